"""The decode kernels in the emulator: every cut of the list, length, page, group, option and stride, under several schedules.

Rings are mostly forced to be small, so that caches of a few hundred keys are cut into many slices.
"""

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cuflash import source, tuning
from cuflash.problem import canonical
from tests.cases import STRIDES
from tests.decode_cases import OPTIONS, PAGE_SIZES, DecodeCase, named
from tests.emulator.build import EmulatorError
from tests.emulator.decode import SEEDS, check, decode, device_of
from tests.emulator.guards import live_buffers
from tests.emulator.host import EmulatedKernel

#: the kernel by mma.sync, and the plain one for every dtype
TARGETS = ((80, "bfloat16"), (90, "float16"), (80, "float32"), (75, "float16"), (75, "float64"), (75, "bfloat16"))
MAIN = ((80, "bfloat16"), (80, "float32"))
RING = tuning.DecodeTile(block_k=16, warps=2, stages=2)
#: cut into slices that end in the middle of an entry, with entries that are empty, short, and longer than a slice
LONG = {"lengths": (290, 0, 1, 300, 77), "capacity": 320}

targets = pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"sm_{t[0]}-{t[1]}")
main = pytest.mark.parametrize("target", MAIN, ids=lambda t: f"sm_{t[0]}-{t[1]}")


@pytest.fixture(autouse=True)
def ring(monkeypatch):
    """Sets the only ring that the kernel may choose."""

    def force(row=RING):
        monkeypatch.setattr(tuning, "DECODE_MMA", (row,))

    force()
    return force


# ---- options ---------------------------------------------------------------------------------------------------------
@targets
@pytest.mark.parametrize("name", OPTIONS)
def test_options(target, name):
    arch, dtype = target
    check(named(name, dtype=dtype), arch)


@main
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "full"])
def test_options_of_cut_lists(target, name):
    arch, dtype = target
    check(named(name, dtype=dtype, **LONG), device_of(arch, 6), residents=3)


@main
def test_without_undefined_behaviour(target):
    arch, dtype = target
    for name in ("causal", "everything"):
        check(named(name, dtype=dtype, **LONG), arch, sanitize=True)


def test_without_statistics():
    made = named("causal", **LONG).make()
    with_lse, without = (decode(made, device_of(80), with_lse=flag) for flag in (True, False))
    assert without[1] is None
    np.testing.assert_array_equal(with_lse[0].view(np.uint16), without[0].view(np.uint16))


# ---- the list of work --------------------------------------------------------------------------------------------------
@main
@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 5, 8, 13])
def test_every_count_of_slices(target, multiprocessors):
    arch, dtype = target
    case = named("everything", dtype=dtype, heads_k=2, **LONG)
    check(case, device_of(arch, multiprocessors), SEEDS, launches=2)


@pytest.mark.parametrize("row", tuning.DECODE_MMA, ids=str)
def test_every_ring(ring, row):
    ring(row)
    case = named("append-in-pages", **LONG)
    check(case, replace(device_of(80, 7), shared_limit=227 * 1024))


@main
def test_lengths_at_every_edge(target):
    arch, dtype = target
    edges = (0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 127, 128, 130)
    for seq_q, seq_new in ((1, 0), (1, 1), (3, 2)):
        lengths = tuple(min(n, 130 - seq_new) for n in edges)
        case = DecodeCase("edges", dtype, lengths, capacity=130, seq_q=seq_q, seq_new=seq_new)
        check(case, device_of(arch, 6))


@main
def test_more_entries_than_a_warp_has_lanes(target):
    arch, dtype = target
    lengths = tuple(np.random.default_rng(0).integers(0, 40, 75).tolist())
    check(DecodeCase("many", dtype, lengths, heads_q=2, heads_k=1, capacity=40), device_of(arch, 5), (0, 1, 2))
    lengths = (0,) * 40 + (33,)
    check(DecodeCase("empty ones first", dtype, lengths, heads_q=2, heads_k=1, capacity=40), device_of(arch, 5), (0, 1))


@main
def test_one_long_entry(target):
    arch, dtype = target
    for heads_k in (1, 4):
        check(DecodeCase("long", dtype, (900,), heads_q=4, heads_k=heads_k, capacity=1000), device_of(arch, 16))


@main
def test_without_queries_keys_are_still_appended(target):
    arch, dtype = target
    check(named("append", dtype=dtype, seq_q=0), arch, (0, 1))


