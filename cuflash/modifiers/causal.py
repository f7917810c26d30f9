"""Causal mask: a query sees the keys up to the diagonal (`Problem.diagonal` says which diagonal)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from cuflash.modifiers.base import Array, Kind, Modifier, Tile

if TYPE_CHECKING:
    from cuflash.problem import Problem


@dataclass(frozen=True)
class Causal(Modifier):
    """Key j is visible to query i iff j <= i + diagonal."""

    name: ClassVar[str] = "causal"
    kind: ClassVar[Kind] = "range"
    order: ClassVar[int] = 10
    fields: ClassVar[tuple[tuple[str, str], ...]] = (("int", "causal_diagonal"),)
    cuda: ClassVar[str] = """
struct Causal {
  static __device__ __forceinline__ void narrow_keys(const Params& p, const Place& place, int q, Range& keys) {
    keys.end = min(keys.end, q + place.diagonal(p.causal_diagonal) + 1);
  }
  static __device__ __forceinline__ void narrow_queries(const Params& p, const Place& place, int k, Range& queries) {
    queries.begin = max(queries.begin, k - place.diagonal(p.causal_diagonal));
  }
};
"""

    def values(self, problem: Problem) -> dict[str, float | int]:
        return {"causal_diagonal": problem.diagonal}

    def narrow(self, begin: Array, end: Array, q: Array, tile: Tile) -> tuple[Array, Array]:
        return begin, np.minimum(end, q + tile.problem.diagonal + 1)
