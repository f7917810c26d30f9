"""Decode calls on CuPy arrays, on the caller's current stream; nothing is synchronised.

What blocks leave for each other lies in memory that stays: launches on one stream follow each other and share it, and so do
those of one capture on one stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import cupy
from numpy import ndarray

from cuflash import explanation, floor, jit, launch, tensormap
from cuflash.decode_plan import DecodePlan, decode_arrays, places_of, plan_decode
from cuflash.decode_problem import DecodeCall
from cuflash.explanation import Explanation
from cuflash.plan import pointers_of
from cuflash.problem import canonical


class Workspace(NamedTuple):
    """Memory for parts and the counts of those that arrived, all 0 between launches."""

    sizes: dict[str, int]
    memory: dict[str, Any]
    pointers: dict[str, int]


_workspaces: dict[tuple[int, ...], Workspace] = {}
_kept: list[Workspace] = []  # of captured launches, which may run at any time
_captures = count(1 << 62)


def workspace(plan: DecodePlan) -> Mapping[str, int]:
    """Addresses of the memory of the current stream, or of its capture, at least as large as the plan needs."""
    stream = cupy.cuda.get_current_stream()
    thread = threading.get_ident() if stream.ptr == cupy.cuda.runtime.streamPerThread else 0
    is_captured = stream.ptr > 1 and stream.is_capturing()  # the legacy stream, 0 or 1, cannot be
    owner = (plan.device.index, stream.ptr, thread, capture_of(stream) if is_captured else 0)
    found = _workspaces.get(owner)
    needed = plan.needed
    if found is None or any(found.sizes[name] < size for name, size in needed.items()):
        sizes = {name: max(size, found.sizes[name] if found else 0) for name, size in needed.items()}
        memory = {name: cupy.empty(size, cupy.uint8) for name, size in sizes.items()}
        memory["arrivals"].fill(0)
        found = Workspace(sizes, memory, pointers_of(memory))
        _workspaces[owner] = found
        if is_captured:
            _kept.append(found)
    return found.pointers


def capture_of(stream: Any) -> int:
    """Number of the capture that a stream takes part in; a new one where the driver does not tell."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    function = capture_info()
    if function is not None:
        code = function(ctypes.c_void_p(stream.ptr), ctypes.byref(status), ctypes.byref(number), None, None, None)
        if code == 0 and number.value:
            return number.value
    return next(_captures)


@cache
def capture_info() -> Any:
    """The driver's cuStreamGetCaptureInfo (CUDA 11.3 and later), if it has it."""
    return getattr(tensormap._driver(), "cuStreamGetCaptureInfo_v2", None)


# ---- calls -------------------------------------------------------------------------------------------------------------
def decode(
    call: DecodeCall, out: Any = None, with_lse: bool = False, requested: str | None = None, key: Any = None
) -> tuple[Any, Any]:
    """Output and lse (None unless asked for), with the axes (batch, heads, seq, ...), written into `out` if given."""
    problem = call.problem
    index = call.q.data.device_id
    with cupy.cuda.Device(index):
        lse = cupy.empty(problem.lse_shape, problem.accumulator) if with_lse else None
        to = launch.empty(problem.out_shape, problem, call.q.dtype) if out is None else out
        arrays = decode_arrays(call, to, lse)
        plan = plan_decode(call.decode, launch.device(index), places_of(call, arrays), requested)
        run(plan, pointers_of(arrays))
    if key is not None and out is None:
        remember(key, call, plan, canonical(to, problem.layout).shape)
    return to, lse


def run(plan: DecodePlan, pointers: dict[str, int]) -> None:
    """Launch on the current stream of the plan's device, which must be the current device."""
    waits = getattr(plan.main.config, "programmatic", False)
    launch.run(plan, {**pointers, **workspace(plan)}, launch.launch_programmatic if waits else None)


