"""Modifiers written as expressions, for every backend: by name, functions of the sizes of a call."""

from typing import Any

import numpy as np

from cuflash.modifiers import MaskModifier, Modifier, ScoreModifier


def chains(sizes: tuple[int, ...], real: Any = np.float32) -> dict[str, tuple[Modifier, ...]]:
    """Chains for a call of these (batch, heads_q, seq_q, seq_k): all types, indices, functions and gradients."""
    batch, heads, seq_q, seq_k = sizes
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(real)

    def uniform(*shape: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, shape).astype(real)

    distance = "abs(q + seq_k - seq_q - k)"
    ids = np.sort(rng.integers(0, 3, (batch, seq_k))).astype(np.int32)
    buckets = np.minimum(np.arange(seq_q + seq_k) // 9, 6).astype(np.int32)
    return {
        "slopes": (ScoreModifier(f"s - slope[h] * {distance}", slope=uniform(heads), gradients="slope"),),
        "table": (
            ScoreModifier(
                "s + rel[bucket[q - k + last], h]",
                rel=normal(7, heads),
                bucket=buckets,
                last=seq_k - 1,
                gradients="rel",
            ),
        ),
        "clamped table": (
            ScoreModifier(
                "s + rel[kv, q - k + 20] * far[b, h]", rel=normal(2, 31), far=uniform(1, heads), gradients=("rel",)
            ),
        ),
        "composed": (
            ScoreModifier(
                "s * heat[h] + rel[h, (q - k) // 4 + 9]",
                heat=uniform(heads),
                rel=normal(heads, 20),
                gradients=("heat", "rel"),
            ),
            ScoreModifier("c * tanh(s / c) + line[b, k]", c=3.0, line=normal(batch, seq_k), gradients="line"),
        ),
        "masks": (
            MaskModifier("ids[b, q + seq_k - seq_q] == ids[b, k] or b == 1 and k % 3 == 0", ids=ids),
            MaskModifier(
                "not hidden[h, q, 0] and (q - k) % period != 1", hidden=rng.random((heads, seq_q, 1)) < 0.2, period=5
            ),
        ),
        "everything": (
            ScoreModifier(
                "where(s > 0, s * warm[h], min(exp(s), 1.0) - 1) + max(full[b, h, q, k], low) / sqrt(1.0 + q)",
                warm=uniform(heads),
                full=normal(1, 1, seq_q, seq_k),
                low=-0.5,
                gradients=("warm", "full"),
            ),
            MaskModifier(
                f"{distance} < reach[h] and log(1.0 + k) >= 0 and open",
                reach=rng.uniform(9, 40, heads).astype(real),
                open=True,
            ),
        ),
    }


#: the names of the chains
NAMES = ("slopes", "table", "clamped table", "composed", "masks", "everything")
