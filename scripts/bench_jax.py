"""The suite "jax" of bench.py: `cuflash.jax.attention` beside `jax.nn.dot_product_attention`, by XLA and by cuDNN.

All systems take the same arrays, (batch, seq, heads, head_dim), inside of compiled programs in one process.  Batches of calls
are timed by the host's clock, up to the last result's being there, in random rotation.  Errors are relative to plain
attention in float32 over two of the heads; whoever is wrong posts no time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

import numpy as np

from cuflash.cli import text
from cuflash.cli.shape import Shape

Array = Any
Call = Callable[[], Any]
Row = dict[str, Any]

LIMIT_S = 90  # no further part is begun after this
BATCH_MS = 10.0  # a timed batch of calls fills at least this long
LARGEST_ERROR = 1e-2  # relative, in norm: bfloat16
#: batch, seq and whether causal, at head_dim 128 and 16 heads; what matters most comes first
SHAPES = ((1, 16384, True), (4, 4096, True), (1, 16384, False), (4, 4096, False))
SYSTEMS = {"cuflash": None, "cudnn": "cudnn", "xla": "xla"}


def load() -> Any:
    """JAX, told to take memory as it needs it, and nearly all there is."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    import jax

    return jax


def versions() -> dict[str, str]:
    """Of what is measured here."""
    found = {"jax": load().__version__}
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.setdefault("cudnn", metadata.version(name))
    return found


def attention(system: str, causal: bool, **options: Any) -> Callable[..., Array]:
    """The function of a system on (batch, seq, heads, head_dim)."""
    jax = load()
    if system == "cuflash":
        from cuflash.jax import attention as own

        return functools.partial(own, causal=causal, layout="bshd", **options)
    implementation = SYSTEMS[system]
    return functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation=implementation, **options)


# ---- the parts of the suite ------------------------------------------------------------------------------------------
def speed(session: Any) -> None:
    """Forward and backward of long sequences."""
    started = time.perf_counter()
    for batch, seq, causal in SHAPES[1:2] if session.quick else SHAPES:
        shape = Shape(batch, 16, 16, seq, seq, 128, 128)
        if time.perf_counter() - started > LIMIT_S:
            session.add("jax", "cuflash", **sizes(shape, causal), failure=f"left out: {LIMIT_S} s are over")
            continue
        with session.part("jax", "cuflash", **sizes(shape, causal)):
            measure(session, "jax", shape, causal, tuple(SYSTEMS), started + LIMIT_S)


def processor(session: Any) -> None:
    """The same on the host, where cuDNN has no part in it."""
    jax = load()
    seq = 256 if session.quick else 2048
    shape = Shape(1, 8, 8, seq, seq, 64, 64)
    with session.part("jax processor", "cuflash", **sizes(shape, True)), jax.default_device(jax.devices("cpu")[0]):
        measure(session, "jax processor", shape, True, ("cuflash", "xla"), time.perf_counter() + LIMIT_S)
        masked_rows(session, ("cuflash", "xla"))


def small_calls(session: Any) -> None:
    """Host time of a small call: what one more call in a program costs where the device has little to do."""
    calls: dict[str, Call] = {}
    for system in SYSTEMS:
        with session.part("jax host", system):
            q, k, v, _ = arrays_of(Shape(1, 4, 4, 64, 64, 64, 64))
            function = load().jit(attention(system, True))
            load().block_until_ready(function(q, k, v))
            calls[system] = functools.partial(function, q, k, v)
    with session.part("jax host", "cuflash"):
        for system, ms in rotate(calls, session.rounds).items():
            session.add("jax host", system, us=1e3 * ms)


def masked_rows(session: Any, systems: tuple[str, ...] = tuple(SYSTEMS)) -> None:
    """What a row becomes that sees no key, and its gradient."""
    mask = np.ones((1, 1, 256, 256), bool)
    mask[..., 3, :] = False
    for system in systems:
        with session.part("jax masked rows", system):
            jax = load()
            q, k, v, dout = arrays_of(Shape(1, 4, 4, 256, 256, 128, 128))
            out, vjp = jax.vjp(jax.jit(attention(system, False, mask=jax.numpy.asarray(mask))), q, k, v)
            dq, dk, dv = vjp(dout)
            values: Row = {"out": largest(out[:, 3]), "dq": largest(dq[:, 3])}
            values["finite"] = all(bool(jax.numpy.isfinite(x).all()) for x in (out, dq, dk, dv))
            session.add("jax masked rows", system, dtype="bfloat16", **values)


SUITE = (speed, small_calls, masked_rows)
PROCESSOR = (processor,)


# ---- measuring -------------------------------------------------------------------------------------------------------
def sizes(shape: Shape, causal: bool) -> Row:
    return {"dtype": "bfloat16", **asdict(shape), "causal": causal}


def arrays_of(shape: Shape) -> tuple[Array, ...]:
    """q, k, v and dout, normally distributed."""
    jax = load()
    shapes = (shape.q, shape.k, shape.v, shape.out)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(
        jax.random.normal(key, (batch, seq, heads, dim), jax.numpy.bfloat16)
        for key, (batch, heads, seq, dim) in zip(keys, shapes, strict=True)
    )


