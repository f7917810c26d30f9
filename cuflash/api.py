"""The public calls: arrays come in, one backend computes, results go back as the caller's own kind.

Sources: FlashAttention (arXiv:2205.14135) and FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cuflash import arrays, backends, explanation, numpy_backend, numpy_tangents
from cuflash.arrays import Home
from cuflash.errors import ArgumentError, UnsupportedError
from cuflash.explanation import Explanation
from cuflash.gradients import gradients_type
from cuflash.modifiers import Modifier, Sinks, Written
from cuflash.modifiers.base import device_of
from cuflash.problem import (
    DTYPES,
    MAX_SEQ,
    Call,
    Problem,
    canonical,
    check_array,
    check_layout,
    check_packed_shapes,
    describe,
    describe_packed,
    dtype_name,
    in_layout,
    operand,
    operand_title,
    refuse_narrow,
)
from cuflash.statistics import Statistics

#: inputs that may move in forward mode
MOVING = ("q", "k", "v", "bias", "sinks")
BACKENDS = ("numpy", *(row.name for row in backends.BACKENDS))


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
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    batch_invariant: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """Exact attention softmax(scale · q kᵀ) v, in memory linear in the lengths.

    Arrays are NumPy, CuPy, or of any library that exports DLPack or ``__cuda_array_interface__``: all of one kind, in
    one place, of any strides.  Results are of that kind where its library imports DLPack, else CuPy or NumPy.

    Parameters
    ----------
    q
        (*batch, heads_q, seq_q, head_dim), float16, bfloat16, float32, float64 or float8_e4m3fn; any number of batch axes.
        Arrays of bytes become the last with ``.view(ml_dtypes.float8_e4m3fn)``.
    k
        (*batch, heads_k, seq_k, head_dim), dtype of q; heads_q is a multiple of heads_k.
    v
        (*batch, heads_k, seq_k, head_dim_v), dtype of q.
    scale
        Multiplies the logits q·k; None is 1/√head_dim.
    causal
        True or "bottom_right": query i sees key j iff j <= i + seq_k - seq_q.  "top_left": iff j <= i.
    window
        (left, right), inclusive distances in positions from the diagonal that `causal` uses; None is unbounded.
    mask
        bool, True = visible, broadcastable to (*batch, heads_q, seq_q, seq_k).
    bias
        Logits to add, dtype of q, broadcastable likewise.
    softcap
        Positive c: a scaled logit s becomes c·tanh(s/c).
    modifiers
        `ALiBi(slopes)`, `KeyLengths(lengths)`, `Documents(ids_q, ids_k)`, `BlockMask(blocks, size)`, `Sinks(logits)`,
        `Dropout(p, seed, offset)`; at most one of each.  `ScoreModifier(expression)` and `MaskModifier(expression)` say what
        else you want: as many as you like, each expression once; an expression may call a `CudaFunction`.
    layout
        "bhsd" is the order of axes above; "bshd" has seq before heads in q, k, v and out.
    q_scale, k_scale, v_scale
        Of float8_e4m3fn arrays: what the elements of a head are multiplied with, greater than 0.  A number, or float32
        broadcastable to (*batch, heads_q), for keys and values to (*batch, heads_k); None is 1.  On a device arrays of them lie
        there as well, and are not looked at.
    return_lse
        Also return the log-sum-exp of each row's logits.
    out
        Array to write the result into: its shape, dtype and kind, any strides, no memory shared with an input.
    out_dtype
        Of float8_e4m3fn arrays: "bfloat16", which None is as well, or "float16"; others have results of their own dtype.
    batch_invariant
        True: the bits of a batch entry do not depend on the other entries, on how many there are, or on how the arrays lie
        in memory; for one device, version and set of options, and the same lengths.  Arrays that are not contiguous are
        copied for it, and on the host entries are computed one by one.
    precision
        Of the products of float32 arrays on tensor cores.  None is that of float32; "tf32" is that of TensorFloat-32, 11 bits
        of each number, in half the time: on a GPU of compute capability 8.0 or later, and nowhere else.
    backend
        None chooses; "numpy" (host), "simt", "mma" or "wgmma" (CUDA) insists.  "wgmma" takes compute capability 9.0, of
        float32 the forward, and other arrays whose rows start at multiples of 16 bytes.

    Returns
    -------
    out
        (*batch, heads_q, seq_q, head_dim_v) in the layout, dtype of q or `out_dtype`; 0 in a row that sees no key.
    lse
        With `return_lse` only: (*batch, heads_q, seq_q) in every layout, natural logarithm, float32 (float64 for
        float64); -inf in a row that sees no key.

    Raises
    ------
    ArgumentError
        An argument has a value, dtype, kind or device that the call cannot take.  Nothing was written.
    ShapeError
        Shapes do not fit each other; an ArgumentError.
    UnsupportedError
        No backend, or not the one asked for, offers the combination; or there is no GPU for CUDA arrays.

    Notes
    -----
    Order of operations: scale, softcap, ALiBi, each `ScoreModifier` as given, bias, all that hides keys, softmax with its
    sinks, dropout.  Equal calls on one device give equal bits.  Algorithm: Dao et al., arXiv:2205.14135, and Dao,
    arXiv:2307.08691.

    float8_e4m3fn arrays have no gradient.  On a GPU the weights that meet the values are rounded to that type, too
    (arXiv:2407.08608, section 3.3); on the host they are not.  A `bias` has the dtype of the result there.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((1, 2, 1)), np.zeros((1, 2, 1))
    >>> v = np.array([[[1.0], [3.0]]])
    >>> cuflash.attention(q, k, v, causal=True)
    array([[[1.],
            [2.]]])
    """
    check_flag("return_lse", return_lse)
    check_flag("batch_invariant", batch_invariant)
    eight_bit = (q_scale, k_scale, v_scale, out_dtype)
    is_plain = type(modifiers) is tuple and not (modifiers or batch_invariant)
    is_plain = is_plain and q_scale is None and k_scale is None and v_scale is None and out_dtype is None
    keys: list[Any] = []
    if is_plain and _replay is not None:
        options = _replay.options_of(scale, causal, window, softcap, layout, precision, backend, bool(return_lse))
        replayed = replayed_forward(keys, (q, k, v, mask, bias, out), options, return_lse)
        if replayed is not None:
            return replayed
    home, native = arrays.gather({"q": q, "k": k, "v": v, **present(mask=mask, bias=bias, out=out)})
    is_plain = is_plain and (out is None or home.library not in arrays.IMMUTABLE)
    if is_plain and home.device is not None and (home.namespace is not None or not keys):
        options = replays().options_of(scale, causal, window, softcap, layout, precision, backend, bool(return_lse))
        key, replayed = replays().forward(tuple(map(native.get, replays().FORWARD)), options)
        if replayed is not None:
            replays().remember_alike(keys, key)
            if out is not None:
                home.wait(native["out"])
                return (out, home.give(replayed[0])) if return_lse else out
            given = tuple(map(home.give, replayed))
            return given if return_lse else given[0]
        if key is not None:
            keys.append(key)
    modifiers = keep(modifiers)
    call, native = described(
        home, native, scale, causal, window, softcap, modifiers, layout, backend, precision, eight_bit
    )
    to = checked_out(home, call, native)
    o, lse = run_forward(home, call, to, return_lse, backend, batch_invariant=bool(batch_invariant))
    if keys:
        replays().remember_forward(keys, call, o, lse, out is not None, backend)
    result = given_out(home, call, o, out)
    return (result, home.give(lse)) if return_lse else result


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """Gradients of `attention`, from its inputs and its two results, in memory linear in the lengths.

    Parameters
    ----------
    dout
        Gradient of the loss with respect to `out`, its shape and dtype; any strides.
    q, k, v
        As in the forward call.
    out, lse
        What ``attention(..., return_lse=True)`` returned.
    dlse
        Gradient of the loss with respect to `lse`, its shape and dtype; None is 0.
    deterministic
        True: equal calls on one device give equal bits in every gradient; dq is then summed in a fixed order, which takes
        time and 4 bytes for each tile of queries, and gradients of a bias that is broadcast and of a `ScoreModifier`'s arrays
        in fixed point, which takes 16 to 32 bytes for each of their elements.  None and False: as fast as it goes, which on a
        GPU leaves the order of the sums in dq, dbias and these open, while dk, dv and dsinks still repeat; the numpy backend
        always repeats all of them.
    batch_invariant
        As for `attention`, of each gradient that is not itself a sum over the batch; it makes None of `deterministic` True
        and does not go with False.
    scale, causal, window, mask, bias, softcap, modifiers, layout, precision, backend
        As in the forward call, and with the same values.

    Returns
    -------
    Gradients
        A named tuple (dq, dk, dv), then those that a `ScoreModifier` was asked for by name, dbias if there is a bias and dsinks
        if there are `Sinks`: each of the shape and dtype of its argument.

    Raises
    ------
    ArgumentError
        As for `attention`, and for a dout, out, lse or dlse that does not belong to the call.
    UnsupportedError
        As for `attention`.

    Notes
    -----
    With δ = dout·out - dlse by row and P = exp(S - lse): dS = P ∘ (dout vᵀ - δ), dq = scale · dS k, dk = scale · dSᵀ q
    and dv = Pᵀ dout (arXiv:2205.14135, appendix B).  `attention_hvp` differentiates this once more.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((1, 1, 1)), np.zeros((1, 2, 1))
    >>> v = np.array([[[1.0], [3.0]]])
    >>> out, lse = cuflash.attention(q, k, v, return_lse=True)
    >>> cuflash.attention_backward(np.ones_like(out), q, k, v, out, lse).dv
    array([[[0.5],
            [0.5]]])
    """
    deterministic = order_of_sums(deterministic, batch_invariant)
    is_plain = type(modifiers) is tuple and not (modifiers or batch_invariant) and bias is None
    keys: list[Any] = []
    if is_plain and _replay is not None:
        options = _replay.options_of(scale, causal, window, softcap, layout, precision, backend, bool(deterministic))
        key, replayed = _replay.backward((q, k, v, mask, dout, out, lse, dlse), options)
        if replayed is not None:
            return replayed
        if key is not None:
            keys.append(key)
    given = {"dout": dout, "out": out, "lse": lse, **present(dlse=dlse, mask=mask, bias=bias)}
    home, native = arrays.gather({"q": q, "k": k, "v": v, **given})
    if is_plain and home.device is not None and (home.namespace is not None or not keys):
        options = replays().options_of(scale, causal, window, softcap, layout, precision, backend, bool(deterministic))
        key, replayed = replays().backward(tuple(map(native.get, replays().BACKWARD)), options)
        if replayed is not None:
            replays().remember_alike(keys, key)
            return type(replayed)(*map(home.give, replayed))
        if key is not None:
            keys.append(key)
    call, native = described(home, native, scale, causal, window, softcap, modifiers, layout, backend, precision)
    check_results(call, native, "(*batch, heads_q, seq_q)")
    gradients = run_backward(home, call, native, deterministic, backend, bool(batch_invariant))
    if keys:
        replays().remember_backward(keys, call, native, gradients, deterministic, backend)
    return give_gradients(gradients, home, call, native)


def attention_statistics(
    q: Any,
    k: Any,
    v: Any,
    *,
    maximum: bool = True,
    entropy: bool = True,
    column_sums: bool = True,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    out: Any = None,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Statistics:
    """`attention` with its log-sum-exp, and statistics of the scores and weights that it never stores.

    Parameters
    ----------
    q, k, v, scale, causal, window, mask, bias, softcap, modifiers, layout, out, batch_invariant, backend
        As for `attention`; backend="wgmma" has no statistics and refuses.
    maximum
        Whether to return the largest score of each row.
    entropy
        Whether to return the entropy of each row's weights.
    column_sums
        Whether to return the sum of each key's weights over the queries, which takes a second pass over the scores.

    Returns
    -------
    Statistics
        A named tuple (out, lse, maximum, entropy, column_sums); what was not asked for is None.  Statistics are of the kind
        of q, float32 (float64 for float64).

    out, lse
        As from `attention`.
    maximum
        (*batch, heads_q, seq_q) in every layout: the largest score after scale, softcap, other modifiers and bias, of the
        keys that the row sees; -inf in a row that sees none.
    entropy
        Likewise, -Σ p·log p in nats, a sink counted as a key: from 0, all weight on one key, to the logarithm of the number
        of keys; 0 in a row that sees no key.
    column_sums
        (*batch, heads_q, seq_k) in every layout: Σ p over the queries, the attention that a key receives; 0 for a key that
        no query sees.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `attention` does; also for a maximum, entropy or column_sums that is not True or False.

    Notes
    -----
    Largest score and entropy come out of the forward's recurrence (arXiv:2205.14135, algorithm 1) with one more sum,
    Σ exp(s - m)·(s - m); sums of columns from exp(s - lse), as in a backward.  Memory stays linear in the lengths, and equal
    calls on one device give equal bits.  A row whose lse is NaN has NaN in all of them.  They are those before dropout.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 3, 1)), np.zeros((1, 2, 1)), np.ones((1, 2, 1))
    >>> found = cuflash.attention_statistics(q, k, v)
    >>> found.entropy.round(4)
    array([[0.6931, 0.6931, 0.6931]])
    >>> found.column_sums
    array([[1.5, 1.5]])
    """
    flags = {"maximum": maximum, "entropy": entropy, "column_sums": column_sums}
    for name, flag in {**flags, "batch_invariant": batch_invariant}.items():
        check_flag(name, flag)
    given = present(mask=mask, bias=bias, out=out)
    home, call, native = enter(q, k, v, given, scale, causal, window, softcap, modifiers, layout, backend)
    to = checked_out(home, call, native)
    shapes = statistics_shapes(call.problem)
    statistics = empty_statistics(home, call, {name: shape for name, shape in shapes.items() if flags[name]})
    o, lse = run_forward(home, call, to, True, backend, statistics, bool(batch_invariant))
    found = {name: home.give(x) for name, x in statistics.items()}
    return Statistics(given_out(home, call, o, out), home.give(lse), **found)


def attention_vjp(
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
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Any:
    """`attention` and a function that pulls a gradient of its result back to its inputs.

    Parameters
    ----------
    q, k, v, scale, causal, window, mask, bias, softcap, modifiers, layout, return_lse, precision, backend
        As for `attention`.
    deterministic, batch_invariant
        As for `attention_backward`.

    Returns
    -------
    out
        As from `attention`.
    lse
        With `return_lse` only.
    vjp
        ``vjp(dout, dlse=None)`` returns the gradients as `attention_backward` does.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `attention` and `attention_backward` do.

    Notes
    -----
    Besides its inputs, `vjp` keeps only `out` and lse (arXiv:2205.14135, section 3.1), and it keeps no copies: write to
    none of them before its last use.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> out, vjp = cuflash.attention_vjp(q, k, v)
    >>> dq, dk, dv = vjp(np.ones_like(out))
    >>> dk
    array([[[0.],
            [0.]]])
    """
    refuse_narrow(q, k, v)
    modifiers = keep(modifiers)
    check_flag("return_lse", return_lse)
    order_of_sums(deterministic, batch_invariant)
    options: dict[str, Any] = {
        "scale": scale,
        "causal": causal,
        "window": window,
        "mask": mask,
        "bias": bias,
        "softcap": softcap,
        "modifiers": modifiers,
        "layout": layout,
        "batch_invariant": batch_invariant,
        "precision": precision,
        "backend": backend,
    }
    out, lse = attention(q, k, v, return_lse=True, **options)

    def vjp(dout: Any, dlse: Any = None) -> Any:
        """Gradients of the call for a gradient of its output, and of its lse if given."""
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **options)

    return (out, lse, vjp) if return_lse else (out, vjp)


def attention_jvp(
    q: Any,
    k: Any,
    v: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    *,
    dbias: Any = None,
    dsinks: Any = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Any:
    """`attention`, and how its result changes when its inputs move: forward mode, in memory linear in the lengths.

    Parameters
    ----------
    q, k, v
        As for `attention`.
    dq, dk, dv
        Tangents of q, k and v: the directions in which they move, of their shapes and dtype, any strides; None does not move.
    dbias
        The same for `bias`, its shape and dtype.
    dsinks
        The same for the logits of `Sinks`, real numbers of their shape.
    scale, causal, window, mask, bias, softcap, modifiers, layout, return_lse, batch_invariant, backend
        As for `attention`; backend="wgmma" has no forward mode and refuses.  Whatever has no tangent here, such as slopes of
        `ALiBi` and arrays of a `ScoreModifier`, is constant; `Dropout` drops the same weights of both.

    Returns
    -------
    out
        As from `attention`.
    dout
        Tangent of `out`, its shape and dtype: the derivative of out(q + t·dq, k + t·dk, ...) by t at 0; 0 in a row that sees no
        key.
    lse, dlse
        With `return_lse` only: as from `attention`, and its tangent, of its shape and dtype; 0 in a row that sees no key.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `attention` does, and for a tangent that does not belong to its input.

    Notes
    -----
    With s' = scale · (dq·k + q·dk), times the slopes of softcap and other modifiers, plus dbias: dlse = Σ p·s' by row, and
    dout = Σ p·(s'·v + dv) - dlse·out, in one pass by the recurrence of arXiv:2205.14135, algorithm 1, with two more sums.  A
    number that all s' of a row have in common cancels there, so it should not be much larger than what they differ by.  Equal
    calls on one device give equal bits.  16-bit dtypes round p·s' as they round p.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> out, dout = cuflash.attention_jvp(q, k, v, None, np.array([[[0.0], [2.0]]]), None)
    >>> out, dout
    (array([[[2.]]]), array([[[1.]]]))
    """
    check_flag("batch_invariant", batch_invariant)
    moved = present(dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks)
    given = {**moved, **present(mask=mask, bias=bias)}
    home, call, native = enter(q, k, v, given, scale, causal, window, softcap, modifiers, layout, backend)
    tangents = {name: tangent(call, native, name, f"d{name}") for name in MOVING if f"d{name}" in moved}
    found = run_jvp(home, call, tangents, backend, bool(batch_invariant))
    out, dout = (home.give(canonical(x, call.problem.layout)) for x in found[:2])
    return (out, dout, *(home.give(x) for x in found[2:])) if return_lse else (out, dout)


def attention_hvp(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    q_tangent: Any,
    k_tangent: Any,
    v_tangent: Any,
    dout_tangent: Any = None,
    *,
    dlse: Any = None,
    dlse_tangent: Any = None,
    bias_tangent: Any = None,
    sinks_tangent: Any = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Any:
    """Hessian-vector product: how the gradients of `attention` change when its inputs move, in memory linear in the lengths.

    It is forward mode over reverse mode, in JAX's words the `jvp` of the `vjp`.  With a constant `dout` it is the Hessian of
    Σ dout·out times the tangents; `dout_tangent` adds what the rest of a loss needs, whose own gradient moves, too.

    Parameters
    ----------
    dout
        Gradient of the loss with respect to the output, its shape and dtype; any strides.
    q, k, v
        As for `attention`; their results are computed anew.
    q_tangent, k_tangent, v_tangent
        The directions in which q, k and v move, of their shapes and dtype; None does not move.
    dout_tangent
        The same for `dout`.
    dlse
        Gradient of the loss with respect to the log-sum-exp, as for `attention_backward`; None is 0.
    dlse_tangent, bias_tangent, sinks_tangent
        The directions in which dlse, `bias` and the logits of `Sinks` move, of their shapes; None does not move.
    scale, causal, window, mask, bias, softcap, modifiers, layout, backend
        As for `attention`; on a device "simt" alone offers it, for float32 and float64.
    batch_invariant
        As for `attention_backward`.

    Returns
    -------
    Gradients
        A named tuple like that of `attention_backward`, (dq, dk, dv), then dbias and dsinks, each of which is the derivative
        of that gradient along the tangents: of dq(q + t·q_tangent, ..., dout + t·dout_tangent) by t at 0.

    Raises
    ------
    ArgumentError
        As for `attention_backward`, and for a tangent that does not belong to its argument.
    UnsupportedError
        As for `attention`, for 16-bit dtypes on a device, and for a `ScoreModifier` with gradients, or whose second
        derivative is too long, or needs that of a `CudaFunction`.

    Notes
    -----
    In the notation of `attention_backward`, with a tangent written x': p' = p·(s' - lse'), and
    dS' = P ∘ ((s' - lse') ∘ (dP - δ) + dP' - δ'), from which dq' = scale · (dS' k + dS k'), and so on; back through softcap its
    second derivative counts.  Results and weights come back tile by tile as in arXiv:2205.14135, appendix B; products by a
    Hessian in this way are those of Pearlmutter, "Fast exact multiplication by the Hessian" (1994).  Equal calls on one device
    give equal bits, except that a GPU adds dbias in any order.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> cuflash.attention_hvp(np.ones((1, 1, 1)), q, k, v, q, None, None).dk
    array([[[-0.5],
            [ 0.5]]])
    """
    check_flag("batch_invariant", batch_invariant)
    moved = present(
        q_tangent=q_tangent,
        k_tangent=k_tangent,
        v_tangent=v_tangent,
        bias_tangent=bias_tangent,
        sinks_tangent=sinks_tangent,
    )
    rest = {"dout": dout, **present(dout_tangent=dout_tangent, dlse=dlse, dlse_tangent=dlse_tangent)}
    given = {**moved, **rest, **present(mask=mask, bias=bias)}
    home, call, native = enter(q, k, v, given, scale, causal, window, softcap, modifiers, layout, backend)
    problem = call.problem
    check_curvature(problem)
    shapes = {"out": in_layout(problem.out_shape, problem.layout), "lse": problem.lse_shape}
    for name in rest:
        of = "out" if "dout" in name else "lse"
        dtype = problem.dtype if of == "out" else problem.accumulator
        check_array(
            name, native[name], shapes[of], dtype, "the output's" if of == "out" else "(*batch, heads_q, seq_q)"
        )
    tangents = {name: tangent(call, native, name, f"{name}_tangent") for name in MOVING if f"{name}_tangent" in moved}
    if dout_tangent is not None:
        tangents["dout"] = canonical(native["dout_tangent"], problem.layout)
    if dlse_tangent is not None:
        tangents["dlse"] = native["dlse_tangent"]
    products = run_hvp(home, call, native, tangents, backend, bool(batch_invariant))
    return give_gradients(products, home, call, native)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    return_lse: bool = False,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Exact attention of many sequences packed one after the other, each of which sees itself alone.

    Parameters
    ----------
    q
        (total_q, heads_q, head_dim), float16, bfloat16, float32 or float64.
    k
        (total_k, heads_k, head_dim), dtype of q; heads_q is a multiple of heads_k.
    v
        (total_k, heads_k, head_dim_v), dtype of q.
    cu_seqlens_q
        int32, (segments + 1,): the queries of segment s are rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1 of q.  The
        first is 0, none is smaller than the one before, the last is at most total_q; rows from there on belong to no
        segment.  A sequence, a NumPy array, or an array of the caller's kind.
    cu_seqlens_k
        The same for the keys, of the same length.
    max_seqlen_q, max_seqlen_k
        No segment has more queries, or keys.  With it, offsets that lie on a device are taken as they are; without it, they
        are read and checked, for which the host waits.  Results do not depend on it.
    scale, softcap, return_lse, backend
        As for `attention`.
    causal, window
        As for `attention`, with the positions and the lengths of each segment.
    modifiers
        `ALiBi(slopes)`, whose distance is counted within a segment, `Sinks(logits)`, and `Dropout(p, seed, offset)`, for
        which a segment is what a batch entry is elsewhere.  `ScoreModifier(expression)` and `MaskModifier(expression)`, whose
        positions and lengths are those of a segment, with arrays by ``h`` or computed indices, and without gradients.
    out
        Array to write the result into: its shape, dtype and kind, any strides, no memory shared with an input.

    Returns
    -------
    out
        (total_q, heads_q, head_dim_v), dtype of q; 0 in a row that sees no key or belongs to no segment.
    lse
        With `return_lse` only: (heads_q, total_q), natural logarithm, float32 (float64 for float64); -inf in such a row.

    Raises
    ------
    ArgumentError, ShapeError
        As for `attention`, and for offsets that do not begin at 0, decrease, or go beyond the arrays.  Nothing was written.
        Offsets on a device that are not read cannot be refused: they lead to results without meaning, but to nothing
        outside the arrays.
    UnsupportedError
        As for `attention`, and for other modifiers.

    Notes
    -----
    A segment's results are the same bits whatever it is packed with: its tile follows from its own length.  On the host they are
    the bits of `attention`, on a device where it takes the same backend and tile.  Segments may be empty, on either side.
    Algorithm: Dao, arXiv:2307.08691, section 3.1.1, for each segment.

    A CUDA graph captures the call with device offsets and both maxima; replays follow the offsets that then stand there.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((3, 1, 1)), np.zeros((3, 1, 1))
    >>> v = np.array([1.0, 3.0, 9.0]).reshape(3, 1, 1)
    >>> cuflash.attention_varlen(q, k, v, [0, 2, 3], [0, 2, 3]).ravel()
    array([2., 2., 9.])
    """
    check_flag("return_lse", return_lse)
    offsets, maxima = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    is_plain = type(modifiers) is tuple and not modifiers and are_lengths(maxima)
    keys: list[Any] = []
    if is_plain and _replay is not None:
        more = bool(return_lse), arrays.rounded_length(max_seqlen_k or 0)
        options = _replay.options_of(scale, causal, window, softcap, "packed", None, backend, more)
        replayed = replayed_forward(keys, (q, k, v, *offsets, out), options, return_lse)
        if replayed is not None:
            return replayed
    home, call, native = enter_packed(
        q, k, v, offsets, maxima, present(out=out), scale, causal, window, softcap, modifiers, backend
    )
    o, lse = run_forward(home, call, checked_out(home, call, native), return_lse, backend)
    if keys and (out is None or home.library not in arrays.IMMUTABLE):
        replays().remember_forward(keys, call, o, lse, out is not None, backend)
    elif home.device is not None:
        replays()  # the next one has a signature
    result = given_out(home, call, o, out)
    return (result, home.give(lse)) if return_lse else result


def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    deterministic: bool | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    backend: str | None = None,
) -> Any:
    """Gradients of `attention_varlen`, from its inputs and its two results, in memory linear in the totals.

    Parameters
    ----------
    dout
        Gradient of the loss with respect to `out`, its shape and dtype; any strides.
    q, k, v, cu_seqlens_q, cu_seqlens_k
        As in the forward call.
    out, lse
        What ``attention_varlen(..., return_lse=True)`` returned.
    dlse
        Gradient of the loss with respect to `lse`, its shape and dtype; None is 0.
    deterministic
        As for `attention_backward`.
    max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, modifiers, backend
        As in the forward call, and with the same values.

    Returns
    -------
    Gradients
        A named tuple (dq, dk, dv), then dsinks if there are `Sinks`: each of the shape and dtype of its argument; 0 in rows
        that belong to no segment.

    Raises
    ------
    ArgumentError, UnsupportedError
        As for `attention_varlen`, and for a dout, out, lse or dlse that does not belong to the call.

    Notes
    -----
    The equations of `attention_backward` for each segment.  With deterministic=True, a segment's gradients are the same
    bits whatever it is packed with.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((2, 1, 1)), np.zeros((3, 1, 1)), np.array([1.0, 3.0, 9.0]).reshape(3, 1, 1)
    >>> offsets = [0, 1, 2], [0, 2, 3]
    >>> out, lse = cuflash.attention_varlen(q, k, v, *offsets, return_lse=True)
    >>> cuflash.attention_varlen_backward(np.ones_like(out), q, k, v, *offsets, out, lse).dv.ravel()
    array([0.5, 0.5, 1. ])
    """
    deterministic = order_of_sums(deterministic, batch_invariant=False)
    given = {"dout": dout, "out": out, "lse": lse, **present(dlse=dlse)}
    offsets, maxima = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    is_plain = type(modifiers) is tuple and not modifiers and are_lengths(maxima)
    keys: list[Any] = []
    if is_plain and _replay is not None:
        more = bool(deterministic), arrays.rounded_length(max_seqlen_k or 0)
        options = _replay.options_of(scale, causal, window, softcap, "packed", None, backend, more)
        key, replayed = _replay.backward((q, k, v, *offsets, dout, out, lse, dlse), options)
        if replayed is not None:
            return replayed
        if key is not None:
            keys.append(key)
    home, call, native = enter_packed(
        q, k, v, offsets, maxima, given, scale, causal, window, softcap, modifiers, backend
    )
    check_results(call, native, "(heads_q, total_q)")
    gradients = run_backward(home, call, native, deterministic, backend)
    if keys:
        replays().remember_backward(keys, call, native, gradients, deterministic, backend)
    elif home.device is not None:
        replays()
    return give_gradients(gradients, home, call, native)


