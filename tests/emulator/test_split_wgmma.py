"""float32 by Hopper's warpgroup products in the emulator: tiles, options, lengths, head sizes and values.

What it has in common with the same by mma.sync is tested as in `test_split.py`, whose calls these are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from cuflash import problem, tuning
from cuflash.backends import select
from cuflash.errors import UnsupportedError
from cuflash.plan import places_of
from cuflash.schedules.split_wgmma import MAX_SPLIT
from tests.cases import DROPOUT, OPTIONS, SINKS, STRIDES, Case
from tests.emulator import Mutant, kernels, must_be_noticed, test_split
from tests.emulator.kernels import SEEDS
from tests.emulator.mutants import Sources
from tests.emulator.test_split import SUITED, UNSUITED, scaled
from tests.emulator.test_wgmma import edges, hopper
from tests.tolerance import Expectation

MANY_SEEDS = range(12)

TILE = tuning.ForwardSplitWgmmaTile(2, 128, 128, 32, 2)
TILES = {
    "two stages": TILE,
    "three stages": TILE._replace(block_k=16, stages=3),
    "three warpgroups": TILE._replace(block_q=192, block_k=16),
    "chains and turns": TILE._replace(block_q=192, block_k=64, turns=True),
}


@pytest.fixture
def tile(monkeypatch):
    """Sets the only tile that may be chosen."""

    def force(row=TILE):
        monkeypatch.setattr(tuning, "FORWARD_SPLIT_WGMMA", (row, row._replace(planes=1)))

    force()
    return force


def check(case: Case, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    check_call(case.call()[0], seeds, **options)


def check_call(call: problem.Call, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    test_split.check_call(call, seeds, device=hopper(), requested="wgmma", **options)


# ---- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIONS)
def test_options(tile, name):
    lengths = {"seq_q": 141, "seq_k": 77} if "more-queries" in name else {"seq_q": 131, "seq_k": 77}
    check(Case(name, **{**OPTIONS[name], **lengths}))


@pytest.mark.parametrize("name", ["sinks-everything", "dropout-everything"])
def test_options_behind_the_scores(tile, name):
    check(Case(name, **{**SINKS, **DROPOUT}[name]))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_tf32(tile, name):
    """The error is that of numbers with 11 bits."""
    made = Case(name, **{**OPTIONS[name], "seq_q": 131, "seq_k": 77}).make()
    call = problem.describe(made["q"], made["k"], made["v"], precision="tf32", **made["options"])
    expectation = Expectation(call)
    for seed in SEEDS:
        out, lse = kernels.forward(call, hopper(), seed, requested="wgmma", without=("forward_simt",))
        seen = np.isfinite(expectation.lse)
        errors = abs(out - expectation.out).max(), abs(lse[seen] - expectation.lse[seen]).max()
        assert all(1e-5 < error < 4e-3 for error in errors), errors


# ---- tiles, lengths, head sizes, strides -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TILES)
def test_schedules(tile, name):
    """Rows and keys that end inside a tile, warpgroups that see fewer keys than others, some tiles without any key."""
    tile(TILES[name])
    case = Case("schedules", heads_k=1, seq_q=300, seq_k=150, lengths=(150, 37), window=(100, 0))
    check(case, MANY_SEEDS)
    check(replace(case, seq_q=200, causal="top_left", window=None), (3, 8), sanitize=name == "two stages")


@pytest.mark.parametrize("causal", [False, True, "top_left"], ids=["full", "causal", "top-left"])
def test_lengths(tile, causal):
    seeds = count()
    for seq_q in (1, 63, 65, 129, 257):
        for seq_k in sorted({*edges(TILE.block_k), 130}):
            case = Case("lengths", batch=(), heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=causal)
            try:
                check(case, (next(seeds),))
            except (AssertionError, kernels.EmulatorError) as error:
                raise AssertionError(f"seq_q {seq_q}, seq_k {seq_k}: {error}") from error


@pytest.mark.parametrize("row", tuning.FORWARD_SPLIT_WGMMA, ids=lambda row: "-".join(map(str, row[:-1])))
def test_shipped_tiles(monkeypatch, row):
    monkeypatch.setattr(tuning, "FORWARD_SPLIT_WGMMA", (row,))
    case = Case("shipped", batch=(), heads_q=1, heads_k=1, seq_q=row.block_q + 1, seq_k=2 * row.block_k + 1)
    made = replace(case, head_dim=row.max_head_dim).make()
    call = problem.describe(*(made[n] for n in "qkv"), precision="tf32" if row.planes == 1 else None, causal=True)
    expectation = Expectation(call)
    for seed in (1, 2):
        out, _ = kernels.forward(call, hopper(), seed, requested="wgmma", without=("forward_simt",))
        assert abs(out - expectation.out).max() < (4e-3 if row.planes == 1 else 2e-6)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (40, 24), (24, 120), (128, 80)])
def test_head_sizes(tile, head_dim, head_dim_v):
    check(Case("dims", batch=(1,), head_dim=head_dim, head_dim_v=head_dim_v, causal=True), (0, 4))


@pytest.mark.parametrize("name", STRIDES)
def test_strides(tile, name):
    """Tensor maps describe planes: however the arrays lie, none is refused."""
    for seed, layout in ((2, "bhsd"), (5, "bshd")):
        check(Case(name, strides=name, layout=layout, head_dim=20), (seed,))


# ---- values ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", ["x30", "logits about -200", "logits about -1e5", "dominant key late", "133120"])
def test_values(tile, values):
    check(Case(values, values=values, causal=True), (1,))
    check(Case(values, values=values, seq_q=150, seq_k=183), (2, 3))


@pytest.mark.parametrize("name", SUITED)
def test_heads_that_planes_stand_for(tile, name):
    check_call(scaled(**SUITED[name]), (1, 4))


@pytest.mark.parametrize("name", UNSUITED)
def test_heads_that_are_left_to_plain_float32(tile, name):
    check_call(scaled(**UNSUITED[name]), (0, 5), left=1)


def test_keys_beyond_the_length_are_not_read(tile):
    """Nobody has written their planes, which are NaN here."""
    made = Case("lengths", seq_q=140, seq_k=90, lengths=(20, 0), causal="top_left").make()
    for name in ("k", "v"):
        made[name][0, :, 20:] = np.nan
        made[name][1] = np.inf
    check_call(problem.describe(made["q"], made["k"], made["v"], **made["options"]), MANY_SEEDS)


def test_repeats(tile):
    """Equal bits under every schedule."""
    call, _, _ = Case("repeats", heads_q=4, seq_q=150, causal=True).call()
    first = kernels.forward(call, hopper(), 0, requested="wgmma")
    for seed in SEEDS:
        for x, y in zip(first, kernels.forward(call, hopper(), seed, requested="wgmma"), strict=True):
            np.testing.assert_array_equal(x, y)


# ---- bugs that must be noticed -------------------------------------------------------------------------------------------
BUGS = (
    (
        "values are read before they are there",
        "issue_low_keys();\n      v_at.wait_full(shared.values);\n      issue_low_weights();",
        "issue_low_keys();\n      issue_low_weights();",
    ),
    (
        "weights change under a product",
        "wgmma_wait_group<0>();\n    take_output();\n    if (moved)",
        "take_output();\n    if (moved)",
    ),
    ("sums of low parts keep their scale", "c[i] *= 1.f / kLowScale;", "c[i] *= 2.f / kLowScale;"),
    ("the low part of the weights is forgotten", "c, a.plane[1], b.plane(0, slot)", "c, a.plane[0], b.plane(0, slot)"),
    ("the low part of the keys is forgotten", "c, a.plane(0), b.plane(1, slot)", "c, a.plane(0), b.plane(0, slot)"),
    (
        "values that nobody has written meet weights of 0",
        "if (place.key_count >= min(range.end, p.seq_k)) return;",
        "return;",
    ),
    ("the output keeps its base", "if (moved) softmax.rescale<OutFragment>(o, alpha);", ""),
    ("what is not read is not handed back", "k_at.release(shared.keys);\n        v_at", "v_at"),
)
BUGS_OF_CHAINS = (
    ("a chain goes on where another one has ended", "slot), first > 0, first, end", "slot), false, first, end"),
    (
        "a chain is taken before it is there",
        "wgmma_wait_group<1>();\n      take_chain();\n    }\n    issue_output",
        "take_chain();\n    }\n    issue_output",
    ),
    ("who has ended takes no turn", "turns.take();\n        turns.pass();", ""),
)


@pytest.mark.parametrize(
    ("name", "bug"),
    [*(("three warpgroups", bug) for bug in BUGS), *(("chains and turns", bug) for bug in BUGS_OF_CHAINS)],
    ids=lambda x: (x if isinstance(x, str) else x[0]).replace(" ", "_"),
)
def test_bug_is_noticed(tile, name, bug):
    tile(TILES[name])
    case = Case("late", seq_q=141, seq_k=110, values="dominant key late", causal="top_left", lengths=(110, 70))
    made = case.make()
    for name in ("k", "v"):
        made[name][1, :, 70:] = np.nan
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    kernel, expectation = "forward_split_wgmma", Expectation(call)

    def run(text: Sources, seed: int) -> None:
        expectation.check_forward(*kernels.forward(call, hopper(), seed, requested="wgmma", text=text))

    must_be_noticed(Mutant(kernel, *bug), run, SEEDS)


# ---- choice ------------------------------------------------------------------------------------------------------------
def chosen(case: Case, *, backward: bool = False, **at: Any) -> str:
    call, _, _ = case.call()
    places = dict(places_of(call.problem, {"q": call.q, "k": call.k, "v": call.v, **at}))
    return select(call.problem, hopper(), places, backward=backward)[0].name


def test_what_is_chosen():
    long = Case("long", batch=(), heads_q=1, heads_k=1, seq_q=256, seq_k=256, head_dim=8)
    assert chosen(long) == "wgmma"
    assert chosen(long, backward=True) == ("wgmma" if MAX_SPLIT else "mma")
    assert chosen(replace(long, head_dim=129), backward=True) == "mma"
    assert chosen(long, maximum=np.zeros((1, 256), np.float32)) == "mma"
    assert chosen(replace(long, head_dim=136)) == "mma"
    assert chosen(replace(long, lengths=(200,), batch=(1,), head_dim=128)) == "wgmma"
    assert chosen(replace(long, seq_k=255)) == "simt"
    assert chosen(replace(long, seq_k=0)) == "simt"


def test_what_is_refused():
    call, _, _ = Case("wide", head_dim=136).call()
    with pytest.raises(UnsupportedError, match="no tile of float32 by wgmma has room; backend='mma' takes it"):
        kernels.forward(call, hopper(), requested="wgmma")
    call, dout, dlse = Case("backward", head_dim=136).call()
    out, lse = kernels.forward(call, hopper(), requested="mma")
    with pytest.raises(UnsupportedError, match="wgmma: its backward of float32 takes heads of"):
        kernels.backward(call, out, lse, dout, dlse, hopper(), requested="wgmma")
