"""Every bad call is refused by an exception that names the argument, its value and the remedy, and changes no array."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import (
    ALiBi,
    ArgumentError,
    BlockMask,
    CuflashError,
    Documents,
    KeyLengths,
    ShapeError,
    Sinks,
    UnsupportedError,
)
from cuflash.modifiers import Modifier

# heads_q 4, heads_k 2, seq_q 5, seq_k 7, head_dim 8, head_dim_v 6
Q, K, V = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)
OUT, LSE, SCORES = (2, 4, 5, 6), (2, 4, 5), (2, 4, 5, 7)


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def good() -> dict[str, Any]:
    return {"q": numbers(Q), "k": numbers(K), "v": numbers(V)}


@dataclass(frozen=True)
class Foreign(Modifier):
    """A modifier that does not exist in this version."""

    name: ClassVar[str] = "foreign"
    p: float = 0.1


@dataclass(frozen=True)
class Case:
    """Arguments that replace the good ones, what must be raised, and what its message must contain."""

    changes: Callable[[dict[str, Any]], dict[str, Any]]
    words: tuple[str, ...]
    error: type[Exception] = ArgumentError


def case(name: str, *words: str, error: type[Exception] = ArgumentError, **changes: Any) -> Any:
    return pytest.param(Case(lambda _: changes, words, error), id=name)


def derived(
    name: str, changes: Callable[[dict[str, Any]], dict[str, Any]], *words: str, error: type[Exception] = ArgumentError
) -> Any:
    """A case whose arguments are made from the good ones."""
    return pytest.param(Case(changes, words, error), id=name)


def shape_case(name: str, *words: str, **changes: Any) -> Any:
    return case(name, *words, error=ShapeError, **changes)


INPUT_CASES = [
    # ---- kinds of argument -------------------------------------------------------------------------------------------
    case("q is a list", "q is [[[", "list", "numpy.asarray", q=numbers(Q).tolist()),
    case("k is None", "k is None", "NoneType", "numpy.asarray", k=None),
    case("v is a number", "v is 3.0", "float", "numpy.asarray", v=3.0),
    case("mask is a list", "mask is [True]", "list", "numpy.asarray", mask=[True]),
    case("bias is a number", "bias is 1.5", "float", "numpy.asarray", bias=1.5),
    case("q is a masked array", "q is a masked array", "mask", q=np.ma.masked_array(numbers(Q), numbers(Q) > 0)),
    # ---- dtypes ------------------------------------------------------------------------------------------------------
    case("q int32", "q has dtype int32", "float32", "astype", q=np.ones(Q, np.int32)),
    case("k bool", "k has dtype bool", "float32", "astype", k=np.ones(K, bool)),
    case("v complex64", "v has dtype complex64", "float32", "astype", v=np.ones(V, np.complex64)),
    case("q uint16", "q has dtype uint16", "ml_dtypes.bfloat16", q=np.ones(Q, np.uint16)),
    case("q of the other byte order", "q has dtype >f4", "float32", "astype", q=np.ones(Q, ">f4")),
    case("q float8", "q has dtype float8_e5m2", "astype", q=np.ones(Q, ml_dtypes.float8_e5m2)),
    case("q object", "q has dtype object", "astype", q=np.ones(Q, object)),
    case("k float64, others float32", "k float64", "q float32", "common", k=numbers(K, np.float64)),
    case("v bfloat16, others float32", "v bfloat16", "q float32", "common", v=numbers(V, ml_dtypes.bfloat16)),
    case("mask uint8", "mask has dtype uint8", "bool", "astype", mask=np.ones(SCORES, np.uint8)),
    case("mask float32", "mask has dtype float32", "bool", "bias", mask=np.zeros(SCORES, np.float32)),
    case("bias float64", "bias has dtype float64", "float32", "astype", bias=np.zeros(SCORES, np.float64)),
    case("bias bool", "bias has dtype bool", "float32", "astype", bias=np.zeros(SCORES, bool)),
    case("bias float16", "bias has dtype float16", "float32", "astype", bias=np.zeros(SCORES, np.float16)),
    # ---- shapes ------------------------------------------------------------------------------------------------------
    shape_case("q of 2 axes", "q has shape (5, 8)", "3 axes", "axis of length 1", q=numbers((5, 8))),
    shape_case("k of 1 axis", "k has shape (7,)", "3 axes", "axis of length 1", k=numbers((7,))),
    shape_case("v of 0 axes", "v has shape ()", "3 axes", "axis of length 1", v=np.zeros((), np.float32)),
    shape_case("batch differs", "batch axes of q, k and v", "(3, 4, 5, 8)", "broadcast_to", q=numbers((3, *Q[1:]))),
    shape_case("number of batch axes differs", "batch axes", "(4, 5, 8)", "broadcast_to", q=numbers(Q[1:])),
    shape_case("batch 1 is not repeated", "batch axes", "(1, 2, 7, 8)", "broadcast_to", k=numbers((1, *K[1:]))),
    shape_case("seq of v", "k and v", "heads and seq", "(2, 2, 9, 6)", v=numbers((2, 2, 9, 6))),
    shape_case("heads of v", "k and v", "heads and seq", "(2, 4, 7, 6)", v=numbers((2, 4, 7, 6))),
    shape_case("head_dim of k", "q and k", "head_dim", "(2, 2, 7, 9)", k=numbers((2, 2, 7, 9))),
    shape_case("heads not divisible", "heads of q (3)", "(2)", "multiple", "layout", q=numbers((2, 3, 5, 8))),
    shape_case("fewer heads in q", "heads of q (1)", "(2)", "multiple", "layout", q=numbers((2, 1, 5, 8))),
    shape_case("no heads in q", "heads of q (0)", "(2)", "positive", q=numbers((2, 0, 5, 8))),
    shape_case("no heads in k", "heads of q (4)", "(0)", "positive", k=numbers((2, 0, 7, 8)), v=numbers((2, 0, 7, 6))),
    shape_case(
        "head_dim 0", "head_dim", "at least 1", "(2, 4, 5, 0)", q=numbers((2, 4, 5, 0)), k=numbers((2, 2, 7, 0))
    ),
    shape_case("head_dim_v 0", "head_dim", "at least 1", "(2, 2, 7, 0)", v=numbers((2, 2, 7, 0))),
    shape_case("layout of q", "heads of q (5)", "(7)", "multiple", "'bshd'", layout="bshd"),
    shape_case(
        "too many keys",
        "k has seq 1073741825",
        "1073741824",
        "split",
        k=np.broadcast_to(np.float32(1), (2, 2, (1 << 30) + 1, 8)),
        v=np.broadcast_to(np.float32(1), (2, 2, (1 << 30) + 1, 6)),
    ),
    shape_case("mask keys", "mask has shape (5, 8)", "(2, 4, 5, 7)", "length 1", mask=np.ones((5, 8), bool)),
    shape_case("mask rows", "mask has shape (6, 7)", "(2, 4, 5, 7)", "length 1", mask=np.ones((6, 7), bool)),
    shape_case("mask per key head", "mask has shape (2, 2, 5, 7)", "length 1", mask=np.ones((2, 2, 5, 7), bool)),
    shape_case(
        "mask axes", "mask has shape (1, 2, 4, 5, 7)", "(2, 4, 5, 7)", "length 1", mask=np.ones((1, *SCORES), bool)
    ),
    shape_case("bias keys", "bias has shape (6,)", "(2, 4, 5, 7)", "length 1", bias=numbers((6,))),
    shape_case("bias empty", "bias has shape (5, 0)", "(2, 4, 5, 7)", "length 1", bias=numbers((5, 0))),
    # ---- scalars -----------------------------------------------------------------------------------------------------
    case("scale NaN", "scale=nan", "finite", scale=float("nan")),
    case("scale infinite", "scale=-inf", "finite", scale=-float("inf")),
    case("scale beyond float32", "scale=1e+39", "finite", "3.4028235e+38", scale=1e39),
    case("scale beyond float64", "scale=1000", "finite", scale=10**400),
    case("scale bool", "scale=True", "real number", "float", scale=True),
    case("scale NumPy bool", "scale=np.True_", "real number", "float", scale=np.True_),
    case("scale str", "scale='1'", "real number", "float", scale="1"),
    case("scale complex", "scale=1j", "real number", "float", scale=1j),
    case("scale NumPy complex", "scale=np.complex64(1", "real number", "float", scale=np.complex64(1)),
    case("scale array", "scale=array([1.", "real number", "float", scale=np.ones(4)),
    case("softcap 0", "softcap=0", "greater than 0", "None", softcap=0),
    case("softcap negative", "softcap=-30.0", "greater than 0", "None", softcap=-30.0),
    case("softcap NaN", "softcap=nan", "finite", softcap=float("nan")),
    case("softcap denormal", "softcap=1e-40", "1.1754944e-38", "None", softcap=1e-40),
    case("softcap str", "softcap='on'", "real number", softcap="on"),
    # ---- options -----------------------------------------------------------------------------------------------------
    case("causal 1", "causal=1", "True, False", "'top_left'", causal=1),
    case("causal word", "causal='bottomright'", "'bottom_right'", causal="bottomright"),
    case("causal array", "causal=array(", "'bottom_right'", causal=np.ones(3, bool)),
    case("window a number", "window=3", "pair", "None", window=3),
    case("window of three", "window=(1, 2, 3)", "pair", "None", window=(1, 2, 3)),
    case("window left -2", "window left=-2", "at least 0", "None (or -1)", window=(-2, 0)),
    case("window right huge negative", "window right=-1000000", "at least 0", "None", window=(None, -(10**6))),
    case("window float", "window left=2.0", "integer", "None", window=(2.0, 0)),
    case("window bool", "window right=True", "integer", "None", window=(1, True)),
    case("window str", "window left='1'", "integer", "None", window="12"),
    case("layout", "layout='sbhd'", "'bhsd'", "'bshd'", layout="sbhd"),
    case("layout None", "layout=None", "'bhsd'", "'bshd'", layout=None),
    case("backend unknown", "backend='cudnn'", "numpy, wgmma, mma, simt", backend="cudnn"),
    case("backend no word", "backend=1", "numpy, wgmma, mma, simt", backend=1),
    # ---- modifiers ---------------------------------------------------------------------------------------------------
    case("one modifier", "modifiers=ALiBi(", "sequence", "(ALiBi(),)", modifiers=ALiBi([1, 2, 3, 4])),
    case("modifiers None", "modifiers=None", "sequence", "KeyLengths(lengths)", modifiers=None),
    case("a class", "modifiers contains <class", "ALiBi(slopes)", modifiers=[ALiBi]),
    case("a foreign one", "modifiers contains Foreign(", "no modifier", "ALiBi", modifiers=[Foreign()]),
    case("twice", "alibi 2 times", "at most once", "combine", modifiers=[ALiBi([1.0] * 4), ALiBi([1.0] * 4)]),
    case("lengths absent", "lengths of KeyLengths is None", "numpy.asarray", modifiers=[KeyLengths()]),
    case("lengths float", "lengths of KeyLengths", "float64", "int32", modifiers=[KeyLengths([1.0, 2.0])]),
    case("lengths bool", "lengths of KeyLengths", "bool", "int32", modifiers=[KeyLengths([True, False])]),
    case("lengths int16", "lengths of KeyLengths", "int16", "astype", modifiers=[KeyLengths(np.ones(2, np.int16))]),
    case("length -1", "lengths of KeyLengths contains -1", "0 to 7", modifiers=[KeyLengths([3, -1])]),
    case("length 8", "lengths of KeyLengths contains 8", "0 to 7", modifiers=[KeyLengths(np.array([8, 1]))]),
    case("length 2**40", "contains 1099511627776", "0 to 7", modifiers=[KeyLengths([1 << 40, 0])]),
    case("lengths ragged", "lengths of KeyLengths=[[1], [1, 2]]", "no array", modifiers=[KeyLengths([[1], [1, 2]])]),
    shape_case("three lengths", "lengths of KeyLengths has shape (3,)", "(2,)", modifiers=[KeyLengths([1, 2, 3])]),
    case("slopes absent", "slopes of ALiBi is None", "numpy.asarray", modifiers=[ALiBi()]),
    case("slopes complex", "slopes of ALiBi has dtype complex128", "real", modifiers=[ALiBi([1j] * 4)]),
    case("slopes words", "slopes of ALiBi has dtype <U1", "real", modifiers=[ALiBi(["a"] * 4)]),
    case("slopes NaN", "slopes of ALiBi contains nan", "finite", modifiers=[ALiBi([1.0, float("nan"), 1.0, 1.0])]),
    case("slopes beyond float32", "slopes of ALiBi contains 1e+39", "float32", modifiers=[ALiBi([1e39] * 4)]),
    case("ids absent", "ids_k of Documents is None", "numpy.asarray", modifiers=[Documents([0] * 5)]),
    case("ids float", "ids_q of Documents has dtype float64", "int32", modifiers=[Documents([0.5] * 5, [0] * 7)]),
    case("ids bool", "ids_k of Documents has dtype bool", "int32", modifiers=[Documents([0] * 5, [True] * 7)]),
    case("ids too large", "ids_q of Documents contains 2147483648", modifiers=[Documents([1 << 31] * 5, [0] * 7)]),
    case("ids ragged", "ids_q of Documents=[[1], [1, 2]]", "no array", modifiers=[Documents([[1], [1, 2]], [0] * 7)]),
    shape_case("six ids", "ids_q of Documents has shape (6,)", "(2, 5)", modifiers=[Documents([0] * 6, [0] * 7)]),
    shape_case("ids of heads", "ids_k of Documents", "(2, 7)", modifiers=[Documents([0] * 5, np.ones((2, 4, 7), int))]),
    case("two Documents", "documents 2 times", "at most once", modifiers=[Documents([0] * 5, [0] * 7)] * 2),
    case("blocks absent", "blocks of BlockMask is None", "numpy.asarray", modifiers=[BlockMask(None, 4)]),
    case("blocks int", "blocks of BlockMask has dtype int64", "bool", modifiers=[BlockMask([[1, 1], [1, 1]], 4)]),
    shape_case(
        "too few blocks",
        "blocks of BlockMask has shape (2, 3)",
        "(*batch, heads_q, ceil(seq_q / 4), ceil(seq_k / 4)) = (2, 4, 2, 2)",
        modifiers=[BlockMask(np.ones((2, 3), bool), 4)],
    ),
    case("logits absent", "logits of Sinks is None", "numpy.asarray", modifiers=[Sinks()]),
    case("logits complex", "logits of Sinks has dtype complex128", "real", modifiers=[Sinks([1j] * 4)]),
    case("logits bool", "logits of Sinks has dtype bool", "astype", modifiers=[Sinks([True] * 4)]),
    shape_case("logits per key head", "logits of Sinks has shape (2,)", "(2, 4)", modifiers=[Sinks([1.0, 2.0])]),
    case("two Sinks", "sinks 2 times", "at most once", modifiers=[Sinks([0.0] * 4), Sinks([0.0] * 4)]),
    shape_case("slopes per key head", "slopes of ALiBi has shape (2,)", "(2, 4)", modifiers=[ALiBi([1.0, 2.0])]),
]


def snapshot(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arrays of a call by name, with the bytes of the memory they are views of, where it is small."""
    found = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray) and x.dtype != object}
    return {name: (x, root(x).tobytes()) for name, x in found.items() if root(x).nbytes < 1 << 20}


