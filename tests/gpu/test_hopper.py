"""Hopper's own kernels on the device: every tile, layouts that have tensor maps, graphs, streams, threads, new addresses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import KeyLengths, problem
from tests.cases import DTYPES, OPTIONS, Case
from tests.gpu.device import DRY, Device, Kind, canonical_gradients, check
from tests.tolerance import Expectation

HOPPER = "numpy" if DRY else "wgmma"

pytestmark = pytest.mark.parametrize(
    "kind", [Kind(HOPPER, dtype) for dtype in ("float16", "bfloat16")], ids=str, indirect=True
)

#: head_dim, head_dim_v, queries, options: together every tile that is shipped
SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "64": (64, 64, 300, {}),
    "64, long": (64, 64, 420 if DRY else 4200, {}),
    "64, scored": (64, 64, 300, {"softcap": 2.0}),
    "128": (128, 128, 300, {}),
    "128, scored twice": (128, 128, 300, {"softcap": 2.0, "bias": "hqk"}),
    "192 and 128": (192, 128, 300, {}),
    "192": (192, 192, 300, {}),
    "192, scored twice": (192, 192, 300, {"softcap": 2.0, "bias": "hqk"}),
    "256": (256, 256, 300, {}),
    "256, scored": (256, 256, 300, {"softcap": 2.0}),
    "256, scored twice": (256, 256, 300, {"softcap": 2.0, "bias": "hqk"}),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_tile(device: Device, kind: Kind, name: str, causal: bool) -> None:
    """More tiles than blocks and fewer, with keys that end inside a block and at its end."""
    d, d_v, seq_q, options = SHAPES[name]
    many = 1 if DRY or seq_q > 1000 else 12
    backward = DRY or not ("softcap" in options and "bias" in options)  # refused: tests/test_backends.py
    for batch, heads_q, seq_k in ((1, 2, 391), (1, 2, 384), (many, 12, 257)):
        case = Case(name, batch=(batch,), heads_q=heads_q, heads_k=1, seq_q=seq_q, seq_k=seq_k)
        case = replace(case, head_dim=d, head_dim_v=d_v, causal=causal, **options)
        check(device, kind, case, backward=backward)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_turns_of_many_blocks(device: Device, kind: Kind, head_dim: int, head_dim_v: int, causal: bool) -> None:
    """Several tiles of keys of a head run at a time, and more than the device holds at once."""
    heads, seq = (2, 150) if DRY else (24, 1100)
    case = Case("turns", kind.dtype, batch=(), heads_q=heads, heads_k=heads, seq_q=seq, seq_k=seq, causal=causal)
    call, dout, _ = replace(case, head_dim=head_dim, head_dim_v=head_dim_v).call()
    q, k, v, dout = (device.put(x) for x in (call.q, call.k, call.v, dout))
    options = {"causal": causal, "backend": kind.backend}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)

    def gradients(deterministic: bool) -> list[np.ndarray]:
        found = cuflash.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
        return [device.get(x) for x in found]

    first = gradients(True)
    for _ in range(2 if DRY else 10):
        for x, y in zip(first, gradients(True), strict=True):
            assert x.tobytes() == y.tobytes()
    for x, y in zip(first, gradients(False), strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert np.linalg.norm(x - y) <= float(ml_dtypes.finfo(DTYPES[kind.dtype]).eps) * np.linalg.norm(y)


@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_dq_of_wide_heads(device: Device, kind: Kind, head_dim: int) -> None:
    """By a kernel of its own: equal bits, and no turns for which blocks wait."""
    hosts = [random(i, kind, 2, h, n, head_dim) for i, (h, n) in enumerate(((4, 300), (2, 391), (2, 391), (4, 300)))]
    q, k, v, dout = (device.put(x) for x in hosts)
    for options in ({}, {"causal": True}, {"window": (100, 50)}):
        call, found = problem.describe(*hosts[:3], **options), set()
        out, lse = cuflash.attention(q, k, v, return_lse=True, backend=kind.backend, **options)
        options = {**options, "deterministic": True, "backend": kind.backend}
        for _ in range(1 if DRY else 5):
            gradients = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
            found.add(b"".join(device.get(x).tobytes() for x in gradients))
        assert len(found) == 1
        Expectation(call, hosts[3], None).check_backward(canonical_gradients(device, call, gradients))


def test_everything(device: Device, kind: Kind) -> None:
    for head_dim in (16, 64, 128, 192, 256):
        case = Case("", **{**OPTIONS["everything"], "head_dim": head_dim, "head_dim_v": head_dim, "seq_q": 300})
        check(device, kind, case)


def test_many_lengths(device: Device, kind: Kind) -> None:
    """Long and short tiles of queries, blocks of keys that begin and end anywhere."""
    rng = np.random.default_rng(0)
    for _ in range(10 if DRY else 60):
        seq_q, seq_k = (int(n) for n in rng.integers(1, 700, 2))
        window = (int(rng.integers(0, 300)), int(rng.integers(0, 300))) if rng.random() < 0.5 else None
        case = Case("", seq_q=seq_q, seq_k=seq_k, heads_q=3, heads_k=1, head_dim=64, lengths="random", window=window)
        try:
            check(device, kind, replace(case, causal=bool(rng.random() < 0.5)))
        except AssertionError as error:
            raise AssertionError(f"{case}, {seq_q} x {seq_k}, window {window}: {error}") from error


# ---- layouts ---------------------------------------------------------------------------------------------------------


def random(seed: int, kind: Kind, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[kind.dtype])


def judge(device: Device, call: problem.Call, got: tuple[Any, Any]) -> None:
    Expectation(call).check_forward(*(device.get(x) for x in got))


def test_slices_of_one_array(device: Device, kind: Kind) -> None:
    """q, k and v as parts of one projection's result, their rows heads apart."""
    host = random(0, kind, 2, 300, 3, 4, 64)
    fused = device.put(host)
    q, k, v = (x.swapaxes(1, 2) for x in (fused[:, :, i] for i in range(3)))
    got = cuflash.attention(q, k, v, causal=True, return_lse=True, backend=kind.backend)
    call = problem.describe(*(host[:, :, i].swapaxes(1, 2).copy() for i in range(3)), causal=True)
    judge(device, call, got)
    device.check_inputs()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_columns_of_a_wider_array(device: Device, kind: Kind, layout: str) -> None:
    """Inputs and output; what lies beside them stays."""
    hosts = [
        random(seed, kind, 2, *((4, n) if layout == "bhsd" else (n, 4)), 80) for seed, n in enumerate((300, 391, 391))
    ]
    call = problem.describe(*(x[..., 8:72].copy() for x in hosts), layout=layout)
    arrays = [device.put(x)[..., 8:72] for x in hosts]
    target, root, before, first = device.place(np.full_like(hosts[0], np.nan))
    out, lse = cuflash.attention(*arrays, layout=layout, return_lse=True, out=target[..., 8:72], backend=kind.backend)
    judge(device, call, (problem.canonical(out, layout), lse))
    for beside in (target[..., :8], target[..., 72:]):
        assert np.isnan(device.get(device.xp.ascontiguousarray(beside)).astype(np.float32)).all()
    edges = np.r_[:first, first + hosts[0].nbytes : before.size]
    assert (device.get(root)[edges] == before[edges]).all(), "bytes around out changed"
    device.check_inputs()


