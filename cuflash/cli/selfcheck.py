"""The self-check: whether results are right on this machine, by which backend, how fast, and in what memory."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash
from cuflash import problem, reference
from cuflash.cli import text
from cuflash.cli.bench import DIRECTIONS, Bench, Row
from cuflash.cli.machine import Machine, array_library, backends, on_device, on_host, stamp, this_machine
from cuflash.cli.plain import PlainAttention, allowed, error
from cuflash.cli.shape import Shape
from cuflash.errors import UnsupportedError

OUTPUTS = ("out", "lse", "dq", "dk", "dv")
RULE = "twice the error of plain attention in the same dtype, plus rounding of sums"


@dataclass(frozen=True)
class Scope:
    """What is checked and timed on a kind of device; everything is causal."""

    errors: Shape  # ragged on purpose: no length is a multiple of a tile
    times: Shape
    timed_dtypes: tuple[str, ...]
    repeat: int


ON_GPU = Scope(Shape(1, 8, 2, 777, 1001, 128, 128), Shape(1, 16, 16, 4096, 4096, 128, 128), ("bfloat16", "float32"), 7)
ON_CPU = Scope(Shape(1, 4, 2, 257, 301, 64, 64), Shape(1, 8, 8, 1024, 1024, 64, 64), ("float32",), 5)


@dataclass(frozen=True)
class ErrorCheck:
    """Largest absolute errors of one dtype against float64, and the largest ones that pass, by output."""

    dtype: str
    backend: str | None
    errors: dict[str, float]
    allowed: dict[str, float]
    refusal: str = ""  # why this machine does not offer the dtype
    failure: str = ""  # what broke

    @property
    def beyond(self) -> list[str]:
        """Outputs that are beyond tolerance."""
        return [name for name in self.errors if not self.errors[name] <= self.allowed[name]]

    @property
    def failed(self) -> bool:
        """Whether the dtype is offered and does not do what it should."""
        return bool(self.failure or self.beyond)

    @property
    def share(self) -> float:
        """Largest share of its tolerance that an output uses."""
        return max(self.errors[name] / self.allowed[name] for name in self.errors)


def run(arguments: argparse.Namespace) -> int:
    """Check and report: 0 if everything is within tolerance, else 1."""
    machine = this_machine()
    scope = ON_GPU if machine.devices else ON_CPU
    xp = array_library(machine)
    progress = text.Progress()
    try:
        checks = [check_errors(xp, scope.errors, dtype, progress) for dtype in problem.DTYPES]
        times = [
            row
            for dtype in scope.timed_dtypes
            for row in Bench(xp, scope.times, dtype, causal=True).rows(
                ("cuflash", "plain"), DIRECTIONS, scope.repeat, progress
            )
        ]
    finally:
        progress.done()
    passed = not any(check.failed for check in checks) and all(
        row["ms"] is not None for row in times if row["system"] == "cuflash"
    )
    if arguments.json:
        report = stamp(machine, times) | {
            "backends": backends(machine),
            "errors": [vars(check) for check in checks],
            "verdict": "PASS" if passed else "FAIL",
        }
        print(json.dumps(report, indent=2))
    else:
        print(report_text(machine, scope, checks, times))
        print(verdict(checks, passed))
    return 0 if passed else 1


def check_errors(xp: Any, shape: Shape, dtype: str, progress: text.Progress) -> ErrorCheck:
    """Forward and backward of one dtype beside the reference."""
    progress("checking errors", dtype)
    q, k, v, dout = shape.arrays(dtype)
    try:
        backend, found = fused(xp, q, k, v, dout)
    except UnsupportedError as refusal:
        return ErrorCheck(dtype, None, {}, {}, refusal=str(refusal))
    except Exception as failure:  # noqa: BLE001 - whatever broke, the report says so and goes on
        return ErrorCheck(dtype, None, {}, {}, failure=text.failure(failure))
    call = problem.describe(q, k, v, causal=True)
    exact = (*reference.forward(call), *reference.backward(call, dout))
    dense = PlainAttention(np, causal=True)
    out, lse, p = dense.forward(q, k, v)
    plain = (out, lse, *dense.backward(dout, q, k, v, out, p))
    return ErrorCheck(
        dtype,
        backend,
        {name: error(x, y) for name, x, y in zip(OUTPUTS, found, exact, strict=True)},
        {name: allowed(x, y) for name, x, y in zip(OUTPUTS, plain, exact, strict=True)},
    )


def fused(xp: Any, *host: Any) -> tuple[str, list[Any]]:
    """The backend, and the outputs in the order of OUTPUTS, back on the host."""
    q, k, v, dout = (on_device(xp, x) for x in host)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    gradients = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    return cuflash.explain(q, k, v, causal=True).backend, [on_host(x) for x in (out, lse, *gradients)]


def report_text(machine: Machine, scope: Scope, checks: list[ErrorCheck], times: list[Row]) -> str:
    """The report for a terminal, without its verdict."""
    checked = [check for check in checks if check.errors]
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if name != "cuflash")
    used = {c.backend: ", ".join(x.dtype for x in checked if x.backend == c.backend) for c in checked}
    parts = [
        f"cuflash {cuflash.__version__} self-check\n",
        text.facts(
            [
                ("machine", machine.headline),
                ("software", versions),
                *(("backend", f"{name} for {dtypes}") for name, dtypes in used.items()),
                *(("", f"not {name}: {why}") for name, why in backends(machine).items() if why and name not in used),
                *(("note", note) for note in machine.notes),
            ]
        ),
        f"\nLargest error against float64: {scope.errors}, causal\n",
        text.table(
            ("dtype", *OUTPUTS, "of tolerance", ""),
            [
                (c.dtype, *(f"{c.errors[n]:.1e}" for n in OUTPUTS), f"{c.share:.0%}", "FAIL" if c.failed else "ok")
                for c in checked
            ],
        ),
        f"\n  tolerance: {RULE}",
        *(f"  {check.dtype}: not offered here: {check.refusal}" for check in checks if check.refusal),
        *(f"  {check.dtype}: FAIL: {check.failure}" for check in checks if check.failure),
    ]
    for dtype in scope.timed_dtypes:
        parts += ["", times_text(scope, dtype, [row for row in times if row["dtype"] == dtype])]
    return "\n".join([*parts, ""])


def times_text(scope: Scope, dtype: str, rows: list[Row]) -> str:
    """Times and memory of one dtype: a line per system, a column per direction."""
    by = {(row["system"], row["direction"]): row for row in rows}

    def line(name: str, shown: Any) -> tuple[str, ...]:
        times = (shown("ms", direction, text.milliseconds) for direction in DIRECTIONS)
        return (name, *times, *(shown("peak_bytes", direction, text.size) for direction in ("forward", "step")))

    def of(system: str) -> Any:
        return lambda key, direction, form: form(by[system, direction].get(key))

    def ratio(key: str, direction: str, _form: Any) -> str:
        return text.ratio(by["plain", direction].get(key), by["cuflash", direction].get(key))

    lines = [line("cuflash", of("cuflash")), line("plain", of("plain")), line("plain : cuflash", ratio)]
    failures = dict.fromkeys(f"  {row['system']}: {row['failure']}" for row in rows if row.get("failure"))
    title = f"Time (median of {scope.repeat}) and peak memory beyond the inputs: {dtype}, {scope.times}, causal\n"
    header = ("", "forward", "backward", "whole step", "memory forward", "memory step")
    return "\n".join([title, text.table(header, lines), *failures])


def verdict(checks: list[ErrorCheck], passed: bool) -> str:
    """The last line."""
    if passed:
        return f"PASS   every output of {', '.join(c.dtype for c in checks if c.errors)} is within tolerance"
    broken = [f"{check.dtype} does not run" for check in checks if check.failure]
    beyond = [f"{check.dtype} {name} beyond tolerance" for check in checks for name in check.beyond]
    return f"FAIL   {', '.join(broken + beyond) or 'cuflash could not be timed, see above'}"
