"""What explanations say: of every form of call, on the host and of plans for devices, their floors and their measured times."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import (
    KeyLengths,
    api,
    decode_plan,
    decode_problem,
    explanation,
    floor,
    plan,
    problem,
    reference,
    schedules,
)
from cuflash.backends import SHARED_LIMITS, described_device
from cuflash.errors import ArgumentError, UnsupportedError
from tests.cases import DTYPES, STRIDES
from tests.decode_cases import named
from tests.packs import Pack

PACK = Pack((5, 0, 9, 5), (7, 3, 9, 7), behind=(2, 1), head_dim=8, causal=True)
HOPPER = replace(
    described_device(90), multiprocessors=132, clock_hz=1e9, bytes_per_second=4e12, cache_bytes=50 << 20, compiler=1300
)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# ---- the calls -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("explain", "call"),
    [
        (cuflash.explain, cuflash.attention),
        (cuflash.explain_varlen, cuflash.attention_varlen),
        (cuflash.explain_decode, cuflash.attention_decode),
    ],
)
def test_arguments_are_those_of_the_call(explain: Any, call: Any) -> None:
    mine, others = (inspect.signature(x).parameters for x in (explain, call))
    left_out = {"return_lse", "out", "batch_invariant", "checked"}  # a plan does not depend on them
    assert {**mine, "measure": None} == {**{n: p for n, p in others.items() if n not in left_out}, "measure": None}
    assert mine["measure"].default is False
    listed = (inspect.getdoc(explain) or "").partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    documented = {name for line in listed.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(mine) <= documented


def host_calls() -> dict[str, Any]:
    """An explanation of each form, by its options."""
    x, pack, made = numbers(2, 3, 8), PACK.make(), named("append", page_size=16).make()
    packed = [pack["q"], pack["k"], pack["v"], *pack["offsets"]]
    decoded = {**made.arrays, "lengths": made.lengths, "page_table": made.table}
    return {
        "attention": lambda **options: cuflash.explain(x, x, x, **options),
        "packed": lambda **options: cuflash.explain_varlen(*packed, **pack["options"], **options),
        "decode": lambda **options: cuflash.explain_decode(**decoded, **options),
    }


@pytest.mark.parametrize("form", host_calls())
def test_on_the_host(form: str) -> None:
    explained = host_calls()[form]()
    assert explained.backend == "numpy"
    assert set(explained.reasons) == set(api.BACKENDS) - {"numpy"}
    assert explained.method.endswith("sums in float32")
    word = {"attention": "bhsd", "packed": "Packed(count=4)", "decode": "pages of 16, 2 new keys"}[form]
    assert word in str(explained).splitlines()[1]
    assert explained.measured_ms is explained.share is explained.floor_ms is explained.workspace_bytes is None
    with pytest.raises(UnsupportedError, match=r"measure=True times kernels .* q is a numpy array on the host; move"):
        host_calls()[form](measure=True)
    with pytest.raises(ArgumentError, match="measure='yes'"):
        host_calls()[form](measure="yes")
    with pytest.raises(UnsupportedError, match="backend='mma'"):
        host_calls()[form](backend="mma")


def test_explaining_decode_writes_nothing() -> None:
    made = named("append").make()
    before = {name: x.tobytes() for name, x in made.arrays.items()}
    cuflash.explain_decode(**made.arrays, lengths=made.lengths, page_table=made.table)
    assert {name: x.tobytes() for name, x in made.arrays.items()} == before


# ---- plans -----------------------------------------------------------------------------------------------------------
def planned(dtype: str, backend: str | None, capability: int, **options: Any) -> explanation.Explanation:
    """Of a call of 300 queries on a device that is only described."""
    x = np.zeros((1, 4, 300, 64), DTYPES[dtype])
    call = problem.describe(x, x, x, **options)
    places = plan.places_of(call.problem, plan.forward_arrays(call, x, None))
    return explanation.of_plan(plan.plan_forward(call.problem, described_device(capability), places, backend), "title")


@pytest.mark.parametrize(
    ("dtype", "backend", "capability", "options", "method", "schedule"),
    [
        ("float16", "mma", 75, {}, "tensor cores by mma.sync, sums in float32", ("forward_mma",)),
        ("bfloat16", None, 90, {}, "tensor cores by wgmma, sums in float32", ("forward_wgmma",)),
        (
            "float32",
            "mma",
            80,
            {},
            "two float16 planes, three products on tensor cores by mma.sync, sums in float32",
            ("split_planes", "forward_split", "forward_simt"),
        ),
        (
            "float32",
            "mma",
            80,
            {"precision": "tf32"},
            "one float16 plane, one product on tensor cores by mma.sync, sums in float32",
            ("split_planes", "forward_split", "forward_simt"),
        ),
        (
            "float32",
            "wgmma",
            90,
            {},
            "two float16 planes, three products on tensor cores by wgmma, sums in float32",
            ("split_planes", "forward_split_wgmma", "forward_simt"),
        ),
        ("float32", "simt", 90, {}, "multiply-adds, without tensor cores, sums in float32", ("forward_simt",)),
        ("float64", None, 80, {}, "tensor cores by mma.sync, sums in float64", ("forward_simt",)),
        ("float64", None, 75, {}, "multiply-adds, without tensor cores, sums in float64", ("forward_simt",)),
    ],
)
def test_methods(
    dtype: str, backend: str | None, capability: int, options: Any, method: str, schedule: tuple[str, ...]
) -> None:
    explained = planned(dtype, backend, capability, **options)
    assert (explained.method, explained.schedule) == (method, schedule)
    assert explained.workspace_bytes == 0 if len(schedule) == 1 else explained.workspace_bytes > 0
    assert ("planes do not stand for" in str(explained)) == (len(schedule) > 1)
    assert ("blocks stay and take 8 tiles" in str(explained)) == (backend is None and capability == 90)


def test_every_main_kernel_tells_its_method() -> None:
    """Those of forwards, backwards and decode calls; statistics, tangents and what goes before and behind are no subject."""
    without = {"forward_columns_mma", "forward_columns_simt", "forward_values"}
    without |= {"backward_delta", "backward_bounds", "backward_sums"}
    names = [m.name for m in pkgutil.iter_modules(schedules.__path__)]
    found = 0
    for name in names:
        for x in vars(importlib.import_module(f"cuflash.schedules.{name}")).values():
            kernel = str(getattr(x, "kernel", ""))
            is_main = kernel.startswith(("forward_", "backward_", "decode_")) and kernel not in without
            if isinstance(x, type) and is_main and "convert" not in kernel:
                assert hasattr(x, "method"), f"{x.__name__} has no method"
                found += 1
    assert found >= 11


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_of_two_tiles_are_told_apart(head_dim: int) -> None:
    def explained(*lengths: int) -> explanation.Explanation:
        call = Pack(lengths, dtype="bfloat16", head_dim=head_dim, causal=True).call()[0]
        places = plan.places_of(call.problem, plan.forward_arrays(call, call.q, None))
        return explanation.of_plan(plan.plan_forward(call.problem, HOPPER, places, "wgmma"), "")

    short, both = explained(100, 2000), explained(100, 9000)
    assert short.tile is not None
    assert both.tile is not None
    assert short.tile != both.tile
    assert any(note.startswith("all sequences have this tile") for note in short.notes)
    (note,) = (note for note in both.notes if note.startswith("sequences of more than"))
    assert f"others {short.tile[0]} queries x {short.tile[1]} keys;" in note
    most = int(note.split()[4])
    assert explained(100, most).tile == short.tile
    assert explained(100, most + 1).tile == both.tile


@pytest.mark.parametrize("capability", SHARED_LIMITS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_packed_sequences_are_explained_for_every_device(dtype: str, capability: int) -> None:
    call = replace(PACK, dtype=dtype, head_dim=64).call()[0]
    out = np.zeros(call.problem.out_shape, DTYPES[dtype])
    made = plan.plan_forward(
        call.problem,
        described_device(capability),
        plan.places_of(call.problem, plan.forward_arrays(call, out, None)),
    )
    explained = explanation.of_plan(made, str(call.problem), registers=7, spilled_bytes=0)
    assert explained.method
    assert explained.registers == 7
    assert explained.grid == made.main.blocks
    assert explained.tile == (made.main.config.block_q, made.main.config.block_k)
    assert "Packed(count=4)" in explained.problem
    assert "whatever their lengths" in explained.notes[-1]


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "mma"), ("bfloat16", "simt"), ("float64", None)])
def test_decoding_is_explained(dtype: str, backend: str | None, page_size: int) -> None:
    rows, table = (page_size, np.zeros((2, 65536 // page_size), np.int32)) if page_size else (65536, None)
    q, cache = (np.zeros(shape, DTYPES[dtype]) for shape in ((2, 8, 1, 64), (2, 4, rows, 64)))
    native = {"q": q, "k_cache": cache, "v_cache": cache}
    options: dict[str, Any] = {"scale": None, "causal": True, "window": None, "softcap": None, "modifiers": ()}
    call = decode_problem.describe(native, None, table, layout="bhsd", **options)
    out = np.zeros(call.problem.out_shape, q.dtype)
    places = decode_plan.places_of(call, decode_plan.decode_arrays(call, out, None))
    made = decode_plan.plan_decode(call.decode, HOPPER, places, backend)
    explained = explanation.of_plan(made, str(call.decode))
    config: Any = made.main.config
    assert explained.schedule == (config.kernel,)
    assert explained.tile == (config.rows, config.block_k)
    assert explained.grid == 132 * config.blocks_per_sm
    assert explained.slices == 132 * config.blocks_per_sm // 4  # four heads side by side
    assert explained.workspace_bytes == sum(made.needed.values()) > 0
    assert set(explained.reasons) == set(api.BACKENDS) - {explained.backend}
    assert f"slices:    {explained.slices} at most" in str(explained).splitlines()
    assert ("tensor maps" in str(explained)) == (backend == "mma")


def test_masks_that_the_floor_does_not_know() -> None:
    x = np.zeros((1, 4, 300, 64), np.float16)
    call = problem.describe(x, x, x, mask=np.ones((300, 300), bool), causal=True)
    made = plan.plan_forward(
        call.problem, described_device(80), plan.places_of(call.problem, plan.forward_arrays(call, x, None))
    )
    assert not explanation.of_plan(made, "").notes
    assert explanation.of_plan(made, "", floor_seconds=1.0).notes == (
        "the floor counts the pairs that Mask hides as if they were visible",
    )


def test_all_of_an_explanation_is_printed() -> None:
    explained = explanation.Explanation(
        "mma",
        method="by hand",
        schedule=("a", "b"),
        slices=33,
        workspace_bytes=3 << 20,
        floor_ms=0.5,
        measured_ms=0.8,
    )
    assert explained.share == 0.625
    assert str(explained).splitlines() == [
        "backend:   mma",
        "method:    by hand",
        "schedule:  a, b",
        "slices:    33 at most",
        "workspace: 3,072.0 KiB",
        "floor:     0.5 ms",
        "measured:  0.8 ms, of which 62% are the floor",
    ]
    assert str(replace(explained, workspace_bytes=0, floor_ms=None)).splitlines()[4:] == [
        "workspace: none",
        "measured:  0.8 ms",
    ]


# ---- the floor -------------------------------------------------------------------------------------------------------
def pairs_of(made: Any) -> float:
    """Pairs of a described call that are visible, counted one by one."""
    return float(reference.visible(made).sum()) * np.prod(made.problem.score_shape) / reference.visible(made).size


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("window", [None, (3, 1), (None, 2)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(7, 20), (20, 7), (1, 1)])
def test_the_floor_counts_the_pairs_that_intervals_leave(
    seq_q: int, seq_k: int, window: Any, causal: bool | str
) -> None:
    q, k = numbers(2, 4, seq_q, 8), numbers(2, 2, seq_k, 8)
    for modifiers in ((), (KeyLengths(np.array([seq_k, seq_k // 2])),)):
        made = problem.describe(q, k, k, causal=causal, window=window, modifiers=modifiers)
        work = floor.work_of_call(made, np.asarray)
        assert work.pairs == pytest.approx(pairs_of(made))
    whole = problem.describe(q, k, k)
    assert floor.work_of_call(whole, np.asarray).moved_bytes == 2 * q.nbytes + 2 * k.nbytes


def test_the_floor_of_long_calls_is_estimated() -> None:
    x = np.broadcast_to(np.float16(0), (1, 1, 100_000, 8))
    made = problem.describe(x, x, x, causal=True, window=(999, None))
    work = floor.work_of(made.problem)
    assert work.pairs == pytest.approx(100_000 * 1000, rel=0.01)
    wide = problem.describe(x, x, x, causal=True, window=(None, None))
    assert floor.work_of(wide.problem).pairs == pytest.approx(100_000**2 / 2, rel=0.01)


def test_keys_that_no_query_sees_are_not_moved() -> None:
    q, k = numbers(1, 2, 4, 8), numbers(1, 2, 100, 8)
    made = problem.describe(q, k, k, causal=True, window=(5, None))
    assert floor.work_of(made.problem).moved_bytes == 2 * q.nbytes + 2 * k[:, :, : 4 + 5].nbytes


@pytest.mark.parametrize("options", [{}, {"window": (2, None)}, {"causal": "top_left"}], ids=str)
def test_the_floor_of_packed_sequences_is_that_of_each(options: Any) -> None:
    call = replace(PACK, **options).call()[0]
    parts = []
    for seq_q, seq_k in zip(PACK.lengths_q, PACK.lengths_k, strict=True):
        q, k = numbers(2, seq_q, 8), numbers(2, seq_k, 8)
        parts.append(floor.work_of_call(problem.describe(q, k, k, **{"causal": True, **options}), np.asarray))
    work = floor.work_of_call(call, np.asarray)
    assert work.pairs > 0
    assert work.pairs == pytest.approx(sum(part.pairs for part in parts))
    assert work.moved_bytes == pytest.approx(sum(part.moved_bytes for part in parts))


def test_offsets_of_a_device_may_be_anything() -> None:
    call = PACK.call()[0]
    wild = {name: np.array([3, -7, 1 << 30, 0, 5], np.int32)[:, None] for name in ("segments_q", "segments_k")}
    work = floor.work_of_call(replace(call, operands={**call.operands, **wild}), np.asarray)
    assert 0 <= work.pairs <= np.prod(call.problem.score_shape)


@pytest.mark.parametrize("window", [None, (3, None)])
def test_the_floor_of_decoding_is_that_of_the_lengths(window: Any) -> None:
    case = named("append", lengths=(40, 0, 40), capacity=64, window=window)
    call = case.make().call()
    work = floor.work_of_decode(call, call.lengths)
    made = call.problem
    counts = [min(n + case.seq_new, 64) for n in case.lengths]
    pairs = sum(
        min(max(i + n - made.seq_q + 1, 0), (window or (1 << 20,))[0] + 1) for n in counts for i in range(made.seq_q)
    )
    assert work.pairs == made.heads_q * pairs
    all_of_it = floor.work_of_decode(call, None)
    assert all_of_it.pairs >= work.pairs
    row = (made.head_dim + made.head_dim_v) * 2
    queries, new = 3 * made.heads_q * made.seq_q * row, 3 * made.heads_k * case.seq_new * row
    if window is None:
        assert work.moved_bytes == queries + new + made.heads_k * sum(counts) * row


def test_time_follows_from_rates() -> None:
    x = np.broadcast_to(np.float16(0), (1, 8, 4096, 64))
    made = problem.describe(x, x, x).problem
    work = floor.work_of(made)
    assert floor.seconds(made, HOPPER) == pytest.approx(4 * 64 * work.pairs / (4096 * 132 * 1e9))
    assert floor.seconds(made, replace(HOPPER, bytes_per_second=1e9)) == work.moved_bytes / 1e9
    assert floor.seconds(made, HOPPER, floor.Work(0, 8e12)) == 2
    assert floor.seconds(made, replace(HOPPER, clock_hz=0)) is None
    for dtype, precision in product(("float32",), (None, "tf32")):
        single = replace(made, dtype=dtype, precision=precision)
        assert floor.seconds(single, HOPPER) == pytest.approx(
            (1 if precision else 3) * floor.seconds(made, HOPPER), 1e-3
        )


# ---- on a device, of which stand-ins are what explaining sees ----------------------------------------------------------
class Pointer:
    """A place in a buffer."""

    def __init__(self, buffer: np.ndarray, offset: int = 0) -> None:
        self.buffer, self.offset, self.device_id = buffer, offset, 0

    @property
    def ptr(self) -> int:
        return self.buffer.ctypes.data + self.offset

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.buffer, self.offset + offset)


class Array(np.ndarray):
    """A NumPy array that looks like CuPy's where addresses are concerned."""

    @property
    def data(self) -> Any:
        return Pointer(self)


