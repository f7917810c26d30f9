"""Values that overflow, cancel or hide: every backend stays exact, never makes a NaN, and never hides one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import KeyLengths
from tests.cases import DTYPES, VALUES, Case
from tests.gpu.device import Device, Kind, check

SEQ_Q, SEQ_K = 150, 283  # several tiles


def holds(kind: Kind, values: str) -> bool:
    return not (kind.dtype == "float16" and values == "133120")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("values", VALUES)
def test_values(device: Device, kind: Kind, values: str, causal: bool) -> None:
    if holds(kind, values):
        case = Case("", seq_q=SEQ_Q, seq_k=SEQ_K, values=values, causal=causal, dlse=causal)
        check(device, kind, case)
        check(device, kind, Case("", seq_q=5, seq_k=9, head_dim=64, values=values, causal=causal, dlse=causal))


@pytest.mark.parametrize("values", ["x30", "logits about -200", "logits about -1e5", "dominant key late"])
@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"bias": "hqk"}, {"mask": "bhqk"}], ids=lambda x: next(iter(x)))
def test_values_with_options(device: Device, kind: Kind, values: str, options: dict[str, Any]) -> None:
    check(device, kind, Case("", seq_q=SEQ_Q, seq_k=SEQ_K, values=values, dlse=True, **options))


def test_one_key_of_133120(device: Device, kind: Kind) -> None:
    """A product of two such numbers is far above what float16 holds, and the weight is 1 all the same."""
    if holds(kind, "133120"):
        check(device, kind, Case("", values="133120", seq_q=1, seq_k=1, head_dim=64))


def run(device: Device, kind: Kind, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of host arrays in the kind's dtype, in float64."""
    dtype = DTYPES[kind.dtype]
    arrays = (device.put(np.asarray(x).astype(dtype)) for x in (q, k, v))
    with device.poisoned():
        out, lse = cuflash.attention(*arrays, return_lse=True, backend=kind.backend, **options)
        return device.get(out).astype(np.float64), device.get(lse).astype(np.float64)


def gradients(device: Device, kind: Kind, dout: Any, q: Any, k: Any, v: Any, **options: Any) -> dict[str, np.ndarray]:
    """The gradients of host arrays in the kind's dtype, by name."""
    dtype = DTYPES[kind.dtype]
    dout, q, k, v = (device.put(np.asarray(x).astype(dtype)) for x in (dout, q, k, v))
    with device.poisoned():
        _, vjp = cuflash.attention_vjp(q, k, v, backend=kind.backend, **options)
        return {name: device.get(x) for name, x in vjp(dout)._asdict().items()}


def largest(kind: Kind) -> float:
    dtype = DTYPES[kind.dtype]
    return float(ml_dtypes.finfo(dtype).max)


def test_values_near_the_largest_number(device: Device, kind: Kind) -> None:
    """v near the dtype's limit (a 1024th of it, where sums in float32 have the same limit): out is v, not infinite."""
    top = largest(kind) / (1 if kind.dtype == "float16" else 1024)
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 70, 16)), rng.standard_normal((2, 283, 16))
    v = np.full((2, 283, 16), top).astype(DTYPES[kind.dtype])
    out, lse = run(device, kind, q, k, v)
    np.testing.assert_allclose(out, v[:, :1].astype(np.float64) * np.ones_like(out), rtol=0.01)
    assert np.isfinite(lse).all()


def test_logits_near_the_largest_number(device: Device, kind: Kind) -> None:
    """Logits of 2^100 (2^30 for float16) of both signs: all weight is on the first key of the largest logit's."""
    big = 2.0**15 if kind.dtype == "float16" else 2.0**50
    q, k = np.zeros((1, 3, 16)), np.zeros((1, 200, 16))
    q[..., 0], k[..., 0] = big, -big
    k[:, 150, 0] = big
    v = np.arange(200.0)[None, :, None] * np.ones(16)
    out, lse = run(device, kind, q, k, v, scale=1.0)
    np.testing.assert_array_equal(out, 150)
    np.testing.assert_array_equal(lse, big * big)
    found = gradients(device, kind, np.ones((1, 3, 16)), q, k, v, scale=1.0)
    for name, x in found.items():
        assert np.isfinite(x.astype(np.float64)).all(), name
    np.testing.assert_array_equal(found["dv"][:, 150].astype(np.float64), 3)
    np.testing.assert_array_equal(np.delete(found["dv"].astype(np.float64), 150, axis=1), 0)


@pytest.mark.parametrize("far", [-100.0, -1e4, -3e4])
def test_visible_keys_far_below_zero_count_fully(device: Device, kind: Kind, far: float) -> None:
    """No finite number stands for minus infinity: a row whose only visible scores are far below 0 is a softmax too."""
    bias = np.full((70, 200), far).astype(DTYPES[kind.dtype])
    mask = np.zeros((70, 200), bool)
    mask[:, 130:] = True
    v = np.where(np.arange(200)[:, None] < 130, 100.0, 1.0) * np.ones((1, 1, 16))
    out, lse = run(
        device, kind, np.zeros((1, 70, 16)), np.zeros((1, 200, 16)), v, bias=device.put(bias), mask=device.put(mask)
    )
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, float(bias[0, 0]) + np.log(70), rtol=1e-6)


