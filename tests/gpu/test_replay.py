"""A repeated call skips validation and planning: it must be the same call in every respect, and never a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import api
from cuflash.errors import ArgumentError

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def arrays(seed: int, layout: str = "bhsd") -> tuple[cupy.ndarray, ...]:
    rng = cupy.random.default_rng(seed)
    shape = (2, 4, 70, 32) if layout == "bhsd" else (2, 70, 4, 32)
    return tuple(rng.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for _ in range(3))


def twice(first: tuple[cupy.ndarray, ...], second: tuple[cupy.ndarray, ...], **options: object) -> None:
    """The second call, which is replayed, equals the same call made when nothing is known."""
    cuflash.attention(*first, return_lse=True, **options)
    with replayed():
        out, lse = cuflash.attention(*second, return_lse=True, **options)
    forget()
    fresh, fresh_lse = cuflash.attention(*second, return_lse=True, **options)
    cupy.testing.assert_array_equal(out, fresh)
    cupy.testing.assert_array_equal(lse, fresh_lse)


def forget() -> None:
    api.replays()._replays.clear()


@contextmanager
def replayed() -> Iterator[None]:
    """Calls that may not go the long way."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("this call was not replayed")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(api.launcher(), name, refuse)
        yield


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_new_data_gives_new_results(layout: str) -> None:
    twice(arrays(0, layout), arrays(1, layout), layout=layout, causal=True)


def test_operands_are_those_of_the_call() -> None:
    mask, bias = cupy.ones((70, 70), bool), cupy.zeros((4, 70, 70), cupy.float16)
    mask[:, 35:] = False
    twice(arrays(0), arrays(1), mask=mask, bias=bias)
    bias[:] = cupy.linspace(-3, 3, 70)
    mask[:] = True
    twice(arrays(0), arrays(1), mask=mask, bias=bias)


def test_options_that_differ_are_not_mixed_up() -> None:
    q, k, v = arrays(0)
    results = [
        cuflash.attention(q, k, v, **options)
        for _ in range(2)
        for options in ({}, {"causal": True}, {"scale": 0.3}, {"softcap": 1.0}, {"window": (3, 3)})
    ]
    for a, b in zip(results[:5], results[5:], strict=True):
        cupy.testing.assert_array_equal(a, b)
    for i in range(5):
        for j in range(i):
            assert (results[i] != results[j]).any()


def test_what_is_refused_stays_refused() -> None:
    q, k, v = arrays(0)
    for _ in range(2):
        cuflash.attention(q, k, v, causal=True, scale=1.0)
    with pytest.raises(ArgumentError, match="causal"):
        cuflash.attention(q, k, v, causal=1, scale=1.0)
    with pytest.raises(ArgumentError, match="scale"):
        cuflash.attention(q, k, v, causal=True, scale=True)


def test_misaligned_arrays_get_a_plan_of_their_own() -> None:
    q, k, v = arrays(0)
    for _ in range(2):
        want = cuflash.attention(q, k, v, backend="mma")
    memory = cupy.empty(q.size + 1, q.dtype)
    shifted = memory[1:].reshape(q.shape)
    shifted[...] = q
    for _ in range(2):
        cupy.testing.assert_array_equal(cuflash.attention(shifted, k, v, backend="mma"), want)


# ---- out= ------------------------------------------------------------------------------------------------------------
def test_a_new_out_in_each_call() -> None:
    given = [arrays(seed) for seed in range(3)]
    want = [cuflash.attention(*x, causal=True) for x in given]
    cuflash.attention(*given[0], causal=True, out=cupy.empty_like(given[0][0]))
    with replayed():
        for x, expected in zip(given, want, strict=True):
            out = cupy.full_like(x[0], cupy.nan)
            assert cuflash.attention(*x, causal=True, out=out) is out
            cupy.testing.assert_array_equal(out, expected)


def test_outs_of_other_strides() -> None:
    q, k, v = arrays(0)
    want = cuflash.attention(q, k, v)
    for _ in range(2):
        wide = cupy.full((*q.shape[:-1], 2 * q.shape[-1]), cupy.nan, q.dtype)
        for view in (wide[..., :32], wide[..., ::2], wide[..., 1:33], wide[..., 31::-1]):
            wide[...] = cupy.nan
            cuflash.attention(q, k, v, out=view)
            cupy.testing.assert_allclose(view, want, atol=2e-3)
            assert int(cupy.isnan(wide).sum()) == wide.size // 2


