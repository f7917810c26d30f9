"""One wrong thing in any call that is right otherwise: refused by name and value before anything is computed or written.

Each run makes the same calls; CUFLASH_DRAWN_CALLS=20 makes twenty times as many, and others each time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import cuflash
from cuflash import (
    ALiBi,
    BlockMask,
    CuflashError,
    Documents,
    Dropout,
    KeyLengths,
    MaskModifier,
    ScoreModifier,
    Sinks,
    inspection,
    numpy_backend,
    union,
)
from cuflash.problem import canonical, in_layout
from tests.cases import DTYPES, STRIDES
from tests.decode_cases import DecodeCase
from tests.drawn_calls import Drawn, cases, decode_cases, drawn_calls, packs, root
from tests.packs import Pack
from tests.test_errors import device_array

#: a word that a message must have, or several of which it must have one
Word = str | tuple[str, ...]


@dataclass(frozen=True)
class Wrong:
    """Arguments in place of right ones, made when the call is, and what the message must say."""

    changes: dict[str, Any]
    words: tuple[Word, ...]
    lazy: Callable[[], dict[str, Any]] = dict


# ---- what must not happen --------------------------------------------------------------------------------------------
@contextmanager
def nothing_computed() -> Any:
    """Fails where anything is computed."""
    computing = [
        (numpy_backend, ("forward", "backward", "decode")),
        (inspection, ("weights_of",)),
        (union, ("forward", "backward")),
    ]
    with ExitStack() as stack:
        for module, names in computing:
            for name in names:
                error = AssertionError(f"{module.__name__}.{name} was called")
                stack.enter_context(mock.patch.object(module, name, side_effect=error))
        yield


def arrays_in(x: Any) -> list[np.ndarray]:
    """All NumPy arrays of some arguments."""
    if isinstance(x, np.ndarray):
        return [x] if x.dtype != object else []
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [array for part in parts for array in arrays_in(part)]


def refuses(call: Callable[..., Any], arguments: dict[str, Any], wrong: Wrong) -> None:
    """Fail unless the call is refused as it must be."""
    given = {**arguments, **wrong.changes}
    before = [(root(x), root(x).tobytes()) for x in arrays_in(given) if root(x).nbytes < 1 << 24]
    with nothing_computed(), pytest.raises(CuflashError) as caught:
        call(**{**given, **wrong.lazy()})
    message = str(caught.value)
    missing = [w for w in wrong.words if not any(x in message for x in ((w,) if isinstance(w, str) else w))]
    assert not missing, f"{missing} is not in: {message}"
    assert all(x.tobytes() == kept for x, kept in before), "an array was written"


# ---- what can be wrong with an array ---------------------------------------------------------------------------------
JUNK = ([[1.0]], 3.0, "x", {}, (1, 2))
REAL = ("float16", "bfloat16", "float32", "float64")


class Exporter:
    """An array of a device that is neither the host nor CUDA's."""

    dtype = "float32"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 10, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError


def shown(value: Any) -> str:
    return f"{value!r:.40}"


@st.composite
def wrong_kind(draw: Any, name: str, x: np.ndarray, optional: bool = False) -> Wrong:
    """Something that is no array, or one of another kind or place."""
    choice = draw(st.sampled_from(("junk", "none", "masked", "device", "exporter")))
    if choice == "none":
        assume(not optional)
        return Wrong({name: None}, (f"{name} is None",))
    if choice == "masked":
        return Wrong({name: np.ma.masked_array(np.zeros(x.shape, x.dtype))}, (f"{name} is a masked array",))
    if choice == "exporter":
        return Wrong({name: Exporter()}, (name, "(10, 0)"))
    if choice == "device" and importlib.util.find_spec("cupy") is not None:
        dtype = np.float32 if x.dtype == ml_dtypes.bfloat16 else x.dtype
        return Wrong({name: device_array(x.shape, dtype)}, (f"{name} is a cupy array on cuda:0", "on the host"))
    junk = draw(st.sampled_from(JUNK))
    return Wrong({name: junk}, (f"{name} is {shown(junk)}", type(junk).__name__))


@st.composite
def wrong_dtype(draw: Any, name: str, x: np.ndarray) -> Wrong:
    """Another dtype, right for none of the arguments or only for others."""
    others = [*REAL, "int32", "bool", "complex64", "uint16", "float8_e4m3fn", ">f4", "O"]
    own = str(x.dtype)
    dtype = draw(st.sampled_from([d for d in others if d != own]))
    made = np.zeros(x.shape, DTYPES.get(dtype) or (ml_dtypes.float8_e4m3fn if dtype.startswith("float8") else dtype))
    return Wrong({name: made}, (name, str(made.dtype)))


