"""Host side of forward_mma.cu and backward_mma.cu."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash import tuning
from cuflash.errors import UnsupportedError
from cuflash.modifiers import Modifier, Written
from cuflash.problem import NARROW, Problem
from cuflash.schedules.base import MMA, key_tiles, padded, query_tiles, tiles
from cuflash.schedules.base import in_turns as in_turns
from cuflash.schedules.order import turns_section as turns_section
from cuflash.schedules.steps import steps_of_head

STEP = 16  # depth of one mma.m16n8k16, and height of its rows
MAX_CHUNK = 256  # value columns whose float32 accumulator still fits in registers


def tile_bytes(rows: int, columns: int, itemsize: int) -> int:
    """A SharedTile of hw/copy.cuh: 16 bytes of padding per row."""
    return rows * (columns * itemsize + 16)


@dataclass(frozen=True)
class ForwardMma:
    """Constants of forward_mma.cu; head sizes are padded to a multiple of 16."""

    kernel = "forward_mma"
    method = MMA

    head_dim: int
    head_dim_v: int
    chunk: int  # value columns of a block
    block_q: int
    block_k: int
    warps: int
    stages: int
    blocks_per_sm: int
    aligned: bool
    exact: bool  # the head sizes are the padded ones
    q_in_registers: bool = False
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
        keys = tile_bytes(self.block_k, self.head_dim, itemsize) + tile_bytes(self.block_k, self.chunk, itemsize)
        addresses = 2 * 8
        inputs = tile_bytes(self.block_q, self.head_dim, itemsize) + self.stages * keys + addresses
        return max(inputs, tile_bytes(self.block_q, self.chunk, itemsize))

    def blocks(self, problem: Problem) -> int:
        chunks = tiles(problem.head_dim_v, self.chunk)
        return query_tiles(problem, self.block_q) * chunks * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class ForwardMmaNarrow(ForwardMma):
    """The same for 8-bit inputs: values come in steps, the head size of the scores is padded to a multiple of 32."""

    method = f"{MMA}, of weights rounded to 8 bits as well"

    def shared_bytes(self, itemsize: int) -> int:
        keys = tile_bytes(self.block_k, self.head_dim, itemsize) + self.block_k * self.chunk * itemsize
        addresses = padded(2 * 8, 128)  # tiles of steps start at multiples of 128 bytes, and so does what holds them
        inputs = tile_bytes(self.block_q, self.head_dim, itemsize) + self.stages * keys + addresses
        return max(inputs, tile_bytes(self.block_q, self.chunk, ITEMSIZE))

    def step_count(self, problem: Problem) -> int:
        """Steps of the values of a head."""
        return steps_of_head(problem, self.block_k)


@dataclass(frozen=True)
class ForwardColumnsMma:
    """Constants of forward_columns_mma.cu; a warp owns block_k / warps keys."""

    kernel = "forward_columns_mma"
    statistics = True

    head_dim: int
    block_q: int
    block_k: int
    warps: int
    stages: int
    blocks_per_sm: int
    aligned: bool
    exact: bool  # the head size is the padded one
    k_in_registers: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        queries = tile_bytes(self.block_q, self.head_dim, itemsize) + 4 * self.block_q
        return tile_bytes(self.block_k, self.head_dim, itemsize) + self.stages * queries

    def blocks(self, problem: Problem) -> int:
        return tiles(problem.seq_k, self.block_k) * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class JvpMma:
    """Constants of jvp_mma.cu; head sizes are padded to a multiple of 16."""

    kernel = "jvp_mma"

    head_dim: int
    head_dim_v: int
    chunk: int  # value columns of a block
    block_q: int
    block_k: int
    warps: int
    blocks_per_sm: int
    aligned: bool

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        rows = tile_bytes(self.block_q + self.block_k, self.head_dim, itemsize)
        inputs = 2 * (rows + tile_bytes(self.block_k, self.chunk, itemsize))
        return max(inputs, tile_bytes(self.block_q, self.chunk, itemsize))

    def blocks(self, problem: Problem) -> int:
        chunks = tiles(problem.head_dim_v, self.chunk)
        return query_tiles(problem, self.block_q) * chunks * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class BackwardMma:
    """Constants of backward_mma.cu; a warp owns block_k / warps keys, and a part of dQ's rows and columns."""

    kernel = "backward_mma"
    method = MMA
    statistics_rows = 1  # each row has its shift and its delta side by side

    head_dim: int
    head_dim_v: int
    chunk: int  # columns of dK and dQ of a block
    chunk_v: int  # columns of dV of a block
    block_q: int
    block_k: int
    warps: int
    query_warps: int  # columns of warps in S and dP
    dq_warp_columns: int
    stages: int
    dout_stages: int
    blocks_per_sm: int
    aligned: bool
    exact: bool  # the head sizes are the padded ones
    late: bool  # dq is added a step late, unless blocks take turns
    deterministic: bool = False  # blocks add to dq in turns
    sum_digits: int = 0  # of gradients of operands that are summed in fixed point
    stores_gradients: bool = False  # those of operands are single terms, in the type of the result

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
        return self.head_dim // self.chunk

    def shared_bytes(self, itemsize: int) -> int:
        keys = tile_bytes(self.block_k, self.head_dim, itemsize) + tile_bytes(self.block_k, self.head_dim_v, itemsize)
        queries = tile_bytes(self.block_q, self.head_dim, itemsize) + 2 * 4 * self.block_q
        dout = tile_bytes(self.block_q, self.head_dim_v, itemsize)
        tiles_of_scores = 1 + (self.query_warps > 1) + (self.late and not self.deterministic)
        scores = tiles_of_scores * tile_bytes(self.block_k, self.block_q, itemsize)
        return keys + self.stages * queries + self.dout_stages * dout + scores

    def chunks(self, problem: Problem) -> int:
        return max(tiles(problem.head_dim, self.chunk), tiles(problem.head_dim_v, self.chunk_v))

    def blocks(self, problem: Problem) -> int:
        return key_tiles(problem, self.block_k) * self.chunks(problem) * problem.heads_k * problem.batch_size


