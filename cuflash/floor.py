"""Floor: the time below which no forward of a call can end, from what it has to multiply and to move at peak rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuflash.backends import Device
from cuflash.decode_problem import DecodeCall, lengths_of
from cuflash.modifiers import Packed, Tile
from cuflash.problem import Call, Problem
from cuflash.variant import ITEMSIZE

#: floating-point operations per clock and multiprocessor, dense, by capability: 16-bit tensor cores, float32, float64
RATES = {
    75: (1024, 128, 4),
    80: (2048, 128, 128),
    86: (1024, 256, 4),
    87: (1024, 256, 4),
    89: (1024, 256, 4),
    90: (4096, 256, 128),
    100: (8192, 256, 128),
    103: (8192, 256, 4),
    120: (1024, 256, 4),
    121: (1024, 256, 4),
}

#: products of 16-bit parts for one of float32 (schedules/split.py), by precision
PRODUCTS = {None: 3, "tf32": 1}

MOST_ROWS = 1024  # queries of a sequence that are looked at


class Work(NamedTuple):
    """What a forward cannot do without."""

    pairs: float  # of a query and a key that it sees, over all heads
    moved_bytes: float  # of queries, of keys and values that some query sees, and of outputs


def seconds(problem: Problem, device: Device, work: Work | None = None) -> float | None:
    """The larger of arithmetic and memory traffic at peak rates; None for a device whose rates are not known."""
    if not (device.clock_hz and device.bytes_per_second and device.capability in RATES):
        return None
    pairs, moved_bytes = work or work_of(problem)
    itemsize = ITEMSIZE[problem.dtype]
    tensor, *scalar = RATES[device.capability]
    rate = 2 // itemsize * tensor if itemsize < 4 else scalar[itemsize // 8]
    if problem.dtype == "float32" and device.capability >= 80:  # by products of float16 parts
        rate = max(rate, tensor // PRODUCTS[problem.precision])
    flops = 2 * pairs * (problem.head_dim + problem.head_dim_v)
    return max(flops / (rate * device.multiprocessors * device.clock_hz), moved_bytes / device.bytes_per_second)


def work_of(problem: Problem, operands: Mapping[str, Any] | None = None) -> Work:
    """Work of a call; `operands` are the arrays on the host by which intervals of keys are told.

    Keys outside of the intervals that causal, windows and lengths leave do not count; what other masks hide does.
    """
    visible, reached = intervals(problem, operands or {})
    heads_q, heads_k = problem.batch_size * problem.heads_q, problem.batch_size * problem.heads_k
    itemsize, out_itemsize = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    of_queries = problem.head_dim * itemsize + problem.head_dim_v * out_itemsize
    of_keys = (problem.head_dim + problem.head_dim_v) * itemsize
    return Work(heads_q * problem.seq_q * visible, heads_q * problem.seq_q * of_queries + heads_k * reached * of_keys)


def work_of_call(call: Call, on_host: Callable[[Any], Any]) -> Work:
    """Work of a call, also of packed sequences, with lengths and offsets that are brought to the host."""
    problem = call.problem
    if not problem.is_packed:
        names = {name for m in problem.modifiers if m.kind == "range" for name in m.operand_attributes()}
        return work_of(problem, {name: on_host(call.operands[name]) for name in names})
    alone = replace(problem, modifiers=tuple(m for m in problem.modifiers if not isinstance(m, Packed)))
    lengths = []
    for name, seq in zip(Packed.operand_attributes(), (problem.seq_q, problem.seq_k), strict=True):
        bounds = np.clip(on_host(call.operands[name]).ravel(), 0, seq)  # on a device they may be anything
        lengths.append(np.maximum(np.diff(bounds), 0).tolist())
    return total(alone, zip(*lengths, strict=True))


def work_of_decode(call: DecodeCall, lengths: Any) -> Work:
    """Work of a decode call with these lengths, on the host, or None; new keys are written besides."""
    problem, counts = call.problem, lengths_of(call, lengths)
    found = total(replace(problem, batch=()), ((problem.seq_q, n) for n in counts))
    row = (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    return Work(found.pairs, found.moved_bytes + len(counts) * problem.heads_k * call.decode.seq_new * row)


def total(problem: Problem, lengths: Iterable[tuple[int, int]]) -> Work:
    """Work of sequences of so many queries and keys; those of equal lengths are looked at once."""
    counts: dict[tuple[int, int], int] = {}
    for pair in lengths:
        counts[pair] = counts.get(pair, 0) + 1
    parts = [(work_of(replace(problem, seq_q=q, seq_k=k)), count) for (q, k), count in counts.items()]
    return Work(sum(w.pairs * count for w, count in parts), sum(w.moved_bytes * count for w, count in parts))


def intervals(problem: Problem, operands: Mapping[str, Any]) -> tuple[float, float]:
    """Keys that a query sees, and keys that some query of its head sees, on average, as far as intervals tell."""
    if not (problem.batch_size and problem.seq_q and problem.seq_k):
        return 0.0, 0.0
    ranges = [m for m in problem.modifiers if m.kind == "range" and m.operand_attributes().keys() <= operands.keys()]
    rows = np.linspace(0, problem.seq_q - 1, min(problem.seq_q, MOST_ROWS)).astype(np.int64)[:, None]
    tile = Tile(problem, operands, slice(0, problem.seq_q), slice(0, problem.seq_k))
    begin, end = np.zeros_like(rows), np.full_like(rows, problem.seq_k)
    for modifier in ranges:
        begin, end = modifier.narrow(begin, end, rows, tile)
    begin, end = np.broadcast_arrays(begin, end)
    sees = begin < end
    first = np.where(sees, begin, problem.seq_k).min(axis=-2)
    last = np.where(sees, end, 0).max(axis=-2)
    return float(np.maximum(end - begin, 0).mean()), float(np.maximum(last - first, 0).mean())
