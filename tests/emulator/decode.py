"""Decode calls in the emulator: the plan's own launch, on arrays whose surroundings are guarded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash import decode_plan
from cuflash.backends import Device, described_device
from cuflash.problem import canonical
from tests.decode_cases import DecodeCase, Made

from .build import EmulatorError
from .kernels import SEEDS, Memory, Run, execute, movable, poison


def device_of(arch: int, multiprocessors: int = 8) -> Device:
    """A device of few multiprocessors, which still cut a list of a few dozen blocks of keys."""
    return replace(described_device(arch), multiprocessors=multiprocessors)


def decode(
    made: Made, device: Device, seed: int = 0, *, with_lse: bool = True, launches: int = 1, **options: Any
) -> tuple[Any, Any, decode_plan.DecodePlan]:
    """Output and log-sum-exp (or None) of a call, and its plan; the caches are checked when it has run."""
    run, memory = Run(seed=seed, **options), Memory()
    call = made.call()
    problem, layout = call.problem, call.problem.layout
    appends = bool(call.decode.seq_new)
    arrays = {}
    for name in ("q", "k", "v", "lengths", "page_table", "k_new", "v_new"):
        x = getattr(call, name)
        if x is None:
            continue
        written = appends and name in ("k", "v")
        arrays[name] = memory.like(movable(x), name)[0] if written else memory.input(movable(x), name)
    operands = {name: memory.input(x, name) for name, x in call.operands.items()}
    call = replace(call, operands=operands, **arrays)
    out = memory.output(problem.out_shape, call.q.dtype, "out", layout, run.place)
    lse = memory.output(problem.lse_shape, problem.accumulator, "lse") if with_lse else None
    arrays = decode_plan.decode_arrays(call, out, lse)
    places = decode_plan.places_of(call, arrays)
    plan = decode_plan.plan_decode.__wrapped__(call.decode, device, places, run.requested)
    workspace = {name: memory.like(poison((n,), np.uint8), name)[0] for name, n in plan.workspace().items()}
    workspace["arrivals"][...] = 0
    before = {name: arrays[name].copy() for name in ("k", "v")} if appends else {}
    results = []
    for _ in range(launches):
        out[...] = poison((), out.dtype)
        for name, x in before.items():
            arrays[name][...] = x
        execute(plan, {**arrays, **workspace}, run)
        results.append(out.tobytes())
        if workspace["arrivals"].any():
            raise EmulatorError(f"arrivals were left at {workspace['arrivals'].view(np.uint32)}: the next launch fails")
        assert results[-1] == results[0], f"launch {len(results)} of {made.case} differs from the first"
    memory.check()
    made.check_caches(canonical(call.k, layout), canonical(call.v, layout))
    return out.copy(), None if lse is None else lse.copy(), plan


def check(case: DecodeCase, device: Device | int, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    """Run a case under each schedule and judge its results; equal calls must give equal bits."""
    made, first = case.make(), None
    for seed in seeds:
        found = decode(made, device_of(device) if isinstance(device, int) else device, seed, **options)
        made.check(*found[:2])
        bits = [x.view(f"u{x.dtype.itemsize}") for x in found[:2] if x is not None]
        first = bits if first is None else first
        for x, y in zip(bits, first, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"seed {seed} of {case} differs")
