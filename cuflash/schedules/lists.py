"""Host side of segment_lists.cu: lists of the tiles of packed sequences, those of long walks first."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.problem import Problem
from cuflash.schedules.base import key_tiles, query_tiles

ELEMENT_BYTES = 32  # of a list: ListedSegment of kernels/attention/index.cuh


@dataclass(frozen=True)
class SegmentLists:
    """Constants of segment_lists.cu: a block makes a list."""

    kernel = "segment_lists"
    threads = 512

    direction: str  # of the kernels that follow, whose arguments it takes
    of_keys: bool  # tiles are of keys and walk over queries
    tile: int
    long_tile: int = 0  # of segments of more keys, if they have a list of their own
    most_keys: int = 0

    def shared_bytes(self, itemsize: int) -> int:
        """None but what the kernel declares."""
        return 0

    def blocks(self, problem: Problem) -> int:
        """One for each list."""
        return 2 if self.long_tile else 1

    def room(self, problem: Problem) -> int:
        """Tiles of a list, at most."""
        count = key_tiles if self.of_keys else query_tiles
        return max(count(problem, tile) for tile in (self.tile, self.long_tile) if tile)

    def bytes_of(self, problem: Problem) -> int:
        """Memory of the lists."""
        return self.blocks(problem) * (1 + self.room(problem)) * ELEMENT_BYTES
