"""Host side of forward_simt.cu and backward_simt.cu: float32 and float64 on every architecture.

Products are scalar multiply-adds; the forward's float64 products run on tensor cores where there are any (sm_80 and later), the
backward's in a kernel of their own where these are fast (schedules/f64.py).

A warp is a grid of lanes, `lane_rows` rows of ``32 / lane_rows``, and a thread holds a small block of every product.  What
bounds such a product is how often a thread must go to shared memory: a block of r x c results needs r + c vector loads for
every r * c * (elements in a vector) multiply-adds.  `forward` and `backward` search for the tile that this count makes
fastest among those that fit; the formulas for pitches are those of ``kernels/hw/gemm_simt.cuh``, and a static assertion in each
kernel compares the size of shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from cuflash import tuning
from cuflash.errors import UnsupportedError
from cuflash.modifiers import Documents, Modifier, Written
from cuflash.problem import Problem
from cuflash.schedules import f64
from cuflash.schedules.base import MMA, MULTIPLY_ADDS, key_tiles, padded, query_tiles, tiles
from cuflash.schedules.base import in_turns as in_turns
from cuflash.schedules.f64 import BackwardF64
from cuflash.schedules.order import turns_section as turns_section
from cuflash.schedules.rows import BackwardConvertSimt

ALL_BANKS = 128  # bytes that one pass over the banks of shared memory moves
VECTOR = 16  # bytes of the widest load
RESERVED = 1024  # bytes of shared memory that the system keeps for itself, for each block
LATENCY = 1000  # cycles of an SM that a tile is on its way
WITHOUT_TENSOR = (
    64 * 1024
)  # bytes of shared memory of a block on sm_75; what has more multiplies float64 on tensor cores
WARPS = 8  # of an SM: each may then use every register the instruction set can name
REGISTERS = 255
ADDRESSES = 36  # registers a thread needs besides its blocks of numbers: seen in builds of CUDA 13, as is the next
MAX_SUMS = 128  # registers of sums that a loop leaves room for
MODIFIER = 30  # and for each modifier that looks at single scores
STATISTICS = 16  # and for numbers of each row beside m and l
TANGENT = 12  # and where each array has another beside it


def odd_pitch(length: int, itemsize: int) -> int:
    """Pitch of rows that are read as vectors: an odd number of vectors."""
    vector = VECTOR // itemsize
    return (tiles(length, vector) | 1) * vector


def scatter_pitch(length: int, lane_columns: int, itemsize: int) -> int:
    """Pitch of rows that lanes write element by element: rows that meet in one pass start in different banks."""
    banks = ALL_BANKS // itemsize
    return length + (min(lane_columns, banks // 2) - length) % banks


def pair_pitch(length: int) -> int:
    """Pitch of float64 rows that four lanes read as pairs: two rows that follow each other fill all banks."""
    return length + (24 - length) % 16


@dataclass(frozen=True)
class ForwardSimt:
    """Constants of forward_simt.cu; a warp owns ``lane_rows * thread_rows`` queries."""

    kernel = "forward_simt"

    head_dim: int  # padded to a multiple of 8
    head_dim_v: int  # padded to a multiple of 2 columns for each column of lanes
    block_k: int
    warps: int
    lane_rows: int
    thread_rows: int
    blocks_per_sm: int
    aligned: bool
    tensor: bool = False  # float64 on tensor cores
    maximum: bool = False  # also the largest score of each row
    entropy: bool = False  # also the entropy of each row's weights
    rest: bool = False  # only heads that forward_split.cu leaves

    @property
    def method(self) -> str:
        return MMA if self.tensor else MULTIPLY_ADDS

    @property
    def statistics(self) -> bool:
        """Whether there is a statistic beside lse."""
        return self.maximum or self.entropy

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return self.warps * self.lane_rows * self.thread_rows

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        if self.tensor:
            pitch, pitch_v, probabilities = pair_pitch(self.head_dim), self.head_dim_v + 2 - self.head_dim_v % -8, 0
        else:
            pitch, pitch_v = odd_pitch(self.head_dim, itemsize), self.head_dim_v
            probabilities = self.block_q * scatter_pitch(self.block_k, 32 // self.lane_rows, itemsize)
        return ((self.block_q + self.block_k) * pitch + self.block_k * pitch_v + probabilities) * itemsize

    def blocks(self, problem: Problem) -> int:
        return query_tiles(problem, self.block_q) * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class ForwardColumnsSimt:
    """Constants of forward_columns_simt.cu; a warp owns ``lane_rows * thread_rows`` keys."""

    kernel = "forward_columns_simt"
    statistics = True

    head_dim: int  # padded to a multiple of 8
    warps: int
    lane_rows: int
    thread_rows: int
    thread_columns: int
    blocks_per_sm: int
    aligned: bool

    @property
    def block_q(self) -> int:
        """Queries of a step."""
        return 32 // self.lane_rows * self.thread_columns

    @property
    def block_k(self) -> int:
        """Keys of a block."""
        return self.warps * self.lane_rows * self.thread_rows

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        elements = (self.block_q + self.block_k) * odd_pitch(self.head_dim, itemsize) + 2 * self.block_q
        return elements * itemsize

    def blocks(self, problem: Problem) -> int:
        return tiles(problem.seq_k, self.block_k) * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class JvpSimt:
    """Constants of jvp_simt.cu; a warp owns ``lane_rows * thread_rows`` queries."""

    kernel = "jvp_simt"

    head_dim: int  # padded to a multiple of 8
    head_dim_v: int  # padded to a multiple of 2 columns for each column of lanes
    block_k: int
    warps: int
    lane_rows: int
    thread_rows: int
    blocks_per_sm: int
    aligned: bool

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return self.warps * self.lane_rows * self.thread_rows

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        elements = 2 * (self.block_q + self.block_k) * odd_pitch(self.head_dim, itemsize)
        elements += 2 * self.block_k * self.head_dim_v
        elements += 2 * self.block_q * scatter_pitch(self.block_k, 32 // self.lane_rows, itemsize)
        return elements * itemsize

    def blocks(self, problem: Problem) -> int:
        return query_tiles(problem, self.block_q) * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class HvpSimt:
    """Constants of hvp_simt.cu; a warp owns ``lane_rows * thread_rows`` queries, or keys."""

    kernel = "hvp_simt"

    head_dim: int  # padded to a multiple of 8 and of 2 columns for each column of lanes
    head_dim_v: int
    owns_keys: bool  # walks over queries
    walked: int  # positions of a step
    warps: int
    lane_rows: int
    thread_rows: int
    blocks_per_sm: int
    aligned: bool

    @property
    def owned(self) -> int:
        """Queries, or keys, of a block."""
        return self.warps * self.lane_rows * self.thread_rows

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        pitches = odd_pitch(self.head_dim, itemsize) + odd_pitch(self.head_dim_v, itemsize)
        elements = 2 * (self.owned + self.walked) * pitches
        elements += 2 * self.owned * scatter_pitch(self.walked, 32 // self.lane_rows, itemsize)
        elements += 4 * (self.walked if self.owns_keys else self.owned)  # numbers of each query
        return elements * itemsize

    def blocks(self, problem: Problem) -> int:
        if self.owns_keys:
            return key_tiles(problem, self.owned) * problem.heads_k * problem.batch_size
        return query_tiles(problem, self.owned) * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class BackwardSimt:
    """Constants of backward_simt.cu.

    Three products spread over the block's warps and lanes in three ways: scores (queries x keys) and gradients of keys and
    values (keys x columns) over half of the warps, gradients of queries (queries x columns) over all.  ``*_warp_rows`` and
    ``*_lane_rows`` count the rows of each.
    """

    kernel = "backward_simt"
    method = MULTIPLY_ADDS

    head_dim: int  # padded to a multiple of 2 columns for each column of lanes, of keys and of queries
    head_dim_v: int
    block_q: int
    block_k: int
    warps: int
    score_warp_rows: int
    score_lane_rows: int
    key_warp_rows: int
    key_lane_rows: int
    query_warp_rows: int
    query_lane_rows: int
    blocks_per_sm: int
    aligned: bool
    deterministic: bool = False  # blocks add to dq in turns
    sum_digits: int = 0  # of gradients of operands that are summed in fixed point
    rest: bool = False  # only heads that planes do not stand for
    statistics_rows: int = (
        1  # each row has its shift and its delta side by side, unless the kernel before wants it otherwise
    )

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
        pitches = odd_pitch(self.head_dim, itemsize) + odd_pitch(self.head_dim_v, itemsize)
        elements = (self.block_q + self.block_k) * pitches
        elements += 2 * self.block_q * scatter_pitch(self.block_k, 32 // self.score_lane_rows, itemsize)
        return elements * itemsize

    def blocks(self, problem: Problem) -> int:
        return key_tiles(problem, self.block_k) * problem.heads_k * problem.batch_size


# ---- the choice of a tile ----------------------------------------------------------------------------------------------
# A block of r x c results that a thread holds, and what one step of a product through it costs: cycles of an SM for one warp.


@dataclass(frozen=True)
class ThreadTile:
    """Rows and columns of one thread in one product."""

    rows: int
    columns: int
    itemsize: int

    @property
    def registers(self) -> int:
        return self.rows * self.columns * self.itemsize // 4

    @property
    def vector(self) -> int:
        """Elements of a load."""
        return VECTOR // self.itemsize

    def runs(self, count: int) -> float:
        """Loads for `count` elements of a row, read in runs of neighbours."""
        return count / (self.vector if count % self.vector == 0 else 2 if count % 2 == 0 else 1)

    def time(self, loads: float) -> float:
        """For `loads` and a vector's depth of multiply-adds, which overlap; the shorter part not entirely.

        An SM multiplies 128 lanes of float32 or 64 of float64 in a cycle; a warp's load takes 2 passes.
        """
        arithmetic = self.rows * self.columns * self.vector / (4 if self.itemsize == 4 else 2)
        return max(arithmetic, 2 * loads) + min(arithmetic, 2 * loads) / 4

    def along_rows(self) -> tuple[float, int]:
        """Both operands vectors along the contraction: time for each element of depth, registers of the operands."""
        return self.time(self.rows + self.columns) / self.vector, 4 * self.columns + 8

    def along_left(self) -> tuple[float, int]:
        """The left operand along the contraction, the right one across."""
        loads = self.rows + self.vector * self.runs(self.columns)
        return self.time(loads) / self.vector, 4 * self.rows + self.columns * self.itemsize // 4

    def across(self) -> tuple[float, int]:
        """Both operands across the contraction."""
        loads = self.vector * (self.runs(self.rows) + self.runs(self.columns))
        return self.time(loads) / self.vector, 2 * (self.rows + self.columns) * self.itemsize // 4


def resident(warps: int, shared_bytes: int, shared_limit: int) -> int:
    """Blocks of an SM that registers and shared memory admit; `shared_limit` is that of one block."""
    return max(1, min(WARPS // warps, (shared_limit + RESERVED) // (shared_bytes + RESERVED)))


def idle(warps: int, blocks: int) -> float:
    """Factor for too few warps to hide latencies."""
    return 1 + (WARPS / (warps * blocks) - 1) / 2


def convert(problem: Problem, main: BackwardSimt | BackwardF64) -> BackwardConvertSimt:
    """The kernel that brings the sums of dq into the caller's strides; they lie alike whatever the tile of `main`."""
    return BackwardConvertSimt(
        block_q=main.block_q if problem.is_packed else 0, in_blocks=isinstance(main, BackwardF64)
    )