def attention_varlen_vjp(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Any:
    """`attention_varlen` and a function that pulls a gradient of its result back to its inputs.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As for `attention_varlen`.
    scale, causal, window, softcap, modifiers, return_lse, backend
        As for `attention_varlen`.
    deterministic
        As for `attention_backward`.

    Returns
    -------
    out
        As from `attention_varlen`.
    lse
        With `return_lse` only.
    vjp
        ``vjp(dout, dlse=None)`` returns the gradients as `attention_varlen_backward` does.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `attention_varlen` and `attention_varlen_backward` do.

    Notes
    -----
    Besides its inputs, `vjp` keeps only `out` and lse, and it keeps no copies: write to none of them, nor to the offsets,
    before its last use.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((2, 1, 1)), np.zeros((3, 1, 1)), np.array([1.0, 3.0, 9.0]).reshape(3, 1, 1)
    >>> out, vjp = cuflash.attention_varlen_vjp(q, k, v, [0, 1, 2], [0, 2, 3])
    >>> vjp(np.ones_like(out)).dv.ravel()
    array([0.5, 0.5, 1. ])
    """
    check_flag("return_lse", return_lse)
    order_of_sums(deterministic, batch_invariant=False)
    options: dict[str, Any] = {
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "scale": scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "modifiers": keep(modifiers),
        "backend": backend,
    }
    out, lse = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **options)

    def vjp(dout: Any, dlse: Any = None) -> Any:
        """Gradients of the call for a gradient of its output, and of its lse if given."""
        return attention_varlen_backward(
            *(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse), dlse=dlse, deterministic=deterministic, **options
        )

    return (out, lse, vjp) if return_lse else (out, vjp)


