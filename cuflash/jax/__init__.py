"""`attention` as a function of JAX: under `jit`, `grad` and `vjp`, `vmap` and `shard_map`, on a GPU and on the host.

XLA calls cuflash in the middle of a compiled program, through its interface for foreign functions: nothing is built, and
on a GPU the kernels run on XLA's own stream.  Importing this imports JAX; cuflash itself does not.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import time
from dataclasses import replace
from typing import Any

import numpy as np

from cuflash.api import check_flag, order_of_sums
from cuflash.errors import ArgumentError
from cuflash.jax.calls import BACKWARD, FORWARD, HANDLERS, HOST, Options
from cuflash.jax.versions import jax, results, vary, varying
from cuflash.problem import describe, in_layout

__all__ = ["attention"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Any:
    """Exact attention softmax(scale · q kᵀ) v of JAX arrays, with its gradients, in memory linear in the lengths.

    Parameters
    ----------
    q
        (*batch, heads_q, seq_q, head_dim), float16, bfloat16, float32 or, in JAX's x64 mode, float64; any number of batch
        axes, to which `jax.vmap` adds.
    k
        (*batch, heads_k, seq_k, head_dim), dtype of q; heads_q is a multiple of heads_k.
    v
        (*batch, heads_k, seq_k, head_dim_v), dtype of q.
    scale, causal, window, softcap, layout
        As for `cuflash.attention`: Python values, which are part of a compiled program.
    mask
        bool, True = visible, broadcastable to (*batch, heads_q, seq_q, seq_k).
    bias
        Logits to add, dtype of q, broadcastable likewise; its gradient has its own shape.
    return_lse
        Also return the log-sum-exp of each row's logits, which has a gradient, too.
    deterministic
        As for `cuflash.attention_backward`, for the gradients.

    Returns
    -------
    out
        (*batch, heads_q, seq_q, head_dim_v) in the layout, dtype of q; 0 in a row that sees no key.
    lse
        With `return_lse` only: (*batch, heads_q, seq_q) in every layout, natural logarithm, float32 (float64 for
        float64); -inf in a row that sees no key.

    Raises
    ------
    ArgumentError
        An argument has a value, dtype or kind that the call cannot take; raised while JAX traces.
    ShapeError
        Shapes do not fit each other; an ArgumentError.
    jax.errors.JaxRuntimeError
        What only the device can tell, such as a head size above its limit or a missing CuPy, with cuflash's text, when the
        compiled program runs.

    Notes
    -----
    Algorithm: Dao et al., arXiv:2205.14135, and Dao, arXiv:2307.08691.  Reverse mode only, and no second derivatives,
    since a function of JAX has a rule for `jvp` or one for `vjp`: `cuflash.attention_jvp` and `cuflash.attention_hvp` take JAX's
    arrays outside of traced programs.
    Arrays that are sharded without `shard_map` are gathered first: XLA does not look into the call.  On a GPU all memory is
    XLA's; on the host the numpy backend computes.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from cuflash.jax import attention
    >>> q, k, v = jnp.zeros((1, 2, 1)), jnp.zeros((1, 2, 1)), jnp.array([[[1.0], [3.0]]])
    >>> jax.jit(lambda v: attention(q, k, v, causal=True))(v).tolist()
    [[[1.0], [2.0]]]
    >>> jax.grad(lambda v: attention(q, k, v, causal=True).sum())(v).tolist()
    [[[1.5], [0.5]]]
    """
    check_flag("return_lse", return_lse)
    deterministic = order_of_sums(deterministic, False)
    given = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias}
    given = {name: jax_array(name, x) for name, x in given.items() if x is not None}
    stand_ins: dict[str, Any] = {name: stand_in(name, x) for name, x in given.items()}
    call = describe(
        **stand_ins,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        layout=layout,
    )
    problem = call.problem
    axes: frozenset[str] = frozenset().union(*(varying(x) for x in given.values()))
    given = {name: vary(x, axes) for name, x in given.items()}
    for name in ("mask", "bias"):
        if name in given:  # all axes, so that those which vmap adds in front are the batch's
            x = given[name]
            given[name] = x.reshape(*[1] * (len(problem.score_shape) - x.ndim), *x.shape)
    options = Options.of(problem, bool(return_lse), deterministic)
    found = attend(options, *(given.get(name) for name in ("q", "k", "v", "mask", "bias")))
    return found if return_lse else found[0]


# ---- what comes in ---------------------------------------------------------------------------------------------------
def jax_array(name: str, x: Any) -> Any:
    """The argument as an array of JAX, of the dtype that it has."""
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise ArgumentError(
            f"{name} is {x!r:.80} of type {type(x).__name__}: must be a JAX or NumPy array; make it one with jax.numpy.asarray"
        )
    array = jax.numpy.asarray(x)
    if array.dtype != x.dtype:
        raise ArgumentError(
            f"{name} has dtype {x.dtype}, which JAX would make {array.dtype}; convert it with astype, or set "
            "jax.config.update('jax_enable_x64', True)"
        )
    return array


def stand_in(name: str, x: Any) -> np.ndarray[Any, Any]:
    """A NumPy array of the same shape and dtype that takes no memory: what `describe` looks at."""
    try:
        return np.broadcast_to(np.empty((), x.dtype), x.shape)
    except TypeError as error:  # such as a key of jax.random
        raise ArgumentError(
            f"{name} has dtype {x.dtype}, which is none of numbers; pass an array of numbers"
        ) from error


# ---- the function and its gradient -----------------------------------------------------------------------------------
def primal(options: Options, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> tuple[Any, ...]:
    """`out`, and with it lse if that is a result."""
    return call_forward(options, q, k, v, mask, bias, options.with_lse)


def call_forward(options: Options, q: Any, k: Any, v: Any, mask: Any, bias: Any, with_lse: bool) -> tuple[Any, ...]:
    """XLA's call of the forward."""
    shapes = [((*q.shape[:-1], v.shape[-1]), q.dtype)]
    if with_lse:
        shapes.append((in_layout(q.shape, options.layout)[:-1], "float64" if q.dtype == "float64" else "float32"))
    call = jax.ffi.ffi_call(FORWARD, results(shapes, q), vmap_method="expand_dims")
    inputs = [x for x in (q, k, v, mask, bias) if x is not None]
    return tuple(call(*inputs, options=replace(options, with_lse=with_lse).text()))


