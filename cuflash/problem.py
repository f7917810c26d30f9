"""Problem: the frozen, hashable description of one call, and the only place that validates what a user passes.

`describe` takes native arrays (NumPy or CuPy) and options, checks them, and returns a `Call`: the problem, and the
arrays as views with the axes (*batch, heads, seq, dim).  Nothing here computes or launches.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from typing import Any, Literal, cast

import numpy as np

from cuflash.errors import ArgumentError, ShapeError, UnsupportedError
from cuflash.modifiers import (
    ALiBi,
    Bias,
    BlockMask,
    Causal,
    Documents,
    Dropout,
    KeyLengths,
    Mask,
    Modifier,
    Packed,
    Scales,
    Sinks,
    Softcap,
    Window,
    Written,
)

Layout = Literal["bhsd", "bshd"]
Precision = Literal["tf32"]
Alignment = Literal["bottom_right", "top_left"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
NARROW = "float8_e4m3fn"  # of inputs alone, with `Scales`
OUT_DTYPES = ("bfloat16", "float16")  # of what is computed from such
MAX_SEQ = 1 << 30  # positions are 32-bit in the kernels; sums of two stay below 2^31
#: how messages name dtypes in whose arrays bits of others may lie
BITS = {
    "uint16": "the bits of bfloat16 with .view(ml_dtypes.bfloat16), others ",
    "uint8": f"the bits of {NARROW} with .view(ml_dtypes.{NARROW}), others ",
}
FLOAT32 = np.finfo(np.float32)
FLOAT64 = np.finfo(np.float64)

#: how messages name the operands that are fields of a modifier
OPERANDS = {
    "key_lengths": "lengths of KeyLengths",
    "alibi_slopes": "slopes of ALiBi",
    "document_q": "ids_q of Documents",
    "document_k": "ids_k of Documents",
    "block_mask": "blocks of BlockMask",
    "sinks": "logits of Sinks",
}


#: fields of modifiers that expressions made (modifiers/written.py)
WRITTEN = re.compile(r"(score|mask)_[0-9a-f]{16}_at\d+_(\w+)")


def operand_title(name: str) -> str:
    """What messages call an operand."""
    if found := WRITTEN.fullmatch(name):
        return f"{found[2]} of {found[1].capitalize()}Modifier"
    return OPERANDS.get(name, name)


@dataclass(frozen=True)
class Problem:
    """One call without its arrays: shapes, dtype, scale and modifiers; what a plan is made from."""

    dtype: str
    batch: tuple[int, ...]
    heads_q: int
    heads_k: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int
    scale: float
    alignment: Alignment = "bottom_right"
    modifiers: tuple[Modifier, ...] = ()
    layout: Layout = "bhsd"
    precision: Precision | None = None  # of products; None is that of the dtype

    @property
    def batch_size(self) -> int:
        """Product of the batch axes."""
        return math.prod(self.batch)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_k

    @property
    def is_packed(self) -> bool:
        """Whether seq_q and seq_k are those of many sequences, one after the other."""
        return any(isinstance(m, Packed) for m in self.modifiers)

    @property
    def longest_q(self) -> int:
        """The number of queries that tiles are chosen for.

        Packed sequences have the tiles of long ones, whatever their lengths: so the bits of a sequence do not depend on
        what it is packed with.
        """
        return MAX_SEQ if self.is_packed else self.seq_q

    @property
    def longest_k(self) -> int:
        """The same for keys."""
        return MAX_SEQ if self.is_packed else self.seq_k

    @property
    def diagonal(self) -> int:
        """Query i stands at key position i + diagonal, for causal, windows and distances; packed sequences add their own."""
        return self.seq_k - self.seq_q if self.alignment == "bottom_right" and not self.is_packed else 0

    @property
    def scales(self) -> Scales | None:
        """What the elements of 8-bit arrays count; None for others."""
        return next((m for m in self.modifiers if isinstance(m, Scales)), None)

    @property
    def out_dtype(self) -> str:
        """dtype of the output."""
        return scales.out_dtype if (scales := self.scales) else self.dtype

    @property
    def accumulator(self) -> str:
        """dtype of sums, statistics and lse."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def score_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.heads_q, self.seq_q, self.seq_k)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Axes (*batch, heads_q, seq_q, head_dim_v), before the layout."""
        return (*self.batch, self.heads_q, self.seq_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.heads_q, self.seq_q)

    def __str__(self) -> str:
        """One line: dtype, shapes, scale and modifiers."""
        q = (*self.batch, self.heads_q, self.seq_q, self.head_dim)
        k = (*self.batch, self.heads_k, self.seq_k, self.head_dim)
        shapes = f"{self.dtype} q {q}, k {k}, v {(*k[:-1], self.head_dim_v)}, scale {self.scale:.6g}"
        return ", ".join([shapes, *map(repr, self.modifiers), self.alignment, self.layout])

    def modifier(self, name: str) -> Modifier | None:
        """The modifier of that name, if the call has it."""
        return next((m for m in self.modifiers if m.name == name), None)


