"""`python -m cuflash bench`: time forward, backward and whole step of chosen shapes, on the device that is there."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cuflash
from cuflash.cli import text
from cuflash.cli.machine import array_library, on_device, stamp, this_machine
from cuflash.cli.measure import Clock
from cuflash.cli.plain import PlainAttention
from cuflash.cli.shape import Shape
from cuflash.errors import ArgumentError

Array = Any  # numpy.ndarray or cupy.ndarray
Row = dict[str, Any]
Call = Callable[[], Any]

DIRECTIONS = ("forward", "backward", "step")
ON_GPU = (Shape(4, 16, 16, 4096, 4096, 64, 64), Shape(4, 16, 16, 4096, 4096, 128, 128))
ON_CPU = (Shape(1, 8, 8, 512, 512, 64, 64), Shape(1, 8, 8, 1024, 1024, 64, 64))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, and write and draw the rows where that is asked for."""
    unknown = [direction for direction in arguments.directions if direction not in DIRECTIONS]
    if unknown:
        raise ArgumentError(f"--directions {','.join(unknown)}: must be some of {','.join(DIRECTIONS)}")
    if arguments.repeat < 1:
        raise ArgumentError(f"--repeat {arguments.repeat}: must be at least 1")
    if arguments.plot:
        pyplot()  # before minutes of measuring
    machine = this_machine()
    xp = array_library(machine)
    shapes = arguments.shapes or (ON_GPU if machine.devices else ON_CPU)
    dtypes = arguments.dtypes or (["bfloat16"] if machine.devices else ["float32"])
    systems = ("cuflash", "plain") if arguments.plain else ("cuflash",)
    progress, rows = text.Progress(), []
    try:
        for dtype in dtypes:
            for shape in shapes:
                bench = Bench(xp, shape, dtype, arguments.causal, arguments.backend, arguments.deterministic or None)
                rows += bench.rows(systems, arguments.directions, arguments.repeat, progress)
    finally:
        progress.done()
    print(f"{machine.headline}; {', '.join(f'{name} {version}' for name, version in machine.versions.items())}")
    print(f"{'causal' if arguments.causal else 'full'} attention, median of {arguments.repeat}\n")
    print(rows_text(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(stamp(machine, rows), indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        draw(rows, machine.headline, arguments.plot)
    return 0


@dataclass(frozen=True)
class Bench:
    """One shape and dtype, timed on NumPy arrays (`xp` is NumPy) or on CuPy arrays."""

    xp: Any
    shape: Shape
    dtype: str
    causal: bool
    backend: str | None = None  # None is cuflash's own choice
    deterministic: bool | None = None

    def rows(
        self, systems: Sequence[str], directions: Sequence[str], repeat: int, progress: text.Progress
    ) -> list[Row]:
        """A row for each system and direction; one that cannot run carries `failure` in place of figures."""
        clock = Clock(self.xp)
        arrays = tuple(on_device(self.xp, x) for x in self.shape.arrays(self.dtype))
        rows = []
        for system in systems:
            for direction in directions:
                progress("timing", f"{system} {direction} {self.dtype}, {self.shape}")
                row: Row = {
                    "system": system,
                    "backend": self.chosen(*arrays[:3]) if system == "cuflash" else None,
                    "direction": direction,
                    "dtype": self.dtype,
                    **asdict(self.shape),
                    "causal": self.causal,
                }
                try:
                    call = (self.fused if system == "cuflash" else self.plain)(direction, *arrays)
                    ms = clock.milliseconds(call, repeat)
                    tflops = self.shape.operations(direction, self.causal) / ms / 1e9
                    row |= {"ms": ms, "tflops": tflops, "peak_bytes": clock.peak_bytes(call)}
                except Exception as failure:  # noqa: BLE001
                    # CuPy without cuBLAS has no matrix product, a score matrix may not fit into memory, and a library may
                    # lack a function for bfloat16: a row that says so is worth more than no report.
                    row |= {"ms": None, "failure": text.failure(failure)}
                rows.append(row)
        return rows

    def chosen(self, q: Array, k: Array, v: Array) -> str:
        """The backend that computes the call."""
        return str(cuflash.explain(q, k, v, causal=self.causal, backend=self.backend).backend)

    def fused(self, direction: str, q: Array, k: Array, v: Array, dout: Array) -> Call:
        """A call of cuflash."""
        options: dict[str, Any] = {"causal": self.causal, "backend": self.backend}

        def forward() -> Any:
            return cuflash.attention(q, k, v, return_lse=True, **options)

        def backward(out: Array, lse: Array) -> Any:
            return cuflash.attention_backward(dout, q, k, v, out, lse, deterministic=self.deterministic, **options)

        return directed(direction, forward, backward)

    def plain(self, direction: str, q: Array, k: Array, v: Array, dout: Array) -> Call:
        """A call of plain attention."""
        dense = PlainAttention(self.xp, self.causal)

        def forward() -> Any:
            return dense.forward(q, k, v)

        def backward(out: Array, _lse: Array, p: Array) -> Any:
            return dense.backward(dout, q, k, v, out, p)

        return directed(direction, forward, backward)


def directed(direction: str, forward: Call, backward: Callable[..., Any]) -> Call:
    """The forward, the backward of a saved forward, or both."""
    if direction == "forward":
        return forward
    if direction == "step":
        return lambda: backward(*forward())
    saved = forward()
    return lambda: backward(*saved)


def rows_text(rows: list[Row]) -> str:
    """The rows as a table."""
    lines = []
    for row in rows:
        sizes = str(Shape(**{name: row[name] for name in Shape.__dataclass_fields__}))
        figures = (text.milliseconds(row["ms"]), text.rate(row.get("tflops")), text.size(row.get("peak_bytes")))
        system = f"{row['system']} ({row['backend']})" if row["backend"] else row["system"]
        lines.append((sizes, row["dtype"], row["direction"], system, *figures))
    header = ("shape", "dtype", "direction", "system", "time", "rate", "memory")
    failures = dict.fromkeys(f"  {row['system']}: {row['failure']}" for row in rows if row["ms"] is None)
    return "\n".join([text.table(header, lines, left=4, indent=""), *failures])


def pyplot() -> Any:
    """matplotlib, drawing to files, or an error that says how to get it."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise ArgumentError("--plot needs matplotlib: pip install 'cuflash[plot]'") from None
    matplotlib.use("agg")
    return importlib.import_module("matplotlib.pyplot")


def draw(rows: list[Row], title: str, path: str) -> None:
    """Bars of TFLOP/s, a group for each shape, dtype and direction."""
    plt = pyplot()
    measured = [row for row in rows if row["ms"] is not None]
    systems = list(dict.fromkeys(row["system"] for row in measured))
    groups = list(dict.fromkeys(group_label(row) for row in measured))
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.45 * len(groups) * len(systems)), layout="constrained")
    height = 0.8 / max(len(systems), 1)
    for index, system in enumerate(systems):
        own = [row for row in measured if row["system"] == system]
        places = [groups.index(group_label(row)) + index * height for row in own]
        bars = axes.barh(places, [row["tflops"] for row in own], height, label=system)
        axes.bar_label(bars, [text.milliseconds(row["ms"]) for row in own], padding=3)
    axes.set_yticks([at + 0.4 - height / 2 for at in range(len(groups))], groups)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.set_title(title)
    axes.margins(x=0.12)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"drawn into {path}", file=sys.stderr)


def group_label(row: Row) -> str:
    shape = Shape(**{name: row[name] for name in Shape.__dataclass_fields__})
    return f"{row['direction']}, {row['dtype']}\n{shape}"
