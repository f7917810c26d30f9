"""Sinks: a key of value 0 that is not there, its gradient, what it does to rows without keys, and the calls that take it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import Sinks, numpy_backend, plan, problem, reference, segments
from cuflash.backends import described_device, select
from tests.cases import DTYPES, SINKS, Case
from tests.packs import Judge, Pack
from tests.test_reference import central_difference
from tests.tolerance import Expectation

cases = pytest.mark.parametrize("name", SINKS)


def tiny(name: str) -> tuple[Case, dict[str, Any]]:
    """A case in float64 that is small enough to differentiate numerically, and its arrays."""
    options = {**SINKS[name], "seq_q": 6, "seq_k": 5, "head_dim": 3, "head_dim_v": 2}
    if "lengths" in options:
        options["lengths"] = (5, 3)
    case = Case(name, "float64", **options)
    return case, case.make()


def logits_of(made: dict[str, Any]) -> np.ndarray:
    return next(m.logits for m in made["options"]["modifiers"] if isinstance(m, Sinks))


def with_logits(made: dict[str, Any], logits: np.ndarray | None) -> dict[str, Any]:
    """The options with other logits, or with no sinks."""
    chain = [m for m in made["options"]["modifiers"] if not isinstance(m, Sinks)]
    return {**made["options"], "modifiers": chain + ([] if logits is None else [Sinks(logits)])}


# ---- what it means -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 0.8, "window": (1, 0)}], ids=str)
def test_it_is_one_more_key_with_the_value_0(options: dict[str, Any]) -> None:
    """Of a head's own, written out: the key has a score by a bias, and everybody sees it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, 4)) for n in (6, 5, 5))
    g, g_lse, logits = rng.standard_normal(q.shape), rng.standard_normal((2, 3, 6)), rng.standard_normal(3)
    made = problem.describe(q, k, v, modifiers=[Sinks(logits)], **options)
    plain = problem.describe(q, k, v, **options)
    seen = np.concatenate([np.ones((2, 3, 6, 1), bool), reference.visible(plain)], axis=-1)
    k, v = (np.concatenate([np.zeros((2, 3, 1, 4)), x], axis=-2) for x in (k, v))
    bias = np.zeros((2, 3, 6, 6))
    bias[..., 0] = logits[:, None]
    written = problem.describe(q, k, v, mask=seen, bias=bias, softcap=options.get("softcap"))
    for got, want in zip(reference.forward(made), reference.forward(written), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-14)
    got, want = reference.backward(made, g, g_lse), reference.backward(written, g, g_lse)
    np.testing.assert_allclose(got.dq, want.dq, atol=1e-14)
    np.testing.assert_allclose(got.dk, want.dk[..., 1:, :], atol=1e-14)
    np.testing.assert_allclose(got.dv, want.dv[..., 1:, :], atol=1e-14)
    np.testing.assert_allclose(got.dsinks.ravel(), want.dbias[..., 0].sum(axis=(0, -1)), atol=1e-13)
    got, want = reference.statistics(made), reference.statistics(written)
    np.testing.assert_allclose(got["entropy"], want["entropy"], atol=1e-14)
    np.testing.assert_allclose(got["column_sums"], want["column_sums"][..., 1:], atol=1e-14)


@cases
def test_gradients_agree_with_finite_differences(name: str) -> None:
    case, made = tiny(name)
    call, dout, _ = case.call()
    dlse = np.random.default_rng(1).standard_normal(call.problem.lse_shape)
    gradients = reference.backward(call, dout, dlse)

    def loss(argument: str, x: np.ndarray) -> float:
        options = with_logits(made, x if argument == "sinks" else logits_of(made))
        arrays = [x if argument == n else made[n] for n in "qkv"]
        out, lse = reference.forward(problem.describe(*arrays, **options))
        return float(np.vdot(dout, out) + np.vdot(dlse, lse))

    for argument in ("q", "k", "v", "sinks"):
        x = logits_of(made) if argument == "sinks" else made[argument]
        numeric = central_difference(lambda moved, argument=argument: loss(argument, moved), x)
        exact = getattr(gradients, f"d{argument}").reshape(x.shape)
        assert abs(numeric - exact).max() <= 1e-9 * max(1, abs(numeric).max()), argument
    assert abs(gradients.dsinks).max() > 0.01


