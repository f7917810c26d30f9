"""Hopper's backwards in the emulator: both schedules, the edges of their tiles, options, turns, and bugs that must show.

Five forms of the kernels: 128 queries shared out by rows (heads up to 64), 64 queries shared out by columns (up to 128), the
same with dP queued late (scores that are changed one by one), split roles (above 128; of those that have a kernel of its own for
dq, `test_wgmma_dq.py`), and the same for two parts of the keys (values up to 128).
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from cuflash import plan, problem
from cuflash.backends import described_device
from cuflash.errors import UnsupportedError
from cuflash.modifiers import KeyLengths
from cuflash.plan import Plan
from cuflash.schedules.wgmma import BackwardWgmma, BackwardWgmmaSplit, turns_section
from tests import cases
from tests.cases import OPTIONS, Case
from tests.emulator import kernels
from tests.emulator.build import EmulatorError
from tests.emulator.kernels import SEEDS
from tests.emulator.mutants import Mutant, Sources, must_be_noticed, sown
from tests.tolerance import Expectation

HOPPER = described_device(90)
SMALL = replace(HOPPER, multiprocessors=2)  # blocks that stay take several tiles of keys each
MANY_SEEDS = range(12)

#: head sizes of each form
FORMS = {"rows": (64, 64), "columns": (128, 128), "late": (64, 64), "split": (136, 136), "parts": (136, 64)}
forms = pytest.mark.parametrize("form", FORMS)


def of(form: str, **fields) -> Case:
    """A case that one form of the kernels computes; an ALiBi of no slope is what queues dP late."""
    late = {"alibi": "h"} if form == "late" else {}
    sizes = dict(zip(("head_dim", "head_dim_v"), FORMS[form], strict=True))
    return Case(form, "bfloat16", **{**sizes, **late, **fields})


def check(case: Case, seeds: Iterable[int] = SEEDS, **options) -> None:
    """Judge the backward of a case, which is given the forward's own results."""
    call, dout, dlse = case.call()
    check_call(call, dout, dlse, seeds, **options)


def check_call(call: problem.Call, dout, dlse, seeds: Iterable[int] = SEEDS, device=HOPPER, **options) -> None:
    expectation = Expectation(call, dout, dlse)
    out, lse = kernels.forward(call, HOPPER, 0, requested="wgmma")
    for seed in seeds:
        gradients = kernels.backward(call, out, lse, dout, dlse, device, seed, requested="wgmma", **options)
        expectation.check_backward(gradients)


def check_bug(mutant: Mutant, case: Case) -> None:
    """Some order of the kernels' steps must show it."""
    call, dout, dlse = case.call()
    out, lse = kernels.forward(call, HOPPER, 0, requested="wgmma")
    expectation = Expectation(call, dout, dlse)

    def run(text: Sources, seed: int) -> None:
        given = (call, out, lse, dout, dlse, HOPPER, seed)
        expectation.check_backward(kernels.backward(*given, requested="wgmma", text=text))

    must_be_noticed(mutant, run, MANY_SEEDS)


def plan_of(case: Case, **options) -> Plan:
    """The backward of a case."""
    call, dout, dlse = case.call()
    out, lse = np.zeros(call.problem.out_shape, dout.dtype), np.zeros(call.problem.lse_shape, np.float32)
    arrays = plan.backward_arrays(call, out=out, lse=lse, dout=dout, dlse=dlse, dq=call.q, dk=call.k, dv=call.v)
    places = plan.places_of(call.problem, arrays)
    return plan.plan_backward.__wrapped__(call.problem, HOPPER, places, requested="wgmma", **options)


def config_of(case: Case) -> BackwardWgmma:
    """Constants of the main kernel of a case."""
    return plan_of(case).main.config


def test_forms():
    configs = {form: config_of(of(form, seq_q=200)) for form in FORMS}
    assert [c.block_q for c in configs.values()] == [128, 64, 64, 64, 64]
    assert [c.block_k for c in configs.values()] == [128, 128, 128, 64, 128]
    assert [c.late_dp for c in configs.values()] == [False, False, True, False, False]
    assert [isinstance(c, BackwardWgmmaSplit) for c in configs.values()] == [False, False, False, True, True]
    assert [c.stays for c in configs.values()] == [True, True, False, False, False]


