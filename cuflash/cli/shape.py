"""The sizes of an attention call, as the command line takes them, and random arrays of these sizes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    batch: int
    heads_q: int
    heads_k: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int

    def __str__(self) -> str:
        heads = either(self.heads_q, self.heads_k)
        return (
            f"batch {self.batch}, heads {heads}, seq {either(self.seq_q, self.seq_k)}, "
            f"head_dim {either(self.head_dim, self.head_dim_v)}"
        )

    @property
    def q(self) -> tuple[int, int, int, int]:
        """Shape of the queries."""
        return (self.batch, self.heads_q, self.seq_q, self.head_dim)

    @property
    def k(self) -> tuple[int, int, int, int]:
        """Shape of the keys."""
        return (self.batch, self.heads_k, self.seq_k, self.head_dim)

    @property
    def v(self) -> tuple[int, int, int, int]:
        """Shape of the values."""
        return (self.batch, self.heads_k, self.seq_k, self.head_dim_v)

    @property
    def out(self) -> tuple[int, int, int, int]:
        """Shape of the output."""
        return (self.batch, self.heads_q, self.seq_q, self.head_dim_v)

    def arrays(self, dtype: str, seed: int = 0) -> tuple[Any, Any, Any, Any]:
        """NumPy arrays q, k, v and dout, normally distributed."""
        rng = np.random.default_rng(seed)
        q, k, v, dout = (
            rng.standard_normal(sizes, np.float32).astype(host_dtype(dtype))
            for sizes in (self.q, self.k, self.v, self.out)
        )
        return q, k, v, dout

    def operations(self, direction: str, causal: bool) -> float:
        """Floating-point operations of the matrix products: two products forward, five backward, seven in a step."""
        forward = 2.0 * (self.head_dim + self.head_dim_v)
        backward = 2.0 * (3 * self.head_dim + 2 * self.head_dim_v)
        each = {"forward": forward, "backward": backward, "step": forward + backward}[direction]
        return self.batch * self.heads_q * self.pairs(causal) * each

    def pairs(self, causal: bool) -> float:
        """Query-key pairs per head; each on the causal diagonal counts half, so that seq · seq gives seq²/2."""
        if not causal:
            return float(self.seq_q * self.seq_k)
        if self.seq_q <= self.seq_k:
            return self.seq_q * self.seq_k - self.seq_q**2 / 2
        return self.seq_k**2 / 2


def either(q: int, k: int) -> str:
    return f"{q}" if q == k else f"{q}/{k}"


def host_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype of that name; bfloat16 is ml_dtypes'."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def parse(words: str) -> Shape:
    """Read ``B,HQ,HK,SQ,SK,D[,DV]``."""
    try:
        sizes = [int(word) for word in words.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (6, 7) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{words!r} is no shape: six or seven positive integers are needed, "
            "batch,heads_q,heads_k,seq_q,seq_k,head_dim[,head_dim_v]"
        )
    return Shape(*(sizes if len(sizes) == 7 else [*sizes, sizes[-1]]))
