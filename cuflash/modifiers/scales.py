"""Scales: what the elements of 8-bit arrays count, one number for each head, and the dtype of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cuflash.modifiers.base import Array, Axes, Kind, Modifier, array_field

if TYPE_CHECKING:
    from cuflash.problem import Problem


@dataclass(frozen=True)
class Scales(Modifier):
    """Every element of q, k and v stands for itself times the scale of its head.  Calls of 8-bit arrays have it, no others.

    Kernels find the values laid out anew in `value_steps`, `step_count` steps for each head (kernels/forward_values.cu);
    `value_words` tells that four neighbours may be read at once.
    """

    name: ClassVar[str] = "scales"
    kind: ClassVar[Kind] = "units"
    order: ClassVar[int] = -2
    fields: ClassVar[tuple[tuple[str, str], ...]] = (
        ("View", "q_scale"),
        ("View", "k_scale"),
        ("View", "v_scale"),
        ("Pointer", "value_steps"),
        ("int", "step_count"),
        ("int", "value_words"),
        ("Real", "value_scale"),
    )
    cuda: ClassVar[str] = """
struct Scales {
  static __device__ __forceinline__ Real of(const View& view, const Place& place, int head) {
    return view.data ? static_cast<const Real*>(view.data)[place.offset(view, head)] : Real(1);
  }
  static __device__ __forceinline__ Real of_scores(const Params& p, const Place& place) {
    return of(p.q_scale, place, place.head) * of(p.k_scale, place, place.head_k);
  }
  static __device__ __forceinline__ Real of_values(const Params& p, const Place& place) {
    return p.value_scale * of(p.v_scale, place, place.head_k);
  }
};
"""

    out_dtype: str = "bfloat16"
    value_scale: float = 1.0  # of all heads
    logit_scale: float = 1.0  # likewise, of queries times that of keys: a part of the problem's scale
    q_scale: Any = array_field()
    k_scale: Any = array_field()
    v_scale: Any = array_field()

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        return {"q_scale": "q_scale", "k_scale": "k_scale", "v_scale": "v_scale"}

    def axes(self, operand: str, problem: Problem) -> Axes:
        return (("heads_q", problem.heads_q) if operand == "q_scale" else ("heads_k", problem.heads_k)), None, None

    def values(self, problem: Problem) -> dict[str, float | int]:
        return {"value_scale": self.value_scale}

    def dequantised(self, q: Array, k: Array, v: Array, operands: Mapping[str, Array]) -> tuple[Array, Array, Array]:
        """What the arrays stand for, in float32."""
        found = []
        for x, name in ((q, "q_scale"), (k, "k_scale"), (v, "v_scale")):
            values = x.astype(np.float32)
            found.append(values * operands[name].astype(np.float32) if name in operands else values)
        return found[0], found[1], found[2] * np.float32(self.value_scale)