# ---- schedules and lengths -------------------------------------------------------------------------------------------
@forms
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_schedules(form, dtype):
    """Several tiles of queries, two heads of a group, tiles of keys with and without queries, keys that end inside one."""
    case = of(form, batch=(2,), heads_k=1, seq_q=270, seq_k=200, lengths=(200, 37), window=(100, 20), dlse=True)
    check(replace(case, dtype=dtype), MANY_SEEDS if dtype == "bfloat16" else (0, 3))


def edges(block: int) -> tuple[int, ...]:
    return 1, block - 1, block, block + 1, 2 * block, 2 * block + 1


@forms
@pytest.mark.parametrize("causal", [False, True, "top_left"], ids=["full", "causal", "top-left"])
def test_lengths(form, causal):
    config = config_of(of(form))
    shapes = [(n, 70) for n in edges(config.block_q)] + [(70, n) for n in edges(config.block_k)]
    for seed, (seq_q, seq_k) in enumerate(shapes):
        check(of(form, batch=(), heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=causal), (seed,))


@pytest.mark.parametrize("sizes", [(8, 8), (40, 24), (72, 96), (64, 128), (128, 16), (192, 128), (16, 200), (256, 256)])
def test_head_sizes(sizes):
    head_dim, head_dim_v = sizes
    check(Case("", "float16", head_dim=head_dim, head_dim_v=head_dim_v, seq_q=130, seq_k=70, causal=True), (0, 5))


# ---- blocks that stay -------------------------------------------------------------------------------------------------
STAYING = {
    "steps of one tile": {"seq_q": 450, "seq_k": 450, "causal": True},
    "group": {"seq_q": 270, "seq_k": 330, "heads_q": 4, "causal": True, "dlse": True},
    "keys that nobody sees": {"seq_q": 200, "seq_k": 520, "causal": "top_left"},
    "lengths": {"seq_q": 200, "seq_k": 400, "lengths": (400, 150), "window": (150, 20)},
    "full": {"seq_q": 300, "seq_k": 300},
}
staying = pytest.mark.parametrize("fields", STAYING.values(), ids=STAYING)
staying_forms = pytest.mark.parametrize("form", ["rows", "columns"])


@staying
@staying_forms
def test_blocks_stay(form, fields):
    """Each takes several tiles: of one step, of none, and of keys that have to be cleared."""
    check(of(form, **{"batch": (2,), "heads_q": 2, "heads_k": 2, **fields}), (0, 1, 2), device=SMALL, residents=2)


@staying
@staying_forms
def test_blocks_that_stay_take_turns(form, fields):
    """Whoever does not wait adds out of turn, and a tile that was taken early would wait for ever."""
    call, dout, dlse = of(form, **{"batch": (2,), "heads_q": 2, "heads_k": 2, **fields}).call()
    out, lse = kernels.forward(call, HOPPER, 0, requested="wgmma")
    expectation, found = Expectation(call, dout, dlse), set()
    for seed in SEEDS:
        options = {"requested": "wgmma", "deterministic": True, "residents": 3}
        gradients = kernels.backward(call, out, lse, dout, dlse, HOPPER, seed, **options)
        expectation.check_backward(gradients)
        found.add(b"".join(x.tobytes() for x in gradients))
    assert len(found) == 1


def test_which_blocks_stay():
    """Those of forms that keep nothing else from one step to the next, and not where few ends are worth it."""

    def found(form: str, **fields) -> tuple[bool, int]:
        config = config_of(of(form, **{"batch": (), "heads_q": 2, "heads_k": 2, "seq_q": 200, "seq_k": 200, **fields}))
        return config.stays, config.key_stages

    assert [found(form) for form in FORMS] == [(True, 2), (True, 1), (False, 1), (False, 1), (False, 1)]
    assert found("rows", window=(10, 10)) == (True, 2)
    assert found("rows", documents="one") == (False, 1)
    assert [found("columns", bias=axes)[0] for axes in ("hqk", "h1k", "hq1")] == [False, False, True]
    long = [{"seq_q": n, "causal": causal} for n in (8192, 8193) for causal in (False, True)]
    assert [found("columns", **fields)[0] for fields in long] == [True, True, True, False]
    assert found("rows", seq_q=8193, causal=True) == (True, 2)


# ---- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    rows = {"head_dim_v": 24} if name.startswith("everything") else {}  # TMA takes rows of whole 16-byte pieces
    case = Case(name, "bfloat16", **{**OPTIONS[name], **rows})
    if (case.documents or case.blocks) and any((case.mask, case.bias, case.softcap, case.alibi)):
        with pytest.raises(UnsupportedError, match="no registers to pass over the tiles that documents hides beside"):
            check(case)
    else:
        long = not (case.lengths or case.documents)
        check(replace(case, seq_q=141, seq_k=177) if long else case, (0, 1, 4))


