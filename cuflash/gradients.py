"""Gradients: the named tuple that every backward returns, (dq, dk, dv) and one entry for each differentiable option."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from cuflash.modifiers import Modifier, Written
from cuflash.problem import Problem
from cuflash.variant import ITEMSIZE


@cache
def gradients_type(names: tuple[str, ...] = ()) -> type[Any]:
    """The named tuple ``Gradients(dq, dk, dv, d<name>...)`` for the operands called `names`."""
    fields = ("dq", "dk", "dv", *(f"d{name}" for name in names))

    def reduce(self: Any) -> Any:
        """Tell pickle how to make the class again, which it cannot find by name."""
        return restore, (names, tuple(self))

    # `type` rather than `class`: the fields are known at run time only.
    return type("Gradients", (namedtuple("Gradients", fields),), {"__slots__": (), "__reduce__": reduce})


def restore(names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Make a pickled `Gradients` again."""
    return gradients_type(names)(*values)


def differentiable_operands(modifiers: Iterable[Modifier]) -> tuple[str, ...]:
    """Names of the array operands that have a gradient, in the order of the chain."""
    return tuple(name for modifier in modifiers for name in modifier.differentiable)


def score_operands(modifiers: Iterable[Modifier]) -> tuple[str, ...]:
    """Those of them that are added to scores: kernels add up their gradients from those of the scores."""
    return differentiable_operands(modifier for modifier in modifiers if modifier.kind == "score")


def gradient_terms(problem: Problem, operands: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of what a backward by kernels computes of the operands' gradients, by operand; the rest is sums over axes."""
    return {
        name: modifier.gradient_terms(operands[name].shape, problem)
        for modifier in problem.modifiers
        for name in modifier.differentiable
    }


# ---- sums in fixed point -----------------------------------------------------------------------------------------------
def sum_digits(problem: Problem, operands: Mapping[str, Any], deterministic: bool) -> int:
    """Words of each sum of the operands' gradients in fixed point (kernels/hw/fixed.cuh); 0 where sums are numbers.

    Fixed point is what gives a sum the same bits whatever order its terms come in; an element that is one term needs none.
    """
    names = score_operands(problem.modifiers) if deterministic else ()
    tables = {name for m in problem.modifiers for name in m.tables}
    if not any(name in tables or operands[name].shape != problem.score_shape for name in names):
        return 0
    has_derivatives = any(isinstance(m, Written) and m.differentiable for m in problem.modifiers)
    return 2 + (problem.accumulator == "float64") + has_derivatives


def stores_gradients(problem: Problem, operands: Mapping[str, Any]) -> bool:
    """Whether the gradient of a 16-bit bias is stored as it comes, because its elements are single terms."""
    names = score_operands(problem.modifiers)
    return names == ("bias",) and ITEMSIZE[problem.dtype] == 2 and operands["bias"].shape == problem.score_shape


def may_be_rounded(problem: Problem) -> bool:
    """Whether there are kernels that sum the gradient of a bias in registers, in one order, and round it as the result is."""
    single = len(problem.batch) <= 1 and score_operands(problem.modifiers) == ("bias",)
    return single and ITEMSIZE[problem.dtype] == 2


def gradient_sums(
    problem: Problem, operands: Mapping[str, Any], deterministic: bool, rounded: bool = False
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the zeros that a backward by kernels adds the operands' gradients to, by operand.

    Those in fixed point have a last axis more, of their words; those of single terms have the type of the result, and so have
    sums that shall be `rounded`, which a plan may have to widen (plan.py, Plan.widened).
    """
    digits, of_scores = sum_digits(problem, operands, deterministic), score_operands(problem.modifiers)
    number, stored = np.dtype(problem.accumulator), rounded or stores_gradients(problem, operands)
    found = {}
    for name, shape in gradient_terms(problem, operands).items():
        if digits and not rounded and name in of_scores:
            found[name] = (*shape, digits), np.dtype(np.int64)
        else:
            found[name] = shape, operands[name].dtype if stored and name in of_scores else number
    return found


def numbers_of(sums: Any, problem: Problem) -> Any:
    """The sums as numbers, once kernels are done with them: those in fixed point have each in its first bytes."""
    return sums.view(problem.accumulator)[..., 0].copy() if sums.dtype == np.int64 else sums
