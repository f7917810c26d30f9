"""Modifiers that users write: one expression, from which the CUDA text, the NumPy twin and all derivatives follow.

An expression makes a class, as if somebody had written a file of this folder for it.  The class's name holds a hash of all that
is compiled in: the expression, the types of what it names, and which arrays have gradients.  Equal expressions share one.
Numbers, arrays and their lengths are fields of the kernels' argument record, so that new ones compile nothing.

Each way in which the expression indexes an array is an operand of its own: `ids[q] == ids[k]` reads one array as two.  An axis
that goes by b, h, q or k alone is an axis of the scores, and is broadcast if its length is 1; any other index is computed, and
clamped to its axis.

What an expression cannot say, a function in CUDA may (function.py): it is one more operation, which comes with its derivatives
and its NumPy twins.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast
from weakref import WeakValueDictionary

import numpy as np

from cuflash.errors import ArgumentError, ShapeError
from cuflash.modifiers.base import Array, Kind, Modifier, Tile, array_field
from cuflash.modifiers.expression import (
    C_TYPES,
    FUNCTIONS,
    INT_MAX,
    INT_MIN,
    MAX_NODES,
    NAMES,
    Node,
    Operand,
    Parser,
    Slots,
    Text,
    Type,
    UnknownDerivativeError,
    evaluate,
    is_constant,
    number_type,
    reached,
    slots_of,
)
from cuflash.modifiers.function import CudaFunction

if TYPE_CHECKING:
    from typing_extensions import Self

    from cuflash.problem import Problem

REAL_DTYPES = ("float16", "bfloat16", "float32", "float64")
CALL_SIZE = 16  # of a call of a function, in operations: what registers are set aside for
KEPT = 256  # classes that stay for the next use, beside those that somebody has


class Given(NamedTuple):
    """An array or number that an expression names; `shape` is None for numbers."""

    type: Type
    shape: tuple[int, ...] | None
    dtype: str
    value: Any


class Access(NamedTuple):
    """One way in which the expression indexes an array, and the field of the argument record for it."""

    field: str
    load: Node
    slots: Slots
    row_limit: str  # fields of the last index, where it is computed
    column_limit: str

    @property
    def array(self) -> str:
        return str(self.load.value)

    @property
    def lengths(self) -> tuple[str, str, str]:
        """In CUDA, its rows and columns, where it has them, and whether these are no positions."""
        rows, columns = (
            f"p.{x} + 1" if x else y for x, y in ((self.row_limit, "p.seq_q"), (self.column_limit, "p.seq_k"))
        )
        return rows, columns, str(self.slots.is_table).lower()


@dataclass(frozen=True)
class Program:
    """What follows from an expression."""

    root: Node
    slope: Node | None  # None is 1 everywhere; of masks, which have none, too
    accesses: tuple[Access, ...]
    scalars: dict[str, str]  # fields of numbers, by the user's name
    partials: dict[str, Node]  # derivatives by elements of arrays, by field
    functions: tuple[tuple[str, CudaFunction], ...] = ()  # by the user's names
    curvature: Node | None = None  # second derivative by the score; None is 0 everywhere
    lacks_curvature: bool = False  # it is not known, or too long to be computed

    @property
    def needs_score(self) -> bool:
        """Whether a partial derivative depends on the score."""
        return any(x.op == "name" and x.value == "s" for x in reached(self.partials.values()))

    @property
    def size(self) -> int:
        """Operations of the expression."""
        return sum(CALL_SIZE if x.op == "call" else bool(x.args) for x in reached([self.root]))

    def access(self, field: str) -> Access:
        return next(a for a in self.accesses if a.field == field)


@dataclass(frozen=True, init=False, repr=False)
class Written(Modifier):
    """Base class of both kinds; instances are of a class that belongs to their expression."""

    program: ClassVar[Program]
    #: a name for messages
    called: ClassVar[str] = ""

    expression: str
    scalars: tuple[tuple[str, float | int], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    gradients: tuple[str, ...]
    given: dict[str, Given] = array_field()
    functions: dict[str, CudaFunction] = array_field()  # whose twins do not compare

    @property
    def title(self) -> str:
        return self.called

    @classmethod
    def lacks_curvature(cls) -> bool:
        return cls.program.lacks_curvature

    def __repr__(self) -> str:
        scalars = "".join(f", {name}={value!r}" for name, value in self.scalars)
        gradients = f", gradients={self.gradients!r}" if self.gradients else ""
        return f"{self.called}({self.expression!r}{scalars}{gradients})"

    def __reduce__(self) -> Any:
        base = ScoreModifier if self.kind == "score" else MaskModifier
        return made, (base, self.expression, self.gradients, self.given, self.functions)

    # The text may be a user's own: nothing is looked for in it.
    @classmethod
    def knows_tiles(cls) -> bool:
        return False

    @classmethod
    def has_slope(cls) -> bool:
        return cls.program.slope is not None

    # ---- arrays --------------------------------------------------------------------------------------------------
    def arrays(self) -> dict[str, Any]:
        found = {a.field: self.given[a.array].value for a in self.program.accesses}
        return {field: x for field, x in found.items() if x is not None}

    def named_arrays(self) -> dict[str, Given]:
        """The arrays by the user's names."""
        return {name: x for name, x in self.given.items() if x.shape is not None}

    def with_arrays(self, arrays: Mapping[str, Any]) -> Self:
        """The same modifier with other arrays, of the same shapes, in place of the user's."""
        given = {name: x._replace(value=arrays.get(name, x.value)) for name, x in self.given.items()}
        return self.remade(given)

    def bare(self) -> Self:
        given = {name: x if x.shape is None else x._replace(value=None) for name, x in self.given.items()}
        return self.remade(given)

    def remade(self, given: dict[str, Given]) -> Self:
        new = object.__new__(type(self))
        for name in ("expression", "scalars", "shapes", "gradients"):
            object.__setattr__(new, name, getattr(self, name))
        object.__setattr__(new, "given", given)
        object.__setattr__(new, "functions", self.functions)
        return new

    def values(self, problem: Problem) -> dict[str, float | int]:
        found: dict[str, float | int] = {self.program.scalars[name]: value for name, value in self.scalars}
        shapes = dict(self.shapes)
        for a in self.program.accesses:
            for limit, axis in ((a.row_limit, a.slots.row), (a.column_limit, a.slots.column)):
                if limit and axis is not None:
                    found[limit] = shapes[a.array][axis] - 1
        return found

    def operand(self, field: str, x: Any, problem: Problem) -> Any:
        """An array with its axes in their slots: (*batch, heads_q, rows, columns)."""
        a = self.program.access(field)
        name, slots = f"{a.array} of {self.called}", a.slots
        plain = (("b", slots.batch, problem.batch_size), ("h", slots.head, problem.heads_q))
        sides = (
            ("q", slots.row, problem.seq_q, slots.row_computed),
            ("k", slots.column, problem.seq_k, slots.column_computed),
        )
        for letter, axis, full in (*plain, *(side[:3] for side in sides if not side[3])):
            if axis is not None and x.shape[axis] not in (1, full):
                raise ShapeError(
                    f"{name} has shape {x.shape}, and its axis {axis} is indexed by {letter}: it must have the length {full}, "
                    "or 1 where it is to be repeated"
                )
        for _, axis, _, computed in sides:
            if computed and axis is not None and x.shape[axis] < 1:
                raise ShapeError(f"{name} has shape {x.shape}: its axis {axis} is empty, and there is nothing to read")
        order = [axis for axis in (slots.batch, slots.head, slots.row, slots.column) if axis is not None]
        index = tuple(
            None if axis is None else slice(None) for axis in (slots.batch, slots.head, slots.row, slots.column)
        )
        entries, *rest = (x := x.transpose(order)[index]).shape
        batch = problem.batch if entries == problem.batch_size else (1,) * len(problem.batch)
        return x.reshape((*batch, *rest))

    def gradient(self, name: str, found: Mapping[str, Any]) -> Any:
        """The gradient of one of the user's arrays, from those of its operands by field."""
        shape, total = dict(self.shapes)[name], None
        for a in self.program.accesses:
            if a.array == name and a.field in found:
                x = found[a.field]
                slots = (a.slots.batch, a.slots.head, a.slots.row, a.slots.column)
                x = x.reshape((math.prod(x.shape[:-3]), *x.shape[-3:]))
                taken = sorted((axis, slot) for slot, axis in enumerate(slots) if axis is not None)
                unused = [slot for slot, axis in enumerate(slots) if axis is None]
                x = x.transpose([*(slot for _, slot in taken), *unused]).reshape(shape)
                total = x if total is None else total + x
        return total

    def packed_refusal(self) -> str | None:
        """What of it has no meaning beside packed sequences, or None."""
        for a in self.program.accesses:
            for axis, computed, letter in (
                (a.slots.row, a.slots.row_computed, "q"),
                (a.slots.column, a.slots.column_computed, "k"),
            ):
                if axis is not None and not computed:
                    return f"{a.array} with an axis for each {letter}"
        if self.gradients:
            return f"the gradient of {self.gradients[0]}"
        if any(x.op == "name" and x.value == "b" for x in reached([self.program.root])):
            return "b"
        return None

    # ---- NumPy twin ----------------------------------------------------------------------------------------------
    def twin_operands(
        self, problem: Problem, operands: Mapping[str, Any], numbers: Mapping[str, int], first_entry: int
    ) -> dict[str, Any]:
        for function in self.functions.values():
            function.check_twins(repr(self))
        return {}

    def computed(self, roots: Iterable[Node], tile: Tile, real: np.dtype[Any], s: Array | None = None) -> list[Array]:
        """Values of nodes in a tile."""
        accesses = {a.load: a for a in self.program.accesses}

        def leaf(x: Node, index: tuple[Any, ...]) -> Any:
            if x.op == "load":
                return self.elements(accesses[x], tile, index, real)
            if x.op == "call":
                local, name = x.value
                return self.functions[local].computed(name, index, x.type, real)
            if x.op == "scalar":
                return number_type(x.type, real)(self.given[x.value].value)
            return s if x.value == "s" else PLACES_IN_NUMPY[x.value](tile)

        return evaluate(roots, real, leaf)

    def elements(self, a: Access, tile: Tile, index: tuple[Any, ...], real: np.dtype[Any]) -> Array:
        """What an access reads in a tile."""
        x = tile.operands[a.field]
        x = x[table_index(a, x.shape, tile, index)] if a.slots.is_table else tile.part(a.field)
        return x.astype(real) if a.load.type == "real" else x

    def add_gradient(self, operand: str, terms: Array, to: Array, tile: Tile) -> None:
        a = self.program.access(operand)
        if not a.slots.is_table:
            super().add_gradient(operand, terms, to, tile)
            return
        index = self.computed(a.load.args, tile, np.dtype(tile.problem.accumulator))
        places = np.broadcast_arrays(*table_index(a, to.shape, tile, tuple(index)), terms)[:-1]
        flat = np.ravel_multi_index(tuple(places), to.shape).ravel()
        to += np.bincount(flat, terms.ravel(), to.size).reshape(to.shape).astype(to.dtype)