def of_shape(name: str, shape: tuple[int, ...], dtype: Any, *also: tuple[int, ...]) -> Wrong:
    """An array of a wrong shape, which messages show, or in another order of axes."""
    return Wrong({name: np.ones(shape, dtype)}, (name, tuple(map(str, (shape, *also)))))


@st.composite
def wrong_shape(draw: Any, name: str, x: np.ndarray) -> Wrong:
    """A shape that cannot be told from the right one by broadcasting: one axis longer, one less, or one more."""
    choice = draw(st.sampled_from(("longer", "less", "more")))
    axis = draw(st.integers(0, x.ndim - 1))
    shape = {
        "longer": (*x.shape[:axis], x.shape[axis] + 1, *x.shape[axis + 1 :]),
        "less": (*x.shape[:axis], *x.shape[axis + 1 :]),
        "more": (*x.shape[:axis], 1, *x.shape[axis:]),
    }[choice]
    return of_shape(name, shape, x.dtype)


def wrong_array(name: str, x: np.ndarray, optional: bool = False) -> Any:
    """Something else than a right array."""
    return st.one_of(wrong_kind(name, x, optional), wrong_dtype(name, x), wrong_shape(name, x))


# ---- options ---------------------------------------------------------------------------------------------------------
NAN, INF = float("nan"), float("inf")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "scale": (NAN, INF, -INF, "1", True, 1j, [1.0], 10**400, np.ones(3), {}),
    "softcap": (NAN, INF, 0, 0.0, -1.0, "on", True, 1e-320, [2.0]),
    "causal": (1, 0, "left", "bottom", [], 2.0, np.ones(2, bool)),
    "window": (3, (1,), (1, 2, 3), (-2, 0), (0, -7), (1.5, 0), (True, 0), "12", ("a", None), {1, 2, 3}),
    "layout": ("sbhd", "BHSD", None, 3, ["bhsd"]),
    "backend": ("cudnn", "", 1, ["numpy"], True),
    "modifiers": (None, 3, ALiBi([1.0]), [3], ["alibi"], [ALiBi], [None]),
    "batch_invariant": (1, None, "yes", 0.0),
    "return_lse": (1, None, "yes", 0.0),
    "measure": (1, None, "yes", True),
    "deterministic": (1, "yes", 0.0),
    "maximum": (1, None),
    "entropy": ("x",),
    "column_sums": (0,),
    "checked": (1, None, "yes"),
}


def wrong_options(names: tuple[str, ...]) -> list[Wrong]:
    """Every wrong value of these options."""
    found = []
    for name in names:
        for value in OPTIONS[name]:
            part = value[0] if isinstance(value, list) and value and name == "modifiers" else value
            shows = number(part) if name in ("scale", "softcap") else side(value, shown(part))
            found.append(Wrong({name: value}, (name, shows)))
    return found


def number(value: Any) -> Word:
    """How messages show a number."""
    return shown(value), str(value)[:20]


def side(value: Any, whole: str) -> Word:
    """How messages show a window: whole, or the bound that is wrong."""
    parts = value if isinstance(value, (tuple, str)) else ()
    return (whole, *(f"{name}={x!r}" for name, x in zip(("left", "right"), parts, strict=False)))


