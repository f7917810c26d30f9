"""Launch: plans on CuPy arrays, on the caller's current stream; nothing is synchronised, nothing allocated but results.

A repeated plain forward goes from its arguments' signature straight to the launch (`replay`).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import cupy
from numpy import ndarray

from cuflash import jit
from cuflash.arrays import named_dtype
from cuflash.backends import Device, floor_seconds, select
from cuflash.explanation import Explanation
from cuflash.gradients import gradient_sums, gradient_terms, gradients_type, numbers_of
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


@lru_cache(maxsize=4096)
def launches(plan: Plan) -> tuple[Launch, ...]:
    """The steps of a plan, compiled and loaded."""
    return tuple(
        Launch(
            jit.load(step.variant, plan.device.index).function,
            step.blocks,
            step.config.threads,
            step.config.shared_bytes(ITEMSIZE[step.variant.dtype]),
        )
        for step in plan.steps
        if step.blocks
    )


def run(plan: Plan, pointers: Mapping[str, int]) -> None:
    """Launch the steps on the current stream of the plan's device, which must be the current device."""
    if "tile_counter" in plan.offsets:
        pointers = {**pointers, "tile_counter": tile_counter(plan.device.index)}
    record = plan.arguments(pointers)
    argument = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(record)))
    arguments = ctypes.addressof(argument)  # the driver copies the record during the call
    stream = cupy.cuda.get_current_stream().ptr
    for function, blocks, threads, shared_bytes in launches(plan):
        cupy.cuda.driver.launchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, 0)


# ---- counters of tiles ----------------------------------------------------------------------------------------------
COUNTERS = 4096


@dataclass
class TileCounters:
    """Counters of a device, all 0 while nobody uses them."""

    memory: Any
    unused: Iterator[int]
    owners: dict[tuple[int, int], int]  # by stream and, where threads have streams of their own, thread


_tile_counters: dict[int, TileCounters] = {}


def tile_counter(device: int) -> int:
    """Address of the two words with which a persistent kernel gives out its tiles; 0 if there are none for it.

    Launches on one stream follow each other and share a counter, which each of them leaves as it was.  A captured launch may
    run at any time, so it has one to itself.
    """
    stream = cupy.cuda.get_current_stream()
    per_thread = stream.ptr == cupy.cuda.runtime.streamPerThread
    is_captured = stream.ptr > 1 and stream.is_capturing()  # the legacy stream, 0 or 1, cannot be
    counters = _tile_counters.get(device)
    if counters is None:
        if is_captured:
            return 0  # no memory is taken during a capture
        with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):  # they outlive what serves one call
            memory = cupy.zeros((COUNTERS, 2), cupy.uint32)
        counters = TileCounters(memory, iter(range(COUNTERS)), {})
        stream.synchronize()  # once: other streams find zeros
        counters = _tile_counters.setdefault(device, counters)
    owner = (stream.ptr, threading.get_ident() if per_thread else 0)
    index = None if is_captured else counters.owners.get(owner)
    if index is None:
        index = next(counters.unused, None)
        if index is None:
            return 0
        if not is_captured:
            counters.owners[owner] = index
    return int(counters.memory.data.ptr) + 8 * index


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
        operands = gradient_sums(problem, call.operands, bool(deterministic))
        sums = {f"d{name}": zeros(*of, given.get(f"d{name}")) for name, of in operands.items()}
        arrays = backward_arrays(call, out=out, lse=lse, dout=dout, dlse=dlse, **gradients, **sums)
        if batch_invariant:
            arrays = compacted(problem, arrays)
        if not is_mergeable(problem, arrays):
            arrays = in_one_batch(problem, arrays)
        places = places_of(problem, arrays)
        plan = plan_backward(problem, device(call.q.data.device_id), places, bool(deterministic), requested)
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
        run(plan, arguments_of(call, arrays))
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
    return {
        name: (cupy.zeros if name in plan.cleared else cupy.empty)(size, cupy.uint8)
        for name, size in plan.workspace().items()
    }


