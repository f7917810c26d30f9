"""Key lengths: only the first n keys of each batch entry exist; what lies behind them is never read into a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cuflash.modifiers.base import Array, Axes, Kind, Modifier, Tile, array_field

if TYPE_CHECKING:
    from cuflash.problem import Problem


@dataclass(frozen=True)
class KeyLengths(Modifier):
    """Hides the keys at and beyond a length of their own for each batch entry.

    Parameters
    ----------
    lengths
        int32 or int64, shape broadcastable to the batch axes; each between 0 and seq_k.  NumPy arrays and sequences are
        checked; arrays on a device are not read by the host, and values outside are clamped to [0, seq_k] there.

    Notes
    -----
    The causal diagonal and windows keep counting from seq_k, the length of the array.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((2, 1, 4, 8), np.float32)
    >>> cuflash.attention(q, k, v, modifiers=(cuflash.KeyLengths([4, 2]),)).shape
    (2, 1, 4, 8)
    """

    name: ClassVar[str] = "lengths"
    kind: ClassVar[Kind] = "range"
    order: ClassVar[int] = 12
    fields: ClassVar[tuple[tuple[str, str], ...]] = (("View", "key_lengths"), ("int", "key_lengths_wide"))
    cuda: ClassVar[str] = """
struct KeyLengths {
  static __device__ __forceinline__ int key_count(const Params& p, const Place& place) {
    const i64 at = place.offset(p.key_lengths);
    const i64 n = p.key_lengths_wide ? static_cast<const i64*>(p.key_lengths.data)[at]
                                     : static_cast<const int*>(p.key_lengths.data)[at];
    return static_cast<int>(n < 0 ? 0 : n < p.seq_k ? n : p.seq_k);
  }
};
"""

    lengths: Any = array_field()
    wide: bool = False

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"key_lengths": "lengths"}

    def axes(self, operand: str, problem: Problem) -> Axes:
        return None, None, None

    def values(self, problem: Problem) -> dict[str, float | int]:
        return {"key_lengths_wide": int(self.wide)}

    def narrow(self, begin: Array, end: Array, q: Array, tile: Tile) -> tuple[Array, Array]:
        return begin, np.minimum(end, tile.operands["key_lengths"])
