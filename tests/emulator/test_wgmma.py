"""Hopper's kernels in the emulator: every tile, length edge, option, layout and number of blocks, under several schedules.

Tiles are mostly forced to be as small as two warpgroups allow, so that lengths of a few dozen cross most edges; every
shipped tile runs as well.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest

from cuflash import problem, tuning
from cuflash.backends import BACKENDS, Device, described_device
from cuflash.errors import UnsupportedError
from cuflash.modifiers import KeyLengths
from cuflash.schedules import order, wgmma
from tests import cases
from tests.cases import OPTIONS, STRIDES, Case
from tests.emulator import kernels
from tests.emulator.kernels import SEEDS
from tests.tolerance import Expectation

DTYPES = ("float16", "bfloat16")
MANY_SEEDS = range(18)

TILE = tuning.ForwardWgmmaTile(max_head_dim=256, block_q=128, block_k=32, stages=2, query_stages=2, continuous=True)
TILES = {
    "continuous": TILE,
    "two tiles of queries": TILE._replace(continuous=False),
    "one tile of queries": TILE._replace(continuous=False, query_stages=1),
    "fetched queries": TILE._replace(continuous=False, query_stages=1, out_panels=1),
    "output in place of queries": TILE._replace(continuous=False, in_place=True),
    "three warpgroups, output in place": TILE._replace(
        block_q=192, block_k=16, continuous=False, in_place=True, stages=5
    ),
    "three warpgroups": TILE._replace(block_q=192, continuous=False, stages=3),
    "four warpgroups": TILE._replace(block_q=256, block_k=16, stages=4),
}


@pytest.fixture
def tile(monkeypatch):
    """Sets the only tile that may be chosen."""

    def force(row=TILE):
        monkeypatch.setattr(tuning, "FORWARD_WGMMA", (row,))

    force()
    return force


def hopper(multiprocessors: int = 2) -> Device:
    """A device of compute capability 9.0 that runs that many blocks at once."""
    return replace(described_device(90), multiprocessors=multiprocessors)


def check(case: Case, seeds: Iterable[int] = SEEDS, device: Device | None = None, **options) -> None:
    kernels.check(case, device or hopper(), seeds, requested="wgmma", with_backward=False, **options)


def check_call(call: problem.Call, seeds: Iterable[int] = SEEDS, **options) -> None:
    kernels.check_call(call, None, None, hopper(), seeds, requested="wgmma", with_backward=False, **options)


def forward(call: problem.Call, seed: int = 0, device: Device | None = None, **options):
    """Output and log-sum-exp."""
    return kernels.forward(call, device or hopper(), seed, requested="wgmma", **options)


def row_id(row: tuple) -> str:
    return "-".join(f"{name}{int(value)}" for name, value in row._asdict().items())


dtypes = pytest.mark.parametrize("dtype", DTYPES)
tiles = pytest.mark.parametrize("name", TILES)


# ---- tiles -----------------------------------------------------------------------------------------------------------
def row_parameters() -> Iterable:
    """Every row, those that are the first for their heads in both dtypes."""
    heads = set()
    for row in tuning.FORWARD_WGMMA:
        for dtype in DTYPES[row.max_head_dim in heads :]:
            yield pytest.param(row, dtype, id=f"{row_id(row)}-{dtype}")
        heads.add(row.max_head_dim)


@pytest.mark.parametrize(("row", "dtype"), list(row_parameters()))
def test_every_tile(tile, row, dtype):
    """Each with the widest heads that it is meant for, as far as they fit."""
    tile(row)
    seeds = count()
    head_dim = row.max_head_dim
    head_dim_v = next(d for d in range(head_dim, 0, -64) if fits(row, head_dim, d))
    for extra_q, extra_k in ((-1, 1), (1, -1), (0, 0)):
        case = Case("tile", dtype, batch=(), heads_q=2, heads_k=1, seq_q=row.block_q + extra_q, causal="top_left")
        case = replace(case, seq_k=2 * row.block_k + extra_k, head_dim=head_dim, head_dim_v=head_dim_v)
        check(case, [next(seeds) for _ in range(2)])


def fits(row: tuning.ForwardWgmmaTile, head_dim: int, head_dim_v: int) -> bool:
    call, _, _ = Case("fits", "float16", head_dim=head_dim, head_dim_v=head_dim_v).call()
    try:
        return wgmma.forward(call.problem, hopper().shared_limit, True).block_k == row.block_k
    except UnsupportedError:
        return False


@tiles
def test_schedules(tile, name):
    """Several tiles of queries for each block, rows and keys that end inside a tile, some tiles without any key."""
    tile(TILES[name])
    case = Case("schedules", "bfloat16", heads_k=1, seq_q=300, seq_k=150, lengths=(150, 37), window=(100, 0))
    check(case, MANY_SEEDS)


# ---- lengths ---------------------------------------------------------------------------------------------------------
def edges(block: int) -> tuple[int, ...]:
    return 1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1


@pytest.mark.parametrize("causal", [False, True, "top_left"], ids=["full", "causal", "top-left"])
@pytest.mark.parametrize("seq_q", sorted({63, 64, 65, *edges(TILE.block_q)}))
def test_lengths(tile, seq_q, causal):
    for seed, seq_k in enumerate(sorted({*edges(TILE.block_k), 3 * TILE.block_k, 130}), seq_q):
        case = Case("lengths", "bfloat16", batch=(), heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=causal)
        try:
            check(case, (seed, seed + 9))  # of another pace
        except (AssertionError, kernels.EmulatorError) as error:
            raise AssertionError(f"seq_q {seq_q}, seq_k {seq_k}: {error}") from error


@tiles
@pytest.mark.parametrize("window", [(0, 0), (3, 0), (40, None), (None, 5), (17, 30)], ids=str)
def test_window_edges(tile, window, name):
    tile(TILES[name])
    for seed, (seq_q, seq_k) in enumerate(((129, 31), (15, 65), (257, 130), (1, 64), (64, 1), (130, 300))):
        case = Case("window", "bfloat16", batch=(1,), heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, window=window)
        check(replace(case, lengths=(seq_k,)), (seed, seed + 9))


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty_arrays_are_refused(tile, empty):
    call, _, _ = replace(Case("empty", "float16"), **empty).call()
    with pytest.raises(UnsupportedError, match="an array is empty, which no tensor map describes"):
        forward(call)


# ---- options ---------------------------------------------------------------------------------------------------------
CORE = ("causal", "bias", "everything")
#: TMA takes rows of whole 16-byte pieces
WHOLE_ROWS = {"everything": {"head_dim_v": 24}}


def option_parameters() -> Iterable:
    for name, dtype in product(OPTIONS, DTYPES):
        if dtype == "bfloat16" or name in CORE:
            yield pytest.param(name, dtype, id=f"{name}-{dtype}")


@pytest.mark.parametrize(("name", "dtype"), list(option_parameters()))
def test_options(tile, name, dtype):
    lengths = {"seq_q": 141, "seq_k": 77} if "more-queries" in name else {"seq_q": 131, "seq_k": 77}
    check(Case(name, dtype, **{**OPTIONS[name], **WHOLE_ROWS.get(name, {}), **lengths}))


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_options_without_undefined_behaviour(tile, name):
    check(Case(name, "bfloat16", **{**OPTIONS[name], **WHOLE_ROWS.get(name, {})}), sanitize=True)


@tiles
def test_everything_in_every_kind_of_tile(tile, name):
    tile(TILES[name])
    for seed, (seq_q, seq_k) in enumerate(product((127, 129, 270), (31, 33, 65))):
        options = {**OPTIONS["everything"], "lengths": (seq_k, seq_k // 2), "seq_q": seq_q, "seq_k": seq_k}
        check(Case("everything", "float16", **{**options, **WHOLE_ROWS["everything"]}), (seed,))


def test_without_statistics(tile):
    call, _, _ = Case("no lse", "bfloat16", seq_q=131).call()
    with_lse, without = (forward(call, with_lse=flag) for flag in (True, False))
    assert without[1] is None
    np.testing.assert_array_equal(with_lse[0], without[0])


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("values", ["x30", "logits about -200", "logits about -1e5", "dominant key late", "133120"])
def test_values(tile, values, causal):
    check(Case(values, "bfloat16", values=values, causal=causal, seq_q=150, seq_k=283), (0, 1))
    check(Case(values, "bfloat16", values=values, causal=causal, seq_q=5, seq_k=9), (2, 3))


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"bias": "hqk"}, {"mask": "bhqk"}], ids=lambda x: next(iter(x)))
def test_values_with_options(tile, options):
    for seed, values in enumerate(("x30", "logits about -200", "logits about -1e5", "dominant key late")):
        check(Case(values, "float16", values=values, seq_q=150, seq_k=83, **options), (seed, seed + 9))


def test_scale_of_no_score(tile):
    """Without a positive scale a larger product is no larger score: the running maximum must be one of scores."""
    for seed, scale in enumerate((-5.0, 0.0, 5.0)):
        check(Case("scale", "float16", scale=scale, values="dominant key late", causal=True), (seed, seed + 9))


def arrays(dtype: str, *lengths: int) -> list[np.ndarray]:
    """Random q, k, v of these lengths, one head and 16 columns."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, n, 16)).astype(cases.DTYPES[dtype]) for n in lengths]


