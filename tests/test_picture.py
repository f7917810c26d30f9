"""Pictures: what is drawn where, that it is true, and what is refused."""

from __future__ import annotations

import doctest
import inspect
import io
import sys
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, ShapeError, UnsupportedError, inspection, picture, problem, reference
from tests.cases import OPTIONS, Case
from tests.test_arrays import Namespaced

pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")


def results(heads: int = 2) -> tuple[Any, Any]:
    """Weights of some rows and sums of columns of one batch entry."""
    made = Case("picture", batch=(), heads_q=heads, heads_k=1, causal=True).make()
    weights = cuflash.attention_weights(made["q"], made["k"], [0, 5, 32], causal=True)
    return weights, cuflash.attention_statistics(made["q"], made["k"], made["v"], causal=True).column_sums


def visible(figure: Any) -> list[Any]:
    """Axes that are drawn, without scales of colours."""
    return [axes for axes in figure.axes if axes.get_visible() and axes.get_label() != "<colorbar>"]


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_every_head_has_its_weights_and_sums(heads: int) -> None:
    weights, sums = results(heads)
    figure = cuflash.draw_attention(weights, sums, rows=[0, 5, 32], title="a title")
    images = [axes for axes in visible(figure) if axes.images]
    bars = [axes for axes in visible(figure) if axes.patches]
    assert len(images) == len(bars) == heads
    for head, axes in enumerate(images):
        drawn = axes.images[0].get_array()
        np.testing.assert_array_equal(drawn.filled(0), weights[head])
        assert (drawn.mask == (weights[head] == 0)).all(), "what is exactly 0 has no colour"
        assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "5", "32"]
    titles = {axes.get_title(): axes for axes in images}
    assert set(titles) == {f"head {head}" for head in range(heads)}
    for head, axes in enumerate(bars):
        np.testing.assert_allclose([bar.get_height() for bar in axes.patches], sums[head], rtol=1e-6)
    assert figure.get_suptitle() == "a title"
    figure.savefig(file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")


def test_one_of_both_without_heads_and_from_another_library() -> None:
    weights, sums = results()
    assert len(visible(cuflash.draw_attention(weights[0]))) == 1
    assert len(visible(cuflash.draw_attention(Namespaced(weights)))) == 2
    figure = cuflash.draw_attention(column_sums=Namespaced(sums[1]))
    (axes,) = visible(figure)
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], sums[1], rtol=1e-6)


def test_weights_that_are_all_0() -> None:
    figure = cuflash.draw_attention(np.zeros((2, 3, 4), np.float32))
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize(
    ("arguments", "words", "error"),
    [
        ({}, "weights and column_sums are both None", ArgumentError),
        (
            {"weights": np.zeros((2, 2, 3, 4))},
            "weights has shape (2, 2, 3, 4): must be (heads, rows, seq_k)",
            ShapeError,
        ),
        ({"column_sums": np.zeros(())}, "column_sums has shape (): must be (heads, seq_k)", ShapeError),
        ({"weights": np.zeros((2, 3, 4)), "column_sums": np.zeros((1, 4))}, "must be (2, 4)", ShapeError),
        ({"weights": np.zeros((2, 3, 4)), "rows": [1]}, "rows has 1 positions: weights has 3 rows", ArgumentError),
        ({"column_sums": np.zeros((2, 4)), "rows": [1]}, "weights has 0 rows", ArgumentError),
        ({"weights": [[1.0]]}, "weights", ArgumentError),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], words: str, error: type[Exception]) -> None:
    with pytest.raises(ArgumentError) as caught:
        cuflash.draw_attention(**arguments)
    assert type(caught.value) is error
    assert words in str(caught.value)


# ---- tiles -----------------------------------------------------------------------------------------------------------
def states_of(figure: Any) -> Any:
    """The states of tiles that a picture shows."""
    (axes,) = visible(figure)
    return axes.images[0].get_array()


