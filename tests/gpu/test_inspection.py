"""Weights of chosen rows, and pictures of tiles and rows, of arrays on the device."""

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "groups-window-bias", "everything", "sparse-everything", "documents-mixed"])
def test_pictures_are_those_of_the_host(device: Device, name: str, dtype: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    made = Case(name, **(OPTIONS[name] | {"dtype": dtype})).make()
    q, k = made["q"], made["k"]
    moved, options = (device.put(q), device.put(k)), on_device(device, made["options"])
    given = {"entry": 1, "head": 1}
    tiles, want = (
        cuflash.draw_tiles(*pair, tile=(16, 8), **given, **of).axes[0].images[0].get_array()
        for pair, of in ((moved, options), ((q, k), made["options"]))
    )
    np.testing.assert_array_equal(tiles, want)
    for row in (0, -1):
        (scores, maximum), (want_scores, want_maximum) = (
            (figure.axes[0].lines[0].get_ydata(), figure.axes[0].patches[0].get_data().values)
            for figure in (
                cuflash.draw_recurrence(*moved, row, block=8, **given, **options),
                cuflash.draw_recurrence(q, k, row, block=8, **given, **made["options"]),
            )
        )
        np.testing.assert_allclose(scores, want_scores, atol=1e-12)
        np.testing.assert_allclose(maximum, want_maximum, atol=1e-12)
    cuflash.draw_tiles(*moved, **options)  # the backend's own tiles
    device.check_inputs()
