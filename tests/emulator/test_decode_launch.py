"""The host side of decode calls on a device, with stand-ins for CuPy's arrays and streams; the kernel runs in the emulator."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuflash import decode_plan, source
from cuflash.problem import canonical
from cuflash.variant import ITEMSIZE
from tests.decode_cases import Made, named
from tests.emulator.decode import device_of
from tests.emulator.kernels import kernel

pytest.importorskip("cupy")

from cuflash import decode_launch, launch, tensormap

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

    def run(plan: Any, pointers: dict[str, int], _: Any) -> None:
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


# ---- launches that begin before what lies in front of them has ended ----------------------------------------------------
NO_LIBRARY = 99000  # the version of a driver whose library is not found


class DriverError(Exception):
    """What CuPy raises for a code of the driver."""


class Driver:
    """The driver and CuPy's part of it, which note launches; `code` is what the driver answers."""

    def __init__(self, version: int, has_function: bool = True) -> None:
        self.version, self.code = version, 0
        self.early: list[dict[str, Any]] = []
        self.usual: list[tuple[int, ...]] = []
        if has_function:
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
            self.cuLaunchKernelEx = kind(self.launch_early)

    def launch_early(self, address: int, function: int, arguments: int, extra: int | None) -> int:
        words, longs = (ctypes.c_uint32 * 14).from_address(address), (ctypes.c_uint64 * 7).from_address(address)
        id_, allowed = ((ctypes.c_uint32 * 3).from_address(longs[5])[i] for i in (0, 2))
        self.early.append(
            {
                "function": function,
                "grid": tuple(words[:3]),
                "block": tuple(words[3:6]),
                "shared_bytes": words[6],
                "stream": longs[4],
                "attributes": words[12],
                "attribute": (id_, allowed),
                "arguments": ctypes.c_uint64.from_address(arguments).value,
                "extra": extra,
            }
        )
        return self.code

    def library(self) -> Any:
        if self.version == NO_LIBRARY:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return self

    def cupy(self) -> Any:
        driver = SimpleNamespace(launchKernel=lambda *given: self.usual.append(given), CUDADriverError=DriverError)
        runtime = SimpleNamespace(driverGetVersion=lambda: self.version)
        stream = Stream(77)
        return SimpleNamespace(cuda=SimpleNamespace(driver=driver, runtime=runtime, get_current_stream=lambda: stream))


def launched(monkeypatch: pytest.MonkeyPatch, driver: Driver, arch: int, dtype: str = "float16") -> Any:
    """The plan of a call that the host has launched."""
    call = named("causal", dtype=dtype, **LONG).make().call()
    arrays = decode_plan.decode_arrays(call, np.zeros(call.problem.out_shape, dtype), None)
    plan = decode_plan.plan_decode(call.decode, device_of(arch, 6), decode_plan.places_of(call, arrays))
    monkeypatch.setattr(launch, "cupy", driver.cupy())
    monkeypatch.setattr(launch.jit, "load", lambda *_: SimpleNamespace(function=1234))
    monkeypatch.setattr(tensormap, "_driver", driver.library)
    monkeypatch.setattr(decode_launch, "workspace", lambda _: dict.fromkeys(plan.workspace(), 0))
    monkeypatch.setattr(type(plan), "arguments", lambda *_: bytearray(256))
    for kept in (launch.launch_kernel_ex, launch.launches, launch.programmatic):
        kept.cache_clear()
    try:
        decode_launch.run(plan, {})
    finally:
        for kept in (launch.launch_kernel_ex, launch.launches, launch.programmatic):
            kept.cache_clear()
    return plan


def test_a_launch_may_begin_before_the_one_in_front_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(12030)
    (step,) = launched(monkeypatch, driver, 90).steps
    (found,) = driver.early
    assert not driver.usual
    assert found.pop("arguments")
    assert found == {
        "function": 1234,
        "grid": (step.blocks, 1, 1),
        "block": (step.config.threads, 1, 1),
        "shared_bytes": step.config.shared_bytes(2),
        "stream": 77,
        "attributes": 1,
        "attribute": (6, 1),  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1
        "extra": None,
    }


@pytest.mark.parametrize(
    ("version", "has_function", "arch", "dtype"),
    [
        (12020, True, 90, "float16"),  # cannot be captured
        (11040, False, 90, "float16"),
        (13000, False, 90, "float16"),
        (NO_LIBRARY, True, 90, "float16"),
        (13000, True, 89, "float16"),  # these kernels do not wait
        (13000, True, 90, "float32"),
    ],
)
def test_other_launches_are_as_usual(
    monkeypatch: pytest.MonkeyPatch, version: int, has_function: bool, arch: int, dtype: str
) -> None:
    driver = Driver(version, has_function)
    (step,) = launched(monkeypatch, driver, arch, dtype).steps
    ((*given, _, extra),) = driver.usual
    assert not driver.early
    shared_bytes = step.config.shared_bytes(ITEMSIZE[dtype])
    assert given == [1234, step.blocks, 1, 1, step.config.threads, 1, 1, shared_bytes, 77]
    assert extra == 0


def test_a_refused_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(13000)
    driver.code = 701
    with pytest.raises(DriverError, match="701"):
        launched(monkeypatch, driver, 90)
