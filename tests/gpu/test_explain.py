"""Explanations on the device: what is compiled, the floor, and measured times; nothing of the caller's is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import KeyLengths
from tests.cases import DTYPES
from tests.gpu.device import DRY, Device, Kind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DRY, reason="the host is not measured")]


def normal(device: Device, kind: Kind, *shape: int, seed: int = 0) -> Any:
    return device.put(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(DTYPES[kind.dtype]))


def judge(explained: cuflash.Explanation, kind: Kind) -> None:
    """Kernels are named, do not spill, and take no less time than their floor."""
    assert explained.backend == kind.backend
    assert explained.schedule
    assert explained.method.endswith("sums in float64" if kind.dtype == "float64" else "sums in float32")
    assert explained.registers
    assert explained.spilled_bytes == 0
    assert explained.floor_ms is not None
    assert explained.measured_ms is not None
    assert explained.share is not None
    assert 0 < explained.share < 1.05, str(explained)
    assert f"measured:  {explained.measured_ms:.4g} ms, of which" in str(explained)


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_is_measured(device: Device, kind: Kind, causal: bool) -> None:
    q, k, v = (normal(device, kind, 2, 8, 1024, 64, seed=seed) for seed in range(3))
    options = {"causal": causal, "modifiers": [KeyLengths(device.put(np.array([1000, 77], np.int32)))]}
    plain = cuflash.explain(q, k, v, **options, backend=kind.backend)
    assert plain.measured_ms is None
    explained = cuflash.explain(q, k, v, **options, backend=kind.backend, measure=True)
    judge(explained, kind)
    assert (explained.variant, explained.grid, explained.floor_ms) == (plain.variant, plain.grid, plain.floor_ms)
    device.check_inputs()


def test_packed_sequences_are_measured(device: Device, kind: Kind) -> None:
    q, k, v = (normal(device, kind, 1100, 4, 64, seed=seed) for seed in range(3))
    offsets = device.put(np.array([0, 700, 700, 1000], np.int32))
    options = {"max_seqlen_q": 700, "max_seqlen_k": 700, "causal": True, "backend": kind.backend}
    explained = cuflash.explain_varlen(q, k, v, offsets, offsets, **options, measure=True)
    judge(explained, kind)
    assert "Packed(count=3)" in explained.problem
    whole = cuflash.explain_varlen(q, k, v, [0, 1100], [0, 1100], causal=True, backend=kind.backend)
    assert explained.floor_ms < whole.floor_ms
    device.check_inputs()


@pytest.mark.parametrize("kind", [Kind("mma", "bfloat16"), Kind("simt", "float32"), Kind("simt", "float64")], ids=str)
@pytest.mark.parametrize("page_size", [0, 16])
def test_decoding_is_measured(device: Device, kind: Kind, page_size: int) -> None:
    rows, entries = (page_size, 4 * 256) if page_size else (4096, 4)
    q = normal(device, kind, 4, 8, 1, 128)
    caches = [normal(device, kind, entries, 2, rows, 128, seed=seed) for seed in (1, 2)]
    new = [normal(device, kind, 4, 2, 1, 128, seed=seed) for seed in (3, 4)]
    table = device.put(np.arange(4 * 256, dtype=np.int32).reshape(4, 256)) if page_size else None
    lengths = device.put(np.array([4000, 0, 17, 4095], np.int32))
    options = {"page_table": table, "k_new": new[0], "v_new": new[1], "backend": kind.backend}
    explained = cuflash.explain_decode(q, *caches, lengths, **options, measure=True)
    judge(explained, kind)
    assert explained.slices
    assert explained.workspace_bytes
    full = cuflash.explain_decode(q, *caches, [4095] * 4, **options)
    assert (full.grid, full.slices, full.variant) == (explained.grid, explained.slices, explained.variant)
    assert explained.floor_ms < full.floor_ms
    device.check_inputs()


@pytest.mark.parametrize("strides", ["reversed", "bshd"])
def test_scratch_data_lies_as_the_callers(device: Device, strides: str) -> None:
    """So that what is measured is the kernel that the call gets."""
    x = np.random.default_rng(0).standard_normal((2, 512, 4, 64)).astype(np.float16)
    q = device.put(x)
    q = q.swapaxes(1, 2) if strides == "bshd" else q[:, :, ::-1].swapaxes(1, 2)
    explained = cuflash.explain(q, q, q, measure=True)
    assert explained.backend in (("mma", "wgmma") if strides == "bshd" else ("mma",))
    assert explained.measured_ms is not None
    device.check_inputs()


def test_a_stream_of_the_caller(device: Device, cupy: Any) -> None:
    q = normal(device, Kind("mma", "float16"), 1, 4, 512, 64)
    with cupy.cuda.Stream(non_blocking=True):
        explained = cuflash.explain(q, q, q, backend="mma", measure=True)
    judge(explained, Kind("mma", "float16"))