def exact(q, k, v, **options) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse in float64."""
    out, lse = forward(problem.describe(q, k, v, **options), 3)
    return out.astype(np.float64), lse.astype(np.float64)


@dtypes
def test_logits_near_the_largest_number(tile, dtype):
    """All weight is on the one key whose logit is positive, and lse is that logit, exactly."""
    big = 2.0**15 if dtype == "float16" else 2.0**50
    q, k, v = (np.zeros((1, n, 16)) for n in (3, 200, 200))
    q[..., 0], k[..., 0] = big, -big
    k[:, 150, 0] = big
    v += np.arange(200.0)[None, :, None]
    out, lse = exact(*(x.astype(cases.DTYPES[dtype]) for x in (q, k, v)), scale=1.0)
    np.testing.assert_array_equal(out, 150)
    np.testing.assert_array_equal(lse, big * big)


@dtypes
@pytest.mark.parametrize("far", [-100.0, -1e4, -3e4])
def test_visible_keys_far_below_zero_count_fully(tile, dtype, far):
    """No finite number stands for minus infinity."""
    zero = np.zeros((), cases.DTYPES[dtype])
    q, k = np.full((1, 70, 16), zero), np.full((1, 200, 16), zero)
    v = np.where(np.arange(200)[:, None] < 130, 100.0, 1.0) * np.ones((1, 1, 16))
    mask = np.zeros((70, 200), bool)
    mask[:, 130:] = True
    bias = np.full((70, 200), far).astype(zero.dtype)
    out, lse = exact(q, k, v.astype(zero.dtype), bias=bias, mask=mask)
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, float(bias[0, 0]) + np.log(70), rtol=1e-6)


def test_values_near_the_largest_number(tile):
    q, k, v = arrays("float16", 70, 283, 283)
    v[...] = np.finfo(np.float16).max
    out, lse = exact(q, k, v)
    np.testing.assert_allclose(out, float(v[0, 0, 0]), rtol=0.01)
    assert np.isfinite(lse).all()


def test_rows_that_see_nothing_between_rows_that_do(tile):
    q, k, v = arrays("bfloat16", 300, 150, 150)
    mask = np.random.default_rng(2).random((300, 150)) < 0.5
    mask[::7] = False
    mask[64:192] = False  # a warpgroup of the first tile, and one of the second
    mask[:, :40] = False
    call = problem.describe(q, k, v, mask=mask)
    check_call(call)


# ---- NaN and infinity ------------------------------------------------------------------------------------------------
def hiding(seq_k: int, length: int, **options) -> dict:
    """Options of one set of kernels: a window, and keys that end at a length."""
    return {"window": (None, None), **options, "modifiers": (KeyLengths(np.array(min(length, seq_k), np.int32)),)}


@tiles
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_what_no_row_sees_never_reaches_a_result(tile, name, bad):
    """Keys beyond a length, beyond the last query, and in front of the first."""
    tile(TILES[name])
    for seq_q, hidden, options in (
        (270, slice(100, None), hiding(150, 100, window=(2**40, 2**40))),
        (100, slice(100, None), hiding(150, 150, window=(None, 0), causal="top_left")),
        (30, slice(0, 117), hiding(150, 150, window=(3, None))),
    ):
        q, k, v = arrays("bfloat16", seq_q, 150, 150)
        call = problem.describe(q, k, v, **options)
        want = forward(call)
        Expectation(call).check_forward(*want)
        k[:, hidden] = v[:, hidden] = bad
        for seed in SEEDS:
            for got, wanted in zip(forward(call, seed), want, strict=True):
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("array", ["k", "v"])
def test_a_nan_reaches_the_rows_that_see_it(tile, array):
    """A NaN in v may also reach rows of the same tile of queries, which multiply it by 0; tiles before never read it."""
    given = dict(zip("qkv", arrays("bfloat16", 300, 300, 300), strict=True))
    given[array][0, 270, 3] = np.nan
    out, lse = exact(**given, causal=True)
    assert np.isfinite(out[:, : 270 if array == "k" else 192]).all()  # where the last tile begins: 320 rows, less 128
    assert np.isnan(out[:, 270:, 3]).all()
    assert np.isfinite(lse[:, :270]).all()
    assert np.isnan(lse[:, 270:]).all() == (array == "k")


@tiles
def test_rows_that_see_nothing_are_zero_beside_a_nan(tile, name):
    """Rows of one tile share their products, so the NaN has met the weights 0 of all of them."""
    tile(TILES[name])
    q, k, v = arrays("bfloat16", 140, 20, 20)
    v[0, 3] = np.nan
    for seed in SEEDS:
        out, lse = forward(problem.describe(q, k, v, causal=True), seed)
        np.testing.assert_array_equal(out[0, :120].astype(np.float32), 0)
        assert np.isneginf(lse[0, :120]).all()
        assert np.isnan(out[0, 123:].astype(np.float32)).all()
        assert np.isfinite(lse[0, 120:]).all()


def test_a_nan_query_stays_in_its_row(tile):
    q, k, v = arrays("float16", 150, 150, 150)
    want, _ = exact(q, k, v)
    q[0, 77, 5] = np.nan
    out, lse = exact(q, k, v)
    assert np.isnan(out[0, 77]).all()
    assert np.isnan(lse[0, 77])
    np.testing.assert_allclose(np.delete(out, 77, axis=1), np.delete(want, 77, axis=1), rtol=0, atol=2e-3)


def test_lengths_of_64_bits_and_out_of_range(tile):
    made = Case("lengths", "float16", batch=(3,)).make()
    want, got = ([KeyLengths(np.array(n, np.int64), wide=True)] for n in ((0, 17, 45), (-3, 17, 2**40)))
    calls = [problem.describe(made["q"], made["k"], made["v"], modifiers=(m[0],)) for m in (want, got)]
    Expectation(calls[0]).check_forward(*forward(calls[1]))


# ---- blocks that stay ------------------------------------------------------------------------------------------------
@tiles
@pytest.mark.parametrize("section", [1, 2, 4, 16])
def test_any_number_of_blocks_gives_the_same(tile, monkeypatch, name, section):
    """Each tile of queries once, in whatever order heads are taken."""
    tile(TILES[name])
    monkeypatch.setattr(order, "EVEN_SECTION", section)
    case = Case("blocks", "bfloat16", batch=(1,), heads_q=5, heads_k=5, seq_q=2 * TILES[name].block_q + 1, seq_k=40)
    call, _, _ = replace(case, window=(None, 0), lengths=(40,)).call()
    assert order.section(call.problem, 0) == min(section, 5)
    expectation = Expectation(call)
    first = None
    for seed, blocks in enumerate((1, 2, 3, 7, 15, 132)):
        out, lse = forward(call, seed, hopper(blocks))
        expectation.check_forward(out, lse)
        bits = out.tobytes() + lse.tobytes()
        first = first or bits
        assert bits == first


@pytest.mark.parametrize("cached", [1, 1 << 12, 1 << 30])
def test_sections_of_causal_heads(tile, monkeypatch, cached):
    """Under a causal mask as many heads at once as fit the cache, one at least."""
    monkeypatch.setattr(order, "CACHE_BYTES", cached)
    check(Case("sections", "float16", heads_q=6, heads_k=2, seq_q=270, causal=True))


def test_every_seed_gives_the_same_bits(tile):
    call, _, _ = Case("bits", "bfloat16", seq_q=270, causal=True).call()
    assert len({forward(call, seed)[0].tobytes() for seed in MANY_SEEDS}) == 1


# ---- head sizes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(8, 8), (40, 24), (72, 72), (96, 136), (64, 128), (136, 64), (192, 128), (200, 208), (256, 256)],
)
def test_head_sizes(tile, head_dim, head_dim_v):
    """Widths that end inside a step of 16 columns and inside a panel of 64."""
    if head_dim > 192:
        tile(TILES["one tile of queries"])
    case = Case("dims", "bfloat16", batch=(1,), seq_q=131, seq_k=70, head_dim=head_dim, head_dim_v=head_dim_v)
    check(replace(case, causal=True))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 40), (192, 128)])
def test_output_in_the_place_of_queries(tile, head_dim, head_dim_v):
    tile(TILES["one tile of queries"])
    case = Case("dims", "float16", batch=(1,), seq_q=270, seq_k=70, head_dim=head_dim, head_dim_v=head_dim_v)
    check(replace(case, causal=True))


def test_output_too_wide_for_the_place_of_queries(tile):
    """It gets a place of its own, beside a single tile of queries, or is refused where there is none."""
    tile(TILES["one tile of queries"])
    check(Case("dims", "float16", seq_q=270, seq_k=70, head_dim=64, head_dim_v=72, causal=True))
    tile(TILES["one tile of queries"]._replace(max_head_dim=64))
    call, _, _ = Case("dims", "float16", head_dim=64, head_dim_v=72).call()
    with pytest.raises(UnsupportedError, match=r"head_dim 64 with head_dim_v 72.*backend='mma'"):
        forward(call)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "panels"),
    [(64, 40, 1), (72, 72, 1), (192, 128, 1), (136, 176, 2), (256, 256, 2), (136, 136, 4)],
)
def test_output_in_parts_beside_fetched_queries(tile, head_dim, head_dim_v, panels):
    """As many parts as it takes, the last of which may have fewer panels, and may end inside one."""
    tile(TILES["fetched queries"]._replace(out_panels=panels))
    case = Case("parts", "bfloat16", batch=(1,), seq_q=270, seq_k=70, head_dim=head_dim, head_dim_v=head_dim_v)
    case = replace(case, causal=True)
    call, _, _ = case.call()
    config = wgmma.forward(call.problem, hopper().shared_limit, True)
    assert config.out_panels == min(panels, -(-head_dim_v // 64))
    assert config.box_rows["q"] == wgmma.GROUP_ROWS
    check(case)


def test_who_fetches_queries(tile):
    """Not where shared memory is needed for blocks of a bias, or values are wider than queries."""
    tile(TILES["fetched queries"]._replace(bias_stages=2))
    call, _, _ = Case("plain", "bfloat16", seq_q=270).call()
    assert wgmma.forward(call.problem, hopper().shared_limit, True).out_panels == 1
    call, _, _ = Case("bias", "bfloat16", seq_q=270, bias="bhqk").call()
    config = wgmma.forward(call.problem, hopper().shared_limit, True, "blocks")
    assert (config.bias_stages, config.out_panels) == (2, 0)
    call, _, _ = Case("wide", "bfloat16", seq_q=270, head_dim=64, head_dim_v=72).call()
    assert wgmma.forward(call.problem, hopper().shared_limit, True).out_panels == 0


# ---- strides ---------------------------------------------------------------------------------------------------------
def rows_apart(x: np.ndarray) -> np.ndarray:
    """A column slice of a wider array: rows 16 elements further apart, so that 16-byte pieces stay aligned."""
    outer = np.full((*x.shape[:-1], x.shape[-1] + 16), np.nan, x.dtype)
    outer[..., 8:-8] = x
    return outer[..., 8:-8]


def heads_inside(x: np.ndarray) -> np.ndarray:
    """Rows outside, heads inside, and batch entries innermost of the three."""
    order = (-2, -3, *range(x.ndim - 3), -1)
    back = np.argsort([axis % x.ndim for axis in order])
    return np.ascontiguousarray(x.transpose(order)).transpose(back)


TAKEN = {"rows apart": rows_apart, "heads inside": heads_inside}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", TAKEN)
@pytest.mark.parametrize("array", ["q", "k", "v", "out", "all"])
def test_strides(tile, array, strides, layout):
    case = Case("strides", "bfloat16", layout=layout, heads_k=1, mask="bhqk", bias="b1qk", seq_q=131)
    made = case.make()
    for name in "qkv":
        if array in (name, "all"):
            made[name] = TAKEN[strides](made[name])
    place = TAKEN[strides] if array in ("out", "all") else kernels.contiguous
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    check_call(call, (0, 3, 5), place=place)


def test_rows_that_are_no_whole_pieces(tile):
    """12 columns in rows of 16: what lies behind them is not read, and nothing is written there."""
    made = Case("columns", "float16", head_dim=12, seq_q=131).make()

    def widened(x):
        outer = np.full((*x.shape[:-1], 16), np.nan, x.dtype)
        outer[..., :12] = x
        return outer[..., :12]

    call = problem.describe(*(widened(made[name]) for name in "qkv"))
    check_call(call, place=widened)


def test_slices_of_one_array(tile):
    """q, k and v as parts of one projection's result."""
    fused = np.random.default_rng(0).standard_normal((2, 145, 3, 2, 16)).astype(np.float16)
    q, k, v = (fused[:, :, i].swapaxes(1, 2) for i in range(3))
    check_call(problem.describe(q, k, v, causal=True))