# ---- modifiers -------------------------------------------------------------------------------------------------------
def wrong_modifiers(call: Drawn, kept: tuple[Any, ...]) -> list[Wrong]:
    """Every modifier with something wrong about it, in place of those of its own kind."""
    case = call.case
    batch, heads, seq_q, seq_k = case.batch, case.heads_q, case.seq_q, case.seq_k
    shape, ones = (*batch, heads + 1), (1,) * len(batch)

    def ids(n: int, dtype: Any = np.int32) -> np.ndarray:
        return np.zeros(n, dtype)

    blocks = -(-seq_q // 16) + 2, -(-seq_k // 16) + 2
    choices: dict[str, tuple[Callable[[], Any], tuple[Word, ...]]] = {
        "lengths above": (lambda: KeyLengths(np.full(ones, seq_k + 1)), ("KeyLengths", str(seq_k + 1))),
        "lengths below": (lambda: KeyLengths(np.full(ones, -3)), ("KeyLengths", "-3")),
        "lengths dtype": (lambda: KeyLengths(np.ones(ones, np.float32)), ("KeyLengths", "float32")),
        "lengths shape": (lambda: KeyLengths(np.zeros((*batch, 2), int)), ("KeyLengths", str((*batch, 2)))),
        "lengths none": (KeyLengths, ("KeyLengths", "None")),
        "slopes shape": (lambda: ALiBi(np.ones(shape)), ("slopes of ALiBi", str(shape))),
        "slopes NaN": (lambda: ALiBi([1.0] * (heads - 1) + [NAN]), ("slopes of ALiBi", "nan")),
        "slopes dtype": (lambda: ALiBi(["a"] * heads), ("slopes of ALiBi", "<U1")),
        "sinks shape": (lambda: Sinks(np.ones(shape)), ("logits of Sinks", str(shape))),
        "sinks dtype": (lambda: Sinks(np.ones(heads, bool)), ("logits of Sinks", "bool")),
        "sinks twice": (lambda: [Sinks([0.0] * heads)] * 2, ("sinks", "2 times")),
        "ids_q shape": (lambda: Documents(ids(seq_q + 2), ids(seq_k)), ("ids_q of Documents", f"({seq_q + 2},)")),
        "ids_k shape": (lambda: Documents(ids(seq_q), ids(seq_k + 2)), ("ids_k of Documents", f"({seq_k + 2},)")),
        "ids dtype": (lambda: Documents(ids(seq_q), ids(seq_k, float)), ("ids_k of Documents", "float64")),
        "ids value": (lambda: Documents([1 << 40], ids(seq_k)), ("ids_q of Documents", str(1 << 40))),
        "blocks shape": (lambda: BlockMask(np.ones(blocks, bool), 16), ("blocks of BlockMask", str(blocks))),
        "blocks dtype": (lambda: BlockMask(np.ones((1, 1)), 16), ("blocks of BlockMask", "float64")),
        "blocks size": (lambda: BlockMask(np.ones((1, 1), bool), 0), ("size=0", "BlockMask")),
        "dropout above": (lambda: Dropout(1.0, 1, 2), ("p=1.0", "Dropout")),
        "dropout below": (lambda: Dropout(-0.1, 1, 2), ("p=-0.1", "Dropout")),
        "dropout NaN": (lambda: Dropout(NAN, 1, 2), ("p=nan", "Dropout")),
        "dropout seed": (lambda: Dropout(0.5, "x", 2), ("seed='x'", "Dropout")),
        "dropout offset": (lambda: Dropout(0.5, 1, 1 << 64), (f"offset={1 << 64}", "Dropout")),
        "dropout no seed": (lambda: Dropout(0.5), ("seed=None", "Dropout")),
        "score array": (
            lambda: ScoreModifier("s * x[h]", x=np.ones(heads + 1)),
            ("x of ScoreModifier", f"({heads + 1},)"),
        ),
        "score text": (lambda: ScoreModifier("s + nothing"), ("ScoreModifier", "nothing")),
        "score value": (lambda: ScoreModifier("s * c", c=1 << 40), ("c of ScoreModifier", str(1 << 40))),
        "mask number": (lambda: MaskModifier("q - k"), ("MaskModifier", "q - k")),
        "mask array": (
            lambda: MaskModifier("ok[k]", ok=np.ones(seq_k + 2, bool)),
            ("ok of MaskModifier", f"({seq_k + 2},)"),
        ),
    }
    own = {"lengths": KeyLengths, "slopes": ALiBi, "sinks": Sinks, "blocks": BlockMask, "dropout": Dropout}

    def wrong(name: str) -> Wrong:
        make, words = choices[name]
        kind = own.get(name.split()[0], Documents)
        chain = tuple(m for m in kept if not isinstance(m, (kind, ScoreModifier, MaskModifier)))

        def lazy() -> dict[str, Any]:
            made = make()
            return {"modifiers": (*chain, *(made if isinstance(made, list) else [made]))}

        return Wrong({}, words, lazy)

    return [wrong(name) for name in choices]


# ---- attention and its backward --------------------------------------------------------------------------------------
COMMON = ("scale", "softcap", "causal", "window", "layout", "modifiers")
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "attention": (*COMMON, "backend", "batch_invariant", "return_lse"),
    "attention_vjp": (*COMMON, "backend", "batch_invariant", "return_lse", "deterministic"),
    "attention_statistics": (*COMMON, "backend", "batch_invariant", "maximum", "entropy", "column_sums"),
    "attention_backward": (*COMMON, "backend", "batch_invariant", "deterministic"),
    "explain": (*COMMON, "backend", "measure"),
    "attention_weights": COMMON,
}
WITH_OUT = ("attention", "attention_statistics")


