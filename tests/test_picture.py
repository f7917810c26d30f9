"""The picture of weights and received attention: what is drawn where, and what is refused."""

from __future__ import annotations

import doctest
import io
import sys
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, ShapeError, UnsupportedError, picture
from tests.cases import Case
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


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'cuflash\[plot\]'"):
        cuflash.draw_attention(np.zeros((1, 1, 1)))


def test_example_runs() -> None:
    assert doctest.testmod(picture).failed == 0
