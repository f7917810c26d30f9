"""Functions in CUDA that users write, for expressions to call: what takes statements, loops or a derivative of one's own.

The expression around a function stays data; the function is a program, compiled and run as it stands.  Before anything is
compiled its text is looked at: for the functions that it is said to have, their types, and what would spill into the text
around it.  The compiler's messages point into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash.errors import ArgumentError, UnsupportedError
from cuflash.modifiers.expression import C_TYPES, Type

TYPES: dict[str, Type] = {name: kind for kind, name in C_TYPES.items()}
REAL = "Real is float, or double where the arrays are float64"
MAX_TEXT = 20000  # characters

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTION = re.compile(r"((?:[A-Za-z_][\w:]*[\s*&]+)+)([A-Za-z_]\w*)\s*\(([^()]*)\)\s*\{")
_LOOP = re.compile(r"\b(?:for|while|do|goto)\b")
_QUALIFIERS = {"static", "inline", "constexpr", "const", "__device__", "__host__", "__forceinline__", "__noinline__"}


class Signature(NamedTuple):
    """Types of a function's value and parameters, the latter by name."""

    value: Type
    parameters: tuple[tuple[str, Type], ...]

    def text(self, name: str) -> str:
        return f"{name}({', '.join(f'{C_TYPES[kind]} {x}' for x, kind in self.parameters)})"


