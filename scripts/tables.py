"""Print README's tables from the measured results, so that no figure in it is typed by hand.

    python scripts/tables.py            # rewrite README.md between its markers
    python scripts/tables.py --check    # exit 1 if README.md is not what the results say

A table stands between ``<!-- table: NAME TOPIC -->`` and ``<!-- end of table -->``.  NAME is a file in scripts/results/
and TOPIC what its rows call so; or NAME is "package", and the table is printed from the package itself, with what all files say.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the package of this checkout

from cuflash import backends, decode_plan
from cuflash.cli import text
from cuflash.errors import UnsupportedError
from cuflash.modifiers import Scales
from cuflash.problem import DTYPES, NARROW, Problem
from cuflash.schedules import decode as schedule

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "scripts" / "results"
MARKED = re.compile(r"(<!-- table: (\S+) ([^>]+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
SYSTEMS = {
    "cuflash": "cuflash",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "torch-efficient": "memory-efficient",
    "torch-math": "plain, float64",
    "torch": "PyTorch",
    "plain": "plain NumPy",
    "xla": "XLA",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if README.md would change")
    arguments = parser.parse_args()
    before = README.read_text(encoding="utf-8")
    after = filled(before, RESULTS)
    if arguments.check:
        if before != after:
            print("README.md is not what scripts/results/ says; run: python scripts/tables.py", file=sys.stderr)
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    return 0


def filled(document: str, results: Path) -> str:
    """The document with every marked table printed from its results."""

    def printed(match: re.Match[str]) -> str:
        head, file, topic, tail = match.groups()
        body = PACKAGE[topic](results) if file == "package" else table(results / f"{file}.json", topic)
        return f"{head}{body}\n{tail}"

    return MARKED.sub(printed, document)


def table(path: Path, topic: str) -> str:
    """One topic of a result file as Markdown, with its source below."""
    if topic not in TOPICS:
        raise SystemExit(f"README.md asks for a table of {topic!r}: known are {', '.join(TOPICS)}")
    if not path.exists():
        return f"*Not measured yet: `scripts/results/{path.name}` does not exist.*"
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in result["rows"] if row["topic"] == topic]
    measured = [row for row in rows if not row.get("failure")]
    failures = dict.fromkeys(f"*{name(row)}: {row['failure']}*" for row in rows if row.get("failure"))
    parts = [TOPICS[topic](measured)] if measured else ["*Nothing could be measured.*"]
    return "\n\n".join([*parts, *failures, source(path, result, on_gpu=not topic.endswith("processor"))])


def source(path: Path, result: dict[str, Any], on_gpu: bool) -> str:
    """Where, when and how the figures were measured."""
    device = f"{result['gpu']}, driver {result['driver']}" if on_gpu else result["processor"]
    names = ("cuflash", "numpy", *(("cupy", "nvrtc", "torch", "jax", "cudnn") if on_gpu else ()), "onnx")
    versions = ", ".join(f"{n} {result['versions'][n]}" for n in names if n in result["versions"])
    return f"<sub>{device}; {versions}; {result['date']}; `scripts/results/{path.name}`, by `{result['command']}`</sub>"


def name(row: Row) -> str:
    """The system as a reader knows it."""
    return SYSTEMS.get(row["system"], row["system"])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table; the first `left` columns are text, the others numbers."""
    rule = [":--" if column < left else "--:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def grouped(rows: list[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by the values of some keys, then by system."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), {})[row["system"]] = row
    return groups


def systems_of(rows: list[Row]) -> list[str]:
    """cuflash first, then the others as they come."""
    return list(dict.fromkeys(["cuflash", *(row["system"] for row in rows)]))


def seq_and_batch(row: Row) -> str:
    return f"{row['batch']} x {row['heads_q']} x {row['seq_q']} x {row['head_dim']}"


