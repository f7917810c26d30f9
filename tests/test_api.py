"""The public calls: what they return, in which shapes, and that they agree with each other."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import ALiBi, Explanation, KeyLengths, api, numpy_backend, problem, reference

Q, K, V = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)
OUT, LSE = (2, 4, 5, 6), (2, 4, 5)


def numbers(shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def inputs(dtype: Any = np.float64) -> dict[str, np.ndarray]:
    return {"q": numbers(Q, dtype), "k": numbers(K, dtype), "v": numbers(V, dtype)}


def every_option() -> dict[str, Any]:
    """Each option at a value that changes the answer."""
    mask = np.arange(35).reshape(5, 7) % 4 != 1
    chain = [ALiBi([0.5, 0.25, 0.125, 0.0625]), KeyLengths([7, 4])]
    return {
        "scale": 0.7,
        "causal": True,
        "window": (3, None),
        "mask": mask,
        "bias": numbers((4, 1, 7)),
        "softcap": 2.0,
        "modifiers": chain,
    }


# ---- against the reference -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("option", sorted(every_option()))
def test_each_option_reaches_the_answer(option: str) -> None:
    """No option is accepted and ignored: with it the result is the reference's, without it is another one."""
    given, options = inputs(), {option: every_option()[option]}
    out, lse, vjp = cuflash.attention_vjp(**given, **options, return_lse=True)
    plain, plain_lse, plain_vjp = cuflash.attention_vjp(**given, return_lse=True)
    assert np.abs(out - plain).max() > 1e-3
    assert np.abs(vjp(out)[0] - plain_vjp(out)[0]).max() > 1e-3
    native = options
    if option == "modifiers":
        native = {"modifiers": [ALiBi(np.array(options[option][0].slopes)), KeyLengths(np.array([7, 4]))]}
    call = problem.describe(**given, **native)
    want, want_lse = reference.forward(call)
    np.testing.assert_allclose(out, want, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, atol=1e-13)
    for got, expected in zip(vjp(out, lse), reference.backward(call, out, lse), strict=True):
        np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=1e-12)
    assert plain_lse.shape == lse.shape


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_against_a_difference_quotient(layout: str) -> None:
    """The derivative along a random direction, of a loss of out and lse, through the public calls alone."""
    rng = np.random.default_rng(3)
    given = {name: problem.canonical(x, layout) for name, x in inputs().items()}
    options = every_option() | {"layout": layout}
    bias = options.pop("bias")
    weights, lse_weights = problem.canonical(rng.standard_normal(OUT), layout), rng.standard_normal(LSE)

    def loss(**changed: np.ndarray) -> float:
        out, lse = cuflash.attention(**changed, **options, return_lse=True)
        return float((out * weights).sum() + (lse * lse_weights)[np.isfinite(lse)].sum())

    values = given | {"bias": bias}
    out, lse, vjp = cuflash.attention_vjp(**values, **options, return_lse=True)
    gradients = vjp(weights, np.where(np.isfinite(lse), lse_weights, 0))._asdict()
    assert gradients.keys() == {"dq", "dk", "dv", "dbias"}
    for name, x in values.items():
        direction, step = rng.standard_normal(x.shape), 1e-5
        quotient = (loss(**values | {name: x + step * direction}) - loss(**values | {name: x - step * direction})) / (
            2 * step
        )
        assert abs(quotient - (gradients[f"d{name}"] * direction).sum()) < 1e-8, name
    assert out.shape == problem.in_layout(OUT, layout)


# ---- what comes back -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_shapes_and_dtypes(layout: str, dtype: Any) -> None:
    given = {name: problem.canonical(x, layout) for name, x in inputs(dtype).items()}
    out, lse = cuflash.attention(**given, layout=layout, return_lse=True)
    assert (out.shape, out.dtype) == (problem.in_layout(OUT, layout), dtype)
    assert (lse.shape, lse.dtype) == (LSE, np.float64 if dtype == np.float64 else np.float32)
    gradients = cuflash.attention_backward(out, **given, out=out, lse=lse, layout=layout)
    assert [x.shape for x in gradients] == [x.shape for x in given.values()]
    assert {x.dtype for x in gradients} == {np.dtype(dtype)}