@pytest.mark.parametrize("option", [{"mask": "bhqk"}, {"bias": "hqk"}, {"softcap": 2.0}], ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("head_dim", [128, 160])
def test_options_of_wide_heads(head_dim, option):
    check(Case("", "bfloat16", head_dim=head_dim, seq_q=141, seq_k=177, causal=True, dlse=True, **option), (0, 2, 5))


@pytest.mark.parametrize("head_dim", [104, 256])
def test_modifiers_without_registers_are_refused(head_dim):
    with pytest.raises(UnsupportedError, match="no room for the slopes of softcap beside bias"):
        check(Case("", "bfloat16", head_dim=head_dim, softcap=2.0, bias="qk"))


@forms
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_what_no_query_sees_never_reaches_a_gradient(form, bad):
    rng = np.random.default_rng(0)
    dtype, (d, d_v) = cases.DTYPES["bfloat16"], FORMS[form]
    shapes = ((100, d), (150, d), (150, d_v), (100, d_v))
    q, k, v, dout = (rng.standard_normal((1, *shape)).astype(dtype) for shape in shapes)
    options = {"mask": np.ones((100, 150), bool)} if form == "late" else {}
    modifiers = (KeyLengths(np.array(100, np.int32)),)
    call = problem.describe(q, k, v, causal="top_left", modifiers=modifiers, **options)
    out, lse = kernels.forward(call, HOPPER, 0, requested="wgmma")
    options = {"requested": "wgmma", "deterministic": True}
    want = kernels.backward(call, out, lse, dout, None, HOPPER, 0, **options)
    Expectation(call, dout, None).check_backward(want)
    k[:, 100:] = v[:, 100:] = bad
    for seed in SEEDS:
        got = kernels.backward(call, out, lse, dout, None, HOPPER, seed, **options)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)


@forms
def test_without_undefined_behaviour(form):
    check(of(form, batch=(), heads_k=1, seq_q=150, seq_k=150, causal=True), (0, 1), sanitize=True)


# ---- turns -----------------------------------------------------------------------------------------------------------
@forms
def test_turns_give_equal_bits(form):
    """Blocks run three at a time, so that whoever does not wait adds out of turn."""
    config = config_of(of(form))
    case = of(form, batch=(), heads_k=1, seq_q=2 * config.block_q + 9, seq_k=4 * config.block_k + 5, causal=True)
    if form == "split":
        case = replace(case, documents="one")  # without, dq has a kernel of its own
    call, dout, dlse = case.call()
    out, lse = kernels.forward(call, HOPPER, 0, requested="wgmma")
    expectation, found = Expectation(call, dout, dlse), set()
    for seed in SEEDS:
        gradients = kernels.backward(
            call, out, lse, dout, dlse, HOPPER, seed, requested="wgmma", deterministic=True, residents=3
        )
        expectation.check_backward(gradients)
        found.add(b"".join(x.tobytes() for x in gradients))
    assert len(found) == 1


def test_heads_side_by_side_in_turns():
    def heads(form: str, **fields) -> int:
        case = of(form, **fields)
        return turns_section(case.call()[0].problem, config_of(case))

    assert [(heads(form), heads(form, causal=True)) for form in FORMS] == [(32, 32), *[(16, 32)] * 2, (4, 16), (16, 32)]
    assert heads("rows", batch=(), heads_q=2, heads_k=2, seq_q=2049) == 16


#: form, what is wrong, text and what takes its place
TURN_BUGS = [
    ("split", "nobody waits for a turn", "wait_for_turn(turn_counter(p, i64(step.number()) * kSharers + sharer), turn);", ""),
    ("columns", "consumers do not wait for what the warp of turns waits for", "{ of.wait_full(come[sharer]); }", "{}"),
    ("parts", "a turn is passed on before all is added", "      cursor.wait_full(turns.added[sharer]);\n", ""),
    ("parts", "a block is left out", "const u32 next = work.keys.begin / Config::kBlockK + 1;", "const u32 next = work.keys.begin / Config::kBlockK + 2;"),
]  # fmt: skip


