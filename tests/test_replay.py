"""Repeated calls before anything runs: which are replayed, what is launched then and where, and what is refused as ever."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, abi, api, arrays, exchange
from cuflash.errors import CuflashError

pytest.importorskip("cupy")

from cuflash import launch, replay
from tests import machine as machines
from tests.machine import LIBRARY, Array, Launched, Machine, Stream, Tensor, array

SHAPE = (2, 4, 70, 64)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with machines.machine(80) as found:
        yield found


@pytest.fixture
def hopper() -> Iterator[Machine]:
    with machines.machine(90, multiprocessors=4) as found:
        yield found


def numbers(seed: int, shape: tuple[int, ...] = SHAPE, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def inputs(kind: Any = array) -> list[Any]:
    return [kind(numbers(seed)) for seed in range(3)]


def tensor(x: np.ndarray) -> Tensor:
    return Tensor(array(x))


def field(launched: Launched, name: str) -> int:
    """An address in an argument record."""
    variant = launched.variant
    dtype = abi.record(variant.direction, variant.modifiers, "float32", variant.maps, variant.statistics)
    at: Any = dtype.fields
    found: int = ctypes.c_uint64.from_buffer_copy(launched.record, at[name][1]).value
    return found


def address(x: Any) -> int:
    found: int = getattr(x, "values", x).ctypes.data
    return found


KINDS = pytest.mark.parametrize("kind", [array, tensor], ids=["cupy", "library"])


# ---- what is launched ------------------------------------------------------------------------------------------------
@KINDS
def test_addresses_are_those_of_the_call(machine: Machine, kind: Any) -> None:
    for _ in range(4):
        q, k, v = inputs(kind)
        mask = kind(np.ones((70, 70), bool))
        out, lse = cuflash.attention(q, k, v, mask=mask, return_lse=True)
        assert type(out) is type(lse) is type(q)
        given = {"q": q, "k": k, "v": v, "mask": mask, "out": out, "lse": lse}
        assert {name: field(machine.launched[-1], name) for name in given} == {n: address(x) for n, x in given.items()}
    assert (machine.planned, len(machine.launched)) == (1, 4)
    assert len({launched.variant for launched in machine.launched}) == 1


@KINDS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_have_their_dtypes_and_shapes(machine: Machine, kind: Any, dtype: str) -> None:
    for _ in range(3):
        q = kind(numbers(0, (3, 9, 4, 16), arrays.named_dtype(dtype)))
        v = kind(numbers(2, (3, 9, 2, 24), arrays.named_dtype(dtype)))
        k = kind(numbers(1, (3, 9, 2, 16), arrays.named_dtype(dtype)))
        out, lse = (getattr(x, "values", x) for x in cuflash.attention(q, k, v, return_lse=True, layout="bshd"))
        assert (out.shape, out.dtype, lse.shape) == ((3, 9, 4, 24), arrays.named_dtype(dtype), (3, 4, 9))
        assert lse.dtype == ("float64" if dtype == "float64" else "float32")
        assert out.flags.c_contiguous
    assert machine.planned == 1


@KINDS
def test_addresses_of_a_backward(machine: Machine, kind: Any) -> None:
    for _ in range(3):
        q, k, v, out, dout = (kind(numbers(seed)) for seed in range(5))
        lse, dlse = (kind(numbers(seed, SHAPE[:-1], np.float32)) for seed in (5, 6))
        machine.launched.clear()
        found = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=True)
        assert [type(x) for x in found] == [type(q)] * 3
        assert found._fields == ("dq", "dk", "dv")
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse, **found._asdict()}
        for launched in machine.launched:
            assert {name: field(launched, name) for name in given} == {n: address(x) for n, x in given.items()}
            parts = [field(launched, name) for name in ("statistics", "dq_sum", "turns")]
            assert all(parts)
            assert len(set(parts)) == 3
            assert all(at % 16 == 0 for at in parts)
    assert machine.planned == 1


def test_tensor_maps_and_counters(hopper: Machine) -> None:
    """Hopper's kernels find arrays by maps, and streams have counters of their own; a captured launch has one to itself."""
    counters = []
    for stream in (Stream(), Stream(), Stream(77), Stream(77, True), Stream(77, True), Stream(77)):
        hopper.stream = stream
        q, k, v = inputs()
        out = cuflash.attention(q, k, v)
        launched = hopper.launched[-1]
        assert launched.variant.kernel == "forward_wgmma"
        assert launched.stream == stream.ptr
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            assert field(launched, f"{name}_map") == address(x)
        counters.append(field(launched, "tile_counter"))
    assert hopper.planned == 1
    same, again, other, captured, next_captured, free = counters
    assert same == again
    assert other == free
    assert len({same, other, captured, next_captured}) == 4
    assert all(counters)


