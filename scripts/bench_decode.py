"""The suite "decode" of bench.py: one query for each entry of a batch over long caches, beside a kernel that only reads.

Two times are taken of everything.  The GPU's own: CUDA graphs of calls that rotate over caches larger than the second-level
cache, replayed, so that the host has no part in it.  And that of single calls, host included: one call between two events,
waited for.  Rates count the bytes of keys and values, which every call has to read.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cuflash

Array = Any
Row = dict[str, Any]

#: batch, heads_q, heads_k, keys of each entry
SHAPES = (
    (1, 32, 8, 32768),
    (1, 32, 8, 131072),
    (16, 32, 8, 8192),
    (64, 32, 8, 4096),
    (128, 64, 8, 4096),
    (16, 32, 32, 4096),
)
HEAD_DIM = 128
ROTATED_BYTES = 640 << 20  # of caches that calls take turns with: far more than any second-level cache
GRAPH_CALLS = 12  # of a graph, at least
PAGES = (64, 16)
PEERS = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION"}
LARGEST_DIFFERENCE = 1e-2  # relative, in norm: bfloat16

READ = r"""
// Ordinary 16-byte loads, 8 in flight for each thread; `out` keeps them from being left out.
extern "C" __global__ void __launch_bounds__(1024, 2) read_all(const uint4* data, unsigned vectors, unsigned* out) {
  unsigned sink = 0;
  const unsigned threads = gridDim.x * blockDim.x;
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * threads < vectors; i += 8 * threads) {
    uint4 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __ldcs(data + i + j * threads);
#pragma unroll
    for (int j = 0; j < 8; ++j) sink ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  for (; i < vectors; i += threads) sink ^= data[i].x;
  if (sink == 0x12345678u) *out = 1;
}
"""


@dataclass
class System:
    """What is measured: calls by number of the cache, captured by CuPy or by PyTorch; `result` of cache 0 is compared."""

    name: str
    cache: str
    call: Callable[[int], Any]
    by_torch: bool = False
    result: Callable[[], np.ndarray] | None = None
    expected: np.ndarray | None = None
    graph: Any = None
    kept: list[Any] = field(default_factory=list)


def decode(session: Any) -> None:
    """The shapes, with contiguous caches in both layouts and with pages."""
    for shape in SHAPES[:1] if session.quick else SHAPES:
        with session.part("decode", "cuflash", **sizes(shape)):
            measure(session, shape, systems_of(session, shape))


def rings(session: Any) -> None:
    """Other rings and counts of heads side by side for two of the shapes: what tuning.py chooses among."""
    from cuflash import tuning
    from cuflash.schedules import decode as schedule

    chosen, lanes = tuning.DECODE_MMA, schedule.MAX_HEAD_LANES
    for shape in (SHAPES[0], SHAPES[3]):
        with session.part("decode rings", "cuflash", **sizes(shape)):
            q, caches = data_of(session, shape)
            found = []
            for row in ((32, 4, 3), (32, 4, 2), (32, 3, 4), (32, 2, 5), (32, 5, 2), (16, 8, 2), (16, 4, 5), (16, 6, 3)):
                for head_lanes in (lanes, 1) if row == (32, 4, 3) else (lanes,):
                    name = "cuflash " + "x".join(map(str, row)) + f" lanes {head_lanes}"

                    def prepare(row: Any = row, head_lanes: int = head_lanes) -> None:
                        tuning.DECODE_MMA, schedule.MAX_HEAD_LANES = (tuning.DecodeTile(*row),), head_lanes
                        forget_plans()

                    found.append(contiguous(q, caches, shape, name, prepare=prepare))
            try:
                measure(session, shape, found, topic="decode rings", with_single=False)
            finally:
                tuning.DECODE_MMA, schedule.MAX_HEAD_LANES = chosen, lanes
                forget_plans()


def forget_plans() -> None:
    """So that the next call is planned anew."""
    from cuflash import decode_launch, decode_plan

    decode_plan.plan_decode.cache_clear()
    decode_launch._replays.clear()


def sizes(shape: tuple[int, int, int, int]) -> Row:
    batch, heads_q, heads_k, seq_k = shape
    return {
        "direction": "decode",
        "dtype": "bfloat16",
        "batch": batch,
        "heads_q": heads_q,
        "heads_k": heads_k,
        "seq_q": 1,
        "seq_k": seq_k,
        "head_dim": HEAD_DIM,
        "head_dim_v": HEAD_DIM,
        "causal": False,
    }


def bytes_of(shape: tuple[int, int, int, int]) -> int:
    """Of keys and values."""
    batch, _, heads_k, seq_k = shape
    return 2 * 2 * batch * heads_k * seq_k * HEAD_DIM


# ---- data ------------------------------------------------------------------------------------------------------------
def data_of(session: Any, shape: tuple[int, int, int, int]) -> tuple[Array, Array]:
    """Queries (batch, 1, heads_q, head_dim), and caches (copies, 2, batch, seq_k, heads_k, head_dim)."""
    import cupy
    import ml_dtypes

    batch, heads_q, heads_k, seq_k = shape
    copies = max(1, -(-ROTATED_BYTES // bytes_of(shape)))
    q_shape, shape_of_all = (batch, 1, heads_q, HEAD_DIM), (copies, 2, batch, seq_k, heads_k, HEAD_DIM)
    if session.peers:
        import torch

        torch.manual_seed(0)
        made = (torch.empty(s, device="cuda", dtype=torch.bfloat16).normal_() for s in (q_shape, shape_of_all))
        q, caches = (cupy.from_dlpack(x) for x in made)
        return q, caches
    rng = np.random.default_rng(0)
    bits = rng.standard_normal(1 << 20, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    flat = cupy.resize(cupy.asarray(bits), (int(np.prod(shape_of_all)),))
    q = cupy.asarray(rng.standard_normal(q_shape, np.float32).astype(ml_dtypes.bfloat16))
    return q, flat.view(ml_dtypes.bfloat16).reshape(shape_of_all)


def on_host(x: Array) -> np.ndarray:
    """As float64."""
    bits: np.ndarray = x.view("uint16").get()
    return bits.view(x.dtype).astype(np.float64)


def exact(q: Array, k: Array, v: Array, group: int) -> np.ndarray:
    """Attention of the last entry's first group of heads, (group, head_dim); k and v are its own, (seq_k, head_dim)."""
    s = on_host(q[-1, 0, :group]) @ on_host(k).T * HEAD_DIM**-0.5
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    found: np.ndarray = p @ on_host(v) / p.sum(axis=-1, keepdims=True)
    return found


