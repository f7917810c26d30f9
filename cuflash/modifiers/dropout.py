"""Dropout: random weights become 0, by numbers that anybody can draw again.

The numbers are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): a function from
a key of two words and a counter of four to four words.  Words are 32 bits, the low one of two comes first.

1. The key of a head: words 0 and 1 of philox(counter = (offset, offset >> 32, entry, head), key = (seed, seed >> 32)).
   `entry` numbers the batch as if its axes were one, of packed sequences it is the segment; `head` is that of the query.
2. The number of query i and key j of that head, counted from 0 within their sequence: 16 bits of
   philox(counter = (j // 16 · 4 + j % 8 // 2, i // 16 · 8 + i % 8, 0, 0), key of the head), of word 2 · (i // 8 % 2) + j // 8 % 2
   the lower half for an even j, else the upper one.

So the eight numbers of a call belong to queries i and i + 8 and keys j, j + 1, j + 8 and j + 9: those that one thread holds of
a product by tensor cores, in the forward as in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cuflash.errors import ArgumentError
from cuflash.modifiers.base import Array, Axes, Kind, Modifier, Tile, array_field

if TYPE_CHECKING:
    from cuflash.problem import Problem

STEPS = 1 << 16  # of p
WORD = np.uint64(0xFFFFFFFF)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = 0x9E3779B9, 0xBB67AE85

Words = tuple[Array, Array, Array, Array]


@dataclass(frozen=True)
class Dropout(Modifier):
    """Sets random weights to 0, each with probability `p`, and multiplies the others by 1 / (1 - p).

    Parameters
    ----------
    p
        From 0 to less than 1, rounded to a multiple of 2^-16; 0 is no dropout and costs nothing.
    seed, offset
        Integers of 64 bits, -1 the same as 2^64 - 1: other numbers for each pair.  Or an int64 or uint64 array of one element
        beside q on a device, which the kernels read, so that a captured CUDA graph draws anew when it has changed; it must
        not change between a forward and its backward.

    Notes
    -----
    Weights are dropped behind the softmax: lse and statistics are those without dropout, a row may come out as 0, never as
    NaN.  There is no global state: which weights are dropped depends on p, seed, offset, batch entry (of packed sequences the
    segment), head, and the positions of query and key alone, so that forward and backward, all backends, tiles and devices
    agree bit for bit, and `dropout_mask` gives the same on the host.  The numbers are those of Philox4x32-10; the file that
    defines this class says how they are counted.  Parts of the keys that `cuflash.merge` makes one count theirs from 0 each:
    give each an offset of its own.  Whoever evaluates leaves it out, or passes p=0.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 4, 1)), np.ones((1, 4, 1))
    >>> cuflash.attention(q, k, v, modifiers=(cuflash.Dropout(0.5, seed=1, offset=0),))
    array([[[0.5]]])
    """

    name: ClassVar[str] = "dropout"
    kind: ClassVar[Kind] = "drop"
    order: ClassVar[int] = 50
    fields: ClassVar[tuple[tuple[str, str], ...]] = (
        ("View", "dropout_seed"),
        ("View", "dropout_offset"),
        ("u64", "dropout_seed_value"),
        ("u64", "dropout_offset_value"),
        ("int", "dropout_threshold"),
        ("Real", "dropout_scale"),
    )
    cuda: ClassVar[str] = """
struct Dropout {
  static __device__ __forceinline__ u64 seed(const Params& p) {
    return p.dropout_seed.data ? *static_cast<const u64*>(p.dropout_seed.data) : p.dropout_seed_value;
  }
  static __device__ __forceinline__ u64 offset(const Params& p) {
    return p.dropout_offset.data ? *static_cast<const u64*>(p.dropout_offset.data) : p.dropout_offset_value;
  }
  static __device__ __forceinline__ u32 threshold(const Params& p) { return u32(p.dropout_threshold); }
  static __device__ __forceinline__ Real scale(const Params& p) { return p.dropout_scale; }
};
"""

    p: float = 0.0
    seed: Any = array_field()
    offset: Any = array_field()

    def __post_init__(self) -> None:
        number = self.p[()] if isinstance(self.p, np.ndarray) and self.p.ndim == 0 else self.p
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= number < 1:
            raise ArgumentError(f"p={self.p!r:.80} of Dropout: must be a number from 0 to less than 1")
        object.__setattr__(self, "p", float(number))
        if self.threshold >= STEPS:
            raise ArgumentError(
                f"p={self.p!r:.80} of Dropout: is rounded to a multiple of 2^-16 and must then be less than 1; pass at most "
                f"{1 - 1 / STEPS}"
            )

    @property
    def threshold(self) -> int:
        """Numbers below it are those of weights to drop."""
        return round(self.p * STEPS)

    @property
    def factor(self) -> float:
        """What weights that stay are multiplied with."""
        return STEPS / (STEPS - self.threshold)

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"dropout_seed": "seed", "dropout_offset": "offset"}

    def arrays(self) -> dict[str, Any]:
        return {name: x for name, x in super().arrays().items() if not isinstance(x, int)}

    def numbers(self) -> dict[str, int]:
        return {f"{name}_value": x for name, x in super().arrays().items() if isinstance(x, int)}

    def axes(self, operand: str, problem: Problem) -> Axes:
        return None, None, None

    def values(self, problem: Problem) -> dict[str, float | int]:
        return {"dropout_threshold": self.threshold, "dropout_scale": self.factor}

    def twin_operands(
        self, problem: Problem, operands: Mapping[str, Array], numbers: Mapping[str, int], first_entry: int
    ) -> dict[str, Array]:
        """The heads' keys, (*batch, heads_q, 1, 1), each as one number."""
        seed, offset = (
            int(operands[name].ravel()[0]) if name in operands else numbers[f"{name}_value"]
            for name in self.operand_attributes()
        )
        entries = first_entry + np.arange(problem.batch_size, dtype=np.uint64)[:, None]
        heads = np.arange(problem.heads_q, dtype=np.uint64)
        keys = head_keys(seed % (1 << 64), offset % (1 << 64), entries, heads)
        return {"dropout_keys": keys.reshape(*problem.batch, problem.heads_q, 1, 1)}

    def weight_factors(self, tile: Tile) -> Array:
        keys = tile.operands["dropout_keys"]
        kept = numbers_of(keys, tile.rows, tile.columns) >= self.threshold
        return np.where(kept, self.factor, 0)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], rounds: int = 10) -> Words:
    """Philox4x32: four words, as uint64 arrays, of a counter of four words and a key of two, which broadcast."""
    a, b, c, d = (np.asarray(x, np.uint64) for x in counter)
    low, high = (np.asarray(x, np.uint64) for x in key)
    shift = np.uint64(32)
    for step in range(rounds):
        if step:
            low, high = (low + np.uint64(WEYL[0])) & WORD, (high + np.uint64(WEYL[1])) & WORD
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (second >> shift) ^ b ^ low, second & WORD, (first >> shift) ^ d ^ high, first & WORD
    return a, b, c, d


