"""Tiled attention in NumPy: FlashAttention's recurrence in linear memory, and the backend of a machine without a GPU.

The scores of one call fill a (seq_q, seq_k) matrix per head.  Here only one tile of it exists at a time, and each query
row carries three numbers along its keys: m, the largest score so far; l = Σ exp(s − m); a = Σ exp(s − m)·v.  A tile
with scores s moves them on (Dao et al., arXiv:2205.14135, algorithm 1; Milakov & Gimelshein, arXiv:1805.02867):

    m' = max(m, max s);  α = exp(m − m');  p = exp(s − m');  l ← α·l + Σ p;  a ← α·a + p·V;  m ← m'

with the result a / l and the log-sum-exp L = m + log l.  Both l and a change their base with α.  The backward makes a
tile of P again as exp(s − L), so it needs no more than O and L from the forward.

Axes: arrays are (*batch, heads, seq, dim).  Query heads that share a key head are stacked below each other,
(*batch, heads_k, group · rows, dim), so that keys and values are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import segments
from cuflash.arrays import named_dtype
from cuflash.decode_problem import DecodeCall, append, entries
from cuflash.gradients import differentiable_operands, gradients_type
from cuflash.modifiers import BlockMask, Modifier, Tile
from cuflash.modifiers.base import sum_to
from cuflash.problem import Call, Problem, for_twins

Array = NDArray[Any]
Seen = NDArray[np.bool_] | None  # which scores of a tile may be seen; None is all of them

# Tiles have about TILE_SCORES scores: 512 KiB in float32, so that the two or three alive stay in a second-level cache,
# and still large enough that a product takes 100 times as long as its call.  On one core, for float32, 8 heads, 2048
# positions and head_dim 64, forward / backward take 149 / 305 ms with tiles of 128 × 256, 142 / 300 with 256 × 512, and
# 139 / 429 with 512 × 2048; with a causal mask, where few rows waste less at the diagonal, 91 / 189 with 256 × 512 and
# 118 / 283 with 512 × 2048.
TILE_ROWS = 256
TILE_SCORES = 1 << 17
NOTHING = -2000.0  # a logarithm whose exponential is 0 in every dtype
# Where a mask knows at a glance what is hidden, tiles are put together from as many columns; they have fewer rows if the
# mask's blocks do, but not so few that calls take longer than products.
GLANCE_COLUMNS = 128
TILE_LEAST = 64


def forward(
    call: Call,
    out: Array | None = None,
    *,
    statistics: Mapping[str, Array] | None = None,
    batch_invariant: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Array, Array]:
    """Output and log-sum-exp of one call.

    Parameters
    ----------
    call
        A `cuflash.problem.Call` with NumPy arrays of any strides; they are only read.
    out
        Where to write the output, (*batch, heads_q, seq_q, head_dim_v), of any strides; None makes a new array.
    statistics
        Arrays to write statistics into, by name: "maximum" and "entropy", (*batch, heads_q, seq_q), and "column_sums",
        (*batch, heads_q, seq_k); None is none.
    batch_invariant
        Whether each batch entry is computed as if it were alone.
    block_q, block_k
        Rows and columns of a tile; None chooses them.

    Returns
    -------
    out
        (*batch, heads_q, seq_q, head_dim_v) in the dtype of q; 0 in a row that sees no key.
    lse
        (*batch, heads_q, seq_q), natural logarithm, float32 (float64 for float64); −∞ in a row that sees no key.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import numpy_backend, problem
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> numpy_backend.forward(problem.describe(q, k, v))[0]
    array([[[2.]]])
    """
    problem = call.problem
    if problem.is_packed:
        packed, lse = segments.forward(
            call,
            call.q.dtype,
            problem.accumulator,
            lambda part: forward(part.call, block_q=block_q, block_k=block_k),
        )
        if out is None:
            return packed, lse
        out[...] = packed
        return out, lse
    call = for_twins(call)
    inputs = (call.q, call.k, call.v, *call.operands.values())
    direct = out is not None and not any(np.may_share_memory(out, x) for x in inputs)
    result = out if out is not None and direct else np.empty(problem.out_shape, named_dtype(problem.out_dtype))
    lse = np.empty(problem.lse_shape, problem.accumulator)
    asked = statistics or {}
    with np.errstate(all="ignore"):  # infinities and NaN of the input are results here, not accidents
        for chunk in chunks(call, block_q, block_k, batch_invariant):
            for rows in blocks(0, problem.seq_q, chunk.block_q):
                at = (*chunk.queries, rows)
                result[at], lse[at], maximum, entropy = forward_rows(chunk, rows, "entropy" in asked)
                for name, x in (("maximum", maximum), ("entropy", entropy)):
                    if name in asked:
                        asked[name][at] = x
            if "column_sums" in asked:
                asked["column_sums"][chunk.queries] = column_sums(chunk, lse[chunk.queries])
        if out is not None and not direct:
            out[...] = result
            result = out
    return result, lse


def forward_rows(chunk: Chunk, rows: slice, with_entropy: bool = False) -> tuple[Array, Array, Array, Array | None]:
    """Output, log-sum-exp, largest score and, if asked for, entropy of one tile of queries: the recurrence over its keys.

    The entropy is log l − u / l with u = Σ exp(s − m)·(s − m), which changes its base as l does, and by what m moves.
    """
    q = chunk.load_q(rows)
    m = np.full((*q.shape[:-1], 1), -np.inf, q.dtype)
    l = np.zeros_like(m)  # noqa: E741 (the papers' letter)
    a = np.zeros((*q.shape[:-1], chunk.v.shape[-1]), q.dtype)
    u = np.zeros_like(m) if with_entropy else None
    for tile, seen in chunk.tiles(rows):
        s, _ = scores(chunk, q, tile, seen)
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        # While a row has seen nothing its maximum is −∞, and −∞ − (−∞) is NaN: for this step it is shifted by 0.
        shift = np.where(np.isneginf(m_new), 0, m_new)
        alpha = np.exp(m - shift)
        power = np.subtract(s, shift, out=s)
        p = np.exp(power, out=None if with_entropy else s)
        if u is not None:
            u = np.where(alpha == 0, 0, alpha * (u + (m - shift) * l))
            u += (p * np.maximum(power, NOTHING)).sum(axis=-1, keepdims=True)  # what is hidden weighs 0; 0 · −∞ is NaN
        l *= alpha  # noqa: E741
        l += p.sum(axis=-1, keepdims=True)  # noqa: E741
        if (factors := factors_of(tile, p)) is not None:
            p *= factors
        a *= alpha
        a += chunk.spread(seen_product(chunk.stack(p), chunk.v[..., tile.columns, :], chunk.stack_seen(seen, p)))
        m = m_new
    base = m
    if (sink := sink_of(chunk)) is not None:  # one more term, whose value is 0
        base = np.maximum(m, sink)
        shift = np.where(np.isneginf(base), 0, base)
        alpha, extra = np.exp(m - shift), np.exp(sink - shift)
        if u is not None:
            u = np.where(alpha == 0, 0, alpha * (u + (m - shift) * l)) + extra * np.maximum(sink - shift, NOTHING)
        l = l * alpha + extra  # noqa: E741
        a *= alpha
    empty = l == 0
    total = np.where(empty, 1, l)
    lse = np.where(empty, -np.inf, base + np.log(total))
    entropy = None if u is None else np.where(empty, 0, np.maximum(np.log(total) - u / total, 0))[..., 0]
    return np.where(empty, 0, a / total), lse[..., 0], np.where(np.isnan(lse), lse, m)[..., 0], entropy


def sink_of(chunk: Chunk) -> Array | None:
    """Logits of the chunk's sinks, (*batch, heads_q, 1, 1), in the dtype of the sums; None where there are none."""
    for modifier in chunk.problem.modifiers:
        if modifier.kind == "sum":
            return modifier.logit(chunk.operands).astype(chunk.k.dtype)
    return None