# ---- printed from the package ----------------------------------------------------------------------------------------
GPUS = {
    75: "Turing (T4, RTX 20)",
    80: "Ampere (A100)",
    86: "Ampere (A10, A40, RTX 30)",
    87: "Orin",
    89: "Ada (L4, L40, RTX 40)",
    90: "Hopper (H100, H200)",
    100: "Blackwell (B200)",
    103: "Blackwell (B300)",
    120: "Blackwell (RTX 50, RTX PRO)",
    121: "Blackwell (DGX Spark)",
}


def support(_: Path) -> str:
    """Which backend computes a dtype on a GPU, and what the backends differ in."""
    x = {dtype: problem_of(dtype) for dtype in (*DTYPES, NARROW)}
    lines = []
    for capability in backends.SHARED_LIMITS:
        device = backends.described_device(capability)
        cells = []
        for dtype in x:
            try:
                cells.append(f"`{backends.select(x[dtype], device, {})[0].name}`")
            except UnsupportedError:
                cells.append("-")
        lines.append((GPUS.get(capability, "-"), f"sm_{capability}", *cells))
    lines.append(("none", "host", *["`numpy`"] * len(x)))
    differences = [
        (
            f"`{b.name}`",
            b.summary,
            f"{b.max_head_dim}",
            "with `deterministic=True`",
        )
        for b in backends.BACKENDS
    ]
    differences.append(("`numpy`", "tiles in NumPy", "any", "always"))
    header = ("backend", "what it is", "largest head size", "backward repeats bit for bit")
    return "\n\n".join(
        [
            markdown(("GPU", "architecture", *DTYPES, "8 bits, forward"), lines, left=7),
            markdown(header, differences, left=4),
        ]
    )


def problem_of(dtype: str) -> Problem:
    """An ordinary call of a dtype."""
    modifiers = (Scales(),) if dtype == NARROW else ()
    return Problem(dtype, (1,), 8, 8, 1024, 1024, 64, 64, scale=0.125, modifiers=modifiers)


#: a case in which most methods were measured
MEASURED = {"head_dim": 128, "seq_q": 4096}
ACCURACY = {"seq_q": 2048, "factor": 1}  # and that of rows of the topic accuracy
#: files and topics in which speeds stand, the first that has a case counts, and those that have errors against float64
SPEEDS = (
    ("h200-hopper", ("hopper",)),
    ("h200-halves", ("halves",)),
    ("h200-foundation", ("speed",)),
    ("h200-precision", ("float32", "precision")),
    ("h200-narrow", ("narrow",)),
)
ERRORS = (
    ("h200-accuracy", ("accuracy",)),
    ("h200-precision", ("float32", "precision")),
    ("h200-narrow", ("narrow",)),
)
MEASURED_CAPABILITY = 90  # of the device on which they were


def methods(results: Path) -> str:
    """How each backend multiplies, by dtype and architecture, with speeds and errors where they were measured."""
    lines, used = [], set()
    for title, problem in multiplied():
        for backend in backends.BACKENDS:
            for method, capabilities in methods_of(problem, backend.name).items():
                cells = ["-", "-"]
                if MEASURED_CAPABILITY in capabilities:
                    for column, (sources, key, form) in enumerate(
                        ((ERRORS, "error", ".1e"), (SPEEDS, "tflops", ".0f"))
                    ):
                        found = [measured(results, sources, problem, backend.name, d, key) for d in DIRECTIONS]
                        used |= {row[0] for row in found if row}
                        values = [format(row[1], form) if row else "-" for row in found]
                        cells[column] = " / ".join(values) if any(found) else "-"
                lines.append((title, f"`{backend.name}`", architectures(capabilities), method, *cells))
    lines.append(("all", "`numpy`", "host", "matrix products of NumPy", "-", "-"))
    header = ("dtype", "backend", "architecture", "products by", "error, forward / backward", "TFLOP/s")
    return "\n\n".join([markdown(header, lines, left=4), *sources_of(results, sorted(used))])


DIRECTIONS = ("forward", "backward")


