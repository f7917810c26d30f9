"""The reference is tested itself: finite differences, a double loop written from the definition, and identities."""

import copy
import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import scipy.optimize

from cuflash import problem, reference
from cuflash.gradients import gradients_type
from cuflash.modifiers import ALiBi, KeyLengths
from tests.cases import DTYPES, OPTIONS, Case

SIZES = {33: 4, 45: 6}  # of the shared options, brought down for finite differences


def tiny(name, **changes):
    """A case in float64 that is small enough to differentiate numerically."""
    options = dict(OPTIONS[name])
    for axis in ("seq_q", "seq_k"):
        options[axis] = SIZES[options.get(axis, getattr(Case, axis))]
    if isinstance(options.get("lengths"), tuple):
        options["lengths"] = tuple(-(-n * 6 // 45) for n in options["lengths"])
    if "blocks" in options:
        options["block_size"] = tuple(-(-n // 8) for n in options.get("block_size", Case.block_size))
    if options.get("mask_density", 1) < 0.2:
        options["mask_density"] = 0.4
    dims = {"head_dim": 2, "head_dim_v": 4} if name == "wide-values" else {"head_dim": 3, "head_dim_v": 2}
    return replace(Case(name), **{**options, **dims, "dtype": "float64", **changes})


def central_difference(f, x, step=1e-3):
    """Gradient of the number f(x) by the five-point stencil, whose error is of order step⁴."""
    gradient = np.empty(x.shape)
    for at in np.ndindex(x.shape):
        values = []
        for n in (-2, -1, 1, 2):
            moved = x.copy()
            moved[at] += n * step
            values.append(f(moved))
        gradient[at] = np.dot([1, -8, 8, -1], values) / (12 * step)
    return gradient


def loss_of(case, made, name, dout, dlse):
    """The function of one argument whose gradient `backward` returns for these dout and dlse."""

    def loss(x):
        options = made["options"] | ({name: x} if name == "bias" else {})
        arrays = [x if name == n else made[n] for n in "qkv"]
        out, lse = reference.forward(problem.describe(*arrays, **options))
        return np.vdot(dout, out) + np.vdot(dlse, np.where(np.isneginf(lse), 0, lse))

    return loss


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_agree_with_finite_differences(name):
    case = tiny(name)
    made, (call, dout, _) = case.make(), case.call()
    dlse = np.random.default_rng(1).standard_normal(call.problem.lse_shape)
    gradients = reference.backward(call, dout, dlse)
    arguments = ["q", "k", "v"] + ["bias"] * (made["options"]["bias"] is not None)
    assert gradients._fields == tuple(f"d{argument}" for argument in arguments)
    for argument in arguments:
        x = made["options"]["bias"] if argument == "bias" else made[argument]
        numeric = central_difference(loss_of(case, made, argument, dout, dlse), x)
        exact = getattr(gradients, f"d{argument}").reshape(x.shape)
        assert abs(numeric - exact).max() <= 1e-9 * max(1, abs(numeric).max()), argument
    if name == "plain":
        assert abs(gradients.dq).max() > 0.01  # the comparison above is not between zeros


@pytest.mark.parametrize("which", ["out", "lse"])
def test_gradients_agree_with_scipy(which):
    case = tiny("everything")
    made, (call, dout, dlse) = case.make(2), case.call(2)
    if which == "out":
        dlse = np.zeros_like(dlse)
    else:
        dout = np.zeros_like(dout)
    gradients = reference.backward(call, dout, dlse)
    for name in "qkv":
        loss = loss_of(case, made, name, dout, dlse)
        shape = made[name].shape
        numeric = scipy.optimize.approx_fprime(made[name].ravel(), lambda x, f=loss, s=shape: f(x.reshape(s)), 1e-7)
        np.testing.assert_allclose(getattr(gradients, f"d{name}").ravel(), numeric, rtol=1e-5, atol=1e-6)


CAUSAL = (False, True, "bottom_right", "top_left")
WINDOWS = (None, *product((None, -1, 0, 1, 3), repeat=2))


def sees(i, j, seq_q, seq_k, causal, window):
    """Whether query i sees key j, said as the documentation says it."""
    diagonal = i if causal == "top_left" else i + seq_k - seq_q
    if causal and not j <= diagonal:
        return False
    left, right = window or (None, None)
    far_left = left not in (None, -1) and j < diagonal - left
    far_right = right not in (None, -1) and j > diagonal + right
    return not far_left and not far_right


@pytest.mark.parametrize("causal", CAUSAL, ids=str)
def test_visible_set_is_that_of_a_double_loop(causal):
    for seq_q, seq_k, window in product(range(1, 8), range(1, 8), WINDOWS):
        q, k = np.ones((1, seq_q, 1)), np.ones((1, seq_k, 1))
        call = problem.describe(q, k, k, causal=causal, window=window)
        want = [[sees(i, j, seq_q, seq_k, causal, window) for j in range(seq_k)] for i in range(seq_q)]
        assert reference.visible(call)[0].tolist() == want, (seq_q, seq_k, window)
        # All scores are equal, so a row's weights are 1/n on the n keys that it sees.
        count = np.maximum(np.sum(want, axis=-1, keepdims=True), 1)
        np.testing.assert_allclose(reference.weights(call)[0], np.array(want) / count, rtol=1e-15)


def test_every_option_by_a_double_loop():
    """Each score, from its definition, with every option on: scale, softcap, ALiBi, bias, visibility, softmax."""
    case = replace(tiny("everything"), seq_q=5, seq_k=7, lengths=(5, 7))
    made, (call, _, _) = case.make(), case.call()
    options, (out, lse) = made["options"], reference.forward(call)
    slopes, lengths = options["modifiers"][0].slopes, options["modifiers"][1].lengths
    bias = np.broadcast_to(options["bias"], call.problem.score_shape)
    mask = np.broadcast_to(options["mask"], call.problem.score_shape)
    weights = reference.weights(call)
    for b, h, i in np.ndindex(2, 4, 5):
        scores = {}
        for j in range(7):
            if j > i + 2 or j < i + 2 - 30 or j >= lengths[b] or not mask[b, h, i, j]:
                continue
            s = case.scale * sum(made["q"][b, h, i, c] * made["k"][b, h // 2, j, c] for c in range(3))
            s = case.softcap * np.tanh(s / case.softcap)
            scores[j] = s - slopes[h] * abs(i + 2 - j) + bias[b, h, i, j]
        total = sum(np.exp(s) for s in scores.values())
        row = sum((np.exp(s) / total * made["v"][b, h // 2, j] for j, s in scores.items()), np.zeros(2))
        np.testing.assert_allclose(out[b, h, i], row, rtol=1e-13, atol=1e-15)
        if scores:
            np.testing.assert_allclose(lse[b, h, i], np.log(total), rtol=1e-13)
        else:
            assert lse[b, h, i] == -np.inf
        for j in range(7):
            np.testing.assert_allclose(weights[b, h, i, j], np.exp(scores[j]) / total if j in scores else 0, rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_precision_inputs_are_only_rounded_once(dtype):
    made = tiny("bias-head", dtype=dtype).make()
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    wide = [made[n].astype(np.float64) for n in "qkv"]
    options = made["options"] | {"bias": made["options"]["bias"].astype(np.float64)}
    for got, want in zip(reference.forward(call), reference.forward(problem.describe(*wide, **options)), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, want)


# ---- identities ------------------------------------------------------------------------------------------------------


def random(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def attend(q, k, v, **options):
    return reference.forward(problem.describe(q, k, v, **options))


def test_a_shift_of_a_row_of_scores_moves_only_its_lse():
    q, k, v, shift = random((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 6, 5), (2, 3, 4, 1))
    out, lse = attend(q, k, v)
    shifted, shifted_lse = attend(q, k, v, bias=100 * shift)
    np.testing.assert_allclose(shifted, out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(shifted_lse, lse + 100 * shift[..., 0], rtol=1e-13)


@pytest.mark.parametrize("cut", range(7))
def test_two_halves_weighted_by_their_lse_are_the_whole(cut):
    q, k, v = random((2, 4, 5), (2, 6, 5), (2, 6, 3))
    out, lse = attend(q, k, v)
    parts = [attend(q, k[:, part], v[:, part]) for part in (slice(0, cut), slice(cut, None))]
    np.testing.assert_allclose(np.logaddexp(parts[0][1], parts[1][1]), lse, rtol=1e-14)
    np.testing.assert_allclose(sum(np.exp(x_lse - lse)[..., None] * x for x, x_lse in parts), out, atol=1e-14)


def test_a_causal_prefix_does_not_depend_on_what_follows():
    q, k, v = random((2, 6, 5), (2, 6, 5), (2, 6, 3))
    out, lse = attend(q, k, v, causal=True)
    for n in range(1, 7):
        prefix, prefix_lse = attend(q[:, :n], k[:, :n], v[:, :n], causal=True)
        np.testing.assert_allclose(prefix, out[:, :n], atol=1e-15)
        np.testing.assert_allclose(prefix_lse, lse[:, :n], atol=1e-15)


def test_the_last_rows_may_be_asked_for_alone():
    """A cache: the newest queries against all keys give the last rows of the whole call."""
    q, k, v = random((2, 6, 5), (2, 6, 5), (2, 6, 3))
    whole = attend(q, k, v, causal=True, window=(2, None))
    last = attend(q[:, 4:], k, v, causal=True, window=(2, None))
    for x, y in zip(whole, last, strict=True):
        np.testing.assert_allclose(x[:, 4:], y, atol=1e-15)


def test_the_order_of_the_keys_does_not_matter():
    q, k, v, bias = random((2, 4, 5), (2, 6, 5), (2, 6, 3), (4, 6))
    order = np.random.default_rng(1).permutation(6)
    np.testing.assert_allclose(
        attend(q, k[:, order], v[:, order], bias=bias[:, order])[0], attend(q, k, v, bias=bias)[0], atol=1e-14
    )


def test_shared_key_heads_are_repeated_key_heads():
    q, k, v, g = random((6, 4, 5), (2, 7, 5), (2, 7, 3), (6, 4, 3))
    shared = problem.describe(q, k, v, causal=True)
    repeated = problem.describe(q, k.repeat(3, axis=0), v.repeat(3, axis=0), causal=True)
    np.testing.assert_array_equal(reference.forward(shared)[0], reference.forward(repeated)[0])
    ours, theirs = reference.backward(shared, g), reference.backward(repeated, g)
    np.testing.assert_array_equal(ours.dq, theirs.dq)
    for name in ("dk", "dv"):
        want = getattr(theirs, name).reshape(2, 3, 7, -1).sum(axis=1)
        np.testing.assert_allclose(getattr(ours, name), want, atol=1e-14)


def test_softcap_bounds_before_anything_is_hidden():
    """A cap after the mask would turn −∞ into −cap and let hidden keys in."""
    q, k, v = random((1, 3, 4), (1, 3, 4), (1, 3, 4))
    np.testing.assert_allclose(attend(q, k, v, softcap=0.01, causal=True)[0][0, 0], v[0, 0], atol=1e-15)
    np.testing.assert_allclose(attend(9 * q, k, v, softcap=1e-9)[0][0], v[0].mean(axis=0, keepdims=True).repeat(3, 0))


# ---- rows without keys, values that are not finite -------------------------------------------------------------------


def test_a_row_that_sees_no_key_is_zero_by_selection():
    """Even where its own query and gradient are NaN: nothing of it may reach a result."""
    q, k, v, g, dlse = random((2, 5, 3), (2, 4, 3), (2, 4, 3), (2, 5, 3), (2, 5))
    mask = np.ones((5, 4), bool)
    mask[[0, 3]] = False
    clean = reference.backward(problem.describe(q, k, v, mask=mask), g, dlse)
    for x in (q, g, dlse):
        x[:, [0, 3]] = np.nan
    call = problem.describe(q, k, v, mask=mask)
    out, lse = reference.forward(call)
    assert (out[:, [0, 3]] == 0).all()
    assert np.isneginf(lse[:, [0, 3]]).all()
    for got, want in zip(reference.backward(call, g, dlse), clean, strict=True):
        np.testing.assert_array_equal(got, want)
    assert (reference.backward(call, g, dlse).dq[:, [0, 3]] == 0).all()


def test_a_bias_of_minus_infinity_everywhere_is_an_empty_row():
    q, k, v, g, bias = random((1, 3, 4), (1, 5, 4), (1, 5, 4), (1, 3, 4), (3, 5))
    bias[1] = -np.inf
    want = reference.backward(problem.describe(q[:, ::2], k, v, bias=bias[::2]), g[:, ::2])
    g[0, 1] = np.nan
    call = problem.describe(q, k, v, bias=bias)
    out, lse = reference.forward(call)
    assert (out[0, 1] == 0).all()
    assert lse[0, 1] == -np.inf
    got = reference.backward(call, g)
    assert (got.dq[0, 1] == 0).all()
    assert (got.dbias[..., 1, :] == 0).all()
    np.testing.assert_allclose(got.dk, want.dk, atol=1e-15)
    np.testing.assert_allclose(got.dv, want.dv, atol=1e-15)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_no_row_sees_never_reaches_a_result(value):
    q, k, v, g = random((2, 2, 3, 4), (2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 3, 4))
    options = {"mask": np.array([True, False, True, True, True, True]), "modifiers": [KeyLengths(np.array([4, 5]))]}
    clean = problem.describe(q.copy(), k.copy(), v.copy(), **options)
    for x in (k, v):
        x[0, :, 4:], x[1, :, 5:], x[:, :, 1] = value, value, value
    dirty = problem.describe(q, k, v, **options)
    for got, want in zip(reference.forward(dirty), reference.forward(clean), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(reference.backward(dirty, g), reference.backward(clean, g), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_other(which):
    q, k, v, g = random((1, 5, 3), (1, 5, 3), (1, 5, 3), (1, 5, 3))
    clean = problem.describe(q.copy(), k.copy(), v.copy(), causal=True)
    {"q": q, "k": k, "v": v}[which][0, 2] = np.nan
    dirty = problem.describe(q, k, v, causal=True)
    rows = [2] if which == "q" else [2, 3, 4]
    others = [i for i in range(5) if i not in rows]
    out, want = reference.forward(dirty)[0], reference.forward(clean)[0]
    assert np.isnan(out[0, rows]).all()
    np.testing.assert_array_equal(out[0, others], want[0, others])
    got, want = reference.backward(dirty, g), reference.backward(clean, g)
    assert np.isnan(got.dq[0, rows]).all()
    np.testing.assert_array_equal(got.dq[0, others], want.dq[0, others])
    # Through their rows it reaches the gradients of the keys that these rows see: all up to the last row.
    if which == "q":
        np.testing.assert_array_equal(got.dk[0, 3:], want.dk[0, 3:])
        assert np.isnan(got.dk[0, :3]).all()


def test_sizes_of_zero():
    for seq_q, seq_k in ((0, 3), (3, 0), (0, 0)):
        q, k, v, g = random((2, seq_q, 4), (2, seq_k, 4), (2, seq_k, 5), (2, seq_q, 5))
        call = problem.describe(q, k, v, causal=True)
        out, lse = reference.forward(call)
        assert out.shape == (2, seq_q, 5)
        assert (out == 0).all()
        assert np.isneginf(lse).all()
        for x, gradient in zip((q, k, v), reference.backward(call, g), strict=True):
            assert gradient.shape == x.shape
            assert (gradient == 0).all()


def test_distances_count_from_the_causal_diagonal():
    """ALiBi by hand: two queries at positions 1 and 2 of three keys."""
    q, k = np.zeros((1, 2, 1)), np.zeros((1, 3, 1))
    weights = reference.weights(problem.describe(q, k, k, modifiers=[ALiBi(np.array([1.0]))]))
    row = np.exp([[-1.0, 0.0, -1.0], [-2.0, -1.0, 0.0]])
    np.testing.assert_allclose(weights[0], row / row.sum(axis=-1, keepdims=True), rtol=1e-15)


def test_gradients_can_be_pickled_and_copied():
    gradients = gradients_type(("bias",))(1, 2, 3, dbias=4)
    assert type(gradients) is gradients_type(("bias",))
    assert type(gradients) is not gradients_type()
    for again in (pickle.loads(pickle.dumps(gradients)), copy.copy(gradients), copy.deepcopy(gradients)):
        assert again == gradients
        assert type(again) is type(gradients)
        assert again.dbias == 4