def empty(shape: Any, dtype: Any) -> Any:
    """Memory at a multiple of 512 bytes, as CuPy's is."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 512, np.uint8)
    start = -buffer.ctypes.data % 512
    return buffer[start : start + size].view(dtype).reshape(shape).view(Array)


def made_array(shape: Any, dtype: Any, pointer: Pointer, strides: Any) -> Any:
    return np.ndarray(shape, dtype, np.asarray(pointer.buffer), pointer.offset, strides).view(Array)


class Event:
    """Event n is recorded at n² ms."""

    count = 0

    def record(self) -> None:
        Event.count += 1
        self.at = float(Event.count**2)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins; `machine.runs` has the plan and pointers of each launch."""
    pytest.importorskip("cupy")
    from cuflash import decode_launch, launch, rehearsal

    state = SimpleNamespace(runs=[], loaded=[])
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
    runtime = SimpleNamespace(streamPerThread=2, getDevice=lambda: 0)
    cuda = SimpleNamespace(
        Device=lambda _: nullcontext(),
        get_current_stream=lambda: stream,
        runtime=runtime,
        Event=Event,
        get_elapsed_time=lambda begin, end: end.at - begin.at,
    )
    cupy = SimpleNamespace(
        ndarray=made_array,
        uint8=np.uint8,
        cuda=cuda,
        empty=empty,
        asarray=lambda x: x.view(Array),
        asnumpy=np.asarray,
    )

    def load(variant: Any, _: int) -> Any:
        state.loaded.append(variant)
        return SimpleNamespace(registers=168, local_bytes=0)

    for module in (decode_launch, launch, rehearsal):
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setattr(launch.jit, "load", load)
    monkeypatch.setattr(launch, "device", lambda _: HOPPER)
    monkeypatch.setattr(launch, "run", lambda p, pointers, _=None: state.runs.append((p, dict(pointers))))
    monkeypatch.setattr(rehearsal, "FLUSHED_BYTES", 512)
    monkeypatch.setattr(rehearsal, "LASTING", 21.0)
    decode_launch._workspaces.clear()
    Event.count = 0
    yield state
    decode_launch._workspaces.clear()