@dataclass(frozen=True)
class CudaFunction:
    """A function in CUDA with its derivatives, which expressions of modifiers call.

    Parameters
    ----------
    source
        CUDA C++: the function and whatever else it needs.  Values and parameters are ``Real`` (float, or double where the
        arrays are float64), ``int`` or ``bool``.  All functions of CUDA's math library are there; no header is needed, and
        lines that begin with # are refused.
    name
        The function in `source`, as for ``cupy.RawKernel``.
    derivatives
        By parameter, the function in `source` that is the derivative by it: the same parameters, and a Real value.  Only what is
        asked for needs one: a parameter that the score enters, or an array whose gradient is named.
    twins
        By name, NumPy functions that do the same for arrays, of `name` and of every derivative: what NumPy arrays are computed
        with.  Without them there is no attention on the host with this function.

    Raises
    ------
    ArgumentError
        `source` has no such function, or one whose types do not fit.

    Notes
    -----
    Unlike an expression, `source` is a program: take it from nobody whose programs you would not run.  Whether it compiles shows
    at the first use on a GPU: a `CompileError` points to its line.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> bent = cuflash.CudaFunction(
    ...     '''
    ...     Real bent(Real s, Real c) { return s < c ? s : c + log(Real(1) + s - c); }
    ...     Real bent_by_s(Real s, Real c) { return s < c ? Real(1) : Real(1) / (Real(1) + s - c); }
    ...     ''',
    ...     "bent",
    ...     derivatives={"s": "bent_by_s"},
    ...     twins={
    ...         "bent": lambda s, c: np.where(s < c, s, c + np.log(1 + s - c)),
    ...         "bent_by_s": lambda s, c: np.where(s < c, 1, 1 / (1 + s - c)),
    ...     },
    ... )
    >>> q = k = v = np.ones((1, 4, 8))
    >>> cuflash.attention(q, k, v, modifiers=(cuflash.ScoreModifier("bent(s, c)", bent=bent, c=0.5),)).shape
    (1, 4, 8)
    """

    source: str
    name: str
    derivatives: Mapping[str, str] = field(default_factory=dict, hash=False)
    twins: Mapping[str, Callable[..., Any]] = field(default_factory=dict, compare=False, hash=False, repr=False)

    def __post_init__(self) -> None:
        title = f"CudaFunction {self.name!r:.80}"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ArgumentError(f"{title}: must be the name of a function in source")
        if not isinstance(self.source, str) or len(self.source) > MAX_TEXT:
            raise ArgumentError(f"{self.title}: source must be a text of CUDA, of at most {MAX_TEXT} characters")
        for given in ("derivatives", "twins"):
            if not isinstance(getattr(self, given), Mapping):
                raise ArgumentError(f"{self.title}: {given}={getattr(self, given)!r:.80} must be a mapping")
            object.__setattr__(self, given, dict(getattr(self, given)))
        code = self.code()
        self.check_text(code)
        signature = self.parsed(code, self.name)
        object.__setattr__(self, "_signature", signature)
        for parameter, name in self.derivatives.items():
            if dict(signature.parameters).get(parameter) != "real":
                reals = ", ".join(x for x, kind in signature.parameters if kind == "real") or "none"
                raise ArgumentError(
                    f"{self.title}: derivatives names {parameter!r:.40}, which is no Real parameter of "
                    f"{signature.text(self.name)}; there are: {reals}"
                )
            if not isinstance(name, str):
                raise ArgumentError(f"{self.title}: derivatives[{parameter!r}]={name!r:.80} must be a name in source")
            own = self.parsed(code, name)
            if [kind for _, kind in own.parameters] != [kind for _, kind in signature.parameters]:
                raise ArgumentError(
                    f"{self.title}: the derivative {own.text(name)} must have the parameters of {signature.text(self.name)}"
                )
            if own.value != "real":
                raise ArgumentError(f"{self.title}: the derivative {name} must return Real")
        if signature.value != "real" and self.derivatives:
            raise ArgumentError(
                f"{self.title}: returns {C_TYPES[signature.value]}, which has no derivatives; leave them out"
            )
        names = {self.name, *self.derivatives.values()}
        if self.twins and set(self.twins) != names:
            raise ArgumentError(
                f"{self.title}: twins has {', '.join(map(str, self.twins))}; give one for each of "
                f"{', '.join(sorted(names))}, or none at all"
            )
        for name, twin in self.twins.items():
            if not callable(twin):
                raise ArgumentError(f"{self.title}: twins[{name!r}]={twin!r:.80} must be a function of arrays")

    def __hash__(self) -> int:
        return hash((self.source, self.name))

    @property
    def title(self) -> str:
        """What messages call it, the compiler's too."""
        return f"CudaFunction {self.name}"

    @property
    def signature(self) -> Signature:
        found: Signature = self._signature  # type: ignore[attr-defined]
        return found

    @property
    def identity(self) -> tuple[Any, ...]:
        """All of it that is compiled in."""
        return self.source, self.name, tuple(sorted(self.derivatives.items()))

    def derivative(self, parameter: str) -> str:
        """Name of the derivative by a parameter."""
        if parameter not in self.derivatives:
            raise ArgumentError(
                f"{self.title}: the derivative by {parameter} is needed and not given; "
                f"write it into source and pass derivatives={{{parameter!r}: its name}}"
            )
        return self.derivatives[parameter]

    # ---- the text --------------------------------------------------------------------------------------------------
    def code(self) -> str:
        """The text with blanks in place of comments and strings, each line where it was."""
        return _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), self.source)

    def at(self, code: str, position: int, message: str) -> ArgumentError:
        """An error that names a line of the text and shows it."""
        line = code.count("\n", 0, position) + 1
        return ArgumentError(f"{self.title}, line {line}: {message}\n    {self.line(line).strip()}")

    def line(self, number: int) -> str:
        lines = self.source.split("\n")
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def check_text(self, code: str) -> None:
        """Raise where the text would change what stands around it."""
        if found := re.search(r"^\s*(?:#|%:|\?\?=)", code, re.MULTILINE):
            raise self.at(
                code,
                found.end() - 1,
                "has a line for the preprocessor; no header is needed for CUDA's functions, write constants as constexpr",
            )
        if found := re.search(r"\\\s*$", self.source, re.MULTILINE):
            raise self.at(self.source, found.start(), "ends in \\; join the lines")
        depth: list[int] = []
        for found in re.finditer(r"[{}]", code):
            if found[0] == "{":
                depth.append(found.start())
            elif not depth:
                raise self.at(code, found.start(), "closes a brace that was never opened")
            else:
                depth.pop()
        if depth:
            raise self.at(code, depth[-1], "opens a brace that is never closed")
        if "/*" in code or "'" in code or '"' in code:
            position = min(i for i in map(code.find, ("/*", "'", '"')) if i >= 0)
            raise self.at(code, position, "begins a comment or string that never ends")

    def parsed(self, code: str, name: str) -> Signature:
        """Types of a function that the text defines outside of others."""
        found = [x for x in definitions(code) if x[1] == name]
        if not found:
            known = ", ".join(dict.fromkeys(x[1] for x in definitions(code))) or "none"
            raise ArgumentError(f"{self.title}: source defines no function {name:.80}; it defines: {known}")
        if len(found) > 1:
            raise self.at(code, found[1][3], f"defines {name} a second time; give each function a name of its own")
        value, _, parameters, position = found[0]
        kinds = [self.typed(code, position, part) for part in parameters.split(",")] if parameters.strip() else []
        value_type = self.type_of(code, position, value.split(), f"{name} returns")
        if len(dict(kinds)) < len(kinds):
            raise self.at(code, position, f"two parameters of {name} have one name")
        return Signature(value_type, tuple(kinds))

    def typed(self, code: str, position: int, parameter: str) -> tuple[str, Type]:
        *words, name = parameter.split() or [""]
        if not _NAME.fullmatch(name) or not words:
            raise self.at(
                code, position, f"the parameter {parameter.strip()!r:.40} must be a type and a name, such as Real s"
            )
        return name, self.type_of(code, position, words, f"the parameter {name} is")

    def type_of(self, code: str, position: int, words: list[str], what: str) -> Type:
        kept = [word for word in words if word not in _QUALIFIERS]
        if len(kept) == 1 and kept[0] in TYPES:
            return TYPES[kept[0]]
        raise self.at(code, position, f"{what} {' '.join(kept) or 'of no type'}: must be Real, int or bool; {REAL}")

    def cuda(self, namespace: str) -> str:
        """The text for a kernel's source; a compiler's messages name the function in place of a file.

        What loops is called, not pasted: a kernel calls it for each of the scores that a thread holds, and the assembler's time
        grows with more than the length of what it is given (a loop of divisions took Hopper's backward four minutes).
        """
        text = self.source
        for start in reversed(list(loops(self.code()))):
            text = f"{text[:start]}__noinline__ {text[start:]}"
        return f'namespace {namespace} {{\n#line 1 "{self.title}"\n{text}\n}}'

    # ---- the NumPy twins -------------------------------------------------------------------------------------------
    def check_twins(self, title: str) -> None:
        if not self.twins:
            names = ", ".join(f"{name!r}: ..." for name in dict.fromkeys((self.name, *self.derivatives.values())))
            raise UnsupportedError(
                f"{title} on the host: {self.title} has no twins, and the numpy backend and the reference run no CUDA; give "
                f"twins={{{names}}}, or arrays on a GPU"
            )

    def computed(self, name: str, arguments: tuple[Any, ...], kind: Type, real: np.dtype[Any]) -> NDArray[Any]:
        """What a twin makes of arrays."""
        found = np.asarray(self.twins[name](*arguments))
        wanted = {"real": "fiu", "int": "iu", "bool": "b"}[kind]
        if found.dtype.kind not in wanted:
            raise ArgumentError(
                f"{self.title}: twins[{name!r}] returned dtype {found.dtype}, and the function's value is {C_TYPES[kind]}"
            )
        types: dict[Type, np.dtype[Any]] = {"real": real, "int": np.dtype(np.int32), "bool": np.dtype(np.bool_)}
        return found.astype(types[kind], copy=False)


