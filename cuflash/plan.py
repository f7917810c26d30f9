"""Plan: one call on a GPU as launches, packed arguments and workspace; planned once per problem and strides, then replayed.

`forward` and `backward` run a `Call` on CuPy arrays.  Planning itself touches neither CuPy nor a device: tests run the same
steps through the emulator, and `explain` describes devices that are not there.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash import abi
from cuflash.backends import Device, select
from cuflash.errors import UnsupportedError
from cuflash.explanation import Explanation
from cuflash.gradients import differentiable_operands, gradients_type
from cuflash.modifiers import REGISTRY, Scaled
from cuflash.problem import Call, Problem
from cuflash.schedules import rows
from cuflash.schedules.base import Config
from cuflash.variant import ITEMSIZE, Variant

LOG2_E = 1.4426950408889634
MAX_BLOCKS = (1 << 31) - 1  # of grid.x
_POINTER = struct.Struct("=Q")


@dataclass(frozen=True)
class Placed:
    """Where an array lies: byte strides of (*batch, heads, row, column), 0 where broadcast, and the address modulo 16."""

    strides: tuple[int, ...]
    itemsize: int
    misalignment: int

    def aligned(self, to: int, axes: int) -> bool:
        """Whether rows of `axes` axes can be moved in pieces of `to` bytes."""
        return (
            self.misalignment % to == 0
            and self.strides[axes - 1] == self.itemsize
            and all(s % to == 0 for s in self.strides[: axes - 1])
        )


def placed(array: Any, shape: tuple[int, ...], address: int) -> Placed:
    """Place of an array that is broadcast to `shape`."""
    strides = tuple(
        0 if n == 1 and full != 1 else s for n, s, full in zip(array.shape, array.strides, shape, strict=True)
    )
    return Placed(strides, array.dtype.itemsize, address % 16)


@dataclass(frozen=True)
class Step:
    """One launch."""

    variant: Variant
    blocks: int

    @property
    def config(self) -> Config:
        return self.variant.config  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Plan:
    """Launches that share one argument record, and the workspace they need in bytes."""

    problem: Problem
    device: Device
    backend: str
    reasons: Mapping[str, str]
    steps: tuple[Step, ...]
    template: bytes
    offsets: Mapping[str, int]  # of the pointers, by field name
    statistics_bytes: int = 0
    dq_sum_bytes: int = 0
    kernels: list[Any] = field(default_factory=list, compare=False)  # filled at the first run

    def arguments(self, pointers: Mapping[str, int]) -> bytearray:
        """The argument record with these addresses; those not named are null."""
        record = bytearray(self.template)
        for name, address in pointers.items():
            _POINTER.pack_into(record, self.offsets[name], address)
        return record


# ---- planning -----------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def plan_forward(
    problem: Problem, device: Device, places: tuple[tuple[str, Placed], ...], requested: str | None = None
) -> Plan:
    """Plan of the forward for arrays at these places."""
    at = dict(places)
    backend, reasons = select(problem, device, requested=requested)
    axes = len(problem.out_shape)
    aligned = all(at[name].aligned(16, axes) for name in ("q", "k", "v"))
    config = backend.schedule.forward(problem, device.shared_limit, aligned)
    names = chain_names(problem)
    step = Step(Variant(f"forward_{backend.name}", problem.dtype, names, config), config.blocks(problem))
    values = {**common_values(problem), "out_pairs": pairs(at["out"], axes)}
    template, offsets = pack("forward", problem, at, values)
    return checked(Plan(problem, device, backend.name, reasons, (step,), template, offsets))


@lru_cache(maxsize=4096)
def plan_backward(
    problem: Problem,
    device: Device,
    places: tuple[tuple[str, Placed], ...],
    deterministic: bool = False,
    requested: str | None = None,
) -> Plan:
    """Plan of the backward: statistics, the main kernel, and where sums need it their conversion."""
    at = dict(places)
    backend, reasons = select(problem, device, requested=requested, deterministic=deterministic)
    axes = len(problem.out_shape)
    itemsize = ITEMSIZE[problem.dtype]
    aligned = all(at[name].aligned(16, axes) for name in ("q", "k", "v", "dout"))
    main = backend.schedule.backward(problem, device.shared_limit, aligned)
    delta_aligned = all(at[name].aligned(16, axes) for name in ("out", "dout"))
    delta = rows.delta(problem, itemsize, main.block_q, delta_aligned)
    convert = backend.schedule.convert(main)
    names = chain_names(problem)
    steps = (
        Step(Variant("backward_delta", problem.dtype, names, delta), delta.blocks(problem)),
        Step(Variant(f"backward_{backend.name}", problem.dtype, names, main), main.blocks(problem)),
        Step(Variant(f"backward_convert_{backend.name}", problem.dtype, names, convert), convert.blocks(problem)),
    )
    padded = delta.rows_padded(problem)
    values = {
        **common_values(problem),
        "rows_padded": padded,
        "dq_width": main.head_dim,
        **{f"{name}_pairs": pairs(at[name], axes) for name in ("dq", "dk", "dv")},
    }
    template, offsets = pack("backward", problem, at, values)
    lines = problem.batch_size * problem.heads_q * padded
    real = np.dtype(problem.accumulator).itemsize
    return checked(
        Plan(
            problem,
            device,
            backend.name,
            reasons,
            steps,
            template,
            offsets,
            statistics_bytes=2 * real * lines,
            dq_sum_bytes=real * lines * main.head_dim,
        )
    )


def chain_names(problem: Problem) -> tuple[str, ...]:
    """Names of the modifiers that are compiled in.

    Raw products can stand for scores only while a larger product is a larger score: other scales compile the scaling in.
    """
    names = tuple(m.name for m in problem.modifiers)
    scored = any(m.kind == "score" for m in problem.modifiers)
    return names if scored or problem.scale > 0 else (Scaled.name, *names)


def common_values(problem: Problem) -> dict[str, float | int]:
    """Scalar fields that every kernel has."""
    scored = any(REGISTRY[name].kind == "score" for name in chain_names(problem))
    values: dict[str, float | int] = {
        "batch_size": problem.batch_size,
        "heads_q": problem.heads_q,
        "heads_k": problem.heads_k,
        "group": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "scale": problem.scale,
        # the exponent is 2^(score · softmax_scale): scores are raw products unless a modifier wants logits
        "softmax_scale": LOG2_E * (1 if scored else problem.scale),
    }
    for modifier in problem.modifiers:
        values.update(modifier.values(problem))
    return values


def pairs(place: Placed, axes: int) -> int:
    """Whether two neighbouring elements of every row may be written at once."""
    return int(place.aligned(2 * place.itemsize, axes))


def pack(
    direction: str, problem: Problem, at: Mapping[str, Placed], values: Mapping[str, float | int]
) -> tuple[bytes, dict[str, int]]:
    """The argument record without addresses, and where the addresses go."""
    names = chain_names(problem)
    dtype = abi.record(direction, names, problem.accumulator)
    record = np.zeros((), dtype)
    sizes, strides = merged_batch(problem.batch, {n: p.strides[: len(problem.batch)] for n, p in at.items()})
    record["batch_sizes"] = sizes
    offsets = {}
    for kind, name in abi.fields(direction, names):
        assert dtype.fields is not None
        if kind in ("View", "Pointer"):
            offsets[name] = dtype.fields[name][1]
        elif name in values:
            record[name] = values[name]
        if kind == "View" and name in at:
            place = at[name]
            inner = [s // place.itemsize for s in place.strides[len(problem.batch) :]]
            record[name]["batch"] = [s // place.itemsize for s in strides[name]]
            record[name]["head"], record[name]["row"] = inner[0], inner[1]
            record[name]["column"] = inner[2] if len(inner) > 2 else 0
    return record.tobytes(), offsets


def merged_batch(
    sizes: tuple[int, ...], strides: Mapping[str, tuple[int, ...]]
) -> tuple[list[int], dict[str, list[int]]]:
    """Batch axes merged wherever every array allows it, then padded in front to `abi.BATCH_AXES`."""
    merged_sizes: list[int] = []
    merged: dict[str, list[int]] = {name: [] for name in strides}
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        if merged_sizes and all(merged[n][-1] == strides[n][axis] * size for n in strides):
            merged_sizes[-1] *= size
            for n in strides:
                merged[n][-1] = strides[n][axis]
        else:
            merged_sizes.append(size)
            for n in strides:
                merged[n].append(strides[n][axis])
    missing = abi.BATCH_AXES - len(merged_sizes)
    if missing < 0:
        raise UnsupportedError(
            f"batch axes {sizes} of these strides cannot be merged to {abi.BATCH_AXES}; make the arrays contiguous"
        )
    return [1] * missing + merged_sizes, {n: [0] * missing + s for n, s in merged.items()}


def checked(plan: Plan) -> Plan:
    for step in plan.steps:
        if step.blocks > MAX_BLOCKS:
            raise UnsupportedError(
                f"{step.variant.entry} would need {step.blocks} blocks, the grid holds {MAX_BLOCKS}; split the batch"
            )
    return plan


# ---- arrays of a call ---------------------------------------------------------------------------------------------------
def address(array: Any) -> int:
    """Address of the first element of a NumPy or CuPy array."""
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else int(array.data.ptr)


def places_of(problem: Problem, arrays: Mapping[str, Any]) -> tuple[tuple[str, Placed], ...]:
    """Places of the arrays by field name; operands are broadcast to the scores' axes."""
    found = []
    for name, array in arrays.items():
        shape = array.shape
        if len(shape) == len(problem.score_shape) and name.removeprefix("d") not in ("q", "k", "v", "out"):
            shape = problem.score_shape
        found.append((name, placed(array, shape, address(array))))
    return tuple(found)


