"""A machine with a GPU that is none: what calls see of CuPy, and a library of another kind of arrays, which exports DLPack.

Arrays of the device are NumPy arrays with an address.  What is launched is noted, and handed to whoever runs it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cuflash import api, arrays, exchange, jit, launch, replay, tensormap
from cuflash.backends import Device, described_device
from cuflash.plan import Plan, Step
from cuflash.variant import Variant


class Array(np.ndarray):
    """A NumPy array that looks like CuPy's where addresses are concerned."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    @property
    def device(self) -> Any:
        return nullcontext()


def array(x: np.ndarray) -> Array:
    """A copy on the device, at a multiple of 16 bytes, of the same strides."""
    low, high = np.lib.array_utils.byte_bounds(x)
    memory = np.zeros(high - low + 16, np.uint8)
    start = -memory.ctypes.data % 16 + x.ctypes.data - low
    made = np.ndarray(x.shape, x.dtype, memory, start, x.strides)
    made[...] = x
    return made.view(Array)


class Stream:
    """A stream, captured or not."""

    def __init__(self, ptr: int = 0, capturing: bool = False) -> None:
        self.ptr, self.capturing = ptr, capturing

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class Launched(NamedTuple):
    """One launch: the step as far as the driver knows it, the stream, and a copy of the argument record."""

    variant: Variant
    blocks: int
    threads: int
    shared_bytes: int
    stream: int
    record: bytes


class Machine:
    """What happens on it."""

    def __init__(self, device: Device, run: Callable[[Launched], None] | None) -> None:
        self.device, self.run = device, run
        self.stream, self.current = Stream(), device.index
        self.launched: list[Launched] = []
        self.cleared: list[tuple[int, int, int]] = []  # address, bytes, stream
        self.planned = 0  # calls that went the long way
        self.variants: list[Variant] = []

    def load(self, variant: Variant, index: int) -> Any:
        self.variants.append(variant)
        return SimpleNamespace(function=len(self.variants) - 1)

    def launch(self, function: int, blocks: int, *rest: int) -> None:
        _, _, threads, _, _, shared_bytes, stream, arguments, _ = rest
        variant = self.variants[function]
        record = ctypes.c_uint64.from_address(arguments).value
        content = ctypes.string_at(record, Step(variant, blocks).argument_bytes)
        self.launched.append(Launched(variant, blocks, threads, shared_bytes, stream, content))
        if self.run is not None:
            self.run(self.launched[-1])

    def allocate(self, size: int) -> Any:
        memory = np.full(size, 0xFF, np.uint8).view(Array)
        return SimpleNamespace(ptr=memory.ctypes.data, memory=memory)

    def cupy(self) -> ModuleType:
        """The module, as far as calls use it."""

        def made(make: Any) -> Any:
            return lambda *arguments: make(*arguments).view(Array)

        module: Any = ModuleType("cupy")
        for name in ("empty", "zeros", "ascontiguousarray", "broadcast_to"):
            setattr(module, name, made(getattr(np, name)))
        module.ndarray, module.uint8, module.uint32 = Array, np.uint8, np.uint32
        module.get_default_memory_pool = lambda: SimpleNamespace(malloc=None)
        module.from_dlpack = lambda x: x.exported(self.stream.ptr)
        module.cuda = SimpleNamespace(
            Device=lambda _: nullcontext(),
            alloc=self.allocate,
            driver=SimpleNamespace(launchKernel=self.launch),
            get_current_stream=lambda *_: self.stream,
            is_available=lambda: True,
            runtime=SimpleNamespace(
                getDevice=lambda: self.current,
                streamPerThread=2,
                driverGetVersion=lambda: 0,
                memsetAsync=lambda at, value, size, stream: (
                    self.cleared.append((at, size, stream)) or ctypes.memset(at, value, size)
                ),
            ),
            using_allocator=lambda _: nullcontext(),
        )
        return module


@contextmanager
def machine(
    capability: int = 80, run: Callable[[Launched], None] | None = None, multiprocessors: int = 1, compiler: int = 1300
) -> Iterator[Machine]:
    """A machine whose one device has this capability; `run` gets each launch."""
    described = described_device(capability)
    device = Device(capability, described.shared_limit, multiprocessors=multiprocessors, compiler=compiler)
    found = Machine(device, run)
    module = found.cupy()
    caches = (launch.launches.cache_clear, launch.launch_kernel_ex.cache_clear, arrays.require_gpu.cache_clear)
    kept = (launch._tile_counters, replay._replays, replay._records)
    plain: Any = Plan.arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", module)
        patch.setitem(sys.modules, "library", LIBRARY)
        LIBRARY.clear()
        for user in (launch, replay, jit):
            patch.setattr(user, "cupy", module)
        for user in (launch, replay):
            patch.setattr(user, "device", lambda _: found.device)
        patch.setattr(jit, "load", found.load)
        patch.setattr(tensormap, "encode", encode)
        patch.setattr(Plan, "arguments", lambda plan, pointers: plain(plan, pointers, encode))
        for name in ("forward", "backward"):
            patch.setattr(launch, name, counted(found, getattr(launch, name)))
        patch.setattr(api, "_launch", launch)
        patch.setattr(api, "_replay", replay)
        for clear in caches:
            clear()
        for cache in kept:
            cache.clear()
        yield found
    for clear in caches:
        clear()
    for cache in kept:
        cache.clear()


