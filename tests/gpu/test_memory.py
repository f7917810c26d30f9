"""What a call takes from the device beyond its inputs, for the shape (4, 8, 8192, 128): nothing of the size of the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import cuflash
from tests.cases import DTYPES

SHAPE = (4, 8, 8192, 128)  # batch times heads 32: q, k and v are 64 MiB each in 16 bits, the scores would be 4 GiB
ONE_PERCENT = 1.01
MIB = 1 << 20


class Peak:
    """The most that the current allocator's pool held during a block, in bytes above what it held at the start."""

    value = 0


@contextmanager
def peak(cupy: Any) -> Iterator[Peak]:
    pool, found = cupy.get_default_memory_pool(), Peak()
    before = pool.used_bytes()

    def allocate(size: int) -> Any:
        pointer = pool.malloc(size)
        found.value = max(found.value, pool.used_bytes() - before)
        return pointer

    with cupy.cuda.using_allocator(allocate):
        yield found


@contextmanager
def free_memory(cupy: Any) -> Iterator[Callable[[], int]]:
    """A function that says how many bytes of the device are gone since the start, whoever took them."""
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.cuda.Device().synchronize()
    before = cupy.cuda.runtime.memGetInfo()[0]
    yield lambda: before - cupy.cuda.runtime.memGetInfo()[0]


@pytest.fixture
def arrays(cupy: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    dtype = DTYPES["bfloat16"]
    host = np.random.default_rng(0).standard_normal(SHAPE[2:]).astype(dtype)
    one = cupy.asarray(host.view(np.uint16))
    bits = tuple(cupy.broadcast_to(cupy.roll(one, shift), SHAPE).copy() for shift in (0, 1, 2, 3))
    yield tuple(x.view(dtype) for x in bits)
    del one, bits
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("causal", [False, True])
def test_forward_takes_its_results(cupy: Any, arrays: Any, causal: bool) -> None:
    q, k, v, _ = arrays
    out, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)  # compiles
    results = out.nbytes + lse.nbytes
    assert results == 65 * MIB
    del out, lse
    with peak(cupy) as found:
        kept = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    assert results <= found.value <= results * ONE_PERCENT
    with peak(cupy) as found:
        cuflash.attention(q, k, v, causal=causal, out=kept[0])
    assert found.value == 0


def test_statistics_take_their_results(cupy: Any, arrays: Any) -> None:
    q, k, v, _ = arrays
    results = sum(x.nbytes for x in cuflash.attention_statistics(q, k, v, causal=True))  # compiles
    assert results == (64 + 4) * MIB
    with peak(cupy) as found:
        kept = cuflash.attention_statistics(q, k, v, causal=True)
    assert results <= found.value <= results * ONE_PERCENT
    del kept


def test_backward_takes_its_results_and_one_float32_dq(cupy: Any, arrays: Any) -> None:
    q, k, v, dout = arrays
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    first = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)  # compiles
    results = sum(x.nbytes for x in first)
    assert results == 192 * MIB
    del first
    with peak(cupy) as found:
        kept = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert results <= found.value <= (results + 4 * q.size) * ONE_PERCENT
    del kept


def test_nothing_is_kept(cupy: Any, arrays: Any) -> None:
    """After a step, nothing beyond its results is in use, and nothing at all once they are gone."""
    q, k, v, dout = arrays
    pool = cupy.get_default_memory_pool()

    def step() -> Any:
        out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
        return out, vjp, vjp(dout)

    step()
    before = pool.used_bytes()
    kept = step()
    lse_bytes = 4 * q.size // q.shape[-1]
    assert pool.used_bytes() - before == q.nbytes + lse_bytes + sum(x.nbytes for x in kept[2])
    del kept
    for _ in range(20):
        step()
    assert pool.used_bytes() == before


def test_the_device_gives_no_more_than_the_pool(cupy: Any, arrays: Any) -> None:
    """Local memory, the driver or another allocator do not take what the pool does not show."""
    q, k, v, dout = arrays
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    pool = cupy.get_default_memory_pool()
    with free_memory(cupy) as gone:
        held = pool.total_bytes()
        for _ in range(5):
            cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
        cupy.cuda.Device().synchronize()
        assert gone() <= pool.total_bytes() - held + 64 * MIB


def workspace(q: Any) -> int:
    """What a backward may take and give back: dq in float32, and two float32 numbers for each of its rows."""
    return 4 * q.size + 8 * q.size // q.shape[-1]


@pytest.mark.parametrize("options", ["mask", "bias", "both"])
def test_operands_are_not_expanded(cupy: Any, options: str) -> None:
    """A mask or bias that is broadcast over batch and heads, read through strides of its own, is not copied.

    With them Hopper's backward sums dq in panels for two warpgroups, 128 columns at least.
    """
    rng = np.random.default_rng(1)
    q, k, v, dout = (cupy.asarray(rng.standard_normal((8, 4, 1024, 128)).astype(np.float16)) for _ in range(4))
    given = {
        "mask": cupy.asarray(rng.random((2048, 1024)) < 0.9)[::2],
        "bias": cupy.asarray(rng.standard_normal((1024, 1024)).astype(np.float16)).T,
    }
    given = {name: x for name, x in given.items() if options in (name, "both")}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **given)
    cuflash.attention_backward(dout, q, k, v, out, lse, **given)
    with peak(cupy) as found:
        kept = cuflash.attention(q, k, v, return_lse=True, **given)
    assert found.value <= (out.nbytes + lse.nbytes) * ONE_PERCENT
    del kept
    with peak(cupy) as found:
        gradients = cuflash.attention_backward(dout, q, k, v, out, lse, **given)
    sums = 4 * 1024 * 1024 if "bias" in given else 0  # of the bias gradient
    assert found.value <= (sum(x.nbytes for x in gradients) + workspace(q) + sums) * ONE_PERCENT


def test_views_are_not_copied(cupy: Any) -> None:
    """Slices of one fused projection, in the layout that such a projection has."""
    rng = np.random.default_rng(2)
    fused = cupy.asarray(rng.standard_normal((4, 2048, 3, 8, 64)).astype(np.float16))
    q, k, v = (fused[:, :, i] for i in range(3))
    out, lse = cuflash.attention(q, k, v, layout="bshd", return_lse=True)
    dout = cupy.broadcast_to(out[:, :1], out.shape)
    cuflash.attention_backward(dout, q, k, v, out, lse, layout="bshd")
    with peak(cupy) as found:
        kept = cuflash.attention(q, k, v, layout="bshd", return_lse=True)
    assert found.value <= (out.nbytes + lse.nbytes) * ONE_PERCENT
    del kept
    with peak(cupy) as found:
        gradients = cuflash.attention_backward(dout, q, k, v, out, lse, layout="bshd")
    assert found.value <= (sum(x.nbytes for x in gradients) + workspace(q)) * ONE_PERCENT


def test_inputs_are_never_written(cupy: Any, arrays: Any) -> None:
    """Byte by byte, at a size at which every multiprocessor is busy."""
    names = ("q", "k", "v", "dout")
    before = [x.view(np.uint16).copy() for x in arrays]
    q, k, v, dout = arrays
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    before += [out.view(np.uint16).copy(), lse.view(np.uint32).copy()]
    cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    for name, x, old in zip((*names, "out", "lse"), (*arrays, out, lse), before, strict=True):
        assert bool((x.view(old.dtype) == old).all()), f"{name} was written"