@dataclass(frozen=True)
class BackwardConvert:
    """Constants of backward_convert_mma.cu: those of the main kernel that say how its sums lie in memory."""

    kernel = "backward_convert_mma"

    head_dim: int
    head_dim_v: int
    chunk: int
    block_q: int
    warps: int
    dq_warp_columns: int
    has_planes: bool = False  # which that kernel multiplies, for the heads that they stand for

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, itemsize: int) -> int:
        return tile_bytes(self.block_q, self.chunk, itemsize)

    def blocks(self, problem: Problem) -> int:
        chunks = self.head_dim // self.chunk
        return query_tiles(problem, self.block_q) * chunks * problem.heads_q * problem.batch_size


# ---- choosing tiles -------------------------------------------------------------------------------------------------
ITEMSIZE = 2
SM_75_SHARED = 64 * 1024  # the least of all; sm_75 is told by it
SM_89_SHARED = 99 * 1024  # sm_120's as well: both multiply 8 bits as they are, devices with more turn them into float16


def looking(problem: Problem) -> list[Modifier]:
    """The modifiers that know where each element stands, which takes positions, operands or slopes, and so registers."""
    return [m for m in problem.modifiers if m.kind in ("score", "mask", "drop")]


def is_rich(problem: Problem) -> bool:
    """Whether scores are changed or hidden, or weights dropped, one by one."""
    return problem.scale <= 0 or bool(looking(problem))


def is_crowded(problem: Problem) -> bool:
    """Whether a call has so many modifiers, some of them compiled for tested and for clear tiles, that little is left."""
    return len(looking(problem)) >= 4 and any(m.knows_tiles() for m in looking(problem))


def differentiates(problem: Problem) -> bool:
    """Whether the backward adds to gradients of what expressions read."""
    return any(isinstance(m, Written) and m.differentiable for m in problem.modifiers)


def keeps_scores(problem: Problem) -> bool:
    """Whether those gradients may depend on the scores that entered the modifiers."""
    scored = (m.has_slope() or (isinstance(m, Written) and m.program.needs_score) for m in problem.modifiers)
    return differentiates(problem) and any(scored)


def forward_registers(problem: Problem, tile: tuning.ForwardTile, aligned: bool, statistics: bool = False) -> int:
    """Registers that the accumulators, scores and kept queries of a warp may take.

    The limits are those below which the compiler's reports show no spill (tests/test_compile_matrix.py).
    """
    if is_crowded(problem):
        return 80 if aligned else 72
    if tile.block_q // tile.warps <= STEP:
        return 152 if is_rich(problem) and tile.stages == 1 else 192
    if statistics:  # a warp with twice the rows has no registers for twice the numbers
        return 0
    if is_rich(problem):
        return 104
    bounded = tile.stages == 1 and (problem.is_packed or problem.modifier("window") is not None)
    return 152 if bounded or not aligned else 192 if problem.head_dim <= 128 else 160


def narrow_registers(problem: Problem, tile: tuning.ForwardTile, shared_limit: int) -> int:
    """The same of 8-bit inputs; where they become float16 in front of each product, this takes registers, too."""
    scores = tile.block_q * tile.block_k // (32 * tile.warps)
    converted = shared_limit > SM_89_SHARED
    if is_crowded(problem):
        return 48 if scores <= 16 else 0
    if is_rich(problem):
        return 0 if scores > 32 else 96 if converted else 144
    return 160 if not converted else 112 if scores <= 32 else 0


