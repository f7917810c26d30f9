"""`python -m cuflash weights`: how attention spreads over the keys, as a table and a picture."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import ml_dtypes
import numpy as np

import cuflash
from cuflash.cli import text
from cuflash.cli.machine import array_library, on_device, on_host, this_machine
from cuflash.errors import ArgumentError

ROWS = 64  # that are drawn unless rows are named


def run(arguments: argparse.Namespace) -> int:
    """Print what the statistics say, and draw where that is asked for."""
    q, k, described = arrays(arguments)
    xp = array_library(this_machine())
    q, k = on_device(xp, q), on_device(xp, k)
    options = {name: getattr(arguments, name) for name in ("causal", "window", "softcap", "scale")}
    found = cuflash.attention_statistics(q, k, k, backend=arguments.backend, **options)
    print(f"{described}, {q.dtype}\n")
    statistics = {name: on_host(getattr(found, name)) for name in ("maximum", "entropy", "column_sums")}
    print(heads_text(statistics, k.shape[-2]))
    if arguments.plot:
        seq_q = q.shape[-2]
        rows = arguments.rows or sorted(
            {i * (seq_q - 1) // max(min(seq_q, ROWS) - 1, 1) for i in range(min(seq_q, ROWS))}
        )
        weights = cuflash.attention_weights(q, k, rows, **options)
        named = [row % seq_q for row in rows]
        figure = cuflash.draw_attention(weights, found.column_sums, rows=named, title=described)
        figure.savefig(arguments.plot, dpi=150)
        print(f"drawn into {arguments.plot}", file=sys.stderr)
    return 0


def arrays(arguments: argparse.Namespace) -> tuple[Any, Any, str]:
    """Queries and keys of one batch entry, from files or random, and what they are."""
    if (arguments.shape is None) == (arguments.arrays is None):
        raise ArgumentError("give either a shape, for random arrays, or --arrays Q.npy K.npy")
    if arguments.arrays is None:
        q, k, _, _ = arguments.shape.arrays(arguments.dtype)
        described = f"random, {arguments.shape}"
    else:
        q, k = (load(path) for path in arguments.arrays)
        described = " and ".join(arguments.arrays)
    if q.ndim < 3 or k.ndim < 3:
        raise ArgumentError(f"arrays of shapes {q.shape} and {k.shape}: (..., heads, seq, head_dim) is needed")
    entries = int(np.prod(q.shape[:-3]))
    if not 0 <= arguments.entry < entries:
        raise ArgumentError(f"--entry {arguments.entry}: the batch has {entries} entries, counted from 0")
    at = np.unravel_index(arguments.entry, q.shape[:-3]) if q.ndim > 3 else ()
    return q[at], k[at] if q.shape[:-3] == k.shape[:-3] else k, described


def load(path: str) -> Any:
    """An array from a file of NumPy's; bfloat16, which such files do not name, is what two bare bytes are taken for."""
    try:
        x = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ArgumentError(f"--arrays {path}: {error}") from None
    return x.view(ml_dtypes.bfloat16) if x.dtype == np.dtype("V2") else x


def heads_text(statistics: dict[str, Any], seq_k: int) -> str:
    """A line for each head."""
    lines = []
    for head, (m, h, c) in enumerate(zip(*(statistics[n] for n in ("maximum", "entropy", "column_sums")), strict=True)):
        most = int(c.argmax())
        cells = (f"{m.max():.4g}", f"{h.mean():.3f}", f"{h.min():.3f}", f"{h.max():.3f}")
        share = c[most] / max(float(c.sum()), np.finfo(np.float32).tiny)
        lines.append((f"{head}", *cells, f"{most}", f"{share:.1%}"))
    header = ("head", "largest score", "entropy", "least", "most", "favourite key", "receives")
    note = f"\nentropy in nats, mean over the queries; all {seq_k} keys alike have {np.log(seq_k):.3f}"
    return text.table(header, lines, indent="") + "\n" + note
