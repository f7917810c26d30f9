"""In which order blocks take their tiles (kernels/attention/index.cuh, Assignment)."""

from __future__ import annotations

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
SHORT_KEYS = 2048  # up to which a forward takes the lesser: short tiles of all heads at once leave little to multiply
EVEN_SECTION = 16  # heads at once where all tiles take the same time: more give nothing
TURNS_SECTION = 16  # heads at once, at least, where blocks add in turns


def turns_section(problem: Problem, main: object) -> int:
    """Heads at once, at least, where blocks of a backward add in turns, of every schedule that knows no better."""
    return TURNS_SECTION


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
    itemsize = ITEMSIZE[problem.dtype]
    width = (problem.head_dim + problem.head_dim_v) * itemsize
    sums = problem.head_dim * max(itemsize, SUM_BYTES)  # of a row of dq
    group_bytes = seq_q * (width + sums) * problem.group if backward else seq_k * width
    short = seq_k <= SHORT_KEYS and not packed  # packed lists have an order of their own
    share = SHARE if backward or short else FORWARD_SHARE
    fitting = max(1, (cache_bytes or CACHE_BYTES) * share // 5 // max(1, group_bytes))
    if not backward:
        fitting *= problem.group
    found = 1 << (fitting.bit_length() - 1)
    if problem.modifier("causal") is None:
        found = min(found, EVEN_SECTION)
    return max(1, min(max(found, turns), heads))
