"""Whole calls in the emulator: the plan's own steps, on arrays whose surroundings are guarded.

Inputs keep their strides and their place relative to 16 bytes, and may not be written; what lies between their elements
reads as NaN.  Outputs and workspace start as NaN, and nothing around or between their elements may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash import abi, source
from cuflash import plan as planning
from cuflash.api import statistics_shapes
from cuflash.arrays import named_dtype
from cuflash.backends import Device, described_device
from cuflash.gradients import gradient_sums, gradient_terms, gradients_type, may_be_rounded, numbers_of
from cuflash.modifiers.base import sum_to
from cuflash.plan import Plan
from cuflash.problem import Call
from cuflash.variant import ITEMSIZE, Variant
from tests.cases import Case
from tests.tolerance import Expectation

from .build import EmulatorError
from .guards import FILL, GuardedBuffer, check_guards, guarded
from .host import EmulatedKernel

Place = Callable[[np.ndarray], np.ndarray]


def contiguous(x: np.ndarray) -> np.ndarray:
    """The same array: the place of an output that the library allocates."""
    return x


@lru_cache(maxsize=64)
def kernel(text: str, entry: str, arch: int, sanitize: bool) -> EmulatedKernel:
    """A built kernel, kept for a while: resident blocks are forks, which copy the mappings of every loaded library."""
    return EmulatedKernel(text, entry, sanitize, arch=arch)


@dataclass
class Memory:
    """The guarded arrays of one call."""

    outputs: list[tuple[np.ndarray, GuardedBuffer]] = field(default_factory=list)
    buffers: list[GuardedBuffer] = field(default_factory=list)

    def like(self, values: np.ndarray, name: str) -> tuple[np.ndarray, GuardedBuffer]:
        """Array of the same strides, place relative to 16 bytes and values; NaN between its elements."""
        if not values.size:
            return values, guarded(0, np.uint8, name)[1]
        low, high = np.lib.array_utils.byte_bounds(values)
        shift = low % 16
        memory, buffer = guarded(shift + high - low, np.uint8, name)
        self.buffers.append(buffer)
        array = np.ndarray(values.shape, values.dtype, memory.data, shift + address(values) - low, values.strides)
        array[...] = values
        return array, buffer

    def input(self, values: np.ndarray, name: str) -> np.ndarray:
        """Copy that nobody may write."""
        array, buffer = self.like(values, name)
        buffer.protect()
        return array

    def output(self, shape: tuple[int, ...], dtype: Any, name: str, layout: str = "bhsd", place: Place = contiguous):
        """Array of NaN with the axes (*batch, heads, seq, dim), contiguous in the layout unless placed otherwise."""
        if layout == "bshd":
            *batch, heads, seq, dim = shape
            values = place(poison((*batch, seq, heads, dim), dtype)).swapaxes(-3, -2)
        else:
            values = place(poison(shape, dtype))
        array, buffer = self.like(values, name)
        self.outputs.append((array, buffer))
        return array

    def sums(self, shape: tuple[int, ...], dtype: Any, name: str) -> np.ndarray:
        """Array of zeros that kernels add to."""
        array, _ = self.like(np.zeros(shape, dtype), name)
        return array

    def check(self) -> None:
        """EmulatorError when a kernel wrote around an array or between the elements of an output."""
        check_guards(*self.buffers)
        for array, buffer in self.outputs:
            if not array.size:
                continue
            untouched = buffer.bytes.copy()
            start = address(array) - buffer.start
            np.ndarray(array.shape, array.dtype, untouched.data, start, array.strides).view()[...] = poison(
                (), array.dtype
            )
            if (untouched != FILL).any():
                at = int(np.flatnonzero(untouched != FILL)[0])
                raise EmulatorError(f"written between the elements of array '{buffer.name}', at byte offset {at}")


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def movable(array: np.ndarray) -> np.ndarray:
    """The array itself, or a copy where its elements do not lie on multiples of their size: no kernel is given such."""
    return array if array.flags.aligned else array.copy()


def poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Array whose bytes are those of untouched guarded memory."""
    dtype = np.dtype(dtype)
    return np.full((*shape, dtype.itemsize), FILL, np.uint8).view(dtype)[..., 0]


