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


class ForwardSplitTile(NamedTuple):
    """Tile of forward_split.cu: of wide values so many columns at most, and low parts of so many keys summed at once."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    blocks_per_sm: int
    max_chunk: int
    score_part: int


class BackwardTile(NamedTuple):
    """Tile of backward_mma.cu and backward_split.cu; `late`, in the former alone, adds dQ a step late."""

    block_q: int
    block_k: int
    warps: int
    query_warps: int
    stages: int
    dout_stages: int
    blocks_per_sm: int
    late: bool = False


class ColumnsTile(NamedTuple):
    """Tile of forward_columns_mma.cu."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    blocks_per_sm: int
    k_in_registers: bool = False


class ColumnsSimtTile(NamedTuple):
    """Tile of forward_columns_simt.cu: a warp has `lane_rows` rows of lanes, a thread so many keys and queries."""

    warps: int
    lane_rows: int
    thread_rows: int
    thread_columns: int


class JvpTile(NamedTuple):
    """Tile of jvp_mma.cu: queries and keys of a step, warps of a block, blocks of a multiprocessor."""

    block_q: int
    block_k: int
    warps: int
    blocks_per_sm: int


class ForwardWgmmaTile(NamedTuple):
    """Tile of forward_wgmma.cu, for head sizes, keys per query and weights of modifiers up to a limit."""

    max_head_dim: int
    block_q: int
    block_k: int
    stages: int
    query_stages: int
    continuous: bool
    optimistic: bool = True
    merged: bool = False  # of 8-bit inputs: what each block of keys adds is summed apart
    out_panels: int = 0  # of the output have a place of their own, while warpgroups fetch the next queries
    in_place: bool = False  # the output takes the place of its queries, though there are more
    bias_stages: int = 0  # of tiles for calls whose bias comes ahead, in blocks as tall as those of the queries
    max_keys: int = 1 << 31  # that one query sees
    max_keys_from_end: int = 1 << 31  # the same where tiles count from the end
    max_weight: int = 1 << 31  # schedules/wgmma.py, `weight`


class ForwardSplitWgmmaTile(NamedTuple):
    """Tile of forward_split_wgmma.cu, for so many planes, and head sizes and weights of modifiers up to a limit."""

    planes: int
    max_head_dim: int
    block_q: int
    block_k: int
    stages: int
    max_weight: int = 1 << 31  # schedules/wgmma.py, `weight`
    turns: bool = False  # warpgroups take turns at issuing products


class DecodeTile(NamedTuple):
    """Ring of a warp of decode_mma.cu: keys of a stage, warps of a block, stages of a warp."""

    block_k: int
    warps: int
    stages: int


