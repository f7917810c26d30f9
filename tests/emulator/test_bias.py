"""A bias of every broadcast shape in the emulator: each of its four axes full or of length 1, values and gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from cuflash import plan, tuning
from cuflash.backends import described_device
from cuflash.gradients import gradient_sums
from cuflash.schedules import wgmma
from tests.cases import Case
from tests.emulator.build import EmulatorError
from tests.emulator.kernels import check, check_call
from tests.emulator.mutants import sown
from tests.emulator.test_mma import FORWARD, target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)
from tests.emulator.test_wgmma import hopper

PATTERNS = ["".join(axes) for axes in product("b1", "h1", "q1", "k1")]
TARGETS = [(80, "bfloat16"), (75, "float32"), (75, "float64")]


@pytest.fixture(autouse=True)
def small_tiles(mma_tile: object, simt_tile: object) -> None:  # noqa: F811
    """Every test runs with them."""


def case_of(pattern: str, dtype: str, head_dim: int = 24, **options: object) -> Case:
    """Two groups of two heads, edges of tiles on both sides."""
    sizes = {"heads_q": 4, "heads_k": 2, "seq_q": 37, "seq_k": 50}
    return Case("bias", dtype, head_dim=head_dim, bias=pattern, **{**sizes, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("target", TARGETS, ids=target_id)
def test_patterns(target: tuple[int, str], pattern: str) -> None:
    """One schedule for each pattern, another for the next."""
    check(case_of(pattern, target[1]), target[0], [PATTERNS.index(pattern) % 6])


@pytest.mark.parametrize("pattern", [x for x in PATTERNS if x[3] == "k"])
@pytest.mark.parametrize("options", [{}, {"mask": "hqk", "causal": True}], ids=["alone", "masked"])
def test_rows_in_pieces(mma_tile: Any, options: dict[str, object], pattern: str) -> None:  # noqa: F811
    """Rows that start at multiples of 16 bytes, in tiles that lie inside and in one at the edge."""
    mma_tile(FORWARD._replace(block_k=32))
    check(case_of(pattern, "float16", seq_k=72, **options), 80, [1, 4])
    check(
        case_of(pattern, "bfloat16", 64, batch=(2,), seq_k=264, **options),
        90,
        [2],
        requested="wgmma",
        with_backward=False,
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("head_dim", [64, 128, 136])
def test_patterns_on_hopper(head_dim: int, pattern: str) -> None:
    """By both schedules of its backward, and by that of split roles."""
    case = case_of(pattern, "bfloat16", head_dim, batch=(2,), seq_q=70)
    check(case, described_device(90), [PATTERNS.index(pattern) % 6], requested="wgmma")


# ---- Hopper: a bias that comes ahead of use ------------------------------------------------------------------------------
#: every order in which slots of queries, keys and a bias go round
AHEAD = {
    "continuous": tuning.ForwardWgmmaTile(256, 128, 64, 2, 2, continuous=True, bias_stages=3),
    "one tile of queries": tuning.ForwardWgmmaTile(256, 128, 128, 2, 1, continuous=False, bias_stages=2),
    "three warpgroups": tuning.ForwardWgmmaTile(256, 192, 64, 3, 1, continuous=False, bias_stages=1),
}
#: those with intervals of keys, and with tiles that the producer passes over
HIDING = {
    "alone": {},
    "causal": {"causal": True},
    "ranges": {"window": (100, 60), "lengths": (136, 70)},
    "mask": {"mask": "hqk"},
    "documents": {"documents": "packed"},
}


@pytest.fixture(params=AHEAD)
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuning.ForwardWgmmaTile:
    """Sets the only tile that may be chosen."""
    for table in ("FORWARD_WGMMA_BIAS", "FORWARD_WGMMA_ROW", "FORWARD_WGMMA"):
        monkeypatch.setattr(tuning, table, (AHEAD[request.param],))
    return AHEAD[request.param]


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_ahead_of_use(pattern: str) -> None:
    """Several tiles of queries for each block of threads, rows and keys that end inside a tile and inside a panel."""
    case = case_of(pattern, "bfloat16", 16, batch=(2,), heads_q=2, heads_k=1, seq_q=300, seq_k=136)
    check(case, hopper(), [PATTERNS.index(pattern) % 6, 6], requested="wgmma", with_backward=False)


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("pattern", ["bhqk", "1h1k", "b1q1"])
def test_ahead_of_use_beside_what_hides_keys(ahead: tuning.ForwardWgmmaTile, pattern: str, hiding: str) -> None:
    if hiding == "documents" and ahead.block_q > 128:
        pytest.skip("a producer that looks at tiles has registers beside two warpgroups")
    options = {"batch": (2,), "heads_q": 2, "heads_k": 1, "seq_q": 300, "seq_k": 136, **HIDING[hiding]}
    check(case_of(pattern, "float16", 16, **options), hopper(), range(3), requested="wgmma", with_backward=False)


@pytest.mark.parametrize("hiding", ["alone", "causal", "ranges"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_backward_ahead_of_use(pattern: str, head_dim: int, hiding: str) -> None:
    """Two heads of a group, tiles of queries and keys that end inside, gradients of full arrays in place of blocks."""
    options = {"batch": (2,), "heads_q": 2, "heads_k": 1, "seq_q": 150, "seq_k": 136, "dlse": True, **HIDING[hiding]}
    check(case_of(pattern, "bfloat16", head_dim, **options), hopper(), [PATTERNS.index(pattern) % 6], requested="wgmma")


@pytest.mark.parametrize("hiding", ["alone", "causal", "mask"])
@pytest.mark.parametrize("lengths", [(1100, 136), (140, 600), (40, 72)], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_blocks_go_round(head_dim: int, lengths: tuple[int, int], hiding: str) -> None:
    """More steps than slots, of the blocks that bring a bias and of those that dq is made of."""
    seq_q, seq_k = lengths
    options = {"heads_q": 2, "heads_k": 1, "seq_q": seq_q, "seq_k": seq_k, "dlse": True, **HIDING[hiding]}
    check(case_of("bhqk", "bfloat16", head_dim, **options), hopper(), [head_dim % 6], requested="wgmma")


def test_keys_that_nobody_sees_may_be_anything() -> None:
    """Those behind an entry's length, in a block with others: dS of 0 must not meet them."""
    options = {"batch": (2,), "heads_q": 2, "heads_k": 1, "seq_q": 150, "seq_k": 264, "lengths": (140, 200)}
    call, dout, dlse = case_of("bhqk", "bfloat16", 64, **options).call()
    call.k[0, :, 140:] = call.k[1, :, 200:] = np.nan
    check_call(call, dout, dlse, hopper(), [0, 1], requested="wgmma")


