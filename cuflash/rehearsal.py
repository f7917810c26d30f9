"""Rehearsal: a planned call on scratch data, run and timed on its device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import cupy
import numpy as np

from cuflash.arrays import extent

ALIGNMENT = 256  # bytes: of addresses of scratch arrays, the same part is left as of those that they stand for
PATTERN = 1 << 18  # numbers, after which they come again
FLUSHED_BYTES = 256 << 20  # written before each run: more than any second-level cache holds
LASTING = 50.0  # milliseconds that all runs together fill, but for very short and very long ones
LEAST, MOST = 5, 200  # runs


def scratch(x: cupy.ndarray, seed: int) -> cupy.ndarray:
    """An array of random numbers of normal distribution that lies as `x` does: shape, dtype, strides, alignment."""
    low, high = extent(x)
    lead = low % ALIGNMENT
    memory = cupy.empty(lead + high - low, cupy.uint8)
    numbers = np.random.default_rng(seed).standard_normal(PATTERN, np.float32).astype(x.dtype)
    begin = cupy.asarray(numbers.view(np.uint8)[: memory.size - lead])
    memory[lead : lead + begin.size] = begin
    filled = begin.size
    while 0 < filled < memory.size - lead:  # by what is there already, twice as much each time
        more = min(filled, memory.size - lead - filled)
        memory[lead + filled : lead + filled + more] = memory[lead : lead + more]
        filled += more
    return cupy.ndarray(x.shape, x.dtype, memory.data + (lead + x.data.ptr - low), x.strides)


def milliseconds(run: Callable[[], None]) -> float:
    """Median time of what `run` launches on the current stream, for data that no cache holds; waits for the device."""
    run()
    flushed = cupy.empty(FLUSHED_BYTES, cupy.uint8)
    (first,) = timed(run, flushed, 1)
    count = max(LEAST, min(MOST, round(LASTING / max(first, 1e-3))))
    return statistics.median(timed(run, flushed, count))


def timed(run: Callable[[], None], flushed: cupy.ndarray, count: int) -> list[float]:
    """Times of so many runs.  While the device writes, the host gets ahead of it, so that its own time does not count."""
    events = []
    for _ in range(count):
        flushed.fill(0)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    events[-1][1].synchronize()
    return [float(cupy.cuda.get_elapsed_time(*pair)) for pair in events]
