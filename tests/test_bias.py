"""A bias of every broadcast shape: values, gradients and memory, on the host and in the plans for GPUs."""

from __future__ import annotations

import tracemalloc
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import UnsupportedError, plan, problem, reference
from cuflash.backends import described_device
from cuflash.gradients import gradient_sums
from tests.cases import Case
from tests.test_reference import central_difference
from tests.tolerance import Expectation

PATTERNS = ["".join(axes) for axes in product("b1", "h1", "q1", "k1")]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, dtype: str) -> None:
    """On the host, forward and backward."""
    case = Case("bias", dtype, heads_q=4, heads_k=2, seq_q=37, seq_k=50, bias=pattern, dlse=True)
    made, (call, dout, dlse) = case.make(), case.call()
    expectation = Expectation(call, dout, dlse)
    q, k, v, bias = made["q"], made["k"], made["v"], made["options"]["bias"]
    out, lse, vjp = cuflash.attention_vjp(q, k, v, bias=bias, return_lse=True)
    expectation.check_forward(out, lse)
    gradients = vjp(dout, dlse)
    expectation.check_backward(gradients)
    assert (gradients.dbias.shape, gradients.dbias.dtype) == (bias.shape, bias.dtype)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_derivatives_by_finite_differences(pattern: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.standard_normal((2, 2, n, 2)) for n in (3, 4, 4, 3))
    sizes = [1 if x == "1" else n for x, n in zip(pattern, (2, 2, 3, 4), strict=True)]
    bias = rng.standard_normal(sizes)

    def loss(x: np.ndarray) -> Any:
        return np.vdot(g, reference.forward(problem.describe(q, k, v, bias=x))[0])

    found = reference.backward(problem.describe(q, k, v, bias=bias), g).dbias
    np.testing.assert_allclose(found, central_difference(loss, bias, 1e-4), atol=1e-8)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
def test_sums_on_a_gpu_have_the_size_of_the_bias(pattern: str, deterministic: bool) -> None:
    """Times two words where they have to repeat; and whatever its shape, the workspace is that of a call without one."""
    spaces = []
    for bias in (None, pattern):
        call, dout, _ = Case("bias", "bfloat16", seq_q=300, seq_k=280, bias=bias).call()
        shapes = gradient_sums(call.problem, call.operands, deterministic)
        sums = {f"d{n}": np.zeros(*of) for n, of in shapes.items()}
        for name, x in call.operands.items():
            is_whole = x.shape == call.problem.score_shape  # of single terms, in the type of the result
            is_sum = deterministic and not is_whole
            assert sums[f"d{name}"].nbytes == x.size * (16 if is_sum else 2 if is_whole else 4)
        lse = np.zeros(call.problem.lse_shape, np.float32)
        found = plan.backward_arrays(call, out=dout, lse=lse, dout=dout, dq=call.q, dk=call.k, dv=call.v, **sums)
        places = plan.places_of(call.problem, found)
        made = plan.plan_backward(call.problem, described_device(80), places, deterministic, requested="mma")
        spaces.append(made.workspace())
    assert spaces[1].pop("bounds", 0) in (0, 16 * 3)
    assert spaces[0] == spaces[1]


@pytest.mark.parametrize("pattern", ["111k", "11q1"])
def test_nothing_of_the_size_of_the_scores_is_made_on_the_host(pattern: str) -> None:
    case = Case("bias", "float32", batch=(2,), heads_q=1, heads_k=1, seq_q=1024, seq_k=1024, head_dim=8, bias=pattern)
    made = case.make()
    q, k, v = made["q"], made["k"], made["v"]
    out, vjp = cuflash.attention_vjp(q, k, v, bias=made["options"]["bias"])
    tracemalloc.start()
    try:
        vjp(out)
        assert tracemalloc.get_traced_memory()[1] < 2 * 1024 * 1024 * 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("strides", "axis"), [((1 << 31, 2), "queries"), ((4, -(1 << 31) - 2), "keys")])
def test_a_bias_that_lies_too_far_apart_is_refused(strides: tuple[int, int], axis: str) -> None:
    """Nothing of it is read: only its strides are looked at."""
    q = np.ones((1, 1, 2, 16), np.float32)
    far = np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (1, 1, 2, 2), (0, 0, *strides))
    call = problem.describe(q, q, q, bias=far)
    places = plan.places_of(call.problem, plan.forward_arrays(call, q, None))
    with pytest.raises(UnsupportedError, match=rf"^bias: neighbours along its axis of {axis} lie -?\d+ bytes apart"):
        plan.plan_forward(call.problem, described_device(75), places, "simt")