def explain(
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
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out_dtype: Any = None,
    precision: str | None = None,
    backend: str | None = None,
    measure: bool = False,
) -> Explanation:
    """How `attention` would compute a call: the backend, why no other, and what the kernel takes from the device.

    Parameters
    ----------
    q, k, v, scale, causal, window, mask, bias, softcap, modifiers, layout
        As for `attention`; nothing is computed.
    q_scale, k_scale, v_scale, out_dtype, precision, backend
        As for `attention`; nothing is computed.
    measure
        True: the call also runs some times on a GPU, with random numbers in place of q, k and v, which take as much memory
        again; everything else is what is given, and nothing of the caller's is written.  Results are dropped, the host waits.

    Returns
    -------
    Explanation
        Readable when printed.

    Raises
    ------
    ArgumentError
        As `attention` does.
    UnsupportedError
        As `attention` does, and for measure=True with arrays on the host.

    Notes
    -----
    The floor time is what the device's peak arithmetic and bandwidth allow for the work that arXiv:2205.14135 counts.  Keys that
    causal, `window` or `KeyLengths` hide do not count, for which lengths are read, on a device as well; what other masks hide
    does.  The measured time is the median of runs each of which finds nothing in a cache; of it, the floor is the share that no
    kernel can save.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((1, 4, 8), np.float32)
    >>> cuflash.explain(x, x, x, causal=True).backend
    'numpy'
    """
    check_flag("measure", measure)
    given = present(mask=mask, bias=bias)
    eight_bit = (q_scale, k_scale, v_scale, out_dtype)
    home, call, _ = enter(
        q, k, v, given, scale, causal, window, softcap, modifiers, layout, backend, precision, eight_bit
    )
    return explained(home, call, backend, measure)


