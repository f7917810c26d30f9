"""Host side of forward_split.cu and backward_split.cu: float32 on tensor cores, as planes of float16 (attention/planes.cuh).

A kernel goes before them: split_planes.cu writes the planes and decides which heads they stand for.  Behind them go
forward_simt.cu and backward_simt.cu, which have the other heads; nobody waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from cuflash import tuning
from cuflash.errors import UnsupportedError
from cuflash.modifiers import KeyLengths
from cuflash.place import Placed
from cuflash.problem import Problem
from cuflash.schedules import mma, simt
from cuflash.schedules.base import MMA, key_tiles, padded, query_tiles, tiles
from cuflash.schedules.base import in_turns as in_turns
from cuflash.schedules.order import power_of_two_below
from cuflash.schedules.order import turns_section as turns_section
from cuflash.schedules.rows import BackwardConvertSimt
from cuflash.schedules.simt import BackwardSimt, ForwardSimt

if TYPE_CHECKING:
    from cuflash.backends import Device
    from cuflash.schedules.split_wgmma import ForwardSplitWgmma

STEP = mma.STEP
PLANES = {1: "one float16 plane, one product", 2: "two float16 planes, three products"}
MAX_HEAD_DIM = 256
HALF = 2  # bytes of an element of a plane
# Of split_planes.cu: threads of a block, pieces of four numbers that each of them keeps, blocks of a multiprocessor.
SPLIT_THREADS, SPLIT_PIECES, SPLIT_PARTS, SPLIT_BLOCKS = 256, 12, 3, 3
SPLIT_SHARED = 256  # bytes of what a block knows of its tile
OF_QUERIES = (0, 3)  # arrays with the heads and rows of the queries
LEAST_LENGTH = 256  # queries and keys below which splitting takes longer than it saves


@dataclass(frozen=True)
class ForwardSplit:
    """Constants of forward_split.cu; head sizes are padded to a multiple of 16."""

    kernel = "forward_split"
    aligned = True  # the planes are, whatever they were made from

    planes: int  # 2, or 1 where TF32 was asked for
    head_dim: int
    head_dim_v: int
    width_v: int  # columns of a row of values in the planes
    chunk: int  # value columns of a block
    block_q: int
    block_k: int
    warps: int
    stages: int
    blocks_per_sm: int
    score_part: int  # keys whose low parts are summed at once
    maximum: bool = False  # also the largest score of each row
    entropy: bool = False  # also the entropy of each row's weights

    @property
    def method(self) -> str:
        return f"{PLANES[self.planes]} on {MMA}"

    @property
    def statistics(self) -> bool:
        """Whether there is a statistic beside lse."""
        return self.maximum or self.entropy

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        """Of tiles of planes, whatever the itemsize of the arrays."""
        keys = mma.tile_bytes(self.block_k, self.head_dim, HALF) + mma.tile_bytes(self.block_k, self.chunk, HALF)
        addresses, numbers = 2 * 8, 8 * 4
        tiles_bytes = mma.tile_bytes(self.block_q, self.head_dim, HALF) + self.stages * keys
        return self.planes * (tiles_bytes + addresses) + numbers

    def blocks(self, problem: Problem) -> int:
        chunks = tiles(problem.head_dim_v, self.chunk)
        return query_tiles(problem, self.block_q) * chunks * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class BackwardSplit:
    """Constants of backward_split.cu; the columns of warps of S and dP share the columns of dK and dV."""

    kernel = "backward_split"
    aligned = True  # the planes are, whatever they were made from
    statistics_rows = 1  # each row has its shift and its delta side by side
    dq_chunks = 1

    planes: int  # 2, or 1 where TF32 was asked for
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    warps: int
    query_warps: int  # columns of warps in S and dP
    dq_warp_columns: int
    stages: int
    dout_stages: int
    blocks_per_sm: int
    exact: bool  # the planes are as wide as the padded heads
    deterministic: bool = False  # blocks add to dq in turns
    sum_digits: int = 0  # of gradients of operands that are summed in fixed point

    @property
    def method(self) -> str:
        return f"{PLANES[self.planes]} on {MMA}"

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def dq_width(self) -> int:
        """Columns of the sums of dq."""
        return self.head_dim

    def shared_bytes(self, itemsize: int) -> int:
        """Of tiles of planes, whatever the itemsize of the arrays."""
        of_row = mma.tile_bytes(1, self.head_dim, HALF), mma.tile_bytes(1, self.head_dim_v, HALF)
        keys = self.block_k * sum(of_row)
        queries = self.block_q * (self.stages * of_row[0] + self.dout_stages * of_row[1])
        scores = 2 * mma.tile_bytes(self.block_k, self.block_q, HALF)
        statistics, largest = self.stages * 2 * 4 * self.block_q, 4 * padded(self.warps, 4)
        addresses = 2 * 8
        return self.planes * (keys + queries + scores + addresses) + statistics + largest

    def blocks(self, problem: Problem) -> int:
        return key_tiles(problem, self.block_k) * problem.heads_k * problem.batch_size


@dataclass(frozen=True)
class SplitPlanes:
    """Constants of split_planes.cu: `lanes` threads share a row."""

    kernel = "split_planes"

    arrays: int  # q, k, v and, for a backward, dout
    planes: int
    lanes: int
    columns: int  # pieces of four that a thread has of a row
    thread_rows: int  # of which a thread keeps pieces in registers
    parts: int  # of a tile that are kept in shared memory, each as many rows as make four pieces
    rows: int  # that a block keeps
    most_tiles: int  # of a unit, so that all of them run at once
    blocks_per_sm: int
    aligned: bool  # rows are whole pieces of 16 bytes
    grouped: bool  # heads of queries that share keys have their exponents in common

    threads = SPLIT_THREADS

    @property
    def direction(self) -> str:
        """Whose argument record it takes."""
        return "backward" if self.arrays > 3 else "forward"

    def shared_bytes(self, itemsize: int) -> int:
        return max(1, self.parts) * 16 * 4 * self.threads + SPLIT_SHARED

    def tiles(self, problem: Problem, array: int) -> int:
        """Of a head of an array."""
        rows = split_arrays(problem, self.arrays)[array][1]
        parts = tiles(rows, self.rows) * (problem.group if self.grouped and array in OF_QUERIES else 1)
        return max(1, tiles(rows, self.rows * max(1, tiles(parts, self.most_tiles))))

    def blocks(self, problem: Problem) -> int:
        arrays = split_arrays(problem, self.arrays)
        return sum(heads * self.tiles(problem, i) for i, (heads, _, _) in enumerate(arrays))

    def counters(self, problem: Problem) -> tuple[int, int]:
        """Where counters and posts begin behind magnitudes, and their bytes."""
        heads = sum(heads for heads, _, _ in split_arrays(problem, self.arrays))
        of_keys = problem.batch_size * problem.heads_k
        words = padded(2 * problem.batch_size * (problem.heads_q + problem.heads_k) + of_keys, 2)
        return 4 * words + 8 * heads, 8 * (heads + of_keys + self.blocks(problem))

    def workspace(self, problem: Problem) -> dict[str, int]:
        """Bytes of what kernels keep between them, by field name."""
        arrays = split_arrays(problem, self.arrays)
        elements = sum(heads * rows * padded(columns, STEP) for heads, rows, columns in arrays)
        return {"planes": self.planes * elements * HALF, "magnitudes": sum(self.counters(problem))}

    def zeroed(self, problem: Problem) -> dict[str, tuple[int, int]]:
        """What of that has to be 0 before: first byte and size."""
        begin, size = self.counters(problem)
        return {"magnitudes": (begin, size)} if size else {}


def split_arrays(problem: Problem, arrays: int) -> list[tuple[int, int, int]]:
    """Heads of all batch entries, rows and columns of each array, in the order of kernels/attention/planes.cuh."""
    of_queries, of_keys = problem.batch_size * problem.heads_q, problem.batch_size * problem.heads_k
    return [
        (of_queries, problem.seq_q, problem.head_dim),
        (of_keys, problem.seq_k, problem.head_dim),
        (of_keys, problem.seq_k, problem.head_dim_v),
        (of_queries, problem.seq_q, problem.head_dim_v),
    ][:arrays]


def splitting(
    problem: Problem, device: Device, planes: int, aligned: bool, *, backward: bool = False, grouped: bool = False
) -> SplitPlanes:
    """The kernel that goes before; `aligned` is that of all arrays that are split."""
    pieces = padded(max(problem.head_dim, problem.head_dim_v), STEP) // 4
    lanes = 1 << min(5, (pieces - 1).bit_length())
    columns = tiles(pieces, lanes)
    thread_rows = SPLIT_PIECES if columns == 1 else 4  # the others spill
    aligned = aligned and not (problem.head_dim % 4 or problem.head_dim_v % 4)
    blocks = SPLIT_BLOCKS if aligned else SPLIT_BLOCKS - 1  # loads of single numbers take registers
    together = max(1, device.multiprocessors * blocks // 2)
    return SplitPlanes(
        arrays=4 if backward else 3,
        planes=planes,
        lanes=lanes,
        columns=columns,
        thread_rows=thread_rows,
        parts=SPLIT_PARTS,
        rows=SPLIT_THREADS // lanes * (thread_rows + SPLIT_PARTS * (4 // columns)),
        most_tiles=power_of_two_below(together),
        blocks_per_sm=blocks,
        aligned=aligned,
        grouped=grouped and problem.group > 1,
    )


def names(chain: tuple[str, ...]) -> tuple[str, ...]:
    """Of a call's modifiers, those that the kernels that go before are compiled with.

    They ask for the lengths alone, whose fields lie behind those of the modifiers in front of them.
    """
    return chain[: chain.index(KeyLengths.name) + 1] if KeyLengths.name in chain else ()


# ---- what is taken --------------------------------------------------------------------------------------------------
def refusal(problem: Problem, device: Device, at: Mapping[str, Placed], backward: bool) -> str | None:
    """Why a call is not taken, or None."""
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"{name} {size} is above {MAX_HEAD_DIM} for float32"
    if problem.is_packed:
        return "packed sequences of float32 are left to simt"
    if backward:
        try:
            backward_tile(problem, device.shared_limit)
        except UnsupportedError as error:
            return str(error)
    return None


def hesitation(problem: Problem) -> str | None:
    """Why a call is taken on request only, or None."""
    if problem.precision is None and min(problem.seq_q, problem.seq_k) < LEAST_LENGTH:
        return f"below {LEAST_LENGTH} queries or keys of float32 simt is faster"
    return None


def planes_of(problem: Problem) -> int:
    """Planes of a number: one where TF32 was asked for."""
    return 1 if problem.precision == "tf32" else 2


# ---- choosing tiles -------------------------------------------------------------------------------------------------
def forward_registers(tile: tuning.ForwardSplitTile, chunk: int, planes: int, statistics: bool) -> int:
    """What a thread keeps: sums of outputs, some of them twice, scores, their low parts, and what statistics take."""
    rows = tile.block_q // tile.warps
    low = tile.score_part if planes > 1 else 0
    kept = tile.block_k // 2 if statistics else 0
    return rows * (3 * chunk // 2 + tile.block_k + low + kept) // 32


def forward(
    problem: Problem, shared_limit: int, aligned: bool, *, maximum: bool = False, entropy: bool = False
) -> ForwardSplit:
    """The first tile of the table that fits; `maximum` and `entropy` add these statistics of each row.

    Values in chunks, of which each computes all scores anew, are the last resort.
    """
    planes = planes_of(problem)
    head_dim, width_v = padded(problem.head_dim, STEP), padded(problem.head_dim_v, STEP)
    for whole, tile in product((True, False), tuning.FORWARD_SPLIT):
        chunk = mma.chunk_of(width_v, tile.max_chunk, STEP)
        if (tile.block_q > 64 and problem.longest_q <= 64) or whole != (chunk == width_v):
            continue
        if forward_registers(tile, chunk, planes, maximum or entropy) > register_limit(problem):
            continue
        config = ForwardSplit(
            planes=planes,
            head_dim=head_dim,
            head_dim_v=padded(width_v, chunk),
            width_v=width_v,
            chunk=chunk,
            block_q=tile.block_q,
            block_k=tile.block_k,
            warps=tile.warps,
            stages=tile.stages,
            blocks_per_sm=tile.blocks_per_sm,
            score_part=tile.score_part,
            maximum=maximum,
            entropy=entropy,
        )
        if config.shared_bytes(4) * tile.blocks_per_sm + 1024 * tile.blocks_per_sm <= shared_limit + 1024:
            return config
    raise mma.too_large("forward", problem, shared_limit)


def register_limit(problem: Problem) -> int:
    """Limits below which the compiler's reports show no spill (tests/test_compile_matrix.py)."""
    counted = [m for m in problem.modifiers if m.kind not in ("sum", "place")]
    if not counted:
        return 160
    if mma.is_crowded(problem):
        return 100
    return 116 if mma.is_rich(problem) or len(counted) > 1 else 128


