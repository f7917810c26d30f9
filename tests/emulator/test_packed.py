"""Packed sequences in the emulator: every kernel, segments of all lengths, and the same bits alone and in a pack."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from cuflash import arrays, plan, problem, segments, source, tuning
from cuflash.gradients import gradients_type
from cuflash.problem import Call
from cuflash.variant import Variant
from tests.emulator import kernels
from tests.emulator.mutants import mutate
from tests.emulator.test_mma import target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)
from tests.emulator.test_wgmma import TILES, hopper
from tests.emulator.test_wgmma import tile as wgmma_tile  # noqa: F401 (a fixture)
from tests.packs import Judge, Pack, alone

#: small tiles: 32 x 16 forward and 32 x 32 backward for 16 bits, 16 x 32 and 16 x 16 for the others; on sm_90 bfloat16 runs
#: on wgmma, forward by 128 x 32, where TMA takes the arrays
TARGETS = ((75, "float16"), (80, "bfloat16"), (90, "bfloat16"), (75, "float32"), (80, "float64"), (90, "float32"))
targets = pytest.mark.parametrize("target", TARGETS, ids=target_id)

LENGTHS_Q, LENGTHS_K = (33, 0, 7, 64, 1, 20, 0), (40, 9, 0, 50, 65, 20, 0)
PACK = Pack(LENGTHS_Q, LENGTHS_K, behind=(9, 37))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "dlse": True},
    "top-left": {"causal": "top_left", "window": (9, 30)},
    "window": {"window": (12, 3), "dlse": True},
    "left": {"window": (None, 0), "heads_q": 4, "heads_k": 1},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi": True, "dlse": True},
    "negative-scale": {"scale": -0.4},
    "groups": {"heads_q": 6, "heads_k": 2, "causal": True, "dlse": True},
    "wide": {"head_dim": 24, "head_dim_v": 40},
    "narrow": {"head_dim": 40, "head_dim_v": 8, "causal": True},
    "everything": {
        "heads_q": 4,
        "heads_k": 2,
        "scale": 0.4,
        "causal": True,
        "window": (30, None),
        "softcap": 3.0,
        "alibi": True,
        "head_dim": 17,
        "head_dim_v": 12,
        "dlse": True,
    },
}


small = pytest.mark.usefixtures("mma_tile", "simt_tile", "wgmma_tile")


def check(pack: Pack, arch: int, seeds: Iterable[int] = kernels.SEEDS, **options: Any) -> None:
    call, dout, dlse = pack.call()
    judge = Judge(call, dout, dlse)
    for seed in seeds:
        out, lse = kernels.forward(call, arch, seed)
        judge.check_forward(out, lse)
        judge.check_backward(kernels.backward(call, out, lse, dout, dlse, arch, seed, **options))


@small
@targets
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, target: tuple[int, str]) -> None:
    """Each under three seeds of the schedule, and in turns under the other three."""
    pack = replace(PACK, dtype=target[1], **OPTIONS[name])
    check(pack, target[0], (0, 1, 2))
    check(pack, target[0], (3, 4, 5), deterministic=True)


@small
@targets
@pytest.mark.parametrize(
    "pack",
    [
        Pack((), behind=(5, 3)),
        Pack((), (), behind=(0, 0)),
        Pack((0, 0, 0)),
        Pack((0, 0), (20, 0), behind=(0, 40)),
        Pack((20, 0), (0, 0), behind=(40, 0)),
        Pack((70,)),
        Pack((32, 64, 32, 96)),
        Pack((1,) * 40, (3,) * 40, behind=(0, 1)),
        Pack((2, 1, 90, 0, 3), (1, 2, 100, 4, 0), behind=(33, 0)),
    ],
    ids=lambda pack: f"{pack.lengths_q}+{pack.behind}"[:40],
)
def test_lengths(pack: Pack, target: tuple[int, str]) -> None:
    """Segments without queries, without keys and without either, of whole tiles, far shorter and far longer than a tile."""
    pack = replace(pack, dtype=target[1], causal=True, dlse=True)
    check(pack, target[0], (0, 1, 2))
    check(pack, target[0], (3, 4, 5), deterministic=True)


@small
@pytest.mark.parametrize("strides", ["padded", "every second", "reversed", "last axis first", "stride 0"])
@pytest.mark.parametrize("target", [(80, "float16"), (80, "float32")], ids=target_id)
def test_strides(strides: str, target: tuple[int, str]) -> None:
    check(replace(PACK, dtype=target[1], strides=strides, head_dim=17, causal=True), target[0])


@small
@targets
def test_offsets_of_any_stride(target: tuple[int, str]) -> None:
    call, dout, dlse = replace(PACK, dtype=target[1]).call()
    spread = {name: np.repeat(x, 3, axis=-2)[:, ::3] for name, x in call.operands.items()}
    assert spread["segments_q"].strides[-2] == 12
    call, judge = replace(call, operands=spread), Judge(call, dout, dlse)
    for seed in kernels.SEEDS:
        out, lse = kernels.forward(call, target[0], seed)
        judge.check_forward(out, lse)
        judge.check_backward(kernels.backward(call, out, lse, dout, dlse, target[0], seed))


# ---- the same bits alone and in a pack -----------------------------------------------------------------------------------
def results(call: Call, dout: Any, dlse: Any, arch: int, seed: int, backend: str | None = None) -> list[np.ndarray]:
    """out, lse, dq, dk and dv."""
    options: dict[str, Any] = {"requested": backend, "residents": 2}
    out, lse = kernels.forward(call, arch, seed, **options)
    gradients = kernels.backward(call, out, lse, dout, dlse, arch, seed, deterministic=True, **options)
    return [out, lse[..., None], *gradients]


def of_segment(found: list[np.ndarray], part: segments.Segment) -> list[np.ndarray]:
    at = (part.rows, part.rows, part.rows, part.columns, part.columns)
    return [x[..., rows, :] for x, rows in zip(found, at, strict=True)]


def assert_same_bits(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes(), f"{name} differs"


@small
@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, id=f"{name}-{target_id(target)}")
        for name, target in product(("plain", "causal", "window", "everything"), TARGETS)
        if name in ("causal", "everything") or target in ((80, "bfloat16"), (90, "bfloat16"))
    ],
)
def test_a_segment_has_the_bits_of_a_call_of_its_own(name: str, target: tuple[int, str]) -> None:
    """With the same tile: as attention's, packed alone, and in the pack."""
    call, dout, dlse = replace(PACK, dtype=target[1], **OPTIONS[name]).call()
    found = results(call, dout, dlse, target[0], 1)
    for number, part in enumerate(segments.cut(call)):
        own = dout[..., part.rows, :], None if dlse is None else dlse[..., part.rows]
        assert_same_bits(of_segment(found, part), results(part.call, *own, target[0], 2))
        assert_same_bits(of_segment(found, part), results(alone(call, number)[0], *own, target[0], 3))