def contiguous(
    q: Array,
    caches: Array,
    shape: tuple[int, int, int, int],
    name: str,
    layout: str = "bshd",
    prepare: Callable[[], None] = lambda: None,
) -> System:
    """cuflash on contiguous caches; in layout "bhsd" the same memory is read as (batch, heads_k, seq_k, head_dim).

    `prepare` is run before every call.
    """
    import cupy

    batch, heads_q, heads_k, seq_k = shape
    group = heads_q // heads_k
    lengths = cupy.full(batch, seq_k, cupy.int32)
    if layout == "bhsd":
        caches = caches.reshape(len(caches), 2, batch, heads_k, seq_k, HEAD_DIM)
        own = q.reshape(batch, heads_q, 1, HEAD_DIM)
        k, v = (caches[0, n, -1, 0] for n in (0, 1))
    else:
        own = q
        k, v = (caches[0, n, -1, :, 0] for n in (0, 1))

    views = [(caches[i, 0], caches[i, 1]) for i in range(len(caches))]

    def call(i: int) -> Any:
        prepare()
        return cuflash.attention_decode(own, *views[i], lengths, layout=layout)

    return System(
        name,
        f"contiguous {layout}",
        call,
        result=lambda: on_host(call(0).reshape(batch, heads_q, HEAD_DIM)[-1, :group]),
        expected=exact(q, k, v, group),
    )


