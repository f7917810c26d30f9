"""A repeated forward skips validation and planning: it must be the same call in every respect, and never a wrong one."""

from __future__ import annotations

import pytest

import cuflash
from cuflash.errors import ArgumentError

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu


def arrays(seed: int, layout: str = "bhsd") -> tuple[cupy.ndarray, ...]:
    rng = cupy.random.default_rng(seed)
    shape = (2, 4, 70, 32) if layout == "bhsd" else (2, 70, 4, 32)
    return tuple(rng.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for _ in range(3))


def twice(first: tuple[cupy.ndarray, ...], second: tuple[cupy.ndarray, ...], **options: object) -> None:
    """The second call, which is replayed, equals the same call made with copies, which is not."""
    cuflash.attention(*first, return_lse=True, **options)
    cuflash.attention(*first, return_lse=True, **options)
    out, lse = cuflash.attention(*second, return_lse=True, **options)
    fresh = cupy.empty_like(out)
    _, fresh_lse = cuflash.attention(*second, return_lse=True, out=fresh, **options)
    cupy.testing.assert_array_equal(out, fresh)
    cupy.testing.assert_array_equal(lse, fresh_lse)


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
