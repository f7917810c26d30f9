"""What XLA's calls compute: their options as an attribute, and the handlers for the host and for a GPU.

A handler wraps what XLA hands it without a copy.  On a GPU it launches on XLA's stream and takes whatever memory it needs
beside the results from XLA's allocator, so nothing is synchronised and CuPy's own pool is not used.  `jax.vmap` puts axes
in front of arrays, of length 1 for those that do not vary: these are broadcast here, in place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuflash import api, numpy_backend
from cuflash.jax.ffi import Activity, Buffer, Frame, handler
from cuflash.modifiers import Softcap, Window
from cuflash.plan import (
    Plan,
    backward_arrays,
    forward_arrays,
    is_mergeable,
    places_of,
    plan_backward,
    plan_forward,
)
from cuflash.problem import Call, Layout, Problem, canonical, describe

FORWARD, BACKWARD = "cuflash_forward", "cuflash_backward"  # names of the calls in a compiled program
MAX_PLANS = 4096


@dataclass(frozen=True)
class Options:
    """Everything about a call that its arrays do not say."""

    scale: float
    causal: str  # "" for none
    window: tuple[int | None, int | None] | None
    softcap: float | None
    layout: Layout
    masked: bool
    biased: bool
    with_lse: bool
    deterministic: bool | None

    @classmethod
    def of(cls, problem: Problem, with_lse: bool, deterministic: bool | None) -> Options:
        """The options of a call that is already checked."""
        window, softcap = problem.modifier("window"), problem.modifier("softcap")
        return cls(
            scale=problem.scale,
            causal=problem.alignment if problem.modifier("causal") else "",
            window=(window.left, window.right) if isinstance(window, Window) else None,
            softcap=softcap.cap if isinstance(softcap, Softcap) else None,
            layout=problem.layout,
            masked=problem.modifier("mask") is not None,
            biased=problem.modifier("bias") is not None,
            with_lse=with_lse,
            deterministic=deterministic,
        )

    def text(self) -> str:
        """All of them as text: a program that was compiled may be kept, and run by another process."""
        return json.dumps(asdict(self))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that every call begins with."""
        return ("q", "k", "v", *(("mask",) if self.masked else ()), *(("bias",) if self.biased else ()))

    def names(self, direction: str) -> tuple[str, ...]:
        """Names of a call's arguments, then of its results."""
        if direction == FORWARD:
            return (*self.inputs, "out", *(("lse",) if self.with_lse else ()))
        cotangents = ("dout", *(("dlse",) if self.with_lse else ()))
        return (*self.inputs, "out", "lse", *cotangents, "dq", "dk", "dv", *(("dbias",) if self.biased else ()))

    def describe(self, given: Mapping[str, Any]) -> Call:
        """The call of these arrays."""
        return describe(
            *(given[name] for name in "qkv"),
            scale=self.scale,
            causal=self.causal or False,
            window=self.window,
            softcap=self.softcap,
            layout=self.layout,
            mask=given.get("mask"),
            bias=given.get("bias"),
        )


@lru_cache(maxsize=4096)
def options_of(text: bytes) -> Options:
    """The inverse of `Options.text`."""
    fields = json.loads(text)
    window = fields.pop("window")
    return Options(window=None if window is None else tuple(window), **fields)


# ---- what the host and a GPU share -----------------------------------------------------------------------------------
AXES = {"q": 3, "k": 3, "v": 3, "out": 3, "dout": 3, "lse": 2, "dlse": 2}  # behind those of the batch, of what is read


def described(options: Options, given: Mapping[str, Any], xp: Any) -> tuple[Call, dict[str, Any]]:
    """The call of all arrays by name, and those that are none of its own, with the axes (*batch, heads, seq, dim)."""
    result = "dq" if "dq" in given else "out"
    batch = given[result].shape[:-3]  # results vary along all axes that an argument varies along
    arrays = dict(given)
    for name, x in given.items():
        if name in AXES:
            arrays[name] = spread(x, (*batch, *x.shape[x.ndim - AXES[name] :]), xp)
    if "dbias" in given:
        arrays["bias"] = spread(given["bias"], given["dbias"].shape, xp)
    call = options.describe(arrays)
    others = {name: x for name, x in arrays.items() if name not in options.inputs}
    for name in others.keys() & {"out", "dout", "dq", "dk", "dv"}:
        others[name] = canonical(others[name], call.problem.layout)
    return call, others


def spread(x: Any, shape: tuple[int, ...], xp: Any) -> Any:
    return x if x.shape == shape else xp.broadcast_to(x, shape)


# ---- on the host -----------------------------------------------------------------------------------------------------
HOST = Activity()


def host_array(buffer: Buffer, is_result: bool = False) -> np.ndarray[Any, Any]:
    """A NumPy array over memory of XLA."""
    if 0 in buffer.shape:
        return np.empty(buffer.shape, buffer.dtype)
    interface = {
        "version": 3,
        "shape": buffer.shape,
        "typestr": f"|V{buffer.dtype.itemsize}",
        "data": (buffer.pointer, not is_result),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface)).view(buffer.dtype)


