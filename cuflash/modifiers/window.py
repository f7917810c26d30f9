"""Sliding window: a query sees the keys within two inclusive distances of the diagonal (Longformer, arXiv:2004.05150)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from cuflash.modifiers.base import Array, Kind, Modifier, Tile

if TYPE_CHECKING:
    from cuflash.problem import Problem


@dataclass(frozen=True)
class Window(Modifier):
    """Key j is visible to query i iff i + diagonal - left <= j <= i + diagonal + right; None is unbounded."""

    name: ClassVar[str] = "window"
    kind: ClassVar[Kind] = "range"
    order: ClassVar[int] = 11
    fields: ClassVar[tuple[tuple[str, str], ...]] = (("int", "window_first"), ("int", "window_last"))
    cuda: ClassVar[str] = """
struct Window {
  static __device__ __forceinline__ void narrow_keys(const Params& p, int q, Range& keys) {
    keys.begin = max(keys.begin, q + p.window_first);
    keys.end = min(keys.end, q + p.window_last + 1);
  }
  static __device__ __forceinline__ void narrow_queries(const Params& p, int k, Range& queries) {
    queries.begin = max(queries.begin, k - p.window_last);
    queries.end = min(queries.end, k - p.window_first + 1);
  }
};
"""

    left: int | None
    right: int | None

    def offsets(self, problem: Problem) -> tuple[int, int]:
        """First and last visible key relative to the query, clamped so that 32-bit positions cannot overflow."""
        first = 1 - problem.seq_q if self.left is None else max(problem.diagonal - self.left, 1 - problem.seq_q)
        last = problem.seq_k - 1 if self.right is None else min(problem.diagonal + self.right, problem.seq_k - 1)
        return first, last

    def values(self, problem: Problem) -> dict[str, float | int]:
        first, last = self.offsets(problem)
        return {"window_first": first, "window_last": last}

    def narrow(self, begin: Array, end: Array, q: Array, tile: Tile) -> tuple[Array, Array]:
        first, last = self.offsets(tile.problem)
        return np.maximum(begin, q + first), np.minimum(end, q + last + 1)
