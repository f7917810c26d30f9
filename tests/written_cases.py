"""Modifiers written as expressions, for every backend: by name, functions of the sizes of a call."""

from typing import Any

import numpy as np

from cuflash.modifiers import ALiBi, CudaFunction, Documents, MaskModifier, Modifier, ScoreModifier

BENT = """
Real square(Real x) { return x * x; }

// Towards 0, some times.
__device__ Real bent(Real s, Real warm, int times) {
  for (int i = 0; i < times; ++i) s /= 1 + warm * square(s);
  return s;
}
__device__ Real bent_by_s(Real s, Real warm, int times) {
  Real slope = 1;
  for (int i = 0; i < times; ++i) {
    const Real u = 1 + warm * square(s);
    slope *= (1 - warm * square(s)) / (u * u);
    s /= u;
  }
  return slope;
}
__device__ Real bent_by_warm(Real s, Real warm, int times) {
  Real partial = 0;
  for (int i = 0; i < times; ++i) {
    const Real u = 1 + warm * square(s);
    partial = (partial * (1 - warm * square(s)) - s * square(s)) / (u * u);
    s /= u;
  }
  return partial;
}
"""
KIN = """
bool kin(int q, int k, int limit) {  // whether halving brings both together, not below a limit
  while (q != k) {
    if (q < limit && k < limit) return false;
    if (q > k) q /= 2; else k /= 2;
  }
  return true;
}
"""


def bent(s: Any, warm: Any, times: Any) -> Any:
    for _ in range(times):
        s = s / (1 + warm * s * s)
    return s


def bent_by_s(s: Any, warm: Any, times: Any) -> Any:
    slope: Any = 1
    for _ in range(times):
        u = 1 + warm * s * s
        slope, s = slope * (1 - warm * s * s) / (u * u), s / u
    return slope


def bent_by_warm(s: Any, warm: Any, times: Any) -> Any:
    partial: Any = 0
    for _ in range(times):
        u = 1 + warm * s * s
        partial, s = (partial * (1 - warm * s * s) - s * s * s) / (u * u), s / u
    return partial


def kin(q: Any, k: Any, limit: Any) -> Any:
    q, k = np.broadcast_arrays(q, k)
    while (open_ := (q != k) & ~((q < limit) & (k < limit))).any():
        q, k = np.where(open_ & (q > k), q // 2, q), np.where(open_ & (q < k), k // 2, k)
    return q == k


def function() -> CudaFunction:
    """A score by a loop, with its derivatives."""
    return CudaFunction(
        BENT,
        "bent",
        derivatives={"s": "bent_by_s", "warm": "bent_by_warm"},
        twins={"bent": bent, "bent_by_s": bent_by_s, "bent_by_warm": bent_by_warm},
    )


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
        "function": (
            ScoreModifier(
                "bent(s, warm[h], times) + q % 2", bent=function(), warm=uniform(heads), times=3, gradients="warm"
            ),
            MaskModifier("kin(q, k, limit)", kin=CudaFunction(KIN, "kin", twins={"kin": kin}), limit=9),
        ),
    }


def forms(sizes: tuple[int, ...], dtype: Any) -> dict[str, tuple[tuple[Modifier, ...], dict[str, Any]]]:
    """What is often written, each with the options of a call that do the same, for arrays of a dtype."""
    _, heads, seq_q, seq_k = sizes
    rng = np.random.default_rng(0)
    real = np.float64 if dtype == np.float64 else np.float32
    slopes = np.array([0.5, 0.25, 0.125, 0.0625] * heads, real)[:heads]
    table, bucket = (
        rng.standard_normal((6, heads)).astype(dtype),
        np.minimum(np.arange(seq_q + seq_k, dtype=np.int32) // 9, 5),
    )
    ids_q, ids_k = (np.sort(rng.integers(0, 3, n)).astype(np.int32) for n in (seq_q, seq_k))
    q, k = np.arange(seq_q)[:, None], np.arange(seq_k)[None, :]
    cap = CudaFunction(
        """
        Real cap(Real s, Real c, Real r) { return c * tanh_of(s * r); }
        Real cap_by_s(Real s, Real c, Real r) { const Real t = tanh_of(s * r); return 1 - t * t; }
        """,
        "cap",
        derivatives={"s": "cap_by_s"},
        twins={"cap": lambda s, c, r: c * np.tanh(s / c), "cap_by_s": lambda s, c, r: 1 - np.tanh(s / c) ** 2},
    )
    far = table.astype(real)
    return {
        "alibi": (
            (ScoreModifier("s - slope[h] * abs(q + seq_k - seq_q - k)", slope=slopes),),
            {"modifiers": (ALiBi(slopes),)},
        ),
        "softcap": ((ScoreModifier("c * tanh(s / c)", c=2.0),), {"softcap": 2.0}),
        "softcap in CUDA": ((ScoreModifier("cap(s, c, r)", cap=cap, c=3.0, r=1 / 3.0),), {"softcap": 3.0}),
        "relative bias": (
            (ScoreModifier("s + table[bucket[q - k + last], h]", table=far, bucket=bucket, last=seq_k - 1),),
            {"bias": table[bucket[q - k + seq_k - 1]].transpose(2, 0, 1).copy()},
        ),
        "prefix": ((MaskModifier("k < prefix or k <= q", prefix=7),), {"mask": (k < 7) | (k <= q)}),
        "documents": (
            (MaskModifier("ids_q[q] == ids_k[k]", ids_q=ids_q, ids_k=ids_k),),
            {"modifiers": (Documents(ids_q, ids_k),)},
        ),
        "dilated": ((MaskModifier("(q - k) % 3 == 0"),), {"mask": (q - k) % 3 == 0}),
    }


#: the names of the forms
FORMS = ("alibi", "softcap", "softcap in CUDA", "relative bias", "prefix", "documents", "dilated")
#: the names of the chains
NAMES = ("slopes", "table", "clamped table", "composed", "masks", "everything", "function")
