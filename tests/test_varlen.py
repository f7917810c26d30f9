"""Packed sequences on the host: what a packed call means, its gradients, what it refuses, and how it is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import (
    ALiBi,
    ArgumentError,
    BlockMask,
    Documents,
    KeyLengths,
    ShapeError,
    UnsupportedError,
    numpy_backend,
    plan,
    problem,
    reference,
)
from cuflash.backends import described_device, select
from cuflash.modifiers import Packed
from tests.cases import DTYPES, STRIDES
from tests.packs import Judge, Pack
from tests.test_reference import central_difference

PACK = Pack((4, 0, 3, 1, 2, 0), (5, 2, 0, 1, 3, 0), behind=(2, 3), dtype="float64", head_dim=3, head_dim_v=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top_left"},
    "window": {"window": (1, 1)},
    "left": {"window": (2, None), "causal": "top_left"},
    "huge": {"window": (2**40, 2**40)},
    "softcap": {"softcap": 0.7, "scale": -0.6},
    "alibi": {"alibi": True, "causal": True},
    "groups": {"heads_q": 6, "heads_k": 2, "window": (None, 0)},
    "everything": {"heads_q": 4, "causal": True, "window": (2, None), "softcap": 2.0, "alibi": True, "scale": 0.4},
}
options = pytest.mark.parametrize("name", OPTIONS)


def call_of(name: str, **changes: Any) -> tuple[problem.Call, np.ndarray, np.ndarray]:
    call, dout, dlse = replace(PACK, **OPTIONS[name], dlse=True, **changes).call()
    assert dlse is not None
    return call, dout, dlse


# ---- what it means -----------------------------------------------------------------------------------------------------
def dense(name: str) -> tuple[problem.Call, Any, Any]:
    """The same pairs of queries and keys as one sequence, by a mask and a bias written from the definition."""
    pack = replace(PACK, **OPTIONS[name], dlse=True)
    made = pack.make()
    total_q, total_k = len(made["q"]), len(made["k"])
    seen, distance = np.zeros((total_q, total_k), bool), np.zeros((total_q, total_k))
    left, right = pack.window or (None, None)
    for (q0, q1), (k0, k1) in zip(*(pairwise(offsets.tolist()) for offsets in made["offsets"]), strict=True):
        shift = 0 if pack.causal == "top_left" else (k1 - k0) - (q1 - q0)
        for i in range(q0, q1):
            for j in range(k0, k1):
                ahead = (j - k0) - (i - q0) - shift
                seen[i, j] = (
                    (not pack.causal or ahead <= 0)
                    and (left is None or ahead >= -left)
                    and (right is None or ahead <= right)
                )
                distance[i, j] = abs(ahead)
    chain = made["options"]["modifiers"]
    call = problem.describe(
        made["q"],
        made["k"],
        made["v"],
        layout="bshd",
        scale=pack.scale,
        softcap=pack.softcap,
        mask=seen,
        bias=-chain[0].slopes[:, None, None] * distance if chain else None,
    )
    return call, made["dout"].swapaxes(0, 1), made["dlse"]


@options
def test_packing_hides_other_segments_and_counts_positions_within_one(name: str) -> None:
    call, dout, dlse = call_of(name)
    other = dense(name)[0]
    for got, want in zip(reference.forward(call), reference.forward(other), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)
    got, want = reference.backward(call, dout, dlse), reference.backward(other, dout, dlse)
    for field in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(got, field), getattr(want, field), rtol=1e-12, atol=1e-14, err_msg=field)
    assert got._fields == ("dq", "dk", "dv")


@options
def test_gradients_agree_with_finite_differences(name: str) -> None:
    call, dout, dlse = call_of(name)
    gradients = reference.backward(call, dout, dlse)
    for argument in "qkv":

        def loss(x: np.ndarray, argument: str = argument) -> Any:
            out, lse = reference.forward(replace(call, **{argument: x}))
            return np.vdot(dout, out) + np.vdot(dlse, np.where(np.isneginf(lse), 0, lse))

        numeric = central_difference(loss, getattr(call, argument).copy())
        exact = getattr(gradients, f"d{argument}")
        assert abs(numeric - exact).max() <= 1e-9 * max(1, abs(numeric).max()), argument
        assert abs(exact).max() > 0.01


# ---- the numpy backend -------------------------------------------------------------------------------------------------
@options
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_backend(name: str, dtype: str) -> None:
    large = {"lengths_q": (70, 0, 33, 1, 300), "lengths_k": (90, 9, 0, 1, 280), "behind": (5, 7), "head_dim": 24}
    for changes in ({}, large):
        call, dout, dlse = call_of(name, dtype=dtype, **changes)
        judge = Judge(call, dout, dlse)
        out, lse = numpy_backend.forward(call)
        judge.check_forward(out, lse)
        judge.check_backward(numpy_backend.backward(call, out, lse, dout, dlse))


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides: str) -> None:
    call, dout, dlse = replace(PACK, strides=strides, causal=True, dlse=True).call()
    judge = Judge(call, dout, dlse)
    out, lse = numpy_backend.forward(call)
    judge.check_forward(out, lse)
    judge.check_backward(numpy_backend.backward(call, out, lse, dout, dlse))


@options
def test_a_segment_has_the_bits_of_a_call_of_its_own(name: str) -> None:
    made = replace(PACK, **OPTIONS[name], dtype="float32").make()
    q, k, v, dout, keywords = (made[n] for n in ("q", "k", "v", "dout", "options"))
    out, lse, vjp = cuflash.attention_varlen_vjp(q, k, v, *made["offsets"], return_lse=True, **keywords)
    gradients = vjp(dout)
    for (q0, q1), (k0, k1) in zip(*(pairwise(x.tolist()) for x in made["offsets"]), strict=True):
        rows, columns = slice(q0, q1), slice(k0, k1)
        own_out, own_lse, own_vjp = cuflash.attention_vjp(
            q[rows], k[columns], v[columns], layout="bshd", return_lse=True, **keywords
        )
        own = own_vjp(dout[rows])
        np.testing.assert_array_equal(out[rows], own_out)
        np.testing.assert_array_equal(lse[:, rows], own_lse)
        np.testing.assert_array_equal(gradients.dq[rows], own.dq)
        np.testing.assert_array_equal(gradients.dk[columns], own.dk)
        np.testing.assert_array_equal(gradients.dv[columns], own.dv)


# ---- calls -------------------------------------------------------------------------------------------------------------
Q, K, V = (9, 4, 8), (11, 2, 8), (11, 2, 6)
OFFSETS_Q, OFFSETS_K = [0, 3, 3, 8], [0, 5, 6, 10]


def good() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("q", Q), ("k", K), ("v", V))}
    return {**arrays, "cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K}


def test_results_and_their_shapes() -> None:
    made = good()
    out, lse = cuflash.attention_varlen(**made, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((9, 4, 6), np.float32, (4, 9), np.float32)
    assert (out[8:] == 0).all()
    assert np.isneginf(lse[:, 8:]).all()
    into = np.full((9, 6, 4), np.nan, np.float32).swapaxes(1, 2)
    assert cuflash.attention_varlen(**made, out=into) is into
    np.testing.assert_array_equal(into, out)
    grads = cuflash.attention_varlen_backward(np.ones_like(out), *made.values(), out, lse, dlse=np.ones_like(lse))
    assert [x.shape for x in grads] == [Q, K, V]
    assert (grads.dq[8:] == 0).all()
    assert (grads.dk[10:] == 0).all()
    assert (grads.dv[10:] == 0).all()


@pytest.mark.parametrize(
    "kind",
    [
        tuple,
        np.array,
        lambda x: np.array(x, np.int32),
        lambda x: np.array(x, np.uint8),
        lambda x: np.repeat(np.array(x, np.int32), 2)[::2],
    ],
)
@pytest.mark.parametrize("maxima", [{}, {"max_seqlen_q": 5, "max_seqlen_k": 5}, {"max_seqlen_q": np.int64(9)}], ids=str)
def test_offsets_of_any_kind(kind: Callable[[Any], Any], maxima: dict[str, Any]) -> None:
    made = good()
    want = cuflash.attention_varlen(**made)
    made.update(cu_seqlens_q=kind(OFFSETS_Q), cu_seqlens_k=kind(OFFSETS_K))
    np.testing.assert_array_equal(cuflash.attention_varlen(**made, **maxima), want)


def test_no_segments() -> None:
    made = {**good(), "cu_seqlens_q": [0], "cu_seqlens_k": [0]}
    out, vjp = cuflash.attention_varlen_vjp(**made)
    assert (out == 0).all()
    assert all((x == 0).all() for x in vjp(np.ones_like(out)))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "falling": ({"cu_seqlens_q": [0, 4, 3, 8]}, ArgumentError, "cu_seqlens_q falls from 4 to 3 at index 2.*cumulative"),
    "not from 0": ({"cu_seqlens_k": [1, 5, 6, 10]}, ArgumentError, "cu_seqlens_k starts with 1: must start with 0"),
    "negative": ({"cu_seqlens_k": [0, -5, 6, 10]}, ArgumentError, "cu_seqlens_k falls from 0 to -5"),
    "beyond": ({"cu_seqlens_q": [0, 3, 3, 10]}, ArgumentError, "cu_seqlens_q ends with 10: must be at most 9"),
    "far beyond": ({"cu_seqlens_q": [0, 3, 3, 1 << 40]}, ArgumentError, "cu_seqlens_q ends with 1099511627776"),
    "unequal": ({"cu_seqlens_q": [0, 8]}, ShapeError, r"cu_seqlens_q has shape \(2,\) and cu_seqlens_k \(4,\)"),
    "empty": ({"cu_seqlens_q": []}, ShapeError, r"cu_seqlens_q has shape \(0,\): must be \(segments \+ 1,\)"),
    "matrix": ({"cu_seqlens_q": [OFFSETS_Q]}, ShapeError, r"cu_seqlens_q has shape \(1, 4\)"),
    "number": ({"cu_seqlens_q": 4}, ShapeError, r"cu_seqlens_q has shape \(\)"),
    "float": ({"cu_seqlens_k": [0.0, 5, 6, 10]}, ArgumentError, "cu_seqlens_k has dtype float64: must be int32"),
    "bool": ({"cu_seqlens_k": [False, True, True, True]}, ArgumentError, "cu_seqlens_k has dtype bool"),
    "maximum": ({"max_seqlen_q": 4}, ArgumentError, "max_seqlen_q=4: the longest segment of cu_seqlens_q has 5 rows"),
    "maximum of keys": ({"max_seqlen_k": 0}, ArgumentError, "max_seqlen_k=0: the longest segment"),
    "odd maximum": ({"max_seqlen_q": 4.0}, ArgumentError, r"max_seqlen_q=4\.0: must be an integer"),
    "no maximum": ({"max_seqlen_k": -1}, ArgumentError, "max_seqlen_k=-1: must be an integer of at least 0"),
    "flag": ({"max_seqlen_q": True}, ArgumentError, "max_seqlen_q=True: must be an integer"),
    "batch": ({"q": np.zeros((1, *Q), np.float32)}, ShapeError, r"q has shape \(1, 9, 4, 8\).*3 axes \(total, heads"),
    "heads": ({"q": np.zeros((9, 3, 8), np.float32)}, ShapeError, r"heads of q \(3\).*q \(9, 3, 8\)"),
    "values": ({"v": np.zeros((10, 2, 6), np.float32)}, ShapeError, "k and v must agree in heads and seq"),
    "dtypes": ({"v": np.zeros(V, np.float64)}, ArgumentError, "q, k and v must have one dtype"),
    "window": ({"window": 3}, ArgumentError, "window=3"),
    "lengths": ({"modifiers": (KeyLengths([1, 1, 1]),)}, UnsupportedError, "KeyLengths with packed sequences"),
    "documents": ({"modifiers": (Documents([0], [0]),)}, UnsupportedError, "Documents with packed sequences"),
    "blocks": ({"modifiers": (BlockMask(np.ones((1, 1), bool), 16),)}, UnsupportedError, "BlockMask with packed"),
    "slopes": ({"modifiers": (ALiBi([1.0] * 3),)}, ShapeError, "slopes of ALiBi"),
    "backend": ({"backend": "mma"}, UnsupportedError, "backend='mma' computes on an NVIDIA GPU"),
    "out": ({"out": np.zeros((9, 4, 8), np.float32)}, ShapeError, r"out has shape.*\(9, 4, 6\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_calls_are_refused_before_anything_is_written(name: str) -> None:
    changes, error, message = REFUSED[name]
    into = np.full((9, 4, 6), 7, np.float32)
    with pytest.raises(error, match=message):
        cuflash.attention_varlen(**{**good(), "out": into, **changes})
    assert (into == 7).all()


@pytest.mark.parametrize("name", ["mask", "bias", "layout"])
def test_options_that_have_no_meaning_here_are_no_arguments(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        cuflash.attention_varlen(**good(), **{name: None})


def test_results_of_another_call_are_refused() -> None:
    made = good()
    out, lse = cuflash.attention_varlen(**made, return_lse=True)
    with pytest.raises(ShapeError, match=r"lse has shape \(9, 4\): must be \(heads_q, total_q\) \(4, 9\)"):
        cuflash.attention_varlen_backward(out, *made.values(), out, np.ascontiguousarray(lse.T))
    with pytest.raises(ShapeError, match="dout has shape"):
        cuflash.attention_varlen_backward(out[:8], *made.values(), out, lse)
    with pytest.raises(ArgumentError, match="deterministic=3"):
        cuflash.attention_varlen_backward(out, *made.values(), out, lse, deterministic=3)
    with pytest.raises(ArgumentError, match="deterministic=3"):  # before anything is computed
        cuflash.attention_varlen_vjp(*made.values(), deterministic=3)


# ---- plans -------------------------------------------------------------------------------------------------------------
def planned(lengths: tuple[int, ...], dtype: str, **changes: Any) -> list[plan.Plan]:
    call, dout, _ = Pack(lengths, dtype=dtype, **changes).call()
    shapes = call.problem
    out, lse = np.zeros(shapes.out_shape, call.q.dtype), np.zeros(shapes.lse_shape, shapes.accumulator)
    forward = plan.places_of(shapes, plan.forward_arrays(call, out, lse))
    arrays = plan.backward_arrays(call, out=out, lse=lse, dout=dout, dq=call.q, dk=call.k, dv=call.v)
    device = described_device(90)
    return [
        plan.plan_forward(shapes, device, forward),
        plan.plan_backward(shapes, device, plan.places_of(shapes, arrays), True),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_kernel_serves_every_pack(dtype: str) -> None:
    """Neither lengths nor their number choose a tile, but for a segment of its own length: bits stay what they are."""
    packs = [planned(lengths, dtype, behind=behind) for lengths, behind in (((1,), (0, 0)), ((3, 4000, 0), (9, 100)))]
    for one, other in zip(*packs, strict=True):
        assert [step.variant for step in one.steps] == [step.variant for step in other.steps]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_are_as_many_as_the_rows_need(dtype: str) -> None:
    """One long segment among many short ones does not multiply the blocks of these."""
    lengths = (20000, *(1,) * 1000)
    forward, backward = planned(lengths, dtype, head_dim=64, heads_q=3, heads_k=1)
    for step in (step for step in forward.steps if hasattr(step.config, "block_q")):
        assert step.config.blocks(forward.problem) == 3 * (21000 // step.config.block_q + 1001 + 1)
    main = backward.main.config
    assert main.blocks(backward.problem) == 21000 // main.block_k + 1001 + 1


def test_more_segments_than_an_axis_of_the_grid_has_blocks() -> None:
    forward, backward = planned((1,) * 80000, "bfloat16", heads_q=1, heads_k=1)
    assert 80000 < forward.main.config.blocks(forward.problem) < plan.MAX_BLOCKS
    lists, _, *others = backward.steps
    assert lists.blocks == 1
    for step in others:
        assert 80000 < step.config.blocks(backward.problem) < plan.MAX_BLOCKS


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_hopper_kernels_take_packed_sequences(head_dim: int, backward: bool) -> None:
    """Of rows that TMA can walk, whatever the options; all others go to mma."""
    device = described_device(90)

    def chosen(pack: Pack) -> tuple[str, dict[str, str]]:
        call = replace(pack, dtype="bfloat16").call()[0]
        places = dict(plan.places_of(call.problem, plan.forward_arrays(call, call.q, None)))
        backend, reasons = select(call.problem, device, places, backward=backward)
        return backend.name, reasons

    pack = Pack((3, 0, 500), head_dim=head_dim)
    for options in ({}, {"causal": True, "window": (9, None)}, {"softcap": 2.0}, {"alibi": True}, {"heads_q": 4}):
        assert chosen(replace(pack, **options))[0] == "wgmma"
    refused = {"rows of q are not contiguous": replace(pack, strides="padded")}
    refused["an array is empty"] = replace(pack, lengths_q=(0,), lengths_k=(0,))
    for words, other in refused.items():
        name, reasons = chosen(other)
        assert name == "mma"
        assert words in reasons["wgmma"]


def test_window_offsets_stay_within_32_bits() -> None:
    """A kernel adds a position and a segment's diagonal to them."""
    limit = problem.MAX_SEQ
    for seq_q, seq_k in ((limit, limit), (1, limit), (limit, 1)):
        for window in ((None, None), (0, 0), (2**40, 2**40), (limit, 0)):
            modifiers = (problem.Window(*window), Packed(count=1))
            packed = problem.Problem("float32", (), 1, 1, seq_q, seq_k, 8, 8, 1.0, modifiers=modifiers)
            first, last = modifiers[0].offsets(packed)
            assert 1 - limit <= first <= 0 <= last <= limit - 1
            assert packed.diagonal == 0
            for at in (limit - 1, 1 - limit):  # positions of queries on their diagonal: both ways round
                for value in (at + first, at + last + 1, at - last, at - first + 1):
                    assert -(2**31) <= value < 2**31
