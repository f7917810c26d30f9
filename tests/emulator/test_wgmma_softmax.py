"""The guessing softmax of Hopper's forward: scores that hold a guess, that need a repair, and that lose it."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from cuflash import source, tuning
from cuflash.backends import Device
from cuflash.modifiers import KeyLengths
from cuflash.problem import Call, describe
from cuflash.schedules import wgmma
from tests.cases import DTYPES
from tests.emulator import Mutant, examine, kernels
from tests.emulator.kernels import SEEDS
from tests.emulator.mutants import mutate
from tests.rising import LARGEST, PATTERNS, made
from tests.tolerance import Expectation

DEVICE = Device(90, 227 * 1024, multiprocessors=2)  # two blocks, so that each takes many tiles
#: head sizes that a tile takes and that end inside a panel, by its largest
SIZES = {64: (48, 48), 96: (72, 88), 128: (80, 80), 192: (144, 80), 256: (208, 208)}
TILES = {
    f"{tile.block_q}x{tile.block_k}-d{tile.max_head_dim}": (tile, SIZES[tile.max_head_dim])
    for tile in tuning.FORWARD_WGMMA
}
SMALL = tuning.ForwardWgmmaTile(64, 128, 32, 2, 2, continuous=True)
DEEP = SMALL._replace(stages=6)
FETCHED = SMALL._replace(query_stages=1, continuous=False, out_panels=1)
PLACED = SMALL._replace(continuous=False, in_place=True)
BIASED = SMALL._replace(bias_stages=3)


@pytest.fixture
def force(monkeypatch):
    """Sets the only tile that may be chosen."""

    def force(tile):
        for table in ("FORWARD_WGMMA", "FORWARD_WGMMA_BIAS", "FORWARD_WGMMA_ROW"):
            monkeypatch.setattr(tuning, table, (tile._replace(max_keys=1 << 31, max_weight=1 << 31),))

    return force


@cache
def plain_call(tile, sizes, dtype: str, names=tuple(PATTERNS), of_rows: bool = True) -> tuple[Call, Expectation]:
    """Where the tile is for a bias, beside one, which may be the same for all rows."""
    options = {}
    seq_q, seq_k = tile.block_q - 5, 3 * tile.block_k + (8 if tile.bias_stages else 7)
    if tile.bias_stages:
        heads = sum(dtype in PATTERNS[name].dtypes for name in names)
        shape = (1, heads, seq_q if of_rows else 1, seq_k)
        options["bias"] = np.random.default_rng(1).standard_normal(shape).astype(DTYPES[dtype])
    call = made(names, tile.block_k, sizes, dtype, seq_q, seq_k, **options)
    return call, Expectation(call)


def check(call: Call, expectation: Expectation, seeds) -> None:
    for seed in seeds:
        expectation.check_forward(*kernels.forward(call, DEVICE, seed, requested="wgmma"))


# ---- right for every input -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("name", TILES)
def test_every_pattern(force, name, dtype):
    tile, sizes = TILES[name]
    force(tile)
    check(*plain_call(tile, sizes, dtype), SEEDS[list(LARGEST).index(dtype) :: 2])


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("tile", [SMALL, DEEP, FETCHED, PLACED], ids=str)
def test_every_pattern_under_every_schedule(force, tile, dtype):
    force(tile)
    check(*plain_call(tile, (64, 64), dtype), SEEDS)


@pytest.mark.parametrize("of_rows", [True, False], ids=["blocks", "rows"])
@pytest.mark.parametrize("dtype", LARGEST)
def test_every_pattern_beside_a_bias(force, dtype, of_rows):
    force(BIASED)
    check(*plain_call(BIASED, (64, 64), dtype, of_rows=of_rows), SEEDS)


#: keyword arguments of a call by name, from the tile, with the lengths that they are for
MASKS = {
    # the first row of a tile sees nothing of the masked blocks: it meets an open block with nothing seen
    "causal": lambda tile, seq_q: (2 * tile.block_k - 1 + seq_q, {"causal": True}),
    "window": lambda tile, _: (4 * tile.block_k, {"window": (2 * tile.block_k + 3, tile.block_k // 2)}),
    "lengths": lambda tile, _: (
        4 * tile.block_k,
        {"modifiers": (KeyLengths(np.array([0, 3 * tile.block_k + 1], np.int32)),)},
    ),
}


TELLING = ("still", "by 12", "by 27", "by 140", "one key by 300", "one warp by 300", "two rows of a warp apart", "far")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", TILES)
def test_patterns_under_a_mask(force, name, mask):
    tile, sizes = TILES[name]
    force(tile)
    turn = list(MASKS).index(mask) + list(TILES).index(name)
    seq_q = tile.block_q - 5
    seq_k, options = MASKS[mask](tile, seq_q)
    dtype, batch = list(LARGEST)[turn % 2], 2 if mask == "lengths" else 1
    call = made(TELLING, tile.block_k, sizes, dtype, seq_q, seq_k, batch, **options)
    check(call, Expectation(call), (turn % 6, (turn + 3) % 6))


@pytest.mark.parametrize("mask", MASKS)
def test_patterns_under_a_mask_beside_a_bias(force, mask):
    force(BIASED)
    seq_q = BIASED.block_q - 7  # rows of the bias are whole numbers of 16 bytes
    seq_k, options = MASKS[mask](BIASED, seq_q)
    batch = 2 if mask == "lengths" else 1
    bias = np.random.default_rng(1).standard_normal((batch, len(TELLING), seq_q, seq_k)).astype(DTYPES["bfloat16"])
    call = made(TELLING, BIASED.block_k, (64, 64), "bfloat16", seq_q, seq_k, batch, bias=bias, **options)
    check(call, Expectation(call), SEEDS[:3])


@pytest.mark.parametrize("scores", ["small", "far"])
@pytest.mark.parametrize("tile", [SMALL, PLACED, *tuning.FORWARD_WGMMA[:3]], ids=str)
def test_a_guess_that_holds_changes_no_bit(force, tile, scores):
    """And far scores, with whose rounding a guess would not hold, are never guessed at."""
    rng, results = np.random.default_rng(0), []
    q, k, v = (rng.standard_normal((1, 2, n, 64)).astype(DTYPES["bfloat16"]) for n in (tile.block_q + 1, 300, 300))
    call = (
        describe(q, k, v, scale=1 / 16)
        if scores == "small"
        else plain_call(tile, (64, 64), "bfloat16", ("far and still",))[0]
    )
    for optimistic in (True, False):
        force(tile._replace(optimistic=optimistic))
        results.append(kernels.forward(call, DEVICE, 1, requested="wgmma"))
    for guessed, waited in zip(*results, strict=True):
        assert guessed.tobytes() == waited.tobytes()


def test_tiles_say_whether_they_guess(force):
    for optimistic in (True, False):
        force(SMALL._replace(optimistic=optimistic))
        call, _ = plain_call(SMALL, (64, 64), "bfloat16", ("still",))
        assert wgmma.forward(call.problem, 227 * 1024, True).optimistic == optimistic


# ---- each branch, once with a bug ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sown:
    """A bug, as texts of the source and what takes their place, and the patterns that show it."""

    description: str
    patterns: tuple[str, ...]
    replacements: tuple[tuple[str, str], ...]
    tile: tuning.ForwardWgmmaTile = SMALL

    def __str__(self) -> str:
        return self.description.replace(" ", "_")


def sown(description: str, patterns: str | tuple[str, ...], *replacements: tuple[str, str], **fields) -> Sown:
    return Sown(description, (patterns,) if isinstance(patterns, str) else patterns, replacements, **fields)


MUTANTS = [
    # ---- held
    sown("a block passes whatever it grew", "by 27", ("sums_pass(exp2_of(kSlack + kLift))", "false")),
    sown("a lane decides for itself", "one row by 20", ("return Fragment::any(passed);", "return passed;")),
    # ---- repaired
    sown("probabilities keep their old base", "by 12", ("rescale<Fragment>(s, alpha);", "")),
    sown("the accumulator keeps its old base", "by 27", ("moved = true;", "")),
    sown("lanes move to different bases", "by 27", ("max_of(Fragment::row_max(largest[slot]), Real(1))", "max_of(largest[slot], Real(1))")),
    sown("repairs what overflowed", "by 140", ("kReach = 100;", "kReach = 1000;")),
    # ---- lost
    sown("the scores are not computed anew", "by 140", ("again();", "")),
    sown("the scores are added to what is left", "by 140", ("clear(s);", "")),
    sown("the sum of a lost guess stays", "by 110", ("*this = before;", "")),
    sown("a lost guess ends the step", "by 140", ("return !beyond;", "return true;")),
    sown("another warp's rows are multiplied", "one warp by 300", ("s, queries, warp_row(), keys,", "s, queries, 0, keys,")),
    # ---- handing back
    sown("keys are handed back before the vote", ("by 140", "one warp by 300"),
         ("softmax.guess(s, alpha, moved, units, release_keys,", "(release_keys(), softmax).guess(s, alpha, moved, units, [] {},")),
    sown("keys are handed back by one warp for all", ("by 140", "one warp by 300"),
         ("if (hands_back) k_at", "if (elected) k_at"), ("shared.keys.init(kReaders)", "shared.keys.init(kGroups)")),
    sown("queries are handed back by one warp for all", ("one warp by 300", "by 140") * 3,
         ("Config::kSeparateOut ? hands_back : elected", "elected"),
         ("Config::kSeparateOut ? kReaders : kGroups", "kGroups"), tile=DEEP),
    sown("queries are fetched while another warp multiplies those before", ("one warp by 300", "by 140") * 3,
         ("if constexpr (kFetches) {\n      bar_sync(kGroupBarrier + group, kWarpgroupThreads);", "if constexpr (kFetches) {"),
         tile=FETCHED),
    sown("a bias is handed back before the vote", "by 140", ("    if (found) bias.release();\n", ""),
         ("bias.try_on(s, s_at, units.scale);", "bias.add_to(s, s_at, units.scale);"), tile=BIASED),
    sown("a bias is kept once it was guessed with", "still", ("if (found) bias.release();", ""), tile=BIASED),
    sown("a lost guess forgets the bias", "by 140", ("if (found) bias.release();", "bias.release();"), tile=BIASED),
    sown("keys are never handed back after a loss", "by 140", ("    settled();\n    return", "    return")),
]  # fmt: skip


@pytest.mark.parametrize("bug", MUTANTS, ids=str)
def test_mutant_is_noticed(force, bug):
    force(bug.tile)
    call, expectation = plain_call(bug.tile, (64, 64), "float16", bug.patterns)
    *others, (old, new) = bug.replacements

    def sow(text):
        for pair in others:
            text = mutate(text, *pair)
        return text

    def run(text, seed):
        built = text if callable(text) else lambda _: text
        expectation.check_forward(*kernels.forward(call, DEVICE, seed, requested="wgmma", text=built))

    for seed in SEEDS:
        run(source.build, seed)  # the control
    variant_text = []
    kernels.forward(
        call, DEVICE, 0, requested="wgmma", text=lambda v: variant_text.append(source.build(v)) or variant_text[0]
    )
    findings = examine(Mutant("forward_wgmma", bug.description, old, new), sow(variant_text[0]), run, SEEDS)
    assert findings.noticed, findings