def multiplied() -> Iterator[tuple[str, Problem]]:
    """Ordinary calls by the dtype and precision of their products."""
    for dtype in DTYPES:
        yield dtype, problem_of(dtype)
        if dtype == "float32":
            yield '`"tf32"`', replace(problem_of(dtype), precision="tf32")
    yield NARROW, problem_of(NARROW)


def methods_of(problem: Problem, backend: str) -> dict[str, list[int]]:
    """Capabilities on which a backend takes a problem, by how it multiplies there."""
    found: dict[str, list[int]] = {}
    for capability in backends.SHARED_LIMITS:
        methods = {direction: method_of(problem, backend, capability, direction) for direction in DIRECTIONS}
        told = [method for method in methods.values() if method]
        if methods["forward"]:
            found.setdefault("; backward by ".join(dict.fromkeys(told)), []).append(capability)
    return found


def method_of(problem: Problem, backend: str, capability: int, direction: str) -> str | None:
    """How a backend multiplies in a direction; None where it does not take the problem."""
    device, backward = backends.described_device(capability), direction == "backward"
    if backward and problem.dtype == NARROW:  # which has no gradients
        return None
    try:
        chosen, _ = backends.select(problem, device, {}, requested=backend, backward=backward)
    except UnsupportedError:
        return None
    method: str = getattr(chosen.schedule_of(problem), direction)(problem, device.shared_limit, True).method
    return method


def architectures(capabilities: Sequence[int]) -> str:
    """Their names, in few words."""
    known = list(backends.SHARED_LIMITS)
    if len(capabilities) > 1 and list(capabilities) == known[known.index(capabilities[0]) :]:
        return f"sm_{capabilities[0]} and later"
    return ", ".join(f"sm_{capability}" for capability in capabilities)


def measured(
    results: Path, sources: Any, problem: Problem, backend: str, direction: str, key: str
) -> tuple[str, float] | None:
    """The file that has a figure of the measured case, and the figure."""
    chosen = backends.select(problem, backends.described_device(MEASURED_CAPABILITY), {})[0].name
    wanted = {"system": "cuflash", "direction": direction, "dtype": problem.dtype, "causal": False, **MEASURED}
    for file, topics in sources:
        path = results / f"{file}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        for topic in topics:
            same = {**wanted, **ACCURACY} if topic == "accuracy" else wanted
            for row in rows:
                is_it = row["topic"] == topic and row.get(key) is not None
                is_it = is_it and all(row.get(name) == value for name, value in same.items())
                is_it = is_it and row["head_dim_v"] == row["head_dim"] and row["heads_k"] == row["heads_q"]
                if is_it and row.get("backend", chosen) == backend and row.get("precision") == problem.precision:
                    return file, row[key]
    return None


def sources_of(results: Path, files: Sequence[str]) -> list[str]:
    """Where and when the figures of several files were measured."""
    found = [(file, json.loads((results / f"{file}.json").read_text(encoding="utf-8"))) for file in files]
    if not found:
        return []
    dates = ", ".join(f"`scripts/results/{file}.json` of {result['date']}" for file, result in found)
    gpus = ", ".join(dict.fromkeys(result["gpu"] for _, result in found))
    case = f"head size {MEASURED['head_dim']}, {MEASURED['seq_q']} queries and keys ({ACCURACY['seq_q']} for 16-bit errors)"
    return [f"<sub>{gpus}; {case}, full; {dates}</sub>"]


def decode_support(_: Path) -> str:
    """What computes decode calls, by dtype and the lowest compute capability."""
    lines = []
    for name, needed in (("mma", decode_plan.MMA_CAPABILITIES), ("simt", decode_plan.SIMT_CAPABILITIES)):
        cells = [f"sm_{needed[dtype]} and later" if dtype in needed else "-" for dtype in DTYPES]
        lines.append((f"`{name}`", *cells, f"{schedule.MAX_HEAD_DIM}"))
    lines.append(("`numpy`", *["the host"] * len(DTYPES), "any"))
    return markdown(("decode", *DTYPES, "largest head size"), lines, left=6)


PACKAGE: dict[str, Callable[[Path], str]] = {"support": support, "methods": methods, "decode": decode_support}


