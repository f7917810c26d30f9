"""FlashAttention-3 and FlashAttention-4 on the tensors that scripts/bench.py measures; each of them needs PyTorch.

FA3's forward comes from the wheel `fa3-fwd`, its backward from `flash-attn3-jax`, which runs under JAX; FA4 from `flash-attn-4`
with its compiler (`nvidia-cutlass-dsl`), which takes seconds for each kind of call:

    python scripts/peers.py HEAD_DIM HEAD_DIM_V HEADS_Q HEADS_K CAUSAL    # compile FA4 for such calls into its cache
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

Tensor = Any
Call = Callable[[], Any]
#: forward, backward, output and gradients; the calls' own results may have other axes
Peer = tuple[Call, Call | None, Tensor, tuple[Tensor, ...]]


def rows_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(batch, heads, seq, dim) as (batch, seq, heads, dim), and back."""
    return tuple(x.transpose(1, 2).contiguous() for x in tensors)


def first(result: Any) -> Any:
    """The output of a call that may return more."""
    return result[0] if isinstance(result, (tuple, list)) else result


def fa4(tensors: tuple[Tensor, ...], causal: bool) -> Peer:
    """FlashAttention-4, forward and backward."""
    import torch
    from flash_attn.cute.interface import flash_attn_func

    q, k, v, dout = rows_first(*tensors)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    saved = first(flash_attn_func(*leaves, causal=causal))

    def forward() -> Tensor:
        with torch.no_grad():
            return first(flash_attn_func(q, k, v, causal=causal))

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(saved, leaves, dout, retain_graph=True)  # type: ignore[no-any-return]

    return forward, backward, *results(forward(), backward())


def fa3(tensors: tuple[Tensor, ...], causal: bool) -> Peer:
    """FlashAttention-3: the forward by PyTorch, the backward under JAX where it has one for these head sizes."""
    import torch
    from fa3_fwd_interface import flash_attn_func

    q, k, v, dout = rows_first(*tensors)

    def forward() -> Tensor:
        with torch.no_grad():
            return first(flash_attn_func(q, k, v, causal=causal))

    out = forward()
    try:
        backward = fa3_backward(q, k, v, out, dout, causal)
        gradients = tuple(torch.from_dlpack(x) for x in backward())
    except Exception as failure:
        print(f"fa3 backward: {' '.join(str(failure).split())[:200]}", file=sys.stderr)
        return forward, None, *results(out, ())
    return forward, backward, *results(out, gradients)


def fa3_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, causal: bool) -> Call:
    """Its backward as a compiled JAX function of (batch, seq, heads, dim) arrays."""
    import cupy
    import jax
    from flash_attn3_jax.flash import _flash_mha_bwd

    import cuflash

    arrays = tuple(cupy.from_dlpack(x) for x in (q, k, v))
    lse = cuflash.attention(*arrays, causal=causal, layout="bshd", return_lse=True)[1]
    cupy.cuda.Device().synchronize()
    given = [jax.dlpack.from_dlpack(x) for x in (dout, q, k, v, out, lse)]
    scale = 1 / math.sqrt(q.shape[-1])
    compiled = jax.jit(lambda *x: _flash_mha_bwd(*x, scale, causal, (-1, -1)))
    jax.block_until_ready(compiled(*given))
    return lambda: compiled(*given)


# ---- packed sequences: q, k, v and dout are (total, heads, dim) ----
def fa3_packed(tensors: tuple[Tensor, ...], bounds: Tensor, longest: int, causal: bool) -> tuple[Call, None]:
    """FlashAttention-3's forward."""
    from fa3_fwd_interface import flash_attn_varlen_func

    def forward() -> Tensor:
        return first(flash_attn_varlen_func(*tensors[:3], bounds, bounds, longest, longest, causal=causal))

    return forward, None


def fa4_packed(tensors: tuple[Tensor, ...], bounds: Tensor, longest: int, causal: bool) -> tuple[Call, Call]:
    """FlashAttention-4, forward and backward."""
    import torch
    from flash_attn.cute.interface import flash_attn_varlen_func

    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
    saved = first(flash_attn_varlen_func(*leaves, causal=causal, **lengths))

    def forward() -> Tensor:
        with torch.no_grad():
            return first(flash_attn_varlen_func(*inputs, causal=causal, **lengths))

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(saved, leaves, dout, retain_graph=True)  # type: ignore[no-any-return]

    return forward, backward


# ---- decode: q is (batch, 1, heads_q, dim), the caches are (batch, seq_k, heads_k, dim) ----
def fa3_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Call:
    """FlashAttention-3's call for one new query."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    return lambda: first(flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths))


def results(out: Tensor, gradients: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """With the axes of cuflash's."""
    (out,) = rows_first(out)
    return out, rows_first(*gradients)


def main() -> None:
    import torch

    head_dim, head_dim_v, heads_q, heads_k, causal = map(int, sys.argv[1:])
    sizes = ((heads_q, head_dim), (heads_k, head_dim), (heads_k, head_dim_v), (heads_q, head_dim_v))
    tensors = tuple(torch.zeros((1, h, 1024, d), device="cuda", dtype=torch.bfloat16) for h, d in sizes)
    fa4(tensors, bool(causal))


if __name__ == "__main__":
    main()
