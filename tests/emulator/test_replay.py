"""Repeated calls with stand-ins for CuPy: replayed ones have the bits of the first, and what must be refused is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import source
from cuflash.gradients import gradients_type
from cuflash.problem import canonical
from tests.cases import Case
from tests.emulator.kernels import kernel
from tests.tolerance import Expectation

pytest.importorskip("cupy")

from tests import machine as machines
from tests.machine import Launched, Machine, Tensor, array

CASE = Case("replay", "bfloat16", head_dim=64, causal=True)


def run(launched: Launched) -> None:
    """One launch in the emulator."""
    built = kernel(source.build(launched.variant), launched.variant.entry, 80, False)
    built.launch((launched.blocks,), launched.threads, launched.record, launched.shared_bytes)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with machines.machine(80, run) as found:
        yield found


def same(got: Any, want: Any) -> None:
    assert [np.asarray(x).tobytes() for x in got] == [np.asarray(x).tobytes() for x in want]


@pytest.mark.parametrize("kind", [array, lambda x: Tensor(array(x))], ids=["cupy", "library"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_replayed_calls_have_the_bits_of_the_first(machine: Machine, kind: Any, layout: str) -> None:
    case = Case("replay", "bfloat16", head_dim=64, causal=True, layout=layout)
    made = [case.make(seed) for seed in range(3)]
    call, dout, _ = case.call(0)

    def step(x: dict[str, Any]) -> list[np.ndarray]:
        given = {name: kind(x[name]) for name in ("q", "k", "v", "dout")}
        dout = given.pop("dout")
        out, lse, vjp = cuflash.attention_vjp(**given, **x["options"], return_lse=True, deterministic=True)
        assert type(out) is type(dout)
        results = [out, lse, *vjp(dout)]
        return [np.array(getattr(y, "values", y)) for y in results]

    results = [step(made[i]) for i in (0, 1, 2)]
    assert machine.planned == 2  # the first call's forward and backward
    same(step(made[0]), results[0])
    assert machine.planned == 2
    assert (results[1][0] != results[2][0]).any()
    out, lse, *gradients = results[0]
    Expectation(call).check_forward(canonical(out, layout), lse)
    Expectation(call, dout).check_backward(gradients_type()(*(canonical(x, layout) for x in gradients)))
