"""In which order blocks take their tiles (kernels/attention/index.cuh, Assignment)."""

from __future__ import annotations

from typing import Any

from cuflash.modifiers import Packed
from cuflash.problem import Problem
from cuflash.schedules.base import tiles
from cuflash.variant import ITEMSIZE

CACHE_BYTES = 60 << 20  # second-level cache of a device that does not tell
SUM_BYTES = 4  # an element of dq while it is summed; twice that for float64
# Fifths of the cache that what is read may take.  H200, 2026-11-30, bf16, causal forward, medians of three, with 3 and with 6:
# d 256 S 16384 662 and 671 TFLOP/s, d 192 with values of 128, S 8192 607 and 645, d 128 S 16384 676 and 684, S 8192 660 and 673;
# d 128 S 1024 446 and 379, d 64 367 and 347 (two runs; FlashAttention-3 441 and 424, 278 and 279)
FORWARD_SHARE, SHARE = 6, 3
# Where so few heads fit the lesser share, these alone are worked on side by side, and the shorter half of all heads' tiles comes
# last.  H200, 2026-12-01, bf16, causal forward, before and after: d 256 S 16384 700 and 720, d 192 with values of 128, S 8192 666
# and 685, d 128 S 16384 703 and 726; where more fit: d 128 S 8192 682 and 686, d 64 S 16384 553 and 548, d 256 S 4096 630 and 620
FEW_HEADS = 8
SHORT_KEYS = 2048  # up to which a forward takes the lesser: short tiles of all heads at once leave little to multiply
EVEN_SECTION = 16  # heads at once where all tiles take the same time: more give nothing
TURNS_SECTION = 16  # heads at once, at least, where blocks add in turns


def turns_section(problem: Problem, main: object) -> int:
    """Heads at once, at least, where blocks of a backward add in turns, of every schedule that knows no better."""
    return TURNS_SECTION


def of_forward(problem: Problem, config: Any, cache_bytes: int) -> dict[str, int]:
    """Fields of a forward's record: heads side by side, and tiles of each head that come behind those of all heads.

    Blocks that work on long tiles of few heads at once find what they read in the cache; the short tiles, which read little, are
    left to make blocks end together.
    """
    found = {"section": section(problem, cache_bytes), "late": 0}
    if getattr(config, "keeps_late", False) and problem.modifier("causal") and not problem.is_packed:
        heads = (cache_bytes or CACHE_BYTES) * SHARE // 5 // max(1, problem.seq_k * row_bytes(problem))
        side_by_side = power_of_two_below(max(1, heads) * problem.group)
        if heads < FEW_HEADS and side_by_side < problem.batch_size * problem.heads_q:
            found = {"section": side_by_side, "late": tiles(problem.seq_q, config.block_q) // 2}
    return found


def row_bytes(problem: Problem) -> int:
    """Of a key and its value, or of a query and its output."""
    return (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]


def power_of_two_below(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def section(problem: Problem, cache_bytes: int, *, backward: bool = False, turns: int = 0) -> int:
    """Heads whose tiles are worked on side by side, a power of two.

    Under a causal mask tiles differ in length; the more heads begin with their longest together, the less is left of a last
    head when the others are done.  What the blocks of so many heads read should stay in the second-level cache: keys and
    values in the forward, queries and gradients of a group of heads in the backward.  Where blocks add in turns,
    there are `turns` heads at least: the fewer tiles of one head run at a time, the less they wait for each other.
    """
    heads = problem.batch_size * (problem.heads_k if backward else problem.heads_q)
    packed = problem.modifier(Packed.name)
    count = max(1, packed.count) if isinstance(packed, Packed) else 1
    seq_q, seq_k = tiles(problem.seq_q, count), tiles(problem.seq_k, count)
    width = row_bytes(problem)
    sums = problem.head_dim * max(ITEMSIZE[problem.dtype], SUM_BYTES)  # of a row of dq
    group_bytes = seq_q * (width + sums) * problem.group if backward else seq_k * width
    short = seq_k <= SHORT_KEYS and not packed  # packed lists have an order of their own
    share = SHARE if backward or short else FORWARD_SHARE
    fitting = max(1, (cache_bytes or CACHE_BYTES) * share // 5 // max(1, group_bytes))
    if not backward:
        fitting *= problem.group
    found = power_of_two_below(fitting)
    if problem.modifier("causal") is None:
        found = min(found, EVEN_SECTION)
    return max(1, min(max(found, turns), heads))