@dataclass(frozen=True)
class Run:
    """How to run: schedule seed, undefined-behaviour checks, blocks at once, where outputs lie, the text of a variant.

    `watch` is given the arrays of a call by field name when it has run, its workspace among them; kernels of `without` are
    left out.
    """

    seed: int = 0
    sanitize: bool = False
    requested: str | None = None
    deterministic: bool = False
    residents: int = 1
    place: Place = contiguous
    text: Callable[[Variant], str] = source.build
    watch: Callable[[Mapping[str, np.ndarray]], None] | None = None
    without: tuple[str, ...] = ()
    rounded: bool = True  # sums that kernels can round, as the library has them


def execute(plan: Plan, arrays: Mapping[str, np.ndarray], run: Run, call: Call | None = None) -> None:
    """Launch the steps of a plan one after the other; a call may have numbers beside its arrays."""
    for name, (begin, size) in plan.zeroed.items():
        arrays[name][begin : begin + size] = 0
    pointers = planning.arguments_of(call, arrays) if call else planning.pointers_of(arrays)
    for step in plan.steps:
        if not step.blocks or step.variant.kernel in run.without:
            continue
        variant = step.variant
        built = kernel(run.text(variant), variant.entry, plan.device.capability, run.sanitize)
        shared_bytes = step.config.shared_bytes(ITEMSIZE[variant.dtype])
        record = bytes(plan.arguments(pointers, built.encode))[: step.argument_bytes]
        # Blocks of these kernels wait for no other and add to nothing: it is the order they run in that could show.
        alone = variant.kernel.startswith(("backward_delta", "backward_convert", "backward_sums", "hvp_delta"))
        residents = 1 if alone else min(run.residents, step.blocks)
        built.launch((step.blocks,), step.config.threads, record, shared_bytes, run.seed, residents=residents)


def guarded_call(call: Call, memory: Memory) -> Call:
    """The call with its arrays in guarded memory."""
    arrays = {n: memory.input(movable(getattr(call, n)), n) for n in ("q", "k", "v")}
    operands = {n: memory.input(movable(x), n) for n, x in call.operands.items()}
    return replace(call, **arrays, operands=operands)


def forward(
    call: Call, device: Device | int, seed: int = 0, *, with_lse: bool = True, **options: Any
) -> tuple[Any, Any]:
    """Output and log-sum-exp (or None) of one call.

    Parameters
    ----------
    call
        A `cuflash.problem.Call` of NumPy arrays.
    device
        A `Device`, or a compute capability (80).
    seed
        Of the emulator's schedule; at least 6 different ones make a test.
    with_lse
        False passes no array for the log-sum-exp.
    options
        Other fields of `Run`.

    Raises
    ------
    EmulatorError
        A kernel broke a rule, or wrote where it may not.
    """
    return run_forward(call, device, seed, with_lse, (), options)[:2]


