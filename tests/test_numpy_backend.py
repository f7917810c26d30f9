"""The tiled NumPy backend against the reference, its memory and its tiles; and the rule that judges it."""

import tracemalloc
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cuflash import numpy_backend, problem, reference
from cuflash.modifiers import KeyLengths
from tests.cases import DTYPES, FULL, OPTIONS, SMALL, STRIDES, Case, in_dtypes
from tests.test_reference import CAUSAL, WINDOWS, random, sees
from tests.tolerance import Expectation, assert_close


def run(call, dout, dlse=None, **blocks):
    out, lse = numpy_backend.forward(call, **blocks)
    return out, lse, numpy_backend.backward(call, out, lse, dout, dlse, **blocks)


@pytest.mark.parametrize("case", in_dtypes(FULL), ids=str)
def test_every_case_is_within_tolerance(case):
    call, dout, dlse = case.call()
    expectation = Expectation(call, dout, dlse)
    out, lse, gradients = run(call, dout, dlse)
    assert lse.dtype == call.problem.accumulator
    expectation.check_forward(out, lse)
    expectation.check_backward(gradients)


@pytest.mark.parametrize("case", [replace(case, dtype="float64") for case in SMALL], ids=str)
@pytest.mark.parametrize(("block_q", "block_k"), [(1, 128), (16, 16), (33, 7), (128, 1)])
def test_tiles_of_any_size_give_the_same(case, block_q, block_k):
    case = replace(case, seq_q=min(case.seq_q, 40), seq_k=min(case.seq_k, 45))
    call, dout, dlse = case.call()
    expectation = Expectation(call, dout, dlse)
    out, lse, gradients = run(call, dout, dlse, block_q=block_q, block_k=block_k)
    expectation.check_forward(out, lse)
    expectation.check_backward(gradients)


# ---- which tiles are visited -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", CAUSAL, ids=str)
def test_tiles_cover_the_visible_set_and_nothing_else(causal):
    """Against the double loop: no visible pair is missed, none is seen twice, no tile without one is visited."""
    for seq_q, seq_k, window in product(range(1, 8), range(1, 8), WINDOWS):
        q, k = np.ones((1, seq_q, 1)), np.ones((1, seq_k, 1))
        call = problem.describe(q, k, k, causal=causal, window=window)
        want = [[sees(i, j, seq_q, seq_k, causal, window) for j in range(seq_k)] for i in range(seq_q)]
        for block in (1, 2, 3):
            count = np.zeros((seq_q, seq_k), int)
            (chunk,) = numpy_backend.chunks(call, block, block)
            for rows in numpy_backend.blocks(0, seq_q, block):
                for tile, seen in chunk.tiles(rows):
                    part = count[tile.rows, tile.columns]
                    assert seen is None or seen.any()
                    part += 1 if seen is None else seen
            assert count.tolist() == np.array(want, int).tolist(), (seq_q, seq_k, window, block)


def tile_count(**options):
    q = np.ones((1, 1024, 1), np.float32)
    (chunk,) = numpy_backend.chunks(problem.describe(q, q, q, **options), 64, 64)
    return sum(1 for rows in numpy_backend.blocks(0, 1024, 64) for _ in chunk.tiles(rows))


def test_hidden_tiles_are_skipped():
    assert tile_count() == 256
    assert tile_count(causal=True) == 136  # the 16 · 17 / 2 tiles at and below the diagonal
    assert tile_count(window=(64, 0)) <= 16 * 3
    assert tile_count(modifiers=[KeyLengths(np.array(100))]) == 32
    mask = np.zeros((1024, 1024), bool)
    mask[70, 900] = True
    assert tile_count(mask=mask) == 1


def test_tiles_outside_a_range_are_not_even_looked_at(monkeypatch):
    """Only a mask has to be read to know that a tile is hidden."""
    made, tile = [], numpy_backend.Tile
    monkeypatch.setattr(numpy_backend, "Tile", lambda *fields: made.append(fields) or tile(*fields))
    visited = tile_count(window=(64, 0), causal=True)
    assert len(made) == visited + 16  # and one for the ranges of each row of tiles


