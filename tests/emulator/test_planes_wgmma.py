"""precision="tf32" on Hopper in the emulator: the kernels of 16 bits, which multiply one plane of each array, and write float32.

Errors are those of numbers with 11 bits, in units of the largest result; the tolerance rule asks float32 for more.  What their
schedules do is tested with arrays of 16 bits (`test_wgmma.py`, `test_wgmma_backward.py`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from cuflash import plan, problem, reference, tuning
from cuflash.backends import select
from cuflash.errors import UnsupportedError
from cuflash.modifiers import ScoreModifier
from cuflash.problem import Call
from cuflash.schedules import split
from tests.cases import DROPOUT, OPTIONS, STRIDES, Case
from tests.emulator import Mutant, kernels, must_be_noticed
from tests.emulator.kernels import SEEDS
from tests.emulator.mutants import Sources
from tests.emulator.test_split import UNSUITED, decisions, scaled
from tests.emulator.test_split_backward import (
    clear_rows,
    grow_an_element,
    in_magnitudes,
    magnitudes,
    shrink_a_row,
    shrink_elements,
    spoiled,
)
from tests.emulator.test_wgmma import hopper
from tests.tolerance import Expectation

LARGEST, MEAN = 3e-3, 4e-4  # error and its root mean square, in units of the largest result
GRADIENTS = ("dq", "dk", "dv")


def coarse(case: Case) -> tuple[Call, np.ndarray]:
    """A case that asks for TF32, and its dout."""
    call, dout, _ = case.call()
    return replace(call, problem=replace(call.problem, precision="tf32")), dout


def judge(found: np.ndarray, right: np.ndarray, name: str, times: float = 1, least: float = 1e-300) -> None:
    error, unit = abs(found - right), max(abs(right).max(), least)
    assert np.isfinite(found).all(), name
    assert error.max() <= times * LARGEST * unit, f"{name}: {error.max() / unit}"
    assert np.sqrt((error**2).mean()) <= times * MEAN * unit, f"{name}: {np.sqrt((error**2).mean()) / unit}"


def check_forward(call: Call, seeds: Any = SEEDS, left: int = 0, times: float = 1, **options: Any) -> None:
    """So many heads of keys are left to plain float32; where there are none its kernel is left out."""
    expectation, seen = Expectation(call), []
    without = () if left else ("forward_simt",)
    for seed in seeds:
        run = {"requested": "wgmma", "without": without, "watch": lambda x: seen.append(decisions(call, x)), **options}
        out, lse = kernels.forward(call, hopper(), seed, **run)
        judge(out, expectation.out, "out", times)
        finite = np.isfinite(expectation.lse)
        assert (np.isfinite(lse) == finite).all()
        assert (abs(lse[finite] - expectation.lse[finite]) <= 4e-3 * times).all()
        assert (seen[-1] == 0).sum() == left


def check_backward(
    call: Call,
    dout: np.ndarray,
    seeds: Any = SEEDS,
    left: int = 0,
    least: float = 1e-300,
    multiprocessors: int = 2,
    **options: Any,
) -> None:
    """Gradients that may be 0 altogether are judged in units of `least`."""
    device = hopper(multiprocessors)
    expectation, want, seen = Expectation(call, dout), reference.backward(call, dout), []
    out, lse = expectation.plain["out"], expectation.lse.astype(np.float32)
    without = () if left else ("backward_simt",)
    for seed in seeds:
        run = {"requested": "wgmma", "without": without, "watch": lambda x: seen.append(decisions(call, x)), **options}
        found = kernels.backward(call, out, lse, dout, None, device, seed, **run)
        for name in GRADIENTS:
            judge(getattr(found, name), getattr(want, name), name, least=least)
        assert (seen[-1] == 0).sum() == left


# ---- options ---------------------------------------------------------------------------------------------------------
#: what the backward adds to, or leaves to mma
LEFT = ("bias", "dlse", "everything", "sparse", "documents", "blocks", "dropout", "lse")


def taken(name: str) -> bool:
    return not any(part in name for part in LEFT)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_forward(name):
    case = Case(name, **{**OPTIONS[name], "seq_q": 131, "seq_k": 150})
    call, _ = coarse(replace(case, dlse=False))
    check_forward(call, (0, 1), times=3 if "softcap" in name or "everything" in name else 1)


@pytest.mark.parametrize("name", [name for name in OPTIONS if taken(name)])
def test_options_of_the_backward(name):
    case = Case(name, **{**OPTIONS[name], "seq_q": 131, "seq_k": 150})
    check_backward(*coarse(replace(case, dlse=False)), (0, 1), least=4)


def test_dropout_and_tiles_are_left_to_the_other_kernel():
    call, _ = coarse(Case("dropout", **{**next(iter(DROPOUT.values())), "seq_q": 131, "seq_k": 150}))
    places = plan.places_of(call.problem, plan.forward_arrays(call, np.zeros_like(call.q), None))
    made = plan.plan_forward.__wrapped__(call.problem, hopper(), places, "wgmma")
    assert made.main.config.kernel == "forward_split_wgmma"


# ---- tiles, lengths, head sizes, strides -------------------------------------------------------------------------------
@pytest.mark.parametrize("row", dict.fromkeys(tuning.FORWARD_WGMMA_PLANE), ids=lambda row: "-".join(map(str, row[:-2])))
def test_shipped_tiles(monkeypatch, row):
    monkeypatch.setattr(tuning, "FORWARD_WGMMA_PLANE", (row,))
    case = Case(
        "shipped", batch=(), heads_q=2, heads_k=1, seq_q=row.block_q + 1, seq_k=2 * row.block_k + 1, causal=True
    )
    check_forward(coarse(replace(case, head_dim=min(row.max_head_dim, 256)))[0], (1, 2))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(head_dim):
    seeds = count()
    for seq_q in (1, 65, 129):
        for seq_k in (1, 127, 129):
            case = Case("lengths", batch=(), heads_q=2, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=seq_q != seq_k)
            check_backward(*coarse(replace(case, head_dim=head_dim)), (next(seeds),), least=4)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (40, 24), (24, 120), (128, 80)])
def test_head_sizes(head_dim, head_dim_v):
    call, dout = coarse(Case("dims", batch=(1,), head_dim=head_dim, head_dim_v=head_dim_v, causal=True))
    check_forward(call, (0,))
    check_backward(call, dout, (4,))


@pytest.mark.parametrize("name", STRIDES)
def test_strides(name):
    """Tensor maps describe planes, and results go straight into the arrays: however these lie, none is refused."""
    for seed, layout in ((2, "bhsd"), (5, "bshd")):
        call, dout = coarse(Case(name, strides=name, layout=layout, head_dim=20))
        check_forward(call, (seed,))
        check_backward(call, dout, (seed,), least=4)
        check_backward(call, dout, (seed,), least=4, place=STRIDES["padded"])


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}], ids=str)
def test_empty(empty):
    call, _ = coarse(replace(Case("empty"), **empty))
    with pytest.raises(UnsupportedError, match="an array is empty"):
        kernels.forward(call, hopper(), requested="wgmma")


# ---- values ------------------------------------------------------------------------------------------------------------
@magnitudes
def test_magnitudes(factors):
    call, dout = in_magnitudes(factors, precision="tf32")
    check_forward(call, (0,))
    check_backward(call, dout, (0, 1))


def test_heads_of_a_group_in_scales_of_their_own():
    """Their gradients of keys and values add up in one unit; of those that lie too far apart nobody is answered by planes."""
    made = Case("group", heads_q=4, heads_k=2, seq_q=70, seq_k=90).make()
    for part in ("q", "dout"):
        made[part][:, 1] *= np.float32(2.0**-6)
        made[part][:, 2] *= np.float32(2.0**7)
    call = problem.describe(*(made[n] for n in "qkv"), scale=2.0**-10, precision="tf32")
    check_backward(call, made["dout"], (0, 1))
    made["dout"][:, 1] *= np.float32(2.0**-9)
    check_backward(call, made["dout"], (0,), left=2)


def test_groups_of_heads_in_several_tiles(monkeypatch):
    monkeypatch.setattr(split, "SPLIT_PIECES", 1)
    monkeypatch.setattr(split, "SPLIT_PARTS", 0)
    made = Case("group", heads_q=4, heads_k=2, seq_q=70, seq_k=90, head_dim=128).make()
    for part in ("q", "dout"):
        made[part][:, 1] *= np.float32(2.0**-6)
    call = problem.describe(*(made[n] for n in "qkv"), scale=2.0**-8, precision="tf32")
    for residents in (1, 4):
        check_backward(call, made["dout"], (0, 1), multiprocessors=16, residents=residents)


def test_the_largest_gradients_do_not_overflow():
    """All numbers of a head as large as its largest, of which delta takes nothing: dS at its bound."""
    made = Case("largest", batch=(), heads_q=1, heads_k=1, seq_q=3, seq_k=2, head_dim=128).make()
    for part in ("q", "k", "v", "dout"):
        made[part][...] = np.float32(1.999)
    for part in ("k", "v"):
        made[part][0, 1] *= -1  # scores are about 0, so P is 1/2 twice, and delta 0
    call = problem.describe(*(made[n] for n in "qkv"), scale=1e-9, precision="tf32")
    check_backward(call, made["dout"], (0,), least=0)


@pytest.mark.parametrize("name", [name for name in UNSUITED if name not in ("infinity", "not a number")])
def test_heads_that_are_left_to_plain_float32(name):
    call = scaled(**UNSUITED[name])
    check_forward(problem.describe(call.q, call.k, call.v, precision="tf32"), (0,), left=1)


@pytest.mark.parametrize(
    ("part", "change"),
    [*((part, shrink_a_row) for part in ("q", "k", "v", "dout")), ("v", grow_an_element), ("dout", grow_an_element)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_heads_that_do_not_suit(part, change):
    call, dout = spoiled(part, change)
    coarse_call = problem.describe(call.q, call.k, call.v, causal=True, precision="tf32")
    expectation, want = Expectation(coarse_call, dout), reference.backward(coarse_call, dout)
    out, lse = expectation.plain["out"], expectation.lse.astype(np.float32)
    found = kernels.backward(coarse_call, out, lse, dout, None, hopper(), 1, requested="wgmma")
    for name in GRADIENTS:  # the heads that are spoiled, as exact as float32
        got, right = (x[1, (2 if name == "dq" else 1) :] for x in (getattr(found, name), getattr(want, name)))
        assert abs(got - right).max() <= 1e-4 * abs(right).max()
        got, right = (x[0] for x in (getattr(found, name), getattr(want, name)))
        judge(got, right, name)


@pytest.mark.parametrize("change", [clear_rows, shrink_elements], ids=lambda f: f.__name__)
def test_zeros_and_small_elements_suit(change):
    call, dout = spoiled("dout", change)
    check_backward(problem.describe(call.q, call.k, call.v, causal=True, precision="tf32"), dout, (0,))


def test_keys_beyond_the_length_are_not_read():
    """Nobody has written their planes, which are NaN here."""
    made = Case("lengths", seq_q=140, seq_k=150, lengths=(20, 0), causal="top_left").make()
    for name in ("k", "v"):
        made[name][0, :, 20:] = np.nan
        made[name][1] = np.inf
    call = problem.describe(*(made[n] for n in "qkv"), precision="tf32", **made["options"])
    check_forward(call)
    check_backward(call, made["dout"])


# ---- bugs that must be noticed -------------------------------------------------------------------------------------------
BUGS = (
    ("backward_wgmma", "dP keeps the planes' units", "fma_of(dp, units.of_dp, -delta)", "(dp - delta)"),
    ("backward_wgmma", "dK keeps its lift", "PowerOfTwo(-ds - q)", "PowerOfTwo(-q)"),
    ("backward_wgmma", "dV keeps its lift", "PowerOfTwo(-kProbabilityLift - dout)", "PowerOfTwo(-dout)"),
    ("backward_convert_mma", "dQ has the units of dK", "PowerOfTwo(-ds - k)", "PowerOfTwo(-ds - q)"),
    (
        "backward_convert_mma",
        "sums of plain float32 are taken for the planes'",
        "if (is_split(p, place)) {",
        "if (true) {",
    ),
    ("backward_delta", "delta is not lifted", "delta().times(statistics.delta)", "delta().times(0.f)"),
    ("backward_delta", "P is not lifted", "statistics.shift -= kProbabilityLift;", ""),
    ("backward_wgmma", "heads of others are answered too", "if (kHasPlanes && !is_split(p, work.place)) return;", ""),
    (
        "split_planes",
        "heads of a group have exponents of their own",
        "return Config::kGrouped && SplitShape::is_of_queries(array) ? p.group : 1;",
        "return 1;",
    ),
)


@pytest.mark.parametrize(("kernel", *("name", "old", "new")), BUGS, ids=lambda x: x.replace(" ", "_")[:40])
def test_bug_is_noticed(kernel, name, old, new):
    made = Case("bugs", heads_q=4, heads_k=2, seq_q=70, seq_k=90, causal=True).make()
    for part in ("q", "dout"):
        made[part][:, 1] *= np.float32(2.0**-5)
    made["k"] *= np.float32(2.0**9)  # in other units than the queries
    shrink_a_row(made["k"][1, 1])
    call = problem.describe(*(made[n] for n in "qkv"), causal=True, scale=2.0**-12, precision="tf32")
    dout, expectation, want = made["dout"], Expectation(call, made["dout"]), reference.backward(call, made["dout"])
    out, lse = expectation.plain["out"], expectation.lse.astype(np.float32)

    def run(text: Sources, seed: int) -> None:
        found = kernels.backward(call, out, lse, dout, None, hopper(), seed, requested="wgmma", text=text)
        for gradient in GRADIENTS:
            for entry in range(2):
                judge(getattr(found, gradient)[entry], getattr(want, gradient)[entry], gradient)

    must_be_noticed(Mutant(kernel, name, old, new), run, (0, 1))


# ---- choice ------------------------------------------------------------------------------------------------------------
def chosen(case: Case, *, offer: str = "", **at: Any) -> tuple[str, str]:
    """The backend of the backward, and why wgmma is not it."""
    call, dout = coarse(case)
    arrays = {"q": call.q, "k": call.k, "v": call.v, "dout": dout, **at}
    backend, reasons = select(
        call.problem, hopper(), dict(plan.places_of(call.problem, arrays)), backward=True, offer=offer
    )
    return backend.name, reasons.get("wgmma", "")


def test_what_the_backward_leaves_to_mma():
    long = Case("long", batch=(), heads_q=1, heads_k=1, seq_q=256, seq_k=256, head_dim=64)
    assert chosen(long)[0] == chosen(replace(long, causal=True, softcap=2.0))[0] == "wgmma"
    for case, reason in (
        (replace(long, head_dim=136), "takes heads of 128 at most"),
        (replace(long, bias="b1qk"), "adds to no gradients of bias"),
        (replace(long, dropout=0.5), "random numbers of Dropout"),
    ):
        name, why = chosen(case)
        assert name == "mma"
        assert reason in why
    assert chosen(long, dlse=np.zeros((1, 256), np.float32)) == (
        "mma",
        "its backward of float32 takes no gradient of lse, which nothing bounds",
    )
    assert chosen(long, offer="in_turns") == ("mma", "it has no deterministic backward of float32")


def test_expressions_with_slopes_are_left_to_mma():
    made = Case("slope", batch=(), heads_q=1, heads_k=1, seq_q=256, seq_k=256, head_dim=8).make()
    call = problem.describe(*(made[n] for n in "qkv"), precision="tf32", modifiers=(ScoreModifier("s * s"),))
    places = dict(plan.places_of(call.problem, {"q": call.q, "k": call.k, "v": call.v}))
    assert "whose derivative nothing bounds" in select(call.problem, hopper(), places, backward=True)[1]["wgmma"]