def test_an_out_that_overlaps_is_refused_when_the_call_is_known() -> None:
    memory = cupy.zeros((4, *arrays(0)[0].shape), cupy.float16)
    q, k, v, out = memory
    for _ in range(2):
        cuflash.attention(q, k, v, out=out)
    flat = memory.reshape(-1)
    for start, name in ((2 * q.size - 8, "k"), (2 * q.size + 8, "v"), (q.size, "k")):
        with pytest.raises(ArgumentError, match=f"out overlaps {name}"):
            cuflash.attention(q, k, v, out=flat[start : start + q.size].reshape(q.shape))


# ---- backward --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_new_data_gives_new_gradients(layout: str) -> None:
    options = {"layout": layout, "causal": True, "deterministic": True, "return_lse": True}

    def gradients(seed: int) -> Any:
        q, k, v = arrays(seed, layout)
        _, lse, vjp = cuflash.attention_vjp(q, k, v, **options)
        return vjp(arrays(seed + 7, layout)[0], cupy.ones_like(lse))

    gradients(0)
    with replayed():
        found = [gradients(seed) for seed in (0, 1)]
    for seed, got in enumerate(found):
        forget()
        for x, want in zip(got, gradients(seed), strict=True):
            cupy.testing.assert_array_equal(x, want)


# ---- streams, graphs, other libraries --------------------------------------------------------------------------------
def test_a_graph_captures_replayed_calls() -> None:
    q, k, v = arrays(0)
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            cuflash.attention(q, k, v, out=out)
        with replayed():
            stream.begin_capture()
            cuflash.attention(q, k, v, out=out)
            cuflash.attention(q, k, out, out=v)
            graph = stream.end_capture()
    want = cuflash.attention(*arrays(1))
    for x, new in zip((q, k, v), arrays(1), strict=True):
        x[...] = new
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    cupy.testing.assert_array_equal(out, want)
    cupy.testing.assert_array_equal(v, cuflash.attention(q, k, out))


def torch_arrays(torch: Any, seed: int) -> list[Any]:
    return [torch.from_dlpack(x) for x in arrays(seed)]


@pytest.mark.parametrize("streams", ["the same", "others"])
def test_arrays_of_torch(streams: str) -> None:
    """By DLPack's C functions where both libraries work on one stream, and in the right order where they do not."""
    torch = pytest.importorskip("torch")
    want = [cuflash.attention(*arrays(seed), causal=True, return_lse=True) for seed in range(3)]
    stream = torch.cuda.Stream() if streams == "others" else torch.cuda.current_stream()
    torch.cuda.synchronize()
    for seed in (0, 0, 1, 2, 1):
        with torch.cuda.stream(stream):
            x = torch_arrays(torch, seed)
            torch.cuda._sleep(5_000_000)
            x = [y * 1 for y in x]  # written late
            out, lse = cuflash.attention(*x, causal=True, return_lse=True)
            given = torch.full_like(out, torch.nan)
            assert cuflash.attention(*x, causal=True, out=given) is given
            copies = [y.clone() for y in (out, lse, given)]
        stream.synchronize()
        assert {type(y) for y in (out, lse)} == {torch.Tensor}
        for got, expected in zip(copies, (*want[seed], want[seed][0]), strict=True):
            np.testing.assert_array_equal(got.cpu().numpy(), expected.get())
    with pytest.raises(ArgumentError, match="detach"):
        cuflash.attention(*(y.requires_grad_() for y in x), causal=True, return_lse=True)


def test_gradients_of_torch() -> None:
    torch = pytest.importorskip("torch")
    results = []
    for make in (arrays, lambda seed: torch_arrays(torch, seed)):
        for seed in (0, 0, 1):
            q, k, v = make(seed)
            _, _, vjp = cuflash.attention_vjp(q, k, v, return_lse=True, deterministic=True)
            found = vjp(make(seed + 7)[0])
            assert {type(x) for x in found} == {type(q)}
            results.append([x.cpu().numpy() if make is not arrays else x.get() for x in found])
    for got, expected in zip(results[3:], results[:3], strict=True):
        for x, want in zip(got, expected, strict=True):
            np.testing.assert_array_equal(x, want)


def test_torch_captures_replayed_calls() -> None:
    """Its graphs are captured on a stream of its own, which CuPy has to be told."""
    torch = pytest.importorskip("torch")
    x = torch_arrays(torch, 0)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), cupy.cuda.Stream.from_external(side):
        for _ in range(3):
            cuflash.attention(*x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side), cupy.cuda.Stream.from_external(side):
        out = cuflash.attention(*x)
    for y, new in zip(x, torch_arrays(torch, 1), strict=True):
        y.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(out.cpu().numpy(), cuflash.attention(*arrays(1)).get())
