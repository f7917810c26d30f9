"""The tensor-core kernels in the emulator: every tile, length edge, option and stride, under several schedules.

Tiles are mostly forced to be small, so that lengths of a few dozen cross every edge; every shipped tile runs as well.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import count, product

import numpy as np
import pytest

from cuflash import problem, tuning
from cuflash.backends import Device, described_device
from cuflash.modifiers import KeyLengths
from cuflash.schedules import mma
from tests.cases import DTYPES, OPTIONS, STRIDES, Case
from tests.emulator import kernels
from tests.emulator.kernels import SEEDS

#: sm_75 copies through registers and multiplies 8 deep; sm_80 has cp.async; sm_90 adds four sums at once
TARGETS = ((75, "float16"), (80, "float16"), (80, "bfloat16"), (90, "bfloat16"))

# On Hopper another backend would be chosen.
check, check_call, forward = (
    partial(run, requested="mma") for run in (kernels.check, kernels.check_call, kernels.forward)
)

FORWARD = tuning.ForwardTile(block_q=32, block_k=16, warps=2, stages=2, blocks_per_sm=1)
BACKWARD = tuning.BackwardTile(block_q=32, block_k=32, warps=2, query_warps=1, stages=2, dout_stages=2, blocks_per_sm=1)
TILES = {
    "two stages": (FORWARD, BACKWARD),
    "one stage": (FORWARD._replace(stages=1), BACKWARD._replace(stages=1, dout_stages=1)),
    "queries in registers": (FORWARD._replace(q_in_registers=True), BACKWARD._replace(dout_stages=1)),
    "two columns of warps": (FORWARD._replace(block_k=32), BACKWARD._replace(warps=4, query_warps=2)),
    "late": (FORWARD, BACKWARD._replace(late=True)),
    "late with two columns": (FORWARD, BACKWARD._replace(warps=4, query_warps=2, late=True)),
}


@pytest.fixture
def tile(monkeypatch):
    """Sets the only tile that each direction may choose."""

    def force(forward=FORWARD, backward=BACKWARD):
        monkeypatch.setattr(tuning, "FORWARD_MMA", (forward,))
        monkeypatch.setattr(tuning, "BACKWARD_MMA", (backward,))

    force()
    return force


def target_id(target: tuple[int, str]) -> str:
    return f"sm_{target[0]}-{target[1]}"


def row_id(row: tuple) -> str:
    return "-".join(f"{name}{int(value)}" for name, value in row._asdict().items())


#: once for each set of instructions: on one device the 16-bit types differ in the name of the product
targets = pytest.mark.parametrize("target", [t for t in TARGETS if t != (80, "float16")], ids=target_id)


# ---- tiles -----------------------------------------------------------------------------------------------------------
@targets
@pytest.mark.parametrize("row", tuning.FORWARD_MMA, ids=row_id)
def test_every_forward_tile(tile, target, row):
    arch, dtype = target
    tile(forward=row)
    seeds = count()
    for extra_q, extra_k in ((-1, 1), (1, -1), (0, 0)):
        case = Case("tile", dtype, batch=(), heads_q=2, heads_k=1, seq_q=row.block_q + extra_q, causal=True)
        call, _, _ = replace(case, seq_k=2 * row.block_k + extra_k).call()
        expectation = kernels.Expectation(call)
        for _ in range(2):
            expectation.check_forward(*forward(call, large(arch), next(seeds)))


@targets
@pytest.mark.parametrize("row", tuning.BACKWARD_MMA, ids=row_id)
def test_every_backward_tile(tile, target, row):
    arch, dtype = target
    tile(backward=row)
    head_dim = next((d for d in (16, 32, 64) if mma.dq_warp_columns(row, d)), None)
    assert head_dim, "no head size lets the warps share dQ's columns"
    seeds = count()
    for extra_q, extra_k in ((-1, 1), (1, -1), (0, 0)):
        case = Case("tile", dtype, batch=(), heads_q=2, heads_k=1, seq_k=row.block_k + extra_k, head_dim=head_dim)
        case = replace(case, seq_q=2 * row.block_q + extra_q, causal=True, dlse=True)
        check(case, large(arch), (next(seeds), next(seeds)))


def large(arch: int) -> Device:
    """A device of that architecture whose shared memory takes every tile: it is the kernel that is looked at."""
    return replace(described_device(arch), shared_limit=227 * 1024)


# ---- lengths ---------------------------------------------------------------------------------------------------------
def edges(block: int) -> tuple[int, ...]:
    return 1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1


@pytest.mark.parametrize("causal", [False, True, "top_left"], ids=["full", "causal", "top-left"])
@pytest.mark.parametrize("seq_q", sorted({*edges(FORWARD.block_q), *edges(BACKWARD.block_q)}))
def test_lengths(tile, seq_q, causal):
    lengths = sorted({*edges(FORWARD.block_k), *edges(BACKWARD.block_k)})
    for seed, seq_k in enumerate(lengths, seq_q):
        arch, dtype = TARGETS[seed % len(TARGETS)]
        case = Case("lengths", dtype, batch=(), heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=causal)
        try:
            check(case, arch, (seed,))
        except (AssertionError, kernels.EmulatorError) as error:
            raise AssertionError(f"{dtype} on sm_{arch}, seq_q {seq_q}, seq_k {seq_k}, seed {seed}: {error}") from error


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("window", [(0, 0), (3, 0), (40, None), (None, 5), (17, 30)], ids=str)
def test_window_edges(tile, window, name):
    tile(*TILES[name])
    for seed, (seq_q, seq_k) in enumerate(((33, 31), (15, 65), (65, 17), (1, 64), (64, 1), (32, 32))):
        case = Case("window", "bfloat16", batch=(), heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, window=window)
        case = replace(case, head_dim=24)
        check(case, 80, (seed,))


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(tile, empty):
    check(replace(Case("empty", "float16"), **empty), 80, (0,))


# ---- options ---------------------------------------------------------------------------------------------------------
CORE = ("plain", "causal", "window", "bias", "lengths", "lse-gradient", "groups", "everything")


def option_parameters() -> Iterable:
    for name, target in product(OPTIONS, TARGETS):
        if target == (80, "bfloat16") or (name in CORE if target != (80, "float16") else name == "everything"):
            yield pytest.param(name, target, id=f"{name}-{target_id(target)}")


@pytest.mark.parametrize(("name", "target"), list(option_parameters()))
def test_options(tile, name, target):
    arch, dtype = target
    check(Case(name, dtype, **{"seq_q": 37, "seq_k": 45, **OPTIONS[name]}), arch)


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_options_without_undefined_behaviour(tile, name):
    check(Case(name, "bfloat16", **OPTIONS[name]), 80, sanitize=True)


@pytest.mark.parametrize("name", TILES)
def test_everything_in_every_kind_of_tile(tile, name):
    tile(*TILES[name])
    for seed, (seq_q, seq_k) in enumerate(product((31, 33, 65), (31, 33, 65))):
        options = {
            **OPTIONS["everything"],
            "lengths": (seq_k, seq_k // 2),
            "seq_q": seq_q,
            "seq_k": seq_k,
            "head_dim": 24,
        }
        check(Case("everything", "float16", **options), 80, (seed,))


@pytest.mark.parametrize("values", ["x30", "logits about -200", "logits about -1e5", "dominant key late", "133120"])
def test_values(tile, values):
    case = Case(values, "bfloat16", values=values, causal=True, dlse=True)
    check(case, 80, (0, 1))


def test_scale_of_no_score(tile):
    """Without a positive scale a larger product is no larger score: the running maximum must be one of scores."""
    for seed, scale in enumerate((-5.0, 0.0, 5.0)):
        check(Case("scale", "float16", scale=scale, values="dominant key late", causal=True), 80, (seed,))


@pytest.mark.parametrize("arch", [75, 80])
def test_keys_beyond_the_length_are_never_used(tile, arch):
    case = Case("lengths", "float16", lengths=(20, 0), causal="top_left", dlse=True)
    made = case.make()
    for name in ("k", "v"):
        made[name][0, :, 20:] = np.nan
        made[name][1] = np.inf
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    check_call(call, made["dout"], made["dlse"], arch)


def test_lengths_of_64_bits_and_out_of_range(tile):
    case = Case("lengths", "float16", batch=(3,))
    made = case.make()
    want, got = ([KeyLengths(np.array(n, np.int64), wide=True)] for n in ((0, 17, 45), (-3, 17, 2**40)))
    calls = [problem.describe(made["q"], made["k"], made["v"], modifiers=(m[0],)) for m in (want, got)]
    expectation = kernels.Expectation(calls[0])
    expectation.check_forward(*forward(calls[1], 80))


def test_without_statistics(tile):
    call, _, _ = Case("no lse", "bfloat16").call()
    with_lse, without = (forward(call, 80, with_lse=flag) for flag in (True, False))
    assert without[1] is None
    np.testing.assert_array_equal(with_lse[0], without[0])


# ---- head sizes ------------------------------------------------------------------------------------------------------
@targets
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (33, 7), (40, 24), (8, 80)])
def test_head_sizes(tile, target, head_dim, head_dim_v):
    arch, dtype = target
    check(Case("dims", dtype, batch=(1,), head_dim=head_dim, head_dim_v=head_dim_v, causal=True), arch)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 80), (160, 120), (72, 200)])
def test_chunks_of_columns(tile, monkeypatch, head_dim, head_dim_v, aligned):
    monkeypatch.setattr(mma, "MAX_CHUNK", 48)
    if not aligned:
        tile(backward=BACKWARD._replace(block_q=16))
    case = Case("chunks", "bfloat16", batch=(1,), head_dim=head_dim, head_dim_v=head_dim_v, causal=True, bias="hqk")
    check(case if aligned else replace(case, strides="padded"), large(80))


@pytest.mark.parametrize("arch", [86, 90])
def test_chunks_of_shipped_tiles(arch):
    """Heads so wide that on sm_86 a block has fewer threads than a row has pieces."""
    case = Case("chunks", "float16", batch=(), heads_q=1, heads_k=1, seq_q=17, seq_k=70, head_dim=272, head_dim_v=512)
    check(replace(case, softcap=2.0), arch, (0, 1))


# ---- strides ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("head_dim", [16, 15])
def test_strides(tile, strides, layout, head_dim):
    case = Case("strides", "bfloat16", strides=strides, layout=layout, head_dim=head_dim, mask="bhqk", bias="b1qk")
    check(replace(case, causal=True, dlse=True), 80)


@pytest.mark.parametrize("strides", ["padded", "every second", "reversed", "last axis first"])
@pytest.mark.parametrize("head_dim", [16, 15])
def test_strides_of_results(tile, strides, head_dim):
    check(Case("results", "float16", head_dim=head_dim), 80, place=STRIDES[strides])


@pytest.mark.parametrize("arch", [75, 80])
def test_slices_of_one_array(tile, arch):
    """q, k and v as parts of one projection's result: aligned rows with a stride of their own."""
    rng = np.random.default_rng(0)
    fused = rng.standard_normal((2, 45, 3, 2, 16)).astype(np.float16)
    q, k, v = (fused[:, :, i].swapaxes(1, 2) for i in range(3))
    check_call(problem.describe(q, k, v, causal=True), rng.standard_normal(q.shape).astype(np.float16), None, arch)