@st.composite
def wrong_operands(draw: Any, call: Drawn, arguments: dict[str, Any]) -> Wrong:
    """q, k and v that do not fit each other."""
    case = call.case
    names = [name for name in "qkv" if name in arguments]
    axes = {"q": ["heads", "dim"], "k": ["dim"], "v": []}
    if "v" in names:
        axes |= {"k": ["heads", "seq", "dim"], "v": ["heads", "seq"]}
    name = draw(st.sampled_from(names))
    axis = draw(st.sampled_from([*axes[name], *range(len(case.batch)), "axes", "none"]))
    shape = list(canonical(arguments[name], case.layout).shape)
    if axis == "axes":
        shape = shape[-2:]
    elif axis == "none":
        shape[-1] = 0
        if name == "v" or "v" not in names:  # nothing to compare it with
            assume(name == "v")
    elif axis == "heads" and name == "q":
        shape[-3] = shape[-3] + 1 if case.heads_k > 1 else 0
    else:
        at = {"heads": -3, "seq": -2, "dim": -1}.get(axis, axis)
        shape[at] += 1
    given = tuple(shape)
    laid = in_layout(given, case.layout) if len(given) > 2 else given
    return of_shape(name, laid, DTYPES[case.dtype], given)


@st.composite
def wrong_broadcast(draw: Any, name: str, x: np.ndarray, full: tuple[int, ...]) -> Wrong:
    """A mask or bias that does not broadcast to the scores."""
    shape = list(x.shape)
    axis = draw(st.integers(-len(shape), -1))
    shape[axis] = full[axis] + 2
    if draw(st.booleans()):
        shape = [1] * (len(full) + 1 - len(shape)) + list(x.shape)
    return of_shape(name, tuple(shape), x.dtype)


def wrong_outs(arguments: dict[str, Any], names: Iterable[str], shape: tuple[int, ...], dtype: Any) -> list[Wrong]:
    """Arrays that the result cannot be written to: read-only, its own neighbour, or one element shared with an input."""
    right = np.full(shape, 7, dtype)
    right.flags.writeable = False
    found = [Wrong({"out": right}, ("out is read-only",))]
    if not right.size:
        return found
    if max(shape) > 1:
        axis = int(np.argmax(shape))
        once = np.full((*shape[:axis], 1, *shape[axis + 1 :]), 7, dtype)
        strides = tuple(0 if i == axis else s for i, s in enumerate(once.strides))
        itself = np.lib.stride_tricks.as_strided(once, shape, strides)
        found.append(Wrong({"out": itself}, ("out of shape", str(shape))))
    for name in names:
        x = arguments.get(name)
        if x is not None and x.size:
            buffer = np.ones(x.size + right.size, dtype)
            taken, target = buffer[: x.size].reshape(x.shape), buffer[x.size - 1 : -1].reshape(shape)
            found.append(Wrong({name: taken, "out": target}, (f"out overlaps {name}", "bytes [")))
    return found


@st.composite
def right_calls(draw: Any) -> Drawn:
    """Any small call, in any kind of strides."""
    case = draw(cases(lengths=st.integers(0, 9)))
    return Drawn(replace(case, strides=draw(st.sampled_from([name for name in STRIDES if name != "stride 0"]))))