def columns(problem: Problem, shared_limit: int, aligned: bool) -> simt.ForwardColumnsSimt:
    """Sums of columns are those of plain float32."""
    return simt.columns(problem, shared_limit, aligned)


def rest(problem: Problem, shared_limit: int, aligned: bool, main: ForwardSplit | ForwardSplitWgmma) -> ForwardSimt:
    """The kernel that answers the heads that planes do not stand for."""
    found = simt.forward(problem, shared_limit, aligned, maximum=main.maximum, entropy=main.entropy)
    return replace(found, rest=True)


def backward(problem: Problem, shared_limit: int, aligned: bool) -> BackwardSplit:
    """The backward's tile; how arrays lie does not matter to planes."""
    return backward_tile(problem, shared_limit)


def backward_tile(problem: Problem, shared_limit: int) -> BackwardSplit:
    """The first tile of the table that fits and pads heads no further than to a multiple of 32 columns."""
    planes = planes_of(problem)
    least = padded(problem.head_dim, 2 * STEP), padded(problem.head_dim_v, 2 * STEP)
    for tile in tuning.BACKWARD_SPLIT:
        head_dim, head_dim_v = (padded(width, STEP * tile.query_warps) for width in least)
        columns = dq_warp_columns(tile, head_dim)
        if (
            (head_dim, head_dim_v) != least
            or columns is None
            or not backward_fits(problem, tile, head_dim + head_dim_v)
        ):
            continue
        config = BackwardSplit(
            planes=planes,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            block_q=tile.block_q,
            block_k=tile.block_k,
            warps=tile.warps,
            query_warps=tile.query_warps,
            dq_warp_columns=columns,
            stages=tile.stages,
            dout_stages=tile.dout_stages,
            blocks_per_sm=tile.blocks_per_sm,
            exact=(head_dim, head_dim_v) == (padded(problem.head_dim, STEP), padded(problem.head_dim_v, STEP)),
        )
        fits = (config.shared_bytes(4) + 1024) * tile.blocks_per_sm <= shared_limit + 1024
        if fits and has_rest(problem, shared_limit, config):
            return config
    raise mma.too_large("backward", problem, shared_limit)


