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
    q_in_registers: bool = False


class BackwardTile(NamedTuple):
    """Tile of backward_mma.cu."""

    block_q: int
    block_k: int
    warps: int
    query_warps: int
    stages: int
    dout_stages: int
    blocks_per_sm: int


FORWARD_MMA = (
    # H200, 2026-11-29, bf16, B·S = 16384, against FA2 in one run: d 64 1.04 to 1.10
    ForwardTile(128, 64, 4, 2, 2, q_in_registers=True),
    # likewise, d 128: 1.01 to 1.04 (128 x 32: 0.95 to 1.03, 256 x 64 with 8 warps: 0.90 to 1.01, one stage: 0.87 to 0.93)
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
    # H200, 2026-11-29, bf16, B·S = 16384, against FA2 in one run: d 64 1.02 to 1.14 (64 x 64: 0.91 to 1.08)
    BackwardTile(32, 128, 4, 1, 2, 2, 2),
    # likewise, d 128: 1.01 to 1.12 (one column of warps: 0.88 to 1.01, 64 keys and two blocks: 0.93 to 1.05)
    BackwardTile(64, 128, 8, 2, 2, 2, 1),
    BackwardTile(64, 64, 4, 1, 2, 2, 2),
    BackwardTile(64, 64, 4, 1, 1, 1, 1),
    BackwardTile(64, 64, 8, 2, 2, 2, 1),
    BackwardTile(64, 64, 8, 2, 1, 1, 1),
    BackwardTile(32, 64, 4, 1, 2, 2, 1),
    BackwardTile(32, 64, 4, 1, 1, 1, 1),
    BackwardTile(32, 64, 8, 2, 2, 2, 1),
    BackwardTile(32, 64, 8, 2, 1, 1, 1),
    BackwardTile(32, 32, 2, 1, 1, 1, 1),
    BackwardTile(16, 32, 2, 1, 1, 1, 1),
    BackwardTile(16, 16, 1, 1, 1, 1, 1),
)