@pytest.mark.parametrize("bug", TURN_BUGS, ids=lambda bug: f"{bug[0]}-{bug[1]}".replace(" ", "_"))
def test_bug_of_turns_is_noticed(bug):
    form, description, old, new = bug
    config = config_of(of(form))
    case = of(form, batch=(), heads_k=1, seq_q=200, seq_k=4 * config.block_k + 5)
    if form == "split":
        case = replace(case, documents="one")  # without, dq has a kernel of its own
    call, dout, dlse = case.call()
    out, lse = kernels.forward(call, HOPPER, 0, requested="wgmma")
    found = set()

    options = {"requested": "wgmma", "deterministic": True, "residents": 5, "text": sown(old, new, config.kernel)}
    for seed in MANY_SEEDS:
        try:
            gradients = kernels.backward(call, out, lse, dout, dlse, HOPPER, seed, **options)
        except EmulatorError:
            return
        found.add(b"".join(x.tobytes() for x in gradients))
        if len(found) > 1:
            return
    pytest.fail(f"nobody noticed that {description}")


# ---- bugs ------------------------------------------------------------------------------------------------------------
#: form, what is wrong, text and what takes its place
BUGS = [
    ("columns", "scores are read before they are there", "wgmma_wait_group<Config::kLateDp ? 0 : 1>();\n    pin(s);", ""),
    ("columns", "dP is read before it is there", "wgmma_wait_group<0>();\n    pin(dp);", ""),
    ("columns", "dQ is read before it is there", "wgmma_wait_group<2>();\n      finish_dq(dq, cursor.previous());\n    }\n    if constexpr",
     "finish_dq(dq, cursor.previous());\n    }\n    if constexpr"),
    ("columns", "queries are given back while they are read", "wgmma_wait_group<Config::kLateDp ? 1 : 2>();", ""),
    ("columns", "dS is overwritten while it is read", "    cursor.wait_empty(shared.gradients);\n    store_operand(shared.ds(cursor.slot), warp_key(own_thread())", "    store_operand(shared.ds(cursor.slot), warp_key(own_thread())"),
    ("columns", "dS is read before it is written", "    of.wait_full(shared.gradients);\n", ""),
    ("columns", "dS is not made visible to wgmma", "warp_key(own_thread()), gradients);\n    fence_proxy_async();", "warp_key(own_thread()), gradients);"),
    ("columns", "the last dQ is forgotten", "release_keys();\n    finish_dq(dq, cursor);\n", "release_keys();\n"),
    ("columns", "the warpgroups swap their columns of dQ", "warp % 4 * kGroups + warp / 4", "warp"),
    ("columns", "a head of the group is forgotten", "      tile = begin(work);\n      ++head;\n", "      tile = begin(work);\n"),
    ("columns", "statistics of the other slot", "shared.channels.statistics[cursor.slot];\n    probabilities", "shared.channels.statistics[cursor.slot ^ 1];\n    probabilities"),
    ("rows", "dP is there before dS is used up", "      wgmma_wait_group<1>();\n      pin(dk);", "      pin(dk);"),
    ("rows", "the warpgroups share their queries of dQ", "(kSplitsRows ? group * kDsPanel : 0)", "0"),
    ("split", "P is overwritten while it is read", "    p_cursor.wait_empty(shared.probabilities);\n", ""),
    ("split", "P is read before it is written", "    p_cursor.wait_full(shared.probabilities);\n    Scores s;", "    Scores s;"),
    ("split", "dS is read before it is written", "    of.wait_full(shared.gradients);\n    constexpr", "    constexpr"),
    ("split", "a panel of dQ is forgotten", "add_panels<kPanel + kGroups>(dq, of, tile);", ""),
    ("split", "dO is never given back", "      release_by_warp(shared.channels.douts, now.slot);\n", "", ),
    ("split", "V is overwritten while the other still reads it",
     "bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);  // nobody reads K or V any more", ""),
    ("parts", "P is overwritten while it is read", "    p_cursor.wait_empty(shared.probabilities);\n", ""),
    ("parts", "P is read before it is written", "        p_cursor.wait_full(shared.probabilities);\n", ""),
    ("parts", "dS is not made visible to wgmma", "      fence_proxy_async();\n      if (part == kParts - 1)",
     "      if (part == kParts - 1)"),
    ("parts", "dQ is read before it is there", "        wgmma_wait_group<1>();\n        pin(dp);\n", ""),
    ("parts", "the middle panel of dQ is read before it is there", "        issue_middle(s);\n        wgmma_wait_group<0>();\n", "        issue_middle(s);\n"),
    ("parts", "the last middle panel of dQ is forgotten", "    add_in_parts<kMiddlePanel>(s, before);\n  }", "  }"),
    ("parts", "dS of the part before is read before it is written", "    cursor.previous().wait_full(shared.gradients);\n", ""),
    ("parts", "a panel of dQ takes the place of the one before",
     "      mbarrier_wait(shared_address(&shared.panels.empty[kBefore]), kPlace == 0 ? step ^ 1 : step);\n", ""),
    ("parts", "a panel of dQ is added before it is there", "        at.wait_full(shared.panels);\n", ""),
    ("parts", "the place of a panel is given back while it is read", "        cp_async_bulk_wait_group_read<0>();\n        at.release", "        at.release"),
    ("parts", "queries are given back while they are read",
     "        wgmma_wait_group<0>();\n        pin(dp);\n        pin(dk[1 - part]);\n        if (part == 0",
     "        if (part == 0"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug[0]}-{bug[1]}".replace(" ", "_"))
def test_bug_is_noticed(bug):
    form, *sown_bug = bug
    case = of(form, batch=(), heads_q=4, heads_k=2, seq_q=330, seq_k=150)
    check_bug(Mutant(config_of(of(form)).kernel, *sown_bug), case)


#: form, what is wrong in blocks that stay, text and what takes its place
STAYING_BUGS = [
    ("rows", "K is given back before the last dQ", "    wgmma_wait_group<0>();\n    if constexpr (kStays) release_keys();\n",
     "    if constexpr (kStays) release_keys();\n    wgmma_wait_group<0>();\n"),
    ("columns", "K is given back before the last dQ", "    wgmma_wait_group<0>();\n    if constexpr (kStays) release_keys();\n",
     "    if constexpr (kStays) release_keys();\n    wgmma_wait_group<0>();\n"),
    ("rows", "K is loaded before there is room", "      keys.wait_empty(shared.channels.keys);\n", ""),
    ("columns", "K is loaded before there is room", "      keys.wait_empty(shared.channels.keys);\n", ""),
    ("rows", "V is loaded before there is room", "    one.wait_empty(shared.taken.values);\n", ""),
    ("rows", "V is read before it is there", "    if constexpr (kHasRoom) await_values(key_slot);\n", ""),
    ("columns", "V is read before it is there", "    if constexpr (!kHasRoom) await_values(tile.slot);\n", ""),
    ("rows", "scores take K of the tile before", "operand(shared.in.k[key_slot], own_rows())", "operand(shared.in.k[0], own_rows())"),
    ("rows", "dQ takes K of the tile before", "operand(shared.in.k[key_slot]) +", "operand(shared.in.k[0]) +"),
    ("rows", "dV leaves through a place that is still read", "    await_place();\n    leave(dv", "    leave(dv"),
    ("columns", "dV leaves through dS that is still read", "        last.wait_empty(shared.gradients);\n", ""),
    ("columns", "dS is written where dK still leaves", "    if constexpr (kStays && !kHasRoom) await_place();\n", ""),
    ("rows", "a tile is taken twice", "    if (!Config::kDeterministic) number += gridDim.x;\n", ""),
    ("rows", "queries of the last step are never given back",
     "      release_by_warp(shared.channels.queries, cursor.slot);\n    }\n    if constexpr (kLeavesDq)", "    }\n    if constexpr (kLeavesDq)"),
    ("columns", "the next tile begins with the last one's queries", "      walk();\n      cursor.advance();\n", "      walk();\n"),
]  # fmt: skip


@pytest.mark.parametrize("bug", STAYING_BUGS, ids=lambda bug: f"{bug[0]}-{bug[1]}".replace(" ", "_"))
def test_bug_of_blocks_that_stay_is_noticed(bug):
    """One block takes all tiles, of one or two steps each."""
    form, *sown_bug = bug
    case = of(form, batch=(), heads_q=2, heads_k=2, seq_q=100, seq_k=500)
    check_bug(Mutant(config_of(case).kernel, *sown_bug), case)


def test_k_may_not_be_overwritten_while_the_other_warpgroup_reads_it():
    """Where blocks do not stay, dK leaves through its place."""
    text = "bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);  // both have finished reading K"
    case = of("columns", batch=(), heads_q=4, heads_k=2, seq_q=330, seq_k=150, bias="h1k")
    check_bug(Mutant("backward_wgmma", "K is overwritten", text, ""), case)