PLACES_IN_NUMPY: dict[str, Callable[[Tile], Any]] = {
    "b": lambda tile: tile.entries,
    "h": lambda tile: tile.heads,
    "kv": lambda tile: tile.heads // np.int32(tile.problem.group),
    "q": lambda tile: tile.q.astype(np.int32),
    "k": lambda tile: tile.k.astype(np.int32),
    "seq_q": lambda tile: np.int32(tile.problem.seq_q),
    "seq_k": lambda tile: np.int32(tile.problem.seq_k),
}


def table_index(a: Access, shape: tuple[int, ...], tile: Tile, index: tuple[Any, ...]) -> tuple[Any, ...]:
    """Index of a table's elements for all scores of a tile; axes of length 1 are broadcast."""
    *lead, rows, columns = shape
    axes = [np.arange(n).reshape(-1, *(1,) * (len(lead) - i + 1)) for i, n in enumerate(lead)]

    def side(axis: int | None, computed: bool, count: int, positions: Array) -> Any:
        if axis is None:
            return np.zeros((1, 1), np.intp)
        if computed:
            return np.clip(index[axis], 0, count - 1)
        return positions if count > 1 else 0 * positions

    row = side(a.slots.row, a.slots.row_computed, rows, tile.q)
    column = side(a.slots.column, a.slots.column_computed, columns, tile.k)
    return (*axes, row, column)


