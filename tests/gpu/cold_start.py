"""A process that uses cuflash for the first time: ``python tests/gpu/cold_start.py [THREADS]``, run by test_runtime.py.

Prints "ready" once everything is imported, waits for a line of input, computes in all threads at once, and prints one JSON
object: a digest of each thread's results, and the warnings.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy
import numpy as np

import cuflash

#: thread i computes with the i-th of these, so that some kernels are wanted by several threads at once
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (9, 9)}, {})


def digest(options: dict[str, Any]) -> str:
    """Forward and backward on a stream of its own; a hash of what has the same bits every time."""
    rng = np.random.default_rng(0)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        q, k, v, dout = (cupy.asarray(rng.standard_normal((2, 2, 70, 16)).astype(np.float32)) for _ in range(4))
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        gradients = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
        found = hashlib.sha256()
        for x in (out, lse, gradients.dk, gradients.dv):
            found.update(x.get().tobytes())
        assert np.isfinite(gradients.dq.get()).all()  # on the host: CuPy's own kernels need a cache that can be written
        stream.synchronize()
    return found.hexdigest()


def main(count: int) -> None:
    """Run `count` threads at once."""
    barrier = threading.Barrier(count)

    def work(i: int) -> str:
        barrier.wait()
        return digest(OPTIONS[i % len(OPTIONS)])

    print("ready", flush=True)
    sys.stdin.readline()
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(count) as pool:
        warnings.simplefilter("default")
        futures = [pool.submit(work, i) for i in range(count)]
        results = [repr(future.exception()) if future.exception() else future.result() for future in futures]
    said = [f"{w.category.__name__}: {w.message}" for w in caught]
    print(json.dumps({"results": results, "warnings": said}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
