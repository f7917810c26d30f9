"""Each array on its own through every kind of strides, in both layouts; what a kernel cannot read is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, problem
from cuflash.problem import canonical
from tests.cases import DTYPES, STRIDES, Case
from tests.gpu.device import (
    DRY,
    MAIN_KINDS,
    Device,
    Kind,
    allow_reference_error,
    canonical_gradients,
    check,
    taken,
)
from tests.test_layouts import (
    ARRAYS,
    SAME_VALUES,
    arguments,
    backwards,
    constant,
    fused,
    garbage,
    heads_inside,
    misaligned,
    odd_offset,
    step_2,
    stride_0,
    transposed,
)
from tests.tolerance import Expectation


def rows_apart(x: np.ndarray) -> np.ndarray:
    """A column slice of a wider array: rows 16 elements further apart, so that 16-byte pieces stay aligned."""
    buffer = garbage((*x.shape[:-1], x.shape[-1] + 16), x.dtype)
    buffer[..., 8:-8] = x
    return buffer[..., 8:-8]


def odd_pitch(x: np.ndarray) -> np.ndarray:
    """Rows one element further apart: the first row is aligned, the second is not."""
    buffer = garbage((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    buffer[..., :-1] = x
    return buffer[..., :-1]


def odd_heads(x: np.ndarray) -> np.ndarray:
    """The third axis from the end at an odd pitch, everything inside it compact."""
    if x.ndim < 3:
        return x
    *outer, rows, columns = x.shape
    buffer = garbage((*outer, rows * columns + 1), x.dtype)
    view = buffer[..., :-1].reshape(x.shape, copy=False)
    view[...] = x
    return view


VARIANTS = [*(v for v in SAME_VALUES if v is not misaligned), rows_apart, odd_pitch, odd_heads]
INPUTS = [name for name in ARRAYS if name != "out"]


def run(device: Device, kind: Kind, layout: str, strided: dict[str, Any], batch: tuple[int, ...] = (2,)) -> None:
    """Run and judge a call and its backward with the arrays named in `strided` as such views."""
    arrays = arguments(layout, batch, DTYPES[kind.dtype])
    arrays = {name: strided[name](x) if name in strided else x for name, x in arrays.items()}
    given = {name: arrays[name] for name in ("q", "k", "v", "mask", "bias")}
    call = problem.describe(**given, layout=layout)
    dout = arrays["dout"]
    expectation = Expectation(call, canonical(dout, layout), arrays["dlse"])
    if kind.dtype == "float64":
        allow_reference_error(expectation)

    inputs = {name: device.put(x) for name, x in given.items()} | {"layout": layout, "backend": kind.backend}
    dout, dlse = device.put(dout), device.put(arrays["dlse"])
    with device.poisoned():
        if "out" in strided:
            shape = strided["out"](np.full(arrays["dout"].shape, np.nan, DTYPES[kind.dtype]))
            target, root, before, first = device.place(shape)
            out, lse = cuflash.attention(**inputs, out=target, return_lse=True)
            assert out is target
            free = ~taken(before, shape, first)
            assert (device.get(root)[free] == before[free]).all(), "bytes between or around the elements of out changed"
        else:
            out, lse = cuflash.attention(**inputs, return_lse=True)
        expectation.check_forward(canonical(device.get(out), layout), device.get(lse))
        # The backward reads copies of out and lse that have the strides in question.
        out, lse = (
            device.put(strided[name](device.get(x))) if name in strided else x
            for name, x in (("out", out), ("lse", lse))
        )
        gradients = cuflash.attention_backward(dout, **inputs, out=out, lse=lse, dlse=dlse)
        expectation.check_backward(canonical_gradients(device, call, gradients))
    device.check_inputs()


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=str, indirect=True)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ARRAYS)
def test_each_array_on_its_own(device: Device, kind: Kind, name: str, layout: str) -> None:
    # Results have no stride 0: as out= it is refused, and an lse or out that is one value is no result.
    changing = () if name in ("out", "lse") else (stride_0, constant)
    for variant in (*VARIANTS, *changing):
        try:
            run(device, kind, layout, {name: variant})
        except AssertionError as error:
            raise AssertionError(f"{name}, {variant.__name__}: {error}") from error


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.__name__)
def test_all_arrays_at_once(device: Device, kind: Kind, variant: Any, layout: str) -> None:
    run(device, kind, layout, dict.fromkeys(ARRAYS, variant))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_all_arrays_differently(device: Device, kind: Kind, layout: str) -> None:
    kinds = [transposed, fused, step_2, backwards, odd_offset, heads_inside, rows_apart, odd_pitch, odd_heads]
    for shift in range(len(kinds)):
        run(device, kind, layout, dict(zip(ARRAYS, kinds[shift:] + kinds[:shift], strict=True)))


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=str, indirect=True)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3), (0,)], ids=str)
def test_leading_axes(device: Device, kind: Kind, batch: tuple[int, ...]) -> None:
    for variant in (transposed, step_2, backwards):
        run(device, kind, "bshd", dict.fromkeys(ARRAYS, variant), batch)


def axes_in_disorder(x: np.ndarray) -> np.ndarray:
    """The leading four axes in another order in memory, so that no two of them are one."""
    if x.ndim < 6:
        return x
    order = (2, 0, 3, 1, *range(4, x.ndim))
    return x.transpose(order).copy().transpose(np.argsort(order))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", [*ARRAYS, "all"])
def test_batch_axes_that_cannot_be_merged(device: Device, kind: Kind, name: str, layout: str) -> None:
    """Four of them, and an array that strides over them in an order of its own."""
    names = ARRAYS if name == "all" else (name,)
    run(device, kind, layout, dict.fromkeys(names, axes_in_disorder), (2, 3, 2, 2))


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=str, indirect=True)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", STRIDES)
def test_strides_over_several_tiles(device: Device, kind: Kind, strides: str, layout: str) -> None:
    """Also at lengths that fill tiles: an error there is not repaired by padding."""
    for seq_q, seq_k in ((150, 283), (128, 256)):
        shape = {"seq_q": seq_q, "seq_k": seq_k, "heads_k": 1, "head_dim": 32}
        check(device, kind, Case("", strides=strides, layout=layout, mask="bhqk", bias="b1qk", dlse=True, **shape))


@pytest.mark.parametrize(
    "mask", ["1", "k", "q1", "qk", "h11", "h1k", "hq1", "hqk", "1qk", "b111", "b11k", "b1q1", "bhqk"]
)
def test_operands_of_every_broadcast_shape(device: Device, kind: Kind, mask: str) -> None:
    shape = {"heads_q": 4, "seq_q": 70, "seq_k": 83}
    check(device, kind, Case("", mask=mask, bias=mask, mask_density=0.8, **shape))
    check(device, kind, Case("", mask=mask, bias=mask, mask_density=0.8, strides="reversed", **shape))


def test_axes_of_length_1_may_have_any_stride(device: Device, kind: Kind) -> None:
    dtype = DTYPES[kind.dtype]
    x = np.random.default_rng(0).standard_normal((1, 1, 33, 8)).astype(dtype)
    want = cuflash.attention(device.put(x), device.put(x), device.put(x), backend=kind.backend)
    odd = np.lib.stride_tricks.as_strided(x, x.shape, (13 * x.itemsize, -7 * x.itemsize, *x.strides[2:]))
    view = device.put(odd)
    assert view.strides[:2] == odd.strides[:2]
    got = cuflash.attention(view, view, view, backend=kind.backend)
    np.testing.assert_array_equal(device.get(got), device.get(want))


@pytest.mark.skipif(DRY, reason="the host reads elements at any address")
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "out"])
def test_elements_across_their_alignment_are_refused(device: Device, name: str) -> None:
    arrays = {n: x for n, x in arguments("bhsd", dtype=np.float32).items() if n in ("q", "k", "v", "bias")}
    arrays["out"] = np.zeros((2, 4, 5, 6), np.float32)
    given = {n: device.put(misaligned(x) if n == name else x) for n, x in arrays.items()}
    with pytest.raises(ArgumentError, match=f"^{name} starts at byte 1"):
        cuflash.attention(**given)


def test_out_that_overlaps_is_refused(device: Device, kind: Kind) -> None:
    x = device.put(np.zeros((2, 2, 40, 16), DTYPES[kind.dtype]))
    with pytest.raises(ArgumentError, match="out overlaps q"):
        cuflash.attention(x, x, x, out=x)
    one = device.put(np.zeros((1, 2, 40, 16), DTYPES[kind.dtype]))
    with pytest.raises(ArgumentError, match=r"share memory|read-only"):
        cuflash.attention(x, x, x, out=device.xp.broadcast_to(one, x.shape))
