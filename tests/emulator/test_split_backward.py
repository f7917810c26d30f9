"""The backward of float32 on tensor cores in the emulator: options, tiles, head sizes, heads that its planes do not stand for.

The forward's results come from plain attention, so that nothing but the backward's kernels is built.  Rounding within tensor
cores is not what it is on a device; what numbers of two planes are good for can be seen here all the same.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from cuflash import problem, reference, tuning
from cuflash.backends import Device, described_device
from cuflash.errors import UnsupportedError
from cuflash.problem import Call
from cuflash.schedules import split
from tests.cases import OPTIONS, STRIDES, Case
from tests.emulator import kernels
from tests.emulator.kernels import SEEDS
from tests.tolerance import Expectation

TILE = tuning.BackwardTile(block_q=32, block_k=32, warps=4, query_warps=2, stages=1, dout_stages=1, blocks_per_sm=1)


@pytest.fixture(autouse=True)
def tile(monkeypatch):
    """Sets the only tile that there is."""

    def force(row=TILE):
        monkeypatch.setattr(tuning, "BACKWARD_SPLIT", (row,))

    force()
    return force


class Watch:
    """What the kernels leave in their workspace."""

    def __init__(self, call: Call) -> None:
        self.problem = call.problem
        self.decisions: np.ndarray | None = None
        self.dq_sums: set[bytes] = set()

    def __call__(self, arrays: Any) -> None:
        heads = self.problem.batch_size * self.problem.heads_k
        words = 2 * self.problem.batch_size * (self.problem.heads_q + self.problem.heads_k)
        magnitudes = arrays.get("magnitudes", np.zeros(0, np.uint8))
        self.decisions = magnitudes.view(np.int32)[words : words + heads].astype(bool)
        self.dq_sums.add(arrays["dq_sum"].tobytes() if "dq_sum" in arrays else b"")


def check_call(
    call: Call, dout: Any, dlse: Any, arch: int | Device = 90, seeds: Any = SEEDS, suits: Any = True, **options: Any
) -> Watch:
    """Judge the gradients of a call; `suits`, of all heads of keys or one by one, is what must be decided on the device."""
    options = {"requested": "mma", **options}
    expectation, watch = Expectation(call, dout, dlse), Watch(call)
    out, lse = expectation.plain["out"], expectation.lse.astype(np.float32)
    for seed in seeds:
        found = kernels.backward(call, out, lse, dout, dlse, arch, seed, watch=watch, **options)
        expectation.check_backward(found)
        assert watch.decisions.tolist() == np.broadcast_to(suits, watch.decisions.shape).tolist()
    return watch


def check(case: Case, arch: int | Device = 90, seeds: Any = SEEDS, **options: Any) -> Watch:
    """The same for a case."""
    call, dout, dlse = case.call()
    return check_call(call, dout, dlse, arch, seeds, **options)


# ---- options ---------------------------------------------------------------------------------------------------------
#: those that share a kernel share its build
CHOSEN = (
    "plain",
    "scale",
    "wide-values",
    "causal",
    "causal-more-queries",
    "groups",
    "lse-gradient",
    "everything",
    "everything-mostly-hidden",
    "sparse-everything",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_options(name):
    case = Case(name, **{"seq_q": 37, "seq_k": 45, **OPTIONS[name]})
    check(case, suits=True if case.lengths is None else suited(case))


def suited(case: Case) -> list[bool]:
    """All heads: also one without keys, whose magnitudes are those of nothing."""
    return [True] * (int(np.prod(case.batch)) * case.heads_k)


def test_options_without_undefined_behaviour():
    check(Case("causal", **OPTIONS["causal"]), seeds=(0,), sanitize=True)


def test_dropout():
    check(replace(Case("dropout", heads_q=4, causal=True, seq_q=45, seq_k=33, dlse=True), dropout=0.5))


# ---- tiles, lengths, head sizes --------------------------------------------------------------------------------------
TILES = {
    "two stages": (90, TILE._replace(stages=2, dout_stages=2)),
    "one column of warps": (80, TILE._replace(query_warps=1, warps=2)),
    "four columns of warps": (90, TILE._replace(block_q=64, query_warps=4, warps=8)),
}


@pytest.mark.parametrize("name", TILES)
def test_kinds_of_tiles(tile, name):
    arch, row = TILES[name]
    tile(row)
    case = Case("tile", batch=(), heads_q=2, heads_k=1, head_dim=64, causal=True, dlse=True)
    for seed, (extra_q, extra_k) in enumerate(((-1, 1), (1, -1), (0, 0))):
        lengths = {"seq_q": 2 * row.block_q + extra_q, "seq_k": row.block_k + extra_k}
        check(replace(case, **lengths), arch, (2 * seed, 2 * seed + 1))


@pytest.mark.parametrize(("arch", "head_dim"), [(90, 64), (80, 128)])
def test_shipped_tiles(monkeypatch, arch, head_dim):
    monkeypatch.undo()
    case = Case("shipped", batch=(), heads_q=1, heads_k=1, seq_q=130, seq_k=100, head_dim=head_dim, causal=True)
    check(case, arch, (1, 3))


def test_lengths():
    seeds = count()
    for seq_q in (1, 31, 32, 33, 65):
        for seq_k in (1, 31, 32, 33, 65):
            case = Case("lengths", batch=(), heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, causal=seq_q % 2 == 1)
            check(replace(case, head_dim=24), seeds=(next(seeds),))


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(empty):
    check(replace(Case("empty"), **empty), seeds=(0,))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (40, 24)])
def test_head_sizes(head_dim, head_dim_v):
    check(Case("dims", batch=(1,), head_dim=head_dim, head_dim_v=head_dim_v), seeds=(0, 1))


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides):
    case = Case("strides", strides=strides, layout="bshd", head_dim=15, causal=True, dlse=True)
    check(case, seeds=(0, 1))
    check(case, seeds=(2,), place=STRIDES["padded"])


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", ["x30", "logits about -200", "logits about -1e5", "dominant key late", "constant"])
def test_values(values):
    check(Case("values", values=values, causal=True, dlse=True), seeds=(0, 1))


magnitudes = pytest.mark.parametrize(
    "factors", [(1e-12, 1e9, 1e-30, 1e25), (1e15, 1e-15, 1e20, 1e-35), (1, 1, 1e-20, 1e-8)], ids=str
)


def in_magnitudes(factors: tuple[float, ...], **options: Any) -> tuple[Call, np.ndarray]:
    """A call and its dout, each array in a scale of its own; dS itself may be far from 1."""
    made = Case("magnitudes", causal=True).make()
    q, k, v, dout = (
        (made[n] * np.float32(x)).astype(np.float32) for n, x in zip(("q", "k", "v", "dout"), factors, strict=True)
    )
    scale = float(0.25 / (np.float64(factors[0]) * factors[1]))
    return problem.describe(q, k, v, causal=True, scale=scale, **options), dout


@magnitudes
def test_magnitudes(factors):
    call, dout = in_magnitudes(factors)
    assert np.isfinite(Expectation(call, dout).plain["dk"]).all()
    check_call(call, dout, None, seeds=(0, 1))


def spoiled(part: str, change: Any, seq_k: int = 45, head_dim: int = 16) -> tuple[Call, np.ndarray]:
    """A call of two batch entries with two heads of keys each, and its dout, of which one head is changed in one array."""
    made = Case("spoiled", heads_q=4, heads_k=2, seq_q=70, seq_k=seq_k, head_dim=head_dim, causal=True).make()
    head = made[part][1, 3 if part in ("q", "dout") else 1]
    change(head)
    return problem.describe(made["q"], made["k"], made["v"], causal=True), made["dout"]


def shrink_a_row(head: np.ndarray) -> None:
    head[5] *= np.float32(2.0**-16)


def grow_an_element(head: np.ndarray) -> None:
    head[40, 3] *= np.float32(2.0**20)


def clear_rows(head: np.ndarray) -> None:
    head[3:30] = 0


def shrink_elements(head: np.ndarray) -> None:
    head[:, 1:9] *= np.float32(2.0**-30)


@pytest.mark.parametrize("part", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("change", [shrink_a_row, grow_an_element], ids=lambda f: f.__name__)
def test_heads_that_do_not_suit(part, change):
    call, dout = spoiled(part, change)
    check_call(call, dout, None, seeds=(0, 1), suits=[True, True, True, False])


@pytest.mark.parametrize("part", ["k", "dout"])
@pytest.mark.parametrize("change", [clear_rows, shrink_elements], ids=lambda f: f.__name__)
def test_zeros_and_small_elements_suit(part, change):
    call, dout = spoiled(part, change)
    check_call(call, dout, None, seeds=(0, 1))


def test_values_that_are_not_finite():
    """They are seen by whom they meet, and leave other heads and rows alone."""
    call, dout = spoiled("dout", lambda head: head.__setitem__((66, 2), np.inf))
    call.k[0, 0, 40] = np.nan
    watch, lse = Watch(call), np.zeros((2, 4, 70), np.float32)
    found = kernels.backward(call, np.zeros_like(dout), lse, dout, None, 90, 0, requested="mma", watch=watch)
    assert watch.decisions.tolist() == [False, True, True, False]
    assert np.isnan(found.dq[0, :2, 65:]).all()  # those that see key 40
    assert np.isnan(found.dq[1, 3, 66]).all()
    assert not np.isfinite(found.dv[1, 1, 0]).all()
    for x in (
        found.dq[0, :2, :32],
        found.dq[0, 2:],
        found.dq[1, :3],
        found.dq[1, 3, :64],
        found.dk[0, 1],
        found.dv[1, 0],
    ):
        assert np.isfinite(x).all()


def test_a_row_of_nan_leaves_others_alone():
    """dlse is not split: its NaN must not reach the scale of a tile, nor an infinite one."""
    call, dout, dlse = Case("dlse", batch=(), heads_q=1, heads_k=1, dlse=True).call()
    expectation, want = Expectation(call, dout, dlse), reference.backward(call, dout, dlse)
    out, lse = expectation.plain["out"], expectation.lse.astype(np.float32)
    for bad in (np.nan, np.inf):
        spoiled_dlse = dlse.copy()
        spoiled_dlse[0, 7] = bad
        found = kernels.backward(call, out, lse, dout, spoiled_dlse, 90, 0, requested="mma")
        others = np.arange(33) != 7
        np.testing.assert_allclose(found.dq[:, others], want.dq[:, others], rtol=1e-4, atol=1e-5)
        assert not np.isfinite(found.dq[:, 7]).any()


def test_one_plane_is_as_good_as_tf32():
    case = Case("tf32", causal=True, dlse=True)
    made = case.make()
    calls = [problem.describe(made["q"], made["k"], made["v"], causal=True, precision=x) for x in (None, "tf32")]
    expectation = Expectation(calls[0], made["dout"], made["dlse"])
    want = reference.backward(calls[0], made["dout"], made["dlse"])
    out, lse = expectation.plain["out"], expectation.lse.astype(np.float32)
    exact, coarse = (
        kernels.backward(call, out, lse, made["dout"], made["dlse"], 90, 0, requested="mma") for call in calls
    )
    for name in ("dq", "dk", "dv"):
        right = getattr(want, name)
        errors = [abs(getattr(x, name) - right).max() / abs(right).max() for x in (exact, coarse)]
        assert errors[0] < 2e-6
        assert 2.0**-14 < errors[1] < 2.0**-8


# ---- turns -----------------------------------------------------------------------------------------------------------
def test_in_turns():
    """Blocks run at once and add to dq in one order, the heads that the planes do not stand for too."""
    call, dout = spoiled("k", shrink_a_row, 140)
    common = {"residents": 3, "suits": [True, True, True, False]}
    assert len(check_call(call, dout, None, deterministic=True, **common).dq_sums) == 1
    assert len(check_call(call, dout, None, **common).dq_sums) > 1


# ---- the choice of a tile --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
def test_tiles_fit(monkeypatch, arch, precision):
    """The kernel of the heads that are left works in the same tiles."""
    monkeypatch.undo()
    limit = described_device(arch).shared_limit
    for head_dim in (1, 16, 40, 64, 96, 128):
        made = Case("fits", head_dim=head_dim, seq_q=300, seq_k=300).make()
        call = problem.describe(made["q"], made["k"], made["v"], precision=precision)
        main = split.backward(call.problem, limit, True)
        rest = split.backward_rest(call.problem, limit, True, main)
        assert main.shared_bytes(4) * main.blocks_per_sm <= limit
        assert rest.shared_bytes(4) <= limit
        assert (rest.block_q, rest.block_k, rest.dq_width) == (main.block_q, main.block_k, main.dq_width)


def test_what_does_not_fit_is_refused():
    call, dout, dlse = Case("wide", head_dim=256, seq_q=9, seq_k=9).call()
    with pytest.raises(UnsupportedError, match="mma: head_dim 256 with head_dim_v 256: no tile of the backward fits"):
        check_call(call, dout, dlse, 86)
