"""Softcap: c·tanh(s/c) on the scaled score, before everything else (Gemma 2, arXiv:2408.00118, section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from cuflash.modifiers.base import Array, Kind, Modifier, Tile

if TYPE_CHECKING:
    from cuflash.problem import Problem


@dataclass(frozen=True)
class Softcap(Modifier):
    """Bounds every score to (-cap, cap)."""

    name: ClassVar[str] = "softcap"
    kind: ClassVar[Kind] = "score"
    order: ClassVar[int] = 0
    fields: ClassVar[tuple[tuple[str, str], ...]] = (("Real", "softcap"), ("Real", "softcap_inverse"))
    cuda: ClassVar[str] = """
struct Softcap {
  static constexpr bool kHasSlope = true;
  static __device__ __forceinline__ Real apply(const Params& p, const Place&, int, int, Real s) {
    return p.softcap * tanh_of(s * p.softcap_inverse);
  }
  static __device__ __forceinline__ Real apply_with_slope(const Params& p, const Place&, int, int, Real s, Real& slope) {
    const Real t = tanh_of(s * p.softcap_inverse);
    slope *= Real(1) - t * t;
    return p.softcap * t;
  }
};
"""

    curved: ClassVar[str] = """
struct SoftcapCurved {
  static __device__ __forceinline__ Real apply_with_curvature(const Params& p, const Place&, int, int, Real s, Real& slope,
                                                              Real& curvature) {
    const Real t = tanh_of(s * p.softcap_inverse);
    slope = Real(1) - t * t;
    curvature = Real(-2) * p.softcap_inverse * t * slope;
    return p.softcap * t;
  }
};
"""

    cap: float

    def values(self, problem: Problem) -> dict[str, float | int]:
        return {"softcap": self.cap, "softcap_inverse": 1.0 / self.cap}

    def apply(self, s: Array, tile: Tile) -> Array:
        return self.cap * np.tanh(s / self.cap)

    def slope(self, s: Array, tile: Tile) -> Array:
        return 1 - np.tanh(s / self.cap) ** 2

    def curvature(self, s: Array, tile: Tile) -> Array:
        t = np.tanh(s / self.cap)
        curvature: Array = -2 / self.cap * t * (1 - t**2)
        return curvature
