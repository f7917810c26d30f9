"""Host side of forward_split.cu: float32 on tensor cores, as planes of float16 (kernels/attention/planes.cuh).

Two kernels go before it: split_magnitudes.cu looks at every number, split_planes.cu writes the planes and decides which heads
they stand for.  Behind it goes forward_simt.cu, which has the other heads; nobody waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from cuflash import tuning
from cuflash.modifiers import KeyLengths
from cuflash.place import Placed
from cuflash.problem import Problem
from cuflash.schedules import mma, simt
from cuflash.schedules.base import padded, query_tiles, tiles
from cuflash.schedules.simt import ForwardSimt

if TYPE_CHECKING:
    from cuflash.backends import Device

STEP = mma.STEP
MAX_HEAD_DIM = 256
HALF = 2  # bytes of an element of a plane
SPLIT_ROWS = 64  # of a block of split_magnitudes.cu and split_planes.cu
MOST_TILES = 256  # of a head in split_magnitudes.cu: kMostTiles of kernels/attention/planes.cuh
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
class SplitMagnitudes:
    """Constants of split_magnitudes.cu: `lanes` threads share a row."""

    kernel = "split_magnitudes"

    arrays: int  # q, k, v and, for a backward, dout
    rows: int
    lanes: int
    aligned: bool

    threads = 256

    @property
    def direction(self) -> str:
        """Whose argument record it takes."""
        return direction_of(self.arrays)

    def shared_bytes(self, itemsize: int) -> int:
        return 0

    def blocks(self, problem: Problem) -> int:
        return sum(heads * magnitude_tiles(rows, self.rows) for heads, rows, _ in split_arrays(problem, self.arrays))


@dataclass(frozen=True)
class SplitPlanes:
    """Constants of split_planes.cu: `lanes` threads share a row."""

    kernel = "split_planes"

    arrays: int
    planes: int
    rows: int
    tile_rows: int  # `rows` of split_magnitudes.cu
    lanes: int
    aligned: bool

    threads = 256

    @property
    def direction(self) -> str:
        """Whose argument record it takes."""
        return direction_of(self.arrays)

    def shared_bytes(self, itemsize: int) -> int:
        return 0

    def blocks(self, problem: Problem) -> int:
        return sum(heads * max(1, tiles(rows, self.rows)) for heads, rows, _ in split_arrays(problem, self.arrays))


def direction_of(arrays: int) -> str:
    return "backward" if arrays > 3 else "forward"


def split_arrays(problem: Problem, arrays: int) -> list[tuple[int, int, int]]:
    """Heads of all batch entries, rows and columns of each array, in the order of kernels/attention/planes.cuh."""
    of_queries, of_keys = problem.batch_size * problem.heads_q, problem.batch_size * problem.heads_k
    return [
        (of_queries, problem.seq_q, problem.head_dim),
        (of_keys, problem.seq_k, problem.head_dim),
        (of_keys, problem.seq_k, problem.head_dim_v),
        (of_queries, problem.seq_q, problem.head_dim_v),
    ][:arrays]


def magnitude_tiles(rows: int, least: int) -> int:
    """Tiles of a head whose magnitudes are found apart."""
    return max(1, tiles(rows, max(least, tiles(rows, MOST_TILES))))


def splitting(
    problem: Problem, planes: int, aligned: bool, *, backward: bool = False
) -> tuple[SplitMagnitudes, SplitPlanes]:
    """The kernels that go before; `aligned` is that of all arrays that are split."""
    arrays = 4 if backward else 3
    pieces = tiles(max(problem.head_dim, problem.head_dim_v), 4)
    lanes = 1 << min(5, (pieces - 1).bit_length())
    return (
        SplitMagnitudes(arrays, SPLIT_ROWS, lanes, aligned),
        SplitPlanes(arrays, planes, SPLIT_ROWS, SPLIT_ROWS, lanes, aligned),
    )


def names(chain: tuple[str, ...]) -> tuple[str, ...]:
    """Of a call's modifiers, those that the kernels that go before are compiled with.

    They ask for the lengths alone, whose fields lie behind those of the modifiers in front of them.
    """
    return chain[: chain.index(KeyLengths.name) + 1] if KeyLengths.name in chain else ()


def workspace(problem: Problem, planes: int, *, backward: bool = False) -> dict[str, int]:
    """Bytes of what the kernels keep between them, by field name."""
    arrays = split_arrays(problem, 4 if backward else 3)
    words = padded(
        2 * problem.batch_size * (problem.heads_q + problem.heads_k) + problem.batch_size * problem.heads_k, 2
    )
    pairs = sum(heads * magnitude_tiles(rows, SPLIT_ROWS) for heads, rows, _ in arrays)
    elements = sum(heads * rows * padded(columns, STEP) for heads, rows, columns in arrays)
    return {"planes": planes * elements * HALF, "magnitudes": 4 * words + 8 * pairs}


# ---- what is taken --------------------------------------------------------------------------------------------------
def refusal(problem: Problem, device: Device, at: Mapping[str, Placed], backward: bool) -> str | None:
    """Why a call is not taken, or None."""
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"{name} {size} is above {MAX_HEAD_DIM} for float32"
    if problem.is_packed:
        return "packed sequences of float32 are left to simt"
    if backward:
        return "the backward of float32 is left to simt"
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
    return 116 if mma.is_rich(problem) else 128


def columns(problem: Problem, shared_limit: int, aligned: bool) -> simt.ForwardColumnsSimt:
    """Sums of columns are those of plain float32."""
    return simt.columns(problem, shared_limit, aligned)


def rest(problem: Problem, shared_limit: int, aligned: bool, main: ForwardSplit) -> ForwardSimt:
    """The kernel that answers the heads that planes do not stand for."""
    found = simt.forward(problem, shared_limit, aligned, maximum=main.maximum, entropy=main.entropy)
    return replace(found, rest=True)