@main
def test_a_cache_without_positions(target):
    arch, dtype = target
    check(DecodeCase("none", dtype, (0, 0), capacity=0), arch, (0, 1))


def test_a_page_table_without_pages_is_not_read():
    """A box is asked for even where nobody sees a key, and then its page would be looked up."""
    case = DecodeCase("none", "float16", (0, 0), page_size=16)
    for capacity, boxes in ((64, 2), (0, 0)):
        made = replace(case, capacity=capacity).make()
        out, lse, plan = decode(made, device_of(90))
        made.check(out, lse)
        assert len(plan.maps) == boxes


def test_the_launch_depends_on_shapes_alone():
    plans = [decode(replace(named("append"), lengths=n).make(), device_of(80))[2] for n in ((60, 0), (1, 62))]
    first, second = ((plan.steps, plan.template, plan.workspace()) for plan in plans)
    assert first == second


# ---- pages -------------------------------------------------------------------------------------------------------------
@main
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page_size", [*PAGE_SIZES, 5, 33])
def test_pages(target, page_size, layout):
    arch, dtype = target
    case = named("append", dtype=dtype, page_size=page_size, layout=layout, **LONG)
    check(case, device_of(arch, 6))


@main
def test_numbers_of_pages_outside_the_pool(target):
    """They read as pages of zeros, and what should be appended there is dropped; nothing beyond the pool is touched."""
    arch, dtype = target
    case = named("append", dtype=dtype, page_size=16, lengths=(60, 44), capacity=64)
    made = case.make()
    for value, page in ((-1, 1), (1 << 20, 0), (made.arrays["k_cache"].shape[0], 2)):
        table = made.table.copy()
        wrong = replace(made, table=table, keys=[x.copy() for x in made.keys], values=[x.copy() for x in made.values])
        table[1, page] = value
        for x in (
            wrong.keys[1],
            wrong.values[1],
        ):  # the last page holds the new keys, which are attended to all the same
            x[:, 16 * page : min(16 * page + 16, 44)] = 0
        after = [x.copy() for x in made.after]
        if page == 2:
            for x in after:
                x[made.table[1, 2], :, 44 - 32 : 46 - 32] = np.nan
        wrong = replace(wrong, after=tuple(after))
        for seed in SEEDS:
            wrong.check(*decode(wrong, device_of(arch), seed)[:2])


@main
def test_lengths_out_of_range_are_clamped(target):
    arch, dtype = target
    for seq_new in (0, 2):
        made = named("causal", dtype=dtype, lengths=(64, 0), seq_new=seq_new).make()
        wrong = replace(made, lengths=np.array([1 << 30, -(1 << 31)], np.int32))
        for seed in SEEDS:
            made.check(*decode(wrong, device_of(arch), seed)[:2])


# ---- rows --------------------------------------------------------------------------------------------------------------
@main
@pytest.mark.parametrize("seq_q", [1, 2, 3, 5])
@pytest.mark.parametrize(("heads_q", "heads_k"), [(1, 1), (3, 3), (4, 1), (8, 2), (9, 3), (16, 1), (17, 1)])
def test_groups_share_a_tile(target, heads_q, heads_k, seq_q):
    arch, dtype = target
    case = DecodeCase("groups", dtype, (75, 3), heads_q, heads_k, seq_q, capacity=80)
    check(case, device_of(arch, 6), (seq_q, seq_q + 6))


@targets
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (40, 24), (64, 128), (200, 256)])
def test_head_sizes(target, head_dim, head_dim_v):
    arch, dtype = target
    for seq_q in (1, 7):
        case = DecodeCase("dims", dtype, head_dim=head_dim, head_dim_v=head_dim_v, seq_q=seq_q, seq_new=1)
        check(case, replace(device_of(arch), shared_limit=227 * 1024), (seq_q, seq_q + 3))


@main
@pytest.mark.parametrize("values", [30.0, 300.0])
def test_scores_that_are_far_apart(target, values):
    arch, dtype = target
    check(named("causal", dtype=dtype, values=values, head_dim=32, **LONG), device_of(arch, 6), (0, 1))


# ---- strides -----------------------------------------------------------------------------------------------------------
@main
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", [name for name in STRIDES if name != "stride 0"])
@pytest.mark.parametrize("head_dim", [16, 15])
def test_strides(target, strides, layout, head_dim):
    arch, dtype = target
    for page_size in (0, 7):
        case = named("append", dtype=dtype, strides=strides, layout=layout, head_dim=head_dim, page_size=page_size)
        check(case, arch, (0, 1, 2))


