"""Launch: plans on CuPy arrays, on the caller's current stream; nothing is synchronised, nothing allocated but results."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import cupy

from cuflash import explanation, floor, jit, tensormap
from cuflash.arrays import named_dtype
from cuflash.backends import Device, select
from cuflash.explanation import Explanation
from cuflash.gradients import gradient_sums, gradient_terms, gradients_type, may_be_rounded, numbers_of
from cuflash.place import as_bytes
from cuflash.plan import (
    Plan,
    arguments_of,
    backward_arrays,
    compacted,
    forward_arrays,
    hvp_arrays,
    is_mergeable,
    jvp_arrays,
    places_of,
    plan_backward,
    plan_forward,
    plan_hvp,
    plan_jvp,
)
from cuflash.problem import Call, Problem, canonical, in_layout
from cuflash.variant import ITEMSIZE


# ---- plans on a device ----------------------------------------------------------------------------------------------
@cache
def device(index: int) -> Device:
    """What plans need to know of the GPU with that index."""
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    attributes = cupy.cuda.Device(index).attributes  # rates in kHz; the memory moves data twice a clock
    bus_bytes = 2 * attributes.get("GlobalMemoryBusWidth", 0) / 8
    return Device(
        capability=10 * properties["major"] + properties["minor"],
        shared_limit=properties["sharedMemPerBlockOptin"],
        name=properties["name"].decode(),
        index=index,
        multiprocessors=properties["multiProcessorCount"],
        clock_hz=1e3 * attributes.get("ClockRate", 0),
        bytes_per_second=1e3 * attributes.get("MemoryClockRate", 0) * bus_bytes,
        cache_bytes=properties["l2CacheSize"],
        compiler=jit.compiler(),
    )


class Launch(NamedTuple):
    """What the driver needs of one step, beside the arguments."""

    function: int
    blocks: int
    threads: int
    shared_bytes: int
    programmatic: bool  # it waits by itself for what lies in front of it


@lru_cache(maxsize=4096)
def launches(plan: Plan) -> tuple[Launch, ...]:
    """The steps of a plan, compiled and loaded."""
    return tuple(
        Launch(
            jit.load(step.variant, plan.device.index).function,
            step.blocks,
            step.config.threads,
            step.config.shared_bytes(ITEMSIZE[step.variant.dtype]),
            getattr(step.config, "programmatic", False),
        )
        for step in plan.steps
        if step.blocks
    )


def run(plan: Plan, pointers: Mapping[str, int], launch: Callable[..., None] | None = None) -> None:
    """Launch the steps on the current stream of the plan's device, which must be the current device.

    `launch` is called in place of CuPy's `launchKernel`, and of that for kernels that wait by themselves.
    """
    current = cupy.cuda.get_current_stream()
    if "tile_counter" in plan.offsets:
        pointers = {**pointers, "tile_counter": tile_counter(plan.device.index, current)}
    record = plan.arguments(pointers)
    argument = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(record)))
    arguments = ctypes.addressof(argument)  # the driver copies the record during the call
    for name, (begin, size) in plan.zeroed.items():
        cupy.cuda.runtime.memsetAsync(pointers[name] + begin, 0, size, current.ptr)
    usual = launch or cupy.cuda.driver.launchKernel
    for function, blocks, threads, shared_bytes, programmatic in launches(plan):
        start = launch_programmatic if programmatic and launch is None else usual
        start(function, blocks, 1, 1, threads, 1, 1, shared_bytes, current.ptr, arguments, 0)


# ---- launches that begin before what lies in front of them has ended -------------------------------------------------
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
MIN_PROGRAMMATIC_DRIVER = 12030  # CUDA 12.3: the first whose graphs hold such launches, which may be captured then


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint64 * 8))


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


_SERIALIZATION = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))


@lru_cache(maxsize=4096)
def programmatic(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, stream: int
) -> LaunchConfig:
    """A programmatic launch but for its function and arguments; nobody changes it, so that threads share it."""
    return LaunchConfig(grid, block, shared_bytes, stream, ctypes.addressof(_SERIALIZATION), 1)


def launch_programmatic(
    function: int,
    grid_x: int,
    grid_y: int,
    grid_z: int,
    block_x: int,
    block_y: int,
    block_z: int,
    shared_bytes: int,
    stream: int,
    arguments: int,
    extra: int,
) -> None:
    """CuPy's `launchKernel` for a kernel that itself waits for what lies in front of it, before it touches any array.

    Its blocks may begin before those in front have ended: as these make room, or earlier if their kernel allows it.  Where the
    driver does not know such launches this one is like any other, and the kernel finds nothing to wait for.  Source: CUDA
    driver API, cuLaunchKernelEx; CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
    """
    launch = launch_kernel_ex()
    if launch is None:
        rest = (block_x, block_y, block_z, shared_bytes, stream, arguments, extra)
        cupy.cuda.driver.launchKernel(function, grid_x, grid_y, grid_z, *rest)
        return
    config = programmatic((grid_x, grid_y, grid_z), (block_x, block_y, block_z), shared_bytes, stream)
    code = launch(ctypes.byref(config), function, arguments, extra)
    if code:
        raise cupy.cuda.driver.CUDADriverError(code)


@cache
def launch_kernel_ex() -> Any:
    """The driver's cuLaunchKernelEx; None where programmatic launches are not known, or cannot be captured."""
    if cupy.cuda.runtime.driverGetVersion() < MIN_PROGRAMMATIC_DRIVER:
        return None
    try:
        found = getattr(tensormap._driver(), "cuLaunchKernelEx", None)
    except OSError:  # the driver's library has another name here
        return None
    if found is not None:
        found.argtypes = (ctypes.c_void_p,) * 4
    return found