def test_many_short_heads_share_each_numpy_call():
    q = np.ones((1000, 8, 16, 32), np.float32)
    chunks = list(numpy_backend.chunks(problem.describe(q, q, q), None, None))
    assert len(chunks) <= 20
    assert sum(chunk.k[..., 0, 0].size for chunk in chunks) == 8000


def test_chunks_cut_any_batch_into_disjoint_boxes():
    for shape in ((5,), (3, 4), (2, 1, 3), (1, 1), (0, 3), (1, 0), (2, 0, 3), (3, 2, 4)):
        for count in (1, 2, 5, 24):
            hit = np.zeros(shape, int)
            for box in numpy_backend.boxes(shape, count):
                assert 0 < hit[box].size <= count
                hit[box] += 1
            assert (hit == 1).all()


# ---- memory ----------------------------------------------------------------------------------------------------------


def peaks(seq):
    """Largest memory above the inputs, in MiB, of forward and backward for one float32 head."""
    q, k, v, g = (x.astype(np.float32) for x in random(*4 * [(1, seq, 32)]))
    call = problem.describe(q, k, v, causal=True)
    tracemalloc.start()
    try:
        out, lse = numpy_backend.forward(call)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        numpy_backend.backward(call, out, lse, g)
        return forward / 2**20, tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_memory_is_linear():
    short, long = peaks(1024), peaks(4096)
    for small, large in zip(short, long, strict=True):
        assert large < 10  # one matrix of scores is 64 MiB
        assert large - small < 4 * small