class ScoreModifier(Written):
    """Changes every score by an expression of your own; its derivative follows by itself.

    Parameters
    ----------
    expression
        The new score of the scaled score ``s`` (softcap and ALiBi are applied before it), as a text.  It may name

        * ``b``, ``h``, ``kv``: the batch entry (all batch axes counted as one), the query head, the key head;
        * ``q``, ``k``: the positions of query and key in their arrays, from 0.  ``causal`` is ``k <= q + seq_k - seq_q``.
          With packed sequences they count from the beginning of each, and so do the next two;
        * ``seq_q``, ``seq_k``: the lengths; ``inf``;
        * whatever is given in `operands`.

        It has numbers, ``+ - * / // % **``, comparisons, ``and``, ``or``, ``not``, ``x if c else y``, ``where(c, x, y)``,
        ``abs``, ``exp``, ``log``, ``tanh``, ``sqrt``, ``floor``, ``min``, ``max``, ``int(x)`` (towards 0) and indexing.
    gradients
        Names of arrays of real numbers whose gradients the backward returns, as dname behind dq, dk and dv: one name, or a
        sequence of them.
    operands
        Numbers, and arrays of any strides: real ones of any dtype (computed with in float32, float64 for float64), int32 or bool;
        sequences and NumPy arrays of other integers are converted where their values fit.  A `CudaFunction` is called by the name
        that it is given as.  An index that is just b, h, q or k
        needs an axis of that length, or of length 1, which is repeated.  Any other index is clamped to its axis: nothing
        outside of an array is ever read.

    Raises
    ------
    ArgumentError
        The expression cannot be read, or its types do not fit; the message points into it.

    Notes
    -----
    Whole numbers have 32 bits and wrap; ``//`` and ``%`` round down, and are 0 for a divisor of 0.  Derivatives of
    comparisons, ``floor`` and ``int`` are 0, that of ``abs`` at 0 is 0.  The text is parsed and never executed by Python.
    A kernel is compiled for each expression, at its first use; other numbers, arrays or lengths compile nothing.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((1, 2, 4, 8), np.float32)
    >>> decay = cuflash.ScoreModifier("s - slope[h] * abs(q - k)", slope=[0.5, 0.25], gradients="slope")
    >>> out, vjp = cuflash.attention_vjp(q, k, v, modifiers=(decay,))
    >>> vjp(out).dslope.shape
    (2,)
    """

    kind: ClassVar[Kind] = "score"
    order: ClassVar[int] = 5
    called: ClassVar[str] = "ScoreModifier"

    def __new__(cls, expression: str, /, *, gradients: str | Iterable[str] = (), **operands: Any) -> ScoreModifier:
        return cast(ScoreModifier, made(ScoreModifier, expression, gradients, *described("ScoreModifier", operands)))

    def __init__(self, expression: str, /, *, gradients: str | Iterable[str] = (), **operands: Any) -> None:
        pass  # `made` did it

    def apply(self, s: Array, tile: Tile) -> Array:
        return filled(self.computed([self.program.root], tile, s.dtype, s)[0], s)

    def slope(self, s: Array, tile: Tile) -> Array | None:
        slope = self.program.slope
        return None if slope is None else filled(self.computed([slope], tile, s.dtype, s)[0], s)

    def curvature(self, s: Array, tile: Tile) -> Array | None:
        curvature = self.program.curvature
        return None if curvature is None else filled(self.computed([curvature], tile, s.dtype, s)[0], s)

    def partial(self, operand: str, s: Array, tile: Tile) -> Array | None:
        return filled(self.computed([self.program.partials[operand]], tile, s.dtype, s)[0], s)


