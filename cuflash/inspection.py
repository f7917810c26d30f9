"""Inspection: the weights that attention gives to every key, for a few rows; slow, and for looking at them only."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import arrays, reference
from cuflash.api import enter, present
from cuflash.errors import ArgumentError
from cuflash.modifiers import Modifier, Tile
from cuflash.modifiers.base import device_of, module_of
from cuflash.problem import Call, Problem, for_twins

SKIPPED, TESTED, OPEN = range(3)  # what happens to a tile


def attention_weights(
    q: Any,
    k: Any,
    rows: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
) -> Any:
    """The weights softmax(scale · q kᵀ) of chosen rows, which `attention` multiplies with v and never stores.

    Parameters
    ----------
    q
        (*batch, heads_q, seq_q, head_dim), as for `attention`.
    k
        (*batch, heads_k, seq_k, head_dim), as for `attention`.
    rows
        Positions of queries, in any order: a sequence of integers from -seq_q to seq_q - 1; negative ones count from the
        end.
    scale, causal, window, mask, bias, softcap, modifiers, layout
        As for `attention`.

    Returns
    -------
    weights
        (*batch, heads_q, len(rows), seq_k) in every layout, float32 (float64 for float64), of the kind of q: each row sums
        to 1, less the weight of a sink, or is 0 where the query sees no key.  With `Dropout`, they are those behind it.

    Raises
    ------
    ArgumentError
        As for `attention`, and for rows that do not exist.
    UnsupportedError
        There is no GPU for CUDA arrays.

    Notes
    -----
    Computed in float64, one row after the other, scores where the arrays are and the rest on the host: some milliseconds
    a row, in memory for these rows alone.  Equations of Dao et al., arXiv:2205.14135, section 2.2.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((1, 3, 1)), np.zeros((1, 3, 1))
    >>> cuflash.attention_weights(q, k, [1, -1], causal=True).round(3)
    array([[[0.5  , 0.5  , 0.   ],
            [0.333, 0.333, 0.333]]])
    """
    home, call = without_values(q, k, mask, bias, scale, causal, window, softcap, modifiers, layout, None)
    positions = positions_of(rows, call.problem.seq_q)
    shape = (*call.problem.lse_shape[:-1], len(positions), call.problem.seq_k)
    weights = np.empty(shape, call.problem.accumulator)
    with device_of(call.q), np.errstate(all="ignore"):
        keys = call.k.astype(np.float64).swapaxes(-1, -2)
        for index, row in enumerate(positions):
            weights[..., index, :] = weights_of(call, keys, row)[..., 0, :]
        found = module_of(call.q).asarray(weights)
    return home.give(found)


def without_values(q: Any, k: Any, mask: Any, bias: Any, *options: Any) -> tuple[arrays.Home, Call]:
    """Where the arrays are and the call that they make; the keys stand for the values, at which nobody looks."""
    home, call, _ = enter(q, k, k, present(mask=mask, bias=bias), *options)
    if home.device is not None:
        arrays.require_gpu()
    return home, call


def positions_of(rows: Any, seq_q: int) -> list[int]:
    """The rows asked for, counted from the first."""
    try:
        positions = [operator.index(row) for row in rows]
    except TypeError:
        raise ArgumentError(
            f"rows={rows!r:.80}: must be a sequence of integers, the positions of queries; write [{rows!r:.20}] for one"
        ) from None
    for row in positions:
        if not -seq_q <= row < seq_q:
            raise ArgumentError(f"rows contains {row}: must be from {-seq_q} to {seq_q - 1}, the seq of q is {seq_q}")
    return [row % seq_q for row in positions]


def weights_of(call: Call, keys: Any, row: int) -> NDArray[Any]:
    """Weights of one row, (*batch, heads_q, 1, seq_k), on the host."""
    s, tile = scored_tile(call, keys, row)
    weights = reference.softmax(s, reference.visible_in(tile), reference.sink_of(tile))[0]
    return weights * reference.weight_factors(tile)


def scores_of(call: Call, keys: Any, row: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Scores of one row, (*batch, heads_q, 1, seq_k), on the host, and which of them it sees."""
    s, tile = scored_tile(call, keys, row)
    return s, reference.visible_in(tile)