def counted(found: Machine, function: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        found.planned += 1
        return function(*arguments, **options)

    return call


def encode(tensor_map: tensormap.TensorMap, address: int) -> bytes:
    """A tensor map that tells its address."""
    return (address + tensor_map.origin).to_bytes(8, "little", signed=False).ljust(128, b"\0")


# ---- another library -------------------------------------------------------------------------------------------------
class Tensor:
    """An array of another library on the device, with what DLPack asks of it."""

    def __init__(self, values: np.ndarray, requires_grad: bool = False) -> None:
        self.values, self.requires_grad = values, requires_grad
        self.trouble = ""  # with which C functions meet: "error" or "null"
        steps = [s // values.dtype.itemsize for s in values.strides]
        self.axes = (ctypes.c_int64 * (2 * values.ndim))(*values.shape, *steps)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> str:
        return f"library.{self.values.dtype}"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("only the stand-in for CuPy takes it, by `exported`")

    def view(self, dtype: Any) -> Tensor:
        return Tensor(self.values.view(dtype))

    def exported(self, stream: int) -> Array:
        if self.requires_grad:
            raise BufferError("this one is tracked")
        LIBRARY.waits.append((LIBRARY.stream, stream))
        return self.values.view(Array)


Tensor.__module__ = "library.inner"

CODES = {
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "int32": (0, 32),
    "bool": (6, 8),
}
# Of its own: what `ctypes.pythonapi` hands out is shared with every library, which may set other types.
_get = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Library(ModuleType):
    """Its module: what its C functions do, and how often they were called."""

    def __init__(self) -> None:
        super().__init__("library")
        self.int16, self.bfloat16 = np.int16, arrays.bfloat16()
        self.clear()
        self.alive: dict[int, tuple[Any, np.ndarray]] = {}  # managed tensors that nobody took yet
        functions = {
            "managed_tensor_allocator": (self.allocate, 4),
            "managed_tensor_from_py_object_no_sync": (self.view, 2),  # not for us
            "managed_tensor_to_py_object_no_sync": (self.give, 2),
            "dltensor_from_py_object_no_sync": (self.view, 2),
            "current_work_stream": (self.current, 3),
        }
        self.callbacks = {
            name: ctypes.PYFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * count)(function)
            for name, (function, count) in functions.items()
        }
        addresses = {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in self.callbacks.items()}
        self.table = exchange.Table(major=1, minor=3, **addresses)

    def clear(self) -> None:
        self.stream, self.is_full, self.views, self.made = 0, False, 0, 0
        self.waits: list[tuple[int, int]] = []  # streams of which the second was made to wait for the first

    def capsule(self, table: exchange.Table | None = None) -> Any:
        return _get(ctypes.addressof(self.table if table is None else table), exchange.CAPSULE, None)

    def from_dlpack(self, x: Any) -> Tensor:
        self.waits.append((0, self.stream))
        return Tensor(np.asarray(x))

    def view(self, at: int, out: int) -> int:
        self.views += 1
        x = ctypes.cast(at, ctypes.py_object).value
        if x.trouble == "error":
            return -1
        code, bits = CODES[str(x.values.dtype)]
        shape = ctypes.addressof(x.axes)
        data = 0 if x.trouble == "null" else x.values.ctypes.data - 32
        fields = data, 2, 0, x.values.ndim, code, bits, 1, shape, shape + 8 * x.values.ndim, 32 if data else 0
        ctypes.memmove(out, exchange.TENSOR.pack(*fields), exchange.TENSOR.size)
        return 0

    def allocate(self, prototype: int, out: int, context: int | None, fail: int | None) -> int:
        if self.is_full:
            return -1
        content = ctypes.string_at(prototype, exchange.TENSOR.size)
        _, kind, device, axes, code, bits, lanes, at_shape, strides, offset = exchange.TENSOR.unpack(content)
        assert (kind, device, lanes, strides, offset) == (2, 0, 1, 0, 0)
        shape = (ctypes.c_int64 * axes).from_address(at_shape)
        name = next(name for name, pair in CODES.items() if pair == (code, bits))
        values = np.full(tuple(shape), np.nan, arrays.named_dtype(name))
        managed = (ctypes.c_uint64 * 10)()
        managed[4], managed[9] = values.ctypes.data - 64, 64
        address = ctypes.addressof(managed)
        self.alive[address] = managed, values
        ctypes.c_uint64.from_address(out).value = address
        self.made += 1
        return 0

    def give(self, managed: int, out: int) -> int:
        _, values = self.alive.pop(managed)
        x = Tensor(values)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
        ctypes.c_uint64.from_address(out).value = id(x)
        return 0

    def current(self, kind: int, device: int | None, out: int) -> int:
        assert (kind, device or 0) == (2, 0)
        ctypes.c_uint64.from_address(out).value = self.stream
        return 0


LIBRARY = Library()
setattr(Tensor, exchange.ATTRIBUTE, LIBRARY.capsule())
