"""Arrays of other libraries on a GPU: own kind out, streams in order, each device by itself, inputs unchanged."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import ALiBi, ArgumentError, KeyLengths, api

pytestmark = pytest.mark.gpu

Q, K, V, OUT = (2, 4, 65, 32), (2, 2, 77, 32), (2, 2, 77, 32), (2, 4, 65, 32)
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
LIBRARIES = ["cupy", "torch", "jax", "numba"]
MISSING = {
    ("jax", "float64"): "JAX has float64 only in its x64 mode",
    ("numba", "bfloat16"): "Numba has no bfloat16 array",
}


def load(library: str) -> Any:
    """A library, or a skip that says that it is absent; its own warnings at import are not ours."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to the others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = "numba.cuda" if library == "numba" else library
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"{library} cannot be imported: {error}")


def cuda_array(library: str, x: np.ndarray) -> Any:
    """A NumPy array as one of a library on device 0."""
    module = load(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the libraries say while they start and convert is not ours
        if library == "cupy":
            return module.asarray(x)
        if library == "torch":
            if x.dtype == ml_dtypes.bfloat16:
                return module.from_numpy(x.view(np.int16)).cuda().view(module.bfloat16)
            return module.from_numpy(x).cuda()
        if library == "jax":
            return module.device_put(x, module.devices("cuda")[0])
        return module.to_device(x)


def host_array(x: Any) -> np.ndarray:
    """An array of any library as float64 on the host."""
    kind = type(x).__module__.partition(".")[0]
    if kind == "torch":
        return x.double().cpu().numpy()
    if kind == "cupy":
        return x.get().astype(np.float64)
    return np.asarray(x).astype(np.float64)


def kind_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0].replace("jaxlib", "jax")


