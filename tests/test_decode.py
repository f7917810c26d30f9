"""`attention_decode` on the host, its reference twin, its plans, and every argument that it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import decode_plan, reference
from cuflash.backends import described_device
from cuflash.errors import ArgumentError, CuflashError, ShapeError, UnsupportedError
from cuflash.problem import canonical, in_layout
from cuflash.schedules import decode as schedule
from tests.cases import DTYPES, STRIDES
from tests.decode_cases import OPTIONS, PAGE_SIZES, UNUSED, DecodeCase, Made, named
from tests.test_errors import device_array


def run(made: Made, **changes: Any) -> Any:
    """The public call of a case, and a check of its caches."""
    arguments = {**made.arrays, "lengths": made.lengths, "page_table": made.table, **made.options, **changes}
    result = cuflash.attention_decode(**arguments)
    made.check_caches(made.arrays["k_cache"], made.arrays["v_cache"])
    return result


def check(case: DecodeCase) -> None:
    made = case.make()
    out, lse = run(made, return_lse=True)
    assert out.flags.c_contiguous
    made.check(canonical(out, case.layout), lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: str) -> None:
    check(named(name, dtype=dtype))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages(page_size: int, layout: str) -> None:
    check(named("append", page_size=page_size, layout=layout, lengths=(290, 0, 1, 300), capacity=320))


@pytest.mark.parametrize("strides", [name for name in STRIDES if name != "stride 0"])
def test_strides(strides: str) -> None:
    check(named("append-in-pages", strides=strides, layout="bshd", dtype="float32"))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_is_plain_attention_of_each_entry(name: str) -> None:
    made = named(name, dtype="float64").make()
    out, lse = reference.decode(made.call())
    for entry, expectation in enumerate(made.expectations()):
        np.testing.assert_array_equal(out[entry], expectation.out)
        np.testing.assert_array_equal(lse[entry], expectation.lse)
    made.check_caches(made.arrays["k_cache"], made.arrays["v_cache"])


def test_out_takes_the_result() -> None:
    for layout in ("bhsd", "bshd"):
        case = named("append", layout=layout)
        want = run(case.make())
        out = np.empty((*want.shape[:-1], 2 * want.shape[-1]), want.dtype)[..., ::2]
        assert run(case.make(), out=out) is out
        np.testing.assert_array_equal(out.view(np.uint16), want.view(np.uint16))


def test_lengths_may_be_any_integers() -> None:
    made = named("causal").make()
    want = run(made)
    for lengths in (list(made.case.lengths), tuple(made.case.lengths), np.array(made.case.lengths, np.int64)):
        np.testing.assert_array_equal(run(made, lengths=lengths).view(np.uint16), want.view(np.uint16))


def test_a_step_of_decoding_is_the_last_row_of_attention() -> None:
    """Token by token into an empty cache, against one call over all of them."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 9, 8)) for heads in (4, 2, 2))
    want = cuflash.attention(q, k, v, causal=True)
    caches = [np.full((2, 2, 9, 8), np.nan) for _ in range(2)]
    for step in range(9):
        at = np.s_[:, :, step : step + 1]
        out = cuflash.attention_decode(q[at], *caches, [step, step], k_new=k[at], v_new=v[at])
        np.testing.assert_allclose(out, want[at], rtol=1e-12, atol=1e-14)
    for cache, x in zip(caches, (k, v), strict=True):
        np.testing.assert_array_equal(cache, x)