#: a bias whose gradient is a sum over heads, entries or both, which a kernel of its own makes
SHARED = ("b1qk", "1hqk", "11qk")


@pytest.mark.parametrize("hiding", ["alone", "causal", "ranges", "mask"])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (40, 120)], ids=str)
@pytest.mark.parametrize("pattern", SHARED)
def test_sums_of_those_who_share(pattern: str, sizes: tuple[int, int], hiding: str) -> None:
    """More heads than places of their factors, tiles of which some entries see nothing, rows and keys that end inside."""
    options = {"batch": (3,), "seq_q": 150, "seq_k": 264, "dlse": True, **HIDING[hiding]}
    if hiding == "ranges":
        options["lengths"] = (264, 100, 0)
    case = case_of(pattern, "bfloat16", sizes[0], head_dim_v=sizes[1], **options)
    check(case, hopper(), [SHARED.index(pattern)], requested="wgmma")


def test_sums_that_are_not_rounded() -> None:
    """Of callers whose own code rounds them."""
    options = {"batch": (2,), "seq_q": 150, "seq_k": 136}
    check(case_of("1hqk", "float16", 64, **options), hopper(), [1], requested="wgmma", rounded=False)


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_sums_have_a_kernel_of_their_own(deterministic: bool, rounded: bool) -> None:
    """With a block for each tile of each bias, and nothing that must be 0 before; else sums of a fixed order have more words."""
    for pattern, tiles in (("b1qk", 3 * 4), ("1hqk", 4 * 4), ("11qk", 4), ("bhqk", 0), ("1h1k", 0)):
        call, out, _ = case_of(pattern, "bfloat16", 64, batch=(3,), seq_q=150, seq_k=136).call()
        terms = gradient_sums(call.problem, call.operands, deterministic, rounded)
        sums = {f"d{name}": np.zeros(*of) for name, of in terms.items()}
        lse = np.zeros(call.problem.lse_shape, np.float32)
        given = {"out": out, "lse": lse, "dout": out, "dq": call.q, "dk": call.k, "dv": call.v, **sums}
        places = plan.places_of(call.problem, plan.backward_arrays(call, **given))
        for multiprocessors in (1000, 2):
            made = plan.plan_backward(call.problem, hopper(multiprocessors), places, deterministic, "wgmma")
            found = [step.blocks for step in made.steps if step.config.kernel == "backward_wgmma_bias"]
            assert found == ([min(tiles, multiprocessors)] if tiles and (rounded or not deterministic) else [])
            assert ("dbias" in made.overwritten) == (pattern == "bhqk" or bool(found))
            assert made.widened == ({"bias"} if rounded and pattern == "1h1k" else set())
            assert made.main.config.kernel == "backward_wgmma"


