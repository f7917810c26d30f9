"""Largest scores, entropies and sums of columns in the emulator: every option, tile and dtype, under several schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from cuflash import abi, problem, source, tuning
from cuflash.backends import Device, described_device
from cuflash.errors import UnsupportedError
from cuflash.schedules import mma, simt
from tests.cases import OPTIONS, STRIDES, Case
from tests.emulator import Mutant, examine, kernels
from tests.emulator.kernels import SEEDS
from tests.tolerance import Expectation

TARGETS = ((75, "float16"), (80, "bfloat16"), (90, "bfloat16"), (75, "float32"), (80, "float32"), (90, "float64"))
EVERY_OPTION = (80, "bfloat16")
CORE = ("plain", "causal", "lengths", "groups", "everything", "sparse-everything")

FORWARD = tuning.ForwardTile(block_q=32, block_k=16, warps=2, stages=2, blocks_per_sm=1)
COLUMNS = tuning.ColumnsTile(block_q=16, block_k=32, warps=2, stages=2, blocks_per_sm=1)
COLUMNS_SIMT = tuning.ColumnsSimtTile(warps=2, lane_rows=4, thread_rows=2, thread_columns=2)
TILES = {
    "two stages": COLUMNS,
    "one stage": COLUMNS._replace(stages=1),
    "keys in registers": COLUMNS._replace(block_q=32, block_k=64, k_in_registers=True),
    "one warp": COLUMNS._replace(block_k=16, warps=1),
}


@pytest.fixture
def tile(monkeypatch):
    """Sets the only tile that each kernel may choose, small enough for many."""

    def force(columns=COLUMNS):
        monkeypatch.setattr(tuning, "FORWARD_MMA", (FORWARD,))
        monkeypatch.setattr(tuning, "COLUMNS_MMA", (columns,))
        monkeypatch.setattr(tuning, "COLUMNS_SIMT", (COLUMNS_SIMT,))

    force()
    return force


def target_id(target: tuple[int, str]) -> str:
    return f"sm_{target[0]}-{target[1]}"


targets = pytest.mark.parametrize("target", TARGETS, ids=target_id)


def check(case: Case, device: Device | int, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    """Run a case under each schedule and judge all that it returns, which must be the same bits each time."""
    call, _, _ = case.call()
    expectation = Expectation(call)
    results = set()
    for seed in seeds:
        out, lse, found = kernels.statistics(call, device, seed, **options)
        expectation.check_forward(out, lse)
        expectation.check_statistics(found)
        results.add(b"".join(x.tobytes() for x in (out, lse, *found.values())))
    assert len(results) == 1


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, id=f"{name}-{target_id(target)}")
        for name, target in product(OPTIONS, TARGETS)
        if target == EVERY_OPTION or name in CORE
    ],
)
def test_options(tile, name, target):
    arch, dtype = target
    check(Case(name, dtype, **{"seq_q": 37, "seq_k": 45, **OPTIONS[name]}), arch, SEEDS if name in CORE else (0, 3))


@pytest.mark.parametrize("name", TILES)
def test_kinds_of_tiles(tile, name):
    tile(TILES[name])
    for seed, (seq_q, seq_k) in enumerate(product((1, 31, 65), (15, 64, 100))):
        case = Case("tile", "float16", batch=(), heads_q=2, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=True)
        check(replace(case, head_dim=24, window=(40, None)), 80, (seed,))


@targets
def test_shipped_tiles(target):
    arch, dtype = target
    case = Case("shipped", dtype, batch=(), heads_q=1, heads_k=1, seq_q=130, seq_k=200, head_dim=40, causal=True)
    check(case, arch, (1,))


@pytest.mark.parametrize("row", range(len(tuning.COLUMNS_MMA)))
@pytest.mark.parametrize("arch", [75, 80])
def test_every_tile_of_columns(monkeypatch, arch, row):
    made = tuning.COLUMNS_MMA[row]
    monkeypatch.setattr(tuning, "COLUMNS_MMA", (made,))
    case = Case("tile", "float16", batch=(), heads_q=2, heads_k=1, seq_q=made.block_q + 1, seq_k=made.block_k + 1)
    check(replace(case, causal=True), replace(described_device(arch), shared_limit=227 * 1024), (row, row + 1))


@pytest.mark.parametrize("row", range(len(tuning.COLUMNS_SIMT)))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_simt_tile_of_columns(monkeypatch, dtype, row):
    monkeypatch.setattr(tuning, "COLUMNS_SIMT", (tuning.COLUMNS_SIMT[row],))
    case = Case("tile", dtype, batch=(), heads_q=2, heads_k=1, seq_q=70, seq_k=150, head_dim=20, causal=True)
    check(case, 80 if row % 2 else 75, (row, row + 1))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_without_undefined_behaviour(tile, dtype):
    check(Case("everything", dtype, **OPTIONS["everything"]), 80, sanitize=True)


@pytest.mark.parametrize("values", ["x30", "constant", "logits about -200", "logits about -1e5", "dominant key late"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_values(tile, values, dtype):
    """Maxima that lag behind, that grow late, and scores so far that they are subtracted before they are scaled."""
    check(Case(values, dtype, values=values, causal=True, seq_k=70), 80, (0, 1))


def test_scale_of_no_score(tile):
    for seed, (scale, dtype) in enumerate(product((-5.0, 0.0, 5.0), ("float16", "float32"))):
        check(Case("scale", dtype, scale=scale, values="dominant key late", causal=True), 80, (seed,))


@pytest.mark.parametrize("target", [(75, "float16"), (80, "bfloat16"), (80, "float32")], ids=target_id)
def test_a_nan_reaches_what_sees_it(tile, target):
    """A row that sees a NaN is NaN, and so is each key that such a row sees; what is hidden weighs 0 all the same."""
    arch, dtype = target
    case = Case("nan", dtype, batch=(), heads_q=1, heads_k=1, seq_q=45, seq_k=45, causal=True)
    made = case.make()
    made["k"][0, 20] = np.nan
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    _, _, found = kernels.statistics(call, arch)
    for name in ("maximum", "entropy"):
        assert np.isnan(found[name][0, 20:]).all(), name
        assert np.isfinite(found[name][0, :20]).all(), name
    assert np.isnan(found["column_sums"]).all()  # row 44 sees every key
    call = problem.describe(made["q"], made["k"], made["v"], causal=True, window=(0, 0))
    sums = kernels.statistics(call, arch)[2]["column_sums"]
    assert np.flatnonzero(np.isnan(sums[0])).tolist() == [20]
    np.testing.assert_allclose(sums[0, np.arange(45) != 20], 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_keys_beyond_the_length_are_never_used(tile, dtype):
    case = Case("lengths", dtype, lengths=(20, 0), causal="top_left")
    made = case.make()
    for name in ("k", "v"):
        made[name][0, :, 20:] = np.nan
        made[name][1] = np.inf
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    expectation = Expectation(call)
    for seed in SEEDS:
        expectation.check_statistics(kernels.statistics(call, 80, seed)[2])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("names", [(), *((name,) for name in abi.STATISTICS), ("maximum", "column_sums")], ids=str)
def test_each_alone(tile, names, dtype):
    """What is asked for does not change the bits of the rest, and without any the kernels are those of a plain forward."""
    call, _, _ = Case("alone", dtype, **OPTIONS["everything"]).call()
    whole, lse, found = kernels.statistics(call, 80)
    out, own_lse, some = kernels.statistics(call, 80, names=names)
    np.testing.assert_array_equal(out, whole)
    np.testing.assert_array_equal(own_lse, lse)
    assert set(some) == set(names)
    for name in names:
        np.testing.assert_array_equal(some[name], found[name])
    if not names:
        np.testing.assert_array_equal(kernels.forward(call, 80)[0], whole)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strides(tile, strides, dtype):
    case = Case("strides", dtype, strides=strides, layout="bshd", head_dim=15, mask="bhqk", bias="b1qk", causal=True)
    check(case, 80, (0, 3))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (40, 24), (136, 280)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_head_sizes(head_dim, head_dim_v, dtype):
    case = Case("dims", dtype, batch=(), heads_q=2, heads_k=1, head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
    check(case, 80, (0, 5))


@pytest.mark.parametrize("batch", [(), (3, 2), (2, 1, 3)], ids=str)
def test_batch_axes(tile, batch):
    for dtype in ("float16", "float32"):
        case = Case("batch", dtype, batch=batch, seq_q=9, seq_k=11, mask="b1qk", bias="b11k", lengths="random")
        check(case, 80, (0, 2))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(tile, empty, dtype):
    check(replace(Case("empty", dtype), **empty), 80, (0,))


# ---- bugs sown on purpose --------------------------------------------------------------------------------------------
BUGS = [
    Mutant("forward_mma", "sums do not follow the maximum", "alpha[slot] * moved", "alpha[slot] * this->moment[slot]"),
    Mutant("forward_mma", "sums keep their base", "alpha[slot] * moved", "moved"),
    Mutant("forward_mma", "what is hidden is infinite", "max_of(power, kNothing)", "power"),
    Mutant("forward_mma", "the maximum lags", "max_of(this->largest_score[slot], largest[slot])", "m[slot]"),
    Mutant("forward_mma", "an empty row has an entropy", "l[slot] == Real(0) || h < Real(0)", "h < Real(0)"),
    Mutant("forward_mma", "lanes are not summed", "Fragment::row_sum(this->moment[slot])", "this->moment[slot]"),
    Mutant(
        "forward_columns_mma",
        "the next tile overwrites this one",
        "load_queries(next, stage ^ 1)",
        "load_queries(next, stage)",
    ),
    Mutant("forward_columns_mma", "queries are read before they arrive", "cp_async_wait_group<0>();", ""),
    Mutant(
        "forward_columns_mma", "nobody waits for the others", "__syncthreads();  // this tile has", "// this tile has"
    ),
    Mutant("forward_columns_mma", "lanes are not summed", "Fragment::row_sum(sum[slot])", "sum[slot]"),
    Mutant(
        "forward_columns_mma",
        "all heads have the first one's lse",
        "(p.lse.data) + place.offset(p.lse)",
        "(p.lse.data)",
    ),
    Mutant(
        "forward_columns_simt",
        "the next lse overwrites this one",
        "load_queries(next, buffer ^ 1)",
        "load_queries(next, buffer)",
    ),
    Mutant(
        "forward_columns_simt", "the next queries come too early", "__syncthreads();  // queries are", "// queries are"
    ),
    Mutant(
        "forward_columns_simt", "nobody waits for the others", "__syncthreads();  // this tile has", "// this tile has"
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.kernel}: {bug.description}")
def test_bug_is_noticed(tile, bug):
    dtype = "float32" if bug.kernel.endswith("simt") else "float16"
    case = Case("bug", dtype, heads_k=1, causal=True, seq_q=70, seq_k=53, head_dim=24, scale=1.0)
    call, _, _ = replace(case, values="dominant key late").call()
    expectation = Expectation(call)
    found = []

    def note(variant):
        found.append(variant)
        return source.build(variant)

    expectation.check_statistics(kernels.statistics(call, 80, text=note)[2])
    variant = next(v for v in found if v.kernel == bug.kernel)

    def run(text, seed):
        _, _, results = kernels.statistics(call, 80, seed, text=lambda v: text if v == variant else source.build(v))
        expectation.check_statistics(results)

    findings = examine(bug, source.build(variant), run, SEEDS)
    assert findings.noticed, findings


def test_hopper_leaves_them_to_mma():
    call, _, _ = Case("hopper", "bfloat16", head_dim=64).call()
    with pytest.raises(
        UnsupportedError, match="wgmma: it computes no statistics beside lse, and entropy was asked for"
    ):
        kernels.statistics(call, 90, names=("entropy",), requested="wgmma")


@pytest.mark.parametrize("limit", [64, 99, 163, 227])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_there_is_a_tile_for_every_head(limit, dtype):
    for head_dim, options in product((1, 16, 40, 64, 128, 200, 256, 512), ({}, OPTIONS["everything"])):
        call = Case("heads", dtype, **{**options, "head_dim": head_dim, "head_dim_v": 16}).call()[0]
        schedule = mma if dtype == "float16" else simt
        config = schedule.columns(call.problem, limit * 1024, True)
        assert config.shared_bytes(np.dtype(dtype).itemsize) <= limit * 1024
        assert config.head_dim >= head_dim
