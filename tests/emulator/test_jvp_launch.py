"""The host side of forward mode and second derivatives on a device, with stand-ins for CuPy; kernels run in the emulator."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import source
from cuflash.backends import described_device
from cuflash.errors import UnsupportedError
from cuflash.problem import Call
from cuflash.variant import ITEMSIZE
from tests.cases import Case
from tests.emulator.kernels import kernel
from tests.tangents import tangents_of
from tests.tolerance import Expectation

pytest.importorskip("cupy")

from cuflash import launch

CASE = Case("launch", seq_q=37, bias="h1k", sinks="h", softcap=3.0, causal=True, dlse=True)


class Array(np.ndarray):
    """A NumPy array that looks like CuPy's where addresses are concerned."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the launches see of CuPy; the kernels that ran are in `machine.kernels`."""
    state = SimpleNamespace(kernels=[])

    def made(make: Any) -> Any:
        return lambda *arguments: make(*arguments).view(Array)

    names = ("empty", "zeros", "ascontiguousarray", "broadcast_to")
    functions = {name: made(getattr(np, name)) for name in names}
    cuda = SimpleNamespace(Device=lambda _: nullcontext())
    monkeypatch.setattr(launch, "cupy", SimpleNamespace(uint8=np.uint8, cuda=cuda, **functions))

    def run(plan: Any, pointers: dict[str, int]) -> None:
        for step in plan.steps:
            built = kernel(source.build(step.variant), step.variant.entry, 80, False)
            record = bytes(plan.arguments(pointers))[: step.argument_bytes]
            shared = step.config.shared_bytes(ITEMSIZE[step.variant.dtype])
            built.launch((step.blocks,), step.config.threads, record, shared)
            state.kernels.append(step.variant.kernel)

    monkeypatch.setattr(launch, "device", lambda _: described_device(80))
    monkeypatch.setattr(launch, "run", run)
    return state


def on_device(call: Call) -> Call:
    """The call with arrays that have an address."""
    arrays = {name: getattr(call, name).view(Array) for name in "qkv"}
    return replace(call, **arrays, operands={name: x.view(Array) for name, x in call.operands.items()})


@pytest.mark.parametrize("batch", [(2,), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_forward_mode(machine, batch, dtype, batch_invariant):
    strides = "every second" if batch_invariant else "contiguous"
    call, _, _ = replace(CASE, dtype=dtype, batch=batch, strides=strides).call()
    tangents = tangents_of(call)
    given = {name: x.view(Array) for name, x in tangents.items()}
    found = launch.jvp(on_device(call), given, None, batch_invariant)
    Expectation(call).check_jvp(tangents, *(np.asarray(x) for x in found))
    assert machine.kernels == ["jvp_simt" if dtype == "float32" else "jvp_mma"]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_products_by_the_hessian(machine, layout):
    call, dout, dlse = replace(CASE, layout=layout).call()
    tangents = tangents_of(call, dout, dlse)
    given = {name: x.view(Array) for name, x in tangents.items()}
    found = launch.hvp(on_device(call), dout.view(Array), dlse.view(Array), given)
    Expectation(call, dout, dlse).check_hvp(tangents, type(found)(*(np.asarray(x) for x in found)))
    assert machine.kernels == ["jvp_simt", "hvp_delta", "hvp_simt", "hvp_simt"]
    assert found.dq.swapaxes(-3, -2).flags.c_contiguous == (layout == "bshd")


def test_nothing_runs_before_a_refusal(machine):
    call, dout, _ = replace(CASE, dtype="bfloat16", head_dim=64).call()
    with pytest.raises(UnsupportedError, match="mma: it has no Hessian-vector products"):
        launch.hvp(on_device(call), dout.view(Array), None, {})
    assert not machine.kernels
