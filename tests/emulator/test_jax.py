"""`cuflash.jax` the whole way on a GPU that the emulator plays: XLA's own calls, the handlers, launch.py, the kernels.

XLA runs the programs on the host, and its calls go to the handlers for a GPU.  CuPy is a stand-in over NumPy, and so are the
stream and the memory that XLA would lend.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cuflash.jax
from cuflash import arrays, source
from cuflash.backends import described_device
from cuflash.jax import calls, ffi
from cuflash.variant import ITEMSIZE
from tests import traced
from tests.cases import Case
from tests.emulator.kernels import kernel, poison

pytest.importorskip("cupy", reason="launch.py imports CuPy, which is in the extras named cuda12 and cuda13")

from cuflash import launch

TARGETS = {direction: f"{direction}_played" for direction in (calls.FORWARD, calls.BACKWARD)}
for direction, handler in calls.HANDLERS["CUDA"].items():
    pointer = ctypes.cast(handler, ctypes.c_void_p).value
    jax.ffi.register_ffi_target(TARGETS[direction], jax.ffi.pycapsule(pointer), platform="cpu")


class Array(np.ndarray):
    """A NumPy array that looks like CuPy's where addresses are concerned."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


def array_at(shape: Any, dtype: Any, at: int) -> Array:
    """Array over memory that somebody else holds."""
    shape, dtype = tuple(np.atleast_1d(shape)), np.dtype(dtype)
    if 0 in shape:
        return np.empty(shape, dtype).view(Array)
    interface = {"version": 3, "shape": shape, "typestr": f"|V{dtype.itemsize}", "data": (at, False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface)).view(dtype).view(Array)