@st.composite
def wrong_calls(draw: Any, kind: str) -> tuple[str, dict[str, Any], list[Wrong]]:
    """A function, the arguments of a right call, and what is wrong: one thing, or several in turn."""
    functions = {"out": WITH_OUT, "results": ("attention_backward",), "rows": ("attention_weights",)}
    call, function = draw(right_calls()), draw(st.sampled_from(functions.get(kind, sorted(FUNCTIONS))))
    case, made = call.case, call.make()
    arguments = {name: made[name] for name in "qkv"} | made["options"]
    if function == "attention_weights":
        arguments = {**arguments, "rows": [0] * (case.seq_q > 0)}
        del arguments["v"]
    out_shape = made["dout"].shape
    lse_shape = (*case.batch, case.heads_q, case.seq_q)
    sums = np.float64 if case.dtype == "float64" else np.float32
    results = {}
    if function == "attention_backward":
        results = {"dout": made["dout"], "out": np.zeros(out_shape, made["q"].dtype), "lse": np.zeros(lse_shape, sums)}
        results |= {"dlse": made["dlse"]} if made["dlse"] is not None else {}
        arguments |= results

    if kind == "option":
        return function, arguments, wrong_options(FUNCTIONS[function])
    if kind == "modifier":
        return function, arguments, wrong_modifiers(call, arguments["modifiers"])
    if kind == "out":
        dtype = made["q"].dtype
        another = draw(wrong_array("out", np.full(out_shape, 7, dtype), optional=True))
        return function, arguments, [another, *wrong_outs(arguments, ("q", "k", "v", "bias"), out_shape, dtype)]

    def wrong() -> Wrong:
        masks = [name for name in ("mask", "bias") if arguments[name] is not None]
        if kind == "operands":
            return draw(wrong_operands(call, arguments))
        if kind == "rows":
            row = draw(st.sampled_from((case.seq_q, -case.seq_q - 1)))
            junk = draw(st.sampled_from((3, None, ["a"], [1.0], [row])))
            return Wrong({"rows": junk}, ("rows", str(row) if junk == [row] else shown(junk)))
        if kind == "results":
            name = draw(st.sampled_from(sorted(results)))
            return draw(wrong_array(name, results[name], optional=name == "dlse"))
        if kind == "broadcast":
            assume(masks)
            name = draw(st.sampled_from(masks))
            return draw(wrong_broadcast(name, arguments[name], (*lse_shape, case.seq_k)))
        name = draw(st.sampled_from([*(name for name in "qkv" if name in arguments), *masks]))
        if kind == "dtype":
            return draw(wrong_dtype(name, arguments[name]))
        return draw(wrong_kind(name, arguments[name], optional=name in masks))

    return function, arguments, [wrong()]


KINDS = {
    "option": 8,
    "modifier": 12,
    "out": 12,
    "operands": 40,
    "rows": 10,
    "results": 40,
    "broadcast": 20,
    "dtype": 30,
    "kind": 30,
}


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str) -> None:
    @drawn_calls(KINDS[kind])
    @given(wrong_calls(kind))
    def run(drawn: tuple[str, dict[str, Any], list[Wrong]]) -> None:
        function, arguments, wrongs = drawn
        for wrong in wrongs:
            refuses(getattr(cuflash, function), arguments, wrong)

    run()


@drawn_calls(20)
@given(right_calls(), st.data())
def test_vjp(call: Drawn, data: Any) -> None:
    made = call.make()
    _, lse, vjp = cuflash.attention_vjp(made["q"], made["k"], made["v"], return_lse=True, **made["options"])
    arguments = {"dout": made["dout"], "dlse": made["dlse"]}
    name, x = data.draw(st.sampled_from((("dout", made["dout"]), ("dlse", lse))))
    refuses(vjp, arguments, data.draw(wrong_array(name, x, optional=name == "dlse")))


# ---- packed calls ----------------------------------------------------------------------------------------------------
PACKED = ("scale", "softcap", "causal", "window", "modifiers", "backend")
PACKED_FUNCTIONS = {
    "attention_varlen": (*PACKED, "return_lse"),
    "attention_varlen_vjp": (*PACKED, "return_lse", "deterministic"),
    "attention_varlen_backward": (*PACKED, "deterministic"),
    "explain_varlen": (*PACKED, "measure"),
}


@st.composite
def wrong_offsets(draw: Any, pack: Pack, offsets: dict[str, np.ndarray]) -> Wrong:
    """Where sequences cannot begin, or maxima that they exceed."""
    name = draw(st.sampled_from(sorted(offsets)))
    x, longest = offsets[name], name.replace("cu_seqlens", "max_seqlen")
    total = int(x[-1]) + pack.behind[name.endswith("k")]
    choices = ["first", "last", "dtype", "axes", "none", "count", "junk", "maximum"] + ["falls"] * (int(x[-1]) > 0)
    choice = draw(st.sampled_from([*choices, "longest"] if int(x[-1]) > 0 else choices))
    changed = x.copy()
    if choice == "first":
        changed[0] = -1 if len(x) > 1 else 1
        return Wrong({name: changed}, (name, f"starts with {changed[0]}"))
    if choice == "last":
        return Wrong({n: np.append(o, total + 1) if n == name else np.append(o, o[-1]) for n, o in offsets.items()},
                     (name, f"ends with {total + 1}"))  # fmt: skip
    if choice == "falls":
        return Wrong(
            {n: np.append(o, 0 if n == name else o[-1]) for n, o in offsets.items()}, (name, f"from {x[-1]} to 0")
        )
    if choice == "dtype":
        return Wrong({name: x.astype(float)}, (name, "float64"))
    if choice == "axes":
        return Wrong({name: x[None]}, (name, str(x[None].shape)))
    if choice == "none":
        return Wrong({name: x[:0]}, (name, "(0,)"))
    if choice == "count":
        return Wrong({name: np.append(x, x[-1])}, (name, str((len(x) + 1,))))
    if choice == "junk":
        junk = draw(st.sampled_from((None, "x", {}, [[0], [0, 1]])))
        return Wrong({name: junk}, (name, shown(junk)))
    if choice == "maximum":
        junk = draw(st.sampled_from((-1, 1.5, "x", True, np.ones(2))))
        return Wrong({longest: junk}, (longest, shown(junk)[:5]))
    most = int(np.diff(x).max())
    return Wrong({longest: most - 1}, (f"{longest}={most - 1}", str(most)))


