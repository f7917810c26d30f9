"""Decode calls on the device: every option, pages, cuts of the list, appending in place, checked mode, graphs and streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import decode_plan
from cuflash.errors import ArgumentError
from cuflash.problem import canonical
from tests.cases import DTYPES
from tests.decode_cases import OPTIONS, PAGE_SIZES, DecodeCase, Made, named
from tests.gpu.device import DRY, Device, Kind

pytestmark = pytest.mark.gpu

CAPABILITIES = {"mma": decode_plan.MMA_CAPABILITIES, "simt": decode_plan.SIMT_CAPABILITIES}
KINDS = (
    [Kind("numpy", dtype) for dtype in DTYPES]
    if DRY
    else [Kind(backend, dtype) for backend, needed in CAPABILITIES.items() for dtype in needed]
)
MAIN = [kind for kind in KINDS if kind.dtype in ("bfloat16", "float32")]
#: entries that are empty, short, and longer than a multiprocessor's share
LONG = {"lengths": (2900, 0, 1, 3000, 777), "capacity": 3200, "head_dim": 64}
HEAD_SIZES = ((1, 1), (7, 33), (64, 64), (128, 128), (192, 128), (256, 256))
#: of the dtypes that a kernel computes besides those of MAIN
FEW = ("plain", "append", "everything")
OPTION_CASES = [(kind, named(name, head_dim=64)) for kind in KINDS for name in OPTIONS if kind in MAIN or name in FEW]
SIZE_CASES = [
    (kind, DecodeCase("dims", "", (300, 17), 4, 2, seq_q, 1, *sizes, capacity=301))
    for kind in KINDS
    for sizes in HEAD_SIZES
    for seq_q in ((1, 7) if kind.backend == "mma" else (1,))
]
#: kernels that are compiled beforehand, on all cores (warm_cache.py)
COMPILED_FIRST = [(kind, replace(case, dtype=kind.dtype)) for kind, case in (*OPTION_CASES, *SIZE_CASES)]

needs_device = pytest.mark.skipif(DRY, reason="of a device alone")
main_kinds = pytest.mark.parametrize("kind", MAIN, ids=str)


class Cache:
    """A cache in the middle of NaN, that a call may write where it should and nowhere else."""

    def __init__(self, device: Device, x: np.ndarray) -> None:
        self.device, self.host = device, x
        self.view, self.root, self.data, self.first = device.place(x)

    def check(self, after: np.ndarray, layout: Any) -> None:
        want = self.data.copy()
        np.ndarray(self.host.shape, self.host.dtype, want.data, self.first, self.host.strides)[...] = canonical(
            after, layout
        )
        wrong = np.flatnonzero(self.device.get(self.root) != want)
        assert not wrong.size, f"{wrong.size} bytes of or beside a cache differ, the first at {wrong[0] - self.first}"


def skip_unless(device: Device, kind: Kind) -> None:
    if not DRY:
        needed, found = CAPABILITIES[kind.backend][kind.dtype], int(device.xp.cuda.Device().compute_capability)
        if found < needed:
            pytest.skip(f"{kind} needs compute capability {needed / 10}, the device has {found / 10}")


def on_device(device: Device, made: Made, **changes: Any) -> tuple[dict[str, Any], tuple[Cache, Cache]]:
    """Keywords of the public call, and its caches."""
    caches = Cache(device, made.arrays["k_cache"]), Cache(device, made.arrays["v_cache"])
    arguments = {name: device.put(x) for name, x in made.arrays.items() if not name.endswith("cache")}
    arguments |= {"k_cache": caches[0].view, "v_cache": caches[1].view, **made.options}
    arguments |= {"lengths": device.put(made.lengths), "page_table": device.put(made.table)}
    arguments["modifiers"] = made.modifiers(device.put)
    return arguments | changes, caches


def run(device: Device, kind: Kind, case: DecodeCase, seed: int = 0) -> np.ndarray:
    """A case, judged; its output, which equal calls repeat bit for bit."""
    skip_unless(device, kind)
    made = replace(case, dtype=kind.dtype).make(seed)
    results = []
    for _ in range(3):  # the second and third are replayed
        arguments, caches = on_device(device, made, backend=kind.backend, return_lse=True)
        with device.poisoned():
            out, lse = cuflash.attention_decode(**arguments)
            made.check(device.get(canonical(out, case.layout)), device.get(lse))
        for cache, after in zip(caches, made.after, strict=True):
            cache.check(after, case.layout)
        device.check_inputs()
        results.append(device.get(out))
    for found in results[1:]:
        assert found.tobytes() == results[0].tobytes()
    return results[0]


@pytest.mark.parametrize(("kind", "case"), OPTION_CASES, ids=str)
def test_options(device: Device, kind: Kind, case: DecodeCase) -> None:
    run(device, kind, case)


@main_kinds
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "full"])
def test_options_of_cut_lists(device: Device, kind: Kind, name: str) -> None:
    run(device, kind, named(name, **LONG))


@main_kinds
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages(device: Device, kind: Kind, page_size: int, layout: str) -> None:
    run(device, kind, named("append", page_size=page_size, layout=layout, **LONG))


@main_kinds
@pytest.mark.parametrize(("heads_q", "heads_k"), [(1, 1), (8, 8), (8, 1), (16, 1), (9, 3), (24, 8)])
def test_groups(device: Device, kind: Kind, heads_q: int, heads_k: int) -> None:
    for seq_q in (1, 4):
        run(
            device,
            kind,
            DecodeCase("groups", kind.dtype, (700, 33), heads_q, heads_k, seq_q, head_dim=64, capacity=704),
        )


@pytest.mark.parametrize(("kind", "case"), SIZE_CASES, ids=lambda x: str(x) if isinstance(x, Kind) else x.sizes)
def test_head_sizes(device: Device, kind: Kind, case: DecodeCase) -> None:
    run(device, kind, case)


@main_kinds
def test_lengths_at_every_edge(device: Device, kind: Kind) -> None:
    edges = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257)
    for seq_new in (0, 3):
        run(device, kind, DecodeCase("edges", lengths=edges, capacity=260, seq_q=3, seq_new=seq_new, head_dim=64))


@main_kinds
def test_many_entries(device: Device, kind: Kind) -> None:
    lengths = tuple(np.random.default_rng(0).integers(0, 300, 700).tolist())
    run(device, kind, DecodeCase("many", lengths=lengths, heads_q=2, heads_k=1, capacity=300, head_dim=64))


@main_kinds
def test_a_long_entry(device: Device, kind: Kind) -> None:
    for heads_k in (1, 4):
        run(
            device,
            kind,
            DecodeCase("long", lengths=(50_000,), heads_k=heads_k, capacity=50_001, head_dim=64, seq_new=1),
        )


@pytest.mark.big
@main_kinds
def test_more_entries_than_a_grid_has_columns(device: Device, kind: Kind) -> None:
    lengths = tuple(np.random.default_rng(0).integers(0, 6, 701 if DRY else 70_001).tolist())
    made = DecodeCase("entries", kind.dtype, lengths, heads_q=2, heads_k=1, capacity=5 + 1, head_dim=64).make()
    skip_unless(device, kind)
    arguments, _ = on_device(device, made, backend=kind.backend)
    out = device.get(cuflash.attention_decode(**arguments))
    few = [*range(5), *range(len(lengths) - 5, len(lengths))]
    for entry in few:
        parts = {name: [getattr(made, name)[entry]] for name in ("keys", "values")}
        replace(made, q=made.q[entry : entry + 1], **parts).check(out[entry : entry + 1], None)
    empty = np.array(lengths) == 0
    assert not out[empty].any()
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.big
@main_kinds
def test_offsets_beyond_32_bits(device: Device, kind: Kind) -> None:
    """Pages that lie 2^29 elements apart, of which keys are read and to which keys are appended."""
    skip_unless(device, kind)
    xp, apart = device.xp, 1 << (12 if DRY else 29)
    made = named("append", dtype=kind.dtype, page_size=16, lengths=(60, 44), head_dim=64).make()
    arguments, _ = on_device(device, made, backend=kind.backend)
    caches = {}
    for name in ("k_cache", "v_cache"):
        x = made.arrays[name]
        bits = f"u{x.dtype.itemsize}"
        memory = xp.empty(apart * (len(x) - 1) + x[0].size, bits)
        strides = (apart * x.itemsize, *x.strides[1:])
        caches[name] = xp.lib.stride_tricks.as_strided(memory, x.shape, strides)
        caches[name][...] = xp.asarray(x.view(bits))
        arguments[name] = caches[name].view(x.dtype)
    out = cuflash.attention_decode(**arguments)
    made.check(device.get(out), None)
    dtype = made.arrays["k_cache"].dtype
    made.check_caches(*(device.get(xp.ascontiguousarray(x)).view(dtype) for x in caches.values()))


# ---- numbers out of range ------------------------------------------------------------------------------------------------
@main_kinds
def test_numbers_of_pages_outside_the_pool(device: Device, kind: Kind) -> None:
    if DRY:
        pytest.skip("the host checks every table")
    skip_unless(device, kind)
    made = named("causal", dtype=kind.dtype, page_size=16, lengths=(60, 44), head_dim=64).make()
    for value, page in ((-1, 1), (1 << 30, 0), (made.arrays["k_cache"].shape[0], 2)):
        table = made.table.copy()
        table[1, page] = value
        wrong = replace(made, table=table, keys=[x.copy() for x in made.keys], values=[x.copy() for x in made.values])
        for x in (wrong.keys[1], wrong.values[1]):
            x[:, 16 * page : 16 * page + 16] = 0
        arguments, _ = on_device(device, wrong, backend=kind.backend, return_lse=True)
        with device.poisoned():
            out, lse = cuflash.attention_decode(**arguments)
            wrong.check(device.get(out), device.get(lse))
        with pytest.raises(ArgumentError, match=rf"page_table\[1, {page}\] is {value}: must be from 0 to"):
            cuflash.attention_decode(**arguments, checked=True)
        device.check_inputs()


@needs_device
@main_kinds
def test_lengths_out_of_range(device: Device, kind: Kind) -> None:
    skip_unless(device, kind)
    made = named("causal", dtype=kind.dtype, lengths=(64, 0), head_dim=64).make()
    wrong = replace(made, lengths=np.array([1 << 30, -5], np.int32))
    arguments, _ = on_device(device, wrong, backend=kind.backend, return_lse=True)
    out, lse = cuflash.attention_decode(**arguments)
    made.check(device.get(out), device.get(lse))
    with pytest.raises(ArgumentError, match=r"lengths\[0\] is 1073741824: must be from 0 to 64"):
        cuflash.attention_decode(**arguments, checked=True)


@main_kinds
def test_what_is_in_range_passes_the_check(device: Device, kind: Kind) -> None:
    skip_unless(device, kind)
    made = named("append-in-pages", dtype=kind.dtype, head_dim=64).make()
    arguments, caches = on_device(device, made, backend=kind.backend, return_lse=True, checked=True)
    out, lse = cuflash.attention_decode(**arguments)
    made.check(device.get(out), device.get(lse))
    for cache, after in zip(caches, made.after, strict=True):
        cache.check(after, made.case.layout)


def test_lengths_and_tables_from_the_host(device: Device) -> None:
    made = named("append-in-pages", dtype="float32", head_dim=64).make()
    arguments, _ = on_device(device, made)
    want = device.get(cuflash.attention_decode(**arguments))
    arguments, _ = on_device(device, made, lengths=list(made.case.lengths), page_table=made.table)
    assert device.get(cuflash.attention_decode(**arguments)).tobytes() == want.tobytes()
    arguments["lengths"] = [69, 0]
    with pytest.raises(ArgumentError, match=r"lengths\[0\] is 69"):
        cuflash.attention_decode(**arguments)


# ---- graphs, streams, replays --------------------------------------------------------------------------------------------
@needs_device
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_graph_takes_new_lengths_and_keys(device: Device, dtype: str) -> None:
    """One step of decoding, captured once and replayed for each position, against plain attention."""
    cupy = device.xp
    rng = np.random.default_rng(0)
    steps, heads_k = 40, 2
    q, k, v = (rng.standard_normal((2, steps, heads, 64)).astype(dtype) for heads in (8, heads_k, heads_k))
    caches = [cupy.full((2, 700, heads_k, 64), np.nan, dtype) for _ in range(2)]
    first = 650
    old = [rng.standard_normal((2, first, heads_k, 64)).astype(dtype) for _ in range(2)]
    for cache, x in zip(caches, old, strict=True):
        cache[:, :first] = cupy.asarray(x)
    lengths = cupy.full(2, first, cupy.int32)
    step = [cupy.zeros((2, 1, heads, 64), dtype) for heads in (8, heads_k, heads_k)]
    out = cupy.empty((2, 1, 8, 64), dtype)

    def call() -> None:
        options = {"k_new": step[1], "v_new": step[2], "layout": "bshd", "out": out}
        cuflash.attention_decode(step[0], *caches, lengths, **options)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        call()
        lengths += 1
        graph = stream.end_capture()
        lengths[:] = first
        found = []
        for position in range(steps):
            for to, x in zip(step, (q, k, v), strict=True):
                to[:] = cupy.asarray(x[:, position : position + 1])
            graph.launch(stream)
            found.append(out.get())
        stream.synchronize()
    whole = [np.concatenate([x, y], axis=1) for x, y in zip(old, (k, v), strict=True)]
    want = cuflash.attention(q.astype(np.float64), *(x.astype(np.float64) for x in whole), causal=True, layout="bshd")
    error = np.abs(np.concatenate(found, axis=1) - want).max()
    assert error < (2e-3 if dtype == "float16" else 1e-5), error
    np.testing.assert_array_equal(caches[0][:, : first + steps].get(), whole[0])


@needs_device
def test_graphs_and_streams_do_not_share_what_blocks_leave(device: Device) -> None:
    """Two graphs captured on one stream and calls on a third run at once, again and again."""
    cupy = device.xp
    made = [named("causal", **LONG, heads_k=4, heads_q=4 * n).make(n) for n in (1, 2, 3)]
    arguments = [on_device(device, m)[0] for m in made]
    wanted = [device.get(cuflash.attention_decode(**a)) for a in arguments]
    outs = [cupy.empty_like(cuflash.attention_decode(**a)) for a in arguments]
    cupy.cuda.runtime.deviceSynchronize()
    capturing = cupy.cuda.Stream(non_blocking=True)
    graphs = []
    with capturing:
        for a, out in zip(arguments[:2], outs, strict=False):
            cuflash.attention_decode(**a, out=out)
            capturing.synchronize()
            capturing.begin_capture()
            for _ in range(5):
                cuflash.attention_decode(**a, out=out)
            graphs.append(capturing.end_capture())
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for _ in range(30):
        for graph, stream in zip(graphs, streams, strict=False):
            graph.launch(stream)
        with streams[2]:
            cuflash.attention_decode(**arguments[2], out=outs[2])
    for stream in streams:
        stream.synchronize()
    for out, want in zip(outs, wanted, strict=True):
        assert device.get(out).tobytes() == want.tobytes()


@needs_device
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_calls_read_what_those_in_front_have_written(device: Device, dtype: str) -> None:
    """Each call's queries are the output in front, its keys were appended there, its lengths were just counted up.

    Nothing is waited for, so that a launch may begin before the one in front has ended; waiting after each gives the same.
    """
    cupy = device.xp
    rng = np.random.default_rng(0)
    shapes = ((3, 1, 8, 128), (3, 4096, 2, 128), (3, 4096, 2, 128), (2, 3, 1, 2, 128))
    initial = [cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for shape in shapes]
    q, k, v, new = (x.copy() for x in initial)
    first = cupy.asarray(np.array([1000, 0, 3000], np.int32))
    lengths = first.copy()

    def steps(wait: bool) -> list[Any]:
        for to, x in zip((q, k, v, new, lengths), (*initial, first), strict=True):
            to[...] = x
        found: list[Any] = []
        for step in range(9):
            options = {"k_new": new[step % 2], "v_new": new[1 - step % 2], "layout": "bshd"}
            found.append(cuflash.attention_decode(found[-1] if found else q, k, v, lengths, **options))
            if step % 3 == 2:
                cupy.add(lengths, 1, out=lengths)
                cupy.multiply(new, new.dtype.type(0.75), out=new)
            if wait:
                cupy.cuda.runtime.deviceSynchronize()
        return [*found, k, v]

    want = [device.get(x) for x in steps(wait=True)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        steps(wait=False)
        stream.synchronize()
        stream.begin_capture()
        of_graph = steps(wait=False)
        graph = stream.end_capture()
        for _ in range(20):
            for found in (steps(wait=False), of_graph):
                if found is of_graph:
                    graph.launch(stream)
                stream.synchronize()
                for x, y in zip(found, want, strict=True):
                    assert device.get(x).tobytes() == y.tobytes()


@needs_device
def test_a_replayed_call_with_other_memory_is_checked_again(device: Device) -> None:
    cupy = device.xp
    made = named("append", dtype="float16", head_dim=64).make()
    arguments, _ = on_device(device, made)
    for _ in range(3):
        cuflash.attention_decode(**arguments)
    cache = cupy.zeros_like(arguments["k_cache"])
    inside = cache.reshape(-1)[: arguments["k_new"].size].reshape(arguments["k_new"].shape)
    with pytest.raises(ArgumentError, match="k_cache overlaps k_new"):
        cuflash.attention_decode(**arguments | {"k_cache": cache, "k_new": inside})


@needs_device
def test_torch_tensors_are_appended_to_in_place(device: Device) -> None:
    torch = pytest.importorskip("torch")
    made = named("append", dtype="float32", head_dim=64).make()
    tensors = {name: torch.from_numpy(x.copy()).cuda() for name, x in made.arrays.items()}
    lengths = torch.tensor(made.case.lengths, dtype=torch.int32, device="cuda")
    out, lse = cuflash.attention_decode(**tensors, lengths=lengths, return_lse=True)
    assert isinstance(out, torch.Tensor)
    made.check(out.cpu().numpy(), lse.cpu().numpy())
    made.check_caches(tensors["k_cache"].cpu().numpy(), tensors["v_cache"].cpu().numpy())
