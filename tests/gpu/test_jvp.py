"""Forward mode and second derivatives on the device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.errors import UnsupportedError
from cuflash.problem import canonical
from tests.cases import DROPOUT, OPTIONS, SINKS, STRIDES, Case
from tests.gpu.device import DRY, KINDS, MAIN_KINDS, Device, Kind, canonical_gradients, described, on_device
from tests.tangents import tangents_of
from tests.tolerance import Expectation

EVERY = {**OPTIONS, **SINKS, **DROPOUT}
OWN_KINDS = [kind for kind in KINDS if kind.backend != "wgmma"]
SOME_KINDS = [kind for kind in MAIN_KINDS if kind.backend != "wgmma"]
HVP_KINDS = [kind for kind in KINDS if kind.backend in ("simt", "numpy")]
SHAPES = ((1, 1), (129, 257))


def check(device: Device, kind: Kind, case: Case, *, second: bool = False, repeat: int = 2) -> None:
    """Run a case, judge all that it returns, and see that it repeats; dbias alone is added up in any order."""
    case = replace(case, dtype=kind.dtype)
    made = case.make()
    call, dout = described(made), canonical(made["dout"].copy(), case.layout)
    expectation = Expectation(call, dout, made["dlse"])
    host = tangents_of(call, *((dout, made["dlse"]) if second else ()))
    q, k, v, g, dlse = (device.put(made[name]) for name in ("q", "k", "v", "dout", "dlse"))
    options = {**on_device(device, made["options"]), "backend": kind.backend}
    given = {name: placed(case, name, x, made) for name, x in host.items()}
    along = {name: device.put(x) for name, x in given.items()}
    for name, x in given.items():  # strides of 0 repeat what is there
        host[name] = (canonical(x, case.layout) if name in ("q", "k", "v", "dout") else x).reshape(host[name].shape)
    results = set()
    for _ in range(repeat):
        with device.poisoned():
            if second:
                products = cuflash.attention_hvp(
                    *(g, q, k, v, along["q"], along["k"], along["v"], along["dout"]),
                    dlse=dlse,
                    dlse_tangent=along.get("dlse"),
                    bias_tangent=along.get("bias"),
                    sinks_tangent=along.get("sinks"),
                    **options,
                )
                products = canonical_gradients(device, call, products)
                kept = [x for name, x in products._asdict().items() if name != "dbias"]
            else:
                names = {f"d{name}": x for name, x in along.items()}
                kept = [device.get(x) for x in cuflash.attention_jvp(q, k, v, **names, return_lse=True, **options)]
        results.add(b"".join(x.tobytes() for x in kept))
    device.check_inputs()
    assert len(results) == 1
    if second:
        expectation.check_hvp(host, products)
    else:
        expectation.check_jvp(host, *(canonical(x, case.layout) for x in kept[:2]), *kept[2:])


def placed(case: Case, name: str, x: np.ndarray, made: dict[str, Any]) -> np.ndarray:
    """A tangent in the shape, layout and strides of what it belongs to."""
    if name in ("q", "k", "v", "dout"):
        return case.place(canonical(x, case.layout).copy())
    if name == "bias":
        return case.place(x.reshape(made["options"]["bias"].shape))
    if name == "sinks":
        (logits,) = (m.logits for m in made["options"]["modifiers"] if isinstance(m, cuflash.Sinks))
        return x.reshape(logits.shape)
    return x


@pytest.mark.parametrize("kind", OWN_KINDS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_options(device: Device, name: str, kind: Kind) -> None:
    check(device, kind, Case(name, **{"seq_q": 133, "seq_k": 145, **EVERY[name]}), repeat=1)


@pytest.mark.parametrize("kind", HVP_KINDS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_options_of_second_derivatives(device: Device, name: str, kind: Kind) -> None:
    check(device, kind, Case(name, **{"seq_q": 133, "seq_k": 145, **EVERY[name]}), second=True, repeat=1)


@pytest.mark.parametrize("kind", OWN_KINDS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_sizes(device: Device, head_dim: int, kind: Kind) -> None:
    for (seq_q, seq_k), causal in product(SHAPES, (False, True)):
        case = Case("sizes", seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, causal=causal, batch=(1,))
        check(device, kind, case)
        if kind in HVP_KINDS:
            check(device, kind, replace(case, softcap=3.0), second=True)


@pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
@pytest.mark.parametrize("strides", STRIDES)
def test_strides(device: Device, strides: str, kind: Kind) -> None:
    for layout in ("bhsd", "bshd"):
        case = Case("strides", strides=strides, layout=layout, head_dim=24, bias="b1qk", causal=True)
        check(device, kind, case)
        if kind in HVP_KINDS:
            check(device, kind, case, second=True)


@pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
@pytest.mark.parametrize("values", ["x3", "constant", "logits about -200", "dominant key late"])
def test_values(device: Device, values: str, kind: Kind) -> None:
    case = Case("values", values=values, batch=(1,), seq_q=130, seq_k=200, head_dim=64, causal=True)
    check(device, kind, case)
    if kind in HVP_KINDS:
        check(device, kind, case, second=True)


@pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
def test_tangents_that_are_left_out_are_zero(device: Device, kind: Kind) -> None:
    made = Case("none", kind.dtype, seq_q=200, seq_k=300, head_dim=64).make()
    q, k, v = (device.put(made[name]) for name in ("q", "k", "v"))
    rng = np.random.default_rng(1)
    dk = device.put(rng.standard_normal(made["k"].shape).astype(made["k"].dtype))
    zeros = [device.put(np.zeros_like(made[name])) for name in ("q", "v")]
    got = cuflash.attention_jvp(q, k, v, None, dk, None, causal=True, backend=kind.backend)
    want = cuflash.attention_jvp(q, k, v, zeros[0], dk, zeros[1], causal=True, backend=kind.backend)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(device.get(x), device.get(y))
    if kind in HVP_KINDS:
        products = cuflash.attention_hvp(q, q, k, v, None, None, None, causal=True, backend=kind.backend)
        assert not any(device.get(x).any() for x in products)


@pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
def test_batch_entries_do_not_depend_on_others(device: Device, kind: Kind) -> None:
    made = Case("alone", kind.dtype, batch=(3,), seq_q=200, seq_k=300, head_dim=64).make()
    host = [made[name] for name in ("q", "k", "v", "q", "k", "v")]
    options = {"causal": True, "batch_invariant": True, "backend": kind.backend}
    whole = [device.get(x) for x in cuflash.attention_jvp(*map(device.put, host), **options)]
    alone = [device.get(x) for x in cuflash.attention_jvp(*(device.put(x[1:2].copy()) for x in host), **options)]
    for x, y in zip(whole, alone, strict=True):
        np.testing.assert_array_equal(x[1:2], y)


@pytest.mark.skipif(DRY, reason="asks for a GPU's backend")
def test_what_a_backend_does_not_offer_is_refused_by_name(device: Device) -> None:
    made = Case("half", "float16", head_dim=64).make()
    q, k, v = (device.put(made[name]) for name in ("q", "k", "v"))
    with pytest.raises(UnsupportedError, match="wgmma: it has no forward mode"):
        cuflash.attention_jvp(q, k, v, q, k, v, backend="wgmma")
    with pytest.raises(UnsupportedError, match=r"mma: it has no Hessian-vector products"):
        cuflash.attention_hvp(q, q, k, v, q, k, v)