def beside_packed(case: Pack) -> dict[str, tuple[Any, tuple[Word, ...]]]:
    """Modifiers that do not go with packed sequences, or are wrong anywhere."""
    heads = case.heads_q
    return {
        "lengths": (KeyLengths([0]), ("KeyLengths",)),
        "documents": (Documents([0], [0]), ("Documents",)),
        "blocks": (BlockMask(np.ones((1, 1), bool), 16), ("BlockMask",)),
        "score": (ScoreModifier("s + x[q]", x=np.zeros(1)), ("ScoreModifier", "x")),
        "gradient": (ScoreModifier("s * x[h]", x=np.ones(heads), gradients="x"), ("ScoreModifier", "x")),
        "slopes": (ALiBi(np.ones(heads + 1)), ("slopes of ALiBi", str((heads + 1,)))),
        "sinks": (Sinks(np.ones(heads, bool)), ("logits of Sinks", "bool")),
        "dropout": (Dropout(0.5), ("seed=None",)),
    }


@st.composite
def wrong_packs(draw: Any, kind: str) -> tuple[str, dict[str, Any], list[Wrong]]:
    functions = {"out": ("attention_varlen",), "results": ("attention_varlen_backward",)}
    pack, function = draw(packs()), draw(st.sampled_from(functions.get(kind, sorted(PACKED_FUNCTIONS))))
    made = pack.make()
    offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), made["offsets"], strict=True))
    results = {}
    if function == "attention_varlen_backward":
        lse = np.zeros((pack.heads_q, len(made["q"])), np.float64 if pack.dtype == "float64" else np.float32)
        results = {"dout": made["dout"], "out": np.zeros(made["dout"].shape, made["q"].dtype), "lse": lse}
    arguments = {name: made[name] for name in "qkv"} | offsets | made["options"] | results
    if kind == "option":
        return function, arguments, wrong_options(PACKED_FUNCTIONS[function])
    if kind == "modifier":
        return function, arguments, [Wrong({"modifiers": [m]}, words) for m, words in beside_packed(pack).values()]
    if kind == "offsets":
        return function, arguments, [draw(wrong_offsets(pack, offsets))]
    if kind == "out":
        shape, dtype = made["dout"].shape, made["q"].dtype
        another = draw(wrong_array("out", np.full(shape, 7, dtype), optional=True))
        return function, arguments, [another, *wrong_outs(arguments, "qkv", shape, dtype)]
    if kind == "results":
        name = draw(st.sampled_from(sorted(results)))
        return function, arguments, [draw(wrong_array(name, results[name], optional=name == "dlse"))]
    name = draw(st.sampled_from("qkv"))
    x = arguments[name]
    if kind == "axes":
        shape = draw(st.sampled_from(((1, *x.shape), x.shape[1:])))
        return function, arguments, [of_shape(name, shape, x.dtype)]
    return function, arguments, [draw((wrong_kind if kind == "kind" else wrong_dtype)(name, x))]


PACKED_KINDS = {"option": 4, "modifier": 6, "out": 8, "offsets": 60, "results": 20, "axes": 10, "kind": 10, "dtype": 10}


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_calls(kind: str) -> None:
    @drawn_calls(PACKED_KINDS[kind])
    @given(wrong_packs(kind))
    def run(drawn: tuple[str, dict[str, Any], list[Wrong]]) -> None:
        function, arguments, wrongs = drawn
        for wrong in wrongs:
            refuses(getattr(cuflash, function), arguments, wrong)

    run()


# ---- decode calls ----------------------------------------------------------------------------------------------------
DECODE = ("scale", "softcap", "causal", "window", "layout", "modifiers", "backend", "checked", "return_lse")


