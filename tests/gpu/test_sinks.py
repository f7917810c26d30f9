"""Sinks on the device: every backend and dtype, the gradient of the logits bit for bit, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import Sinks
from tests.cases import SINKS, Case
from tests.gpu.device import DRY, Device, Kind, check, on_device

needs_device = pytest.mark.skipif(DRY, reason="graphs are the device's")
LENGTHS = {"seq_q": 283, "seq_k": 150, "head_dim": 64, "lengths": (150, 0)}


@pytest.mark.parametrize("name", SINKS)
def test_options(device: Device, kind: Kind, name: str) -> None:
    check(device, kind, Case(name, **{**SINKS[name], **LENGTHS}))


@pytest.mark.parametrize("name", ["sinks", "sinks-batch", "sinks-number"])
def test_the_gradient_repeats_bit_for_bit(device: Device, kind: Kind, name: str) -> None:
    """In turns as well as without them: each row writes its own term, and the terms are added in one order."""
    case = Case(name, kind.dtype, **{**SINKS[name], "seq_q": 1030, "seq_k": 300, "batch": (3,), "lengths": None})
    check(device, kind, case, deterministic=True)
    made = case.make()
    q, k, v, dout, dlse = (device.put(made[n]) for n in ("q", "k", "v", "dout", "dlse"))
    options = {**on_device(device, made["options"]), "backend": kind.backend}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    found = {
        device.get(
            cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=flag, **options).dsinks
        ).tobytes()
        for flag in (True, True, False, None)
    }
    assert len(found) == 1


def test_logits_and_their_gradient_may_have_the_dtype_of_q(device: Device, kind: Kind) -> None:
    made = Case("dtype", kind.dtype, heads_q=4).make()
    q, k, v, dout = (device.put(made[n]) for n in ("q", "k", "v", "dout"))
    logits = device.put(np.linspace(-1, 2, 4).astype(q.dtype))
    out, vjp = cuflash.attention_vjp(q, k, v, modifiers=[Sinks(logits)], backend=kind.backend)
    gradient = vjp(dout).dsinks
    assert (type(gradient), gradient.dtype, gradient.shape) == (type(q), q.dtype, (4,))
    host, host_vjp = cuflash.attention_vjp(
        made["q"], made["k"], made["v"], modifiers=[Sinks(device.get(logits))], backend="numpy"
    )
    tolerance = 3e-2 if q.dtype.itemsize == 2 else 1e-4
    np.testing.assert_allclose(device.get(out).astype(float), host.astype(float), atol=tolerance)
    want = host_vjp(made["dout"]).dsinks.astype(float)
    np.testing.assert_allclose(device.get(gradient).astype(float), want, rtol=tolerance, atol=10 * tolerance)


@needs_device
def test_a_captured_graph_follows_the_logits(cupy: Any, device: Device) -> None:
    case = replace(Case("graph", "float16", **SINKS["sinks"]), seq_q=150, seq_k=283)
    made = case.make()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        q, k, v, dout = (cupy.asarray(made[n]) for n in ("q", "k", "v", "dout"))
        logits = cupy.zeros(2, np.float32)

        def step() -> Any:
            out, lse, vjp = cuflash.attention_vjp(q, k, v, modifiers=[Sinks(logits)], return_lse=True)
            return out, lse, *vjp(dout)

        step()
        stream.synchronize()
        stream.begin_capture()
        got = step()
        graph = stream.end_capture()
        for values in ([0.5, 3.0], [-2.0, 1.0]):
            logits.set(np.array(values, np.float32), stream=stream)
            graph.launch(stream)
            stream.synchronize()
            found = [x.get() for x in (got[0], got[1], got[5])]
            want = step()
            for x, y in zip(found, (want[0], want[1], want[5]), strict=True):
                np.testing.assert_array_equal(x, y.get())