def root(x: np.ndarray) -> np.ndarray:
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def refuses(case: Case, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    before = snapshot(arguments)
    with pytest.raises(CuflashError) as caught:
        call(**arguments)
    assert type(caught.value) is case.error
    message = str(caught.value)
    assert not [word for word in case.words if word not in message], message
    assert all(root(x).tobytes() == kept for x, kept in before.values())


@pytest.mark.parametrize("function", [cuflash.attention, cuflash.attention_vjp, cuflash.explain])
@pytest.mark.parametrize("case", INPUT_CASES)
def test_bad_input(case: Case, function: Callable[..., Any]) -> None:
    arguments = good()
    refuses(case, function, arguments | case.changes(arguments))


def test_the_good_call_is_good() -> None:
    assert cuflash.attention(**good()).shape == OUT


def test_an_unknown_option_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="dropout_p"):
        cuflash.attention(**good(), dropout_p=0.1)


@pytest.mark.parametrize("function", [cuflash.attention, cuflash.attention_vjp])
def test_a_flag_that_is_none(function: Callable[..., Any]) -> None:
    refuses(Case(lambda _: {}, ("return_lse=1", "True or False")), function, good() | {"return_lse": 1})


# ---- out= ------------------------------------------------------------------------------------------------------------
def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def inside(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The first elements of an array's own memory in another shape."""
    return root(x).reshape(-1)[: np.prod(shape)].reshape(shape)


OUT_CASES = [
    case("list", "out is [0.0]", "list", "numpy.asarray", out=[0.0]),
    shape_case("shape", "out has shape (2, 4, 5, 8)", "(2, 4, 5, 6)", "arguments", out=np.zeros(Q, np.float32)),
    shape_case("axes", "out has shape (4, 5, 6)", "(2, 4, 5, 6)", "arguments", out=np.zeros(OUT[1:], np.float32)),
    case("dtype", "out has dtype float64", "float32", "astype", out=np.zeros(OUT)),
    case("read-only", "out is read-only", "writeable=True", out=read_only(np.zeros(OUT, np.float32))),
    case(
        "stride 0",
        "out of shape (2, 4, 5, 6)",
        "share memory",
        "not broadcast",
        out=np.lib.stride_tricks.as_strided(np.zeros((5, 6), np.float32), OUT, (0, 0, 24, 4)),
    ),
    case(
        "rows that overlap",
        "out of shape (2, 4, 5, 6)",
        "share memory",
        "not broadcast",
        out=np.lib.stride_tricks.as_strided(np.zeros(240, np.float32), OUT, (480, 120, 20, 4)),
    ),
    derived("overlaps q", lambda a: {"out": inside(a["q"], OUT)}, "out overlaps q", "bytes [0x", "own memory"),
    derived(
        "is v",
        lambda a: {"q": a["q"][:, :2], "v": (v := numbers((2, 2, 5, 6))), "k": a["k"][:, :, :5], "out": v},
        "out overlaps v",
        "own memory",
    ),
    derived(
        "overlaps k by one element",
        lambda a: {"k": (b := np.zeros(463, np.float32))[239:463].reshape(K), "out": b[:240].reshape(OUT)},
        "out overlaps k",
        "own memory",
    ),
    derived(
        "overlaps bias",
        lambda a: {"bias": (b := np.zeros(280, np.float32)).reshape(SCORES), "out": b[:240].reshape(OUT)},
        "out overlaps bias",
        "own memory",
    ),
    derived(
        "overlaps slopes",
        lambda a: {"out": (o := np.ones(OUT, np.float32)), "modifiers": [ALiBi(o.reshape(-1)[-4:])]},
        "out overlaps slopes of ALiBi",
        "own memory",
    ),
]


@pytest.mark.parametrize("case", OUT_CASES)
def test_bad_out(case: Case) -> None:
    arguments = good()
    refuses(case, cuflash.attention, arguments | case.changes(arguments))


def test_out_between_the_inputs_of_one_buffer_is_allowed() -> None:
    fused = numbers((2, 4, 7, 4, 8))
    q, k, v, out = (fused[..., i, :] for i in range(4))
    expected = cuflash.attention(q.copy(), k.copy(), v.copy())
    assert cuflash.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)


