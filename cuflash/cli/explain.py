"""`python -m cuflash explain`: how a call would be computed, here or on a GPU that is only described; also as a picture."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import numpy as np

import cuflash
from cuflash import arrays, decode_plan, decode_problem, explanation, inspection, numpy_backend, picture, plan, problem
from cuflash.backends import Device, described_device
from cuflash.cli import text
from cuflash.cli.bench import Bench
from cuflash.cli.machine import array_library, this_machine
from cuflash.cli.measure import Clock
from cuflash.cli.shape import Shape, host_dtype
from cuflash.errors import ArgumentError
from cuflash.variant import ITEMSIZE

DRAWN_ROWS = 16  # whose weights are drawn
MOST_SCORES = {"host": 1 << 21, "device": 1 << 28}  # that plain attention has to hold for the picture
LENGTHS = 4  # each twice the one before


#: explaining and computing, by what is explained
CALLS: dict[str, tuple[Any, Any]] = {
    "attention": (cuflash.explain, cuflash.attention),
    "packed": (cuflash.explain_varlen, cuflash.attention_varlen),
    "decode": (cuflash.explain_decode, cuflash.attention_decode),
}


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation."""
    options = {name: getattr(arguments, name) for name in ("causal", "window", "softcap", "scale")}
    check(arguments)
    if arguments.capability is None:
        xp = array_library(this_machine())
        explain, compute = CALLS[arguments.form]
        positional, named = given(xp, arguments)
        named |= {**options, "backend": arguments.backend}
        explained = explain(*positional, **named, measure=arguments.measure and xp is not np)
        if arguments.measure and xp is np:
            numbers = [random_like(x) for x in positional]
            ms = Clock(np).milliseconds(lambda: compute(*numbers, **named))
            explained = replace(explained, measured_ms=ms)
        tile = explained.tile
        print(explained)
    else:
        plans, title = planned(arguments, described_device(arguments.capability), options)
        tile = explanation.of_plan(plans[0], title).tile
        print(described(plans, title))
    if arguments.picture:
        draw(arguments, options, tile)
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Raise where options do not go together; before anything is measured."""
    if arguments.measure and arguments.capability is not None:
        raise ArgumentError(f"--measure: a GPU of capability {arguments.capability} is only described; leave out one")
    if arguments.page_size is not None and (arguments.form != "decode" or arguments.page_size < 1):
        raise ArgumentError(
            f"--page-size {arguments.page_size}: positions of a page, at least 1, of a cache for --decode"
        )
    if arguments.picture:
        if arguments.form != "attention":
            raise ArgumentError(f"--picture: what attention does is drawn; leave out --{arguments.form}")
        picture.matplotlib("--picture", "figure")


def given(xp: Any, arguments: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Arrays of a call, by position and by name; those of numbers hold nothing."""
    shape, dtype = arguments.shape, host_dtype(arguments.dtype)
    if arguments.form == "packed":
        lengths = {"q": shape.seq_q, "k": shape.seq_k, "v": shape.seq_k}
        shapes = [(shape.batch * n, getattr(shape, x)[1], getattr(shape, x)[3]) for x, n in lengths.items()]
        offsets = [np.arange(shape.batch + 1) * n for n in (shape.seq_q, shape.seq_k)]
        return [*(xp.empty(sizes, dtype) for sizes in shapes), *offsets], {}
    if arguments.page_size is None:
        return list(empty(xp, shape, arguments.dtype)[:3]), {}
    pages = -(-shape.seq_k // arguments.page_size)  # of an entry
    table = np.arange(shape.batch * pages, dtype=np.int32).reshape(shape.batch, pages)
    pools = [(table.size, x[1], arguments.page_size, x[3]) for x in (shape.k, shape.v)]
    return [xp.empty(sizes, dtype) for sizes in (shape.q, *pools)], {"page_table": table}


def empty(xp: Any, shape: Shape, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Arrays q, k, v and out that hold nothing."""
    q, k, v, out = (xp.empty(sizes, host_dtype(dtype)) for sizes in (shape.q, shape.k, shape.v, shape.out))
    return q, k, v, out


def random_like(x: Any) -> Any:
    """Numbers of normal distribution in place of none; integers as they are."""
    return x if x.dtype.kind == "i" else np.random.default_rng(0).standard_normal(x.shape, np.float32).astype(x.dtype)


def planned(
    arguments: argparse.Namespace, device: Device, options: dict[str, Any]
) -> tuple[tuple[plan.Plan, ...], str]:
    """The forward and, where there is one, the backward on a GPU, planned without one and not compiled; the call in one line."""
    positional, named = given(np, arguments)
    q, k, v = positional[:3]
    if arguments.form == "decode":
        native = {"q": q, "k_cache": k, "v_cache": v}
        table = named.get("page_table")
        made = decode_problem.describe(native, None, table, **options, modifiers=(), layout="bhsd")
        places = decode_plan.places_of(
            made, decode_plan.decode_arrays(made, np.empty(made.problem.out_shape, q.dtype), None)
        )
        return (decode_plan.plan_decode(made.decode, device, places, arguments.backend),), str(made.decode)
    if arguments.form == "packed":
        offsets_q, offsets_k = positional[3:]
        packed = arrays.native_packed(offsets_q, offsets_k, None, None, len(q), len(k), arrays.HOST)
        call = problem.describe_packed(q, k, v, packed, **options)
    else:
        call = problem.describe(q, k, v, **options)
    out_shape, layout = call.problem.out_shape, call.problem.layout
    out = problem.canonical(np.empty(problem.in_layout(out_shape, layout), q.dtype), layout)
    lse = np.empty(call.problem.lse_shape, call.problem.accumulator)
    found = plan.forward_arrays(call, out, lse)
    forward = plan.plan_forward(call.problem, device, plan.places_of(call.problem, found), arguments.backend)
    saved = {"out": out, "lse": lse, "dout": out, "dq": call.q, "dk": call.k, "dv": call.v}
    found = plan.backward_arrays(call, **saved)
    backward = plan.plan_backward(call.problem, device, plan.places_of(call.problem, found), False, arguments.backend)
    return (forward, backward), str(call.problem)


def described(plans: tuple[plan.Plan, ...], title: str) -> str:
    """What a plan of each direction says."""
    explained = explanation.of_plan(plans[0], title)
    facts = [(name, getattr(explained, name)) for name in ("backend", "problem", "device", "method")]
    facts += [(f"not {name}", why) for name, why in explained.reasons.items()]
    kernels = [
        (
            step.variant.entry,
            tile(step.config),
            blocks(step, one.problem),
            f"{step.config.threads}",
            text.size(step.config.shared_bytes(ITEMSIZE[step.variant.dtype])),
        )
        for one in plans
        for step in one.steps
    ]
    return "\n".join(
        [
            text.facts([*facts, *(("note", note) for note in explained.notes)]),
            f"\n{text.table(('kernel', 'queries x keys', 'blocks', 'threads', 'shared memory'), kernels, indent='')}\n",
            *(f"workspace of the {one.main.variant.direction}: {workspace(one)}" for one in plans),
        ]
    )


def workspace(planned: plan.Plan) -> str:
    """Memory beside inputs and results; when decoding it follows from the blocks, of which a described device has no count."""
    step, needed = planned.main, sum(planned.workspace().values())
    return f"{text.size(needed / step.blocks)} for each block" if is_decode(step) else text.size(needed)


def blocks(step: plan.Step, described: problem.Problem) -> str:
    """Blocks of the grid, or the tiles that are given out to as many blocks as a device holds."""
    config: Any = step.config
    if is_decode(step):
        return f"{config.blocks_per_sm} a multiprocessor"
    return f"{config.blocks(described)} tiles" if getattr(config, "persistent", False) else f"{step.blocks}"


def is_decode(step: plan.Step) -> bool:
    """Whether a launch is of as many blocks as a device holds, whatever the call."""
    return step.variant.direction == "decode"


def tile(config: Any) -> str:
    """Queries and keys of one step of a kernel that has both."""
    sizes = (getattr(config, "block_q", getattr(config, "rows", None)), getattr(config, "block_k", None))
    return " x ".join(map(str, sizes)) if None not in sizes else ""


# ---- the picture -----------------------------------------------------------------------------------------------------
def draw(arguments: argparse.Namespace, options: dict[str, Any], tile: tuple[int, int] | None) -> None:
    """Tiles, costs, the recurrence along a row, and weights of some rows, of random arrays of one head."""
    shape = arguments.shape
    q, k, v, _ = Shape(1, 1, 1, shape.seq_q, shape.seq_k, shape.head_dim, shape.head_dim_v).arrays(arguments.dtype)
    call, whole = (
        problem.describe(q, k, v, **options),
        problem.describe(*empty(np, shape, arguments.dtype)[:3], **options),
    )
    block_q, block_k = tile or numpy_backend.tile_sizes(whole.problem, None, None)[:2]
    figure = picture.new_figure("--picture", (13, 9.6), f"{shape}, {arguments.dtype}")
    (upper_left, upper_right), (lower_left, lower_right) = figure.subfigures(2, 2)

    picture.paint_tiles(upper_left, inspection.tile_states(call, (0, 0), block_q, block_k), block_q, block_k)

    machine = this_machine()
    upper_right.suptitle(
        f"a forward, {'causal' if options['causal'] else 'full'}, on {machine.headline}", fontsize="medium"
    )
    picture.paint_costs(upper_right, costs(array_library(machine), shape, arguments.dtype, options["causal"]))

    row = shape.seq_q - 1
    lower_left.suptitle(f"row {row}: scores, their maximum, and the factor of correction")
    s, seen = inspection.scores_of(call, call.k.astype(np.float64).swapaxes(-1, -2), row)
    picture.paint_recurrence(lower_left, s[0, 0, 0], np.broadcast_to(seen, s.shape)[0, 0, 0], block_k)

    count = min(shape.seq_q, DRAWN_ROWS)
    rows = sorted({i * row // max(count - 1, 1) for i in range(count)})
    lower_right.suptitle("weights of some rows")
    picture.paint_attention(lower_right, cuflash.attention_weights(q, k, rows, **options)[0], None, rows, (1.0,))

    try:
        figure.savefig(arguments.picture, dpi=120)
    except ValueError as error:  # a name that ends in no format
        raise ArgumentError(f"--picture {arguments.picture}: {error}") from None
    print(f"drawn into {arguments.picture}", file=sys.stderr)


def costs(xp: Any, shape: Shape, dtype: str, causal: Any) -> list[dict[str, Any]]:
    """Measured rows of cuflash and plain attention, up to the length of the shape or what plain attention can hold."""
    most = MOST_SCORES["host" if xp is np else "device"]
    heads = 1 if xp is np else min(shape.heads_q, 16)
    longest = min(max(shape.seq_k, 2**LENGTHS), int((most / heads) ** 0.5))
    lengths = [(1 << (longest.bit_length() - 1)) >> i for i in range(LENGTHS)][::-1]
    rows: list[dict[str, Any]] = []
    progress = text.Progress()
    try:
        for n in lengths:
            square = Shape(1, heads, heads, n, n, shape.head_dim, shape.head_dim_v)
            rows += Bench(xp, square, dtype, bool(causal)).rows(("cuflash", "plain"), ("forward",), 3, progress)
    finally:
        progress.done()
    return [row for row in rows if row["ms"] is not None]
