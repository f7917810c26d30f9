"""The operator Attention of ONNX on the device: all node tests on every backend, and random calls in every dtype."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import cuflash.onnx
from cuflash.backends import BACKENDS
from tests.cases import DTYPES
from tests.gpu.device import DRY, Device, Kind
from tests.test_onnx import random_call

ALLOWED = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4, "float64": 1e-12}


@pytest.mark.parametrize("backend", ["numpy"] if DRY else ["chosen", *(row.name for row in BACKENDS)])
def test_node_tests(device: Device, backend: str) -> None:
    """None fails anywhere, and where cuflash chooses the backend only bfloat16 may be refused, by old devices.

    In 16 bits a named backend's result may be beyond the tolerance from the expected one where it is nearer than that to
    float64.
    """
    pytest.importorskip("onnx", reason="onnx is in the extra named test")
    score = importlib.import_module("scripts.onnx_score")
    rows = score.score(backend, score.cases())
    assert len(rows) >= 93
    assert [row for row in rows if row["verdict"] == "failed"] == []
    refused, passed = ({row["dtype"] for row in rows if row["verdict"] == v} for v in ("refused", "passed"))
    nearer = {row["dtype"] for row in rows if row["verdict"] == "nearer"}
    assert nearer <= (set() if backend in ("numpy", "chosen") else {"float16", "bfloat16"})
    capability = 80 if DRY else int(device.xp.cuda.Device().compute_capability)
    if backend in ("numpy", "chosen"):
        assert refused <= ({"bfloat16"} if capability < 80 else set())
    elif backend in ("simt", "mma"):
        offered = next(row.capabilities for row in BACKENDS if row.name == backend)
        assert {dtype for dtype, needed in offered.items() if needed <= capability} - {"float64"} <= passed


@pytest.mark.parametrize("seed", range(8))
def test_random_calls(device: Device, kind: Kind, seed: int) -> None:
    given, attributes = random_call(seed, step=8)
    rounded = {name: x.astype(DTYPES[kind.dtype]) if x.dtype.kind == "f" else x for name, x in given.items()}
    wide = {name: x.astype(np.float64) if x.dtype == DTYPES[kind.dtype] else x for name, x in rounded.items()}
    wanted = cuflash.onnx.attention(**wide, **attributes, return_qk_matmul_output=True)
    options: dict[str, Any] = {**attributes, "return_qk_matmul_output": True, "backend": kind.backend}
    found = cuflash.onnx.attention(**{name: device.put(x) for name, x in rounded.items()}, **options)
    device.check_inputs()
    for name, got, want in zip(found._fields, found, wanted, strict=True):
        assert (got is None) == (want is None), name
        if got is not None:
            result = device.get(got)
            assert result.dtype == DTYPES[kind.dtype]
            allowed = ALLOWED[kind.dtype]
            np.testing.assert_allclose(result.astype(np.float64), want, rtol=allowed, atol=allowed, err_msg=name)
