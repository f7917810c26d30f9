"""Segments: a packed call as calls of one sequence each, which is what it means, for the backends in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.gradients import differentiable_operands, gradients_type
from cuflash.modifiers import Packed
from cuflash.problem import Call

Array = NDArray[Any]


class Segment(NamedTuple):
    """One sequence: its call, and which rows of the packed queries and keys are its own."""

    call: Call
    rows: slice
    columns: slice


def cut(call: Call) -> Iterator[Segment]:
    """The segments of a packed call, as views."""
    problem = call.problem
    chain = tuple(m for m in problem.modifiers if not isinstance(m, Packed))
    operands = {name: x for name, x in call.operands.items() if name not in Packed.operand_attributes()}
    offsets_q, offsets_k = (call.operands[name].ravel().tolist() for name in Packed.operand_attributes())
    for number, (bounds_q, bounds_k) in enumerate(zip(pairwise(offsets_q), pairwise(offsets_k), strict=True)):
        rows, columns = slice(*bounds_q), slice(*bounds_k)
        lengths = {"seq_q": rows.stop - rows.start, "seq_k": columns.stop - columns.start}
        part = Call(
            replace(problem, modifiers=chain, **lengths),
            call.q[..., rows, :],
            call.k[..., columns, :],
            call.v[..., columns, :],
            operands,
            call.numbers,
            first_entry=number,
        )
        yield Segment(part, rows, columns)


def forward(
    call: Call, dtype: Any, accumulator: Any, compute: Callable[[Segment], tuple[Array, Array]]
) -> tuple[Array, Array]:
    """Output and log-sum-exp from those of each segment; 0 and −∞ behind the last one."""
    out, lse = np.zeros(call.problem.out_shape, dtype), np.full(call.problem.lse_shape, -np.inf, accumulator)
    for segment in cut(call):
        out[..., segment.rows, :], lse[..., segment.rows] = compute(segment)
    return out, lse


def backward(call: Call, dtype: Any, compute: Callable[[Segment], Any]) -> Any:
    """Gradients from those of each segment, those of operands summed over them; 0 behind the last one."""
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (call.q, call.k, call.v))
    names = differentiable_operands(call.problem.modifiers)
    sums = {f"d{name}": np.zeros(call.operands[name].shape, call.operands[name].dtype) for name in names}
    for segment in cut(call):
        gradients = compute(segment)
        dq[..., segment.rows, :] = gradients.dq
        dk[..., segment.columns, :], dv[..., segment.columns, :] = gradients.dk, gradients.dv
        for name, total in sums.items():
            total += getattr(gradients, name)
    return gradients_type(names)(dq, dk, dv, *sums.values())
