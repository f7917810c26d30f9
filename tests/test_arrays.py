"""Any array in, the caller's own kind out: DLPack exporters, read-only inputs, sequences in modifiers, overlaps."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import ALiBi, ArgumentError, KeyLengths, UnsupportedError, arrays

Q, K, V = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


class Exporter:
    """The least that a DLPack exporter can do; another library's array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def dtype(self) -> str:
        return f"library.{self.array.dtype}"

    def __dlpack__(self, **options: Any) -> Any:
        if self.array.dtype == ml_dtypes.bfloat16:
            raise BufferError("bfloat16 is more than NumPy can take")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def view(self, dtype: Any) -> Exporter:
        return type(self)(self.array.view(dtype))


class Namespaced(Exporter):
    """An exporter that says by itself where its functions are (Python array API)."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(__name__="spaced.numpy", from_dlpack=lambda x: Namespaced(np.from_dlpack(x)))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `library` whose array type is `library.Array`, as PyTorch's is `torch.Tensor`."""
    module = ModuleType("library")
    module.Array = type("Array", (Exporter,), {"__module__": "library.inner"})  # type: ignore[attr-defined]
    module.from_dlpack = lambda x: module.Array(np.from_dlpack(x))  # type: ignore[attr-defined]
    module.int16, module.bfloat16 = np.int16, ml_dtypes.bfloat16  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "library", module)
    return module


def inputs(kind: Any, dtype: Any = np.float32) -> dict[str, Any]:
    return {"q": kind(numbers(Q, dtype)), "k": kind(numbers(K, dtype)), "v": kind(numbers(V, dtype))}


def run(kind: Any, dtype: Any = np.float32, **options: Any) -> list[Any]:
    """Everything a call returns, forward and backward, with inputs of some kind."""
    given = inputs(kind, dtype)
    bias, mask = kind(numbers((5, 7), dtype)), kind(numbers((4, 5, 7)) > -1)
    out, lse, vjp = cuflash.attention_vjp(**given, bias=bias, mask=mask, return_lse=True, **options)
    return [out, lse, *vjp(out, lse)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_own_kind_out(library: ModuleType, dtype: Any) -> None:
    for x, want in zip(run(library.Array, dtype), run(np.asarray, dtype), strict=True):
        assert type(x) is library.Array
        np.testing.assert_array_equal(x.array, want)
        assert x.array.dtype == want.dtype


def test_own_kind_out_in_the_other_layout(library: ModuleType) -> None:
    given = {name: library.Array(x.array.swapaxes(1, 2)) for name, x in inputs(library.Array).items()}
    out, vjp = cuflash.attention_vjp(**given, layout="bshd")
    assert out.array.shape == (2, 5, 4, 6)
    for x, name in zip(vjp(out), "qkv", strict=True):
        assert type(x) is library.Array
        assert x.array.shape == given[name].array.shape
        assert x.array.flags.c_contiguous  # JAX takes nothing else


def test_a_subclass_of_another_module_belongs_to_the_library(library: ModuleType) -> None:
    mine = type("Mine", (library.Array,), {"__module__": "nowhere"})
    assert {type(x) for x in run(mine)} == {library.Array}


def test_own_kind_out_by_array_namespace() -> None:
    assert {type(x) for x in run(Namespaced)} == {Namespaced}


def test_numpy_out_where_the_library_cannot_import() -> None:
    for x, want in zip(run(Exporter), run(np.asarray), strict=True):
        assert type(x) is np.ndarray
        np.testing.assert_array_equal(x, want)


def test_numpy_and_exporters_that_leave_as_numpy_mix() -> None:
    given = inputs(np.asarray)
    assert type(cuflash.attention(Exporter(given["q"]), given["k"], given["v"])) is np.ndarray


def test_kinds_do_not_mix(library: ModuleType) -> None:
    given = inputs(np.asarray) | {"k": library.Array(numbers(K))}
    with pytest.raises(ArgumentError, match="q is a numpy array on the host, k is a library array on the host"):
        cuflash.attention(**given)
    with pytest.raises(ArgumentError, match="mask is a library array on the host"):
        cuflash.attention(**inputs(np.asarray), mask=library.Array(np.ones((5, 7), bool)))


def test_out_of_the_own_kind_is_written_and_returned(library: ModuleType) -> None:
    target = library.Array(np.zeros((2, 4, 5, 6), np.float32))
    assert cuflash.attention(**inputs(library.Array), out=target) is target
    np.testing.assert_array_equal(target.array, cuflash.attention(**inputs(np.asarray)))


def test_out_of_an_immutable_library_is_refused(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "IMMUTABLE", ("library",))
    with pytest.raises(ArgumentError, match="out is a library array on the host, and such arrays cannot be written"):
        cuflash.attention(**inputs(library.Array), out=library.Array(np.zeros((2, 4, 5, 6), np.float32)))


def test_read_only_inputs_are_welcome() -> None:
    def locked(x: np.ndarray) -> np.ndarray:
        x.flags.writeable = False
        return x

    for x, want in zip(run(locked), run(np.asarray), strict=True):
        np.testing.assert_array_equal(x, want)


def test_bfloat16_through_array_where_there_is_no_module() -> None:
    class Plain(Exporter):
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return self.array

    want = cuflash.attention(**inputs(np.asarray, ml_dtypes.bfloat16))
    np.testing.assert_array_equal(cuflash.attention(**inputs(Plain, ml_dtypes.bfloat16)), want)


@pytest.mark.parametrize("subclass", [np.memmap, np.recarray])
def test_subclasses_of_numpy_arrays_leave_as_plain_ones(subclass: type) -> None:
    out = cuflash.attention(**inputs(lambda x: x.view(subclass)))
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, cuflash.attention(**inputs(np.asarray)))