def paged(q: Array, caches: Array, shape: tuple[int, int, int, int], page_size: int) -> System:
    """cuflash on the same memory as a pool of pages, (pages, page_size, heads_k, head_dim), in random order."""
    import cupy

    batch, heads_q, heads_k, seq_k = shape
    group = heads_q // heads_k
    pools = caches.reshape(len(caches), 2, batch * seq_k // page_size, page_size, heads_k, HEAD_DIM)
    order = np.random.default_rng(1).permutation(pools.shape[2]).astype(np.int32).reshape(batch, -1)
    table, lengths = cupy.asarray(order), cupy.full(batch, seq_k, cupy.int32)
    views = [(pools[i, 0], pools[i, 1]) for i in range(len(pools))]

    def call(i: int) -> Any:
        return cuflash.attention_decode(q, *views[i], lengths, page_table=table, layout="bshd")

    k, v = (pools[0, n][table[-1], :, 0].reshape(seq_k, HEAD_DIM) for n in (0, 1))
    return System(
        "cuflash",
        f"pages of {page_size}",
        call,
        result=lambda: on_host(call(0)[-1, 0, :group]),
        expected=exact(q, k, v, group),
    )


def peer(q: Array, caches: Array, shape: tuple[int, int, int, int], system: str, backend: str) -> System:
    """One of PyTorch's backends on the contiguous caches."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    _, heads_q, heads_k, _ = shape
    chosen = getattr(SDPBackend, backend)
    tensors = [tuple(torch.from_dlpack(caches[i, n]).transpose(1, 2) for n in (0, 1)) for i in range(len(caches))]
    own = torch.from_dlpack(q).transpose(1, 2)

    def call(i: int) -> Any:
        with torch.no_grad(), sdpa_kernel(chosen):
            return scaled_dot_product_attention(own, *tensors[i], enable_gqa=heads_q != heads_k)

    return System(
        system,
        "contiguous bshd",
        call,
        by_torch=True,
        result=lambda: call(0)[-1, : heads_q // heads_k, 0].double().cpu().numpy(),
        expected=exact(q, *(caches[0, n, -1, :, 0] for n in (0, 1)), heads_q // heads_k),
    )


def fa3(q: Array, caches: Array, shape: tuple[int, int, int, int]) -> System:
    """FlashAttention-3 on the contiguous caches."""
    import torch

    from scripts import peers

    batch, heads_q, heads_k, seq_k = shape
    own = torch.from_dlpack(q)
    lengths = torch.full((batch,), seq_k, device="cuda", dtype=torch.int32)
    calls = [peers.fa3_decode(own, *(torch.from_dlpack(x) for x in caches[i]), lengths) for i in range(len(caches))]
    return System(
        "fa3",
        "contiguous bshd",
        lambda i: calls[i](),
        by_torch=True,
        result=lambda: calls[0]()[-1, 0, : heads_q // heads_k].double().cpu().numpy(),
        expected=exact(q, *(caches[0, n, -1, :, 0] for n in (0, 1)), heads_q // heads_k),
    )


def reading(caches: Array) -> System:
    """The kernel that only reads."""
    import cupy

    kernel = cupy.RawModule(code=READ).get_function("read_all")
    out = cupy.zeros(1, cupy.uint32)
    blocks = 2 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    vectors = np.uint32(caches[0].nbytes // 16)
    views = [caches[i] for i in range(len(caches))]
    return System("read", "contiguous bshd", lambda i: kernel((blocks,), (1024,), (views[i], vectors, out)))


def systems_of(session: Any, shape: tuple[int, int, int, int]) -> list[System]:
    """Everything that a shape is measured with; what cannot be prepared becomes a row."""
    q, caches = data_of(session, shape)
    makers: list[tuple[str, str, Callable[[], System]]] = [
        ("cuflash", "contiguous bshd", lambda: contiguous(q, caches, shape, "cuflash")),
        ("cuflash", "contiguous bhsd", lambda: contiguous(q, caches, shape, "cuflash", "bhsd")),
        *(("cuflash", f"pages of {n}", lambda n=n: paged(q, caches, shape, n)) for n in PAGES),  # type: ignore[misc]
        ("read", "contiguous bshd", lambda: reading(caches)),
    ]
    if session.peers:
        makers += [
            (name, "contiguous bshd", lambda n=name, b=b: peer(q, caches, shape, n, b)) for name, b in PEERS.items()
        ]  # type: ignore[misc]
    if session.all_peers:
        makers.append(("fa3", "contiguous bshd", lambda: fa3(q, caches, shape)))
    found = []
    for name, cache, make in makers:
        with session.part("decode", name, **sizes(shape), cache=cache):
            found.append(make())
    return found


# ---- times -----------------------------------------------------------------------------------------------------------
def measure(
    session: Any,
    shape: tuple[int, int, int, int],
    systems: list[System],
    topic: str = "decode",
    with_single: bool = True,
) -> None:
    """GPU time by graphs and the time of single calls, of all systems in random rotation."""
    import cupy

    copies = max(1, -(-ROTATED_BYTES // bytes_of(shape)))
    calls = max(GRAPH_CALLS, copies)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    ready = []
    for system in systems:
        with session.part(topic, system.name, **sizes(shape), cache=system.cache):
            if system.result is not None and system.expected is not None:
                found = system.result()
                error = float(np.linalg.norm(found - system.expected) / np.linalg.norm(system.expected))
                if not error <= LARGEST_DIFFERENCE:
                    raise RuntimeError(f"wrong: relative difference {error:.3g}")
            for i in range(3):
                system.call(i % copies)
            cupy.cuda.runtime.deviceSynchronize()
            capture(system, calls, copies)
            replayed(system, begin, end)
            ready.append(system)
    gpu: dict[int, list[float]] = {n: [] for n in range(len(ready))}
    single: dict[int, list[float]] = {n: [] for n in range(len(ready))}
    for _ in range(session.rounds):
        for n in random.sample(list(gpu), len(gpu)):
            gpu[n].append(replayed(ready[n], begin, end) / calls)
    if with_single:
        turn = 0  # no call reads the caches that the one before has left in the second-level cache
        for _ in range(4 * session.rounds):
            for n in random.sample(list(single), len(single)):
                turn += 1
                cupy.cuda.runtime.deviceSynchronize()
                begin.record()
                ready[n].call(turn % copies)
                end.record()
                end.synchronize()
                single[n].append(cupy.cuda.get_elapsed_time(begin, end))
    for n, system in enumerate(ready):
        ms = statistics.median(gpu[n])
        row: Row = {"ms": ms, "gbps": bytes_of(shape) / ms / 1e6}
        if with_single:
            ms = statistics.median(single[n])
            row |= {"ms_single": ms, "gbps_single": bytes_of(shape) / ms / 1e6}
        session.add(topic, system.name, **sizes(shape), cache=system.cache, **row)


def capture(system: System, calls: int, copies: int) -> None:
    """The graph of so many calls; results are kept, so that nobody else gets their memory."""
    if system.by_torch:
        import torch

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            system.call(0)
        torch.cuda.synchronize()
        system.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(system.graph):
            system.kept = [system.call(i % copies) for i in range(calls)]
        return
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        system.call(0)
        stream.synchronize()
        stream.begin_capture()
        try:
            system.kept = [system.call(i % copies) for i in range(calls)]
        finally:
            graph = stream.end_capture()
    system.graph = graph


def replayed(system: System, begin: Any, end: Any) -> float:
    """Milliseconds of a graph."""
    import cupy

    launch = system.graph.replay if system.by_torch else lambda: system.graph.launch(cupy.cuda.Stream.null)
    launch()
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end))


SUITE: tuple[Callable[[Any], None], ...] = (decode, rings)
