"""Host side of forward_split_wgmma.cu: float32 on Hopper's warpgroup products, as planes of float16 fed through tensor maps.

The kernels before it, and the one behind it that has the heads which planes do not stand for, are those of schedules/split.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuflash import tensormap, tuning
from cuflash.errors import UnsupportedError
from cuflash.place import Placed
from cuflash.problem import Problem
from cuflash.schedules import split
from cuflash.schedules.base import WGMMA, padded, query_tiles
from cuflash.schedules.wgmma import (
    GROUP_ROWS,
    GROUP_THREADS,
    REGISTERS,
    REGISTERS_TO_LOOK,
    SCORED,
    STEP,
    TOLD_BYTES,
    channel_bytes,
    unmet,
    weight,
)
from cuflash.tensormap import PANEL_ALIGNMENT, TensorMap, panel_bytes

if TYPE_CHECKING:
    from cuflash.backends import Device

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


def refusal(problem: Problem, device: Device, at: Mapping[str, Placed], backward: bool) -> str | None:
    """Why a call is not taken, or None."""
    if backward:
        return "its backward of float32 is that of mma"
    if reason := unmet(problem, device, at) or split.refusal(problem, device, at, backward):
        return reason
    try:
        maps(problem, forward(problem, device.shared_limit, True))
    except UnsupportedError as error:
        return str(error)
    return None


def maps(problem: Problem, config: ForwardSplitWgmma) -> tuple[TensorMap, ...]:
    """Maps of the planes of the arrays: columns, rows, heads of all batch entries, planes (kernels/attention/planes.cuh)."""
    found, origin = [], 0
    for name, (heads, rows, columns) in zip(config.box_rows, split.split_arrays(problem, 3), strict=True):
        width = padded(columns, STEP)
        strides = (split.HALF * rows * width * heads, split.HALF * rows * width, split.HALF * width, split.HALF)
        place = Placed(strides, split.HALF, 0)
        sizes = (width, rows, heads, config.planes)
        found.append(tensormap.described(name, "float16", sizes, place, config.box_rows[name], "planes", origin))
        origin += config.planes * strides[0]
    return tuple(found)


def forward(problem: Problem, shared_limit: int, aligned: bool) -> ForwardSplitWgmma:
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
