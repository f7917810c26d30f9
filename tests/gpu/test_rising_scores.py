"""Scores that outgrow what a 16-bit forward has met before, by a little or beyond float32, for some rows or for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import KeyLengths
from cuflash.problem import Call
from tests.gpu.device import DRY, KINDS, Device, Kind, on_device
from tests.rising import LARGEST, PATTERNS, SCALE, made
from tests.tolerance import Expectation

pytestmark = pytest.mark.parametrize("kind", [k for k in KINDS if k.dtype in LARGEST], ids=str, indirect=True)

SIZES = {
    "64": (64, 64),
    "48": (48, 48),
    "128": (128, 128),
    "192 and 128": (192, 128),
    "192": (192, 192),
    "256": (256, 256),
}
OPTIONS = ("full", "causal", "window", "lengths")


def options(name: str, seq_k: int) -> dict[str, Any]:
    lengths = KeyLengths(np.array([0, seq_k - 30], np.int32))
    return {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (250, 30)},
        "lengths": {"modifiers": (lengths,)},
    }[name]


def run(device: Device, kind: Kind, call: Call, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    arrays = (device.put(x) for x in (call.q, call.k, call.v))
    given = on_device(device, {"modifiers": (), **options})
    with device.poisoned():
        out, lse = cuflash.attention(*arrays, scale=SCALE, return_lse=True, backend=kind.backend, **given)
        return device.get(out), device.get(lse)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_every_pattern(device: Device, kind: Kind, size: str, option: str) -> None:
    for block_k in (32, 128):
        seq_k = 4 * block_k + 7
        given = options(option, seq_k)
        call = made(PATTERNS, block_k, SIZES[size], kind.dtype, 250, seq_k, batch=2, **given)
        Expectation(call).check_forward(*run(device, kind, call, **given))
    device.check_inputs()


@pytest.mark.parametrize("seq_q", [500, 4200])
@pytest.mark.parametrize("size", ["64", "128"])
def test_again_and_again(device: Device, kind: Kind, size: str, seq_q: int) -> None:
    """Warps that compute a block anew lag behind, now here, now there: results are the same bits whenever they are."""
    if DRY:
        seq_q = 128
    call = made(PATTERNS, 128, SIZES[size], kind.dtype, seq_q, 1000)
    want = run(device, kind, call)
    if seq_q <= 500:
        Expectation(call).check_forward(*want)
    for _ in range(2 if DRY else 100):
        for got, expected in zip(run(device, kind, call), want, strict=True):
            assert got.tobytes() == expected.tobytes()