def explain_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    backend: str | None = None,
    measure: bool = False,
) -> Explanation:
    """How `attention_varlen` would compute a call of packed sequences; as `explain`.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, modifiers, backend
        As for `attention_varlen`; nothing is computed.
    measure
        As for `explain`; the offsets are those given.

    Returns
    -------
    Explanation
        Readable when printed.  `grid` has room for sequences of any lengths; blocks beyond those that are there end at once.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `attention_varlen` does, and `explain` for `measure`.

    Notes
    -----
    The floor time is that of the sequences between the offsets, which are read for it, on a device as well: pairs of one
    sequence, not of the whole (arXiv:2205.14135 counts the work).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((9, 4, 8), np.float32)
    >>> cuflash.explain_varlen(x, x, x, [0, 5, 9], [0, 5, 9], causal=True).backend
    'numpy'
    """
    check_flag("measure", measure)
    offsets, maxima = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    home, call, _ = enter_packed(q, k, v, offsets, maxima, {}, scale, causal, window, softcap, modifiers, backend)
    return explained(home, call, backend, measure)


def explained(home: Home, call: Call, backend: str | None, measure: bool) -> Explanation:
    """The explanation of a described call."""
    if home.device is None:
        return explained_on_host(home, call.problem, str(call.problem), measure)
    found: Explanation = launcher().explain(call, backend, measure)
    return found


