"""The float32 and float64 kernels in the emulator: every kind of tile, option and stride, under several schedules.

Tiles are mostly forced to be small, so that lengths of a few dozen cross every edge; those that the search finds for the
devices run as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cuflash import problem
from cuflash.backends import Device, described_device
from cuflash.errors import UnsupportedError
from cuflash.schedules import f64, simt
from cuflash.schedules.base import padded
from cuflash.schedules.f64 import BackwardF64
from cuflash.schedules.simt import BackwardSimt, ForwardSimt
from tests.cases import OPTIONS, STRIDES, Case
from tests.emulator.kernels import SEEDS, check, check_call, forward

#: sm_75 copies at once and has no tensor cores for float64; sm_80 has both; sm_90 multiplies 16 x 8 x 8
TARGETS = ((75, "float32"), (80, "float32"), (75, "float64"), (80, "float64"), (90, "float64"))

#: block_k, warps, lane_rows, thread_rows
FORWARD = {
    "16 columns of lanes": (32, 2, 2, 4),
    "8 columns of lanes": (16, 4, 4, 2),
    "4 columns of lanes": (8, 2, 8, 4),
    "one row a thread": (16, 1, 8, 1),
}
#: block_q, block_k, warps, then rows of warps and of lanes of scores, of keys, of queries
BACKWARD = {
    "one warp a half": (16, 16, 2, 1, 4, 1, 4, 1, 4),
    "flat": (16, 32, 4, 1, 4, 1, 2, 2, 2),
    "tall": (32, 16, 8, 4, 4, 2, 8, 4, 8),
    "twelve keys a thread": (32, 96, 4, 1, 8, 1, 8, 1, 8),
}
#: the same for float64 on tensor cores: block_q, block_k, warps, and warps that share the queries of dq
BACKWARD_F64 = {
    "one warp a half": (16, 16, 2, 1),
    "flat": (24, 32, 4, 1),
    "tall": (32, 64, 8, 4),
    "twelve keys a thread": (8, 64, 4, 1),
}


@pytest.fixture
def tile(monkeypatch):
    """Sets the tile of each direction; float64 runs on tensor cores where the device has them."""

    def force(forward="16 columns of lanes", backward="one warp a half"):
        block_k, warps, lane_rows, thread_rows = FORWARD[forward]

        def forced_forward(call, shared_limit, aligned):
            if call.dtype == "float64" and shared_limit > simt.WITHOUT_TENSOR:
                tensor_rows = max(16, lane_rows * thread_rows) // 16 * 2
                width = padded(call.head_dim_v, 8)
                return ForwardSimt(padded(call.head_dim, 8), width, block_k, warps, 8, tensor_rows, 1, aligned, True)
            width = padded(call.head_dim_v, 64 // lane_rows)
            return ForwardSimt(padded(call.head_dim, 8), width, block_k, warps, lane_rows, thread_rows, 1, aligned)

        monkeypatch.setattr(simt, "forward", forced_forward)
        monkeypatch.setattr(simt, "backward", forced_backward(backward))

    force()
    return force


def forced_backward(name: str) -> Callable[..., BackwardSimt | BackwardF64]:
    """What takes the place of `simt.backward` so that every call gets this tile."""
    block_q, block_k, warps, *rows = BACKWARD[name]
    unit = 2 * max(units(warps // 2, *rows[2:4]), units(warps, *rows[4:6]))

    def forced(call, shared_limit, aligned):
        if call.dtype == "float64" and shared_limit > f64.SLOW:
            tile = BACKWARD_F64[name]
            rows_of_dq = 8 * tile[2] // tile[3]
            return BackwardF64(padded(call.head_dim, rows_of_dq), padded(call.head_dim_v, 16), *tile, 1, aligned)
        widths = padded(call.head_dim, unit), padded(call.head_dim_v, unit)
        return BackwardSimt(*widths, block_q, block_k, warps, *rows, 1, aligned)

    return forced


def units(warps: int, warp_rows: int, lane_rows: int) -> int:
    """Columns of threads."""
    return warps // warp_rows * (32 // lane_rows)


def target_id(target: tuple[int, str]) -> str:
    return f"sm_{target[0]}-{target[1]}"


targets = pytest.mark.parametrize("target", TARGETS, ids=target_id)


# ---- tiles -----------------------------------------------------------------------------------------------------------
@targets
@pytest.mark.parametrize(("name_f", "name_b"), list(zip(FORWARD, BACKWARD, strict=True)))
def test_kinds_of_tiles(tile, target, name_f, name_b):
    arch, dtype = target
    tile(name_f, name_b)
    for seed, (seq_q, seq_k) in enumerate(((31, 33), (33, 97), (65, 16), (1, 1), (32, 96), (17, 31))):
        case = Case("tile", dtype, batch=(), heads_q=2, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=True, dlse=True)
        check(case, arch, (seed,))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("arch", "head_dim"), [(75, 16), (80, 33), (90, 64), (86, 128)])
def test_shipped_tiles(dtype, arch, head_dim):
    case = Case("shipped", dtype, batch=(), heads_q=2, heads_k=1, seq_q=130, seq_k=100, head_dim=head_dim)
    check(replace(case, causal="top_left"), arch, (1, 3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seq_k", [1, 30])
def test_many_queries_of_few_keys(dtype, seq_k):
    """Few keys bring few warps, which then have more rows of queries than threads."""
    check(Case("short", dtype, batch=(), heads_q=2, heads_k=1, seq_q=129, seq_k=seq_k, head_dim=8), 90, (1, 3))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("head_dim", [200, 256])
def test_wide_heads(dtype, head_dim):
    check(Case("wide", dtype, batch=(), heads_q=1, heads_k=1, seq_q=9, seq_k=40, head_dim=head_dim), 90, (1,))


def test_widest_heads():
    check(Case("wide", "float32", batch=(), heads_q=1, heads_k=1, seq_q=9, seq_k=40, head_dim=512), 90, (1,))


def test_what_does_not_fit_is_refused():
    case = Case("too wide", "float64", batch=(), heads_q=1, heads_k=1, seq_q=9, seq_k=9, head_dim=512)
    with pytest.raises(UnsupportedError, match=r"head_dim 512 .* 64-bit .* 65536 bytes of shared memory"):
        forward(case.call()[0], 75)


@pytest.mark.parametrize("limit", [64, 99, 163, 227])
@pytest.mark.parametrize("head_dim", [1, 16, 40, 64, 80, 96, 128, 160, 192, 256])
def test_search_stays_within_the_limits(head_dim, limit):
    for dtype, options in product(("float32", "float64"), ({}, OPTIONS["everything"])):
        call = Case("search", dtype, **{**options, "head_dim": head_dim, "head_dim_v": head_dim}).call()[0]
        itemsize = np.dtype(dtype).itemsize
        for search in (simt.forward, simt.backward):
            try:
                config = search(call.problem, limit * 1024, True)
            except UnsupportedError:
                assert dtype == "float64"
                assert head_dim > 192
                assert limit == 64
                continue
            assert config.shared_bytes(itemsize) <= limit * 1024
            assert config.head_dim >= head_dim
            assert config.head_dim_v >= head_dim


def test_a_length_rarely_brings_a_new_kernel():
    tiles = {simt.forward(Case("n", seq_q=n).call()[0].problem, 227 * 1024, True) for n in range(1, 1025)}
    assert len(tiles) <= 7


# ---- options ---------------------------------------------------------------------------------------------------------
CORE = ("plain", "causal", "window", "bias", "lengths", "lse-gradient", "groups", "everything")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, id=f"{name}-{target_id(target)}")
        for name, target in product(OPTIONS, TARGETS)
        if target == (80, "float32") or (name in CORE if target != (75, "float64") else name == "everything")
    ],
)
def test_options(tile, name, target):
    arch, dtype = target
    check(Case(name, dtype, **{"seq_q": 37, "seq_k": 45, **OPTIONS[name]}), arch)


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_options_without_undefined_behaviour(tile, name):
    check(Case(name, "float32", **OPTIONS[name]), 80, sanitize=True)


@pytest.mark.parametrize("values", ["x30", "logits about -200", "logits about -1e5", "dominant key late", "133120"])
def test_values(tile, values):
    for dtype in ("float32", "float64"):
        check(Case(values, dtype, values=values, causal=True, dlse=True), 80, (0, 1))


@pytest.mark.parametrize("target", [(75, "float32"), (80, "float32"), (90, "float64")], ids=target_id)
def test_keys_beyond_the_length_are_never_used(tile, target):
    arch, dtype = target
    case = Case("lengths", dtype, lengths=(20, 0), causal="top_left", dlse=True)
    made = case.make()
    for name in ("k", "v"):
        made[name][0, :, 20:] = np.nan
        made[name][1] = np.inf
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    check_call(call, made["dout"], made["dlse"], arch)


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(tile, empty):
    check(replace(Case("empty", "float32"), **empty), 80, (0,))


# ---- head sizes and strides --------------------------------------------------------------------------------------------
@targets
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (33, 6), (40, 24)])
def test_head_sizes(tile, target, head_dim, head_dim_v):
    arch, dtype = target
    check(Case("dims", dtype, batch=(1,), head_dim=head_dim, head_dim_v=head_dim_v, causal=True), arch, (0, 4))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("target", [(75, "float32"), (80, "float32"), (80, "float64")], ids=target_id)
def test_strides(tile, strides, layout, target):
    arch, dtype = target
    case = Case("strides", dtype, strides=strides, layout=layout, head_dim=15, mask="bhqk", bias="b1qk")
    check(replace(case, causal=True, dlse=True), arch, (0, 3))


@pytest.mark.parametrize("strides", ["padded", "every second", "reversed", "last axis first"])
@pytest.mark.parametrize("head_dim", [16, 15])
def test_strides_of_results(tile, strides, head_dim):
    check(Case("results", "float32", head_dim=head_dim), 80, (0, 3), place=STRIDES[strides])


@pytest.mark.parametrize("head_dim", [13, 14, 15, 16])
def test_rows_that_end_within_a_vector(tile, head_dim):
    """Aligned rows of a larger array: the last vector of a row is read in part."""
    rng = np.random.default_rng(0)
    for dtype, arch in product(("float32", "float64"), (75, 80)):
        wide = rng.standard_normal((3, 2, 2, 45, 20)).astype(dtype)
        wide[..., head_dim:] = np.nan
        q, k, v = wide[..., :head_dim]
        dout = rng.standard_normal((2, 2, 45, 20)).astype(dtype)[..., :head_dim]
        check_call(problem.describe(q, k, v, causal=True), dout, None, arch, (0, 1))


@pytest.mark.parametrize("batch", [(), (3, 2), (2, 1, 3)], ids=str)
def test_batch_axes(tile, batch):
    case = Case("batch", "float32", batch=batch, seq_q=9, seq_k=11, mask="b1qk", bias="b11k", lengths="random")
    check(case, 80, (0, 2))


def test_every_pace_is_used():
    assert len(SEEDS) >= 6
    assert isinstance(described_device(80), Device)
