"""Packed: sequences that lie one after the other along one axis, as segments between offsets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cuflash.modifiers.base import Axes, Kind, Modifier, array_field

if TYPE_CHECKING:
    from cuflash.problem import Problem


@dataclass(frozen=True)
class Packed(Modifier):
    """Query and key i of ``offsets[s] <= i < offsets[s + 1]`` belong to segment s, a sequence that sees itself alone.

    Positions, and with them causal masks, windows and ALiBi, count from a segment's beginning.  What lies behind the last
    segment sees nothing and is seen by nothing.  Its CUDA text is in kernels/attention/index.cuh, its twin in segments.py.
    """

    name: ClassVar[str] = "packed"
    kind: ClassVar[Kind] = "place"
    order: ClassVar[int] = 30
    fields: ClassVar[tuple[tuple[str, str], ...]] = (
        ("View", "segments_q"),
        ("View", "segments_k"),
        ("int", "segment_count"),
        ("int", "segments_end_together"),
        # kernels/segment_lists.cu: lists of tiles, and how many there is room for in each
        ("Pointer", "segment_lists"),
        ("int", "listed_tiles"),
    )

    offsets_q: Any = array_field()
    offsets_k: Any = array_field()
    count: int = 0
    longest_k: int = field(
        default=1 << 30, repr=False
    )  # keys of the longest segment or more: a power of two, for few plans

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"segments_q": "offsets_q", "segments_k": "offsets_k"}

    def axes(self, operand: str, problem: Problem) -> Axes:
        return None, ("segments + 1", self.count + 1), None

    def values(self, problem: Problem) -> dict[str, float | int]:
        return {
            "segment_count": self.count,
            "segments_end_together": int(problem.alignment == "bottom_right"),
        }