class MaskModifier(Written):
    """Hides keys by an expression of your own: True where the query may see the key.

    Parameters
    ----------
    expression
        As for `ScoreModifier`, without ``s``; its value is True or False.
    operands
        As for `ScoreModifier`.

    Raises
    ------
    ArgumentError
        As for `ScoreModifier`.

    Notes
    -----
    It is asked about every pair of query and key, and saves no work by itself.  `causal`, `window`, `KeyLengths`, `Documents`
    and `BlockMask` pass over what they hide: give one of them as well where it is true of all that you want to see.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 2, 1)), np.zeros((1, 3, 1)), np.array([[[1.0], [3.0], [8.0]]])
    >>> prefix = cuflash.MaskModifier("k < prefix or k <= q + seq_k - seq_q", prefix=1)
    >>> cuflash.attention(q, k, v, modifiers=(prefix,)).ravel()
    array([2., 4.])
    """

    kind: ClassVar[Kind] = "mask"
    order: ClassVar[int] = 23
    called: ClassVar[str] = "MaskModifier"

    def __new__(cls, expression: str, /, **operands: Any) -> MaskModifier:
        return cast(MaskModifier, made(MaskModifier, expression, (), *described("MaskModifier", operands)))

    def __init__(self, expression: str, /, **operands: Any) -> None:
        pass  # `made` did it

    def visible(self, tile: Tile) -> Array:
        (seen,) = self.computed([self.program.root], tile, np.dtype(tile.problem.accumulator))
        return np.asarray(seen)