def host_call(frame: Frame, direction: str) -> tuple[Call, dict[str, Any]]:
    options = options_of(frame.attribute(b"options"))
    arrays = [*map(host_array, frame.arguments), *(host_array(x, is_result=True) for x in frame.results)]
    return described(options, dict(zip(options.names(direction), arrays, strict=True)), np)


def forward_on_host(frame: Frame) -> None:
    call, to = host_call(frame, FORWARD)
    _, lse = numpy_backend.forward(call, to["out"])
    if "lse" in to:
        to["lse"][...] = lse


def backward_on_host(frame: Frame) -> None:
    call, arrays = host_call(frame, BACKWARD)
    given = {name: arrays.pop(name, None) for name in ("out", "lse", "dout", "dlse")}
    found = numpy_backend.backward(call, **given)  # always in a fixed order
    for name, x in arrays.items():
        x[...] = getattr(found, name)


# ---- on a GPU --------------------------------------------------------------------------------------------------------
class XlaStream:
    """XLA's stream, as CuPy takes those of others."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@lru_cache(maxsize=256)
def stream_of(pointer: int) -> Any:
    """XLA keeps few streams, and CuPy does not own them."""
    import cupy

    return cupy.cuda.Stream.from_external(XlaStream(pointer))


class Workspace:
    """Memory of XLA's allocator for one call.

    What was launched by the end of it may still use the memory: XLA gives it to what is queued after that.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.taken: list[tuple[int, int]] = []

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: Any) -> None:
        for pointer, size in self.taken:
            self.frame.free(pointer, size)

    def take(self, size: int) -> int:
        """Address of so many bytes."""
        pointer = self.frame.allocate(size) if size else 0
        if pointer:
            self.taken.append((pointer, size))
        return pointer


def memory_at(pointer: int, size: int, device: int) -> Any:
    """Memory of XLA as CuPy has it."""
    import cupy

    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, size, None, device), 0)


_plans: dict[Any, Plan] = {}  # of calls like those that ran before


def on_device(frame: Frame, direction: str) -> None:
    """Launch a call on XLA's stream and device."""
    text, buffers = frame.attribute(b"options"), (*frame.arguments, *frame.results)
    written = next((x.pointer for x in frame.results if x.nbytes), None)
    if written is None:
        return
    launch = api.launcher()
    import cupy

    device = cupy.cuda.runtime.pointerGetAttributes(written).device
    key = (direction, text, device, *((x.shape, x.dtype, x.pointer % 16) for x in buffers))
    plan, options = _plans.get(key), options_of(text)
    names = options.names(direction)
    with cupy.cuda.Device(device), stream_of(frame.stream), Workspace(frame) as workspace:
        if plan is not None:
            pointers = {name: x.pointer for name, x in zip(names, buffers, strict=True)}
            needed = {name: workspace.take(size) for name, size in plan.workspace().items()}
            launch.run(plan, pointers | needed)
            return
        # Whatever this thread has CuPy allocate is XLA's memory, too.
        with cupy.cuda.using_allocator(lambda size: memory_at(workspace.take(size), size, device)):
            wrapped = (cupy.ndarray(x.shape, x.dtype, memory_at(x.pointer, x.nbytes, device)) for x in buffers)
            call, others = described(options, dict(zip(names, wrapped, strict=True)), cupy)
            plan = launched(call, others, options.deterministic, device)
    if plan is not None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan


def launched(call: Call, others: dict[str, Any], deterministic: bool | None, device: int) -> Plan | None:
    """Launch a call; returns its plan if a call like it needs nothing else: no copies, and no sum behind the kernels."""
    launch = api.launcher()
    if "dq" not in others:
        launch.forward(call, others["out"], "lse" in others, lse=others.get("lse"))
        taken = forward_arrays(call, others["out"], others.get("lse"))
    else:
        given = {name: others.get(name) for name in ("out", "lse", "dout", "dlse")}
        gradients = {name: x for name, x in others.items() if name not in given}
        launch.backward(call, **given, deterministic=deterministic, to=gradients)
        taken = backward_arrays(call, **given, **gradients)
    if "dbias" in others or not is_mergeable(call.problem, taken):
        return None
    at = launch.device(device), places_of(call.problem, taken)
    if "dq" in others:
        return plan_backward(call.problem, *at, bool(deterministic), None)
    return plan_forward(call.problem, *at, None)


def forward_on_device(frame: Frame) -> None:
    on_device(frame, FORWARD)


def backward_on_device(frame: Frame) -> None:
    on_device(frame, BACKWARD)


#: the handlers of a call by the platform that XLA runs it on; they live as long as the process
HANDLERS = {
    "cpu": {FORWARD: handler(forward_on_host, HOST), BACKWARD: handler(backward_on_host, HOST)},
    "CUDA": {FORWARD: handler(forward_on_device, Activity()), BACKWARD: handler(backward_on_device, Activity())},
}
