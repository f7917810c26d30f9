"""Equal calls give equal bits: the forward always, the backward where blocks take turns, whatever order blocks run in.

Several blocks run at once here, interleaved by the seed: one after another they would add in order even without turns.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cuflash import tuning
from cuflash.backends import described_device
from cuflash.problem import describe
from cuflash.schedules import mma, simt
from tests.cases import OPTIONS, STRIDES, Case
from tests.emulator import kernels
from tests.emulator.kernels import SEEDS
from tests.emulator.test_bias import PATTERNS
from tests.emulator.test_simt import forced_backward
from tests.tolerance import Expectation

TARGETS = ((75, "float16"), (80, "bfloat16"), (100, "bfloat16"), (75, "float32"), (80, "float32"), (90, "float64"))
EVERY_OPTION = (80, "bfloat16")
CORE = ("causal", "window", "bias", "lengths", "groups", "everything")
RESIDENTS = 3
PACES = (0, 2, 5)  # of seeds, for what is run over many calls

BACKWARD = tuning.BackwardTile(block_q=32, block_k=32, warps=2, query_warps=1, stages=2, dout_stages=2, blocks_per_sm=1)
TILES = {
    "two stages": BACKWARD,
    "one stage": BACKWARD._replace(stages=1, dout_stages=1),
    "two columns of warps": BACKWARD._replace(warps=4, query_warps=2),
    "late": BACKWARD._replace(warps=4, query_warps=2, late=True),
}


@pytest.fixture
def tile(monkeypatch):
    """Sets the only tile that each backward may choose, small enough for many blocks."""

    def force(backward="two stages", backward_simt="one warp a half"):
        monkeypatch.setattr(tuning, "BACKWARD_MMA", (TILES[backward],))
        monkeypatch.setattr(simt, "backward", forced_backward(backward_simt))

    force()
    return force


def target_id(target: tuple[int, str]) -> str:
    return f"sm_{target[0]}-{target[1]}"


targets = pytest.mark.parametrize("target", TARGETS, ids=target_id)


def single_terms(options: dict) -> dict:
    """The options with a bias of the scores' shape, whose gradient's elements are no sums."""
    return {**options, "bias": "bhqk"} if options.get("bias") else options


def check_repeats(case: Case, arch: int, seeds=SEEDS, deterministic: bool = True, **options) -> int:
    """Judge a backward under each schedule, and count the different results in it: gradients and unrounded sums."""
    return check_call_repeats(*case.call(), arch, seeds, deterministic, **options)


def check_call_repeats(
    call, dout, dlse, arch: int, seeds=SEEDS, deterministic=True, names=("dq_sum", "dq", "dk", "dv", "dbias"), **options
) -> int:
    """The same of a call; `names` are those of the results that are compared."""
    expectation = Expectation(call, dout, dlse)
    out, lse = expectation.plain["out"], expectation.lse.astype(call.problem.accumulator)
    results = set()

    def note(arrays):
        results.add(b"".join(arrays[name].tobytes() for name in names if name in arrays))

    options |= {"deterministic": deterministic, "residents": RESIDENTS, "watch": note}
    for seed in seeds:
        expectation.check_backward(kernels.backward(call, out, lse, dout, dlse, arch, seed, **options))
    return len(results)


# ---- the backward ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, id=f"{name}-{target_id(target)}")
        for name, target in product(OPTIONS, TARGETS)
        if target == EVERY_OPTION or (name in CORE if target[0] != 100 else name == "everything")
    ],
)
def test_options(tile, name, target):
    arch, dtype = target
    case = Case(name, dtype, **{"seq_q": 70, "seq_k": 83, **single_terms(OPTIONS[name])})
    assert check_repeats(case, arch, PACES) == 1


@targets
def test_without_turns_the_order_shows(tile, target):
    """What the tests here could not see if blocks did not run at once."""
    arch, dtype = target
    case = Case("plain", dtype, batch=(), heads_q=1, heads_k=1, seq_q=70, seq_k=140)
    assert check_repeats(case, arch, deterministic=False) > 1
    assert check_repeats(case, arch) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group", [1, 3])
def test_every_set_of_key_tiles(tile, dtype, group):
    """Which tiles of keys add to a tile of queries, and so the order of turns, changes with lengths and windows."""
    rng = np.random.default_rng(group)
    for seed in range(12):
        seq_q, seq_k = (int(n) for n in rng.integers(1, 150, 2))
        window = tuple(None if rng.random() < 0.2 else int(rng.integers(0, 100)) for _ in range(2))
        lengths = (int(rng.integers(0, seq_k + 1)), seq_k)
        causal = (True, "top_left")[int(rng.integers(2))]
        case = Case("sets", dtype, heads_q=group, heads_k=1, seq_q=seq_q, seq_k=seq_k, window=window, lengths=lengths)
        try:
            assert check_repeats(replace(case, causal=causal), 80, (seed, seed + 1)) == 1
        except (AssertionError, kernels.EmulatorError) as error:
            raise AssertionError(f"{case!r}, {causal}, seed {seed}: {error}") from error


@pytest.mark.parametrize("name", TILES)
def test_kinds_of_tiles(tile, name):
    tile(name, "flat")
    options = single_terms(OPTIONS["everything"])
    for dtype in ("float16", "float64"):
        case = Case("tiles", dtype, **{**options, "seq_q": 65, "seq_k": 97, "lengths": (97, 50), "head_dim": 24})
        assert check_repeats(case, 80) == 1


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(160, 120), (72, 200)])
def test_chunks_of_columns(tile, arch, head_dim, head_dim_v):
    """Each chunk of dq has turns of its own; chunks of dv alone have none."""
    case = Case("chunks", "bfloat16", batch=(), heads_q=2, heads_k=1, head_dim=head_dim, head_dim_v=head_dim_v)
    case = replace(case, seq_q=45, seq_k=100, causal=True)
    problem = case.call()[0].problem
    assert mma.backward(problem, described_device(arch).shared_limit, True).chunks(problem) > 1
    assert check_repeats(case, arch, range(4)) == 1


@pytest.mark.parametrize("target", [(80, "float16"), (100, "bfloat16"), (80, "float32")], ids=target_id)
def test_values_that_are_not_finite(tile, target):
    """A NaN that is seen reaches dq where it does without turns, and nowhere else."""
    arch, dtype = target
    case = Case("nan", dtype, batch=(), heads_q=1, heads_k=1, seq_q=70, seq_k=83)
    made = replace(case, causal="top_left").make()
    made["k"][0, 64] = np.nan
    made["dout"][0, 66] = np.inf
    call = describe(made["q"], made["k"], made["v"], **made["options"])
    out, lse = Expectation(call).plain["out"], np.zeros((1, 70), np.float32)
    found = [
        kernels.backward(call, out, lse, made["dout"], None, arch, 1, deterministic=flag, residents=RESIDENTS)
        for flag in (False, True)
    ]
    for plain, ordered in zip(*found, strict=True):
        plain, ordered = plain.astype(np.float64), ordered.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(plain), np.isnan(ordered))
        np.testing.assert_array_equal(np.isinf(plain), np.isinf(ordered))
    assert np.isnan(found[1].dq[0, 64:].astype(float)).all()
    assert np.isfinite(found[1].dq[0, :64].astype(float)).all()


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(tile, strides):
    case = Case("strides", "float32", strides=strides, layout="bshd", seq_q=40, head_dim=15, bias="bhqk", dlse=True)
    assert check_repeats(case, 80, (0, 4)) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(tile, empty, dtype):
    assert check_repeats(replace(Case("empty", dtype, bias="bhqk"), **empty), 80, (0, 1)) == 1


# ---- gradients of a bias that is broadcast: sums of many blocks, in fixed point -----------------------------------------
def shared(bias: str, dtype: str, **options) -> Case:
    """A call of one group of two heads for each batch entry, edges of tiles on both sides."""
    sizes = {"heads_q": 2, "heads_k": 1, "seq_q": 37, "seq_k": 50, "head_dim": 24, "dlse": True}
    return Case("shared", dtype, bias=bias, **{**sizes, **options})


@pytest.mark.parametrize("bias", PATTERNS)
def test_every_broadcast_shape(tile, bias):
    assert check_repeats(shared(bias, "bfloat16"), 80) == 1


@pytest.mark.parametrize("bias", ["1111", "11qk"])
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ((75, "float32"), {}),
        ((75, "float64"), {}),
        ((90, "float64"), {}),
        ((80, "float32"), {"requested": "mma"}),
        ((90, "bfloat16"), {"requested": "wgmma", "head_dim": 64}),
        ((90, "bfloat16"), {"requested": "wgmma", "head_dim": 136}),
    ],
    ids=str,
)
def test_sums_of_every_kernel(tile, target, options, bias):
    arch, dtype = target
    case = shared(bias, dtype, head_dim=options.get("head_dim", 24))
    assert check_repeats(case, arch, PACES, requested=options.get("requested")) == 1


def test_without_fixed_point_the_order_of_a_gradient_shows(tile):
    """What the tests above could not see if the order did not matter."""
    assert check_repeats(shared("1111", "bfloat16"), 80, deterministic=False, names=("dbias",)) > 1


@pytest.mark.parametrize(
    ("dtype", "bias", "axis"), [("bfloat16", "b11k", 0), ("bfloat16", "1h1k", 1), ("float64", "1hq1", 1)]
)
def test_small_gradients_beside_large_ones(tile, dtype, bias, axis):
    """Of heads and batch entries whose gradients differ by 2^30, or that have none: each is as exact as it is alone."""
    made = shared(bias, dtype, batch=(4,), heads_q=4).make()
    scale = np.array([1, 2.0**-20, 2.0**10, 0])[: made["dout"].shape[axis]]
    shape = [-1 if i == axis else 1 for i in range(4)]
    dout = (made["dout"] * scale.reshape(shape)).astype(made["dout"].dtype)
    dlse = made["dlse"] * scale.reshape(shape[:3]).astype(made["dlse"].dtype)
    call = describe(made["q"], made["k"], made["v"], **made["options"])
    assert check_call_repeats(call, dout, dlse, 80 if dtype == "bfloat16" else 90, PACES) == 1


@pytest.mark.parametrize("bias", ["bh1k", "1h11"])
def test_sums_that_are_not_finite(tile, bias):
    """They are where they are without turns, and what is hidden from all queries may hold anything."""
    made = shared(bias, "bfloat16", seq_q=50, seq_k=83, causal="top_left", heads_q=2, lengths=(83, 60)).make()
    made["k"][0, 0, 30], made["dout"][0, 1, 20] = np.nan, np.inf
    made["v"][:, :, 60:] = 3e38
    call = describe(made["q"], made["k"], made["v"], **made["options"])
    expectation = Expectation(call, made["dout"], made["dlse"])
    out, lse = expectation.plain["out"], expectation.lse.astype(np.float32)
    plain, first, second = (
        kernels.backward(
            *(call, out, lse, made["dout"], made["dlse"], 80, seed), deterministic=seed > 0, residents=RESIDENTS
        ).dbias.astype(np.float64)
        for seed in range(3)
    )
    assert first.tobytes() == second.tobytes()
    np.testing.assert_array_equal(np.isnan(plain), np.isnan(first))
    np.testing.assert_array_equal(np.isinf(plain), np.isinf(first))
    finite = np.isfinite(plain)
    assert 0 < finite.sum() < finite.size or bias == "1h11"
    np.testing.assert_allclose(first[finite], plain[finite], rtol=1e-2, atol=1e-3)


# ---- the forward -------------------------------------------------------------------------------------------------------
@targets
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_forward(target, name):
    arch, dtype = target
    call, _, _ = Case(name, dtype, **{"seq_q": 140, "seq_k": 83, **OPTIONS[name]}).call()
    results = [kernels.forward(call, arch, seed, residents=RESIDENTS) for seed in SEEDS]
    assert len({out.tobytes() + lse.tobytes() for out, lse in results}) == 1