# ---- the backward ----------------------------------------------------------------------------------------------------
BACKWARD_CASES = [
    shape_case("dout shape", "dout has shape (2, 4, 5, 8)", "(2, 4, 5, 6)", dout=np.zeros(Q, np.float32)),
    shape_case("dout of the other layout", "dout has shape (2, 5, 4, 6)", dout=np.zeros((2, 5, 4, 6), np.float32)),
    shape_case("dout would broadcast", "dout has shape (1, 1, 1, 6)", dout=np.zeros((1, 1, 1, 6), np.float32)),
    case("dout dtype", "dout has dtype float64", "float32", "astype", dout=np.zeros(OUT)),
    case("dout absent", "dout is None", "numpy.asarray", dout=None),
    shape_case("out shape", "out has shape (2, 4, 5, 7)", "(2, 4, 5, 6)", out=np.zeros(SCORES, np.float32)),
    case("out dtype", "out has dtype float16", "float32", "astype", out=np.zeros(OUT, np.float16)),
    case("out absent", "out is None", "numpy.asarray", out=None),
    shape_case("lse shape", "lse has shape (2, 4, 7)", "(2, 4, 5)", "seq_q", lse=np.zeros((2, 4, 7), np.float32)),
    shape_case("lse with an axis more", "lse has shape (2, 4, 5, 1)", lse=np.zeros((*LSE, 1), np.float32)),
    case("lse dtype", "lse has dtype float64", "float32", "astype", lse=np.zeros(LSE)),
    case("lse absent", "lse is None", "numpy.asarray", lse=None),
    shape_case("dlse shape", "dlse has shape (2, 5, 4)", "(2, 4, 5)", dlse=np.zeros((2, 5, 4), np.float32)),
    case("dlse dtype", "dlse has dtype float16", "float32", "astype", dlse=np.zeros(LSE, np.float16)),
    case("deterministic", "deterministic=1", "True, False or None", deterministic=1),
    *INPUT_CASES,
]


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_bad_backward(case: Case) -> None:
    arguments = good()
    out, lse = cuflash.attention(**arguments, return_lse=True)
    arguments |= {"dout": numbers(OUT), "out": out, "lse": lse}
    refuses(case, cuflash.attention_backward, arguments | case.changes(arguments))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_lse_stays_float32_for_16_bits(dtype: Any) -> None:
    arguments = {name: x.astype(dtype) for name, x in good().items()}
    out, lse = cuflash.attention(**arguments, return_lse=True)
    with pytest.raises(ArgumentError, match="lse has dtype"):
        cuflash.attention_backward(out, **arguments, out=out, lse=lse.astype(dtype))


