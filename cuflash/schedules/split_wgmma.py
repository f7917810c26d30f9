"""Host side of float32 on Hopper's warpgroup products, as planes of float16 fed through tensor maps.

Two planes of each number are multiplied by forward_split_wgmma.cu, backward_split_wgmma.cu and backward_split_wgmma_roles.cu.
One plane, where TF32 was asked for, is an array of float16 whose heads have scales: forward_wgmma.cu and backward_wgmma.cu
multiply it like any other, and write float32.  The kernels before them, and those behind that have the heads which planes do not
stand for, are those of schedules/split.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from cuflash import tensormap, tuning
from cuflash.errors import UnsupportedError
from cuflash.modifiers import Written
from cuflash.place import Placed
from cuflash.problem import Problem
from cuflash.schedules import simt, split, wgmma
from cuflash.schedules.base import WGMMA, key_tiles, padded, query_tiles
from cuflash.schedules.mma import BackwardConvert
from cuflash.schedules.simt import BackwardSimt
from cuflash.schedules.wgmma import (
    GROUP_ROWS,
    GROUP_THREADS,
    REGISTERS,
    REGISTERS_TO_LOOK,
    SCORED,
    STEP,
    TOLD_BYTES,
    BackwardWgmma,
    ForwardWgmma,
    channel_bytes,
    unmet,
    weight,
)
from cuflash.tensormap import PANEL_ALIGNMENT, PANEL_COLUMNS, TensorMap, panel_bytes

if TYPE_CHECKING:
    from cuflash.backends import Device

MAX_SPLIT = 128  # head size up to which there is a backward of two planes; 0 leaves all to mma
MAX_WHOLE = 64  # and up to which a warpgroup has registers for its sums of dK and dV, if scores have no slopes
UNIT_BYTES = 16  # what a block of the backward multiplies with, in shared memory

#: whether to take a call at all is the same question as for mma.sync
hesitation = split.hesitation
rest = split.rest


@dataclass(frozen=True)
class ForwardSplitWgmma:
    """Constants of forward_split_wgmma.cu; head sizes are padded to a multiple of 16, in shared memory to whole panels."""

    kernel = "forward_split_wgmma"
    aligned = True  # the planes are, whatever they were made from
    maximum = entropy = False  # statistics that it does not have

    planes: int  # 2, or 1 where TF32 was asked for
    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    stages: int
    producer_registers: int
    consumer_registers: int
    turns: bool = False  # warpgroups take turns at issuing products

    @property
    def method(self) -> str:
        return f"{split.PLANES[self.planes]} on {WGMMA}"

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (self.block_q // GROUP_ROWS + 1)

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        return self.block_k, self.head_dim_v

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Rows of a copy, by array."""
        return {"q": self.block_q, "k": self.block_k, "v": self.block_k}

    def shared_bytes(self, itemsize: int) -> int:
        """Of tiles of planes, whatever the itemsize of the arrays."""
        keys = self.stages * (panel_bytes(self.block_k, self.head_dim) + panel_bytes(self.block_k, self.head_dim_v))
        channels = channel_bytes(1) + 2 * channel_bytes(self.stages)
        tiles = self.planes * (panel_bytes(self.block_q, self.head_dim) + keys)
        return padded(tiles + channels + self.stages * TOLD_BYTES, PANEL_ALIGNMENT)

    def blocks(self, problem: Problem) -> int:
        return query_tiles(problem, self.block_q) * problem.heads_q * problem.batch_size


@dataclass(frozen=True)
class ForwardPlane(ForwardWgmma):
    """Constants of forward_wgmma.cu where it multiplies planes: the output takes no place in shared memory."""

    elements = "float16"
    planes = 1
    has_planes = True
    method = f"{split.PLANES[1]} on {WGMMA}"
    maximum = entropy = False  # statistics that it does not have
    out_bytes = 16

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Rows of a copy, by array."""
        return {"q": self.block_q, "k": self.block_k, "v": self.block_k}


@dataclass(frozen=True)
class BackwardPlane(BackwardWgmma):
    """Constants of backward_wgmma.cu where it multiplies planes."""

    elements = "float16"
    planes = 1
    has_planes = True
    method = f"{split.PLANES[1]} on {WGMMA}"
    told_bytes = BackwardWgmma.told_bytes + UNIT_BYTES

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Rows of a copy, by array."""
        return {"q": self.block_q, "k": self.block_k, "v": self.block_k, "dout": self.block_q}