def scored_tile(call: Call, keys: Any, row: int) -> tuple[NDArray[Any], Tile]:
    """Scores of one row, (*batch, heads_q, 1, seq_k), on the host, and the tile that they are."""
    problem = call.problem
    part = slice(row, row + 1)
    q = call.q[..., part, :].astype(np.float64)
    *batch, heads_q, _, head_dim = q.shape
    stacked = q.reshape(*batch, problem.heads_k, problem.group, head_dim)  # the heads of a group share their keys
    s = on_host(module_of(q).matmul(stacked, keys)).reshape(*batch, heads_q, 1, problem.seq_k)
    s *= problem.scale
    tile = Tile(problem, operands_of(for_twins(call), part), part, slice(0, problem.seq_k))
    for modifier in problem.modifiers:
        if modifier.kind == "score":
            s = modifier.apply(s, tile)
    return s, tile


def operands_of(call: Call, part: slice) -> dict[str, NDArray[Any]]:
    """The modifiers' arrays on the host, those with an entry for each query cut to one row, which is broadcast."""
    seq_q, tables = call.problem.seq_q, {name for m in call.problem.modifiers for name in m.tables}
    return {
        name: on_host(x[..., part, :] if x.shape[-2] == seq_q and name not in tables else x)
        for name, x in call.operands.items()
    }


def on_host(x: Any) -> NDArray[Any]:
    """A NumPy array of a native one; floating-point numbers become float64."""
    if x.dtype.kind not in "biu":
        x = x.astype(np.float64)
    host: NDArray[Any] = x if isinstance(x, np.ndarray) else x.get()
    return host


# ---- one head of one entry of the batch ------------------------------------------------------------------------------
def place_of(problem: Problem, entry: Any, head: Any) -> tuple[int, ...]:
    """Index of a head: `entry` counts those of the batch, in the order of memory."""
    for name, value, count in (("entry", entry, problem.batch_size), ("head", head, problem.heads_q)):
        if not (isinstance(value, (int, np.integer)) and 0 <= value < count):
            raise ArgumentError(f"{name}={value!r:.80}: must be an integer from 0 to {count - 1}")
    return (*map(int, np.unravel_index(entry, problem.batch)), int(head))


def tile_states(call: Call, at: tuple[int, ...], block_q: int, block_k: int) -> NDArray[np.int8]:
    """What a forward does with each tile of one head, (tiles of queries, tiles of keys).

    The rule is that of kernels/attention/mask.cuh: intervals that move with the position bound what a tile of queries walks
    over, and masks that know tiles leave out some of them.  In an open tile no pair is tested.
    """
    problem = call.problem
    masks = [m for m in problem.modifiers if m.kind == "mask"]
    ranges = [m for m in problem.modifiers if m.kind == "range"]
    names = {name for m in (*masks, *ranges) for name in m.operand_attributes()}
    operands = {name: on_host(one_head(x, at)) for name, x in call.operands.items() if name in names}
    states = np.full((-(-problem.seq_q // block_q), -(-problem.seq_k // block_k)), SKIPPED, np.int8)
    for i, line in enumerate(states):
        rows = slice(i * block_q, min((i + 1) * block_q, problem.seq_q))
        tile = Tile(problem, operands, rows, slice(0, problem.seq_k))
        begin, end = np.zeros_like(tile.q), np.full_like(tile.q, problem.seq_k)
        for modifier in ranges:
            begin, end = modifier.narrow(begin, end, tile.q, tile)
        begin, end = np.broadcast_arrays(np.maximum(begin, 0), np.minimum(end, problem.seq_k))
        some = begin < end
        if not some.any():
            continue
        whole_rows = rows.stop - rows.start == block_q
        for j in range(begin[some].min() // block_k, -(-end[some].max() // block_k)):
            tile = Tile(problem, operands, rows, slice(j * block_k, min((j + 1) * block_k, problem.seq_k)))
            if any(m.tile_is_hidden(tile) for m in masks if m.knows_tiles()):
                continue
            inside = whole_rows and begin.max() <= j * block_k and (j + 1) * block_k <= end.min()
            line[j] = OPEN if inside and all(m.tile_is_clear(tile) for m in masks) else TESTED
    return states


def one_head(x: Any, at: tuple[int, ...]) -> Any:
    """A head's part of an operand, its axes kept; those of length 1 are broadcast."""
    return x[tuple(slice(None) if n == 1 else slice(i, i + 1) for n, i in zip(x.shape, at, strict=False))]


def recurrence_of(s: NDArray[Any], seen: NDArray[np.bool_], block: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The running maximum of a row behind each block of its keys, and the factor by which its sums change their base there.

    Where nothing was seen before, the sums are 0, and the factor is NaN.
    """
    s = np.where(seen, s, -np.inf)
    ends = range(block, len(s) + block, block)
    m = np.array([s[:end].max(initial=-np.inf) for end in ends])
    before = np.concatenate([[-np.inf], m[:-1]])
    with np.errstate(all="ignore"):
        return m, np.where(np.isneginf(before), np.nan, np.exp(before - m))
