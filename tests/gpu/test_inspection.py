"""Weights of chosen rows of arrays on the device."""

from __future__ import annotations

import numpy as np
import pytest

import cuflash
from cuflash import problem, reference
from tests.cases import DTYPES, OPTIONS, Case
from tests.gpu.device import Device, on_device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "groups-window-bias", "everything", "sparse-everything", "documents-mixed"])
def test_rows_of_the_reference(device: Device, name: str, dtype: str) -> None:
    made = Case(name, **(OPTIONS[name] | {"dtype": dtype})).make()
    want = reference.weights(problem.describe(made["q"], made["k"], made["v"], **made["options"]))
    q, k = device.put(made["q"]), device.put(made["k"])
    got = cuflash.attention_weights(q, k, [0, -1, 5], **on_device(device, made["options"]))
    assert type(got) is type(q)
    assert got.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_allclose(device.get(got), want[..., [0, -1, 5], :], atol=1e-6)
    device.check_inputs()