# ---- printed from results --------------------------------------------------------------------------------------------
def speed(rows: list[Row]) -> str:
    """TFLOP/s of every system, and the speed of cuflash as a multiple of the first other one."""
    keys = ("dtype", "head_dim", "seq_q", "causal", "direction")
    groups, systems = grouped(rows, keys), systems_of(rows)
    lines = []
    for by_system in groups.values():
        row = next(iter(by_system.values()))
        rates = [f"{by_system[s]['tflops']:.1f}" if s in by_system else "-" for s in systems]
        peer = by_system.get(systems[1]) if len(systems) > 1 else None
        own = by_system.get("cuflash")
        share = text.ratio(peer and peer["ms"], own and own["ms"])
        mask = "causal" if row["causal"] else "full"
        lines.append((row["dtype"], seq_and_batch(row), mask, row["direction"], *rates, share))
    names = [SYSTEMS.get(system, system) for system in systems]
    against = [f"{names[0]} : {names[1]}"] if len(names) > 1 else [""]
    header = ("dtype", "batch x heads x seq x head_dim", "mask", "TFLOP/s", *names, *against)
    return markdown(header, lines, left=4)


def hopper(rows: list[Row]) -> str:
    """TFLOP/s of every system, cuflash as a multiple of the best other one, and the geometric means of these by direction."""
    keys = ("direction", "head_dim", "head_dim_v", "batch", "heads_q", "heads_k", "seq_q", "causal")
    systems = systems_of(rows)
    lines, shares = [], {}
    for values, by_system in grouped(rows, keys).items():
        direction, head_dim, head_dim_v, batch, heads_q, heads_k, seq, causal = values
        heads = f"{heads_q}" if heads_q == heads_k else f"{heads_q}/{heads_k}"
        size = f"{head_dim}" if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"
        rates = [f"{by_system[s]['tflops']:.0f}" if s in by_system else "-" for s in systems]
        others = [row["ms"] for system, row in by_system.items() if system != "cuflash"]
        share = min(others) / by_system["cuflash"]["ms"] if others and "cuflash" in by_system else None
        if share is not None:
            shares.setdefault(direction, []).append(share)
        mask = "causal" if causal else "full"
        ratio = f"{share:.2f}" if share is not None else "-"
        lines.append((f"{batch} x {heads} x {seq} x {size}", mask, direction, *rates, ratio))
    for direction, values in shares.items():
        mean = math.prod(values) ** (1 / len(values))
        lines.append(("geometric mean", "", direction, *[""] * len(systems), f"**{mean:.2f}**"))
    names = [SYSTEMS.get(system, system) for system in systems]
    header = ("batch x heads x seq x head_dim", "mask", "TFLOP/s", *names, "cuflash : best other")
    return markdown(header, sorted(lines, key=lambda line: line[2] != "forward"), left=3)


def precision(rows: list[Row]) -> str:
    """Speed and error of the wide dtypes: each has a peer of its own."""
    lines = []
    for by_system in grouped(rows, ("dtype", "head_dim", "causal", "direction")).values():
        own = by_system.pop("cuflash", None)
        peer = next(iter(by_system.values()), None)
        row = own or peer
        if row is None:
            continue
        cells = [f"{r['tflops']:.1f}" if r else "-" for r in (own, peer)]
        errors = [f"{r['error']:.1e}" if r and r.get("error") is not None else "-" for r in (own, peer)]
        share = text.ratio(peer and peer["ms"], own and own["ms"])
        mask = "causal" if row["causal"] else "full"
        case = row["dtype"], str(row["head_dim"]), mask, row["direction"]
        lines.append((*case, name(peer) if peer else "-", *cells, share, *errors))
    header = (
        "dtype",
        "head size",
        "mask",
        "direction",
        "other system",
        "cuflash TFLOP/s",
        "other",
        "cuflash : other",
        "cuflash error",
        "other",
    )
    return markdown(header, lines, left=5)


