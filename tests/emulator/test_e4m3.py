"""Forwards of 8-bit inputs in the emulator: the values' layout, both products, scales, options, lengths and head sizes."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash import problem, tuning
from cuflash.errors import UnsupportedError
from tests.cases import STRIDES
from tests.emulator import kernels
from tests.emulator.e4m3 import (
    CASE,
    check_weights_far_below_the_largest,
    check_what_no_row_sees,
    check_who_sees_a_nan,
    widened,
    widened_call,
)
from tests.emulator.kernels import SEEDS
from tests.emulator.test_wgmma import hopper, row_id

TILE = tuning.ForwardWgmmaTile(max_head_dim=256, block_q=128, block_k=32, stages=2, query_stages=2, continuous=True)
TILES = {
    "continuous": TILE,
    "merged": TILE._replace(continuous=False, query_stages=1, merged=True),
    "three warpgroups": TILE._replace(block_q=192, block_k=64, continuous=False, optimistic=False),
}
tiles = pytest.mark.parametrize("name", TILES)


@pytest.fixture
def tile(monkeypatch):
    """Sets the only tile that may be chosen."""

    def force(row=TILE):
        monkeypatch.setattr(tuning, "FORWARD_WGMMA_E4M3", (row,))

    force()
    return force


def check(case, seeds=SEEDS, **options):
    check_call(case.call()[0], seeds, **options)


def check_call(call, seeds=SEEDS, **options):
    kernels.check_call(call, None, None, hopper(), seeds, requested="wgmma", with_backward=False, **options)


def forward(call, seed=0, **options):
    return kernels.forward(call, hopper(), seed, requested="wgmma", **options)


# ---- tiles and lengths -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", tuning.FORWARD_WGMMA_E4M3, ids=row_id)
def test_every_tile(tile, row):
    tile(row)
    for seed, (extra_q, extra_k) in enumerate(((-1, 1), (1, -1), (0, 0))):
        size = row.max_head_dim
        case = replace(CASE, batch=(), seq_q=row.block_q + extra_q, seq_k=2 * row.block_k + extra_k, head_dim=size)
        check(case, (2 * seed,))


@tiles
def test_lengths(tile, name):
    tile(TILES[name])
    block_q, block_k = TILES[name].block_q, TILES[name].block_k
    seed = 0
    for seq_q in (1, 65, block_q + 1):
        for seq_k in (1, 17, block_k - 1, block_k, 3 * block_k + 5):
            seed += 1
            case = replace(CASE, batch=(), heads_q=1, seq_q=seq_q, seq_k=seq_k, causal=seed % 2 == 0)
            try:
                check(case, (seed,))
            except (AssertionError, kernels.EmulatorError) as error:
                raise AssertionError(f"seq_q {seq_q}, seq_k {seq_k}: {error}") from error


@tiles
def test_schedules(tile, name):
    """Several tiles of queries for each block, some of them without any key; blocks that take turns."""
    tile(TILES[name])
    check(replace(CASE, seq_q=300, seq_k=150, lengths=(150, 37), window=(100, 0)), range(12))


def test_every_seed_gives_the_same_bits(tile):
    call, _, _ = replace(CASE, seq_q=270, causal=True).call()
    assert len({forward(call, seed)[0].tobytes() for seed in SEEDS}) == 1


# ---- head sizes and strides ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 3), (33, 17), (64, 64), (72, 130), (128, 128), (256, 256)])
def test_head_sizes(tile, head_dim, head_dim_v):
    """Widths that end inside a step of 32 columns, a panel of 128, and a word of 4."""
    tile(TILES["merged"])
    call = widened_call(replace(CASE, batch=(1,), seq_q=131, head_dim=head_dim, head_dim_v=head_dim_v, causal=True))
    check_call(call, (0, 2, 4), place=widened)


@pytest.mark.parametrize("strides", [*STRIDES, "rows apart"])
def test_values_may_lie_anyhow(tile, strides):
    """They are read one by one where four neighbours are not a word."""
    made = CASE.make()
    v = made["v"]
    if strides == "rows apart":  # by 5 bytes more than they have: words, but not in their places
        outer = np.full((*v.shape[:-1], v.shape[-1] + 5), np.nan, v.dtype)
        outer[..., :-5] = v
        v = outer[..., :-5]
    else:
        v = STRIDES[strides](v)
    check_call(problem.describe(made["q"], made["k"], v, **made["options"]), (0, 1, 2))


def test_queries_and_keys_lie_in_pieces(tile):
    made = CASE.make()
    for name in "qk":
        arrays = {**made, name: STRIDES["padded"](made[name])}
        call = problem.describe(arrays["q"], arrays["k"], arrays["v"], **made["options"])
        with pytest.raises(UnsupportedError, match=f"rows of {name} are not contiguous"):
            forward(call)


@pytest.mark.parametrize("batch", [(), (3, 2)], ids=str)
def test_batch_axes_and_layout(tile, batch):
    check(replace(CASE, batch=batch, layout="bshd", heads_q=4, heads_k=2, causal=True), (0, 4, 5))


# ---- scales and options ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "scales",
    [(None, None, None), (2.0, 0.25, 3.0), ("h", 0.5, "h"), (None, "bh", None), ("1", None, "1")],
    ids=str,
)
def test_scales(tile, scales):
    check(replace(CASE, scales=scales, causal=True), (0, 3))


def test_half_results(tile):
    check(replace(CASE, out_dtype="float16", causal=True))


OPTIONS = {
    "softcap": {"softcap": 3.0},
    "bias and mask": {"bias": "b1qk", "mask": "qk", "scale": -0.3},
    "ranges": {"causal": True, "window": (30, 5), "lengths": "random", "alibi": "h"},
    "sinks": {"sinks": "h", "causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(tile, name):
    check(replace(CASE, **OPTIONS[name]))


@pytest.mark.parametrize("values", ["x3", "x30", "constant", "logits about -200", "dominant key late"])
def test_values(tile, values):
    """Rows of equal scores, whose guesses' sums are large, and those whose maximum grows late; the last without guesses."""
    tile(TILES["three warpgroups" if values == "dominant key late" else "continuous"])
    check(replace(CASE, batch=(), values=values, seq_k=250, scales=(None, None, None)), (0, 5))


def test_weights_far_below_the_largest_count(tile):
    check_weights_far_below_the_largest(forward)


# ---- what does not count ---------------------------------------------------------------------------------------------
@tiles
def test_what_no_row_sees_never_reaches_a_result(tile, name):
    tile(TILES[name])
    check_what_no_row_sees(forward, queries=270)


def test_a_nan_reaches_the_rows_that_see_it(tile):
    check_who_sees_a_nan(forward, tile_begins=192)  # 320, rows of five warpgroups, less 128
