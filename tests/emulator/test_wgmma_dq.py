"""dQ of wide heads by blocks that own queries, in the emulator: the edges of its tiles, options, equal bits, and bugs that must show."""

import numpy as np
import pytest

from cuflash import problem
from cuflash.modifiers import KeyLengths
from tests import cases
from tests.cases import Case
from tests.emulator import kernels
from tests.emulator.mutants import Mutant
from tests.emulator.test_wgmma_backward import HOPPER, check, check_bug, plan_of
from tests.tolerance import Expectation

HEAD_DIM = 200  # the last step of 16 has columns of no element


def of(**fields) -> Case:
    return Case("", **{"dtype": "bfloat16", "batch": (), "head_dim": HEAD_DIM, **fields})


# ---- which calls it takes ----------------------------------------------------------------------------------------------
def kernels_of(case: Case, **options) -> list[str]:
    return [step.variant.kernel for step in plan_of(case, **options).steps]


def test_which_calls_it_takes():
    """Heads above 192, and above 128 where sums have an order, unless scores are looked at one by one."""
    apart, summed = (
        ["backward_delta", "backward_wgmma_split", last] for last in ("backward_wgmma_dq", "backward_convert_mma")
    )
    assert kernels_of(of()) == kernels_of(of(bias="q1")) == kernels_of(of(window=(5, 5))) == apart
    assert (
        kernels_of(of(bias="qk"))
        == kernels_of(of(softcap=2.0))
        == kernels_of(of(mask="qk"), deterministic=True)
        == summed
    )
    assert kernels_of(of(head_dim=16, head_dim_v=200)) == apart
    assert kernels_of(of(head_dim=136), deterministic=True) == apart
    assert kernels_of(of(head_dim=136)) == summed
    assert kernels_of(of(head_dim=128), deterministic=True)[-2:] == ["backward_wgmma", "backward_convert_mma"]
    assert kernels_of(of(documents="packed"))[-2:] == ["backward_wgmma_split", "backward_convert_mma"]


def test_nothing_is_summed_in_memory():
    for deterministic in (False, True):
        made = plan_of(of(), deterministic=deterministic)
        assert set(made.workspace()) == {"statistics"}
        assert [getattr(step.config, "deterministic", False) for step in made.steps] == [False] * 3
    assert set(plan_of(of(documents="packed"), deterministic=True).workspace()) >= {"statistics", "dq_sum", "turns"}


# ---- lengths and options -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True, "top_left"], ids=["full", "causal", "top-left"])
def test_lengths(causal):
    """Tiles of 128 queries, of which the second half may have none, and of 64 keys; queries without keys, keys without queries."""
    for seed, (seq_q, seq_k) in enumerate([(1, 70), (64, 1), (65, 64), (128, 65), (129, 128), (192, 129), (70, 257)]):
        check(of(heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=causal), (seed,))


@pytest.mark.parametrize("head_dim_v", [16, 256])
def test_head_sizes(head_dim_v):
    check(of(head_dim=256, head_dim_v=head_dim_v, seq_q=130, seq_k=70, causal=True), (0, 5))


@pytest.mark.parametrize(
    "fields",
    [
        {"batch": (2,), "heads_k": 1, "seq_q": 270, "seq_k": 200, "lengths": (200, 37), "window": (100, 20), "dlse": True},
        {"window": (5, 5), "seq_q": 200, "seq_k": 300},
        {"bias": "hq1", "dlse": True},
        {"sinks": "h", "lengths": 100},
        {"dtype": "float16", "layout": "bshd", "batch": (2,)},
    ],
    ids=["group", "narrow window", "bias apart", "sinks", "layout"],
)  # fmt: skip
def test_options(fields):
    check(of(**{"seq_q": 141, "seq_k": 177, **fields}), (0, 3))


