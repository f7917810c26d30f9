"""Host side of decode_mma.cu and decode_simt.cu: a few queries against a long cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuflash import tuning
from cuflash.errors import UnsupportedError
from cuflash.problem import Problem
from cuflash.schedules.base import MMA, MULTIPLY_ADDS, padded, tiles
from cuflash.schedules.mma import STEP, tile_bytes
from cuflash.tensormap import PANEL_ALIGNMENT, panel_bytes

if TYPE_CHECKING:
    from cuflash.backends import Device

MAX_HEAD_DIM = 256
MAX_HEAD_LANES = 4  # heads whose keys are read side by side
MAX_BLOCKS_OF_KEYS = (1 << 31) - 1  # that the kernels' list of work counts
LANES = 32
BARRIER_BYTES = 8  # of a stage


@dataclass(frozen=True)
class Decode:
    """Constants of both kernels; `rows` are packed query rows of a tile, `block_k` keys that a warp takes at a time."""

    kernel = ""

    head_dim: int
    head_dim_v: int
    rows: int
    block_k: int
    warps: int
    stages: int
    head_lanes: int  # neighbouring blocks that work on neighbouring heads
    blocks_per_sm: int
    paged: bool
    appends: bool
    aligned: bool

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    def merge_bytes(self, real: int) -> int:
        """A MergeStorage of decode_slices.cuh, whose sums take `real` bytes each."""
        outputs = self.warps * self.rows * (self.head_dim_v * real + 16)
        statistics = 2 * (self.warps + 1) * self.rows * real
        return padded(outputs + statistics + 4, 16)

    def part_rows(self, blocks: int) -> int:
        """Rows of the parts that so many blocks may leave."""
        return 2 * blocks * self.rows

    def slices(self, blocks: int) -> int:
        """Slices that so many blocks cut the keys into at most; `head_lanes` blocks walk the same one."""
        return blocks // self.head_lanes

    def units(self, problem: Problem) -> int:
        """Entries of the batch times heads of the keys times tiles of packed rows."""
        return problem.batch_size * problem.heads_k * tiles(problem.seq_q * problem.group, self.rows)

    def blocks_of_keys(self, problem: Problem) -> int:
        """Length of the kernels' list if all caches are full."""
        return self.units(problem) * max(1, tiles(problem.seq_k, self.block_k))

    def blocks(self, problem: Problem) -> int:
        """Blocks of threads that have something to do if all caches are full and the device is large enough."""
        least = self.head_lanes if problem.batch_size and self.appends else 0
        slices = self.blocks_of_keys(problem) // (self.head_lanes * self.warps)
        return max(least, self.head_lanes * max(1, slices) if self.units(problem) else 0)


@dataclass(frozen=True)
class DecodeMma(Decode):
    """Constants of decode_mma.cu; head sizes are padded to a multiple of 16."""

    kernel = "decode_mma"
    method = MMA

    tensor: bool = False  # blocks of keys come as boxes of a tensor map
    queries_ahead: bool = False  # requested while the unit in front is worked on, where registers are left
    programmatic: bool = False  # waits by itself for what lies in front of it, so that it may begin before

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Rows of a copy, by array."""
        return {"k": self.block_k, "v": self.block_k} if self.tensor else {}

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory of a block: each warp's ring of keys and values, the queries, and results."""
        rest = tile_bytes(STEP, self.head_dim, itemsize) + self.merge_bytes(4)
        widths, stages = (self.head_dim, self.head_dim_v), self.warps * self.stages
        if self.tensor:
            panels = sum(panel_bytes(self.block_k, width) for width in widths)
            return padded(padded(stages * (panels + BARRIER_BYTES), PANEL_ALIGNMENT) + rest, PANEL_ALIGNMENT)
        return stages * sum(tile_bytes(self.block_k, width, itemsize) for width in widths) + rest


@dataclass(frozen=True)
class DecodeSimt(Decode):
    """Constants of decode_simt.cu; head sizes are padded to multiples of 8 and 32."""

    kernel = "decode_simt"
    method = MULTIPLY_ADDS

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory of a block: the queries, and results."""
        real = max(itemsize, 4)
        return padded(self.rows * self.head_dim * real, 16) + self.merge_bytes(real)


# ---- choosing tiles -------------------------------------------------------------------------------------------------
def head_lanes(problem: Problem, multiprocessors: int) -> int:
    """As many as divide the heads, up to 4; 1 where a device would be left with idle multiprocessors."""
    for lanes in (MAX_HEAD_LANES, 2):
        if problem.heads_k % lanes == 0 and multiprocessors % lanes == 0:
            return lanes
    return 1


def mma(problem: Problem, device: Device, *, aligned: bool, page_size: int, appends: bool, mapped: bool) -> DecodeMma:
    """The first ring of the table that fits; tiles of 8 rows where these hold all queries of a group.

    So are those of values wider than 192: an output of 16 such rows leaves a warp no registers.  Caches that tensor maps
    describe (`mapped`) come as boxes where each block of keys lies in one page.
    """
    has_narrow_tiles = problem.seq_q * problem.group <= 8 or problem.head_dim_v > 192
    head_dim, head_dim_v = padded(problem.head_dim, STEP), padded(problem.head_dim_v, STEP)
    for tile in tuning.DECODE_MMA:
        config = DecodeMma(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            rows=8 if has_narrow_tiles else 16,
            block_k=tile.block_k,
            warps=tile.warps,
            stages=tile.stages,
            head_lanes=head_lanes(problem, device.multiprocessors),
            blocks_per_sm=1,
            paged=bool(page_size),
            appends=appends,
            aligned=aligned,
            tensor=mapped and page_size % tile.block_k == 0,
            queries_ahead=(has_narrow_tiles or head_dim_v <= 128) and head_dim <= 32 * tile.warps,
            programmatic=device.capability >= 90,
        )
        if config.shared_bytes(2) <= device.shared_limit:
            return config
    raise UnsupportedError(
        f"head_dim {problem.head_dim} with head_dim_v {problem.head_dim_v}: no tile of the decode kernel fits the "
        f"{device.shared_limit} bytes of shared memory of a block; backend='simt' takes it"
    )


def simt(problem: Problem, device: Device, *, aligned: bool, page_size: int, appends: bool, mapped: bool) -> DecodeSimt:
    """Up to 8 rows, 4 for float64 and wide outputs, no more than the queries of a group are."""
    head_dim_v = padded(problem.head_dim_v, LANES)
    most = 8
    while most * head_dim_v * (2 if problem.dtype == "float64" else 1) > 8 * 256:
        most //= 2
    rows = 1
    while rows < min(most, problem.seq_q * problem.group):
        rows *= 2
    return DecodeSimt(
        head_dim=padded(problem.head_dim, 8),
        head_dim_v=head_dim_v,
        rows=rows,
        block_k=LANES,
        warps=4,
        stages=1,
        head_lanes=head_lanes(problem, device.multiprocessors),
        blocks_per_sm=2,
        paged=bool(page_size),
        appends=appends,
        aligned=aligned,
    )
