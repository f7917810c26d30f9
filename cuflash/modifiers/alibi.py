"""ALiBi: a penalty that grows with the distance from the diagonal, one slope per head (arXiv:2108.12409, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cuflash.modifiers.base import Array, Axes, Kind, Modifier, Tile, array_field

if TYPE_CHECKING:
    from cuflash.problem import Problem


@dataclass(frozen=True)
class ALiBi(Modifier):
    """Adds ``-slopes[head] * |i + seq_k - seq_q - j|`` to the score of query i and key j.

    Parameters
    ----------
    slopes
        Real numbers, shape (heads_q,) or broadcastable to (*batch, heads_q); unit: logits per position.  A sequence, a
        NumPy array or an array of the caller's kind.  They are treated as constants: no gradient flows to them.

    Notes
    -----
    The distance is counted from the diagonal that `causal` uses: with ``causal="top_left"`` it is |i - j|.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((1, 2, 4, 8), np.float32)
    >>> cuflash.attention(q, k, v, causal=True, modifiers=(cuflash.ALiBi([0.5, 0.25]),)).shape
    (1, 2, 4, 8)
    """

    name: ClassVar[str] = "alibi"
    kind: ClassVar[Kind] = "score"
    order: ClassVar[int] = 1
    fields: ClassVar[tuple[tuple[str, str], ...]] = (("View", "alibi_slopes"), ("int", "alibi_diagonal"))
    cuda: ClassVar[str] = """
struct ALiBi {
  static constexpr bool kHasSlope = false;
  static __device__ __forceinline__ Real apply(const Params& p, const Place& place, int q, int k, Real s) {
    const Real slope = static_cast<const Real*>(p.alibi_slopes.data)[place.offset(p.alibi_slopes)];
    return s - slope * Real(abs(q + place.diagonal(p.alibi_diagonal) - k));
  }
  static __device__ __forceinline__ Real apply_with_slope(const Params& p, const Place& place, int q, int k, Real s, Real&) {
    return apply(p, place, q, k, s);
  }
};
"""

    slopes: Any = array_field()

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"alibi_slopes": "slopes"}

    def axes(self, operand: str, problem: Problem) -> Axes:
        return ("heads_q", problem.heads_q), None, None

    def values(self, problem: Problem) -> dict[str, float | int]:
        return {"alibi_diagonal": problem.diagonal}

    def apply(self, s: Array, tile: Tile) -> Array:
        distance = np.abs(tile.q + tile.problem.diagonal - tile.k).astype(s.dtype)
        penalty: Array = tile.part("alibi_slopes").astype(s.dtype) * distance
        return s - penalty
