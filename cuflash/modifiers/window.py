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
  static __device__ __forceinline__ void narrow_keys(const Params& p, const Place& place, int q, Range& keys) {
    const int at = q + place.diagonal(0);
    keys.begin = max(keys.begin, at + p.window_first);
    keys.end = min(keys.end, at + p.window_last + 1);
  }
  static __device__ __forceinline__ void narrow_queries(const Params& p, const Place& place, int k, Range& queries) {
    const int at = k - place.diagonal(0);
    queries.begin = max(queries.begin, at - p.window_last);
    queries.end = min(queries.end, at - p.window_first + 1);
  }
};
"""

    left: int | None
    right: int | None

    def offsets(self, problem: Problem) -> tuple[int, int]:
        """First and last visible key relative to the query, clamped so that 32-bit positions cannot overflow."""
        least, most = 1 - problem.seq_q, problem.seq_k - 1
        if problem.is_packed:  # the kernels add each segment's own diagonal
            least, most = min(least, -most), max(-least, most)
        first = least if self.left is None else max(problem.diagonal - self.left, least)
        last = most if self.right is None else min(problem.diagonal + self.right, most)
        return first, last

    def values(self, problem: Problem) -> dict[str, float | int]:
        first, last = self.offsets(problem)
        return {"window_first": first, "window_last": last}

    def narrow(self, begin: Array, end: Array, q: Array, tile: Tile) -> tuple[Array, Array]:
        first, last = self.offsets(tile.problem)
        return np.maximum(begin, q + first), np.minimum(end, q + last + 1)