def test_pools_may_interleave_keys_and_values() -> None:
    """One array of pages that hold keys and values side by side."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((6, 2, 4, 1, 8)).astype(np.float32)
    new = rng.standard_normal((2, 2, 1, 1, 8)).astype(np.float32)
    q = rng.standard_normal((2, 1, 2, 8)).astype(np.float32)
    table = np.array([[5, 0, UNUSED], [1, 2, 3]], np.int32)
    before = pool.copy()
    options = {"page_table": table, "layout": "bshd", "k_new": new[0], "v_new": new[1]}
    cuflash.attention_decode(q, pool[:, 0], pool[:, 1], [5, 11], **options)
    for n in range(2):
        before[0, n, 1], before[3, n, 3] = new[n, 0], new[n, 1]
    np.testing.assert_array_equal(pool, before)


# ---- refusals ----------------------------------------------------------------------------------------------------------
def good(**changes: Any) -> dict[str, Any]:
    made = named("append", dtype="float32", page_size=16).make()
    arguments = {**made.arrays, "lengths": made.lengths, "page_table": made.table}
    return arguments | changes


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def changed(x: np.ndarray, at: tuple[int, ...], value: int) -> np.ndarray:
    x = x.copy()
    x[at] = value
    return x


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


TABLE, LENGTHS = good()["page_table"], good()["lengths"]
PAGES = good()["k_cache"].shape[0]
REFUSALS: dict[str, tuple[dict[str, Any], tuple[str, ...], type[Exception]]] = {
    "axes of q": ({"q": numbers(4, 2, 16)}, ("q has shape (4, 2, 16)", "4 axes"), ShapeError),
    "axes of a pool": ({"k_cache": numbers(3, 16, 16)}, ("k_cache has shape", "pages"), ShapeError),
    "dtypes": (
        {"q": numbers(2, 4, 2, 16, dtype=np.float16)},
        ("one dtype", "q float16", "k_cache float32"),
        ArgumentError,
    ),
    "integers": ({"q": numbers(2, 4, 2, 16, dtype=int)}, ("q has dtype int64", "astype"), ArgumentError),
    "heads": ({"q": numbers(2, 3, 2, 16)}, ("heads of q (3)", "heads of k and v (2)"), ShapeError),
    "head_dim": ({"q": numbers(2, 4, 2, 8)}, ("same head_dim", "q (2, 4, 2, 8)"), ShapeError),
    "pools of two lengths": ({"v_cache": numbers(2, 2, 16, 16)}, ("2", "pages", "page table serves both"), ShapeError),
    "pages of two sizes": ({"v_cache": numbers(PAGES, 2, 8, 16)}, ("16 positions", "8"), ShapeError),
    "batch of contiguous caches": (
        {"page_table": None, "k_cache": numbers(3, 2, 64, 16), "v_cache": numbers(3, 2, 64, 16)},
        ("batch axes", "(3, 2, 64, 16)"),
        ShapeError,
    ),
    "one of two": ({"v_new": None}, ("k_new is given and v_new is not", "pass both"), ArgumentError),
    "shape of k_new": ({"k_new": numbers(2, 2, 2, 8)}, ("k_new has shape (2, 2, 2, 8)", "(2, 2, 2, 16)"), ShapeError),
    "seq of v_new": ({"v_new": numbers(2, 2, 3, 16)}, ("v_new has shape (2, 2, 3, 16)", "(2, 2, 2, 16)"), ShapeError),
    "dtype of k_new": (
        {"k_new": numbers(2, 2, 2, 16, dtype=float)},
        ("k_new has dtype float64", "float32"),
        ArgumentError,
    ),
    "shape of lengths": ({"lengths": [1, 2, 3]}, ("lengths has shape (3,)", "(batch,) (2,)"), ShapeError),
    "dtype of lengths": ({"lengths": np.ones(2)}, ("lengths has dtype float64", "int32"), ArgumentError),
    "a negative length": ({"lengths": [5, -1]}, ("lengths[1] is -1", "from 0 to 62"), ArgumentError),
    "a length without room": (
        {"lengths": [63, 0]},
        ("lengths[0] is 63", "0 to 62", "64 positions", "2 new"),
        ArgumentError,
    ),
    "lengths beyond int32": ({"lengths": [1 << 40, 0]}, ("lengths contains 1099511627776", "int32"), ArgumentError),
    "no lengths and new keys": ({"lengths": None}, ("lengths[0] is 64", "0 to 62"), ArgumentError),
    "more new keys than positions": (
        {"k_new": numbers(2, 2, 70, 16), "v_new": numbers(2, 2, 70, 16)},
        ("70 keys", "64 positions"),
        ArgumentError,
    ),
    "shape of the table": ({"page_table": TABLE[0]}, ("page_table has shape (4,)", "(batch, pages"), ShapeError),
    "batch of the table": ({"page_table": TABLE[:1]}, ("page_table has shape (1, 4)", "2"), ShapeError),
    "dtype of the table": (
        {"page_table": TABLE.astype(float)},
        ("page_table has dtype float64", "int32"),
        ArgumentError,
    ),
    "a page that the pool lacks": (
        {"page_table": changed(TABLE, (0, 2), PAGES)},
        (f"page_table[0, 2] is {PAGES}", f"0 to {PAGES - 1}", "entry 0 uses its first 3"),
        ArgumentError,
    ),
    "a negative page": ({"page_table": changed(TABLE, (1, 1), -5)}, ("page_table[1, 1] is -5",), ArgumentError),
    "top_left": ({"causal": "top_left"}, ("causal='top_left'", "KeyLengths"), ArgumentError),
    "causal": ({"causal": 1}, ("causal=1", "True, False"), ArgumentError),
    "window": ({"window": 3}, ("window=3", "pair"), ArgumentError),
    "softcap": ({"softcap": 0}, ("softcap=0", "greater than 0"), ArgumentError),
    "scale": ({"scale": np.nan}, ("scale=nan", "finite"), ArgumentError),
    "layout": ({"layout": "sbhd"}, ("layout='sbhd'", "'bshd'"), ArgumentError),
    "return_lse": ({"return_lse": 1}, ("return_lse=1", "True or False"), ArgumentError),
    "checked": ({"checked": 1}, ("checked=1", "True or False"), ArgumentError),
    "KeyLengths": ({"modifiers": (cuflash.KeyLengths([1, 1]),)}, ("KeyLengths", "lengths="), ArgumentError),
    "Documents": (
        {"modifiers": (cuflash.Documents(np.zeros(2, int), np.zeros(64, int)),)},
        ("Documents", "ALiBi and Sinks only", "cuflash.attention"),
        ArgumentError,
    ),
    "BlockMask": (
        {"modifiers": (cuflash.BlockMask(np.ones((1, 1), bool), 64),)},
        ("BlockMask", "ALiBi and Sinks only"),
        ArgumentError,
    ),
    "slopes": ({"modifiers": (cuflash.ALiBi([1.0, 2.0, 3.0]),)}, ("slopes of ALiBi", "(3,)", "heads_q"), ShapeError),
    "backend": ({"backend": "fast"}, ("backend='fast'", "mma"), ArgumentError),
    "a backend elsewhere": ({"backend": "mma"}, ("backend='mma'", "numpy array on the host"), UnsupportedError),
    "shape of out": ({"out": numbers(2, 4, 1, 16)}, ("out has shape (2, 4, 1, 16)", "(2, 4, 2, 16)"), ShapeError),
    "dtype of out": ({"out": numbers(2, 4, 2, 16, dtype=np.float16)}, ("out has dtype float16",), ArgumentError),
    "out that cannot be written": ({"out": read_only(numbers(2, 4, 2, 16))}, ("out is read-only",), ArgumentError),
    "a list": ({"q": [1.0]}, ("q is [1.0]", "numpy.asarray"), ArgumentError),
}


def refuses(words: tuple[str, ...], error: type[Exception], arguments: dict[str, Any]) -> None:
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    before = {name: x.tobytes() for name, x in arrays.items()}
    with pytest.raises(CuflashError) as caught:
        cuflash.attention_decode(**arguments)
    assert type(caught.value) is error, caught.value
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert before == {name: x.tobytes() for name, x in arrays.items()}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    changes, words, error = REFUSALS[name]
    refuses(words, error, good(**changes))


def test_the_good_call_is_good() -> None:
    assert cuflash.attention_decode(**good()).shape == (2, 4, 2, 16)


OVERLAPS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]] = {
    "a read-only cache": (lambda a: {"k_cache": read_only(a["k_cache"])}, ("k_cache is read-only", "in place")),
    "one array for both": (lambda a: {"v_cache": a["k_cache"]}, ("k_cache overlaps v_cache", "in place")),
    "new keys inside the cache": (
        lambda a: {"k_new": a["v_cache"][:2, :, :2]},
        ("v_cache overlaps k_new",),
    ),
    "out inside the cache": (
        lambda a: {"out": a["k_cache"].reshape(-1)[:256].reshape(2, 4, 2, 16)},
        ("out overlaps k_cache",),
    ),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_shares_memory_is_refused(name: str) -> None:
    change, words = OVERLAPS[name]
    arguments = good()
    refuses(words, ArgumentError, arguments | change(arguments))


def test_a_cache_that_is_broadcast_cannot_take_keys() -> None:
    arguments = good()
    one = arguments["k_cache"][:1]
    arguments["k_cache"] = np.lib.stride_tricks.as_strided(
        one, arguments["k_cache"].shape, (0, *one.strides[1:]), writeable=True
    )
    refuses(("k_cache of shape", "share memory", "in place"), ArgumentError, arguments)


def test_unused_places_of_a_table_may_hold_anything() -> None:
    made = named("append-in-pages").make()
    assert (made.table == UNUSED).any()
    run(made)


# ---- on a device, before anything runs ---------------------------------------------------------------------------------
def on_device(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": device_array((2, 4, 1, 16)),
        "k_cache": device_array((2, 2, 64, 16), at=2 << 20),
        "v_cache": device_array((2, 2, 64, 16), at=3 << 20),
        "lengths": device_array((2,), np.int32, at=4 << 20),
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": lambda: device_array((2,), np.int64)}, ("lengths has dtype int64", "int32")),
        ({"lengths": lambda: device_array((3,), np.int32)}, ("lengths has shape (3,)",)),
        ({"lengths": lambda: device_array((2,), np.int32, device=1)}, ("lengths is", "cuda:1", "cuda:0")),
        ({"lengths": lambda: [65, 1]}, ("lengths[0] is 65", "from 0 to 64")),
        ({"k_cache": lambda: numbers(2, 2, 64, 16)}, ("k_cache is a numpy array",)),
        ({"page_table": lambda: device_array((2, 4), np.int64)}, ("page_table has dtype int64",)),
        ({"backend": lambda: "numpy"}, ("backend='numpy' computes on the host",)),
    ],
)
def test_refusals_on_a_device(changes: dict[str, Callable[[], Any]], words: tuple[str, ...]) -> None:
    arguments = on_device(**{name: make() for name, make in changes.items()})
    with pytest.raises(CuflashError) as caught:
        cuflash.attention_decode(**arguments)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_lengths_on_a_device_beside_arrays_on_the_host() -> None:
    with pytest.raises(ArgumentError, match="lengths is a cupy array"):
        cuflash.attention_decode(**good(lengths=device_array((2,), np.int32)))


# ---- plans -------------------------------------------------------------------------------------------------------------
def plan_of(case: DecodeCase, arch: int = 90, multiprocessors: int = 132, requested: str | None = None) -> Any:
    call = case.make().call()
    out = np.empty(call.problem.out_shape, call.q.dtype)
    places = decode_plan.places_of(call, decode_plan.decode_arrays(call, out, None))
    device = replace(described_device(arch), multiprocessors=multiprocessors)
    return decode_plan.plan_decode.__wrapped__(call.decode, device, places, requested)


def test_backends_by_dtype_and_device() -> None:
    found = {
        (arch, dtype): plan_of(DecodeCase(dtype=dtype), arch).backend for arch in (75, 80, 90, 120) for dtype in DTYPES
    }
    assert {key for key, backend in found.items() if backend == "mma"} == {
        (arch, dtype) for arch in (80, 90, 120) for dtype in ("float16", "bfloat16")
    }
    assert set(found.values()) == {"mma", "simt"}
    assert plan_of(DecodeCase(), requested="simt").backend == "simt"
    assert "mma is preferred" in plan_of(DecodeCase()).reasons["simt"]


@pytest.mark.parametrize(
    ("case", "requested", "words"),
    [
        (DecodeCase(), "wgmma", ("wgmma: it has no decode kernel",)),
        (DecodeCase(dtype="float32"), "mma", ("float32 is not among its dtypes",)),
        (DecodeCase(head_dim=257), None, ("head_dim 257 is above 256", "numpy backend")),
        (DecodeCase(head_dim_v=300, dtype="float32"), None, ("head_dim_v 300 is above 256",)),
    ],
)
def test_calls_that_no_kernel_takes(case: DecodeCase, requested: str | None, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan_of(case, requested=requested)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_a_list_that_cannot_be_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_BLOCKS_OF_KEYS", 3)
    with pytest.raises(UnsupportedError, match="split the batch"):
        plan_of(DecodeCase())


def test_grids_fill_the_device_and_no_more() -> None:
    for multiprocessors, heads_k in ((132, 8), (108, 6), (170, 8), (5, 3)):
        case = DecodeCase(lengths=(100,), heads_q=heads_k, heads_k=heads_k, capacity=200_000, head_dim=8)
        plan = plan_of(case, 90, multiprocessors)
        lanes = plan.steps[0].config.head_lanes
        assert heads_k % lanes == 0
        assert multiprocessors - lanes < plan.steps[0].blocks <= multiprocessors
    small = plan_of(DecodeCase())
    assert small.steps[0].blocks < 132
    assert small.workspace()["arrivals"] == 4 * small.steps[0].blocks


def test_what_holds_no_query_launches_nothing_unless_it_appends() -> None:
    empty = DecodeCase(lengths=(), capacity=16)
    assert plan_of(empty).steps[0].blocks == 0
    assert plan_of(DecodeCase(seq_q=0)).steps[0].blocks == 0
    assert plan_of(DecodeCase(seq_q=0, seq_new=1)).steps[0].blocks > 0
    made = DecodeCase(seq_q=0, seq_new=1).make()
    assert run(made).shape == in_layout((2, 4, 0, 16), "bhsd")


def test_bfloat16_is_that_of_ml_dtypes() -> None:
    assert run(named("plain").make()).dtype == ml_dtypes.bfloat16


# ---- the benchmark -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, 4, 2, 64), (3, 2, 2, 128)])
def test_the_benchmark_compares_like_with_like(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls, on host arrays, return what they are compared with before they are timed."""
    from scripts import bench_decode

    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(bench_decode, "on_host", lambda x: x.astype(np.float64))
    batch, heads_q, heads_k, seq_k = shape
    rng = np.random.default_rng(0)
    q = rng.standard_normal((batch, 1, heads_q, 128)).astype(ml_dtypes.bfloat16)
    caches = rng.standard_normal((2, 2, batch, seq_k, heads_k, 128)).astype(ml_dtypes.bfloat16)
    systems = [
        bench_decode.contiguous(q, caches, shape, "cuflash"),
        bench_decode.contiguous(q, caches, shape, "cuflash", "bhsd"),
        bench_decode.paged(q, caches, shape, 16),
        bench_decode.paged(q, caches, shape, 64),
    ]
    for system in systems:
        found = system.result()
        assert np.linalg.norm(found - system.expected) < bench_decode.LARGEST_DIFFERENCE * np.linalg.norm(
            system.expected
        )
        assert (system.call(1) != system.call(0)).any()


def test_the_table_of_the_benchmark() -> None:
    from scripts import bench_decode, tables

    shape = bench_decode.SHAPES[0]
    rows = [
        {
            "topic": "decode",
            "system": system,
            "cache": cache,
            **bench_decode.sizes(shape),
            "gbps": gbps,
            "gbps_single": gbps / 2,
        }
        for system, cache, gbps in (
            ("cuflash", "contiguous bshd", 3000.0),
            ("cudnn", "contiguous bshd", 2900.0),
            ("read", "contiguous bshd", 4000.0),
            ("cuflash", "pages of 16", 2800.0),
        )
    ]
    lines = tables.TOPICS["decode"](rows).splitlines()
    assert lines[2] == "| 1 x 32/8 x 32768 | contiguous bshd | 3000 | 2900 | 4000 | 1500 | 1450 |"
    assert lines[3] == "| 1 x 32/8 x 32768 | pages of 16 | 2800 | - | 4000 | 1400 | - |"
