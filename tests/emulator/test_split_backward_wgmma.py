"""The backward of float32 by Hopper's warpgroup products in the emulator: options, lengths, head sizes, values, and sown bugs.

What it has in common with the same by mma.sync is tested in `test_split_backward.py`, whose calls these are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from cuflash import plan, problem
from cuflash.backends import select
from cuflash.problem import Call
from cuflash.schedules.split_wgmma import MAX_SPLIT, MAX_WHOLE
from tests.cases import OPTIONS, STRIDES, Case
from tests.emulator import Mutant, kernels, must_be_noticed, test_split_backward
from tests.emulator.kernels import SEEDS
from tests.emulator.mutants import Sources
from tests.emulator.test_planes_wgmma import taken
from tests.emulator.test_split_backward import (
    clear_rows,
    grow_an_element,
    shrink_a_row,
    shrink_elements,
    spoiled,
    suited,
)
from tests.emulator.test_wgmma import edges, hopper
from tests.tolerance import Expectation

pytestmark = pytest.mark.skipif(not MAX_SPLIT, reason="left to mma: schedules/split_wgmma.py")
MANY_SEEDS = range(12)
#: a warpgroup sums dK and dV, or one of them
both = pytest.mark.parametrize("head_dim", [16, 72], ids=["whole", "roles"])


def check_call(call: Call, dout: Any, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    test_split_backward.check_call(call, dout, None, hopper(), seeds, requested="wgmma", **options)


def check(case: Case, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    call, dout, _ = case.call()
    check_call(call, dout, seeds, **options)


# ---- options, lengths, head sizes, strides -----------------------------------------------------------------------------
@both
@pytest.mark.parametrize("name", [name for name in OPTIONS if taken(name)])
def test_options(name, head_dim):
    case = Case(name, **{**OPTIONS[name], "seq_q": 131, "seq_k": 150, "head_dim": head_dim, "dlse": False})
    check(case, (0, 1), suits=True if case.lengths is None else suited(case))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_schedules(head_dim):
    """Several tiles of queries, two heads of a group, tiles of keys with and without queries, keys that end inside one."""
    case = Case("schedules", heads_k=1, seq_q=270, seq_k=300, head_dim=head_dim, lengths=(300, 37), window=(100, 20))
    check(case, MANY_SEEDS, suits=suited(case))
    check(replace(case, seq_q=100, seq_k=130, lengths=None, window=None, causal=True), (3,), sanitize=True)


@both
@pytest.mark.parametrize("causal", [False, True, "top_left"], ids=["full", "causal", "top-left"])
def test_lengths(causal, head_dim):
    seeds = count()
    for seq_q in (1, 63, 65, 129):
        for seq_k in sorted({*edges(128 if head_dim <= MAX_WHOLE else 64), 1}):
            sizes = {"seq_q": seq_q, "seq_k": seq_k, "head_dim": head_dim}
            check(Case("lengths", batch=(), heads_q=1, heads_k=1, causal=causal, **sizes), (next(seeds),))


WHOLE = ((1, 1), (7, 33), (40, 24), (64, 16), (16, 64))
ROLES = ((65, 65), (96, 80), (128, 128), (128, 40), (24, 112))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), WHOLE + ROLES)
def test_head_sizes(head_dim, head_dim_v):
    check(Case("dims", batch=(1,), head_dim=head_dim, head_dim_v=head_dim_v, causal=True), (0, 4))


@pytest.mark.parametrize("name", STRIDES)
def test_strides(name):
    for seed, layout in ((2, "bhsd"), (5, "bshd")):
        check(Case(name, strides=name, layout=layout, head_dim=20), (seed,))
        check(Case(name, strides=name, layout=layout, head_dim=20), (seed,), place=STRIDES["padded"])
    check(Case(name, strides=name, layout="bshd", head_dim=100), (seed,), place=STRIDES["padded"])


# ---- values ------------------------------------------------------------------------------------------------------------
@both
@pytest.mark.parametrize("values", ["x30", "logits about -200", "logits about -1e5", "dominant key late", "constant"])
def test_values(values, head_dim):
    check(Case("values", values=values, causal=True, head_dim=head_dim), (0, 1))


@test_split_backward.magnitudes
def test_magnitudes(factors):
    check_call(*test_split_backward.in_magnitudes(factors))


@both
def test_rows_and_heads_in_scales_of_their_own(head_dim):
    """Down to 2^-12 of the largest row of a group; elements of what is far below still add up exactly enough."""
    made = Case("rows", heads_q=4, heads_k=2, seq_q=140, seq_k=150, head_dim=head_dim).make()
    rng = np.random.default_rng(0)
    for part in ("q", "dout", "v"):
        made[part] *= np.exp2(rng.integers(-10, 1, (*made[part].shape[:-1], 1))).astype(np.float32)
    check_call(problem.describe(made["q"], made["k"], made["v"], scale=0.125), made["dout"], (0, 1))


@both
@pytest.mark.parametrize("part", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("change", [shrink_a_row, grow_an_element], ids=lambda f: f.__name__)
def test_heads_that_do_not_suit(part, change, head_dim):
    call, dout = spoiled(part, change, head_dim=head_dim)
    check_call(call, dout, (0, 1), suits=[True, True, True, False])


@pytest.mark.parametrize("part", ["k", "dout"])
@pytest.mark.parametrize("change", [clear_rows, shrink_elements], ids=lambda f: f.__name__)
def test_zeros_and_small_elements_suit(part, change):
    call, dout = spoiled(part, change)
    check_call(call, dout, (0, 1))


@both
def test_keys_beyond_the_length_are_not_read(head_dim):
    made = Case("lengths", seq_q=140, seq_k=150, head_dim=head_dim, lengths=(20, 0), causal="top_left").make()
    for name in ("k", "v"):
        made[name][0, :, 20:] = np.nan
        made[name][1] = np.inf
    check_call(problem.describe(*(made[n] for n in "qkv"), **made["options"]), made["dout"])


# ---- bugs that must be noticed -------------------------------------------------------------------------------------------
#: of what both kernels have
BUGS_OF_BOTH = (
    ("sums of low parts keep their scale", "c[i] *= 1.f / kLowScale;", "c[i] *= 2.f / kLowScale;"),
    (
        "keys that nobody has written meet a gradient of 0",
        "    for (int plane = 0; plane < kPlanes; ++plane) {\n      clear_rows_outside",
        "    for (int plane = 0; plane < 0; ++plane) {\n      clear_rows_outside",
    ),
    ("a step keeps the head of before", "place.head = at.head;", "place.head = work.place.head;"),
)
#: of backward_split_wgmma.cu, beside those of barriers around dS: products are issued by whole warpgroups here, which are barriers themselves
BUGS = (
    (
        "dS is not fenced",
        "    fence_proxy_async();\n    bar_sync(kGroupBarrier + group",
        "    bar_sync(kGroupBarrier + group",
    ),
    (
        "dO is not handed back",
        "pin(probabilities);\n    release_by_warp(shared.channels.douts, slot);",
        "pin(probabilities);",
    ),
    ("the low part of dS is forgotten", "own_ds.plane(1), keys.plane(0)", "own_ds.plane(0), keys.plane(0)"),
    ("the low part of K is forgotten", "own_ds.plane(0), keys.plane(1)", "own_ds.plane(0), keys.plane(0)"),
    ("dQ is of the other group's keys", "keys(shared.k, own_rows());", "keys(shared.k, 0);"),
)


#: of backward_split_wgmma_roles.cu
BUGS_OF_ROLES = (
    ("dS is not fenced", "    fence_proxy_async();\n    arrive_by_warp(ds_cursor", "    arrive_by_warp(ds_cursor"),
    ("P is overwritten before it is read", "    p_cursor.wait_empty(shared.probabilities);\n", ""),
    ("P is read before it is there", "    p_cursor.wait_full(shared.probabilities);\n", ""),
    ("dS is overwritten before it is read", "    ds_cursor.wait_empty(shared.gradients);\n", ""),
    ("dS is read before it is there", "    cursor.wait_full(shared.gradients);\n", ""),
    ("dO and Q are not handed back", "    release_by_warp(this->far_channel(), cursor.slot);\n", ""),
    ("the low part of K is forgotten", "keys.plane(1) + half * kNext", "keys.plane(0) + half * kNext"),
    ("low parts of keys meet nothing", "+ x.low[i]) * (1.f", ") * (1.f"),
    ("half of dQ is added to the other", "add(first, before, 0);", "add(first, before, 1);"),
    ("the last half of dQ is forgotten", "  if (before >= 0) add(second, before, 1);\n}", "}"),
    ("columns of a second panel are those of the first", "take(sums, rest, kFirst / 2);", "take(sums, rest);"),
)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "bug"),
    [
        *(pytest.param("backward_split_wgmma", 16, bug, id=bug[0].replace(" ", "_")) for bug in (*BUGS, *BUGS_OF_BOTH)),
        *(
            pytest.param("backward_split_wgmma_roles", 72, bug, id=f"roles-{bug[0].replace(' ', '_')}")
            for bug in (*BUGS_OF_ROLES, *BUGS_OF_BOTH)
        ),
    ],
)
def test_bug_is_noticed(kernel, head_dim, bug):
    options = {"heads_q": 4, "heads_k": 2, "alibi": "h", "causal": True, "lengths": (150, 70), "head_dim": head_dim}
    made = Case("bugs", seq_q=140, seq_k=150, **options).make()
    for name in ("k", "v"):
        made[name][1, :, 70:] = np.nan
    call = problem.describe(*(made[n] for n in "qkv"), **made["options"])
    expectation, dout = Expectation(call, made["dout"]), made["dout"]
    out, lse = expectation.plain["out"], expectation.lse.astype(np.float32)

    def run(text: Sources, seed: int) -> None:
        found = kernels.backward(call, out, lse, dout, None, hopper(), seed, requested="wgmma", text=text)
        expectation.check_backward(found)

    must_be_noticed(Mutant(kernel, *bug), run, SEEDS)


# ---- choice ------------------------------------------------------------------------------------------------------------
def test_what_is_chosen():
    def chosen(case: Case, **at: Any) -> str:
        call, dout, _ = case.call()
        places = dict(plan.places_of(call.problem, {"q": call.q, "k": call.k, "v": call.v, "dout": dout, **at}))
        return select(call.problem, hopper(), places, backward=True)[0].name

    long = Case("long", batch=(), heads_q=1, heads_k=1, seq_q=256, seq_k=256, head_dim=64)
    assert chosen(long) == chosen(replace(long, causal=True)) == "wgmma"
    assert chosen(replace(long, head_dim_v=128)) == "wgmma"
    assert chosen(replace(long, head_dim_v=129)) == "mma"
    assert chosen(long, dlse=np.zeros((1, 256), np.float32)) == "mma"
    assert chosen(replace(long, seq_q=255)) == "simt"