def factors_of(tile: Tile, weights: Array) -> Array | None:
    """What the weights of a tile are multiplied with behind the softmax, in their dtype; None where nothing is dropped."""
    for modifier in tile.problem.modifiers:
        if modifier.kind == "drop":
            return modifier.weight_factors(tile).astype(weights.dtype, copy=False)
    return None


def column_sums(chunk: Chunk, lse: Array) -> Array:
    """Sum of each key's weights over all queries, head by head: the weights come back tile by tile as exp(s − L)."""
    sums = np.zeros((*lse.shape[:-1], chunk.problem.seq_k), lse.dtype)
    for rows in blocks(0, chunk.problem.seq_q, chunk.block_q):
        q = chunk.load_q(rows)
        shift = lse[..., rows, None]
        shift = np.where(np.isneginf(shift), np.inf, shift)
        for tile, seen in chunk.tiles(rows):
            s, _ = scores(chunk, q, tile, seen)
            p = np.exp(np.minimum(np.subtract(s, shift, out=s), 0, out=s), out=s)
            hide(p, seen, 0)  # not 0 already where the row's L is NaN
            sums[..., tile.columns] += p.sum(axis=-2)
    return sums


def decode(call: DecodeCall, out: Array) -> tuple[Array, Array]:
    """Output and log-sum-exp of one decode call: each entry of the batch is a forward over the keys that it has.

    Parameters
    ----------
    call
        A `cuflash.decode_problem.DecodeCall` with NumPy arrays; new keys are written into its caches.
    out
        Where to write the output, (batch, heads_q, seq_q, head_dim_v), of any strides, apart from the inputs.

    Returns
    -------
    out, lse
        As from `forward`.
    """
    append(call)
    lse = np.empty(call.problem.lse_shape, call.problem.accumulator)
    for entry, part in entries(call):
        out[entry], lse[entry] = forward(part)
    return out, lse