def test_layouts_agree() -> None:
    given, options = inputs(), every_option()
    out, lse, vjp = cuflash.attention_vjp(**given, **options, return_lse=True)
    swapped = {name: x.swapaxes(1, 2) for name, x in given.items()}
    out_2, lse_2, vjp_2 = cuflash.attention_vjp(**swapped, **options, layout="bshd", return_lse=True)
    np.testing.assert_array_equal(out_2.swapaxes(1, 2), out)
    np.testing.assert_array_equal(lse_2, lse)
    for name, x in vjp_2(out_2, lse_2)._asdict().items():
        want = getattr(vjp(out, lse), name)
        np.testing.assert_array_equal(x if name == "dbias" else x.swapaxes(1, 2), want)


def test_results_of_one_call_do_not_depend_on_what_is_asked_for() -> None:
    given = inputs()
    out, lse = cuflash.attention(**given, return_lse=True)
    np.testing.assert_array_equal(cuflash.attention(**given), out)
    np.testing.assert_array_equal(cuflash.attention(**given, backend="numpy"), out)
    out_2, vjp = cuflash.attention_vjp(**given)
    np.testing.assert_array_equal(out_2, out)
    *_, vjp_3 = cuflash.attention_vjp(**given, return_lse=True)
    for a, b, c in zip(vjp(out), vjp_3(out, None), vjp(out, np.zeros_like(lse)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_out_is_written_and_returned() -> None:
    given, target = inputs(), np.full(OUT, np.nan)
    got, lse = cuflash.attention(**given, out=target, return_lse=True)
    assert got is target
    np.testing.assert_array_equal(target, cuflash.attention(**given))
    assert lse.shape == LSE


@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 1, 7), (2, 4, 5, 7), (1, 1, 1, 1), ()])
def test_dbias_has_the_shape_that_bias_was_given_in(shape: tuple[int, ...]) -> None:
    out, vjp = cuflash.attention_vjp(**inputs(), bias=numbers(shape).reshape(shape))
    assert vjp(out).dbias.shape == shape


def test_no_dbias_without_a_bias() -> None:
    out, vjp = cuflash.attention_vjp(**inputs(), mask=np.ones((5, 7), bool))
    gradients = vjp(out)
    assert gradients._fields == ("dq", "dk", "dv")
    assert pickle.loads(pickle.dumps(gradients))._fields == gradients._fields


@pytest.mark.parametrize("deterministic", [None, True, False, np.True_])
def test_the_numpy_backend_is_deterministic_either_way(deterministic: Any) -> None:
    given = inputs()
    out, lse = cuflash.attention(**given, return_lse=True)
    first = cuflash.attention_backward(out, **given, out=out, lse=lse, deterministic=deterministic)
    for a, b in zip(first, cuflash.attention_backward(out, **given, out=out, lse=lse), strict=True):
        np.testing.assert_array_equal(a, b)


def test_modifiers_may_come_from_a_generator() -> None:
    given, chain = inputs(), every_option()["modifiers"]
    out, vjp = cuflash.attention_vjp(**given, modifiers=(m for m in chain))
    want, want_vjp = cuflash.attention_vjp(**given, modifiers=chain)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(vjp(out).dq, want_vjp(out).dq)
    np.testing.assert_array_equal(cuflash.attention(**given, modifiers=(m for m in chain)), want)


