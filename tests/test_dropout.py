"""Dropout: its numbers from the definition, the same for all who draw them; gradients; and what it leaves alone."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, Dropout, UnsupportedError, numpy_backend, plan, problem, reference
from cuflash.backends import described_device, select
from cuflash.modifiers.dropout import head_keys, numbers_of, philox
from tests.cases import DROPOUT, DTYPES, Case
from tests.packs import Judge, Pack
from tests.test_errors import device_array
from tests.test_reference import central_difference
from tests.tolerance import Expectation

cases = pytest.mark.parametrize("name", DROPOUT)
ONES = 0xFFFFFFFF


# ---- the numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES,) * 4, (ONES,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(counter: Any, key: Any, words: str) -> None:
    """Those that the authors' Random123 publishes for philox4x32-10."""
    assert " ".join(f"{int(x):08x}" for x in philox(counter, key)) == words


def number(seed: int, offset: int, entry: int, head: int, i: int, j: int) -> int:
    """One number in plain Python, as the documentation says it."""

    def plain(counter: list[int], key: list[int]) -> list[int]:
        for step in range(10):
            low, high = ((k + step * w) & ONES for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
            first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = [second >> 32 ^ counter[1] ^ low, second & ONES, first >> 32 ^ counter[3] ^ high, first & ONES]
        return counter

    key = plain([offset & ONES, offset >> 32, entry, head], [seed & ONES, seed >> 32])[:2]
    words = plain([j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, 0, 0], key)
    return words[2 * (i // 8 % 2) + j // 8 % 2] >> 16 * (j % 2) & 0xFFFF


def test_numbers_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        seed, offset = (int(x) for x in rng.integers(0, 1 << 64, 2, np.uint64))
        entry, head, i, j = (
            int(rng.integers(1 << 20)),
            int(rng.integers(64)),
            *(int(x) for x in rng.integers(1 << 30, size=2)),
        )
        keys = head_keys(seed, offset, np.uint64(entry), np.uint64(head)).reshape(1, 1)
        (found,) = numbers_of(keys, slice(i, i + 1), slice(j, j + 1)).ravel()
        assert int(found) == number(seed, offset, entry, head, i, j)


def test_any_part_of_the_positions_has_the_same_numbers() -> None:
    keys = head_keys(3, 1 << 40, np.arange(2, dtype=np.uint64)[:, None], np.arange(3, dtype=np.uint64))[..., None, None]
    whole = numbers_of(keys, slice(0, 70), slice(0, 90))
    assert whole.shape == (2, 3, 70, 90)
    for rows, columns in ((slice(3, 40), slice(1, 2)), (slice(15, 17), slice(7, 90)), (slice(69, 70), slice(30, 64))):
        np.testing.assert_array_equal(numbers_of(keys, rows, columns), whole[..., rows, columns])
    assert len(np.unique(whole[0, 0])) > 5900  # of 6300; more would repeat if counters did


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_the_share_that_is_dropped(p: float) -> None:
    """In every head, row and column, within five standard deviations; and heads, seeds and offsets do not agree."""
    kept = cuflash.dropout_mask(Dropout(p, 7, 11), (2, 3, 512, 640))
    deviation = np.sqrt(p * (1 - p))
    for axes, n in (((-2, -1), 512 * 640), (-1, 640), (-2, 512)):
        assert (abs(kept.mean(axis=axes) - (1 - p)) < 5.5 * deviation / np.sqrt(n) + 2**-17).all()
    others = [
        cuflash.dropout_mask(Dropout(p, *pair), (2, 3, 512, 640)) for pair in ((8, 11), (7, 12), (7 + (1 << 32), 11))
    ]
    pairs = [(kept, x) for x in others]
    pairs += [(kept[0], kept[1]), (kept[:, 0], kept[:, 1]), (kept[..., 1:, :], kept[..., :-1, :])]
    pairs += [(kept[..., 8:, :], kept[..., :-8, :]), (kept[..., 1:], kept[..., :-1]), (kept[..., 8:], kept[..., :-8])]
    for x, y in pairs:
        correlation = (np.mean(x & y) - np.mean(x) * np.mean(y)) / deviation**2
        assert abs(correlation) < 5.5 / np.sqrt(x.size)


def test_the_mask_is_what_a_call_drops() -> None:
    """With the unit matrix for values, outputs are weights."""
    q, k = (np.random.default_rng(n).standard_normal((2, 3, 2, 40, 8)) for n in (0, 1))
    dropout = Dropout(0.4, 1 << 63, 5)
    v = np.broadcast_to(np.eye(40), (2, 3, 2, 40, 40))
    plain, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    out, dropped_lse = cuflash.attention(q, k, v, causal=True, modifiers=[dropout], return_lse=True)
    kept = cuflash.dropout_mask(dropout, (2, 3, 2, 40, 40))
    np.testing.assert_array_equal(out != 0, kept & (plain != 0))
    np.testing.assert_allclose(out, np.where(kept, plain * dropout.factor, 0), rtol=1e-14)
    np.testing.assert_array_equal(lse, dropped_lse)
    weights = cuflash.attention_weights(q, k, [3, 39], causal=True, modifiers=[dropout])
    np.testing.assert_allclose(weights, out[..., [3, 39], :], atol=1e-14)


def test_on_average_nothing_changes() -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((2, 8, 4)) for n in range(3))
    outs = [cuflash.attention(q, k, v, modifiers=[Dropout(0.3, 1, offset)]) for offset in range(2000)]
    error = np.std(outs, axis=0) / np.sqrt(len(outs))
    assert (abs(np.mean(outs, axis=0) - cuflash.attention(q, k, v)) < 5 * error).all()


# ---- against the reference ---------------------------------------------------------------------------------------------
@cases
def test_gradients_agree_with_finite_differences(name: str) -> None:
    options = {**DROPOUT[name], "seq_q": 6, "seq_k": 5, "head_dim": 3, "head_dim_v": 2}
    if "lengths" in options:
        options["lengths"] = (5, 3)
    case = Case(name, "float64", **options)
    made, (call, dout, _) = case.make(), case.call()
    dlse = np.random.default_rng(1).standard_normal(call.problem.lse_shape)
    gradients = reference.backward(call, dout, dlse)

    def loss(argument: str, x: np.ndarray) -> float:
        changed = {"bias": x} if argument == "bias" else {}
        arrays = [x if argument == n else made[n] for n in "qkv"]
        out, lse = reference.forward(problem.describe(*arrays, **made["options"] | changed))
        return float(np.vdot(dout, out) + np.vdot(dlse, np.where(np.isneginf(lse), 0, lse)))

    for argument in ("q", "k", "v", *(("bias",) if case.bias else ())):
        x = made["options"]["bias"] if argument == "bias" else made[argument]
        numeric = central_difference(lambda moved, argument=argument: loss(argument, moved), x)
        exact = getattr(gradients, f"d{argument}").reshape(x.shape)
        assert abs(numeric - exact).max() <= 1e-9 * max(1, abs(numeric).max()), argument
    if name == "dropout":
        plain = reference.backward(replace(call, problem=replace(call.problem, modifiers=())), dout, dlse)
        assert abs(gradients.dv - plain.dv).max() > 0.1


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case_is_within_tolerance(name: str, dtype: str) -> None:
    call, dout, dlse = Case(name, dtype, **DROPOUT[name]).call()
    expectation = Expectation(call, dout, dlse)
    for block_q, block_k in ((None, None), (16, 16), (7, 33)):
        out, lse = numpy_backend.forward(call, block_q=block_q, block_k=block_k)
        expectation.check_forward(out, lse)
        gradients = numpy_backend.backward(call, out, lse, dout, dlse, block_q=block_q, block_k=block_k)
        expectation.check_backward(gradients)


def test_statistics_are_those_before_dropout() -> None:
    case = Case("statistics", **DROPOUT["dropout-causal"])
    made = case.make()
    arguments = [made[n] for n in "qkv"]
    found = cuflash.attention_statistics(*arguments, **made["options"])
    plain = cuflash.attention_statistics(*arguments, **{**made["options"], "modifiers": ()})
    for name in ("lse", "maximum", "entropy", "column_sums"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))
    assert abs(found.out - plain.out).max() > 0.1


def test_rows_of_which_nothing_is_left_are_0() -> None:
    """The sum of a row is taken before, so that nothing is divided by 0: the first rows of a causal mask, nearly all dropped."""
    x = np.ones((1, 64, 4), np.float32)
    out, vjp = cuflash.attention_vjp(x, x, x, causal=True, modifiers=[Dropout(0.97, 1, 2)])
    kept = cuflash.dropout_mask(Dropout(0.97, 1, 2), (1, 64, 64)) & np.tri(64, dtype=bool)
    assert (out[0, :, 0] == 0).tolist() == (~kept[0].any(axis=-1)).tolist()
    assert (out == 0).any()
    assert (out != 0).any()
    assert all(np.isfinite(gradient).all() for gradient in vjp(x))


def test_segments_of_a_pack_are_the_entries_of_a_batch() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 5, 2, 4)) for _ in range(3))
    chain = [Dropout(0.5, 3, 4)]
    batch, batch_vjp = cuflash.attention_vjp(q, k, v, layout="bshd", causal=True, modifiers=chain)
    rows = [x.reshape(15, 2, 4) for x in (q, k, v)]
    packed, packed_vjp = cuflash.attention_varlen_vjp(*rows, *2 * [[0, 5, 10, 15]], causal=True, modifiers=chain)
    np.testing.assert_array_equal(packed, batch.reshape(15, 2, 4))
    for x, y in zip(packed_vjp(packed), batch_vjp(batch), strict=True):
        np.testing.assert_allclose(x, y.reshape(15, 2, 4), atol=1e-15)
    pack = Pack((4, 0, 3, 1), (5, 2, 0, 1), behind=(2, 3), dropout=0.5, dlse=True)
    made, (call, dout, dlse) = pack.make(), pack.call()
    arguments = [made[n] for n in "qkv"] + list(made["offsets"])
    out, lse, vjp = cuflash.attention_varlen_vjp(*arguments, return_lse=True, **made["options"])
    judge = Judge(call, dout, dlse)
    judge.check_forward(out.swapaxes(0, 1), lse)
    judge.check_backward(type(g := vjp(made["dout"], dlse))(*(x.swapaxes(0, 1) for x in g)))


