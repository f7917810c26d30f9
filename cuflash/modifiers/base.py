"""What a modifier is: the contract between one feature of the scores, the kernels and the NumPy twin.

A modifier changes scores, hides keys, or joins or follows the softmax.  It is written once, here in Python and as a few
lines of CUDA, and serves every backend in both directions.  Seven kinds exist:

* ``score``: s -> f(s, q, k); CUDA `apply` and `apply_with_slope`, twin `apply` and `slope`; for second derivatives, where
  there are any, CUDA `apply_with_curvature` in a struct of its own, twin `curvature`;
* ``range``: query q sees an interval of keys; CUDA `narrow_keys` and `narrow_queries`, twin `narrow`.  Tiles outside the
  interval are never visited;
* ``mask``: an arbitrary test of (q, k); CUDA `visible`, twin `visible`.  A mask that can tell at a glance that a tile has
  no visible pair, or no hidden one, adds `tile_is_hidden` and `tile_is_clear`, in CUDA and as twins: hidden tiles are
  not visited, and in clear ones no pair is tested;
* ``sum``: one more term in the sum of each row, after its last key; CUDA and twin `logit`;
* ``drop``: weights that become 0 behind the softmax (dropout.py alone; kernels/attention/dropout.cuh), twin
  `weight_factors`;
* ``place``: says which sequence a tile belongs to (packed.py alone), before anything looks at positions;
* ``units``: what elements count (scales.py alone; kernels/attention/units.cuh), twin `dequantised`.

The order of a chain is fixed: scale, softcap, other score modifiers, bias, then everything that hides keys, then the
sum, then what drops weights.

A modifier is a file of this folder, or an expression of a user from which the same follows (written.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Self

    from cuflash.problem import Problem

Array = NDArray[Any]
Kind = Literal["score", "range", "mask", "sum", "drop", "place", "units"]
#: axes of an operand behind those of the batch, for heads, queries and keys: label and length, None where it has none
Axes = tuple[tuple[str, int] | None, tuple[str, int] | None, tuple[str, int] | None]


@dataclass(frozen=True)
class Tile:
    """A block of scores seen by the NumPy twins: which positions it covers, and the operands that reach it.

    `operands` holds arrays with the axes (*batch, heads_q, seq_q, seq_k); an axis of length 1 is broadcast.
    """

    problem: Problem
    operands: Mapping[str, Array]
    rows: slice
    columns: slice
    #: part of the axes (*batch, heads_q) that the operands are cut to; empty is all of them
    lead: tuple[slice, ...] = ()

    @property
    def q(self) -> NDArray[np.int64]:
        """Positions of the queries, as a column."""
        return np.arange(self.rows.start, self.rows.stop, dtype=np.int64)[:, None]

    @property
    def k(self) -> NDArray[np.int64]:
        """Positions of the keys, as a row."""
        return np.arange(self.columns.start, self.columns.stop, dtype=np.int64)[None, :]

    @property
    def heads(self) -> NDArray[np.int32]:
        """Numbers of the query heads, along their axis."""
        heads = np.arange(self.problem.heads_q, dtype=np.int32)
        return heads[self.lead[-1] if self.lead else slice(None)][:, None, None]

    @property
    def entries(self) -> NDArray[np.int32]:
        """Numbers of the batch entries, all batch axes counted as one, along these axes."""
        entries = np.arange(self.problem.batch_size, dtype=np.int32).reshape(self.problem.batch)
        return entries[self.lead[:-1]][..., None, None, None]

    def window(self, array: Array) -> tuple[slice, ...]:
        """Index that cuts the tile's part out of an operand-shaped array."""
        rows = self.rows if array.shape[-2] != 1 or self.problem.seq_q == 1 else slice(None)
        columns = self.columns if array.shape[-1] != 1 or self.problem.seq_k == 1 else slice(None)
        return (..., rows, columns)  # type: ignore[return-value]

    def part(self, name: str) -> Array:
        """The operand's values in this tile, broadcastable to (*batch, heads_q, rows, columns)."""
        array = self.operands[name]
        return array[self.window(array)]


