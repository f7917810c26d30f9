"""Merging results on the device: what the host computes from the same arrays, and the whole from split keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.problem import canonical
from tests.cases import DTYPES
from tests.gpu.device import Device, Kind
from tests.test_union import LSE, OUT, close, inputs, numbers, parts


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_agrees_with_the_host(device: Device, dtype: str, layout: str) -> None:
    outs, lses = parts(3, DTYPES[dtype].type, spread=3)
    outs = [canonical(x, layout) for x in outs]
    lses[1][:, 1], lses[0][0, 2, 3], lses[2] = -np.inf, -np.inf, lses[2] + 1e4
    for x, y in zip(outs, lses, strict=True):
        y[1, 3] = -np.inf
        canonical(x, layout)[1, 3] = np.nan
    dout, dlse = canonical(numbers(OUT, DTYPES[dtype], 7), layout), numbers(LSE, lses[0].dtype, 8)
    out, lse, vjp = cuflash.merge_vjp(outs, lses, layout=layout)
    want = [out, lse, *(x for xs in vjp(dout, dlse) for x in xs)]
    with device.poisoned():
        there = [[device.put(x) for x in xs] for xs in (outs, lses)]
        out, lse, vjp = cuflash.merge_vjp(*there, layout=layout)
        assert type(out) is type(there[0][0])
        found = [out, lse, *(x for xs in vjp(device.put(dout), device.put(dlse)) for x in xs)]
        for n, (x, y) in enumerate(zip(found, want, strict=True)):
            assert x.dtype == y.dtype
            close(device.get(x), y, dtype, str(n))
    device.check_inputs()


def test_split_keys_merged_are_the_whole(device: Device, kind: Kind) -> None:
    """Forward, and the gradients through the merge and through each part."""
    given = {name: device.put(x) for name, x in inputs(kind.dtype).items()}
    xp: Any = device.xp
    options: dict[str, Any] = {"return_lse": True, "backend": kind.backend}
    whole, whole_lse, whole_vjp = cuflash.attention_vjp(**given, **options)
    dout, dlse = device.put(numbers(OUT, DTYPES[kind.dtype], 7)), device.put(numbers(LSE, whole_lse.dtype, 8))
    calls = [
        cuflash.attention_vjp(given["q"], given["k"][:, :, at], given["v"][:, :, at], **options)
        for at in (slice(0, 4), slice(4, 11))
    ]
    out, lse, vjp = cuflash.merge_vjp([c[0] for c in calls], [c[1] for c in calls])
    close(device.get(out), device.get(whole), kind.dtype, "out")
    close(device.get(lse), device.get(whole_lse), kind.dtype, "lse")
    want = [device.get(x) for x in whole_vjp(dout, dlse)]
    grads = [c[2](g, h) for c, g, h in zip(calls, *vjp(dout, dlse), strict=True)]
    for n, name in ((1, "dk"), (2, "dv")):
        found = np.concatenate([device.get(g[n]) for g in grads], 2)
        close(found, want[n], kind.dtype, name)
    close(sum(device.get(g.dq).astype(np.float64) for g in grads), want[0], kind.dtype, "dq")
    assert xp.isfinite(lse).all()
