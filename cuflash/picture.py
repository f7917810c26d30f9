"""Picture: the weights of rows and the attention that keys receive, drawn head by head by matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import arrays
from cuflash.errors import ArgumentError, ShapeError, UnsupportedError
from cuflash.inspection import on_host

COLUMNS = 4  # heads side by side
RANGE = 1e-4  # least weight that has a colour of its own, of the largest
NAMED_ROWS = 16  # rows that have a label each


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
    try:
        figures, colors = (importlib.import_module(f"matplotlib.{name}") for name in ("figure", "colors"))
    except ImportError:
        raise UnsupportedError("draw_attention needs matplotlib: pip install 'cuflash[plot]'") from None
    heads = (w if w is not None else c).shape[0]  # type: ignore[union-attr]
    parts = [x for x in (w, c) if x is not None]
    across = min(heads, COLUMNS)
    lines = -(-heads // COLUMNS)
    heights = [2.6 if x is w else 1.6 for x in parts] * lines
    figure = figures.Figure(figsize=(1 + 3.2 * across, 0.6 + sum(heights)), layout="constrained")
    if title:
        figure.suptitle(title)
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
    return figure


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
