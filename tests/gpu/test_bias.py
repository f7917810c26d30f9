"""A bias of every broadcast shape on the device, forward and backward."""

from __future__ import annotations

from itertools import product

import pytest

import cuflash
from tests.cases import Case
from tests.gpu.device import KINDS, Device, Kind, check
from tests.tolerance import Expectation

#: those that bring a bias ahead of use; in a dry run another one
HOPPER = [x for x in KINDS if x.backend == "wgmma" and x.dtype != "float32"] or KINDS[:1]
PATTERNS = ["".join(axes) for axes in product("b1", "h1", "q1", "k1")]


@pytest.mark.parametrize(
    ("pattern", "head_dim"), [*product(PATTERNS, (64, 128)), *product(("1111", "b11k", "1hqk"), (136,))]
)
def test_patterns(device: Device, kind: Kind, pattern: str, head_dim: int) -> None:
    """As exact with sums that repeat as without, and three times the same bits."""
    case = Case(
        "bias", kind.dtype, heads_q=4, heads_k=2, seq_q=200, seq_k=330, head_dim=head_dim, bias=pattern, dlse=True
    )
    made, (call, dout, dlse) = case.make(), case.call()
    expectation = Expectation(call, dout, dlse)
    q, k, v = (device.put(made[x]) for x in "qkv")
    bias = device.put(made["options"]["bias"])
    out, lse = cuflash.attention(q, k, v, bias=bias, return_lse=True, backend=kind.backend)
    expectation.check_forward(device.get(out), device.get(lse))
    given, options = (device.put(dout), q, k, v, out, lse), {"dlse": device.put(dlse), "bias": bias}
    results = []
    for deterministic in (False, True, True, True):
        found = cuflash.attention_backward(*given, deterministic=deterministic, backend=kind.backend, **options)
        assert found.dbias.shape == bias.shape
        results.append(type(found)(*map(device.get, found)))
    for gradients in results[:2]:
        expectation.check_backward(gradients)
    assert len({b"".join(x.tobytes() for x in gradients) for gradients in results[1:]}) == 1
    device.check_inputs()


@pytest.mark.parametrize("kind", HOPPER, ids=str, indirect=True)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 60), "sinks": "h"}], ids=str)
@pytest.mark.parametrize(
    ("pattern", "head_dim"), [*product(PATTERNS, (64, 128)), *product(("bhqk", "b11k", "1hq1"), (192, 256))]
)
def test_rows_of_whole_pieces(
    device: Device, kind: Kind, pattern: str, head_dim: int, options: dict[str, object]
) -> None:
    """Which Hopper's kernels bring ahead of use, and take the gradients of from shared memory."""
    sizes = {"heads_q": 4, "heads_k": 2, "seq_q": 300, "seq_k": 392, "head_dim": head_dim}
    check(device, kind, Case("pieces", kind.dtype, bias=pattern, dlse=True, **sizes, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
def test_a_gradient_takes_no_more_than_the_bias(deterministic: bool) -> None:
    """Of one row of numbers, for scores that would take 64 MiB in float32."""
    import cupy

    x = cupy.ones((1, 1, 4096, 64), cupy.float16)
    bias = cupy.zeros((1, 1, 1, 4096), cupy.float16)
    out, lse = cuflash.attention(x, x, x, bias=bias, return_lse=True)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    cuflash.attention_backward(out, x, x, x, out, lse, bias=bias, deterministic=deterministic)
    assert pool.total_bytes() - before < 4096 * 4096