@dataclass(frozen=True)
class BackwardSplitWgmma:
    """Constants of backward_split_wgmma.cu: two warpgroups of 64 keys each."""

    kernel = "backward_split_wgmma"
    aligned = True  # the planes are, whatever they were made from
    has_planes = True
    dq_chunks = 1
    threads = 3 * GROUP_THREADS
    method = f"{split.PLANES[2]} on {WGMMA}"

    head_dim: int
    head_dim_v: int
    dq_width: int  # columns of the sums of dq
    planes: int = 2
    block_q: int = GROUP_ROWS
    block_k: int = 2 * GROUP_ROWS
    stages: int = 2
    producer_registers: int = 24
    consumer_registers: int = 240
    deterministic: bool = False  # blocks take no turns here
    sum_digits: int = 0
    # no bias comes ahead of use (wgmma_bias.cuh)
    bias_rows: int = 0
    bias_stages: int = 0
    holds_bias: bool = False
    returns_bias: bool = False
    dbias_apart: bool = False
    stays: bool = False
    key_stages: int = 1

    @property
    def exchanged_bytes(self) -> int:
        """Shared memory in which consumers hand over more than dS."""
        return 0

    @property
    def statistics_rows(self) -> int:
        """Rows whose shifts lie together, behind them their deltas."""
        return self.block_q

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        return self.block_q, self.head_dim, self.head_dim_v, self.dq_width

    @property
    def box_rows(self) -> Mapping[str, int]:
        """Rows of a copy, by array."""
        return {"q": self.block_q, "k": self.block_k, "v": self.block_k, "dout": self.block_q}

    def shared_bytes(self, itemsize: int) -> int:
        """Of tiles of planes, whatever the itemsize of the arrays."""
        keys = panel_bytes(self.block_k, self.dq_width) + panel_bytes(self.block_k, self.head_dim_v)
        queries = panel_bytes(self.block_q, self.head_dim) + panel_bytes(self.block_q, self.head_dim_v)
        gradients = panel_bytes(self.block_k, self.block_q)
        tiles = self.planes * (keys + self.stages * queries + gradients)
        statistics = self.stages * 2 * 4 * self.block_q
        channels = BackwardPlane.told_bytes + channel_bytes(1) + 2 * channel_bytes(self.stages)
        return padded(tiles + statistics + channels + self.exchanged_bytes, PANEL_ALIGNMENT)

    def blocks(self, problem: Problem) -> int:
        return key_tiles(problem, self.block_k) * problem.heads_k * problem.batch_size


