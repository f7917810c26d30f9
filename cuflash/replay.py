"""Repeated calls: one like a call before costs a look at its arguments, new results and the launches.

A signature holds all that checks and plans depend on, so that a call whose signature is known has passed every check that can
fail and has its plan.  Only addresses differ.  What depends on them is in the signature (alignment) or looked at each time
(whether `out` overlaps an input), and so are the current device and stream.  Nothing here raises for a call's arguments: what
is not replayed goes the long way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import cupy
from numpy import ndarray

from cuflash.arrays import extent
from cuflash.exchange import FLOAT32, FLOAT64, Exchange, Prototype, exchange_of
from cuflash.gradients import gradients_type
from cuflash.launch import Launch, device, launch_programmatic, launches, tile_counter
from cuflash.plan import Plan, backward_arrays, forward_arrays, is_mergeable, places_of, plan_backward, plan_forward
from cuflash.problem import Call, canonical, in_layout

MAX_REPLAYS = MAX_RECORDS = 4096
ALIGNMENT = 256  # of the parts of a workspace, as allocators have it


class Record(NamedTuple):
    """A packed argument record, which nobody changes: threads share it."""

    arguments: int  # what the driver takes: the address of an array of addresses
    memory: tuple[Any, ...]


class Kept(NamedTuple):
    """What a call that ran leaves for the next one."""

    plan: Plan
    fields: tuple[str, ...]  # of the arguments that are arrays, in order
    made: dict[str, tuple[tuple[int, ...], Any]]  # shapes and dtypes of results
    #: bytes from the address on, of the fields' arrays; empty unless the last one is `out`
    spans: tuple[tuple[int, int], ...] = ()


class Replay:
    """A call that ran before: its launches, and the results to make, by CuPy or by the library that the arguments come from."""

    __slots__ = (
        "counted",
        "device",
        "exchange",
        "fields",
        "kept",
        "launches",
        "made",
        "parts",
        "size",
        "spans",
        "zeroed",
    )

    def __init__(self, kept: Kept, exchange: Exchange | None, dtype: int) -> None:
        self.kept, self.exchange = kept, exchange
        plan, self.spans = kept.plan, kept.spans
        self.launches: tuple[Launch, ...] = launches(plan)
        self.device = plan.device.index
        self.made: tuple[Any, ...] = tuple(kept.made.values())
        if exchange is not None:
            of_sums = FLOAT64 if plan.problem.accumulator == "float64" else FLOAT32
            self.made = tuple(
                Prototype(shape, of_sums if name == "lse" else dtype, self.device)
                for name, (shape, _) in kept.made.items()
            )
        self.counted = "tile_counter" in plan.offsets
        #: fields of the argument record in the order of a call's addresses; parts of the workspace follow
        self.fields = (*kept.fields, *kept.made, *(["tile_counter"] if self.counted else []))
        self.parts: dict[str, int] = {}
        self.size = 0
        for name, size in plan.workspace().items():
            self.parts[name] = self.size
            self.size += -(-size // ALIGNMENT) * ALIGNMENT
        self.zeroed = [(self.parts[name] + begin, size) for name, (begin, size) in plan.zeroed.items()]

    def run(self, pointers: tuple[int, ...]) -> list[Any] | None:
        """Launch for arguments at these addresses, on the current stream; results, or None for a call that is not replayed."""
        number, exchange = self.device, self.exchange
        cuda = cupy.cuda
        if cuda.runtime.getDevice() != number or (self.spans and not self.is_apart(pointers)):
            return None
        stream = cuda.get_current_stream(number)
        at = stream.ptr
        results = []
        if exchange is None:
            for shape, dtype in self.made:
                x = cupy.ndarray(shape, dtype)
                results.append(x)
                pointers += (x.data.ptr,)
        else:
            if exchange.stream(number) != at:  # only `__dlpack__` makes one stream wait for another
                return None
            for prototype in self.made:
                try:
                    x, pointer = exchange.make(prototype)
                except MemoryError:
                    return None
                results.append(x)
                pointers += (pointer,)
        if self.counted:
            pointers += (tile_counter(number, stream),)
        if self.size:
            memory = cuda.alloc(self.size)  # free again on this stream when it is dropped
            pointers += (memory.ptr,)
            for begin, size in self.zeroed:
                cuda.runtime.memsetAsync(memory.ptr + begin, 0, size, at)
        arguments = (_records.get((self, pointers)) or self.packed(pointers)).arguments
        usual = cuda.driver.launchKernel
        for function, blocks, threads, shared_bytes, programmatic in self.launches:
            launch = launch_programmatic if programmatic else usual
            launch(function, blocks, 1, 1, threads, 1, 1, shared_bytes, at, arguments, 0)
        return results

    def packed(self, pointers: tuple[int, ...]) -> Record:
        """The argument record for these addresses; memory pools give the same ones again and again."""
        named = dict(zip(self.fields, pointers, strict=False))
        named |= {name: pointers[-1] + offset for name, offset in self.parts.items()}
        record = self.kept.plan.arguments(named)
        argument = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(record)))
        if len(_records) >= MAX_RECORDS:
            _records.clear()
        found = _records[self, pointers] = Record(ctypes.addressof(argument), (record, argument))
        return found

    def is_apart(self, pointers: tuple[int, ...]) -> bool:
        """Whether no input reaches into the bytes from the first to the last one of `out`."""
        *inputs, (low, high) = self.spans
        first, last = pointers[-1] + low, pointers[-1] + high
        return not any(
            pointer + begin < last and first < pointer + end
            for pointer, (begin, end) in zip(pointers, inputs, strict=False)
        )


_replays: dict[Any, Replay] = {}
_records: dict[tuple[Replay, tuple[int, ...]], Record] = {}


# ---- signatures ------------------------------------------------------------------------------------------------------
def options_of(
    scale: Any, causal: Any, window: Any, softcap: Any, layout: Any, precision: Any, backend: Any, more: Any
) -> Any:
    """The options as part of a signature, `more` is the call's own; None for calls that are not replayed."""
    kind = type(causal)
    if (
        (kind is bool or kind is str)
        and type(layout) is str
        and scale is None
        and window is None
        and softcap is None
        and precision is None
        and backend is None
    ):
        return causal, layout, more
    options = (scale, causal, window, softcap, layout, precision, backend, more)
    if ndarray in map(type, options):  # whose text leaves digits out
        return None
    return repr(options)  # the text also tells 1 from True