def head_keys(seed: int, offset: int, entries: Any, heads: Any) -> NDArray[np.uint64]:
    """Keys of heads as one number each: its lower 32 bits are word 0."""
    words = philox((offset & int(WORD), offset >> 32, entries, heads), (seed & int(WORD), seed >> 32))
    keys: NDArray[np.uint64] = words[0] | words[1] << np.uint64(32)
    return keys


def numbers_of(keys: Array, rows: slice, columns: slice) -> NDArray[np.uint64]:
    """16-bit numbers of queries and keys at these positions, (..., rows, columns), for heads of keys (..., 1, 1)."""
    i, j = (np.arange(x.start, x.stop, dtype=np.int64) for x in (rows, columns))
    # Each counter once, then what belongs to each position.
    row_draws, row_at = np.unique(i // 16 * 8 + i % 8, return_inverse=True)
    column_draws, column_at = np.unique(j // 16 * 4 + j % 8 // 2, return_inverse=True)
    words = philox((column_draws, row_draws[:, None], 0, 0), (keys & WORD, keys >> np.uint64(32)))
    drawn = np.stack(words, axis=-1)[..., row_at[:, None], column_at, (2 * (i // 8 % 2))[:, None] + j // 8 % 2]
    found: NDArray[np.uint64] = drawn >> (16 * (j % 2)).astype(np.uint64) & np.uint64(0xFFFF)
    return found


def dropout_mask(dropout: Dropout, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which weights a `Dropout` keeps, on the host: bit for bit what every backend does.

    Parameters
    ----------
    dropout
        A `Dropout` with its seed and offset; those that lie on a device are read, for which the host waits.
    shape
        (*batch, heads_q, seq_q, seq_k) of the call.  Of packed sequences each segment is an entry of the batch.

    Returns
    -------
    kept
        bool, of that shape: False where the weight becomes 0.

    Raises
    ------
    ArgumentError
        The first argument is no `Dropout`, its seed or offset no such integer, or `shape` has less than 3 axes.

    Notes
    -----
    Philox4x32-10 (Salmon et al., SC11), counted as `cuflash/modifiers/dropout.py` says.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.dropout_mask(cuflash.Dropout(0.5, seed=1, offset=0), (1, 1, 4))
    array([[[False, False,  True, False]]])
    """
    if not isinstance(dropout, Dropout):
        raise ArgumentError(f"dropout={dropout!r:.80}: must be a Dropout(p, seed, offset)")
    if (
        not isinstance(shape, tuple)
        or len(shape) < 3
        or any(isinstance(n, bool) or not isinstance(n, int) for n in shape)
    ):
        raise ArgumentError(
            f"shape={shape!r:.80}: must be a tuple of at least 3 lengths (*batch, heads_q, seq_q, seq_k)"
        )
    seed, offset = (word_pair(name, getattr(dropout, name)) for name in ("seed", "offset"))
    *batch, heads, seq_q, seq_k = shape
    entries = np.arange(int(np.prod(batch, dtype=np.int64)), dtype=np.uint64)[:, None]
    keys = head_keys(seed, offset, entries, np.arange(heads, dtype=np.uint64)).reshape(*batch, heads, 1, 1)
    kept = np.empty(shape, bool)
    for first in range(0, seq_q, 256):
        rows = slice(first, min(first + 256, seq_q))
        kept[..., rows, :] = numbers_of(keys, rows, slice(0, seq_k)) >= dropout.threshold
    return kept


def word_pair(name: str, x: Any) -> int:
    """A seed or offset as a number, wherever it lies."""
    value = x.get() if hasattr(x, "get") and hasattr(x, "dtype") else x
    if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 and value.dtype.kind in "iu":
        value = int(value.reshape(-1)[0])
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 64:
        raise ArgumentError(
            f"{name}={x!r:.80} of Dropout: must be an integer of 64 bits, or an int64 or uint64 array of one element"
        )
    return value % (1 << 64)