def test_batch_entries_do_not_depend_on_each_other() -> None:
    made = Case("batch", "float32", batch=(3, 2), dropout=0.5).make()
    options = {**made["options"], "batch_invariant": True}
    whole = cuflash.attention(made["q"], made["k"], made["v"], **options)
    first = cuflash.attention(*(made[n][:1] for n in "qkv"), **options)
    np.testing.assert_array_equal(whole[:1], first)


# ---- p and what it is not ----------------------------------------------------------------------------------------------
def test_no_dropout_is_another_problem_in_nothing() -> None:
    x = np.ones((1, 4, 8), np.float32)
    plain = problem.describe(x, x, x)
    for p in (0, 0.0, 2.0**-18):
        call = problem.describe(x, x, x, modifiers=[Dropout(p, 1, 2)])
        assert call.problem == plain.problem
        assert not call.operands
        assert not call.numbers
    assert problem.describe(x, x, x, modifiers=[Dropout(2.0**-16, 1, 2)]).problem != plain.problem


def test_seeds_and_offsets_are_no_part_of_a_plan() -> None:
    x = np.ones((1, 4, 8), np.float32)
    calls = [
        problem.describe(x, x, x, modifiers=[Dropout(0.1, seed, offset)]) for seed, offset in ((1, 2), (1 << 60, 0))
    ]
    assert calls[0].problem == calls[1].problem
    assert calls[0].numbers == {"dropout_seed_value": 1, "dropout_offset_value": 2}
    assert calls[1].numbers == {"dropout_seed_value": 1 << 60, "dropout_offset_value": 0}
    dropout = Dropout(np.float32(0.25), 1, 2)
    assert (dropout.threshold, dropout.factor, repr(dropout)) == (1 << 14, 4 / 3, "Dropout(p=0.25)")
    assert pickle.loads(pickle.dumps(dropout)).seed == 1