def test_new_addresses(device: Device, kind: Kind) -> None:
    """Each call's maps are of its own arrays, also where memory is used again and where strides change."""
    for turn in range(5 if DRY else 50):
        n = 200 + turn % 3
        hosts = [random(turn + i, kind, 2, 2, n, 64) for i in range(3)]
        arrays = [device.xp.asarray(x) if DRY else device.put(x) for x in hosts]
        judge(device, problem.describe(*hosts), cuflash.attention(*arrays, return_lse=True, backend=kind.backend))
        device.free()


# ---- streams, graphs, threads ------------------------------------------------------------------------------------------
needs_device = pytest.mark.skipif(DRY, reason="streams and graphs are the device's")
SHAPE_Q, SHAPE_K = (2, 8, 500, 128), (2, 2, 700, 128)


def inputs(seed: int, kind: Kind) -> list[np.ndarray]:
    return [random(seed + i, kind, *shape) for i, shape in enumerate((SHAPE_Q, SHAPE_K, SHAPE_K))]


def bits(x: Any) -> Any:
    return x.view(f"u{x.dtype.itemsize}")


@needs_device
@pytest.mark.parametrize("what", ["plain", "causal", "lengths"])
def test_graph_replayed_with_new_data(device: Device, kind: Kind, what: str) -> None:
    """The maps of a captured call are those of its arrays, whose contents may change."""
    cupy = device.xp
    modifiers = (KeyLengths(np.array([650, 300])),)
    options = {"plain": {}, "causal": {"causal": True}, "lengths": {"modifiers": modifiers}}[what]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [cupy.empty(shape, DTYPES[kind.dtype]) for shape in (SHAPE_Q, SHAPE_K, SHAPE_K)]
        out = cupy.empty(SHAPE_Q, DTYPES[kind.dtype])
        for x in arrays:
            bits(x).fill(0)
        cuflash.attention(*arrays, return_lse=True, out=out, backend=kind.backend, **options)
        stream.synchronize()
        stream.begin_capture()
        _, lse = cuflash.attention(*arrays, return_lse=True, out=out, backend=kind.backend, **options)
        graph = stream.end_capture()
        for seed in (1, 2, 3):
            hosts = inputs(seed, kind)
            for x, host in zip(arrays, hosts, strict=True):
                bits(x).set(bits(host), stream=stream)
            bits(out).fill(0xFFFF)
            graph.launch(stream)
            stream.synchronize()
            judge(device, problem.describe(*hosts, **options), (out, lse))


