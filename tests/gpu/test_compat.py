"""The calls of flash-attn and PyTorch on the device, against the same calls in float64 on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuflash import compat
from tests.cases import DTYPES
from tests.gpu.device import KINDS, Device, Kind
from tests.test_compat import CACHES, OPTIONS, cache, numbers

ALLOWED = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}
OWN_KINDS = [kind for kind in KINDS if kind.backend != "wgmma"]  # which takes neither packed sequences nor caches
SOME = ["plain", "causal window", "softcap", "everything"]


def check(device: Device, kind: Kind, call: Callable[..., Any], given: dict[str, Any], options: dict[str, Any]) -> None:
    """Results of arrays on the device are those of the host's in float64, within what rounding explains."""
    rounded = {name: x.astype(DTYPES[kind.dtype]) if x.dtype.kind == "f" else x for name, x in given.items()}
    wide = {name: x.astype(np.float64) if x.dtype == DTYPES[kind.dtype] else x for name, x in rounded.items()}
    moved = {name: device.put(x) for name, x in rounded.items()}
    wanted = call(**wide, **options)
    with device.poisoned():
        found = call(**moved, **options, backend=kind.backend)
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for got, want in pairs:
        if want is None:
            assert got is None
            continue
        np.testing.assert_allclose(
            device.get(got).astype(np.float64), want, rtol=ALLOWED[kind.dtype], atol=2 * ALLOWED[kind.dtype]
        )
    for name in ("k_cache", "v_cache"):  # appended in place, rotated or not
        if name in given:
            ours = device.get(moved[name]).astype(np.float64)
            np.testing.assert_allclose(ours, wide[name], rtol=ALLOWED[kind.dtype], atol=2 * ALLOWED[kind.dtype])


@pytest.mark.parametrize("name", SOME)
def test_flash_attn_func(device: Device, kind: Kind, name: str) -> None:
    given = {"q": numbers(2, 70, 4, 16), "k": numbers(2, 90, 2, 16, seed=1), "v": numbers(2, 90, 2, 16, seed=2)}
    check(device, kind, compat.flash_attn_func, given, {**OPTIONS[name], "return_attn_probs": True})


@pytest.mark.parametrize("name", SOME)
def test_flash_attn_qkvpacked_func(device: Device, kind: Kind, name: str) -> None:
    options = {**OPTIONS[name], "return_attn_probs": True}
    check(device, kind, compat.flash_attn_qkvpacked_func, {"qkv": numbers(2, 70, 3, 4, 16)}, options)


@pytest.mark.parametrize("kind", OWN_KINDS, ids=str)
@pytest.mark.parametrize("name", SOME)
def test_flash_attn_varlen_func(device: Device, kind: Kind, name: str) -> None:
    given = {"q": numbers(90, 4, 16), "k": numbers(99, 2, 16, seed=1), "v": numbers(99, 2, 16, seed=2)}
    given |= {"cu_seqlens_q": np.array([0, 33, 33, 90], np.int32), "cu_seqlens_k": np.array([0, 40, 50, 99], np.int32)}
    options = {**OPTIONS[name], "max_seqlen_q": 57, "max_seqlen_k": 49, "return_attn_probs": True}
    check(device, kind, compat.flash_attn_varlen_func, given, options)


@pytest.mark.parametrize("kind", OWN_KINDS, ids=str)
@pytest.mark.parametrize("where", CACHES)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal window"])
def test_flash_attn_with_kvcache(device: Device, kind: Kind, name: str, rotary: bool, where: str) -> None:
    given, _ = cache(where)
    given |= {"q": numbers(2, 3, 4, 8), "k": numbers(2, 3, 2, 8, seed=1), "v": numbers(2, 3, 2, 8, seed=2)}
    given["cache_seqlens"] = np.array([7, 2], np.int32)
    if rotary:
        angles = np.arange(16)[:, None] * np.array([1.0, 0.3, 0.01, 0.001])
        given |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    check(device, kind, compat.flash_attn_with_kvcache, given, {**OPTIONS[name], "return_softmax_lse": True})


@pytest.mark.parametrize("options", ["plain", "causal", "bool", "float"])
def test_scaled_dot_product_attention(device: Device, kind: Kind, options: str) -> None:
    given = {
        "query": numbers(2, 4, 70, 16),
        "key": numbers(2, 2, 90, 16, seed=1),
        "value": numbers(2, 2, 90, 8, seed=2),
    }
    hidden = numbers(70, 90, seed=5) > 0.7
    if options in ("bool", "float"):
        given["attn_mask"] = ~hidden if options == "bool" else np.where(hidden, -np.inf, numbers(70, 90))
    called = {"enable_gqa": True, "is_causal": options == "causal"}
    check(device, kind, compat.scaled_dot_product_attention, given, called)


def test_dropout(device: Device, kind: Kind) -> None:
    """The same weights are dropped as on the host."""
    given = {"q": numbers(2, 70, 4, 16), "k": numbers(2, 90, 2, 16, seed=1), "v": numbers(2, 90, 2, 16, seed=2)}
    check(
        device, kind, compat.flash_attn_func, given, {"causal": True, "dropout_p": 0.25, "dropout_seed": (7, 1 << 40)}
    )
