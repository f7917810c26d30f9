"""Merging results over disjoint keys: equal to attention over all of them, forward and every gradient."""

from __future__ import annotations

import doctest
import inspect
import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, CuflashError, ShapeError, union
from cuflash.problem import canonical
from tests.cases import DTYPES
from tests.test_arrays import Namespaced
from tests.test_reference import central_difference

Q, K, V = (2, 4, 5, 8), (2, 2, 11, 8), (2, 2, 11, 6)
OUT, LSE = (2, 4, 5, 6), (2, 4, 5)
#: how far a result may be from one that is rounded once less, relative to the largest number
ROUNDING = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-6, "float64": 1e-14}
CUTS = {"two": (0, 4, 11), "three": (0, 1, 7, 11), "one each": tuple(range(12)), "one": (0, 11)}
LAYOUTS = ("bhsd", "bshd")


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def numbers(shape: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def inputs(dtype: str, layout: str = "bhsd") -> dict[str, np.ndarray]:
    shapes = {"q": Q, "k": K, "v": V}
    return {n: np.ascontiguousarray(canonical(numbers(s, DTYPES[dtype]), layout)) for n, s in shapes.items()}


def parts(count: int = 3, dtype: Any = np.float64, spread: float = 1.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Results of made-up calls."""
    statistics = np.float64 if dtype == np.float64 else np.float32
    outs = [numbers(OUT, dtype, n) for n in range(count)]
    return outs, [spread * numbers(LSE, statistics, n) for n in range(count)]


def close(got: np.ndarray, want: np.ndarray, dtype: str, name: str) -> None:
    got, want = got.astype(np.float64), want.astype(np.float64)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want), err_msg=name)
    finite = np.isfinite(want)
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0)).max()
    assert error <= ROUNDING[dtype] * max(1.0, np.abs(want[finite]).max(initial=0)), f"{name}: {error}"


# ---- against attention over all keys ---------------------------------------------------------------------------------
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_keys_merged_are_the_whole(dtype: str, layout: str, cuts: str) -> None:
    """Forward, and all gradients through the merge and each part's backward; causal, so that parts have empty rows."""
    given = inputs(dtype, layout)
    axis = 2 if layout == "bhsd" else 1
    dout = canonical(numbers(OUT, DTYPES[dtype], 7), layout)
    dlse = numbers(LSE, np.float64 if dtype == "float64" else np.float32, 8)
    position = np.arange(11) <= np.arange(5)[:, None] + 3  # the first rows see no key of the last part
    whole, whole_lse, whole_vjp = cuflash.attention_vjp(**given, mask=position, layout=layout, return_lse=True)
    want = whole_vjp(dout, dlse)

    calls = []
    for begin, end in zip(CUTS[cuts][:-1], CUTS[cuts][1:], strict=True):
        at = (slice(None),) * axis + (slice(begin, end),)
        options = {"mask": position[:, begin:end], "layout": layout, "return_lse": True}
        calls.append(cuflash.attention_vjp(given["q"], given["k"][at], given["v"][at], **options))
    outs, lses = [c[0] for c in calls], [c[1] for c in calls]
    out, lse, vjp = cuflash.merge_vjp(outs, lses, layout=layout)
    assert (out.dtype, lse.dtype, out.shape) == (whole.dtype, whole_lse.dtype, whole.shape)
    close(out, whole, dtype, "out")
    close(lse, whole_lse, dtype, "lse")
    douts, dlses = vjp(dout, dlse)
    assert {x.dtype for x in douts} == {dout.dtype}
    assert {x.dtype for x in dlses} == {dlse.dtype}
    grads = [c[2](g, h) for c, g, h in zip(calls, douts, dlses, strict=True)]
    close(np.sum([g.dq.astype(np.float64) for g in grads], axis=0), want.dq, dtype, "dq")
    close(np.concatenate([g.dk for g in grads], axis), want.dk, dtype, "dk")
    close(np.concatenate([g.dv for g in grads], axis), want.dv, dtype, "dv")
    if cuts == "two":
        assert np.isneginf(lses[1]).any()
        assert not np.isneginf(lse).any()


def test_merging_is_associative() -> None:
    outs, lses = parts(4)
    first, second = cuflash.merge(outs[:2], lses[:2]), cuflash.merge(outs[2:], lses[2:])
    twice = cuflash.merge([first[0], second[0]], [first[1], second[1]])
    for got, want in zip(twice, cuflash.merge(outs, lses), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)


def test_one_part_is_itself() -> None:
    for dtype in DTYPES.values():
        outs, lses = parts(1, dtype.type)
        lses[0][0, 1] = -np.inf
        outs[0][0, 1] = 0
        out, lse = cuflash.merge(outs, lses)
        np.testing.assert_array_equal(out, outs[0])
        np.testing.assert_array_equal(lse, lses[0])
        assert out is not outs[0]
        assert lse is not lses[0]


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_rows_are_neutral_whatever_they_hold(dtype: str) -> None:
    outs, lses = parts(3, DTYPES[dtype].type)
    lses[1][:, 1] = -np.inf
    want = cuflash.merge([outs[0][:, 1], outs[2][:, 1]], [lses[0][:, 1], lses[2][:, 1]])
    outs[1][:, 1] = np.nan
    out, lse, vjp = cuflash.merge_vjp(outs, lses)
    np.testing.assert_array_equal(out[:, 1], want[0])
    np.testing.assert_array_equal(lse[:, 1], want[1])
    douts, dlses = vjp(np.ones_like(out), np.ones_like(lse))
    assert (douts[1][:, 1] == 0).all()
    assert (dlses[1][:, 1] == 0).all()
    assert all(np.isfinite(x.astype(np.float64)).all() for x in (*douts, *dlses))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_empty_everywhere_stay_empty(dtype: str) -> None:
    outs, lses = parts(2, DTYPES[dtype].type)
    for x, y in zip(outs, lses, strict=True):
        x[0, 2, 3], y[0, 2, 3] = np.nan, -np.inf
    out, lse, vjp = cuflash.merge_vjp(outs, lses)
    assert (out[0, 2, 3] == 0).all()
    assert lse[0, 2, 3] == -np.inf
    dout, dlse = np.ones_like(out), np.ones_like(lse)
    dout[0, 2, 3], dlse[0, 2, 3] = np.nan, np.nan
    for x in (*vjp(dout, dlse)[0], *vjp(dout, dlse)[1]):
        assert (x[0, 2, 3] == 0).all()
        assert np.isfinite(x.astype(np.float64)).all()


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_results_far_apart(dtype: str, shift: float) -> None:
    outs, lses = parts(2, DTYPES[dtype].type)
    lses[1] = (lses[1] - np.copysign(1e4, shift) + shift).astype(lses[1].dtype)
    lses[0] = (lses[0] + shift).astype(lses[0].dtype)
    if shift < 0:
        outs, lses = outs[::-1], lses[::-1]
    out, lse, vjp = cuflash.merge_vjp(outs, lses)
    larger = int(lses[1].max() > lses[0].max())
    if shift != 1e30:  # where both are the same number
        np.testing.assert_array_equal(out, outs[larger])
        np.testing.assert_array_equal(lse, lses[larger])
        douts, dlses = vjp(out, lse)
        np.testing.assert_array_equal(douts[larger], out)
        assert (douts[1 - larger] == 0).all()
        assert (dlses[1 - larger] == 0).all()
    else:
        np.testing.assert_allclose(out, (outs[0] + outs[1]) / 2, rtol=1e-6)
        np.testing.assert_array_equal(lse, lses[0])


def test_a_nan_that_a_row_sees_reaches_that_row_alone() -> None:
    outs, lses = parts(2)
    clean = cuflash.merge(outs, lses)
    outs[1][0, 1, 2] = np.nan
    lses[1][0, 1, 2] -= 1e4  # its weight is 0, and 0 · NaN is NaN as it is in attention
    out, lse = cuflash.merge(outs, lses)
    assert np.isnan(out[0, 1, 2]).all()
    out[0, 1, 2], lse[0, 1, 2] = clean[0][0, 1, 2], clean[1][0, 1, 2]
    np.testing.assert_array_equal(out, clean[0])
    np.testing.assert_array_equal(lse, clean[1])
    lses[0][1, 0, 0] = np.nan
    assert np.isnan(cuflash.merge(outs, lses)[1][1, 0, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_agree_with_finite_differences(layout: str) -> None:
    outs = [canonical(numbers((2, 3, 2), seed=n), layout) for n in range(3)]
    lses = [numbers((2, 3), seed=n) for n in range(3)]
    lses[2][1, 1] = -np.inf
    dout, dlse = canonical(numbers((2, 3, 2), seed=5), layout), numbers((2, 3), seed=6)
    out, lse, vjp = cuflash.merge_vjp(outs, lses, layout=layout)
    douts, dlses = vjp(dout, dlse)
    without = cuflash.merge_backward(dout, outs, lses, out, lse, layout=layout)[1]
    for n, (given, gradients) in product(range(3), ((outs, douts), (lses, dlses))):

        def loss(x: np.ndarray, n: int = n, given: Any = given) -> float:
            changed = [x if i == n else y for i, y in enumerate(given)]
            out, lse = cuflash.merge(*(changed if g is given else g for g in (outs, lses)), layout=layout)
            return float(np.vdot(dout, out) + np.vdot(dlse, lse))

        numeric = central_difference(loss, given[n])
        np.testing.assert_allclose(gradients[n], numeric, rtol=1e-9, atol=1e-10)
        assert np.abs(numeric).max() > 0.01
        assert np.abs(without[n] - dlses[n]).max() > 0.01


@pytest.mark.parametrize("empty", [(0, 2, 3, 4), (2, 2, 0, 4)], ids=str)
def test_sizes_of_zero(empty: tuple[int, ...]) -> None:
    out, lse, vjp = cuflash.merge_vjp([np.zeros(empty)] * 2, [np.zeros(empty[:-1])] * 2)
    assert (out.shape, lse.shape) == (empty, empty[:-1])
    assert vjp(out, lse)[0][1].shape == empty


# ---- arrays ----------------------------------------------------------------------------------------------------------
def test_inputs_of_any_strides_are_not_changed() -> None:
    outs, lses = parts(2)
    want = cuflash.merge(outs, lses)
    strided = [np.moveaxis(np.moveaxis(x, -1, 0).copy(), 0, -1) for x in outs]
    broadcast = np.broadcast_to(lses[0][:1], LSE)
    np.testing.assert_array_equal(cuflash.merge(strided, lses)[0], want[0])
    np.testing.assert_array_equal(cuflash.merge(outs, [broadcast] * 2)[0], (outs[0] + outs[1]) / 2)
    for n, (x, y) in enumerate(zip(*parts(2), strict=True)):
        np.testing.assert_array_equal(outs[n], x)
        np.testing.assert_array_equal(lses[n], y)


def test_results_are_contiguous_in_their_layout() -> None:
    outs, lses = parts(2)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in outs]
    out, _ = cuflash.merge(swapped, lses, layout="bshd")
    assert out.flags.c_contiguous
    np.testing.assert_array_equal(out.swapaxes(1, 2), cuflash.merge(outs, lses)[0])


def test_the_vjp_does_not_see_later_changes_of_the_lists() -> None:
    outs, lses = parts(2)
    out, _, vjp = cuflash.merge_vjp(outs, lses)
    want = vjp(out)
    outs.pop(), lses.pop()
    np.testing.assert_array_equal(vjp(out)[0][1], want[0][1])


def test_arrays_of_another_library() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        outs, lses = parts(2, dtype)
        out, lse, vjp = cuflash.merge_vjp(list(map(Namespaced, outs)), list(map(Namespaced, lses)))
        for got, want in zip((out, lse), cuflash.merge(outs, lses), strict=True):
            assert type(got) is Namespaced
            np.testing.assert_array_equal(got.array, want)
        assert {type(x) for xs in vjp(out, lse) for x in xs} == {Namespaced}


# ---- errors ----------------------------------------------------------------------------------------------------------
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no parts": ({"outs": [], "lses": []}, ("outs has 0", "at least 1")),
    "lengths": ({"outs": parts(2)[0], "lses": parts(3)[1]}, ("outs has 2", "lses has 3", "return_lse=True")),
    "a stacked array": ({"outs": np.zeros((2, *OUT))}, ("outs is", "ndarray", "list or tuple")),
    "a generator": ({"lses": (x for x in parts(2)[1])}, ("lses is", "generator", "list or tuple")),
    "None": ({"outs": None}, ("outs is None", "NoneType")),
    "a list of lists": ({"outs": [[1.0], [2.0]]}, ("outs[0] is [1.0]", "numpy.asarray")),
    "dtypes": ({"outs": [parts(1)[0][0], parts(1, np.float32)[0][0]]}, ("outs[1] has dtype float32", "float64")),
    "integers": ({"outs": [np.ones(OUT, int)] * 2}, ("outs[0] has dtype int64", "float16", "astype")),
    "dtype of lse": ({"lses": parts(2, np.float32)[1]}, ("lses[0] has dtype float32", "float64")),
    "shape": ({"outs": [numbers(OUT), numbers((2, 4, 5, 7))]}, ("outs[1] has shape (2, 4, 5, 7)", str(OUT))),
    "shape of lse": ({"lses": [numbers(LSE), numbers((2, 5, 4))]}, ("lses[1] has shape (2, 5, 4)", str(LSE))),
    "batch is not repeated": ({"outs": [numbers(OUT), numbers((1, *OUT[1:]))]}, ("outs[1] has shape (1, 4, 5, 6)",)),
    "axes": ({"outs": [numbers((5, 6))] * 2, "lses": [numbers((5,))] * 2}, ("outs[0] has shape (5, 6)", "3 axes")),
    "layout": ({"layout": "sbhd"}, ("layout='sbhd'", "'bshd'")),
    "the other layout": ({"layout": "bshd"}, ("lses[0] has shape (2, 4, 5)", "(2, 5, 4)")),
}
SHAPES = ("shape", "shape of lse", "batch is not repeated", "axes", "the other layout")


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("function", [cuflash.merge, cuflash.merge_vjp, cuflash.merge_backward])
def test_bad_arguments(function: Any, name: str) -> None:
    changes, words = BAD[name]
    outs, lses = parts(2)
    out, lse = cuflash.merge(outs, lses)
    given: dict[str, Any] = {"outs": outs, "lses": lses} | changes
    if function is cuflash.merge_backward:
        given |= {"dout": out, "out": out, "lse": lse}
    if name == "a generator":
        given["lses"] = (x for x in lses)
    with pytest.raises(CuflashError) as caught:
        function(**given)
    assert type(caught.value) is (ShapeError if name in SHAPES else ArgumentError)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_bad_arrays_of_the_backward(name: str) -> None:
    outs, lses = parts(2)
    out, lse = cuflash.merge(outs, lses)
    good = {"dout": out, "outs": outs, "lses": lses, "out": out, "lse": lse, "dlse": lse}
    for bad, word in (
        (good[name].astype(np.float16), "dtype float16"),
        (good[name][:1], f"shape {(1, *LSE[1:])}"[:-1]),
    ):
        with pytest.raises(ArgumentError, match=rf"^{name} has ") as caught:
            cuflash.merge_backward(**good | {name: bad})
        assert word in str(caught.value)


def test_places_that_differ() -> None:
    outs, lses = parts(2)
    with pytest.raises(ArgumentError, match=r"outs\[1\] is a spaced array on the host"):
        cuflash.merge([outs[0], Namespaced(outs[1])], lses)


# ---- documentation ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [cuflash.merge, cuflash.merge_backward, cuflash.merge_vjp])
def test_every_parameter_is_documented(call: Any) -> None:
    text = inspect.getdoc(call) or ""
    for heading in ("Parameters", "Returns", "Raises", "Notes", "Examples"):
        assert f"\n{heading}\n{'-' * len(heading)}\n" in text, heading
    listed = text.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    documented = {name for line in listed.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(inspect.signature(call).parameters) <= documented


def test_examples_run() -> None:
    result = doctest.testmod(union)
    assert result.attempted > 3
    assert result.failed == 0
