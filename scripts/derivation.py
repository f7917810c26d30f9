"""Derive FlashAttention's recurrence in figures: print each and fail if one is off.

Needs NumPy only.  Sections: what a score matrix costs in memory; the smallest example of a forgotten rescale; the tiled
forward against dense attention; its gradients against finite differences; where a forgotten rescale hides.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuflash import numpy_backend, problem

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Report:
    """Prints figures, each with what it must be, and counts those that are not."""

    off: int = 0
    seen: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        print(f"\n{title}")

    def figure(self, name: str, shown: str, must: str, right: bool) -> None:
        self.off += not right
        self.seen.append(name)
        print(f"  {name:<52} {shown:>12}   {must:<14} {'ok' if right else 'OFF'}")


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(report: Report) -> None:
    """The arrays of one call with batch · heads 32, 8192 positions, head_dim 128."""
    heads, seq, dim = 32, 8192, 128
    report.section(f"Memory of one call: batch x heads {heads}, seq {seq}, head_dim {dim}")
    for name, elements, size, must in (
        ("q, k or v, 16 bits", heads * seq * dim, 2, "64 MiB"),
        ("scores or weights, 16 bits", heads * seq * seq, 2, "4 GiB"),
        ("scores or weights, float32", heads * seq * seq, 4, "8 GiB"),
        ("log-sum-exp, float32: what is kept instead", heads * seq, 4, "1 MiB"),
    ):
        shown = binary_size(elements * size)
        report.figure(name, shown, must, shown == must)


def binary_size(count: int) -> str:
    unit = "GiB" if count >= 2**30 else "MiB"
    return f"{count / {'GiB': 2**30, 'MiB': 2**20}[unit]:.4g} {unit}"


# ---- the recurrence, with the mistake that is easily made ------------------------------------------------------------


def recurrence(s: Array, v: Array, block: int, *, rescale_l: bool = True, rescale_a: bool = True) -> Array:
    """Output of one query with scores s (seq_k,) and values v (seq_k, d_v); False forgets α on l or on a."""
    m, l, a = -math.inf, 0.0, np.zeros(v.shape[-1])  # noqa: E741 (the papers' letter)
    for start in range(0, len(s), block):
        part = slice(start, start + block)
        m_new = max(m, s[part].max())
        alpha, p = math.exp(m - m_new), np.exp(s[part] - m_new)
        l = (alpha if rescale_l else 1) * l + p.sum()  # noqa: E741
        a = (alpha if rescale_a else 1) * a + p @ v[part]
        m = m_new
    return a / l


def softmax(s: Array) -> Array:
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def example(report: Report) -> None:
    """Two blocks of two keys, the second 10 higher: only the second counts, so the output is nearly 1."""
    s, v = np.array([0.0, 0.0, 10.0, 10.0]), np.array([[0.0], [0.0], [1.0], [1.0]])
    report.section("Scores [0, 0 | 10, 10], values [0, 0 | 1, 1]")
    right = recurrence(s, v, 2)[0]
    report.figure("both l and a rescaled by alpha", f"{right:.7f}", "0.9999546", f"{right:.7f}" == "0.9999546")
    # α forgotten on a alone would not show here: a is still 0 when the maximum grows.
    wrong = recurrence(s, v, 2, rescale_l=False, rescale_a=False)[0]
    report.figure("neither rescaled", f"{wrong:.7f}", "0.5", wrong == 0.5)


def hidden_mistake(report: Report) -> None:
    """α is 1 as long as the maximum does not grow: a test whose maximum stands in the first block sees no mistake."""
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal(64), rng.standard_normal((64, 8))
    report.section("alpha forgotten on a alone: 64 keys in blocks of 16, one score 6 higher than the rest")
    for name, at, must, holds in (
        ("error, largest score in the first block (hidden)", 3, "<= 1e-15", lambda e: e <= 1e-15),
        ("error, largest score in the last block (visible)", 60, ">= 0.1", lambda e: e >= 0.1),
    ):
        scores = s.copy()
        scores[at] = s.max() + 6
        want = softmax(scores) @ v
        error = abs(recurrence(scores, v, 16, rescale_a=False) - want).max()
        report.figure(name, f"{error:.1e}", must, holds(error))
        error = abs(recurrence(scores, v, 16) - want).max()
        report.figure("  the same with alpha", f"{error:.1e}", "<= 1e-15", error <= 1e-15)


# ---- the tiled backend -----------------------------------------------------------------------------------------------


def forward_cases() -> Iterator[tuple[int, int, float]]:
    """(seq, block, size of the scores): 5 · 3 · 3 = 45 cases."""
    yield from itertools.product((1, 5, 16, 37, 64), (1, 7, 16), (1.0, 30.0, 1000.0))


def forward(report: Report) -> None:
    """Queries and keys are multiples of 1/64, so that their scores are exact and the error is the recurrence's own."""
    report.section("Tiled forward against dense attention, float64: lengths x blocks x sizes of the scores")
    rng, errors = np.random.default_rng(0), []
    for seq, block, size in forward_cases():
        q, k = (np.round(64 * rng.standard_normal((2, seq, 4))) / 64 for _ in range(2))
        v = rng.uniform(-1, 1, (2, seq, 4))
        call = problem.describe(q, k, v, scale=size)
        out, _ = numpy_backend.forward(call, block_q=block, block_k=block)
        errors.append(abs(out - softmax(size * (q @ k.swapaxes(-1, -2))) @ v).max())
    report.figure("cases", str(len(errors)), "45", len(errors) == 45)
    report.figure("largest error", f"{max(errors):.1e}", "<= 1e-15", max(errors) <= 1e-15)


def gradients(report: Report) -> None:
    """Loss Σ g ∘ out + Σ h ∘ lse of a causal call in small tiles."""
    report.section("Gradients of the tiled backward against finite differences, float64, tiles of 2 x 3")
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((2, seq, 3)) for name, seq in (("q", 5), ("k", 7), ("v", 7))}
    g, h = rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 5))
    blocks = {"block_q": 2, "block_k": 3}

    def loss() -> float:
        out, lse = numpy_backend.forward(problem.describe(**arrays, causal=True), **blocks)
        return float(np.vdot(g, out) + np.vdot(h, lse))

    call = problem.describe(**arrays, causal=True)
    exact = numpy_backend.backward(call, *numpy_backend.forward(call, **blocks), g, h, **blocks)
    for name, x in arrays.items():
        error = abs(getattr(exact, f"d{name}") - central_difference(loss, x)).max()
        report.figure(f"largest error of d{name}", f"{error:.1e}", "<= 1e-10", error <= 1e-10)


def central_difference(loss: Callable[[], float], x: Array, step: float = 1e-3) -> Array:
    """Gradient of the loss with respect to x, which is moved in place; five points, error of order step⁴."""
    gradient = np.empty_like(x)
    for at in np.ndindex(x.shape):
        there, values = x[at], []
        for n in (-2, -1, 1, 2):
            x[at] = there + n * step
            values.append(loss())
        x[at] = there
        gradient[at] = np.dot([1, -8, 8, -1], values) / (12 * step)
    return gradient


SECTIONS = (memory, example, forward, gradients, hidden_mistake)


def main() -> int:
    """Print all figures; returns the exit code, 1 if any is off."""
    report = Report()
    for section in SECTIONS:
        section(report)
    print(f"\n{len(report.seen)} figures, {report.off} off")
    return int(report.off > 0)


if __name__ == "__main__":
    sys.exit(main())
