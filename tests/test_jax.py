"""`cuflash.jax` on the host: values, gradients, JAX's transformations, errors, and XLA's interface."""

from __future__ import annotations

import ctypes
import doctest
import gc
import inspect
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import cuflash
import cuflash.jax
from cuflash import ArgumentError, ShapeError, UnsupportedError, VersionError, numpy_backend
from cuflash.backends import described_device
from cuflash.jax import attention, calls, ffi, versions
from cuflash.plan import Plan
from tests import traced
from tests.cases import Case
from tests.test_import import run as run_python

Q, K, V = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)


@pytest.fixture(autouse=True)
def on_the_host() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(sum(shape) + seed).standard_normal(shape).astype(dtype)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return numbers(Q), numbers(K), numbers(V)


# ---- values and gradients --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", traced.TRACED)
def test_every_option(name: str) -> None:
    traced.check(Case(name, **{"seq_q": 17, "seq_k": 22, **traced.TRACED[name]}))


EVERYTHING = {key: x for key, x in traced.OPTIONS["everything"].items() if key not in ("alibi", "lengths")}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_and_layout(dtype: str, layout: str) -> None:
    traced.check(Case("", dtype, layout=layout, **EVERYTHING))


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": ()},
        {"batch": (2, 1, 3)},
        {"batch": (0,)},
        {"seq_q": 0},
        {"seq_k": 0},
        {"head_dim": 33, "head_dim_v": 1},
    ],
    ids=str,
)
def test_every_size(sizes: dict[str, Any]) -> None:
    traced.check(Case("", **{"seq_q": 9, "seq_k": 11, "bias": "hqk", "causal": True, **sizes}), deterministic=True)


def test_the_same_bits_as_without_jax() -> None:
    made = Case("", **EVERYTHING).make()
    found = traced.step(made)
    options = {**made["options"], "mask": made["options"]["mask"].copy()}
    out, lse, vjp = cuflash.attention_vjp(made["q"], made["k"], made["v"], **options, return_lse=True)
    for name, x in {"out": out, "lse": lse, **vjp(made["dout"], made["dlse"])._asdict()}.items():
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_against_the_attention_of_jax(dtype: Any) -> None:
    """Same layout, scale, diagonal, mask, bias and groups; rows that see no key differ, and there are none."""
    q, k, v = (numbers(shape, dtype) for shape in ((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)))
    bias, mask = numbers((1, 4, 9, 9), dtype), np.random.default_rng(0).random((2, 1, 9, 9)) < 0.7
    mask |= np.eye(9, dtype=bool)
    dout = numbers((2, 9, 4, 8), dtype, seed=1)

    def theirs(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, is_causal=True, scale=0.3)

    def ours(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, bias=bias, mask=mask, causal="top_left", scale=0.3, layout="bshd")

    (out, vjp), (want, want_vjp) = (jax.vjp(jax.jit(f), q, k, v, bias) for f in (ours, theirs))
    for got, expected in zip((out, *vjp(dout)), (want, *want_vjp(dout)), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        error = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64)).max()
        assert error <= 8 * float(jnp.finfo(dtype).eps) * np.abs(np.asarray(expected, np.float64)).max()


def test_gradients_against_differences() -> None:
    """A loss of out and lse, through softcap, bias and a window, in float64."""
    with traced.float64():
        q, k, v, bias = (numbers(shape, np.float64) for shape in ((4, 5, 8), (2, 7, 8), (2, 7, 6), (4, 1, 7)))

        def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
            out, lse = attention(q, k, v, bias=bias, softcap=2.0, window=(3, None), causal=True, return_lse=True)
            return (out**2).sum() + jnp.sin(lse).sum()

        check_grads(loss, (q, k, v, bias), order=1, modes=["rev"])


def test_a_row_that_sees_no_key() -> None:
    """jax.nn.dot_product_attention returns the mean of the values there, and a gradient of it."""
    mask = np.ones((5, 7), bool)
    mask[2] = False
    (out, lse), vjp = jax.vjp(jax.jit(partial(attention, mask=mask, return_lse=True)), *inputs())
    assert (out[:, :, 2] == 0).all()
    assert np.isneginf(lse[:, :, 2]).all()
    dq, dk, dv = vjp((jnp.full_like(out, jnp.nan).at[:, :, jnp.array([0, 1, 3, 4])].set(1), jnp.ones_like(lse)))
    assert (dq[:, :, 2] == 0).all()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 1, 7), (2, 4, 5, 7), (1, 1, 1, 1), ()])