def numbers(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def inputs(dtype: Any) -> dict[str, np.ndarray]:
    return {
        "q": numbers(Q, dtype),
        "k": numbers(K, dtype),
        "v": numbers(V, dtype),
        "bias": numbers((65, 77), dtype),
        "mask": np.random.default_rng(0).random((4, 65, 77)) < 0.8,
    }


def results(library: str, dtype: Any, **options: Any) -> dict[str, Any]:
    """Everything that a forward and a backward return for arrays of a library."""
    given = {name: cuda_array(library, x) for name, x in inputs(dtype).items()}
    out, lse, vjp = cuflash.attention_vjp(**given, causal=True, deterministic=None, return_lse=True, **options)
    return {"out": out, "lse": lse} | vjp(out, lse)._asdict()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_own_kind_out(library: str, dtype: str) -> None:
    if reason := MISSING.get((library, dtype)):
        pytest.skip(reason)
    chain = [ALiBi([0.5, 0.25, 0.125, 0.0625]), KeyLengths([77, 50])]
    got = results(library, DTYPES[dtype], modifiers=chain)
    host = inputs(np.float64)
    exact, lse, vjp = cuflash.attention_vjp(**host, causal=True, modifiers=chain, return_lse=True)
    want = {"out": exact, "lse": lse} | vjp(exact, lse)._asdict()
    tolerance = {"float16": 0.02, "bfloat16": 0.15, "float32": 2e-4, "float64": 1e-11}[dtype]
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert kind_of(x) == ("cupy" if library == "numba" else library)
        assert tuple(x.shape) == want[name].shape
        if name != "lse":
            assert str(x.dtype).endswith(dtype)
        values, empty = host_array(x), np.isneginf(want[name])
        assert (np.isneginf(values) == empty).all()
        error = np.abs(np.where(empty, 0, values) - np.where(empty, 0, want[name])).max()
        assert error <= tolerance * max(1, np.abs(want[name][~empty]).max()), name


@pytest.mark.parametrize("library", ["torch", "jax", "numba"])
def test_the_same_bits_as_with_cupy(library: str) -> None:
    """The other libraries' arrays reach the same kernel: its forward has the same bits."""
    got, want = results(library, np.float16), results("cupy", np.float16)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(host_array(got[name]), host_array(want[name]))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_other_layout(library: str) -> None:
    given = inputs(np.float16)
    want = cuflash.attention(*(cuda_array("cupy", given[name]) for name in "qkv"))
    swapped = {name: cuda_array(library, np.ascontiguousarray(given[name].swapaxes(1, 2))) for name in "qkv"}
    out, vjp = cuflash.attention_vjp(**swapped, layout="bshd")
    np.testing.assert_array_equal(host_array(out).swapaxes(1, 2), host_array(want))
    assert [tuple(x.shape) for x in vjp(out)] == [tuple(x.shape) for x in swapped.values()]
    assert {kind_of(x) for x in vjp(out)} == {library}


def test_inputs_of_jax_are_not_changed() -> None:
    given = {name: cuda_array("jax", x) for name, x in inputs(np.float16).items()}
    out, vjp = cuflash.attention_vjp(**given)
    vjp(out)
    for name, x in inputs(np.float16).items():
        np.testing.assert_array_equal(np.asarray(given[name]), x)
    with pytest.raises(ArgumentError, match="out is a jax array on cuda:0, and such arrays cannot be written"):
        cuflash.attention(given["q"], given["k"], given["v"], out=out)


def test_views_of_torch() -> None:
    torch = load("torch")
    fused = cuda_array("torch", numbers((2, 65, 3, 4, 32), np.float16))
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    assert torch.equal(cuflash.attention(q, k, v), cuflash.attention(q.contiguous(), k.contiguous(), v.contiguous()))
    out, vjp = cuflash.attention_vjp(q, k, v)
    expanded = torch.ones((), dtype=torch.float16, device="cuda").expand(out.shape)
    assert torch.allclose(vjp(expanded).dv, vjp(expanded.contiguous()).dv, atol=1e-2)


def test_strided_and_empty_arrays_of_numba() -> None:
    q, k, v = (cuda_array("numba", numbers((2, 2, 33, 64))) for _ in range(3))
    empty = load("numba").device_array((0, 2, 33, 64), np.float32)
    half = [x[:, :, :, ::2] for x in (q, k, v)]
    want = cuflash.attention(*(cuda_array("cupy", x.copy_to_host()[..., ::2]) for x in (q, k, v)))
    np.testing.assert_array_equal(cuflash.attention(*half).get(), want.get())
    assert cuflash.attention(empty, empty, empty).shape == (0, 2, 33, 64)


# ---- what must be refused --------------------------------------------------------------------------------------------
def test_libraries_do_not_mix() -> None:
    given = inputs(np.float16)
    q, k, v = (cuda_array("torch", given[name]) for name in "qkv")
    with pytest.raises(ArgumentError, match="q is a torch array on cuda:0, k is a torch array on the host"):
        cuflash.attention(q, k.cpu(), v)
    with pytest.raises(ArgumentError, match="v is a cupy array on cuda:0"):
        cuflash.attention(q, k, cuda_array("cupy", given["v"]))
    with pytest.raises(ArgumentError, match="mask is a numpy array on the host"):
        cuflash.attention(q, k, v, mask=given["mask"])


def test_a_tensor_that_requires_grad_is_told_to_detach() -> None:
    q, k, v = (cuda_array("torch", x) for name, x in inputs(np.float16).items() if name in "qkv")
    with pytest.raises(ArgumentError, match=r"k .*detach"):
        cuflash.attention(q, k.requires_grad_(), v)
    assert cuflash.attention(q, k.detach(), v).shape == OUT


def test_arrays_on_the_host_are_not_moved() -> None:
    given = inputs(np.float16)
    with pytest.raises(cuflash.UnsupportedError, match="q is a numpy array on the host; move"):
        cuflash.attention(given["q"], given["k"], given["v"], backend="mma")


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_out_of_the_own_kind(library: str) -> None:
    q, k, v = (cuda_array(library, inputs(np.float16)[name]) for name in "qkv")
    target = cuda_array(library, np.full(OUT, np.nan, np.float16))
    assert cuflash.attention(q, k, v, out=target) is target
    np.testing.assert_array_equal(host_array(target), host_array(cuflash.attention(q, k, v)))
    with pytest.raises(ArgumentError, match="out overlaps v"):
        cuflash.attention(q[:, :2], k, v, out=v[:, :, :65])


# ---- streams ---------------------------------------------------------------------------------------------------------
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
"""


@pytest.fixture(scope="module")
def spin() -> Any:
    """Occupies the current stream for about 20 ms, or a number of times as long."""
    cupy = load("cupy")
    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.int64(1),))
    return lambda times=1: kernel((1,), (1,), (np.int64(times * 40_000_000),))


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """Inputs on the device, the result for them, and one call of each direction so that nothing compiles later."""
    cupy = load("cupy")
    given = {name: cuda_array("cupy", inputs(np.float16)[name]) for name in "qkv"}
    out, vjp = cuflash.attention_vjp(**given)
    gradients = vjp(out)
    cupy.cuda.Device().synchronize()
    return given | {"out": out, "dv": gradients.dv}


def test_a_delayed_producer_on_the_same_stream(spin: Any, example: dict[str, Any]) -> None:
    """A stream that the null stream does not wait for: work on any other stream reads NaN."""
    cupy = load("cupy")
    q = cupy.full(Q, np.nan, np.float16)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin()
        q[...] = example["q"]
        out, vjp = cuflash.attention_vjp(q, example["k"], example["v"])
        dv = vjp(out).dv
        seen, seen_dv = out.copy(), dv.copy()  # a consumer that does not wait either
        stream.synchronize()
    np.testing.assert_array_equal(seen.get(), example["out"].get())
    assert np.isfinite(seen_dv.get()).all()
    np.testing.assert_allclose(seen_dv.get(), example["dv"].get(), atol=1e-2)


@pytest.mark.parametrize("with_out", [False, True])
def test_a_delayed_producer_and_consumer_on_a_stream_of_torch(
    spin: Any, example: dict[str, Any], with_out: bool
) -> None:
    """Torch's stream writes q late, CuPy's stream computes late, torch's stream reads the result: no one waits."""
    cupy, torch = load("cupy"), load("torch")
    values, k, v = (torch.from_dlpack(example[name]) for name in "qkv")
    q = torch.full_like(values, float("nan"))
    target = torch.full(OUT, float("nan"), dtype=torch.float16, device="cuda") if with_out else None
    torch.cuda.synchronize()
    theirs, ours = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(theirs):
        torch.cuda._sleep(40_000_000)
        q.copy_(values)
        with ours:
            spin()
            out = cuflash.attention(q, k, v, out=target)
        seen = out.clone()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(host_array(seen), host_array(example["out"]))


def test_that_nobody_would_wait_by_chance(spin: Any, example: dict[str, Any]) -> None:
    """A stream that is not ordered after the producer does read NaN; where other processes use the GPU, after longer delays."""
    cupy = load("cupy")
    out = cupy.zeros(OUT, np.float16)  # memory that is there: to ask the driver for some may wait

    def reads_nan(times: int) -> bool:
        q = cupy.full(Q, np.nan, np.float16)
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True):
            spin(times)
            q[...] = example["q"]
        with cupy.cuda.Stream(non_blocking=True) as other:
            cuflash.attention(q, example["k"], example["v"], out=out)
            other.synchronize()
        seen = bool(np.isnan(out.get()).all())
        cupy.cuda.Device().synchronize()
        return seen

    assert any(reads_nan(times) for times in (1, 8, 64))


