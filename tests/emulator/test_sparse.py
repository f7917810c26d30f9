"""Documents and block masks in the emulator: patterns of hidden tiles on every kind of kernel, and that tiles are skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from cuflash import problem, source
from cuflash.modifiers import BlockMask, Documents, KeyLengths, Modifier
from cuflash.modifiers.documents import GRANULE
from cuflash.schedules import mma
from cuflash.variant import Variant
from tests.cases import OPTIONS, Case
from tests.emulator import EmulatedKernel, kernels
from tests.emulator.build import EmulatorError
from tests.emulator.kernels import backward, check, check_call, forward
from tests.emulator.mutants import mutate
from tests.emulator.test_mma import TILES, target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import BACKWARD, FORWARD
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)
from tests.emulator.test_wgmma import hopper
from tests.emulator.test_wgmma import tile as wgmma_tile  # noqa: F401 (a fixture)
from tests.tolerance import Expectation

#: small tiles: 32 x 16 forward and 32 x 32 backward for 16 bits, 16 x 32 and 16 x 16 for the others
TARGETS = ((75, "float16"), (80, "bfloat16"), (100, "bfloat16"), (75, "float32"), (80, "float64"), (90, "float32"))
targets = pytest.mark.parametrize("target", TARGETS, ids=target_id)
#: and by wgmma, 128 x 32 forward and 64 x 128 backward
with_hopper = pytest.mark.parametrize("target", [*TARGETS, (90, "bfloat16")], ids=target_id)

Pattern = Callable[[np.random.Generator, tuple[int, int, int]], np.ndarray]


@pytest.fixture(autouse=True)
def small_tiles(mma_tile: Any, simt_tile: Any, wgmma_tile: Any) -> None:  # noqa: F811
    """Every test runs with them, unless it sets others."""


def one(at: tuple[int, int], value: bool) -> Pattern:
    """Blocks that are all alike but one."""

    def make(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
        blocks = np.full(shape[1:], not value)
        blocks[at] = value
        return blocks

    return make


#: blocks of 16 x 16 for (heads_q, blocks of queries, blocks of keys)
PATTERNS: dict[str, Pattern] = {
    "all hidden": lambda rng, shape: np.zeros((1, 1), bool),
    "all visible": lambda rng, shape: np.ones(shape, bool),
    "one visible": one((3, 4), True),
    "first visible": one((0, 0), True),
    "last visible": one((-1, -1), True),
    "one hidden": one((2, 2), False),
    "rows hidden": lambda rng, shape: np.repeat(rng.random((shape[1], 1)) < 0.5, shape[2], axis=1),
    "columns hidden": lambda rng, shape: rng.random((1, shape[2])) < 0.5,
    "heads hidden": lambda rng, shape: np.arange(shape[0])[:, None, None] % 2 == 0,
    "diagonal": lambda rng, shape: np.eye(*shape[1:], dtype=bool),
    "coarse": lambda rng, shape: np.kron(rng.random((shape[0], 3, 4)) < 0.4, np.ones((2, 2), bool))[
        :, : shape[1], : shape[2]
    ],
    "few of each head": lambda rng, shape: rng.random(shape) < 0.1,
    "half of each head": lambda rng, shape: rng.random(shape) < 0.5,
}


def made(target: tuple[int, str], chain: list[Modifier], **changes: Any) -> tuple[problem.Call, Any, Any]:
    """A call of 2 query heads for each of 2 key heads, lengths that end within tiles and blocks."""
    case = replace(Case("sparse", target[1], batch=(1,), heads_q=4, seq_q=85, seq_k=103, dlse=True), **changes)
    arrays = case.make()
    options = {**arrays["options"], "modifiers": [*arrays["options"]["modifiers"], *chain]}
    call = problem.describe(arrays["q"], arrays["k"], arrays["v"], **options)
    return call, arrays["dout"], arrays["dlse"]


# ---- what is known of granules -----------------------------------------------------------------------------------------
def granules(ids: np.ndarray) -> list[list[int]]:
    """Smallest and largest id of each."""
    parts = np.split(ids, range(GRANULE, ids.size, GRANULE)) if ids.size else []
    return [[int(part.min()), int(part.max())] for part in parts]


@pytest.mark.parametrize("seq", [1, GRANULE - 1, GRANULE, GRANULE + 1, 5 * GRANULE + 3])
@pytest.mark.parametrize("lead", [(), (1,), (3,)], ids=str)
def test_granules_bound_their_ids(lead: tuple[int, ...], seq: int) -> None:
    """Of each batch entry; ids lie together, far apart, or are the same for all entries."""
    rng, seen = np.random.default_rng(seq), {}
    of_q = rng.integers(-(1 << 31), 1 << 31, (*lead, 2 * seq)).astype(np.int32)[..., ::2]
    of_k = rng.integers(-(1 << 31), 1 << 31, (70,)).astype(np.int32)
    arrays = Case("granules", "float16", batch=(3,), heads_q=2, heads_k=1, seq_q=seq, seq_k=70).make()
    q, k, v = (arrays[name] for name in "qkv")
    call = problem.describe(q, k, v, modifiers=[Documents(of_q, of_k)])
    forward(call, 80, watch=lambda found: seen.update({n: x.copy() for n, x in found.items() if "bounds" in n}))
    for side, ids in (("q", of_q), ("k", of_k)):
        found = seen[f"document_bounds_{side}"].view(np.int32).reshape(3, -1, 2)
        for own, entry in zip(found, np.broadcast_to(ids, (3, ids.shape[-1])), strict=True):
            assert own.tolist() == granules(entry)


@pytest.mark.parametrize("seq", [(0, 40), (40, 0)], ids=str)
def test_a_side_without_granules(seq: tuple[int, int]) -> None:
    ids = [np.zeros(n, np.int32) for n in seq]
    arrays = Case("none", "float16", batch=(1,), seq_q=seq[0], seq_k=seq[1]).make()
    call = problem.describe(*(arrays[name] for name in "qkv"), modifiers=[Documents(*ids)])
    check_call(call, arrays["dout"], None, 80, (0,))


# ---- patterns ----------------------------------------------------------------------------------------------------------
@with_hopper
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, target: tuple[int, str]) -> None:
    """Each under three seeds of the schedule, and under the other three with a causal mask."""
    blocks = PATTERNS[pattern](np.random.default_rng(0), (4, 6, 7))
    for causal, seeds in ((False, (0, 1, 2)), (True, (3, 4, 5))):
        check_call(*made(target, [BlockMask(blocks, 16)], causal=causal), target[0], seeds)


@targets
@pytest.mark.parametrize("size", [(32, 32), (64, 16), (16, 64), (24, 40), (5, 9), (1, 1)], ids=str)
def test_sizes_of_blocks(size: tuple[int, int], target: tuple[int, str]) -> None:
    blocks = np.random.default_rng(1).random((4, -(-85 // size[0]), -(-103 // size[1]))) < 0.3
    for seed, window in enumerate((None, (20, 30), (0, 0), None, (None, 3), (60, None))):
        check_call(*made(target, [BlockMask(blocks, size)], window=window), target[0], (seed,))


@with_hopper
@pytest.mark.parametrize("lengths", [(32, 32, 39), (1, 64, 38), (103,), (33,) * 4, (7,) * 15, (0, 96, 7)], ids=str)
def test_packed_documents(lengths: tuple[int, ...], target: tuple[int, str]) -> None:
    """The queries are the last ones of the same documents, as in a continued sequence."""
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32) - 3, lengths)[:103]
    ids = np.concatenate([ids, np.full(103 - ids.size, 99, np.int32)])
    for seed, causal in enumerate((True, False, True, False, True, False)):
        check_call(*made(target, [Documents(ids[-85:], ids)], causal=causal), target[0], (seed,))


@with_hopper
def test_documents_that_meet_nowhere(target: tuple[int, str]) -> None:
    for seed, (q, k) in enumerate(((0, 1), (1, 0), (-(1 << 31), (1 << 31) - 1), (5, 5), (7, 7), (3, -3))):
        chain = [Documents(np.full(85, q, np.int32), np.full(103, k, np.int32))]
        call, dout, dlse = made(target, chain)
        out, lse = forward(call, target[0], seed)
        assert (out == 0).all() == np.isneginf(lse).all() == (q != k)
        check_call(call, dout, dlse, target[0], (seed,))


@with_hopper
def test_documents_with_blocks_lengths_and_a_mask(target: tuple[int, str]) -> None:
    rng = np.random.default_rng(2)
    ids = np.sort(rng.integers(0, 3, (2, 103)).astype(np.int32), axis=-1)
    chain = [
        Documents(ids[:, :85], ids),
        BlockMask(rng.random((2, 1, 6, 7)) < 0.7, 16),
        KeyLengths(np.array([103, 50], np.int32)),
    ]
    changes = {"batch": (2,), "causal": "top_left", "mask": "hqk", "bias": "b1qk", "softcap": 2.0, "alibi": "h"}
    check_call(*made(target, chain, **changes), target[0])


@with_hopper
def test_in_turns(target: tuple[int, str]) -> None:
    """Every tile of keys has its turn; hidden ones are visited and change nothing, or by wgmma are passed over."""
    ids = np.arange(103, dtype=np.int32) // 40
    chain = [BlockMask(PATTERNS["coarse"](np.random.default_rng(0), (4, 6, 7)), 16), Documents(ids[-85:], ids)]
    for causal, seeds in ((False, (0, 1, 2)), (True, (3, 4, 5))):
        check_call(*made(target, chain, causal=causal), target[0], seeds, deterministic=True)


def test_wide_values_with_many_modifiers_are_cut_into_chunks() -> None:
    case = Case("chunks", "bfloat16", **OPTIONS["sparse-everything"], head_dim=24, head_dim_v=200)
    call, *_ = case.call()
    config = mma.forward(call.problem, 163 * 1024, True)
    assert config.chunk < config.head_dim_v <= mma.MAX_CHUNK
    expectation = kernels.Expectation(call)
    for seed in kernels.SEEDS:
        expectation.check_forward(*forward(call, 80, seed))


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("kind", ["blocks", "documents"])
def test_every_kind_of_mma_tile(mma_tile: Any, kind: str, name: str) -> None:  # noqa: F811
    mma_tile(*TILES[name])
    options = {"blocks": "bhqk"} if kind == "blocks" else {"documents": "packed", "causal": True}
    for seed, (seq_q, seq_k) in enumerate(((33, 97), (96, 31), (65, 65), (1, 100), (70, 1), (64, 128))):
        sizes = {"seq_q": seq_q, "seq_k": seq_k, "heads_q": 4, "head_dim": 32}
        check(Case(kind, "float16", **sizes, **options), 80, (seed,))


@pytest.mark.parametrize(("name_f", "name_b"), list(zip(FORWARD, BACKWARD, strict=True)))
@pytest.mark.parametrize("kind", ["blocks", "documents"])
def test_every_kind_of_simt_tile(simt_tile: Any, kind: str, name_f: str, name_b: str) -> None:  # noqa: F811
    simt_tile(name_f, name_b)
    options = {"blocks": "bhqk"} if kind == "blocks" else {"documents": "packed", "causal": True}
    for seed, (seq_q, seq_k) in enumerate(((33, 97), (96, 31), (65, 65), (1, 100), (70, 1), (64, 128))):
        check(Case(kind, "float32", seq_q=seq_q, seq_k=seq_k, heads_q=4, **options), 80, (seed,))


@pytest.mark.parametrize("target", TARGETS[1:3] + TARGETS[4:5], ids=target_id)
def test_without_undefined_behaviour(target: tuple[int, str]) -> None:
    blocks = PATTERNS["half of each head"](np.random.default_rng(0), (4, 6, 7))
    ids = np.arange(103, dtype=np.int32) // 40
    chain = [BlockMask(blocks, 16), Documents(ids[-85:], ids)]
    check_call(*made(target, chain), target[0], (0, 4), sanitize=True)


# ---- skipped, not only hidden ------------------------------------------------------------------------------------------
def visiting_all(variant: Variant) -> str:
    """The kernel that looks at every tile."""
    text = source.build(variant)
    assert "kHidesTiles = true" in text
    return text.replace("kHidesTiles = true", "kHidesTiles = false")


def sparse_chain(kind: str) -> list[Modifier]:
    """Keys 32 to 63 are seen by queries 32 to 63 alone, and these see other keys only where blocks let them."""
    if kind == "documents":
        ids = np.arange(128, dtype=np.int32) // 32
        return [Documents(ids, ids)]
    return [BlockMask(np.array([[1, 0, 0, 1], [0, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0]], bool), 32)]


@targets
@pytest.mark.parametrize("kind", ["documents", "blocks"])
@pytest.mark.parametrize("text", [source.build, visiting_all], ids=["skipping", "visiting all"])
def test_what_is_hidden_is_not_read(kind: str, target: tuple[int, str], text: Callable[[Variant], str]) -> None:
    """NaN in keys and values reaches the queries that see them and no others, in both directions.

    A kernel that computes hidden tiles multiplies it by 0, which shows.
    """
    arch, dtype = target
    arrays = Case("hidden", dtype, batch=(1,), seq_q=128, seq_k=128).make()
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    clean = problem.describe(q, k.copy(), v.copy(), modifiers=sparse_chain(kind))
    k[..., 32:64, :] = v[..., 32:64, :] = np.nan
    dirty = problem.describe(q, k, v, modifiers=sparse_chain(kind))
    rest = np.r_[0:32, 64:128]
    found = []
    for seed in range(6) if text is source.build else (0,):
        out, lse = forward(clean, arch, seed)
        want = {"out": out, "lse": lse, **backward(clean, out, lse, dout, None, arch, seed)._asdict()}
        dirty_out, dirty_lse = forward(dirty, arch, seed, text=text)
        got = {"out": dirty_out, "lse": dirty_lse}
        got |= backward(dirty, out, lse, dout, None, arch, seed, text=text)._asdict()
        assert np.isnan(got["out"][..., 32:64, :].astype(np.float64)).all()
        for name, x in got.items():
            parts = (y[..., rest] if name == "lse" else y[..., rest, :] for y in (x, want[name]))
            found.append(all_close(*parts))
    if text is source.build:
        assert all(found)
    else:
        assert not all(found)


@pytest.mark.parametrize("kind", ["documents", "blocks"])
def test_hopper_does_not_read_what_is_hidden(kind: str) -> None:
    """The same of the forward by wgmma, whose tiles have 128 queries; many blocks of keys, by one block and by several."""
    arrays = Case("hidden", "bfloat16", batch=(1,), heads_q=1, heads_k=1, seq_q=512, seq_k=2560).make()
    q, k, v = (arrays[name] for name in "qkv")
    ids_q, ids_k = (np.arange(n, dtype=np.int32) // size for n, size in ((512, 128), (2560, 640)))
    chain = [Documents(ids_q, ids_k)] if kind == "documents" else [BlockMask(np.eye(4, dtype=bool), (128, 640))]
    expectation = kernels.Expectation(problem.describe(q, k.copy(), v.copy(), modifiers=chain))
    k[..., 640:1280, :] = v[..., 640:1280, :] = np.nan
    dirty = problem.describe(q, k, v, modifiers=chain)
    for seed, blocks in enumerate((1, 2, 3, 4, 132, 1)):
        out, lse = forward(dirty, hopper(blocks), seed)
        assert np.isnan(out[..., 128:256, :].astype(np.float64)).all()
        out[..., 128:256, :], lse[..., 128:256] = expectation.out[..., 128:256, :], expectation.lse[..., 128:256]
        expectation.check_forward(out, lse)


# ---- the backward by wgmma ---------------------------------------------------------------------------------------------
#: head sizes of its two schedules
SCHEDULES = {"paired": 16, "split": 136}
schedules = pytest.mark.parametrize("schedule", SCHEDULES)
#: tiles of 64 queries that see tiles of 128 or 64 keys: gaps of more than a warp looks at together, and a tile nobody sees
TILES_SEEN = np.zeros((2, 36, 4), bool)
TILES_SEEN[0, [0, 1, 3, 32, 35], 0] = TILES_SEEN[1, [0, 33, 35], 0] = TILES_SEEN[1, 5:15:3, 2] = True
TILES_SEEN[0, [2, 4, 35], 2] = TILES_SEEN[1, 33, 3] = TILES_SEEN[0, 1, 3] = True


def long_call(schedule: str, **options: Any) -> tuple[problem.Call, np.ndarray, np.ndarray]:
    """Many tiles of queries of two heads that share their keys; the last tiles end early."""
    keys = 128 if schedule == "paired" else 64
    case = Case("long", "bfloat16", batch=(), heads_q=2, heads_k=1, seq_q=36 * 64 - 7, seq_k=4 * keys - 9, dlse=True)
    arrays = replace(case, head_dim=SCHEDULES[schedule]).make()
    call = problem.describe(*(arrays[n] for n in "qkv"), modifiers=[BlockMask(TILES_SEEN, (64, keys))], **options)
    return call, arrays["dout"], arrays["dlse"]


@schedules
@pytest.mark.parametrize("causal", [False, "top_left"], ids=["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in turns"])
def test_hopper_passes_over_long_gaps(schedule: str, causal: bool, deterministic: bool) -> None:
    """In turns three blocks run at a time, so that whoever does not wait adds out of turn."""
    call, dout, dlse = long_call(schedule, causal=causal)
    out, lse = forward(call, 90, 0)
    expectation, found = Expectation(call, dout, dlse), set()
    for seed in range(3):
        options = {"deterministic": deterministic, "residents": 3 if deterministic else 1}
        gradients = backward(call, out, lse, dout, dlse, 90, seed, requested="wgmma", **options)
        expectation.check_backward(gradients)
        keys = 128 if schedule == "paired" else 64
        assert not any(x[:, keys : 2 * keys].any() for x in (gradients.dk, gradients.dv))
        found.add(b"".join(x.tobytes() for x in gradients))
    assert not deterministic or len(found) == 1


@schedules
def test_hopper_does_not_read_what_is_hidden_backward(schedule: str) -> None:
    """NaN in a tile of keys, and in one of queries, reaches what sees them and nothing else, with turns and without."""
    blocks = np.array([[1, 0], [1, 1], [0, 1], [1, 0]], bool)
    case = Case("hidden", "bfloat16", batch=(), heads_q=1, heads_k=1, seq_q=256, seq_k=256)
    arrays = replace(case, head_dim=SCHEDULES[schedule]).make()
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    chain = [BlockMask(blocks, (64, 128))]
    clean = problem.describe(q, k.copy(), v.copy(), modifiers=chain)
    out, lse = forward(clean, 90, 0)
    want = backward(clean, out, lse, dout, None, 90, 0, requested="wgmma")
    k[:, 128:] = v[:, 128:] = np.nan
    dirty = problem.describe(q, k, v, modifiers=chain)
    for seed, deterministic in product(range(3), (False, True)):
        got = backward(dirty, out, lse, dout, None, 90, seed, requested="wgmma", deterministic=deterministic)
        dq = got.dq.astype(np.float64)
        assert np.isnan(dq[:, 64:192]).all()
        assert all_close(dq[:, [*range(64), *range(192, 256)]], want.dq[:, [*range(64), *range(192, 256)]])
        assert all(all_close(x[:, :128], y[:, :128]) for x, y in ((got.dk, want.dk), (got.dv, want.dv)))


#: schedule, what is wrong, text and what takes its place
HOPPER_BUGS = [
    ("paired", "a step too far is found", "return index + __ffs(int(rest)) - 1;", "return index + __ffs(int(rest));"),
    ("paired", "all lanes look at one step", "const int own = index + int(threadIdx.x) % 32;", "const int own = index;"),
    ("paired", "what was seen is taken for what comes", "      index = first + 32;\n", "      index = first + 33;\n"),
    ("paired", "every tile is in the first head", "head_tiles += heads * (p.rows_padded / Config::kBlockQ);\n    tile +=", "tile +="),
    ("paired", "the step in the other slot is told", "channels.tell(cursor.slot,", "channels.tell(cursor.slot ^ 1,"),
    ("paired", "the last step is not told", "walk.ends()}); });", "0}); });"),
    ("paired", "nobody is told that there is no step", "      mbarrier_arrive(cursor.full(channels.queries));\n", ""),
    ("paired", "what is told is a step", "none.tile = -1;", "none.tile = 0;"),
    ("paired", "a step is told while another is read", "  cursor.wait_empty(channels.queries);\n  if (leads) {", "  if (leads) {"),
    ("paired", "dQ of a step is added to that of the next",
     "before = at.step(shared.channels, slot).number();", "before = at.step(shared.channels, slot ^ 1).number();"),
    ("paired", "every tile is open", "return kPassesOver ? channels.heard(slot).open >> part & 1", "return kPassesOver ? true"),
    ("paired", "all wait for the tile before, though it is hidden", "if (lookout.marks(index) >> kParts & 1) return own_tile();",
     "return own_tile();"),
    ("paired", "all wait for the first tile", "return own_tile() - hidden;", "return first;"),
    ("paired", "the turn of another step", "if (threadIdx.x % 32 == 0) act(walk.step(), turn);", "if (threadIdx.x % 32 == 0) act(walk.step(), own);"),
    ("split", "the step before is told again", "rest = at.is_last(shared.channels, cursor.slot) ? 1 : 2;", "rest = at.is_last(shared.channels, cursor.slot ^ 1) ? 1 : 2;"),
]  # fmt: skip


@pytest.mark.parametrize("bug", HOPPER_BUGS, ids=lambda bug: f"{bug[0]}-{bug[1]}".replace(" ", "_"))
def test_bug_of_hopper_is_noticed(bug: tuple[str, str, str, str]) -> None:
    schedule, description, old, new = bug
    call, dout, dlse = long_call(schedule, causal="top_left")
    out, lse = forward(call, 90, 0)
    expectation = Expectation(call, dout, dlse)

    def text(variant: Variant) -> str:
        whole = source.build(variant)
        # Once at least: a text that is nowhere is no bug.
        return (
            mutate(whole, old, new, max(1, whole.count(old))) if variant.kernel.startswith("backward_wgmma") else whole
        )

    for seed, deterministic in product(range(6), (True, False)):
        options = {"requested": "wgmma", "deterministic": deterministic, "residents": 3}
        try:
            expectation.check_backward(backward(call, out, lse, dout, dlse, 90, seed, text=text, **options))
        except (AssertionError, EmulatorError):
            return
    pytest.fail(f"nobody noticed that {description}")


def all_close(x: np.ndarray, y: np.ndarray) -> bool:
    """Equal up to the order of a sum."""
    return np.allclose(x.astype(np.float64), y.astype(np.float64), rtol=1e-2, atol=1e-2)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the emulator changed between threads, by kernel: its work."""
    counts: Counter[str] = Counter()
    launch = EmulatedKernel.launch

    def counted(self: EmulatedKernel, *arguments: Any, **options: Any) -> None:
        launch(self, *arguments, **options)
        counts[self.name.split("_")[1]] += self.switches()

    monkeypatch.setattr(EmulatedKernel, "launch", counted)
    return counts