def float32(rows: list[Row]) -> str:
    """float32 by plain multiply-adds, by tensor cores, and with precision="tf32"."""
    kinds = {
        "`simt`": ("simt", None),
        "`mma`": ("mma", None),
        "`wgmma`": ("wgmma", None),
        '`"tf32"`': ("mma", "tf32"),
        '`"tf32"` by `wgmma`': ("wgmma", "tf32"),
    }
    measured = {(row["backend"], row.get("precision")) for row in rows}
    return side_by_side(rows, {title: kind for title, kind in kinds.items() if kind in measured})


def narrow(rows: list[Row]) -> str:
    """8-bit inputs beside the same numbers in bfloat16."""
    titled = [{**row, "backend": row["dtype"]} for row in rows]
    return side_by_side(titled, {"8 bits": ("float8_e4m3fn", None), "bfloat16": ("bfloat16", None)})


def side_by_side(rows: list[Row], kinds: dict[str, tuple[str, str | None]]) -> str:
    """TFLOP/s and errors of calls that differ in backend and precision, a column each."""
    lines = []
    cases = dict.fromkeys((r["head_dim"], r["seq_q"], r["causal"], r["direction"]) for r in rows)
    for head_dim, seq, causal, direction in cases:
        same = [
            r
            for r in rows
            if (r["head_dim"], r["seq_q"], r["causal"], r["direction"]) == (head_dim, seq, causal, direction)
        ]
        found = {(r["backend"], r.get("precision")): r for r in same}
        chosen = [found.get(kind) for kind in kinds.values()]
        cells = [f"{r['tflops']:.1f}" if r else "-" for r in chosen]
        errors = [f"{r['error']:.1e}" if r and r.get("error") is not None else "-" for r in chosen]
        lines.append((str(head_dim), str(seq), "causal" if causal else "full", direction, *cells, *errors))
    header = ("head size", "seq", "mask", "direction", *(f"{x} TFLOP/s" for x in kinds), *(f"{x} error" for x in kinds))
    return markdown(header, lines, left=4)


def inputs(rows: list[Row]) -> str:
    """Errors of float32 by each backend, by what was done to the inputs."""
    named = list(dict.fromkeys(row["backend"] for row in rows))
    columns = list(product(("forward", "backward"), named))
    found = {(row["head_dim"], row["inputs"], row["direction"], row["backend"]): row["error"] for row in rows}
    lines = []
    for case in dict.fromkeys((row["head_dim"], row["inputs"]) for row in rows):
        errors = [found.get((*case, *column)) for column in columns]
        lines.append((*map(str, case), *("-" if error is None else f"{error:.1e}" for error in errors)))
    titles = (f"{direction}, `{backend}`" for direction, backend in columns)
    return markdown(("head size", "inputs", *titles), lines, left=2)


def memory(rows: list[Row]) -> str:
    """Memory beyond the inputs."""
    lines = []
    for by_system in grouped(rows, ("direction",)).values():
        own = by_system["cuflash"]
        peers = [text.size(row["peak_bytes"]) for system, row in by_system.items() if system != "cuflash"]
        figures = (own["peak_bytes"], own["extra_bytes"], own["score_matrix_bytes"])
        lines.append((own["direction"], seq_and_batch(own), *map(text.size, figures), *(peers or ["-"])))
    header = (
        "direction",
        "batch x heads x seq x head_dim",
        "cuflash, results included",
        "beyond the results",
        "one score matrix would be",
        SYSTEMS["fa2"],
    )
    return markdown(header, lines, left=2)


def host(rows: list[Row]) -> str:
    """Host time of a small call."""
    own = {"forward": "", "backward": ", backward"}
    lines = [(name(row) + own[row["direction"]], f"{row['us']:.1f} us") for row in rows]
    return markdown(("a small call, repeated", "host time"), lines, left=1)


def first_call(rows: list[Row]) -> str:
    """First calls of a process."""
    lines = [(row["direction"], row["cache"], f"{row['ms'] / 1e3:.2f} s") for row in rows]
    return markdown(("first call", "kernel cache", "time"), lines, left=2)