def filled(x: Any, s: Array) -> Array:
    """A new array of the shape and dtype of the scores."""
    return np.array(np.broadcast_to(x, s.shape), s.dtype)


# ---- what is given ---------------------------------------------------------------------------------------------------
def described(title: str, operands: Mapping[str, Any]) -> tuple[dict[str, Given], dict[str, CudaFunction]]:
    """Types and shapes of the arrays and numbers that an expression names, and the functions that it calls."""
    found, functions = {}, {}
    for name, x in sorted(operands.items()):
        if name in NAMES or name in FUNCTIONS:
            raise ArgumentError(f"{title}: nothing can be given as {name}=, which has a meaning of its own; rename it")
        if not (name.isidentifier() and name.isascii()):
            raise ArgumentError(f"{title}: {name!r:.40} is no name of letters, digits and _; rename it")
        if isinstance(x, CudaFunction):
            functions[name] = x
        else:
            found[name] = described_one(f"{name} of {title}", x)
    return found, functions


def described_one(name: str, x: Any) -> Given:
    if isinstance(x, (list, tuple, range)):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ArgumentError(f"{name}={x!r:.80} is no array: {error}") from error
    if isinstance(x, (np.generic, np.ndarray)) and np.ndim(x) == 0:
        x = x.item() if x.dtype.kind in "bifu" else float(x) if "float" in str(x.dtype) else x
    if isinstance(x, bool):
        return Given("bool", None, "bool", x)
    if isinstance(x, int):
        if not INT_MIN <= x <= INT_MAX:
            raise ArgumentError(f"{name}={x}: does not fit in 32 bits; pass {x}.0 for a real number")
        return Given("int", None, "int32", x)
    if isinstance(x, float):
        return Given("real", None, "float64", x)
    try:
        shape, dtype = tuple(map(int, x.shape)), str(x.dtype).rpartition(".")[2]
    except (AttributeError, TypeError):
        raise ArgumentError(
            f"{name} is {x!r:.80}: must be a number, a sequence or an array with shape and dtype"
        ) from None
    if not shape:
        raise ArgumentError(f"{name} is an array without axes; pass a Python number, or an array of one axis")
    kind: Type
    if dtype in REAL_DTYPES:
        kind = "real"
    elif dtype.startswith(("int", "uint", "bool")):
        kind = "bool" if dtype == "bool" else "int"
    else:
        raise ArgumentError(
            f"{name} has dtype {dtype}: must be one of {', '.join(REAL_DTYPES)}, integers or bool; convert it with astype"
        )
    return Given(kind, shape, dtype, x)


