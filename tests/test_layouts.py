"""Each array on its own through every kind of strides, both layouts, any number of leading axes: the NumPy path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.problem import canonical, describe

HEADS_Q, HEADS_K, SEQ_Q, SEQ_K, DIM, DIM_V = 4, 2, 5, 7, 8, 6
ARRAYS = ("q", "k", "v", "mask", "bias", "dout", "out", "lse", "dlse")


def garbage(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """What surrounds a view: NaN, which shows in any result that reads it; for bool, a pattern."""
    if dtype.kind == "b":
        return np.resize(np.array([False, True, True]), shape)
    return np.full(shape, np.nan, dtype)


def contiguous(x: np.ndarray) -> np.ndarray:
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """Its last two axes swapped in memory."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def heads_inside(x: np.ndarray) -> np.ndarray:
    """The axes two and three from the end swapped in memory: the other layout's array."""
    return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)


def fused(x: np.ndarray) -> np.ndarray:
    """The middle one of three arrays in one buffer, as q, k and v of a fused projection."""
    buffer = garbage((*x.shape[:-1], 3, x.shape[-1]), x.dtype)
    buffer[..., 1, :] = x
    return buffer[..., 1, :]


def backwards(x: np.ndarray) -> np.ndarray:
    """Negative strides in all axes."""
    all_reversed = (slice(None, None, -1),) * x.ndim
    return np.ascontiguousarray(x[all_reversed])[all_reversed]


def step_2(x: np.ndarray) -> np.ndarray:
    """Every other element along the last axis."""
    buffer = garbage((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def stride_0(x: np.ndarray) -> np.ndarray:
    """One row that stands for all rows of the next-to-last axis; the only kind that changes values."""
    return np.broadcast_to(x[..., :1, :], x.shape)


def constant(x: np.ndarray) -> np.ndarray:
    """Stride 0 everywhere, such as the gradient of a plain sum; changes values too."""
    return np.broadcast_to(x[(-1,) * x.ndim], x.shape)


def odd_offset(x: np.ndarray) -> np.ndarray:
    """Begins one element into its buffer."""
    buffer = garbage((x.size + 2,), x.dtype)
    view = buffer[1:-1].reshape(x.shape)
    view[...] = x
    return view


def misaligned(x: np.ndarray) -> np.ndarray:
    """Begins one byte into its buffer."""
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


SAME_VALUES = [
    contiguous,
    transposed,
    heads_inside,
    fused,
    backwards,
    step_2,
    odd_offset,
    misaligned,
]
Variant = Callable[[np.ndarray], np.ndarray]


def arguments(layout: str, batch: tuple[int, ...] = (2,), dtype: Any = np.float64) -> dict[str, Any]:
    """Contiguous arrays of a call and of its backward, in the layout."""
    rng = np.random.default_rng(len(batch))

    def normal(heads: int, seq: int, dim: int) -> np.ndarray:
        return np.ascontiguousarray(canonical(rng.standard_normal((*batch, heads, seq, dim)), layout)).astype(dtype)

    scores = (*batch, HEADS_Q, SEQ_Q, SEQ_K)
    accumulator = np.float64 if dtype == np.float64 else np.float32
    mask = rng.random(scores) < 0.7
    mask[..., 0, :] = False  # a row that sees no key
    return {
        "q": normal(HEADS_Q, SEQ_Q, DIM),
        "k": normal(HEADS_K, SEQ_K, DIM),
        "v": normal(HEADS_K, SEQ_K, DIM_V),
        "mask": mask,
        "bias": rng.standard_normal(scores).astype(dtype),
        "dout": normal(HEADS_Q, SEQ_Q, DIM_V),
        "dlse": rng.standard_normal(scores[:-1]).astype(accumulator),
    }


def expected(arrays: dict[str, np.ndarray], layout: str, **options: Any) -> dict[str, np.ndarray]:
    """What the dense float64 reference says about contiguous copies of the same arrays, in the layout."""
    copies = {name: x.copy() for name, x in arrays.items()}  # in C order
    dout, dlse = copies.pop("dout"), copies.pop("dlse")
    call = describe(**copies, layout=layout, **options)
    out, lse = reference.forward(call)
    gradients = reference.backward(call, canonical(dout, layout), dlse)
    found = {f"d{name}": canonical(getattr(gradients, f"d{name}"), layout) for name in "qkv"}
    if "bias" in copies:
        found["dbias"] = gradients.dbias.reshape(copies["bias"].shape)
    return found | {"out": canonical(out, layout), "lse": lse}


def check(arrays: dict[str, np.ndarray], layout: str, strided: dict[str, Variant], tolerance: float = 1e-12) -> None:
    """Run forward and backward with the arrays named in `strided` as such views, against the reference."""
    arrays = {name: strided.get(name, contiguous)(x) for name, x in arrays.items()}
    before = {name: x.copy() for name, x in arrays.items()}
    want = expected(arrays, layout)
    dout, dlse = arrays.pop("dout"), arrays.pop("dlse")
    inputs = arrays | {"layout": layout}

    target = None
    if "out" in strided:
        target = strided["out"](np.full(dout.shape, np.nan, dout.dtype))
        around = surroundings(target)
    out, lse = cuflash.attention(**inputs, out=target, return_lse=True)
    if target is not None:
        assert out is target
        np.testing.assert_array_equal(surroundings(target), around)
    out, lse = (strided.get(name, contiguous)(x) for name, x in (("out", out), ("lse", lse)))
    gradients = cuflash.attention_backward(dout, **inputs, out=out, lse=lse, dlse=dlse)
    got = {"out": out, "lse": lse} | gradients._asdict()
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.shape == want[name].shape, name
        empty = np.isneginf(want[name])  # lse of a row that sees no key
        assert (np.isneginf(x) == empty).all(), name
        error = np.abs(np.where(empty, 0, x).astype(np.float64) - np.where(empty, 0, want[name])).max(initial=0)
        assert error <= tolerance, f"{name}: {error}"
    for name, x in (arrays | {"dout": dout, "dlse": dlse}).items():
        np.testing.assert_array_equal(x, before[name])


def surroundings(view: np.ndarray) -> np.ndarray:
    """The bytes of the buffer behind a view that do not belong to it."""
    root = view
    while isinstance(root.base, np.ndarray):
        root = root.base
    start = view.ctypes.data - root.ctypes.data
    taken = np.zeros(root.nbytes, bool)
    grid = np.ix_(*(np.arange(n) * s for n, s in zip(view.shape, view.strides, strict=True)))
    for byte in range(view.itemsize):
        taken[start + byte + sum(grid)] = True
    return np.frombuffer(root.tobytes(), np.uint8)[~taken]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name in ARRAYS for variant in SAME_VALUES]
    # Results of a call have no stride 0: as out= it is refused (test_errors.py).
    + [(name, variant) for name in ARRAYS if name not in ("out", "lse") for variant in (stride_0, constant)],
)
def test_each_array_on_its_own(name: str, variant: Variant, layout: str) -> None:
    check(arguments(layout), layout, {name: variant})


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("variant", SAME_VALUES)
def test_all_arrays_at_once(variant: Variant, layout: str) -> None:
    check(arguments(layout), layout, dict.fromkeys(ARRAYS, variant))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_other_dtypes(dtype: Any, layout: str) -> None:
    tolerance = {2: 0.1, 4: 1e-5}[np.dtype(dtype).itemsize]
    kinds = (transposed, fused, step_2, backwards, odd_offset, misaligned, heads_inside)
    check(arguments(layout, dtype=dtype), layout, dict(zip(ARRAYS, kinds, strict=False)), tolerance)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (2, 1, 3), (2, 1, 1, 3), (0,), (1, 0), (2, 0, 3)])