def narrow_chunk(problem: Problem, shared_limit: int) -> int:
    """Value columns of a block at most."""
    return MAX_CHUNK // 4 if is_crowded(problem) else MAX_CHUNK // 2 if shared_limit > SM_89_SHARED else MAX_CHUNK


def jvp_registers(problem: Problem, shared_limit: int, aligned: bool) -> int:
    """Registers that the accumulators and scores of the forward mode may take; see `forward_registers`."""
    modifiers = looking(problem)
    if is_crowded(problem) or (problem.modifier("dropout") and len(modifiers) > 1):
        return 80
    if shared_limit <= SM_75_SHARED or any(m.knows_tiles() or isinstance(m, Written) for m in modifiers):
        return 112
    if len(modifiers) >= 4:  # slopes, addresses and marks of masks at once
        return 112
    if len(modifiers) <= 1:
        return 160
    return 144 if aligned else 112


def backward_registers(problem: Problem, tile: tuning.BackwardTile, shared_limit: int, aligned: bool) -> int:
    """Registers that the accumulators and scores of the backward may take; see `forward_registers`."""
    chunked = max(problem.head_dim, problem.head_dim_v) > 128
    if is_rich(problem):
        # Beside others, dropout takes what they leave: marks, exchanged numbers and the generator's state.
        aligned = aligned and not (problem.modifier("dropout") and any(m.kind != "drop" for m in looking(problem)))
        if chunked:
            return 80 if aligned and not differentiates(problem) else 48
        many = len(looking(problem)) >= 4  # slopes, addresses and marks of masks at once
        return 144 if tile.query_warps > 1 and aligned and shared_limit > SM_75_SHARED and not many else 112
    if shared_limit <= SM_75_SHARED:  # which copies through registers
        return 112
    if tile.query_warps > 1:
        return 160 if chunked else 192
    return 192 if tile.block_k // tile.warps > STEP else 144