def test_a_cache_that_is_broadcast():
    case = named("causal", strides="stride 0", lengths=(64, 64), full=True)
    made = case.make()
    if not any(0 in x.strides for x in made.arrays.values()):
        pytest.fail("no array of the case is broadcast")
    repeated = {name: canonical(made.arrays[name], case.layout) for name in ("q", "k_cache", "v_cache")}
    parts = {"keys": list(repeated["k_cache"]), "values": list(repeated["v_cache"])}
    made = replace(made, q=repeated["q"], after=(repeated["k_cache"], repeated["v_cache"]), **parts)
    made.check(*decode(made, device_of(80))[:2])


@main
@pytest.mark.parametrize("strides", ["padded", "every second", "reversed", "last axis first"])
def test_strides_of_results(target, strides):
    arch, dtype = target
    check(named("causal", dtype=dtype), arch, (0, 1, 2), place=STRIDES[strides])


# ---- what lies in front ----------------------------------------------------------------------------------------------
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
OPENS = "__syncthreads(); if (threadIdx.x == 0) open_pages(); __syncthreads();"
OPEN_PAGES = """
extern "C" int mprotect(void*, unsigned long, int);
struct Pages { void* address; unsigned long size; int rights; };
extern "C" __device__ Pages closed_pages[256];
Pages closed_pages[256];
static void open_pages() {
  for (Pages& x : closed_pages)
    if (x.size) mprotect(x.address, x.size, x.rights);
}
"""
PROGRAMMATIC = "  if constexpr (Config::kProgrammatic) {"
SHARE = "  const Share share(p);\n"