def backward(
    call: Call,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None = None,
    *,
    batch_invariant: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
) -> Any:
    """Gradients of one call: a named tuple (dq, dk, dv, then those of a bias and of sinks).

    Parameters
    ----------
    call
        The `cuflash.problem.Call` of the forward; its arrays are only read.
    out, lse
        What `forward` returned for it.
    dout
        Gradient of the loss with respect to the output, (*batch, heads_q, seq_q, head_dim_v).
    dlse
        The same for the log-sum-exp, (*batch, heads_q, seq_q); None is 0.
    batch_invariant
        Whether each batch entry is computed as if it were alone.
    block_q, block_k
        Rows and columns of a tile; None chooses them.

    Returns
    -------
    Gradients
        dq, dk and dv have the shapes and the dtype of q, k and v; dbias those of ``call.operands["bias"]``.

    Notes
    -----
    Equations of arXiv:2205.14135, appendix B.  Sums run in one fixed order: equal calls give equal bits.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import numpy_backend, problem
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> call = problem.describe(q, k, v)
    >>> numpy_backend.backward(call, *numpy_backend.forward(call), np.ones((1, 1, 1))).dv
    array([[[0.5],
            [0.5]]])
    """
    problem = call.problem
    if problem.is_packed:
        return segments.backward(
            call,
            call.q.dtype,
            lambda part: backward(
                part.call,
                out[..., part.rows, :],
                lse[..., part.rows],
                dout[..., part.rows, :],
                None if dlse is None else dlse[..., part.rows],
                block_q=block_q,
                block_k=block_k,
            ),
        )
    call = for_twins(call)
    names = differentiable_operands(problem.modifiers)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (call.q, call.k, call.v))
    sums = {name: np.zeros(call.operands[name].shape, problem.accumulator) for name in names}
    with np.errstate(all="ignore"):
        for chunk in chunks(call, block_q, block_k, batch_invariant):
            chunk_dk, chunk_dv = np.zeros(chunk.k.shape, chunk.k.dtype), np.zeros(chunk.v.shape, chunk.v.dtype)
            chunk_sums = {name: cut(x, chunk.queries) for name, x in sums.items()}
            for rows in blocks(0, problem.seq_q, chunk.block_q):
                at = (*chunk.queries, rows)
                row_dlse = None if dlse is None else dlse[at]
                dq[at] = backward_rows(
                    chunk, rows, out[at], lse[at], dout[at], row_dlse, chunk_dk, chunk_dv, chunk_sums
                )
            dk[chunk.keys], dv[chunk.keys] = chunk_dk, chunk_dv
        operand_gradients = (sums[name].astype(call.operands[name].dtype, copy=False) for name in names)
        return gradients_type(names)(dq, dk, dv, *operand_gradients)