@pytest.mark.parametrize("kind", [int, np.int64, np.uint32, np.array, lambda x: np.array([x])])
def test_kinds_of_seeds(kind: Any) -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((2, 8, 4)) for n in range(3))
    want = cuflash.attention(q, k, v, modifiers=[Dropout(0.5, 12, 34)])
    np.testing.assert_array_equal(cuflash.attention(q, k, v, modifiers=[Dropout(0.5, kind(12), kind(34))]), want)
    kept = cuflash.dropout_mask(Dropout(0.5, kind(12), kind(34)), (2, 8, 8))
    np.testing.assert_array_equal(kept, cuflash.dropout_mask(Dropout(0.5, 12, 34), (2, 8, 8)))


@pytest.mark.parametrize("p", [-0.1, 1, 1.0, np.nan, np.inf, "0.5", None, True, 1 - 2**-18, np.ones(2), 2], ids=str)
def test_refused_p(p: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^p=.* of Dropout: "):
        Dropout(p, 1, 2)


@pytest.mark.parametrize("value", [None, -1 << 64, 1 << 64, 0.5, "1", True, np.ones(2, int), np.ones(1), [1]], ids=str)
@pytest.mark.parametrize("name", ["seed", "offset"])
def test_refused_seeds(name: str, value: Any) -> None:
    x = np.ones((1, 4, 8), np.float32)
    dropout = Dropout(0.5, **{"seed": 1, "offset": 2, name: value})
    with pytest.raises(ArgumentError, match=f"^{name}.* of Dropout"):
        cuflash.attention(x, x, x, modifiers=[dropout])
    with pytest.raises(ArgumentError, match=f"^{name}.* of Dropout"):
        cuflash.dropout_mask(dropout, (1, 4, 4))


def test_refused_masks() -> None:
    with pytest.raises(ArgumentError, match=r"^dropout=0\.5: must be a Dropout"):
        cuflash.dropout_mask(0.5, (1, 4, 4))  # type: ignore[arg-type]
    for shape in ((4, 4), [1, 4, 4], (1, 4, 4.0), 3):
        with pytest.raises(ArgumentError, match=r"^shape=.*: must be a tuple"):
            cuflash.dropout_mask(Dropout(0.5, 1, 2), shape)  # type: ignore[arg-type]


def test_an_array_on_a_device_is_refused_beside_host_arrays() -> None:
    x = np.ones((1, 4, 8), np.float32)
    with pytest.raises((ArgumentError, UnsupportedError)):
        cuflash.attention(x, x, x, modifiers=[Dropout(0.5, device_array((1,), np.int64), 2)])


# ---- backends ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backward", [False, True])
def test_hopper_leaves_it_to_mma(backward: bool) -> None:
    call, _, _ = Case("plans", "bfloat16", dropout=0.1, head_dim=64).call()
    lse = np.zeros(call.problem.lse_shape, np.float32)
    at = dict(plan.places_of(call.problem, plan.forward_arrays(call, call.q, lse)))
    backend, reasons = select(call.problem, described_device(90), at, backward=backward)
    assert backend.name == "mma"
    assert "random numbers of Dropout" in reasons["wgmma"]


def test_decode_refuses_it() -> None:
    q, cache = np.ones((1, 2, 1, 8), np.float32), np.ones((1, 2, 16, 8), np.float32)
    with pytest.raises(ArgumentError, match="Dropout: attention_decode takes ALiBi and Sinks only"):
        cuflash.attention_decode(q, cache, cache, [3], modifiers=(Dropout(0.5, 1, 2),))