# ---- counters of tiles ----------------------------------------------------------------------------------------------
COUNTERS = 4096


@dataclass
class TileCounters:
    """Counters of a device, all 0 while nobody uses them."""

    memory: Any
    address: int
    unused: Iterator[int]
    owners: dict[tuple[int, int], int]  # by stream and, where threads have streams of their own, thread


_tile_counters: dict[int, TileCounters] = {}


def tile_counter(device: int, stream: Any) -> int:
    """Address of the two words with which a persistent kernel gives out its tiles; 0 if there are none for it.

    Launches on one stream, which must be the current one, follow each other and share a counter, which each of them leaves as it
    was.  A captured launch may run at any time, so it has one to itself.
    """
    at, thread = stream.ptr, 0
    is_captured = at > 1 and stream.is_capturing()  # the legacy stream, 0 or 1, cannot be
    counters = _tile_counters.get(device)
    if counters is None:
        if is_captured:
            return 0  # no memory is taken during a capture
        with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):  # they outlive what serves one call
            memory = cupy.zeros((COUNTERS, 2), cupy.uint32)
        counters = TileCounters(memory, int(memory.data.ptr), iter(range(COUNTERS)), {})
        stream.synchronize()  # once: other streams find zeros
        counters = _tile_counters.setdefault(device, counters)
    if at > 1 and at == cupy.cuda.runtime.streamPerThread:
        thread = threading.get_ident()
    index = None if is_captured else counters.owners.get((at, thread))
    if index is None:
        index = next(counters.unused, None)
        if index is None:
            return 0
        if not is_captured:
            counters.owners[at, thread] = index
    return counters.address + 8 * index


# ---- calls ----------------------------------------------------------------------------------------------------------
def forward(
    call: Call,
    out: Any = None,
    with_lse: bool = False,
    requested: str | None = None,
    statistics: Mapping[str, Any] | None = None,
    batch_invariant: bool = False,
    lse: Any = None,
) -> tuple[Any, Any]:
    """Output and lse (None unless asked for), with the axes (*batch, heads, seq, ...), written into `out` and `lse` if given.

    `lse` is contiguous; so are `statistics`, arrays to write by name, of which sums of columns need lse.
    """
    problem = call.problem
    with cupy.cuda.Device(call.q.data.device_id):
        if with_lse and lse is None:
            lse = cupy.empty(problem.lse_shape, problem.accumulator)
        to = empty(problem.out_shape, problem, named_dtype(problem.out_dtype)) if out is None else out
        arrays = forward_arrays(call, to, lse, **(statistics or {}))
        if batch_invariant:
            arrays = compacted(problem, arrays)
        if not is_mergeable(problem, arrays):
            arrays = in_one_batch(problem, arrays)
        plan = plan_forward(problem, device(call.q.data.device_id), places_of(problem, arrays), requested)
        memory = workspace(plan)
        run(plan, arguments_of(call, {**arrays, **memory}))
        if arrays["out"] is not to:
            to[...] = arrays["out"]
    return to, lse