class Pages(ctypes.Structure):
    """Of an array, and the rights to touch them that a kernel has once it has waited."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_ulong), ("rights", ctypes.c_int))


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_touched_before_what_lies_in_front_has_ended(monkeypatch, waits):
    """Arrays are closed until all threads of a block have waited; a kernel that looks at lengths before is found out."""
    genuine = EmulatedKernel.launch

    def text(variant):
        found = source.build(variant)
        assert [found.count(x) for x in (WAIT, PROGRAMMATIC, SHARE)] == [1, 1, 1]
        if not waits:
            found = found.replace(SHARE, "").replace(PROGRAMMATIC, SHARE + PROGRAMMATIC)
        return OPEN_PAGES + found.replace(WAIT, OPENS)

    def launch(kernel, *arguments, **options):
        table, buffers = (Pages * 256).in_dll(kernel._library, "closed_pages"), live_buffers()
        assert len(buffers) <= len(table)
        for pages, buffer in zip(table, buffers, strict=False):
            pages.address, pages.size, pages.rights = buffer.first, buffer.pages, buffer.rights
            buffer.close()
        try:
            genuine(kernel, *arguments, **options)
        finally:
            for buffer in buffers:
                buffer.reopen()

    monkeypatch.setattr(EmulatedKernel, "launch", launch)
    for name in ("causal", "append-in-pages"):
        with nullcontext() if waits else pytest.raises(EmulatorError, match="array 'lengths'"):
            check(named(name, dtype="float16", **LONG), device_of(90, 6), (0, 1), text=text)


# ---- the test of the tests ---------------------------------------------------------------------------------------------
MMA, SLICES, RINGS, CACHE, PACKED, PARTIALS = (
    "decode_mma.cu",
    "decode_slices.cuh",
    "decode_rings.cuh",
    "attention/cache.cuh",
    "attention/packed.cuh",
    "attention/partials.cuh",
)
SABOTAGES = (
    ("the count of arrivals stays", SLICES, "if (threadIdx.x == 0) *arrivals = 0;", ""),
    ("two parts of a block share a slot", SLICES, "slices.begin(first) < unit.begin ? 1 : 0", "false ? 1 : 0"),
    ("a walk begins with the first of all entries", SLICES, "start = {u32(found * each),", "start = {0u,"),
    (
        "slices are as long as one that a launch has room for",
        SLICES,
        "return min(slice * length, total);",
        "return slice * length;",
    ),
    (
        "a part lies where the one in front of it does",
        SLICES,
        "kHeadLanes * i : slot_of(of)",
        "kHeadLanes * 0 : slot_of(of)",
    ),
    ("a block counts what it has not written", SLICES, "if (of + i == share.slice) {", "if (false) {"),
    (
        "queries are those of the unit in front",
        MMA,
        "    at = min(end, unit.end);\n    request_queries();",
        "    at = min(end, unit.end);",
    ),
    ("queries are replaced while they are read", SLICES, "  __syncthreads();  // bases and sums of all warps", ""),
    ("outputs are added before they are there", SLICES, "  between();\n  __syncthreads();", "  between();"),
    ("parts do not change base", PARTIALS, "o[c] *= before;", ""),
    ("parts count alike", PARTIALS, "const Real weight = weight_in(base, part[i].m, p);", "const Real weight = 1;"),
    ("copies are not waited for", RINGS, "cp_async_wait_group<Config::kStages - 1>();", ""),
    ("boxes are not waited for", RINGS, "mbarrier_wait(barrier(stage), phase);", ""),
    ("rows that a box brings too many stay", RINGS, "ballot_sync(0xffffffffu, !stays)", "ballot_sync(0u, false)"),
    (
        "boxes are those of the first page",
        RINGS,
        "page = page_of(p, sequence, index);",
        "page = page_of(p, sequence, 0);",
    ),
    ("pages are those of the unit in front", RINGS, "if (!is_new && ++lane < 32) return;", "if (++lane < 32) return;"),
    ("a page is looked up once in 32 blocks", RINGS, "__shfl_sync(0xffffffffu, page, lane)", "page"),
    ("new keys beyond the capacity are written", CACHE, "if (position >= p.seq_k) continue;", ""),
    (
        "new keys are read where they are being written",
        CACHE,
        "if (kAppends && position >= sequence.cached)",
        "if (false)",
    ),
    ("keys behind the length are read", CACHE, "position < seen.begin || position >= seen.end", "false"),
    ("groups of rows lie across pages", CACHE, "kPaged && p.page_size % kGroup != 0", "false"),
    ("groups reach into new keys", CACHE, "min(seen.end, sequence.cached)", "seen.end"),
    ("groups reach behind the length", CACHE, "position + kBlock <=", "position <"),
    ("pages outside the pool are read", CACHE, "page < 0 || page >= p.pages", "false"),
    ("queries all stand at one position", PACKED, "sequence.first_query + row.query", "sequence.first_query"),
    ("heads of a group are one", PACKED, "head_k * p.group + row - query * p.group", "head_k * p.group"),
    (
        "rows take the factor of their neighbour",
        "hw/fragment.cuh",
        "threadIdx.x % 4 * 8 + slot * 4",
        "threadIdx.x % 4 * 8",
    ),
)


@pytest.mark.parametrize(("_name", "path", "old", "new"), SABOTAGES, ids=[row[0] for row in SABOTAGES])
def test_bugs_are_noticed(monkeypatch, _name, path, old, new):
    genuine = source.read
    assert genuine(path).count(old) == 1
    monkeypatch.setattr(source, "read", lambda p: genuine(p).replace(old, new) if p == path else genuine(p))
    text = source.build.__wrapped__  # not the kept text of the sound kernel

    lengths = {**LONG, "lengths": (290, 0, 1, 319, 77)}
    cases = [
        named("everything", **lengths),
        named("append", lengths=(0, 3, 20), capacity=21),
        named("alibi", values=3.0),
        named("append-in-pages", lengths=(60, 35)),
        named("append", lengths=(60, 35, 14)),
        named("causal", page_size=16, **LONG),
    ]

    def run():
        for case, arch in product(cases, (80, 90) if path in (MMA, RINGS) else (80,)):
            check(case, device_of(arch), text=text, launches=2)
        read_a_page_far_outside(text)

    with pytest.raises((AssertionError, EmulatorError)):
        run()


def read_a_page_far_outside(text):
    made = named("causal", page_size=16).make()
    table = made.table.copy()
    table[0, 0] = 1 << 20
    out, _, _ = decode(replace(made, table=table), device_of(80), text=text)
    assert np.isfinite(out.astype(np.float32)).all()


def test_a_page_far_outside_the_pool_is_no_memory():
    read_a_page_far_outside(source.build)


def test_targets_have_both_kernels():
    kernels = set()
    for (arch, dtype), name in product(TARGETS, ("plain",)):
        kernels.add(decode(named(name, dtype=dtype).make(), device_of(arch))[2].steps[0].variant.kernel)
    assert kernels == {"decode_mma", "decode_simt"}
    assert len(SEEDS) >= 6
