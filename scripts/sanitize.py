"""Every kernel under compute-sanitizer: memcheck, racecheck and synccheck, initcheck too with --initcheck.

    python scripts/sanitize.py [--initcheck] [--jobs N] [--only TEXT]

The kernels are compiled first, without the sanitizer; then each case and tool is a process of its own that runs this file
with ``--case NAME``.  Every array has an allocation of its own, so that a byte beyond it is noticed.  Prints a table, and
the sanitizer's own words for whatever failed; a line for each process goes to stderr as it ends.  The exit status is not 0
if anything failed.

racecheck does not follow a __syncwarp in front of an arrival at an mbarrier, so under it all lanes of a warp arrive in place
of one (hw/copy_tma.cuh); nor does it follow barriers that only a part of a block meets at or waits at, so under it the halves
of a block of backward_f64.cu meet as a whole wherever one of them does (AS_FOLLOWED).
synccheck takes two warpgroups that meet at a named barrier from two places of the code for divergent ones, as those of
backward_wgmma_split.cu do; so it says of a kernel of ten lines that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "synccheck")
ERROR = 9  # exit status that the sanitizer gives a process in which it found something
TIMEOUT = 150  # seconds for one process


@dataclass(frozen=True)
class Case:
    """A ragged call, a little longer than a tile; `pitch` further elements lie between the rows, so 1 is unaligned."""

    backend: str
    dtype: str
    pitch: int
    options: str

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.dtype}-{'unaligned' if self.pitch else 'aligned'}-{self.options}"


def cases() -> Iterator[Case]:
    """Every backend and dtype, aligned and not; on the aligned ones all options together, turns, packs, and all the rest."""
    from cuflash import decode_plan
    from cuflash.backends import BACKENDS

    for row in BACKENDS:
        for dtype in row.capabilities:
            for options in ("plain", "everything", "turns"):
                yield Case(row.name, dtype, 0, options)
            if row.name == "simt" or dtype != "float32":  # whose packed sequences are simt's
                yield Case(row.name, dtype, 0, "packed")
            if row.name == "wgmma":  # which takes aligned arrays, and has no statistics
                for options in ("causal", "wide", "parted", "documents", "blocks", "bias"):
                    if dtype != "float32" or options in ("causal", "wide"):  # nor the others for float32
                        yield Case(row.name, dtype, 0, options)
            else:
                yield Case(row.name, dtype, 1, "causal")
                yield Case(row.name, dtype, 0, "statistics")
                if (row.name, dtype) != ("mma", "float32"):  # which leaves forward mode to simt
                    yield Case(row.name, dtype, 0, "tangents")
                    yield Case(row.name, dtype, 1, "tangents")
    for backend, dtypes in (("mma", decode_plan.MMA_CAPABILITIES), ("simt", decode_plan.SIMT_CAPABILITIES)):
        for dtype, pitch in product(dtypes, (0, 1)):
            yield Case(backend, dtype, pitch, "decode")


# What racecheck does not follow, and what takes its place under it: no less is written or read, no more of it ordered than a
# barrier of all orders.  Both halves of backward_f64.cu meet in the order of the half that has scores.
AS_FOLLOWED = {
    "hw/copy_tma.cuh": (("kArrivingLanes = 1;", "kArrivingLanes = 32;"),),
    "backward_f64.cu": (
        ("if (before >= 0) bar_sync(kPRead, Config::kThreads);", "if (before >= 0) __syncthreads();\n__syncthreads();"),
        ("bar_arrive(kPWritten, Config::kThreads);", "__syncthreads();"),
        ("bar_sync(kDpWritten, Config::kThreads);", "__syncthreads();"),
        ("[] { bar_arrive(kDsWritten, Config::kThreads); }", "[] { __syncthreads(); }"),
        ("bar_sync(kFirstHalf, kHalfThreads);", "__syncthreads();"),
        (
            "if (before >= 0) bar_sync(kDsWritten, Config::kThreads);",
            "if (before >= 0) {\n__syncthreads();\n__syncthreads();\nif (steps > 0) __syncthreads();\n}",
        ),
        ("bar_sync(kSecondHalf, kHalfThreads);  // dO has arrived", "__syncthreads();  // dO has arrived"),
        ("bar_arrive(kDpWritten, Config::kThreads);", "__syncthreads();"),
        ("bar_sync(kPWritten, Config::kThreads);", "__syncthreads();"),
        ("if (next_steps > 0) bar_arrive(kPRead, Config::kThreads);", ""),
    ),
}


def as_followed(path: str, text: str) -> str:
    """Source of a file below kernels/ as racecheck follows it."""
    for old, new in AS_FOLLOWED.get(path, ()):
        if text.count(old) != 1:
            raise SystemExit(f"{path} no longer says {old!r} once")
        text = text.replace(old, new)
    return text


def build_as_followed() -> None:
    """Build the kernels of this process so."""
    from cuflash import source

    read = source.read
    source.read = lambda path: as_followed(path, read(path))


def run(case: Case) -> None:
    """Forward and backward of one case; raises if a result is not finite."""
    import cupy
    import ml_dtypes
    import numpy as np

    import cuflash

    # The pool would put several arrays into one allocation, and leave freed memory accessible.
    cupy.cuda.set_allocator(None)
    dtype: Any = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    bits = f"u{dtype.itemsize}"
    rng = np.random.default_rng(0)
    wide = 128 if case.dtype == "float32" else 256
    sizes = {"bias": (72, 136, 64, 64), "wide": (200, 133, wide, wide), "parted": (200, 200, 192, 128)}
    seq_q, seq_k, dim, dim_v = sizes.get(case.options, (70, 133, 40, 40))

    def array(*shape: int) -> Any:
        host = rng.standard_normal((*shape[:-1], shape[-1] + case.pitch)).astype(dtype)
        return cupy.asarray(host.view(bits)).view(dtype)[..., : shape[-1]]

    if case.options == "decode":
        pool_k, pool_v, new_k, new_v = (
            array(390, 2, 16, dim),
            array(390, 2, 16, dim),
            array(3, 2, 2, dim),
            array(3, 2, 2, dim),
        )
        lengths = cupy.asarray(np.array([2000, 0, 1333], np.int32))
        table = cupy.asarray(rng.permutation(390).reshape(3, 130).astype(np.int32))
        given = {"page_table": table, "k_new": new_k, "v_new": new_v, "backend": case.backend}
        out = cuflash.attention_decode(array(3, 4, 2, dim), pool_k, pool_v, lengths, **given)
        cupy.cuda.Device().synchronize()
        check_finite(case, {"out": out})
        return
    if case.options == "packed":
        check_packed(case, array)
        return
    q, dout = array(1, 4, seq_q, dim), array(1, 4, seq_q, dim_v)
    k, v = array(1, 2, seq_k, dim), array(1, 2, seq_k, dim_v)
    real = np.float64 if case.dtype == "float64" else np.float32
    known = {"plain": {}, "causal": {"causal": True}, "turns": {"causal": True}, "statistics": {"causal": True}}
    known |= {"tangents": {"causal": True, "softcap": 3.0}, "wide": {"causal": True}, "parted": {"causal": True}}
    known |= {"bias": {"bias": array(4, seq_q, seq_k)}}
    hiding = (
        cuflash.Documents(*(cupy.asarray(np.arange(n, dtype=np.int32) // 50) for n in (seq_q, seq_k))),
        cuflash.BlockMask(cupy.asarray(rng.random((4, -(-seq_q // 16), -(-seq_k // 16))) < 0.7), 16),
    )
    known |= {
        name: {"causal": True, "modifiers": (m,)} for name, m in zip(("documents", "blocks"), hiding, strict=True)
    }
    options: dict[str, Any] = known.get(case.options) or {
        "causal": True,
        "window": (100, 20),
        "softcap": 3.0,
        "mask": cupy.asarray(rng.random((4, seq_q, seq_k)) < 0.7),
        "bias": array(seq_q, seq_k),
        "modifiers": (
            cuflash.ALiBi(cupy.asarray(rng.random(4).astype(real))),
            cuflash.KeyLengths(cupy.asarray(np.array([120], np.int32))),
            *hiding,
            cuflash.Sinks(cupy.asarray(rng.random(4).astype(real))),
            cuflash.Dropout(0.3, 7, cupy.asarray(1)),
        ),
    }
    if case.options == "plain":
        options = {}
    if (case.backend, case.options) == ("wgmma", "everything"):  # which leaves these to others beside a mask and a bias
        others = (cuflash.Documents, cuflash.BlockMask, cuflash.Dropout)
        options["modifiers"] = tuple(m for m in options["modifiers"] if not isinstance(m, others))
    options["backend"] = case.backend
    # Of float32 it leaves the backward to mma beside what has slopes or gradients, and in turns.
    forward_only = (case.backend, case.dtype) == ("wgmma", "float32") and case.options in ("everything", "turns")
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    found: dict[str, Any] = {}
    if case.options == "statistics":
        found = cuflash.attention_statistics(q, k, v, **options)._asdict()
    elif case.options == "tangents":
        _, found["tangent"] = cuflash.attention_jvp(q, k, v, q, None, v, **options)
        if case.backend == "simt":
            found |= cuflash.attention_hvp(dout, q, k, v, q, None, v, **options)._asdict()
    elif forward_only:
        found = {"out": out}
    else:
        for turns in {"turns": (True,), "parted": (False, True)}.get(case.options, (False,)):
            gradients = cuflash.attention_backward(dout, q, k, v, out, lse, deterministic=turns, **options)
            found |= {"out": out, **gradients._asdict()}
    cupy.cuda.Device().synchronize()
    check_finite(case, found)


def check_packed(case: Case, array: Callable[..., Any]) -> None:
    """Forward and backward of segments: none, one row, some tiles, long ones that have a list of tiles of their own."""
    import cupy
    import numpy as np

    import cuflash

    queries, keys = (
        cupy.asarray(np.cumsum([0, *n], dtype=np.int32)) for n in ((1, 0, 70, 90, 33), (5, 9, 0, 2100, 133))
    )
    given: dict[str, Any] = {"causal": True, "backend": case.backend}
    q, dout = array(200, 4, 128), array(200, 4, 128)  # the last rows are of no segment
    k, v = array(2250, 2, 128), array(2250, 2, 128)
    out, lse = cuflash.attention_varlen(q, k, v, queries, keys, return_lse=True, **given)
    gradients = cuflash.attention_varlen_backward(dout, q, k, v, queries, keys, out, lse, **given)
    cupy.cuda.Device().synchronize()
    check_finite(case, {"out": out, **gradients._asdict()})


def check_finite(case: Case, results: dict[str, Any]) -> None:
    """Exit unless all numbers of all results are finite."""
    import cupy
    import numpy as np

    for name, x in results.items():
        host = cupy.ascontiguousarray(x.view(f"u{x.dtype.itemsize}")).get().view(x.dtype)
        if not np.isfinite(host.astype(np.float64)).all():
            raise SystemExit(f"{case.name}: {name} is not finite")


# ---- the processes ---------------------------------------------------------------------------------------------------


def sanitizer() -> str:
    """Path of compute-sanitizer."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [shutil.which("compute-sanitizer")]
    for place in filter(None, places):
        found += [f"{place}/bin/compute-sanitizer", f"{place}/compute-sanitizer/compute-sanitizer"]
    for path in filter(None, found):
        if os.access(path, os.X_OK):
            return path
    raise SystemExit("compute-sanitizer was not found on the PATH or under CUDA_HOME; it comes with the CUDA toolkit")


