"""A batch of seven against each entry alone on the device, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import cuflash
from tests.cases import STRIDES
from tests.gpu.device import KINDS, MAIN_KINDS, Device, Kind, on_device
from tests.test_batch_invariance import ENTRIES, alone, bits, many

NAMES = ("plain", "causal", "lengths-causal", "groups", "bias", "everything", "sparse-everything")
LEFT_TO_MMA = ("sparse-everything",)  # by wgmma


def results(device: Device, kind: Kind, made: dict[str, Any], **options: Any) -> list[Any]:
    """All results of a call, on the host."""
    q, k, v, dout, dlse = (device.put(made[name]) for name in ("q", "k", "v", "dout", "dlse"))
    options = {**on_device(device, made["options"]), "backend": kind.backend, "batch_invariant": True, **options}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    found = [out, lse]
    if kind.backend != "wgmma":
        found += cuflash.attention_statistics(q, k, v, **options)
    found += cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return [device.get(x) for x in found]


def check(device: Device, kind: Kind, made: dict[str, Any]) -> None:
    whole = results(device, kind, made)
    for entry in range(ENTRIES):
        single = results(device, kind, alone(made, entry))
        assert bits(single) == bits(x[entry : entry + 1] for x in whole), f"entry {entry}"
    device.check_inputs()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_options(device: Device, name: str, kind: Kind) -> None:
    if kind.backend == "wgmma" and name in LEFT_TO_MMA:
        pytest.skip("wgmma leaves it to mma")
    case = many(name, kind.dtype, head_dim=64, head_dim_v=64)
    check(device, kind, replace(case, seq_q=300, seq_k=500).make())


@pytest.mark.parametrize("kind", [kind for kind in MAIN_KINDS if kind.backend != "wgmma"], ids=str)
@pytest.mark.parametrize("strides", [name for name in STRIDES if name != "stride 0"])
def test_strides(device: Device, strides: str, kind: Kind) -> None:
    """Entries cut from arrays that are not contiguous, against entries in arrays of their own."""
    for layout in ("bhsd", "bshd"):
        case = many("causal", kind.dtype, head_dim=128, head_dim_v=128, strides=strides, layout=layout)
        check(device, kind, replace(case, seq_q=130, seq_k=150).make())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_out(device: Device, kind: Kind) -> None:
    """Where the result goes changes no bit of it."""
    made = replace(many("causal", kind.dtype, head_dim=64), seq_q=150, seq_k=150).make()
    q, k, v = (device.put(made[name]) for name in ("q", "k", "v"))
    options: dict[str, Any] = {"causal": True, "backend": kind.backend, "batch_invariant": True}
    want = cuflash.attention(q, k, v, **options)
    wide = device.xp.zeros((*q.shape[:-1], 65), q.dtype)
    out = wide[..., 1:]
    assert cuflash.attention(q, k, v, out=out, **options) is out
    assert bits([device.get(out)]) == bits([device.get(want)])
    assert not device.get(wide)[..., 0].any()