def explained_on_host(home: Home, problem: Problem, title: str, measure: bool) -> Explanation:
    """The explanation of a call that the numpy backend computes, which is not measured."""
    if measure:
        raise UnsupportedError(
            f"measure=True times kernels on an NVIDIA GPU, but q is {home}; move the arrays there, or time the call itself, "
            "as python -m cuflash explain --measure does"
        )
    refused = f"computes on an NVIDIA GPU, but q is {home}"
    return explanation.of_host(problem, title, {name: refused for name in BACKENDS if name != "numpy"})


_launch: Any = None  # cuflash.launch, once a call on a device has imported it whole
_replay: Any = None  # cuflash.replay, likewise


def launcher() -> Any:
    """The module that runs calls on devices, where there are any; importing it imports CuPy."""
    global _launch
    arrays.require_gpu()
    if _launch is None:
        from cuflash import launch

        _launch = launch
    return _launch


def replays() -> Any:
    """The module that runs repeated ones."""
    global _replay
    if _replay is None:
        from cuflash import replay

        _replay = replay
    return _replay


# ---- the steps they share --------------------------------------------------------------------------------------------
def present(**arguments: Any) -> dict[str, Any]:
    return {name: x for name, x in arguments.items() if x is not None}


def check_flag(name: str, value: Any) -> None:
    """Raise unless an argument is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{name}={value!r:.80}: must be True or False")


def order_of_sums(deterministic: Any, batch_invariant: Any) -> bool | None:
    """Whether a backward sums in a fixed order; None is the backend's default."""
    if not (deterministic is None or isinstance(deterministic, (bool, np.bool_))):
        raise ArgumentError(f"deterministic={deterministic!r}: must be True, False or None (the backend's default)")
    check_flag("batch_invariant", batch_invariant)
    if not batch_invariant:
        return None if deterministic is None else bool(deterministic)
    if deterministic is not None and not deterministic:
        raise ArgumentError(
            "deterministic=False with batch_invariant=True: sums in any order depend on what else runs; leave one out"
        )
    return True


