"""Gradients: the named tuple that every backward returns, (dq, dk, dv) and one entry for each differentiable option."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from cuflash.modifiers import Modifier
from cuflash.problem import Problem


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