def signature(arrays: tuple[Any, ...], options: Any) -> tuple[Any, tuple[int, ...]]:
    """What two calls have in common that run the same plan, and the addresses; None for calls that are not replayed."""
    if options is None:
        return None, ()
    kind = cupy.ndarray
    if type(arrays[0]) is not kind:
        other: Any = type(arrays[0])
        exchange = exchange_of(other)
        return (None, ()) if exchange is None else exchange.signature(arrays, options)
    key, pointers = [None, options], []
    for x in arrays:
        if x is None:
            key.append(None)
        elif type(x) is kind:
            memory = x.data
            pointer = memory.ptr
            key += (x.shape, x.strides, x.dtype, memory.device_id, pointer & 15)
            pointers.append(pointer)
        else:
            return None, ()
    return tuple(key), tuple(pointers)


def remember(keys: Iterable[Any], kept: Kept) -> None:
    """Keep what a call leaves under its signatures."""
    for key in keys:
        exchange = key[0]
        if len(_replays) >= MAX_REPLAYS:
            _replays.clear()
        _replays[key] = Replay(kept, exchange, 0 if exchange is None else exchange.dtype(key))


def remember_alike(keys: Iterable[Any], key: Any) -> None:
    """Keep under further signatures what is kept under `key`."""
    if (found := _replays.get(key)) is not None:
        remember((other for other in keys if other not in _replays), found.kept)


# ---- forward ---------------------------------------------------------------------------------------------------------
FORWARD = ("q", "k", "v", "mask", "bias", "out")
PACKED_FORWARD = ("q", "k", "v", "segments_q", "segments_k", "out")


def forward(arrays: tuple[Any, ...], options: Any) -> tuple[Any, list[Any] | None]:
    """Signature of a call with arrays of `FORWARD`, or of a packed one; output unless given, and lse, where it is replayed."""
    key, pointers = signature(arrays, options)
    found = _replays.get(key)
    return key, None if found is None else found.run(pointers)


def remember_forward(
    keys: Iterable[Any], call: Call, out: Any, lse: Any, is_given: bool, requested: str | None
) -> None:
    """Keep the plan of a forward that has just run; its results have the axes (*batch, heads, seq, ...)."""
    problem = call.problem
    arrays = forward_arrays(call, out, lse)
    if problem.scales or not is_mergeable(problem, arrays):
        return
    plan = plan_forward(problem, device(call.q.data.device_id), places_of(problem, arrays), requested)
    names = PACKED_FORWARD if problem.is_packed else FORWARD
    fields = tuple(name for name in names if name in arrays and (is_given or name != "out"))
    made = {} if is_given else {"out": (in_layout(problem.out_shape, problem.layout), out.dtype)}
    if lse is not None:
        made["lse"] = problem.lse_shape, lse.dtype
    remember(keys, Kept(plan, fields, made, tuple(span(arrays[name]) for name in fields) if is_given else ()))


def span(x: Any) -> tuple[int, int]:
    """First byte and the byte after the last one that an array's elements take, from its address on."""
    first, end = extent(x)
    return first - x.data.ptr, end - x.data.ptr


# ---- backward --------------------------------------------------------------------------------------------------------
BACKWARD = ("q", "k", "v", "mask", "dout", "out", "lse", "dlse")
PACKED_BACKWARD = ("q", "k", "v", "segments_q", "segments_k", "dout", "out", "lse", "dlse")


def backward(arrays: tuple[Any, ...], options: Any) -> tuple[Any, Any]:
    """Signature of a call with the arrays of `BACKWARD`, or of a packed one, and the gradients where it is replayed."""
    key, pointers = signature(arrays, options)
    found = _replays.get(key)
    results = None if found is None else found.run(pointers)
    return key, None if results is None else gradients_type()(*results)


def remember_backward(
    keys: Iterable[Any],
    call: Call,
    native: Mapping[str, Any],
    gradients: Any,
    deterministic: bool | None,
    requested: str | None,
) -> None:
    """Keep the plan of a backward that has just run; its gradients have the axes (*batch, heads, seq, dim)."""
    problem = call.problem
    given = {name: canonical(native[name], problem.layout) for name in ("out", "dout")}
    arrays = backward_arrays(call, lse=native["lse"], dlse=native.get("dlse"), **given, **gradients._asdict())
    if len(gradients) > 3 or not is_mergeable(problem, arrays):
        return
    places = places_of(problem, arrays)
    plan = plan_backward(problem, device(call.q.data.device_id), places, bool(deterministic), requested)
    made = {name: (in_layout(x.shape, problem.layout), x.dtype) for name, x in gradients._asdict().items()}
    names = PACKED_BACKWARD if problem.is_packed else BACKWARD
    remember(keys, Kept(plan, tuple(name for name in names if name in arrays), made))