def statistics(
    call: Call, device: Device | int, seed: int = 0, names: Iterable[str] = abi.STATISTICS, **options: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Output, log-sum-exp, and statistics by name of one call; the rest is as in `forward`."""
    return run_forward(call, device, seed, True, tuple(names), options)


def run_forward(
    call: Call, device: Device | int, seed: int, with_lse: bool, names: tuple[str, ...], options: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """The steps of a forward with the statistics of these names."""
    run, memory = Run(seed=seed, **options), Memory()
    problem, device = call.problem, described_device(device) if isinstance(device, int) else device
    call = guarded_call(call, memory)
    shapes = statistics_shapes(problem)
    asked = {name: memory.output(shapes[name], problem.accumulator, name) for name in names}
    out = memory.output(problem.out_shape, named_dtype(problem.out_dtype), "out", problem.layout, run.place)
    lse = memory.output(problem.lse_shape, problem.accumulator, "lse") if with_lse else None
    arrays = planning.forward_arrays(call, out, lse, **asked)
    places = planning.places_of(problem, arrays)
    plan = planning.plan_forward.__wrapped__(problem, device, places, run.requested)
    arrays |= {name: memory.like(poison((n,), np.uint8), name)[0] for name, n in plan.workspace().items()}
    counter = memory.like(np.zeros(2, np.uint32), "tile_counter")[0]
    if "tile_counter" in plan.offsets and seed % 2:  # tiles are given out, else shared out beforehand
        arrays["tile_counter"] = counter
    arrays |= {name: memory.like(poison((n,), np.uint8), name)[0] for name, n in plan.workspace().items()}
    execute(plan, arrays, run, call)
    memory.check()
    if run.watch is not None:
        run.watch(arrays)
    if counter.any():
        raise EmulatorError(f"the tile counter was left at {counter}; the next launch would begin there")
    return out.copy(), None if lse is None else lse.copy(), {name: x.copy() for name, x in asked.items()}


def jvp(
    call: Call, tangents: Mapping[str, np.ndarray], device: Device | int, seed: int = 0, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """Output, its tangent, log-sum-exp and its tangent of one call, for tangents by name; the rest is as in `forward`."""
    run, memory = Run(seed=seed, **options), Memory()
    problem, device = call.problem, described_device(device) if isinstance(device, int) else device
    call = guarded_call(call, memory)
    tangents = {name: memory.input(movable(x), f"{name}_tangent") for name, x in tangents.items()}
    results = {
        name: memory.output(problem.out_shape, call.q.dtype, name, problem.layout, run.place)
        for name in ("out", "out_tangent")
    }
    results |= {name: memory.output(problem.lse_shape, problem.accumulator, name) for name in ("lse", "lse_tangent")}
    arrays = planning.jvp_arrays(call, tangents, **results)
    plan = planning.plan_jvp.__wrapped__(problem, device, planning.places_of(problem, arrays), run.requested)
    workspace = {name: memory.like(poison((n,), np.uint8), name)[0] for name, n in plan.workspace().items()}
    execute(plan, {**arrays, **workspace}, run, call)
    memory.check()
    return tuple(x.copy() for x in results.values())  # type: ignore[return-value]


def hvp(
    call: Call,
    dout: Any,
    dlse: Any,
    tangents: Mapping[str, np.ndarray],
    device: Device | int,
    seed: int = 0,
    results: tuple[Any, Any, Any, Any] | None = None,
    **options: Any,
) -> Any:
    """Tangents of the gradients of one call; `results` are those of `jvp`, which is run where they are not given."""
    run, memory = Run(seed=seed, **options), Memory()
    problem, device = call.problem, described_device(device) if isinstance(device, int) else device
    of_inputs = {name: x for name, x in tangents.items() if name not in ("dout", "dlse")}
    results = results or jvp(call, of_inputs, device, seed)
    call = guarded_call(call, memory)
    given = dict(zip(("out", "out_tangent", "lse", "lse_tangent"), results, strict=True)) | {"dout": dout}
    given |= {} if dlse is None else {"dlse": dlse}
    given = {name: memory.input(movable(x), name) for name, x in given.items()}
    tangents = {name: memory.input(movable(x), f"{name}_tangent") for name, x in tangents.items()}
    terms = gradient_terms(problem, call.operands)
    products = {
        f"d{name}": memory.output(x.shape, x.dtype, f"d{name}", problem.layout, run.place)
        for name, x in (("q", call.q), ("k", call.k), ("v", call.v))
    }
    sums = {f"d{name}": memory.sums(shape, problem.accumulator, f"d{name}") for name, shape in terms.items()}
    arrays = planning.hvp_arrays(call, tangents, **given, **products, **sums)
    plan = planning.plan_hvp.__wrapped__(problem, device, planning.places_of(problem, arrays), run.requested)
    workspace = {name: memory.like(poison((n,), np.uint8), name)[0] for name, n in plan.workspace().items()}
    execute(plan, {**arrays, **workspace}, run, call)
    memory.check()
    operands = [sum_to(sums[f"d{n}"], call.operands[n].shape).astype(call.operands[n].dtype) for n in terms]
    return gradients_type(tuple(terms))(*(x.copy() for x in products.values()), *operands)


def backward(
    call: Call, out: Any, lse: Any, dout: Any, dlse: Any, device: Device | int, seed: int = 0, **options: Any
) -> Any:
    """Gradients of one call: a named tuple (dq, dk, dv, then those of operands), the last ones from sums in the accumulator's dtype.

    Parameters
    ----------
    out, lse, dout, dlse
        NumPy arrays with the axes (*batch, heads_q, seq_q, ...); dlse may be None.
    call, device, seed, options
        As in `forward`.

    Raises
    ------
    EmulatorError
        A kernel broke a rule, or wrote where it may not.
    """
    run, memory = Run(seed=seed, **options), Memory()
    problem, device = call.problem, described_device(device) if isinstance(device, int) else device
    call = guarded_call(call, memory)
    given = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    given = {n: memory.input(movable(x), n) for n, x in given.items() if x is not None}
    rounded = run.rounded and may_be_rounded(problem)
    terms = gradient_sums(problem, call.operands, run.deterministic, rounded)
    gradients = {
        f"d{name}": memory.output(x.shape, x.dtype, f"d{name}", problem.layout, run.place)
        for name, x in (("q", call.q), ("k", call.k), ("v", call.v))
    }
    sums = {f"d{name}": memory.sums(*of, f"d{name}") for name, of in terms.items()}
    arrays = planning.backward_arrays(call, **given, **gradients, **sums)
    places = planning.places_of(problem, arrays)
    # Blocks that run at once have a multiprocessor each, those that stay, too.
    device = replace(device, multiprocessors=max(device.multiprocessors, run.residents))
    plan = planning.plan_backward.__wrapped__(problem, device, places, run.deterministic, run.requested)
    for name in plan.widened:
        of = gradient_sums(problem, call.operands, run.deterministic)[name]
        sums[f"d{name}"] = arrays[f"d{name}"] = memory.sums(*of, f"d{name}")
    for name in plan.overwritten:
        sums[name][...] = poison((), sums[name].dtype)
    workspace = {name: memory.like(poison((n,), np.uint8), name)[0] for name, n in plan.workspace().items()}
    execute(plan, {**arrays, **workspace}, run, call)
    memory.check()
    if run.watch is not None:
        run.watch({**arrays, **workspace})
    found = {n: numbers_of(sums[f"d{n}"], problem) for n in terms}
    operands = [sum_to(found[n], call.operands[n].shape).astype(call.operands[n].dtype) for n in terms]
    return gradients_type(tuple(terms))(*(x.copy() for x in gradients.values()), *operands)


# ---- checking ------------------------------------------------------------------------------------------------------------
SEEDS = range(6)  # every pace of asynchronous work


def check(case: Case, device: Device | int, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    """Run a case forward and backward under each schedule and judge the results by the project's tolerance.

    The backward is given the forward's own output and log-sum-exp; `with_backward=False` leaves it out.
    """
    call, dout, dlse = case.call()
    check_call(call, dout, dlse, device, seeds, **options)


def check_call(
    call: Call,
    dout: Any,
    dlse: Any,
    device: Device | int,
    seeds: Iterable[int] = SEEDS,
    *,
    with_backward: bool = True,
    **options: Any,
) -> None:
    """The same for a call."""
    expectation = Expectation(call, *((dout, dlse) if with_backward else ()))
    for seed in seeds:
        out, lse = forward(call, device, seed, **options)
        expectation.check_forward(out, lse)
        if not with_backward:
            continue
        gradients = backward(call, out, lse, dout, dlse, device, seed, **options)
        expectation.check_backward(gradients)