def made(
    base: type[Written],
    expression: str,
    gradients: Any,
    given: dict[str, Given],
    functions: dict[str, CudaFunction],
) -> Written:
    """The modifier of an expression: an instance of the class that belongs to it."""
    if not isinstance(expression, str):
        raise ArgumentError(f"{base.called}({expression!r:.80}): must be a text, such as 's - 0.5 * abs(q - k)'")
    try:
        names = (gradients,) if isinstance(gradients, str) else tuple(gradients)
    except TypeError:
        raise ArgumentError(
            f"gradients={gradients!r:.80} of {base.called}: must be a name, or names in a sequence"
        ) from None
    for name in names:
        if name not in given or given[name].shape is None or given[name].type != "real":
            arrays = ", ".join(n for n, x in given.items() if x.shape is not None and x.type == "real") or "none"
            raise ArgumentError(
                f"gradients={gradients!r:.80} of {base.called}: {name!r} is no array of real numbers; "
                f"given are: {arrays}"
            )
        if name in ("q", "k", "v"):
            raise ArgumentError(
                f"gradients={gradients!r:.80} of {base.called}: d{name} is the gradient of {name} itself; rename the array"
            )
    names = tuple(dict.fromkeys(names))
    operands = tuple((n, Operand(x.type, None if x.shape is None else len(x.shape))) for n, x in given.items())
    kind = class_of(cast(Any, base), expression, operands, names, tuple(functions.items()))
    new = object.__new__(kind)
    object.__setattr__(new, "expression", kind.text)  # type: ignore[attr-defined]
    object.__setattr__(new, "scalars", tuple((n, x.value) for n, x in given.items() if x.shape is None))
    object.__setattr__(new, "shapes", tuple((n, x.shape) for n, x in given.items() if x.shape is not None))
    object.__setattr__(new, "gradients", names)
    object.__setattr__(new, "given", given)
    object.__setattr__(new, "functions", functions)
    return new


# ---- classes ---------------------------------------------------------------------------------------------------------
#: by name, as long as something has them: a modifier, a plan, or `class_of` for the next use
CLASSES: WeakValueDictionary[str, type[Written]] = WeakValueDictionary()
_lock = threading.Lock()


@lru_cache(maxsize=KEPT)
def class_of(
    base: type[Written],
    expression: str,
    operands: tuple[tuple[str, Operand], ...],
    gradients: tuple[str, ...],
    functions: tuple[tuple[str, CudaFunction], ...],
) -> type[Written]:
    """The class of an expression; equal ones share it."""
    hidden = {"s": "a mask does not depend on the score s"} if base.kind == "mask" else {}
    parser = Parser(base.called, expression, dict(operands), hidden, dict(functions))
    root, text = parser.parse("bool" if base.kind == "mask" else "real")
    identity = repr((base.kind, text, operands, gradients, *((name, x.identity) for name, x in functions)))
    name = f"{base.kind}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    with _lock:
        found = CLASSES.get(name)
        if found is None:
            program = programmed(parser, name, root, dict(operands), gradients)
            members = {
                "__module__": __name__,
                "__doc__": base.__doc__,
                "name": name,
                "text": text,
                "program": program,
                "fields": fields_of(program, dict(operands)),
                "differentiable": tuple(program.partials),
                "tables": tuple(a.field for a in program.accesses if a.slots.is_table),
                "cuda": cuda_of(base.kind, name, text, program),
                "curved": curved_of(name, text, program),
            }
            found = CLASSES[name] = type(name.capitalize(), (base,), members)
    return found