def test_dbias_has_the_shape_that_bias_was_given_in(shape: tuple[int, ...]) -> None:
    bias = numbers(shape).reshape(shape)
    got = jax.grad(lambda bias: (attention(*inputs(), bias=bias) ** 2).sum())(bias)
    out, vjp = cuflash.attention_vjp(*inputs(), bias=bias)
    assert got.shape == shape
    np.testing.assert_allclose(got, vjp(2 * out).dbias, atol=1e-5)


def test_lse_alone_has_a_gradient() -> None:
    """That of the log-sum-exp of the logits, which JAX computes for itself."""
    q, k, v = (numbers(shape) for shape in ((5, 8), (7, 8), (7, 6)))
    ours = jax.grad(lambda q: attention(q[None], k[None], v[None], return_lse=True)[1].sum())(q)
    plain = jax.grad(lambda q: jax.nn.logsumexp(q @ k.T / np.sqrt(np.float32(8)), axis=-1).sum())(q)
    np.testing.assert_allclose(ours, plain, atol=1e-6)


# ---- transformations -------------------------------------------------------------------------------------------------
def loss(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    out, lse = attention(q, k, v, bias=bias, mask=mask, causal=True, return_lse=True)
    return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()


BATCHED = {
    "q": numbers((3, 4, 5, 8)),
    "k": numbers((3, 2, 7, 8)),
    "v": numbers((3, 2, 7, 6)),
    "bias": numbers((3, 5, 7)),
    "mask": np.random.default_rng(3).random((3, 4, 1, 7)) < 0.8,
}


@pytest.mark.parametrize("mapped", ["q k v bias mask", "q", "k v", "bias", "mask", "q mask"])
def test_vmap(mapped: str) -> None:
    """Values and gradients are those of the examples one by one, whichever arguments vary."""
    names = mapped.split()
    arrays = [x if name in names else x[0] for name, x in BATCHED.items()]
    axes = tuple(0 if name in names else None for name in BATCHED)
    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    found = jax.jit(jax.vmap(step, in_axes=axes))(*arrays)
    for i in range(3):
        want = step(*(x[i] if name in names else x for name, x in zip(BATCHED, arrays, strict=True)))
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, atol=1e-5, rtol=1e-5), found, want)


def test_vmap_of_other_axes_and_twice() -> None:
    q, k, v = (numbers((3, 2, *shape)) for shape in ((4, 5, 8), (2, 7, 8), (2, 7, 6)))
    want = cuflash.attention(q, k, v)
    got = jax.vmap(jax.vmap(attention, in_axes=1, out_axes=2), in_axes=(0, 0, 0))(
        *(x.swapaxes(1, 2) for x in (q, k, v))
    )
    np.testing.assert_allclose(np.moveaxis(got, 3, 1), want, atol=1e-6)
    rows = jax.vmap(attention, in_axes=(0, None, None))(q, k[0], v[0])  # nothing else has the axis
    np.testing.assert_allclose(rows[2], cuflash.attention(q[2], k[0], v[0]), atol=1e-6)


def test_vmap_four_times() -> None:
    q, k, v = numbers((2, 3, 2, 5, 8)), numbers((3, 2, 1, 7, 8)), numbers((3, 2, 1, 7, 6))
    step = attention
    for axes in ((None, 0, 0), (0, None, None), (None, 0, 0), (0, None, None)):
        step = jax.vmap(step, in_axes=axes)
    got = step(q, k, v)
    for a, b, c, d in np.ndindex(2, 3, 3, 2):
        np.testing.assert_allclose(got[a, b, c, d], cuflash.attention(q[a, c], k[b, d], v[b, d]), atol=1e-6)


def test_a_jacobian() -> None:
    """Its rows are a vmap over gradients of the output alone."""
    q, k, v = (numbers(shape) for shape in ((1, 2, 3), (1, 4, 3), (1, 4, 2)))
    got = jax.jacrev(attention)(q, k, v)
    _, vjp = cuflash.attention_vjp(q, k, v)
    for at in np.ndindex(1, 2, 2):
        np.testing.assert_allclose(
            got[at], vjp(np.eye(4, dtype=np.float32)[at[1] * 2 + at[2]].reshape(1, 2, 2)).dq, atol=1e-6
        )


def test_inside_of_scan_and_checkpoint() -> None:
    q, k, v = (numbers((2, 5, 8)), numbers((2, 5, 8)), numbers((2, 5, 8)))

    def model(q: Any, wrap: Any) -> Any:
        layer = wrap(lambda x: attention(x, k, v, causal=True) + x)
        return (jax.lax.scan(lambda x, _: (layer(x), None), q, length=3)[0] ** 2).sum()

    plain, again = (jax.jit(jax.grad(model), static_argnums=1)(q, wrap) for wrap in (lambda f: f, jax.checkpoint))
    np.testing.assert_allclose(plain, again, rtol=1e-6)
    x = q
    for _ in range(3):
        x = cuflash.attention(x, k, v, causal=True) + x
    np.testing.assert_allclose(model(q, lambda f: f), (x**2).sum(), rtol=1e-5)


