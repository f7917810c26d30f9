"""The host side of decode calls on a device, with stand-ins for CuPy's arrays and streams; the kernel runs in the emulator."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import source
from cuflash.problem import canonical
from cuflash.variant import ITEMSIZE
from tests.decode_cases import Made, named
from tests.emulator.decode import device_of
from tests.emulator.kernels import kernel

pytest.importorskip("cupy")

from cuflash import decode_launch, launch

ARRAYS = ("q", "k", "v", "lengths", "page_table", "k_new", "v_new")
LONG = {"lengths": (290, 0, 1, 300, 77), "capacity": 320}


class Array(np.ndarray):
    """A NumPy array that looks like CuPy's where addresses are concerned."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    def fill(self, value: int) -> None:
        self[...] = value


class Stream:
    """A stream, captured or not."""

    def __init__(self, ptr: int = 0, capturing: bool = False) -> None:
        self.ptr, self.capturing = ptr, capturing

    def is_capturing(self) -> bool:
        return self.capturing


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the launches see of CuPy; `machine.stream` is the current stream, `machine.launches` counts."""
    state = SimpleNamespace(stream=Stream(), launches=0)
    runtime = SimpleNamespace(streamPerThread=2, getDevice=lambda: 0)
    cuda = SimpleNamespace(Device=lambda _: nullcontext(), get_current_stream=lambda: state.stream, runtime=runtime)
    cupy = SimpleNamespace(
        ndarray=Array, uint8=np.uint8, cuda=cuda, empty=lambda shape, dtype: np.empty(shape, dtype).view(Array)
    )

    def run(plan: Any, pointers: dict[str, int]) -> None:
        step, state.launches = plan.steps[0], state.launches + 1
        built = kernel(source.build(step.variant), step.variant.entry, 80, False)
        record = bytes(plan.arguments(pointers))[: step.argument_bytes]
        built.launch(
            (step.blocks,), step.config.threads, record, step.config.shared_bytes(ITEMSIZE[step.variant.dtype])
        )

    for module in (decode_launch, launch):
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setattr(launch, "device", lambda _: device_of(80, 6))
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(decode_launch, "capture_info", lambda: None)
    for kept in (decode_launch._workspaces, decode_launch._replays, decode_launch._kept):
        kept.clear()
    yield state
    for kept in (decode_launch._workspaces, decode_launch._replays, decode_launch._kept):
        kept.clear()


def prepared(made: Made) -> tuple[Any, dict[str, Any]]:
    """The call on stand-ins for arrays of the device, and its arrays by name."""
    call = made.call()
    arrays = {name: getattr(call, name) for name in ARRAYS}
    arrays = {name: None if x is None else x.copy(order="A").view(Array) for name, x in arrays.items()}
    operands = {name: x.view(Array) for name, x in call.operands.items()}
    return replace(call, operands=operands, **arrays), arrays


@pytest.mark.parametrize("name", ["causal", "append-in-pages", "everything"])
def test_a_call_and_its_replay(machine: Any, name: str) -> None:
    made = named(name, **LONG).make()
    call, arrays = prepared(made)
    key = decode_launch.signature(arrays, ("options",))
    assert decode_launch.replay(key, arrays, True) is None
    out, lse = decode_launch.decode(call, None, True, None, key)
    made.check(np.asarray(out), np.asarray(lse))
    if call.operands:  # no call with modifiers is replayed
        return
    again, lse_again = decode_launch.replay(key, arrays, True)
    assert (again.tobytes(), lse_again.tobytes()) == (out.tobytes(), lse.tobytes())
    assert machine.launches == 2
    made.check_caches(*(np.asarray(canonical(getattr(call, n), made.case.layout)) for n in ("k", "v")))


def test_a_replay_looks_at_where_new_keys_lie(machine: Any) -> None:
    made = named("append", **LONG).make()
    call, arrays = prepared(made)
    key = decode_launch.signature(arrays, ())
    decode_launch.decode(call, None, False, None, key)
    new = arrays["k_new"]
    inside = call.v.reshape(-1)[: new.size].reshape(new.shape)
    assert decode_launch.replay(key, {**arrays, "k_new": inside}, False) is None
    assert decode_launch.replay(key, arrays, False) is not None


def test_other_calls_are_not_the_same() -> None:
    _, arrays = prepared(named("append", **LONG).make())
    assert decode_launch.signature(arrays, (1,)) is None  # these are no arrays of CuPy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_launch, "cupy", SimpleNamespace(ndarray=Array))
        key = decode_launch.signature(arrays, (1,))
        assert decode_launch.signature(arrays, (True,)) != key
        assert decode_launch.signature({**arrays, "lengths": None}, (1,)) != key
        assert decode_launch.signature({**arrays, "q": arrays["q"][..., ::-1]}, (1,)) != key
        assert decode_launch.signature({**arrays, "k_new": None, "v_new": None}, (1,)) != key


def test_streams_and_captures_have_memory_of_their_own(machine: Any) -> None:
    call, _ = prepared(named("causal", **LONG).make())
    numbers = iter((5, 5, 6))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_launch, "capture_of", lambda _: next(numbers))
        for stream in (Stream(), Stream(), Stream(77), Stream(77, True), Stream(77, True), Stream(77, True)):
            machine.stream = stream
            decode_launch.decode(call)
            found.append(list(decode_launch._workspaces))
    assert [len(keys) for keys in found] == [1, 1, 2, 3, 3, 4]
    pointers = [w.pointers["arrivals"] for w in decode_launch._workspaces.values()]
    assert len(set(pointers)) == len(pointers)
    assert len(decode_launch._kept) == 2


def test_memory_grows_with_what_is_needed(machine: Any) -> None:
    small, _ = prepared(named("causal").make())
    large, _ = prepared(named("causal", **LONG, head_dim=64, heads_q=16).make())
    sizes = []
    for call in (small, large, small):
        decode_launch.decode(call)
        (workspace,) = decode_launch._workspaces.values()
        assert not workspace.memory["arrivals"].any()
        sizes.append(workspace.sizes)
    assert sizes[1] == sizes[2]
    assert all(sizes[0][name] < sizes[1][name] for name in ("parts", "part_totals", "arrivals"))


def test_captures_are_told_apart_where_the_driver_does_not(machine: Any) -> None:
    numbers = [decode_launch.capture_of(Stream(7, True)) for _ in range(3)]
    assert len(set(numbers)) == 3
