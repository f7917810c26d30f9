"""Text for a terminal: aligned tables, numbers with units, and a progress line that stays out of the output."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, indent: str = "  ") -> str:
    """Aligned columns: the first `left` to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = (x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        return (indent + "   ".join(cells)).rstrip()

    return "\n".join(text(line) for line in lines)


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Name and value, a line each."""
    pairs = list(pairs)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}   {value}".rstrip() for name, value in pairs)


def milliseconds(value: float | None) -> str:
    """Time in ms, with three digits that matter."""
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.3f} ms"


def size(count: float | None) -> str:
    """Bytes in the unit that reads well."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def failure(error: BaseException) -> str:
    """What went wrong, in one line with the kind of error in front."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def rate(tflops: float | None) -> str:
    """Arithmetic per second, in the unit that reads well."""
    if tflops is None:
        return "-"
    return f"{tflops:.3g} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.3g} GFLOP/s"


def ratio(numerator: float | None, denominator: float | None) -> str:
    """How many times as large, or "-" where one of the two is missing."""
    return f"{numerator / denominator:.2f}x" if numerator is not None and denominator else "-"


class Progress:
    """Says on stderr what is going on: a line that is overwritten on a terminal, a short line per stage elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self.stage_shown = ""

    def __call__(self, stage: str, detail: str = "") -> None:
        """Enter a stage, or a step of it."""
        if self.live:
            self.stream.write(f"\r\x1b[K{stage}{': ' if detail else ''}{detail} ...")
        elif stage != self.stage_shown:
            self.stream.write(f"{stage} ...\n")
        self.stage_shown = stage
        self.stream.flush()

    def done(self) -> None:
        """Take the line away."""
        if self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
