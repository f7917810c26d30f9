"""Forwards of 8-bit inputs in the emulator: the values' layout, both products, scales, options, lengths and head sizes."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cuflash import problem, reference, tuning
from cuflash.errors import UnsupportedError
from cuflash.modifiers import KeyLengths, Scales
from tests.cases import STRIDES, Case
from tests.emulator import kernels
from tests.emulator.kernels import SEEDS
from tests.emulator.test_wgmma import hopper, row_id
from tests.tolerance import Expectation

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
TILE = tuning.ForwardWgmmaTile(max_head_dim=256, block_q=128, block_k=32, stages=2, query_stages=2, continuous=True)
TILES = {
    "continuous": TILE,
    "merged": TILE._replace(continuous=False, query_stages=1, merged=True),
    "three warpgroups": TILE._replace(block_q=192, block_k=64, continuous=False, optimistic=False),
}
tiles = pytest.mark.parametrize("name", TILES)
CASE = Case("e4m3", "float8_e4m3fn", heads_k=1, seq_q=150, seq_k=75, scales=("bh", "bh", "bh"))


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


def widened(x: np.ndarray) -> np.ndarray:
    """The same array in rows of whole 16-byte pieces, NaN behind their ends."""
    step = 16 // x.dtype.itemsize
    outer = np.full((*x.shape[:-1], -(-x.shape[-1] // step) * step), np.nan, x.dtype)
    outer[..., : x.shape[-1]] = x
    return outer[..., : x.shape[-1]]


def widened_call(case: Case) -> problem.Call:
    made = case.make()
    return problem.describe(*(widened(made[name]) for name in "qkv"), **made["options"])


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
    """One key outweighs each other by 2^12; the others, a thousand of them, still make a fifth of the sum."""
    q, k = np.zeros((1, 64, 16), E4M3), np.zeros((1, 1024, 16), E4M3)
    v = np.full((1, 1024, 16), 1, E4M3)
    q[..., 0], k[:, 5, 0], v[:, 5] = 1, 1, 0
    call = problem.describe(q, k, v, scale=12 * np.log(2), scales=Scales())
    got, _ = forward(call)
    np.testing.assert_allclose(got.astype(float), reference.forward(call)[0], rtol=2**-4)


# ---- what does not count ---------------------------------------------------------------------------------------------
@tiles
def test_what_no_row_sees_never_reaches_a_result(tile, name):
    """Keys beyond a length, beyond the last query, and in front of the first; also inside half a step."""
    tile(TILES[name])
    lengths = (KeyLengths(np.array(101, np.int32)),)
    for seq_q, hidden, options in (
        (270, slice(101, None), {"window": (None, None), "modifiers": lengths}),
        (100, slice(100, None), {"window": (None, 0), "causal": "top_left"}),
        (30, slice(0, 117), {"window": (3, None)}),
    ):
        made = replace(CASE, batch=(), seq_q=seq_q, seq_k=150).make()
        q, k, v = (made[name] for name in "qkv")
        call = problem.describe(q, k, v, scales=made["options"]["scales"], **options)
        want = forward(call)
        Expectation(call).check_forward(*want)
        k[:, hidden] = v[:, hidden] = np.nan
        for seed in SEEDS:
            for got, wanted in zip(forward(call, seed), want, strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_a_nan_reaches_the_rows_that_see_it(tile):
    made = replace(CASE, batch=(), heads_q=1, seq_q=300, seq_k=300).make()
    q, k, v = (made[name] for name in "qkv")
    v[0, 270, 3] = np.nan
    out = forward(problem.describe(q, k, v, causal=True, scales=Scales()))[0].astype(float)
    assert np.isfinite(out[:, :256]).all()
    assert np.isnan(out[:, 270:, 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=-1)).all()
