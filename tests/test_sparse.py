"""Documents and block masks: what they hide, what they say of whole tiles, and which tiles are visited for it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, BlockMask, Documents, arrays, numpy_backend, problem, reference
from cuflash.modifiers import Tile
from cuflash.modifiers.blocks import POSITION_BITS, division

HEADS, SEQ_Q, SEQ_K = 4, 50, 70


def numbers(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def call(seq_q: int = SEQ_Q, seq_k: int = SEQ_K, batch: int = 2, **options: Any) -> problem.Call:
    q, k, v = numbers((batch, HEADS, seq_q, 3), (batch, 2, seq_k, 3), (batch, 2, seq_k, 2))
    return problem.describe(q, k, v, **options)


def documents(*shape: int, count: int = 3, seed: int = 0) -> np.ndarray:
    return np.sort(np.random.default_rng([seed, *shape]).integers(0, count, shape), axis=-1).astype(np.int32)


# ---- what is visible -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shapes", [((SEQ_Q,), (SEQ_K,)), ((2, SEQ_Q), (SEQ_K,)), ((2, 1), (1, SEQ_K))], ids=str)
def test_documents_see_their_own_keys(shapes: Any) -> None:
    ids_q, ids_k = (documents(*shape, seed=n) for n, shape in enumerate(shapes))
    seen = reference.visible(call(modifiers=[Documents(ids_q, ids_k)]))
    wide_q, wide_k = np.broadcast_to(ids_q, (2, SEQ_Q)), np.broadcast_to(ids_k, (2, SEQ_K))
    for b, i, j in np.ndindex(2, SEQ_Q, SEQ_K):
        assert (seen[b, :, i, j] == (wide_q[b, i] == wide_k[b, j])).all()
    assert seen.any()
    assert not seen.all()


@pytest.mark.parametrize("size", [16, (7, 33), (1, 1), (64, 200)], ids=str)
@pytest.mark.parametrize("letters", ["bhqk", "hqk", "qk", "b1qk", "q1", "h11"])
def test_blocks_see_blocks(letters: str, size: Any) -> None:
    size_q, size_k = (size, size) if isinstance(size, int) else size
    counts = {"b": 2, "h": HEADS, "q": -(-SEQ_Q // size_q), "k": -(-SEQ_K // size_k), "1": 1}
    blocks = np.random.default_rng(0).random([counts[letter] for letter in letters]) < 0.5
    seen = reference.visible(call(modifiers=[BlockMask(blocks, size)]))
    wide = np.broadcast_to(blocks, (2, HEADS, counts["q"], counts["k"]))
    for i, j in np.ndindex(SEQ_Q, SEQ_K):
        np.testing.assert_array_equal(seen[:, :, i, j], wide[:, :, i // size_q, j // size_k])


def test_both_hide_with_all_that_hides() -> None:
    """The visible set is the intersection of what each modifier lets through."""
    ids_q, ids_k, mask = documents(SEQ_Q), documents(SEQ_K), np.random.default_rng(1).random((SEQ_Q, SEQ_K)) < 0.8
    blocks = np.random.default_rng(2).random((HEADS, 4, 5)) < 0.6
    each: list[dict[str, Any]] = [
        {"causal": True},
        {"window": (40, 5)},
        {"mask": mask},
        {"modifiers": [Documents(ids_q, ids_k)]},
        {"modifiers": [BlockMask(blocks, 16)]},
    ]
    together = reference.visible(
        call(causal=True, window=(40, 5), mask=mask, modifiers=[BlockMask(blocks, 16), Documents(ids_q, ids_k)])
    )
    want = np.logical_and.reduce([reference.visible(call(**options)) for options in each])
    np.testing.assert_array_equal(together, want)
    assert want.any()


@pytest.mark.parametrize("which", ["documents", "blocks"])
def test_the_public_call_is_that_with_a_mask(which: str) -> None:
    q, k, v = numbers((2, HEADS, SEQ_Q, 8), (2, 2, SEQ_K, 8), (2, 2, SEQ_K, 8))
    if which == "documents":
        ids_q, ids_k = [0] * 20 + [5] * 30, [0] * 33 + [5] * 20 + [-1] * 17
        modifier: Any = Documents(ids_q, ids_k)
        mask = np.array(ids_q)[:, None] == ids_k
    else:
        blocks = np.random.default_rng(3).random((2, HEADS, 4, 5)) < 0.5
        modifier = BlockMask(blocks, 16)
        mask = np.kron(blocks, np.ones((16, 16), bool))[..., :SEQ_Q, :SEQ_K]
    out, lse, vjp = cuflash.attention_vjp(q, k, v, causal=True, modifiers=(modifier,), return_lse=True)
    want, want_lse, want_vjp = cuflash.attention_vjp(q, k, v, causal=True, mask=mask, return_lse=True)
    np.testing.assert_allclose(out, want, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, atol=1e-13)
    for got, expected in zip(vjp(out, lse), want_vjp(out, lse), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)
    assert repr(modifier) in ("Documents()", "BlockMask(size=(16, 16))")


# ---- what is said of whole tiles -------------------------------------------------------------------------------------
def sparse_calls() -> dict[str, problem.Call]:
    rng = np.random.default_rng(4)
    mixed = rng.integers(0, 3, SEQ_K).astype(np.int32)
    return {
        "packed": call(modifiers=[Documents(documents(2, SEQ_Q), documents(2, SEQ_K))]),
        "packed alike": call(modifiers=[Documents(documents(SEQ_Q), documents(SEQ_K))]),
        "mixed": call(modifiers=[Documents(documents(SEQ_Q), mixed)]),
        "one document": call(modifiers=[Documents(np.zeros(1, np.int32), np.zeros(SEQ_K, np.int32))]),
        "blocks": call(modifiers=[BlockMask(rng.random((4, 5)) < 0.4, 16)]),
        "blocks of heads": call(
            modifiers=[BlockMask(rng.random((2, HEADS, 8, 3)) < rng.choice([0, 0.4, 1], (8, 3)), (7, 33))]
        ),
        "rows of blocks": call(modifiers=[BlockMask(np.array([[True], [False], [False], [True]]), (16, 80))]),
    }


@pytest.mark.parametrize("name", sparse_calls())
def test_what_is_said_of_a_tile_is_true(name: str) -> None:
    """Hidden means that no pair is visible, clear that all are, and both are said."""
    given = sparse_calls()[name]
    (modifier,), said = given.problem.modifiers, set()
    for rows, columns in [(i, j) for i in range(0, SEQ_Q, 7) for j in range(0, SEQ_K, 9)]:
        for height, width in ((1, 1), (5, 8), (16, 16), (30, 40)):
            tile = Tile(
                given.problem,
                given.operands,
                slice(rows, min(rows + height, SEQ_Q)),
                slice(columns, min(columns + width, SEQ_K)),
            )
            seen = modifier.visible(tile)
            hidden, clear = modifier.tile_is_hidden(tile), modifier.tile_is_clear(tile)
            assert not (hidden and seen.any())
            assert not (clear and not seen.all())
            if (height, width) == (1, 1) and modifier.visible(tile).size == 1:
                assert hidden != clear
            said |= {word for word, is_so in (("hidden", hidden), ("clear", clear)) if is_so}
    assert said >= ({"clear"} if name == "one document" else {"hidden", "clear"})


def test_division_is_exact_for_every_position() -> None:
    rng, last = np.random.default_rng(0), (1 << POSITION_BITS) - 1
    sizes = {*range(1, 300), *(1 << n for n in range(31)), *((1 << n) - 1 for n in range(2, 31))}
    sizes |= {*((1 << n) + 1 for n in range(30)), *map(int, rng.integers(1, 1 << 30, 200))}
    for size in sizes:
        multiplier, shift = division(size)
        assert multiplier < 1 << 31
        quotients = {*map(int, rng.integers(0, last // size + 1, 20)), 1, last // size}
        for position in {n * size + d for n in quotients for d in (-1, 0, 1, size - 1)} | {0, last}:
            if 0 <= position <= last:
                assert position * multiplier >> shift == position // size, (size, position)


# ---- the NumPy backend -----------------------------------------------------------------------------------------------
def visited(given: problem.Call, block: int) -> int:
    (chunk,) = numpy_backend.chunks(given, block, block)
    return sum(1 for rows in numpy_backend.blocks(0, given.problem.seq_q, block) for _ in chunk.tiles(rows))


def looked_at(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[Tile]:
    """The tiles whose single pairs are tested from now on."""
    found: list[Tile] = []
    visible = kind.visible
    monkeypatch.setattr(kind, "visible", lambda self, tile: found.append(tile) or visible(self, tile))
    return found


def test_tiles_of_other_documents_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = looked_at(monkeypatch, Documents)
    ids = np.arange(64, dtype=np.int32) // 16
    assert visited(call(64, 64, 1, modifiers=[Documents(ids, ids)]), 8) == 16  # 4 documents of 2 x 2 tiles
    assert not looked  # within a document nothing is tested
    uneven = np.repeat(np.arange(3, dtype=np.int32), (20, 24, 20))
    assert visited(call(64, 64, 1, modifiers=[Documents(uneven, uneven)]), 8) == 9 + 16 + 9 - 2  # two are shared
    assert {(tile.rows.start, tile.columns.start) for tile in looked} > {(16, 16), (40, 40)}
    assert visited(call(64, 64, 1, causal=True, modifiers=[Documents(ids, ids)]), 8) == 12


def test_tiles_of_hidden_blocks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = looked_at(monkeypatch, BlockMask)
    blocks = np.random.default_rng(5).random((4, 4)) < 0.4
    assert visited(call(64, 64, 1, modifiers=[BlockMask(blocks, 16)]), 16) == blocks.sum()
    assert visited(call(64, 64, 1, modifiers=[BlockMask(blocks, 16)]), 8) == 4 * blocks.sum()
    assert not looked
    assert visited(call(64, 64, 1, modifiers=[BlockMask(np.zeros((1, 1), bool), 64)]), 8) == 0
    assert visited(call(64, 64, 1, modifiers=[BlockMask(blocks, 16)]), 32) == 4
    assert len(looked) == 4


def test_tiles_follow_what_is_visible() -> None:
    """Tiles are as high as blocks, and as wide as what is visible side by side: no further and no less."""
    rows, columns, heads = numpy_backend.tile_sizes(call(4096, 4096, 1).problem, None, None)
    for size, want in ((8, numpy_backend.TILE_LEAST), (100, 100), ((200, 16), rows), (4096, rows)):
        counts = [-(-4096 // n) for n in (size if isinstance(size, tuple) else (size, size))]
        given = call(4096, 4096, 1, modifiers=[BlockMask(np.ones(counts, bool), size)])
        assert numpy_backend.tile_sizes(given.problem, None, None) == (want, columns, heads)
    for visible, want in (
        ([0, 0, 0, 0, 0, 0, 0, 0], []),
        ([0, 1, 1, 0, 0, 0, 1, 0], [(64, 192), (384, 448)]),
        ([1, 0, 0, 0, 0, 0, 0, 1], [(0, 64), (448, 500)]),
        ([1, 1, 1, 1, 1, 1, 1, 1], [(0, 256), (256, 500)]),
    ):
        given = call(64, 500, 1, modifiers=[BlockMask(np.array([visible], bool), 64)])
        (chunk,) = numpy_backend.chunks(given, 64, 256)
        found = [(tile.columns.start, tile.columns.stop) for tile, _ in chunk.tiles(slice(0, 64))]
        assert found == want


def test_hidden_tiles_are_not_read() -> None:
    """NaN in the keys and values that one document sees, and in nothing else, stays there, in both directions."""
    q, k, v, g = numbers((1, 64, 4), (1, 64, 4), (1, 64, 4), (1, 64, 4))
    ids = np.arange(64, dtype=np.int32) // 16
    given = problem.describe(q, k.copy(), v.copy(), modifiers=[Documents(ids, ids)])
    out, lse = numpy_backend.forward(given, block_q=16, block_k=16)
    want = numpy_backend.backward(given, out, lse, g, block_q=16, block_k=16)
    k[:, 16:32] = v[:, 16:32] = np.nan
    dirty = problem.describe(q, k, v, modifiers=[Documents(ids, ids)])
    rest = np.r_[0:16, 32:64]
    np.testing.assert_array_equal(numpy_backend.forward(dirty, block_q=16, block_k=16)[0][:, rest], out[:, rest])
    found = numpy_backend.backward(dirty, out, lse, g, block_q=16, block_k=16)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_array_equal(x[:, rest], y[:, rest])


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64, np.uint64, ">i4"])
def test_ids_of_any_integer_dtype(dtype: Any) -> None:
    ids = np.arange(7).astype(dtype)
    (native,) = arrays.native_modifiers([Documents(ids, [0, 1])], arrays.HOST, "float32", 2)
    assert isinstance(native, Documents)
    assert native.ids_q.dtype == native.ids_k.dtype == np.int32
    assert native.ids_q.tolist() == list(range(7))


def test_sizes_of_blocks() -> None:
    for size, want in ((4, (4, 4)), (np.int64(4), (4, 4)), ([2, 3], (2, 3)), ((1 << 50, 1), (1 << 30, 1))):
        assert BlockMask(None, size).size == want
    assert BlockMask(np.ones((2, 2), bool), 4) == BlockMask(None, (4, 4))  # plans do not depend on the array
    for wrong in (None, 0, -1, 2.0, True, (1,), (1, 2, 3), (4, 0), (True, 4), "16", (4, 1.5)):
        with pytest.raises(ArgumentError, match=r"^size=.* of BlockMask: must be an integer of at least 1, or a pair"):
            BlockMask(np.ones((2, 2), bool), wrong)


def test_equal_sizes_of_zero() -> None:
    for seq_q, seq_k in ((0, 5), (5, 0)):
        q, k = np.ones((1, seq_q, 2)), np.ones((1, seq_k, 2))
        chain = (Documents(np.zeros(seq_q, int), np.zeros(seq_k, int)), BlockMask(np.ones((1, 1), bool), 4))
        if seq_q == 0:
            chain = (chain[0], BlockMask(np.ones((0, 2), bool), 4))
        out, vjp = cuflash.attention_vjp(q, k, k, modifiers=chain)
        assert (out == 0).all()
        assert vjp(out).dk.shape == k.shape


@pytest.mark.parametrize("kind", [Documents, BlockMask])
def test_every_parameter_is_documented(kind: Any) -> None:
    text = inspect.getdoc(kind) or ""
    for heading in ("Parameters", "Notes", "Examples"):
        assert f"\n{heading}\n{'-' * len(heading)}\n" in text, heading
    for name in inspect.signature(kind).parameters:
        assert f"\n{name}\n    " in text
