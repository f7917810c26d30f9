"""Sinks in the emulator: every kernel that ends rows, the gradient of the logits, turns, packs, and bugs that must show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cuflash import Sinks, problem
from tests.cases import SINKS, Case
from tests.emulator import kernels
from tests.emulator.build import EmulatorError
from tests.emulator.kernels import check
from tests.emulator.mutants import sown
from tests.emulator.test_mma import target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)
from tests.packs import Judge, Pack

TARGETS = ((75, "float16"), (90, "bfloat16"), (80, "float32"), (90, "float64"))
small = pytest.mark.usefixtures("mma_tile", "simt_tile")


#: each option on one of them
CHOSEN = list(zip(SINKS, TARGETS, strict=True))


@small
@pytest.mark.parametrize(("name", "target"), CHOSEN, ids=lambda x: x if isinstance(x, str) else target_id(x))
def test_options(name: str, target: tuple[int, str]) -> None:
    """Each under three seeds of the schedule, and in turns under the other three."""
    case = Case(name, target[1], **{"seq_q": 37, "seq_k": 45, **SINKS[name]})
    check(case, target[0], (0, 1, 2))
    check(case, target[0], (3, 4, 5), deterministic=True)


@pytest.mark.parametrize(("name", "head_dim"), [("sinks", 16), ("sinks-batch", 136)])
def test_hopper(name: str, head_dim: int) -> None:
    """Both of its schedules of the backward, whose sums of rows are those of the same first pass."""
    check(
        Case(name, "bfloat16", **{**SINKS[name], "head_dim": head_dim, "seq_q": 150}), 90, (0, 1, 4), requested="wgmma"
    )


@small
@pytest.mark.parametrize(
    ("dtype", "backend"), [("bfloat16", "mma"), ("bfloat16", "wgmma"), ("float32", "simt")], ids=lambda x: x
)
def test_packed_sequences(dtype: str, backend: str) -> None:
    """Segments without keys have their sink alone, rows of no segment none."""
    pack = Pack((33, 0, 7, 1, 20, 0), (40, 9, 0, 65, 20, 0), behind=(9, 37), dtype=dtype)
    call, dout, dlse = replace(pack, sinks=True, causal=True, dlse=True).call()
    judge = Judge(call, dout, dlse)
    for seed in (0, 1, 4):
        out, lse = kernels.forward(call, 90, seed, requested=backend)
        judge.check_forward(out, lse)
        options = {"requested": backend, "deterministic": bool(seed % 2)}
        judge.check_backward(kernels.backward(call, out, lse, dout, dlse, 90, seed, **options))


@pytest.mark.parametrize("target", [(80, "float16"), (75, "float32")], ids=target_id)
def test_statistics(target: tuple[int, str]) -> None:
    call, _, _ = Case("statistics", target[1], **SINKS["sinks-batch"]).call()
    expectation = kernels.Expectation(call)
    for seed in (0, 3):
        out, lse, found = kernels.statistics(call, target[0], seed)
        expectation.check_forward(out, lse)
        expectation.check_statistics(found)


@small
@pytest.mark.parametrize("target", [(80, "bfloat16")], ids=target_id)
def test_logits_that_are_not_finite_or_far(target: tuple[int, str]) -> None:
    """-inf is no sink, NaN and +inf make their own head NaN, and what is far from the scores is exact."""
    made = Case("logits", target[1], heads_q=6, heads_k=6, seq_q=45, seq_k=33, causal=True).make()
    real = np.float64 if target[1] == "float64" else np.float32
    logits = np.array([-np.inf, np.nan, np.inf, -1e4, 1e4, 90], real)
    q, k, v = made["q"], made["k"], made["v"]
    call = problem.describe(q, k, v, causal=True, modifiers=[Sinks(logits)])
    plain = problem.describe(q, k, v, causal=True)
    out, lse = kernels.forward(call, target[0], 0)
    want, want_lse = kernels.forward(plain, target[0], 0)
    for x, y in ((out, want), (lse, want_lse)):
        np.testing.assert_allclose(x[:, 0].astype(float), y[:, 0].astype(float), rtol=1e-6)
        assert np.isnan(x[:, 1:3].astype(float)).all()
    few = problem.describe(q[:, 3:], k[:, 3:], v[:, 3:], causal=True, modifiers=[Sinks(logits[3:])])
    kernels.Expectation(few).check_forward(out[:, 3:], lse[:, 3:])
    gradients = kernels.backward(call, out, lse, made["dout"], None, target[0], 0)
    want_gradients = kernels.backward(plain, want, want_lse, made["dout"], None, target[0], 0)
    assert gradients.dsinks[0, 0] == 0
    np.testing.assert_allclose(gradients.dv[:, 0].astype(float), want_gradients.dv[:, 0].astype(float), atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("softmax.join_sink(p, place);", ""),
        ("return l[slot] == Real(0) ? Real(0) : this->weight[slot] / l[slot];", "return Real(1) / l[slot];"),
        (
            "fma_of(this->base[slot], kLog2, log_of(l[slot]))",
            "fma_of(m[slot], p.softmax_scale * kLog2, log_of(l[slot]))",
        ),
        ("-weight * row.delta", "weight * row.delta"),
        ("place.offset(p.sinks)", "0"),
    ],
)
@small
def test_bugs_are_found(old: str, new: str) -> None:
    """Each wrong line must show, or the tests above prove nothing."""
    case = Case("bugs", "float32", **SINKS["sinks-batch"])
    with pytest.raises((AssertionError, EmulatorError)):
        check(case, 80, (0,), text=sown(old, new))