FORWARD_MMA = (
    # H200, 2026-11-30, bf16, B·S = 16384, against FA2 in one run: d 64 1.10 to 1.15
    ForwardTile(128, 64, 4, 2, 2, q_in_registers=True),
    # likewise, d 128: 1.09 to 1.25 (when this tile had 1.01 to 1.04, 128 x 32: 0.95 to 1.03, 256 x 64 with 8 warps: 0.90 to 1.01,
    # one stage: 0.87 to 0.93)
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

# The same kernel with 8-bit inputs, whose values come in steps of 32 keys.  On an H200 (2026-11-30, S 4096, TFLOP/s full and
# causal), where the assembler makes float16 of them, d 64 233 and 210 (128 x 32: 206 and 181), d 128 227 and 196 with 8 warps,
# 243 and 220 with 64 x 64, 237 and 215 with 128 x 32; not measured where there are instructions for them.
FORWARD_MMA_E4M3 = (
    ForwardTile(128, 64, 4, 2, 2, q_in_registers=True),
    ForwardTile(128, 32, 4, 2, 2),
    ForwardTile(128, 64, 8, 2, 1),
    ForwardTile(128, 64, 8, 1, 1),
    ForwardTile(64, 64, 4, 2, 2),
    ForwardTile(64, 32, 4, 2, 2),
    ForwardTile(64, 32, 4, 1, 1),
    ForwardTile(32, 32, 2, 1, 1),
    ForwardTile(16, 32, 1, 1, 1),
)

# H200, 2026-11-30, B 1, H 16, S 4096, TFLOP/s full and causal
FORWARD_SPLIT = (
    # 92 and 85 (128 x 64 of 8 warps: 90 and 78, 128 x 128: 96 and 78)
    ForwardSplitTile(128, 32, 4, 2, 2, max_chunk=64, score_part=32),
    # without modifiers 103 (128 x 32: 91, causal 84, 192 x 32 of 12 warps: 84 and 79, 64 x 32 of 4 warps: 98 and 83); causal
    # spills here
    ForwardSplitTile(128, 64, 8, 2, 1, max_chunk=128, score_part=64),
    ForwardSplitTile(128, 64, 8, 2, 1, max_chunk=64, score_part=64),
    ForwardSplitTile(128, 32, 8, 2, 1, max_chunk=128, score_part=32),
    ForwardSplitTile(128, 16, 8, 2, 1, max_chunk=128, score_part=16),
    ForwardSplitTile(128, 64, 8, 1, 1, max_chunk=64, score_part=64),
    ForwardSplitTile(64, 32, 4, 1, 1, max_chunk=128, score_part=32),
    ForwardSplitTile(64, 16, 4, 1, 1, max_chunk=128, score_part=16),
    ForwardSplitTile(32, 16, 2, 1, 1, max_chunk=64, score_part=16),
    ForwardSplitTile(16, 16, 1, 1, 1, max_chunk=64, score_part=16),
)

JVP_MMA = (
    JvpTile(64, 64, 4, 2),
    JvpTile(64, 32, 4, 2),
    JvpTile(64, 16, 4, 1),
    JvpTile(32, 32, 2, 1),
    JvpTile(32, 16, 2, 1),
    JvpTile(16, 16, 1, 1),
)

COLUMNS_MMA = (
    ColumnsTile(64, 128, 4, 2, 2, k_in_registers=True),
    ColumnsTile(64, 128, 4, 2, 2),
    ColumnsTile(64, 64, 4, 2, 2),
    ColumnsTile(64, 64, 4, 1, 2),
    ColumnsTile(32, 64, 4, 1, 1),
    ColumnsTile(32, 32, 2, 1, 1),
    ColumnsTile(16, 16, 1, 1, 1),
)

COLUMNS_SIMT = (
    ColumnsSimtTile(4, 8, 4, 8),
    ColumnsSimtTile(4, 8, 4, 4),
    ColumnsSimtTile(4, 8, 2, 4),
    ColumnsSimtTile(2, 8, 2, 2),
    ColumnsSimtTile(1, 8, 1, 2),
    ColumnsSimtTile(1, 8, 1, 1),
)

BACKWARD_MMA = (
    # H200, 2026-11-30, bf16, B·S = 16384, d 64, TFLOP/s S 16384 full, S 4096 full and causal: 320, 309 and 294, FA2 in the same
    # rotation 282, 263 and 227 (dQ at once: 305, 295 and 275, 64 x 64: 258, 250 and 243)
    BackwardTile(32, 128, 4, 1, 2, 2, 2, late=True),
    BackwardTile(32, 128, 4, 1, 2, 2, 2),
    # likewise, d 128, S 16384 and 4096, full and causal: 351, 353, 336 and 318, FA2 304, 302, 283 and 252 (dQ at once: 315, 332,
    # 303 and 306, 64 keys and two blocks: 297, 292, 289 and 272, 128 x 64: 249, 244, 241 and 226)
    BackwardTile(64, 128, 8, 2, 2, 2, 1, late=True),
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

# H200, 2026-11-30, B 1, H 16, S 4096, TFLOP/s full and causal
BACKWARD_SPLIT = (
    # d 64: 92 and 85 (64 x 128 in two stages: 94 and 83, 32 x 128: 76 and 71, 32 x 64: 80 and 73)
    BackwardTile(64, 64, 4, 2, 1, 1, 2),
    # d 128: 88 and 83 (32 x 128: 90 and 85, 64 x 64 with 2 rows of warps: 87 and 81, 32 x 64: 73 and 69)
    BackwardTile(64, 64, 8, 4, 1, 1, 1),
    BackwardTile(64, 64, 8, 2, 1, 1, 1),
    BackwardTile(32, 64, 8, 2, 1, 1, 1),
    BackwardTile(64, 32, 8, 4, 1, 1, 1),
    BackwardTile(32, 32, 4, 2, 1, 1, 1),
    BackwardTile(16, 32, 2, 1, 1, 1, 1),
    BackwardTile(16, 16, 1, 1, 1, 1, 1),
)

# H200, 2026-11-30, bf16, B·S = 16384, H·d = 2048, all variants of a shape in one rotation, TFLOP/s full and causal
FORWARD_WGMMA = (
    # S 1024: 482 and 373 (192 x 128: 434 and 302), S 4096: 538 and 482 (538 and 468)
    ForwardWgmmaTile(64, 256, 64, 6, 2, continuous=True, max_keys=4096, max_weight=3),
    # S 16384: 578 and 548 (256 x 64: 553 and 527)
    ForwardWgmmaTile(64, 192, 128, 4, 2, continuous=False, max_weight=7),
    # S 1024: 520 and 383 (192 x 96: 460 and 327), S 4096: 570 and 511 (595 and 520)
    ForwardWgmmaTile(96, 128, 128, 2, 2, continuous=True, max_keys=2048, max_weight=9),
    # S 16384: 640 and 605 (192 x 112: 641 and 619, 192 x 80: 623 and 580, 128 x 128: 598 and 562)
    ForwardWgmmaTile(96, 192, 96, 3, 1, continuous=False, max_weight=7),
    # S 1024: 586 and 445 (192 x 80: 514 and 381), S 2048: 635 and 483 (616 and 484), causal S 3072: 533 (572), S 4096: 545 (565)
    ForwardWgmmaTile(128, 128, 128, 2, 2, continuous=True, max_keys=2048, max_keys_from_end=1024, max_weight=9),
    # S 2048: causal 551 (128 x 128: 530; one tile of queries, counted from the first query: 525), S 4096: 700 and 619 (682, 600;
    # 128 x 128: 650, 576), S 8192: 683 causal (685), S 16384: 716 and 722 (705, 725)
    ForwardWgmmaTile(128, 192, 80, 3, 2, continuous=False, in_place=True, max_weight=7),
    ForwardWgmmaTile(128, 128, 128, 2, 2, continuous=True, max_weight=9),
    ForwardWgmmaTile(128, 128, 64, 3, 2, continuous=True, max_weight=40),
    ForwardWgmmaTile(128, 128, 32, 4, 2, continuous=True),
    # values of 128, S 1024: 594 and 390, S 8192: 680 and 648 (the output in the place of queries: 534 and 356, 678 and 640)
    ForwardWgmmaTile(192, 128, 128, 2, 1, continuous=False, out_panels=1, max_weight=9),
    ForwardWgmmaTile(192, 128, 96, 2, 1, continuous=False, max_weight=9),
    ForwardWgmmaTile(192, 128, 64, 2, 1, continuous=False, max_weight=40),
    ForwardWgmmaTile(192, 128, 32, 2, 1, continuous=False),
    # S 1024: 602 and 448 (the output in the place of queries: 554 and 421), S 16384 causal: 693 (692)
    ForwardWgmmaTile(256, 128, 64, 2, 1, continuous=False, out_panels=2, max_weight=7),
    ForwardWgmmaTile(256, 128, 32, 2, 1, continuous=False, max_weight=13),
    ForwardWgmmaTile(256, 128, 16, 2, 1, continuous=False),
)

# The same kernel with planes of float32 numbers, whose output does not take the place of its queries.
FORWARD_WGMMA_PLANE = tuple(
    tile._replace(query_stages=1, in_place=False) if tile.in_place else tile
    for tile in FORWARD_WGMMA
    if tile[:3] != (192, 128, 128)
)

# The same kernel where blocks of a bias come ahead of use; H200, 2026-11-30, bf16, B 4, H·d = 2048, S 4096: share of the speed
# without a bias that is left, full and causal.
FORWARD_WGMMA_BIAS = (
    # 0.780 and 0.744 (two stages: 0.767 and 0.737, without guesses 0.701 and 0.687, warpgroups taking turns 0.756)
    ForwardWgmmaTile(64, 192, 128, 3, 1, continuous=False, bias_stages=2, max_weight=3),
    # 0.751 and 0.772 (three stages: 0.734 and 0.763)
    ForwardWgmmaTile(64, 256, 64, 4, 1, continuous=False, bias_stages=3, max_weight=9),
    # 0.680 and 0.685 (the bias brought to powers of two under the product of the scores: 0.613 and 0.629)
    ForwardWgmmaTile(64, 128, 128, 3, 2, continuous=True, bias_stages=2, max_weight=9),
    # 0.792 and 0.769 (guesses: 0.785 and 0.779, 192 x 64 in three stages: 0.751 and 0.753, 192 x 80: 0.706 and 0.699)
    ForwardWgmmaTile(128, 128, 128, 2, 1, continuous=False, optimistic=False, bias_stages=2, max_weight=9),
    ForwardWgmmaTile(128, 128, 64, 2, 2, continuous=True, bias_stages=4, max_weight=40),
    ForwardWgmmaTile(192, 128, 64, 2, 1, continuous=False, bias_stages=4, max_weight=40),
    ForwardWgmmaTile(256, 128, 64, 2, 1, continuous=False, bias_stages=2, max_weight=9),
)

# The same where it has one row for all queries; likewise.
FORWARD_WGMMA_ROW = (
    # 0.845 and 0.845
    ForwardWgmmaTile(64, 256, 64, 6, 2, continuous=True, max_keys=2048, max_weight=3),
    # 0.880 and 0.846
    ForwardWgmmaTile(64, 192, 128, 4, 2, continuous=False, max_weight=7),
    *(tile for tile in FORWARD_WGMMA if tile.max_head_dim == 96),
    # 0.845 and 0.831 (192 x 80: 0.812 and 0.846)
    ForwardWgmmaTile(128, 128, 128, 2, 2, continuous=True, max_weight=9),
    *(tile for tile in FORWARD_WGMMA if tile.max_head_dim >= 128),
)

# The same kernel with 8-bit inputs; H200, 2026-11-30, d 128, TFLOP/s full and causal.
FORWARD_WGMMA_E4M3 = (
    ForwardWgmmaTile(64, 192, 128, 4, 2, continuous=False, max_weight=1),
    ForwardWgmmaTile(64, 128, 128, 4, 2, continuous=True, max_weight=20),
    # S 16384: 942 and 912
    ForwardWgmmaTile(128, 128, 192, 2, 2, continuous=True, max_keys=8192, max_weight=7),
    # S 16384: 980 and 914 (192 x 96 in three stages: 962 and 900, 128 x 160: 932 and 852, 128 x 128: 889 and 866, sums of each
    # block in float32, 128 x 96: 812 and 786)
    ForwardWgmmaTile(128, 192, 96, 4, 1, continuous=False, max_weight=1),
    ForwardWgmmaTile(128, 128, 192, 2, 2, continuous=True, max_weight=7),
    ForwardWgmmaTile(128, 128, 128, 2, 2, continuous=True, max_weight=9),
    ForwardWgmmaTile(128, 128, 64, 3, 2, continuous=True),
    ForwardWgmmaTile(192, 128, 128, 2, 1, continuous=False, max_weight=7),
    ForwardWgmmaTile(256, 128, 96, 2, 1, continuous=False, max_weight=7),
    ForwardWgmmaTile(256, 128, 64, 2, 1, continuous=False, max_weight=13),
    ForwardWgmmaTile(256, 128, 32, 2, 1, continuous=False),
)

# H200, 2026-11-30, heads 16, S 4096, whole calls, TFLOP/s full and causal beside those of mma.sync.  P V of a block was one chain
# of sums when these were measured; where tiles have more than 48 keys it is several now (kernels/forward_split_wgmma.cu), with
# which d 64 has 162 and 130, d 128 175 and 151.
FORWARD_SPLIT_WGMMA = (
    # 154 and 120, mma 93 and 76 (without turns 146 and 101, 128 x 64 x 4: 134 and 108, 128 x 96 x 3: 136 and 107,
    # 192 x 64 x 4: 134 and 108)
    ForwardSplitWgmmaTile(2, 64, 128, 128, 2, max_weight=7, turns=True),
    ForwardSplitWgmmaTile(2, 64, 128, 64, 4, max_weight=30),
    ForwardSplitWgmmaTile(2, 64, 128, 32, 4),
    # 184 and 152, mma 102 and 83; S 16384: 229 and 227, 113 and 101 (turns: 190 and 154, 228 and 222; 128 x 64: 172 and 140,
    # 208 and 191; 128 x 48: 170 and 135, 197 and 194)
    ForwardSplitWgmmaTile(2, 128, 128, 80, 2, max_weight=7),
    ForwardSplitWgmmaTile(2, 128, 128, 48, 2, max_weight=15),
    ForwardSplitWgmmaTile(2, 128, 128, 32, 4, max_weight=24),
    ForwardSplitWgmmaTile(2, 128, 128, 16, 4),
    # 246 and 165, mma 160 and 132 (192 x 128 x 3: 233 and 170, 192 x 96 x 4: 232 and 169)
    ForwardSplitWgmmaTile(1, 64, 128, 128, 4, max_weight=15),
    # 396 and 281, mma 198 and 162 (128 x 128 x 2: 369 and 251, in turns 347 and 262, 192 x 80 x 3: 358 and 239)
    ForwardSplitWgmmaTile(1, 128, 128, 96, 3, max_weight=15),
    ForwardSplitWgmmaTile(1, 128, 128, 64, 4, max_weight=30),
    ForwardSplitWgmmaTile(1, 128, 128, 32, 4),
    # 464 and 313
    ForwardSplitWgmmaTile(1, 256, 128, 64, 2, max_weight=9),
    ForwardSplitWgmmaTile(1, 256, 128, 32, 2, max_weight=50),  # above spills; mma takes it
)

DECODE_MMA = (
    # H200, 2026-11-30, bf16, d 128, GB/s at batch 1, heads 32/8, 32768 keys and at 64, 32/8, 4096: by boxes 3263 and 4454
    # (32 x 8 x 1: 3277 and 4454, 32 x 4 x 2: 3205 and 4444, 16 x 10 x 2: 3212 and 4438, 32 x 4 x 3: 3107 and 4386,
    # 16 x 4 x 6: 2893 and 4316), row by row 2896 and 4139 (32 x 4 x 3: 2788 and 4086, 16 x 6 x 3: 2873 and 4116)
    DecodeTile(16, 8, 2),
    DecodeTile(32, 4, 4),
    DecodeTile(32, 4, 3),
    DecodeTile(32, 4, 2),
    DecodeTile(16, 4, 3),
    DecodeTile(16, 4, 2),
    DecodeTile(16, 2, 4),
    DecodeTile(16, 2, 3),
    DecodeTile(16, 2, 2),
    DecodeTile(16, 1, 2),
)
