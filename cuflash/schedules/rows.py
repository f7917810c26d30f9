"""Host side of backward_delta.cu, which every backward starts with, and of hvp_delta.cu, the same for second derivatives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cuflash.modifiers.documents import GRANULE
from cuflash.place import Placed
from cuflash.problem import Problem
from cuflash.schedules.base import query_tiles, tiles

PAIR_BYTES = 8  # of the smallest and the largest id of a granule


@dataclass(frozen=True)
class BackwardDelta:
    """Constants of backward_delta.cu: `lanes` threads share a row."""

    kernel = "backward_delta"

    lanes: int
    aligned: bool
    block_q: int  # tile of the main kernel: rows are padded to a multiple of it
    passes: int = 1  # rows of a thread
    key_tile: int = 0  # where dq is summed in turns: keys of the main kernel's tile,
    turns: int = 0  # and counters of a tile of queries
    counts: bool = False  # blocks of the main kernel stay, and count the tiles that they take
    statistics_rows: int = 1  # of which the shifts lie together, behind them the deltas
    has_planes: bool = False  # which the main kernel multiplies, and whose units its statistics have
    bias_apart: bool = False  # a bias that is the same for all keys is left to this kernel
    sum_digits: int = 0  # of its gradient where it is summed in fixed point
    sum_warps: int = (
        0  # of packed sequences: warps that share out the sums of a tile of dq, where those of some have no rows,
    )
    sum_warp_columns: int = 1  # so many of them beside each other

    threads = 256

    def shared_bytes(self, itemsize: int) -> int:
        return 0

    def rows_padded(self, problem: Problem) -> int:
        return query_tiles(problem, self.block_q) * self.block_q

    def blocks(self, problem: Problem) -> int:
        lines = problem.batch_size * problem.heads_q * self.rows_padded(problem)
        return tiles(lines * self.lanes, self.threads * self.passes)


def delta(
    problem: Problem,
    itemsize: int,
    block_q: int,
    aligned: bool,
    statistics_rows: int = 1,
    has_planes: bool = False,
) -> BackwardDelta:
    """As many lanes per row as it has 16-byte pieces, up to a warp, and several rows for each that lie in one tile."""
    pieces = tiles(problem.head_dim_v * itemsize, 16)
    lanes = 1 << min(5, (pieces - 1).bit_length())
    lines = BackwardDelta.threads // lanes
    passes = [n for n in (4, 2) if n <= lanes and block_q % (n * lines) == 0]
    return BackwardDelta(
        lanes=lanes,
        aligned=aligned,
        block_q=block_q,
        passes=passes[0] if passes else 1,
        statistics_rows=statistics_rows,
        has_planes=has_planes,
    )


@dataclass(frozen=True)
class DocumentBounds:
    """Constants of document_bounds.cu: a warp looks at a granule."""

    kernel = "document_bounds"
    threads = 256

    direction: str  # of the kernels that follow, whose arguments it takes

    def shared_bytes(self, itemsize: int) -> int:
        """None."""
        return 0

    def granules(self, problem: Problem) -> dict[str, int]:
        """Those of a batch entry, by field name."""
        return {
            f"document_bounds_{side}": tiles(n, GRANULE) for side, n in (("q", problem.seq_q), ("k", problem.seq_k))
        }

    def blocks(self, problem: Problem) -> int:
        """All granules."""
        return tiles(problem.batch_size * sum(self.granules(problem).values()), self.threads // 32)

    def places(self, problem: Problem) -> dict[str, Placed]:
        """Where the smallest and the largest id of each lie, by field name: one batch entry after the other."""
        found = {}
        for name, count in self.granules(problem).items():
            lengths = [PAIR_BYTES * count * math.prod(problem.batch[axis + 1 :]) for axis in range(len(problem.batch))]
            found[name] = Placed((*lengths, 0, PAIR_BYTES, PAIR_BYTES // 2), PAIR_BYTES // 2, 0)
        return found

    def bytes_of(self, problem: Problem) -> dict[str, int]:
        """Memory of them."""
        return {name: problem.batch_size * n * PAIR_BYTES for name, n in self.granules(problem).items()}


@dataclass(frozen=True)
class BackwardBounds:
    """Constants of backward_bounds.cu: a warp looks at a row."""

    kernel = "backward_bounds"
    threads = 256

    def shared_bytes(self, itemsize: int) -> int:
        """None."""
        return 0

    def blocks(self, problem: Problem) -> int:
        """Rows of the queries' side, then rows of keys."""
        rows = problem.heads_q * problem.seq_q + problem.heads_k * problem.seq_k
        return tiles(problem.batch_size * rows, self.threads // 32)


@dataclass(frozen=True)
class BackwardSums:
    """Constants of backward_sums.cu: a thread reads one sum after the other."""

    kernel = "backward_sums"
    threads = 256

    sum_digits: int

    def shared_bytes(self, itemsize: int) -> int:
        """None."""
        return 0

    def blocks(self, problem: Problem) -> int:
        """As many as there are blocks of scores, up to what fills a device."""
        return min(tiles(problem.batch_size * problem.heads_q * problem.seq_q * problem.seq_k, self.threads), 1024)


@dataclass(frozen=True)
class HvpDelta:
    """Constants of hvp_delta.cu: `lanes` threads share a row."""

    kernel = "hvp_delta"
    threads = 256

    lanes: int

    def shared_bytes(self, itemsize: int) -> int:
        """None."""
        return 0

    def blocks(self, problem: Problem) -> int:
        """All rows."""
        return tiles(problem.batch_size * problem.heads_q * problem.seq_q * self.lanes, self.threads)


def hvp_delta(problem: Problem) -> HvpDelta:
    """As many lanes per row as it has columns, up to a warp."""
    return HvpDelta(1 << min(5, (problem.head_dim_v - 1).bit_length()))


@dataclass(frozen=True)
class BackwardConvertSimt:
    """Constants of backward_convert_simt.cu: a warp writes a row."""

    kernel = "backward_convert_simt"

    lanes: int = 32
    rows: int = 8
    block_q: int = 0  # where sequences are packed: tile of the main kernel, to which segments are padded
    in_blocks: bool = False  # the sums lie as backward_f64.cu adds them, not row by row

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes * self.rows

    def shared_bytes(self, itemsize: int) -> int:
        """None."""
        return 0

    def blocks(self, problem: Problem) -> int:
        """A row of dq each for as many warps as a block has."""
        rows = query_tiles(problem, self.block_q) * self.block_q if self.block_q else problem.seq_q
        return tiles(problem.batch_size * problem.heads_q * rows, self.rows)
