"""Forward mode: the reference against finite differences and identities, the host's backend against it, and the calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, ShapeError, Sinks, UnsupportedError, numpy_tangents, problem, reference
from cuflash.problem import Call
from tests.cases import DROPOUT, DTYPES, FULL, OPTIONS, SINKS, SMALL, STRIDES, Case, in_dtypes
from tests.tangents import tangents_of
from tests.test_arrays import Namespaced
from tests.test_reference import tiny
from tests.tolerance import Expectation

EVERY = {**OPTIONS, **SINKS, **DROPOUT}
STEP = 1e-3


def tiny_call(name: str) -> tuple[Call, Any, Any, dict[str, Any]]:
    """A small call in float64 with dout, dlse and tangents of everything."""
    if name in OPTIONS:
        call, dout, _ = tiny(name).call()
    else:
        options = {**EVERY[name], "seq_q": 4, "seq_k": 6, "head_dim": 3, "head_dim_v": 2}
        lengths = {"lengths": (3, 6)} if isinstance(options.get("lengths"), tuple) else {}
        call, dout, _ = Case(name, "float64", **{**options, **lengths}).call()
    dlse = np.random.default_rng(1).standard_normal(call.problem.lse_shape)
    return call, dout, dlse, tangents_of(call, dout, dlse)


def moved(call: Call, tangents: dict[str, Any], t: float) -> Call:
    """The call with its inputs so far along their tangents."""
    arrays = {name: getattr(call, name) + t * tangents[name] for name in "qkv" if name in tangents}
    operands = {name: x + t * tangents[name] if name in tangents else x for name, x in call.operands.items()}
    return replace(call, **arrays, operands=operands)


def slope(values: Any) -> Any:
    """Derivative at 0 by the five-point stencil."""
    two_before, before, after, two_after = (values(n * STEP) for n in (-2, -1, 1, 2))
    with np.errstate(invalid="ignore"):
        return np.nan_to_num((two_before - 8 * before + 8 * after - two_after) / (12 * STEP))


def gradients_at(call: Call, dout: Any, dlse: Any, tangents: dict[str, Any], t: float) -> Any:
    moving = [x if name not in tangents else x + t * tangents[name] for name, x in (("dout", dout), ("dlse", dlse))]
    return reference.backward(moved(call, tangents, t), *moving)


# ---- the reference ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", EVERY)
def test_tangents_agree_with_finite_differences(name: str) -> None:
    call, _, _, tangents = tiny_call(name)
    found = reference.jvp(call, tangents)
    for at in (0, 1):
        numeric = slope(lambda t, at=at: reference.forward(moved(call, tangents, t))[at])
        assert abs(numeric - found[at]).max() <= 1e-9 * max(1, abs(numeric).max())
    assert abs(found[0]).max() > 0.01 or not reference.visible(call).any()


@pytest.mark.parametrize("name", EVERY)
def test_products_by_the_hessian_agree_with_finite_differences(name: str) -> None:
    call, dout, dlse, tangents = tiny_call(name)
    found = reference.hvp(call, dout, dlse, tangents)
    for field in found._fields:
        numeric = slope(lambda t, field=field: getattr(gradients_at(call, dout, dlse, tangents, t), field))
        assert abs(numeric - getattr(found, field)).max() <= 2e-9 * max(1, abs(numeric).max()), field
    assert abs(found.dv).max() > 0.01 or not reference.visible(call).any()


@pytest.mark.parametrize("only", ["q", "k", "v", "bias", "sinks", "dout", "dlse"])
def test_each_tangent_alone(only: str) -> None:
    """What does not move has the tangent 0, and derivatives along several are sums."""
    call, dout, dlse, tangents = tiny_call("sinks-everything")
    one, rest = {only: tangents[only]}, {name: x for name, x in tangents.items() if name != only}
    for f in (lambda t: reference.jvp(call, t), lambda t: reference.hvp(call, dout, dlse, t)):
        for whole, first, second in zip(f(tangents), f(one), f(rest), strict=True):
            np.testing.assert_allclose(first + second, whole, atol=1e-12)
    for want, got in zip(reference.hvp(call, dout, dlse, one), numpy_tangents.hvp(call, dout, dlse, one), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


EXPRESSIONS = (
    "s + 0.3 * s * s - 0.1 * s ** 3",
    "c * tanh(s / c) - abs(q - k)",
    "log(1 + exp(s)) if q > k else sqrt(4 + s * s)",
    "s / (1 + abs(s))",
    "2.5 * s",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_second_derivatives_of_expressions(expression: str) -> None:
    own = cuflash.ScoreModifier(expression, **({"c": 2.0} if "c *" in expression else {}))
    made = tiny("softcap-bias").make()
    call = problem.describe(made["q"], made["k"], made["v"], softcap=3.0, bias=made["options"]["bias"], modifiers=[own])
    dout, dlse = made["dout"], np.random.default_rng(1).standard_normal(call.problem.lse_shape)
    tangents = tangents_of(call, dout, dlse)
    found = reference.hvp(call, dout, dlse, tangents)
    tiled = numpy_tangents.hvp(call, dout, dlse, tangents, block_q=2, block_k=3)
    for field in found._fields:
        numeric = slope(lambda t, field=field: getattr(gradients_at(call, dout, dlse, tangents, t), field))
        np.testing.assert_allclose(getattr(found, field), numeric, atol=1e-7, err_msg=field)
        np.testing.assert_allclose(getattr(tiled, field), getattr(found, field), atol=1e-12, err_msg=field)


# ---- the backend of the host -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", in_dtypes(SMALL, ("bfloat16", "float32")), ids=str)
def test_every_option_in_small_tiles(case: Case) -> None:
    call, dout, dlse = case.call()
    expectation = Expectation(call, dout, dlse)
    tangents = tangents_of(call, dout, dlse)
    tile = {"block_q": 16, "block_k": 32}
    expectation.check_jvp(tangents, *numpy_tangents.jvp(call, tangents, **tile))
    expectation.check_hvp(tangents, numpy_tangents.hvp(call, dout, dlse, tangents, **tile))


@pytest.mark.parametrize("name", [*SINKS, *DROPOUT])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_acts_behind_the_scores(name: str, dtype: str) -> None:
    call, dout, dlse = Case(name, dtype, **EVERY[name]).call()
    expectation, tangents = Expectation(call, dout, dlse), tangents_of(call, dout, dlse)
    expectation.check_jvp(tangents, *numpy_tangents.jvp(call, tangents, block_q=7, block_k=16))
    expectation.check_hvp(tangents, numpy_tangents.hvp(call, dout, dlse, tangents, block_q=7, block_k=16))


VALUES = [case for case in FULL if case.values != "normal"] + [case for case in FULL if case.name.startswith("dim-")]


@pytest.mark.parametrize("case", in_dtypes(VALUES, ("float16", "float64")), ids=str)
def test_values_and_sizes(case: Case) -> None:
    call, dout, dlse = case.call()
    expectation, tangents = Expectation(call, dout, dlse), tangents_of(call, dout, dlse)
    expectation.check_jvp(tangents, *numpy_tangents.jvp(call, tangents))
    expectation.check_hvp(tangents, numpy_tangents.hvp(call, dout, dlse, tangents))


def test_a_nan_reaches_what_sees_it() -> None:
    made = Case("nan", "float64", batch=(), heads_q=1, heads_k=1, seq_q=45).make()
    call = problem.describe(made["q"], made["k"], made["v"], causal=True)
    for name in ("k", "v"):
        tangents = tangents_of(call)
        tangents[name][0, 20] = np.nan
        for dout, dlse in (reference.jvp(call, tangents), numpy_tangents.jvp(call, tangents, block_k=8)[1::2]):
            assert np.isnan(dout[0, 20:]).all()
            assert np.isfinite(dout[0, :20]).all()
            assert np.isnan(dlse[0, 20:]).all() == (name == "k")


# ---- the calls -------------------------------------------------------------------------------------------------------
def call_arguments(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of a case, and tangents in its layout and strides by the names of `attention_jvp`."""
    made, rng = case.make(), np.random.default_rng(7)
    arrays = {name: made[name] for name in ("q", "k", "v", "dout")}
    arrays |= {"bias": made["options"]["bias"]} if made["options"]["bias"] is not None else {}
    found = {n: case.place(rng.standard_normal(x.shape).astype(x.dtype, order="C")) for n, x in arrays.items()}
    for m in made["options"]["modifiers"]:
        if isinstance(m, Sinks):
            found["sinks"] = rng.standard_normal(m.logits.shape).astype(m.logits.dtype)
    return made, found


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", STRIDES)
def test_adjoint_and_symmetric(strides: str, layout: str) -> None:
    """<jvp(x'), g> = <x', vjp(g)>, and <x'', H x'> = <x', H x''>."""
    case = Case("call", "float64", strides=strides, layout=layout, heads_q=4, head_dim_v=24, causal=True)
    case = replace(case, softcap=2.0, mask="b1qk", bias="h1k", alibi="h", sinks="h", dropout=0.3)
    made, moving = call_arguments(case)
    options, (q, k, v, g) = made["options"], (made[name] for name in ("q", "k", "v", "dout"))
    names = ("q", "k", "v", "bias", "sinks")
    dlse = np.random.default_rng(3).standard_normal((2, 4, 33))
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    gradients = cuflash.attention_backward(g, q, k, v, out, lse, dlse=dlse, **options)
    along = {f"d{name}": moving[name] for name in names}
    own_out, dout, own_lse, dlse_found = cuflash.attention_jvp(q, k, v, **along, return_lse=True, **options)
    np.testing.assert_allclose(own_out, out, atol=1e-14)
    np.testing.assert_allclose(own_lse, lse, atol=1e-14)
    left = np.vdot(dout, g) + np.vdot(dlse_found, dlse)
    right = sum(np.vdot(moving[name], getattr(gradients, f"d{name}")) for name in names)
    assert abs(left - right) < 1e-10 * abs(right)
    assert abs(right) > 1

    other = {name: np.random.default_rng(9).standard_normal(moving[name].shape) for name in names}
    products = [
        cuflash.attention_hvp(
            *(g, q, k, v, x["q"], x["k"], x["v"]),
            dlse=dlse,
            bias_tangent=x["bias"],
            sinks_tangent=x["sinks"],
            **options,
        )
        for x in (moving, other)
    ]
    assert products[0]._fields == ("dq", "dk", "dv", "dbias", "dsinks")
    left, right = (
        sum(np.vdot(x[name], getattr(product, f"d{name}")) for name in names)
        for x, product in zip((other, moving), products, strict=True)
    )
    assert abs(left - right) < 1e-10 * abs(right)
    for name in names:
        given = made[name] if name in made else options["bias"] if name == "bias" else options["modifiers"][1].logits
        assert getattr(products[0], f"d{name}").shape == given.shape