def replayed_forward(keys: list[Any], given: tuple[Any, ...], options: Any, return_lse: bool) -> Any:
    """What a forward returns whose arrays, `out` last, are those of one before; else None, and `keys` gains its signature."""
    key, found = _replay.forward(given, options)
    if found is None:
        if key is not None:
            keys.append(key)
        return None
    if given[-1] is not None:
        found.insert(0, given[-1])
    return tuple(found) if return_lse else found[0]


def are_lengths(maxima: tuple[Any, Any]) -> bool:
    """Whether both are given as plain integers, so that offsets on a device are taken as they are."""
    return all(type(n) is int and n >= 0 for n in maxima)


def keep(modifiers: Any) -> Any:
    """A sequence that can be read twice; anything else stays what it is, to be refused by name."""
    return tuple(modifiers) if isinstance(modifiers, Iterable) else modifiers


def enter(
    q: Any,
    k: Any,
    v: Any,
    given: Mapping[str, Any],
    scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    modifiers: Any,
    layout: Any,
    backend: Any,
    precision: Any = None,
    eight_bit: tuple[Any, Any, Any, Any] | None = None,
) -> tuple[Home, Call, dict[str, Any]]:
    """Validate a call: where its arrays live, what it is, and its native arrays by name.

    `eight_bit` are the scales and the dtype of the result, in calls that take 8-bit arrays.
    """
    home, native = arrays.gather({"q": q, "k": k, "v": v, **given})
    call, native = described(
        home, native, scale, causal, window, softcap, modifiers, layout, backend, precision, eight_bit
    )
    return home, call, native