def test_rows_that_see_nothing_between_rows_that_do(device: Device, kind: Kind) -> None:
    """Exact zeros in out and in every gradient, however large dout is there."""
    rng = np.random.default_rng(2)
    q, k, v, dout = (rng.standard_normal((2, n, 16)) for n in (150, 283, 283, 150))
    mask = rng.random((2, 150, 283)) < 0.5
    mask[:, ::7] = False
    mask[:, :, ::5] = False
    mask[:, 64:128] = False  # a whole tile
    dout[:, 64:128] = 1e4
    out, lse = run(device, kind, q, k, v, mask=device.put(mask))
    empty, unseen = ~mask.any(axis=-1), ~mask.any(axis=-2)
    np.testing.assert_array_equal(out[empty], 0)
    assert np.isneginf(lse[empty]).all()
    assert np.isfinite(out[~empty]).all()
    found = gradients(device, kind, dout, q, k, v, mask=device.put(mask))
    for name, where in (("dq", empty), ("dk", unseen), ("dv", unseen)):
        x = found[name].astype(np.float64)
        assert np.isfinite(x).all(), name
        np.testing.assert_array_equal(x[where], 0)
        assert (x[~where] != 0).any()


# ---- NaN and infinity ------------------------------------------------------------------------------------------------


def hiding(what: str, device: Device) -> dict[str, Any]:
    """Options that hide keys 200 and above of 283 from all of 150 queries."""
    return {
        "lengths": lambda: {"modifiers": [KeyLengths(np.array([200, 200]))]},
        "lengths on the device": lambda: {"modifiers": [KeyLengths(device.put(np.array([200, 200], np.int64)))]},
        "window": lambda: {"window": (None, 49), "causal": "top_left"},
    }[what]()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("what", ["lengths", "lengths on the device", "window"])
def test_what_no_row_sees_is_never_read_into_a_result(device: Device, kind: Kind, what: str, bad: float) -> None:
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((2, 2, n, 16)) for n in (150, 283, 283, 150))
    options = hiding(what, device)
    want, want_lse = run(device, kind, q, k, v, **options)
    want_gradients = gradients(device, kind, dout, q, k, v, **options)
    k[..., 200:, :] = v[..., 200:, :] = bad
    out, lse = run(device, kind, q, k, v, **options)
    # Which kernel answers a head of float32 on tensor cores depends on all of its numbers, seen or not.
    rounding = 1e-5 if kind == ("mma", "float32") else 0
    np.testing.assert_allclose(out, want, rtol=rounding, atol=rounding)
    np.testing.assert_allclose(lse, want_lse, rtol=rounding, atol=rounding)
    found = gradients(device, kind, dout, q, k, v, **options)
    for name, x in found.items():
        x, wanted = x.astype(np.float64), want_gradients[name].astype(np.float64)
        np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-2 * abs(wanted).max(), err_msg=name)
    np.testing.assert_array_equal(found["dk"][..., 200:, :].astype(np.float64), 0)
    np.testing.assert_array_equal(found["dv"][..., 200:, :].astype(np.float64), 0)


@pytest.mark.parametrize("array", ["k", "v"])
def test_a_nan_reaches_the_rows_that_see_it(device: Device, kind: Kind, array: str) -> None:
    """Key 1050 is seen by the causal rows 1050 and later alone.

    A NaN in v may also reach rows of the same tile of queries, which multiply it by 0; tiles before it never read it.
    """
    rng = np.random.default_rng(4)
    arrays = {name: rng.standard_normal((1, 1100, 16)) for name in "qkv"}
    arrays[array][0, 1050, 3] = np.nan
    out, lse = run(device, kind, **arrays, causal=True)
    assert np.isfinite(out[:, : 1050 if array == "k" else 512]).all()
    assert np.isnan(out[:, 1050:, 3]).all()
    assert np.isfinite(lse[:, :1050]).all()
    assert np.isnan(lse[:, 1050:]).all() == (array == "k")


def test_a_nan_query_stays_in_its_row(device: Device, kind: Kind) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 150, 16)) for _ in "qkv")
    want, _ = run(device, kind, q, k, v)
    q[0, 77, 5] = np.nan
    out, lse = run(device, kind, q, k, v)
    assert np.isnan(out[0, 77]).all()
    assert np.isnan(lse[0, 77])
    # Rows that share a warp change the base of their sums together, and so round differently.
    others, wanted = np.delete(out, 77, axis=1), np.delete(want, 77, axis=1)
    unit = float(np.spacing(DTYPES[kind.dtype].type(1)))
    np.testing.assert_allclose(others, wanted, rtol=0, atol=4 * unit * abs(wanted).max())


def test_zeros_of_33728(device: Device, kind: Kind) -> None:
    """Longer than 16-bit positions reach: zeros give zeros, ones give ones, and lse is the logarithm of the count."""
    seq = 33728
    zeros, ones = np.zeros((1, seq, 8)), np.ones((1, seq, 8))
    out, lse = run(device, kind, zeros[:, :20], zeros, ones)
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_allclose(lse, np.log(seq), rtol=1e-6)
    out, lse = run(device, kind, zeros, zeros[:, :20], zeros[:, :20])
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_allclose(lse, np.log(20), rtol=1e-6)