@dataclass(frozen=True)
class Call:
    """A problem and the arrays it was described from, as views with the axes (*batch, heads, seq, dim).

    `operands` holds the modifiers' arrays by field name, with the axes (*batch, heads_q, seq_q, seq_k); a length of 1
    is broadcast.  `numbers` holds integers of theirs that are no part of the problem.  Of a call that was cut out of another,
    `first_entry` is the number that its first batch entry has there.
    """

    problem: Problem
    q: Any
    k: Any
    v: Any
    operands: Mapping[str, Any]
    numbers: Mapping[str, int] = field(default_factory=dict)
    first_entry: int = 0


def for_twins(call: Call) -> Call:
    """The call with what the modifiers' twins read besides, and what 8-bit arrays stand for in place of these."""
    operands = dict(call.operands)
    for m in call.problem.modifiers:
        operands |= m.twin_operands(call.problem, call.operands, call.numbers, call.first_entry)
    q, k, v = call.q, call.k, call.v
    if (scales := call.problem.scales) is not None:
        q, k, v = scales.dequantised(q, k, v, operands)
    return replace(call, q=q, k=k, v=v, operands=operands)


def canonical(array: Any, layout: Layout) -> Any:
    """View with the axes (*batch, heads, seq, dim); its own inverse."""
    return array.swapaxes(-3, -2) if layout == "bshd" else array