def described(
    home: Home,
    native: dict[str, Any],
    scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    modifiers: Any,
    layout: Any,
    backend: Any,
    precision: Any = None,
    eight_bit: tuple[Any, Any, Any, Any] | None = None,
) -> tuple[Call, dict[str, Any]]:
    """The same for arrays that have come in: what the call is, and its native arrays by name."""
    check_backend(backend, home)
    seq_axis = -3 if check_layout(layout) == "bshd" else -2
    seq_k = native["k"].shape[seq_axis] if native["k"].ndim >= 3 else MAX_SEQ
    dtype = dtype_name(native["q"].dtype)
    chain = arrays.native_modifiers(modifiers, home, dtype, seq_k)
    call = describe(
        native["q"],
        native["k"],
        native["v"],
        scale=scale,
        causal=causal,
        window=window,
        mask=native.get("mask"),
        bias=native.get("bias"),
        softcap=softcap,
        modifiers=chain,
        layout=layout,
        precision=precision,
        scales=None if eight_bit is None else arrays.native_scales(*eight_bit, home, dtype),
    )
    check_precision_there(call, home)
    return call, {**native, **differentiable(chain)}


def enter_packed(
    q: Any,
    k: Any,
    v: Any,
    offsets: tuple[Any, Any],
    maxima: tuple[Any, Any],
    given: Mapping[str, Any],
    scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    modifiers: Any,
    backend: Any,
) -> tuple[Home, Call, dict[str, Any]]:
    """The same for a call of packed sequences."""
    home, native = arrays.gather({"q": q, "k": k, "v": v, **given})
    check_backend(backend, home)
    check_packed_shapes(native["q"], native["k"], native["v"])
    total_q, total_k = len(native["q"]), len(native["k"])
    packed = arrays.native_packed(*offsets, *maxima, total_q, total_k, home)
    chain = arrays.native_modifiers(modifiers, home, dtype_name(native["q"].dtype), total_k)
    call = describe_packed(
        native["q"],
        native["k"],
        native["v"],
        packed,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        modifiers=chain,
    )
    return home, call, {**native, **differentiable(chain)}


def differentiable(chain: Iterable[Modifier]) -> dict[str, Any]:
    """The modifiers' arrays that have a gradient, by operand, in the shapes in which they came."""
    return {name: m.arrays()[name] for m in chain for name in m.differentiable}


def tangent(call: Call, native: Mapping[str, Any], name: str, argument: str) -> Any:
    """The tangent of an input, with the axes that the input has in the call; raises unless it belongs to it."""
    problem, x = call.problem, native[argument]
    if name in ("q", "k", "v"):
        check_array(argument, x, native[name].shape, problem.dtype, f"that of {name},")
        return canonical(x, problem.layout)
    if name not in native:
        title = "Sinks" if name == "sinks" else name
        raise ArgumentError(f"{argument} is given, and the call has no {title}; leave it out")
    if name == "sinks":
        if dtype_name(x.dtype) not in DTYPES:
            raise ArgumentError(f"{argument} has dtype {x.dtype}: must be real numbers; convert it with astype")
        x = arrays.in_dtype(x, problem.accumulator)
    check_array(argument, x, native[name].shape, dtype_name(native[name].dtype), f"that of {operand_title(name)},")
    modifier = next(m for m in problem.modifiers if name in m.differentiable)
    return operand(modifier, name, x, problem)


def check_curvature(problem: Problem) -> None:
    """Raise if a second derivative is not known."""
    for m in problem.modifiers:
        if m.lacks_curvature():
            raise UnsupportedError(
                f"a Hessian-vector product with {m!r}: its second derivative by the score is not known, or takes too many "
                "operations; use a shorter expression, of which no CudaFunction bends the score"
            )
        if isinstance(m, Written) and m.gradients:
            raise UnsupportedError(
                f"a Hessian-vector product with {m!r}: second derivatives by {m.gradients[0]} are not offered; leave gradients "
                "out, which treats it as constant"
            )


def check_results(call: Call, native: Mapping[str, Any], lse_axes: str) -> None:
    """Raise unless the results and their gradients belong to the call."""
    problem = call.problem
    for name in ("dout", "out"):
        check_array(name, native[name], in_layout(problem.out_shape, problem.layout), problem.dtype, "the output's")
    for name in ("lse", "dlse"):
        if name in native:
            check_array(name, native[name], problem.lse_shape, problem.accumulator, lse_axes)


