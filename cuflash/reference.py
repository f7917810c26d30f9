"""Attention in NumPy float64, dense, written to be read: what every other backend is compared with.

The whole of attention, for one head, with queries Q (seq_q, d), keys K (seq_k, d) and values V (seq_k, d_v):

* scores       S = scale · Q Kᵀ, changed by softcap, other score modifiers and bias, in this order;
* visibility   a score whose key may not be seen by its query becomes −∞;
* softmax      P = exp(S − L) with L = log Σ_j exp(S_j), row by row; a sink is one more term of the sum;
* output       O = P V; dropout multiplies P with 0 or 1 / (1 − p) before, element by element.

Backward, for a loss whose gradient is g = dL/dO (and dL/dL = dlse):

* dV = Pᵀ g                       from O = P V;
* dP = g Vᵀ                       likewise, both with the factors of dropout;
* dS = P ∘ (dP − δ + dlse)        softmax, with δ_i = Σ_j P_ij dP_ij = g_i · o_i;
* dS ← dS ∘ f'                    back through each score modifier f;
* dQ = scale · dS K, dK = scale · dSᵀ Q.

Forward mode, for tangents Q', K', V' of the inputs, which are directions in which they change:

* S' = scale · (Q' Kᵀ + Q K'ᵀ), times the slope f' of each score modifier, plus the tangent of a bias;
* L' = Σ_j P_j S'_j by row, a sink counted as a key;
* P' = P ∘ (S' − L'), O' = P' V + P V', with the factors of dropout.

The same of the backward, for a tangent g' of g, gives the product of the Hessian with a direction:

* (dP)' = g' Vᵀ + g V'ᵀ, δ' = g' · o + g · o' − (dlse)';
* (dS)' = P ∘ ((S' − L') ∘ (dP − δ) + (dP)' − δ'); back through a modifier it is times f', and dS times f'' S' is added;
* (dQ)' = scale · ((dS)' K + dS K'), (dK)' = scale · ((dS)'ᵀ Q + dSᵀ Q'), (dV)' = P'ᵀ g + Pᵀ g'.

Everything of the size seq_q · seq_k stands in memory, which is what the other backends avoid (Dao et al.,
arXiv:2205.14135; the same equations are in its appendix B).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import segments
from cuflash.decode_problem import DecodeCall, append, entries
from cuflash.gradients import differentiable_operands, gradients_type
from cuflash.modifiers import Tile
from cuflash.modifiers.base import sum_to
from cuflash.problem import Call, for_twins

Array = NDArray[Any]


def forward(call: Call) -> tuple[Array, Array]:
    """Output and log-sum-exp of one call, in float64.

    Parameters
    ----------
    call
        A `cuflash.problem.Call` with NumPy arrays of any supported dtype.

    Returns
    -------
    out
        (*batch, heads_q, seq_q, head_dim_v); 0 in a row that sees no key.
    lse
        (*batch, heads_q, seq_q), natural logarithm; −∞ in a row that sees no key.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import problem, reference
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> reference.forward(problem.describe(q, k, v))[0]
    array([[[2.]]])
    """
    if call.problem.is_packed:
        return segments.forward(call, np.float64, np.float64, lambda segment: forward(segment.call))
    with np.errstate(all="ignore"):  # infinities and NaN of the input are results here, not accidents
        dense = attend(call)
        return seen_product(dense.dropped, dense.seen, dense.v), dense.lse


def decode(call: DecodeCall) -> tuple[Array, Array]:
    """Output and log-sum-exp of one decode call, in float64: each entry of the batch is plain attention over its keys.

    Parameters
    ----------
    call
        A `cuflash.decode_problem.DecodeCall` with NumPy arrays; new keys are written into its caches.

    Returns
    -------
    out
        (batch, heads_q, seq_q, head_dim_v); 0 in a row that sees no key.
    lse
        (batch, heads_q, seq_q), natural logarithm; −∞ in a row that sees no key.
    """
    append(call)
    out, lse = np.zeros(call.problem.out_shape), np.zeros(call.problem.lse_shape)
    for entry, part in entries(call):
        out[entry], lse[entry] = forward(part)
    return out, lse


def backward(call: Call, dout: Array, dlse: Array | None = None) -> Any:
    """Gradients of one call, in float64: a named tuple (dq, dk, dv, then those of a bias and of sinks).

    Parameters
    ----------
    call
        A `cuflash.problem.Call` with NumPy arrays of any supported dtype.
    dout
        Gradient of the loss with respect to the output, (*batch, heads_q, seq_q, head_dim_v).
    dlse
        The same for the log-sum-exp, (*batch, heads_q, seq_q); None is 0.

    Returns
    -------
    Gradients
        dq, dk and dv have the shapes of q, k and v; dbias that of ``call.operands["bias"]``.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import problem, reference
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> reference.backward(problem.describe(q, k, v), np.ones((1, 1, 1))).dv
    array([[[0.5],
            [0.5]]])
    """
    problem = call.problem
    if problem.is_packed:
        return segments.backward(
            call,
            np.float64,
            lambda part: backward(part.call, dout[..., part.rows, :], None if dlse is None else dlse[..., part.rows]),
        )
    with np.errstate(all="ignore"):
        dense = attend(call)
        q, k, v, p, seen = dense.q, dense.k, dense.v, dense.p, dense.seen
        # A row that sees neither key nor sink passes nothing back, whatever its gradient holds.
        empty = np.isneginf(dense.lse)[..., None]
        g = np.where(empty, 0, dout.astype(np.float64))

        dv = seen_product(dense.dropped.swapaxes(-1, -2), seen.swapaxes(-1, -2), g)
        dp = dense.factors * (g @ v.swapaxes(-1, -2))
        delta = (g * seen_product(dense.dropped, seen, v)).sum(axis=-1, keepdims=True)
        if dlse is not None:
            delta = delta - np.where(empty, 0, dlse.astype(np.float64)[..., None])
        ds = np.where(seen & ~empty, p * (dp - delta), 0)

        gradients = {}
        for modifier in problem.modifiers:
            if modifier.kind == "sum":  # a key whose value is 0, so that its dP is 0
                (name,) = modifier.differentiable
                gradients[name] = sum_to(
                    np.where(dense.p_sink == 0, 0, -dense.p_sink * delta), call.operands[name].shape
                )
        for modifier, slope, partials in reversed(dense.slopes):
            for name in modifier.differentiable:
                partial, gradients[name] = partials[name], np.zeros(call.operands[name].shape)
                terms = ds if partial is None else np.where(ds == 0, 0, ds * partial)
                modifier.add_gradient(name, terms, gradients[name], whole(call))
            if slope is not None:
                ds = np.where(seen, ds * slope, 0)

        dq = problem.scale * seen_product(ds, seen, k)
        dk = problem.scale * seen_product(ds.swapaxes(-1, -2), seen.swapaxes(-1, -2), q)

        names = differentiable_operands(problem.modifiers)
        dk, dv = sum_groups(dk, problem.group), sum_groups(dv, problem.group)
        return gradients_type(names)(dq, dk, dv, *(gradients[name] for name in names))


def jvp(call: Call, tangents: Mapping[str, Array]) -> tuple[Array, Array]:
    """Tangents of output and log-sum-exp of one call for tangents of its inputs, in float64.

    Parameters
    ----------
    call
        A `cuflash.problem.Call` with NumPy arrays of any supported dtype.
    tangents
        Directions in which "q", "k", "v" and the operands "bias" and "sinks" change, of the shapes that these have in `call`;
        what is missing stays as it is.

    Returns
    -------
    dout
        (*batch, heads_q, seq_q, head_dim_v); 0 in a row that sees no key.
    dlse
        (*batch, heads_q, seq_q); 0 in a row that sees no key.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import problem, reference
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> reference.jvp(problem.describe(q, k, v), {"k": np.array([[[0.0], [2.0]]])})
    (array([[[1.]]]), array([[1.]]))
    """
    with np.errstate(all="ignore"):
        dense = attend(call)
        moved = move(call, dense, tangents)
        return moved.out, moved.lse[..., 0]


def hvp(call: Call, dout: Array, dlse: Array | None, tangents: Mapping[str, Array]) -> Any:
    """Tangents of the gradients of one call, in float64: a named tuple as `backward` returns.

    Parameters
    ----------
    call, dout, dlse
        As for `backward`.
    tangents
        As for `jvp`, and of "dout" and "dlse".

    Returns
    -------
    Gradients
        The derivatives of what `backward` returns in this direction.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import problem, reference
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> one = np.ones((1, 1, 1))
    >>> reference.hvp(problem.describe(q, k, v), one, None, {"q": one, "v": v}).dk
    array([[[-1.],
            [ 1.]]])
    """
    problem = call.problem
    with np.errstate(all="ignore"):
        dense = attend(call)
        k, v, seen = dense.k, dense.v, dense.seen
        moved = move(call, dense, tangents)
        dq, dk, dv = (repeated(call, tangents, name) for name in "qkv")
        empty = np.isneginf(dense.lse)[..., None]

        def given(x: Array | None, shape: tuple[int, ...]) -> Array:
            return np.where(empty, 0, 0.0 if x is None else x.astype(np.float64).reshape(shape))

        whole_shape, row_shape = problem.out_shape, (*problem.lse_shape, 1)
        g, dg = given(dout, whole_shape), given(tangents.get("dout"), whole_shape) + np.zeros(whole_shape)
        gl, dgl = given(dlse, row_shape), given(tangents.get("dlse"), row_shape)
        p_moved = dense.p * (moved.s - moved.lse)
        tv = seen_product(
            np.where(seen, dense.factors * p_moved, 0).swapaxes(-1, -2), seen.swapaxes(-1, -2), g
        ) + seen_product(dense.dropped.swapaxes(-1, -2), seen.swapaxes(-1, -2), dg)
        dp = dense.factors * (g @ v.swapaxes(-1, -2))
        dp_moved = dense.factors * (dg @ v.swapaxes(-1, -2) + g @ dv.swapaxes(-1, -2))
        out = seen_product(dense.dropped, seen, v)
        delta = (g * out).sum(axis=-1, keepdims=True) - gl
        delta_moved = (dg * out + g * moved.out).sum(axis=-1, keepdims=True) - dgl
        ds = np.where(seen & ~empty, dense.p * (dp - delta), 0)
        ds_moved = np.where(seen & ~empty, p_moved * (dp - delta) + dense.p * (dp_moved - delta_moved), 0)

        gradients = {}
        for modifier in problem.modifiers:
            if modifier.kind == "sum":
                (name,) = modifier.differentiable
                terms = -dense.p_sink * ((moved.sink - moved.lse) * delta + delta_moved)
                gradients[name] = sum_to(np.where(dense.p_sink == 0, 0, terms), call.operands[name].shape)
            elif modifier.kind == "score":  # biases: they follow everything that has a slope
                for name in modifier.differentiable:
                    gradients[name] = np.zeros(call.operands[name].shape)
                    modifier.add_gradient(name, ds_moved, gradients[name], whole(call))
        ds_moved = np.where(seen, ds_moved * moved.slope + ds * moved.curvature * moved.entering, 0)
        ds = np.where(seen, ds * moved.slope, 0)

        def product(left: Array, right: Array) -> Array:
            return seen_product(left, seen, right)

        def transposed(left: Array, right: Array) -> Array:
            return seen_product(left.swapaxes(-1, -2), seen.swapaxes(-1, -2), right)

        tq = problem.scale * (product(ds_moved, k) + product(ds, dk))
        tk = problem.scale * (transposed(ds_moved, dense.q) + transposed(ds, dq))
        names = differentiable_operands(problem.modifiers)
        tk, tv = sum_groups(tk, problem.group), sum_groups(tv, problem.group)
        return gradients_type(names)(tq, tk, tv, *(gradients[name] for name in names))


@dataclass(frozen=True)
class Moved:
    """How a call changes in the direction of its tangents; 0 where nothing is seen."""

    entering: Array  # scores before their modifiers
    s: Array
    slope: Array | float  # of all score modifiers together
    curvature: Array | float
    sink: Array | float
    lse: Array  # (*batch, heads_q, seq_q, 1)
    out: Array


def move(call: Call, dense: Dense, tangents: Mapping[str, Array]) -> Moved:
    """The tangents of everything between inputs and output."""
    problem, tile = call.problem, whole(call)
    dq, dk, dv = (repeated(call, tangents, name) for name in "qkv")
    entering = problem.scale * (dq @ dense.k.swapaxes(-1, -2) + dense.q @ dk.swapaxes(-1, -2))
    s = problem.scale * (dense.q @ dense.k.swapaxes(-1, -2))
    slope, curvature = np.ones((1, 1)), np.zeros((1, 1))
    for modifier in problem.modifiers:
        if modifier.kind == "score":
            own, bent = modifier.slope(s, tile), modifier.curvature(s, tile)
            if own is not None:  # (f(g))'' = f'' g'² + f' g''
                curvature = own * curvature + (0 if bent is None else bent * slope**2)
                slope = slope * own
            s = modifier.apply(s, tile)
    ds = entering * slope
    if "bias" in tangents:
        ds = ds + tangents["bias"].astype(np.float64)
    ds = np.where(dense.seen, ds, 0)
    sink = tangents["sinks"].astype(np.float64) if "sinks" in tangents else np.zeros(1)
    lse = (dense.p * ds + np.zeros(dense.seen.shape)).sum(axis=-1, keepdims=True)
    lse = lse + np.where(dense.p_sink == 0, 0, dense.p_sink * sink)
    weights = np.where(dense.seen, dense.factors * dense.p * (ds - lse), 0)
    out = seen_product(weights, dense.seen, dense.v) + seen_product(dense.dropped, dense.seen, dv)
    return Moved(np.where(dense.seen, entering, 0), ds, slope, curvature, sink, lse, out)


def repeated(call: Call, tangents: Mapping[str, Array], name: str) -> Array:
    """The tangent of q, k or v in float64, with one head for each query head; 0 where there is none."""
    x = getattr(call, name)
    found = tangents[name].astype(np.float64) if name in tangents else np.zeros(x.shape)
    return found if name == "q" else found.repeat(call.problem.group, axis=-3)


def weights(call: Call) -> Array:
    """The weights P, (*batch, heads_q, seq_q, seq_k), in float64, before dropout.

    Each row sums to 1 less the weight of a sink, or to 0 if it sees no key.
    """
    with np.errstate(all="ignore"):
        return attend(call).p


def statistics(call: Call) -> dict[str, Array]:
    """What `cuflash.attention_statistics` returns beside the results of `forward`, in float64, by name.

    Parameters
    ----------
    call
        A `cuflash.problem.Call` with NumPy arrays of any supported dtype.

    Returns
    -------
    maximum
        max_j S_ij, (*batch, heads_q, seq_q); −∞ in a row that sees no key.
    entropy
        −Σ_j P_ij log P_ij, (*batch, heads_q, seq_q), in nats, a sink counted as a key; 0 in a row that sees no key.
    column_sums
        Σ_i P_ij, (*batch, heads_q, seq_k); 0 for a key that no query sees.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import problem, reference
    >>> q, k = np.zeros((1, 3, 1)), np.zeros((1, 2, 1))
    >>> reference.statistics(problem.describe(q, k, k))["column_sums"]
    array([[1.5, 1.5]])
    """
    with np.errstate(all="ignore"):
        dense = attend(call)
        m = dense.s.max(axis=-1, initial=-np.inf)
        p = np.concatenate([dense.p, dense.p_sink], axis=-1)
        return {
            "maximum": np.where(np.isnan(dense.lse), np.nan, m),
            "entropy": -np.where(p == 0, 0, p * np.log(p)).sum(axis=-1) + 0.0,
            "column_sums": dense.p.sum(axis=-2),
        }


def visible(call: Call) -> NDArray[np.bool_]:
    """True where the query of the row may see the key of the column, (*batch, heads_q, seq_q, seq_k)."""
    return np.broadcast_to(visible_in(whole(call)), call.problem.score_shape)


def visible_in(tile: Tile) -> NDArray[np.bool_]:
    """The same for one tile; axes along which nothing changes may be of length 1."""
    modifiers = tile.problem.modifiers
    begin, end = np.zeros_like(tile.q), np.full_like(tile.q, tile.problem.seq_k)
    for modifier in modifiers:
        if modifier.kind == "range":
            begin, end = modifier.narrow(begin, end, tile.q, tile)
    seen = (begin <= tile.k) & (tile.k < end)
    for modifier in modifiers:
        if modifier.kind == "mask":
            seen = seen & modifier.visible(tile)
    return seen


@dataclass(frozen=True)
class Dense:
    """Everything the two directions share; every array is float64 and has one head for each query head."""

    q: Array
    k: Array
    v: Array
    seen: NDArray[np.bool_]
    s: Array  # −∞ where hidden
    p: Array
    p_sink: Array  # weights of the sinks, (*batch, heads_q, seq_q, 1); 0 where there is none
    lse: Array
    #: each score modifier with its derivatives by the score and by its operands; None is 1
    slopes: list[tuple[Any, Array | None, dict[str, Array | None]]]
    factors: Array  # of the weights behind the softmax; 1 without dropout

    @property
    def dropped(self) -> Array:
        """The weights that meet the values."""
        return self.p * self.factors


def attend(call: Call) -> Dense:
    """Scores, visibility and softmax."""
    call, problem = for_twins(call), call.problem
    q = call.q.astype(np.float64)
    k, v = (x.astype(np.float64).repeat(problem.group, axis=-3) for x in (call.k, call.v))
    tile, seen = whole(call), visible(call)

    s = problem.scale * (q @ k.swapaxes(-1, -2))
    slopes = []
    for modifier in problem.modifiers:
        if modifier.kind == "score":
            partials = {name: modifier.partial(name, s, tile) for name in modifier.differentiable}
            slopes.append((modifier, modifier.slope(s, tile), partials))
            s = modifier.apply(s, tile)
    sink = sink_of(tile)
    p, lse = softmax(s, seen, sink)
    p_sink = np.where(np.isneginf(sink), 0, np.exp(sink - lse[..., None]))
    return Dense(q, k, v, seen, np.where(seen, s, -np.inf), p, p_sink, lse, slopes, weight_factors(tile))


def weight_factors(tile: Tile) -> Array:
    """What weights are multiplied with behind the softmax; axes along which nothing changes may be of length 1."""
    for modifier in tile.problem.modifiers:
        if modifier.kind == "drop":
            return modifier.weight_factors(tile)
    return np.ones((1, 1))


def sink_of(tile: Tile) -> Array:
    """The logit of a further key that every query sees, with the axes (*batch, heads_q, 1, 1); −∞ is none."""
    for modifier in tile.problem.modifiers:
        if modifier.kind == "sum":
            return modifier.logit(tile.operands).astype(np.float64)
    return np.full((1, 1), -np.inf)


def softmax(s: Array, seen: NDArray[np.bool_], sink: Array) -> tuple[Array, Array]:
    """Weights and log-sum-exp of scores by row, over the keys in `seen` and the sink."""
    s = np.where(seen, s, -np.inf)
    m = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    shift = np.where(np.isneginf(m), 0, m)  # −∞ − (−∞) would be NaN: an empty row is shifted by 0
    e = np.exp(s - shift)
    total = e.sum(axis=-1, keepdims=True) + np.exp(sink - shift)
    p = np.where(seen & (total != 0), e / np.where(total == 0, 1, total), 0)
    lse = np.where(total == 0, -np.inf, m + np.log(np.where(total == 0, 1, total)))
    return p, lse[..., 0]


def whole(call: Call) -> Tile:
    """The one tile that covers all scores."""
    return Tile(call.problem, call.operands, slice(0, call.problem.seq_q), slice(0, call.problem.seq_k))


def seen_product(left: Array, seen: NDArray[np.bool_], right: Array) -> Array:
    """``left @ right`` over the pairs in `seen` alone; `left` is 0 outside them.

    In a plain product a NaN or an infinity in row j of `right` reaches every row of the result, because 0 · NaN is NaN.
    Here it reaches the rows that see j and no other.
    """
    finite = np.isfinite(right)
    result = left @ np.where(finite, right, 0)
    rest = np.where(finite, 0, right)
    for j in np.flatnonzero((~finite).any(axis=(*range(right.ndim - 2), -1))):
        result = result + np.where(seen[..., :, j, None], left[..., :, j, None] * rest[..., None, j, :], 0)
    return result


def sum_groups(x: Array, group: int) -> Array:
    """Sum over the query heads that share a key head: (*batch, heads_q, ...) to (*batch, heads_k, ...)."""
    *batch, heads_q, seq, dim = x.shape
    total: Array = x.reshape(*batch, heads_q // group, group, seq, dim).sum(axis=-3)
    return total