def backward_fits(problem: Problem, tile: tuning.BackwardTile, width: int) -> bool:
    """Whether a thread has registers for its sums of dK and dV, `width` columns together, and for its scores.

    The limits are those below which the compiler's reports show no spill (tests/test_compile_matrix.py), neither here nor
    where the plain kernel works in the same tile.
    """
    rows = tile.block_k / (32 * tile.warps)
    sums, scores = rows * width, 3 * rows * tile.block_q
    crowded = len(mma.looking(problem)) >= 4 or mma.keeps_scores(problem)
    return sums <= 80 and sums + scores <= (88 if crowded else 112 if mma.is_rich(problem) else 160)


def dq_warp_columns(tile: tuning.BackwardTile, head_dim: int) -> int | None:
    """Parts into which the warps cut dQ's columns: those that leave each warp the squarest piece, of whole 16 x 16 blocks."""
    pieces = {}
    for columns in (8, 4, 2, 1):
        row_parts = tile.warps // columns
        if tile.warps % columns == 0 and tile.block_q % (STEP * row_parts) == 0 and head_dim % (STEP * columns) == 0:
            pieces[columns] = tile.block_q // row_parts + head_dim // columns
    return min(pieces, key=lambda columns: pieces[columns], default=None)


def backward_rest(problem: Problem, shared_limit: int, aligned: bool, main: BackwardSplit) -> BackwardSimt:
    """The kernel that answers the heads that planes do not stand for, in the same tiles, so that both take turns alike."""
    sizes = main.head_dim, main.head_dim_v, main.block_q, main.block_k
    return replace(simt.backward_in(problem, sizes, shared_limit, aligned), rest=True)


def has_rest(problem: Problem, shared_limit: int, main: BackwardSplit) -> bool:
    """Whether the plain kernel, whose numbers take as much memory as two planes, fits into a tile as well."""
    try:
        backward_rest(problem, shared_limit, False, main)
    except UnsupportedError:
        return False
    return True


def convert(problem: Problem, main: BackwardSplit) -> BackwardConvertSimt:
    """The kernel that brings the sums of dq, which are row-major, into the caller's strides."""
    return BackwardConvertSimt()
