"""Plain attention: the whole score matrix in memory, by the array library's own products.

It is what cuflash is timed beside, and, since it rounds every stored matrix to the arrays' dtype, the yardstick of the
tolerance rule: cuflash may be wrong by at most twice what plain attention in the same dtype is wrong by, plus what a
different order of the sums changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray

#: units in the last place of the accumulator, relative to the largest value: what a different order of sums may change
FLOOR_ULPS = 16


class Gradients(NamedTuple):
    """Gradients of q, k and v, in their shapes."""

    dq: Array
    dk: Array
    dv: Array


@dataclass(frozen=True)
class PlainAttention:
    """Causal or full attention of (batch, heads, seq, dim) arrays; `xp` is NumPy or CuPy.

    `p`, of batch · heads_q · seq_q · seq_k elements, is what its backward needs from its forward.
    """

    xp: Any
    causal: bool

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Outputs (out, lse, p)."""
        xp = self.xp
        s = self.product(grouped(q, k), k[:, :, None].swapaxes(-1, -2))
        s = s.astype(accumulator(q), copy=False) * accumulator(q).type(1 / math.sqrt(q.shape[-1]))
        if self.causal:
            seq_q, seq_k = s.shape[-2:]
            s = xp.where(xp.tri(seq_q, seq_k, seq_k - seq_q, dtype=bool), s, s.dtype.type(-np.inf))
        m = s.max(-1, keepdims=True)
        m = xp.where(xp.isinf(m), m.dtype.type(0), m)
        s -= m
        xp.exp(s, out=s)
        total = s.sum(-1, keepdims=True)
        s /= xp.where(total == 0, total.dtype.type(1), total)
        p = s.astype(q.dtype, copy=False)
        out = self.product(p, v[:, :, None])
        with np.errstate(divide="ignore"):
            lse = (m + xp.log(total))[..., 0]
        return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1]), p

    def backward(self, dout: Array, q: Array, k: Array, v: Array, out: Array, p: Array) -> Gradients:
        """Gradients from the stored probabilities."""
        dout_g, out_g = grouped(dout, k), grouped(out, k)
        dv = self.product(p.swapaxes(-1, -2), dout_g)
        ds = self.product(dout_g, v[:, :, None].swapaxes(-1, -2)).astype(accumulator(q), copy=False)
        ds -= (dout_g.astype(ds.dtype, copy=False) * out_g.astype(ds.dtype, copy=False)).sum(-1, keepdims=True)
        ds *= p.astype(ds.dtype, copy=False)
        ds *= ds.dtype.type(1 / math.sqrt(q.shape[-1]))
        ds = ds.astype(q.dtype, copy=False)
        dq = self.product(ds, k[:, :, None])
        dk = self.product(ds.swapaxes(-1, -2), grouped(q, k))
        return Gradients(dq.reshape(q.shape), self.over_group(dk), self.over_group(dv))

    def product(self, a: Array, b: Array) -> Array:
        """Matrix product, rounded to the dtype of `a`; NumPy's 16-bit products would also add up in 16 bits."""
        if a.dtype.itemsize == 2 and (self.xp is np or a.dtype.kind != "f"):  # CuPy's products know no bfloat16
            return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)
        return a @ b

    def over_group(self, x: Array) -> Array:
        """Sum over the query heads that share a key head."""
        return x[:, :, 0] if x.shape[2] == 1 else x.astype(accumulator(x), copy=False).sum(2).astype(x.dtype)


def grouped(x: Array, k: Array) -> Array:
    """View (batch, heads_k, group, seq, dim) of an array with the query heads."""
    batch, heads_q, *rest = x.shape
    return x.reshape(batch, k.shape[1], heads_q // k.shape[1], *rest)


def accumulator(x: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def error(found: Array, exact: Array) -> float:
    """Largest absolute difference; infinite if one of the two is not finite and the other is, or another infinity."""
    found = np.asarray(found, np.float64)
    both = np.isfinite(found) & np.isfinite(exact)
    if not np.array_equal(found[~both], exact[~both], equal_nan=True):
        return math.inf
    return float(np.abs(found[both] - exact[both]).max(initial=0.0))


def allowed(plain: Array, exact: Array) -> float:
    """Largest error that the tolerance rule lets pass; `plain` is an output of plain attention."""
    size = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
    return 2 * error(plain, exact) + FLOOR_ULPS * float(np.finfo(accumulator(plain)).eps) * float(size)
