"""Expressions that users write: parsed, typed and differentiated, evaluated by NumPy and spelled in CUDA.

The text is data.  Python's own parser turns it into a tree, a list of allowed nodes turns that into the few operations below,
and nothing of it is ever executed by Python.  Numbers are 32-bit integers, which wrap, or real; the type of each operation
follows from its operands, and so do its value on the host, its CUDA text and its derivative.

Source of the derivatives: the chain rule, from the leaves to the whole (Griewank & Walther, "Evaluating Derivatives",
section 3.1), on a graph in which equal parts are one node.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from cuflash.errors import ArgumentError

if TYPE_CHECKING:
    from cuflash.modifiers.function import CudaFunction

Type = Literal["int", "real", "bool"]
Array = NDArray[Any]

MAX_TEXT = 2000  # characters
MAX_DEPTH = 100  # of the tree
MAX_NODES = 500  # of an expression and its derivatives together
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
REAL_INT = 2147483520  # the largest integer that float32 has below 2^31
MAX_POWER = 16

#: names that mean something in every expression, and their types
NAMES: dict[str, Type] = {
    "s": "real",
    "b": "int",
    "h": "int",
    "kv": "int",
    "q": "int",
    "k": "int",
    "seq_q": "int",
    "seq_k": "int",
    "inf": "real",
}
#: functions and the least and largest number of their arguments
FUNCTIONS: dict[str, tuple[int, int]] = {
    "abs": (1, 1),
    "exp": (1, 1),
    "log": (1, 1),
    "tanh": (1, 1),
    "sqrt": (1, 1),
    "floor": (1, 1),
    "int": (1, 1),
    "min": (2, 8),
    "max": (2, 8),
    "where": (3, 3),
}
ARITHMETIC: dict[type[ast.AST], str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}
WHOLE: dict[type[ast.AST], str] = {ast.FloorDiv: "floordiv", ast.Mod: "mod"}
COMPARISONS: dict[type[ast.AST], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
KINDS = {"int": "a whole number", "real": "a real number", "bool": "True or False"}


@dataclass(frozen=True)
class Node:
    """One operation; equal ones of a graph are one object, so that they are compared and hashed by identity."""

    op: str
    type: Type
    args: tuple[Node, ...] = ()
    value: Any = None

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True)
class Operand:
    """What an expression may know of an array or number that it names: its type, and its axes (None for a number)."""

    type: Type
    axes: int | None


class UnknownDerivativeError(Exception):
    """A derivative of a derivative of a function in CUDA."""


class Graph:
    """Makes nodes, each once."""

    def __init__(self, functions: Mapping[str, CudaFunction] | None = None) -> None:
        self.nodes: dict[Any, Node] = {}
        self.functions = functions or {}

    def node(self, op: str, kind: Type, *args: Node, value: Any = None) -> Node:
        # `repr` tells 0.0 from -0.0, and 1 from True
        key = (op, kind, tuple(map(id, args)), repr(value))
        if key not in self.nodes:
            self.nodes[key] = Node(op, kind, args, value)
        return self.nodes[key]

    def real(self, x: Node) -> Node:
        """A number as a real one."""
        if x.type == "real":
            return x
        if x.op == "const":
            return self.node("const", "real", value=float(x.value))
        return self.node("real", "real", x)

    def number(self, value: float) -> Node:
        return self.node("const", "real", value=float(value))

    # ---- operations on real numbers whose result may be known without computing: derivatives are made of them ----
    def add(self, x: Node, y: Node) -> Node:
        return y if is_constant(x, 0) else x if is_constant(y, 0) else self.node("add", "real", x, y)

    def sub(self, x: Node, y: Node) -> Node:
        return x if is_constant(y, 0) else self.neg(y) if is_constant(x, 0) else self.node("sub", "real", x, y)

    def neg(self, x: Node) -> Node:
        return self.number(-x.value) if x.op == "const" else self.node("neg", "real", x)

    def mul(self, x: Node, y: Node) -> Node:
        if is_constant(x, 0) or is_constant(y, 0):
            return self.number(0)
        return y if is_constant(x, 1) else x if is_constant(y, 1) else self.node("mul", "real", x, y)

    def div(self, x: Node, y: Node) -> Node:
        return x if is_constant(x, 0) or is_constant(y, 1) else self.node("div", "real", x, y)

    def where(self, condition: Node, x: Node, y: Node) -> Node:
        return x if x is y else self.node("where", x.type, condition, x, y)

    # ---- derivatives ----
    def derivative(self, of: Node, by: Node) -> Node:
        """The derivative of a real node by another one; 0 where a step, a comparison or a whole number lies between."""
        known: dict[Node, Node] = {}
        zero, one = self.number(0), self.number(1)

        def d(x: Node) -> Node:
            if x not in known:
                known[x] = one if x is by else rule(x)
            return known[x]

        def rule(x: Node) -> Node:
            a = x.args
            if x.type != "real":
                return zero
            if x.op == "add":
                return self.add(d(a[0]), d(a[1]))
            if x.op == "sub":
                return self.sub(d(a[0]), d(a[1]))
            if x.op == "neg":
                return self.neg(d(a[0]))
            if x.op == "mul":
                return self.add(self.mul(d(a[0]), a[1]), self.mul(a[0], d(a[1])))
            if x.op == "div":  # (u / v)' = (u' - (u / v) v') / v
                return self.div(self.sub(d(a[0]), self.mul(x, d(a[1]))), a[1])
            if x.op == "where":
                return self.where(a[0], d(a[1]), d(a[2]))
            if x.op in ("const", "name", "scalar", "load", "real", "floor"):
                return zero
            if x.op == "call":
                return called(x)
            inner = d(a[0])
            if is_constant(inner, 0):
                return zero
            return self.mul(outer(x, a[0]), inner)

        def called(x: Node) -> Node:
            local, name = x.value
            function, total = self.functions[local], zero
            for u, (parameter, _) in zip(x.args, function.signature.parameters, strict=True):
                if not is_constant(inner := d(u), 0):
                    if name != function.name:
                        raise UnknownDerivativeError(
                            f"{function.title}: nobody has written down that of {name} by {parameter}"
                        )
                    partial = self.node("call", "real", *x.args, value=(local, function.derivative(parameter)))
                    total = self.add(total, self.mul(partial, inner))
            return total

        def outer(x: Node, u: Node) -> Node:
            if x.op == "exp":
                return x
            if x.op == "log":
                return self.div(one, u)
            if x.op == "tanh":
                return self.sub(one, self.mul(x, x))
            if x.op == "sqrt":
                return self.div(self.number(0.5), x)
            positive, negative = self.node("lt", "bool", zero, u), self.node("lt", "bool", u, zero)
            return self.where(positive, one, self.where(negative, self.neg(one), zero))  # abs

        return d(of)


def is_constant(x: Node, value: float) -> bool:
    return x.op == "const" and x.type == "real" and bool(x.value == value)


def reached(roots: Iterable[Node]) -> list[Node]:
    """All nodes that the roots are made of, each behind its own arguments."""
    found: dict[Node, None] = {}

    def visit(x: Node) -> None:
        if x not in found:
            for argument in x.args:
                visit(argument)
            found[x] = None

    for root in roots:
        visit(root)
    return list(found)


# ---- text to graph ---------------------------------------------------------------------------------------------------
class Parser:
    """One expression's text; errors point into it."""

    def __init__(
        self,
        title: str,
        text: str,
        operands: Mapping[str, Operand],
        hidden: Mapping[str, str],
        functions: Mapping[str, CudaFunction] | None = None,
    ) -> None:
        self.title, self.text, self.operands, self.hidden = title, text, operands, hidden
        self.functions = functions or {}
        self.graph = Graph(self.functions)
        self.used: set[str] = set()
        self.depth = 0

    def parse(self, wanted: Type) -> tuple[Node, str]:
        """The graph's root, of the wanted type, and the text as Python writes it."""
        if not self.text.strip():
            raise ArgumentError(
                f"{self.title}({self.text!r:.80}): is empty; write an expression, such as 's - 0.5 * abs(q - k)'"
            )
        if len(self.text) > MAX_TEXT:
            raise ArgumentError(
                f"{self.title}: the expression has {len(self.text)} characters, at most {MAX_TEXT} are read"
            )
        self.text = self.text.strip()
        if "#" in self.text:
            raise self.point("an expression has no comments", self.text.index("#"), len(self.text))
        try:
            tree = ast.parse(self.flat, mode="eval").body
        except SyntaxError as error:
            raise self.point(
                f"this is no expression ({error.msg})", (error.offset or len(self.text) + 1) - 1, 1
            ) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ArgumentError(f"{self.title}: the expression cannot be read ({error}); write a shorter one") from None
        try:
            root = self.visit(tree)
            canonical = ast.unparse(tree)
        except RecursionError:
            raise ArgumentError(f"{self.title}: the expression is nested too deeply; write a shorter one") from None
        if wanted == "bool" and root.type != "bool":
            raise self.error(
                tree, "a mask must be True where the key may be seen, this is a number; compare it, as in x > 0"
            )
        if wanted == "real":
            if root.type == "bool":
                raise self.error(
                    tree,
                    "a score must be a number, this is True or False; write where(..., s, -inf), or a MaskModifier",
                )
            root = self.graph.real(root)
        if unused := [name for name in (*self.operands, *self.functions) if name not in self.used]:
            raise ArgumentError(
                f"{self.title}: {unused[0]} is given and not in the expression {canonical!r}; leave it out"
            )
        self.check_size([root])
        return root, canonical

    def check_size(self, roots: Iterable[Node]) -> None:
        if len(reached(roots)) > MAX_NODES:
            raise ArgumentError(
                f"{self.title}: the expression and its derivatives take more than {MAX_NODES} operations; compute what does "
                "not depend on the score beforehand, into an array"
            )

    @property
    def flat(self) -> str:
        """The text in one line, each character at its place."""
        return "".join(" " if c.isspace() else c for c in self.text)

    # ---- errors ----
    def error(self, at: ast.AST, message: str) -> ArgumentError:
        """An error that points to a part of the text."""
        # Columns of the tree are bytes of UTF-8.
        first, last = (
            len(self.flat.encode()[:column].decode())
            for column in (at.col_offset, at.end_col_offset)  # type: ignore[attr-defined]
        )
        return self.point(message, first, last - first)

    def point(self, message: str, first: int, width: int) -> ArgumentError:
        """The same, with the line of a place in the text, and a mark below it."""
        first = min(first, len(self.text))
        before = self.text[:first].split("\n")
        line, column = self.text.split("\n")[len(before) - 1], len(before[-1])
        where = f"line {len(before)}, " if "\n" in self.text else ""
        mark = " " * column + "^" * max(1, min(width, len(line) - column))
        return ArgumentError(f"{self.title}, {where}column {column + 1}: {message}\n    {line}\n    {mark}")

    # ---- nodes ----
    def visit(self, at: ast.AST) -> Node:
        method: Callable[[Any], Node] | None = getattr(self, f"visit_{type(at).__name__.lower()}", None)
        if method is None:
            raise self.error(
                at,
                f"{type(at).__name__} is not part of these expressions; they have numbers, + - * / // % **, comparisons, "
                f"and, or, not, x if c else y, indexing, and {', '.join(FUNCTIONS)}",
            )
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(
                at, f"this is nested more than {MAX_DEPTH} deep; compute a part of it beforehand, into an array"
            )
        node = method(at)
        self.depth -= 1
        return node

    def visit_constant(self, at: ast.Constant) -> Node:
        x = at.value
        if isinstance(x, bool):
            return self.graph.node("const", "bool", value=x)
        if isinstance(x, int):
            if x > INT_MAX:
                raise self.error(at, f"{x} does not fit in 32 bits; write {x}.0 for a real number")
            return self.graph.node("const", "int", value=x)
        if isinstance(x, float):
            return self.graph.node("const", "real", value=x)
        raise self.error(at, f"{x!r:.40} is no number")

    def visit_name(self, at: ast.Name) -> Node:
        name = at.id
        if name in self.operands:
            self.used.add(name)
            operand = self.operands[name]
            if operand.axes is None:
                return self.graph.node("scalar", operand.type, value=name)
            index = {1: "h", 2: "q, k", 3: "h, q, k", 4: "b, h, q, k"}.get(operand.axes, "...")
            raise self.error(at, f"{name} is an array of {operand.axes} axes; index it, such as {name}[{index}]")
        if name in self.hidden:
            raise self.error(at, self.hidden[name])
        if name in NAMES:
            if name == "inf":
                return self.graph.number(float("inf"))
            return self.graph.node("name", NAMES[name], value=name)
        if name in FUNCTIONS or name in self.functions:
            raise self.error(at, f"{name} is a function; give it its arguments in brackets")
        known = [*(n for n in NAMES if n not in self.hidden), *self.operands]
        close = difflib.get_close_matches(name, [*known, *FUNCTIONS, *self.functions], 1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise self.error(
            at, f"unknown name {name}; {guess}there are {', '.join(known)}, and what is given as {name}=..."
        )

    def visit_unaryop(self, at: ast.UnaryOp) -> Node:
        x = self.visit(at.operand)
        if isinstance(at.op, ast.Not):
            return self.graph.node("not", "bool", self.condition(at.operand, x))
        if isinstance(at.op, ast.Invert):
            raise self.error(at, "~ is not part of these expressions; write not")
        self.numbers(at, at.operand, x)
        if isinstance(at.op, ast.UAdd):
            return x
        return self.graph.neg(x) if x.op == "const" and x.type == "real" else self.graph.node("neg", x.type, x)

    def visit_binop(self, at: ast.BinOp) -> Node:
        operator = type(at.op)
        if isinstance(at.op, (ast.BitAnd, ast.BitOr, ast.BitXor)):
            raise self.error(at, "& | ^ are not part of these expressions; write and, or, !=")
        x, y = self.visit(at.left), self.visit(at.right)
        self.numbers(at, at.left, x)
        self.numbers(at, at.right, y)
        if operator in ARITHMETIC:
            x, y = self.alike(x, y)
            return self.graph.node(ARITHMETIC[operator], x.type, x, y)
        if isinstance(at.op, ast.Div):
            return self.graph.node("div", "real", self.graph.real(x), self.graph.real(y))
        if operator in WHOLE:
            for side, value in ((at.left, x), (at.right, y)):
                if value.type != "int":
                    raise self.error(side, "// and % are for whole numbers, this is a real one; write floor(x / y)")
            return self.graph.node(WHOLE[operator], "int", x, y)
        if isinstance(at.op, ast.Pow):
            power = at.right.value if isinstance(at.right, ast.Constant) else None
            if type(power) is not int or not 1 <= power <= MAX_POWER:
                raise self.error(
                    at.right, f"the exponent must be a number from 1 to {MAX_POWER}; write exp(y * log(x)) for others"
                )
            result = x
            for _ in range(power - 1):
                result = self.graph.node("mul", x.type, result, x)
            return result
        raise self.error(at, f"{operator.__name__} is not part of these expressions")

    def visit_compare(self, at: ast.Compare) -> Node:
        sides = [at.left, *at.comparators]
        nodes = [self.visit(side) for side in sides]
        parts = []
        for i, operator in enumerate(at.ops):
            x, y = nodes[i], nodes[i + 1]
            if type(operator) not in COMPARISONS:
                raise self.error(at, "only < <= > >= == != compare")
            op = COMPARISONS[type(operator)]
            if x.type == "bool" or y.type == "bool":
                if x.type != y.type or op not in ("eq", "ne"):
                    raise self.error(at, "True and False compare by == and != with each other alone")
            else:
                x, y = self.alike(x, y)
            parts.append(self.graph.node(op, "bool", x, y))
        return self.joined("and", parts)

    def visit_boolop(self, at: ast.BoolOp) -> Node:
        op = "and" if isinstance(at.op, ast.And) else "or"
        return self.joined(op, [self.condition(value, self.visit(value)) for value in at.values])

    def joined(self, op: str, parts: list[Node]) -> Node:
        first, *rest = parts
        for x in rest:
            first = self.graph.node(op, "bool", first, x)
        return first

    def visit_ifexp(self, at: ast.IfExp) -> Node:
        return self.choice(at, at.test, at.body, at.orelse)

    def visit_call(self, at: ast.Call) -> Node:
        if isinstance(at.func, ast.Name) and at.func.id in self.functions:
            return self.visit_function(at, at.func.id)
        if not isinstance(at.func, ast.Name) or at.func.id not in FUNCTIONS:
            name = ast.unparse(at.func)
            known = [*FUNCTIONS, *self.functions]
            close = difflib.get_close_matches(name, known, 1)
            guess = f"did you mean {close[0]}? " if close else ""
            raise self.error(at.func, f"{name:.40} is no function here; {guess}there are {', '.join(known)}")
        name = at.func.id
        least, most = FUNCTIONS[name]
        if at.keywords or any(isinstance(x, ast.Starred) for x in at.args) or not least <= len(at.args) <= most:
            count = f"{least}" if least == most else f"{least} to {most}"
            raise self.error(at, f"{name} takes {count} argument{'s' * (most > 1)}")
        if name == "where":
            return self.choice(at, *at.args)
        nodes = [self.visit(x) for x in at.args]
        for side, x in zip(at.args, nodes, strict=True):
            self.numbers(at, side, x)
        if name in ("min", "max"):
            return self.extreme(name, nodes)
        (x,) = nodes
        if name == "abs":
            return self.graph.node("abs", x.type, x)
        if name == "int":
            return x if x.type == "int" else self.graph.node("int", "int", x)
        return self.graph.node(name, "real", self.graph.real(x))

    def visit_function(self, at: ast.Call, name: str) -> Node:
        """A call of a function in CUDA."""
        self.used.add(name)
        function = self.functions[name]
        signature = function.signature
        if at.keywords or any(isinstance(x, ast.Starred) for x in at.args):
            raise self.error(at, f"{name} takes its arguments in order: it is {signature.text(function.name)}")
        if len(at.args) != len(signature.parameters):
            raise self.error(
                at,
                f"{name} has {len(at.args)} arguments here, and is {signature.text(function.name)} of {function.title}",
            )
        nodes = []
        for side, (parameter, kind) in zip(at.args, signature.parameters, strict=True):
            x = self.visit(side)
            if kind == "real" and x.type == "int":
                x = self.graph.real(x)
            if x.type != kind:
                hint = "; int(x) rounds towards 0" if (kind, x.type) == ("int", "real") else ""
                raise self.error(
                    side,
                    f"{parameter} of {signature.text(function.name)} is {KINDS[kind]}, this is {KINDS[x.type]}{hint}",
                )
            nodes.append(x)
        return self.graph.node("call", signature.value, *nodes, value=(name, function.name))

    def visit_subscript(self, at: ast.Subscript) -> Node:
        if not isinstance(at.value, ast.Name):
            raise self.error(at.value, "only an array that is given by name can be indexed")
        name = at.value.id
        if name not in self.operands:
            self.visit(at.value)  # an unknown name says so
            raise self.error(at.value, f"{name} is {KINDS[NAMES.get(name, 'int')]} and cannot be indexed")
        operand = self.operands[name]
        if operand.axes is None:
            raise self.error(at.value, f"{name} is a number and cannot be indexed")
        self.used.add(name)
        index = at.slice.elts if isinstance(at.slice, ast.Tuple) else [at.slice]
        if len(index) != operand.axes:
            raise self.error(at, f"{name} has {operand.axes} axes, and this is an index for {len(index)}")
        nodes = []
        for part in index:
            if isinstance(part, ast.Slice):
                raise self.error(at, "a slice is no element; index each axis by a whole number")
            x = self.visit(part)
            if x.type != "int":
                raise self.error(
                    part, f"an index must be a whole number, this is {KINDS[x.type]}; int(x) rounds towards 0"
                )
            nodes.append(x)
        load = self.graph.node("load", operand.type, *nodes, value=name)
        slots = slots_of(load)
        if slots is None:
            raise self.error(
                at, f"{name} has more than two axes whose index is not just b or h; join some of them to one"
            )
        return load

    # ---- types ----
    def choice(self, at: ast.AST, test: ast.AST, yes: ast.AST, no: ast.AST) -> Node:
        condition = self.condition(test, self.visit(test))
        x, y = self.visit(yes), self.visit(no)
        if (x.type == "bool") != (y.type == "bool"):
            raise self.error(at, f"both values must be of one kind: one is {KINDS[x.type]}, the other {KINDS[y.type]}")
        if x.type != "bool":
            x, y = self.alike(x, y)
        return self.graph.node("where", x.type, condition, x, y)

    def extreme(self, name: str, nodes: list[Node]) -> Node:
        """As Python's own: the first one that no other one is less, or more, than."""
        if any(x.type == "real" for x in nodes):
            nodes = [self.graph.real(x) for x in nodes]
        best = nodes[0]
        for x in nodes[1:]:
            better = (x, best) if name == "min" else (best, x)
            best = self.graph.where(self.graph.node("lt", "bool", *better), x, best)
        return best

    def condition(self, at: ast.AST, x: Node) -> Node:
        if x.type != "bool":
            raise self.error(
                at, f"a condition must be True or False, this is {KINDS[x.type]}; compare it, as in x != 0"
            )
        return x

    def numbers(self, whole: ast.AST, at: ast.AST, x: Node) -> None:
        if x.type == "bool":
            raise self.error(at, "arithmetic with True or False; write where(..., 1, 0) for a number")

    def alike(self, x: Node, y: Node) -> tuple[Node, Node]:
        return (x, y) if x.type == y.type else (self.graph.real(x), self.graph.real(y))


# ---- where an array's elements are ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Slots:
    """Which axis of an array goes by batch entry, by head, and by the two that are left; None where none does.

    `row` and `column` go by the positions q and k, unless they are `computed`: then by an expression.
    """

    batch: int | None
    head: int | None
    row: int | None
    column: int | None
    row_computed: bool
    column_computed: bool

    @property
    def is_table(self) -> bool:
        return self.row_computed or self.column_computed


def slots_of(load: Node) -> Slots | None:
    """Slots of the axes of an access; None if there are more computed indices than slots."""
    plain: dict[str, int] = {}
    computed = []
    for axis, index in enumerate(load.args):
        name = index.value if index.op == "name" else ""
        if name in ("b", "h", "q", "k") and name not in plain:
            plain[name] = axis
        else:
            computed.append(axis)
    free = [side for side, name in (("row", "q"), ("column", "k")) if name not in plain]
    if len(computed) > len(free):
        return None
    taken = dict(zip(free, computed, strict=False))
    return Slots(
        plain.get("b"),
        plain.get("h"),
        taken.get("row", plain.get("q")),
        taken.get("column", plain.get("k")),
        "row" in taken,
        "column" in taken,
    )


# ---- in NumPy --------------------------------------------------------------------------------------------------------
def evaluate(roots: Iterable[Node], real: np.dtype[Any], leaf: Callable[[Node, tuple[Any, ...]], Any]) -> list[Any]:
    """Values of nodes; `leaf` gives those of names, numbers, elements of arrays and calls, the latter two for their arguments."""
    values: dict[Node, Any] = {}
    roots = list(roots)
    with np.errstate(all="ignore"):
        for x in reached(roots):
            arguments = tuple(values[a] for a in x.args)
            if x.op == "const":
                values[x] = number_type(x.type, real)(x.value)
            elif x.op in ("name", "scalar", "load", "call"):
                values[x] = leaf(x, arguments)
            elif x.op == "real":
                values[x] = arguments[0].astype(real)
            else:
                values[x] = NUMPY[x.op](*arguments)
    return [values[root] for root in roots]


def number_type(kind: Type, real: np.dtype[Any]) -> Callable[[Any], Any]:
    """NumPy's type of the numbers of a type."""
    types: dict[Type, Callable[[Any], Any]] = {"int": np.int32, "real": real.type, "bool": np.bool_}
    return types[kind]


def whole(x: Any) -> Any:
    """A real number as an integer, towards 0; NaN as 0."""
    x = np.where(np.isnan(x), x.dtype.type(0), x)
    return np.clip(x, -REAL_INT, REAL_INT).astype(np.int32)


NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "where": np.where,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "int": whole,
}