def check_backend(backend: Any, home: Home) -> None:
    """Raise unless the arrays are where the backend asked for computes."""
    if backend is None:
        return
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r}: must be None or one of {', '.join(BACKENDS)}")
    if home.device is None and backend != "numpy":
        why = arrays.missing_gpu()
        raise UnsupportedError(
            f"backend={backend!r} computes on an NVIDIA GPU, but q is {home}; move the arrays there first, for "
            "example with cupy.asarray" + (f". There is no GPU to use here: {why}" if why else "")
        )
    if home.device is not None and backend == "numpy":
        raise UnsupportedError(
            f"backend='numpy' computes on the host, but q is {home}; move the arrays there, for example with "
            "cupy.asnumpy"
        )


def check_precision_there(call: Call, home: Home) -> None:
    """Raise if a precision was asked for that products on the host do not have."""
    if call.problem.precision and home.device is None:
        raise UnsupportedError(
            f"precision={call.problem.precision!r} is computed on an NVIDIA GPU, but q is {home}; leave it out, or move the "
            "arrays there"
        )


def checked_out(home: Home, call: Call, native: Mapping[str, Any]) -> Any:
    """The caller's `out` if there is one; raises if the result cannot be written there."""
    out, problem = native.get("out"), call.problem
    if out is not None:
        check_array("out", out, in_layout(problem.out_shape, problem.layout), problem.out_dtype, "the result's")
        arrays.check_out(out, home, {"q": call.q, "k": call.k, "v": call.v, **call.operands})
    return out


def given_out(home: Home, call: Call, o: Any, out: Any) -> Any:
    """The output as the caller's kind: the caller's own `out` if there is one."""
    if out is None:
        return home.give(canonical(o, call.problem.layout))
    home.wait(o)
    return out


def statistics_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of all statistics beside lse."""
    return {
        "maximum": problem.lse_shape,
        "entropy": problem.lse_shape,
        "column_sums": (*problem.lse_shape[:-1], problem.seq_k),
    }


def empty_statistics(home: Home, call: Call, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """New arrays for statistics, where the call's arrays are."""
    if home.device is None:
        return {name: np.empty(shape, call.problem.accumulator) for name, shape in shapes.items()}
    made: dict[str, Any] = launcher().empty_statistics(call, shapes)
    return made


def run_forward(
    home: Home,
    call: Call,
    out: Any,
    with_lse: bool,
    backend: str | None,
    statistics: Mapping[str, Any] | None = None,
    batch_invariant: bool = False,
) -> tuple[Any, Any]:
    """Output and log-sum-exp with the axes (*batch, heads, seq, ...), written into the caller's `out` if given.

    `statistics` are arrays to write, by name.
    """
    problem = call.problem
    if home.device is None:
        if out is None and problem.layout == "bshd":
            out = np.empty(in_layout(problem.out_shape, problem.layout), arrays.named_dtype(problem.out_dtype))
        to = None if out is None else canonical(out, problem.layout)
        return numpy_backend.forward(call, to, statistics=statistics, batch_invariant=batch_invariant)
    to = None if out is None else canonical(out, problem.layout)
    result: tuple[Any, Any] = launcher().forward(call, to, with_lse, backend, statistics, batch_invariant)
    return result


def run_backward(
    home: Home,
    call: Call,
    native: Mapping[str, Any],
    deterministic: bool | None,
    backend: str | None,
    batch_invariant: bool = False,
) -> Any:
    """Gradients with the axes (*batch, heads, seq, dim)."""
    out, dout = (canonical(native[name], call.problem.layout) for name in ("out", "dout"))
    lse, dlse = native["lse"], native.get("dlse")
    if home.device is None:
        # Its sums have one order: always deterministic.
        return numpy_backend.backward(call, out, lse, dout, dlse, batch_invariant=batch_invariant)
    return launcher().backward(call, out, lse, dout, dlse, deterministic, backend, batch_invariant)


def run_jvp(
    home: Home, call: Call, tangents: Mapping[str, Any], backend: str | None, batch_invariant: bool
) -> tuple[Any, Any, Any, Any]:
    """Output, its tangent, log-sum-exp and its tangent, with the axes (*batch, heads, seq, ...)."""
    if home.device is None:
        return numpy_tangents.jvp(call, tangents, batch_invariant=batch_invariant)
    found: tuple[Any, Any, Any, Any] = launcher().jvp(call, tangents, backend, batch_invariant)
    return found


def run_hvp(
    home: Home,
    call: Call,
    native: Mapping[str, Any],
    tangents: Mapping[str, Any],
    backend: str | None,
    batch_invariant: bool,
) -> Any:
    """Tangents of the gradients with the axes (*batch, heads, seq, dim)."""
    dout, dlse = canonical(native["dout"], call.problem.layout), native.get("dlse")
    if home.device is None:
        return numpy_tangents.hvp(call, dout, dlse, tangents, batch_invariant=batch_invariant)
    return launcher().hvp(call, dout, dlse, tangents, backend, batch_invariant)


def give_gradients(gradients: Any, home: Home, call: Call, native: Mapping[str, Any]) -> Any:
    """The backend's gradients in the shapes of their arguments, as the caller's kind."""
    layout = call.problem.layout
    shaped = {f"d{name}": canonical(getattr(gradients, f"d{name}"), layout) for name in "qkv"}
    for m in call.problem.modifiers:
        if isinstance(m, Written):
            found = {name: getattr(gradients, f"d{name}") for name in m.differentiable}
            shaped |= {
                f"d{name}": arrays.in_dtype(m.gradient(name, found), m.given[name].dtype) for name in m.gradients
            }
        else:
            shaped |= {
                f"d{name}": getattr(gradients, f"d{name}").reshape(native[name].shape) for name in m.differentiable
            }
    if isinstance(sinks := call.problem.modifier(Sinks.name), Sinks):
        with device_of(shaped["dsinks"]):
            shaped["dsinks"] = shaped["dsinks"].astype(sinks.dtype, copy=False)
    kind = gradients_type(tuple(name.removeprefix("d") for name in list(shaped)[3:]))
    return kind(**{name: home.give(x) for name, x in shaped.items()})