@pytest.mark.parametrize("batch", [(), (3, 2), (1, 2, 1, 2, 2)], ids=str)
def test_batch_axes(tile, batch):
    case = Case("batch", "bfloat16", batch=batch, seq_q=9, seq_k=11, mask="b1qk", bias="b11k", lengths="random")
    check(case)


REFUSED = {
    "padded": "rows of {} are not contiguous, or do not start at multiples of 16 bytes",
    "every second": "rows of {} are not contiguous, or do not start at multiples of 16 bytes",
    "last axis first": "rows of {} are not contiguous, or do not start at multiples of 16 bytes",
    "stride 0": "{} has a stride of 0 bytes along its heads axis",
}


@pytest.mark.parametrize("array", ["q", "k", "v", "out"])
@pytest.mark.parametrize("strides", REFUSED)
def test_strides_that_are_refused(tile, strides, array):
    if (strides, array) == ("stride 0", "out"):
        return  # no result has one
    made = Case("refused", "float16").make()
    place = STRIDES[strides] if array == "out" else kernels.contiguous
    if array != "out":
        made[array] = STRIDES[strides](made[array])
    call = problem.describe(made["q"], made["k"], made["v"])
    with pytest.raises(UnsupportedError, match=REFUSED[strides].format(array)):
        forward(call, place=place)


def test_seeds_and_dtypes_are_all_there_are():
    assert {seed % 6 for seed in SEEDS} == set(range(6))
    assert len(MANY_SEEDS) >= 12
    capabilities = set(next(row for row in BACKENDS if row.name == "wgmma").capabilities)
    assert set(DTYPES) == capabilities - {"float32"}, "whose kernel is that of test_split_wgmma.py"