@pytest.mark.parametrize("part", ["q", "k", "v", "dout"])
def test_one_unaligned_array_is_enough(tile, part):
    case = Case("unaligned", "float16")
    made = case.make()
    made[part] = STRIDES["padded"](made[part])
    check_call(problem.describe(made["q"], made["k"], made["v"]), made["dout"], None, 80)


BATCHES = {
    "none": ((), None),
    "two": ((3, 2), None),
    "three that cannot be merged": ((2, 3, 2), (2, 1, 0)),
    "four that can be merged to three": ((2, 2, 2, 2), (1, 0, 2, 3)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batch_axes(tile, name):
    batch, order = BATCHES[name]
    case = Case("batch", "bfloat16", batch=batch, seq_q=9, seq_k=11, mask="b1qk", bias="b11k", lengths="random")
    made = case.make()
    if order:  # q's batch axes lie in another order than those of k and v
        made["q"] = transposed(made["q"], order)
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    check_call(call, made["dout"], None, 80)


def transposed(x: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """The same array with the leading axes in another order in memory."""
    axes = (*order, *range(len(order), x.ndim))
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


def test_targets_are_those_of_the_backend():
    assert {dtype for _, dtype in TARGETS} == {d for d in DTYPES if d.endswith("16")}
    assert len(SEEDS) >= 6
