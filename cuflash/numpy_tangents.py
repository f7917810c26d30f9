"""Forward mode in NumPy, tile by tile: tangents of attention, and of its gradients (Hessian times a direction).

A tangent is a direction in which an input changes; what comes out is how fast the results change with it.  The recurrence of
numpy_backend.py carries two more numbers along the keys of a row: w = Σ exp(s − m)·s', the tangent of the log-sum-exp before
the division by l, and u = Σ exp(s − m)·(s'·v + v').  They change their base as l and a do, and

    L' = w / l;  O' = u / l − L'·O.

The equations are in reference.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.gradients import differentiable_operands, gradients_type
from cuflash.modifiers import Tile
from cuflash.modifiers.base import sum_to
from cuflash.numpy_backend import (
    Array,
    Chunk,
    Derivatives,
    Seen,
    blas_ready,
    blocks,
    chunks,
    cut,
    factors_of,
    hide,
    scores,
    seen_product,
    sink_of,
    transpose,
)
from cuflash.problem import Call, for_twins


def jvp(
    call: Call,
    tangents: Mapping[str, Array],
    *,
    batch_invariant: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Output and log-sum-exp of one call, and their tangents.

    Parameters
    ----------
    call
        A `cuflash.problem.Call` with NumPy arrays of any strides; they are only read.
    tangents
        Directions in which "q", "k", "v" and the operands "bias" and "sinks" change, with the axes that these have in `call`;
        what is missing stays as it is.
    batch_invariant, block_q, block_k
        As for `numpy_backend.forward`.

    Returns
    -------
    out, dout
        (*batch, heads_q, seq_q, head_dim_v) in the dtype of q; 0 in a row that sees no key.
    lse, dlse
        (*batch, heads_q, seq_q), float32 (float64 for float64); −∞ and 0 in a row that sees no key.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import numpy_tangents, problem
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> numpy_tangents.jvp(problem.describe(q, k, v), {"k": np.array([[[0.0], [2.0]]])})[1]
    array([[[1.]]])
    """
    problem, call = call.problem, for_twins(call)
    out, dout = (np.empty(problem.out_shape, call.q.dtype) for _ in range(2))
    lse, dlse = (np.empty(problem.lse_shape, problem.accumulator) for _ in range(2))
    with np.errstate(all="ignore"):
        for moving in moving_chunks(call, tangents, block_q, block_k, batch_invariant):
            for rows in blocks(0, problem.seq_q, moving.chunk.block_q):
                at = (*moving.chunk.queries, rows)
                out[at], dout[at], lse[at], dlse[at] = jvp_rows(moving, rows)
    return out, dout, lse, dlse


def jvp_rows(moving: Moving, rows: slice) -> tuple[Array, Array, Array, Array]:
    """Output, its tangent, log-sum-exp and its tangent of one tile of queries."""
    chunk = moving.chunk
    q, dq = chunk.load_q(rows), moving.load_q(rows)
    m = np.full((*q.shape[:-1], 1), -np.inf, q.dtype)
    l, w = np.zeros_like(m), np.zeros_like(m)  # noqa: E741 (the papers' letter)
    a, u = (np.zeros((*q.shape[:-1], chunk.v.shape[-1]), q.dtype) for _ in range(2))
    for tile, seen in chunk.tiles(rows):
        s, slopes = scores(chunk, q, tile, seen)
        _, ds = moving.scores(q, dq, tile, seen, slopes)
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        shift = np.where(np.isneginf(m_new), 0, m_new)
        alpha = np.exp(m - shift)
        p = np.exp(np.subtract(s, shift, out=s), out=s)
        ds *= p
        hide(ds, seen, 0)
        for x, terms in ((l, p), (w, ds)):
            x *= alpha
            x += terms.sum(axis=-1, keepdims=True)
        if (factors := factors_of(tile, p)) is not None:
            p *= factors
            ds *= factors
        for x in (a, u):
            x *= alpha
        p_stack, seen_stack = chunk.stack(p), chunk.stack_seen(seen, p)
        columns = (..., tile.columns, slice(None))
        a += chunk.spread(seen_product(p_stack, chunk.v[columns], seen_stack))
        u += chunk.spread(seen_product(chunk.stack(ds), chunk.v[columns], seen_stack))
        if moving.v is not None:
            u += chunk.spread(seen_product(p_stack, moving.v[columns], seen_stack))
        m = m_new
    base = m
    if (sink := sink_of(chunk)) is not None:
        base = np.maximum(m, sink)
        shift = np.where(np.isneginf(base), 0, base)
        alpha, extra = np.exp(m - shift), np.exp(sink - shift)
        l = l * alpha + extra  # noqa: E741
        w = w * alpha + np.where(extra == 0, 0, extra * moving.sink())
        a *= alpha
        u *= alpha
    empty = l == 0
    total = np.where(empty, 1, l)
    lse = np.where(empty, -np.inf, base + np.log(total))
    out, dlse = np.where(empty, 0, a / total), np.where(empty, 0, w / total)
    return out, np.where(empty, 0, u / total - dlse * out), lse[..., 0], dlse[..., 0]


