"""What XLA's calls compute: their options as an attribute, and the handlers for the host and for a GPU.

A handler wraps what XLA hands it without a copy.  On a GPU it launches on XLA's stream and takes whatever memory it needs
beside the results from XLA's allocator, so nothing is synchronised and CuPy's own pool is not used.  `jax.vmap` puts axes
in front of arrays, of length 1 for those that do not vary: these are broadcast here, in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuflash import api, arrays, numpy_backend
from cuflash.jax.ffi import Activity, Buffer, Frame, handler
from cuflash.modifiers import Softcap, Window
from cuflash.problem import Call, Layout, Problem, canonical, describe

FORWARD, BACKWARD = "cuflash_forward", "cuflash_backward"  # names of the calls in a compiled program


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
        """Names of the arrays that the call begins with."""
        return ("q", "k", "v", *(("mask",) if self.masked else ()), *(("bias",) if self.biased else ()))

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the backward's results."""
        return ("dq", "dk", "dv", *(("dbias",) if self.biased else ()))

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


# ---- the steps that the host and a GPU share -------------------------------------------------------------------------
def spread(x: Any, batch: tuple[int, ...], inner: int, broadcast_to: Callable[..., Any]) -> Any:
    """The array with all batch axes of the call in front of its last `inner` axes."""
    shape = (*batch, *x.shape[x.ndim - inner :])
    return x if x.shape == shape else broadcast_to(x, shape)


def forward(options: Options, inputs: list[Any], results: list[Any], xp: Any, run: Callable[..., None]) -> None:
    """Describe a forward, and have it written: ``run(call, out, lse or None)``."""
    given = dict(zip(options.inputs, inputs, strict=True))
    batch = results[0].shape[:-3]
    given |= {name: spread(given[name], batch, 3, xp.broadcast_to) for name in "qkv"}
    call = options.describe(given)
    run(call, canonical(results[0], call.problem.layout), results[1] if options.with_lse else None)


def backward(options: Options, inputs: list[Any], results: list[Any], xp: Any, run: Callable[..., None]) -> None:
    """Describe a backward, and have it written: ``run(call, out, lse, dout, dlse or None, gradients by name)``."""
    names = (*options.inputs, "out", "lse", "dout", *(("dlse",) if options.with_lse else ()))
    given = dict(zip(names, inputs, strict=True))
    to = dict(zip(options.gradients, results, strict=True))
    batch = to["dq"].shape[:-3]
    axes = {"q": 3, "k": 3, "v": 3, "out": 3, "dout": 3, "lse": 2, "dlse": 2}
    given |= {name: spread(x, batch, axes[name], xp.broadcast_to) for name, x in given.items() if name in axes}
    if options.biased and given["bias"].shape != to["dbias"].shape:
        given["bias"] = xp.broadcast_to(given["bias"], to["dbias"].shape)
    call = options.describe(given)
    layout = call.problem.layout
    out, dout = (canonical(given[name], layout) for name in ("out", "dout"))
    # dbias has the axes of the scores already, whichever layout the others have
    gradients = {name: x if name == "dbias" else canonical(x, layout) for name, x in to.items()}
    run(call, out, given["lse"], dout, given.get("dlse"), gradients)


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


def host_arrays(frame: Frame) -> tuple[Options, list[Any], list[Any]]:
    arguments = [host_array(x) for x in frame.arguments]
    return options_of(frame.attribute(b"options")), arguments, [host_array(x, is_result=True) for x in frame.results]


def forward_on_host(frame: Frame) -> None:
    def run(call: Call, out: Any, lse: Any) -> None:
        _, found = numpy_backend.forward(call, out)
        if lse is not None:
            lse[...] = found

    forward(*host_arrays(frame), np, run)


def backward_on_host(frame: Frame) -> None:
    def run(call: Call, out: Any, lse: Any, dout: Any, dlse: Any, to: Mapping[str, Any]) -> None:
        found = numpy_backend.backward(call, out, lse, dout, dlse)  # always in a fixed order
        for name, x in to.items():
            x[...] = getattr(found, name)

    backward(*host_arrays(frame), np, run)


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


@contextmanager
def workspace(frame: Frame, device: int) -> Iterator[None]:
    """Whatever this thread has CuPy allocate inside is XLA's memory, given back at the end.

    Launches that were queued by then may still use it: XLA gives it to what is queued after them.
    """
    import cupy

    taken: list[tuple[int, int]] = []

    def allocate(size: int) -> Any:
        pointer = frame.allocate(size) if size else 0
        if pointer:
            taken.append((pointer, size))
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, size, None, device), 0)

    try:
        with cupy.cuda.using_allocator(allocate):
            yield
    finally:
        for pointer, size in taken:
            frame.free(pointer, size)


def device_array(buffer: Buffer, device: int) -> Any:
    """A CuPy array over memory of XLA."""
    import cupy

    memory = cupy.cuda.UnownedMemory(buffer.pointer, buffer.nbytes, None, device)
    return cupy.ndarray(buffer.shape, buffer.dtype, cupy.cuda.MemoryPointer(memory, 0))


def on_device(frame: Frame, compute: Callable[..., None], run: Callable[..., None]) -> None:
    """Compute a call on XLA's stream and device."""
    options = options_of(frame.attribute(b"options"))
    written = [x.pointer for x in frame.results if x.nbytes]
    if not written:
        return
    arrays.require_gpu()
    import cupy

    device = cupy.cuda.runtime.pointerGetAttributes(written[0]).device
    with cupy.cuda.Device(device), stream_of(frame.stream), workspace(frame, device):
        arguments, results = ([device_array(x, device) for x in them] for them in (frame.arguments, frame.results))
        compute(options, arguments, results, cupy, run)


def forward_on_device(frame: Frame) -> None:
    def run(call: Call, out: Any, lse: Any) -> None:
        api.launcher().forward(call, out, lse is not None, lse=lse)

    on_device(frame, forward, run)


def backward_on_device(frame: Frame) -> None:
    deterministic = options_of(frame.attribute(b"options")).deterministic

    def run(call: Call, out: Any, lse: Any, dout: Any, dlse: Any, to: Mapping[str, Any]) -> None:
        api.launcher().backward(call, out, lse, dout, dlse, deterministic, to=to)

    on_device(frame, backward, run)


#: the handlers of a call by the platform that XLA runs it on; they live as long as the process
HANDLERS = {
    "cpu": {FORWARD: handler(forward_on_host, HOST), BACKWARD: handler(backward_on_host, HOST)},
    "CUDA": {FORWARD: handler(forward_on_device, Activity()), BACKWARD: handler(backward_on_device, Activity())},
}