def in_layout(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The shape that axes (*batch, heads, seq, dim) have in a layout; its own inverse."""
    *batch, heads, seq, dim = shape
    return (*batch, seq, heads, dim) if layout == "bshd" else shape


def describe(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    precision: str | None = None,
    packed: Packed | None = None,
    scales: Scales | None = None,
) -> Call:
    """Validate one call's arguments; raises an `ArgumentError` that names the argument, its value and the remedy."""
    layout = check_layout(layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 3:
            raise ShapeError(
                f"{name} has shape {x.shape}: at least 3 axes are needed, (..., heads, seq, head_dim) in layout "
                f"{layout!r}; add an axis of length 1 for a single head"
            )
    dtype = check_dtypes(q, k, v, narrow=scales is not None and packed is None)
    if dtype != NARROW:
        scales = None
    q, k, v = canonical(q, layout), canonical(k, layout), canonical(v, layout)
    check_shapes(q, k, v, layout)
    *batch, heads_q, seq_q, head_dim = q.shape
    *_, heads_k, seq_k, head_dim_v = v.shape
    alignment, chain = positions(causal, window)
    if softcap is not None:
        chain.append(Softcap(softcap_of(softcap, dtype)))
    if bias is not None:
        if any(isinstance(m, Written) and "bias" in m.gradients for m in modifiers):
            raise ArgumentError(
                "the gradient of a ScoreModifier and that of bias are both called dbias: rename its array"
            )
        chain.append(Bias(array=bias))
    if mask is not None:
        chain.append(Mask(array=mask))
    chain.extend(user_modifiers(modifiers))
    if packed is not None:
        check_packable(chain)
        chain.append(packed)
    if scales is not None:
        chain.append(scales)
    chain = sorted((m for m in chain if not (isinstance(m, Dropout) and m.threshold == 0)), key=lambda m: m.order)
    problem = Problem(
        dtype=dtype,
        batch=tuple(batch),
        heads_q=heads_q,
        heads_k=heads_k,
        seq_q=seq_q,
        seq_k=seq_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=head_dim**-0.5 if scale is None else finite("scale", scale, dtype),
        alignment=alignment,
        modifiers=tuple(m.bare() for m in chain),
        layout=layout,
        precision=check_precision(precision, dtype),
    )
    if scales is not None and (factor := scales.logit_scale) != 1:
        problem = replace(problem, scale=finite("scale times q_scale and k_scale", problem.scale * factor, dtype))
    operands = {name: operand(m, name, x, problem) for m in chain for name, x in m.arrays().items()}
    return Call(problem, q, k, v, operands, {name: x for m in chain for name, x in m.numbers().items()})


def describe_packed(q: Any, k: Any, v: Any, packed: Packed, **options: Any) -> Call:
    """The same for sequences packed along the first axis of q, k and v; offsets are checked already (arrays.py)."""
    check_packed_shapes(q, k, v)
    return describe(q, k, v, layout="bshd", packed=packed, **options)


def check_packed_shapes(q: Any, k: Any, v: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ShapeError(
                f"{name} has shape {x.shape}: packed sequences have the 3 axes (total, heads, head_dim); arrays with batch "
                "axes are for attention"
            )
    if misfit := shape_misfit(*(canonical(x, "bshd").shape for x in (q, k, v))):
        reason, remedy = misfit
        raise ShapeError(
            f"{reason}: q {q.shape}, k {k.shape}, v {v.shape} with axes (total, heads, head_dim), where seq is total; {remedy}"
        )


def check_packable(chain: Iterable[Modifier]) -> None:
    """Raise where a modifier's array has no meaning yet beside packed sequences."""
    for m in chain:
        what = m.packed_refusal() if isinstance(m, Written) else None
        if what or isinstance(m, (Bias, Mask, KeyLengths, Documents, BlockMask)):
            raise UnsupportedError(
                f"{f'{what} in ' if what else ''}{m.title} with packed sequences: no backend offers it; ALiBi, Sinks, Dropout, "
                "causal, window and softcap go with them, and attention takes one sequence, or a batch of padded ones, with any "
                "modifier"
            )


def check_layout(layout: Any) -> Layout:
    if not isinstance(layout, str) or layout not in ("bhsd", "bshd"):
        raise ArgumentError(f"layout={layout!r}: must be 'bhsd' (heads before seq) or 'bshd' (seq before heads)")
    return cast(Layout, layout)


def check_precision(precision: Any, dtype: str) -> Precision | None:
    """The precision of products that was asked for; raises where it has no meaning."""
    if precision is None:
        return None
    if not isinstance(precision, str) or precision != "tf32":
        raise ArgumentError(
            f"precision={precision!r:.80}: must be None, which is that of the dtype, or 'tf32' for float32 arrays"
        )
    if dtype != "float32":
        raise ArgumentError(f"precision='tf32' with {dtype} arrays: it is for float32; leave it out")
    return "tf32"


@cache
def dtype_name(dtype: Any) -> str:
    """The dtype as `DTYPES` spells it; NumPy takes microseconds for a name."""
    return str(dtype)


def refuse_narrow(*arrays: Any) -> None:
    """Raise where an array has 8-bit elements, which the forward alone takes."""
    for x in arrays:
        if dtype_name(getattr(x, "dtype", None)).rpartition(".")[2] == NARROW:
            raise UnsupportedError(
                f"{NARROW} arrays: attention and explain alone take them, without gradients, statistics, packed sequences or "
                "caches; convert them with astype and multiply them with their scales"
            )


def check_dtypes(q: Any, k: Any, v: Any, names: tuple[str, str, str] = ("q", "k", "v"), *, narrow: bool = False) -> str:
    """The one dtype of q, k and v, which the caller knows by these names; `narrow` tells that it may be the 8-bit one."""
    dtypes = {name: dtype_name(x.dtype) for name, x in zip(names, (q, k, v), strict=True)}
    for name, dtype in dtypes.items():
        if dtype not in (*DTYPES, NARROW):
            bits = BITS.get(dtype, "")
            raise ArgumentError(
                f"{name} has dtype {dtype}: must be one of {', '.join(DTYPES)}; convert it, {bits}with astype"
            )
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{n} {d}" for n, d in dtypes.items())
        raise ArgumentError(
            f"{names[0]}, {names[1]} and {names[2]} must have one dtype, found {found}; convert them to a common one"
        )
    if not narrow:
        refuse_narrow(q)
    return dtypes[names[0]]


def check_shapes(q: Any, k: Any, v: Any, layout: str) -> None:
    if misfit := shape_misfit(q.shape, k.shape, v.shape):
        reason, remedy = misfit
        order = "" if layout == "bhsd" else f", layout {layout!r} brought to this order"
        raise ShapeError(
            f"{reason}: q {q.shape}, k {k.shape}, v {v.shape} with axes (..., heads, seq, head_dim){order}; {remedy}"
        )


def shape_misfit(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[str, str] | None:
    """What is wrong with the shapes of q, k and v, and what to do; None where they fit."""
    if not q[:-3] == k[:-3] == v[:-3]:
        return "the batch axes of q, k and v differ", "use broadcast_to to repeat a batch axis"
    if k[-3:-1] != v[-3:-1]:
        return "k and v must agree in heads and seq", "every key needs a value"
    if q[-1] != k[-1]:
        return "q and k must have the same head_dim", "their last axes are multiplied"
    if q[-3] < 1 or k[-3] < 1 or q[-3] % k[-3]:
        heads = f"heads of q ({q[-3]}) must be a positive multiple of heads of k and v ({k[-3]})"
        return heads, "is the layout the one you meant?"
    if q[-1] < 1 or v[-1] < 1:
        return "head_dim of q, k and v must be at least 1", "is the layout the one you meant?"
    for name, seq in (("q", q[-2]), ("k", k[-2])):
        if seq > MAX_SEQ:
            return f"{name} has seq {seq}, more than the {MAX_SEQ} positions that are counted", "split the call"
    return None


def positions(causal: Any, window: Any) -> tuple[Alignment, list[Modifier]]:
    """Alignment of the diagonal, and the modifiers that hide keys by position."""
    if isinstance(causal, (bool, np.bool_)) or causal is None:
        causal = "bottom_right" if causal else ""
    elif not (isinstance(causal, str) and causal in ("bottom_right", "top_left")):
        raise ArgumentError(f"causal={causal!r}: must be True, False, 'bottom_right' (same as True) or 'top_left'")
    chain: list[Modifier] = [Causal()] if causal else []
    if window is not None:
        chain.append(Window(*window_bounds(window)))
    return ("top_left" if causal == "top_left" else "bottom_right"), chain


def window_bounds(window: Any) -> tuple[int | None, int | None]:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ArgumentError(
            f"window={window!r}: must be a pair (left, right) of inclusive distances; None in it means unbounded"
        ) from None
    return window_bound("left", left), window_bound("right", right)


def window_bound(side: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        bound = operator.index(value)
    except TypeError:
        bound = None
    if bound is None or isinstance(value, bool):
        raise ArgumentError(f"window {side}={value!r}: must be an integer distance, or None for unbounded")
    if bound < -1:
        raise ArgumentError(
            f"window {side}={bound}: distances are inclusive and at least 0; None (or -1) means unbounded"
        )
    return None if bound == -1 else bound


def finite(name: str, value: Any, dtype: str) -> float:
    """A real number that the sums' dtype can hold."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    # Arrays of a device are refused with the rest: to read one would wait for the device.
    if isinstance(value, bool) or not (isinstance(value, Real) or str(getattr(value, "dtype", "")) == "bfloat16"):
        raise ArgumentError(f"{name}={value!r:.80}: must be a real number; pass a Python float")
    limit = float((FLOAT64 if dtype == "float64" else FLOAT32).max)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= limit:  # NaN compares false
        raise ArgumentError(f"{name}={value!r:.80}: must be finite and at most {limit:.8g} in size, for {dtype} arrays")
    return number


def softcap_of(value: Any, dtype: str) -> float:
    """The cap c of c·tanh(s/c): the kernels multiply by c and by 1/c."""
    number = finite("softcap", value, dtype)
    if number <= 0:
        raise ArgumentError(f"softcap={value!r}: must be greater than 0; leave it out (None) to switch it off")
    least = float((FLOAT64 if dtype == "float64" else FLOAT32).tiny)
    if not least <= number <= 1 / least:
        raise ArgumentError(
            f"softcap={value!r}: must be from {least:.8g} to {1 / least:.8g} for {dtype} arrays; leave it out (None) "
            "to switch it off"
        )
    return number


def softcap_or_none(value: Any, dtype: str) -> float | None:
    """The cap where another system's call says that 0 is none."""
    number = finite("softcap", value, dtype)
    if number < 0:
        raise ArgumentError(f"softcap={value!r}: must be greater than 0, or 0.0 for none")
    return number or None


def user_modifiers(modifiers: Any) -> list[Modifier]:
    allowed = (ALiBi, KeyLengths, Documents, BlockMask, Sinks, Dropout, Written)
    remedy = (
        "available are ALiBi(slopes), KeyLengths(lengths), Documents(ids_q, ids_k), BlockMask(blocks, size), "
        "Sinks(logits), Dropout(p, seed, offset), ScoreModifier(expression) and MaskModifier(expression); masks, bias, "
        "windows and softcap are arguments"
    )
    if isinstance(modifiers, Modifier):
        raise ArgumentError(
            f"modifiers={modifiers!r}: must be a sequence of modifiers; write modifiers=({modifiers!r},)"
        )
    try:
        chain = list(modifiers)
    except TypeError:
        raise ArgumentError(f"modifiers={modifiers!r}: must be a sequence of modifiers; {remedy}") from None
    for m in chain:
        if not isinstance(m, allowed):
            raise ArgumentError(f"modifiers contains {m!r}, which is no modifier of this version; {remedy}")
    names, titles = [m.name for m in chain], {m.name: repr(m) if isinstance(m, Written) else m.name for m in chain}
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(
                f"modifiers contains {titles[name]} {names.count(name)} times: at most once each; combine their values into one"
            )
    asked = [name for m in chain for name in (m.gradients if isinstance(m, Written) else m.differentiable)]
    for name in asked:
        if asked.count(name) > 1:
            raise ArgumentError(f"the gradients of two modifiers are called d{name}: rename one of the arrays")
    return chain


def operand(modifier: Modifier, name: str, x: Any, problem: Problem) -> Any:
    """Check one array operand and give it the axes (*batch, heads_q, seq_q, seq_k)."""
    if name == "mask" and dtype_name(x.dtype) != "bool":
        raise ArgumentError(
            f"mask has dtype {x.dtype}: must be bool (True = visible); an additive mask goes into bias, 0/1 integers "
            "need mask.astype(bool)"
        )
    if name == "bias" and dtype_name(x.dtype) != problem.out_dtype:
        of = "the result" if problem.scales else "q"
        raise ArgumentError(
            f"bias has dtype {x.dtype}: must be that of {of}, {problem.out_dtype}; convert it with astype"
        )
    if isinstance(modifier, Written):
        return modifier.operand(name, x, problem)
    inner = modifier.axes(name, problem)
    target = (*problem.batch, *(axis[1] for axis in inner if axis))
    if x.ndim > len(target) or any(n not in (1, full) for n, full in zip(x.shape[::-1], target[::-1], strict=False)):
        axes = ", ".join(["*batch", *(axis[0] for axis in inner if axis)])
        raise ShapeError(
            f"{operand_title(name)} has shape {x.shape}, which does not broadcast to ({axes}) = {target}; give it "
            "axes of length 1 where it is to be repeated"
        )
    whole = x[(None,) * (len(target) - x.ndim)]
    index = (..., *(slice(None) if axis else None for axis in inner))
    return whole[index]


def check_array(name: str, x: Any, shape: tuple[int, ...], dtype: str, axes: str) -> None:
    """Raise unless an array that belongs to a call has the shape and dtype that the call gives it."""
    if x.shape != shape:
        raise ShapeError(
            f"{name} has shape {x.shape}: must be {axes} {shape}; is it from a call with the same arguments?"
        )
    if dtype_name(x.dtype) != dtype:
        raise ArgumentError(f"{name} has dtype {x.dtype}: must be {dtype} in a call with these arguments; use astype")