def pressure(modifier: Modifier, scores_alone: bool = False) -> int:
    """What one modifier that looks at single scores takes, in units of `MODIFIER`.

    Where nothing is wanted but scores, an expression takes what the built-in modifier of that kind does: so both have the same
    tile, and the same bits.
    """
    if isinstance(modifier, Written) and scores_alone:
        return 1 + (modifier.program.size - 1) // 16
    if isinstance(modifier, Written):  # gradients of what it reads may need the scores that entered it
        return 2 + modifier.program.needs_score + modifier.program.size // 16
    # What knows tiles is compiled twice: for tiles whose elements are tested and for those that are clear.
    return 3 if modifier.knows_tiles() else 1


def modifier_registers(problem: Problem, scores_alone: bool = False) -> int:
    """Registers that the modifiers of a call take."""
    looking = [m for m in problem.modifiers if m.kind in ("score", "mask", "drop")]
    count = sum(pressure(m, scores_alone) for m in looking)
    wide = problem.dtype == "float64" and problem.head_dim > 128
    if scores_alone and not wide and [m.name for m in looking] == [Documents.name]:
        count = 1  # alone it leaves room, as its expression does
    if problem.dtype == "float64" and problem.modifier("sinks"):  # registers are full to the last there
        count += 1
    count += problem.is_packed and (count > 0 or problem.dtype == "float64")  # what is left has no room for bounds
    single = MODIFIER * count * (2 if problem.dtype == "float64" else 1)
    return single + (6 if problem.modifiers else 0)