# ---- in CUDA ---------------------------------------------------------------------------------------------------------
C_TYPES: dict[Type, str] = {"int": "int", "real": "Real", "bool": "bool"}
#: by operation and type of the first operand
CUDA: dict[str, str] = {
    "add int": "int(u32({0}) + u32({1}))",
    "sub int": "int(u32({0}) - u32({1}))",
    "mul int": "int(u32({0}) * u32({1}))",
    "neg int": "int(0u - u32({0}))",
    "abs int": "({0} < 0 ? int(0u - u32({0})) : {0})",
    "add real": "{0} + {1}",
    "sub real": "{0} - {1}",
    "mul real": "{0} * {1}",
    "div real": "{0} / {1}",
    "neg real": "-{0}",
    "abs real": "fabs({0})",
    "floordiv int": "floor_divided({0}, {1})",
    "mod int": "floor_remainder({0}, {1})",
    "and bool": "{0} && {1}",
    "or bool": "{0} || {1}",
    "not bool": "!{0}",
    "where bool": "{0} ? {1} : {2}",
    "share real": "{0} * (Real(1) / {1})",
    "real int": "Real({0})",
    "int real": "whole({0})",
    **{f"{name} real": f"{name}_of({{0}})" for name in ("exp", "log", "tanh", "sqrt", "floor")},
    **{
        f"{op} {kind}": f"{{0}} {sign} {{1}}"
        for op, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items()
        for kind in ("int", "real", "bool")
    },
}