def test_sums_have_one_order():
    """A bias that moves lse alone, whose gradient is summed in fixed point, by blocks that run side by side."""
    call, dout, dlse = of(head_dim=136, bias="q1", heads_q=2, seq_q=200, seq_k=250, dlse=True).call()
    out, lse = kernels.forward(call, HOPPER, 0, requested="wgmma")
    options = {"requested": "wgmma", "deterministic": True, "residents": 3}
    found = set()
    for seed in range(3):
        gradients = kernels.backward(call, out, lse, dout, dlse, HOPPER, seed, **options)
        Expectation(call, dout, dlse).check_backward(gradients)
        found.add(b"".join(x.tobytes() for x in gradients if x is not None))
    assert len(found) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_what_no_query_sees_never_reaches_a_gradient(bad):
    """Blocks of which some keys are seen, blocks of which none is, and one that only the second warpgroup walks over."""
    rng = np.random.default_rng(0)
    shapes = ((200, HEAD_DIM), (333, HEAD_DIM), (333, HEAD_DIM), (200, HEAD_DIM))
    q, k, v, dout = (rng.standard_normal((1, *shape)).astype(cases.DTYPES["bfloat16"]) for shape in shapes)
    call = problem.describe(q, k, v, causal="top_left", modifiers=(KeyLengths(np.array(150, np.int32)),))
    out, lse = kernels.forward(call, HOPPER, 0, requested="wgmma")
    want = kernels.backward(call, out, lse, dout, None, HOPPER, 0, requested="wgmma")
    Expectation(call, dout, None).check_backward(want)
    k[:, 150:] = v[:, 150:] = bad
    for seed in (0, 1, 2):
        got = kernels.backward(call, out, lse, dout, None, HOPPER, seed, requested="wgmma")
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)


def test_without_undefined_behaviour():
    check(of(heads_k=1, seq_q=150, seq_k=150, causal=True), (0,), sanitize=True)


# ---- bugs ------------------------------------------------------------------------------------------------------------
#: what is wrong, text and what takes its place
BUGS = [
    ("scores are read before they are there", "    wgmma_wait_group<kFirst ? 0 : 1>();\n    pin(s);\n", ""),
    ("dP is read before it is there", "    wgmma_wait_group<0>();\n    pin(dp);\n    release", "    release"),
    ("dS is overwritten while it is read", "      wgmma_wait_group<1>();\n      pin(dq);\n      pin(gradients);\n", ""),
    ("dQ is read before it is there", "    wgmma_wait_group<0>();\n    pin(dq);\n    pin(gradients);\n    release", "    release"),
    ("keys are given back while dQ reads them", "release_by_warp(shared.keys, k_at.previous().slot);", "release_by_warp(shared.keys, k_at.slot);"),
    ("dQ takes the next block's keys", "issue_dq(gradients, before);", "issue_dq(gradients, k_at.slot);"),
    ("queries are read before they are there", "    mbarrier_wait(shared_address(&shared.queries.full[0]), 0);\n", ""),
    ("dO is read before it is there", "    mbarrier_wait(shared_address(&shared.douts.full[0]), 0);\n", ""),
    ("the last block is forgotten", "blocks = blocks_of(p, Config::kBlockQ, 0);", "blocks = blocks_of(p, Config::kBlockQ, 0);\n    blocks.end -= blocks.end > blocks.begin + 1;"),
    ("the warpgroups share their rows of Q", "operand(shared.q, group * kWarpgroupRows)", "operand(shared.q, 0)"),
    ("a warpgroup takes the other's statistics", "const int q = work.row + at.row(slot);", "const int q = work.row + at.row(slot) % kWarpgroupRows;"),
    ("hidden keys count", "block >= open.begin && block < open.end);", "true);"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug[0].replace(" ", "_"))
def test_bug_is_noticed(bug):
    check_bug(Mutant("backward_wgmma_dq", *bug), of(heads_q=2, heads_k=1, seq_q=200, seq_k=250, causal=True))