def functions_of(code: str) -> Iterator[re.Match[str]]:
    """Each function that is defined outside of others, up to its brace: type, name and parameters."""
    outside, depth = [], 0
    for c in code:
        depth -= c == "}"
        outside.append(c if depth == 0 or c == "\n" else " ")
        depth += c == "{"
    yield from _FUNCTION.finditer("".join(outside))


def definitions(code: str) -> Iterator[tuple[str, str, str, int]]:
    """Type, name, parameters and place of each of them."""
    for found in functions_of(code):
        yield found[1], found[2], found[3], found.start(2)


def loops(code: str) -> Iterator[int]:
    """Where each of them begins that has a loop, unless its author says whether it is to be inlined."""
    for found in functions_of(code):
        depth, end = 1, found.end()
        while depth and end < len(code):
            depth += (code[end] == "{") - (code[end] == "}")
            end += 1
        decided = {"__noinline__", "__forceinline__"} & set(found[1].split())
        if not decided and _LOOP.search(code, found.end(), end):
            yield found.start()


_MESSAGE = re.compile(r"^(CudaFunction \w+)\((\d+)\): ((?:catastrophic )?error: .*)$", re.MULTILINE)


def located(log: str, functions: Mapping[str, CudaFunction]) -> str:
    """What a compiler's log says about functions, by title, with their lines; empty where the fault is elsewhere."""
    found = []
    for title, number, message in _MESSAGE.findall(log):
        if title in functions:
            text = functions[title].line(int(number)).strip()
            found.append(f"{title}, line {number}: {message.partition(': ')[2]}\n    {text}")
    return "\n".join(found)
