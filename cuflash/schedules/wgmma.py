"""Host side of forward_wgmma.cu and backward_wgmma.cu: Hopper's warpgroup products, fed through tensor maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cuflash import tensormap, tuning
from cuflash.abi import STATISTICS
from cuflash.errors import UnsupportedError
from cuflash.modifiers import Packed, Tile, Window, Written
from cuflash.place import Placed
from cuflash.problem import NARROW, Problem
from cuflash.schedules.base import WGMMA, key_tiles, padded, query_tiles, tiles
from cuflash.schedules.base import in_turns as in_turns
from cuflash.schedules.mma import BackwardConvert, is_rich, keeps_scores
from cuflash.schedules.steps import steps_of_head
from cuflash.tensormap import PANEL_ALIGNMENT, PANEL_COLUMNS, panel_bytes
from cuflash.variant import ITEMSIZE

if TYPE_CHECKING:
    from cuflash.backends import Device

STEP = 16  # depth of one wgmma; with 8-bit elements, of pairs
GROUP_ROWS, GROUP_THREADS = 64, 128  # of a warpgroup
MAX_HEAD_DIM = 256
SMALLEST_QUERIES = 128  # tiles of more are for as many queries at least
MAX_TILES = 1 << 30  # a block's next tile is counted in 32 bits
SEGMENT_BYTES = 24  # bounds of a packed sequence, a part of the two that follow; other calls have room to spare anyway
TILE_BYTES = 28 + SEGMENT_BYTES  # what consumers are told of a tile of queries
TOLD_BYTES = 8  # and of a block of keys
TOLD_STEP_BYTES = 20  # and in the backward, of a step
WORK_BYTES = 48 + SEGMENT_BYTES  # what a block of the backward is told of its tile of keys
SUM_BYTES = 4  # of the sums of gradients
BIAS_TILE_BYTES = 36  # what a block is told of its tile of the gradient of a bias, and who shares it
BROUGHT = 3  # weight of a bias that comes ahead
SCORED = 8  # weight of what looks at single scores

#: registers per thread of the producer and of each consumer, by consumers: together at most what the launch reserves
#: (65536 / threads, rounded down to a multiple of 8, for each thread; PTX ISA, "setmaxnreg")
REGISTERS = {2: (40, 232), 3: (32, 160), 4: (32, 112)}
#: the same where the producer looks for the tiles that are not hidden; such calls have tiles for two consumers
REGISTERS_TO_LOOK = {2: (88, 208)}
#: those of the backward, and where its producer looks
BACKWARD_REGISTERS, BACKWARD_REGISTERS_TO_LOOK = (24, 240), (56, 224)
#: modifiers of single scores that such a backward takes, those that hide tiles among them; 0 refuses it
MAX_LOOKING_WHERE_HIDDEN = 1


def panels_of(columns: int) -> int:
    """Of a tile of 16-bit elements."""
    return tiles(columns, PANEL_COLUMNS)


def channel_bytes(slots: int) -> int:
    """A Channel of hw/copy_tma.cuh."""
    return 2 * 8 * slots


def bias_bytes(rows: int, columns: int, stages: int) -> int:
    """BiasTiles of wgmma_bias.cuh."""
    return stages * (2 * columns if rows == 1 else panel_bytes(rows, columns))


@dataclass(frozen=True)
class ForwardWgmma:
    """Constants of forward_wgmma.cu; head sizes are padded to a multiple of 16, in memory to whole panels."""

    kernel = "forward_wgmma"
    method = WGMMA

    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    stages: int
    query_stages: int
    separate_out: bool
    continuous: bool
    optimistic: bool
    producer_registers: int
    consumer_registers: int
    merged: bool = False  # what each block of keys adds to the output is summed apart, in full float32
    out_panels: int = 0  # of the output leave at once, beside queries that warpgroups fetch by themselves
    bias_rows: int = 0  # of each block of a bias that comes ahead
    bias_stages: int = 0
    bias_apart: bool = False  # which is the same for all keys, and moves lse alone
    holds_bias: bool = False
    returns_bias: bool = False
    segment_list: int = 0  # of packed sequences, of which the tiles are taken
    from_end: bool = False  # the last tile ends with the queries, and the first one may begin before them
    programmatic: bool = False  # waits by itself for what lies in front of it

    #: blocks stay and take tile after tile, so there are no more of them than the device holds at once
    persistent = True
    #: copies go through tensor maps or not at all
    aligned = True
    #: the shorter half of all heads' tiles may come behind all others (schedules/order.py)
    keeps_late = True

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (self.block_q // GROUP_ROWS + 1)

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        return self.block_k, self.head_dim_v

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Rows of a copy, by array; of a second list, the maps of the kernel of the first one lie in front."""
        queries = GROUP_ROWS if self.out_panels else self.block_q
        own = {"q": queries, "k": self.block_k, "v": self.block_k, "out": GROUP_ROWS, **self.bias_box}
        return {**(dict.fromkeys(map(tensormap.OTHER.__add__, own), 0) if self.segment_list else {}), **own}

    @property
    def bias_box(self) -> Mapping[str, int]:
        return {"bias": self.bias_rows} if self.bias_stages else {}

    @property
    def bias_bytes(self) -> int:
        """Shared memory of a bias that comes ahead."""
        tiles = bias_bytes(self.bias_rows, self.block_k, self.bias_stages)
        return padded(tiles + 2 * channel_bytes(self.bias_stages), PANEL_ALIGNMENT)

    @property
    def fetched_bytes(self) -> int:
        """Of the channels of queries that warpgroups fetch."""
        return padded(self.block_q // GROUP_ROWS * channel_bytes(1), PANEL_ALIGNMENT) if self.out_panels else 0

    @property
    def out_bytes(self) -> int:
        """Of a tile of the output on its way to memory."""
        return panel_bytes(self.block_q, self.out_panels * PANEL_COLUMNS or self.head_dim_v)

    def shared_bytes(self, itemsize: int) -> int:
        queries = self.query_stages * panel_bytes(self.block_q, self.head_dim)
        keys = self.stages * (panel_bytes(self.block_k, self.head_dim) + panel_bytes(self.block_k, self.head_dim_v))
        out = self.out_bytes if self.separate_out else 16
        tile_slots = 2 if self.out_panels else self.query_stages
        channels = channel_bytes(tile_slots) + 2 * channel_bytes(self.stages) + channel_bytes(1)
        told = (2 * tile_slots + 1) * TILE_BYTES + self.stages * TOLD_BYTES
        return self.bias_bytes + self.fetched_bytes + padded(queries + keys + out + channels + told, PANEL_ALIGNMENT)

    def blocks(self, problem: Problem) -> int:
        """Tiles of queries."""
        return query_tiles(problem, self.block_q) * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class ForwardWgmmaNarrow(ForwardWgmma):
    """The same for 8-bit inputs: values come in steps, the head size of the scores is padded to a multiple of 32."""

    method = f"{WGMMA}, of weights rounded to 8 bits as well"

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Rows of a copy, by array; values have no map."""
        return {"q": self.block_q, "k": self.block_k, "out": GROUP_ROWS, **self.bias_box}

    def shared_bytes(self, itemsize: int) -> int:
        keys = self.stages * panel_bytes(self.block_k, self.head_dim, itemsize)
        values = padded(self.stages * self.block_k * self.head_dim_v * itemsize, PANEL_ALIGNMENT)
        queries = self.query_stages * panel_bytes(self.block_q, self.head_dim, itemsize)
        out = panel_bytes(self.block_q, self.head_dim_v)
        channels = channel_bytes(self.query_stages) + 2 * channel_bytes(self.stages) + channel_bytes(1)
        told = (2 * self.query_stages + 1) * TILE_BYTES + self.stages * TOLD_BYTES
        return self.bias_bytes + padded(queries + keys + values + out + channels + told, PANEL_ALIGNMENT)

    def step_count(self, problem: Problem) -> int:
        """Steps of the values of a head."""
        return steps_of_head(problem, self.block_k)


@dataclass(frozen=True)
class BackwardWgmma:
    """Constants of backward_wgmma.cu: two warpgroups of 64 keys each."""

    kernel = "backward_wgmma"
    method = WGMMA

    head_dim: int
    head_dim_v: int
    dq_width: int  # columns of the sums of dq: whole panels where columns are what the warpgroups share out
    block_q: int
    late_dp: bool  # dP is queued once P is formed, which leaves registers for modifiers
    block_k: int = 2 * GROUP_ROWS
    stages: int = 2
    producer_registers: int = BACKWARD_REGISTERS[0]
    consumer_registers: int = BACKWARD_REGISTERS[1]
    deterministic: bool = False  # blocks add to dq in turns
    sum_digits: int = 0  # of gradients of operands that are summed in fixed point
    stores_gradients: bool = False  # those of operands are single terms, in the type of the result
    bias_rows: int = 0  # of each block of a bias that comes ahead
    bias_stages: int = 0
    bias_apart: bool = False  # which is the same for all keys, and left to backward_delta.cu
    holds_bias: bool = False  # which is the same for all queries, in registers
    returns_bias: bool = False  # blocks of gradients take the places of those of the bias
    dbias_apart: bool = False  # or another kernel makes them, of scores of its own
    stays: bool = False  # blocks take tile after tile of keys
    key_stages: int = 1  # places of K; where there are two, results have one of their own as well

    #: parts of a tile of dq that are summed apart
    dq_chunks = 1
    #: what a block is told of its work
    told_bytes = WORK_BYTES + 4
    threads = 3 * GROUP_THREADS
    aligned = True

    @property
    def statistics_rows(self) -> int:
        """Rows whose shifts lie together, behind them their deltas."""
        return self.block_q

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        dq_columns = self.dq_width if self.block_q == self.block_k else self.dq_width // 2
        return self.block_q, self.head_dim, self.head_dim_v, dq_columns

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Rows of a copy, by array."""
        queries = {"q": self.block_q, "dout": self.block_q}
        biases = {"bias": self.bias_rows} if self.bias_stages else {}
        if self.returns_bias:
            biases["dbias"] = self.bias_rows
        return {**queries, "k": self.block_k, "v": self.block_k, "dk": GROUP_ROWS, "dv": GROUP_ROWS, **biases}

    @property
    def persistent(self) -> bool:
        """Whether there are no more blocks than the device holds at once."""
        return self.stays

    @property
    def staying_bytes(self) -> int:
        """Shared memory of blocks that stay: what threads are told of two tiles, and where there is room, K and results."""
        if not self.stays:
            return 0
        told = 2 * (WORK_BYTES + 8) + channel_bytes(2) + channel_bytes(1) + 8
        if self.key_stages == 1:
            return told
        leaving = 2 * panel_bytes(GROUP_ROWS, max(self.head_dim, self.head_dim_v))
        return told + panel_bytes(self.block_k, self.dq_width) + leaving + channel_bytes(1)

    @property
    def exchanged_bytes(self) -> int:
        """Shared memory in which consumers hand over more than dS."""
        return 0

    def shared_bytes(self, itemsize: int) -> int:
        keys = panel_bytes(self.block_k, self.dq_width) + panel_bytes(self.block_k, self.head_dim_v)
        queries = panel_bytes(self.block_q, self.head_dim) + panel_bytes(self.block_q, self.head_dim_v)
        statistics = 2 * 4 * self.block_q
        gradients = 16 if self.returns_bias else 2 * panel_bytes(self.block_k, self.block_q)
        channels = self.told_bytes + channel_bytes(1) + 2 * channel_bytes(self.stages) + channel_bytes(2)
        channels += self.dq_chunks * 2 * channel_bytes(self.stages) if self.deterministic else 8  # of turns
        channels += 2 * channel_bytes(self.bias_stages)
        return bias_bytes(self.bias_rows, self.block_k, self.bias_stages) + padded(
            keys
            + self.stages * (queries + statistics + TOLD_STEP_BYTES)
            + gradients
            + self.exchanged_bytes
            + self.staying_bytes
            + channels,
            PANEL_ALIGNMENT,
        )

    def blocks(self, problem: Problem) -> int:
        return key_tiles(problem, self.block_k) * problem.heads_k * problem.batch_size


@dataclass(frozen=True)
class BackwardQueriesWgmma:
    """Constants of backward_queries_wgmma.cu, which makes dq of the blocks of dS that the main kernel stored."""

    kernel = "backward_queries_wgmma"
    method = WGMMA

    head_dim: int
    head_dim_v: int
    dq_width: int  # columns of a tile of keys
    bias_rows: int  # of a box of dS
    block_q: int = 2 * GROUP_ROWS
    block_k: int = 2 * GROUP_ROWS
    stages: int = 3

    persistent = True
    threads = 3 * GROUP_THREADS

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        return (self.head_dim,)

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Names of the main kernel's maps, which it takes as they are."""
        return dict.fromkeys(("q", "dout", "k", "v", "dk", "dv", "bias", "dbias"), 0)

    def shared_bytes(self, itemsize: int) -> int:
        step = panel_bytes(self.block_q, self.block_k) + panel_bytes(self.block_k, self.dq_width)
        return padded(self.stages * step + channel_bytes(self.stages), PANEL_ALIGNMENT)

    def blocks(self, problem: Problem) -> int:
        """Tiles of queries."""
        return query_tiles(problem, self.block_q) * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class BackwardWgmmaSplit(BackwardWgmma):
    """Constants of backward_wgmma_split.cu: one warpgroup for dV and one for dK."""

    kernel = "backward_wgmma_split"

    key_registers: int = BACKWARD_REGISTERS[1]  # of the consumer for dK
    leaves_dq: bool = False  # panels of dq go through shared memory
    dq_apart: bool = False  # another kernel makes dq, of scores of its own

    @property
    def parts(self) -> int:
        """Tiles of scores that a block's keys are taken in."""
        return self.block_k // GROUP_ROWS

    @property
    def dq_chunks(self) -> int:  # type: ignore[override]
        """Each consumer adds at a time of its own, and with two parts of the keys each panel."""
        return self.dq_width // PANEL_COLUMNS if self.parts > 1 else 2

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        return self.block_q, self.head_dim, self.head_dim_v, PANEL_COLUMNS

    @property
    def exchanged_bytes(self) -> int:
        """P in float32 on its way from one consumer to the other, a panel of dq on its way to the sums, their channels."""
        probabilities = 4 * GROUP_ROWS * self.block_q + channel_bytes(1)
        panel = 4 * self.block_q * PANEL_COLUMNS if self.leaves_dq else 16
        return probabilities + panel + channel_bytes(self.dq_width // PANEL_COLUMNS)


@dataclass(frozen=True)
class BackwardWgmmaDq:
    """Constants of backward_wgmma_dq.cu: dq of wide heads by blocks of 128 queries, of which each warpgroup owns 64."""

    kernel = "backward_wgmma_dq"
    method = WGMMA

    head_dim: int
    head_dim_v: int
    statistics_rows: int  # whose shifts lie together, behind them their deltas
    bias_apart: bool = False
    block_q: int = 2 * GROUP_ROWS
    block_k: int = GROUP_ROWS
    key_stages: int = 2
    value_stages: int = 1
    producer_registers: int = BACKWARD_REGISTERS[0]
    consumer_registers: int = BACKWARD_REGISTERS[1]

    threads = 3 * GROUP_THREADS

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        return self.block_k, self.head_dim

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Names of the main kernel's maps, which it takes as they are."""
        return dict.fromkeys(("q", "dout", "k", "v", "dk", "dv"), 0)

    def shared_bytes(self, itemsize: int) -> int:
        queries = panel_bytes(self.block_q, self.head_dim) + panel_bytes(self.block_q, self.head_dim_v)
        keys = self.key_stages * panel_bytes(self.block_k, self.head_dim)
        values = self.value_stages * panel_bytes(self.block_k, self.head_dim_v)
        channels = 2 * channel_bytes(1) + channel_bytes(self.key_stages) + channel_bytes(self.value_stages)
        return padded(queries + keys + values + channels + WORK_BYTES, PANEL_ALIGNMENT)

    def blocks(self, problem: Problem) -> int:
        """Tiles of queries."""
        return query_tiles(problem, self.block_q) * problem.heads_q * problem.batch_size


MAX_PAIRS = 4  # of factors that are under way to the sum of a bias's gradient


@dataclass(frozen=True)
class BackwardWgmmaBias:
    """Constants of backward_wgmma_bias.cu: the gradient of a bias by tiles of 128 queries, 64 a warpgroup, and 128 keys."""

    kernel = "backward_wgmma_bias"
    method = WGMMA

    head_dim: int
    head_dim_v: int
    box_of_queries: int  # rows of a copy, and of those whose statistics lie together
    block_q: int = 2 * GROUP_ROWS
    block_k: int = 2 * GROUP_ROWS
    stages: int = 2
    bias_places: int = 1
    rounds: bool = False  # into the type of the result
    producer_registers: int = 40
    consumer_registers: int = 232

    is_beside = True  # another kernel does most of the work
    threads = 3 * GROUP_THREADS

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        return (self.block_k,)

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Names of the main kernel's maps, which it takes as they are."""
        return dict.fromkeys(("q", "dout", "k", "v", "dk", "dv", "bias"), 0)

    def shared_bytes(self, itemsize: int) -> int:
        pair = max(
            panel_bytes(self.block_q, columns) + panel_bytes(self.block_k, columns)
            for columns in (self.head_dim, self.head_dim_v)
        )
        statistics = (self.stages + 1) // 2 * 2 * 4 * self.block_q
        tiles = self.stages * pair + self.bias_places * panel_bytes(self.block_q, self.block_k) + statistics
        channels = channel_bytes(self.stages) + channel_bytes(self.bias_places) + channel_bytes(2)
        return padded(tiles + channels + 2 * BIAS_TILE_BYTES, PANEL_ALIGNMENT)

    def blocks(self, problem: Problem) -> int:
        """Tiles of scores that share a gradient."""
        return query_tiles(problem, self.block_q) * key_tiles(problem, self.block_k)


MIN_COMPILER = 1209  # older ones refuse a second -arch, which CuPy cannot be kept from giving


def unmet(problem: Problem, device: Device, at: Mapping[str, Placed]) -> str | None:
    """What every kernel that is fed through tensor maps asks for and the call does not have, or None."""
    if 0 < device.compiler < MIN_COMPILER:
        return f"NVRTC {device.compiler // 100}.{device.compiler % 100} is older than 12.9"
    if asked := [name for name in STATISTICS if name in at]:
        return f"it computes no statistics beside lse, and {', '.join(asked)} was asked for"
    if not (problem.batch_size and problem.seq_q and problem.seq_k):
        return "an array is empty, which no tensor map describes"
    return None


def refusal(problem: Problem, device: Device, at: Mapping[str, Placed], for_backward: bool) -> str | None:
    """Why these kernels do not take the problem with arrays at these places, or None."""
    if reason := unmet(problem, device, at) or unfit(problem, for_backward):
        return reason
    try:
        count = (backward if for_backward else forward)(problem, device.shared_limit, True).blocks(problem)
        if count > MAX_TILES:
            return f"{count} tiles are more than the {MAX_TILES} that its blocks count; split the batch"
        for name in at:
            if name in tensormap.ARRAYS and not (name == "v" and problem.scales):
                tensormap.describe(name, problem, at[name], 1)
    except UnsupportedError as error:
        return str(error)
    return None


def unfit(problem: Problem, for_backward: bool) -> str | None:
    """Which modifiers the kernels have no code or no registers for, or None."""
    if problem.modifier("dropout"):
        return "it has no registers left to draw the random numbers of Dropout in"
    widest = max(problem.head_dim, problem.head_dim_v)
    sloped = [m for m in problem.modifiers if m.has_slope()]
    others = [m for m in problem.modifiers if m.kind in ("score", "mask") and m not in sloped]
    hiding = [m for m in problem.modifiers if m.knows_tiles()]
    if for_backward and hiding and problem.dtype == "float32":
        return f"its backward of float32 does not pass over the tiles that {hiding[0].name} hides"
    if for_backward and hiding and len(sloped) + len(others) > MAX_LOOKING_WHERE_HIDDEN:
        called = [m.title if isinstance(m, Written) else m.name for m in (*sloped, *others) if m is not hiding[0]]
        return f"its backward has no registers to pass over the tiles that {hiding[0].name} hides beside {', '.join(called)}"
    if for_backward and sloped and (others or keeps_scores(problem)) and widest > 96:
        called = [m.title if isinstance(m, Written) else m.name for m in (sloped[0], *others)]
        beside = f" beside {', '.join(called[1:])}" if others else " and the scores that its gradients depend on"
        return f"its backward has no room for the slopes of {called[0]}{beside} at head size {widest}"
    return None


def weight(problem: Problem, bias: str = "") -> int:
    """What the modifiers take of the registers: intervals of keys their few numbers, what looks at single scores far more.

    The limits in the table are those up to which the compiler's reports show no spill (tests/test_compile_matrix.py).
    """
    given = without_bias(problem) if bias else problem
    counted = [m for m in given.modifiers if m.kind not in ("sum", "place", "units")]
    weights = [len(m.fields) if m.kind == "range" else SCORED for m in counted]
    return sum(weights) + (BROUGHT if bias else 0) + (SCORED if problem.scale <= 0 else 0)


def most_keys(problem: Problem) -> int:
    """Keys that the first, the middle or the last query sees, whichever sees most, as far as the same intervals hold for all."""
    some = np.array([0, problem.seq_q // 2, max(problem.seq_q - 1, 0)])
    begin, end = np.zeros_like(some), np.full_like(some, problem.seq_k)
    tile = Tile(problem, {}, slice(0, problem.seq_q), slice(0, problem.seq_k))
    for modifier in problem.modifiers:
        if modifier.kind == "range" and not modifier.operand_attributes():
            begin, end = modifier.narrow(begin, end, some, tile)
    return int(np.max(end - begin, initial=0))


def bias_form(problem: Problem, at: Mapping[str, Placed]) -> str:
    """How a bias comes ahead of use, if nothing else changes scores: in "blocks", as a "row" or "apart"; "" where it does not.

    A row is the same for all queries; what is the same for all keys is kept apart from scores.
    """
    added = [m.added for m in problem.modifiers if m.kind == "score"]
    if added != ["bias"] or problem.is_packed:
        return ""
    place = at["bias"]
    *_, row, column = place.strides
    if column == 0:
        return "apart" if problem.scale > 0 else ""
    try:
        tensormap.of_bias(problem, place, 1)
    except UnsupportedError:
        return ""
    return "blocks" if row else "row"


def without_bias(problem: Problem) -> Problem:
    return replace(problem, modifiers=tuple(m for m in problem.modifiers if m.added != "bias"))


def forward(problem: Problem, shared_limit: int, aligned: bool, bias: str = "") -> ForwardWgmma:
    """The first fitting tile that is no taller than the queries, unless there are but taller ones; `bias` is its form."""
    if bias == "apart":
        return replace(forward(without_bias(problem), shared_limit, aligned), bias_apart=True)
    found = list(fitting_forwards(problem, shared_limit, bias))
    if not found:
        raise UnsupportedError(
            f"head_dim {problem.head_dim} with head_dim_v {problem.head_dim_v}: no tile of the forward by wgmma fits the "
            f"{shared_limit} bytes of shared memory of a block; backend='mma' takes it"
        )
    rows = max(SMALLEST_QUERIES, padded(problem.longest_q, GROUP_ROWS))
    return next((config for config in found if config.block_q <= rows), found[0])


def forward_of_long(problem: Problem, shared_limit: int) -> tuple[ForwardWgmma, int] | None:
    """Of packed sequences: the tile of those of more keys than `forward` has a tile for, and how many these are.

    None if there is no such sequence, or the tile is the same.  A sequence has its tile by its own length, so that its bits do
    not depend on what it is packed with.
    """
    keys = longest_walk(problem)
    short, most = next(limited_forwards(problem, shared_limit, 0))
    long, _ = next(limited_forwards(problem, shared_limit, keys))
    return None if long == short else (long, most)


def longest_walk(problem: Problem) -> int:
    """Keys that a query of packed sequences sees, at most."""
    longest = problem.seq_k
    for m in problem.modifiers:
        if isinstance(m, Packed):
            longest = min(longest, m.longest_k)
        elif isinstance(m, Window) and m.left is not None:
            right = 0 if problem.modifier("causal") else m.right
            longest = longest if right is None else min(longest, m.left + right + 1)
    return longest


def counts_from_end(problem: Problem) -> bool:
    """Whether tiles of queries end where these do, to within the rows of a warpgroup.

    Under a causal mask the last queries see the most keys: warpgroups without queries are better off in the first tile.
    Nothing may be read or written that lies before the first query.
    """
    kinds = {m.kind for m in problem.modifiers}
    return problem.modifier("causal") is not None and kinds <= {"range", "sum", "units"}


def fitting_forwards(problem: Problem, shared_limit: int, bias: str = "") -> Iterator[ForwardWgmma]:
    """The tiles of the table that take the head sizes and the keys, leave registers for the modifiers, and fit.

    Of packed sequences those of short ones.
    """
    keys = 0 if problem.is_packed else most_keys(problem)
    return (config for config, _ in limited_forwards(problem, shared_limit, keys, bias))


def limited_forwards(
    problem: Problem, shared_limit: int, keys: int, bias: str = ""
) -> Iterator[tuple[ForwardWgmma, int]]:
    """The same for queries that see so many keys, each with how many its tile is for."""
    narrow = ITEMSIZE[problem.dtype] == 1
    head_dim, head_dim_v = padded(problem.head_dim, 2 * STEP if narrow else STEP), padded(problem.head_dim_v, STEP)
    wide_out = panels_of(head_dim_v) > panels_of(head_dim)  # more than the queries' place holds
    modifiers = weight(problem, bias)
    looks = any(m.knows_tiles() for m in problem.modifiers)
    has_planes = problem.dtype == "float32"  # schedules/split_wgmma.py
    from_end = not (problem.is_packed or has_planes or bias) and counts_from_end(problem)
    tables: Mapping[str, tuple[tuning.ForwardWgmmaTile, ...]]
    tables = {NARROW: tuning.FORWARD_WGMMA_E4M3, "float32": tuning.FORWARD_WGMMA_PLANE}
    ahead = {"blocks": tuning.FORWARD_WGMMA_BIAS, "row": tuning.FORWARD_WGMMA_ROW}.get(bias, ()) if not narrow else ()
    for tile in (*ahead, *tables.get(problem.dtype, tuning.FORWARD_WGMMA)):
        if max(head_dim, head_dim_v) > tile.max_head_dim or modifiers > tile.max_weight:
            continue
        if keys > (min(tile.max_keys, tile.max_keys_from_end) if from_end else tile.max_keys):
            continue
        groups = tile.block_q // GROUP_ROWS
        bias_rows, bias_stages = {"blocks": (tile.block_q, tile.bias_stages), "row": (1, tile.stages)}.get(bias, (0, 0))
        producer, consumer = (REGISTERS_TO_LOOK if looks else REGISTERS)[groups]
        # Blocks of a bias take the place of the output, and wide values the registers; the others were not tried.
        fetches = not (bias_stages or wide_out or narrow or has_planes)
        out_panels = min(tile.out_panels, panels_of(head_dim_v)) if fetches else 0
        config = (ForwardWgmmaNarrow if narrow else ForwardWgmma)(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            block_q=tile.block_q,
            block_k=tile.block_k,
            stages=tile.stages,
            query_stages=tile.query_stages,
            separate_out=(tile.query_stages > 1 and not tile.in_place) or wide_out or narrow or out_panels > 0,
            continuous=tile.continuous,
            optimistic=tile.optimistic,
            producer_registers=producer,
            consumer_registers=consumer,
            merged=tile.merged,
            bias_rows=bias_rows if bias_stages else 0,
            bias_stages=bias_stages,
            out_panels=out_panels,
            from_end=from_end,
        )
        if config.shared_bytes(ITEMSIZE[problem.dtype]) <= shared_limit:
            yield config, tile.max_keys


# Head sizes of keys and of values up to which registers are left for two parts of the keys.
MAX_PARTED, MAX_PARTED_VALUES = 192, 128
PARTED_REGISTERS = 224, 256  # of the consumers for dV and dK, beside a producer with 24
# Head size up to which dq is summed in memory, unless in a fixed order.  H200, 2026-12-01, bf16, TFLOP/s so and by a kernel of
# its own, full and causal: d 256 S 1024 353 and 381, 286 and 311, S 16384 426 and 468, 433 and 464; d 192 S 8192 470 and 447, 468
# and 434, in a fixed order 289 and 431, 288 and 434; d 256 S 4096 with a bias 248 and 236, a mask 420 and 319, softcap 419, 345
MAX_SUMMED = 192
MAX_PAIRED = 128  # head size up to which dK and dV together fit in a warpgroup's registers


def backward(
    problem: Problem,
    shared_limit: int,
    aligned: bool,
    bias: str = "",
    dbias: Placed | None = None,
    deterministic: bool = False,
) -> BackwardWgmma:
    """128 queries at a time for head sizes up to 64 and scores that nothing changes, else 64; split roles above 128.

    These take 64 keys, or 128 where values have no more than 128 columns and no scores are changed one by one or tiles hidden.
    `bias` is its form, and `dbias` where its gradient lies.
    """
    if bias == "apart":
        found = backward(without_bias(problem), shared_limit, aligned, deterministic=deterministic)
        return replace(found, bias_apart=True)
    head_dim, head_dim_v = padded(problem.head_dim, STEP), padded(problem.head_dim_v, STEP)
    widest = max(head_dim, head_dim_v)
    looks = any(m.knows_tiles() for m in problem.modifiers)
    producer, consumer = BACKWARD_REGISTERS_TO_LOOK if looks else BACKWARD_REGISTERS
    if widest > MAX_PAIRED:
        parts = head_dim <= MAX_PARTED and head_dim_v <= MAX_PARTED_VALUES and not is_rich(problem) and not looks
        values, keys = PARTED_REGISTERS if parts else (consumer, consumer)
        return BackwardWgmmaSplit(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dq_width=padded(head_dim, PANEL_COLUMNS),
            block_q=GROUP_ROWS,
            block_k=(2 if parts else 1) * GROUP_ROWS,
            late_dp=False,
            producer_registers=producer,
            consumer_registers=values,
            key_registers=keys,
            leaves_dq=parts and not deterministic,
            dq_apart=not parts and makes_dq_apart(problem, deterministic),
        )
    itemsize = itemsize_of_gradient(problem, dbias, bias)
    rich = is_rich(without_bias(problem) if itemsize else problem)
    apart = bias == "blocks" and sums_in_registers(problem, dbias, itemsize)
    narrow = widest <= PANEL_COLUMNS and not rich
    config = BackwardWgmma(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dq_width=head_dim if narrow else 2 * PANEL_COLUMNS,
        block_q=2 * GROUP_ROWS if narrow else GROUP_ROWS,
        late_dp=rich,
        bias_rows=(2 * GROUP_ROWS if narrow else GROUP_ROWS) if bias == "blocks" else 0,
        bias_stages=0 if bias != "blocks" else 2 if apart or not itemsize else 4,
        holds_bias=bias == "row",
        returns_bias=bias == "blocks" and itemsize == 2 and not apart,
        dbias_apart=apart,
        producer_registers=producer,
        consumer_registers=consumer,
    )
    if stays(problem, config):
        # H200, 2026-12-01, bf16, microseconds of one and of two places, full and causal: d 64 S 1024 756 and 745, 552 and 521,
        # S 4096 2396 and 2432, 1334 and 1346; d 128 S 1024 682 and 704, 480 and 474, S 4096 2175 and 2313, 1362 and 1381
        config = replace(config, stays=True, key_stages=2 if narrow else 1)
    takes_turns = deterministic and not config.returns_bias  # which leaves dq to another kernel
    fits = replace(config, deterministic=takes_turns).shared_bytes(ITEMSIZE[problem.dtype]) <= shared_limit
    if bias and not fits:
        return backward(problem, shared_limit, aligned)  # which reads the bias from memory
    return config


# Queries of the heads that share one of the keys, of which 32 heads at once stay in the cache.  H200, 2026-12-01, bf16, d 64
# full, microseconds with 16 and with 32: S 1024 847 and 767, S 4096 2418 and 2558 (two runs)
MANY_AT_ONCE = 2048


def turns_section(problem: Problem, config: BackwardWgmma) -> int:
    """Heads at once, at least, where blocks add in turns: the more, the fewer blocks wait for each other.

    With 64 keys at a time additions go as fast as the cache takes them, so that sums have to stay there; where all tiles of keys
    take the same time, they stand in line without waiting, but for those that begin together.
    """
    full = problem.modifier("causal") is None
    if config.block_k == GROUP_ROWS:
        return 4 if full else 16
    begins = config.block_q > GROUP_ROWS and problem.seq_q * problem.group <= MANY_AT_ONCE
    return 16 if full and not begins else 32


def makes_dq_apart(problem: Problem, deterministic: bool) -> bool:
    """Whether dq of heads above MAX_PAIRED has a kernel of its own, which makes scores a second time."""
    return (deterministic or max(problem.head_dim, problem.head_dim_v) > MAX_SUMMED) and not is_rich(problem)


# Steps of a tile of keys, on the average, up to which blocks stay under a causal mask with 64 queries at a time.  H200,
# 2026-12-01, bf16, d 128, microseconds without and with: S 1024 498 and 480, 4096 1367 and 1362, 16384 4121 and 4189; full 709
# and 682, 2201 and 2176, 7997 and 7900
STAYING_STEPS = 64


def stays(problem: Problem, config: BackwardWgmma) -> bool:
    """Whether blocks take tile after tile of keys, if the form keeps nothing else from one step to the next."""
    keeps = config.late_dp or config.bias_stages or config.holds_bias or any(m.knows_tiles() for m in problem.modifiers)
    if keeps or problem.dtype == "float32":
        return False
    if problem.modifier("causal") is None or problem.is_packed or config.block_q > GROUP_ROWS:
        return True
    return query_tiles(problem, config.block_q) * problem.group <= 2 * STAYING_STEPS


def itemsize_of_gradient(problem: Problem, dbias: Placed | None, bias: str) -> int:
    """Bytes of an element of a bias's gradient, of sums or single terms; 0 where nothing but additions one by one make it."""
    if not bias or dbias is None or dbias.itemsize not in (2, SUM_BYTES):
        return 0
    if bias == "blocks" and not sums_in_registers(problem, dbias, dbias.itemsize):
        try:
            tensormap.of_bias(problem, dbias, 1, 0, "dbias")
        except UnsupportedError:
            return 0
    return dbias.itemsize


def sums_in_registers(problem: Problem, dbias: Placed | None, itemsize: int) -> bool:
    """Whether blocks of the gradient of a bias are left to the kernel that sums them before it rounds them."""
    return itemsize == SUM_BYTES or (itemsize > 0 and dbias is not None and dbias.is_broadcast(problem.score_shape))


def sum_of_bias(problem: Problem, main: BackwardWgmma, shared_limit: int, dbias: Placed) -> BackwardWgmmaBias:
    """The kernel that sums the gradient of a bias that `main` leaves to it; its blocks are those of each bias there is."""
    rounds = dbias.itemsize < SUM_BYTES
    config = BackwardWgmmaBias(main.head_dim, main.head_dim_v, main.block_q, rounds=rounds)
    for stages, places in ((MAX_PAIRS, 2), (MAX_PAIRS, 1), (3, 1)):
        more = replace(config, stages=stages, bias_places=places)
        if more.shared_bytes(ITEMSIZE[problem.dtype]) <= shared_limit:
            return more
    return config


def biases(problem: Problem, place: Placed) -> int:
    """How many there are, each of a head of a batch entry, or of all that share it."""
    lengths = (*problem.batch, problem.heads_q)
    return math.prod(n for n, stride in zip(lengths, place.strides, strict=False) if stride)


def convert(problem: Problem, main: BackwardWgmma) -> BackwardConvert | BackwardQueriesWgmma | BackwardWgmmaDq:
    """The kernel that makes dq of what `main` leaves: nothing, blocks of dS, or sums in its own order."""
    if isinstance(main, BackwardWgmmaSplit) and main.dq_apart:
        return BackwardWgmmaDq(main.head_dim, main.head_dim_v, main.statistics_rows, bias_apart=main.bias_apart)
    if main.returns_bias:
        return BackwardQueriesWgmma(main.head_dim, main.head_dim_v, main.dq_width, main.bias_rows)
    return convert_sums(main)


def convert_sums(main: BackwardWgmma) -> BackwardConvert:
    """The kernel that undoes the order in which `main` sums dq: a warp sums 16 rows, of a half where columns are shared."""
    split = isinstance(main, BackwardWgmmaSplit)
    return BackwardConvert(
        head_dim=main.dq_width,
        head_dim_v=main.head_dim_v,
        chunk=main.dq_width,
        block_q=main.block_q,
        warps=4 if split else 8,
        dq_warp_columns=1 if split or main.block_q == main.block_k else 2,
    )