def on_device(call: Any, *names: str) -> Any:
    """The call with stand-ins for arrays of a device."""
    operands = {name: x.view(Array) for name, x in call.operands.items()}
    return replace(call, operands=operands, **{n: getattr(call, n).view(Array) for n in names})


@pytest.mark.parametrize("form", ["attention", "packed"])
def test_a_call_is_measured_on_scratch_data(machine: Any, form: str) -> None:
    from cuflash import launch

    if form == "packed":
        call = replace(PACK, dtype="float16", head_dim=64).call()[0]
    else:
        q, k = (numbers(1, 2, n, 64).astype(np.float16) for n in (300, 130))
        call = problem.describe(q, k, k, causal=True, modifiers=[KeyLengths(np.array([100]))])
    call = on_device(call, "q", "k", "v")
    before = [x.tobytes() for x in (call.q, call.k, call.v)]
    plain = launch.explain(call)
    assert not machine.runs
    assert plain.measured_ms is plain.share is None
    assert (plain.registers, plain.spilled_bytes) == (168, 0)
    assert [v.kernel for v in machine.loaded] == [plain.schedule[-1]]
    work = floor.work_of_call(call, np.asarray)
    assert plain.floor_ms == pytest.approx(1e3 * floor.seconds(call.problem, HOPPER, work))
    measured = launch.explain(call, None, True)
    # Runs take 3, then 7, 11, ... ms: the first says that 7 of them fill the time.
    assert measured.measured_ms == 3 + 4 * (1 + 3)
    assert measured.share == plain.floor_ms / measured.measured_ms
    assert replace(measured, measured_ms=None) == plain
    assert len(machine.runs) == 1 + 1 + 7
    own = {name: getattr(call, name).data.ptr for name in "qkv"}
    for _, pointers in machine.runs:
        assert pointers == machine.runs[0][1]
        assert not set(own.values()) & {pointers[name] for name in own}
        assert all(pointers[name] == x.data.ptr for name, x in call.operands.items())
    assert [x.tobytes() for x in (call.q, call.k, call.v)] == before


