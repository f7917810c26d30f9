"""The calls of other systems: what each argument means there, what is refused, and the traps between the systems.

The twins here are written from the documents of the systems, dense and in float64, and know nothing of cuflash.
"""

from __future__ import annotations

import doctest
import inspect
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash.onnx
from cuflash import ArgumentError, ShapeError, UnsupportedError, compat
from tests.test_arrays import Namespaced

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng((*shape, seed)).standard_normal(shape).astype(dtype)


# ---- twins -----------------------------------------------------------------------------------------------------------
def dense(s: np.ndarray, seen: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of scores (heads, seq_q, seq_k) times values, and the log-sum-exp; rows that see nothing are 0 and -inf."""
    with np.errstate(all="ignore"):
        p = np.where(seen, np.exp(s - np.where(seen, s, -np.inf).max(axis=-1, keepdims=True, initial=-1e300)), 0)
        total = p.sum(axis=-1, keepdims=True)
        shift = np.where(seen, s, -np.inf).max(axis=-1, initial=-np.inf)
        lse = np.where(total[..., 0] > 0, shift + np.log(total[..., 0]), -np.inf)
        return np.where(total > 0, p / total, 0) @ v, lse


def flash(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """flash-attn for one sequence: (seq, heads, dim) in, (seq_q, heads, dim) and (heads, seq_q) out."""
    q, k, v = (x.astype(np.float64).swapaxes(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat(group, axis=0), v.repeat(group, axis=0)
    s = q @ k.swapaxes(1, 2) * (1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale)
    if softcap > 0:
        s = softcap * np.tanh(s / softcap)
    distance = np.arange(k.shape[1]) - (np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1])
    if alibi_slopes is not None:
        s = s - np.asarray(alibi_slopes, np.float64)[:, None, None] * abs(distance)
    seen = np.ones(distance.shape, bool)
    left, right = window_size
    if causal:
        seen &= distance <= 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    out, lse = dense(s, seen, v)
    return out.swapaxes(0, 1), lse


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, positions: Any, interleaved: bool) -> np.ndarray:
    """Rotary embedding of (seq, heads, dim) by complex numbers."""
    half = cos.shape[1]
    first = np.arange(0, 2 * half, 2) if interleaved else np.arange(half)
    second = first + (1 if interleaved else half)
    turned = (x[..., first] + 1j * x[..., second]) * (cos + 1j * sin)[positions][:, None]
    result = x.copy()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left window": {"window_size": (1, -1)},
    "right window": {"window_size": (-1, 0)},
    "window 0": {"window_size": (0, 0)},
    "causal window": {"causal": True, "window_size": (3, 5)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.05], "causal": True},
    "everything": {
        "softmax_scale": 0.8,
        "causal": True,
        "window_size": (4, -1),
        "softcap": 1.5,
        "alibi_slopes": [0.5, 0.25, 0.1, 0.05],
    },
}
LENGTHS = [(5, 5), (3, 7), (7, 3), (1, 6)]


@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_flash_attn_func(name: str, seq_q: int, seq_k: int) -> None:
    q, k, v = numbers(2, seq_q, 4, 8), numbers(2, seq_k, 2, 8, seed=1), numbers(2, seq_k, 2, 8, seed=2)
    out, lse, rest = compat.flash_attn_func(q, k, v, **OPTIONS[name], return_attn_probs=True)
    assert rest is None
    for entry in range(2):
        wanted, wanted_lse = flash(q[entry], k[entry], v[entry], **OPTIONS[name])
        np.testing.assert_allclose(out[entry], wanted, atol=1e-13)
        np.testing.assert_allclose(lse[entry], wanted_lse, atol=1e-13)
    np.testing.assert_array_equal(compat.flash_attn_func(q, k, v, **OPTIONS[name], deterministic=True), out)


@pytest.mark.parametrize("name", OPTIONS)
def test_flash_attn_qkvpacked_func(name: str) -> None:
    qkv = numbers(2, 6, 3, 4, 8)
    out, lse, rest = compat.flash_attn_qkvpacked_func(qkv, **OPTIONS[name], return_attn_probs=True)
    assert rest is None
    for entry in range(2):
        wanted, wanted_lse = flash(*(qkv[entry, :, i] for i in range(3)), **OPTIONS[name])
        np.testing.assert_allclose(out[entry], wanted, atol=1e-13)
        np.testing.assert_allclose(lse[entry], wanted_lse, atol=1e-13)
    np.testing.assert_array_equal(compat.flash_attn_qkvpacked_func(qkv, **OPTIONS[name]), out)


def test_slopes_of_each_entry() -> None:
    q, slopes = numbers(2, 6, 3, 4, 8), np.array([[0.5, 0.25, 0.1, 0.05], [1.0, 0.0, 2.0, 0.3]], np.float32)
    out = compat.flash_attn_qkvpacked_func(q, alibi_slopes=slopes)
    for entry in range(2):
        wanted = flash(*(q[entry, :, i] for i in range(3)), alibi_slopes=slopes[entry])[0]
        np.testing.assert_allclose(out[entry], wanted, atol=1e-13)


@pytest.mark.parametrize("name", OPTIONS)
def test_flash_attn_varlen_func(name: str) -> None:
    at_q, at_k = np.array([0, 3, 3, 10, 11], np.int32), np.array([0, 7, 9, 12, 18], np.int32)
    q, k, v = numbers(11, 4, 8), numbers(18, 2, 8, seed=1), numbers(18, 2, 8, seed=2)
    longest = (7, 7)
    out, lse, rest = compat.flash_attn_varlen_func(
        q, k, v, at_q, at_k, *longest, **OPTIONS[name], return_attn_probs=True
    )
    assert rest is None
    assert lse.shape == (4, 11)
    for i in range(4):
        rows, keys = slice(at_q[i], at_q[i + 1]), slice(at_k[i], at_k[i + 1])
        wanted, wanted_lse = flash(q[rows], k[keys], v[keys], **OPTIONS[name])
        np.testing.assert_allclose(out[rows], wanted, atol=1e-13)
        np.testing.assert_allclose(lse[:, rows], wanted_lse, atol=1e-13)


# ---- caches ----------------------------------------------------------------------------------------------------------
CACHES = ["contiguous", "entries", "pages"]


def cache(kind: str, capacity: int = 12) -> tuple[dict[str, Any], Callable[[int, str], np.ndarray]]:
    """Arguments that say where the keys of 2 entries lie, and a function that gathers those of one, in their order."""
    if kind == "pages":
        table = np.array([[5, 0, 3], [1, 6, 2]], np.int32)
        arguments: dict[str, Any] = {"block_table": table}
        shape, order = (7, 4, 2), list(table)
    else:
        index = [0, 1] if kind == "contiguous" else [3, 1]
        arguments = {} if kind == "contiguous" else {"cache_batch_idx": np.array(index, np.int32)}
        shape, order = ((2 if kind == "contiguous" else 5), capacity, 2), [np.array([i]) for i in index]
    arguments |= {"k_cache": numbers(*shape, 8, seed=3), "v_cache": numbers(*shape, 8, seed=4)}
    return arguments, lambda entry, name: np.concatenate(arguments[name][order[entry]])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_flash_attn_with_kvcache(name: str, kind: str) -> None:
    where, gathered = cache(kind)
    q, new = numbers(2, 3, 4, 8), {"k": numbers(2, 2, 2, 8, seed=1), "v": numbers(2, 2, 2, 8, seed=2)}
    lengths = np.array([9, 4], np.int32)
    before = {(i, x): gathered(i, f"{x}_cache").copy() for i in range(2) for x in "kv"}
    out, lse = compat.flash_attn_with_kvcache(
        q, **where, **new, cache_seqlens=lengths, **OPTIONS[name], return_softmax_lse=True
    )
    for i, length in enumerate(lengths):
        k, v = (np.concatenate([before[i, x][:length], new[x][i]]) for x in "kv")
        wanted, wanted_lse = flash(q[i], k, v, **OPTIONS[name])
        np.testing.assert_allclose(out[i], wanted, atol=1e-13)
        np.testing.assert_allclose(lse[i], wanted_lse, atol=1e-13)
        for x, rows in (("k", k), ("v", v)):  # appended in place, and nothing else was written
            np.testing.assert_array_equal(gathered(i, f"{x}_cache")[: length + 2], rows)
            np.testing.assert_array_equal(gathered(i, f"{x}_cache")[length + 2 :], before[i, x][length + 2 :])
    again = compat.flash_attn_with_kvcache(q, **where, cache_seqlens=list(lengths + 2), **OPTIONS[name])
    np.testing.assert_allclose(again, out, atol=1e-15)


@pytest.mark.parametrize("cache_seqlens", [5, np.int64(5), np.array([5, 5], np.int32), [5, 5]])
def test_lengths_of_every_form(cache_seqlens: Any) -> None:
    where, gathered = cache("contiguous")
    q = numbers(2, 1, 4, 8)
    out = compat.flash_attn_with_kvcache(q, **where, cache_seqlens=cache_seqlens)
    for i in range(2):
        wanted = flash(q[i], gathered(i, "k_cache")[:5], gathered(i, "v_cache")[:5])[0]
        np.testing.assert_allclose(out[i], wanted, atol=1e-14)


def test_no_lengths_are_full_caches() -> None:
    where, _ = cache("contiguous")
    q = numbers(2, 1, 4, 8)
    np.testing.assert_array_equal(
        compat.flash_attn_with_kvcache(q, **where), compat.flash_attn_with_kvcache(q, **where, cache_seqlens=12)
    )


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, -1)}], ids=str)
def test_rotary_embedding(options: dict[str, Any], interleaved: bool, kind: str) -> None:
    where, gathered = cache(kind)
    angles = np.arange(16)[:, None] * np.array([1.0, 0.3, 0.01])
    cos, sin = np.cos(angles), np.sin(angles)  # rotary_dim 6 of head_dim 8
    q, k, v = numbers(2, 3, 4, 8), numbers(2, 3, 2, 8, seed=1), numbers(2, 3, 2, 8, seed=2)
    kept = q.copy(), k.copy()
    lengths = np.array([7, 2], np.int32)
    before = [gathered(i, "k_cache").copy() for i in range(2)]
    out = compat.flash_attn_with_kvcache(
        q,
        **where,
        k=k,
        v=v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=lengths,
        rotary_interleaved=interleaved,
        **options,
    )
    for i, n in enumerate(lengths):
        positions = n + np.arange(3)
        turned = rotate(k[i], cos, sin, positions, interleaved)
        query = rotate(q[i], cos, sin, positions if options else np.full(3, n), interleaved)
        keys = np.concatenate([before[i][:n], turned])
        np.testing.assert_allclose(gathered(i, "k_cache")[: n + 3], keys, atol=1e-14)
        wanted = flash(query, keys, gathered(i, "v_cache")[: n + 3], **options)[0]
        np.testing.assert_allclose(out[i], wanted, atol=1e-13)
    assert (q == kept[0]).all()
    assert (k == kept[1]).all()


# ---- PyTorch ---------------------------------------------------------------------------------------------------------
def torch_twin(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> np.ndarray:
    """The code that its documentation calls equivalent, and rows of 0 where all is hidden."""
    group = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    if group > 1:
        key, value = key.repeat(group, axis=-3), value.repeat(group, axis=-3)
    s = query @ key.swapaxes(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    seen = np.ones(s.shape, bool)
    if is_causal:
        seen &= np.tri(*s.shape[-2:], dtype=bool)
    if attn_mask is not None and attn_mask.dtype == bool:
        seen &= attn_mask
    elif attn_mask is not None:
        s = s + attn_mask
        seen &= ~np.isneginf(s)
    return dense(s, seen, value)[0]


@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
@pytest.mark.parametrize("heads_k", [4, 2, 1])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "broadcast", "scale"])
def test_scaled_dot_product_attention(kind: str, heads_k: int, seq_q: int, seq_k: int) -> None:
    query, key, value = numbers(2, 4, seq_q, 8), numbers(2, heads_k, seq_k, 8, seed=1), numbers(2, heads_k, seq_k, 6)
    hidden = numbers(2, 4, seq_q, seq_k, seed=5) > 0.7
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": ~hidden},
        "float": {"attn_mask": np.where(hidden, -np.inf, numbers(seq_q, seq_k))},
        "broadcast": {"attn_mask": numbers(2, 1, 1, seq_k)},
        "scale": {"scale": -0.7},
    }[kind]
    out = compat.scaled_dot_product_attention(query, key, value, **options, enable_gqa=heads_k < 4)
    np.testing.assert_allclose(out, torch_twin(query, key, value, **options), atol=1e-13)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 1, 3, 5, 8)])
def test_any_number_of_axes(shape: tuple[int, ...]) -> None:
    x, mask = numbers(*shape), np.tri(5, dtype=bool)
    out = compat.scaled_dot_product_attention(x, x, x, mask)
    np.testing.assert_allclose(out, torch_twin(x, x, x, mask), atol=1e-14)


# ---- kinds and dtypes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_stay(dtype: Any) -> None:
    x, bias = numbers(2, 6, 3, 4, 8, dtype=dtype), numbers(6, 6, dtype=dtype)
    q, k, v = (x[:, :, i] for i in range(3))
    sums = np.float64 if dtype == np.float64 else np.float32
    for call in (
        lambda: compat.flash_attn_func(q, k, v, return_attn_probs=True),
        lambda: compat.flash_attn_qkvpacked_func(x, return_attn_probs=True),
        lambda: compat.flash_attn_varlen_func(q[0], k[0], v[0], [0, 6], [0, 6], 6, 6, return_attn_probs=True),
        lambda: compat.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True),
    ):
        assert [y.dtype for y in call()[:2]] == [dtype, sums]
    q, k, v = (y.swapaxes(1, 2) for y in (q, k, v))
    assert compat.scaled_dot_product_attention(q, k, v, bias).dtype == dtype


def test_arrays_of_another_library() -> None:
    x = numbers(2, 6, 3, 4, 8)
    q, k, v = (x[:, :, i].copy() for i in range(3))
    cos = numbers(6, 2)
    index, slopes = np.array([1, 0], np.int32), numbers(4)
    calls: list[Callable[[Any], Any]] = [
        lambda of: compat.flash_attn_func(of(q), of(k), of(v), alibi_slopes=of(slopes)),
        lambda of: compat.flash_attn_qkvpacked_func(of(x), alibi_slopes=of(slopes)),
        lambda of: compat.flash_attn_varlen_func(of(q[0]), of(k[0]), of(v[0]), [0, 6], [0, 6], 6, 6),
        lambda of: compat.flash_attn_with_kvcache(of(q), of(k.copy()), of(v.copy()), cache_batch_idx=of(index)),
        lambda of: compat.flash_attn_with_kvcache(
            *(of(y.copy()) for y in (q[:, :2], k, v, k[:, :2], v[:, :2], cos, cos)),
            cache_seqlens=of(np.array([3, 1], np.int32)),
        ),
        lambda of: compat.scaled_dot_product_attention(of(q), of(k), of(v), of(np.ones((4, 4), bool))),
    ]
    for call in calls:
        found = call(Namespaced)
        assert type(found) is Namespaced
        np.testing.assert_array_equal(found.array, call(np.asarray))


# ---- the traps between the systems -----------------------------------------------------------------------------------
def seen_by(call: Callable[[Any, Any, Any], Any], seq_q: int, seq_k: int) -> list[str]:
    """Which keys each query sees, as a picture: scores are 0 and values tell the key, axes (batch, seq, heads, dim)."""
    q, k = np.zeros((1, seq_q, 1, 4)), np.zeros((1, seq_k, 1, 4))
    weights = call(q, k, np.eye(seq_k)[None, :, None])[0, :, 0]
    for row in weights:  # all alike, or none
        assert np.allclose(row[row > 0], 1 / max((row > 0).sum(), 1))
    return ["".join("1" if x > 0 else "0" for x in row) for row in weights]


def turned(call: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    """A call whose arrays have heads before seq."""
    return lambda *arrays: call(*(x.swapaxes(1, 2) for x in arrays)).swapaxes(1, 2)


def cached(**options: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda *arrays: compat.flash_attn_with_kvcache(*arrays, **options)


def packed(**options: Any) -> Callable[[Any, Any, Any], Any]:
    def call(q: Any, k: Any, v: Any) -> Any:
        offsets = [0, q.shape[1]], [0, k.shape[1]]
        longest = q.shape[1], k.shape[1]
        return compat.flash_attn_varlen_func(q[0], k[0], v[0], *offsets, *longest, **options)[None]

    return call


def plain(**options: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda *arrays: compat.flash_attn_func(*arrays, **options)


def torch_call(**options: Any) -> Callable[[Any, Any, Any], Any]:
    return turned(lambda *arrays: compat.scaled_dot_product_attention(*arrays, **options))


def onnx_call(**options: Any) -> Callable[[Any, Any, Any], Any]:
    return turned(lambda *arrays: cuflash.onnx.attention(*arrays, **options).Y)


def own(**options: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda *arrays: cuflash.attention(*arrays, layout="bshd", **options)


FLASH = {"flash_attn": plain, "packed": packed, "cache": cached}
WIDE_BOTTOM, WIDE_TOP = ["11110", "11111"], ["10000", "11000"]
TALL_BOTTOM, TALL_TOP = ["00", "00", "00", "10", "11"], ["10", "11", "11", "11", "11"]
ALIGNMENTS = [
    *((name, make(causal=True), WIDE_BOTTOM, TALL_BOTTOM) for name, make in FLASH.items()),
    ("cuflash", own(causal=True), WIDE_BOTTOM, TALL_BOTTOM),
    ("cuflash, bottom_right", own(causal="bottom_right"), WIDE_BOTTOM, TALL_BOTTOM),
    ("cuflash, top_left", own(causal="top_left"), WIDE_TOP, TALL_TOP),
    ("torch", torch_call(is_causal=True), WIDE_TOP, TALL_TOP),
    ("onnx", onnx_call(is_causal=1), WIDE_TOP, TALL_TOP),
    # with the lengths of a cache the diagonal of onnx ends in its last key
    ("onnx, wide cache", onnx_call(is_causal=1, nonpad_kv_seqlen=[5]), WIDE_BOTTOM, None),
    ("onnx, short cache", onnx_call(is_causal=1, nonpad_kv_seqlen=[2]), None, TALL_BOTTOM),
]


@pytest.mark.parametrize(("call", "wide", "tall"), [pytest.param(*rest, id=name) for name, *rest in ALIGNMENTS])
def test_trap_causal_alignment(call: Any, wide: list[str] | None, tall: list[str] | None) -> None:
    if wide is not None:
        assert seen_by(call, 2, 5) == wide
    if tall is not None:
        assert seen_by(call, 5, 2) == tall


#: 2 queries and 6 keys, whose diagonal ends in the bottom right corner, but in the top left one without a cache in onnx
WINDOWS = [
    *((f"{name} -1", make(window_size=(-1, -1)), ["111111"] * 2) for name, make in FLASH.items()),
    *((f"{name} 0", make(window_size=(0, 0)), ["000010", "000001"]) for name, make in FLASH.items()),
    *((f"{name} pair", make(window_size=(1, 1)), ["000111", "000011"]) for name, make in FLASH.items()),
    *((f"{name} left", make(window_size=(2, -1)), ["001111", "000111"]) for name, make in FLASH.items()),
    *((f"{name} right", make(window_size=(-1, 0)), ["111110", "111111"]) for name, make in FLASH.items()),
    ("cuflash -1", own(window=(-1, -1)), ["111111"] * 2),
    ("cuflash None", own(window=(None, None)), ["111111"] * 2),
    ("cuflash pair", own(window=(1, 1)), ["000111", "000011"]),
    ("onnx -1", onnx_call(left_window_size=-1, right_window_size=-1), ["111111"] * 2),
    ("onnx 0", onnx_call(left_window_size=0, right_window_size=0), ["100000", "010000"]),
    ("onnx pair", onnx_call(left_window_size=1, right_window_size=1), ["110000", "111000"]),
    ("onnx cache", onnx_call(left_window_size=1, right_window_size=1, nonpad_kv_seqlen=[6]), ["000111", "000011"]),
]


@pytest.mark.parametrize(("call", "seen"), [pytest.param(*rest, id=name) for name, *rest in WINDOWS])
def test_trap_windows(call: Any, seen: list[str]) -> None:
    assert seen_by(call, 2, 6) == seen


MASK = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool)
ADDED = np.where(MASK, 0.0, -np.inf)
MASKED = [
    ("cuflash mask", own(mask=MASK)),
    ("cuflash bias", own(bias=ADDED)),
    ("torch bool", torch_call(attn_mask=MASK)),
    ("torch float", torch_call(attn_mask=ADDED)),
    ("onnx bool", onnx_call(attn_mask=MASK)),
    ("onnx float", onnx_call(attn_mask=ADDED)),
]


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in MASKED])
def test_trap_true_is_visible_and_a_hidden_row_is_0(call: Any) -> None:
    assert seen_by(call, 3, 3) == ["101", "000", "011"]


EVERY = [
    *((name, make()) for name, make in FLASH.items()),
    ("torch", torch_call()),
    ("onnx", onnx_call()),
    ("cuflash", own()),
]


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in EVERY])
def test_trap_default_scale(call: Any) -> None:
    """One over the root of the head size of q and k, not of v, nor 1."""
    q, k, v = np.full((1, 1, 1, 16), 0.5), np.zeros((1, 2, 1, 16)), np.array([0.0, 1.0]).reshape(1, 2, 1, 1)
    k[:, 1] = 0.25
    want = 1 / (1 + math.exp(-16 * 0.5 * 0.25 / 4))
    assert call(q, k, v).item() == pytest.approx(want, abs=1e-12)


def test_trap_lse() -> None:
    """Natural logarithm, heads before rows, and -inf in rows that see nothing."""
    q, k = np.zeros((2, 5, 3, 4)), np.zeros((2, 2, 3, 4))
    want = np.log([[0, 0, 0, 1, 2]], where=np.array([0, 0, 0, 1, 1], bool), out=np.full((1, 5), -np.inf))
    options = {"causal": True, "return_attn_probs": True}
    out, lse, _ = compat.flash_attn_func(q, k, k + 1, **options)
    np.testing.assert_allclose(lse, np.broadcast_to(want, (2, 3, 5)))
    np.testing.assert_array_equal(out[:, :3], 0)
    out, lse, _ = compat.flash_attn_varlen_func(q[0], k[0], k[0] + 1, [0, 5], [0, 2], 5, 2, **options)
    np.testing.assert_allclose(lse, np.broadcast_to(want, (3, 5)))
    np.testing.assert_array_equal(out[:3], 0)
    out, lse = compat.flash_attn_with_kvcache(q, k, k + 1, causal=True, return_softmax_lse=True)
    np.testing.assert_allclose(lse, np.broadcast_to(want, (2, 3, 5)))
    np.testing.assert_array_equal(out[:, :3], 0)


def test_trap_caches_without_keys() -> None:
    q, k = numbers(1, 2, 1, 4), np.full((1, 3, 1, 4), np.nan)
    out, lse = compat.flash_attn_with_kvcache(q, k, k, cache_seqlens=0, return_softmax_lse=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("name", ["onnx", "cuflash"])
def test_trap_softcap_comes_before_a_bias_and_a_bias_after_the_scale(name: str) -> None:
    q, k, v = numbers(1, 3, 1, 4), numbers(1, 5, 1, 4, seed=1), numbers(1, 5, 1, 4, seed=2)
    bias = 3 * numbers(3, 5)
    s = 0.7 * np.tanh(q[0, :, 0] @ k[0, :, 0].T * 2 / 0.7) + bias
    call = (
        onnx_call(attn_mask=bias, softcap=0.7, scale=2.0) if name == "onnx" else own(bias=bias, softcap=0.7, scale=2.0)
    )
    np.testing.assert_allclose(call(q, k, v)[0, :, 0], dense(s, s == s, v[0, :, 0])[0], atol=1e-13)


def test_trap_one_number_is_no_window() -> None:
    for window in (2, (2,), (1, 2, 3)):
        with pytest.raises(ArgumentError, match="window"):
            cuflash.attention(*[np.zeros((1, 3, 4))] * 3, window=window)
        with pytest.raises(ArgumentError, match="window_size"):
            compat.flash_attn_func(*[np.zeros((1, 3, 1, 4))] * 3, window_size=window)


# ---- what is refused -------------------------------------------------------------------------------------------------
X = numbers(2, 5, 4, 8)
ROWS = {"q": X, "k": X, "v": X}
STEP = {"q": X[:, :1], "k_cache": X.copy(), "v_cache": X.copy()}
NEW = {"k": X[:, :1], "v": X[:, :1]}
TABLES = {"rotary_cos": numbers(5, 2), "rotary_sin": numbers(5, 2)}
LONG = {"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 5], "max_seqlen_q": 5, "max_seqlen_k": 5}
GIVEN: dict[str, dict[str, Any]] = {
    "flash_attn_func": ROWS,
    "flash_attn_qkvpacked_func": {"qkv": numbers(2, 5, 3, 4, 8)},
    "flash_attn_varlen_func": {**dict.fromkeys("qkv", X[0]), **LONG},
    "flash_attn_with_kvcache": STEP,
    "scaled_dot_product_attention": {"query": X, "key": X, "value": X},
}
SOME = ("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func")
CACHE = "flash_attn_with_kvcache"
TORCH = "scaled_dot_product_attention"
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...], type[Exception]]] = [
    *((call, {"dropout_p": 1.0}, ("dropout_p=1.0", "less than 1"), ArgumentError) for call in (*SOME, TORCH)),
    *((call, {"dropout_p": 1 - 1e-9}, ("2^-16", "p is dropout_p here"), ArgumentError) for call in (*SOME, TORCH)),
    *(
        (call, {"dropout_p": 0.1, "dropout_seed": 3}, ("dropout_seed=3", "pair"), ArgumentError)
        for call in (*SOME, TORCH)
    ),
    *(
        (
            call,
            {"dropout_p": 0.1, "dropout_seed": ("x", 0)},
            ("seed='x'", "seed is dropout_seed[0] here"),
            ArgumentError,
        )
        for call in (*SOME, TORCH)
    ),
    *(
        (
            call,
            {"dropout_p": 0.1, "return_attn_probs": True},
            ("return_attn_probs=True", "dropout_mask"),
            UnsupportedError,
        )
        for call in SOME
    ),
    *((call, {"dropout_p": "x"}, ("dropout_p='x'", "real number"), ArgumentError) for call in (*SOME, TORCH)),
    *((call, {"deterministic": None}, ("deterministic=None",), ArgumentError) for call in SOME),
    *((call, {"return_attn_probs": 1}, ("return_attn_probs=1",), ArgumentError) for call in SOME),
    *((call, {"causal": "top_left"}, ("causal='top_left'", "True or False"), ArgumentError) for call in (*SOME, CACHE)),
    *((call, {"softcap": -1.0}, ("softcap=-1.0", "0.0 for none"), ArgumentError) for call in (*SOME, CACHE)),
    *((call, {"window_size": (-2, 0)}, ("window_size=(-2, 0)", "-1"), ArgumentError) for call in (*SOME, CACHE)),
    *((call, {"window_size": None}, ("window_size=None", "pair"), ArgumentError) for call in (*SOME, CACHE)),
    *((call, {"window_size": (1.5, 0)}, ("window_size=(1.5, 0)",), ArgumentError) for call in (*SOME, CACHE)),
    *((call, {"softmax_scale": math.inf}, ("softmax_scale=inf",), ArgumentError) for call in (*SOME, CACHE)),
    *((call, {"alibi_slopes": [1.0, 2.0]}, ("alibi_slopes",), ShapeError) for call in (*SOME, CACHE)),
    *((call, {"backend": "mma"}, ("backend='mma'", "numpy array"), UnsupportedError) for call in GIVEN),
    ("flash_attn_func", {"k": X[:, :, :3], "v": X[:, :, :3]}, ("heads of q (4)", "(3)"), ShapeError),
    ("flash_attn_qkvpacked_func", {"qkv": X}, ("qkv has shape (2, 5, 4, 8)", "flash_attn_func"), ShapeError),
    (
        "flash_attn_qkvpacked_func",
        {"qkv": numbers(2, 5, 4, 3, 8)},
        ("qkv has shape (2, 5, 4, 3, 8)", "(batch, seq, 3, heads, head_dim)"),
        ShapeError,
    ),
    ("flash_attn_varlen_func", {"block_table": [[0]]}, ("block_table", "flash_attn_with_kvcache"), UnsupportedError),
    ("flash_attn_varlen_func", {"alibi_slopes": numbers(1, 4)}, ("alibi_slopes has shape (1, 4)",), UnsupportedError),
    ("flash_attn_varlen_func", {"max_seqlen_q": 4}, ("max_seqlen_q=4", "5 rows"), ArgumentError),
    ("flash_attn_varlen_func", {"cu_seqlens_k": [0, 6]}, ("cu_seqlens_k ends with 6",), ArgumentError),
    (CACHE, {"cache_leftpad": [0, 1]}, ("cache_leftpad", "block_table"), UnsupportedError),
    (CACHE, {"num_splits": 1}, ("num_splits=1", "pass 0"), UnsupportedError),
    (CACHE, {"k": NEW["k"]}, ("k is given and v is not",), ArgumentError),
    (CACHE, {"v": NEW["v"]}, ("v is given and k is not",), ArgumentError),
    (CACHE, NEW, ("cache_seqlens=None with k",), ArgumentError),
    (CACHE, {**NEW, "cache_seqlens": 5}, ("lengths[0] is 5", "lengths is cache_seqlens here"), ArgumentError),
    (CACHE, {"cache_seqlens": -1}, ("cache_seqlens=-1", "at least 0"), ArgumentError),
    (CACHE, {"cache_seqlens": True}, ("cache_seqlens=True",), ArgumentError),
    (CACHE, {"cache_seqlens": 2.0}, ("cache_seqlens=2.0",), ArgumentError),
    (CACHE, {"cache_seqlens": [1, 2, 3]}, ("lengths has shape (3,)", "cache_seqlens here"), ShapeError),
    (
        CACHE,
        {"block_table": [[0, 2], [1, 0]]},
        ("page_table[0, 1] is 2", "page_table is block_table here"),
        ArgumentError,
    ),
    (
        CACHE,
        {"cache_batch_idx": [0, 2]},
        ("page_table[1, 0] is 2", "page_table is cache_batch_idx here"),
        ArgumentError,
    ),
    (CACHE, {"cache_batch_idx": [[0, 1]]}, ("cache_batch_idx has shape (1, 2)",), ShapeError),
    (
        CACHE,
        {"cache_batch_idx": [0, 1], "block_table": [[0], [1]]},
        ("cache_batch_idx and block_table",),
        ArgumentError,
    ),
    (CACHE, {"q": X[0]}, ("q has shape (5, 4, 8)", "4 axes"), ShapeError),
    (CACHE, TABLES, ("rotary_cos and rotary_sin without k and v",), ArgumentError),
    (CACHE, {**NEW, "cache_seqlens": 1, "rotary_cos": TABLES["rotary_cos"]}, ("rotary_sin=None",), ArgumentError),
    (
        CACHE,
        {**NEW, **TABLES, "cache_seqlens": 1, "rotary_cos": numbers(4, 2)},
        ("rotary_cos has shape (4, 2)", "capacity of the caches, 5"),
        ShapeError,
    ),
    (
        CACHE,
        {**NEW, **TABLES, "cache_seqlens": 1, "block_table": [[0, 1], [1, 0]]},
        ("rotary_cos has shape (5, 2)", "capacity of the caches, 10"),
        ShapeError,
    ),
    (CACHE, {**NEW, **TABLES, "cache_seqlens": [1, 2, 3]}, ("cache_seqlens has shape (3,)", "(2,)"), ShapeError),
    (
        CACHE,
        {**NEW, "cache_seqlens": 1, "rotary_cos": numbers(5, 5), "rotary_sin": numbers(5, 5)},
        ("rotary_cos has shape (5, 5)", "head_dim, 8"),
        ShapeError,
    ),
    (
        CACHE,
        {**NEW, "cache_seqlens": 1, **{name: x.astype(np.float32) for name, x in TABLES.items()}},
        ("rotary_cos has dtype float32", "float64"),
        ArgumentError,
    ),
    (CACHE, {"rotary_interleaved": 0}, ("rotary_interleaved=0",), ArgumentError),
    (CACHE, {"return_softmax_lse": None}, ("return_softmax_lse=None",), ArgumentError),
    (TORCH, {"is_causal": 1}, ("is_causal=1",), ArgumentError),
    (TORCH, {"enable_gqa": "yes"}, ("enable_gqa='yes'",), ArgumentError),
    (TORCH, {"is_causal": True, "attn_mask": MASK}, ("attn_mask and is_causal=True",), ArgumentError),
    (TORCH, {"attn_mask": MASK.astype(int)}, ("attn_mask has dtype int64", "True = visible"), ArgumentError),
    (TORCH, {"attn_mask": MASK.astype(np.float32)}, ("attn_mask has dtype float32", "float64"), ArgumentError),
    (TORCH, {"attn_mask": MASK}, ("mask has shape (3, 3)", "mask is attn_mask here"), ShapeError),
    (TORCH, {"attn_mask": ADDED}, ("bias has shape (3, 3)", "bias is attn_mask here"), ShapeError),
    (TORCH, {"key": X[:, :1], "value": X[:, :1]}, ("query has 5 heads and key 1", "enable_gqa=True"), ArgumentError),
    (
        TORCH,
        {"key": X[:, :3], "value": X[:, :3], "enable_gqa": True},
        ("heads of q (5)", "q is query here"),
        ShapeError,
    ),
    (TORCH, {"query": X.astype(int)}, ("q has dtype int64", "q is query here"), ArgumentError),
    (TORCH, {"scale": math.nan}, ("scale=nan",), ArgumentError),
]


@pytest.mark.parametrize(
    ("call", "changes", "words", "error"),
    [pytest.param(*case, id=f"{case[0]}-{case[2][0]}") for case in REFUSED],
)
def test_refused(call: str, changes: dict[str, Any], words: tuple[str, ...], error: type[Exception]) -> None:
    given = GIVEN[call] | changes
    before = {name: x.copy() for name, x in given.items() if isinstance(x, np.ndarray)}
    with pytest.raises(cuflash.CuflashError) as caught:
        getattr(compat, call)(**given)
    assert type(caught.value) is error
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert all((given[name] == x).all() for name, x in before.items())


# ---- dropout ---------------------------------------------------------------------------------------------------------
WITH_DROPOUT = (*SOME, TORCH)


@pytest.mark.parametrize("call", WITH_DROPOUT)
def test_dropout_is_that_of_its_seed(call: str) -> None:
    """The weights that `dropout_mask` says stay, divided by 1 - p, whoever asks; none are dropped for p = 0."""
    dropout, given = cuflash.Dropout(0.25, seed=7, offset=1 << 40), GIVEN[call]
    out = getattr(compat, call)(**given, dropout_p=0.25, dropout_seed=(7, 1 << 40))
    if call == "flash_attn_qkvpacked_func":
        q, k, v = (given["qkv"][:, :, i] for i in range(3))
    else:
        q, k, v = (given[name] for name in (("query", "key", "value") if call == TORCH else "qkv"))
    layout, offsets = "bhsd" if call == TORCH else "bshd", []
    if call == "flash_attn_varlen_func":
        offsets = [given["cu_seqlens_q"], given["cu_seqlens_k"]]
        want = cuflash.attention_varlen(q, k, v, *offsets, modifiers=[dropout])
    else:
        heads_first = [x if layout == "bhsd" else x.swapaxes(1, 2) for x in (q, k)]
        weights = cuflash.attention_weights(*heads_first, range(heads_first[0].shape[-2]))
        kept = cuflash.dropout_mask(dropout, weights.shape)
        assert 0 < kept.mean() < 1
        values = v if layout == "bhsd" else v.swapaxes(1, 2)
        values = values.repeat(weights.shape[-3] // values.shape[-3], axis=-3)
        want = (weights * kept / 0.75) @ values
        want = want if layout == "bhsd" else want.swapaxes(1, 2)
    np.testing.assert_allclose(out, want, atol=1e-12)
    plain = getattr(compat, call)(**given)
    np.testing.assert_array_equal(getattr(compat, call)(**given, dropout_p=0.0, dropout_seed=(7, 0)), plain)


@pytest.mark.parametrize("call", WITH_DROPOUT)
def test_dropout_without_a_seed_is_new_each_time(call: str) -> None:
    found = [getattr(compat, call)(**GIVEN[call], dropout_p=0.5) for _ in range(2)]
    assert (found[0] != found[1]).any()


def test_dropout_keeps_the_mean() -> None:
    q, k = np.zeros((1, 4000, 1, 4)), np.zeros((1, 8, 1, 4))
    out = compat.flash_attn_func(q, k, np.ones((1, 8, 1, 1)), dropout_p=0.3)
    assert abs(out.mean() - 1) < 0.05
    assert set((out * 8 * 0.7).round(3).ravel()) <= set(range(9))


# ---- signatures ------------------------------------------------------------------------------------------------------
COMMON: dict[str, Any] = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
TAIL: dict[str, Any] = {"alibi_slopes": None, "deterministic": False, "return_attn_probs": False}
NEEDED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "flash_attn_func": {**dict.fromkeys("qkv", NEEDED), "dropout_p": 0.0, **COMMON, **TAIL},
    "flash_attn_qkvpacked_func": {"qkv": NEEDED, "dropout_p": 0.0, **COMMON, **TAIL},
    "flash_attn_varlen_func": {
        **dict.fromkeys(["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"], NEEDED),
        "dropout_p": 0.0,
        **COMMON,
        **TAIL,
        "block_table": None,
    },
    "flash_attn_with_kvcache": {
        **dict.fromkeys(["q", "k_cache", "v_cache"], NEEDED),
        **dict.fromkeys(["k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"]),
        "block_table": None,
        **COMMON,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
    "scaled_dot_product_attention": {
        **dict.fromkeys(["query", "key", "value"], NEEDED),
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_those_of_the_original(name: str) -> None:
    parameters = inspect.signature(getattr(compat, name)).parameters
    own = ["backend", "dropout_seed"] if "dropout_p" in SIGNATURES[name] else ["backend"]
    assert {p.name: p.default for p in parameters.values()} == {**SIGNATURES[name], **dict.fromkeys(own)}
    assert list(parameters) == [*SIGNATURES[name], *own]
    named = {p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert named == set(own) | ({"scale", "enable_gqa"} if name == TORCH else set())


@pytest.mark.parametrize("name", SIGNATURES)
def test_documentation(name: str) -> None:
    call = getattr(compat, name)
    text = inspect.getdoc(call) or ""
    for heading in ("Parameters", "Returns", "Raises", "Notes", "Examples"):
        assert f"\n{heading}\n{'-' * len(heading)}\n" in text, heading
    listed = text.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    documented = {name for line in listed.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(inspect.signature(call).parameters) <= documented
    assert "2.8" in text or "2.11" in text


def test_examples_run() -> None:
    result = doctest.testmod(compat)
    assert result.attempted > 0
    assert result.failed == 0