@targets
def test_tiles_do_not_depend_on_the_pack(target: tuple[int, str]) -> None:
    """The same by the tile that the library chooses."""
    call, dout, _ = replace(PACK, dtype=target[1], causal=True).call()
    found = results(call, dout, None, target[0], 1)
    for number, part in enumerate(segments.cut(call)):
        own = results(alone(call, number)[0], dout[..., part.rows, :], None, target[0], 2)
        assert_same_bits(of_segment(found, part), own)


@pytest.mark.parametrize("target", [(75, "float16"), (80, "bfloat16"), (90, "bfloat16")], ids=target_id)
def test_16_bit_segments_have_the_bits_of_attention(target: tuple[int, str]) -> None:
    """Of more than 64 queries, by the tiles that the library chooses for either, on mma."""
    call, dout, _ = Pack((3, 70, 100), (9, 200, 65), dtype=target[1], head_dim=64, causal=True).call()
    found = results(call, dout, None, target[0], 1, "mma")
    for part in list(segments.cut(call))[1:]:
        attention = results(part.call, dout[..., part.rows, :], None, target[0], 2, "mma")
        assert_same_bits(of_segment(found, part), attention)


# ---- what must not matter ------------------------------------------------------------------------------------------------
def surrounded(call: Call, dout: Any, number: int) -> tuple[Call, Any, segments.Segment]:
    """The call and dout with NaN in all rows but those of one segment."""
    part = list(segments.cut(call))[number]
    dirty = {}
    for name, x in {"q": call.q, "k": call.k, "v": call.v, "dout": dout}.items():
        own = part.rows if name in ("q", "dout") else part.columns
        dirty[name] = np.full_like(x, np.nan)
        dirty[name][..., own, :] = x[..., own, :]
    return replace(call, **{name: dirty[name] for name in "qkv"}), dirty["dout"], part