def measure(session: Any, topic: str, shape: Shape, causal: bool, systems: tuple[str, ...], until: float) -> None:
    """Forward and backward of one shape by each system, within the time that is left."""
    jax = load()
    q, k, v, dout = arrays_of(shape)
    exact = exact_results(q, k, v, dout, causal)
    calls: dict[str, dict[str, Call]] = {"forward": {}, "backward": {}}
    errors: dict[tuple[str, str], float] = {}
    for system in systems:
        with session.part(topic, system, **sizes(shape, causal)):
            if system != "cuflash" and time.perf_counter() > until:
                raise TimeoutError(f"left out: {LIMIT_S} s are over")
            function = attention(system, causal)
            forward = jax.jit(function)
            _, vjp = jax.jit(functools.partial(jax.vjp, function))(q, k, v)
            backward = jax.jit(lambda vjp, dout: vjp(dout))
            found = {"forward": (forward(q, k, v),), "backward": backward(vjp, dout)}
            for direction, results in found.items():
                error = max(map(relative, results, exact[direction]))
                errors[direction, system] = error
                if not error <= LARGEST_ERROR:
                    raise ArithmeticError(f"wrong: {direction} is off by {error:.3g}")
            calls["forward"][system] = functools.partial(forward, q, k, v)
            calls["backward"][system] = functools.partial(backward, vjp, dout)
            del found, vjp
    for direction, by_system in calls.items():
        with session.part(topic, "cuflash", direction=direction, **sizes(shape, causal)):
            for system, ms in rotate(by_system, session.rounds).items():
                values = {"ms": ms, "tflops": shape.operations(direction, causal) / ms / 1e9}
                row = {"direction": direction, **sizes(shape, causal), **values, "error": errors[direction, system]}
                session.add(topic, system, **row)


def exact_results(q: Array, k: Array, v: Array, dout: Array, causal: bool) -> dict[str, tuple[Array, ...]]:
    """Plain attention in float32 over the first two heads of the first batch entry, and its gradients."""
    jax = load()
    q, k, v, dout = (x[:1, :, :2].astype(np.float32) for x in (q, k, v, dout))

    @jax.jit
    def step(q: Array, k: Array, v: Array, dout: Array) -> Any:
        with jax.default_matmul_precision("highest"):
            out, vjp = jax.vjp(attention("xla", causal), q, k, v)
            return out, vjp(dout)

    out, gradients = step(q, k, v, dout)
    return {"forward": (out,), "backward": tuple(gradients)}


def relative(found: Array, expected: Array) -> float:
    """Norm of the difference from the part that is known, relative to the norm of that."""
    jax = load()
    part = found[:1, :, :2].astype(np.float32)
    return float(jax.numpy.linalg.norm((part - expected).ravel()) / jax.numpy.linalg.norm(expected.ravel()))


def largest(x: Array) -> float:
    """The largest size of an element; NaN if there is one."""
    return float(abs(x.astype(np.float32)).max())


def rotate(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call; in every round each has one batch, in a new random order."""
    jax = load()

    def batch(call: Call, count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - started) / count

    counts = {}
    for name, call in calls.items():
        batch(call, 1)
        counts[name] = max(2, min(500, round(BATCH_MS / max(batch(call, 2), 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(batch(calls[name], counts[name]))
    return {name: statistics.median(values) for name, values in times.items()}


# ---- the table at the end --------------------------------------------------------------------------------------------
def summary(rows: list[Row]) -> str:
    """The rows of this suite in a few lines; empty where there are none."""
    parts = []
    timed = [row for row in rows if row["topic"] in ("jax", "jax processor") and row.get("ms")]
    systems = list(dict.fromkeys(row["system"] for row in timed))
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in timed:
        groups.setdefault((row["seq_q"], row["causal"], row["direction"]), {})[row["system"]] = row
    lines = []
    for (seq, causal, direction), by_system in groups.items():
        own = by_system.get("cuflash", {}).get("ms")
        cells = [
            f"{by_system[s]['ms']:.3f} ms, {by_system[s]['error']:.1e}" if s in by_system else "-" for s in systems
        ]
        shares = [
            f"{by_system[s]['ms'] / own:.2f}" if own and s in by_system else "-" for s in systems if s != "cuflash"
        ]
        lines.append((f"{seq}", "causal" if causal else "full", direction, *cells, *shares))
    if lines:
        header = ("seq", "mask", "direction", *(f"{s}, error" for s in systems))
        header = (*header, *(f"{s} : cuflash" for s in systems if s != "cuflash"))
        parts.append(text.table(header, lines, left=3, indent=""))
    parts += [
        f"small call, {row['system']}: {row['us']:.1f} us" for row in rows if row["topic"] == "jax host" and "us" in row
    ]
    parts += [
        f"row that sees no key, {row['system']}: out {row['out']:.3g}, dq {row['dq']:.3g}, all finite: {row['finite']}"
        for row in rows
        if row["topic"] == "jax masked rows" and "out" in row
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit("run: python scripts/bench.py --suite jax --out scripts/results/GPU-jax.json")
