"""Host side of backward_delta.cu, which every backward starts with."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.problem import Problem
from cuflash.schedules.base import padded, tiles


@dataclass(frozen=True)
class BackwardDelta:
    """Constants of backward_delta.cu: `lanes` threads share a row."""

    kernel = "backward_delta"

    lanes: int
    aligned: bool
    block_q: int  # tile of the main kernel: rows are padded to a multiple of it
    key_tile: int = 0  # where dq is summed in turns: keys of the main kernel's tile,
    turns: int = 0  # and counters of a tile of queries
    statistics_rows: int = 1  # where more than one, their shifts lie together, then their deltas and a byte for each

    threads = 256

    def shared_bytes(self, itemsize: int) -> int:
        return 0

    def rows_padded(self, problem: Problem) -> int:
        return padded(problem.seq_q, self.block_q)

    def row_bytes(self, real: int) -> int:
        """Of what is kept for each row, for sums of that size."""
        return 2 * real + (1 if self.statistics_rows > 1 else 0)

    def blocks(self, problem: Problem) -> int:
        lines = problem.batch_size * problem.heads_q * self.rows_padded(problem)
        return tiles(lines * self.lanes, self.threads)


def delta(problem: Problem, itemsize: int, block_q: int, aligned: bool, statistics_rows: int = 1) -> BackwardDelta:
    """As many lanes per row as it has 16-byte pieces, up to a warp."""
    pieces = tiles(problem.head_dim_v * itemsize, 16)
    lanes = 1 << min(5, (pieces - 1).bit_length())
    return BackwardDelta(lanes=lanes, aligned=aligned, block_q=block_q, statistics_rows=statistics_rows)


@dataclass(frozen=True)
class BackwardConvertSimt:
    """Constants of backward_convert_simt.cu: a warp writes a row."""

    kernel = "backward_convert_simt"

    lanes: int = 32
    rows: int = 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.rows

    def shared_bytes(self, itemsize: int) -> int:
        """None."""
        return 0

    def blocks(self, problem: Problem) -> int:
        """A row of dq each for as many warps as a block has."""
        return tiles(problem.batch_size * problem.heads_q * problem.seq_q, self.rows)