@small
@targets
def test_segments_do_not_see_each_other(target: tuple[int, str]) -> None:
    """NaN in other segments and behind the last one reaches nothing."""
    call, dout, _ = replace(PACK, dtype=target[1], causal=True).call()
    found = results(call, dout, None, target[0], 0)
    for number in (0, 3, 5):
        dirty, dirty_dout, part = surrounded(call, dout, number)
        assert_same_bits(of_segment(results(dirty, dirty_dout, None, target[0], number), part), of_segment(found, part))


BAD = {
    "falling": [0, 50, 20, 70, 10, 125, 125, 134],
    "beyond": [0, 1000, 1 << 30, (1 << 31) - 1, 100, 125, 126, 134],
    "negative": [0, -5, -(1 << 31), 40, 125, 125, 125, 134],
    "not from 0": [50, 60, 70, 80, 90, 100, 110, 120],
    "all behind": [1 << 20] * 8,
    "again": [0, 1000, 0, 1000, 0, 1000, 0, 1000],
    "backwards": [134, 120, 100, 80, 60, 40, 20, 0],
}


@small
@targets
@pytest.mark.parametrize("name", BAD)
def test_offsets_that_nobody_checked_reach_nothing_outside(name: str, target: tuple[int, str]) -> None:
    """The guards around every array stay whole, and no block waits for a turn that never comes."""
    call, dout, dlse = replace(PACK, dtype=target[1], causal=True, dlse=True).call()
    bad = np.array(BAD[name], np.int32)[None, :, None]
    good = call.operands["segments_q"]
    for seed, (q, k) in enumerate(((bad, bad), (bad, good), (good, bad), (bad[:, ::-1].copy(), bad))):
        wrong = replace(call, operands={"segments_q": q, "segments_k": k})
        out, lse = kernels.forward(wrong, target[0], seed)
        out, lse = np.nan_to_num(out), np.nan_to_num(lse)
        for deterministic in (False, True):
            kernels.backward(wrong, out, lse, dout, dlse, target[0], seed, deterministic=deterministic)


# ---- Hopper's kernels ----------------------------------------------------------------------------------------------------
HOPPER_PACK = Pack((70, 0, 131, 1, 64), (9, 30, 200, 65, 64), behind=(9, 37), dtype="bfloat16", causal=True, heads_k=1)


@small
@pytest.mark.parametrize("sizes", [(80, 80), (136, 72)], ids=str)
def test_forms_of_hoppers_backward(sizes: tuple[int, int]) -> None:
    """Those that small heads do not show (tests/emulator/test_wgmma_backward.py), beside NaN."""
    call, dout, _ = replace(HOPPER_PACK, head_dim=sizes[0], head_dim_v=sizes[1]).call()
    judge = Judge(call, dout)
    found = results(call, dout, None, 90, 0, "wgmma")
    judge.check_forward(found[0], found[1][..., 0])
    judge.check_backward(gradients_type()(*found[2:]))
    for seed, number in enumerate((0, 2, 4), 1):
        dirty, dirty_dout, part = surrounded(call, dout, number)
        assert_same_bits(of_segment(results(dirty, dirty_dout, None, 90, seed, "wgmma"), part), of_segment(found, part))