def pointers_of(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Addresses of the arrays by field name."""
    return {name: address(array) for name, array in arrays.items()}


def forward_arrays(call: Call, out: Any, lse: Any) -> dict[str, Any]:
    """Arrays of a forward by field name."""
    arrays = {"q": call.q, "k": call.k, "v": call.v, "out": out, **call.operands}
    return arrays if lse is None else {**arrays, "lse": lse}



def backward_arrays(call: Call, **arrays: Any) -> dict[str, Any]:
    """Arrays of a backward by field name; those that are None are left out."""
    given = {"q": call.q, "k": call.k, "v": call.v, **call.operands, **arrays}
    return {name: array for name, array in given.items() if array is not None}


def movable(array: Any) -> Any:
    """The array itself, or a copy where its elements do not lie on multiples of their size."""
    itemsize = array.dtype.itemsize
    if address(array) % itemsize or any(s % itemsize for n, s in zip(array.shape, array.strides, strict=True) if n > 1):
        return array.copy()
    return array


# ---- running on the device ----------------------------------------------------------------------------------------------
def device_of(array: Any) -> Device:
    """The device that a CuPy array lies on."""
    return _device(int(array.device.id))


@lru_cache(maxsize=None)
def _device(index: int) -> Device:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(index)
    return Device(
        capability=10 * properties["major"] + properties["minor"],
        shared_limit=properties["sharedMemPerBlockOptin"],
        name=properties["name"].decode(),
        index=index,
        multiprocessors=properties["multiProcessorCount"],
    )


def run(plan: Plan, pointers: Mapping[str, int]) -> None:
    """Launch the steps on the current stream of the plan's device, which must be the current device."""
    import cupy

    from cuflash import jit

    if not plan.kernels:
        plan.kernels.extend(jit.load(s.variant, plan.device.index) for s in plan.steps if s.blocks)
    record = plan.arguments(pointers)
    buffer = (ctypes.c_char * len(record)).from_buffer(record)
    parameters = ctypes.c_void_p(ctypes.addressof(buffer))  # the driver copies the record during the call
    stream = cupy.cuda.get_current_stream().ptr
    launches = (s for s in plan.steps if s.blocks)
    for step, kernel in zip(launches, plan.kernels, strict=True):
        shared_bytes = step.config.shared_bytes(ITEMSIZE[step.variant.dtype])
        cupy.cuda.driver.launchKernel(
            kernel.function, step.blocks, 1, 1, step.config.threads, 1, 1, shared_bytes, stream,
            ctypes.addressof(parameters), 0,
        )  # fmt: skip


def forward(call: Call, out: Any = None, with_lse: bool = False, requested: str | None = None) -> tuple[Any, Any]:
    """Run the forward of CuPy arrays; lse is None unless asked for."""
    import cupy

    problem = call.problem
    with cupy.cuda.Device(call.q.device.id):
        if out is None:
            out = empty_in_layout(problem.out_shape, problem.layout, call.q.dtype)
        lse = cupy.empty(problem.lse_shape, problem.accumulator) if with_lse else None
        arrays = {name: movable(x) for name, x in forward_arrays(call, out, lse).items()}
        plan = plan_forward(problem, device_of(call.q), places_of(problem, arrays), requested)
        run(plan, pointers_of(arrays))
    return out, lse


def backward(
    call: Call,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any = None,
    deterministic: bool | None = None,
    requested: str | None = None,
) -> Any:
    """Run the backward of CuPy arrays."""
    import cupy

    problem = call.problem
    with cupy.cuda.Device(call.q.device.id):
        gradients = {
            f"d{name}": empty_in_layout(x.shape, problem.layout, x.dtype)
            for name, x in (("q", call.q), ("k", call.k), ("v", call.v))
        }
        sums = {
            f"d{name}": cupy.zeros(call.operands[name].shape, problem.accumulator)
            for name in differentiable_operands(problem.modifiers)
        }
        arrays = {
            name: movable(x)
            for name, x in backward_arrays(call, out=out, lse=lse, dout=dout, dlse=dlse, **gradients, **sums).items()
        }
        places = places_of(problem, arrays)
        plan = plan_backward(problem, device_of(call.q), places, bool(deterministic), requested)
        workspace = {
            "statistics": cupy.empty(plan.statistics_bytes, cupy.uint8),
            "dq_sum": cupy.empty(plan.dq_sum_bytes, cupy.uint8),
        }
        run(plan, pointers_of({**arrays, **workspace}))
        operands = [sums[name].astype(call.operands[name[1:]].dtype, copy=False) for name in sums]
    return gradients_type(tuple(name[1:] for name in sums))(*gradients.values(), *operands)


def empty_in_layout(shape: tuple[int, ...], layout: str, dtype: Any) -> Any:
    """New CuPy array with the axes (*batch, heads, seq, dim), contiguous in the caller's layout."""
    import cupy

    if layout == "bhsd":
        return cupy.empty(shape, dtype)
    *batch, heads, seq, dim = shape
    return cupy.empty((*batch, seq, heads, dim), dtype).swapaxes(-3, -2)


# ---- explaining ---------------------------------------------------------------------------------------------------------
def explain(call: Call, requested: str | None = None) -> Explanation:
    """What the forward of a call would run, with the compiled kernel's registers."""
    raise NotImplementedError