def hvp(
    call: Call,
    dout: Array,
    dlse: Array | None,
    tangents: Mapping[str, Array],
    *,
    batch_invariant: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Any:
    """Tangents of the gradients of one call: a named tuple as `numpy_backend.backward` returns.

    Parameters
    ----------
    call
        A `cuflash.problem.Call` with NumPy arrays; they are only read.
    dout, dlse
        Gradients of the loss with respect to output and log-sum-exp; None is 0.
    tangents
        As for `jvp`, and of "dout" and "dlse".
    batch_invariant, block_q, block_k
        As for `numpy_backend.forward`.

    Returns
    -------
    Gradients
        The derivatives of the gradients in this direction, each of the shape and dtype of its argument.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import numpy_tangents, problem
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> one = np.ones((1, 1, 1))
    >>> numpy_tangents.hvp(problem.describe(q, k, v), one, None, {"q": one, "v": v}).dk
    array([[[-1.],
            [ 1.]]])
    """
    problem = call.problem
    out, out_moved, lse, lse_moved = jvp(
        call, tangents, batch_invariant=batch_invariant, block_q=block_q, block_k=block_k
    )
    call = for_twins(call)
    names = differentiable_operands(problem.modifiers)
    tq, tk, tv = (np.empty(x.shape, x.dtype) for x in (call.q, call.k, call.v))
    sums = {name: np.zeros(call.operands[name].shape, problem.accumulator) for name in names}
    given = {"out": out, "out_moved": out_moved, "lse": lse, "lse_moved": lse_moved, "dout": dout}
    given |= {} if dlse is None else {"dlse": dlse}
    given |= {f"{name}_moved": tangents[name] for name in ("dout", "dlse") if name in tangents}
    with np.errstate(all="ignore"):
        for moving in moving_chunks(call, tangents, block_q, block_k, batch_invariant):
            chunk = moving.chunk
            chunk_tk, chunk_tv = np.zeros(chunk.k.shape, chunk.k.dtype), np.zeros(chunk.v.shape, chunk.v.dtype)
            chunk_sums = {name: cut(x, chunk.queries) for name, x in sums.items()}
            for rows in blocks(0, problem.seq_q, chunk.block_q):
                at = (*chunk.queries, rows)
                part = {name: x[at] for name, x in given.items()}
                tq[at] = hvp_rows(moving, rows, part, chunk_tk, chunk_tv, chunk_sums)
            tk[chunk.keys], tv[chunk.keys] = chunk_tk, chunk_tv
        operand_gradients = (sums[name].astype(call.operands[name].dtype, copy=False) for name in names)
        return gradients_type(names)(tq, tk, tv, *operand_gradients)


def hvp_rows(
    moving: Moving, rows: slice, given: Mapping[str, Array], tk: Array, tv: Array, sums: dict[str, Array]
) -> Array:
    """The tangent of dq of one tile of queries; adds its share to those of dk, dv and the gradients of the operands."""
    chunk = moving.chunk
    q, dq = chunk.load_q(rows), moving.load_q(rows)
    real = q.dtype

    def numbers(name: str, like: str) -> Array:
        return given[name].astype(real, order="C") if name in given else np.zeros(given[like].shape, real)

    g, dg = numbers("dout", "out"), numbers("dout_moved", "out")
    out, out_moved = numbers("out", "out"), numbers("out_moved", "out")
    delta = (g * out).sum(axis=-1, keepdims=True) - numbers("dlse", "lse")[..., None]
    delta_moved = (dg * out + g * out_moved).sum(axis=-1, keepdims=True) - numbers("dlse_moved", "lse")[..., None]
    lse, lse_moved = given["lse"][..., None], given["lse_moved"][..., None]
    empty = np.isneginf(lse)
    for x in (q, g, dg, delta, delta_moved) if dq is None else (q, dq, g, dg, delta, delta_moved):
        np.copyto(x, 0, where=empty)
    shift = np.where(empty, np.inf, lse)

    if (sink := sink_of(chunk)) is not None:
        weight = np.where(np.isneginf(sink), 0, np.exp(np.minimum(sink - shift, 0)))
        terms = np.where(weight == 0, 0, -weight * ((moving.sink() - lse_moved) * delta + delta_moved))
        for modifier in chunk.problem.modifiers:
            if modifier.kind == "sum":
                (name,) = modifier.differentiable
                sums[name] += sum_to(terms, sums[name].shape)

    tq = np.zeros_like(q)
    q_stack, g_stack, dg_stack = chunk.stack(q), chunk.stack(g), chunk.stack(dg)
    dq_stack = None if dq is None else chunk.stack(dq)
    for tile, seen in chunk.tiles(rows):
        columns = (..., tile.columns, slice(None))
        k, v = chunk.k[columns], chunk.v[columns]
        s, slopes = scores(chunk, q, tile, seen)
        entering, ds_score = moving.scores(q, dq, tile, seen, slopes)
        bend = moving.curvature(q, tile)
        p = np.subtract(s, shift, out=s)
        np.exp(np.minimum(p, 0, out=p), out=p)
        hide(p, seen, 0)
        p_moved = ds_score
        p_moved -= lse_moved
        p_moved *= p
        hide(p_moved, seen, 0)
        factors = factors_of(tile, p)
        seen_stack = chunk.stack_seen(seen, p)
        kept, kept_moved = (x if factors is None else x * factors for x in (p, p_moved))
        seen_by = transpose(seen_stack)
        tv[columns] += seen_product(transpose(chunk.stack(kept_moved)), g_stack, seen_by)
        tv[columns] += seen_product(transpose(chunk.stack(kept)), dg_stack, seen_by)

        dp = chunk.spread(np.matmul(g_stack, v.swapaxes(-1, -2)))
        dp_moved = np.matmul(dg_stack, v.swapaxes(-1, -2))
        if moving.v is not None:
            dp_moved += np.matmul(g_stack, moving.v[columns].swapaxes(-1, -2))
        dp_moved = chunk.spread(dp_moved)
        if factors is not None:
            dp *= factors
            dp_moved *= factors
        dp -= delta
        dp_moved -= delta_moved
        ds, ds_moved = p * dp, p_moved * dp + p * dp_moved
        for x in (ds, ds_moved):
            hide(x, seen, 0)
        for modifier in chunk.problem.modifiers:
            if modifier.kind == "score":  # biases: they follow everything that has a slope
                for name in modifier.differentiable:
                    modifier.add_gradient(name, ds_moved, sums[name], tile)
        for _, slope, _ in slopes:
            if slope is not None:
                ds_moved *= slope
        if bend is not None:
            ds_moved += ds * bend * entering
        for _, slope, _ in slopes:
            if slope is not None:
                ds *= slope
        for x in (ds, ds_moved):
            hide(x, seen, 0)
        ds_stack, moved_stack = chunk.stack(ds), chunk.stack(ds_moved)
        tq += chunk.spread(seen_product(moved_stack, k, seen_stack))
        if moving.k is not None:
            tq += chunk.spread(seen_product(ds_stack, moving.k[columns], seen_stack))
        tk[columns] += seen_product(transpose(moved_stack), q_stack, seen_by)  # q and dq hold the scale
        if dq_stack is not None:
            tk[columns] += seen_product(transpose(ds_stack), dq_stack, seen_by)
    tq *= chunk.problem.scale
    return tq


@dataclass(frozen=True)
class Moving:
    """A chunk, and the tangents of what it holds; None is 0."""

    chunk: Chunk
    q: Array | None
    k: Array | None
    v: Array | None
    operands: Mapping[str, Array]

    def load_q(self, rows: slice) -> Array | None:
        """Tangents of some queries in the dtype of the sums, times the scale."""
        if self.q is None:
            return None
        dq = self.q[..., rows, :].astype(self.chunk.k.dtype, order="C")
        dq *= self.chunk.problem.scale
        return dq

    def sink(self) -> Any:
        """The tangent of the sinks' logits, (*batch, heads_q, 1, 1)."""
        return self.operands["sinks"].astype(self.chunk.k.dtype) if "sinks" in self.operands else 0

    def scores(self, q: Array, dq: Array | None, tile: Tile, seen: Seen, slopes: Derivatives) -> tuple[Array, Array]:
        """Tangents of the scores of a tile, as they enter the modifiers and as they leave them; 0 where hidden."""
        chunk, columns = self.chunk, (..., tile.columns, slice(None))
        entering = np.zeros((*q.shape[:-1], tile.columns.stop - tile.columns.start), q.dtype)
        if dq is not None:
            entering += chunk.spread(np.matmul(chunk.stack(dq), chunk.k[columns].swapaxes(-1, -2)))
        if self.k is not None:
            entering += chunk.spread(np.matmul(chunk.stack(q), self.k[columns].swapaxes(-1, -2)))
        hide(entering, seen, 0)
        leaving = entering.copy()
        for _, slope, _ in slopes:
            if slope is not None:
                leaving *= slope
        if "bias" in self.operands:
            bias = self.operands["bias"]
            leaving += bias[tile.window(bias)].astype(q.dtype)
        hide(leaving, seen, 0)
        return entering, leaving

    def curvature(self, q: Array, tile: Tile) -> Array | None:
        """Second derivatives of the scores of a tile by those that enter the modifiers; None is 0."""
        chunk, scored = self.chunk, [m for m in tile.problem.modifiers if m.kind == "score"]
        if not any(m.has_slope() for m in scored):
            return None
        s = chunk.spread(np.matmul(chunk.stack(q), chunk.k[..., tile.columns, :].swapaxes(-1, -2)))
        slope, curvature = np.ones((), s.dtype), np.zeros((), s.dtype)
        for modifier in scored:
            own, bent = modifier.slope(s, tile), modifier.curvature(s, tile)
            if own is not None:  # (f(g))'' = f'' g'² + f' g''
                curvature = own * curvature + (0 if bent is None else bent * slope**2)
                slope = slope * own
            s = modifier.apply(s, tile)
        return curvature


def moving_chunks(
    call: Call, tangents: Mapping[str, Array], block_q: int | None, block_k: int | None, batch_invariant: bool
) -> Iterator[Moving]:
    """The chunks of a call with their tangents."""
    problem = call.problem
    q, k, v = (tangents.get(name) for name in "qkv")
    operands = {name: x for name, x in tangents.items() if name in call.operands}
    for chunk in chunks(call, block_q, block_k, batch_invariant):
        dk, dv = (
            None if x is None else blas_ready(x[chunk.keys], problem.accumulator, batch_invariant) for x in (k, v)
        )
        yield Moving(
            chunk,
            q=None if q is None else q[chunk.queries],
            k=dk,
            v=dv,
            operands={name: cut(x, chunk.queries) for name, x in operands.items()},
        )