SHARDED = """
import numpy as np, jax, jax.numpy as jnp, cuflash
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from cuflash.jax import attention
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((4, 4, 5, 8), (4, 2, 7, 8), (4, 2, 7, 6)))
bias, mask = rng.standard_normal((4, 1, 7)).astype(np.float32), rng.random((5, 7)) < 0.7
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("b", "h"))
out, lse, vjp = cuflash.attention_vjp(q, k, v, bias=bias, mask=mask, return_lse=True)
seen = np.isfinite(lse)
want = vjp(2 * out, seen.astype(np.float32))
for check in (True, False):
    step = jax.shard_map(
        lambda q, k, v, bias, mask: attention(q, k, v, bias=bias, mask=mask, return_lse=True),
        mesh=mesh, in_specs=(P("b", "h"), P("b", "h"), P("b", "h"), P("h"), P()), out_specs=(P("b", "h"),) * 2,
        check_vma=check)
    got, got_lse = jax.jit(step)(q, k, v, bias, mask)
    np.testing.assert_allclose(got, out, atol=1e-6)
    np.testing.assert_allclose(got_lse, lse, atol=1e-6)
    def loss(q, k, v, bias):
        out, lse = step(q, k, v, bias, mask)
        return (out**2).sum() + jnp.where(seen, lse, 0).sum()
    for x, y in zip(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, bias), want):
        np.testing.assert_allclose(x, y, atol=1e-5)  # that of bias is a sum over devices
sharded = [jax.device_put(x, NamedSharding(mesh, P("b", "h"))) for x in (q, k, v)]
np.testing.assert_allclose(jax.jit(attention)(*sharded), cuflash.attention(q, k, v), atol=1e-6)
print("devices", len(jax.devices()))
"""


def test_inside_of_shard_map() -> None:
    """On four devices of the host: batch and heads are split, a mask is not, and a bias along one axis only."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = run_alone(SHARDED, environment)
    assert (done.returncode, done.stdout) == (0, "devices 4\n"), done.stderr


UNFINISHED = """
import time, numpy as np, jax
from cuflash import numpy_backend
from cuflash.jax import attention
forward = numpy_backend.forward
def slow(call, out):
    end = time.monotonic() + 0.5
    while time.monotonic() < end: pass
    print("in")
    return forward(call, out)
q = np.ones((2, 128, 8), np.float32)
step = jax.jit(lambda q: attention(q + 1, q, q) * 2)
step(q).block_until_ready()
numpy_backend.forward = slow
step(q)
print("end")
"""


def test_a_process_may_end_while_a_program_runs() -> None:
    """The interpreter lets no handler in while it shuts down, and XLA's threads would wait for it forever."""
    done = run_alone(UNFINISHED, {**os.environ, "JAX_PLATFORMS": "cpu"})
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["end", "in"]), done.stderr


def run_alone(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own, in which warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    root = str(Path(__file__).parents[1])
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)


# ---- what must be refused --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": "big"}, ArgumentError, "scale='big': must be a real number"),
        ({"causal": "left"}, ArgumentError, "causal='left': must be True, False"),
        ({"window": (1.5, 0)}, ArgumentError, "window left=1.5: must be an integer distance"),
        ({"window": (-2, 0)}, ArgumentError, "window left=-2"),
        ({"softcap": -1.0}, ArgumentError, "softcap=-1.0: must be greater than 0"),
        ({"layout": "sbhd"}, ArgumentError, "layout='sbhd'"),
        ({"return_lse": 1}, ArgumentError, "return_lse=1: must be True or False"),
        ({"deterministic": "yes"}, ArgumentError, "deterministic='yes'"),
        ({"mask": np.ones((5, 7), np.int32)}, ArgumentError, "mask has dtype int32: must be bool"),
        ({"mask": np.ones((5, 6), bool)}, ShapeError, "mask has shape .5, 6., which does not broadcast"),
        ({"bias": np.ones((5, 7), np.float16)}, ArgumentError, "bias has dtype float16: must be that of q, float32"),
        ({"bias": np.ones((3, 5, 7), np.float32)}, ShapeError, "bias has shape"),
        ({"bias": [1.0, 2.0]}, ArgumentError, "bias is .* of type list: must be a JAX or NumPy array"),
        ({"k": np.ones((2, 3, 7, 8), np.float32)}, ShapeError, "k and v must agree in heads and seq"),
        ({"q": np.ones((2, 3, 5, 8), np.float32)}, ShapeError, "heads of q .3. must be a positive multiple"),
        ({"q": np.ones((5, 8), np.float32)}, ShapeError, "q has shape .5, 8.: at least 3 axes"),
        ({"q": np.ones(Q, np.int32)}, ArgumentError, "q has dtype int32: must be one of float16"),
        ({"v": np.ones(V, np.float16)}, ArgumentError, "q, k and v must have one dtype"),
        ({"q": np.ones(Q, np.float64)}, ArgumentError, "q has dtype float64, which JAX would make float32; .*x64"),
    ],
    ids=str,
)
def test_wrong_calls_are_refused_while_tracing(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = dict(zip("qkv", inputs(), strict=True))
    with pytest.raises(error, match=message):
        jax.jit(lambda: attention(**{**given, **options})).trace()


def test_values_that_are_traced_are_no_options() -> None:
    with pytest.raises(ArgumentError, match=r"scale=.*must be a real number"):
        jax.jit(lambda scale: attention(*inputs(), scale=scale))(0.5)
    with pytest.raises(ArgumentError, match="q has dtype key<"):
        attention(jax.random.key(0), *inputs()[1:])


def test_no_second_derivatives_and_no_forward_mode() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="`cuflash_forward` cannot be differentiated"):
        jax.hessian(lambda q: attention(q, k, v).sum())(q)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))