def test_bias_gradient_takes_the_memory_of_the_bias():
    q, k, v, g, bias = (x.astype(np.float32) for x in random(*4 * [(8, 1024, 8)], (1, 1024)))
    call = problem.describe(q, k, v, bias=bias)
    out, lse = numpy_backend.forward(call)
    tracemalloc.start()
    numpy_backend.backward(call, out, lse, g)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 2**20  # the scores of 8 heads are 32 MiB


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "mask", "bias"])
def test_strides_of_one_array_alone(name, strides):
    """One array in a layout of its own gives what its copy gives, and no input is written to."""
    made = Case("strides", mask="bhqk", bias="bhqk", heads_q=4, dlse=True).make()
    arrays = {n: made[n] for n in ("q", "k", "v", "dout")} | {n: made["options"][n] for n in ("mask", "bias")}
    arrays[name] = STRIDES[strides](arrays[name])
    copies = {n: x.copy() for n, x in arrays.items()}

    def results(q, k, v, dout, mask, bias):
        out, lse, gradients = run(problem.describe(q, k, v, mask=mask, bias=bias), dout, made["dlse"])
        return out, lse, *gradients

    for got, want in zip(results(**arrays), results(**copies), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for n, x in copies.items():
        np.testing.assert_array_equal(arrays[n], x, err_msg=n)


@pytest.mark.parametrize("strides", [name for name in STRIDES if name != "stride 0"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_any_strides_is_filled_and_nothing_around_it(strides, dtype):
    call, _, _ = Case("out", dtype=dtype).call()
    want, _ = numpy_backend.forward(call)
    out = STRIDES[strides](np.full(want.shape, np.nan, want.dtype))
    got, _ = numpy_backend.forward(call, out)
    assert got is out
    np.testing.assert_array_equal(got, want)
    if strides in ("padded", "every second"):
        assert np.isnan(out.base).sum() == out.base.size - out.size > 0


@pytest.mark.parametrize("alias", ["q", "k", "v"])
def test_out_may_be_an_input(alias):
    arrays = dict(zip("qkv", random(*3 * [(2, 300, 8)]), strict=True))
    call = problem.describe(**arrays)
    want = numpy_backend.forward(call)[0]
    got, _ = numpy_backend.forward(call, arrays[alias])
    assert got is arrays[alias]
    np.testing.assert_array_equal(got, want)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [{}, {"block_q": 3, "block_k": 4}], ids=["one tile", "small tiles"])
def test_what_no_row_sees_never_reaches_a_result(dtype, blocks):
    q, k, v, g = (x.astype(DTYPES[dtype]) for x in random((2, 4, 7, 5), (2, 2, 9, 5), (2, 2, 9, 6), (2, 4, 7, 6)))
    mask = np.ones(9, bool)
    mask[1] = False
    options = {"mask": mask, "modifiers": [KeyLengths(np.array([6, 4]))], "causal": True}
    clean = run(problem.describe(q.copy(), k.copy(), v.copy(), **options), g, **blocks)
    for x in (k, v):
        x[0, :, 6:], x[1, :, 4:], x[:, :, 1] = np.nan, np.inf, np.nan
    dirty = run(problem.describe(q, k, v, **options), g, **blocks)
    for got, want in zip((*dirty[:2], *dirty[2]), (*clean[:2], *clean[2]), strict=True):
        np.testing.assert_array_equal(got, want)
        assert not np.isnan(got.astype(np.float64)).any()


@pytest.mark.parametrize("heads_k", [1, 2])
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("blocks", [{}, {"block_q": 2, "block_k": 3}], ids=["one tile", "small tiles"])
def test_a_visible_nan_reaches_what_it_reaches_in_the_reference(which, heads_k, blocks):
    arrays = dict(zip(("q", "k", "v", "dout"), random(*2 * [(2, 6, 3), (heads_k, 6, 3)]), strict=True))
    arrays["v"], arrays["dout"] = random((heads_k, 6, 3), (2, 6, 3), seed=1)
    arrays[which][0, 3] = np.nan
    call = problem.describe(arrays["q"], arrays["k"], arrays["v"], causal=True, mask=np.arange(6) != 1)
    out, lse, gradients = run(call, arrays["dout"], **blocks)
    want = *reference.forward(call), *reference.backward(call, arrays["dout"])
    assert sum(np.isnan(x).sum() for x in want) > 0
    for got, x in zip((out, lse, *gradients), want, strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-12, atol=1e-13)  # NaN equals NaN here, and only NaN


def test_one_late_finite_score_after_many_empty_tiles():
    q, k, v, g = random((1, 1, 4), (1, 100_000, 4), (1, 100_000, 4), (1, 1, 4))
    bias = np.full(100_000, -np.inf)
    bias[50_000] = 0
    out, lse, gradients = run(problem.describe(q, k, v, bias=bias), g)
    np.testing.assert_allclose(out[0, 0], v[0, 50_000], rtol=1e-15)
    np.testing.assert_allclose(lse[0, 0], q[0, 0] @ k[0, 50_000] / 2, rtol=1e-12)
    np.testing.assert_allclose(gradients.dv[0, 50_000], g[0, 0], rtol=1e-12)
    assert np.isfinite(gradients.dq).all()
    assert np.count_nonzero(gradients.dv) == 4


def test_a_bias_of_minus_infinity_everywhere_is_an_empty_row():
    q, k, v, g, bias = random((1, 3, 4), (1, 5, 4), (1, 5, 4), (1, 3, 4), (3, 5))
    bias[1] = -np.inf
    g[0, 1] = np.nan
    call = problem.describe(q, k, v, bias=bias)
    out, lse, gradients = run(call, g)
    assert (out[0, 1] == 0).all()
    assert lse[0, 1] == -np.inf
    assert (gradients.dq[0, 1] == 0).all()
    assert (gradients.dbias[..., 1, :] == 0).all()
    for got, want in zip(gradients, reference.backward(call, g), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-14)


def test_weights_of_huge_scores_cannot_exceed_one():
    """Scores of 1e6 in float32 are 0.06 apart, so that exp(s - lse) of another rounding could be far above 1."""
    q, k, v = (x.astype(np.float32) for x in random((1, 1, 8), (1, 64, 8), (1, 64, 8)))
    call = problem.describe(1000 * q, 1000 * k, v)
    out, lse = numpy_backend.forward(call)
    gradients = numpy_backend.backward(call, out, lse - np.float32(0.5), np.ones_like(out))
    assert gradients.dv.max() == 1


def test_equal_calls_give_equal_bits():
    call, dout, dlse = Case("bits", seq_q=300, seq_k=700, heads_q=4, bias="hqk", dlse=True).call()
    first, second = (run(call, dout, dlse) for _ in range(2))
    for x, y in zip((*first[:2], *first[2]), (*second[:2], *second[2]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_warning_and_no_nan_from_thousands_of_tiny_heads():
    call, dout, _ = Case("tiny", batch=(2700,), heads_q=1, heads_k=1, seq_q=16, seq_k=16, head_dim=16).call()
    expectation = Expectation(call, dout)
    out, lse, gradients = run(call, dout)
    expectation.check_forward(out, lse)
    expectation.check_backward(gradients)


# ---- the rule itself: what it must refuse ----------------------------------------------------------------------------


def expectation_of(name, dtype, seed=0):
    call, dout, dlse = replace(Case(name), **{**OPTIONS[name], "dtype": dtype}).call(seed)
    return call, Expectation(call, dout, dlse), dout, dlse


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_refuses_lower_precision(dtype):
    """Inputs with 3 bits less than the dtype's own (for float32 as many as TF32 has) are noticed."""
    call, expectation, dout, dlse = expectation_of("everything", dtype)
    expectation.check_forward(*numpy_backend.forward(call))
    bits = {"float16": 8, "bfloat16": 5, "float32": 11, "float64": 24}[dtype]

    def coarse(x):
        mantissa, exponent = np.frexp(x.astype(np.float64))
        return np.ldexp(np.round(mantissa * 2**bits), exponent - bits).astype(x.dtype)

    rounded = replace(call, q=coarse(call.q), k=coarse(call.k), v=coarse(call.v))
    out, lse, gradients = run(rounded, dout, dlse)
    with pytest.raises(AssertionError, match=r"out.*error"):
        expectation.check_forward(out, lse)
    with pytest.raises(AssertionError, match=r"d[qkv].*error"):
        expectation.check_backward(gradients)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dbias"])
def test_the_rule_refuses_a_wrong_factor(dtype, name):
    factor = 1.06 if dtype == "bfloat16" else 1.01  # a unit in the last place of bfloat16 is 0.8 %
    _, expectation, dout, dlse = expectation_of("everything", dtype)
    gradients = numpy_backend.backward(expectation.call, *numpy_backend.forward(expectation.call), dout, dlse)
    expectation.check_backward(gradients)
    wrong = (getattr(gradients, name).astype(np.float64) * factor).astype(gradients.dq.dtype)
    with pytest.raises(AssertionError, match=name):
        expectation.check_backward(gradients._replace(**{name: wrong}))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_rule_refuses_what_is_not_finite_on_one_side_only(value):
    want = np.ones((1, 2, 2))
    got = np.ones((1, 2, 2), np.float32)
    assert_close(got, want, got, "x")
    bad, bad_want = got.copy(), want.copy()
    bad[0, 1, 0] = bad_want[0, 1, 0] = value
    assert_close(bad, bad_want, bad, "x")
    for pair in ((bad, want), (got, bad_want), *([(-bad, bad_want)] if np.isinf(value) else [])):
        with pytest.raises(AssertionError, match=r"x\[0, [01], 0\] is"):
            assert_close(*pair, got, "x")


def test_the_rule_asks_for_exact_zeros():
    call, expectation, dout, dlse = expectation_of("everything-mostly-hidden", "float32")
    out, lse, gradients = run(call, dout, dlse)
    expectation.check_forward(out, lse)
    row = tuple(np.argwhere(~expectation.seen.any(axis=-1))[0])
    out[(*row, 0)] = 1e-30
    with pytest.raises(AssertionError, match="exactly 0"):
        expectation.check_forward(out, lse)
    gradients.dk[0, 0, -1, 0] = 1e-30
    with pytest.raises(AssertionError, match="exactly 0"):
        expectation.check_backward(gradients)