def backward_rows(
    chunk: Chunk,
    rows: slice,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    dk: Array,
    dv: Array,
    sums: dict[str, Array],
) -> Array:
    """dq of one tile of queries; adds its share to dk, dv and the gradients of the operands."""
    q = chunk.load_q(rows)
    g = dout.astype(q.dtype, order="C")
    delta = np.sum(g * out.astype(q.dtype), axis=-1, keepdims=True)
    if dlse is not None:
        delta -= dlse[..., None]
    # A row that saw nothing passes nothing back whatever stands in it; exp(s − ∞) makes its weights 0.
    empty = np.isneginf(lse)[..., None]
    for x in (q, g, delta):
        np.copyto(x, 0, where=empty)
    shift = np.where(empty, np.inf, lse[..., None])

    if (sink := sink_of(chunk)) is not None:
        weight = np.where(np.isneginf(sink), 0, np.exp(np.minimum(sink - shift, 0)))
        part = np.where(weight == 0, 0, -weight * delta)  # dP of a value of 0 is 0
        for modifier in chunk.problem.modifiers:
            if modifier.kind == "sum":
                (name,) = modifier.differentiable
                sums[name] += sum_to(part, sums[name].shape)

    dq = np.zeros_like(q)
    q_stack, g_stack = chunk.stack(q), chunk.stack(g)
    for tile, seen in chunk.tiles(rows):
        columns = (..., tile.columns, slice(None))
        k, v = chunk.k[columns], chunk.v[columns]
        s, slopes = scores(chunk, q, tile, seen)
        p = np.subtract(s, shift, out=s)
        if p.max() > 0:  # P cannot exceed 1, but huge scores and their L may round far apart
            np.minimum(p, 0, out=p)
        np.exp(p, out=p)
        hide(p, seen, 0)  # not 0 already where the row's L is NaN
        factors = factors_of(tile, p)
        p_stack, seen_stack = chunk.stack(p if factors is None else p * factors), chunk.stack_seen(seen, p)
        dv[columns] += seen_product(transpose(p_stack), g_stack, transpose(seen_stack))
        ds = chunk.spread(np.matmul(g_stack, v.swapaxes(-1, -2)))
        if factors is not None:
            ds *= factors
        ds -= delta
        ds *= p
        hide(ds, seen, 0)
        for modifier, slope, partials in reversed(slopes):
            for name in modifier.differentiable:
                partial = partials[name]
                terms = ds if partial is None else np.where(ds == 0, 0, ds * partial)
                modifier.add_gradient(name, terms, sums[name], tile)
            if slope is not None:
                ds *= slope
                hide(ds, seen, 0)
        ds_stack = chunk.stack(ds)
        dq += chunk.spread(seen_product(ds_stack, k, seen_stack))
        dk[columns] += seen_product(transpose(ds_stack), q_stack, transpose(seen_stack))  # q holds the scale
    dq *= chunk.problem.scale
    return dq


Derivatives = list[tuple[Modifier, Array | None, dict[str, Array | None]]]


def scores(chunk: Chunk, q: Array, tile: Tile, seen: Seen) -> tuple[Array, Derivatives]:
    """Scores of one tile, −∞ where hidden, and each score modifier with its derivatives by the score and by its operands.

    A derivative that is None is 1.
    """
    s = chunk.spread(np.matmul(chunk.stack(q), chunk.k[..., tile.columns, :].swapaxes(-1, -2)))
    slopes: Derivatives = []
    for modifier in tile.problem.modifiers:
        if modifier.kind == "score":
            partials = {name: modifier.partial(name, s, tile) for name in modifier.differentiable}
            slopes.append((modifier, modifier.slope(s, tile), partials))
            s = modifier.apply(s, tile)
    hide(s, seen, -np.inf)
    return s, slopes


