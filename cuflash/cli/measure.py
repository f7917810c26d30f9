"""How time and memory are measured: CUDA events and the memory pool on a GPU, the clock and tracemalloc elsewhere."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Call = Callable[[], Any]


@dataclass(frozen=True)
class Clock:
    """Times and weighs calls that work on NumPy arrays (`xp` is NumPy), or on CuPy arrays."""

    xp: Any

    @property
    def on_gpu(self) -> bool:
        return self.xp is not np

    def milliseconds(self, call: Call, repeat: int = 7, *, warm_up: int = 1) -> float:
        """Median time of a call; on a GPU the calls stand back to back, and a batch of them fills some milliseconds."""
        for _ in range(warm_up):
            call()
        if not self.on_gpu:
            return statistics.median(self._by_clock(call) for _ in range(repeat))
        batch = max(1, min(1000, round(6.0 / max(self._by_events(call, 1), 1e-3))))
        return statistics.median(self._by_events(call, batch) for _ in range(repeat))

    def _by_clock(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def _by_events(self, call: Call, batch: int) -> float:
        cuda = self.xp.cuda
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        for _ in range(batch):
            call()
        end.record()
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) / batch

    def peak_bytes(self, call: Call) -> int:
        """Most memory that a call holds at once beyond what was there before, its results included."""
        gc.collect()
        if self.on_gpu:
            return self._peak_of_pool(call)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            result = call()
            peak = tracemalloc.get_traced_memory()[1] - before
            del result
        finally:
            tracemalloc.stop()
        return peak

    def _peak_of_pool(self, call: Call) -> int:
        cuda = self.xp.cuda
        held = {"now": 0, "peak": 0}

        class Watch(cuda.MemoryHook):  # type: ignore[misc, name-defined]
            name = "cuflash peak"

            def malloc_postprocess(self, **block: Any) -> None:
                held["now"] += block["mem_size"]
                held["peak"] = max(held.values())

            def free_postprocess(self, **block: Any) -> None:
                held["now"] -= block["mem_size"]

        with Watch():
            result = call()
            cuda.runtime.deviceSynchronize()
        del result
        return held["peak"]