def test_decoding_is_measured_on_scratch_data(machine: Any) -> None:
    from cuflash import decode_launch

    call = named("append-in-pages", head_dim=64).make().call()
    names = [n for n in ("q", "k", "v", "lengths", "page_table", "k_new", "v_new") if getattr(call, n) is not None]
    call = on_device(call, *names)
    before = [getattr(call, name).tobytes() for name in names]
    measured = decode_launch.explain(call, "mma", True)
    assert measured.backend == "mma"
    assert measured.measured_ms == 19
    assert measured.floor_ms == pytest.approx(
        1e3 * floor.seconds(call.problem, HOPPER, floor.work_of_decode(call, call.lengths))
    )
    assert len(machine.runs) == 9
    _, pointers = machine.runs[0]
    for name in names:
        is_own = pointers[name] == getattr(call, name).data.ptr
        assert is_own == (name in ("lengths", "page_table")), name
    assert "arrivals" in pointers
    assert [getattr(call, name).tobytes() for name in names] == before


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn"])
@pytest.mark.parametrize("name", STRIDES)
def test_scratch_arrays_lie_as_what_they_stand_for(name: str, dtype: str) -> None:
    import ml_dtypes

    from cuflash import rehearsal

    kind = np.dtype(ml_dtypes.float8_e4m3fn) if dtype == "float8_e4m3fn" else np.dtype(DTYPES[dtype])
    x = STRIDES[name](np.ones((2, 3, 40, 8), kind)).view(Array)
    found = rehearsal.scratch(x, 1)
    assert (found.shape, found.strides, found.dtype) == (x.shape, x.strides, x.dtype)
    assert found.data.ptr % 256 == x.data.ptr % 256
    assert not np.shares_memory(np.asarray(found), np.asarray(x))
    values = np.asarray(found).astype(np.float64)
    assert np.isfinite(values).all()
    assert 0.5 < values.std() < 1.5
    assert np.unique(values).size > 20
    other = np.asarray(rehearsal.scratch(x, 2)).astype(np.float64)
    assert (other != values).mean() > 0.5


@pytest.mark.usefixtures("machine")
def test_long_scratch_arrays_repeat_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash import rehearsal

    monkeypatch.setattr(rehearsal, "PATTERN", 10)
    found = np.asarray(rehearsal.scratch(empty((1, 1, 7, 5), np.float32), 0)).ravel()
    np.testing.assert_array_equal(found, np.resize(found[:10], 35))
    assert np.unique(found).size == 10
    assert rehearsal.scratch(empty((0, 3), np.float32), 0).shape == (0, 3)