@pytest.mark.parametrize("precision", [None, "tf32"])
def test_counters_of_planes_are_cleared(hopper: Machine, precision: str | None) -> None:
    """By every call on its own stream, replayed or not, in front of the launches."""
    for ptr in (0, 0, 8):
        hopper.stream = Stream(ptr)
        q, k, v = (array(numbers(seed, (1, 2, 300, 64), "float32")) for seed in range(3))
        hopper.cleared.clear()
        cuflash.attention(q, k, v, precision=precision)
        launched = hopper.launched[-3:]
        assert launched[0].variant.kernel == "split_planes"
        (magnitudes,) = {field(x, "magnitudes") for x in launched}
        ((at, size, stream),) = hopper.cleared
        assert (at - magnitudes, size, stream) == (8 * 5 + 8 * 6, 8 * (6 + 2 + launched[0].blocks), ptr)
    assert hopper.planned == 1


# ---- packed sequences ------------------------------------------------------------------------------------------------
PACKED_SHAPE = (300, 4, 64)


def offsets(kind: Any, *lengths: int) -> Any:
    return kind(np.cumsum([0, *lengths], dtype=np.int32))


@pytest.fixture
def offsets_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's arrays are the host's; here they are not looked at."""

    def taken(side: str, x: Any, longest: int | None, total: int, home: Any, packed: Any) -> tuple[Any, int]:
        return arrays.modifier_array(side, x, home), longest or total

    monkeypatch.setattr(arrays, "native_offsets", taken)


@KINDS
@pytest.mark.usefixtures("offsets_of_device")
@pytest.mark.parametrize("longest", [300, 5000], ids=["one list", "two lists"])
def test_packed_calls(hopper: Machine, kind: Any, longest: int) -> None:
    """Offsets on the device are addresses like others; lengths and their number are not looked at but for the longest."""
    maxima, shape = {"max_seqlen_q": 300, "max_seqlen_k": longest}, (longest, 4, 64)
    kernels = {"segment_lists": 1, "forward_wgmma": 1 + (longest > 300)}
    for count in range(4):
        q, k, v = (kind(numbers(seed, shape)) for seed in range(3))
        at = {"segments_q": offsets(kind, 100 + count, 70), "segments_k": offsets(kind, 90, 170)}
        hopper.launched.clear()
        out, lse = cuflash.attention_varlen(q, k, v, *at.values(), return_lse=True, causal=True, **maxima)
        assert type(out) is type(lse) is type(q)
        assert (out.shape, lse.shape) == (shape, (4, longest))
        given = {"q": q, "k": k, "v": v, **at, "out": out, "lse": lse}
        for launched in hopper.launched:
            assert {name: field(launched, name) for name in given} == {n: address(x) for n, x in given.items()}
            assert field(launched, "segment_lists") % 16 == 0
        assert Counter(launched.variant.kernel for launched in hopper.launched) == kernels
        assert len({field(launched, "segment_lists") for launched in hopper.launched}) == 1
    assert hopper.planned == 1
    for _ in range(3):
        q, k, v, out, dout = (kind(numbers(seed, shape)) for seed in range(5))
        lse, of = kind(numbers(5, (4, longest), np.float32)), offsets(kind, 100, 70)
        hopper.launched.clear()
        found = cuflash.attention_varlen_backward(dout, q, k, v, of, of, out, lse, causal=True, **maxima)
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, **found._asdict()}
        given |= {"segments_q": of, "segments_k": of}
        for launched in hopper.launched:
            assert {name: field(launched, name) for name in given} == {n: address(x) for n, x in given.items()}
        steps = ["segment_lists", "backward_delta", "backward_wgmma", "backward_convert_mma"]
        assert [launched.variant.kernel for launched in hopper.launched] == steps
    assert hopper.planned == 2


@pytest.mark.usefixtures("offsets_of_device")
def test_packed_calls_that_are_not_replayed(machine: Machine) -> None:
    q, k, v = (array(numbers(seed, PACKED_SHAPE)) for seed in range(3))
    of, host = offsets(array, 100, 70), np.array([0, 100, 170], np.int32)
    maxima: dict[str, Any] = {"max_seqlen_q": 100, "max_seqlen_k": 100}
    for _ in range(2):
        cuflash.attention_varlen(q, k, v, of, of, **maxima)
    planned = machine.planned
    assert planned == 1
    for at, changes in (
        ((of, of), {"max_seqlen_k": 200}),  # another longest, in powers of two
        ((host, host), {}),  # offsets that are looked at
        ((of, of), {"softcap": 5.0}),
        ((offsets(array, 1, 2, 3), offsets(array, 1, 2, 3)), {}),
        ((of, of), {"causal": True}),
    ):
        cuflash.attention_varlen(q, k, v, *at, **{**maxima, **changes})
        planned += 1
        assert machine.planned == planned
    cuflash.attention_varlen(q, k, v, of, of, max_seqlen_q=100, max_seqlen_k=101)
    assert machine.planned == planned
    for wrong in ({"max_seqlen_k": -1}, {"max_seqlen_q": True}, {"max_seqlen_k": 100.0}):
        with pytest.raises(ArgumentError, match="max_seqlen"):
            cuflash.attention_varlen(q, k, v, of, of, **{**maxima, **wrong})


def test_records_are_kept_for_addresses_that_come_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[tuple[int, ...]] = []
    pack = replay.Replay.packed
    monkeypatch.setattr(replay.Replay, "packed", lambda self, at: (packed.append(at), pack(self, at))[1])
    monkeypatch.setattr(replay, "MAX_RECORDS", 3)
    q, k, v = inputs()
    outs = [array(numbers(seed)) for seed in range(7)]
    for out in (*outs, *outs[:2], *outs[:2]):
        cuflash.attention(q, k, v, out=out)
        assert field(machine.launched[-1], "out") == address(out)
        assert len(replay._records) <= 3
    assert machine.planned == 1
    assert [at[-1] for at in packed] == [address(out) for out in (*outs[1:], *outs[:2])]


def test_threads_do_not_mix_their_calls(machine: Machine) -> None:
    """Each has arrays of its own, some given `out`; what is launched is noted, by the thread."""
    cuflash.attention(*inputs())
    cuflash.attention(*inputs(), out=array(numbers(3)))
    found: dict[int, list[Launched]] = {}
    machine.run = lambda launched: found.setdefault(threading.get_ident(), []).append(launched)

    def work(_: int) -> None:
        q, k, v = inputs()
        out = array(numbers(4))
        for i in range(50):
            given = cuflash.attention(q, k, v, **({"out": out} if i % 2 else {}))
            launched = found[threading.get_ident()][-1]
            want = {"q": q, "k": k, "v": v, "out": given}
            assert {name: field(launched, name) for name in want} == {n: address(x) for n, x in want.items()}

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert machine.planned == 2


@KINDS
def test_the_first_call_of_a_process_is_known_afterwards(machine: Machine, kind: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_launch", None)
        patch.setattr(api, "_replay", None)
        for _ in range(3):
            cuflash.attention(*inputs(kind))
    assert machine.planned == 1


# ---- out= ------------------------------------------------------------------------------------------------------------
@KINDS
def test_a_new_out_in_each_call(machine: Machine, kind: Any) -> None:
    for i in range(4):
        q, k, v = inputs(kind)
        out = kind(numbers(9))
        found = cuflash.attention(q, k, v, out=out, return_lse=bool(i % 2))
        assert (found[0] if i % 2 else found) is out
        assert field(machine.launched[-1], "out") == address(out)
        assert (field(machine.launched[-1], "lse") != 0) == bool(i % 2)
    assert machine.planned == 2


def test_outs_of_other_strides_have_plans_of_their_own(machine: Machine) -> None:
    q, k, v = inputs()
    wide = array(numbers(9, (2, 4, 70, 128)))
    views = [wide[..., :64], wide[..., 64:], wide[..., ::2], wide[..., 1::2], wide[..., 63::-1], wide[..., 1:65]]
    views += [array(numbers(9, (2, 70, 4, 64))).swapaxes(1, 2)]
    records = []
    for _ in range(2):
        for view in views:
            cuflash.attention(q, k, v, out=view)
            records.append(machine.launched[-1].record)
    assert machine.planned == 6  # the second one lies as the first does
    assert records[:7] == records[7:]


@KINDS
def test_an_out_that_overlaps_is_refused_when_the_call_is_known(machine: Machine, kind: Any) -> None:
    memory = array(numbers(0, (4, *SHAPE)))
    q, k, v, out = (memory[i].view(Array) if kind is array else Tensor(memory[i].view(Array)) for i in range(4))
    for _ in range(2):
        cuflash.attention(q, k, v, out=out)
    assert machine.planned == 1
    launched = len(machine.launched)
    flat = memory.reshape(-1)
    size = q.values.size if kind is tensor else q.size
    for name, start in (("k", 2 * size - 8), ("v", 2 * size + 8), ("k", size)):
        view = flat[start : start + size].reshape(SHAPE)
        with pytest.raises(ArgumentError, match=f"out overlaps {name}: bytes"):
            cuflash.attention(q, k, v, out=view if kind is array else Tensor(view))
    assert len(machine.launched) == launched
    cuflash.attention(q, k, v, out=out)
    assert machine.planned == 1


def test_an_out_that_interleaves_with_an_input_is_taken(machine: Machine) -> None:
    fused = array(numbers(0, (2, 4, 70, 4, 64)))
    q, k, v, out = (fused[..., i, :] for i in range(4))
    for _ in range(3):
        cuflash.attention(q, k, v, out=out)
        assert field(machine.launched[-1], "out") == address(out)


def test_an_out_that_repeats_its_elements_is_refused_each_time(machine: Machine) -> None:
    q, k, v = inputs()
    cuflash.attention(q, k, v, out=array(numbers(4)))
    row = np.lib.stride_tricks.as_strided(array(numbers(9, (64,))), SHAPE, (0, 0, 0, 2), subok=True)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="elements that share memory"):
            cuflash.attention(q, k, v, out=row)


def test_an_out_that_is_read_only_is_refused_each_time(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cuflash.attention(*inputs(), out=array(numbers(4)))
    host = [numbers(seed) for seed in range(3)]
    frozen = numbers(9)
    cuflash.attention(*host, out=frozen)
    frozen.flags.writeable = False
    for _ in range(2):
        with pytest.raises(ArgumentError, match="out is read-only"):
            cuflash.attention(*host, out=frozen)
    monkeypatch.setattr(arrays, "IMMUTABLE", ("library",))
    for _ in range(3):
        with pytest.raises(ArgumentError, match="out is a library array on cuda:0, and such arrays cannot be written"):
            cuflash.attention(*inputs(tensor), out=tensor(numbers(9)))


# ---- the same call in every respect ----------------------------------------------------------------------------------
WRONG = [
    {"causal": 1},
    {"causal": "bottom_left"},
    {"scale": True},
    {"scale": float("nan")},
    {"window": (True, 3)},
    {"window": [1]},
    {"softcap": 0},
    {"modifiers": None},
    {"layout": ["bhsd"]},
    {"return_lse": 1},
    {"batch_invariant": 0},
    {"backend": "cpu"},
    {"precision": "tf32"},
    {"out_dtype": "float16x"},
    {"q_scale": 1.0},
]


@KINDS
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_refused_stays_refused(machine: Machine, kind: Any, wrong: dict[str, Any]) -> None:
    given = inputs(kind)
    for options in ({}, {"causal": True}, {"scale": 1.0}, {"window": (1, 3)}, {"return_lse": True}):
        for _ in range(2):
            cuflash.attention(*given, **options)
    launched = len(machine.launched)
    messages = []
    for arguments in (given, [numbers(seed) for seed in range(3)]):
        with pytest.raises(CuflashError) as caught:
            cuflash.attention(*arguments, **wrong)
        messages.append(str(caught.value))
    if wrong != {"precision": "tf32"}:  # arrays on the host have no such precision at all
        assert messages[0] == messages[1]
    assert len(machine.launched) == launched


@KINDS
def test_arrays_that_lie_otherwise_are_other_calls(machine: Machine, kind: Any) -> None:
    q, k, v = (array(numbers(seed, (2, 4, 70, 128))) for seed in range(3))

    def call(*views: Any, **options: Any) -> int:
        before = machine.planned
        cuflash.attention(*(x if kind is array else Tensor(x) for x in views), **options)
        return machine.planned - before

    halves = [x[..., :64] for x in (q, k, v)]
    calls: list[Any] = [
        (halves, {}),
        ([x[..., 1:65] for x in (q, k, v)], {}),  # not at a multiple of 16 bytes
        ([halves[0], *(x[..., ::2] for x in (k, v))], {}),
        ([x[:, :2] for x in halves], {}),
        ([halves[0], *(x[:, :2] for x in halves[1:])], {}),
        ([x.view(arrays.bfloat16()) for x in halves], {}),
        (halves, {"causal": True}),
        (halves, {"causal": "top_left"}),
        (halves, {"scale": 0.3}),
        (halves, {"scale": 0.3, "return_lse": True}),
        (halves, {"scale": np.float64(0.3)}),
        (halves, {"scale": -0.0}),
        (halves, {"scale": 0.0}),
        (halves, {"window": (3, None)}),
        (halves, {"softcap": 2.0}),
        (halves, {"return_lse": True}),
        (halves, {"layout": "bshd"}),
        (halves, {"backend": "mma"}),
    ]
    assert [call(*views, **options) for views, options in calls] == [1] * len(calls)
    assert [call(*views, **options) for views, options in calls] == [0] * len(calls)
    assert call(*halves, scale=np.array(0.3)) == call(*halves, scale=np.array(0.3)) == 1  # its text leaves digits out


def test_backwards_that_differ_are_other_calls(machine: Machine) -> None:
    q, k, v, out, dout = (array(numbers(seed)) for seed in range(5))
    lse = array(numbers(5, SHAPE[:-1], np.float32))
    bias = array(numbers(6, (70, 70)))
    calls: list[dict[str, Any]] = [{}, {"causal": True}, {"deterministic": True}, {"dlse": lse}, {"scale": 0.3}]
    for want in (1, 0):
        for options in calls:
            before = machine.planned
            cuflash.attention_backward(dout, q, k, v, out, lse, **options)
            assert machine.planned - before == want
    for _ in range(2):
        before = machine.planned
        assert cuflash.attention_backward(dout, q, k, v, out, lse, bias=bias).dbias.shape == (70, 70)
        assert machine.planned - before == 1  # its sums are not replayed
        with pytest.raises(ArgumentError, match="deterministic=1"):
            cuflash.attention_backward(dout, q, k, v, out, lse, deterministic=1)
        with pytest.raises(ArgumentError, match="lse"):
            cuflash.attention_backward(dout, q, k, v, out, array(numbers(5, SHAPE[:-1], np.float64)))


@KINDS
def test_on_another_device_the_call_is_made_anew(machine: Machine, kind: Any) -> None:
    for planned in (1, 1):
        cuflash.attention(*inputs(kind))
        assert machine.planned == planned
    machine.current = 1
    cuflash.attention(*inputs(kind))
    assert machine.planned == 2


# ---- arrays of other libraries ---------------------------------------------------------------------------------------
def test_known_calls_look_at_arrays_by_the_librarys_functions(machine: Machine) -> None:
    for _ in range(2):
        cuflash.attention(*inputs(tensor))
    waits, views, made = len(LIBRARY.waits), LIBRARY.views, LIBRARY.made
    given = inputs(tensor)
    out = cuflash.attention(*given)
    assert (len(LIBRARY.waits), LIBRARY.views, LIBRARY.made) == (waits, views + 3, made + 1)
    assert not LIBRARY.alive
    assert machine.planned == 1
    del given
    assert np.isnan(out.values.astype(np.float32)).all()  # alive, and nobody wrote it here


def test_results_of_the_library_are_freed(machine: Machine) -> None:
    freed = []

    class Result(Tensor):
        def __del__(self) -> None:
            freed.append(id(self))

    given = inputs(tensor)
    cuflash.attention(*given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machines, "Tensor", Result)
        out = cuflash.attention(*given)
        assert type(out) is Result
        assert not freed
        del out
    assert len(freed) == 1


def test_streams_that_differ_are_ordered_by_dlpack(machine: Machine) -> None:
    given = inputs(tensor)
    for _ in range(2):
        cuflash.attention(*given)
    LIBRARY.stream, machine.stream = 5, Stream(7)
    for out in (None, tensor(numbers(9))):
        for _ in range(2):
            LIBRARY.waits.clear()
            cuflash.attention(*given, out=out)
            assert LIBRARY.waits == [(5, 7)] * (3 if out is None else 4) + [(0, 5)]  # in, and back
            assert machine.launched[-1].stream == 7
    assert machine.planned == 2  # known ones are replayed for all that
    LIBRARY.stream = 7
    LIBRARY.waits.clear()
    cuflash.attention(*given)
    assert not LIBRARY.waits
    assert machine.launched[-1].stream == 7


def test_tracked_arrays_are_told_to_detach_each_time(machine: Machine) -> None:
    q, k, v = inputs(tensor)
    for _ in range(2):
        cuflash.attention(q, k, v)
        k.requires_grad = True
        with pytest.raises(ArgumentError, match=r"k .*tracked.*detach"):
            cuflash.attention(q, k, v)
        k.requires_grad = False


def test_kinds_do_not_mix_when_the_call_is_known(machine: Machine) -> None:
    q, k, v = inputs(tensor)
    for _ in range(2):
        cuflash.attention(q, k, v)
        with pytest.raises(ArgumentError, match="v is a cupy array on cuda:0"):
            cuflash.attention(q, k, v.values)
        with pytest.raises(ArgumentError, match="k is a numpy array on the host"):
            cuflash.attention(q, np.asarray(k.values), v)


def test_a_library_without_memory_leaves_results_to_cupy(machine: Machine) -> None:
    given = inputs(tensor)
    for _ in range(2):
        cuflash.attention(*given)
    LIBRARY.is_full = True
    assert type(cuflash.attention(*given)) is Tensor
    assert machine.planned == 1


@pytest.mark.parametrize("trouble", ["error", "null"])
def test_arrays_that_c_functions_do_not_show_go_by_dlpack(machine: Machine, trouble: str) -> None:
    given = inputs(tensor)
    for _ in range(2):
        cuflash.attention(*given)
    given[1].trouble = trouble
    LIBRARY.waits.clear()
    cuflash.attention(*given)
    assert len(LIBRARY.waits) == 4
    assert field(machine.launched[-1], "k") == address(given[1])


def test_types_without_all_functions_go_by_dlpack(machine: Machine) -> None:
    names = [name for name, _ in exchange.Table._fields_[3:]]
    addresses = {name: getattr(LIBRARY.table, name) for name in names}

    def kind(base: type, **changes: Any) -> type:
        table = exchange.Table(**{"major": 1, "minor": 3, **addresses, **changes})
        return type("Other", (base,), {exchange.ATTRIBUTE: LIBRARY.capsule(table), "table": table})

    newer = kind(object, major=2, previous=ctypes.addressof(LIBRARY.table))
    assert exchange.exchange_of(Tensor) is not None
    assert exchange.exchange_of(newer) is not None
    refused = [kind(object, **{name: 0}) for name in names]
    refused += [kind(object, major=2), type("Derived", (Tensor,), {}), object, np.ndarray]
    refused += [type("Other", (), {exchange.ATTRIBUTE: x}) for x in (None, 5, LIBRARY.capsule)]
    assert [exchange.exchange_of(x) for x in refused] == [None] * len(refused)
    derived = type("Derived", (Tensor,), {"__module__": "library.inner"})
    for _ in range(3):
        LIBRARY.views = 0
        cuflash.attention(*(derived(array(numbers(seed))) for seed in range(3)))
        assert not LIBRARY.views
    assert machine.planned == 1  # and is replayed


def test_counters_run_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "COUNTERS", 2)
    found = [launch.tile_counter(0, Stream(ptr)) for ptr in (0, 8, 16, 0, 8, 1)]
    assert [bool(at) for at in found] == [True, True, False, True, True, False]
    assert found[0] == found[3] != found[1] == found[4]
    launch._tile_counters.clear()
    assert launch.tile_counter(0, Stream(8, True)) == 0  # no memory is taken during a capture
