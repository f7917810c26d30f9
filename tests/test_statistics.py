"""Largest scores, entropies and sums of columns: the reference against SciPy and differences, the host's backend against it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import cuflash
from cuflash import ArgumentError, UnsupportedError, abi, numpy_backend, problem, reference
from tests.cases import DTYPES, FULL, OPTIONS, SMALL, STRIDES, Case, in_dtypes
from tests.test_arrays import Namespaced
from tests.tolerance import Expectation

REFERENCED = [case for case in FULL if case.name in OPTIONS]


# ---- the reference ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", REFERENCED, ids=str)
def test_entropy_is_that_of_scipy(case: Case) -> None:
    call, _, _ = case.call()
    p = reference.weights(call)
    seen = p.sum(axis=-1) > 0
    want = np.zeros(seen.shape)
    want[seen] = stats.entropy(p[seen], axis=-1)
    np.testing.assert_allclose(reference.statistics(call)["entropy"], want, atol=1e-12)


@pytest.mark.parametrize("case", REFERENCED, ids=str)
def test_maximum_and_sums_are_those_of_loops(case: Case) -> None:
    """Row by row and key by key: the largest score is what is left of lse without the entropy's part."""
    call, _, _ = case.call()
    found, seen = reference.statistics(call), reference.visible(call)
    p, lse = reference.weights(call), reference.forward(call)[1]
    for at in np.ndindex(*lse.shape[:-1]):
        for i in range(call.problem.seq_q):
            row = p[at][i][seen[at][i]]
            want = lse[at][i] + np.log(row.max()) if row.size else -np.inf
            np.testing.assert_allclose(found["maximum"][at][i], want, rtol=1e-10, atol=1e-10)
        for j in range(call.problem.seq_k):
            np.testing.assert_allclose(found["column_sums"][at][j], sum(p[at][:, j]), atol=1e-12)


def test_they_are_derivatives_of_lse() -> None:
    """With scores t·s, d lse / dt at 1 is Σ p·s = lse - entropy; with scores s + b_j, Σ_i d lse_i / db_j is key j's sum."""
    made = Case("derivatives", "float64", causal=True, window=(30, None)).make()
    options = {name: made["options"][name] for name in ("causal", "window")}
    bias = np.zeros((2, 1, 45))

    def lse(t: float) -> Any:
        call = problem.describe(made["q"], made["k"], made["v"], bias=bias, scale=0.25 * t, **options)
        return reference.forward(call)[1]

    step = 1e-5
    found = reference.statistics(problem.describe(made["q"], made["k"], made["v"], scale=0.25, **options))
    slope = (lse(1 + step) - lse(1 - step)) / (2 * step)
    np.testing.assert_allclose(found["entropy"], lse(1) - slope, atol=1e-8)
    for j in (0, 7, 44):
        bias[..., j] = step
        high = lse(1)
        bias[..., j] = -step
        slope = (high - lse(1)).sum(axis=-1) / (2 * step)
        bias[..., j] = 0
        np.testing.assert_allclose(found["column_sums"][..., j], slope, atol=1e-8)