@dataclass(frozen=True)
class Modifier:
    """Base class.  Fields that compare belong to the plan; arrays are carried with ``array_field()`` and never compared."""

    name: ClassVar[str]
    kind: ClassVar[Kind]
    order: ClassVar[int]
    #: (C type, name) of the run-time fields that the CUDA text reads as ``p.<name>``; "View" is an array operand.
    fields: ClassVar[tuple[tuple[str, str], ...]] = ()
    #: names of array operands that have a gradient
    differentiable: ClassVar[tuple[str, ...]] = ()
    #: those of them that may have a tangent: what follows everything that has a slope
    movable: ClassVar[tuple[str, ...]] = ()
    #: the array operand of which `apply` adds an element, if it does nothing else
    added: ClassVar[str] = ""
    #: array operands of which rows or columns are no positions
    tables: ClassVar[tuple[str, ...]] = ()
    #: CUDA struct named like the class
    cuda: ClassVar[str] = ""
    #: CUDA struct `<class>Curved` with `apply_with_curvature`, where the second derivative by the score is not 0
    curved: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """What messages call it."""
        return type(self).__name__

    def arrays(self) -> dict[str, Any]:
        """Array operands by field name."""
        return {n: getattr(self, f) for n, f in self.operand_attributes().items() if getattr(self, f) is not None}

    def numbers(self) -> dict[str, int]:
        """64-bit integers that a call carries beside its arrays, by field name: they vary from call to call, unlike a plan."""
        return {}

    @classmethod
    def operand_attributes(cls) -> dict[str, str]:
        """Field name of each View -> attribute that carries the array."""
        return {}

    @classmethod
    def knows_tiles(cls) -> bool:
        """Whether it can tell at a glance that a tile has no visible pair."""
        return "tile_is_hidden" in cls.cuda

    @classmethod
    def has_slope(cls) -> bool:
        """Whether the score that it makes changes by anything else than the score that enters it."""
        return "kHasSlope = true" in cls.cuda

    @classmethod
    def lacks_curvature(cls) -> bool:
        """Whether it has a second derivative by the score that nobody has written down."""
        return cls.has_slope() and not cls.curved

    def axes(self, operand: str, problem: Problem) -> Axes:
        """Axes that an array operand may have; each may also be of length 1."""
        return ("heads_q", problem.heads_q), ("seq_q", problem.seq_q), ("seq_k", problem.seq_k)

    def gradient_terms(self, shape: tuple[int, ...], problem: Problem) -> tuple[int, ...]:
        """Shape of what a backward computes of an operand's gradient, for an operand of this shape; the rest is sums."""
        return shape

    def bare(self) -> Self:
        """The same modifier without its arrays: what a plan may keep."""
        empty = dict.fromkeys(self.operand_attributes().values())
        return replace(self, **empty) if empty else self

    def values(self, problem: Problem) -> dict[str, float | int]:
        """Values of the scalar run-time fields."""
        return {}

    def twin_operands(
        self, problem: Problem, operands: Mapping[str, Any], numbers: Mapping[str, int], first_entry: int
    ) -> dict[str, Any]:
        """Further operands that only the twins read."""
        return {}

    # ---- NumPy twin ------------------------------------------------------------------------------------------------
    def apply(self, s: Array, tile: Tile) -> Array:
        """Score in, score out (kind ``score``)."""
        raise NotImplementedError

    def slope(self, s: Array, tile: Tile) -> Array | None:
        """Derivative of `apply` at the incoming score; None means 1 everywhere."""
        return None

    def curvature(self, s: Array, tile: Tile) -> Array | None:
        """Second derivative of `apply` at the incoming score; None means 0 everywhere."""
        return None

    def partial(self, operand: str, s: Array, tile: Tile) -> Array | None:
        """Derivative of `apply` by the element of an operand that each score reads; None means 1 everywhere."""
        return None

    def add_gradient(self, operand: str, terms: Array, to: Array, tile: Tile) -> None:
        """Add the tile's terms of an operand's gradient, one for each score, to where each score reads the operand."""
        part = to[tile.window(to)]
        part += sum_to(terms, part.shape)

    def logit(self, operands: Mapping[str, Array]) -> Array:
        """The logit of the further term, with the axes (*batch, heads_q, 1, 1) (kind ``sum``)."""
        raise NotImplementedError

    def weight_factors(self, tile: Tile) -> Array:
        """What weights are multiplied with behind the softmax (kind ``drop``)."""
        raise NotImplementedError

    def narrow(self, begin: Array, end: Array, q: Array, tile: Tile) -> tuple[Array, Array]:
        """Intersect the interval [begin, end) of keys that each query sees (kind ``range``)."""
        raise NotImplementedError

    def visible(self, tile: Tile) -> Array:
        """True where the key may be seen (kind ``mask``)."""
        raise NotImplementedError

    def tile_is_hidden(self, tile: Tile) -> bool:
        """True only if no pair of the tile is visible; False where that takes a look at each (kind ``mask``)."""
        return False

    def tile_is_clear(self, tile: Tile) -> bool:
        """True only if all pairs of the tile are visible; False where that takes a look at each (kind ``mask``)."""
        return False


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes that were broadcast from length 1: the gradient of broadcasting."""
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    total: Array = x.sum(axis=axes, keepdims=True) if axes else x
    return total


def array_field() -> Any:
    """A dataclass field that carries an array: not part of equality, hash or repr."""
    return field(default=None, compare=False, hash=False, repr=False)


def module_of(x: Any) -> Any:
    """NumPy or CuPy: the module whose functions take a native array."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


def device_of(x: Any) -> Any:
    """The context in which arrays beside a native array are made."""
    return nullcontext() if isinstance(x, np.ndarray) else x.device
