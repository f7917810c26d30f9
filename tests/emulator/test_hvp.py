"""Second derivatives in the emulator: every option, both sides that blocks may own, under several schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import problem, source
from cuflash.backends import Device
from cuflash.errors import UnsupportedError
from cuflash.schedules import simt
from tests.cases import DROPOUT, OPTIONS, SINKS, STRIDES, Case
from tests.emulator import Mutant, examine, kernels
from tests.emulator.kernels import SEEDS
from tests.tangents import tangents_of
from tests.tolerance import Expectation

EVERY = {**OPTIONS, **SINKS, **DROPOUT}
TARGETS = ((75, "float64"), (80, "float32"))
CORE = ("plain", "groups", "dropout-everything")
#: what meets a tangent or a curvature; the rest is tested with plain forwards and backwards
SOME = (
    *("scale-negative", "causal-more-queries", "window-zero", "softcap", "mask-sparse", "bias-batch", "bias-row"),
    *("lengths-zero", "documents-strangers", "blocks-causal", "sparse-everything", "groups-window-bias"),
    *("wide-values", "everything-mostly-hidden", "sinks-batch", "sinks-number", "dropout-causal"),
)


@pytest.fixture
def tile(monkeypatch):
    """Small tiles, so that there are many."""
    sizes = {True: (8, 1, 8, 4), False: (16, 1, 8, 8)}  # walked, rows of a thread, rows of lanes, tile of columns

    def hvp(own, shared_limit, aligned, owns_keys):
        walked, rows, lane_rows, unit = sizes[owns_keys]
        widths = (-(-max(n, 8) // max(unit, 8)) * max(unit, 8) for n in (own.head_dim, own.head_dim_v))
        return simt.HvpSimt(*widths, owns_keys, walked, 2, lane_rows, rows, 1, aligned)

    monkeypatch.setattr(simt, "hvp", hvp)


def target_id(target: tuple[int, str]) -> str:
    return f"sm_{target[0]}-{target[1]}"


def check(case: Case, device: Device | int, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    """Run a case under each schedule and judge the products, which must be the same bits each time, but for sums by atomics."""
    call, dout, dlse = case.call()
    expectation, tangents = Expectation(call, dout, dlse), tangents_of(call, dout, dlse)
    results = kernels.jvp(call, {n: x for n, x in tangents.items() if n not in ("dout", "dlse")}, device)
    found = set()
    for seed in seeds:
        products = kernels.hvp(call, dout, dlse, tangents, device, seed, results, **options)
        expectation.check_hvp(tangents, products)
        found.add(b"".join(getattr(products, name).tobytes() for name in ("dq", "dk", "dv")))
    assert len(found) == 1


@pytest.mark.parametrize("target", TARGETS, ids=target_id)
@pytest.mark.parametrize("name", CORE)
def test_core_options(tile, name, target):
    arch, dtype = target
    case = Case(name, dtype, **{"seq_q": 37, "seq_k": 45, **EVERY[name]})
    check(case, arch, SEEDS if dtype == "float32" else (0,))


@pytest.mark.parametrize("name", SOME)
def test_options(tile, name):
    check(Case(name, **{"seq_q": 37, "seq_k": 45, **EVERY[name]}), 80, (0, 3))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (72, 24)])
def test_shipped_tiles_and_head_sizes(head_dim, head_dim_v):
    case = Case("dims", batch=(), heads_q=2, heads_k=1, seq_q=70, seq_k=50, head_dim=head_dim, head_dim_v=head_dim_v)
    check(replace(case, causal=True, softcap=2.0, dlse=True), 80, (5,))


def test_without_undefined_behaviour(tile):
    check(Case("everything", **DROPOUT["dropout-everything"]), 80, (0,), sanitize=True)


@pytest.mark.parametrize("values", ["x3", "constant", "logits about -200", "dominant key late"])
def test_values(tile, values):
    check(Case(values, values=values, causal=True, seq_k=70, dlse=True), 80, (0,))


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(tile, strides):
    case = Case(
        "strides", strides=strides, layout="bshd", head_dim=15, mask="bhqk", bias="b1qk", causal=True, dlse=True
    )
    call, dout, dlse = case.call()
    tangents = {
        name: case.place(x.swapaxes(-3, -2)).swapaxes(-3, -2) if x.ndim == 4 else x
        for name, x in tangents_of(call, dout, dlse).items()
    }
    products = kernels.hvp(call, dout, dlse, tangents, 80, place=STRIDES["padded"])
    Expectation(call, dout, dlse).check_hvp(tangents, products)


def test_batch_axes(tile):
    for batch in ((), (3, 2), (2, 1, 3)):
        check(Case("batch", batch=batch, seq_q=9, seq_k=11, mask="b1qk", bias="b11k", lengths="random"), 80, (0,))


def test_tangents_that_are_no_arrays_are_zeros(tile):
    case = Case("none", bias="h1k", sinks="h", softcap=2.0, causal=True, dlse=True)
    call, dout, dlse = case.call()
    expectation, whole = Expectation(call, dout, dlse), tangents_of(call, dout, dlse)
    for names in ((), ("q", "v", "dlse"), ("k", "bias"), ("dout", "sinks")):
        tangents = {name: whole[name] for name in names}
        products = kernels.hvp(call, dout, dlse, tangents, 80)
        expectation.check_hvp(tangents, products)
        assert names or not any(x.any() for x in products)


def test_keys_beyond_the_length_are_never_used(tile):
    made = Case("lengths", lengths=(20, 0), causal="top_left").make()
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    tangents = tangents_of(call, made["dout"])
    for array in (made["k"], made["v"], tangents["k"], tangents["v"]):
        array[0, :, 20:] = np.nan
        array[1] = np.inf
    Expectation(call, made["dout"]).check_hvp(tangents, kernels.hvp(call, made["dout"], None, tangents, 80))


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(tile, empty):
    check(replace(Case("empty"), **empty), 80, (0,))


EXPRESSIONS = (
    "heat[h] * tanh(s * s / 9) + near[q % 4]",
    "s + 0.1 * s ** 2 if q > k else log(1 + exp(s * heat[h])) + near[k % 4]",
    "0.7 * s * heat[h] + near[q % 4]",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_second_derivatives_of_expressions(tile, expression):
    made = Case("written", seq_q=37, heads_q=4, bias="h1k").make()
    own = cuflash.ScoreModifier(expression, heat=np.float32([1, 2, 3, 4]), near=np.float32([0, 1, 2, 3]))
    call = problem.describe(made["q"], made["k"], made["v"], softcap=3.0, bias=made["options"]["bias"], modifiers=[own])
    tangents = tangents_of(call, made["dout"])
    Expectation(call, made["dout"]).check_hvp(tangents, kernels.hvp(call, made["dout"], None, tangents, 80))


# ---- bugs sown on purpose --------------------------------------------------------------------------------------------
BUGS = [
    Mutant("hvp_simt", "the curvature is forgotten", "fma_of(a[i], slopes.curvature(i), moved[i])", "moved[i]"),
    Mutant(
        "hvp_simt",
        "curvatures meet tangents behind the slope",
        "slopes.bend[i] * (ds[i] * p.scale)",
        "slopes.bend[i] * ds[i]",
    ),
    Mutant("hvp_simt", "weights keep their sum", "s[i] * (ds[i] - row.moved)", "s[i] * ds[i]"),
    Mutant(
        "hvp_simt",
        "delta does not move",
        "dp_moved[i] * drop_scale(p)) - row.delta_moved",
        "dp_moved[i] * drop_scale(p))",
    ),
    Mutant(
        "hvp_simt",
        "the walked side is overwritten while it is read",
        "__syncthreads();  // nothing of",
        "// nothing of",
    ),
    Mutant(
        "hvp_simt",
        "nothing has arrived",
        "wait_for_copies();\n    __syncthreads();  // all has",
        "__syncthreads();  // all has",
    ),
    Mutant("hvp_simt", "warps run ahead of their weights", "__syncwarp();\n    };", "};"),
    Mutant("hvp_simt", "the last head of a group is left out", "++place.head;", "place.head += 2;"),
    Mutant("hvp_delta", "outputs do not move", "fma_of(dout[c], out_moved[c], delta_moved)", "delta_moved"),
    Mutant("hvp_delta", "lanes are not summed", "sum_over_lanes<Config::kLanes>(delta_moved)", "delta_moved"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.kernel}: {bug.description}")
def test_bug_is_noticed(tile, bug):
    case = Case("bug", heads_q=4, heads_k=2, causal=True, softcap=3.0, seq_q=40, seq_k=33, head_dim=24, scale=0.7)
    call, dout, dlse = replace(case, dlse=True).call()
    expectation, tangents = Expectation(call, dout, dlse), tangents_of(call, dout, dlse)
    results = kernels.jvp(call, {n: x for n, x in tangents.items() if n not in ("dout", "dlse")}, 80)
    found = {}

    def note(variant):
        found[variant] = source.build(variant)
        return found[variant]

    expectation.check_hvp(tangents, kernels.hvp(call, dout, dlse, tangents, 80, 0, results, text=note))
    variants = [v for v in found if v.kernel == bug.kernel]
    for variant in variants[:1] if "group" in bug.description else variants[-1:]:

        def run(text, seed, own=variant):
            products = kernels.hvp(
                *(call, dout, dlse, tangents, 80, seed, results), text=lambda v: text if v == own else source.build(v)
            )
            expectation.check_hvp(tangents, products)

        findings = examine(bug, found[variant], run, SEEDS if "__sync" in bug.old else (0,))
        assert findings.noticed, findings


@pytest.mark.parametrize(("arch", "backend"), [(80, "mma"), (90, "wgmma"), (90, None)])
def test_others_refuse_by_name(arch, backend):
    call, dout, _ = Case("half", "bfloat16", head_dim=64).call()
    tangents = tangents_of(call)
    for name in (backend,) if backend else ("mma", "wgmma"):
        with pytest.raises(UnsupportedError, match=f"{name}: it has no Hessian-vector products"):
            kernels.hvp(call, dout, None, tangents, arch, results=kernels.jvp(call, tangents, arch), requested=backend)


@pytest.mark.parametrize("limit", [64, 99, 163, 227])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_there_is_a_tile_for_heads_of_usual_sizes(limit, dtype):
    most = {"float32": 512 if limit > 99 else 256, "float64": 256 if limit > 99 else 128}[dtype]
    for head_dim, options, owns_keys in product(
        (1, 16, 40, 64, 128, 256, 512), ({}, OPTIONS["everything"]), (True, False)
    ):
        call = Case("heads", dtype, **{**options, "head_dim": head_dim, "head_dim_v": head_dim}).call()[0]
        if head_dim <= most:
            config = simt.hvp(call.problem, limit * 1024, True, owns_keys)
            assert config.shared_bytes(np.dtype(dtype).itemsize) <= limit * 1024
        elif limit == 64:
            with pytest.raises(UnsupportedError, match="Hessian-vector product"):
                simt.hvp(call.problem, limit * 1024, True, owns_keys)