def processor(rows: list[Row]) -> str:
    """The NumPy backend beside plain attention."""
    lines = []
    for by_system in grouped(rows, ("seq_q", "direction")).values():
        own, plain = by_system["cuflash"], by_system["plain"]
        times = (text.milliseconds(own["ms"]), text.milliseconds(plain["ms"]))
        sizes = (text.size(own["peak_bytes"]), text.size(plain["peak_bytes"]))
        lines.append((seq_and_batch(own), own["direction"], *times, *sizes))
    header = (
        "batch x heads x seq x head_dim, float32, causal",
        "direction",
        "cuflash",
        "plain NumPy",
        "memory cuflash",
        "plain NumPy",
    )
    return markdown(header, lines, left=2)


def sparse(rows: list[Row]) -> str:
    """Times by the share of visible pairs, a column each."""
    shares = list(dict.fromkeys(row["visible"] for row in rows))
    groups: dict[tuple[Any, ...], dict[float, Row]] = {}
    for row in rows:
        groups.setdefault((row["head_dim"], row["direction"], row["pattern"]), {})[row["visible"]] = row
    lines = []
    for (_, direction, pattern), by_share in groups.items():
        row = next(iter(by_share.values()))
        cells = [text.milliseconds(by_share[share]["ms"]) if share in by_share else "-" for share in shares]
        lines.append((f"{seq_and_batch(row)}, {row['dtype']}", direction, pattern, *cells))
    header = ("batch x heads x seq x head_dim", "direction", "pattern", *(f"{share:.0%} visible" for share in shares))
    return markdown(header, lines, left=3)


def packed(rows: list[Row]) -> str:
    """Times by the mix of lengths, a column for each system."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("head_dim", "causal", "lengths", "direction"))
        groups.setdefault(key, {})[row["system"]] = row
    lines = []
    for (head_dim, causal, lengths, direction), by_system in groups.items():
        row = next(iter(by_system.values()))
        cells = [text.milliseconds(by_system[s]["ms"]) if s in by_system else "-" for s in systems]
        shape = f"{row['seq_q']} x {row['heads_q']} x {head_dim}, {row['dtype']}"
        lines.append((shape, "causal" if causal else "full", lengths, direction, *cells))
    names = {"cuflash": "cuflash, packed", "cuflash batch": "cuflash, as a batch"}
    names |= {f"fa{n}": f"FlashAttention-{n}, packed" for n in (2, 3, 4)}
    header = ("rows x heads x head_dim", "mask", "lengths", "direction", *(names.get(s, s) for s in systems))
    return markdown(header, lines, left=4)


def decode(rows: list[Row]) -> str:
    """GB/s of keys and values, on the GPU and of single calls, beside a kernel that only reads."""
    keys = ("batch", "heads_q", "heads_k", "seq_k", "cache")
    groups, systems = grouped(rows, keys), [s for s in systems_of(rows) if s != "read"]
    ceilings = {tuple(row[key] for key in keys[:-1]): row for row in rows if row["system"] == "read"}
    lines = []
    for values, by_system in groups.items():
        batch, heads_q, heads_k, seq_k, cache = values
        read = ceilings.get(values[:-1])
        rates = [f"{by_system[s]['gbps']:.0f}" if s in by_system else "-" for s in systems]
        singles = [f"{by_system[s]['gbps_single']:.0f}" if s in by_system else "-" for s in systems]
        ceiling = f"{read['gbps']:.0f}" if read else "-"
        if any(s in by_system for s in systems):
            lines.append((f"{batch} x {heads_q}/{heads_k} x {seq_k}", cache, *rates, ceiling, *singles))
    names = [SYSTEMS.get(system, system) for system in systems]
    header = ("batch x heads x keys", "cache", *(f"{n}, GPU" for n in names), "reading alone")
    return markdown((*header, *(f"{n}, single calls" for n in names)), lines, left=2)


def turns(rows: list[Row]) -> str:
    """What deterministic=True costs a backward."""
    lines = []
    for row in rows:
        shape = f"{seq_and_batch(row)}, {row['backend']}"
        cost = f"{row['ms'] / row['ms_free'] - 1:+.0%}"
        times = [text.milliseconds(row[name]) for name in ("ms_free", "ms")]
        lines.append((shape, "causal" if row["causal"] else "full", *times, cost))
    header = ("batch x heads x seq x head_dim", "mask", "backward", "deterministic", "cost")
    return markdown(header, lines, left=2)


def use(rows: list[Row]) -> str:
    """What share of their clocks tensor cores need for the products, and how many clocks there are."""
    lines = []
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        clock = f"{row['clocks'] / row['ms'] / 1e3:.0f}"
        lines.append((seq_and_batch(row), mask, row["direction"], f"{row['use']:.0%}", clock))
    header = ("batch x heads x seq x head_dim", "mask", "", "of the tensor cores' clocks", "clock, MHz")
    return markdown(header, lines, left=3)


def bias(rows: list[Row]) -> str:
    """What share of the speed without a bias is left with one of each broadcast shape."""
    return shares(rows, "pattern", "axes of the bias")


def written(rows: list[Row]) -> str:
    """What share of an option's speed an expression has that does the same."""
    return shares(rows, "form", "form")


