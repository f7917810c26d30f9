"""`python -m cuflash explain`: how a call would be computed, here or on a GPU that is only described."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import cuflash
from cuflash import plan, problem
from cuflash.backends import described_device
from cuflash.cli import text
from cuflash.cli.machine import array_library, this_machine
from cuflash.cli.measure import Clock
from cuflash.cli.shape import Shape, host_dtype
from cuflash.errors import ArgumentError
from cuflash.variant import ITEMSIZE


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation."""
    options = {name: getattr(arguments, name) for name in ("causal", "window", "softcap", "scale")}
    options["backend"] = arguments.backend
    if arguments.capability is None:
        xp = array_library(this_machine())
        q, k, v, _ = empty(xp, arguments.shape, arguments.dtype)
        explained = cuflash.explain(q, k, v, **options)
        print(explained)
        if arguments.measure:
            print(measured(xp, arguments.shape, arguments.dtype, options, explained.floor_ms))
    elif arguments.measure:
        raise ArgumentError(f"--measure: a GPU of capability {arguments.capability} is only described; leave out one")
    else:
        del options["backend"]
        print(described(arguments.shape, arguments.dtype, arguments.capability, arguments.backend, options))
    return 0


def measured(xp: Any, shape: Shape, dtype: str, options: dict[str, Any], floor_ms: float | None) -> str:
    """How long the forward takes, and which share of that would be needed at best."""
    q, k, v = (xp.asarray(x) for x in shape.arrays(dtype)[:3])
    ms = Clock(xp).milliseconds(lambda: cuflash.attention(q, k, v, **options))
    share = f", of which {floor_ms / ms:.0%} are the floor" if floor_ms else ""
    return f"{'measured:':<11}{ms:.4g} ms{share}"


def empty(xp: Any, shape: Shape, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Arrays q, k, v and out that hold nothing."""
    q, k, v, out = (xp.empty(sizes, host_dtype(dtype)) for sizes in (shape.q, shape.k, shape.v, shape.out))
    return q, k, v, out


def described(shape: Shape, dtype: str, capability: int, backend: str | None, options: dict[str, Any]) -> str:
    """Both directions on a GPU of that compute capability, planned without one and not compiled."""
    device = described_device(capability)
    q, k, v, out = empty(np, shape, dtype)
    call = problem.describe(q, k, v, **options)
    lse = np.empty(call.problem.lse_shape, call.problem.accumulator)
    forward = plan.plan_forward(
        call.problem, device, plan.places_of(call.problem, plan.forward_arrays(call, out, lse)), backend
    )
    saved = {"out": out, "lse": lse, "dout": out, "dq": q, "dk": k, "dv": v}
    backward = plan.plan_backward(
        call.problem, device, plan.places_of(call.problem, plan.backward_arrays(call, **saved)), False, backend
    )
    facts = [("backend", forward.backend), ("problem", str(call.problem)), ("device", str(device))]
    kernels = [
        (
            step.variant.entry,
            tile(step.config),
            blocks(step, call.problem),
            f"{step.config.threads}",
            text.size(step.config.shared_bytes(ITEMSIZE[step.variant.dtype])),
        )
        for planned in (forward, backward)
        for step in planned.steps
    ]
    workspace = sum(backward.workspace().values())
    return "\n".join(
        [
            text.facts([*facts, *((f"not {name}", why) for name, why in forward.reasons.items())]),
            f"\n{text.table(('kernel', 'queries x keys', 'blocks', 'threads', 'shared memory'), kernels, indent='')}",
            f"\nworkspace of the backward: {text.size(workspace)}",
        ]
    )


def blocks(step: plan.Step, described: problem.Problem) -> str:
    """Blocks of the grid, or the tiles that are given out to as many blocks as a device holds."""
    return f"{step.config.blocks(described)} tiles" if getattr(step.config, "persistent", False) else f"{step.blocks}"


def tile(config: Any) -> str:
    """Queries and keys of one step of a kernel that has both."""
    sizes = (getattr(config, "block_q", None), getattr(config, "block_k", None))
    return " x ".join(map(str, sizes)) if None not in sizes else ""
