"""Sizes at which 32-bit arithmetic and launch limits give way: each axis beyond 65535, and offsets beyond 2^32 elements.

Most of a large array is zero or never read; what is random is small enough for the reference on the host.  In a dry run
the sizes are small, and only the tests' own arithmetic is tried.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import UnsupportedError, problem
from cuflash.plan import MAX_STEP
from tests.cases import DTYPES, Case
from tests.gpu.device import DRY, MAIN_KINDS, Device, Kind, canonical_gradients, check
from tests.tolerance import Expectation

pytestmark = [
    pytest.mark.big,
    pytest.mark.parametrize("kind", MAIN_KINDS, ids=str, indirect=True),
]

MANY = 701 if DRY else 70_001  # above 65535, the limit of grid.y and grid.z
HUGE = 1 << (17 if DRY else 32)  # elements: offsets up to here pass 2^31 and 2^32, in bytes and in elements
LONG = (1 << (12 if DRY else 23)) + 5  # positions; times 5 heads of 64 it is above 2^31 elements
EDGE = 64  # rows at either end of a long axis that are compared with the reference


def half(kind: Kind) -> bool:
    return DTYPES[kind.dtype].itemsize == 2


# ---- each axis beyond 65535 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        {"batch": (MANY,), "heads_q": 2, "heads_k": 1, "seq_q": 3, "seq_k": 5},
        {"batch": (7, MANY // 7), "heads_q": 1, "heads_k": 1, "seq_q": 3, "seq_k": 5},
        {"batch": (), "heads_q": 2 * MANY, "heads_k": MANY, "seq_q": 3, "seq_k": 5},
        {"batch": (), "heads_q": MANY, "heads_k": 1, "seq_q": 3, "seq_k": 5},
        {"batch": (), "heads_q": 2, "heads_k": 1, "seq_q": MANY, "seq_k": 5},
        {"batch": (), "heads_q": 2, "heads_k": 1, "seq_q": 5, "seq_k": MANY},
    ],
    ids=["batch", "batches", "heads", "group", "seq_q", "seq_k"],
)
def test_long_axis(device: Device, kind: Kind, shape: dict[str, Any]) -> None:
    check(device, kind, Case("", head_dim=8, mask="1k", bias="q1", dlse=True, **shape))


# ---- offsets beyond 2^32 elements, each array on its own -------------------------------------------------------------


def spread(device: Device, buffer: Any, x: np.ndarray, axis: int) -> tuple[Any, list[Any]]:
    """A view of the buffer with the shape of `x` whose offsets along `axis` reach `HUGE` elements, and its pieces.

    The pieces are views along that axis, whose own offsets are small: CuPy's kernels need not be trusted with more.
    """
    n, size = x.shape[axis], x.dtype.itemsize
    rest = tuple(m for a, m in enumerate(x.shape) if a != axis)
    strides = list(np.cumprod([1, *rest[:0:-1]])[::-1] * size) if rest else []
    far = HUGE // (n - 1) // 16 * 16 * size

    def at(shape: tuple[int, ...], strides: list[int], offset: int) -> Any:
        if DRY:
            return np.ndarray(shape, x.dtype, buffer, offset, strides)
        return device.xp.ndarray(shape, x.dtype, buffer.data + offset, strides)

    pieces = [at(rest, strides, i * far) for i in range(n)]
    full = strides.copy()
    full.insert(axis, far)
    return at(x.shape, full, 0), pieces


def bits(x: Any) -> Any:
    return x.view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout", "mask", "bias", "lse", "dlse"])
def test_far_elements(device: Device, kind: Kind, name: str) -> None:
    """One array at a time, one axis after the other, with elements that lie 2^32 elements apart."""
    xp, dtype = device.xp, DTYPES[kind.dtype]
    made = Case(
        "", dtype=kind.dtype, batch=(3,), heads_q=4, seq_q=3, seq_k=70, mask="bhqk", bias="bhqk", dlse=True
    ).make()
    operands = {key: made["options"][key] for key in ("mask", "bias")}
    host = {key: made[key] for key in ("q", "k", "v")} | operands
    call = problem.describe(**host)
    expectation = Expectation(call, made["dout"], made["dlse"])
    size = {"mask": 1, "lse": 4, "dlse": 4}.get(name, dtype.itemsize)
    buffer = xp.empty(HUGE * size + (1 << 20), np.uint8)

    arrays = {key: device.put(x) for key, x in host.items()}
    dout, dlse = device.put(made["dout"]), device.put(made["dlse"])
    out, lse = cuflash.attention(**arrays, return_lse=True, backend=kind.backend)
    near = {**arrays, "dout": dout, "dlse": dlse, "out": out, "lse": lse}
    for axis in range(near[name].ndim):
        x = device.get(near[name])
        far, pieces = spread(device, buffer, x, axis)
        for i, piece in enumerate(pieces):
            bits(piece)[...] = xp.asarray(bits(np.ascontiguousarray(x.take(i, axis))))
        used = {**near, name: far}
        if name == "out":
            for piece in pieces:
                piece.fill(np.nan)
        target = far if name == "out" else None
        if name in ("mask", "bias") and axis >= 2 and far.strides[axis] > MAX_STEP:
            with pytest.raises(UnsupportedError, match=f"{name}: .* and kernels step over 2147483647 at most"):
                cuflash.attention(**{key: used[key] for key in arrays}, backend=kind.backend)
            continue
        result, result_lse = cuflash.attention(
            **{key: used[key] for key in arrays}, out=target, return_lse=True, backend=kind.backend
        )
        found = np.stack([device.get(piece) for piece in pieces], axis) if name == "out" else device.get(result)
        expectation.check_forward(found, device.get(result_lse))
        gradients = cuflash.attention_backward(
            used["dout"],
            **{key: used[key] for key in arrays},
            out=used["out"],
            lse=used["lse"],
            dlse=used["dlse"],
            backend=kind.backend,
        )
        expectation.check_backward(canonical_gradients(device, call, gradients))
    device.check_inputs()


# ---- arrays of more than 2^31 elements -------------------------------------------------------------------------------


def zeros_with_ends(device: Device, ends: np.ndarray, length: int) -> Any:
    """Zeros of `length` rows, but for the first and last rows: those of `ends` (heads, 2 * EDGE, dim)."""
    heads, _, dim = ends.shape
    x = device.xp.zeros((heads, length, dim), ends.dtype)
    for head in range(heads):
        bits(x[head, :EDGE])[...] = device.xp.asarray(bits(ends[head, :EDGE]))
        bits(x[head, length - EDGE :])[...] = device.xp.asarray(bits(ends[head, EDGE:]))
    return x


def both_ends(device: Device, x: Any) -> np.ndarray:
    """First and last `EDGE` rows of (heads, length, ...)."""
    parts = [[device.get(row) for row in (one[:EDGE], one[one.shape[0] - EDGE :])] for one in x]
    return np.stack([np.concatenate(two) for two in parts])


def only_ends_differ_from_zero(device: Device, x: Any) -> bool:
    """Whether all rows between the ends are 0, looked at in pieces that CuPy counts in 32 bits."""
    for one in x:
        step = max(1, (1 << 28) // one[0].size)
        for begin in range(EDGE, one.shape[0] - EDGE, step):
            piece = one[begin : min(begin + step, one.shape[0] - EDGE)]
            if int(device.xp.count_nonzero(bits(piece) << 1)):  # the sign of a zero does not matter
                return False
    return True


def random(seed: int, dtype: np.dtype, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_many_queries(device: Device, kind: Kind) -> None:
    """q, out, dout, dq and the sums of dq above 2^31 elements: the first and last rows of each head are right."""
    dtype, heads, dim = DTYPES[kind.dtype], 5, 64
    q, dout = random(1, dtype, heads, 2 * EDGE, dim), random(2, dtype, heads, 2 * EDGE, dim)
    k, v = random(3, dtype, heads, 3, dim), random(4, dtype, heads, 3, dim)
    call = problem.describe(q, k, v)
    expectation = Expectation(call, dout)
    q_all, dout_all = (zeros_with_ends(device, x, LONG) for x in (q, dout))
    k_all, v_all = device.put(k), device.put(v)
    out, lse = cuflash.attention(q_all, k_all, v_all, return_lse=True, backend=kind.backend)
    expectation.check_forward(both_ends(device, out), both_ends(device, lse))
    middle = device.get(out[-1, LONG // 2 : LONG // 2 + 10]).astype(np.float64)
    np.testing.assert_allclose(middle, v[-1].astype(np.float64).mean(axis=0) + 0 * middle, atol=2e-3)
    dq, dk, dv = cuflash.attention_backward(dout_all, q_all, k_all, v_all, out, lse, backend=kind.backend)
    assert only_ends_differ_from_zero(device, dq)
    expectation.check_backward(
        canonical_gradients(device, call, cuflash_gradients(device, both_ends(device, dq), dk, dv))
    )


def cuflash_gradients(device: Device, dq: np.ndarray, dk: Any, dv: Any) -> Any:
    from cuflash.gradients import gradients_type

    return gradients_type()(device.xp.asarray(bits(dq)).view(dq.dtype), dk, dv)


def test_many_keys(device: Device, kind: Kind) -> None:
    """k, v, dk and dv above 2^31 elements: a window leaves the last keys of each head."""
    dtype, heads, dim, seq_q = DTYPES[kind.dtype], 5, 64, 5
    k, v = random(5, dtype, heads, 2 * EDGE, dim), random(6, dtype, heads, 2 * EDGE, dim)
    q, dout = random(7, dtype, heads, seq_q, dim), random(8, dtype, heads, seq_q, dim)
    window = (EDGE - seq_q, 0)  # the first query sees the last EDGE keys but for the last seq_q - 1 of them
    call = problem.describe(q, k, v, window=window, causal=True)
    expectation = Expectation(call, dout)
    k_all, v_all = (zeros_with_ends(device, x, LONG) for x in (k, v))
    q_all, dout_all = device.put(q), device.put(dout)
    options = {"window": window, "causal": True, "backend": kind.backend}
    out, lse = cuflash.attention(q_all, k_all, v_all, return_lse=True, **options)
    expectation.check_forward(device.get(out), device.get(lse))
    dq, dk, dv = cuflash.attention_backward(dout_all, q_all, k_all, v_all, out, lse, **options)
    for x in (dk, dv):
        assert only_ends_differ_from_zero(device, x)
    ends = [device.xp.asarray(bits(both_ends(device, x))).view(dtype) for x in (dk, dv)]
    expectation.check_backward(canonical_gradients(device, call, cuflash_gradients(device, device.get(dq), *ends)))
    # All keys at once: of equal scores, with values 1, the mean is 1 and lse the logarithm of the count.
    k_all.fill(0)
    v_all.fill(1)
    out, lse = cuflash.attention(q_all, k_all, v_all, return_lse=True, backend=kind.backend)
    np.testing.assert_allclose(device.get(out).astype(np.float64), 1, atol=1e-3)
    np.testing.assert_allclose(device.get(lse), np.log(LONG), rtol=1e-5)


def test_many_rows_of_lse(device: Device, kind: Kind) -> None:
    """More than 2^31 rows in all, of one element each."""
    if not half(kind):
        return  # what counts here is lse, which is float32 for both
    batch, heads, seq = (8, 4, 257) if DRY else (1 << 15, 1 << 8, 257)
    dtype = DTYPES[kind.dtype]
    q = device.xp.zeros((batch, heads, seq, 1), dtype)
    last = random(9, dtype, 1, seq, 1)
    bits(q[-1, -1])[...] = device.xp.asarray(bits(last[0]))
    k, v = random(10, dtype, 1, 3, 1), random(11, dtype, 1, 3, 1)
    k_all, v_all = (device.xp.broadcast_to(device.put(x), (batch, 1, 3, 1)) for x in (k, v))
    out, lse = cuflash.attention(q, k_all, v_all, return_lse=True, backend=kind.backend)
    expectation = Expectation(problem.describe(last, k, v))
    expectation.check_forward(device.get(out[-1, -1:]), device.get(lse[-1, -1:]))
    zero = Expectation(problem.describe(np.zeros_like(last), k, v))
    zero.check_forward(device.get(out[0, :1]), device.get(lse[0, :1]))


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_large_operand(device: Device, kind: Kind, name: str) -> None:
    """A mask or bias of more than 2^32 elements, forward and backward: right to the last row."""
    if not half(kind) and name == "bias":
        return  # its offsets in elements are those of float16, which needs half the memory
    seq, dim, dtype = 700 if DRY else 66_000, 16, DTYPES[kind.dtype]
    q, k, v = (random(seed, dtype, 1, seq, dim) for seed in (12, 13, 14))
    dout = np.zeros((1, seq, dim), dtype)
    dout[:, -EDGE:] = random(15, dtype, 1, EDGE, dim)
    rng = np.random.default_rng(16)
    if name == "mask":
        rows = rng.random((EDGE, seq)) < 0.5
        operand = device.xp.ones((seq, seq), bool)
    else:
        rows = rng.standard_normal((EDGE, seq)).astype(dtype)
        operand = device.xp.zeros((seq, seq), dtype)
    bits(operand[seq - EDGE :])[...] = device.xp.asarray(bits(rows))
    call = problem.describe(q[:, -EDGE:], k, v, **{name: rows})
    expectation = Expectation(call, dout[:, -EDGE:])
    q_all, k_all, v_all, dout_all = (device.put(x) for x in (q, k, v, dout))
    options = {name: operand, "backend": kind.backend}
    out, lse = cuflash.attention(q_all, k_all, v_all, return_lse=True, **options)
    expectation.check_forward(device.get(out[:, -EDGE:]), device.get(lse[:, -EDGE:]))
    gradients = cuflash.attention_backward(dout_all, q_all, k_all, v_all, out, lse, **options)
    assert only_ends_differ_from_zero(device, gradients.dq)
    changed = {"dq": gradients.dq[:, seq - EDGE :]}
    if name == "bias":
        assert only_ends_differ_from_zero(device, gradients.dbias[None])
        changed["dbias"] = gradients.dbias[seq - EDGE :]
    expectation.check_backward(canonical_gradients(device, call, gradients._replace(**changed)))


def test_long_causal(device: Device, kind: Kind) -> None:
    """66049 queries and keys: the last rows are those of a short call, and so are the gradients that they make."""
    seq, dim, dtype = 513 if DRY else 66_049, 16, DTYPES[kind.dtype]
    q, k, v = (random(seed, dtype, 1, seq, dim) for seed in (17, 18, 19))
    dout = np.zeros((1, seq, dim), dtype)
    dout[:, -EDGE:] = random(20, dtype, 1, EDGE, dim)
    call = problem.describe(q[:, -EDGE:], k, v, causal=True)
    expectation = Expectation(call, dout[:, -EDGE:])
    arrays = [device.put(x) for x in (q, k, v)]
    out, lse = cuflash.attention(*arrays, causal=True, return_lse=True, backend=kind.backend)
    expectation.check_forward(device.get(out[:, -EDGE:]), device.get(lse[:, -EDGE:]))
    gradients = cuflash.attention_backward(device.put(dout), *arrays, out, lse, causal=True, backend=kind.backend)
    assert only_ends_differ_from_zero(device, gradients.dq)
    changed = gradients._replace(dq=gradients.dq[:, -EDGE:])
    expectation.check_backward(canonical_gradients(device, call, changed))


def test_the_views_are_what_they_should_be(device: Device, kind: Kind) -> None:
    """`spread` gives views with the right values that do not overlap."""
    x = np.arange(2.0 * 3 * 4).reshape(2, 3, 4).astype(np.float32)
    buffer = device.xp.empty(HUGE * 4 + (1 << 20), np.uint8)
    for axis, i in itertools.product(range(3), range(2)):
        far, pieces = spread(device, buffer, x, axis)
        for j, piece in enumerate(pieces):
            piece[...] = device.xp.asarray(np.ascontiguousarray(x.take(j, axis)))
        assert far.shape == x.shape
        np.testing.assert_array_equal(device.get(far[i]), x[i])