@dataclass(frozen=True)
class BackwardSplitRoles(BackwardSplitWgmma):
    """Constants of backward_split_wgmma_roles.cu: 64 keys, a warpgroup each for dV, dK and dQ."""

    kernel = "backward_split_wgmma_roles"
    threads = 4 * GROUP_THREADS

    block_k: int = GROUP_ROWS
    consumer_registers: int = 192
    sum_registers: int = 104  # of the consumer that sums dq

    @property
    def products(self) -> tuple[int, ...]:
        """Columns of its wgmma instructions."""
        panels = {self.dq_width // 2}
        for columns in (self.head_dim, self.head_dim_v):
            panels |= {min(PANEL_COLUMNS, columns - before) for before in range(0, columns, PANEL_COLUMNS)}
        return self.block_q, 2 * self.block_q, *panels

    @property
    def exchanged_bytes(self) -> int:
        """P in float32 on its way from one consumer to the other, its channel and that of dS."""
        return 4 * self.block_k * self.block_q + 2 * channel_bytes(1)


Backward = BackwardPlane | BackwardSplitWgmma


def refusal(problem: Problem, device: Device, at: Mapping[str, Placed], for_backward: bool) -> str | None:
    """Why a call is not taken, or None."""
    reason = backward_refusal(problem, at) if for_backward else None
    if reason := reason or unmet(problem, device, at) or split.refusal(problem, device, at, False):
        return reason
    try:
        if for_backward:
            main = backward(problem, device.shared_limit, True)
            backward_rest(problem, device.shared_limit, False, main)
            maps(problem, main)
        else:
            maps(problem, forward(problem, device.shared_limit, True))
    except UnsupportedError as error:
        return str(error)
    return None


def backward_refusal(problem: Problem, at: Mapping[str, Placed]) -> str | None:
    """Why the backward does not take a problem; dS is lifted as far as bounds of it allow."""
    widest = wgmma.MAX_PAIRED if split.planes_of(problem) == 1 else MAX_SPLIT
    if max(problem.head_dim, problem.head_dim_v) > widest:
        return f"its backward of float32 takes heads of {widest} at most"
    if "dlse" in at:
        return "its backward of float32 takes no gradient of lse, which nothing bounds"
    for modifier in problem.modifiers:
        if modifier.kind == "score" and modifier.differentiable:
            return f"its backward of float32 adds to no gradients of {modifier.name}"
        if isinstance(modifier, Written) and modifier.has_slope():
            return f"its backward of float32 does not take {modifier.title}, whose derivative nothing bounds"
    return wgmma.unfit(problem, True)


def maps(problem: Problem, config: ForwardSplitWgmma | ForwardPlane | Backward) -> tuple[TensorMap, ...]:
    """Maps of the planes of the arrays (kernels/attention/planes.cuh): columns, rows, heads, and batch entries or planes.

    Kernels that tell planes apart count heads over all batch entries.
    """
    found, origin, batch_size = [], 0, problem.batch_size
    arrays = zip(("q", "k", "v", "dout"), split.split_arrays(problem, len(config.box_rows)), strict=False)
    for name, (heads, rows, columns) in arrays:
        width = padded(columns, STEP)
        of_head = split.HALF * rows * width
        last = (
            (heads, config.planes)
            if isinstance(config, (ForwardSplitWgmma, BackwardSplitWgmma))
            else (heads // batch_size, batch_size)
        )
        place = Placed((of_head * last[0], of_head, split.HALF * width, split.HALF), split.HALF, 0)
        sizes = (width, rows, *last)
        found.append(tensormap.described(name, "float16", sizes, place, config.box_rows[name], "planes", origin))
        origin += config.planes * of_head * heads
    return tuple(found)


def forward(problem: Problem, shared_limit: int, aligned: bool) -> ForwardSplitWgmma | ForwardPlane:
    """With one plane the kernel of 16 bits, unless it would look for tiles or drop weights."""
    looks = any(m.knows_tiles() for m in problem.modifiers)
    if split.planes_of(problem) > 1 or looks or problem.modifier("dropout"):
        return forward_split(problem, shared_limit)
    found = wgmma.forward(problem, shared_limit, aligned)
    changed = {"separate_out": True, "programmatic": True}
    return ForwardPlane(**{**{f.name: getattr(found, f.name) for f in fields(found)}, **changed})


def forward_split(problem: Problem, shared_limit: int) -> ForwardSplitWgmma:
    """The first tile of the table that takes the head sizes, leaves registers for the modifiers, and fits."""
    planes = split.planes_of(problem)
    head_dim, head_dim_v = padded(problem.head_dim, STEP), padded(problem.head_dim_v, STEP)
    looks = any(m.knows_tiles() for m in problem.modifiers)
    modifiers = weight(problem) + (SCORED if looks else 0)  # the producer, which looks, takes registers from the others
    for tile in tuning.FORWARD_SPLIT_WGMMA:
        if planes != tile.planes or max(head_dim, head_dim_v) > tile.max_head_dim or modifiers > tile.max_weight:
            continue
        producer, consumer = (REGISTERS_TO_LOOK if looks else REGISTERS)[tile.block_q // GROUP_ROWS]
        config = ForwardSplitWgmma(
            planes=planes,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            block_q=tile.block_q,
            block_k=tile.block_k,
            stages=tile.stages,
            producer_registers=producer,
            consumer_registers=consumer,
            turns=tile.turns,
        )
        if config.shared_bytes(4) <= shared_limit:
            return config
    raise UnsupportedError(
        f"head_dim {problem.head_dim} with head_dim_v {problem.head_dim_v}: no tile of float32 by wgmma has room; "
        "backend='mma' takes it"
    )


def backward(problem: Problem, shared_limit: int, aligned: bool) -> Backward:
    """With one plane that of 16 bits."""
    if split.planes_of(problem) > 1:
        head_dim, head_dim_v = padded(problem.head_dim, STEP), padded(problem.head_dim_v, STEP)
        if max(head_dim, head_dim_v) > MAX_WHOLE or any(m.has_slope() for m in problem.modifiers):
            return BackwardSplitRoles(head_dim, head_dim_v, dq_width=padded(head_dim, PANEL_COLUMNS))
        return BackwardSplitWgmma(head_dim=head_dim, head_dim_v=head_dim_v, dq_width=head_dim)
    found = wgmma.backward(problem, shared_limit, aligned)
    return BackwardPlane(**{f.name: getattr(found, f.name) for f in fields(found)})


def backward_rest(problem: Problem, shared_limit: int, aligned: bool, main: Backward) -> BackwardSimt:
    """The kernel that answers the heads that planes do not stand for; its sums of dq are as wide, its tiles are its own."""
    sizes = main.dq_width, main.head_dim_v, main.block_q, main.block_k
    found = simt.backward_in(problem, sizes, shared_limit, aligned, whole=False)
    return replace(found, rest=True, statistics_rows=main.statistics_rows)


def convert(problem: Problem, main: Backward) -> BackwardConvert:
    """The kernel that undoes the order in which `main` sums dq, and its units."""
    if isinstance(main, BackwardSplitWgmma):
        width = main.dq_width
        return BackwardConvert(width, main.head_dim_v, width, main.block_q, warps=4, dq_warp_columns=1, has_planes=True)
    return replace(wgmma.convert_sums(main), has_planes=True)
