"""float32 on tensor cores in the emulator: tiles, options, head sizes and strides, under several schedules.

The kernel of plain float32 that answers the heads which do not suit is left out where all suit: what it would have to write is
then missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuflash import problem, tuning
from cuflash.backends import described_device
from cuflash.errors import UnsupportedError
from cuflash.schedules import split
from tests.cases import DROPOUT, OPTIONS, SINKS, STRIDES, Case
from tests.emulator import Mutant, kernels, must_be_noticed
from tests.emulator.kernels import SEEDS
from tests.tolerance import Expectation

LARGE = replace(described_device(80), shared_limit=227 * 1024)

TILE = tuning.ForwardSplitTile(32, 32, 2, 2, 1, max_chunk=64, score_part=16)
TILES = {
    "two stages": TILE,
    "one stage": TILE._replace(stages=1, score_part=32),
    "two rows of blocks": TILE._replace(block_q=64, block_k=16),
}


@pytest.fixture
def tile(monkeypatch):
    """Sets the only tile that may be chosen."""

    def force(forward=TILE):
        monkeypatch.setattr(tuning, "FORWARD_SPLIT", (forward,))

    force()
    return force


def check(case: Case, seeds: Iterable[int] = SEEDS, *, left: int = 0, device: Any = 80, **options: Any) -> None:
    """Run the forward of a case under each schedule and judge what it returns; so many heads of keys are left to simt."""
    call, _, _ = case.call()
    check_call(call, seeds, left=left, device=device, **options)


def check_call(call: problem.Call, seeds: Iterable[int], *, left: int = 0, device: Any = 80, **options: Any) -> None:
    expectation, found = Expectation(call), []
    for seed in seeds:
        run = {"requested": "mma", "watch": lambda arrays: found.append(decisions(call, arrays)), **options}
        if not left:
            run["without"] = ("forward_simt",)
        expectation.check_forward(*kernels.forward(call, device, seed, **run))
        assert (found[-1] == 0).sum() == left, f"heads that planes stand for: {found[-1]}"


def decisions(call: problem.Call, arrays: Any) -> np.ndarray:
    """Whether planes stand for each head of keys."""
    shape = call.problem
    first = 2 * shape.batch_size * (shape.heads_q + shape.heads_k)
    return arrays["magnitudes"].view(np.int32)[first : first + shape.batch_size * shape.heads_k].copy()


# ---- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIONS)
def test_options(tile, name):
    check(Case(name, **{"seq_q": 37, "seq_k": 45, **OPTIONS[name]}))


@pytest.mark.parametrize("name", ["sinks-everything", "dropout-everything"])
def test_options_behind_the_scores(tile, name):
    check(Case(name, **{**SINKS, **DROPOUT}[name]))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_tf32(tile, name):
    """The error is that of numbers with 11 bits."""
    case = Case(name, **{"seq_q": 37, "seq_k": 45, **OPTIONS[name]})
    made = case.make()
    call = problem.describe(made["q"], made["k"], made["v"], precision="tf32", **made["options"])
    expectation = Expectation(call)
    for seed in SEEDS:
        out, lse = kernels.forward(call, 80, seed, requested=None, without=("forward_simt",))
        seen = np.isfinite(expectation.lse)
        errors = abs(out - expectation.out).max(), abs(lse - expectation.lse)[seen].max()
        assert all(1e-5 < error < 4e-3 for error in errors), errors


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_statistics(tile, name):
    call, _, _ = Case(name, **OPTIONS[name]).call()
    expectation = Expectation(call)
    for seed in SEEDS:
        out, lse, found = kernels.statistics(call, 80, seed, requested="mma")
        expectation.check_forward(out, lse)
        expectation.check_statistics(found)


# ---- tiles, lengths, head sizes, strides -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TILES)
def test_kinds_of_tiles(tile, name):
    tile(TILES[name])
    for seed, (seq_q, seq_k) in enumerate(((31, 33), (33, 97), (65, 16), (1, 1), (64, 64), (17, 31))):
        case = Case("tile", batch=(), heads_q=2, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=True)
        check(case, (seed, seed + 1), sanitize=name == "one stage")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_shipped_tiles(head_dim):
    case = Case("shipped", batch=(), heads_q=2, heads_k=1, seq_q=130, seq_k=100, head_dim=head_dim)
    check(replace(case, causal="top_left"), (1, 2), device=90)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (40, 24), (24, 200), (256, 256)])
def test_head_sizes(tile, head_dim, head_dim_v):
    case = Case("dims", batch=(1,), head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
    check(case, (0, 4), device=LARGE)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", STRIDES)
def test_strides(tile, name, layout):
    check(Case(name, strides=name, layout=layout, head_dim=20), (2, 5))


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(tile, empty):
    call, _, _ = replace(Case("empty"), **empty).call()
    Expectation(call).check_forward(*kernels.forward(call, 80, 0, requested="mma", without=("forward_simt",)))


def test_tiles_of_several_parts(tile, monkeypatch):
    """A head whose rows are more than its tiles keep."""
    monkeypatch.setattr(split, "SPLIT_PIECES", 1)
    monkeypatch.setattr(split, "SPLIT_PARTS", 0)
    case = Case("long", batch=(), heads_q=1, heads_k=1, seq_q=5, seq_k=700, head_dim=4)
    for multiprocessors in (1, 4):
        check(case, (0, 1), device=replace(described_device(80), multiprocessors=multiprocessors))


# ---- blocks that wait for each other --------------------------------------------------------------------------------------
@pytest.fixture
def several(monkeypatch):
    """A call whose heads are split in several tiles, one of which planes do not stand for; its device, and how planes are written."""
    monkeypatch.setattr(split, "SPLIT_PIECES", 1)
    monkeypatch.setattr(split, "SPLIT_PARTS", 0)
    made = Case("tiles", batch=(2,), heads_q=4, heads_k=2, seq_q=90, seq_k=75, head_dim=64).make()
    made["k"][0, 0, 3] *= np.float32(1e-6)
    call = problem.describe(*(made[n] for n in "qkv"))

    def written(seed, **options):
        found = []

        def keep(arrays):
            found.append((arrays["planes"].copy(), decisions(call, arrays)))

        others = ("forward_split", "forward_simt")
        kernels.forward(call, WIDE, seed, requested="mma", without=others, watch=keep, **options)
        return found[0]

    return written


WIDE = replace(described_device(80), multiprocessors=16)  # so that heads may have several tiles


@pytest.mark.parametrize("residents", [2, 5, 16])
def test_blocks_that_run_at_once(several, residents):
    """With one at a time all tiles but the last of a head are given up, with all of them none."""
    planes, suited = several(0)
    assert suited.tolist() == [0, 1, 1, 1]
    for seed in SEEDS:
        found = several(seed, residents=residents)
        np.testing.assert_array_equal(found[0], planes)
        np.testing.assert_array_equal(found[1], suited)


BUGS = (
    ("what is given up is nobody's", "posts + work.tile_of_unit()) | kGivenUp)", "posts + work.tile_of_unit()))", 1),
    ("its mark is taken for a magnitude", "u32(word >> 31) & 0x7fffffffu}", "u32(word >> 31)}", 1),
    ("exponents are those of a tile", "found.join(of_a_word(word));", "if (tile == 0) found.join(of_a_word(word));", 1),
    ("blocks wait for nobody", "there = there && word != 0;", "", 16),
    ("a head is decided on before all is known", "== 2 + of_queries - 1", "== 2 + of_queries - 2", 1),
    ("a unit is finished before all blocks are done", "== work.unit_tiles() - 1", "== work.unit_tiles() - 2", 16),
)


@pytest.mark.parametrize(("name", "old", "new", "residents"), BUGS, ids=lambda x: str(x).replace(" ", "_")[:40])
def test_bug_is_noticed(several, name, old, new, residents):
    want = several(0)

    def run(text, seed):
        for found, right in zip(several(seed, text=text, residents=residents), want, strict=True):
            np.testing.assert_array_equal(found, right)

    must_be_noticed(Mutant("split_planes", name, old, new), run, SEEDS)


# ---- values ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", ["x30", "logits about -200", "logits about -1e5", "dominant key late", "133120"])
def test_values(tile, values):
    check(Case(values, values=values, causal=True), (0, 1))


def scaled(**factors: Any) -> problem.Call:
    """A call of two batch entries and two heads of keys; a factor multiplies what an index of an array picks."""
    made = Case("scaled", heads_q=4, causal=True).make()
    for name, (index, factor) in factors.items():
        made[name][index] *= np.float32(factor)
    return problem.describe(made["q"], made["k"], made["v"], **made["options"])


WHOLE, ROW = (0, 0), (0, 0, 3)
SUITED = {
    "tiny": {"v": (WHOLE, 1e-30)},
    "huge": {"v": (WHOLE, 1e30)},
    "opposite": {"q": ((0, slice(2)), 1e-30), "k": (WHOLE, 1e30)},
    "small rows": {"q": (ROW, 1e-3), "k": (ROW, 1e-3), "v": (ROW, 1e-3)},
    "zeros": {"q": (ROW, 0), "k": (WHOLE, 0), "v": (ROW, 0)},
    "largest": {"v": (WHOLE, 1e38)},
}
UNSUITED = {
    "small row of q": {"q": ((0, 1, 3), 1e-6)},
    "small row of k": {"k": (ROW, 1e-6)},
    "large row of v": {"v": (ROW, 1e6)},
    "scores without exponent": {"q": ((0, slice(2)), 1e-30), "k": (WHOLE, 1e-30)},
    "infinity": {"v": ((0, 0, 3, 5), np.inf)},
    "not a number": {"q": ((0, 0, 3, 5), np.nan)},
}


@pytest.mark.parametrize("name", SUITED)
def test_heads_that_planes_stand_for(tile, name):
    check_call(scaled(**SUITED[name]), SEEDS)


@pytest.mark.parametrize("name", UNSUITED)
def test_heads_that_are_left_to_plain_float32(tile, name):
    check_call(scaled(**UNSUITED[name]), SEEDS, left=1)


def test_keys_beyond_the_length_decide_nothing(tile):
    made = Case("lengths", lengths=(20, 0), causal="top_left").make()
    for name in ("k", "v"):
        made[name][0, :, 20:] = np.nan
        made[name][1] = np.inf
    check_call(problem.describe(made["q"], made["k"], made["v"], **made["options"]), SEEDS)


def test_small_numbers_of_a_row_keep_their_bits(tile):
    """Down to 2^-28 of the largest number of a head they are good to a unit of float32."""
    made = Case("columns", seq_q=33, seq_k=45, head_dim=16).make()
    made["q"][...], made["k"][...] = 0, 0
    made["q"][..., :45, :], made["k"][:, :, :, 0] = 1, -200
    made["k"][:, :, 7, 0] = 0  # on which all weight lies
    made["v"][:, :, 7] = np.linspace(1, 2, 16, dtype=np.float32) * np.exp2(-np.arange(16, dtype=np.float32) * 1.6)
    call = problem.describe(made["q"], made["k"], made["v"], scale=1.0)
    out, _ = kernels.forward(call, 80, 1, requested="mma", without=("forward_simt",))
    want = np.broadcast_to(made["v"][:, :, 7:8], out.shape)
    assert (abs(out - want) <= 1.3e-7 * abs(want)).all()


def test_repeats(tile):
    """Equal bits under every schedule."""
    call, _, _ = Case("repeats", heads_q=4, causal=True).call()
    first = kernels.forward(call, 80, 0, requested="mma")
    for seed in SEEDS:
        for x, y in zip(first, kernels.forward(call, 80, seed, requested="mma"), strict=True):
            np.testing.assert_array_equal(x, y)


def test_what_is_refused():
    call, _, _ = Case("wide", head_dim=264).call()
    with pytest.raises(UnsupportedError, match="mma: head_dim 264 is above 256 for float32"):
        kernels.forward(call, 80, requested="mma")
    with pytest.raises(UnsupportedError, match=r"float32 needs compute capability 8\.0, a device .* is older"):
        kernels.forward(Case("old").call()[0], 75, requested="mma")