# ---- exporters that cannot be taken ----------------------------------------------------------------------------------
class Elsewhere(Exporter):
    device = (8, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OnCuda(Elsewhere):
    device = (2, 0)


class Attached(Exporter):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


class Rounded(Exporter):
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array.astype(np.float32)


def test_device_of_another_maker() -> None:
    with pytest.raises(ArgumentError, match=r"q .*Elsewhere.* lies on DLPack device \(8, 0\).*move it"):
        cuflash.attention(**inputs(Elsewhere))


def test_arrays_on_a_cuda_device_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=r"q .*OnCuda.* is on a CUDA device, and CuPy.*pip install 'cuflash"):
        cuflash.attention(**inputs(OnCuda))


def test_what_the_exporter_says_is_passed_on() -> None:
    with pytest.raises(ArgumentError, match=r"q .*Attached.* require gradient, use tensor.detach\(\)"):
        cuflash.attention(**inputs(Attached))
    with pytest.raises(ArgumentError, match="bfloat16 became float32"):
        cuflash.attention(**inputs(Rounded, ml_dtypes.bfloat16))


def test_cuda_array_interface_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=r"k .*SimpleNamespace"):
        cuflash.attention(
            numbers(Q), SimpleNamespace(__cuda_array_interface__={"data": (0, False), "shape": K}), numbers(V)
        )


# ---- the arrays of modifiers -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lengths", "wide"),
    [
        ([3, 7], False),
        ((0, 7), False),
        (range(2, 4), False),
        (5, False),
        ([[3, 7]], None),
        (np.array([3, 7], np.int32), False),
        (np.array([3, 7], np.int64), True),
        (np.array([3, 9, 7, 9], np.int64)[::2], True),
        (np.int32(4), False),
        (np.int64(4), True),
    ],
)
def test_lengths_of_every_kind(lengths: Any, wide: bool | None) -> None:
    if wide is None:
        with pytest.raises(cuflash.ShapeError, match="lengths"):
            cuflash.attention(**inputs(np.asarray), modifiers=[KeyLengths(lengths)])
        return
    (converted,) = arrays.native_modifiers([KeyLengths(lengths)], arrays.HOST, "float32", 7)
    assert isinstance(converted, KeyLengths)
    assert converted.wide is wide
    assert converted.lengths.dtype == (np.int64 if wide else np.int32)
    visible = np.arange(7) < np.broadcast_to(np.asarray(lengths), 2).reshape(2, 1, 1, 1)
    want = cuflash.attention(**inputs(np.asarray), mask=visible)
    got = cuflash.attention(**inputs(np.asarray), modifiers=[KeyLengths(lengths)])
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_no_lengths_for_no_batch_entries() -> None:
    given = {name: x[:0] for name, x in inputs(np.asarray).items()}
    assert cuflash.attention(**given, modifiers=[KeyLengths([])]).shape == (0, 4, 5, 6)