def longest(seq: int) -> int:
    """Largest tile worth having for a length; coarse, so that few lengths bring a new kernel."""
    return max(16, 1 << (seq - 1).bit_length())


def forward(
    problem: Problem, shared_limit: int, aligned: bool, *, maximum: bool = False, entropy: bool = False
) -> ForwardSimt:
    """The forward's tile; `shared_limit` is a block's, in bytes; `aligned` tells that q, k and v admit vectors.

    `maximum` and `entropy` add these statistics of each row.
    """
    tensor = shared_limit > WITHOUT_TENSOR
    statistics = maximum or entropy
    taken, sizes = modifier_registers(problem, not statistics), (problem.head_dim, problem.head_dim_v)
    found = None
    if problem.dtype == "float64" and tensor:
        # What long expressions compute of a score takes registers, too, twice as many as what statistics keep of it.
        rich = statistics + 2 * any(
            isinstance(m, Written) and pressure(m, not statistics) > 1 for m in problem.modifiers
        )
        found = best_tensor_forward(*sizes, longest(problem.longest_q), taken, shared_limit, aligned, rich)
    if found is None:
        itemsize = 8 if problem.dtype == "float64" else 4
        taken += STATISTICS if statistics else 0
        found = best_forward(*sizes, itemsize, longest(problem.longest_q), taken, shared_limit, aligned)
    return replace(found, maximum=maximum, entropy=entropy) if statistics else found