@dataclass(frozen=True)
class Chunk:
    """Some of a call's heads, handled together: a long head comes alone, many short ones share each NumPy call.

    `keys` and `queries` cut the chunk out of arrays with the axes (*batch, heads_k, ...) and (*batch, heads_q, ...);
    `q` is a view, `k` and `v` have the dtype of the sums and rows that a BLAS takes without a copy.
    """

    problem: Problem
    block_q: int
    block_k: int
    keys: tuple[slice, ...]
    queries: tuple[slice, ...]
    q: Array
    k: Array
    v: Array
    operands: dict[str, Array]

    def load_q(self, rows: slice) -> Array:
        """Queries of some rows in the dtype of the sums, times the scale."""
        q = self.q[..., rows, :].astype(self.k.dtype, order="C")
        q *= self.problem.scale
        return q

    def stack(self, x: Array) -> Array:
        """View (*batch, heads_q, rows, n) as (*batch, heads_k, group · rows, n)."""
        *batch, heads, rows, n = x.shape
        return x.reshape(*batch, heads // self.problem.group, self.problem.group * rows, n)

    def spread(self, x: Array) -> Array:
        """The inverse of `stack`."""
        *batch, heads, rows, n = x.shape
        return x.reshape(*batch, heads * self.problem.group, rows // self.problem.group, n)

    def stack_seen(self, seen: Seen, scores: Array) -> Seen:
        """`seen` with the axes of the stacked scores; copied only if an axis was broadcast."""
        if seen is None or self.problem.group == 1:
            return seen
        return self.stack(np.broadcast_to(seen, scores.shape))

    def tiles(self, rows: slice) -> Iterator[tuple[Tile, Seen]]:
        """The tiles in which some query of `rows` sees some key, in the order of the keys."""
        problem = self.problem
        tile = Tile(problem, self.operands, rows, slice(0, problem.seq_k), self.queries)
        begin = np.zeros((rows.stop - rows.start, 1), np.int64)
        end = np.full_like(begin, problem.seq_k)
        for modifier in problem.modifiers:
            if modifier.kind == "range":
                begin, end = modifier.narrow(begin, end, tile.q, tile)
        begin, end = np.broadcast_arrays(np.maximum(begin, 0), np.minimum(end, problem.seq_k))
        some = begin < end
        if not some.any():
            return
        masks = [modifier for modifier in problem.modifiers if modifier.kind == "mask"]
        glancing = [modifier for modifier in masks if modifier.knows_tiles()]
        for columns in self.spans(int(begin[some].min()), int(end[some].max()), rows, glancing):
            tile = Tile(problem, self.operands, rows, columns, self.queries)
            tested = [modifier for modifier in masks if not modifier.tile_is_clear(tile)]
            seen: Seen = None
            if tested or begin.max() > columns.start or end.min() < columns.stop:
                seen = (begin <= tile.k) & (tile.k < end)
                for modifier in tested:
                    seen = seen & modifier.visible(tile)
                if not seen.any():
                    continue
            yield tile, seen

    def spans(self, begin: int, end: int, rows: slice, masks: list[Modifier]) -> Iterator[slice]:
        """Columns of tiles from `begin` to `end`, without what the masks know to be hidden."""
        if not masks:
            yield from blocks(begin, end, self.block_k)
            return
        step = min(
            [GLANCE_COLUMNS, self.block_k, *(max(TILE_LEAST, m.size[1]) for m in masks if isinstance(m, BlockMask))]
        )
        start = begin
        for piece in blocks(begin, end, step):
            hidden = any(m.tile_is_hidden(Tile(self.problem, self.operands, rows, piece)) for m in masks)
            if start < piece.start and (hidden or piece.stop - start > self.block_k):
                yield slice(start, piece.start)
                start = piece.start
            if hidden:
                start = piece.stop
        if start < end:
            yield slice(start, end)


def chunks(call: Call, block_q: int | None, block_k: int | None, batch_invariant: bool = False) -> Iterator[Chunk]:
    """Cut a call into chunks whose tiles of scores fit the cache.

    Entries that share a chunk share its tiles, which cover the keys that any of them sees, and a BLAS may round by the size
    of a product.  `batch_invariant` gives each entry chunks of its own, and the BLAS rows of one pitch.
    """
    problem = call.problem
    rows, columns, heads = tile_sizes(problem, block_q, block_k)
    shape = (*problem.batch, problem.heads_k)
    for keys in entry_boxes(shape, heads) if batch_invariant else boxes(shape, heads):
        *batch, part = keys
        queries = (*batch, slice(part.start * problem.group, part.stop * problem.group))
        yield Chunk(
            problem,
            block_q=rows,
            block_k=columns,
            keys=keys,
            queries=queries,
            q=call.q[queries],
            k=blas_ready(call.k[keys], problem.accumulator, batch_invariant),
            v=blas_ready(call.v[keys], problem.accumulator, batch_invariant),
            operands={name: cut(x, queries) for name, x in call.operands.items()},
        )


def cut(operand: Array, queries: tuple[slice, ...]) -> Array:
    """A chunk's part of an operand, as a view; an axis of length 1 is broadcast and stays."""
    lead = zip(operand.shape, queries, strict=False)
    return operand[tuple(slice(None) if n == 1 else part for n, part in lead)]


def tile_sizes(problem: Problem, block_q: int | None, block_k: int | None) -> tuple[int, int, int]:
    """Rows and columns of a tile, and how many key heads share one: about TILE_SCORES scores together."""
    rows = block_q or max(1, min(problem.seq_q, TILE_ROWS // min(problem.group, 16)))
    columns = block_k or max(1, min(problem.seq_k, TILE_SCORES // (rows * problem.group)))
    heads = max(1, TILE_SCORES // (rows * columns * problem.group))
    for modifier in problem.modifiers:
        if isinstance(modifier, BlockMask):
            rows = block_q or min(rows, max(TILE_LEAST, modifier.size[0]))
    return rows, columns, heads


def boxes(shape: tuple[int, ...], count: int) -> Iterator[tuple[slice, ...]]:
    """Cut an index space into boxes of at most `count` points, in memory order; each box is one slice per axis."""
    if 0 in shape:  # wherever the 0 stands, no box has a point
        return
    inner, axis = 1, len(shape) - 1
    while axis > 0 and inner * shape[axis] <= count:
        inner *= shape[axis]
        axis -= 1
    rest = tuple(slice(0, n) for n in shape[axis + 1 :])
    for outer in np.ndindex(*shape[:axis]):
        for part in blocks(0, shape[axis], max(1, count // max(1, inner))):
            yield (*(slice(i, i + 1) for i in outer), part, *rest)


def entry_boxes(shape: tuple[int, ...], count: int) -> Iterator[tuple[slice, ...]]:
    """The same without a box that holds more than one index of the axes before the last."""
    for outer in np.ndindex(*shape[:-1]):
        for part in blocks(0, shape[-1], count):
            yield (*(slice(i, i + 1) for i in outer), part)


def blocks(start: int, stop: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most `step` from `start` to `stop`."""
    for i in range(start, stop, step):
        yield slice(i, min(i + step, stop))


def blas_ready(x: Array, dtype: str, always_copied: bool = False) -> Array:
    """`x` in that dtype with rows that a BLAS takes as they are; a copy only if it is not so already, or if asked for."""
    *_, row, column = x.strides
    ready = x.dtype == dtype and column == x.itemsize and row % x.itemsize == 0 and row >= x.shape[-1] * x.itemsize
    ready = ready and x.flags.aligned and not always_copied
    return x if ready else x.astype(dtype, order="C")


def seen_product(left: Array, right: Array, seen: Seen) -> Array:
    """``left @ right`` over the pairs in `seen`; `left` is 0 outside them.

    In a plain product a NaN or an infinity in row j of `right` reaches every row of the result, because 0 · NaN is NaN.
    Here it reaches the rows that see j and no other.
    """
    if seen is None or math.isfinite(right.sum()):  # a sum tells it at once; one that overflows costs only time
        product: Array = np.matmul(left, right)
        return product
    finite: Array = np.isfinite(right)
    result: Array = np.matmul(left, np.where(finite, right, 0))
    rest = np.where(finite, 0, right)
    reached = ~finite & np.any(seen, axis=-2, keepdims=True).swapaxes(-1, -2)
    for j in np.flatnonzero(reached.any(axis=(*range(reached.ndim - 2), -1))):
        result += np.where(seen[..., :, j, None], left[..., :, j, None] * rest[..., None, j, :], 0)
    return result


def hide(x: Array, seen: Seen, value: float) -> None:
    """Write `value` where nothing may be seen."""
    if seen is not None:
        np.copyto(x, value, where=~seen)


def transpose(x: Any) -> Any:
    return None if x is None else x.swapaxes(-1, -2)