XLA_ERRORS = (jax.errors.JaxRuntimeError, ValueError)  # the latter from a program that has run before


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnsupportedError("no backend offers it; try another"), "UNIMPLEMENTED"),
        (ArgumentError("lse does not fit"), "INVALID_ARGUMENT"),
        (MemoryError("out of it"), "RESOURCE_EXHAUSTED"),
        (ZeroDivisionError("ünexpected"), "INTERNAL"),
        (KeyboardInterrupt(), "INTERNAL"),
    ],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_errors_come_back_through_xla(
    monkeypatch: pytest.MonkeyPatch, direction: str, error: BaseException, code: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    q, k, v = inputs()
    step = jax.jit(jax.value_and_grad(lambda q: attention(q, k, v).sum()))
    want = step(q)
    with monkeypatch.context() as patch:
        patch.setattr(numpy_backend, direction, fail)
        with pytest.raises(XLA_ERRORS) as caught:
            jax.block_until_ready(step(q))
    assert str(caught.value).startswith(f"{code}: cuflash: {type(error).__name__}: {error}")
    jax.tree.map(np.testing.assert_array_equal, step(q), want)


# ---- versions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", ["0.6.2", "0.7.0", "0.10.2", "0.11.0", "0.11.99", "0.11.1.dev20260808+abc"])
def test_versions_that_are_taken(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["0.4.38", "0.6.1", "0.12.0", "0.12", "1.0.0"])
def test_versions_that_are_refused(version: str) -> None:
    with pytest.raises(VersionError, match=rf"JAX {re.escape(version)} is installed, .* 0.6.2 to 0.11; .*pip install"):
        versions.check(version)


@pytest.mark.parametrize(
    ("stub", "message"),
    [
        ("__version__ = '0.5.3'", "JAX 0.5.3 is installed, and cuflash.jax works with 0.6.2 to 0.11"),
        (
            "raise ImportError('no such jaxlib')",
            r"works with JAX 0.6.2 to 0.11, which cannot be imported \(no such jaxlib",
        ),
    ],
)
def test_importing_beside_another_jax(tmp_path: Path, stub: str, message: str) -> None:
    (tmp_path / "jax.py").write_text(stub)
    done = run_python(
        "import cuflash\ntry:\n  import cuflash.jax\nexcept ImportError as e: print(type(e), e)", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"cuflash.errors.VersionError.*{message}.*pip install 'cuflash\[jax", done.stdout)


def test_the_extra_asks_for_the_versions_that_are_taken() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    oldest, newest = ".".join(map(str, versions.OLDEST)), versions.NEWEST
    assert project.count(f'"jax>={oldest},<{newest[0]}.{newest[1] + 1}"') == 2


# ---- many calls ------------------------------------------------------------------------------------------------------
def test_calls_from_several_threads() -> None:
    """Each with shapes of its own, over and over, while the others run."""
    failures: list[Exception] = []

    def work(n: int) -> None:
        try:
            q, k, v = numbers((2, n, 8)), numbers((2, n + 3, 8)), numbers((2, n + 3, 8))
            step = jax.jit(jax.value_and_grad(lambda q: (attention(q, k, v, causal=True) ** 2).sum()))
            out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
            want = vjp(2 * out).dq
            for _ in range(20):
                np.testing.assert_allclose(jax.device_get(step(q))[1], want, atol=1e-5)
        except Exception as error:  # noqa: BLE001 (told by the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (3, 4, 5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_no_call_leaves_anything_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of many options share the handlers, and what a handler makes is freed when it returns."""
    seen: list[Any] = []
    forward = numpy_backend.forward

    def watched(call: Any, out: Any) -> Any:
        seen.extend(map(weakref.ref, (call, out)))
        return forward(call, out)

    def callbacks() -> int:
        gc.collect()
        return sum(isinstance(x, ffi.Handler) for x in gc.get_objects()) + sum(map(len, calls.HANDLERS.values()))

    monkeypatch.setattr(numpy_backend, "forward", watched)
    before = callbacks()
    for window in range(5):
        jax.block_until_ready(jax.jit(partial(attention, window=(window, None)))(*inputs()))
    gc.collect()
    assert len(seen) == 10
    assert not any(reference() is not None for reference in seen)
    assert callbacks() == before


def test_options_survive_as_text() -> None:
    """A compiled program may be kept, and run by a process that has compiled none."""
    for name in traced.TRACED:
        call, _, _ = Case(name, **traced.TRACED[name]).call()
        options = calls.Options.of(call.problem, True, None)
        calls.options_of.cache_clear()
        again = calls.options_of(options.text().encode())
        assert again == options
        given = {"q": call.q, "k": call.k, "v": call.v, **{n: call.operands[n] for n in options.inputs[3:]}}
        assert again.describe(given).problem == replace(call.problem, layout="bhsd")


# ---- XLA's interface -------------------------------------------------------------------------------------------------
HEADER = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
STRUCTURES = {
    "XLA_FFI_Extension_Base": ffi.Extension,
    "XLA_FFI_Api_Version": ffi.ApiVersion,
    "XLA_FFI_Metadata": ffi.Metadata,
    "XLA_FFI_Metadata_Extension": ffi.MetadataExtension,
    "XLA_FFI_ByteSpan": ffi.ByteSpan,
    "XLA_FFI_Buffer": ffi.BufferStruct,
    "XLA_FFI_Args": ffi.Buffers,
    "XLA_FFI_Rets": ffi.Buffers,
    "XLA_FFI_Attrs": ffi.Attributes,
    "XLA_FFI_Error_Create_Args": ffi.ErrorCreate,
    "XLA_FFI_Error_GetMessage_Args": ffi.ErrorDetails,
    "XLA_FFI_Error_Destroy_Args": ffi.ErrorDestroy,
    "XLA_FFI_Stream_Get_Args": ffi.StreamGet,
    "XLA_FFI_DeviceMemory_Allocate_Args": ffi.MemoryAllocate,
    "XLA_FFI_DeviceMemory_Free_Args": ffi.MemoryFree,
    "XLA_FFI_Api": ffi.Api,
    "XLA_FFI_CallFrame": ffi.CallFrame,
}
SIZES = {"int": 4, "int64_t": 8, "uint32_t": 4, "size_t": 8, "XLA_FFI_DataType": 4, "XLA_FFI_Error_Code": 4}
SIZES |= {
    "XLA_FFI_ExecutionStage": 4,
    "XLA_FFI_Handler_Traits": 4,
    "XLA_FFI_Extension_Type": 4,
    "XLA_FFI_InternalExtension_Type": 4,
}
RENAMED = {  # by version 0.4
    "XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension",
    "XLA_FFI_Error_GetMessage_Args": "XLA_FFI_Error_GetDetails_Args",
}
FIELDS = {  # what the header calls a field, or has called it
    "buffers": ("args", "rets"),
    "error_get_message": ("error_get_message", "error_get_details"),
    "type_register": ("type_register", "type_id_register"),
    "context_get": ("execution_context_get", "invoke_context_get"),
}


def declared(name: str) -> list[tuple[str, str]]:
    """Type and name of each field of a structure in the header that JAX brings along."""
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    names = [name, RENAMED.get(name, name)]
    found = re.search(rf"struct (?:{'|'.join(names)}) {{(.*?)}}", text, re.DOTALL)
    assert found, name
    fields = []
    for field in filter(None, map(str.strip, found[1].split(";"))):
        if function := re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", field):
            fields.append(("*", function[1]))
        else:
            kind, _, field_name = field.rpartition(" ")
            fields.append((kind, field_name))
    return fields


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_those_of_the_header(name: str) -> None:
    """The same fields at the same offsets with the same sizes, as far as ours go; pointers, numbers or structures."""
    structure, offset = STRUCTURES[name], 0
    bases = [c for c in reversed(structure.__mro__) if "_fields_" in c.__dict__]
    ours = [field for c in bases for field in c._fields_]
    theirs = declared(name)
    assert len(ours) <= len(theirs) or name == "XLA_FFI_Error_GetMessage_Args"
    for (field, _), (kind, field_name) in zip(ours, theirs, strict=False):
        mine = getattr(structure, field)
        nested = STRUCTURES.get(kind) or STRUCTURES.get({new: old for old, new in RENAMED.items()}.get(kind, ""))
        size = 8 if "*" in kind else ctypes.sizeof(nested) if nested else SIZES[kind]
        offset += -offset % min(size, 8)
        assert (mine.offset, mine.size) == (offset, size), (field, field_name)
        offset += size
        plain = field_name.removeprefix("XLA_FFI_").replace("_", "").lower()
        assert plain in {x.replace("_", "") for x in FIELDS.get(field, (field,))}


def test_constants_are_those_of_the_header() -> None:
    text = HEADER.read_text()
    names = {"bool": "PRED", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16"}
    for code, dtype in ffi.DTYPES.items():
        assert f"XLA_FFI_DataType_{names[dtype.name]} = {code}," in text
    assert f"XLA_FFI_ExecutionStage_EXECUTE = {ffi.EXECUTE}," in text
    assert f"Extension_Metadata = {ffi.METADATA}," in text
    major, minor = (int(re.search(rf"#define XLA_FFI_API_{x} (\d+)", text)[1]) for x in ("MAJOR", "MINOR"))
    assert ffi.OLDEST_API <= (major, minor) <= ffi.NEWEST_API
    for _, code in ffi.ERROR_CODES:
        assert f" = {code}," in text


def test_what_a_host_does_not_lend_is_refused_with_the_text_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no stream on the host: XLA answers with an error, which is read and freed."""
    found: list[str] = []

    def ask(frame: Any, direction: str) -> Any:
        for name, call in {"stream": lambda: frame.stream, "memory": lambda: frame.allocate(64)}.items():
            with pytest.raises((RuntimeError, MemoryError)) as caught:
                call()
            found.append(f"{name}: {caught.value}")
        return host_call(frame, direction)

    host_call = calls.host_call
    monkeypatch.setattr(calls, "host_call", ask)
    jax.block_until_ready(jax.jit(attention)(*inputs()))
    assert re.search("GPU", found[0])
    assert re.search("64 bytes of workspace: .*GPU", found[1])


# ---- the handlers of a GPU, with XLA and the GPU played by the test --------------------------------------------------
class PlayedXla:
    """A call as XLA hands it over, on a stream and with memory that only exist as numbers."""

    STREAM, MEMORY = 0x5000, 0x7F0000000000

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.taken: dict[int, int] = {}
        self.freed: list[tuple[int, int]] = []
        self.alignments: set[int] = set()
        self.sizes: list[tuple[int, int]] = []  # of structures: as told, and as they are
        self.errors: list[tuple[str, int]] = []

    def error_create(self, arguments: Any) -> int:
        self.errors.append((arguments.message.decode(), arguments.errc))
        return len(self.errors)

    def stream_get(self, arguments: Any) -> None:
        arguments.stream = self.STREAM

    def device_memory_allocate(self, arguments: Any) -> None:
        self.alignments.add(arguments.alignment)
        arguments.data = self.MEMORY + (len(self.taken) << 32)
        self.taken[arguments.data] = arguments.size

    def device_memory_free(self, arguments: Any) -> None:
        self.freed.append((arguments.data, arguments.size))

    def api(self) -> ffi.Api:
        table = ffi.Api()
        kinds = {
            "error_create": ffi.ErrorCreate,
            "stream_get": ffi.StreamGet,
            "device_memory_allocate": ffi.MemoryAllocate,
            "device_memory_free": ffi.MemoryFree,
        }
        for name, kind in kinds.items():

            def function(pointer: int, name: str = name, kind: Any = kind) -> int | None:
                arguments = kind.from_address(pointer)
                self.sizes.append((arguments.struct_size, ctypes.sizeof(kind)))
                return getattr(self, name)(arguments)  # type: ignore[no-any-return]

            setattr(table, name, ffi.Function(function))
        return table

    def buffers(self, arrays: list[np.ndarray]) -> ffi.Buffers:
        codes = {dtype: code for code, dtype in ffi.DTYPES.items()}
        structs = []
        for x in arrays:
            dims = (ctypes.c_int64 * x.ndim)(*x.shape)
            structs.append(ffi.BufferStruct(0, None, codes[x.dtype], x.ctypes.data, x.ndim, dims))
        pointers = (ctypes.POINTER(ffi.BufferStruct) * len(arrays))(*map(ctypes.pointer, structs))
        self.kept += [arrays, structs, pointers]
        return ffi.Buffers(0, None, len(arrays), None, pointers)

    def call(
        self, handler: Any, options: calls.Options, inputs: list[np.ndarray], results: list[np.ndarray]
    ) -> int | None:
        texts = []
        for text in (b"options", options.text().encode()):
            array = ctypes.create_string_buffer(text)
            self.kept.append(array)
            texts.append(ctypes.pointer(ffi.ByteSpan(ctypes.addressof(array), len(text))))
        names, values = ((ctypes.POINTER(ffi.ByteSpan) * 1)(text) for text in texts)
        attributes = ffi.Attributes(0, None, 1, None, names, values)
        frame = ffi.CallFrame(
            0,
            None,
            ctypes.pointer(self.api()),
            None,
            ffi.EXECUTE,
            self.buffers(inputs),
            self.buffers(results),
            attributes,
        )
        error: int | None = handler(ctypes.pointer(frame))
        assert all(told == size for told, size in self.sizes)
        return error


class PlayedLaunch:
    """The module that launches kernels: it writes down what it is given, and takes memory as that does."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def device(self, index: int) -> Any:
        return described_device(90)

    def forward(self, *given: Any, **more: Any) -> None:
        self.calls.append((*given, more))

    def backward(self, call: Any, **more: Any) -> None:
        import cupy

        self.calls.append((call, more, cupy.empty(100, np.uint8).data.ptr, cupy.empty(1 << 20, np.uint8).data.ptr))

    def run(self, plan: Any, pointers: dict[str, int]) -> None:
        self.calls.append((plan, pointers))


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> PlayedLaunch:
    cupy = pytest.importorskip("cupy", reason="CuPy wraps the memory, and is in the extras named cuda12 and cuda13")
    played = PlayedLaunch()
    monkeypatch.setattr(calls, "_plans", {})
    monkeypatch.setattr(calls.api, "launcher", lambda: played)
    monkeypatch.setattr(cupy.cuda.runtime, "pointerGetAttributes", lambda pointer: SimpleNamespace(device=0))
    monkeypatch.setattr(cupy.cuda, "Device", lambda device: nullcontext())
    monkeypatch.setattr(calls, "stream_of", lambda pointer: nullcontext(played.calls.append(pointer)))
    return played


def test_the_forward_of_a_gpu_wraps_what_xla_gives(launch: PlayedLaunch) -> None:
    made = Case("", "bfloat16", layout="bshd", **EVERYTHING | {"mask": "bhqk", "bias": "bhqk"}).make()
    inputs = [made["q"], made["k"], made["v"], made["options"]["mask"], made["options"]["bias"]]
    call, dout, _ = Case("", "bfloat16", layout="bshd", **EVERYTHING | {"mask": "bhqk", "bias": "bhqk"}).call()
    options, results = (
        calls.Options.of(call.problem, True, None),
        [made["dout"].copy(), np.empty(dout.shape[:-1], np.float32)],
    )
    xla = PlayedXla()
    assert xla.call(calls.HANDLERS["CUDA"][calls.FORWARD], options, inputs, results) is None
    stream, (found, out, with_lse, more) = launch.calls
    assert (stream, with_lse, xla.errors, xla.taken) == (xla.STREAM, True, [], {})
    assert found.problem == call.problem
    wrapped = {"q": found.q, "k": found.k, "v": found.v, **found.operands, "out": out, "lse": more["lse"]}
    want = {"q": call.q, "k": call.k, "v": call.v, **call.operands, "out": dout, "lse": results[1]}
    assert wrapped.keys() == want.keys()
    addresses = dict(zip(("q", "k", "v", "mask", "bias", "out", "lse"), [*inputs, *results], strict=True))
    for name, x in wrapped.items():
        assert (x.data.ptr, x.shape, x.dtype) == (addresses[name].ctypes.data, want[name].shape, want[name].dtype), name
        assert x.strides == want[name].strides, name


def test_the_backward_of_a_gpu_takes_memory_of_xla_and_gives_it_back(launch: PlayedLaunch) -> None:
    """And its arrays that vmap left alone are broadcast where they lie."""
    q, k, v, bias = numbers((3, 4, 5, 8)), numbers((1, 2, 7, 8)), numbers((1, 2, 7, 6)), numbers((1, 4, 5, 7))
    out, lse, dout, dlse = numbers((3, 4, 5, 6)), numbers((3, 4, 5)), numbers((1, 4, 5, 6)), numbers((1, 4, 5))
    results = [np.empty((3, *x.shape[1:]), np.float32) for x in (q, k, v, bias)]
    call = cuflash.problem.describe(q[0], k[0], v[0], bias=bias[0])
    options, xla = calls.Options.of(call.problem, True, True), PlayedXla()
    inputs = [q, k, v, bias, out, lse, dout, dlse]
    assert xla.call(calls.HANDLERS["CUDA"][calls.BACKWARD], options, inputs, results) is None
    _, (found, more, small, large) = launch.calls
    assert more["deterministic"] is True
    arrays = [more[name] for name in ("out", "lse", "dout", "dlse")]
    assert [x.data.ptr for x in arrays] == [x.ctypes.data for x in (out, lse, dout, dlse)]
    assert [x.shape for x in (found.k, found.v, *arrays)] == [
        (3, 2, 7, 8), (3, 2, 7, 6), (3, 4, 5, 6), (3, 4, 5), (3, 4, 5, 6), (3, 4, 5)
    ]  # fmt: skip
    assert found.k.strides[0] == arrays[2].strides[0] == arrays[3].strides[0] == 0
    assert [x.data.ptr for x in more["to"].values()] == [x.ctypes.data for x in results]
    assert found.operands["bias"].shape == more["to"]["dbias"].shape == (3, 4, 5, 7)
    assert set(xla.taken) == {small, large}
    assert sorted(xla.freed) == sorted(xla.taken.items())
    assert list(xla.taken.values()) == [100, 1 << 20]
    assert xla.alignments == {16}  # the largest that XLA takes


@pytest.mark.parametrize("with_lse", [False, True])
def test_calls_like_one_before_go_straight_to_the_launch(launch: PlayedLaunch, with_lse: bool) -> None:
    """With the addresses of this call under the names of the kernels' fields, and workspace of the plan's sizes."""
    for _ in range(2):  # at other addresses the second time
        q, k, v, out, dout, dq = (np.zeros((2, 2, 64, 16), np.float16) for _ in range(6))
        lse, dlse = (np.zeros((2, 2, 64), np.float32) for _ in range(2))
        given = {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "lse": lse,
            "dout": dout,
            "dlse": dlse,
            "dq": dq,
            "dk": k.copy(),
            "dv": v.copy(),
        }
        call, xla = cuflash.problem.describe(q, k, v, causal=True), PlayedXla()
        for direction in (calls.FORWARD, calls.BACKWARD):
            options = calls.Options.of(call.problem, with_lse, None)
            names = options.names(direction)
            results = ("out", "lse") if direction == calls.FORWARD else ("dq", "dk", "dv")
            inputs, to = ([given[n] for n in names if (n in results) is is_result] for is_result in (False, True))
            xla.taken.clear()
            launch.calls.clear()
            assert xla.call(calls.HANDLERS["CUDA"][direction], options, inputs, to) is None
            stream, (plan, pointers, *_) = launch.calls
        if isinstance(plan, Plan):
            workspace = {name: pointers.pop(name) for name in plan.workspace()}
            assert pointers == {name: given[name].ctypes.data for name in names}
            assert [xla.taken[address] for address in workspace.values()] == list(plan.workspace().values())
            assert workspace
            assert stream == xla.STREAM
            assert sorted(xla.freed[-len(workspace) :]) == sorted(xla.taken.items())
    assert len(calls._plans) == 2
    assert isinstance(plan, Plan)


def test_the_memory_of_a_call_that_fails_is_given_back(launch: PlayedLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = launch.backward

    def fail(call: Any, **more: Any) -> None:
        backward(call, **more)
        raise UnsupportedError("no GPU backend takes this call")

    launch.backward = fail  # type: ignore[method-assign]
    x, xla = numbers((1, 2, 3)), PlayedXla()
    options = calls.Options.of(cuflash.problem.describe(x, x, x).problem, False, None)
    inputs = [x, x, x, x, numbers((1, 2)), x]
    assert xla.call(calls.HANDLERS["CUDA"][calls.BACKWARD], options, inputs, [x.copy() for _ in range(3)]) == 1
    assert xla.errors == [("cuflash: UnsupportedError: no GPU backend takes this call", 12)]
    assert sorted(xla.freed) == sorted(xla.taken.items())
    assert len(xla.freed) == 2


def test_every_parameter_is_documented() -> None:
    text = inspect.getdoc(attention) or ""
    listed = text.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    documented = {name for line in listed.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(inspect.signature(attention).parameters) <= documented
    plain = inspect.signature(cuflash.attention).parameters
    shared = inspect.signature(attention).parameters.keys() & plain.keys()
    assert all(inspect.signature(attention).parameters[name] == plain[name] for name in shared)


def test_the_documentation_is_true() -> None:
    result = doctest.testmod(cuflash.jax)
    assert result.attempted > 0
    assert result.failed == 0