def by_any_number_of_blocks(call: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse of Hopper's forward, which are right and the same bits for one block and for more than there are tiles."""
    judge, found = Judge(call), set()
    for seed, blocks in enumerate((1, 2, 5, 132, 3, 7)):
        out, lse = kernels.forward(call, hopper(blocks), seed, requested="wgmma")
        judge.check_forward(out, lse)
        found.add(out.tobytes() + lse.tobytes())
    assert len(found) == 1
    return out, lse


@pytest.mark.parametrize("name", ["continuous", "two tiles of queries", "one tile of queries", "three warpgroups"])
def test_every_kind_of_tile(wgmma_tile: Callable[..., None], name: str) -> None:  # noqa: F811
    """By one block, by some, and by more than there are tiles with a row; beside NaN."""
    wgmma_tile(TILES[name])
    call, dout, _ = HOPPER_PACK.call()
    out, lse = by_any_number_of_blocks(call)
    for seed, number in enumerate((0, 2, 4)):
        dirty, _, part = surrounded(call, dout, number)
        got = kernels.forward(dirty, hopper(3), seed, requested="wgmma")
        for x, y in zip(got, (out, lse), strict=True):
            at = x[..., part.rows, :] if x.ndim == 3 else x[..., part.rows]
            np.testing.assert_array_equal(at, y[..., part.rows, :] if x.ndim == 3 else y[..., part.rows])


#: tiles of segments of up to 64 keys, and of others
SHORT, LONG = TILES["continuous"]._replace(max_keys=64), TILES["three warpgroups"]
MIXED = Pack((130, 5, 200, 64, 0, 70, 1), (300, 5, 65, 64, 100, 0, 129), behind=(9, 37), dtype="bfloat16", heads_k=1)


@pytest.fixture
def two_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "FORWARD_WGMMA", (SHORT, LONG))


@pytest.mark.usefixtures("two_lists")
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (90, 20)}, {}], ids=str)
def test_long_segments_have_tiles_of_their_own(options: dict[str, Any]) -> None:
    """By one block, some, and more than there are tiles; a segment's are its own by its length, whatever it is packed with."""
    call, _, _ = replace(MIXED, **options).call()
    out, lse = by_any_number_of_blocks(call)
    for number, part in enumerate(segments.cut(call)):
        if 0 in (part.call.problem.seq_q, part.call.problem.seq_k):
            continue  # empty arrays have no maps
        own = kernels.forward(alone(call, number)[0], hopper(3), number, requested="wgmma")
        np.testing.assert_array_equal(own[0], out[..., part.rows, :])
        np.testing.assert_array_equal(own[1], lse[..., part.rows])


@pytest.mark.usefixtures("two_lists")
@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({}, [192, 128]),
        ({"window": (40, 23)}, [128]),
        ({"window": (40, 24)}, [192, 128]),
        ({"window": (63, None), "causal": True}, [128]),
        ({"window": (None, 3)}, [192, 128]),
        ({"lengths_k": (64,) * 7}, [128]),
        ({"lengths_k": (64,) * 6 + (65,)}, [192, 128]),
    ],
    ids=str,
)
def test_there_are_two_lists_where_a_segment_may_be_long(options: dict[str, Any], tiles: list[int]) -> None:
    made = replace(MIXED, **options).make()
    q, k, v = made["q"], made["k"], made["v"]
    packed = arrays.native_packed(*made["offsets"], None, None, len(q), len(k), arrays.HOST)
    longest = int(np.diff(made["offsets"][1]).max())
    assert longest <= packed.longest_k < 2 * longest
    call = problem.describe_packed(q, k, v, packed, **made["options"])
    at = plan.places_of(call.problem, plan.forward_arrays(call, call.q, None))
    planned = plan.plan_forward.__wrapped__(call.problem, hopper(), at, "wgmma")
    first, *others = planned.steps
    assert first.variant.kernel == "segment_lists"
    assert [step.config.block_q for step in others] == tiles
    assert first.blocks == len(tiles)


