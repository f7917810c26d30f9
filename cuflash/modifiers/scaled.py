"""Scaled: a score modifier that changes nothing, so that kernels see scaled scores in place of raw products.

Plans add it where the scale is not positive: a larger product is then no larger score, and the running maximum must be
taken of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cuflash.modifiers.base import Array, Kind, Modifier, Tile


@dataclass(frozen=True)
class Scaled(Modifier):
    """The identity on scores."""

    name: ClassVar[str] = "scaled"
    kind: ClassVar[Kind] = "score"
    order: ClassVar[int] = -1
    cuda: ClassVar[str] = """
struct Scaled {
  static constexpr bool kHasSlope = false;
  static __device__ __forceinline__ Real apply(const Params&, const Place&, int, int, Real s) { return s; }
  static __device__ __forceinline__ Real apply_with_slope(const Params&, const Place&, int, int, Real s, Real&) { return s; }
};
"""

    def apply(self, s: Array, tile: Tile) -> Array:
        return s
