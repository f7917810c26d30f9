"""Measure cuflash beside other systems, for the README: one process, random rotation among the systems, medians.

    python scripts/bench.py --suite foundation --peers torch --out scripts/results/h200-foundation.json
    python scripts/bench.py --suite foundation --cpu --out scripts/results/cpu-foundation.json
    python scripts/bench.py --suite hopper --peers all --out scripts/results/h200-hopper.json
    python scripts/bench.py --suite use --out scripts/results/h200-use.json
    python scripts/bench.py --suite accuracy --peers torch --out scripts/results/h200-accuracy.json
    python scripts/bench.py --suite precision --peers torch --out scripts/results/h200-precision.json
    python scripts/bench.py --suite sparse --out scripts/results/h200-sparse.json
    python scripts/bench.py --suite turns --out scripts/results/h200-turns.json
    python scripts/bench.py --suite bias --out scripts/results/h200-bias.json
    python scripts/bench.py --suite written --out scripts/results/h200-written.json
    python scripts/bench.py --suite packed --peers all --out scripts/results/h200-packed.json
    python scripts/bench.py --suite decode --peers all --out scripts/results/h200-decode.json
    python scripts/bench.py --suite jax --out scripts/results/h200-jax.json

Times on the GPU are sustained ones: batches of calls back to back, by the host's clock from one idle device to the
next.  Every system gets the same data, and what cuflash computes is compared with a peer once per shape: a kernel that
is wrong posts no time.  Whatever fails becomes a row with `failure`, and the rest goes on.  PyTorch's attention is
asked for by name: FlashAttention-2 ("fa2"), "cudnn", memory-efficient ("torch-efficient") and plain ("torch-math").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout is measured, whatever is installed

import cuflash
from cuflash import floor
from cuflash.cli import bench, text
from cuflash.cli.machine import stamp, this_machine
from cuflash.cli.measure import Clock
from cuflash.cli.shape import Shape
from scripts import bench_decode, bench_jax

Array = Any
Call = Callable[[], Any]
Row = dict[str, Any]

LIMIT_S = 200  # no further part of the suite is begun after this
BATCH_MS = 10.0  # a timed batch of calls fills at least this long
LARGEST_DIFFERENCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-12}  # relative, in norm


@dataclass
class Session:
    """What the measurements share."""

    quick: bool
    peers: bool
    all_peers: bool = False
    rows: list[Row] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 11

    def add(self, topic: str, system: str, **values: Any) -> None:
        """Keep a row and show it."""
        row = {"topic": topic, "system": system, **values}
        self.rows.append(row)
        keys = (
            "direction",
            "dtype",
            "seq_q",
            "head_dim",
            "causal",
            "factor",
            "lengths",
            "pattern",
            "visible",
            "form",
            "backend",
            "cache",
        )
        shown = [f"{k}={row[k]}" for k in keys if row.get(k) is not None]
        measured = ("ms", "tflops", "gbps", "gbps_single", "us", "error", "peak_bytes", "extra_bytes", "failure")
        shown += [
            f"{k}={row[k]:.4g}" if isinstance(row[k], float) else f"{k}={row[k]}"
            for k in measured
            if row.get(k) is not None
        ]
        print(f"{topic:10s} {system:16s} {' '.join(shown)}", flush=True)

    @contextlib.contextmanager
    def part(self, topic: str, system: str, **values: Any) -> Iterator[None]:
        """A part of the suite; what it raises becomes a row."""
        try:
            yield
        except Exception as failure:
            self.add(
                topic, system, **values, failure=f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"
            )
        finally:
            release_memory()


class Stopped(BaseException):
    """Somebody ends the run: what is measured so far is kept."""


def stop(*_: Any) -> None:
    raise Stopped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=SUITES, default="foundation")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--peers", choices=("torch", "all"), help="also measure PyTorch's attention, or FA3 and FA4 too"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument("--cpu", action="store_true", help="only what needs no GPU")
    arguments = parser.parse_args()

    random.seed(0)
    started = time.perf_counter()
    session = Session(arguments.quick, arguments.peers is not None, arguments.peers == "all")
    machine = this_machine()
    if not machine.devices and not arguments.cpu:
        sys.exit(f"no GPU to measure ({machine.no_gpu}); --cpu measures the NumPy backend")
    print(machine.headline, machine.versions, flush=True)
    on_gpu, on_host = SUITES[arguments.suite]
    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(Stopped):
        for part in on_host if arguments.cpu else (*on_gpu, *on_host):
            if time.perf_counter() - started > LIMIT_S:
                session.add(part.__name__, "cuflash", failure=f"left out: {LIMIT_S} s are over")
            else:
                part(session)

    result = stamp(machine, session.rows)
    if session.peers:
        with contextlib.suppress(ImportError):
            import torch

            result["versions"] |= {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
    if arguments.suite == "jax":
        with contextlib.suppress(ImportError):
            result["versions"] |= bench_jax.versions()
    result["seconds"] = round(time.perf_counter() - started, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{arguments.out}: {len(session.rows)} rows in {result['seconds']} s\n")
    print("\n".join(filter(None, (bench_jax.summary(session.rows), summary(session.rows)))))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Data and timing on the GPU
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Data:
    """The same random inputs as CuPy arrays and, with peers, as PyTorch tensors over the same memory."""

    shape: Shape
    dtype: str
    arrays: tuple[Array, ...]  # q, k, v, dout
    tensors: tuple[Array, ...]

    @classmethod
    def make(cls, shape: Shape, dtype: str, with_tensors: bool) -> Data:
        import cupy

        if not with_tensors:
            return cls(shape, dtype, tuple(cupy.asarray(x) for x in shape.arrays(dtype)), ())
        import torch

        generator = torch.Generator(device="cuda").manual_seed(0)
        tensors = tuple(
            torch.randn(sizes, generator=generator, device="cuda", dtype=torch.float32).to(getattr(torch, dtype))
            for sizes in (shape.q, shape.k, shape.v, shape.out)
        )
        return cls(shape, dtype, tuple(cupy.from_dlpack(x) for x in tensors), tensors)


def release_memory() -> None:
    """Give cached memory back, so that one system's pool does not starve the other's."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if cupy is not None and cupy.cuda.is_available():
            cupy.get_default_memory_pool().free_all_blocks()
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def rotate(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call; in every round each has one batch, in a new random order."""
    import cupy

    def batch(call: Call, count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            result = call()
        for x in result if isinstance(result, (tuple, list)) else ():
            getattr(x, "block_until_ready", lambda: None)()  # JAX has queues of its own
        cupy.cuda.Device().synchronize()
        return 1e3 * (time.perf_counter() - started) / count

    counts = {}
    for name, call in calls.items():
        batch(call, 2)
        counts[name] = max(2, min(500, round(BATCH_MS / max(batch(call, 2), 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(batch(calls[name], counts[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def cool(call: Call) -> float | None:
    """Median milliseconds of single calls on a GPU that has rested, by events; None for what runs on streams of its own."""
    import cupy

    if isinstance(result := call(), (tuple, list)) and any(hasattr(x, "block_until_ready") for x in result):
        return None
    cupy.cuda.Device().synchronize()
    time.sleep(0.15)
    times = []
    for _ in range(9):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(cupy.cuda.get_elapsed_time(begin, end)))
    return statistics.median(times[2:])


def difference(found: Array, expected: Array) -> float:
    """Norm of the difference relative to the norm of what is expected; tensors of PyTorch, compared in float64."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def largest_difference(found: tuple[Array, ...], expected: tuple[Array, ...]) -> float:
    """The largest of the outputs' differences; CuPy arrays on the left, tensors on the right."""
    import torch

    return max(difference(torch.from_dlpack(x), y) for x, y in zip(found, expected, strict=True))


def peer_calls(backend: str, data: Data, causal: bool) -> tuple[Call, Call | None, Array, tuple[Array, ...]]:
    """Forward, backward, output and gradients of one of PyTorch's attention backends, or of FA3 or FA4."""
    if backend in ("fa3", "fa4"):
        import peers

        made: tuple[Call, Call | None, Array, tuple[Array, ...]] = getattr(peers, backend)(data.tensors, causal)
        return made
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v, dout = data.tensors
    chosen = getattr(SDPBackend, backend)
    options = {"is_causal": causal, "enable_gqa": data.shape.heads_q != data.shape.heads_k}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(chosen):
        saved = scaled_dot_product_attention(*leaves, **options)

    def forward() -> Array:
        with torch.no_grad(), sdpa_kernel(chosen):
            return scaled_dot_product_attention(q, k, v, **options)

    def backward() -> tuple[Array, ...]:
        return torch.autograd.grad(saved, leaves, dout, retain_graph=True)  # type: ignore[no-any-return]

    return forward, backward, forward(), backward()


def measure_speed(
    session: Session,
    topic: str,
    shape: Shape,
    dtype: str,
    causal: bool,
    peers: dict[str, str],
    exact: bool = False,
    backends: tuple[str | None, ...] = (None,),
    cooled: bool = False,
) -> None:
    """Forward and backward of one shape: cuflash and `peers`, a system's name to the name of PyTorch's backend.

    With `exact`, the errors of all systems against float64 are kept; else cuflash's difference from the first peer.
    cuflash is measured once with each of `backends`, None for the one that it chooses; `cooled` adds single calls after a rest.
    """
    data = Data.make(shape, dtype, session.peers)
    q, k, v, _ = data.arrays
    calls: dict[str, dict[str, Call]] = {"forward": {}, "backward": {}}
    results: dict[str, dict[str, Any]] = {"forward": {}, "backward": {}}
    sizes: Row = {"dtype": dtype, **asdict(shape), "causal": causal}
    names = {f"cuflash {backend}" if backend else "cuflash": backend for backend in backends}
    for name, backend in names.items():
        with session.part(topic, name, **sizes):
            forward, backward = own_calls(data, causal, backend)
            results["forward"][name] = (forward()[0],)
            calls["forward"][name] = forward
            results["backward"][name] = tuple(backward())
            calls["backward"][name] = backward
    first_peer = None
    if session.peers:
        for system, name in peers.items():
            with session.part(topic, system, **sizes):
                forward, backward, peer_out, peer_grads = peer_calls(name, data, causal)
                results["forward"][system], calls["forward"][system] = (peer_out,), forward
                if backward is not None:
                    results["backward"][system], calls["backward"][system] = peer_grads, backward
                first_peer = first_peer or system
    truth = exact_results(data, causal) if exact and session.peers else None
    for direction, systems in calls.items():
        with session.part(topic, "cuflash", direction=direction, **sizes):
            found = results[direction]
            expected = truth[direction] if truth else found.get(first_peer or "")
            errors: dict[str, float] = {}
            for name in [n for n in systems if n in names and expected is not None]:
                errors[name] = largest_difference(found[name], expected)
                if not errors[name] <= LARGEST_DIFFERENCE[dtype]:
                    wrong = f"wrong: relative difference {errors[name]:.3g}"
                    session.add(topic, "cuflash", direction=direction, backend=names[name], **sizes, failure=wrong)
                    del systems[name]
            if truth:
                errors |= {
                    system: max(difference(x, y) for x, y in zip(outputs, truth[direction], strict=True))
                    for system, outputs in found.items()
                    if system not in names
                }
            for system, ms in rotate(systems, session.rounds).items():
                is_own = system in names
                rested = cool(systems[system]) if cooled else None
                session.add(
                    topic,
                    "cuflash" if is_own else system,
                    direction=direction,
                    backend=(names[system] or backend_of(q, k, v, causal, direction)) if is_own else None,
                    **sizes,
                    ms=ms,
                    tflops=shape.operations(direction, causal) / ms / 1e9,
                    cool_tflops=rested and shape.operations(direction, causal) / rested / 1e9,
                    error=errors.get(system),
                    against="float64" if truth else first_peer,
                )


def own_calls(data: Data, causal: bool, backend: str | None, precision: str | None = None) -> tuple[Call, Call]:
    """Forward, with lse, and backward by one backend; each has run once."""
    q, k, v, dout = data.arrays
    options: dict[str, Any] = {"causal": causal, "backend": backend, "precision": precision}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    return (
        lambda: cuflash.attention(q, k, v, return_lse=True, **options),
        lambda: cuflash.attention_backward(dout, q, k, v, out, lse, **options),
    )


def backend_of(q: Array, k: Array, v: Array, causal: bool, direction: str) -> str:
    """The backend that was timed; a fault in the choice must not cost the times."""
    try:
        from cuflash import backends, launch, problem

        called, device = problem.describe(q, k, v, causal=causal).problem, launch.device(q.device.id)
        return str(backends.select(called, device, {}, backward=direction == "backward")[0].name)
    except Exception as failure:
        return f"unknown: {type(failure).__name__}"


def is_hopper() -> bool:
    """Whether the device has compute capability 9.0."""
    import cupy

    return str(cupy.cuda.Device().compute_capability) == "90"


def exact_results(data: Data, causal: bool) -> dict[str, tuple[Array, ...]]:
    """Plain attention in float64 by PyTorch, on the same inputs."""
    wide = Data(data.shape, "float64", (), tuple(x.double() for x in data.tensors))
    *_, out, gradients = peer_calls("MATH", wide, causal)
    return {"forward": (out,), "backward": gradients}


# ---------------------------------------------------------------------------------------------------------------------
# The parts of the suite
# ---------------------------------------------------------------------------------------------------------------------


def tensor_cores(session: Session) -> None:
    """Bfloat16 by mma.sync with batch · seq = 16384 and heads · head_dim = 2048."""
    for head_dim in (64, 128):
        for seq in (4096,) if session.quick else (4096, 16384):
            heads = 2048 // head_dim
            shape = Shape(16384 // seq, heads, heads, seq, seq, head_dim, head_dim)
            for causal in (False, True):
                with session.part("speed", "cuflash", dtype="bfloat16", **asdict(shape), causal=causal):
                    peers = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
                    measure_speed(session, "speed", shape, "bfloat16", causal, peers, backends=("mma",))


#: (head_dim, head_dim_v, batch, heads_q, heads_k, seq) of Hopper's comparison
HOPPER_SHAPES = (
    *((64, 64, b, 32, 32, s) for b, s in ((16, 1024), (4, 4096), (1, 16384))),
    (96, 96, 1, 16, 16, 8192),
    *((128, 128, b, 16, 16, s) for b, s in ((16, 1024), (4, 4096), (1, 16384))),
    (128, 128, 1, 32, 32, 8192),
    (128, 128, 2, 32, 8, 8192),
    (192, 128, 1, 16, 16, 8192),
    *((256, 256, b, 8, 8, s) for b, s in ((16, 1024), (4, 4096), (1, 16384))),
)


def hopper(session: Session) -> None:
    """Bfloat16 by wgmma beside every system that is there, sustained and cool; grouped heads where heads_k is smaller."""
    peers = {"cudnn": "CUDNN_ATTENTION"}
    if session.all_peers:
        compile_fa4()
        peers |= {"fa3": "fa3", "fa4": "fa4"}
    started = time.perf_counter()
    for head_dim, head_dim_v, batch, heads_q, heads_k, seq in HOPPER_SHAPES:
        shape = Shape(batch, heads_q, heads_k, seq, seq, head_dim, head_dim_v)
        if session.quick and seq != 4096:
            continue
        for causal in (False, True):
            with session.part("hopper", "cuflash", dtype="bfloat16", **asdict(shape), causal=causal):
                if time.perf_counter() - started > LIMIT_S:
                    raise TimeoutError(f"left out: {LIMIT_S} s are over")
                measure_speed(session, "hopper", shape, "bfloat16", causal, peers, backends=("wgmma",), cooled=True)


def halves(session: Session) -> None:
    """Float16 beside bfloat16, by wgmma in one rotation."""
    for head_dim, seq, causal in product((64, 128), (4096,) if session.quick else (4096, 16384), (False, True)):
        heads = 2048 // head_dim
        shape = Shape(16384 // seq, heads, heads, seq, seq, head_dim, head_dim)
        common: Row = {**asdict(shape), "causal": causal, "backend": "wgmma"}
        with session.part("halves", "cuflash", **common):
            dtypes = ("bfloat16", "float16")
            made = {x: own_calls(Data.make(shape, x, with_tensors=False), causal, "wgmma") for x in dtypes}
            for number, direction in enumerate(("forward", "backward")):
                for dtype, ms in rotate({x: made[x][number] for x in dtypes}, session.rounds).items():
                    tflops = shape.operations(direction, causal) / ms / 1e9
                    session.add("halves", "cuflash", direction=direction, dtype=dtype, **common, ms=ms, tflops=tflops)


READ_CLOCKS = r"""
extern "C" __global__ void __launch_bounds__(1024) read_clocks(long long* clocks) {
  unsigned multiprocessor;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  if (threadIdx.x == 0) clocks[multiprocessor] = clock64();
}
"""


def tensor_use(session: Session) -> None:
    """How much of what tensor cores can multiply in a clock wgmma's kernels need, and how many clocks there are in a second."""
    import cupy

    from cuflash import launch

    for head_dim, causal in product((64, 128, 256), (False, True)):
        heads = 2048 // head_dim
        shape = Shape(1, heads, heads, 16384, 16384, head_dim, head_dim)
        common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": causal, "backend": "wgmma"}
        with session.part("use", "cuflash", **common):
            device = launch.device(cupy.cuda.Device().id)
            rate = floor.RATES[device.capability][0] * device.multiprocessors
            calls = own_calls(Data.make(shape, "bfloat16", with_tensors=False), causal, "wgmma")
            for direction, call in zip(("forward", "backward"), calls, strict=True):
                clocks, ms = clocks_of(call, session.rounds)
                needed = shape.operations(direction, causal) / rate
                found = {"ms": ms, "clocks": clocks, "use": needed / clocks}
                session.add("use", "cuflash", direction=direction, **common, **found)


def clocks_of(call: Call, rounds: int, count: int = 12) -> tuple[float, float]:
    """Clocks of a multiprocessor and milliseconds of a call among others back to back, as clock64 and events count them."""
    import cupy

    read = cupy.RawKernel(READ_CLOCKS, "read_clocks")
    blocks = 2 * cupy.cuda.Device().attributes["MultiProcessorCount"]  # two fill a multiprocessor
    found = []
    for _ in range(rounds):
        before, behind = cupy.zeros((2, 1024), np.int64)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        call()
        begin.record()
        read((blocks,), (1024,), (before,))
        for _ in range(count):
            call()
        read((blocks,), (1024,), (behind,))
        end.record()
        there = (before != 0) & (behind != 0)
        clocks = float(cupy.median((behind - before)[there]))
        found.append((clocks / count, float(cupy.cuda.get_elapsed_time(begin, end)) / count))
    clocks, ms = (statistics.median(values) for values in zip(*found, strict=True))
    return clocks, ms


def accuracy(session: Session) -> None:
    """Errors against float64 beside cuDNN's on the same inputs, which are normal or peaked: queries times `factor`."""
    factors, backends = (1, 3, 10), (None, "mma")
    for dtype, head_dim, causal, factor in product(("bfloat16", "float16"), (64, 128, 256), (False, True), factors):
        shape = Shape(1, 4, 4, 2048, 2048, head_dim, head_dim)
        common: Row = {"dtype": dtype, **asdict(shape), "causal": causal, "factor": factor}
        with session.part("accuracy", "cuflash", **common):
            data = Data.make(shape, dtype, with_tensors=True)
            data.tensors[0].mul_(factor)  # the same memory as the arrays'
            exact = exact_results(data, causal)
            found: dict[tuple[str, str | None], dict[str, tuple[Array, ...]]] = {}
            for backend in backends:
                forward, backward = own_calls(data, causal, backend)
                found["cuflash", backend] = {"forward": forward()[:1], "backward": tuple(backward())}
            with session.part("accuracy", "cudnn", **common):
                *_, out, gradients = peer_calls("CUDNN_ATTENTION", data, causal)
                found["cudnn", None] = {"forward": (out,), "backward": gradients}
            for (system, backend), results in found.items():
                for direction, outputs in results.items():
                    error = largest_difference(outputs, exact[direction])
                    chosen = {"backend": backend} if backend else {}
                    session.add("accuracy", system, direction=direction, **common, **chosen, error=error)


def turns(session: Session) -> None:
    """The backward with deterministic=True beside the one without, by each backend for tensor cores."""
    lengths = (4096,) if session.quick else (1024, 4096, 16384)
    for head_dim, seq, causal, backend in product((64, 128, 256), lengths, (False, True), ("wgmma", "mma")):
        heads = 2048 // head_dim
        shape = Shape(16384 // seq, heads, heads, seq, seq, head_dim, head_dim)
        common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": causal, "backend": backend}
        with session.part("turns", "cuflash", **common):
            q, k, v, dout = Data.make(shape, "bfloat16", with_tensors=False).arrays
            options = {"causal": causal, "backend": backend}
            out, lse = cuflash.attention(q, k, v, return_lse=True, **options)

            def backward(deterministic: bool, given: Any = (dout, q, k, v, out, lse), options: Any = options) -> Any:
                return cuflash.attention_backward(*given, deterministic=deterministic, **options)

            ms = rotate({"free": lambda: backward(False), "turns": lambda: backward(True)}, session.rounds)
            row = {"direction": "backward", **common, "ms": ms["turns"], "ms_free": ms["free"]}
            session.add("turns", "cuflash", **row, tflops=shape.operations("backward", causal) / ms["turns"] / 1e9)


MODIFIED_BACKENDS: tuple[str | None, ...] = ("wgmma", "mma")  # that modifiers are measured on
#: a bias: which of the axes (batch, heads, q, k) are full, by letters, and 1 for those that are broadcast
BIASES = tuple("".join(axes) for axes in product("b1", "h1", "q1", "k1"))


def directions(options: dict[str, Any], arrays: tuple[Array, ...]) -> dict[str, Call]:
    """Forward and backward of a call with these options."""
    q, k, v, dout = arrays
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    return {
        "forward": lambda: cuflash.attention(q, k, v, **options),
        "backward": lambda: cuflash.attention_backward(dout, q, k, v, out, lse, **options),
    }


def filled(like: Array, sizes: list[int]) -> Array:
    """Array of another shape that holds the numbers of `like`, as often as it takes."""
    count = int(np.prod(sizes))
    return like.reshape(-1).repeat(-(-count // like.size))[:count].reshape(sizes)


def beside(like: Array, x: Array) -> Array:
    """A host array where another one is."""
    if isinstance(like, np.ndarray):
        return x
    import cupy

    return cupy.asarray(x)


def modified_shapes(session: Session) -> list[Shape]:
    seq = 1024 if session.quick else 4096
    return [Shape(4, 2048 // d, 2048 // d, seq, seq, d, d) for d in (64, 128)]


def bias(session: Session) -> None:
    """A bias of every broadcast shape beside none, forward and backward with its gradient."""
    for shape, backend in product(modified_shapes(session), MODIFIED_BACKENDS):
        common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": False, "backend": backend}
        with session.part("bias", "cuflash", **common):
            arrays = Data.make(shape, "bfloat16", with_tensors=False).arrays
            calls = {"none": directions({"backend": backend}, arrays)}
            lengths = (shape.batch, shape.heads_q, shape.seq_q, shape.seq_k)
            for pattern in BIASES:
                sizes = [1 if letter == "1" else n for letter, n in zip(pattern, lengths, strict=True)]
                calls[pattern] = directions({"backend": backend, "bias": filled(arrays[0], sizes)}, arrays)
            for direction in ("forward", "backward"):
                ms = rotate({name: both[direction] for name, both in calls.items()}, session.rounds)
                for pattern in BIASES:
                    row = {"direction": direction, **common, "pattern": pattern}
                    session.add("bias", "cuflash", **row, ms=ms[pattern], ms_free=ms["none"])


def forms(shape: Shape, like: Array) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Options of what is built in, and of the same as an expression."""
    slopes = beside(like, (2.0 ** -np.linspace(1, 8, shape.heads_q)).astype(np.float32))
    ids = (np.arange(shape.seq_k) * 8 // shape.seq_k).astype(np.int32)
    mask, ids = beside(like, ids[:, None] == ids[None, :]), beside(like, ids)
    decay = cuflash.ScoreModifier("s - slope[h] * abs(q + seq_k - seq_q - k)", slope=slopes)
    kin = cuflash.MaskModifier("ids[q] == ids[k]", ids=ids)
    documents = cuflash.Documents(ids, ids)
    return {
        "alibi": ({"modifiers": (cuflash.ALiBi(slopes),)}, {"modifiers": (decay,)}),
        "softcap": ({"softcap": 32.0}, {"modifiers": (cuflash.ScoreModifier("c * tanh(s / c)", c=32.0),)}),
        "mask": ({"mask": mask}, {"modifiers": (kin,)}),
        # What tells at a glance which tiles are hidden, beside the expression, which does not.
        "documents": ({"modifiers": (documents,)}, {"modifiers": (documents, kin)}),
    }


def written(session: Session) -> None:
    """Expressions beside the options that do the same."""
    for shape, backend in product(modified_shapes(session), MODIFIED_BACKENDS):
        arrays = Data.make(shape, "bfloat16", with_tensors=False).arrays
        for form, options in forms(shape, arrays[0]).items():
            common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": False, "backend": backend, "form": form}
            if (form, backend) == ("documents", "wgmma"):  # which leaves it to mma
                continue
            with session.part("written", "cuflash", **common):
                built_in, own = (directions({"backend": backend, **x}, arrays) for x in options)
                for direction in ("forward", "backward"):
                    ms = rotate({"built in": built_in[direction], "written": own[direction]}, session.rounds)
                    row = {"direction": direction, **common, "ms": ms["written"], "ms_free": ms["built in"]}
                    session.add("written", "cuflash", **row)


def compile_fa4() -> None:
    """In as many processes as there are kinds of calls; what fails here becomes a row later."""
    kinds = {(d, dv, hq, hk, causal) for d, dv, _, hq, hk, _ in HOPPER_SHAPES for causal in (0, 1)}
    command = [sys.executable, str(Path(__file__).with_name("peers.py"))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([*command, *map(str, kind)], **quiet) for kind in sorted(kinds)]  # type: ignore[call-overload]
    deadline = time.perf_counter() + 60
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(deadline - time.perf_counter(), 0.1))
            continue
        process.kill()


def wide_types(session: Session) -> None:
    """Float32 and float64, with the error against float64."""
    for dtype, peers in (("float32", {"torch-efficient": "EFFICIENT_ATTENTION"}), ("float64", {"torch-math": "MATH"})):
        for head_dim, causal in product((128,) if session.quick else (128, 64), (False, True)):
            shape = Shape(1, 16, 16, 4096, 4096, head_dim, head_dim)
            with session.part("precision", "cuflash", dtype=dtype, **asdict(shape), causal=causal):
                measure_speed(session, "precision", shape, dtype, causal, peers, exact=dtype == "float32")


def is_taken(call: Call) -> bool:
    """Whether the backend that was asked for takes a call."""
    try:
        call()
    except cuflash.UnsupportedError:
        return False
    return True


def named_precisions(session: Session) -> None:
    """Float32 by each backend, and with precision="tf32", in one rotation, with errors against float64."""
    for head_dim, causal in product((64, 128), (False, True)):
        shape = Shape(1, 16, 16, 4096, 4096, head_dim, head_dim)
        common: Row = {"dtype": "float32", **asdict(shape), "causal": causal}
        with session.part("float32", "cuflash", **common):
            data = Data.make(shape, "float32", session.peers)
            exact = exact_results(data, causal) if session.peers else None
            kinds: dict[str, Row] = {
                "simt": {"backend": "simt"},
                "mma": {"backend": "mma"},
                "tf32": {"backend": "mma", "precision": "tf32"},
                "wgmma": {"backend": "wgmma"},  # on Hopper, and backward of narrow heads alone
                "wgmma tf32": {"backend": "wgmma", "precision": "tf32"},
            }
            kinds = {name: kind for name, kind in kinds.items() if kind["backend"] != "wgmma" or is_hopper()}
            made = {name: own_calls(data, causal, **options) for name, options in kinds.items()}
            calls = {
                direction: {name: x[number] for name, x in made.items() if is_taken(x[number])}
                for number, direction in enumerate(("forward", "backward"))
            }
            for direction, systems in calls.items():
                for name, ms in rotate(systems, session.rounds).items():
                    found = systems[name]()[:1] if direction == "forward" else tuple(systems[name]())
                    error = largest_difference(found, exact[direction]) if exact else None
                    row = {"direction": direction, **common, **kinds[name], "ms": ms, "error": error}
                    session.add("float32", "cuflash", **row, tflops=shape.operations(direction, causal) / ms / 1e9)


def scaled(**factors: float) -> Callable[[dict[str, Array]], None]:
    """Tensors times these factors, in their own memory."""
    return lambda x: [x[name].mul_(factor) for name, factor in factors.items()] and None


def one_dominant_key(x: dict[str, Array]) -> None:
    x["q"].add_(1)
    x["k"][..., -1, :].add_(3)


#: float32 inputs in which planes of float16 might be felt, by what is done to normal ones
INPUTS: dict[str, Callable[[dict[str, Array]], None]] = {
    "normal": scaled(),
    "queries x 10": scaled(q=10),
    "queries x 100": scaled(q=100),
    "all x 30": scaled(q=30, k=30, v=30),
    "one dominant key": one_dominant_key,
    "one sign": lambda x: [x[name].abs_() for name in "qkv"] and None,
    "values x 1e-30": scaled(v=1e-30),
    "keys, values x 1e30, others x 1e-30": scaled(q=1e-30, k=1e30, v=1e30, dout=1e-30),
}


def inputs(session: Session) -> None:
    """Errors of float32 by each backend against float64, on inputs that planes of float16 might not suit."""
    for head_dim, (name, change) in product((64, 128), INPUTS.items()):
        shape = Shape(1, 4, 4, 2048, 2048, head_dim, head_dim)
        common: Row = {"dtype": "float32", **asdict(shape), "causal": False, "inputs": name}
        with session.part("inputs", "cuflash", **common):
            data = Data.make(shape, "float32", with_tensors=True)
            change(dict(zip(("q", "k", "v", "dout"), data.tensors, strict=True)))  # the same memory as the arrays'
            exact = exact_results(data, causal=False)
            for backend in ("simt", "mma", *(("wgmma",) if is_hopper() else ())):
                for direction, call in zip(exact, own_calls(data, False, backend), strict=True):
                    if is_taken(call):  # wgmma takes no wide heads in the backward
                        found = call()[:1] if direction == "forward" else tuple(call())
                        error = largest_difference(found, exact[direction])
                        session.add("inputs", "cuflash", direction=direction, **common, backend=backend, error=error)


def narrow_types(session: Session) -> None:
    """The forward of 8-bit inputs beside that of the same numbers in bfloat16, with errors of some rows against float64."""
    import cupy
    import ml_dtypes

    for head_dim, seq, causal in product((64, 128, 256), (4096, 16384), (False, True)):
        heads = 2048 // head_dim
        shape = Shape(16384 // seq, heads, heads, seq, seq, head_dim, head_dim)
        common: Row = {**asdict(shape), "causal": causal}
        with session.part("narrow", "cuflash", **common):
            rng = np.random.default_rng(0)
            e4m3 = np.dtype(ml_dtypes.float8_e4m3fn)
            host = [rng.standard_normal((1, heads, seq, head_dim), np.float32).astype(e4m3) for _ in range(3)]
            wide = [np.broadcast_to(x, (shape.batch, *x.shape[1:])) for x in host]
            inputs = {
                "float8_e4m3fn": [cupy.asarray(np.ascontiguousarray(x).view(np.uint8)).view(e4m3) for x in wide],
                "bfloat16": [cupy.asarray(np.ascontiguousarray(x.astype(ml_dtypes.bfloat16))) for x in wide],
            }
            rows = np.r_[seq - 256 : seq]
            q, k, v = (cupy.asarray(x[0, 0].astype(np.float64)) for x in host)
            s = q[rows] @ k.T * head_dim**-0.5
            if causal:
                s = cupy.where(cupy.arange(seq)[rows][:, None] < cupy.arange(seq)[None], -cupy.inf, s)
            weights = cupy.exp(s - s.max(axis=-1, keepdims=True))
            exact = (weights / weights.sum(axis=-1, keepdims=True) @ v).get()
            options: dict[str, Any] = {"causal": causal, "return_lse": True, "backend": "wgmma"}
            calls = {name: partial(cuflash.attention, *arrays, **options) for name, arrays in inputs.items()}
            for name, ms in rotate(calls, session.rounds).items():
                out = cupy.ascontiguousarray(calls[name]()[0][0, 0, rows].view(cupy.uint16)).get()
                found = out.view(ml_dtypes.bfloat16).astype(np.float64)
                error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
                row = {"direction": "forward", "dtype": name, **common, "backend": "wgmma", "ms": ms, "error": error}
                session.add("narrow", "cuflash", **row, tflops=shape.operations("forward", causal) / ms / 1e9)


def memory(session: Session) -> None:
    """Device memory of forward and backward beyond the inputs; `extra_bytes` beyond the results too."""
    shape = Shape(2, 16, 16, 8192, 8192, 128, 128)
    common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": False}
    with session.part("memory", "cuflash", **common):
        import cupy

        data = Data.make(shape, "bfloat16", session.peers)
        q, k, v, dout = data.arrays
        clock = Clock(cupy)
        out, lse = cuflash.attention(q, k, v, return_lse=True)
        grads = cuflash.attention_backward(dout, q, k, v, out, lse)
        results = {"forward": out.nbytes + lse.nbytes, "backward": sum(x.nbytes for x in grads)}
        del grads
        calls = {
            "forward": lambda: cuflash.attention(q, k, v, return_lse=True),
            "backward": lambda: cuflash.attention_backward(dout, q, k, v, out, lse),
        }
        scores = shape.batch * shape.heads_q * shape.seq_q * shape.seq_k * 2
        for direction, call in calls.items():
            peak = clock.peak_bytes(call)
            beyond = peak - results[direction]
            session.add(
                "memory",
                "cuflash",
                direction=direction,
                **common,
                peak_bytes=peak,
                extra_bytes=beyond,
                score_matrix_bytes=scores,
            )
        if session.peers:
            import torch

            forward, backward, *_ = peer_calls("FLASH_ATTENTION", data, causal=False)
            for direction, call in (("forward", forward), ("backward", backward)):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call()
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                session.add("memory", "fa2", direction=direction, **common, peak_bytes=peak)


def host_time(session: Session) -> None:
    """What a repeated small call costs the host: calls without waiting for the GPU, in microseconds."""
    import cupy

    shape = Shape(1, 4, 4, 64, 64, 64, 64)
    common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": False}
    calls: dict[tuple[str, str], Call] = {}
    with session.part("host", "cuflash", direction="forward", **common):
        data = Data.make(shape, "bfloat16", session.peers)
        q, k, v, dout = data.arrays
        out = cupy.empty_like(q)
        result, lse = cuflash.attention(q, k, v, return_lse=True)
        calls["cuflash", "forward"] = lambda: cuflash.attention(q, k, v)
        calls["cuflash, out=", "forward"] = lambda: cuflash.attention(q, k, v, out=out)
        calls["cuflash", "backward"] = lambda: cuflash.attention_backward(dout, q, k, v, result, lse)
        if session.peers:
            import torch
            from torch.nn.functional import scaled_dot_product_attention

            *given, tdout = data.tensors
            results = cuflash.attention(*given, return_lse=True)
            leaves = [x.detach().requires_grad_() for x in given]
            saved = scaled_dot_product_attention(*leaves)
            calls["cuflash, torch tensors", "forward"] = lambda: cuflash.attention(*given)
            calls["cuflash, torch tensors", "backward"] = lambda: cuflash.attention_backward(tdout, *given, *results)
            calls["torch", "forward"] = lambda: scaled_dot_product_attention(*given)
            calls["torch", "backward"] = lambda: torch.autograd.grad(saved, leaves, tdout, retain_graph=True)
        repeats = 5
        count = 100 if session.quick else 400
        times: dict[tuple[str, str], list[float]] = {}
        for key, call in calls.items():
            with session.part("host", key[0], direction=key[1], **common):
                for _ in range(20):
                    call()
                times[key] = []
        with torch.no_grad() if session.peers else contextlib.nullcontext():
            for _ in range(repeats):
                for key in random.sample(list(times), len(times)):
                    cupy.cuda.runtime.deviceSynchronize()
                    start = time.perf_counter()
                    for _ in range(count):
                        calls[key]()
                    times[key].append(1e6 * (time.perf_counter() - start) / count)
        cupy.cuda.runtime.deviceSynchronize()
        for (name, direction), values in times.items():
            row = {"direction": direction, **common}
            session.add("host", name, **row, us=statistics.median(values), calls=repeats * count)


FIRST_CALL = """
import json, time
started = time.perf_counter()
import cupy, ml_dtypes, numpy
x = cupy.asarray(numpy.ones((1, 4, 512, 128), ml_dtypes.bfloat16))
cupy.cuda.runtime.deviceSynchronize()
times = {"cupy": time.perf_counter() - started}
def timed(name, call):
    start = time.perf_counter()
    result = call()
    cupy.cuda.runtime.deviceSynchronize()
    times[name] = time.perf_counter() - start
    return result
cuflash = timed("import", lambda: __import__("cuflash"))
out, lse = timed("forward", lambda: cuflash.attention(x, x, x, causal=True, return_lse=True))
timed("backward", lambda: cuflash.attention_backward(out, x, x, x, out, lse, causal=True))
timed("second forward", lambda: cuflash.attention(x, x, x, causal=True, return_lse=True))
print(json.dumps(times))
"""


def first_call(session: Session) -> None:
    """The first call of a process in which CuPy is up: with an empty kernel cache, and with a filled one."""
    shape = Shape(1, 4, 4, 512, 512, 128, 128)
    common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": True}
    with session.part("first call", "cuflash", **common), tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"CUPY_CACHE_DIR": cache}
        for state in ("empty", "filled"):
            found = subprocess.run(
                [sys.executable, "-c", FIRST_CALL],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                cwd=Path(__file__).parent.parent,
            )
            if found.returncode:
                raise RuntimeError(f"with the {state} cache: {found.stderr.strip().splitlines()[-1:]}")
            times = json.loads(found.stdout.splitlines()[-1])
            for direction in ("forward", "backward"):
                seconds = times[direction] + (times["import"] if direction == "forward" else 0)
                session.add(
                    "first call", "cuflash", direction=direction, **common, ms=1e3 * seconds, cache=state, seconds=times
                )


def processor(session: Session) -> None:
    """The NumPy backend beside plain attention in NumPy."""
    seqs = (256,) if session.quick else (1024, 2048)
    for seq in seqs:
        shape = Shape(1, 8, 8, seq, seq, 64, 64)
        with session.part("processor", "cuflash", dtype="float32", **asdict(shape), causal=True):
            rows = bench.Bench(np, shape, "float32", causal=True).rows(
                ("cuflash", "plain"), bench.DIRECTIONS, 3 if session.quick else 7, text.Progress()
            )
            for row in rows:
                session.add("processor", row.pop("system"), **row)


def sparse_calls(shape: Shape, arrays: tuple[Array, ...]) -> Iterator[tuple[Row, dict[str, Call]]]:
    """For each pattern and share of visible pairs, how it is called, by direction; first without a pattern."""
    q, k, v, dout = arrays
    rng, size = np.random.default_rng(0), 128
    counts = shape.heads_q, shape.seq_q // size, shape.seq_k // size
    chains: list[tuple[Row, tuple[Any, ...]]] = [({"pattern": "dense", "visible": 1.0}, ())]
    for share in (1.0, 0.5, 0.25, 0.1):
        blocks = np.zeros((counts[0], counts[1] * counts[2]), bool)
        for row in blocks:  # each head its own
            row[rng.permutation(row.size)[: round(share * row.size)]] = True
        mask = cuflash.BlockMask(blocks.reshape(counts), size)
        chains.append(({"pattern": f"blocks of {size}", "visible": share}, (mask,)))
    for share in (1.0, 0.5, 0.25, 0.1):
        ids = np.arange(shape.seq_q) * round(1 / share) // shape.seq_q
        chains.append(({"pattern": "documents", "visible": share}, (cuflash.Documents(ids, ids),)))
    for row, modifiers in chains:
        out, lse = cuflash.attention(q, k, v, modifiers=modifiers, return_lse=True)
        given: dict[str, Any] = {"modifiers": modifiers}
        yield (
            row,
            {
                "forward": lambda given=given: cuflash.attention(q, k, v, return_lse=True, **given),
                "backward": lambda given=given, out=out, lse=lse: cuflash.attention_backward(
                    dout, q, k, v, out, lse, **given
                ),
            },
        )


def sparse(session: Session) -> None:
    """Time against the share of pairs that documents or a block mask leave visible."""
    for head_dim in (64, 128):
        seq = 4096 if session.quick else 16384
        shape = Shape(1, 2048 // head_dim, 2048 // head_dim, seq, seq, head_dim, head_dim)
        common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": False}
        with session.part("sparse", "cuflash", **common):
            arrays = Data.make(shape, "bfloat16", with_tensors=False).arrays
            rows = list(sparse_calls(shape, arrays))
            for direction in ("forward", "backward"):
                times = rotate({str(n): calls[direction] for n, (_, calls) in enumerate(rows)}, session.rounds)
                for n, (row, _) in enumerate(rows):
                    session.add("sparse", "cuflash", direction=direction, **common, **row, ms=times[str(n)])


def sparse_processor(session: Session) -> None:
    """The same for the NumPy backend."""
    seq = 512 if session.quick else 2048
    shape = Shape(1, 8, 8, seq, seq, 64, 64)
    common: Row = {"dtype": "float32", **asdict(shape), "causal": False}
    with session.part("sparse processor", "cuflash", **common):
        clock = Clock(np)
        for row, calls in sparse_calls(shape, shape.arrays("float32")):
            for direction, call in calls.items():
                ms = clock.milliseconds(call, 3 if session.quick else 7)
                session.add("sparse processor", "cuflash", direction=direction, **common, **row, ms=ms)


def mixes(total: int) -> dict[str, list[int]]:
    """Lengths of segments that together have so many rows."""
    skewed = [total // 2, total // 4] + [total // 64] * 8
    return {
        "8 equal": [total // 8] * 8,
        "skewed": skewed + [16] * ((total - sum(skewed)) // 16),
        "all of 64": [64] * (total // 64),
    }


def packed_calls(
    arrays: tuple[Array, ...], lengths: list[int], offsets: Array, causal: bool
) -> dict[str, dict[str, Call]]:
    """A packed call by direction and system; where lengths are equal, also the same as a batch."""
    q, k, v, dout = (x[0].swapaxes(0, 1) for x in arrays)
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    out, lse = cuflash.attention_varlen(q, k, v, offsets, offsets, causal=causal, return_lse=True, **longest)
    calls: dict[str, dict[str, Call]] = {
        "forward": {
            "cuflash": lambda: cuflash.attention_varlen(
                q, k, v, offsets, offsets, causal=causal, return_lse=True, **longest
            )
        },
        "backward": {
            "cuflash": lambda: cuflash.attention_varlen_backward(
                dout, q, k, v, offsets, offsets, out, lse, causal=causal, **longest
            )
        },
    }
    if len(set(lengths)) == 1:
        batch = [x.reshape(len(lengths), lengths[0], *x.shape[1:]) for x in (q, k, v, dout)]
        options: dict[str, Any] = {"causal": causal, "layout": "bshd"}
        batch_out, batch_lse = cuflash.attention(*batch[:3], return_lse=True, **options)
        calls["forward"]["cuflash batch"] = lambda: cuflash.attention(*batch[:3], return_lse=True, **options)
        calls["backward"]["cuflash batch"] = lambda: cuflash.attention_backward(
            batch[3], *batch[:3], batch_out, batch_lse, **options
        )
    return calls


def packed_peer(
    arrays: tuple[Array, ...], lengths: list[int], offsets: Array, causal: bool
) -> tuple[dict[str, Call], dict[str, tuple[Array, ...]]]:
    """PyTorch's FlashAttention-2 on the same packed arrays: its calls and results by direction."""
    import torch

    q, k, v, dout = (torch.from_dlpack(x)[0].transpose(0, 1).contiguous() for x in arrays)
    bounds = torch.from_dlpack(offsets)
    common = (bounds, bounds, max(lengths), max(lengths), 0.0, causal)
    aten = torch.ops.aten

    def forward() -> Any:
        return aten._flash_attention_forward(q, k, v, *common, False)

    out, lse, state, unused = forward()[:4]

    def backward() -> Any:
        return aten._flash_attention_backward(dout, q, k, v, out, lse, *common, state, unused)

    return {"forward": forward, "backward": backward}, {"forward": (out,), "backward": tuple(backward()[:3])}


def packed_rival(
    name: str, arrays: tuple[Array, ...], lengths: list[int], offsets: Array, causal: bool
) -> dict[str, Call]:
    """FlashAttention-3's or -4's calls by direction, as far as it has them; its output is compared."""
    import cupy
    import torch

    from scripts import peers

    tensors = tuple(torch.from_dlpack(x)[0].transpose(0, 1).contiguous() for x in arrays)
    forward, backward = getattr(peers, f"{name}_packed")(tensors, torch.from_dlpack(offsets), max(lengths), causal)
    own = cuflash.attention_varlen(*(cupy.from_dlpack(x) for x in tensors[:3]), offsets, offsets, causal=causal)
    error = largest_difference((own,), (forward(),))
    if not error <= LARGEST_DIFFERENCE["bfloat16"]:
        raise ArithmeticError(f"{name} differs by {error:.3g}")
    return {"forward": forward, **({"backward": backward} if backward else {})}


def packed(session: Session) -> None:
    """Packed sequences: equal ones beside the same batch, skewed ones, many short ones, and PyTorch's kernels."""
    import cupy

    total = 4096 if session.quick else 32768
    for head_dim, causal, (mix, lengths) in product((64, 128), (False, True), mixes(total).items()):
        heads = 2048 // head_dim
        shape = Shape(1, heads, heads, total, total, head_dim, head_dim)
        common: Row = {"dtype": "bfloat16", **asdict(shape), "causal": causal, "lengths": mix}
        with session.part("packed", "cuflash", **common):
            # Heads lie within rows, as packed arrays have them.
            compact = Shape(1, total, total, heads, heads, head_dim, head_dim)
            arrays = tuple(x.swapaxes(1, 2) for x in Data.make(compact, "bfloat16", with_tensors=False).arrays)
            offsets = cupy.asarray(np.cumsum([0, *lengths]).astype(np.int32))
            calls = packed_calls(arrays, lengths, offsets, causal)
            if session.peers:
                with session.part("packed", "fa2", **common):
                    peer, expected = packed_peer(arrays, lengths, offsets, causal)
                    for direction, call in peer.items():
                        found = calls[direction]["cuflash"]()
                        found = found[:1] if direction == "forward" else tuple(found)
                        error = largest_difference(found, expected[direction])
                        if not error <= LARGEST_DIFFERENCE["bfloat16"]:
                            raise ArithmeticError(f"{direction}: cuflash differs by {error:.3g}")
                        calls[direction]["fa2"] = call
            for name in ("fa3", "fa4") if session.all_peers else ():
                with session.part("packed", name, **common):
                    for direction, call in packed_rival(name, arrays, lengths, offsets, causal).items():
                        calls[direction][name] = call
            pairs = [Shape(1, heads, heads, n, n, head_dim, head_dim) for n in lengths]
            for direction, systems in calls.items():
                operations = sum(each.operations(direction, causal) for each in pairs)
                for system, ms in rotate(systems, session.rounds).items():
                    row = {"direction": direction, **common, "ms": ms, "tflops": operations / ms / 1e9}
                    session.add("packed", system, **row)


def packed_processor(session: Session) -> None:
    """The same for the NumPy backend."""
    total = 512 if session.quick else 4096
    shape = Shape(1, 8, 8, total, total, 64, 64)
    clock = Clock(np)
    for mix, lengths in mixes(total).items():
        common: Row = {"dtype": "float32", **asdict(shape), "causal": True, "lengths": mix}
        with session.part("packed processor", "cuflash", **common):
            calls = packed_calls(shape.arrays("float32"), lengths, np.cumsum([0, *lengths]).astype(np.int32), True)
            for direction, systems in calls.items():
                for system, call in systems.items():
                    ms = clock.milliseconds(call, 3 if session.quick else 7)
                    session.add("packed processor", system, direction=direction, **common, ms=ms)


#: suite -> its parts on a GPU, and those that need none
SUITES: dict[str, tuple[tuple[Callable[[Session], None], ...], tuple[Callable[[Session], None], ...]]] = {
    "foundation": ((tensor_cores, wide_types, memory, host_time, first_call), (processor,)),
    "hopper": ((hopper, halves), ()),
    "use": ((tensor_use,), ()),
    "accuracy": ((accuracy,), ()),
    "inputs": ((inputs,), ()),
    "precision": ((wide_types, named_precisions, narrow_types), ()),
    "sparse": ((sparse,), (sparse_processor,)),
    "turns": ((turns,), ()),
    "bias": ((bias,), ()),
    "written": ((written,), ()),
    "packed": ((packed,), (packed_processor,)),
    "decode": (bench_decode.SUITE, ()),
    "jax": (bench_jax.SUITE, bench_jax.PROCESSOR),
}


# ---------------------------------------------------------------------------------------------------------------------
# The table at the end
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A row of cuflash and what it must reach: a share of a peer's speed at least, or a limit at most."""

    name: str
    topic: str
    where: dict[str, Any]
    peer: str | None = None
    at_least: float = 0.0
    measure: str = "ms"
    at_most: float = 0.0


TARGETS = (
    Target("bfloat16 forward : fa2", "speed", {"direction": "forward"}, "fa2", 1.0),
    Target("bfloat16 backward : fa2", "speed", {"direction": "backward"}, "fa2", 1.0),
    Target("float32 forward : torch-efficient", "precision", {"direction": "forward"}, "torch-efficient", 0.9),
    Target("float32 backward : torch-efficient", "precision", {"direction": "backward"}, "torch-efficient", 0.9),
    Target("float64 forward : torch-math", "precision", {"direction": "forward"}, "torch-math", 1.0),
    Target("host time of a call, us", "host", {"direction": "forward"}, measure="us", at_most=25.0),
    Target("first call, empty cache, ms", "first call", {"cache": "empty", "direction": "forward"}, at_most=2500.0),
    Target("first call, filled cache, ms", "first call", {"cache": "filled", "direction": "forward"}, at_most=500.0),
)


def summary(rows: list[Row]) -> str:
    """Each target with what was measured, then whatever failed."""
    lines = []
    for target in TARGETS:
        own = [
            row
            for row in rows
            if row["topic"] == target.topic
            and row["system"] == "cuflash"
            and all(row.get(key) == value for key, value in target.where.items())
            and row.get(target.measure) is not None
        ]
        for row in own:
            value: float = row[target.measure]
            case = " ".join(str(row[key]) for key in ("batch", "heads_q", "seq_q", "head_dim"))
            case += " causal" if row["causal"] else ""
            if target.peer is None:
                ok = value <= target.at_most
                lines.append((target.name, case, f"{value:.1f}", f"<= {target.at_most:g}", "PASS" if ok else "MISS"))
                continue
            keys = ("topic", "direction", "dtype", *Shape.__dataclass_fields__, "causal")
            peer = [r for r in rows if r["system"] == target.peer and all(r.get(k) == row.get(k) for k in keys)]
            if peer and peer[0].get("ms"):
                share = peer[0]["ms"] / value
                figures = f"{row['tflops']:.1f} : {peer[0]['tflops']:.1f} TFLOP/s = {share:.2f}"
                verdict = "PASS" if share >= target.at_least else "MISS"
                lines.append((target.name, case, figures, f">= {target.at_least:g}", verdict))
    parts = []
    if lines:
        parts.append(
            text.table(("target", "batch heads seq head_dim", "measured", "wanted", ""), lines, left=2, indent="")
        )
    failures = dict.fromkeys(f"FAILED {r['topic']} {r['system']}: {r['failure']}" for r in rows if r.get("failure"))
    return "\n".join([*parts, *failures]) or "nothing here has a target"


if __name__ == "__main__":
    sys.exit(main())