def forward(
    problem: Problem, shared_limit: int, aligned: bool, *, maximum: bool = False, entropy: bool = False
) -> ForwardMma:
    """The first tile of the table that fits; `maximum` and `entropy` add these statistics of each row."""
    narrow = problem.dtype == NARROW
    itemsize = 1 if narrow else ITEMSIZE
    head_dim, head_dim_v = padded(problem.head_dim, 2 * STEP // itemsize), padded(problem.head_dim_v, STEP)
    crowded = is_crowded(problem) or ((maximum or entropy) and is_rich(problem) and shared_limit <= SM_75_SHARED)
    widest = narrow_chunk(problem, shared_limit) if narrow else MAX_CHUNK // 2 if crowded else MAX_CHUNK
    chunk = chunk_of(head_dim_v, widest, STEP)
    head_dim_v = padded(head_dim_v, chunk)
    for tile in tuning.FORWARD_MMA_E4M3 if narrow else tuning.FORWARD_MMA:
        if tile.block_q > 64 and problem.longest_q <= 64:
            continue
        queries = head_dim * itemsize // 4 if tile.q_in_registers else 0
        needed = tile.block_q * (chunk + tile.block_k + queries) // (32 * tile.warps)
        limit = (
            narrow_registers(problem, tile, shared_limit)
            if narrow
            else forward_registers(problem, tile, aligned, maximum or entropy)
        )
        if needed > limit:
            continue
        config = (ForwardMmaNarrow if narrow else ForwardMma)(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            chunk=chunk,
            block_q=tile.block_q,
            block_k=tile.block_k,
            warps=tile.warps,
            stages=tile.stages,
            blocks_per_sm=tile.blocks_per_sm,
            aligned=aligned and rows_are_copied(max(head_dim, chunk), tile.warps, itemsize),
            exact=(head_dim, head_dim_v) == (problem.head_dim, problem.head_dim_v),
            q_in_registers=tile.q_in_registers,
            maximum=maximum,
            entropy=entropy,
        )
        if fits(config, shared_limit, itemsize):
            return config
    raise too_large("forward", problem, shared_limit)


def jvp(problem: Problem, shared_limit: int, aligned: bool) -> JvpMma:
    """The first tile of the table that fits: two accumulators and two tiles of scores must fit a warp's registers."""
    head_dim, head_dim_v = padded(problem.head_dim, STEP), padded(problem.head_dim_v, STEP)
    for limit in (MAX_CHUNK // 2, MAX_CHUNK // 4, MAX_CHUNK // 8):
        chunk = chunk_of(head_dim_v, limit, STEP)
        for tile in tuning.JVP_MMA:
            needed = 2 * tile.block_q * (chunk + tile.block_k) // (32 * tile.warps)
            if needed > jvp_registers(problem, shared_limit, aligned):
                continue
            config = JvpMma(
                head_dim=head_dim,
                head_dim_v=padded(head_dim_v, chunk),
                chunk=chunk,
                block_q=tile.block_q,
                block_k=tile.block_k,
                warps=tile.warps,
                blocks_per_sm=tile.blocks_per_sm,
                aligned=aligned and rows_are_copied(max(head_dim, chunk), tile.warps),
            )
            if fits(config, shared_limit):
                return config
    raise too_large("forward mode", problem, shared_limit)


def columns(problem: Problem, shared_limit: int, aligned: bool) -> ForwardColumnsMma:
    """The first tile of the sums of columns that fits."""
    head_dim = padded(problem.head_dim, STEP)
    for tile in tuning.COLUMNS_MMA:
        needed = tile.block_k * (tile.block_q + (head_dim // 2 if tile.k_in_registers else 0)) // (32 * tile.warps)
        if needed > (32 if is_crowded(problem) else 64 if is_rich(problem) else 128):
            continue
        config = ForwardColumnsMma(
            head_dim=head_dim,
            block_q=tile.block_q,
            block_k=tile.block_k,
            warps=tile.warps,
            stages=tile.stages,
            blocks_per_sm=tile.blocks_per_sm,
            aligned=aligned and rows_are_copied(head_dim, tile.warps),
            exact=head_dim == problem.head_dim,
            k_in_registers=tile.k_in_registers,
        )
        if fits(config, shared_limit):
            return config
    raise too_large("sums of columns", problem, shared_limit)


def backward(problem: Problem, shared_limit: int, aligned: bool) -> BackwardMma:
    """The first tile of the table that fits; more than 256 columns of dK and dV together are computed in chunks."""
    step = STEP if max(problem.head_dim, problem.head_dim_v) <= STEP else 2 * STEP
    head_dim, head_dim_v = padded(problem.head_dim, step), padded(problem.head_dim_v, step)
    for limit in (128, 64, 32) if head_dim + head_dim_v > 256 else (max(head_dim, head_dim_v),):
        chunk, chunk_v = chunk_of(head_dim, limit, step), chunk_of(head_dim_v, limit, step)
        for tile in tuning.BACKWARD_MMA:
            if tile.late and problem.is_packed:  # the bounds of segments take the registers
                continue
            # A tile's scores, dP and, if they are needed, those that entered; chunks have limits that leave room for them.
            scores = 3 if keeps_scores(problem) and max(head_dim, head_dim_v) <= 128 else 2
            accumulators = tile.block_k * (chunk + chunk_v + scores * tile.block_q) // (32 * tile.warps)
            if accumulators > backward_registers(problem, tile, shared_limit, aligned):
                continue
            columns = dq_warp_columns(tile, chunk)
            if columns is None or chunk % (STEP * tile.query_warps) or chunk_v % (STEP * tile.query_warps):
                continue
            padded_sizes = padded(head_dim, chunk), padded(head_dim_v, chunk_v)
            config = BackwardMma(
                head_dim=padded_sizes[0],
                head_dim_v=padded_sizes[1],
                chunk=chunk,
                chunk_v=chunk_v,
                block_q=tile.block_q,
                block_k=tile.block_k,
                warps=tile.warps,
                query_warps=tile.query_warps,
                dq_warp_columns=columns,
                stages=tile.stages,
                dout_stages=tile.dout_stages,
                blocks_per_sm=tile.blocks_per_sm,
                aligned=aligned and rows_are_copied(max(padded_sizes), tile.warps),
                exact=padded_sizes == (problem.head_dim, problem.head_dim_v),
                late=tile.late,
            )
            if fits(config, shared_limit):
                return config
    raise too_large("backward", problem, shared_limit)


def convert(problem: Problem, main: BackwardMma) -> BackwardConvert:
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


def rows_are_copied(width: int, warps: int, itemsize: int = ITEMSIZE) -> bool:
    """Whether a block has a thread for each 16 bytes of a row, which hw/copy.cuh asks for."""
    return 32 * warps >= 1 << (width * itemsize // 16 - 1).bit_length()


def fits(
    config: ForwardMma | ForwardColumnsMma | JvpMma | BackwardMma, shared_limit: int, itemsize: int = ITEMSIZE
) -> bool:
    return config.shared_bytes(itemsize) <= shared_limit


def too_large(direction: str, problem: Problem, shared_limit: int) -> UnsupportedError:
    return UnsupportedError(
        f"head_dim {problem.head_dim} with head_dim_v {problem.head_dim_v}: no tile of the {direction} fits the "
        f"{shared_limit} bytes of shared memory that a block may have on this device"
    )
