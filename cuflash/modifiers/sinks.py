"""Sinks: one more logit in the sum of each row, as a key that every query sees and whose value is 0 (arXiv:2309.17453)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cuflash.modifiers.base import Array, Axes, Kind, Modifier, array_field

if TYPE_CHECKING:
    from cuflash.problem import Problem


@dataclass(frozen=True)
class Sinks(Modifier):
    """Adds ``exp(logits[head])`` to the sum that the weights of each query of a head are divided by.

    Parameters
    ----------
    logits
        Real numbers, shape (heads_q,) or broadcastable to (*batch, heads_q); unit: logits, compared with what scale, softcap,
        other modifiers and bias make of q·k.  A sequence, a NumPy array or an array of the caller's kind.  -inf is no sink.

    Notes
    -----
    It is as if each head had one more key, seen by every query, with this score and the value 0: lse includes it, the weights
    of the keys sum to less than 1, and a row that sees no key has the output 0 and the logit as its lse.  A logit that is NaN
    or +inf makes its rows NaN, as such a score would.  The gradient dsinks has the shape of `logits` and its dtype, float32
    (float64 for float64) for a sequence; it is summed in one fixed order.

    To `cuflash.merge` partial results over disjoint keys, give the sinks to one of them alone: each that has them counts them.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 3, 1)), np.ones((1, 3, 1))
    >>> cuflash.attention(q, k, v, modifiers=(cuflash.Sinks([0.0]),))
    array([[[0.75]]])
    """

    name: ClassVar[str] = "sinks"
    kind: ClassVar[Kind] = "sum"
    order: ClassVar[int] = 40
    fields: ClassVar[tuple[tuple[str, str], ...]] = (("View", "sinks"),)
    differentiable: ClassVar[tuple[str, ...]] = ("sinks",)
    movable: ClassVar[tuple[str, ...]] = ("sinks",)
    cuda: ClassVar[str] = """
struct Sinks {
  // In powers of two; -inf, which is none, for rows that belong to no segment.
  static __device__ __forceinline__ Real logit(const Params& p, const Place& place) {
    if (place.is_of_none(p)) return -infinity<Real>();
    return static_cast<const Real*>(p.sinks.data)[place.offset(p.sinks)] * Real(1.4426950408889634);
  }
};
"""

    logits: Any = array_field()
    dtype: str = field(default="", repr=False)  # of the gradient; the calls set it

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"sinks": "logits"}

    def axes(self, operand: str, problem: Problem) -> Axes:
        return ("heads_q", problem.heads_q), None, None

    def gradient_terms(self, shape: tuple[int, ...], problem: Problem) -> tuple[int, ...]:
        return (*problem.lse_shape, 1)

    def logit(self, operands: Mapping[str, Array]) -> Array:
        return operands["sinks"]