@needs_device
def test_replayed_calls(device: Device, kind: Kind) -> None:
    """A second call of the same signature skips planning; it is the same call, for other arrays as well."""
    first, second = ([device.put(x) for x in inputs(seed, kind)] for seed in (1, 2))
    want = [cuflash.attention(*x, return_lse=True, backend=kind.backend) for x in (first, second)]
    for _ in range(3):
        for arrays, (out, lse) in zip((first, second), want, strict=True):
            again, again_lse = cuflash.attention(*arrays, return_lse=True, backend=kind.backend)
            np.testing.assert_array_equal(device.get(again), device.get(out))
            np.testing.assert_array_equal(device.get(again_lse), device.get(lse))
    judge(device, problem.describe(*inputs(2, kind)), want[1])


@needs_device
def test_streams_and_threads(device: Device, kind: Kind) -> None:
    """Eight threads, each with its stream and data, the first call of the process among them."""
    cupy = device.xp
    hosts = [inputs(10 * seed, kind) for seed in range(8)]

    def work(host: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            arrays = [cupy.asarray(bits(x)).view(x.dtype) for x in host]
            for _ in range(10):
                out, lse = cuflash.attention(*arrays, causal=True, return_lse=True, backend=kind.backend)
            stream.synchronize()
            return device.get(out), device.get(lse)

    with ThreadPoolExecutor(8) as pool:
        for host, got in zip(hosts, pool.map(work, hosts), strict=True):
            Expectation(problem.describe(*host, causal=True)).check_forward(*got)


@needs_device
def test_what_the_kernel_takes(device: Device, kind: Kind) -> None:
    """One block for each multiprocessor, no spill, and the tile and shared memory that were planned."""
    q, k, v = (device.put(x) for x in inputs(0, kind))
    explained = cuflash.explain(q, k, v, backend=kind.backend)
    assert explained.backend == "wgmma"
    assert explained.spilled_bytes == 0
    assert explained.grid == min(device.xp.cuda.Device().attributes["MultiProcessorCount"], 2 * 8 * 4)
    assert explained.tile == (128, 128)


@pytest.mark.big
@needs_device
def test_offsets_beyond_32_bits(device: Device, kind: Kind) -> None:
    """Keys and queries above 2^32 elements: the last entries of the batch are right."""
    cupy, dtype = device.xp, DTYPES[kind.dtype]
    batch, heads, n, d = 1 << 9, 16, 4096, 128
    assert batch * heads * n * d == 1 << 32
    x = cupy.empty((batch + 1, heads, n, d), dtype)
    bits(x).fill(0)
    host = random(3, kind, heads, n, d)
    bits(x[-1])[...] = cupy.asarray(bits(host))
    q = x[:, :, -130:]
    out, lse = cuflash.attention(q, x, x, causal=True, return_lse=True, backend=kind.backend)
    some = slice(0, 2)
    call = problem.describe(host[some, -130:].copy(), host[some].copy(), host[some].copy(), causal=True)
    judge(
        device, call, (cupy.ascontiguousarray(bits(out[-1, some])).view(dtype), cupy.ascontiguousarray(lse[-1, some]))
    )
    assert not int(cupy.count_nonzero(bits(out[:-1]) << 1))