def test_rows_that_see_no_key_have_the_logit_as_their_lse() -> None:
    q, k, v = (np.ones((1, 2, n, 3)) for n in (4, 2, 2))
    logits = np.array([0.5, -3.0])
    out, lse, vjp = cuflash.attention_vjp(q, k, v, causal=True, modifiers=[Sinks(logits)], return_lse=True)
    assert (out[..., :2, :] == 0).all()
    np.testing.assert_allclose(lse[0, :, :2], logits[:, None].repeat(2, 1), rtol=1e-15)
    dlse = np.zeros((1, 2, 4))
    dlse[..., 0] = 1  # of a row without keys alone: its lse is the logit
    gradients = vjp(np.zeros_like(out), dlse)
    np.testing.assert_allclose(gradients.dsinks, [1, 1])
    for x in gradients[:3]:
        assert (x == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_minus_infinity_is_no_sink(dtype: str) -> None:
    made = Case("neutral", dtype, lengths=(0, 45), dlse=True).make()
    plain, sunk = (
        cuflash.attention_vjp(made["q"], made["k"], made["v"], **with_logits(made, logits), return_lse=True)
        for logits in (None, np.full(2, -np.inf))
    )
    for got, want in zip(sunk[:2], plain[:2], strict=True):
        np.testing.assert_array_equal(got, want)
    want, got = (vjp(made["dout"], made["dlse"]) for vjp in (plain[2], sunk[2]))
    for x, y in zip(got, want, strict=False):
        np.testing.assert_array_equal(x, y)
    assert (got.dsinks == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_reaches_its_own_head_alone(value: float) -> None:
    q, k, v = (np.ones((1, 2, 3, 4)),) * 3
    out, lse = cuflash.attention(q, k, v, modifiers=[Sinks([value, 0.0])], return_lse=True)
    assert np.isnan(out[:, 0]).all()
    assert np.isnan(lse[:, 0]).all()
    np.testing.assert_allclose(out[:, 1], 3 * np.e**2 / (3 * np.e**2 + 1))


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_logits_far_from_the_scores(far: float) -> None:
    """The largest of both is the base: nothing overflows, and what is far below weighs nothing."""
    q, k, v = (np.ones((1, 2, 3, 4), np.float32),) * 3
    out, lse = cuflash.attention(q, k, v, modifiers=[Sinks([far, far])], return_lse=True)
    np.testing.assert_allclose(out, 1 if far < 0 else 0, rtol=1e-6)
    np.testing.assert_allclose(lse, 2 + np.log(3) if far < 0 else far, rtol=1e-6)


# ---- the numpy backend -------------------------------------------------------------------------------------------------
@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case_is_within_tolerance(name: str, dtype: str) -> None:
    call, dout, dlse = Case(name, dtype, **SINKS[name]).call()
    expectation = Expectation(call, dout, dlse)
    for block_q, block_k in ((None, None), (16, 16), (7, 33)):
        out, lse = numpy_backend.forward(call, block_q=block_q, block_k=block_k)
        expectation.check_forward(out, lse)
        gradients = numpy_backend.backward(call, out, lse, dout, dlse, block_q=block_q, block_k=block_k)
        expectation.check_backward(gradients)


@cases
def test_statistics(name: str) -> None:
    case = Case(name, "float32", **SINKS[name])
    made, (call, _, _) = case.make(), case.call()
    found = cuflash.attention_statistics(made["q"], made["k"], made["v"], **made["options"])
    names = ("maximum", "entropy", "column_sums")
    Expectation(call).check_statistics({n: getattr(found, n) for n in names})


def test_weights_are_those_of_the_keys() -> None:
    case = Case("weights", **SINKS["sinks"])
    made, (call, _, _) = case.make(), case.call()
    got = cuflash.attention_weights(made["q"], made["k"], range(33), **made["options"])
    np.testing.assert_allclose(got, reference.weights(call), atol=1e-6)
    assert (got.sum(axis=-1) < 0.999).all()


# ---- the public calls --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("logits", "shape", "dtype"),
    [
        ([1, 2], (2,), "float32"),
        ([0.5, 1.5], (2,), "float32"),
        (np.array([[0.5, 1.5]] * 3), (3, 2), "float64"),
        (np.array([0.5, 1.5], np.float16), (2,), "float16"),
        (np.array([0.5, 1.5], ml_dtypes.bfloat16), (2,), "bfloat16"),
        (np.array([[0.5]], np.float32), (1, 1), "float32"),
        (np.array(0.5, np.float32), (), "float32"),
        (np.array([1, 2]), (2,), "float32"),
    ],
    ids=str,
)
def test_the_gradient_has_the_shape_and_dtype_of_the_logits(logits: Any, shape: Any, dtype: str) -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((3, 2, 5, 4)).astype(np.float16) for n in range(3))
    out, vjp = cuflash.attention_vjp(q, k, v, modifiers=[Sinks(logits)])
    gradients = vjp(out)
    assert gradients._fields == ("dq", "dk", "dv", "dsinks")
    assert (gradients.dsinks.shape, gradients.dsinks.dtype) == (shape, DTYPES[dtype])
    assert repr(Sinks(logits)) == "Sinks()"
    bias = np.zeros((5, 5), np.float16)
    out, vjp = cuflash.attention_vjp(q, k, v, bias=bias, modifiers=[Sinks(logits)])
    assert vjp(out)._fields == ("dq", "dk", "dv", "dbias", "dsinks")