class Text:
    """CUDA statements that compute nodes, each once."""

    def __init__(self, leaf: Callable[[Node, tuple[str, ...]], str]) -> None:
        self.leaf = leaf
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}

    def of(self, root: Node) -> str:
        """The name of a node's value, behind the statements that compute it."""
        for x in reached([root]):
            if x in self.names:
                continue
            arguments = tuple(self.names[a] for a in x.args)
            if x.op == "const":
                self.names[x] = literal(x)
            elif x.op in ("name", "scalar"):
                self.names[x] = self.leaf(x, arguments)
            else:
                plain = x.op not in ("load", "call")
                # What numbers divide by is the same for all elements, and so is its reciprocal: the compiler takes it once.
                op = "share" if x.op == "div" and x.args[1].op in ("scalar", "const") else x.op
                form = CUDA[f"{op} {x.args[0].type}"].format(*arguments) if plain else self.leaf(x, arguments)
                self.names[x] = f"x{len(self.lines)}"
                self.lines.append(f"const {C_TYPES[x.type]} {self.names[x]} = {form};")
        return self.names[root]


def literal(x: Node) -> str:
    if x.type == "bool":
        return str(x.value).lower()
    if x.type == "int":
        return str(x.value)
    if np.isinf(x.value):
        return "infinity<Real>()" if x.value > 0 else "(-infinity<Real>())"
    return f"Real({float(x.value)!r})"