def test_tangents_that_are_left_out_are_zero() -> None:
    made, moving = call_arguments(Case("none", "float64", causal=True))
    q, k, v, g = (made[name] for name in ("q", "k", "v", "dout"))
    for name in "qkv":
        given = {f"d{n}": moving[n] if n == name else None for n in "qkv"}
        zeros = {f"d{n}": moving[n] if n == name else np.zeros_like(moving[n]) for n in "qkv"}
        for got, want in zip(*(cuflash.attention_jvp(q, k, v, **x, causal=True) for x in (given, zeros)), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-14)
        got, want = (cuflash.attention_hvp(g, q, k, v, *x.values(), causal=True) for x in (given, zeros))
        np.testing.assert_allclose(got.dk, want.dk, atol=1e-13)
    _, dout = cuflash.attention_jvp(q, k, v, None, None, None)
    assert (dout == 0).all()
    assert (cuflash.attention_hvp(g, q, k, v, None, None, None).dq == 0).all()


def test_a_whole_loss() -> None:
    """Second derivatives of Σ out³: the loss's own gradient 3·out² moves with the output."""
    made, moving = call_arguments(Case("loss", "float64", seq_q=5, seq_k=6, head_dim=3))
    arrays, along = [made[name] for name in "qkv"], [moving[name] for name in "qkv"]

    def gradients(t: float) -> Any:
        out, vjp = cuflash.attention_vjp(*(x + t * dx for x, dx in zip(arrays, along, strict=True)), causal=True)
        return vjp(3 * out**2)

    out, dout = cuflash.attention_jvp(*arrays, *along, causal=True)
    products = cuflash.attention_hvp(3 * out**2, *arrays, *along, 6 * out * dout, causal=True)
    for field in products._fields:
        numeric = slope(lambda t, field=field: getattr(gradients(t), field))
        np.testing.assert_allclose(getattr(products, field), numeric, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kinds_and_dtypes(dtype: str) -> None:
    made, moving = call_arguments(Case("kinds", dtype))
    real = "float64" if dtype == "float64" else "float32"
    arrays, along = [made[name] for name in "qkv"], [moving[name] for name in "qkv"]
    found = cuflash.attention_jvp(*arrays, *along, return_lse=True)
    assert [str(x.dtype) for x in found] == [dtype, dtype, real, real]
    assert [x.shape for x in found] == 2 * [made["q"].shape] + 2 * [made["q"].shape[:-1]]
    if dtype == "float32":
        given = [Namespaced(x) for x in (*arrays, *along)]
        for got, want in zip(cuflash.attention_jvp(*given, return_lse=True), found, strict=True):
            assert type(got) is Namespaced
            np.testing.assert_array_equal(got.array, want)
    products = cuflash.attention_hvp(made["dout"], *arrays, *along)
    assert [(x.shape, str(x.dtype)) for x in products] == [(x.shape, dtype) for x in arrays]


def test_batch_entries_do_not_depend_on_others() -> None:
    made, moving = call_arguments(Case("alone", batch=(3,), seq_q=70, seq_k=90))
    arrays, along = [made[name] for name in "qkv"], [moving[name] for name in "qkv"]
    whole = cuflash.attention_jvp(*arrays, *along, causal=True, batch_invariant=True)
    product = cuflash.attention_hvp(made["dout"], *arrays, *along, causal=True, batch_invariant=True)
    for i in range(3):
        one = slice(i, i + 1)
        part = [x[one] for x in (*arrays, *along)]
        for got, want in zip(cuflash.attention_jvp(*part, causal=True, batch_invariant=True), whole, strict=True):
            np.testing.assert_array_equal(got, want[one])
        alone = cuflash.attention_hvp(made["dout"][one], *part, causal=True, batch_invariant=True)
        for got, want in zip(alone, product, strict=True):
            np.testing.assert_array_equal(got, want[one])


@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(empty: dict[str, Any]) -> None:
    made, moving = call_arguments(replace(Case("empty"), **empty))
    arrays, along = [made[name] for name in "qkv"], [moving[name] for name in "qkv"]
    _, dout, lse, dlse = cuflash.attention_jvp(*arrays, *along, return_lse=True)
    assert np.isneginf(lse).all()
    assert all((x == 0).all() for x in (dout, dlse, *cuflash.attention_hvp(made["dout"], *arrays, *along)))


def test_what_does_not_fit_is_refused_by_name() -> None:
    made, moving = call_arguments(Case("errors"))
    q, k, v, g = (made[name] for name in ("q", "k", "v", "dout"))
    dq, dk, dv = (moving[name] for name in "qkv")
    with pytest.raises(ShapeError, match="dk has shape"):
        cuflash.attention_jvp(q, k, v, dq, dk[:, :1], dv)
    with pytest.raises(ArgumentError, match="dv has dtype float64: must be float32"):
        cuflash.attention_jvp(q, k, v, dq, dk, dv.astype(np.float64))
    with pytest.raises(ArgumentError, match="dbias is given, and the call has no bias"):
        cuflash.attention_jvp(q, k, v, dq, dk, dv, dbias=np.ones((33, 45), np.float32))
    with pytest.raises(ArgumentError, match="sinks_tangent is given, and the call has no Sinks"):
        cuflash.attention_hvp(g, q, k, v, dq, dk, dv, sinks_tangent=np.ones(2))
    with pytest.raises(ShapeError, match="dsinks has shape"):
        cuflash.attention_jvp(q, k, v, dq, dk, dv, dsinks=np.ones(1), modifiers=[Sinks([1.0, 2.0])])
    with pytest.raises(ArgumentError, match="dsinks has dtype int64: must be real numbers"):
        cuflash.attention_jvp(q, k, v, dq, dk, dv, dsinks=np.ones(2, int), modifiers=[Sinks([1.0, 2.0])])
    with pytest.raises(ShapeError, match="dout_tangent has shape"):
        cuflash.attention_hvp(g, q, k, v, dq, dk, dv, g[..., 1:])
    with pytest.raises(ArgumentError, match="batch_invariant=1: must be True or False"):
        cuflash.attention_hvp(g, q, k, v, dq, dk, dv, batch_invariant=1)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="backend='mma' computes on an NVIDIA GPU"):
        cuflash.attention_jvp(q, k, v, dq, dk, dv, backend="mma")