def test_jax_uses_a_result_at_once(spin: Any) -> None:
    cupy, jnp = load("cupy"), load("jax").numpy
    given = {name: cuda_array("jax", inputs(np.float16)[name]) for name in "qkv"}
    want = host_array(cuflash.attention(**given))
    with cupy.cuda.Stream(non_blocking=True):
        spin()
        doubled = cuflash.attention(**given) * jnp.float16(2)
    np.testing.assert_array_equal(host_array(doubled), 2 * want)


def test_sequences_in_modifiers_are_copied_before_a_capture_only(example: dict[str, Any]) -> None:
    cupy = load("cupy")
    q, k, v = (example[name] for name in "qkv")
    chain = [KeyLengths([50, 77]), ALiBi([1, 2, 3, 4])]
    want = cuflash.attention(q, k, v, modifiers=chain)
    out = cupy.zeros_like(want)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cuflash.attention(q, k, v, modifiers=chain, out=out)
        stream.synchronize()
        out[...] = 0
        stream.begin_capture()
        cuflash.attention(q, k, v, modifiers=chain, out=out)
        graph = stream.end_capture()
        assert not out.get().any()
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(out.get(), want.get())


# ---- devices ---------------------------------------------------------------------------------------------------------
def two_devices() -> None:
    count = load("cupy").cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"this machine has {count} GPU, and the test needs two")


def test_the_device_is_the_arrays_device() -> None:
    two_devices()
    cupy = load("cupy")
    given = inputs(np.float16)
    chain = [KeyLengths([50, 77])]
    want = cuflash.attention(*(cupy.asarray(given[name]) for name in "qkv"), modifiers=chain)
    with cupy.cuda.Device(1):
        there = {name: cupy.asarray(given[name]) for name in "qkv"}
        cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Device(0):
        out, lse, vjp = cuflash.attention_vjp(**there, modifiers=chain, return_lse=True)
        found = [out, lse, *vjp(out)]
        assert cupy.cuda.runtime.getDevice() == 0
    assert {x.data.device_id for x in found} == {1}
    np.testing.assert_array_equal(out.get(), want.get())
    with pytest.raises(ArgumentError, match="q is a cupy array on cuda:0, k is a cupy array on cuda:1"):
        cuflash.attention(cupy.asarray(given["q"]), there["k"], there["v"])


def test_torch_on_the_second_device() -> None:
    two_devices()
    torch = load("torch")
    q, k, v = (cuda_array("torch", inputs(np.float16)[name]).to("cuda:1") for name in "qkv")
    torch.cuda.synchronize(1)
    out, vjp = cuflash.attention_vjp(q, k, v)
    assert {str(x.device) for x in (out, *vjp(out))} == {"cuda:1"}
    assert torch.equal(out.cpu(), cuflash.attention(q.to("cuda:0"), k.to("cuda:0"), v.to("cuda:0")).cpu())


def test_explain_on_the_device(example: dict[str, Any]) -> None:
    explained = cuflash.explain(example["q"], example["k"], example["v"], causal=True)
    assert explained.backend in api.BACKENDS
    assert explained.backend != "numpy"
    assert set(explained.reasons) == set(api.BACKENDS) - {explained.backend}
    assert explained.tile
    assert explained.registers
    assert "registers" in str(explained)
