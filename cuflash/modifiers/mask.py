"""Boolean mask: True means that the key may be seen; any shape that broadcasts to the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cuflash.modifiers.base import Array, Kind, Modifier, Tile, array_field


@dataclass(frozen=True)
class Mask(Modifier):
    """Hides the keys whose entry of ``array`` (broadcastable to (*batch, heads_q, seq_q, seq_k)) is False."""

    name: ClassVar[str] = "mask"
    kind: ClassVar[Kind] = "mask"
    order: ClassVar[int] = 20
    fields: ClassVar[tuple[tuple[str, str], ...]] = (("View", "mask"),)
    cuda: ClassVar[str] = """
struct Mask {
  static __device__ __forceinline__ bool visible(const Params& p, const Place& place, int q, int k) {
    return *element_at<u8>(p.mask, place.offset(p.mask), q, k) != 0;
  }
};
"""

    array: Any = array_field()

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"mask": "array"}

    def visible(self, tile: Tile) -> Array:
        return tile.part("mask")
