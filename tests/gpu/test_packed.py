"""Packed sequences on the device: every backend, many and skewed segments, offsets that stay unread, graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError
from tests.cases import DTYPES
from tests.gpu.device import DRY, Device, Kind, allow_reference_error, on_device
from tests.packs import Judge, Pack

needs_device = pytest.mark.skipif(DRY, reason="unread offsets, streams and graphs are the device's")
PACK = Pack((130, 0, 7, 300, 1, 64), (100, 9, 0, 310, 200, 64), behind=(9, 37), head_dim=64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "dlse": True},
    "top-left": {"causal": "top_left", "window": (9, 100)},
    "window": {"window": (50, 3), "dlse": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi": True, "dlse": True},
    "sinks": {"sinks": True, "causal": True, "dlse": True},
    "dropout": {"dropout": 0.3, "causal": True, "dlse": True},
    "groups": {"heads_q": 6, "heads_k": 2, "causal": True},
    "wide": {"head_dim": 24, "head_dim_v": 40},
    "large": {"head_dim": 192, "head_dim_v": 128, "causal": True},
    "everything": {
        "heads_q": 4,
        "scale": 0.4,
        "causal": True,
        "window": (100, None),
        "softcap": 3.0,
        "alibi": True,
        "head_dim": 17,
        "head_dim_v": 12,
        "dlse": True,
    },
}


def check(device: Device, kind: Kind, pack: Pack, *, deterministic: bool | None = None, place: str = "device") -> None:
    """Run a pack forward and backward and judge each segment's results."""
    pack = replace(pack, dtype=kind.dtype)
    made, (call, host_dout, host_dlse) = pack.make(), pack.call()
    judge = Judge(call, host_dout, host_dlse)
    if kind.dtype == "float64":
        for _, expectation in judge.parts:
            allow_reference_error(expectation)
    q, k, v, dout, dlse = (device.put(made[name]) for name in ("q", "k", "v", "dout", "dlse"))
    offsets = [device.put(x) if place == "device" else x for x in made["offsets"]]
    longest = {f"max_seqlen_{n}": int(np.diff(x).max(initial=0)) for n, x in zip("qk", made["offsets"], strict=True)}
    options = {**on_device(device, made["options"]), "backend": kind.backend, **longest}
    del options["mask"], options["bias"]
    with device.poisoned():
        out, lse = cuflash.attention_varlen(q, k, v, *offsets, return_lse=True, **options)
        assert type(out) is type(q)
        assert out.flags.c_contiguous
        judge.check_forward(device.get(out).swapaxes(0, 1), device.get(lse))
        gradients = cuflash.attention_varlen_backward(
            dout, q, k, v, *offsets, out, lse, dlse=dlse, deterministic=deterministic, **options
        )
        found = [device.get(x) for x in gradients]
        judge.check_backward(
            type(gradients)(*(x.swapaxes(0, 1) for x in found[:3]), *(x[:, None, None] for x in found[3:]))
        )
    device.check_inputs()


@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: Device, kind: Kind, name: str) -> None:
    pack = replace(PACK, **OPTIONS[name])
    if kind.backend == "wgmma" and name == "everything":  # TMA takes rows of whole 16-byte pieces
        pack = replace(pack, head_dim=24, head_dim_v=40)
    check(device, kind, pack)
    check(device, kind, pack, deterministic=True, place="host")


