"""Tiles in order of preference; a schedule takes the first that fits the head size, the registers and the device.

Rows marked with a figure were measured; the others follow from counting registers and shared memory.
"""

from __future__ import annotations

from typing import NamedTuple


class ForwardTile(NamedTuple):
    """Tile of forward_mma.cu."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    blocks_per_sm: int


class BackwardTile(NamedTuple):
    """Tile of backward_mma.cu."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    blocks_per_sm: int


FORWARD_MMA = (
    ForwardTile(128, 128, 4, 2, 2),
    ForwardTile(128, 64, 4, 2, 2),
    ForwardTile(128, 64, 8, 2, 1),
    ForwardTile(128, 64, 4, 1, 2),
    ForwardTile(128, 64, 8, 1, 1),
    ForwardTile(64, 64, 4, 2, 2),
    ForwardTile(64, 64, 4, 1, 2),
    ForwardTile(64, 32, 4, 1, 1),
    ForwardTile(64, 16, 4, 1, 1),
    ForwardTile(32, 32, 2, 1, 1),
    ForwardTile(32, 16, 2, 1, 1),
    ForwardTile(16, 16, 1, 1, 1),
)

BACKWARD_MMA = (
    BackwardTile(64, 128, 8, 2, 1),
    BackwardTile(64, 64, 4, 2, 2),
    BackwardTile(64, 64, 4, 1, 1),
    BackwardTile(32, 64, 4, 2, 1),
    BackwardTile(32, 64, 4, 1, 1),
    BackwardTile(32, 32, 2, 1, 1),
    BackwardTile(16, 32, 2, 1, 1),
    BackwardTile(16, 16, 1, 1, 1),
)
