"""Modifiers that users write, on the device: every chain in every dtype, fresh arrays, graphs, and what a first use costs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import MaskModifier, ScoreModifier, problem, reference
from cuflash.modifiers.written import Written
from tests import written_cases
from tests.cases import DTYPES, Case
from tests.gpu.device import Device, Kind
from tests.tolerance import Expectation

SIZES = (2, 4, 200, 330)


def jit_kernels() -> int:
    """How many kernels this process has compiled or loaded."""
    from cuflash import jit

    return len(jit._kernels)


def put(device: Device, chain: tuple[Written, ...]) -> list[Written]:
    """The chain with its arrays on the device."""
    return [m.with_arrays({name: device.put(x.value) for name, x in m.named_arrays().items()}) for m in chain]


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("name", written_cases.NAMES)
def test_chains(device: Device, kind: Kind, name: str, place: str) -> None:
    """Forward and backward against the reference, gradients of arrays included."""
    case = Case(
        "own", kind.dtype, heads_q=4, seq_q=SIZES[2], seq_k=SIZES[3], head_dim=32, dlse=True, causal=name == "table"
    )
    made = case.make()
    chain: Any = written_cases.chains(SIZES, np.float64 if kind.dtype == "float64" else np.float32)[name]
    call = problem.describe(made["q"], made["k"], made["v"], **{**made["options"], "modifiers": chain})
    expectation = Expectation(call, made["dout"], made["dlse"])
    q, k, v, dout = (device.put(made[x]) for x in ("q", "k", "v", "dout"))
    options = {
        "modifiers": put(device, chain) if place == "device" else chain,
        "backend": kind.backend,
        "causal": case.causal,
    }
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    expectation.check_forward(device.get(out), device.get(lse))
    given, dlse = (dout, q, k, v, out, lse), device.put(made["dlse"])
    found = cuflash.attention_backward(*given, dlse=dlse, **options)
    repeated = [cuflash.attention_backward(*given, dlse=dlse, deterministic=True, **options) for _ in range(3)]
    bits = {b"".join(device.get(x).tobytes() for x in gradients) for gradients in repeated}
    assert len(bits) == 1
    want = reference.backward(call, made["dout"], made["dlse"])
    for gradients in (found, repeated[0]):
        for field in ("dq", "dk", "dv"):
            error = abs(device.get(getattr(gradients, field)).astype(np.float64) - getattr(want, field)).max()
            assert error <= 2e-2 * max(1, abs(getattr(want, field)).max()), field
        for m in chain:
            parts = {n: getattr(want, f"d{n}") for n in m.differentiable}
            for array in m.gradients:
                got, whole = device.get(getattr(gradients, f"d{array}")).astype(np.float64), m.gradient(array, parts)
                assert abs(got - whole).max() <= 2e-2 * max(1, abs(whole).max()), array
    device.check_inputs()


@pytest.mark.parametrize("name", written_cases.FORMS)
def test_as_the_built_in_one(device: Device, kind: Kind, name: str) -> None:
    """Equal bits forward."""
    if (kind.backend, name) == ("wgmma", "documents"):
        pytest.skip("it leaves Documents to mma")
    dtype, rng = DTYPES[kind.dtype], np.random.default_rng(0)
    q, k, v = (device.put(rng.standard_normal((2, 4, n, 64)).astype(dtype)) for n in (200, 330, 330))
    own, options = written_cases.forms(SIZES, dtype)[name]
    options = {key: device.put(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    got = cuflash.attention(q, k, v, modifiers=own, backend=kind.backend, return_lse=True)
    want = cuflash.attention(q, k, v, backend=kind.backend, return_lse=True, **options)
    for x, y in zip(got, want, strict=True):
        assert device.get(x).tobytes() == device.get(y).tobytes()


def test_messages_point_into_a_function(device: Device, kind: Kind) -> None:
    """Of the user's, by its line."""
    wrong = cuflash.CudaFunction("\nbool near(int q, int k) { return abs(q - k) < limit; }", "near")
    x = device.put(np.ones((1, 2, 64, 64), DTYPES[kind.dtype]))
    with pytest.raises(cuflash.CompileError, match=r'^CudaFunction near, line 2: identifier "limit" is undefined'):
        cuflash.attention(x, x, x, modifiers=[MaskModifier("near(q, k)", near=wrong)], backend=kind.backend)


def test_other_arrays_and_numbers_compile_nothing(device: Device, kind: Kind) -> None:
    """And the first use of an expression takes seconds at most: the limit leaves room for a slow processor."""
    q, k, v = (device.put(np.ones((1, 2, 64, 64), DTYPES[kind.dtype])) for _ in range(3))

    def run(scale: float, n: int) -> float:
        own = ScoreModifier("s * c + far[clip % 7, abs(q - k)]", c=scale, clip=n, far=np.zeros((7, 40 + n)))
        start = time.perf_counter()
        device.get(cuflash.attention(q, k, v, modifiers=[own, MaskModifier("k <= q or k > 60")], backend=kind.backend))
        return time.perf_counter() - start

    cuflash.attention(q, k, v, backend=kind.backend)  # compiles what prepares arrays
    before = jit_kernels()
    first = run(0.5, 0)
    made = jit_kernels()
    later = [run(0.5 + n, n) for n in range(1, 4)]
    assert made == before + (2 if kind == ("mma", "float32") else 1)  # one for heads that go to plain float32
    assert jit_kernels() == made
    assert first < 20
    assert max(later) < max(0.3, first / 2)


def test_arrays_that_change_between_replays(device: Device, kind: Kind) -> None:
    """What an expression reads of an array on the device is what stands there when the kernel runs."""
    q, k, v = (device.put(np.ones((1, 2, 64, 64), DTYPES[kind.dtype])) for _ in range(3))
    hidden = device.put(np.zeros(64, bool))
    own = MaskModifier("not hidden[k]", hidden=hidden)
    options = {"modifiers": [own], "backend": kind.backend, "return_lse": True}
    _, before = cuflash.attention(q, k, v, **options)
    hidden[32:] = True
    _, after = cuflash.attention(q, k, v, **options)
    np.testing.assert_allclose(device.get(before) - device.get(after), np.log(2), rtol=1e-3)
