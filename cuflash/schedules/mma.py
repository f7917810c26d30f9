"""Host side of forward_mma.cu and backward_mma.cu."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash import tuning
from cuflash.errors import UnsupportedError
from cuflash.problem import Problem
from cuflash.schedules.base import padded, tiles

STEP = 16  # depth of one mma.m16n8k16, and height of its rows
MAX_CHUNK = 256  # value columns whose float32 accumulator still fits in registers


def tile_bytes(rows: int, columns: int, itemsize: int) -> int:
    """A SharedTile of hw/copy.cuh: 16 bytes of padding per row."""
    return rows * (columns * itemsize + 16)


@dataclass(frozen=True)
class ForwardMma:
    """Constants of forward_mma.cu; head sizes are padded to a multiple of 16."""

    head_dim: int
    head_dim_v: int
    chunk: int  # value columns of a block
    block_q: int
    block_k: int
    warps: int
    stages: int
    blocks_per_sm: int
    aligned: bool

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        keys = tile_bytes(self.block_k, self.head_dim, itemsize) + tile_bytes(self.block_k, self.chunk, itemsize)
        return tile_bytes(self.block_q, self.head_dim, itemsize) + self.stages * keys

    def blocks(self, problem: Problem) -> int:
        chunks = tiles(problem.head_dim_v, self.chunk)
        return tiles(problem.seq_q, self.block_q) * chunks * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class BackwardMma:
    """Constants of backward_mma.cu; a warp owns block_k / warps keys, and a part of dQ's rows and columns."""

    head_dim: int
    head_dim_v: int
    chunk: int  # columns of dK and dQ of a block
    chunk_v: int  # columns of dV of a block
    block_q: int
    block_k: int
    warps: int
    dq_warp_columns: int
    stages: int
    blocks_per_sm: int
    aligned: bool

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        keys = tile_bytes(self.block_k, self.head_dim, itemsize) + tile_bytes(self.block_k, self.head_dim_v, itemsize)
        queries = tile_bytes(self.block_q, self.head_dim, itemsize) + tile_bytes(self.block_q, self.head_dim_v, itemsize)
        statistics = 2 * 4 * self.block_q
        return keys + tile_bytes(self.block_k, self.block_q, itemsize) + self.stages * (queries + statistics)

    def chunks(self, problem: Problem) -> int:
        return max(tiles(problem.head_dim, self.chunk), tiles(problem.head_dim_v, self.chunk_v))

    def blocks(self, problem: Problem) -> int:
        return tiles(problem.seq_k, self.block_k) * self.chunks(problem) * problem.heads_k * problem.batch_size


@dataclass(frozen=True)
class BackwardConvert:
    """Constants of backward_convert.cu: those of the main kernel that say how its sums lie in memory."""

    head_dim: int
    head_dim_v: int
    chunk: int
    block_q: int
    warps: int
    dq_warp_columns: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        return 0

    def blocks(self, problem: Problem) -> int:
        query_tiles = tiles(problem.seq_q, self.block_q)
        return query_tiles * (self.head_dim // self.chunk) * problem.heads_q * problem.batch_size


# ---- choosing tiles -------------------------------------------------------------------------------------------------
ITEMSIZE = 2
#: registers that accumulators and scores may take so that the rest still fits, found with the compiler's reports
PLAIN_REGISTERS = 192


def is_rich(problem: Problem) -> bool:
    """Whether some modifier needs positions, operands or slopes of single elements, and so registers."""
    return any(m.kind in ("score", "mask") for m in problem.modifiers)


def forward(problem: Problem, shared_limit: int, aligned: bool) -> ForwardMma:
    """The first tile of the table that fits."""
    head_dim, head_dim_v = padded(problem.head_dim, STEP), padded(problem.head_dim_v, STEP)
    chunk = chunk_of(head_dim_v, MAX_CHUNK, STEP)
    for tile in tuning.FORWARD_MMA:
        rows = tile.block_q // tile.warps
        if tile.block_q > 64 and problem.seq_q <= 64:
            continue
        limit = 128 if is_rich(problem) and rows > STEP else PLAIN_REGISTERS
        if rows * (chunk + tile.block_k) // 32 > limit:
            continue
        config = ForwardMma(
            head_dim=head_dim,
            head_dim_v=padded(head_dim_v, chunk),
            chunk=chunk,
            block_q=tile.block_q,
            block_k=tile.block_k,
            warps=tile.warps,
            stages=tile.stages,
            blocks_per_sm=tile.blocks_per_sm,
            aligned=aligned,
        )
        if fits(config, shared_limit):
            return config
    raise too_large("forward", problem, shared_limit)


def backward(problem: Problem, shared_limit: int, aligned: bool) -> BackwardMma:
    """The first tile of the table that fits; more than 256 columns of dK and dV together are computed in chunks."""
    step = STEP if max(problem.head_dim, problem.head_dim_v) <= STEP else 2 * STEP
    head_dim, head_dim_v = padded(problem.head_dim, step), padded(problem.head_dim_v, step)
    limit = 128 if head_dim + head_dim_v > 256 else max(head_dim, head_dim_v)
    chunk, chunk_v = chunk_of(head_dim, limit, step), chunk_of(head_dim_v, limit, step)
    for tile in tuning.BACKWARD_MMA:
        rows = tile.block_k // tile.warps
        if rows * (chunk + chunk_v + 2 * tile.block_q) // 32 > (160 if is_rich(problem) else PLAIN_REGISTERS):
            continue
        columns = dq_warp_columns(tile, chunk)
        if columns is None:
            continue
        config = BackwardMma(
            head_dim=padded(head_dim, chunk),
            head_dim_v=padded(head_dim_v, chunk_v),
            chunk=chunk,
            chunk_v=chunk_v,
            block_q=tile.block_q,
            block_k=tile.block_k,
            warps=tile.warps,
            dq_warp_columns=columns,
            stages=tile.stages,
            blocks_per_sm=tile.blocks_per_sm,
            aligned=aligned,
        )
        if fits(config, shared_limit):
            return config
    raise too_large("backward", problem, shared_limit)


def convert(main: BackwardMma) -> BackwardConvert:
    """The kernel that undoes the order in which `main` sums dq."""
    names = ("head_dim", "head_dim_v", "chunk", "block_q", "warps", "dq_warp_columns")
    return BackwardConvert(**{name: getattr(main, name) for name in names})


def chunk_of(width: int, limit: int, step: int) -> int:
    """Width of equal chunks, none wider than the limit, each a multiple of the step."""
    return padded(tiles(width, tiles(width, limit)), step)


def dq_warp_columns(tile: tuning.BackwardTile, chunk: int) -> int | None:
    """Parts into which the warps cut dQ's columns: as many as give each warp whole 16 x 16 blocks."""
    for columns in (4, 2, 1):
        row_parts = tile.warps // columns
        if tile.warps % columns or not row_parts or tile.block_q % (STEP * row_parts) or chunk % (STEP * columns):
            continue
        return columns
    return None


def fits(config: ForwardMma | BackwardMma, shared_limit: int) -> bool:
    return config.shared_bytes(ITEMSIZE) <= shared_limit


def too_large(direction: str, problem: Problem, shared_limit: int) -> UnsupportedError:
    return UnsupportedError(
        f"head_dim {problem.head_dim} with head_dim_v {problem.head_dim_v}: no tile of the {direction} fits the "
        f"{shared_limit} bytes of shared memory that a block may have on this device"
    )