@pytest.mark.parametrize("pattern", SHARED)
def test_keys_that_none_of_those_who_share_sees_may_be_anything(pattern: str) -> None:
    options = {"batch": (2,), "seq_q": 150, "seq_k": 264, "lengths": (140, 200)}
    call, dout, dlse = case_of(pattern, "bfloat16", 64, **options).call()
    for x in (call.k, call.v):
        x[0, :, 140:] = x[1, :, 200:] = np.nan
    check_call(call, dout, dlse, hopper(), [0, 1], requested="wgmma")


BUGS_OF_SUMS = {
    "the bias is read before it is there": ("    bias_at.wait_full(shared.biases);\n", ""),
    "the bias is never given back": ("release_by_warp(shared.biases, bias_at.slot);", ""),
    "the bias is that of the tile before": (
        "        release_by_warp(shared.biases, bias_at.slot);\n        bias_at.advance();",
        "        release_by_warp(shared.biases, bias_at.slot);",
    ),
    "a bias is brought where another is read": ("      bias_at.wait_empty(shared.biases);\n", ""),
    "factors are read before they are there": (
        "    cursor.wait_full(shared.pairs);\n    turns.take();",
        "    turns.take();",
    ),
    "factors are given back before they are read": (
        "    if (!kLateDp) issue_dp(dp);",
        "    release_by_warp(shared.pairs, of_scores);\n    if (!kLateDp) issue_dp(dp);",
    ),
    "factors are never given back": ("    release_by_warp(shared.pairs, cursor.slot);\n", ""),
    "all have the statistics of the first": (
        "    release_by_warp(shared.pairs, of_scores);\n    statistics_at.advance();",
        "    release_by_warp(shared.pairs, of_scores);",
    ),
    "the last head is left out": ("Range{0, p.heads_q}", "Range{0, p.heads_q - 1}"),
    "the last entry is left out": ("Range{0, p.batch_size}", "Range{0, p.batch_size - 1}"),
    "every entry is one of the first's": ("{0, row, head, entry}", "{0, row, head, 0}"),
    "keys that nobody sees are left as they are": ("    clean(tile, place);\n", ""),
    "only the last one counts": ("sums[i] += score_gradient", "sums[i] = score_gradient"),
    "a tile's sum goes on from the one before": ("      clear(sums);\n", ""),
    "what a tile is changes while it is asked about": ("    told_at.wait_empty(shared.told);\n", ""),
}


@pytest.mark.parametrize("bug", BUGS_OF_SUMS)
def test_bugs_of_sums_are_found(bug: str) -> None:
    found = []
    for head_dim, pattern in product((64, 128), SHARED):  # with two places of the bias and with one
        options = {"batch": (3,), "seq_q": 150, "seq_k": 264, "lengths": (264, 200, 140)}
        call, dout, dlse = case_of(pattern, "bfloat16", head_dim, **options).call()
        for x in (call.k, call.v):
            x[1, :, 200:] = x[2, :, 140:] = np.nan
        try:
            check_call(call, dout, dlse, hopper(), [1, 4], requested="wgmma", text=sown(*BUGS_OF_SUMS[bug]))
        except (AssertionError, EmulatorError) as error:
            found.append(str(error))
            break
    assert found


def test_the_counter_of_tiles_is_left_as_it_was_found() -> None:
    """Blocks of the next kernel count their turns with it."""
    case = case_of("1hqk", "bfloat16", 64, batch=(2,), seq_q=150, seq_k=136)
    wrong = sown("  if (before == u32(tile_count(p)) - 1) *taken = 0;\n", "")
    with pytest.raises((AssertionError, EmulatorError)):
        check(case, hopper(), [0, 1], requested="wgmma", deterministic=True, residents=2, text=wrong)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pattern", ["bhqk", *SHARED, "1h1k", "bhq1", "11q1", "1111"])
def test_backward_ahead_of_use_in_turns(pattern: str, head_dim: int) -> None:
    options = {"batch": (2,), "heads_q": 2, "heads_k": 1, "seq_q": 150, "seq_k": 136, "dlse": True, "sinks": "h"}
    case = case_of(pattern, "float16", head_dim, **options)
    check(case, hopper(), [0, 1], requested="wgmma", deterministic=True, residents=2)