def programmed(
    parser: Parser, name: str, root: Node, operands: Mapping[str, Operand], gradients: tuple[str, ...]
) -> Program:
    """All that follows from the root of an expression."""
    graph = parser.graph
    accesses: list[Access] = []
    for x in reached([root]):
        if x.op == "load":
            i, slots = len(accesses), cast(Slots, slots_of(x))
            limits = (
                f"{name}_rows{i}" if slots.row_computed else "",
                f"{name}_columns{i}" if slots.column_computed else "",
            )
            accesses.append(Access(f"{name}_at{i}_{x.value}", x, slots, *limits))
    slope = curvature = None
    lacks_curvature = False
    if root.type == "real":
        score = graph.node("name", "real", value="s")
        slope = graph.derivative(root, score)
        try:
            curvature = graph.derivative(slope, score)
        except UnknownDerivativeError:
            lacks_curvature = True
        if is_constant(slope, 1):
            slope = None
        if curvature is not None and is_constant(curvature, 0):
            curvature = None
        if curvature is not None and len(reached([root, curvature])) > MAX_NODES:
            curvature, lacks_curvature = None, True
    partials: dict[str, Node] = {}
    for array in gradients:
        found = {a.field: graph.derivative(root, a.load) for a in accesses if a.array == array}
        found = {field: x for field, x in found.items() if not is_constant(x, 0)}
        if not found:
            raise ArgumentError(
                f"{parser.title}: gradients names {array}, and the derivative of "
                f"{parser.text!r} by it is 0 everywhere; leave it out"
            )
        for a in accesses:
            if a.field in found and any(x.op == "name" and x.value == "s" for x in reached(a.load.args)):
                raise ArgumentError(
                    f"{parser.title}: gradients names {array}, whose index depends on the score, and no backend offers that "
                    "gradient; leave it out"
                )
        partials |= found
    parser.check_size([root, *([slope] if slope else []), *partials.values()])
    scalars = {n: f"{name}_of_{n}" for n, x in operands.items() if x.axes is None}
    functions = tuple(parser.functions.items())
    return Program(root, slope, tuple(accesses), scalars, partials, functions, curvature, lacks_curvature)


def fields_of(program: Program, operands: Mapping[str, Operand]) -> tuple[tuple[str, str], ...]:
    """Run-time fields: arrays, the last index of axes with computed ones, and numbers."""
    fields = [("View", a.field) for a in program.accesses]
    fields += [("int", limit) for a in program.accesses for limit in (a.row_limit, a.column_limit) if limit]
    fields += [("Real" if operands[n].type == "real" else "int", field) for n, field in program.scalars.items()]
    return tuple(fields)


# ---- CUDA ------------------------------------------------------------------------------------------------------------
HERE = "const Params& p, const Place& place, int q, int k"
QUALIFIERS = "static __device__ __forceinline__"
PLACES = {
    "s": "s",
    "b": "place.entry(p)",
    "h": "place.head",
    "kv": "place.head_k",
    "q": "q",
    "k": "k",
    "seq_q": "place.seq_q(p)",
    "seq_k": "place.seq_k(p)",
}


def cuda_of(kind: str, name: str, expression: str, program: Program) -> str:
    """The struct; messages of a compiler point to the expression in place of a file."""
    if kind == "mask":
        body = f"{QUALIFIERS} bool visible({HERE}) {{\n{function(program, name, program.root)}\n  }}"
    else:
        body = f"""static constexpr bool kHasSlope = {str(program.slope is not None).lower()};
  {QUALIFIERS} Real apply({HERE}, Real s) {{
{function(program, name, program.root)}
  }}
  {QUALIFIERS} Real apply_with_slope({HERE}, Real s, Real& slope) {{
{function(program, name, program.root, program.slope)}
  }}
{gradients_of(program, name)}"""
    functions = "\n".join(x.cuda(namespace_of(name, local)) for local, x in program.functions)
    return f"""{functions}
#line 1 "{expression}"
struct {name.capitalize()} {{
  {body}
}};
#line 1 "variant.cuh"
"""


def namespace_of(name: str, local: str) -> str:
    """Where the text of a function stands, so that its names meet no others."""
    return f"{name}_{local}"


