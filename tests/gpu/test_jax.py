"""`cuflash.jax` on a GPU: values, XLA's stream and memory, no waiting, errors.

What does not depend on where a program runs is in tests/test_jax.py.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cuflash
from cuflash.jax import attention, calls
from tests import traced
from tests.cases import DTYPES, Case

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The GPU as JAX has it; what JAX says while it starts is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return jax.devices("cuda")[0]
        except RuntimeError as error:
            pytest.skip(f"JAX finds no GPU, install jax[cuda13]: {error}")


@pytest.fixture(autouse=True)
def on_the_gpu(gpu: Any) -> Iterator[None]:
    with jax.default_device(gpu):
        yield


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    x = np.random.default_rng(sum(shape) + seed).standard_normal(shape).astype(dtype)
    return jnp.asarray(x)


def bits(x: Any) -> np.ndarray:
    """What an array of JAX or CuPy holds, on the host."""
    host = x.get() if hasattr(x, "get") else np.asarray(x)
    return host.view(f"u{host.dtype.itemsize}")  # type: ignore[no-any-return]


# ---- values ----------------------------------------------------------------------------------------------------------
NAMES = ("plain", "causal-top-left", "window", "scale-negative", "softcap", "mask-sparse", "bias-batch", "bias-number")
EVERYTHING = {key: x for key, x in traced.OPTIONS["everything"].items() if key not in ("alibi", "lengths")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*NAMES, "groups-window-bias", "lse-gradient"])
def test_options(name: str, dtype: str) -> None:
    traced.check(Case(name, dtype, **{"seq_q": 70, "seq_k": 133, **traced.TRACED[name]}))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_layout(dtype: str, layout: str) -> None:
    traced.check(Case("", dtype, layout=layout, **EVERYTHING))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sizes_that_kernels_are_made_for(head_dim: int) -> None:
    """On Hopper these run on its own kernels; deterministic gradients, too."""
    case = Case("", "bfloat16", seq_q=300, seq_k=300, head_dim=head_dim, heads_q=4, causal=True, dlse=True)
    traced.check(case)
    traced.check(case, deterministic=True)


@pytest.mark.parametrize(
    "sizes", [{"batch": ()}, {"batch": (0,)}, {"seq_q": 0}, {"seq_k": 0}, {"batch": (2, 1, 3)}], ids=str
)
def test_sizes_at_the_edge(sizes: dict[str, Any]) -> None:
    traced.check(Case("", **{"bias": "hqk", "causal": True, **sizes}))


def test_the_same_bits_as_with_cupy(cupy: Any) -> None:
    q, k, v = (numbers((2, 4, 300, 64), jnp.bfloat16, seed=i) for i in range(3))
    out, lse = jax.jit(lambda *x: attention(*x, causal=True, return_lse=True))(q, k, v)
    want, want_lse = cuflash.attention(*map(cupy.from_dlpack, (q, k, v)), causal=True, return_lse=True)
    np.testing.assert_array_equal(bits(out), bits(want.view(np.uint16)))
    np.testing.assert_array_equal(bits(lse), bits(want_lse))


def test_against_the_attention_of_jax() -> None:
    q, k, v = (numbers((2, 256, heads, 64), jnp.bfloat16, seed=heads) for heads in (4, 2, 2))
    k, v = k, numbers((2, 256, 2, 64), jnp.bfloat16, seed=9)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, causal="top_left", layout="bshd")

    def theirs(q: Any, k: Any, v: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), is_causal=True)

    (out, vjp), (want, want_vjp) = (jax.vjp(jax.jit(f), q, k, v) for f in (ours, theirs))
    dout = numbers(out.shape, jnp.bfloat16, seed=5)
    found, expected = (out, *vjp(dout)), (want, *want_vjp(dout.astype(jnp.float32)))
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)


@pytest.mark.parametrize("mapped", ["q k v bias", "q", "bias"])
def test_vmap_of_gradients(mapped: str) -> None:
    arrays = {
        "q": numbers((3, 4, 70, 64)),
        "k": numbers((3, 2, 70, 64)),
        "v": numbers((3, 2, 70, 64)),
        "bias": numbers((3, 70, 70)),
    }
    names = mapped.split()
    given = [x if name in names else x[0] for name, x in arrays.items()]
    step = jax.value_and_grad(lambda q, k, v, b: (attention(q, k, v, bias=b, causal=True) ** 2).sum(), (0, 1, 2, 3))
    found = jax.jit(jax.vmap(step, in_axes=tuple(0 if name in names else None for name in arrays)))(*given)
    for i in range(3):
        want = step(*(x[i] if name in names else x for name, x in zip(arrays, given, strict=True)))
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, atol=1e-3, rtol=1e-4), found, want)


def test_vmap_four_times() -> None:
    """Axes that q and k have in turn cannot be merged to those that kernels walk over: such arrays are copied."""
    q, k, bias = numbers((2, 3, 2, 33, 64)), numbers((3, 2, 1, 33, 64)), numbers((2, 33, 33))

    def step(q: Any, k: Any, bias: Any) -> Any:
        out, lse = attention(q, k, k, bias=bias, return_lse=True)
        return (out**2).sum() + lse.sum()

    step = jax.value_and_grad(step, (0, 1, 2))
    nested = jax.vmap(
        jax.vmap(jax.vmap(jax.vmap(step, (None, 0, None)), (0, None, None)), (None, 0, None)), (0, None, None)
    )
    found = jax.jit(nested)(q, k, bias)
    for a, b, c, d in np.ndindex(2, 3, 3, 2):
        want = step(q[a, c], k[b, d], bias)
        jax.tree.map(
            lambda x, y, at=(a, b, c, d): np.testing.assert_allclose(x[at], y, atol=1e-3, rtol=1e-4), found, want
        )


def test_a_row_that_sees_no_key() -> None:
    mask = np.ones((70, 70), bool)
    mask[2] = False
    q, k, v = (numbers((2, 70, 64), jnp.bfloat16, seed=i) for i in range(3))
    out, vjp = jax.vjp(jax.jit(lambda q, k, v: attention(q, k, v, mask=mask)), q, k, v)
    gradients = vjp(jnp.ones_like(out))
    assert (bits(out)[:, 2] << 1 == 0).all()
    assert (bits(gradients[0])[:, 2] << 1 == 0).all()
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)


def test_inside_of_shard_map(gpu: Any) -> None:
    mesh = jax.sharding.Mesh(np.array([gpu]), ("b",))
    split = jax.sharding.PartitionSpec("b")
    q, k, v = (numbers((2, 4, 70, 64), seed=i) for i in range(3))
    step = jax.shard_map(lambda *x: attention(*x, causal=True), mesh=mesh, in_specs=(split,) * 3, out_specs=split)
    found = jax.jit(jax.value_and_grad(lambda *x: (step(*x) ** 2).sum()))(q, k, v)
    want = jax.value_and_grad(lambda *x: (attention(*x, causal=True) ** 2).sum())(q, k, v)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-5), found, want)


def test_the_host_in_the_same_process() -> None:
    """Arrays on the host are computed there, by the same function."""
    q, k, v = (jax.device_put(np.asarray(numbers((2, 9, 8), seed=i)), jax.devices("cpu")[0]) for i in range(3))
    out = jax.jit(attention)(q, k, v)
    assert {device.platform for device in out.devices()} == {"cpu"}
    np.testing.assert_array_equal(out, cuflash.attention(*map(np.asarray, (q, k, v))))


# ---- stream and memory -----------------------------------------------------------------------------------------------
def late(x: Any, seed: Any) -> Any:
    """x · seed, after products of matrices that take tens of milliseconds and that it depends on."""
    m = jnp.eye(4096, dtype=jnp.float32) * jnp.cos(seed * 0)
    for _ in range(24):  # unrolled: what decides on a loop may wait for the device
        m = jnp.dot(m, m, precision="highest")
    return (x * (seed * m[0, 0])).astype(x.dtype)


@pytest.fixture(scope="module")
def program() -> Any:
    """Attention between a late producer and a consumer, forward and backward, compiled and run once."""
    given = tuple(numbers((2, 4, 256, 64), jnp.bfloat16, seed=i) for i in range(3))

    @jax.jit
    def step(seed: Any, q: Any, k: Any, v: Any) -> Any:
        def model(q: Any, k: Any, v: Any) -> Any:
            return jnp.tanh(attention(late(q, seed), late(k, seed), late(v, seed), causal=True)) * 2

        out, vjp = jax.vjp(model, q, k, v)
        return out + 1, vjp(jnp.ones_like(out))

    jax.block_until_ready(step(3.0, *given))
    return step, given


def test_producers_and_consumers_of_one_program_are_in_order(program: Any) -> None:
    """On any other stream than XLA's the call would find what the memory held before, from a run with other values."""
    step, (q, k, v) = program
    jax.block_until_ready(step(5.0, q, k, v))
    out, gradients = step(1.0, q, k, v)
    want, vjp = jax.vjp(lambda q, k, v: jnp.tanh(attention(q, k, v, causal=True)) * 2, q, k, v)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, want + 1)), atol=0.02)
    for x, y in zip(gradients, vjp(jnp.ones_like(want)), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 0.02 * np.linalg.norm(y)


def test_no_call_waits_for_the_device(program: Any) -> None:
    """The program is queued long before its first product is done."""
    step, given = program
    jax.block_until_ready(step(2.0, *given))
    started = time.perf_counter()
    result = step(4.0, *given)
    queued = time.perf_counter() - started
    jax.block_until_ready(result)
    done = time.perf_counter() - started
    assert done > 0.02
    assert queued < done / 4


def test_launches_are_on_the_stream_of_xla(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, seen = cuflash.api.launcher(), []
    run, stream_of = launch.run, calls.stream_of

    def watched_run(*given: Any) -> None:
        seen.append(("run", cupy.cuda.get_current_stream().ptr))
        run(*given)

    def watched_stream(pointer: int) -> Any:
        seen.append(("xla", pointer))
        return stream_of(pointer)

    monkeypatch.setattr(launch, "run", watched_run)
    monkeypatch.setattr(calls, "stream_of", watched_stream)
    q, k, v = (numbers((2, 70, 64), seed=i) for i in range(3))
    before = cupy.cuda.get_current_stream().ptr
    jax.block_until_ready(jax.jit(jax.grad(lambda q: attention(q, k, v).sum()))(q))
    assert [name for name, _ in seen] == ["xla", "run"] * 2
    (stream,) = {pointer for _, pointer in seen}
    assert stream > 2  # none of CUDA's own
    assert cupy.cuda.get_current_stream().ptr == before


def test_all_memory_is_that_of_xla(cupy: Any) -> None:
    """Results and workspace, also of a bias whose gradient is summed in another dtype."""
    q, k, v = (numbers((2, 4, 512, 64), jnp.bfloat16, seed=i) for i in range(3))
    bias = numbers((4, 1, 512), jnp.bfloat16)
    step = jax.jit(jax.grad(lambda *x: attention(*x[:3], bias=x[3], layout="bhsd").sum(), (0, 1, 2, 3)))
    jax.block_until_ready(step(q, k, v, bias))
    taken: list[int] = []
    pool = cupy.get_default_memory_pool()
    used, total = pool.used_bytes(), pool.total_bytes()
    cupy.cuda.set_allocator(lambda size: taken.append(size) or pool.malloc(size))
    try:
        jax.block_until_ready(step(q, k, v, bias))
    finally:
        cupy.cuda.set_allocator(pool.malloc)
    assert (taken, pool.used_bytes(), pool.total_bytes()) == ([], used, total)


def test_memory_does_not_grow(gpu: Any) -> None:
    q, k, v = (numbers((2, 4, 512, 64), jnp.bfloat16, seed=i) for i in range(3))
    step = jax.jit(jax.grad(lambda *x: attention(*x, causal=True).astype(jnp.float32).sum(), (0, 1, 2)))
    for _ in range(3):
        jax.block_until_ready(step(q, k, v))
    before = gpu.memory_stats()["bytes_in_use"]
    for _ in range(20):
        jax.block_until_ready(step(q, k, v))
    assert gpu.memory_stats()["bytes_in_use"] <= before


def test_inputs_are_not_changed() -> None:
    given = [numbers((2, 70, 64), seed=i) for i in range(3)]
    before = [np.asarray(x).copy() for x in given]
    jax.block_until_ready(jax.jit(jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2)))(*given))
    for x, y in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_calls_from_several_threads() -> None:
    failures: list[Exception] = []

    def work(n: int) -> None:
        try:
            q, k, v = (numbers((2, n, 64), seed=i) for i in range(3))
            step = jax.jit(jax.grad(lambda q: (attention(q, k, v, causal=True) ** 2).sum()))
            want = np.asarray(step(q))
            for _ in range(20):
                np.testing.assert_allclose(step(q), want, atol=1e-4)
        except Exception as error:  # noqa: BLE001 (told by the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (70, 140, 33, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


# ---- errors ----------------------------------------------------------------------------------------------------------
XLA_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def test_what_only_the_device_can_tell_is_told_through_xla() -> None:
    x, good = numbers((1, 4, 1024)), numbers((1, 4, 64))
    with pytest.raises(XLA_ERRORS, match=r"UNIMPLEMENTED: cuflash: UnsupportedError: no GPU backend .* above 512"):
        jax.block_until_ready(jax.jit(attention)(x, x, x))
    assert jnp.isfinite(attention(good, good, good)).all()