@pytest.mark.parametrize("tile", [(8, 16), (33, 45), (64, 8)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_tiles_are_what_their_pairs_are(name: str, tile: tuple[int, int]) -> None:
    """A skipped tile has no visible pair, an open one no hidden one and no edge; intervals alone are told exactly."""
    case = Case(name, **OPTIONS[name])
    made = case.make()
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    seen = reference.visible(call)
    exact = all(m.kind != "mask" for m in call.problem.modifiers)
    block_q, block_k = tile
    batch = call.problem.batch
    for entry in {0, call.problem.batch_size - 1}:
        for head in {0, call.problem.heads_q - 1}:
            at = (*np.unravel_index(entry, batch), head)
            states = inspection.tile_states(call, at, block_q, block_k)
            assert states.shape == (-(-call.problem.seq_q // block_q), -(-call.problem.seq_k // block_k))
            for (i, j), state in np.ndenumerate(states):
                pairs = seen[at][i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
                full = pairs.shape == tile and pairs.all()
                assert state != inspection.SKIPPED or not pairs.any()
                assert state != inspection.OPEN or full
                if exact:
                    assert state == (
                        inspection.SKIPPED if not pairs.any() else inspection.OPEN if full else inspection.TESTED
                    )


def test_tiles_are_drawn_and_counted() -> None:
    q, ids = np.zeros((2, 1, 96, 8), np.float32), np.repeat([[0, 1, 2], [5, 5, 5]], 32, axis=1)
    options = {"causal": True, "modifiers": (cuflash.Documents(ids, ids),)}
    first = cuflash.draw_tiles(q, q, tile=(16, 32), **options, title="two entries")
    np.testing.assert_array_equal(states_of(first), [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]])
    second = cuflash.draw_tiles(q, q, tile=(16, 32), entry=1, **options)
    np.testing.assert_array_equal(states_of(second), [[1, 0, 0], [1, 0, 0], [2, 1, 0], [2, 1, 0], [2, 2, 1], [2, 2, 1]])
    (axes,) = visible(second)
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words == ["skipped: 6", "pairs tested: 6", "open: 6"]
    assert axes.get_title() == "tiles of 16 queries x 32 keys"
    assert axes.images[0].get_extent() == [0, 96, 96, 0]
    (axes,) = visible(cuflash.draw_tiles(q[:1, :, :40], q[:1], tile=(16, 64)))
    assert axes.images[0].get_extent() == [0, 128, 48, 0]
    assert first.get_suptitle() == "two entries"
    second.savefig(file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")


def test_tiles_without_a_size_are_those_of_the_backend() -> None:
    q = np.zeros((1, 2000, 8), np.float32)
    (axes,) = visible(cuflash.draw_tiles(q, q, causal=True))
    from cuflash import numpy_backend

    sizes = numpy_backend.tile_sizes(problem.describe(q, q, q, causal=True).problem, None, None)[:2]
    assert axes.get_title() == f"tiles of {sizes[0]} queries x {sizes[1]} keys"


# ---- the recurrence --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", [1, 7, 45, 100])
@pytest.mark.parametrize("name", ["plain", "groups-window-bias", "everything", "documents-mixed"])
def test_the_recurrence_leads_to_the_log_sum_exp(name: str, block: int) -> None:
    """Sums of blocks, brought to each new base by the factors that are drawn, and the last maximum."""
    made = Case(name, **OPTIONS[name]).make()
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    lse = reference.forward(call)[1]
    for row in (0, 17, -1):
        figure = cuflash.draw_recurrence(made["q"], made["k"], row, block=block, entry=1, head=1, **made["options"])
        upper, lower = visible(figure)
        drawn = dict(zip(*upper.lines[0].get_data(), strict=True))
        m, edges, _ = upper.patches[0].get_data()
        factors = [bar.get_height() for bar in lower.patches]
        assert list(edges) == [min(i * block, 45) for i in range(len(m) + 1)]
        total, before = 0.0, -np.inf
        for i, (now, factor) in enumerate(zip(m, factors, strict=True)):
            if np.isnan(now):  # nothing is seen so far
                assert factor == 0
                continue
            assert factor == pytest.approx(np.exp(before - now))
            part = [s for key, s in drawn.items() if edges[i] <= key < edges[i + 1]]
            total, before = total * factor + np.exp(np.array(part) - now).sum(), now
        want = lse[1, 1, row]
        assert (before + np.log(total) if total else -np.inf) == pytest.approx(want, abs=1e-12)


def test_the_recurrence_is_written() -> None:
    q, k = np.zeros((1, 3, 8), np.float32), np.zeros((1, 20, 8), np.float32)
    figure = cuflash.draw_recurrence(q, k, -1, title="a row", mask=np.zeros(20, bool))  # which sees nothing
    assert figure.get_suptitle() == "a row"
    figure.savefig(file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")


# ---- costs -----------------------------------------------------------------------------------------------------------
def test_costs_are_lines_by_system_and_direction() -> None:
    rows = [
        {"system": system, "direction": direction, "seq_k": n, "ms": n * factor, "peak_bytes": n * factor << 20}
        for system, factor in (("cuflash", 1), ("plain", 3))
        for direction in ("forward", "step")
        for n in (1024, 256, 512)
    ]
    lost = {"system": "plain", "direction": "forward", "seq_k": 4096, "ms": None, "failure": "MemoryError"}
    figure = cuflash.draw_costs([*rows, lost], title="costs")
    memory, times = visible(figure)
    for axes in (memory, times):
        drawn = {line.get_label(): [list(x) for x in line.get_data()] for line in axes.lines}
        assert drawn == {
            f"{name}, {direction}": [[256, 512, 1024], [256 * factor, 512 * factor, 1024 * factor]]
            for name, factor in (("cuflash", 1), ("plain attention", 3))
            for direction in ("forward", "step")
        }
        assert axes.get_xscale() == axes.get_yscale() == "log"
    assert (memory.get_ylabel(), times.get_ylabel()) == ("memory in MiB", "time in ms")
    figure.savefig(file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="no row with a time"):
        cuflash.draw_costs([lost])


# ---- all of them -----------------------------------------------------------------------------------------------------
DRAWN = [cuflash.draw_tiles, lambda q, k, **options: cuflash.draw_recurrence(q, k, 0, **options)]


@pytest.mark.parametrize("draw", DRAWN, ids=["tiles", "recurrence"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entry": 2}, "entry=2: must be an integer from 0 to 1"),
        ({"entry": -1}, "entry=-1"),
        ({"head": 4}, "head=4: must be an integer from 0 to 3"),
        ({"head": 1.0}, "head=1.0"),
        ({"softcap": -1}, "softcap=-1"),
        ({"mask": np.ones((3, 3), bool)}, "mask has shape (3, 3)"),
        ({"layout": "sbhd"}, "layout='sbhd'"),
    ],
    ids=str,
)
def test_bad_calls(draw: Any, changes: dict[str, Any], words: str) -> None:
    q, k = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 2, 7, 8), np.float32)
    with pytest.raises(ArgumentError) as caught:
        draw(q, k, **changes)
    assert words in str(caught.value)


def test_bad_tiles_and_rows() -> None:
    q = np.zeros((1, 5, 8), np.float32)
    for tile in (3, (0, 4), (4, 2.0), (1, 2, 3), "ab"):
        with pytest.raises(ArgumentError, match="must be queries and keys of a tile"):
            cuflash.draw_tiles(q, q, tile=tile)
    for block in (0, "x"):
        with pytest.raises(ArgumentError, match="must be queries and keys of a tile"):
            cuflash.draw_recurrence(q, q, 0, block=block)
    for row in (5, -6, 1.0):
        with pytest.raises(ArgumentError, match="rows"):
            cuflash.draw_recurrence(q, q, row)


@pytest.mark.parametrize("call", [cuflash.draw_tiles, cuflash.draw_recurrence])
def test_options_are_those_of_attention(call: Any) -> None:
    model, own = (inspect.signature(f).parameters for f in (cuflash.attention_weights, call))
    assert all(own[n] == model[n] for n in model if n != "rows")


@pytest.mark.parametrize(
    "call", [cuflash.draw_attention, cuflash.draw_tiles, cuflash.draw_recurrence, cuflash.draw_costs]
)
def test_every_parameter_is_documented(call: Any) -> None:
    text = inspect.getdoc(call) or ""
    listed = text.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    documented = {name for line in listed.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(inspect.signature(call).parameters) <= documented


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'cuflash\[plot\]'"):
        cuflash.draw_attention(np.zeros((1, 1, 1)))
    x = np.zeros((1, 2, 3))
    with pytest.raises(UnsupportedError, match="draw_tiles needs matplotlib"):
        cuflash.draw_tiles(x, x)
    with pytest.raises(UnsupportedError, match="draw_recurrence needs matplotlib"):
        cuflash.draw_recurrence(x, x, 0)
    with pytest.raises(UnsupportedError, match="draw_costs needs matplotlib"):
        cuflash.draw_costs([{"system": "a", "direction": "b", "seq_k": 1, "ms": 1.0, "peak_bytes": 1}])


def test_example_runs() -> None:
    assert doctest.testmod(picture).failed == 0