# ---- places ----------------------------------------------------------------------------------------------------------
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # an import of it now fails


@pytest.mark.parametrize("backend", ["simt", "mma"])
@pytest.mark.parametrize("function", [cuflash.attention, cuflash.explain])
def test_no_gpu_where_one_was_asked_for(
    function: Callable[..., Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    words = (f"backend='{backend}'", "q is a numpy array on the host", "no GPU", "pip install", "cupy.asarray")
    refuses(Case(lambda _: {}, words, UnsupportedError), function, good() | {"backend": backend})


def device_array(shape: tuple[int, ...], dtype: Any = np.float16, device: int = 0, at: int = 1 << 20) -> Any:
    """A CuPy array whose memory is never touched: enough for everything that happens before a launch."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed: arrays on a device cannot even be described")
    import cupy

    memory = cupy.cuda.UnownedMemory(at, 1 << 24, None, device_id=device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def on_device() -> dict[str, Any]:
    return {"q": device_array(Q), "k": device_array(K), "v": device_array(V)}


def refuses_on_device(words: tuple[str, ...], error: type[Exception] = ArgumentError, **changes: Any) -> None:
    with pytest.raises(CuflashError) as caught:
        cuflash.attention(**on_device() | changes)
    assert type(caught.value) is error
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_k_on_the_host_beside_q_on_a_device() -> None:
    words = ("q is a cupy array on cuda:0", "k is a numpy array on the host", "move")
    refuses_on_device(words, k=numbers(K, np.float16))


def test_two_devices() -> None:
    words = ("q is a cupy array on cuda:0", "v is a cupy array on cuda:1", "move")
    refuses_on_device(words, v=device_array(V, device=1))


def test_mask_and_bias_on_the_host_beside_q_on_a_device() -> None:
    refuses_on_device(("mask is a numpy array on the host", "q is a cupy array on cuda:0"), mask=np.ones(SCORES, bool))
    refuses_on_device(("bias is a numpy array on the host",), bias=np.ones(SCORES, np.float16))


def test_out_on_the_host_beside_q_on_a_device() -> None:
    refuses_on_device(("out is a numpy array on the host",), out=np.zeros(OUT, np.float16))


def test_lengths_on_another_device() -> None:
    lengths = KeyLengths(device_array((2,), np.int32, device=1))
    refuses_on_device(
        ("lengths of KeyLengths is a cupy array on cuda:1", "q is a cupy array on cuda:0"), modifiers=[lengths]
    )


def test_lengths_on_a_device_beside_q_on_the_host() -> None:
    with pytest.raises(ArgumentError, match=r"lengths of KeyLengths is a cupy array on cuda:0, but q is a numpy array"):
        cuflash.attention(**good(), modifiers=[KeyLengths(device_array((2,), np.int32))])


def test_lengths_of_a_wrong_dtype_on_the_device() -> None:
    refuses_on_device(("lengths of KeyLengths has dtype float16", "int32"), modifiers=[KeyLengths(device_array((2,)))])


def test_dtypes_and_shapes_on_a_device() -> None:
    refuses_on_device(("q has dtype int32", "astype"), q=device_array(Q, np.int32))
    refuses_on_device(("heads of q (3)", "(2)"), ShapeError, q=device_array((2, 3, 5, 8)))
    refuses_on_device(("out has dtype float32", "float16"), out=device_array(OUT, np.float32))


def test_out_that_overlaps_on_a_device() -> None:
    refuses_on_device(("out overlaps q", "own memory"), out=device_array(OUT, at=(1 << 20) + 600))


def test_out_broadcast_on_a_device() -> None:
    row = device_array(OUT[-1:], at=1 << 26)
    import cupy

    out = cupy.broadcast_to(row, OUT)
    refuses_on_device(("out of shape (2, 4, 5, 6)", "share memory", "not broadcast"), out=out)


def test_misaligned_on_a_device() -> None:
    refuses_on_device(("q starts at byte 1", "aligned"), q=device_array(Q, at=(1 << 20) + 1))


def test_numpy_backend_for_device_arrays() -> None:
    words = ("backend='numpy'", "q is a cupy array on cuda:0", "cupy.asnumpy")
    refuses_on_device(words, UnsupportedError, backend="numpy")


def test_device_arrays_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = on_device()
    import cupy

    from cuflash import arrays

    monkeypatch.setattr(cupy.cuda, "is_available", lambda: False)
    arrays.require_gpu.cache_clear()
    with pytest.raises(UnsupportedError, match="no usable GPU: CuPy finds no CUDA driver or no device"):
        cuflash.attention(**arguments)


def test_every_message_of_the_cases_differs_from_the_next() -> None:
    """The words of each case single it out: no case passes on another one's message."""
    messages: dict[str, set[str]] = {}
    for parameters in INPUT_CASES:
        (bad,) = parameters.values
        arguments = good()
        try:
            cuflash.attention(**arguments | bad.changes(arguments))
        except CuflashError as error:
            messages.setdefault(str(error), set()).add(str(parameters.id))
    assert not [names for names in messages.values() if len(names) > 1]