def shares(rows: list[Row], key: str, header: str) -> str:
    """The share of the first one's speed that the second of two calls has, a line for each `key`."""
    columns = dict.fromkeys((row["backend"], row["head_dim"], row["direction"]) for row in rows)
    found = {(row[key], row["backend"], row["head_dim"], row["direction"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(row[key] for row in rows):
        cells = (found.get((name, *column)) for column in columns)
        lines.append((name, *("-" if row is None else f"{row['ms_free'] / row['ms']:.2f}" for row in cells)))
    titles = (f"`{backend}` d {head_dim} {direction}" for backend, head_dim, direction in columns)
    return markdown((header, *titles), lines, left=1)


def onnx(rows: list[Row]) -> str:
    """How many of ONNX's node tests each backend passes, by opset, and what becomes of the others."""
    opsets = sorted({row["opset"] for row in rows})
    lines = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        own = [row for row in rows if row["backend"] == backend]
        cells = []
        for part in (*([row for row in own if row["opset"] == opset] for opset in opsets), own):
            cells.append(f"{sum(row['verdict'] == 'passed' for row in part)} of {len(part)}")
        cells += [f"{sum(row['verdict'] == verdict for row in own)}" for verdict in ("nearer", "refused", "failed")]
        lines.append(("as chosen" if backend == "chosen" else f"`{backend}`", *cells))
    header = ("node tests of Attention", *(f"opset {opset}" for opset in opsets), "all", "nearer", "refused", "failed")
    return markdown(header, lines, left=1)


def masked_rows(rows: list[Row]) -> str:
    """What systems make of a row that sees no key."""
    lines = [(name(row), f"{row['out']:.2g}", f"{row['dq']:.2g}", "yes" if row["finite"] else "no") for row in rows]
    header = ("a row that sees no key", "output", "gradient of the query", "all finite")
    return markdown(header, list(dict.fromkeys(lines)), left=1)  # the host answers as the GPU does


TOPICS: dict[str, Callable[[list[Row]], str]] = {
    "decode": decode,
    "speed": speed,
    "hopper": hopper,
    "use": use,
    "precision": precision,
    "float32": float32,
    "narrow": narrow,
    "inputs": inputs,
    "memory": memory,
    "host": host,
    "first call": first_call,
    "processor": processor,
    "sparse": sparse,
    "sparse processor": sparse,
    "turns": turns,
    "bias": bias,
    "written": written,
    "packed": packed,
    "packed processor": packed,
    "onnx": onnx,
    "onnx processor": onnx,
    "jax": speed,
    "jax processor": speed,
    "jax masked rows": masked_rows,
}


if __name__ == "__main__":
    sys.exit(main())