@dataclass
class Machine:
    """What handlers see of XLA and CuPy; `lent` holds the memory of the call that runs."""

    lent: dict[int, np.ndarray] = field(default_factory=dict)
    allocators: list[Any] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)  # plans' directions
    described: int = 0  # calls that were no repetitions

    def allocate(self, _frame: Any, size: int) -> int:
        memory = poison((size + 256,), np.uint8)
        at = memory.ctypes.data + -memory.ctypes.data % 256
        self.lent[at] = memory
        return at

    def free(self, _frame: Any, at: int, size: int) -> None:
        assert self.lent.pop(at).size == size + 256

    @contextmanager
    def using_allocator(self, allocator: Any) -> Iterator[None]:
        self.allocators.append(allocator)
        yield
        self.allocators.pop()

    def empty(self, shape: Any, dtype: Any) -> Array:
        """Memory of whoever lends it: there is no other."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return array_at(shape, dtype, self.allocators[-1](size))

    def zeros(self, shape: Any, dtype: Any) -> Array:
        x = self.empty(shape, dtype)
        x[...] = 0
        return x

    def cupy(self) -> Any:
        cuda = SimpleNamespace(
            Device=lambda _: nullcontext(),
            UnownedMemory=lambda at, size, owner, device: at,
            MemoryPointer=lambda at, offset: at + offset,
            using_allocator=self.using_allocator,
            runtime=SimpleNamespace(pointerGetAttributes=lambda at: SimpleNamespace(device=0)),
        )
        return SimpleNamespace(
            ndarray=array_at,
            uint8=np.uint8,
            cuda=cuda,
            empty=self.empty,
            zeros=self.zeros,
            broadcast_to=lambda x, shape: np.broadcast_to(x, shape, subok=True),
            ascontiguousarray=lambda x: np.ascontiguousarray(x).view(Array),
        )

    def run(self, plan: Any, pointers: dict[str, int]) -> None:
        self.launched.append("backward" if "dq" in plan.offsets else "forward")
        for step in filter(lambda step: step.blocks, plan.steps):
            built = kernel(source.build(step.variant), step.variant.entry, plan.device.capability, False)
            record = bytes(plan.arguments(pointers, built.encode))[: step.argument_bytes]
            shared_bytes = step.config.shared_bytes(ITEMSIZE[step.variant.dtype])
            built.launch((step.blocks,), step.config.threads, record, shared_bytes)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    played = Machine()
    cupy, describe = played.cupy(), calls.Options.describe

    def counted(options: Any, given: Any) -> Any:
        played.described += 1
        return describe(options, given)

    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(launch, "cupy", cupy)
    monkeypatch.setattr(launch, "device", lambda _: described_device(80))
    monkeypatch.setattr(launch, "run", played.run)
    monkeypatch.setattr(arrays, "require_gpu", lambda: None)
    monkeypatch.setattr(calls, "stream_of", lambda _: nullcontext())
    monkeypatch.setattr(calls, "_plans", {})
    monkeypatch.setattr(calls.Options, "describe", counted)
    monkeypatch.setattr(ffi.Frame, "stream", 5)
    for name in ("allocate", "free"):
        monkeypatch.setattr(ffi.Frame, name, bound(getattr(played, name)))
    monkeypatch.setattr(cuflash.jax, "FORWARD", TARGETS[calls.FORWARD])
    monkeypatch.setattr(cuflash.jax, "BACKWARD", TARGETS[calls.BACKWARD])
    jax.clear_caches()  # programs that were traced before call the host
    with jax.default_device(jax.devices("cpu")[0]):
        yield played
    jax.clear_caches()
    assert not played.lent
    assert not played.allocators


def bound(method: Any) -> Any:
    return lambda frame, *given: method(frame, *given)


SMALL = {"seq_q": 17, "seq_k": 22, "head_dim": 16, "heads_q": 4}


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", **SMALL, causal=True, dlse=True),
        Case("bias", **SMALL, bias="h1k", layout="bshd"),
        Case("mask-bias", "bfloat16", **SMALL, bias="bhqk", mask="qk", layout="bshd"),
    ],
    ids=str,
)
def test_cases(machine: Machine, case: Case) -> None:
    """Twice, the second time at other addresses: without a bias, whose gradient is a sum, it goes straight to the launch."""
    for seed in range(2):
        traced.check(case, seed)
    assert machine.launched == ["forward", "backward"] * 2
    assert machine.described == (3 if case.bias else 2)


def test_axes_of_vmap(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that only some arrays have, and four that cannot be merged: these are copied."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 2, 2, 9, 16), (2, 2, 1, 11, 16)))
    bias = rng.standard_normal((2, 9, 11)).astype(np.float32)

    def loss(q: Any, k: Any, bias: Any) -> Any:
        out, lse = cuflash.jax.attention(q, k, k, bias=bias, return_lse=True)
        return (out**2).sum() + jnp.sin(lse).sum()

    copied = []
    in_one_batch = launch.in_one_batch
    monkeypatch.setattr(launch, "in_one_batch", lambda *given: copied.append(given) or in_one_batch(*given))
    step, axes = jax.grad(loss, (0, 1, 2)), ((None, 0, None), (0, None, None))
    both = jax.vmap(jax.vmap(step, axes[0]), axes[1])
    compare(both(q[:, 0], k[:, 0], bias), {(a, b): (q[a, 0], k[b, 0], bias) for a, b in np.ndindex(2, 2)})
    assert not copied
    all_four = jax.vmap(jax.vmap(both, axes[0]), axes[1])
    compare(all_four(q, k, bias), {(a, b, c, d): (q[a, c], k[b, d], bias) for a, b, c, d in np.ndindex(2, 2, 2, 2)})
    assert len(copied) == 2


def compare(found: Any, examples: dict[tuple[int, ...], Any]) -> None:
    """Gradients against those of the numpy backend, example by example."""
    for at, (q, k, bias) in examples.items():
        out, lse, vjp = cuflash.attention_vjp(q, k, k, bias=bias, return_lse=True)
        dq, dk, dv, dbias = vjp(2 * out, np.cos(lse))
        for x, want in zip(found, (dq, dk + dv, dbias), strict=True):
            np.testing.assert_allclose(x[at], want, atol=1e-4, rtol=1e-5)
