"""Block mask: blocks of queries see blocks of keys; tiles in which no block is visible are skipped (block sparsity)."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cuflash.errors import ArgumentError
from cuflash.modifiers.base import Array, Axes, Kind, Modifier, Tile, array_field

if TYPE_CHECKING:
    from cuflash.problem import Problem

POSITION_BITS = 30  # of the longest sequence (problem.MAX_SEQ)


@dataclass(frozen=True)
class BlockMask(Modifier):
    """Hides the keys whose block is not visible to the block of the query.

    Parameters
    ----------
    blocks
        bool, True = visible, broadcastable to (*batch, heads_q, ceil(seq_q / size_q), ceil(seq_k / size_k)).  Key j is
        visible to query i iff ``blocks[..., i // size_q, j // size_k]``.
    size
        Positions of a block: an integer, or a pair (size_q, size_k).

    Notes
    -----
    A tile of queries and keys in which no block is visible is neither loaded nor computed, so time falls with the visible
    area.  Tiles of the kernels have 16 to 128 positions a side: blocks of multiples of 128 waste nothing, and of a tile
    that more than 64 blocks share every element is tested instead.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 4, 1)), np.zeros((1, 4, 1)), np.array([[[1.0], [3.0], [5.0], [9.0]]])
    >>> cuflash.attention(q, k, v, modifiers=(cuflash.BlockMask(np.eye(2, dtype=bool), size=2),)).ravel()
    array([2., 2., 7., 7.])
    """

    name: ClassVar[str] = "blocks"
    kind: ClassVar[Kind] = "mask"
    order: ClassVar[int] = 22
    fields: ClassVar[tuple[tuple[str, str], ...]] = (
        ("View", "block_mask"),
        ("int", "block_multiplier_q"),
        ("int", "block_multiplier_k"),
        ("int", "block_shift_q"),
        ("int", "block_shift_k"),
    )
    cuda: ClassVar[str] = """
struct BlockMask {
  static constexpr int kMostBlocks = 64;  // that a glance at a tile may read

  // Division by the size as a multiplication (see `division` in modifiers/blocks.py).
  static __device__ __forceinline__ int row_of(const Params& p, int q) {
    return int(u64(u32(q)) * u32(p.block_multiplier_q) >> p.block_shift_q);
  }
  static __device__ __forceinline__ int column_of(const Params& p, int k) {
    return int(u64(u32(k)) * u32(p.block_multiplier_k) >> p.block_shift_k);
  }
  static __device__ __forceinline__ bool block(const Params& p, const Place& place, int row, int column) {
    const i64 at = place.offset(p.block_mask) + row * p.block_mask.row + column * p.block_mask.column;
    return static_cast<const u8*>(p.block_mask.data)[at] != 0;
  }
  static __device__ __forceinline__ bool visible(const Params& p, const Place& place, int q, int k) {
    return block(p, place, row_of(p, q), column_of(p, k));
  }
  // Whether all blocks that a tile has a part of are `wanted`.
  static __device__ __forceinline__ bool all_are(bool wanted, const Params& p, const Place& place, Range queries,
                                                 Range keys) {
    const Range rows{row_of(p, queries.begin), row_of(p, queries.end - 1)};
    const Range columns{column_of(p, keys.begin), column_of(p, keys.end - 1)};
    if ((rows.end - rows.begin + 1) * (columns.end - columns.begin + 1) > kMostBlocks) return false;
#pragma unroll 1
    for (int row = rows.begin; row <= rows.end; ++row)
#pragma unroll 1
      for (int column = columns.begin; column <= columns.end; ++column)
        if (block(p, place, row, column) != wanted) return false;
    return true;
  }
  static __device__ __forceinline__ bool tile_is_hidden(const Params& p, const Place& place, Range queries, Range keys) {
    return all_are(false, p, place, queries, keys);
  }
  static __device__ __forceinline__ bool tile_is_clear(const Params& p, const Place& place, Range queries, Range keys) {
    return all_are(true, p, place, queries, keys);
  }
};
"""

    blocks: Any = array_field()
    size: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", pair_of(self.size))

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"block_mask": "blocks"}

    def axes(self, operand: str, problem: Problem) -> Axes:
        size_q, size_k = self.size
        return (
            ("heads_q", problem.heads_q),
            (f"ceil(seq_q / {size_q})", -(-problem.seq_q // size_q)),
            (f"ceil(seq_k / {size_k})", -(-problem.seq_k // size_k)),
        )

    def values(self, problem: Problem) -> dict[str, float | int]:
        (multiplier_q, shift_q), (multiplier_k, shift_k) = map(division, self.size)
        return {
            "block_multiplier_q": multiplier_q,
            "block_multiplier_k": multiplier_k,
            "block_shift_q": shift_q,
            "block_shift_k": shift_k,
        }

    def visible(self, tile: Tile) -> Array:
        blocks, (size_q, size_k) = tile.operands["block_mask"], self.size
        row, column = tile.q // size_q, tile.k // size_k
        # an axis of length 1 is broadcast
        visible: Array = blocks[
            ..., row if blocks.shape[-2] > 1 else 0 * row, column if blocks.shape[-1] > 1 else 0 * column
        ]
        return visible

    def tile_is_hidden(self, tile: Tile) -> bool:
        return not self.touched(tile).any()

    def tile_is_clear(self, tile: Tile) -> bool:
        return bool(self.touched(tile).all())

    def touched(self, tile: Tile) -> Array:
        """The blocks that a tile has a part of."""
        blocks, (size_q, size_k) = tile.operands["block_mask"], self.size
        rows = slice(tile.rows.start // size_q, (tile.rows.stop - 1) // size_q + 1)
        columns = slice(tile.columns.start // size_k, (tile.columns.stop - 1) // size_k + 1)
        part: Array = blocks[
            ..., rows if blocks.shape[-2] > 1 else slice(None), columns if blocks.shape[-1] > 1 else slice(None)
        ]
        return part


def pair_of(size: Any) -> tuple[int, int]:
    """Sizes (size_q, size_k) of a block, from one integer or two."""
    sizes = size if isinstance(size, (tuple, list)) else (size, size)
    try:
        size_q, size_k = (operator.index(n) for n in sizes)
    except (TypeError, ValueError):
        size_q = size_k = 0
    if size_q < 1 or size_k < 1 or any(isinstance(n, bool) for n in sizes):
        raise ArgumentError(
            f"size={size!r} of BlockMask: must be an integer of at least 1, or a pair (size_q, size_k) of such"
        )
    return min(size_q, 1 << POSITION_BITS), min(size_k, 1 << POSITION_BITS)


def division(size: int) -> tuple[int, int]:
    """Numbers with ``position // size == position * multiplier >> shift`` for all positions below 2^30.

    Granlund and Montgomery, "Division by invariant integers using multiplication" (PLDI 1994), theorem 4.2: true of
    shift = 30 + l with 2^l >= size, and a multiplier from 2^shift / size to (2^shift + 2^l) / size.
    """
    shift = POSITION_BITS + (size - 1).bit_length()
    return (1 << shift) // size + 1, shift
