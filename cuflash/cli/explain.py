"""`python -m cuflash explain`: how a call would be computed, here or on a GPU that is only described; also as a picture."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

import cuflash
from cuflash import inspection, numpy_backend, picture, plan, problem
from cuflash.backends import described_device
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


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation."""
    options = {name: getattr(arguments, name) for name in ("causal", "window", "softcap", "scale")}
    options["backend"] = arguments.backend
    if arguments.picture:
        picture.matplotlib("--picture", "figure")  # before anything is measured
    tile = None
    if arguments.capability is None:
        xp = array_library(this_machine())
        q, k, v, _ = empty(xp, arguments.shape, arguments.dtype)
        explained = cuflash.explain(q, k, v, **options)
        tile = explained.tile
        print(explained)
        if arguments.measure:
            print(measured(xp, arguments.shape, arguments.dtype, options, explained.floor_ms))
    elif arguments.measure:
        raise ArgumentError(f"--measure: a GPU of capability {arguments.capability} is only described; leave out one")
    else:
        del options["backend"]
        forward, backward = planned(arguments.shape, arguments.dtype, arguments.capability, arguments.backend, options)
        config: Any = forward.main.config
        tile = (config.block_q, config.block_k)
        print(described(forward, backward))
    if arguments.picture:
        options.pop("backend", None)
        draw(arguments, options, tile)
    return 0


def measured(xp: Any, shape: Shape, dtype: str, options: dict[str, Any], floor_ms: float | None) -> str:
    """How long the forward takes, and which share of that would be needed at best."""
    q, k, v = (xp.asarray(x) for x in shape.arrays(dtype)[:3])
    ms = Clock(xp).milliseconds(lambda: cuflash.attention(q, k, v, **options))
    share = f", of which {floor_ms / ms:.0%} are the floor" if floor_ms else ""
    return f"{'measured:':<11}{ms:.4g} ms{share}"


def empty(xp: Any, shape: Shape, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Arrays q, k, v and out that hold nothing."""
    q, k, v, out = (xp.empty(sizes, host_dtype(dtype)) for sizes in (shape.q, shape.k, shape.v, shape.out))
    return q, k, v, out


def planned(
    shape: Shape, dtype: str, capability: int, backend: str | None, options: dict[str, Any]
) -> tuple[plan.Plan, plan.Plan]:
    """Both directions on a GPU of that compute capability, planned without one and not compiled."""
    device = described_device(capability)
    q, k, v, out = empty(np, shape, dtype)
    call = problem.describe(q, k, v, **options)
    lse = np.empty(call.problem.lse_shape, call.problem.accumulator)
    forward = plan.plan_forward(
        call.problem, device, plan.places_of(call.problem, plan.forward_arrays(call, out, lse)), backend
    )
    saved = {"out": out, "lse": lse, "dout": out, "dq": q, "dk": k, "dv": v}
    backward = plan.plan_backward(
        call.problem, device, plan.places_of(call.problem, plan.backward_arrays(call, **saved)), False, backend
    )
    return forward, backward


def described(forward: plan.Plan, backward: plan.Plan) -> str:
    """What a plan of each direction says."""
    facts = [("backend", forward.backend), ("problem", str(forward.problem)), ("device", str(forward.device))]
    kernels = [
        (
            step.variant.entry,
            tile(step.config),
            blocks(step, forward.problem),
            f"{step.config.threads}",
            text.size(step.config.shared_bytes(ITEMSIZE[step.variant.dtype])),
        )
        for planned in (forward, backward)
        for step in planned.steps
    ]
    workspace = sum(backward.workspace().values())
    return "\n".join(
        [
            text.facts([*facts, *((f"not {name}", why) for name, why in forward.reasons.items())]),
            f"\n{text.table(('kernel', 'queries x keys', 'blocks', 'threads', 'shared memory'), kernels, indent='')}",
            f"\nworkspace of the backward: {text.size(workspace)}",
        ]
    )


def blocks(step: plan.Step, described: problem.Problem) -> str:
    """Blocks of the grid, or the tiles that are given out to as many blocks as a device holds."""
    return f"{step.config.blocks(described)} tiles" if getattr(step.config, "persistent", False) else f"{step.blocks}"


def tile(config: Any) -> str:
    """Queries and keys of one step of a kernel that has both."""
    sizes = (getattr(config, "block_q", None), getattr(config, "block_k", None))
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
