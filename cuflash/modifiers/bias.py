"""Bias: an array added to the scores, of any shape that broadcasts to them, with its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cuflash.modifiers.base import Array, Kind, Modifier, Tile, array_field


@dataclass(frozen=True)
class Bias(Modifier):
    """Adds ``array`` (axes broadcastable to (*batch, heads_q, seq_q, seq_k)) after softcap and before any mask."""

    name: ClassVar[str] = "bias"
    kind: ClassVar[Kind] = "score"
    order: ClassVar[int] = 9
    fields: ClassVar[tuple[tuple[str, str], ...]] = (("View", "bias"),)
    differentiable: ClassVar[tuple[str, ...]] = ("bias",)
    movable: ClassVar[tuple[str, ...]] = ("bias",)
    added: ClassVar[str] = "bias"
    cuda: ClassVar[str] = """
struct Bias {
  static constexpr bool kHasSlope = false;
  static __device__ __forceinline__ Real apply(const Params& p, const Place& place, int q, int k, Real s) {
    return s + to_real(*element_at<OutElement>(p.bias, place.offset(p.bias), q, k));
  }
  static __device__ __forceinline__ Real apply_with_slope(const Params& p, const Place& place, int q, int k, Real s, Real&) {
    return apply(p, place, q, k, s);
  }
};
"""

    array: Any = array_field()

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"bias": "array"}

    def apply(self, s: Array, tile: Tile) -> Array:
        bias: Array = tile.part("bias").astype(s.dtype)
        return s + bias
