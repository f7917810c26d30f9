"""Weights of chosen rows: those of the reference, for every option, in every kind of array."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, BlockMask, ShapeError, inspection, problem, reference
from tests.cases import DTYPES, OPTIONS, Case
from tests.test_arrays import Namespaced

ROWS = (0, 32, 7, -1, 7)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_of_the_reference(name: str, layout: str) -> None:
    made = Case(name, **(OPTIONS[name] | {"layout": layout})).make()
    got = cuflash.attention_weights(made["q"], made["k"], ROWS, **made["options"])
    want = reference.weights(problem.describe(made["q"], made["k"], made["v"], **made["options"]))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want[..., ROWS, :], atol=1e-6)
    sums = got.sum(axis=-1)
    assert (np.isclose(sums, 1, atol=1e-5) | (sums == 0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_times_values_are_the_output(dtype: str) -> None:
    made = Case("dtypes", dtype, heads_q=4, causal=True).make()
    got = cuflash.attention_weights(made["q"], made["k"], range(33), causal=True)
    assert got.dtype == ("float64" if dtype == "float64" else "float32")
    out = cuflash.attention(made["q"], made["k"], made["v"], causal=True).astype(np.float64)
    values = made["v"].astype(np.float64).repeat(2, axis=1)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(got @ values, out, atol=tolerance)


def test_one_query_and_single_blocks() -> None:
    """Operands whose axis of queries has length 1, or one entry for each query though they count blocks."""
    rng = np.random.default_rng(0)
    for seq_q in (1, 6):
        q, k = rng.standard_normal((2, seq_q, 3)), rng.standard_normal((2, 5, 3))
        for options in (
            {"mask": rng.random((seq_q, 5)) < 0.5, "bias": rng.standard_normal((1, 5))},
            {"modifiers": (BlockMask(rng.random((2, seq_q, 3)) < 0.5, (1, 2)),)},
            {"modifiers": (BlockMask(rng.random((2, 1, 1)) < 0.5, (8, 8)),)},
        ):
            got = cuflash.attention_weights(q, k, range(seq_q), **options)
            np.testing.assert_allclose(got, reference.weights(problem.describe(q, k, k, **options)), atol=1e-15)


def test_no_rows_and_other_sequences() -> None:
    made = Case("rows").make()
    assert cuflash.attention_weights(made["q"], made["k"], []).shape == (2, 2, 0, 45)
    want = cuflash.attention_weights(made["q"], made["k"], [3, 4, 5])
    for rows in (range(3, 6), np.array([3, 4, 5], np.uint8), (-30, -29, -28)):
        np.testing.assert_array_equal(cuflash.attention_weights(made["q"], made["k"], rows), want)


def test_arrays_of_another_library() -> None:
    made = Case("library").make()
    got = cuflash.attention_weights(Namespaced(made["q"]), Namespaced(made["k"]), [2])
    assert type(got) is Namespaced
    np.testing.assert_array_equal(got.array, cuflash.attention_weights(made["q"], made["k"], [2]))


@pytest.mark.parametrize(
    ("changes", "words", "error"),
    [
        ({"rows": 3}, ("rows=3", "sequence of integers", "[3]"), ArgumentError),
        ({"rows": [1.0]}, ("rows=[1.0]", "sequence of integers"), ArgumentError),
        ({"rows": [0, 33]}, ("rows contains 33", "-33 to 32"), ArgumentError),
        ({"rows": [-34]}, ("rows contains -34", "-33 to 32"), ArgumentError),
        ({"rows": slice(3)}, ("rows=slice(None, 3, None)", "sequence"), ArgumentError),
        ({"softcap": -1.0}, ("softcap=-1.0", "greater than 0"), ArgumentError),
        ({"mask": np.ones((5, 5), bool)}, ("mask has shape (5, 5)",), ShapeError),
        ({"k": np.ones((2, 2, 45, 15), np.float32)}, ("q and k must have the same head_dim",), ShapeError),
    ],
    ids=str,
)
def test_bad_arguments(changes: dict[str, Any], words: tuple[str, ...], error: type[Exception]) -> None:
    made = Case("errors").make()
    with pytest.raises(ArgumentError) as caught:
        cuflash.attention_weights(**({"q": made["q"], "k": made["k"], "rows": [0]} | changes))
    assert type(caught.value) is error
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_options_are_those_of_attention() -> None:
    model, own = (inspect.signature(f).parameters for f in (cuflash.attention, cuflash.attention_weights))
    of_results = {"v", "return_lse", "out", "batch_invariant", "backend", "precision"}
    of_8_bits = {"q_scale", "k_scale", "v_scale", "out_dtype"}
    assert [n for n in model if n not in of_results | of_8_bits] == [n for n in own if n != "rows"]
    assert all(own[n] == model[n] for n in own if n != "rows")
    text = inspect.getdoc(cuflash.attention_weights) or ""
    listed = text.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    documented = {name for line in listed.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(own) <= documented
    result = doctest.testmod(inspection)
    assert result.attempted > 0
    assert result.failed == 0