def columns(problem: Problem, shared_limit: int, aligned: bool) -> ForwardColumnsSimt:
    """The first tile of the sums of columns that fits; all of them leave registers for any modifiers."""
    itemsize = 8 if problem.dtype == "float64" else 4
    for tile in tuning.COLUMNS_SIMT:
        config = ForwardColumnsSimt(padded(problem.head_dim, 8), *tile, 1, aligned)
        shared_bytes = config.shared_bytes(itemsize)
        if shared_bytes <= shared_limit:
            return replace(config, blocks_per_sm=resident(tile.warps, shared_bytes, shared_limit))
    raise too_large("sums of columns", problem.head_dim, problem.head_dim, itemsize, shared_limit, shared_bytes)


@cache
def best_tensor_forward(
    head_dim: int,
    head_dim_v: int,
    max_q: int,
    modifiers: int,
    shared_limit: int,
    aligned: bool,
    kept: int = 0,
) -> ForwardSimt | None:
    """The fastest by estimate of the tiles whose products are mma.m16n8k8, or None: 16 rows of values must fit a warp.

    `kept` is how many numbers there are beside each score.
    """
    best: tuple[float, ForwardSimt] | None = None
    width = padded(head_dim_v, 8)
    for row_blocks, block_k, warps in product((1, 2), (64, 48, 32, 24, 16, 8), (8, 4, 2, 1)):
        config = ForwardSimt(padded(head_dim, 8), width, block_k, warps, 8, 2 * row_blocks, 1, aligned, tensor=True)
        # Scores weigh more than outputs: exponentials work on them.  Limits seen in builds without spills.
        pressure = row_blocks * (width + 3 * block_k // 2) + 16 * (row_blocks - 1)
        pressure += 0 if modifiers < MODIFIER else 6 if modifiers < 8 * MODIFIER else 20
        pressure += (0 if modifiers < 12 * MODIFIER else 8 if modifiers < 16 * MODIFIER else 16) + (
            0 if aligned or modifiers < 12 * MODIFIER else 24
        )
        pressure += row_blocks * block_k * kept
        shared_bytes = config.shared_bytes(8)
        if pressure > 176 or shared_bytes > shared_limit or (config.block_q > max_q and warps * row_blocks > 1):
            continue
        # Cycles: 8 for an mma; 4 for a load of pairs; per exponential about 25 multiply-adds.
        scores = config.head_dim / 8 * max(8 * row_blocks * block_k / 8, 8 * row_blocks + 4 * block_k / 8)
        out = block_k / 8 * max(8 * row_blocks * width / 8, 4 * width / 8)
        blocks = resident(warps, shared_bytes, shared_limit)
        arrival = LATENCY / (warps * blocks)
        time = max(scores, arrival) + max(out + row_blocks * block_k * 16 * 25 / 64, arrival) + 50
        time *= idle(warps, blocks) / (row_blocks * block_k)
        if best is None or time < best[0]:
            best = time, replace(config, blocks_per_sm=blocks)
    return None if best is None else best[1]


@cache
def best_forward(
    head_dim: int, head_dim_v: int, itemsize: int, max_q: int, modifiers: int, shared_limit: int, aligned: bool
) -> ForwardSimt:
    """The fastest by estimate of the tiles that fit."""
    best: tuple[float, ForwardSimt] | None = None
    least = None
    for lane_rows, rows, keys, warps in product((8, 4, 2), (8, 4, 2, 1), (8, 6, 4, 3, 2, 1), (8, 4, 2, 1)):
        lane_columns = 32 // lane_rows
        width, block_k = padded(head_dim_v, 2 * lane_columns), keys * lane_columns
        scores, out = ThreadTile(rows, keys, itemsize), ThreadTile(rows, width // lane_columns, itemsize)
        if block_k % scores.vector:
            continue
        config = ForwardSimt(padded(head_dim, 8), width, block_k, warps, lane_rows, rows, 1, aligned)
        shared_bytes = config.shared_bytes(itemsize)
        least = min(least or shared_bytes, shared_bytes)
        (score_time, score_operands), (out_time, out_operands) = scores.along_rows(), out.along_left()
        registers = out.registers + max(scores.registers + max(score_operands, 2 * rows + modifiers), out_operands)
        registers += ADDRESSES + 2 * rows * itemsize // 4
        if shared_bytes > shared_limit or registers > REGISTERS:
            continue
        if config.block_q > max_q and (warps, rows) != (1, 1):
            continue
        blocks = resident(warps, shared_bytes, shared_limit)
        copies = block_k * (config.head_dim + width) / (scores.vector if aligned else 1) / (32 * warps)
        arrival, softmax = LATENCY / (warps * blocks), rows * (3 * keys + 15) * itemsize / 4
        time = max(config.head_dim * score_time, arrival) + max(block_k * out_time + softmax, arrival) + 3 * copies
        time *= idle(warps, blocks) / (rows * lane_rows * block_k)
        if best is None or time < best[0]:
            best = time, replace(config, blocks_per_sm=blocks)
    if best is None and modifiers:  # rather a few spills than nothing
        return best_forward(head_dim, head_dim_v, itemsize, max_q, 3 * modifiers // 4, shared_limit, aligned)
    if best is None:
        raise too_large("forward", head_dim, head_dim_v, itemsize, shared_limit, least)
    return best[1]


def jvp(problem: Problem, shared_limit: int, aligned: bool) -> JvpSimt:
    """The tile of forward mode; as `forward`, with the tangents among the arrays that must admit vectors."""
    return best_jvp(
        problem.head_dim,
        problem.head_dim_v,
        8 if problem.dtype == "float64" else 4,
        longest(problem.longest_q),
        any(m.has_slope() for m in problem.modifiers),
        modifier_registers(problem) * 5 // 4,  # which look at a score and at its tangent
        shared_limit,
        aligned,
    )


@cache
def best_jvp(
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    max_q: int,
    has_slopes: bool,
    modifiers: int,
    shared_limit: int,
    aligned: bool,
    spare: int = TANGENT,
) -> JvpSimt:
    """The fastest by estimate of the tiles that fit: of the forward with two accumulators and three times the products."""
    best: tuple[float, JvpSimt] | None = None
    least = None
    for lane_rows, rows, keys, warps in product((8, 4, 2), (8, 4, 2, 1), (8, 6, 4, 3, 2, 1), (8, 4, 2, 1)):
        lane_columns = 32 // lane_rows
        width, block_k = padded(head_dim_v, 2 * lane_columns), keys * lane_columns
        scores, out = ThreadTile(rows, keys, itemsize), ThreadTile(rows, width // lane_columns, itemsize)
        if block_k % scores.vector:
            continue
        config = JvpSimt(padded(head_dim, 8), width, block_k, warps, lane_rows, rows, 1, aligned)
        shared_bytes = config.shared_bytes(itemsize)
        least = min(least or shared_bytes, shared_bytes)
        (score_time, score_operands), (out_time, out_operands) = scores.along_rows(), out.along_left()
        alone = 2 * out.registers if 4 * out.registers <= 160 else 0  # a block's sums before they join the others
        registers = 2 * out.registers + ADDRESSES + (spare * (1 if aligned else 2) + 3 * rows) * itemsize // 4
        registers += max(
            2 * (scores.registers + score_operands),
            (3 if has_slopes else 2) * scores.registers + 2 * rows + modifiers,
            alone + 2 * out_operands,
        )
        if shared_bytes > shared_limit or registers > REGISTERS:
            continue
        if config.block_q > max_q and (warps, rows) != (1, 1):
            continue
        blocks = resident(warps, shared_bytes, shared_limit)
        copies = 2 * block_k * (config.head_dim + width) / (scores.vector if aligned else 1) / (32 * warps)
        arrival, softmax = LATENCY / (warps * blocks), rows * (6 * keys + 15) * itemsize / 4
        time = (
            max(3 * config.head_dim * score_time, arrival) + max(3 * block_k * out_time + softmax, arrival) + 3 * copies
        )
        time *= idle(warps, blocks) / (rows * lane_rows * block_k)
        if best is None or time < best[0]:
            best = time, replace(config, blocks_per_sm=blocks)
    if best is None and (spare or modifiers):  # rather a few spills than nothing
        args = (head_dim, head_dim_v, itemsize, max_q, has_slopes)
        return best_jvp(*args, modifiers if spare else 3 * modifiers // 4, shared_limit, aligned, 0)
    if best is None:
        raise too_large("forward mode", head_dim, head_dim_v, itemsize, shared_limit, least)
    return best[1]


def hvp(problem: Problem, shared_limit: int, aligned: bool, owns_keys: bool) -> HvpSimt:
    """The tile of the kernel that owns keys, or of the one that owns queries; as `jvp`, with dout among the arrays."""
    derivatives = any(m.has_slope() for m in problem.modifiers) + any(bool(m.curved) for m in problem.modifiers)
    return best_hvp(
        problem.head_dim,
        problem.head_dim_v,
        8 if problem.dtype == "float64" else 4,
        owns_keys,
        longest(problem.longest_k if owns_keys else problem.longest_q),
        derivatives,
        modifier_registers(problem) * 5 // 4,
        shared_limit,
        aligned,
    )


@cache
def best_hvp(
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    owns_keys: bool,
    max_owned: int,
    derivatives: int,
    modifiers: int,
    shared_limit: int,
    aligned: bool,
    spare: int = 2 * TANGENT,
) -> HvpSimt:
    """The fastest by estimate of the tiles that fit; `derivatives` are numbers beside each score."""
    best: tuple[float, HvpSimt] | None = None
    least = None
    for lane_rows, rows, columns, warps in product((8, 4, 2), (8, 4, 2, 1), (8, 6, 4, 3, 2, 1), (8, 4, 2, 1)):
        lane_columns = 32 // lane_rows
        unit, walked = max(8, 2 * lane_columns), columns * lane_columns
        width, width_v = padded(head_dim, unit), padded(head_dim_v, unit)
        scores = ThreadTile(rows, columns, itemsize)
        if walked % scores.vector:
            continue
        sums = [ThreadTile(rows, n // lane_columns, itemsize) for n in ((width, width_v) if owns_keys else (width,))]
        config = HvpSimt(width, width_v, owns_keys, walked, warps, lane_rows, rows, 1, aligned)
        shared_bytes = config.shared_bytes(itemsize)
        least = min(least or shared_bytes, shared_bytes)
        score_time, score_operands = scores.along_rows()
        registers = sum(tile.registers for tile in sums) + ADDRESSES + (spare * (1 if aligned else 2)) * itemsize // 4
        registers += max(
            (4 + derivatives) * scores.registers + 2 * score_operands,
            (4 + derivatives) * scores.registers + 2 * rows + modifiers,
            *(
                4 * scores.registers + 2 * tile.along_left()[1] + (tile.registers if 4 * tile.registers <= 160 else 0)
                for tile in sums
            ),
        )
        if shared_bytes > shared_limit or registers > REGISTERS:
            continue
        if config.owned > max_owned and (warps, rows) != (1, 1):
            continue
        blocks = resident(warps, shared_bytes, shared_limit)
        copies = 2 * walked * (width + width_v) / (scores.vector if aligned else 1) / (32 * warps)
        time = 3 * (width + width_v) * score_time + sum(2 * walked * tile.along_left()[0] for tile in sums)
        time += rows * (12 * columns + 15) * itemsize / 4 + 3 * copies + LATENCY / (warps * blocks)
        time *= idle(warps, blocks) / (rows * lane_rows * walked)
        if best is None or time < best[0]:
            best = time, replace(config, blocks_per_sm=blocks)
    if best is None and (spare or modifiers):  # rather a few spills than nothing
        args = (head_dim, head_dim_v, itemsize, owns_keys, max_owned, derivatives)
        return best_hvp(*args, modifiers if spare else 3 * modifiers // 4, shared_limit, aligned, 0)
    if best is None:
        raise too_large("Hessian-vector product", head_dim, head_dim_v, itemsize, shared_limit, least)
    return best[1]


def backward(problem: Problem, shared_limit: int, aligned: bool) -> BackwardSimt | BackwardF64:
    """The backward's tile; as `forward`, with dout among the arrays that must admit vectors."""
    sizes, longest_sides = (
        (problem.head_dim, problem.head_dim_v),
        (longest(problem.longest_q), longest(problem.longest_k)),
    )
    has_slopes, taken = any(m.has_slope() for m in problem.modifiers), modifier_registers(problem)
    if problem.dtype == "float64":
        whole = any(m.knows_tiles() for m in problem.modifiers)
        found = f64.best_backward(*sizes, *longest_sides, has_slopes, taken, shared_limit, aligned, whole)
        if found is not None:
            return found
    itemsize = 8 if problem.dtype == "float64" else 4
    return best_backward(*sizes, itemsize, *longest_sides, has_slopes, taken, shared_limit, aligned)


def backward_in(
    problem: Problem, sizes: tuple[int, int, int, int], shared_limit: int, aligned: bool, *, whole: bool = True
) -> BackwardSimt:
    """The backward whose tile has given sizes: columns of dK and of dV, and queries and keys, or no more of these."""
    head_dim, head_dim_v, block_q, block_k = sizes
    has_slopes, modifiers = any(m.has_slope() for m in problem.modifiers), modifier_registers(problem)
    return best_backward(
        head_dim,
        head_dim_v,
        4,
        block_q,
        block_k,
        has_slopes,
        modifiers,
        shared_limit,
        aligned,
        (block_q, block_k) if whole else None,
        is_exact=True,
    )


@cache
def best_backward(
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    max_q: int,
    max_k: int,
    has_slopes: bool,
    modifiers: int,
    shared_limit: int,
    aligned: bool,
    tile: tuple[int, int] | None = None,
    is_exact: bool = False,
) -> BackwardSimt:
    """The fastest by estimate of the tiles that fit, or of `tile`, queries and keys; where exact, no wider than asked."""
    best: tuple[float, BackwardSimt] | None = None
    least = None
    for warps, block_q, block_k in product((8, 4, 2), (64, 32, 16, 8), (128, 96, 64, 32, 16, 8)):
        if (block_q > max_q and block_q > 16) or (block_k > max_k and block_k > 16):
            continue
        if tile not in (None, (block_q, block_k)):
            continue
        for score, key, query in product(
            spreads(warps // 2, block_q, block_k), spreads(warps // 2, block_k, 0), spreads(warps, block_q, 0)
        ):
            unit = 2 * max(key.column_units, query.column_units)
            width, width_v = padded(head_dim, unit), padded(head_dim_v, 2 * key.column_units)
            if is_exact and width != head_dim:
                continue
            scores = ThreadTile(block_q // score.row_units, block_k // score.column_units, itemsize)
            keys = ThreadTile(block_k // key.row_units, width // key.column_units, itemsize)
            values = ThreadTile(block_k // key.row_units, width_v // key.column_units, itemsize)
            queries = ThreadTile(block_q // query.row_units, width // query.column_units, itemsize)
            layouts = (score.warp_rows, score.lane_rows, key.warp_rows, key.lane_rows, query.warp_rows, query.lane_rows)
            config = BackwardSimt(width, width_v, block_q, block_k, warps, *layouts, 1, aligned)
            shared_bytes = config.shared_bytes(itemsize)
            least = min(least or shared_bytes, shared_bytes)
            (score_time, score_operands), (key_time, key_operands) = scores.along_rows(), keys.across()
            (value_time, value_operands), (query_time, query_operands) = values.across(), queries.along_left()
            statistics = 2 * scores.rows * itemsize // 4
            registers = max(keys.registers, values.registers) + ADDRESSES + (12 if itemsize == 8 else 0)
            registers += max(
                statistics + scores.registers + score_operands,
                statistics + (3 if has_slopes else 2) * scores.registers + 2 * scores.rows + modifiers,
                key_operands,
                value_operands,
                queries.registers + query_operands,
            )
            if shared_bytes > shared_limit or registers > REGISTERS or max(keys.registers, values.registers) > MAX_SUMS:
                continue
            blocks = resident(warps, shared_bytes, shared_limit)
            copies = block_q * (width + width_v) / (scores.vector if aligned else 1) / (32 * warps)
            # The halves work side by side: the slower one counts.
            time = max(width * score_time + block_q * key_time, width_v * score_time + block_q * value_time)
            time += 8 * scores.registers + block_k * query_time + queries.registers + 3 * copies + 50
            time *= idle(warps, blocks) * warps / (block_q * block_k)
            if best is None or time < best[0]:
                best = time, replace(config, blocks_per_sm=blocks)
    if best is None and (modifiers or has_slopes):
        limits = (has_slopes and modifiers > 0, 3 * modifiers // 4, shared_limit, aligned)
        return best_backward(head_dim, head_dim_v, itemsize, max_q, max_k, *limits, tile, is_exact)
    if best is None:
        raise too_large("backward", head_dim, head_dim_v, itemsize, shared_limit, least)
    return best[1]


@dataclass(frozen=True)
class Spread:
    """Warps over a tile: `warp_rows` above each other, each `lane_rows` rows of lanes."""

    warp_rows: int
    lane_rows: int
    row_units: int
    column_units: int


@cache
def spreads(warps: int, rows: int, columns: int) -> tuple[Spread, ...]:
    """Every way that divides the tile; columns 0: any number will do."""
    found: dict[tuple[int, int], Spread] = {}
    for lane_rows in (8, 4, 2):
        for warp_rows in (1, 2, 4, 8):
            row_units, column_units = warp_rows * lane_rows, warps // warp_rows * (32 // lane_rows)
            if warp_rows <= warps and rows % row_units == 0 and columns % max(column_units, 1) == 0:
                found.setdefault((row_units, column_units), Spread(warp_rows, lane_rows, row_units, column_units))
    return tuple(found.values())


def too_large(
    direction: str, head_dim: int, head_dim_v: int, itemsize: int, shared_limit: int, least: int | None
) -> UnsupportedError:
    needs = "" if least is None else f": the smallest tile takes {least} bytes of shared memory"
    return UnsupportedError(
        f"simt {direction}: head_dim {head_dim} and head_dim_v {head_dim_v} with {8 * itemsize}-bit elements do not fit "
        f"this GPU, whose blocks have {shared_limit} bytes of shared memory and whose threads have {REGISTERS} "
        f"registers{needs}; use smaller heads or a narrower dtype"
    )