def zeros(shape: tuple[int, ...], dtype: Any, to: Any = None) -> Any:
    """Array for sums, all 0; `to` itself where it can hold them."""
    if to is None or to.dtype != dtype or to.shape != shape:
        return cupy.zeros(shape, dtype)
    to.fill(0)
    return to


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
    return {
        name: as_bytes(cupy.ascontiguousarray, cupy.broadcast_to(x, (*problem.batch, *x.shape[axes:])))
        for name, x in arrays.items()
    }


def sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes that were broadcast from `shape`."""
    axes = tuple(axis for axis, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    return x.sum(axis=axes, keepdims=True) if axes else x


# ---- repeated calls -------------------------------------------------------------------------------------------------
class Replay(NamedTuple):
    """A forward that ran before: its plan, and the results to allocate."""

    plan: Plan
    device: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None


_replays: dict[Any, Replay] = {}


def signature(q: Any, k: Any, v: Any, mask: Any, bias: Any, options: tuple[Any, ...]) -> Any:
    """What two calls have in common that run the same plan; None for calls that are not replayed."""
    if any(type(x) is ndarray for x in options):  # whose text leaves digits out
        return None
    key: list[Any] = [repr(options)]  # the text also tells 1 from True
    for x in (q, k, v, mask, bias):
        if x is not None:
            if type(x) is not cupy.ndarray:
                return None
            memory = x.data
            key += (x.shape, x.strides, x.dtype, memory.device_id, memory.ptr % 16)
        key.append(None)
    return tuple(key)


def remember(key: Any, call: Call, out: Any, lse: Any, requested: str | None) -> None:
    """Keep the plan of a forward that has just run."""
    problem = call.problem
    arrays = forward_arrays(call, canonical(out, problem.layout), lse)
    if key is None or problem.scales or not is_mergeable(problem, arrays):
        return
    if len(_replays) >= 4096:
        _replays.clear()
    index = call.q.data.device_id
    plan = plan_forward(problem, device(index), places_of(problem, arrays), requested)
    _replays[key] = Replay(plan, index, out.shape, None if lse is None else problem.lse_shape)


def replay(key: Any, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> tuple[Any, Any] | None:
    """Output in the caller's layout and lse of a call like one before; None if there was none, or on another device."""
    found = _replays.get(key)
    if found is None or cupy.cuda.runtime.getDevice() != found.device:
        return None
    out = cupy.empty(found.out_shape, q.dtype)
    pointers = {"q": q.data.ptr, "k": k.data.ptr, "v": v.data.ptr, "out": out.data.ptr}
    lse = None
    if found.lse_shape is not None:
        lse = cupy.empty(found.lse_shape, found.plan.problem.accumulator)
        pointers["lse"] = lse.data.ptr
    if mask is not None:
        pointers["mask"] = mask.data.ptr
    if bias is not None:
        pointers["bias"] = bias.data.ptr
    memory = workspace(found.plan)
    pointers |= {name: x.data.ptr for name, x in memory.items()}
    run(found.plan, pointers)
    return out, lse


# ---- explaining -----------------------------------------------------------------------------------------------------
def explain(call: Call, requested: str | None = None) -> Explanation:
    """What the forward of a call on CuPy arrays would run, with the compiled kernel's registers."""
    problem = call.problem
    with cupy.cuda.Device(call.q.data.device_id):
        arrays = forward_arrays(call, empty(problem.out_shape, problem, named_dtype(problem.out_dtype)), None)
        if not is_mergeable(problem, arrays):
            arrays = in_one_batch(problem, arrays)
        plan = plan_forward(problem, device(call.q.data.device_id), places_of(problem, arrays), requested)
        step = plan.main
        kernel = jit.load(step.variant, plan.device.index)
    seconds = floor_seconds(problem, plan.device)
    config: Any = step.config
    return Explanation(
        backend=plan.backend,
        reasons=plan.reasons,
        problem=str(problem),
        device=str(plan.device),
        variant=step.variant.entry,
        tile=(config.block_q, config.block_k),
        grid=step.blocks,
        threads=config.threads,
        registers=kernel.registers,
        spilled_bytes=kernel.local_bytes,
        shared_bytes=config.shared_bytes(ITEMSIZE[problem.dtype]),
        floor_ms=None if seconds is None else 1e3 * seconds,
        notes=() if config.aligned else ("rows are not 16-byte aligned: elements are copied one by one",),
    )