@pytest.mark.parametrize("far", [-np.inf, np.inf, np.nan, 1e4], ids=str)
@pytest.mark.parametrize("pattern", ["bhq1", "bh1k", "bhqk"])
def test_numbers_that_are_none(pattern: str, far: float) -> None:
    """Rows and keys that a bias hides, or of which it leaves nothing, are what they are by the definition."""
    call, dout, dlse = case_of(pattern, "bfloat16", 64, batch=(), seq_q=70, seq_k=136, dlse=True, sinks="h").call()
    bias = call.operands["bias"]
    if pattern[2] == "q":
        bias[..., ::5, :] = far
    if pattern[3] == "k":
        bias[..., ::3] = far
    check_call(call, dout, dlse, hopper(), [0], requested="wgmma")


BUGS = {
    "a block is read before it is there": ("at.wait_full(channels.biases);\n    add_block", "add_block"),
    "a block is given back before it is read": (
        "at.wait_full(channels.biases);\n    add_block",
        "at.wait_full(channels.biases);\n    release_by_warp(channels.biases, at.slot);\n    add_block",
    ),
    "blocks are never given back": ("release_by_warp(channels.biases, at.slot);", ""),
    "skipped blocks are kept": ("bias.skip();", ""),
    "blocks are those of the first head": ("view.head ? head : 0", "0"),
    "a place is filled again while it is copied": (
        "cp_async_bulk_wait_group_read<0>();\n    at.release(channels.biases)",
        "at.release(channels.biases)",
    ),
    "gradients of hidden blocks are left alone": ("clear_hidden_bias(p, shared.channels.work);", ""),
    "keys of one head have the bias of another": (
        "      leave_head(head);\n      enter_head();",
        "      leave_head(head);",
    ),
    "gradients of two heads are one": ("      leave_head(head);\n      enter_head();", "      enter_head();"),
    "rows are shifted the wrong way": ("lse - bias_apart(p, place, row)", "lse + bias_apart(p, place, row)"),
    "lse is left alone": ("softmax.move(slot,", "if (false) softmax.move(slot,"),
    "dq is made of blocks that are not there": ("      at.wait_full(shared.steps);\n", ""),
    "blocks that dq is made of are never given back": ("release_by_warp(shared.steps, at.slot);", ""),
    "blocks that dq is made of are given back too soon": (
        "      wgmma_commit_group();\n      wgmma_wait_group<0>();\n      pin(dq);\n      release_by_warp(shared.steps, at.slot);",
        "      wgmma_commit_group();\n      release_by_warp(shared.steps, at.slot);\n      wgmma_wait_group<0>();\n      pin(dq);",
    ),
    "dS that is not in the array is left as it is": (
        "    st_shared_v4(ds.address() + at, 0, 0, 0, 0);",
        "    (void)at;",
    ),
    "the sink has no part": ("if constexpr (kHasSinks) sum -=", "if constexpr (false) sum -="),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_found(bug: str) -> None:
    """Each wrong line must show under some form of a bias, or the tests above prove nothing."""
    options = {"batch": (2,), "heads_q": 2, "heads_k": 1, "seq_q": 300, "seq_k": 264, "dlse": True, "sinks": "h"}
    found = []
    for pattern, window in product(("bhqk", "bh1k", "bhq1"), ((100, 60), None)):
        case = case_of(pattern, "bfloat16", 64, window=window, **options)
        try:
            check(case, hopper(), [1, 4], requested="wgmma", text=sown(*BUGS[bug]))
        except (AssertionError, EmulatorError) as error:
            found.append(str(error))
            break
    assert found


def test_where_a_bias_comes_ahead_of_use() -> None:
    """By where it lies; not beside what else changes scores, nor along several batch axes, which would merge by their lengths."""

    def form(pattern: str, **options: object) -> str:
        call, out, _ = case_of(pattern, "bfloat16", 64, **{"seq_q": 40, "seq_k": 56, **options}).call()
        lse = np.zeros(call.problem.lse_shape, np.float32)
        places = dict(plan.places_of(call.problem, plan.forward_arrays(call, out, lse)))
        return wgmma.bias_form(call.problem, places)

    forms = {"qk": "blocks", "1k": "row", "q1": "apart", "11": "apart"}
    assert {pattern: form(pattern) for pattern in PATTERNS} == {x: forms[x[2:]] for x in PATTERNS}
    assert form("bhqk", seq_k=57) == form("111k", seq_k=57) == ""
    assert form("bhqk", softcap=3.0) == form("bhq1", scale=-1.0) == ""
    assert form("bhqk", batch=(2, 3)) == ""
    assert form("bhqk", batch=()) == "blocks"
