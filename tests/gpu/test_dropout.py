"""Dropout on the device: every backend and dtype, the bits of the mask, seeds on the device, graphs that draw anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import Dropout
from tests.cases import DROPOUT, DTYPES, Case
from tests.gpu.device import DRY, Device, Kind, check

needs_device = pytest.mark.skipif(DRY, reason="graphs and arrays of seeds are the device's")
LENGTHS = {"seq_q": 283, "seq_k": 150, "head_dim": 64}


@pytest.mark.parametrize("name", DROPOUT)
def test_options(device: Device, kind: Kind, name: str) -> None:
    lengths = {**LENGTHS, "lengths": (150, 0)} if "lengths" in DROPOUT[name] else LENGTHS
    check(device, kind, Case(name, **{**DROPOUT[name], **lengths}))


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_in_turns(device: Device, kind: Kind, head_dim: int) -> None:
    case = Case("turns", **{**DROPOUT["dropout-causal"], **LENGTHS, "head_dim": head_dim})
    check(device, kind, case, deterministic=True)


@pytest.mark.parametrize("n", [64, 200])
def test_what_is_dropped_is_what_the_mask_says(device: Device, kind: Kind, n: int) -> None:
    """With the unit matrix for values outputs are weights, with it for dout dv is."""
    dtype, rng = DTYPES[kind.dtype], np.random.default_rng(0)
    q, k = (device.put((0.1 * rng.standard_normal((3, 2, n, 40))).astype(dtype)) for _ in "qk")
    unit = device.put(np.broadcast_to(np.eye(n), (3, 2, n, n)).astype(dtype).copy())
    dropout = Dropout(0.5, 0x0123456789ABCDEF, 0xFEDCBA9876543210)
    out, vjp = cuflash.attention_vjp(q, k, unit, modifiers=[dropout], backend=kind.backend)
    kept = cuflash.dropout_mask(dropout, (3, 2, n, n))
    np.testing.assert_array_equal(device.get(out) != 0, kept)
    np.testing.assert_array_equal(device.get(vjp(unit).dv) != 0, kept.swapaxes(-1, -2))


@needs_device
def test_seeds_on_the_device_are_those_of_the_host(cupy: Any, device: Device, kind: Kind) -> None:
    made = Case("seeds", kind.dtype, **LENGTHS).make()
    q, k, v, dout = (device.put(made[n]) for n in ("q", "k", "v", "dout"))
    results = []
    for number in (
        int,
        lambda x: cupy.array(x, np.uint64),
        lambda x: cupy.array([x], np.uint64).view(np.int64),
        lambda x: np.array(x, np.uint64),
    ):
        chain = [Dropout(0.3, number(1 << 63), number(77))]
        out, lse, vjp = cuflash.attention_vjp(
            q, k, v, modifiers=chain, return_lse=True, deterministic=True, backend=kind.backend
        )
        results.append([device.get(x).tobytes() for x in (out, lse, *vjp(dout))])
    assert results[0] == results[1] == results[2] == results[3]


@needs_device
def test_a_replayed_graph_draws_anew(cupy: Any) -> None:
    """The offset is counted on within the graph: each replay drops what the mask of its own offset says."""
    n = 96
    q, k = (cupy.zeros((1, 2, n, 64), np.float16) for _ in "qk")
    unit = cupy.asarray(np.broadcast_to(np.eye(n, dtype=np.float16), (1, 2, n, n)))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        offset = cupy.zeros((), np.int64)
        chain = [Dropout(0.5, 11, offset)]

        def step() -> Any:
            out, vjp = cuflash.attention_vjp(q, k, unit, modifiers=chain)
            gradients = vjp(unit)
            offset[...] += 1
            return out, gradients.dv

        step()
        stream.synchronize()
        stream.begin_capture()
        out, dv = step()
        graph = stream.end_capture()
        for count in range(1, 4):
            graph.launch(stream)
            stream.synchronize()
            kept = cuflash.dropout_mask(Dropout(0.5, 11, count), (1, 2, n, n))
            np.testing.assert_array_equal(out.get() != 0, kept)
            np.testing.assert_array_equal(dv.get() != 0, kept.swapaxes(-1, -2))


@needs_device
@pytest.mark.parametrize("wrong", [np.int32, np.float64, "two"])
def test_refused_arrays(cupy: Any, wrong: Any) -> None:
    x = cupy.ones((1, 4, 8), np.float16)
    seed = cupy.ones(2, np.int64) if wrong == "two" else cupy.ones((), wrong)
    with pytest.raises(cuflash.ArgumentError, match=r"seed of Dropout has shape .* on a device it must be one int64"):
        cuflash.attention(x, x, x, modifiers=[Dropout(0.5, seed, 0)])


@needs_device
def test_hopper_leaves_it_to_mma(cupy: Any) -> None:
    x = cupy.ones((1, 4, 64), np.float16)
    explained = cuflash.explain(x, x, x, modifiers=[Dropout(0.5, 1, 0)])
    assert explained.backend == "mma"