# ---- the backend of the host -----------------------------------------------------------------------------------------
def statistics(
    call: problem.Call, names: tuple[str, ...] = abi.STATISTICS, **tile: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Output, log-sum-exp and statistics of the NumPy backend."""
    shapes = cuflash.api.statistics_shapes(call.problem)
    found = {name: np.full(shapes[name], np.nan, call.problem.accumulator) for name in names}
    out, lse = numpy_backend.forward(call, statistics=found, **tile)
    return out, lse, found


@pytest.mark.parametrize("case", in_dtypes(SMALL), ids=str)
def test_every_option_in_small_tiles(case: Case) -> None:
    call, _, _ = case.call()
    expectation = Expectation(call)
    for tile in ({"block_q": 16, "block_k": 32}, {}):
        out, lse, found = statistics(call, **tile)
        expectation.check_forward(out, lse)
        expectation.check_statistics(found)


@pytest.mark.parametrize("case", in_dtypes(FULL, ("float32", "float64")), ids=str)
def test_every_case(case: Case) -> None:
    call, _, _ = case.call()
    Expectation(call).check_statistics(statistics(call)[2])


def test_a_nan_reaches_what_sees_it() -> None:
    made = Case("nan", batch=(), heads_q=1, heads_k=1, seq_q=45).make()
    made["k"][0, 20] = np.nan
    for options, keys in (({"causal": True}, range(45)), ({"causal": True, "window": (0, 0)}, [20])):
        call = problem.describe(made["q"], made["k"], made["v"], **options)
        want, found = reference.statistics(call), statistics(call)[2]
        for name in abi.STATISTICS:
            np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(want[name]), name)
        assert np.flatnonzero(np.isnan(found["column_sums"][0])).tolist() == list(keys)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_scores(value: float) -> None:
    """An infinite score leaves no weights; one of -inf weighs nothing."""
    q = np.ones((1, 1, 1))
    k = np.array([[[1.0], [value], [2.0]]])
    found = cuflash.attention_statistics(q, k, np.ones((1, 3, 1)), scale=1.0)
    if value > 0:
        assert all(np.isnan(x).all() for x in found[1:])
    else:
        assert found.maximum == 2
        np.testing.assert_allclose(found.entropy, stats.entropy([[1 / (1 + np.e), np.e / (1 + np.e)]], axis=-1)[None])


# ---- the call --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", STRIDES)
def test_the_call(strides: str, layout: str) -> None:
    case = Case("call", strides=strides, layout=layout, heads_q=4, causal=True, head_dim_v=24, mask="b1qk", alibi="h")
    made = case.make()
    found = cuflash.attention_statistics(made["q"], made["k"], made["v"], **made["options"])
    assert type(found) is cuflash.Statistics
    out, lse = cuflash.attention(made["q"], made["k"], made["v"], return_lse=True, **made["options"])
    np.testing.assert_array_equal(found.out, out)
    np.testing.assert_array_equal(found.lse, lse)
    Expectation(case.call()[0]).check_statistics({name: getattr(found, name) for name in abi.STATISTICS})


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_is_returned_on_request(dtype: str) -> None:
    made = Case("request", dtype).make()
    whole = cuflash.attention_statistics(made["q"], made["k"], made["v"])
    for name in abi.STATISTICS:
        flags = {other: other == name for other in abi.STATISTICS}
        found = cuflash.attention_statistics(made["q"], made["k"], made["v"], **flags)
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
        assert getattr(found, name).dtype == ("float64" if dtype == "float64" else "float32")
        assert all(getattr(found, other) is None for other in abi.STATISTICS if other != name)
        np.testing.assert_array_equal(found.out, whole.out)


def test_sums_count_the_queries() -> None:
    made = Case("sums", "float64", causal="top_left", lengths=(20, 0)).make()
    found = cuflash.attention_statistics(made["q"], made["k"], made["v"], **made["options"])
    np.testing.assert_allclose(found.column_sums.sum(axis=-1), [[33, 33], [0, 0]], rtol=1e-14)
    assert (found.entropy[1] == 0).all()
    assert np.isneginf(found.maximum[1]).all()
    np.testing.assert_allclose(
        found.column_sums,
        cuflash.attention_weights(made["q"], made["k"], range(33), **made["options"]).sum(axis=-2),
        atol=1e-14,
    )


def test_uniform_weights_have_the_entropy_of_their_number() -> None:
    q, k = np.zeros((1, 5, 8)), np.zeros((1, 5, 8))
    found = cuflash.attention_statistics(q, k, k, causal=True)
    np.testing.assert_allclose(found.entropy, np.log([np.arange(1, 6)]), atol=1e-15)
    assert found.entropy[0, 0] == 0


def test_out_and_another_library() -> None:
    made = Case("out").make()
    want = cuflash.attention_statistics(made["q"], made["k"], made["v"])
    out = np.full((2, 2, 66, 16), np.nan, np.float32)[..., ::2, :]
    found = cuflash.attention_statistics(made["q"], made["k"], made["v"], out=out)
    assert found.out is out
    np.testing.assert_array_equal(out, want.out)
    given = {name: Namespaced(made[name]) for name in ("q", "k", "v")}
    found = cuflash.attention_statistics(**given, entropy=False)
    assert all(type(x) is Namespaced for x in found if x is not None)
    assert found.entropy is None
    np.testing.assert_array_equal(found.column_sums.array, want.column_sums)


@pytest.mark.parametrize("name", abi.STATISTICS)
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_what_is_no_flag_is_refused(name: str, value: Any) -> None:
    made = Case("flags").make()
    with pytest.raises(ArgumentError, match=f"{name}={value!r}: must be True or False$"):
        cuflash.attention_statistics(made["q"], made["k"], made["v"], **{name: value})


def test_other_errors_are_those_of_attention() -> None:
    made = Case("errors").make()
    with pytest.raises(UnsupportedError, match="backend='mma' computes on an NVIDIA GPU"):
        cuflash.attention_statistics(made["q"], made["k"], made["v"], backend="mma")
    with pytest.raises(ArgumentError, match="out has shape"):
        cuflash.attention_statistics(made["q"], made["k"], made["v"], out=made["q"][..., 1:])
    with pytest.raises(ArgumentError, match="memory"):
        cuflash.attention_statistics(made["q"], made["k"], made["v"], out=made["q"])


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(empty: dict[str, Any]) -> None:
    made = replace(Case("empty"), **empty).make()
    found = cuflash.attention_statistics(made["q"], made["k"], made["v"])
    assert np.isneginf(found.maximum).all()
    assert (found.entropy == 0).all()
    assert (found.column_sums == 0).all()
