"""Cases computed by `cuflash.jax` inside one compiled program, forward and backward, and judged as every backend is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from cuflash.gradients import gradients_type
from cuflash.jax import attention
from tests.cases import OPTIONS, Case
from tests.tolerance import Expectation

#: the options that JAX's function takes
TRACED = {
    name: options
    for name, options in OPTIONS.items()
    if not options.keys() & {"alibi", "lengths", "documents", "blocks"}
}


@contextmanager
def float64() -> Iterator[None]:
    """JAX's mode in which arrays may be float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def step(made: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Output, lse and gradients by name of a case's arrays, from one compiled program."""
    options = {**made["options"], **more}
    mask, bias = options.pop("mask"), options.pop("bias")
    assert not options.pop("modifiers")

    @jax.jit
    def program(q: Any, k: Any, v: Any, mask: Any, bias: Any, dout: Any, dlse: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return attention(q, k, v, mask=mask, bias=bias, return_lse=True, **options)

        (out, lse), vjp = jax.vjp(forward, q, k, v, bias)
        dlse = jax.numpy.zeros_like(lse) if dlse is None else dlse
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dbias"), vjp((dout, dlse)), strict=True))}

    arrays = (None if x is None else np.ascontiguousarray(x) for x in (made["q"], made["k"], made["v"], mask, bias))
    return program(*arrays, made["dout"], made["dlse"])  # type: ignore[no-any-return]


def check(case: Case, seed: int = 0, **more: Any) -> float:
    """Run a case forward and backward and judge all results; the largest error in units of what is allowed."""
    if case.dtype == "float64" and not jax.config.jax_enable_x64:
        with float64():
            return check(case, seed, **more)
    found = {name: None if x is None else np.asarray(x) for name, x in step(case.make(seed), **more).items()}
    call, dout, dlse = case.call(seed)
    swapped = (lambda x: x.swapaxes(-3, -2)) if case.layout == "bshd" else (lambda x: x)
    names = ("bias",) if case.bias else ()
    gradients = gradients_type(names)(
        *(swapped(found[name]) for name in ("dq", "dk", "dv")),
        *(found[f"d{name}"].reshape(call.operands[name].shape) for name in names),
    )
    expectation = Expectation(call, dout, dlse)
    ratio = expectation.check_forward(swapped(found["out"]), found["lse"])
    return max(ratio, expectation.check_backward(gradients))
