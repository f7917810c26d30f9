"""Host side of backward_f64.cu: float64 on GPUs whose tensor cores multiply it at full rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from cuflash.problem import Problem
from cuflash.schedules.base import MMA, key_tiles, padded

SLOW = (
    99 * 1024
)  # bytes of shared memory of a block on GPUs that multiply float64 at a trickle; what has more has full rate
# Cycles of an SM: multiply-adds of tensor cores and bytes of shared memory in one; from the second-level cache; and for what a
# step does once.
MULTIPLY_ADDS, BYTES, ARRIVING, STEP = 128, 128, 24, 300
EXPONENTIAL = 40 / 64  # for one of them, and all else that is done to a score
# Registers of a thread's numbers in builds of CUDA 13 without spills: where nothing looks at single scores, where one modifier
# or those without slopes do, where more do, and where these know tiles as well; of sums alone, and with dq and the operands of
# its product.
PLAIN, MODIFIED, RICH, CROWDED, MAX_SUMS, MAX_DQ = 192, 176, 160, 144, 128, 208


@dataclass(frozen=True)
class BackwardF64:
    """Constants of backward_f64.cu.

    A half of the warps has the whole tile of keys, each warp a part of them; of dQ a warp of the other half has some columns,
    and with `query_warps` of them side by side some queries.
    """

    kernel = "backward_f64"
    method = MMA
    statistics_rows = 1  # each row has its shift and its delta side by side

    head_dim: int  # padded to a multiple of 16
    head_dim_v: int
    block_q: int
    block_k: int
    warps: int
    query_warps: int
    blocks_per_sm: int
    aligned: bool
    deterministic: bool = False  # blocks add to dq in turns
    sum_digits: int = 0  # of gradients of operands that are summed in fixed point

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def dq_width(self) -> int:
        """Columns of the sums of dq."""
        return self.head_dim

    @property
    def dq_chunks(self) -> int:
        """Parts of a tile of dq that are summed by different blocks."""
        return 1

    def shared_bytes(self, itemsize: int) -> int:
        keys = self.block_k * (self.head_dim + self.head_dim_v)
        queries = self.block_q * (2 * self.head_dim + self.head_dim_v + 2 * 2)  # the last are statistics
        return (keys + queries + 2 * self.block_q * self.block_k) * itemsize

    def blocks(self, problem: Problem) -> int:
        return key_tiles(problem, self.block_k) * problem.heads_k * problem.batch_size

    @property
    def row_blocks(self) -> int:
        """Blocks of 16 keys of a warp."""
        return self.block_k // (8 * self.warps)

    @property
    def dq_blocks(self) -> tuple[int, int]:
        """Blocks of 16 columns of dq and of 8 queries of a warp."""
        return self.head_dim * self.query_warps // (8 * self.warps), self.block_q // (8 * self.query_warps)

    @property
    def sum_registers(self) -> int:
        """Of dk or dv."""
        return self.row_blocks * max(self.head_dim, self.head_dim_v)

    @property
    def dq_registers(self) -> int:
        """Of dq and the operands of a step of its product."""
        columns, queries = self.dq_blocks
        return 8 * columns * queries + 8 * columns + 4 * queries

    def step_time(self) -> float:
        """Cycles of an SM for a tile of queries: between two barriers the slowest of what bounds it."""
        size, half, queries, (dq_columns, dq_queries) = (
            self.block_q * self.block_k,
            self.warps // 2,
            self.block_q / 8,
            self.dq_blocks,
        )
        # Bytes that operands of 16 x 8 and of 8 x 8 bring.
        rows, columns = 1024 * self.row_blocks * half, 512 * half
        of_scores = (rows + columns * queries) / 8 / BYTES  # for each column of a head
        of_dq = half * self.block_k / 8 * (1024 * dq_columns + 512 * dq_queries) / BYTES
        of_sums = queries / 8 * 512 * half / BYTES
        multiply = size / MULTIPLY_ADDS
        exponentials = size * EXPONENTIAL
        first = max(
            multiply * (2 * self.head_dim + self.head_dim_v),
            of_scores * (self.head_dim + self.head_dim_v) + of_dq,
            2 * multiply * self.head_dim + exponentials,
        )
        second = max(multiply * (self.head_dim + self.head_dim_v), of_sums * (self.head_dim + self.head_dim_v))
        arrival = self.block_q * (self.head_dim + self.head_dim_v) * 8 / ARRIVING
        return (max(first + second, arrival) + STEP) * (1 + (8 / self.warps - 1) / 2)


# ---- the choice of a tile ----------------------------------------------------------------------------------------------


@cache
def best_backward(
    head_dim: int,
    head_dim_v: int,
    max_q: int,
    max_k: int,
    has_slopes: bool,
    modifiers: int,
    shared_limit: int,
    aligned: bool,
    whole: bool = False,
) -> BackwardF64 | None:
    """The fastest by estimate of the tiles that fit, or None: 16 rows of dk and dv must fit a warp.

    `modifiers` are the registers that these take; with `whole`, tiles divide blocks of 128 that are hidden or not.
    """
    if shared_limit <= SLOW:
        return None
    best: tuple[float, BackwardF64] | None = None
    limit = PLAIN if modifiers <= 6 else MODIFIED if modifiers <= (66 if has_slopes else 186) else RICH
    limit = CROWDED if modifiers > 400 else limit
    for config in tiles(padded(head_dim, 16), padded(head_dim_v, 16), aligned):
        too_long = (config.block_q > max_q and config.block_q > 16) or (config.block_k > max_k and config.block_k > 16)
        scores = config.sum_registers + config.block_q * config.row_blocks * (3 if has_slopes else 2)
        if too_long or config.shared_bytes(8) > shared_limit or config.sum_registers > MAX_SUMS:
            continue
        if whole and 128 % config.block_q:
            continue
        if scores > limit or config.sum_registers + config.dq_registers > MAX_DQ:
            continue
        time = config.step_time() / (config.block_q * config.block_k)
        if best is None or time < best[0]:
            best = time, config
    return None if best is None else best[1]


def tiles(head_dim: int, head_dim_v: int, aligned: bool) -> Iterator[BackwardF64]:
    """All of them whose products are whole."""
    for warps, row_blocks, block_q in product((8, 4, 2), (2, 1), (64, 48, 32, 24, 16, 8)):
        for query_warps in (1, 2, 4):
            config = BackwardF64(head_dim, head_dim_v, block_q, 8 * row_blocks * warps, warps, query_warps, 1, aligned)
            rows, queries = head_dim * query_warps * 2 / warps, block_q / query_warps
            if query_warps <= warps // 2 and rows % 16 == 0 and (query_warps == 1 or queries == 8 or queries % 16 == 0):
                yield config