def command(case: Case, tool: str = "") -> list[str]:
    words = [sys.executable, str(Path(__file__).resolve()), "--case", case.name]
    return [*words, "--as-followed"] if tool == "racecheck" else words


@dataclass(frozen=True)
class Outcome:
    """What a process ended with, what it printed, and how long it took in seconds."""

    status: int | None  # None: it took too long
    text: str
    seconds: float

    def __str__(self) -> str:
        word = {0: "ok", ERROR: "ERROR", None: "TIMEOUT"}.get(self.status, f"exit {self.status}")
        return f"{word} {self.seconds:.0f} s"


def finish(words: list[str]) -> Outcome:
    """Run a process to its end."""
    started = time.monotonic()
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        return Outcome(done.returncode, done.stdout + done.stderr, time.monotonic() - started)
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return Outcome(None, text, time.monotonic() - started)


def examine(chosen: list[Case], tools: tuple[str, ...], jobs: int) -> int:
    """Run all cases under all tools, print the table, and return how many failed."""
    program = sanitizer()

    def watched(case: Case, tool: str = "") -> Outcome:
        before = [program, "--tool", tool, "--error-exitcode", str(ERROR)] if tool else []
        outcome = finish([*before, *command(case, tool)])
        print(f"{case.name} {tool or 'alone'}: {outcome}", file=sys.stderr, flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        alone = dict(zip(chosen, pool.map(watched, chosen), strict=True))
        pairs = [(case, tool) for case, tool in product(chosen, tools) if alone[case].status == 0]
        under = dict(zip(pairs, pool.map(watched, *zip(*pairs, strict=True)), strict=True)) if pairs else {}

    width = max(len(case.name) for case in chosen)
    print(f"{'case':<{width}}  {'alone':<12}" + "".join(f"{tool:<14}" for tool in tools))
    for case in chosen:
        row = [str(under[case, tool]) if (case, tool) in under else "-" for tool in tools]
        print(f"{case.name:<{width}}  {alone[case]!s:<12}" + "".join(f"{cell:<14}" for cell in row))
    outcomes = [(case.name, outcome) for case, outcome in alone.items()]
    outcomes += [(f"{case.name} under {tool}", outcome) for (case, tool), outcome in under.items()]
    failed = [(name, outcome) for name, outcome in outcomes if outcome.status != 0]
    for name, outcome in failed:
        lines = outcome.text.strip().splitlines()
        print(f"\n== {name}: {outcome}", *lines[:40], *(["..."] if len(lines) > 40 else []), *lines[40:][-5:], sep="\n")
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} runs without an error")
    return len(failed)


def main() -> int:
    """Parse the arguments, then run one case or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="run this case and nothing else, without the sanitizer")
    parser.add_argument("--as-followed", action="store_true", help="build kernels as racecheck follows them")
    parser.add_argument("--only", default="", help="leave out the cases whose name does not contain this text")
    parser.add_argument("--initcheck", action="store_true", help="look for reads of memory that nobody wrote, too")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time")
    arguments = parser.parse_args()
    known = {case.name: case for case in cases()}
    if arguments.case:
        if arguments.case not in known:
            parser.error(f"--case {arguments.case}: must be one of {', '.join(known)}")
        if arguments.as_followed:
            build_as_followed()
        run(known[arguments.case])
        return 0
    chosen = [case for name, case in known.items() if arguments.only in name]
    if not chosen:
        parser.error(f"--only {arguments.only}: no case's name contains it; the cases are {', '.join(known)}")
    tools = (*TOOLS, "initcheck") if arguments.initcheck else TOOLS
    return 1 if examine(chosen, tools, max(1, arguments.jobs)) else 0


if __name__ == "__main__":
    sys.exit(main())