def backward(
    call: Call,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any = None,
    deterministic: bool | None = None,
    requested: str | None = None,
    batch_invariant: bool = False,
    to: Mapping[str, Any] | None = None,
) -> Any:
    """Gradients with the axes (*batch, heads, seq, dim), written into the arrays of `to` by name if given."""
    problem = call.problem
    given = to or {}
    with cupy.cuda.Device(call.q.data.device_id):
        gradients = {
            f"d{name}": given[f"d{name}"] if f"d{name}" in given else empty(x.shape, problem, x.dtype)
            for name, x in zip("qkv", (call.q, call.k, call.v), strict=True)
        }
        rounded = not batch_invariant and may_be_rounded(problem)
        operands = gradient_sums(problem, call.operands, bool(deterministic), rounded)
        sums = {f"d{name}": sums_array(*of, given.get(f"d{name}")) for name, of in operands.items()}
        arrays = backward_arrays(call, out=out, lse=lse, dout=dout, dlse=dlse, **gradients, **sums)
        if batch_invariant:
            arrays = compacted(problem, arrays)
        if not is_mergeable(problem, arrays):
            arrays = in_one_batch(problem, arrays)
        places = places_of(problem, arrays)
        plan = plan_backward(
            problem, device(call.q.data.device_id), places, bool(deterministic), requested, batch_invariant
        )
        for name in plan.widened:
            arrays[f"d{name}"] = cupy.empty(*gradient_sums(problem, call.operands, bool(deterministic))[name])
        for name in sums.keys() - plan.overwritten:
            arrays[name].fill(0)
        memory = workspace(plan)
        run(plan, arguments_of(call, {**arrays, **memory}))
        summed = [
            sum_to(numbers_of(arrays[f"d{name}"], problem), x.shape).astype(x.dtype, copy=False)
            for name, x in ((name, call.operands[name]) for name in operands)
        ]
        found = gradients_type(tuple(operands))(*(arrays[name] for name in gradients), *summed)
        for name, target in given.items():
            if getattr(found, name) is not target:
                target[...] = getattr(found, name)
    return found._replace(**given)