def curved_of(name: str, expression: str, program: Program) -> str:
    """The struct of its second derivative, where there is one that can be computed."""
    if program.slope is None or program.curvature is None:
        return ""
    text = statements(program, name)
    value = text.of(program.root)
    for variable, root in (("slope", program.slope), ("curvature", program.curvature)):
        text.lines.append(f"{variable} = {text.of(root)};")
    body = "\n".join(f"    {line}" for line in (*text.lines, f"return {value};"))
    return f"""
#line 1 "{expression}"
struct {name.capitalize()}Curved {{
  {QUALIFIERS} Real apply_with_curvature({HERE}, Real s, Real& slope, Real& curvature) {{
{body}
  }}
}};
#line 1 "variant.cuh"
"""


def statements(program: Program, name: str) -> Text:
    """Statements that compute nodes of the expression."""
    accesses = {a.load: a for a in program.accesses}

    def leaf(x: Node, index: tuple[str, ...]) -> str:
        if x.op == "name":
            return PLACES[x.value]
        if x.op == "scalar":
            field = f"p.{program.scalars[x.value]}"
            return f"({field} != 0)" if x.type == "bool" else field
        if x.op == "call":
            local, called = x.value
            return f"{namespace_of(name, local)}::{called}({', '.join(index)})"
        a = accesses[x]
        kind = {"bool": "u8"}.get(x.type, C_TYPES[x.type])
        element = f"*{address(a, a.field, kind, index)}"
        return f"{element} != 0" if x.type == "bool" else element

    return Text(leaf)


def address(a: Access, view: str, kind: str, index: tuple[str, ...]) -> str:
    """Of the element that an access reads, in a view."""

    def side(axis: int | None, limit: str, position: str) -> str:
        return "0" if axis is None else f"clamped({index[axis]}, p.{limit})" if limit else position

    terms = []
    if a.slots.batch is not None:
        terms.append(f"place.batch_offset(p.{view})")
    if a.slots.head is not None:
        terms.append(f"place.head * p.{view}.head")
    row, column = side(a.slots.row, a.row_limit, "q"), side(a.slots.column, a.column_limit, "k")
    return f"element_at<{kind}>(p.{view}, {' + '.join(terms) or '0'}, {row}, {column})"


def function(program: Program, name: str, root: Node, slope: Node | None = None) -> str:
    """The body of a function of the root's value, which also multiplies `slope`."""
    text = statements(program, name)
    value = text.of(root)
    if slope is not None:
        text.lines.append(f"slope *= {text.of(slope)};")
    return "\n".join(f"    {line}" for line in (*text.lines, f"return {value};"))


def gradients_of(program: Program, name: str) -> str:
    """A struct that adds the terms of one score to the gradients of arrays: at once where the element depends on the position.

    What a thread adds to one element for all its scores is kept until the last of them.
    """
    text, kept, begins, ends = statements(program, name), [], [], []
    for i, (field, partial) in enumerate(program.partials.items()):
        a, view = program.access(field), f"d{field}"
        term = f"ds * {text.of(partial)}"
        index = tuple(text.of(x) for x in a.load.args)
        to = address(a, view, "OperandSum", index)
        kept.append(f"    SumUnit unit{i};\n")
        begins.append(f"      unit{i} = OperandSums::unit(p, place, p.{view}, {a.lengths[-1]});\n")
        if a.slots.row is None and a.slots.column is None:
            kept.append(f"    Real sum{i} = Real(0);\n")
            text.lines.append(f"sum{i} += {term};")
            ends.append(f"      if (sum{i} != Real(0)) OperandSums::add({to}, sum{i}, unit{i});\n")
        else:
            text.lines.append(f"OperandSums::add({to}, {term}, unit{i});")
    lines = "".join(f"      {line}\n" for line in text.lines)
    where = "const P& p, const Place& place"
    return f"""  struct Gradients {{
{"".join(kept)}    template <class P> __device__ __forceinline__ void begin({where}) {{
{"".join(begins)}    }}
    template <class P> __device__ __forceinline__ void add({where}, int q, int k, Real s, Real ds) {{
{lines}    }}
    template <class P> __device__ __forceinline__ void finish({where}) {{
{"".join(ends)}    }}
  }};"""
