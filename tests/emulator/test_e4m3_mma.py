"""Forwards of 8-bit inputs by mma.sync in the emulator: every tile, the values' steps, scales, options, lengths, strides, head sizes."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash import problem, tuning
from cuflash.tuning import ForwardTile
from tests.cases import STRIDES, Case
from tests.emulator import kernels
from tests.emulator.build import BuildError
from tests.emulator.e4m3 import (
    CASE,
    E4M3,
    check_weights_far_below_the_largest,
    check_what_no_row_sees,
    check_who_sees_a_nan,
    widened,
    widened_call,
)
from tests.emulator.kernels import SEEDS
from tests.emulator.mutants import Mutant, sown
from tests.emulator.test_wgmma import row_id
from tests.tolerance import Expectation

TILES = {
    "two stages": ForwardTile(32, 32, 2, 2, 1),
    "one stage": ForwardTile(64, 64, 2, 1, 1),
    "queries in registers": ForwardTile(64, 32, 4, 2, 1, q_in_registers=True),
}
tiles = pytest.mark.parametrize("name", TILES)


@pytest.fixture
def tile(monkeypatch):
    """Sets the only tile that may be chosen."""

    def force(name="two stages"):
        monkeypatch.setattr(tuning, "FORWARD_MMA_E4M3", (TILES[name],))

    force()
    return force


def check(case: Case, seeds=SEEDS, arch=89, **options):
    check_call(case.call()[0], seeds, arch, **options)


def check_call(call, seeds=SEEDS, arch=89, **options):
    kernels.check_call(call, None, None, arch, seeds, requested="mma", with_backward=False, **options)


def forward(call, seed=0, **options):
    return kernels.forward(call, 89, seed, requested="mma", **options)


# ---- tiles and lengths -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", tuning.FORWARD_MMA_E4M3, ids=row_id)
def test_every_tile(monkeypatch, row):
    monkeypatch.setattr(tuning, "FORWARD_MMA_E4M3", (row,))
    for seed, (extra_q, extra_k) in enumerate(((-1, 1), (1, -1))):
        check(replace(CASE, batch=(), seq_q=row.block_q + extra_q, seq_k=2 * row.block_k + extra_k), (3 * seed,))


@pytest.mark.parametrize(("arch", "head_dim"), [(89, 128), (90, 64), (120, 256)])
def test_what_is_chosen(arch, head_dim):
    check(replace(CASE, batch=(1,), head_dim=head_dim, causal=True), (0, 4), arch)


@tiles
def test_lengths(tile, name):
    tile(name)
    block_q, block_k = TILES[name].block_q, TILES[name].block_k
    seed = 0
    for seq_q in (1, 17, block_q + 1):
        for seq_k in (1, 17, block_k - 1, block_k, 3 * block_k + 5):
            seed += 1
            case = replace(CASE, batch=(), heads_q=1, seq_q=seq_q, seq_k=seq_k, causal=seed % 2 == 0)
            try:
                check(case, (seed,))
            except (AssertionError, kernels.EmulatorError) as error:
                raise AssertionError(f"seq_q {seq_q}, seq_k {seq_k}: {error}") from error


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(tile, empty):
    check(replace(CASE, **empty), (0,))


@tiles
def test_schedules(tile, name):
    tile(name)
    check(replace(CASE, lengths=(75, 37), window=(50, 0)))


def test_every_seed_gives_the_same_bits(tile):
    call, _, _ = replace(CASE, causal=True).call()
    assert len({forward(call, seed)[0].tobytes() for seed in SEEDS}) == 1


# ---- head sizes and strides ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(8, 3), (33, 17), (64, 64), (72, 130), (128, 128), (256, 256), (40, 300)]
)
def test_head_sizes(tile, head_dim, head_dim_v):
    """Widths that end inside a step of 32 columns, a piece of 16 bytes, and a word of 4; the last in two chunks."""
    case = replace(CASE, batch=(1,), seq_q=70, head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
    check_call(widened_call(case), (0, 2), place=widened)
    check(case, (4,))


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("name", "qkv")
def test_arrays_may_lie_anyhow(tile, name, strides):
    made = CASE.make()
    arrays = {**made, name: STRIDES[strides](made[name])}
    check_call(problem.describe(*(arrays[n] for n in "qkv"), **made["options"]), (0, 1))


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
    "dropout": {"dropout": 0.3, "lengths": (60, 75)},
    "documents and blocks": {"documents": "packed", "blocks": "bhqk", "lengths": (75, 40)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(tile, name):
    check(replace(CASE, **OPTIONS[name]))


def test_every_option_at_once():
    """In the tile that is chosen for it."""
    options = {name: x for parts in OPTIONS.values() for name, x in parts.items()}
    check(replace(CASE, heads_q=4, heads_k=2, **options))


@pytest.mark.parametrize("values", ["x3", "x30", "constant", "logits about -200", "dominant key late"])
def test_values(tile, values):
    check(replace(CASE, batch=(), values=values, seq_k=250, scales=(None, None, None)), (0, 5))


def test_weights_far_below_the_largest_count(tile):
    check_weights_far_below_the_largest(forward)


# ---- what does not count ---------------------------------------------------------------------------------------------
@tiles
def test_what_no_row_sees_never_reaches_a_result(tile, name):
    tile(name)
    check_what_no_row_sees(forward, queries=150)


def test_a_nan_reaches_the_rows_that_see_it(tile):
    check_who_sees_a_nan(forward)


# ---- bugs sown on purpose --------------------------------------------------------------------------------------------
BUGS = [
    Mutant("forward_mma", "unseen values stay", "if (keys.begin >= seen.begin && min(keys.end", "if (min(keys.end"),
    Mutant(
        "forward_mma",
        "values are cleared while they are read",
        "      __syncthreads();\n    }\n  };",
        "    }\n  };",
    ),
    Mutant("forward_mma", "values are those of the first block", "values + i64(block)", "values + i64(0)"),
    Mutant("forward_mma", "all heads have the first one's values", "work.place.entry(p)", "0"),
    Mutant("forward_mma", "halves of a step are exchanged", "pair / 8 * Tile", "(pair / 8 ^ 1) * Tile"),
    Mutant("forward_mma", "rows of a half are out of order", "(c[0], c[1], c[4], c[5])", "(c[0], c[4], c[1], c[5])"),
    Mutant("forward_mma", "scores have no scale", "softmax.step<OutFragment>(s, o, units)", "softmax.step<OutFragment>(s, o, p)"),
    Mutant("forward_mma", "values have no scale", " * value_scale(done_scales)", ""),
    Mutant("forward_mma", "lse has no scale", "done.place, done.queries, units)", "done.place, done.queries, p)"),
    Mutant("forward_values", "keys that do not exist are read", "if (row >= p.seq_k) return 0;", ""),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.description)
def test_bug_is_noticed(tile, bug):
    made = replace(CASE, window=(30, 0), seq_q=75, seq_k=140).make()
    made["k"][..., :34, :] = made["v"][..., :34, :] = np.nan
    call = problem.describe(*(made[name] for name in "qkv"), **made["options"])
    expectation = Expectation(replace_unseen(call))

    text = sown(bug.old, bug.new, bug.kernel, bug.count)

    def run():
        for seed in SEEDS:
            expectation.check_forward(*forward(call, seed, text=text))

    expectation.check_forward(*forward(call))
    with pytest.raises((AssertionError, kernels.EmulatorError)) as noticed:
        run()
    assert not isinstance(noticed.value, BuildError)


def replace_unseen(call: problem.Call) -> problem.Call:
    """The call with zeros in place of NaN."""
    return replace(call, k=np.nan_to_num(call.k).astype(E4M3), v=np.nan_to_num(call.v).astype(E4M3))