@pytest.mark.parametrize(
    "pack",
    [
        Pack((), behind=(5, 3)),
        Pack((0, 0, 0)),
        Pack((0, 0), (20, 0), behind=(0, 40)),
        Pack((20, 0), (0, 0), behind=(40, 0)),
        Pack((0, 1208, 840, 0), (2538, 1742, 840, 3072), heads_q=4, heads_k=1),
        Pack((128, 64, 256)),
        Pack((1,) * 300, (3,) * 300),
        Pack((2, 1, 2000, 0, 3), (1, 2, 1900, 4, 0), behind=(33, 0)),
    ],
    ids=lambda pack: f"{pack.lengths_q}+{pack.behind}"[:40],
)
def test_lengths(device: Device, kind: Kind, pack: Pack) -> None:
    check(device, kind, replace(pack, causal=True, dlse=True, head_dim=32))
    check(device, kind, replace(pack, head_dim=32), deterministic=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_sizes(device: Device, kind: Kind, sizes: tuple[int, int], causal: bool) -> None:
    """Segments of one tile, of many, and of whole tiles alone."""
    lengths = (70, 0, 300) if DRY else (700, 0, 1, 64, 1024, 333)
    pack = Pack(lengths, heads_q=4, heads_k=2, head_dim=sizes[0], head_dim_v=sizes[1], causal=causal, behind=(100, 9))
    check(device, kind, pack)
    if not DRY:
        check(device, kind, replace(pack, lengths_q=(512,) * 3, behind=(0, 0)), deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_segments_do_not_see_each_other(device: Device, kind: Kind, head_dim: int) -> None:
    """NaN in all other rows reaches nothing."""
    made = replace(PACK, dtype=kind.dtype, causal=True, head_dim=head_dim).make()

    def results(arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
        q, k, v, dout = (device.put(arrays[name]) for name in ("q", "k", "v", "dout"))
        options = {"causal": True, "backend": kind.backend, "deterministic": True, "return_lse": True}
        out, lse, vjp = cuflash.attention_varlen_vjp(q, k, v, *made["offsets"], **options)
        return [device.get(x) for x in (out, lse.T, *vjp(dout))]

    whole = results(made)
    bounds = [list(pairwise(x.tolist())) for x in made["offsets"]]
    for number in (0, 3, 5):
        rows, columns = (slice(*side[number]) for side in bounds)
        dirty = {}
        for name in ("q", "k", "v", "dout"):
            at = rows if name in ("q", "dout") else columns
            dirty[name] = np.full_like(made[name], np.nan)
            dirty[name][at] = made[name][at]
        for x, y, at in zip(results(dirty), whole, (rows, rows, rows, columns, columns), strict=True):
            assert np.ascontiguousarray(x[at]).tobytes() == np.ascontiguousarray(y[at]).tobytes()


@pytest.mark.parametrize("strides", ["padded", "every second", "reversed", "last axis first", "stride 0"])
def test_strides(device: Device, kind: Kind, strides: str) -> None:
    check(device, kind, replace(PACK, strides=strides, causal=True))


def test_a_segment_has_the_same_bits_alone(device: Device, kind: Kind) -> None:
    made = replace(PACK, dtype=kind.dtype, causal=True).make()
    options = {"causal": True, "backend": kind.backend}
    host = [made[name] for name in ("q", "k", "v", "dout")]

    def results(arrays: list[np.ndarray], offsets: Any) -> list[np.ndarray]:
        q, k, v, dout = map(device.put, arrays)
        out, lse, vjp = cuflash.attention_varlen_vjp(q, k, v, *offsets, return_lse=True, deterministic=True, **options)
        gradients = vjp(dout)
        return [device.get(x) for x in (out, lse.T, *gradients)]

    whole = results(host, made["offsets"])
    for bounds_q, bounds_k in zip(*(pairwise(x.tolist()) for x in made["offsets"]), strict=True):
        rows, columns = slice(*bounds_q), slice(*bounds_k)
        own = [x[at] for x, at in zip(host, (rows, columns, columns, rows), strict=True)]
        alone = results(own, [[0, len(own[0])], [0, len(own[1])]])
        for x, y, at in zip(whole, alone, (rows, rows, rows, columns, columns), strict=True):
            assert np.ascontiguousarray(x[at]).tobytes() == np.ascontiguousarray(y).tobytes()


def test_more_segments_than_an_axis_of_the_grid_has_blocks(device: Device, kind: Kind) -> None:
    """Of 80 000 segments of 16, the mean of a segment's values is what each of its queries gets."""
    count, length = (200 if DRY else 80000), 16
    offsets = np.arange(count + 1, dtype=np.int32) * length
    dtype = DTYPES[kind.dtype]
    q = np.zeros((count * length, 1, 64), dtype)
    v = np.repeat((np.arange(count) % 128).astype(dtype), length)[:, None, None] * np.ones((1, 1, 64), dtype)
    out, vjp = cuflash.attention_varlen_vjp(*map(device.put, (q, q, v, offsets, offsets)), backend=kind.backend)
    np.testing.assert_array_equal(device.get(out), v)
    np.testing.assert_array_equal(device.get(vjp(out).dv), v)


# ---- offsets on the device -----------------------------------------------------------------------------------------------
def inputs(device: Device, kind: Kind, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [device.put(rng.standard_normal((500, 2, 64)).astype(DTYPES[kind.dtype])) for _ in range(4)]


@needs_device
def test_offsets_are_read_where_no_maximum_is_given(device: Device, kind: Kind) -> None:
    q, k, v, _ = inputs(device, kind)
    good, bad = (device.put(np.array(x, np.int32)) for x in ([0, 300, 500], [0, 300, 200]))
    want = cuflash.attention_varlen(q, k, v, [0, 300, 500], [0, 300, 500], backend=kind.backend)
    got = cuflash.attention_varlen(q, k, v, good, good, backend=kind.backend)
    assert device.get(got).tobytes() == device.get(want).tobytes()
    for offsets, maxima in (((bad, good), {"max_seqlen_k": 300}), ((good, bad), {"max_seqlen_q": 300})):
        with pytest.raises(ArgumentError, match="falls from 300 to 200"):
            cuflash.attention_varlen(q, k, v, *offsets, backend=kind.backend, **maxima)
    with pytest.raises(ArgumentError, match="dtype int64: must be int32"):
        cuflash.attention_varlen(q, k, v, good.astype(np.int64), good, backend=kind.backend)


BAD = ([0, 400, 20, 70, 10, 500], [0, 1 << 30, (1 << 31) - 1, 3, 200, 500], [500, 400, 300, 200, 100, 0], [-9] * 6)


@needs_device
@pytest.mark.parametrize("values", BAD, ids=str)
def test_unread_offsets_reach_nothing_outside(device: Device, kind: Kind, values: list[int]) -> None:
    """Whatever stands there: no byte beside an array changes, and no block waits for ever."""
    q, k, v, dout = inputs(device, kind)
    bad = device.put(np.array(values, np.int32))
    good = device.put(np.arange(6, dtype=np.int32) * 100)
    options: dict[str, Any] = {"max_seqlen_q": 500, "max_seqlen_k": 500, "causal": True, "backend": kind.backend}
    for offsets in ((bad, bad), (bad, good), (good, bad)):
        with device.poisoned():
            out, lse = cuflash.attention_varlen(q, k, v, *offsets, return_lse=True, **options)
            for deterministic in (False, True):
                cuflash.attention_varlen_backward(
                    dout, q, k, v, *offsets, out, lse, deterministic=deterministic, **options
                )
            device.xp.cuda.Device().synchronize()
        device.check_inputs()


@needs_device
@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_replayed_with_new_offsets(device: Device, kind: Kind, deterministic: bool) -> None:
    """A captured call takes the segments that stand in its offsets when it is replayed."""
    cupy = device.xp
    stream = cupy.cuda.Stream(non_blocking=True)
    options: dict[str, Any] = {"max_seqlen_q": 500, "max_seqlen_k": 500, "causal": True, "backend": kind.backend}
    with stream:
        q, k, v, dout = inputs(device, kind)
        offsets = cupy.asarray(np.array([0, 100, 200, 300, 500], np.int32))
        out, vjp = cuflash.attention_varlen_vjp(q, k, v, offsets, offsets, deterministic=deterministic, **options)
        vjp(dout)
        stream.synchronize()
        stream.begin_capture()
        out, vjp = cuflash.attention_varlen_vjp(q, k, v, offsets, offsets, deterministic=deterministic, **options)
        gradients = vjp(dout)
        graph = stream.end_capture()
        for values in ([0, 500, 500, 500, 500], [0, 1, 2, 3, 4], [0, 0, 250, 251, 500]):
            offsets.set(np.array(values, np.int32), stream=stream)
            graph.launch(stream)
            stream.synchronize()
            want, pull = cuflash.attention_varlen_vjp(
                q, k, v, values, values, deterministic=deterministic, causal=True, backend=kind.backend
            )
            assert device.get(out).tobytes() == device.get(want).tobytes()
            for x, y in zip(gradients, pull(dout), strict=True):
                x, y = (device.get(g).astype(np.float64) for g in (x, y))
                np.testing.assert_allclose(x, y, rtol=0, atol=(0 if deterministic else 1e-2) * abs(y).max())


@needs_device
def test_offsets_that_are_given_a_maximum_are_not_waited_for(device: Device, kind: Kind) -> None:
    cupy = device.xp
    q, k, v, dout = inputs(device, kind)
    offsets = device.put(np.array([0, 100, 500], np.int32))
    options: dict[str, Any] = {"max_seqlen_q": 400, "max_seqlen_k": 400, "backend": kind.backend}
    _, vjp = cuflash.attention_varlen_vjp(q, k, v, offsets, offsets, **options)
    vjp(dout)
    cupy.cuda.Device().synchronize()
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin() { const long long start = clock64(); while (clock64() - start < 1000000000) {} }',
        "spin",
    )
    spin((1,), (1,), ())
    _, vjp = cuflash.attention_varlen_vjp(q, k, v, offsets, offsets, **options)
    vjp(dout)
    assert not cupy.cuda.get_current_stream().done
    cupy.cuda.Device().synchronize()