def read_lists(found: np.ndarray, lists: int) -> list[np.ndarray]:
    """The elements of each list: index, tiles before it, rows of queries and of keys, unused."""
    words = found.view(np.int32).reshape(lists, -1, 8)
    return [own[1 : 1 + own[0, 0]] for own in words]


def assert_lists_tiles(
    found: np.ndarray, lengths: np.ndarray, walks: np.ndarray, tile: int, wanted: np.ndarray
) -> None:
    """Those of the `wanted` segments, one after the other, long walks before those that are an eighth shorter."""
    seen, at = [], 0
    while at < len(found):
        index, before = int(found[at, 0]), int(found[at, 1])
        tiles = -(-int(lengths[index]) // tile)
        assert before == at
        assert (found[at : at + tiles, :2] == [index, before]).all()
        seen.append(index)
        at += tiles
    assert sorted(seen) == [i for i in wanted if lengths[i] > 0]
    long = walks[seen]
    assert (np.maximum.accumulate(long[::-1])[::-1] <= long * 9 / 8 + 1).all()


@pytest.mark.usefixtures("two_lists")
@pytest.mark.parametrize("count", [0, 1, 31, 33, 1100])
def test_lists(count: int) -> None:
    """Of more segments than a block has threads, too."""
    rng = np.random.default_rng(count)
    lengths = [rng.choice([0, 1, 3, 7], count) for _ in range(2)]
    for at, (q, k) in enumerate(((900, 64), (1, 70), (130, 1000), (200, 64), (40, 65))[:count]):
        lengths[0][at * count // 5], lengths[1][at * count // 5] = q, k
    pack = Pack(tuple(lengths[0]), tuple(lengths[1]), behind=(140, 130), dtype="bfloat16", heads_q=6, heads_k=2)
    call, dout, _ = pack.call()
    seen: list[np.ndarray] = []
    options: dict[str, Any] = {"requested": "wgmma", "without": ("forward_wgmma", "backward_wgmma")}
    options["watch"] = lambda found: seen.append(found["segment_lists"].copy())
    out, lse = kernels.forward(call, hopper(), **options)
    kernels.backward(call, out, lse, dout, None, hopper(), **options)
    of_q, of_k = np.append(lengths[0], 140), np.append(lengths[1], 130)
    long = np.append(lengths[1] > 64, False)
    forward = read_lists(seen[0], 1 + bool(long.any()))
    segment = np.arange(count + 1)
    keys_of_none, queries_of_none = np.append(lengths[1], 0), np.append(lengths[0], 0)
    assert_lists_tiles(forward[0], of_q, keys_of_none, 128, segment[~long])
    for found in forward[1:]:
        assert_lists_tiles(found, of_q, keys_of_none, 192, segment[long])
    (backward,) = read_lists(seen[1], 1)
    assert_lists_tiles(backward, of_k, queries_of_none, 128, segment)
    offsets = [np.cumsum(x) - x for x in (of_q, of_k)]
    for found, is_backward in ((forward[0], False), (backward, True)):
        for index, _, *rows in found[:, :6]:
            own = [[begin[index], begin[index] + n[index]] for begin, n in zip(offsets, (of_q, of_k), strict=True)]
            if index == count:
                own[0 if is_backward else 1] = [0, 0]
            assert rows == own[0] + own[1]


@small
@pytest.mark.parametrize("layout", ["rows apart", "heads outside", "one row", "one head"])
def test_arrays_that_tma_walks(layout: str) -> None:
    pack = HOPPER_PACK
    if layout == "one row":
        pack = replace(pack, lengths_q=(0, 1), lengths_k=(1, 0), behind=(0, 0))
    elif layout == "one head":
        pack = replace(pack, heads_q=1)
    call, dout, _ = pack.call()
    if layout == "rows apart":
        wide = {n: np.full((*x.shape[:-1], 48), np.nan, x.dtype) for n, x in (("q", call.q), ("k", call.k))}
        for name, x in wide.items():
            x[..., 8:24] = getattr(call, name)
        call = replace(call, **{name: x[..., 8:24] for name, x in wide.items()})
    elif layout == "heads outside":
        call = replace(call, q=np.ascontiguousarray(call.q), v=np.ascontiguousarray(call.v))
    judge = Judge(call, dout)
    for seed in kernels.SEEDS:
        out, lse = kernels.forward(call, hopper(), seed, requested="wgmma")
        judge.check_forward(out, lse)
        judge.check_backward(kernels.backward(call, out, lse, dout, None, hopper(), seed, requested="wgmma"))


# ---- bugs sown on purpose --------------------------------------------------------------------------------------------------
def run_pack(arch: int, dtype: str, text: Callable[[Variant], str]) -> None:
    """Rows that belong to no segment hold NaN, and their gradients must be 0."""
    call, dout, dlse = replace(PACK, dtype=dtype, causal=True, heads_q=4, dlse=True).call()
    for x, rows in ((call.q, 9), (dout, 9), (call.k, 37), (call.v, 37)):
        x[..., -rows:, :] = np.nan
    judge = Judge(call, dout, dlse)
    out, lse = kernels.forward(call, arch, 1, text=text)
    judge.check_forward(out, lse)
    judge.check_backward(kernels.backward(call, out, lse, dout, dlse, arch, 1, text=text, deterministic=True))


def run_bad_offsets(arch: int, dtype: str, text: Callable[[Variant], str], pack: Pack = PACK) -> None:
    call, dout, dlse = replace(pack, dtype=dtype, causal=True, dlse=True).call()
    for values in BAD.values():
        bad = np.array(values, np.int32)[None, :, None]
        wrong = replace(call, operands={"segments_q": bad, "segments_k": bad})
        out, lse = kernels.forward(wrong, arch, 1, text=text)
        out, lse = np.nan_to_num(out), np.nan_to_num(lse)
        kernels.backward(wrong, out, lse, dout, dlse, arch, 1, text=text, deterministic=True)


Trial = Callable[[int, str, Callable[[Variant], str]], None]
#: what is wrong -> the text of attention/index.cuh, what takes its place, and who notices
MUTANTS: dict[str, tuple[str, str, Trial]] = {
    "queries of the first segment": ("return queries.begin * view.row;", "return 0;", run_pack),
    "keys of the first segment": ("return keys.begin * view.row;", "return 0;", run_pack),
    "sums of segments overlap": (
        "(queries.begin / kTile + index) * kTile;",
        "queries.begin / kTile * kTile;",
        run_pack,
    ),
    "the diagonal is the corner": ("? seq_k(p) - seq_q(p) : 0;", "? 0 : 0;", run_pack),
    "tiles of one segment": ("return p.seq_q / kTile + p.segment_count + 1;", "return p.seq_q / kTile + 1;", run_pack),
    "rows behind are the last segment's": (
        "high = count;\n    while",
        "high = max(count - 1, 0);\n    while",
        run_pack,
    ),
    "rows behind see keys behind": ("(kOfKeys ? queries : keys) = {0, 0};", "if (kOfKeys) queries = {0, 0};", run_pack),
    "keys behind are seen": ("(kOfKeys ? queries : keys) = {0, 0};", "if (!kOfKeys) keys = {0, 0};", run_pack),
    "offsets go anywhere": (
        "min(max(at[min(i, count) * stride], 0), total)",
        "at[min(i, count) * stride]",
        run_bad_offsets,
    ),
    "turns of half a segment": (
        "return offsets.segment_of(first, kTile) == index && offsets.segment_of(last, kTile) == index;",
        "return true;",
        run_bad_offsets,
    ),
}


def run_tiles(arch: int, dtype: str, text: Callable[[Variant], str]) -> None:
    """Many tiles for each of two blocks, under every schedule."""
    call, _, _ = replace(PACK, dtype=dtype, causal=True, heads_q=4).call()
    judge = Judge(call)
    for seed in kernels.SEEDS:
        judge.check_forward(*kernels.forward(call, hopper(), seed, text=text, requested="wgmma"))


def run_few_tiles(arch: int, dtype: str, text: Callable[[Variant], str]) -> None:
    """Fewer tiles than blocks."""
    call, _, _ = replace(PACK, dtype=dtype).call()
    Judge(call).check_forward(*kernels.forward(call, hopper(132), 1, text=text, requested="wgmma"))


def run_long_bad_offsets(arch: int, dtype: str, text: Callable[[Variant], str]) -> None:
    """Of more rows than a tile of 128."""
    run_bad_offsets(arch, dtype, text, replace(PACK, behind=(300, 300)))


#: the same for Hopper's kernels
HOPPER_MUTANTS: dict[str, tuple[str, str, Trial]] = {
    "a tile reaches into the next segment": (
        "return {total - length + min(row, length), rows.end};",
        "return {rows.begin + row, total};",
        run_pack,
    ),
    "sums of segments overlap": (
        "work.place.padded_row<Config::kBlockQ>() / Config::kBlockQ;",
        "0;",
        run_pack,
    ),
    "turns of half a segment": (
        "if (Config::kDeterministic && !place.has_all_tiles<Config::kBlockQ, Config::kBlockK>(p)) steps = 0;",
        "",
        run_long_bad_offsets,
    ),
    "the next tile is replaced before it is read": ("    at.wait_empty(shared.comings);\n", "", run_tiles),
    "the next tile is read before it is there": (
        "if constexpr (kLooksForTiles) coming_at.wait_full(shared.comings);",
        "",
        run_tiles,
    ),
    "a block without a tile goes on": ("  if ((kPacked || kHasPlanes) && tile < 0) return;", "", run_few_tiles),
}


@small
@pytest.mark.parametrize("name", HOPPER_MUTANTS)
def test_mutant_of_hoppers_is_noticed(name: str) -> None:
    old, new, trial = HOPPER_MUTANTS[name]

    def text(variant: Variant) -> str:
        whole = source.build(variant)
        return mutate(whole, old, new) if old in whole else whole

    with pytest.raises((AssertionError, kernels.EmulatorError)):
        trial(90, "bfloat16", text)


@small
@pytest.mark.parametrize("trial", [run_pack, run_long_bad_offsets, run_tiles, run_few_tiles])
def test_hoppers_without_a_bug_pass(trial: Trial) -> None:
    trial(90, "bfloat16", source.build)


@small
@pytest.mark.parametrize("target", [(80, "bfloat16"), (80, "float32")], ids=target_id)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_noticed(name: str, target: tuple[int, str]) -> None:
    old, new, trial = MUTANTS[name]
    with pytest.raises((AssertionError, kernels.EmulatorError)):
        trial(*target, lambda variant: mutate(source.build(variant), old, new))


@small
@pytest.mark.parametrize("target", [(80, "bfloat16"), (80, "float32")], ids=target_id)
@pytest.mark.parametrize("trial", [run_pack, run_bad_offsets])
def test_kernels_without_a_bug_pass(trial: Trial, target: tuple[int, str]) -> None:
    trial(*target, source.build)