def test_packed_sequences() -> None:
    """Every segment, those without keys too; rows that belong to none have no sink."""
    pack = Pack((4, 0, 3, 1, 2), (5, 2, 0, 1, 3), behind=(2, 3), heads_q=4, sinks=True, dlse=True)
    made, (call, dout, dlse) = pack.make(), pack.call()
    arguments = [made[n] for n in "qkv"] + list(made["offsets"])
    out, lse, vjp = cuflash.attention_varlen_vjp(*arguments, return_lse=True, **made["options"])
    judge = Judge(call, dout, dlse)
    judge.check_forward(out.swapaxes(0, 1), lse)
    empty = list(segments.cut(call))[2].rows  # has no keys
    np.testing.assert_allclose(lse[:, empty], logits_of(made)[:, None].repeat(3, 1), rtol=1e-6)
    gradients = vjp(made["dout"], dlse)
    assert gradients.dsinks.shape == (4,)
    assert abs(gradients.dsinks).min() > 1e-3
    want = reference.backward(call, dout, dlse).dsinks.ravel()
    np.testing.assert_allclose(gradients.dsinks, want, rtol=1e-5, atol=1e-6)


def test_merged_parts_of_which_one_has_the_sinks_are_the_whole() -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((2, 9, 4)) for n in range(3))
    sinks = (Sinks([0.3, -0.7]),)
    whole = cuflash.attention(q, k, v, modifiers=sinks, return_lse=True)
    first = cuflash.attention(q, k[:, :4], v[:, :4], modifiers=sinks, return_lse=True)
    second = cuflash.attention(q, k[:, 4:], v[:, 4:], return_lse=True)
    merged = cuflash.merge([first[0], second[0]], [first[1], second[1]])
    for got, want in zip(merged, whole, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-14)


# ---- plans -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", [80, 90])
def test_no_backend_is_lost_by_sinks(arch: int) -> None:
    """Each takes them, with the tile that it has without them."""
    call, _, _ = Case("plans", "bfloat16", sinks="h", head_dim=64).call()
    bare = replace(call.problem, modifiers=())
    device = described_device(arch)
    places = plan.places_of(
        call.problem, plan.forward_arrays(call, call.q, np.zeros(call.problem.lse_shape, np.float32))
    )
    for requested in ("mma", "wgmma")[: 1 + (arch == 90)]:
        backend, _ = select(call.problem, device, dict(places), requested=requested)
        schedules = [backend.schedule.forward(p, device.shared_limit, True) for p in (call.problem, bare)]
        assert schedules[0] == schedules[1]
        backwards = [backend.schedule.backward(p, device.shared_limit, True) for p in (call.problem, bare)]
        assert backwards[0] == backwards[1]


@pytest.mark.parametrize(("seq_q", "seq_k"), [(4, 0), (0, 4)])
def test_empty_sides(seq_q: int, seq_k: int) -> None:
    q, k, v = (np.ones((2, 3, n, 4), np.float32) for n in (seq_q, seq_k, seq_k))
    out, lse, vjp = cuflash.attention_vjp(q, k, v, modifiers=[Sinks([0.5, 1.5, 2.5])], return_lse=True)
    assert (out == 0).all()
    np.testing.assert_allclose(lse, np.broadcast_to([[0.5], [1.5], [2.5]], lse.shape))
    np.testing.assert_allclose(vjp(out, np.ones_like(lse)).dsinks, 2 * seq_q)