def test_second_derivatives_that_are_not_known_are_refused() -> None:
    made, moving = call_arguments(Case("curves"))
    given = [made[name] for name in ("dout", "q", "k", "v")] + [moving[name] for name in "qkv"]
    learned = cuflash.ScoreModifier("s * heat[h]", heat=np.ones(2, np.float32), gradients="heat")
    with pytest.raises(UnsupportedError, match=r"ScoreModifier\(.*second derivatives by heat are not offered"):
        cuflash.attention_hvp(*given, modifiers=[learned])
    long = cuflash.ScoreModifier(" * ".join(f"tanh(s + {i})" for i in range(30)))
    with pytest.raises(UnsupportedError, match="second derivative by the score is not known, or takes too many"):
        cuflash.attention_hvp(*given, modifiers=[long])
    out, _ = cuflash.attention_jvp(*given[1:], modifiers=[long])  # which has no need of it
    assert np.isfinite(out).all()


def test_second_derivatives_through_a_function_in_cuda() -> None:
    """One that bends the score has no known second derivative, unless its derivative is itself."""
    made, moving = call_arguments(Case("functions", dtype="float64"))
    given = [made[name] for name in ("dout", "q", "k", "v")] + [moving[name] for name in "qkv"]
    source = "Real raised(Real x) { return exp(x); } Real square(Real x) { return x * x; } Real twice(Real x) { return x + x; }"
    square = cuflash.CudaFunction(
        source, "square", derivatives={"x": "twice"}, twins={"square": lambda x: x * x, "twice": lambda x: x + x}
    )
    raised = cuflash.CudaFunction(source, "raised", derivatives={"x": "raised"}, twins={"raised": np.exp})
    for called, plain in (("s + square(s)", "s + s * s"), ("s * square(q)", "s * q * q")):
        ours = cuflash.attention_jvp(*given[1:], modifiers=[cuflash.ScoreModifier(called, square=square)])
        expected = cuflash.attention_jvp(*given[1:], modifiers=[cuflash.ScoreModifier(plain)])
        np.testing.assert_allclose(ours[1], expected[1], rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedError, match=r"square\(s\).* is not known.*no CudaFunction bends the score"):
        cuflash.attention_hvp(*given, modifiers=[cuflash.ScoreModifier("s + square(s)", square=square)])
    for functions, called, plain in (
        ({"raised": raised}, "s * raised(0.1 * s)", "s * exp(0.1 * s)"),
        ({"square": square}, "tanh(s) + square(0.1 * q)", "tanh(s) + 0.01 * q * q"),
    ):
        products = cuflash.attention_hvp(*given, modifiers=[cuflash.ScoreModifier(called, **functions)])
        expected = cuflash.attention_hvp(*given, modifiers=[cuflash.ScoreModifier(plain)])
        for ours, theirs in zip(products, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
