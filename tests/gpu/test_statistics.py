"""Largest scores, entropies and sums of columns on the device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import cuflash
from cuflash import abi
from cuflash.errors import UnsupportedError
from cuflash.problem import canonical
from tests.cases import OPTIONS, STRIDES, Case
from tests.gpu.device import DRY, KINDS, MAIN_KINDS, Device, Kind, allow_reference_error, described, on_device
from tests.tolerance import Expectation

OWN_KINDS = [kind for kind in KINDS if kind.backend != "wgmma"]
SOME_KINDS = [kind for kind in MAIN_KINDS if kind.backend != "wgmma"]
SHAPES = ((1, 1), (129, 257), (300, 500))


def check(device: Device, kind: Kind, case: Case, repeat: int = 2) -> None:
    """Run a case, judge all that it returns, and see that it repeats."""
    case = replace(case, dtype=kind.dtype)
    made = case.make()
    expectation = Expectation(described(made))
    if kind.dtype == "float64":
        allow_reference_error(expectation)
    q, k, v = (device.put(made[name]) for name in ("q", "k", "v"))
    options = {**on_device(device, made["options"]), "backend": kind.backend}
    results = set()
    for _ in range(repeat):
        with device.poisoned():
            found = cuflash.attention_statistics(q, k, v, **options)
        assert all(type(x) is type(q) for x in found)
        host = [device.get(x) for x in found]
        expectation.check_forward(canonical(host[0], case.layout), host[1])
        expectation.check_statistics(dict(zip(abi.STATISTICS, host[2:], strict=True)))
        results.add(b"".join(x.tobytes() for x in host))
    device.check_inputs()
    assert len(results) == 1


@pytest.mark.parametrize("kind", OWN_KINDS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: Device, name: str, kind: Kind) -> None:
    check(device, kind, Case(name, **{"seq_q": 133, "seq_k": 145, **OPTIONS[name]}), 1)


@pytest.mark.parametrize("kind", OWN_KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_sizes(device: Device, head_dim: int, kind: Kind) -> None:
    for (seq_q, seq_k), causal in product(SHAPES, (False, True)):
        case = Case("sizes", seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, causal=causal, heads_q=4)
        check(device, kind, case)


@pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
@pytest.mark.parametrize("strides", STRIDES)
def test_strides(device: Device, strides: str, kind: Kind) -> None:
    for layout in ("bhsd", "bshd"):
        check(device, kind, Case("strides", strides=strides, layout=layout, head_dim=24, bias="b1qk", causal=True))


@pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
@pytest.mark.parametrize("values", ["x30", "constant", "logits about -200", "dominant key late"])
def test_values(device: Device, values: str, kind: Kind) -> None:
    check(device, kind, Case("values", values=values, seq_q=200, seq_k=400, head_dim=64, causal=True))


@pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
def test_long_rows(device: Device, kind: Kind) -> None:
    check(
        device, kind, Case("long", batch=(1,), heads_q=1, heads_k=1, seq_q=2100, seq_k=2000, head_dim=64, causal=True)
    )


@pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
def test_what_is_asked_for_does_not_change_the_rest(device: Device, kind: Kind) -> None:
    made = Case("alone", kind.dtype, seq_q=300, seq_k=300, head_dim=64).make()
    q, k, v = (device.put(made[name]) for name in ("q", "k", "v"))
    whole = cuflash.attention_statistics(q, k, v, backend=kind.backend)
    for name in abi.STATISTICS:
        flags = {other: other == name for other in abi.STATISTICS}
        found = cuflash.attention_statistics(q, k, v, backend=kind.backend, **flags)
        got, want = (device.get(getattr(results, name)) for results in (found, whole))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # other tiles, so not the same bits
        assert all(getattr(found, other) is None for other in abi.STATISTICS if other != name)


@pytest.mark.skipif(DRY, reason="asks for a GPU's backend")
def test_hopper_refuses_by_name(device: Device) -> None:
    made = Case("hopper", "bfloat16", head_dim=64).make()
    q, k, v = (device.put(made[name]) for name in ("q", "k", "v"))
    with pytest.raises(UnsupportedError, match=r"wgmma: .*"):
        cuflash.attention_statistics(q, k, v, backend="wgmma")