@pytest.mark.parametrize("variant", [contiguous, transposed, step_2])
def test_leading_axes(batch: tuple[int, ...], variant: Variant, layout: str) -> None:
    check(arguments(layout, batch), layout, dict.fromkeys(ARRAYS, variant))


@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 7), (5, 0), (0, 0), (1, 7), (5, 1)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_short_and_empty_sequences(layout: str, seq_q: int, seq_k: int) -> None:
    axis = -3 if layout == "bshd" else -2
    arrays = arguments(layout)
    given = ("q", "k", "v", "dout")
    cut = {name: x.take(range(seq_k if name in "kv" else seq_q), axis) for name, x in arrays.items() if name in given}
    cut |= {name: arrays[name][..., :seq_q, :seq_k] for name in ("mask", "bias")}
    check(cut | {"dlse": arrays["dlse"][..., :seq_q]}, layout, {})


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (7,), (5, 1), (1, 7), (5, 7), (4, 1, 1), (4, 5, 7), (1, 5, 7), (2, 1, 1, 7), (2, 4, 5, 1), (1, 4, 1, 7)],
)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_mask_and_bias_of_every_broadcast_shape(shape: tuple[int, ...], layout: str) -> None:
    index = tuple(slice(0, n) for n in shape)
    arrays = arguments(layout)
    arrays["mask"] = np.array(arrays["mask"][(0,) * (4 - len(shape))][index])
    arrays["bias"] = np.array(arrays["bias"][(0,) * (4 - len(shape))][index])
    check(arrays, layout, {})
    check(arrays, layout, {"mask": backwards, "bias": backwards})


def test_axes_of_length_1_may_have_any_stride() -> None:
    arrays = arguments("bhsd", (1,))
    odd = np.lib.stride_tricks.as_strided(
        arrays["q"], arrays["q"].shape, (13, *arrays["q"].strides[1:]), writeable=False
    )
    assert odd.strides[0] == 13
    check(arrays | {"q": odd}, "bhsd", {})


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_new_results_are_compact_in_the_callers_layout(layout: str) -> None:
    arrays = arguments(layout)
    out, lse = cuflash.attention(arrays["q"], arrays["k"], arrays["v"], layout=layout, return_lse=True)
    assert out.flags.c_contiguous
    assert lse.flags.c_contiguous
    assert lse.shape == (2, HEADS_Q, SEQ_Q)


def test_the_surroundings_are_seen() -> None:
    """The check of what lies around `out` can fail."""
    target = step_2(np.zeros((2, 3)))
    around = surroundings(target)
    assert around.size == 6 * 8
    target[...] = 1
    np.testing.assert_array_equal(surroundings(target), around)
    target.base[0, 1] = 1
    assert (surroundings(target) != around).any()