@targets
def test_work_falls_with_the_visible_area(target: tuple[int, str], work: Counter[str]) -> None:
    amounts = []
    for visible in (16, 8, 4, 1):
        blocks = np.zeros((4, 4), bool)
        blocks.ravel()[np.random.default_rng(0).permutation(16)[:visible]] = True
        arrays = Case("work", target[1], batch=(), heads_q=1, heads_k=1, seq_q=128, seq_k=128).make()
        call = problem.describe(arrays["q"], arrays["k"], arrays["v"], modifiers=[BlockMask(blocks, 32)])
        work.clear()
        out, lse = forward(call, target[0])
        forward_work = work["forward"]
        backward(call, out, lse, arrays["dout"], None, target[0])
        amounts.append((forward_work, work["backward"]))
    full, half, quarter, single = amounts
    for direction in (0, 1):
        assert half[direction] < 0.8 * full[direction]
        assert quarter[direction] < 0.6 * full[direction]
        assert single[direction] < 0.5 * full[direction]


@targets
def test_gaps_cost_nothing(target: tuple[int, str], work: Counter[str]) -> None:
    """Two visible tiles take the same time side by side and with hidden ones between them."""
    arrays = Case("work", target[1], batch=(), heads_q=2, heads_k=1, seq_q=128, seq_k=128).make()
    amounts = {}
    for name, row in {"beside": (1, 1, 0, 0), "apart": (1, 0, 0, 1), "all": (1, 1, 1, 1)}.items():
        for direction, blocks in (("forward", np.tile(row, (4, 1))), ("backward", np.tile(row, (4, 1)).T)):
            call = problem.describe(arrays["q"], arrays["k"], arrays["v"], modifiers=[BlockMask(blocks == 1, 32)])
            work.clear()
            out, lse = forward(call, target[0])
            backward(call, out, lse, arrays["dout"], None, target[0])
            amounts[name, direction] = work[direction]
    for direction in ("forward", "backward"):
        beside, apart, full = (amounts[name, direction] for name in ("beside", "apart", "all"))
        assert abs(apart - beside) < 0.02 * beside
        assert full > 1.3 * beside


@targets
def test_other_variants_are_compiled_without_it(target: tuple[int, str]) -> None:
    """Without a modifier that knows tiles, no glance is in the text that the generator writes."""
    for options in ({}, {"mask": "hqk", "causal": True}):
        call, *_ = Case("plain", target[1], **options).call()
        variants: list[Variant] = []
        forward(call, target[0], text=lambda variant, v=variants: (v.append(variant), source.build(variant))[1])
        for variant, word in product(variants, ("kHidesTiles = false", "kClearsTiles = false")):
            assert word in source.build(variant)
    assert range(6) == kernels.SEEDS