@pytest.mark.parametrize("dtype", [np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("arrays_dtype", [np.float32, np.float64])
def test_slopes_of_every_dtype(dtype: Any, arrays_dtype: Any) -> None:
    slopes = np.array([1, 2, 3, 4], dtype)
    (converted,) = arrays.native_modifiers([ALiBi(slopes)], arrays.HOST, np.dtype(arrays_dtype).name, 7)
    assert isinstance(converted, ALiBi)
    assert converted.slopes.dtype == arrays_dtype
    np.testing.assert_array_equal(converted.slopes, [1, 2, 3, 4])
    given = inputs(np.asarray, arrays_dtype)
    want = cuflash.attention(**given, modifiers=[ALiBi([1, 2, 3, 4.0])])
    np.testing.assert_array_equal(cuflash.attention(**given, modifiers=(ALiBi(slopes),)), want)


def test_modifiers_take_the_callers_own_kind(library: ModuleType) -> None:
    chain = [ALiBi(library.Array(np.ones(4, np.float32))), KeyLengths(library.Array(np.array([2, 3])))]
    want = cuflash.attention(**inputs(np.asarray), modifiers=[ALiBi([1.0] * 4), KeyLengths([2, 3])])
    np.testing.assert_array_equal(cuflash.attention(**inputs(library.Array), modifiers=chain).array, want)


def test_the_users_modifier_is_not_changed() -> None:
    lengths, slopes = [3, 7], [1, 2, 3, 4]
    chain = [KeyLengths(lengths), ALiBi(slopes)]
    cuflash.attention(**inputs(np.asarray), modifiers=chain)
    assert chain[0].lengths is lengths
    assert chain[1].slopes is slopes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for CuPy that counts the copies to a device."""
    stream = SimpleNamespace(waits=0)
    stream.synchronize = lambda: setattr(stream, "waits", stream.waits + 1)
    cuda = SimpleNamespace(Device=nullcontext, get_current_stream=lambda: stream, is_available=lambda: True)
    copies: list[np.ndarray] = []

    def asarray(x: np.ndarray) -> SimpleNamespace:
        copies.append(x)
        return SimpleNamespace(dtype=x.dtype, values=x.copy())

    module = SimpleNamespace(cuda=cuda, asarray=asarray, ndarray=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "cupy", module)
    arrays.require_gpu.cache_clear()
    yield SimpleNamespace(copies=copies, stream=stream)
    arrays.require_gpu.cache_clear()


def placed(modifier: Any, number: int = 0, dtype: str = "float16") -> Any:
    (converted,) = arrays.native_modifiers([modifier], arrays.device_home(number), dtype, 7)
    return converted


def test_a_device_gets_lengths_once(device: SimpleNamespace) -> None:
    lengths = KeyLengths([3, 7])
    first = placed(lengths)
    assert placed(lengths).lengths is first.lengths
    assert len(device.copies) == 1
    assert device.stream.waits == 1  # other streams may read it at once
    placed(lengths, number=1)
    assert len(device.copies) == 2


def test_a_device_gets_slopes_once_for_each_dtype(device: SimpleNamespace) -> None:
    slopes = ALiBi(np.arange(4))
    assert placed(slopes).slopes is placed(slopes, dtype="bfloat16").slopes
    assert placed(slopes, dtype="float64").slopes.values.dtype == np.float64
    assert len(device.copies) == 2


def test_a_device_gets_lengths_again_when_they_change(device: SimpleNamespace) -> None:
    values = np.array([3, 7], np.int32)
    lengths = KeyLengths(values)
    first = placed(lengths).lengths
    values[0] = 4
    np.testing.assert_array_equal(first.values, [3, 7])
    np.testing.assert_array_equal(placed(lengths).lengths.values, [4, 7])
    assert len(device.copies) == 2


def test_lengths_are_checked_on_each_call(device: SimpleNamespace) -> None:
    lengths = KeyLengths([3, 7])
    placed(lengths)
    with pytest.raises(ArgumentError, match="contains 7: each must be from 0 to 6"):
        arrays.native_modifiers([lengths], arrays.device_home(0), "float16", 6)


def test_copies_on_a_device_do_not_travel_with_the_modifier(device: SimpleNamespace) -> None:
    lengths = KeyLengths([3, 7])
    placed(lengths)
    for twin in (pickle.loads(pickle.dumps(lengths)), copy.deepcopy(lengths)):
        assert twin.lengths == [3, 7]
        placed(twin)
    assert len(device.copies) == 3


# ---- memory ----------------------------------------------------------------------------------------------------------
def random_view(rng: np.random.Generator, buffer: np.ndarray) -> np.ndarray:
    """A view of 1 to 3 axes with any strides, negative ones and 0 included, inside the buffer."""
    size = buffer.itemsize
    while True:
        shape = rng.integers(0, 5, rng.integers(1, 4))
        strides = rng.integers(-9, 10, shape.size)
        reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
        if high - low < buffer.size:
            start = rng.integers(-low, buffer.size - high)
            return np.lib.stride_tricks.as_strided(buffer[start:], shape, strides * size)


def elements(x: np.ndarray) -> list[int]:
    """Addresses of all elements."""
    grid = np.ix_(*(np.arange(n) * s for n, s in zip(x.shape, x.strides, strict=True)))
    return [] if x.size == 0 else (x.ctypes.data + sum(grid)).reshape(-1).tolist()


def test_overlaps_by_comparison_of_all_addresses() -> None:
    rng = np.random.default_rng(0)
    buffer = np.zeros(60, np.float32)
    seen = set()
    for _ in range(3000):
        a, b = random_view(rng, buffer), random_view(rng, buffer)
        shared = bool(set(elements(a)) & set(elements(b)))
        assert arrays.overlaps(a, b) == shared
        seen.add(shared)
        first, end = arrays.extent(a)
        if a.size:
            assert (first, end) == (min(elements(a)), max(elements(a)) + 4)
    assert seen == {True, False}


def test_overlap_with_itself_by_comparison_of_all_addresses() -> None:
    rng = np.random.default_rng(1)
    buffer = np.zeros(80, np.float32)
    refused = missed = 0
    for _ in range(3000):
        x = random_view(rng, buffer)
        repeated = len(set(elements(x))) < x.size
        assert arrays.overlaps_itself(x) or not repeated
        refused += repeated
        missed += arrays.overlaps_itself(x) and not repeated
    assert refused > 300
    assert missed < 300  # interleaved axes that only as_strided makes


@pytest.mark.parametrize(
    "view", [np.s_[::-1], np.s_[:, ::2], np.s_[1:, ..., 3:], np.s_[..., 0], np.s_[:0], np.s_[:, None]]
)
def test_ordinary_views_do_not_overlap_themselves(view: Any) -> None:
    x = np.zeros((4, 5, 6))
    assert not arrays.overlaps_itself(x[view])
    assert not arrays.overlaps_itself(x.transpose(2, 0, 1)[view])


# ---- real libraries on the host --------------------------------------------------------------------------------------
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


@needs_jax
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_on_the_host(dtype: str) -> None:
    import jax

    host = jax.local_devices(backend="cpu")[0]
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    results = run(lambda x: jax.device_put(x, host), numpy_dtype)
    for x, want in zip(results, run(np.asarray, numpy_dtype), strict=True):
        assert isinstance(x, jax.Array)
        assert x.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(x), want)
    given = inputs(lambda x: jax.device_put(x, host))
    with pytest.raises(ArgumentError, match="out is a jax array on the host, and such arrays cannot be written"):
        cuflash.attention(**given, out=given["q"][..., :6])


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_on_the_host(dtype: str) -> None:
    import torch

    def tensor(x: np.ndarray) -> Any:
        if x.dtype == bool:
            return torch.from_numpy(x)
        return torch.from_numpy(x.astype(np.float64)).to(getattr(torch, dtype))

    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for x, want in zip(run(tensor, numpy_dtype), run(np.asarray, numpy_dtype), strict=True):
        assert isinstance(x, torch.Tensor)
        np.testing.assert_array_equal(x.double().numpy(), want.astype(np.float64))
    given = inputs(tensor, numpy_dtype)
    target = torch.empty(2, 4, 5, 6, dtype=getattr(torch, dtype))
    assert cuflash.attention(**given, out=target) is target
    assert torch.equal(target, cuflash.attention(**given))
    with pytest.raises(ArgumentError, match="detach"):
        cuflash.attention(**given | {"q": given["q"].requires_grad_()})