@st.composite
def wrong_cache(draw: Any, kind: str, case: DecodeCase, arguments: dict[str, Any]) -> Wrong:
    """Lengths, tables, caches and new keys that do not fit each other."""
    lengths, table, batch = arguments["lengths"], arguments["page_table"], len(case.lengths)
    room = case.capacity - case.seq_new
    if kind.startswith("table"):
        assume(table is not None)
    if kind.startswith("new"):
        assume(case.seq_new)
    if kind.startswith("length "):
        assume(lengths is not None and batch)
        entry, value = draw(st.integers(0, batch - 1)), room + 1 if kind == "length above" else -1
        changed = lengths.copy()
        changed[entry] = value
        return Wrong({"lengths": changed}, (f"lengths[{entry}] is {value}", f"0 to {room}"))
    if kind == "lengths shape":
        return Wrong({"lengths": np.zeros(batch + 1, np.int32)}, ("lengths", str((batch + 1,))))
    if kind == "lengths dtype":
        assume(batch)
        return Wrong({"lengths": np.zeros(batch)}, ("lengths", "float64"))
    if kind == "junk":
        name = draw(st.sampled_from(("lengths", "page_table")))
        return Wrong({name: "x"}, (f"{name} is 'x'",))
    if kind == "top-left":
        return Wrong({"causal": "top_left"}, ("causal='top_left'",))
    if kind == "page":
        assume(table is not None and lengths is not None)
        used = [(entry, -(-(n + case.seq_new) // case.page_size)) for entry, n in enumerate(case.lengths)]
        assume(any(count for _, count in used))
        entry, count = draw(st.sampled_from([(entry, count) for entry, count in used if count]))
        at, pages = draw(st.integers(0, count - 1)), arguments["k_cache"].shape[0]
        changed = table.copy()
        changed[entry, at] = draw(st.sampled_from((-1, pages, 1 << 30)))
        return Wrong(
            {"page_table": changed}, (f"page_table[{entry}, {at}] is {changed[entry, at]}", f"0 to {pages - 1}")
        )
    if kind == "table dtype":
        assume(table.size)
        return Wrong({"page_table": table.astype(float)}, ("page_table", "float64"))
    if kind == "table axes":
        return Wrong({"page_table": table[None]}, ("page_table", str(table[None].shape)))
    if kind == "table batch":
        shape = (batch + 1, table.shape[1])
        return Wrong({"page_table": np.zeros(shape, np.int32)}, ("page_table", str(shape)))
    if kind == "cache dim":
        shape = (*arguments["k_cache"].shape[:-1], case.head_dim + 1)
        return Wrong({"k_cache": np.zeros(shape, arguments["q"].dtype)}, ("k_cache", str(shape)))
    name = draw(st.sampled_from(("k_new", "v_new")))
    if kind == "new alone":
        return Wrong({name: None}, (f"{name} is not",))
    if kind == "new dtype":
        return draw(wrong_dtype(name, arguments[name]))
    shape = (*arguments[name].shape[:-1], arguments[name].shape[-1] + 1)
    return Wrong({name: np.zeros(shape, arguments["q"].dtype)}, (name, str(shape)))


CACHE_KINDS = (
    "length above",
    "length below",
    "lengths shape",
    "lengths dtype",
    "junk",
    "top-left",
    "page",
    "cache dim",
)
CACHE_KINDS += ("table dtype", "table axes", "table batch", "new alone", "new dtype", "new shape")
DECODE_KINDS = {
    "option": 4,
    "modifier": 4,
    "out": 8,
    "kind": 10,
    "dtype": 10,
    "written": 10,
    **dict.fromkeys(CACHE_KINDS, 6),
}


@st.composite
def wrong_decodes(draw: Any, kind: str) -> tuple[dict[str, Any], list[Wrong]]:
    case = draw(decode_cases())
    made = case.make()
    arguments = {**made.arrays, "lengths": made.lengths, "page_table": made.table, **made.options}
    heads, dtype = case.heads_q, arguments["q"].dtype
    if kind == "option":
        return arguments, wrong_options(DECODE)
    if kind == "modifier":
        choices = {
            "KeyLengths": KeyLengths([1]),
            "Documents": Documents([0], [0]),
            "BlockMask": BlockMask(np.ones((1, 1), bool), 16),
            "Dropout": Dropout(0.5, 1, 2),
            "MaskModifier": MaskModifier("k > 0"),
            f"slopes of ALiBi has shape ({heads + 1},)": ALiBi([1.0] * (heads + 1)),
        }
        return arguments, [Wrong({"modifiers": [m]}, (name,)) for name, m in choices.items()]
    if kind == "out":
        shape = (*arguments["q"].shape[:-1], case.head_dim_v or case.head_dim)
        another = draw(wrong_array("out", np.full(shape, 7, dtype), optional=True))
        return arguments, [another, *wrong_outs(arguments, ("q", "k_cache", "v_cache"), shape, dtype)]
    if kind in CACHE_KINDS:
        return arguments, [draw(wrong_cache(kind, case, arguments))]
    name = draw(st.sampled_from(("q", "k_cache", "v_cache")))
    x = arguments[name]
    if kind == "written":
        assume(case.seq_new and case.lengths and name != "q")
        frozen = np.broadcast_to(x[:1], x.shape) if len(x) == 1 or draw(st.booleans()) else x.copy()
        frozen.flags.writeable = False
        return arguments, [Wrong({name: frozen}, (f"{name} is read-only",))]
    return arguments, [draw((wrong_kind if kind == "kind" else wrong_dtype)(name, x))]


@pytest.mark.parametrize("kind", DECODE_KINDS)
def test_decode_calls(kind: str) -> None:
    @drawn_calls(DECODE_KINDS[kind])
    @given(wrong_decodes(kind))
    def run(drawn: tuple[dict[str, Any], list[Wrong]]) -> None:
        arguments, wrongs = drawn
        for wrong in wrongs:
            refuses(cuflash.attention_decode, arguments, wrong)
            if not {"out", "checked", "return_lse"} & wrong.changes.keys():
                refuses(cuflash.explain_decode, arguments, wrong)

    run()


# ---- merge -----------------------------------------------------------------------------------------------------------
@st.composite
def wrong_merges(draw: Any) -> tuple[str, dict[str, Any], Wrong]:
    dtype, parts = draw(st.sampled_from(sorted(DTYPES))), draw(st.integers(1, 3))
    batch = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
    rows = (*batch, draw(st.integers(1, 3)), draw(st.integers(0, 3)))
    layout = draw(st.sampled_from(("bhsd", "bshd")))
    sums = np.dtype(np.float64 if dtype == "float64" else np.float32)
    shape = in_layout((*rows, draw(st.integers(1, 3))), layout)
    arguments: dict[str, Any] = {
        "outs": [np.zeros(shape, DTYPES[dtype]) for _ in range(parts)],
        "lses": [np.zeros(rows, sums) for _ in range(parts)],
        "layout": layout,
    }
    function = draw(st.sampled_from(("merge", "merge_vjp", "merge_backward")))
    results = {}
    if function == "merge_backward":
        results = {"dout": np.zeros(shape, DTYPES[dtype]), "out": np.zeros(shape, DTYPES[dtype])}
        results |= {"lse": np.zeros(rows, sums), "dlse": np.zeros(rows, sums)}
        arguments |= results
    name = draw(st.sampled_from(("outs", "lses")))
    kind = draw(st.sampled_from(("list", "none", "count", "layout", "one", "one", "result")))
    if kind == "list":
        junk = draw(st.sampled_from((arguments[name][0], None, 3, "x")))
        return function, arguments, Wrong({name: junk}, (f"{name} is", type(junk).__name__))
    if kind == "none":
        return function, arguments, Wrong({"outs": [], "lses": []}, ("outs has 0", "lses has 0"))
    if kind == "count":
        return function, arguments, Wrong({name: [*arguments[name], arguments[name][0]]}, (f"{name} has {parts + 1}",))
    if kind == "layout":
        return function, arguments, draw(st.sampled_from(wrong_options(("layout",))))
    if kind == "result":
        assume(results)
        which = draw(st.sampled_from(sorted(results)))
        return function, arguments, draw(wrong_array(which, results[which], optional=which == "dlse"))
    at = draw(st.integers(0, parts - 1))
    title, x = f"{name}[{at}]", arguments[name][at]
    # A first output of another dtype or shape makes the others wrong.
    wrong = draw(wrong_kind(title, x) if (name, at) == ("outs", 0) else wrong_array(title, x))
    changed = list(arguments[name])
    changed[at] = wrong.changes[title]
    return function, arguments, Wrong({name: changed}, wrong.words)


@drawn_calls(100)
@given(wrong_merges())
def test_merge(drawn: tuple[str, dict[str, Any], Wrong]) -> None:
    function, arguments, wrong = drawn
    refuses(getattr(cuflash, function), arguments, wrong)
