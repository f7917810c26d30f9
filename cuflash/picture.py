"""Pictures, drawn by matplotlib: weights and received attention, tiles, the recurrence along a row, time and memory."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import api, arrays, numpy_backend
from cuflash.errors import ArgumentError, ShapeError, UnsupportedError
from cuflash.inspection import (
    OPEN,
    SKIPPED,
    TESTED,
    on_host,
    place_of,
    positions_of,
    recurrence_of,
    scores_of,
    tile_states,
    without_values,
)
from cuflash.modifiers import Modifier
from cuflash.modifiers.base import device_of
from cuflash.problem import Call

COLUMNS = 4  # heads side by side
RANGE = 1e-4  # least weight that has a colour of its own, of the largest
NAMED_ROWS = 16  # rows that have a label each
LINED_TILES = 64  # tiles of an axis that are told apart by lines
STATES = {SKIPPED: ("skipped", "#eeeeee"), TESTED: ("pairs tested", "#e8a33d"), OPEN: ("open", "#3b75af")}


def draw_attention(
    weights: Any = None, column_sums: Any = None, *, rows: Sequence[int] | None = None, title: str = ""
) -> Any:
    """A picture of the weights of chosen rows, of the attention that each key receives, or of both, head by head.

    Parameters
    ----------
    weights
        (heads, rows, seq_k) or (rows, seq_k), as from `attention_weights` for one batch entry; of any kind of array.
    column_sums
        (heads, seq_k) or (seq_k,), as from `attention_statistics` for one batch entry; of any kind of array.
    rows
        Positions of the queries in `weights`, to label them; None counts from 0.
    title
        Stands above the picture.

    Returns
    -------
    figure
        A `matplotlib.figure.Figure`, which no window shows: write it with ``figure.savefig("weights.png")``.

    Raises
    ------
    ArgumentError
        Neither array is given, or they or `rows` do not fit each other.
    UnsupportedError
        matplotlib is not installed; or there is no GPU for CUDA arrays.

    Notes
    -----
    Colours are logarithmic and the same for all heads; weights that are exactly 0, such as those of hidden keys, stay
    white.  Weights are those of Dao et al., arXiv:2205.14135, section 2.2.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k = np.zeros((1, 3, 1)), np.zeros((1, 3, 1))
    >>> weights = cuflash.attention_weights(q, k, range(3), causal=True)
    >>> sums = cuflash.attention_statistics(q, k, k, causal=True).column_sums
    >>> figure = cuflash.draw_attention(weights, sums)  # doctest: +SKIP
    """
    if weights is None and column_sums is None:
        raise ArgumentError("weights and column_sums are both None: give at least one of them to draw")
    w = stacked("weights", weights, 3, "(heads, rows, seq_k)")
    c = stacked("column_sums", column_sums, 2, "(heads, seq_k)")
    if w is not None and c is not None and (w.shape[0], w.shape[-1]) != c.shape:
        raise ShapeError(f"column_sums has shape {c.shape}: must be {(w.shape[0], w.shape[-1])}, as weights {w.shape}")
    if rows is not None and (w is None or len(rows) != w.shape[1]):
        raise ArgumentError(f"rows has {len(rows)} positions: weights has {0 if w is None else w.shape[1]} rows")
    heads = (w if w is not None else c).shape[0]  # type: ignore[union-attr]
    parts = [x for x in (w, c) if x is not None]
    heights = [2.6 if x is w else 1.6 for x in parts] * -(-heads // COLUMNS)
    figure = new_figure("draw_attention", (1 + 3.2 * min(heads, COLUMNS), 0.6 + sum(heights)), title)
    paint_attention(figure, w, c, rows, heights)
    return figure


def draw_tiles(
    q: Any,
    k: Any,
    *,
    tile: tuple[int, int] | None = None,
    entry: int = 0,
    head: int = 0,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    title: str = "",
) -> Any:
    """A picture of what a call does with each tile of its scores: skip it, compute it, or compute it and test its pairs.

    Parameters
    ----------
    q
        (*batch, heads_q, seq_q, head_dim), as for `attention`.
    k
        (*batch, heads_k, seq_k, head_dim), as for `attention`.
    tile
        Queries and keys of a tile; None is what the backend takes that `explain` names.
    entry
        Which entry of the batch, all batch axes counted together.
    head
        Which head of the queries.
    scale, causal, window, mask, bias, softcap, modifiers, layout
        As for `attention`; what changes scores and hides nothing can only change the tile.
    title
        Stands above the picture.

    Returns
    -------
    figure
        A `matplotlib.figure.Figure`, as from `draw_attention`.

    Raises
    ------
    ArgumentError
        As `attention` does, and for a tile, entry or head that does not exist.
    UnsupportedError
        As `attention` does; or matplotlib is not installed.

    Notes
    -----
    Causal masks, windows and lengths bound the keys that a tile of queries walks over; `Documents` and `BlockMask` tell by
    a glance what else is hidden; a `mask` is asked about each pair.  This is what kernels do; the NumPy backend lets tiles
    begin with the first key that their queries see.  Skipping tiles: Dao, arXiv:2307.08691, section 3.1.1.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((1, 512, 64), np.float32)
    >>> figure = cuflash.draw_tiles(q, q, tile=(64, 64), causal=True, window=(200, None))  # doctest: +SKIP
    """
    home, call = without_values(q, k, mask, bias, scale, causal, window, softcap, modifiers, layout, None)
    at = place_of(call.problem, entry, head)
    block_q, block_k = tile_of(home, call) if tile is None else checked_tile(tile)
    figure = new_figure("draw_tiles", (6, 5.6), title)
    with device_of(call.q):
        states = tile_states(call, at, block_q, block_k)
    paint_tiles(figure, states, block_q, block_k)
    return figure


def draw_recurrence(
    q: Any,
    k: Any,
    row: int,
    *,
    block: int | None = None,
    entry: int = 0,
    head: int = 0,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    title: str = "",
) -> Any:
    """A picture of the recurrence along one row: its scores, their running maximum, and the factors of correction.

    Parameters
    ----------
    q
        (*batch, heads_q, seq_q, head_dim), as for `attention`.
    k
        (*batch, heads_k, seq_k, head_dim), as for `attention`.
    row
        Position of the query; negative ones count from the end.
    block
        Keys that come together; None is what the backend takes that `explain` names.
    entry, head, title
        As for `draw_tiles`.
    scale, causal, window, mask, bias, softcap, modifiers, layout
        As for `attention`.

    Returns
    -------
    figure
        A `matplotlib.figure.Figure`, as from `draw_attention`.

    Raises
    ------
    ArgumentError
        As `attention` does, and for a row, block, entry or head that does not exist.
    UnsupportedError
        As `attention` does; or matplotlib is not installed.

    Notes
    -----
    A block with scores s moves the maximum on, m' = max(m, max s), and what was summed before changes its base by
    exp(m - m') (Dao et al., arXiv:2205.14135, algorithm 1).  Scores are computed in float64.  Sinks join behind the last key,
    and dropout follows: neither shows.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((1, 1, 64)), rng.standard_normal((1, 512, 64))
    >>> figure = cuflash.draw_recurrence(q, k, -1, block=32)  # doctest: +SKIP
    """
    home, call = without_values(q, k, mask, bias, scale, causal, window, softcap, modifiers, layout, None)
    at = place_of(call.problem, entry, head)
    (position,) = positions_of([row], call.problem.seq_q)
    columns = tile_of(home, call)[1] if block is None else checked_tile((1, block))[1]
    figure = new_figure("draw_recurrence", (7, 4.4), title)
    with device_of(call.q), np.errstate(all="ignore"):
        s, seen = scores_of(call, call.k.astype(np.float64).swapaxes(-1, -2), position)
    paint_recurrence(figure, s[at][0], np.broadcast_to(seen, s.shape)[at][0], columns)
    return figure


def draw_costs(rows: Iterable[Mapping[str, Any]], *, title: str = "") -> Any:
    """A picture of memory and time against the length, a line for each system and direction.

    Parameters
    ----------
    rows
        Measured calls, as ``python -m cuflash bench --plain --json FILE`` writes them: mappings with "system", "direction",
        "seq_k", "ms" (milliseconds) and "peak_bytes" (bytes, results included); those without a time are left out.
    title
        Stands above the picture.

    Returns
    -------
    figure
        A `matplotlib.figure.Figure`, as from `draw_attention`.

    Raises
    ------
    ArgumentError
        No row has a time.
    UnsupportedError
        matplotlib is not installed.

    Notes
    -----
    Both scales are logarithmic: a line of slope 1 is linear, one of slope 2 quadratic.  Memory in lengths: Dao et al.,
    arXiv:2205.14135, theorem 1.

    Examples
    --------
    >>> import cuflash
    >>> rows = [{"system": "cuflash", "direction": "forward", "seq_k": 512, "ms": 3.0, "peak_bytes": 1 << 20}]
    >>> figure = cuflash.draw_costs(rows)  # doctest: +SKIP
    """
    measured = [row for row in rows if row.get("ms") is not None]
    if not measured:
        raise ArgumentError("rows has no row with a time in it: pass rows with ms and peak_bytes, in numbers")
    figure = new_figure("draw_costs", (8, 3.6), title)
    paint_costs(figure, measured)
    return figure


# ---- what they share -------------------------------------------------------------------------------------------------
def matplotlib(caller: str, *names: str) -> list[Any]:
    """Modules of matplotlib, or an error that says how to get it."""
    try:
        return [importlib.import_module(f"matplotlib.{name}") for name in names]
    except ImportError:
        raise UnsupportedError(f"{caller} needs matplotlib: pip install 'cuflash[plot]'") from None


def new_figure(caller: str, size: tuple[float, float], title: str) -> Any:
    """A figure that no window shows."""
    (figures,) = matplotlib(caller, "figure")
    figure = figures.Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title)
    return figure


def tile_of(home: arrays.Home, call: Call) -> tuple[int, int]:
    """Queries and keys of a tile of the backend that computes the call."""
    if home.device is None:
        return numpy_backend.tile_sizes(call.problem, None, None)[:2]
    tile: tuple[int, int] = api.launcher().explain(call, None).tile
    return tile


def checked_tile(tile: Any) -> tuple[int, int]:
    try:
        block_q, block_k = tile
        fits = all(isinstance(n, (int, np.integer)) and n > 0 for n in (block_q, block_k))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ArgumentError(f"tile={tile!r:.80}: must be queries and keys of a tile, two integers of at least 1")
    return int(block_q), int(block_k)


def stacked(name: str, x: Any, axes: int, shape: str) -> NDArray[Any] | None:
    """The array on the host with an axis of heads, or None."""
    if x is None:
        return None
    home, native = arrays.gather({name: x})
    if home.device is not None:
        arrays.require_gpu()
    if native[name].ndim not in (axes - 1, axes):
        raise ShapeError(
            f"{name} has shape {native[name].shape}: must be {shape}, or that without heads; choose one batch entry, "
            f"for example {name}[0]"
        )
    host = on_host(native[name])
    return host if host.ndim == axes else host[None]


# ---- on a figure or a part of one ------------------------------------------------------------------------------------
def paint_attention(
    figure: Any,
    w: NDArray[Any] | None,
    c: NDArray[Any] | None,
    rows: Sequence[int] | None,
    heights: Sequence[float],
) -> None:
    """Weights (heads, rows, seq_k), received attention (heads, seq_k), or both."""
    (colors,) = matplotlib("draw_attention", "colors")
    parts = [x for x in (w, c) if x is not None]
    heads = parts[0].shape[0]
    across = min(heads, COLUMNS)
    grid = figure.subplots(len(heights), across, squeeze=False, gridspec_kw={"height_ratios": heights})
    largest = 0.0 if w is None else float(np.nan_to_num(w).max(initial=0))
    norm = colors.LogNorm(RANGE * largest, largest) if largest > 0 else None
    for axes in grid.flat:
        axes.set_visible(False)
    for head in range(heads):
        line, column = divmod(head, COLUMNS)
        for part, x in enumerate(parts):
            axes = grid[line * len(parts) + part, column]
            axes.set_visible(True)
            if part == 0:
                axes.set_title(f"head {head}", fontsize="small")
            if part == len(parts) - 1:
                axes.set_xlabel("key")
            if x is w:
                image = axes.imshow(
                    np.ma.masked_equal(x[head], 0), norm=norm, aspect="auto", interpolation="nearest", cmap="viridis_r"
                )
                axes.set_ylabel("query" if column == 0 else "")
                if rows is not None and len(rows) <= NAMED_ROWS:
                    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
                elif rows is not None:
                    axes.set_yticks([0, len(rows) - 1], [str(rows[0]), str(rows[-1])])
                if column == across - 1 and norm is not None:
                    figure.colorbar(image, ax=list(grid[line * len(parts) + part]), label="weight")
            else:
                axes.bar(np.arange(x.shape[1]), x[head], width=1.0)
                axes.set_xlim(-0.5, max(x.shape[1], 1) - 0.5)
                axes.set_ylabel("received" if column == 0 else "")


def paint_tiles(figure: Any, states: NDArray[np.int8], block_q: int, block_k: int) -> None:
    """States of all tiles."""
    colors, patches = matplotlib("draw_tiles", "colors", "patches")
    lines, columns = states.shape
    axes = figure.subplots()
    axes.imshow(
        states,
        cmap=colors.ListedColormap([color for _, color in STATES.values()]),
        vmin=min(STATES),
        vmax=max(STATES),
        extent=(0, columns * block_k, lines * block_q, 0),
        aspect="auto",
        interpolation="nearest",
    )
    if max(lines, columns) <= LINED_TILES:
        axes.hlines(np.arange(1, lines) * block_q, 0, columns * block_k, colors="white", linewidths=0.8)
        axes.vlines(np.arange(1, columns) * block_k, 0, lines * block_q, colors="white", linewidths=0.8)
    axes.set(xlabel="key", ylabel="query", title=f"tiles of {block_q} queries x {block_k} keys")
    shown = [
        patches.Patch(color=color, label=f"{word}: {np.count_nonzero(states == state)}")
        for state, (word, color) in STATES.items()
    ]
    tight = {"handlelength": 1.0, "handletextpad": 0.4, "columnspacing": 1.0, "fontsize": "small", "frameon": False}
    axes.legend(handles=shown, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(shown), **tight)


def paint_recurrence(figure: Any, s: NDArray[Any], seen: NDArray[np.bool_], block: int) -> None:
    """One row's scores, the maximum of those seen so far, and the factors by which its sums change their base."""
    m, factors = recurrence_of(s, seen, block)
    edges = np.minimum(np.arange(len(m) + 1) * block, len(s))
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
    keys = np.flatnonzero(seen)
    upper.plot(keys, s[keys], ".", markersize=3, color="0.6", label="scores s")
    upper.stairs(np.where(np.isneginf(m), np.nan, m), edges, baseline=None, color="C3", label="running maximum m")
    upper.set_ylabel("score")
    upper.legend(loc="lower right", fontsize="small")
    lower.bar(edges[:-1], np.nan_to_num(factors), np.diff(edges), align="edge", color="C0", edgecolor="white")
    lower.set(ylabel="exp(m - m')", xlabel=f"key, in blocks of {block}", ylim=(0, 1.05), xlim=(0, max(len(s), 1)))


def paint_costs(figure: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Memory and time of measured rows."""
    grid = figure.subplots(1, 2)
    names = {"cuflash": "cuflash", "plain": "plain attention"}
    for axes, name, unit in zip(grid, ("peak_bytes", "ms"), ("memory in MiB", "time in ms"), strict=True):
        for line in dict.fromkeys((row["system"], row["direction"]) for row in rows):
            own = sorted((row["seq_k"], row[name]) for row in rows if (row["system"], row["direction"]) == line)
            scale = 1 << 20 if name == "peak_bytes" else 1
            values = [value / scale for _, value in own]
            label = f"{names.get(line[0], line[0])}, {line[1]}"
            axes.plot([seq for seq, _ in own], values, "o-", markersize=4, label=label)
        axes.set(xlabel="length", ylabel=unit, xscale="log", yscale="log")
        lengths = sorted({row["seq_k"] for row in rows})
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    grid[0].legend(fontsize="small")
