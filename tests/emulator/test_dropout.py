"""Dropout in the emulator: the numbers of every kernel bit for bit, turns, packs, seeds on the device, and sown bugs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cuflash import Dropout, dropout_mask, problem
from tests.cases import DROPOUT, DTYPES, STRIDES, Case
from tests.emulator import kernels
from tests.emulator.build import EmulatorError
from tests.emulator.kernels import check
from tests.emulator.mutants import sown
from tests.emulator.test_mma import TILES, target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)
from tests.packs import Judge, Pack

TARGETS = ((75, "float16"), (90, "bfloat16"), (80, "float32"), (90, "float64"))
#: each option on one of them, the first on all
CHOSEN = [*((name, TARGETS[i % 4]) for i, name in enumerate(DROPOUT)), *(("dropout", target) for target in TARGETS[1:])]
small = pytest.mark.usefixtures("mma_tile", "simt_tile")


@small
@pytest.mark.parametrize(("name", "target"), CHOSEN, ids=lambda x: x if isinstance(x, str) else target_id(x))
def test_options(name: str, target: tuple[int, str]) -> None:
    """Each under three seeds of the schedule, and in turns under the other three."""
    case = Case(name, target[1], **{"seq_q": 37, "seq_k": 45, **DROPOUT[name]})
    check(case, target[0], (0, 1, 2), deterministic=True)
    check(case, target[0], (3, 4, 5))


def test_warps_that_share_rows(mma_tile: Callable[..., None]) -> None:  # noqa: F811
    """They hand P over through shared memory, dropped already."""
    mma_tile(*TILES["two columns of warps"])
    check(Case("shared rows", "bfloat16", **{**DROPOUT["dropout-causal"], "head_dim": 32}), 80, (0, 4))


@pytest.mark.parametrize(
    ("tiles", "target"),
    [*(("small", target) for target in TARGETS), *(("shipped", target) for target in TARGETS[1:3])],
    ids=lambda x: x if isinstance(x, str) else target_id(x),
)
def test_every_kernel_drops_what_the_mask_says(
    request: pytest.FixtureRequest, tiles: str, target: tuple[int, str]
) -> None:
    """With the unit matrix for values outputs are weights, with it for dout dv is: not one of them is dropped otherwise.

    A window makes the plain kernels begin their tiles at any key; batch axes that cannot be merged count as one.
    """
    if tiles == "small":
        for name in ("mma_tile", "simt_tile"):
            request.getfixturevalue(name)
    dtype, n = DTYPES[target[1]], 80
    rng = np.random.default_rng(5)
    q, k = (STRIDES["last axis first"](0.1 * rng.standard_normal((2, 1, 2, n, 16))).astype(dtype) for _ in "qk")
    unit = np.broadcast_to(np.eye(n), (2, 1, 2, n, n)).astype(dtype)
    dropout = Dropout(0.5, 0x0123456789ABCDEF, 0xFEDCBA9876543210)
    call = problem.describe(q, k, unit, window=(30, None), modifiers=[dropout])
    out, lse = kernels.forward(call, target[0], 1)
    seen = np.arange(n) >= np.arange(n)[:, None] - 30
    kept = dropout_mask(dropout, (2, 1, 2, n, n)) & seen
    np.testing.assert_array_equal(out != 0, kept)
    gradients = kernels.backward(call, out, lse, unit, None, target[0], 1)
    np.testing.assert_array_equal(gradients.dv != 0, kept.swapaxes(-1, -2))
    assert 0.4 < kept.sum() / seen.sum() / 4 < 0.6


@small
@pytest.mark.parametrize("target", [(80, "bfloat16"), (90, "float32")], ids=target_id)
def test_packed_sequences(target: tuple[int, str]) -> None:
    """A segment has the numbers of a batch entry."""
    pack = Pack((33, 0, 7, 1, 20, 0), (40, 9, 0, 65, 20, 0), behind=(9, 37), dtype=target[1])
    call, dout, dlse = replace(pack, dropout=0.4, causal=True, dlse=True).call()
    judge = Judge(call, dout, dlse)
    for seed in (0, 1, 4):
        out, lse = kernels.forward(call, target[0], seed)
        judge.check_forward(out, lse)
        judge.check_backward(
            kernels.backward(call, out, lse, dout, dlse, target[0], seed, deterministic=bool(seed % 2))
        )


@small
@pytest.mark.parametrize("target", TARGETS[1:3], ids=target_id)
def test_seeds_in_memory(target: tuple[int, str]) -> None:
    """Numbers that lie in an array, as those on a device do, give the bits of those that the call carries."""
    made = Case("seeds", target[1], **{"seq_q": 37, "seq_k": 45, **DROPOUT["dropout"]}).make()
    (dropout,) = made["options"]["modifiers"]
    results = []
    for kind in (int, lambda x: np.array(x, np.uint64), lambda x: np.array(x, np.uint64).astype(np.int64)):
        chain = [replace(dropout, seed=kind(dropout.seed), offset=kind(dropout.offset))]
        call = problem.describe(made["q"], made["k"], made["v"], modifiers=chain)
        out, lse = kernels.forward(call, target[0], 0)
        kernels.Expectation(call).check_forward(out, lse)
        gradients = kernels.backward(call, out, lse, made["dout"], made["dlse"], target[0], 0, deterministic=True)
        results.append([x.tobytes() for x in (out, lse, *gradients)])
    assert results[0] == results[1] == results[2]


@small
@pytest.mark.parametrize(
    ("old", "new", "dtype"),
    [
        ("drop<true>(s, s_at, key, p, corner);", "", "bfloat16"),
        ("softmax.inverse(slot) * drop_scale(p) * value", "softmax.inverse(slot) * value", "bfloat16"),
        ("mark_dropped<true>(s, s_at, key, p, corner);", "", "bfloat16"),
        ("marked < Real(0) ? Real(0) : dp", "dp", "bfloat16"),
        ("is_odd ? other : own, is_odd ? own : other", "own, other", "bfloat16"),
        ("kept[i] = s[i] < Real(0) ? Real(0) : s[i];", "kept[i] = s[i];", "float32"),
        ("if (kDrops && next_head != place.head)", "if (false)", "bfloat16"),
        ("u32(place.entry(p)), u32(place.head)", "0u, u32(place.head)", "float32"),
    ],
)
def test_bugs_are_found(old: str, new: str, dtype: str) -> None:
    """Each wrong line must show, or the tests above prove nothing."""
    with pytest.raises((AssertionError, EmulatorError)):
        check(Case("bugs", dtype, **DROPOUT["dropout-causal"]), 80, (0,), text=sown(old, new), deterministic=True)