def test_vjp_keeps_only_out_and_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the forward makes besides its results, its description of the call included, is freed when it returns."""
    made: list[Any] = []
    forward = numpy_backend.forward

    def watched(call: Any, out: Any = None, **options: Any) -> Any:
        made.append(weakref.ref(call))
        return forward(call, out, **options)

    monkeypatch.setattr(numpy_backend, "forward", watched)
    _, vjp = cuflash.attention_vjp(**inputs())
    gc.collect()
    assert made
    assert not any(reference() is not None for reference in made)
    closure = inspect.getclosurevars(vjp).nonlocals
    assert {"out", "lse"} <= closure.keys() <= {"out", "lse", "q", "k", "v", "deterministic", "options"}


@pytest.mark.parametrize("value", [0, 1.5, -0.3, np.float32(0.5), np.array(0.5), ml_dtypes.bfloat16(0.5), np.int8(2)])
def test_scale_of_every_real_kind(value: Any) -> None:
    got = cuflash.attention(**inputs(), scale=value)
    np.testing.assert_array_equal(got, cuflash.attention(**inputs(), scale=float(value)))


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"causal": np.True_}, {"causal": True}),
        ({"causal": "bottom_right"}, {"causal": True}),
        ({"causal": None}, {}),
        ({"window": (None, None)}, {}),
        ({"window": (-1, -1)}, {}),
        ({"window": [np.int64(1), np.uint8(0)]}, {"window": (1, 0)}),
        ({"window": (10**30, 1)}, {"window": (None, 1)}),
        ({"window": (1 << 63, 1 << 31)}, {}),
        ({"window": (None, 0)}, {"causal": True}),
        ({"softcap": np.float32(3)}, {"softcap": 3}),
        ({"softcap": 1e30}, {}),
    ],
)
def test_different_ways_to_say_the_same(given: dict[str, Any], same: dict[str, Any]) -> None:
    want = cuflash.attention(**inputs(), **same)
    np.testing.assert_allclose(cuflash.attention(**inputs(), **given), want, atol=1e-14)


def test_zero_is_a_real_window_bound() -> None:
    square = {"q": numbers((1, 1, 5, 8)), "k": numbers((1, 1, 5, 8)), "v": numbers((1, 1, 5, 6))}
    np.testing.assert_allclose(cuflash.attention(**square, window=(0, 0)), square["v"], atol=1e-15)


def test_top_left_and_bottom_right_differ() -> None:
    one_query = inputs() | {"q": numbers((2, 4, 1, 8))}
    full = cuflash.attention(**one_query)
    np.testing.assert_array_equal(cuflash.attention(**one_query, causal=True), full)
    first = cuflash.attention(**one_query, causal="top_left")
    np.testing.assert_allclose(first, one_query["v"][:, [0, 0, 1, 1], :1], atol=1e-15)


# ---- explain, signatures, documentation ------------------------------------------------------------------------------
def test_explain_on_the_host() -> None:
    explained = cuflash.explain(**inputs(), **every_option())
    assert isinstance(explained, Explanation)
    assert explained.backend == "numpy"
    assert set(explained.reasons) == set(api.BACKENDS) - {"numpy"}
    assert all("q is a numpy array on the host" in reason for reason in explained.reasons.values())
    text = str(explained)
    assert all(word in text for word in ("numpy", "simt", "mma", "(2, 4, 5, 8)", "Window(left=3, right=None)"))
    assert "registers" not in text


def test_an_explanation_prints_what_it_has() -> None:
    explained = Explanation(
        backend="mma",
        reasons={"simt": "mma is preferred"},
        tile=(128, 64),
        grid=(1056,),
        threads=128,
        registers=168,
        spilled_bytes=0,
        shared_bytes=49152,
        floor_ms=0.12345,
        notes=("compiled in 1.2 s",),
    )
    assert str(explained).splitlines() == [
        "backend:   mma",
        "tile:      128 queries x 64 keys",
        "grid:      1056",
        "threads:   128",
        "registers: 168",
        "spilled:   0 bytes a thread",
        "shared:    48.0 KiB a block",
        "floor:     0.1235 ms",
        "not simt: mma is preferred",
        "note: compiled in 1.2 s",
    ]


CALLS = [
    cuflash.attention,
    cuflash.attention_backward,
    cuflash.attention_hvp,
    cuflash.attention_jvp,
    cuflash.attention_statistics,
    cuflash.attention_vjp,
    cuflash.explain,
]
OPTIONS = ["scale", "causal", "window", "mask", "bias", "softcap", "modifiers", "layout", "backend"]


@pytest.mark.parametrize("call", CALLS)
def test_all_calls_take_the_same_options(call: Any) -> None:
    model, parameters = inspect.signature(cuflash.attention).parameters, inspect.signature(call).parameters
    assert [name for name in parameters if name in OPTIONS] == OPTIONS
    for name in OPTIONS:
        assert parameters[name] == model[name]
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    described = set(inspect.signature(problem.describe).parameters)
    assert set(OPTIONS) - {"backend"} <= described


@pytest.mark.parametrize("call", CALLS)
def test_every_call_documents_every_parameter(call: Any) -> None:
    text = inspect.getdoc(call) or ""
    for heading in ("Parameters", "Returns", "Raises", "Notes", "Examples"):
        assert f"\n{heading}\n{'-' * len(heading)}\n" in text, heading
    listed = text.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    documented = {name for line in listed.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(inspect.signature(call).parameters) <= documented
    assert "arXiv:2205.14135" in text