def forward(options: Options, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The results, and what the backward needs: the inputs, `out` and lse."""
    out, lse = call_forward(options, q, k, v, mask, bias, True)
    return (out, lse) if options.with_lse else (out,), (q, k, v, mask, bias, out, lse)


def backward(options: Options, kept: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of q, k, v, mask and bias: a mask has none."""
    q, k, v, mask, bias, out, lse = kept
    shapes = [(x.shape, x.dtype) for x in (q, k, v, bias) if x is not None]
    call = jax.ffi.ffi_call(BACKWARD, results(shapes, q), vmap_method="expand_dims")
    inputs = [x for x in (q, k, v, mask, bias) if x is not None]
    dq, dk, dv, *rest = call(*inputs, out, lse, *cotangents, options=options.text())
    return dq, dk, dv, None, rest[0] if rest else None


differentiable = jax.custom_vjp(primal, nondiff_argnums=(0,))
differentiable.defvjp(forward, backward)
attend = jax.jit(differentiable, static_argnums=0, inline=True)  # calls outside of any jit are traced once, too

for platform, handlers in HANDLERS.items():
    for target, callback in handlers.items():
        pointer = ctypes.cast(callback, ctypes.c_void_p).value
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(pointer), platform=platform)


# ---- the end of the process ------------------------------------------------------------------------------------------
QUIET_S = 0.05  # programs that nobody holds a result of are over when no call has begun for as long


@atexit.register
def settle() -> None:
    """Wait for programs that still run on the host: once the interpreter shuts down, it lets no handler in any more.

    XLA would wait for their threads, and they for the interpreter.
    """
    if not HOST.entered:
        return
    for x in jax.live_arrays("cpu"):
        with contextlib.suppress(Exception):  # a program that failed is over, too
            x.block_until_ready()
    before = -1
    while HOST.threads or HOST.entered != before:
        before = HOST.entered
        time.sleep(QUIET_S)