# ---- explaining --------------------------------------------------------------------------------------------------------
def explain(call: DecodeCall, requested: str | None = None, measure: bool = False) -> Explanation:
    """What a call on CuPy arrays would run, with the compiled kernel's registers and on request its time."""
    problem, index = call.problem, call.q.data.device_id
    with cupy.cuda.Device(index):
        arrays = decode_arrays(call, launch.empty(problem.out_shape, problem, call.q.dtype), None)
        plan = plan_decode(call.decode, launch.device(index), places_of(call, arrays), requested)
        kernel = jit.load(plan.main.variant, index)
        work = floor.work_of_decode(call, None if call.lengths is None else cupy.asnumpy(call.lengths))
        ms = measured(plan, arrays) if measure else None
    return explanation.of_plan(
        plan,
        str(call.decode),
        registers=kernel.registers,
        spilled_bytes=kernel.local_bytes,
        floor_seconds=floor.seconds(problem, plan.device, work),
        measured_ms=ms,
    )


def measured(plan: DecodePlan, arrays: Mapping[str, Any]) -> float:
    """Milliseconds of a call on scratch data, caches included: new keys are appended to these."""
    from cuflash import rehearsal

    names = [name for name in ("q", "k", "v", "k_new", "v_new") if name in arrays]
    stood_for = {name: rehearsal.scratch(arrays[name], seed) for seed, name in enumerate(names)}
    pointers = pointers_of({**arrays, **stood_for})
    return rehearsal.milliseconds(lambda: run(plan, pointers))


# ---- repeated calls ----------------------------------------------------------------------------------------------------
class Replay(NamedTuple):
    """A call that ran before: its plan, the output to allocate, and the bytes that its arrays span."""

    plan: DecodePlan
    device: int
    out_shape: tuple[int, ...]
    spans: dict[str, tuple[int, int]]  # of caches and what is appended, from the address on; empty where nothing is


_replays: dict[Any, Replay] = {}


def signature(named: Mapping[str, Any], options: tuple[Any, ...]) -> Any:
    """What two calls have in common that run the same plan; None for calls that are not replayed."""
    if any(type(x) is ndarray for x in options):  # whose text leaves digits out
        return None
    key: list[Any] = [repr(options)]
    for name, x in named.items():
        if x is not None:
            if type(x) is not cupy.ndarray:
                return None
            memory = x.data
            key += (name, x.shape, x.strides, x.dtype, memory.device_id, memory.ptr % 16)
    return tuple(key)


def remember(key: Any, call: DecodeCall, plan: DecodePlan, out_shape: tuple[int, ...]) -> None:
    """Keep the plan of a call that has just run."""
    from cuflash.arrays import extent

    if len(_replays) >= 4096:
        _replays.clear()
    spans = {}
    if call.decode.seq_new:
        for name in ("k", "v", "k_new", "v_new", "q"):
            x = getattr(call, name)
            low, high = extent(x)
            spans[name] = (low - x.data.ptr, high - x.data.ptr)
    _replays[key] = Replay(plan, call.q.data.device_id, out_shape, spans)


def replay(key: Any, named: Mapping[str, Any], with_lse: bool) -> tuple[Any, Any] | None:
    """Output in the caller's layout and lse of a call like one before; None if there was none, or where it must be checked."""
    found = _replays.get(key)
    if found is None or cupy.cuda.runtime.getDevice() != found.device:
        return None
    pointers = {name: x.data.ptr for name, x in named.items() if x is not None}
    if found.spans and not is_apart(pointers, found.spans):
        return None
    out = cupy.empty(found.out_shape, named["q"].dtype)
    pointers["out"] = out.data.ptr
    lse = None
    if with_lse:
        lse = cupy.empty(found.plan.problem.lse_shape, found.plan.problem.accumulator)
        pointers["lse"] = lse.data.ptr
    run(found.plan, pointers)
    return out, lse


def is_apart(pointers: Mapping[str, int], spans: Mapping[str, tuple[int, int]]) -> bool:
    """Whether neither cache touches the other or what is read besides; interleaved ones are looked at more closely."""
    at = {name: (pointers[name] + low, pointers[name] + high) for name, (low, high) in spans.items()}
    k, v = at.pop("k"), at.pop("v")
    pairs = [(k, v), *((cache_, other) for cache_ in (k, v) for other in at.values())]
    return all(a[1] <= b[0] or b[1] <= a[0] for a, b in pairs)