def jvp(
    call: Call, tangents: Mapping[str, Any], requested: str | None = None, batch_invariant: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Output, its tangent, lse and its tangent, with the axes (*batch, heads, seq, ...); `tangents` by name, without zeros."""
    problem = call.problem
    with cupy.cuda.Device(call.q.data.device_id):
        results = {name: empty(problem.out_shape, problem, call.q.dtype) for name in ("out", "out_tangent")}
        results |= {name: cupy.empty(problem.lse_shape, problem.accumulator) for name in ("lse", "lse_tangent")}
        arrays = jvp_arrays(call, tangents, **results)
        if batch_invariant:
            arrays = compacted(problem, arrays)
        if not is_mergeable(problem, arrays):
            arrays = in_one_batch(problem, arrays)
        plan = plan_jvp(problem, device(call.q.data.device_id), places_of(problem, arrays), requested)
        memory = workspace(plan)
        run(plan, arguments_of(call, {**arrays, **memory}))
    return arrays["out"], arrays["out_tangent"], arrays["lse"], arrays["lse_tangent"]


def hvp(
    call: Call,
    dout: Any,
    dlse: Any,
    tangents: Mapping[str, Any],
    requested: str | None = None,
    batch_invariant: bool = False,
) -> Any:
    """Tangents of the gradients with the axes (*batch, heads, seq, dim); `tangents` by name, without zeros."""
    problem = call.problem
    with cupy.cuda.Device(call.q.data.device_id):
        index = call.q.data.device_id
        select(problem, device(index), {}, requested=requested, offer="hvp")  # before anything runs
        of_inputs = {name: x for name, x in tangents.items() if name not in ("dout", "dlse")}
        names = ("out", "out_tangent", "lse", "lse_tangent")
        results = dict(zip(names, jvp(call, of_inputs, requested, batch_invariant), strict=True))
        products = {
            f"d{name}": empty(x.shape, problem, x.dtype)
            for name, x in zip("qkv", (call.q, call.k, call.v), strict=True)
        }
        terms = gradient_terms(problem, call.operands)
        sums = {f"d{name}": cupy.zeros(shape, problem.accumulator) for name, shape in terms.items()}
        arrays = hvp_arrays(call, tangents, **results, dout=dout, dlse=dlse, **products, **sums)
        if batch_invariant:
            arrays = compacted(problem, arrays)
        if not is_mergeable(problem, arrays):
            arrays = in_one_batch(problem, arrays)
        plan = plan_hvp(problem, device(index), places_of(problem, arrays), requested)
        memory = workspace(plan)
        run(plan, arguments_of(call, {**arrays, **memory}))
        summed = [
            sum_to(arrays[f"d{name}"], call.operands[name].shape).astype(call.operands[name].dtype, copy=False)
            for name in terms
        ]
        return gradients_type(tuple(terms))(*(arrays[name] for name in products), *summed)


def workspace(plan: Plan) -> dict[str, Any]:
    """What the kernels of a plan need beside the call's arrays, by field name; free again on this stream when it is dropped."""
    return {name: cupy.empty(size, cupy.uint8) for name, size in plan.workspace().items()}


def sums_array(shape: tuple[int, ...], dtype: Any, to: Any = None) -> Any:
    """Contiguous array for sums, which may hold anything; `to` itself where it can hold them."""
    fits = to is not None and to.dtype == dtype and to.shape == shape and to.flags.c_contiguous
    return to if fits else cupy.empty(shape, dtype)


def empty(shape: tuple[int, ...], problem: Problem, dtype: Any) -> Any:
    """New array with the axes (*batch, heads, seq, dim), contiguous in the caller's layout."""
    return canonical(cupy.empty(in_layout(shape, problem.layout), dtype), problem.layout)


def empty_statistics(call: Call, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """New arrays for statistics, contiguous, beside q."""
    with cupy.cuda.Device(call.q.data.device_id):
        return {name: cupy.empty(shape, call.problem.accumulator) for name, shape in shapes.items()}


def in_one_batch(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Contiguous copies, operands broadcast along the batch axes, so that these can be merged into one."""
    axes = len(problem.batch)
    whole = {name: (*problem.batch, *x.shape[axes:]) for name, x in arrays.items()}
    return {
        name: as_bytes(cupy.ascontiguousarray, x if x.shape == whole[name] else cupy.broadcast_to(x, whole[name]))
        for name, x in arrays.items()
    }


def sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes that were broadcast from `shape`."""
    axes = tuple(axis for axis, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    return x.sum(axis=axes, keepdims=True) if axes else x


# ---- explaining -----------------------------------------------------------------------------------------------------
def explain(call: Call, requested: str | None = None, measure: bool = False) -> Explanation:
    """What the forward of a call on CuPy arrays would run, with the compiled kernel's registers and on request its time."""
    problem, index = call.problem, call.q.data.device_id
    with cupy.cuda.Device(index):
        arrays = forward_arrays(call, empty(problem.out_shape, problem, named_dtype(problem.out_dtype)), None)
        if not is_mergeable(problem, arrays):
            arrays = in_one_batch(problem, arrays)
        plan = plan_forward(problem, device(index), places_of(problem, arrays), requested)
        kernel = jit.load(plan.main.variant, index)
        work = floor.work_of_call(call, cupy.asnumpy)
        ms = measured(plan, call, arrays) if measure else None
    return explanation.of_plan(
        plan,
        str(problem),
        registers=kernel.registers,
        spilled_bytes=kernel.local_bytes,
        floor_seconds=floor.seconds(problem, plan.device, work),
        measured_ms=ms,
    )


def measured(plan: Plan, call: Call, arrays: Mapping[str, Any]) -> float:
    """Milliseconds of a forward whose queries, keys and values are replaced by scratch data; all else is only read."""
    from cuflash import rehearsal

    stood_for = {name: rehearsal.scratch(arrays[name], seed) for seed, name in enumerate(("q", "k", "v"))}
    memory = workspace(plan)
    pointers = arguments_of(call, {**arrays, **stood_for, **memory})
    return rehearsal.milliseconds(lambda: run(plan, pointers))
