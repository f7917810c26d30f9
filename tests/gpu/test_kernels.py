"""Every backend and dtype against the reference: options alone and together, groups, head sizes, lengths; repeatability."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import ALiBi, KeyLengths, UnsupportedError, problem, reference
from tests.cases import DTYPES, OPTIONS, STRIDES, Case
from tests.gpu.device import DRY, KINDS, MAIN_KINDS, Device, Kind, canonical_gradients, check, on_device
from tests.tolerance import Expectation, assert_close

SEQ_Q, SEQ_K = 150, 283  # several tiles of every schedule, none of them full at the end


def over_tiles(name: str, options: dict[str, Any]) -> Case:
    """A case of `OPTIONS` at lengths of several tiles; it keeps which of the two is the longer one."""
    more_queries = options.get("seq_q", 0) > options.get("seq_k", 0)
    lengths = {"seq_q": SEQ_K, "seq_k": SEQ_Q} if more_queries else {"seq_q": SEQ_Q, "seq_k": SEQ_K}
    return Case(name, **{**options, **lengths})


TILED = [over_tiles(name, options) for name, options in OPTIONS.items()]

# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.name)
def test_option(device: Device, kind: Kind, case: Case) -> None:
    check(device, kind, case)


@pytest.mark.parametrize("name", ["plain", "causal", "window", "mask-sparse", "bias-row", "lengths", "everything"])
def test_option_in_one_tile(device: Device, kind: Kind, name: str) -> None:
    check(device, kind, Case(name, **OPTIONS[name]))


#: each modifier, at values that hide keys and move scores
FACTORS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (90, 40)},
    {"softcap": 2.0},
    {"mask": "h1k"},
    {"bias": "b1qk"},
    {"alibi": "h"},
    {"lengths": (120, 283)},
    {"scale": -0.4, "heads_q": 4},
)


def combination(row: int) -> Case:
    """One of 16 choices among the 8 factors: of any three factors, all 8 choices occur twice.

    Factor j is in row r if r and the j-th 4-bit number with an odd number of ones share an odd number of ones; three
    such numbers are linearly independent over GF(2), so this is an orthogonal array of strength 3.
    """
    columns = [n for n in range(16) if n.bit_count() % 2]
    chosen = [factor for n, factor in zip(columns, FACTORS, strict=True) if (row & n).bit_count() % 2]
    options: dict[str, Any] = {"seq_q": SEQ_Q, "seq_k": SEQ_K, "dlse": bool(row % 2)}
    for factor in chosen:
        options |= factor
    return Case(f"combination-{row}", **options)


COMBINATIONS = [combination(row) for row in range(16)]


def test_combinations_hold_every_three_factors() -> None:
    chosen = [tuple(all(getattr(case, n) == v for n, v in f.items()) for f in FACTORS) for case in COMBINATIONS]
    for three in combinations(range(len(FACTORS)), 3):
        assert len({tuple(row[j] for j in three) for row in chosen}) == 8


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=str, indirect=True)
@pytest.mark.parametrize("case", COMBINATIONS, ids=lambda case: case.name)
def test_combination(device: Device, kind: Kind, case: Case) -> None:
    check(device, kind, case)


def test_each_option_changes_the_answer(device: Device, kind: Kind) -> None:
    """None is accepted and ignored: any two of these calls give different results."""
    rng, dtype = np.random.default_rng(1), DTYPES[kind.dtype]
    q, k, v = (device.put(rng.standard_normal((2, 2, n, 16)).astype(dtype)) for n in (150, 283, 283))
    mask = device.put(rng.random((283,)) < 0.5)
    bias = device.put(rng.standard_normal((150, 1)).astype(dtype) * np.ones(283, dtype))
    bias_row = device.put(rng.standard_normal((283,)).astype(dtype))
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "scale": {"scale": 0.5},
        "scale negative": {"scale": -0.5},
        "causal": {"causal": True},
        "causal top left": {"causal": "top_left"},
        "window left": {"window": (40, None)},
        "window right": {"window": (None, 40)},
        "window": {"window": (40, 40)},
        "window 0": {"window": (0, 0)},
        "window top left": {"window": (40, 40), "causal": "top_left"},
        "softcap": {"softcap": 0.8},
        "mask": {"mask": mask},
        "bias": {"bias": bias_row},
        "slopes": {"modifiers": [ALiBi(np.full(2, 0.25))]},
        "lengths": {"modifiers": [KeyLengths(np.array([100, 283]))]},
    }
    outs, lses = {}, {}
    for name, given in options.items():
        out, lse = cuflash.attention(q, k, v, return_lse=True, backend=kind.backend, **given)
        outs[name], lses[name] = device.get(out), device.get(lse)
    # A bias by row leaves the weights, and shows in the lse.
    _, lses["bias by row"] = map(
        device.get, cuflash.attention(q, k, v, return_lse=True, backend=kind.backend, bias=bias)
    )
    for first, second in combinations(outs, 2):
        assert not np.array_equal(outs[first], outs[second]), f"{first} and {second} give the same output"
    for first, second in combinations(lses, 2):
        assert not np.array_equal(lses[first], lses[second]), f"{first} and {second} give the same lse"


def test_new_maximum_in_a_later_block(device: Device, kind: Kind) -> None:
    """Scores 0 for 256 keys, then 10: both the sum and the output must change base."""
    dtype = DTYPES[kind.dtype]
    q = np.ones((1, 4, 16), dtype)
    k, v = (np.zeros((1, 512, 16), dtype) for _ in "kv")
    k[:, 256:, 0], v[:, 256:] = 10, 1
    out = device.get(
        cuflash.attention(device.put(q), device.put(k), device.put(v), scale=1, backend=kind.backend)
    ).astype(np.float64)
    want = 1 / (1 + np.exp(-10))  # 0.9999546
    assert abs(out - want).max() <= 2 * float(np.spacing(dtype.type(1)))


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12])
def test_group(device: Device, kind: Kind, group: int) -> None:
    for seq_q, heads_k in ((1, 2), (20, 1), (75, 2)):
        case = Case("", batch=(2,), heads_q=group * heads_k, heads_k=heads_k, seq_q=seq_q, seq_k=90)
        check(device, kind, replace(case, causal=True, window=(30, None), bias="hqk", dlse=True))


HEAD_DIMS = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 46, 48, 63, 64, 65, 72, 80, 96, 100, 112, 120)
LARGE_HEAD_DIMS = (127, 128, 129, 136, 144, 160, 176, 192, 208, 224, 240, 255, 256)


def head_size(d: int, d_v: int, backward: bool = True) -> Case:
    lengths = {"seq_q": 70, "seq_k": 83} if backward else {"seq_q": 19, "seq_k": 21}
    return Case(f"{d}x{d_v}", batch=(1,), head_dim=d, head_dim_v=d_v, heads_q=2, heads_k=1, causal=True, **lengths)


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=str, indirect=True)
@pytest.mark.parametrize("d", HEAD_DIMS + LARGE_HEAD_DIMS)
def test_head_size_forward(device: Device, kind: Kind, d: int) -> None:
    check(device, kind, head_size(d, d, backward=False), backward=False)


HEAD_SIZES = (
    *((d, d) for d in (1, 8, 33, 46, 64, 80, 96, 128, 160, 192, 256)),
    *((64, 1), (1, 64), (5, 9), (40, 8), (192, 128), (128, 192), (576, 512), (320, 64)),
)


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=str, indirect=True)
@pytest.mark.parametrize(("d", "d_v"), HEAD_SIZES)
def test_head_size(device: Device, kind: Kind, d: int, d_v: int) -> None:
    """Backward too; a size that no backend takes is refused with its limit, not computed wrongly."""
    case = head_size(d, d_v)
    if max(d, d_v) <= 256:
        check(device, kind, case)
        return
    try:
        check(device, kind, case)
    except UnsupportedError as error:
        assert "head_dim" in str(error)  # noqa: PT017 - either answer is right


@pytest.mark.parametrize("batch", [(), (1,), (3, 2), (2, 1, 3), (0,), (2, 0), (40,), (300,)], ids=str)
def test_batch(device: Device, kind: Kind, batch: tuple[int, ...]) -> None:
    case = Case("", batch=batch, heads_q=4, seq_q=9, seq_k=11, head_dim=8, bias="b1qk", mask="h1k", lengths="random")
    check(device, kind, case)


LENGTH_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "top_left"},
    {"window": (17, 3)},
    {"window": (40, 0), "causal": "top_left"},
)


@pytest.mark.parametrize("kind", MAIN_KINDS, ids=str, indirect=True)
@pytest.mark.parametrize("options", LENGTH_OPTIONS, ids=lambda x: "-".join(map(str, x.values())) or "plain")
def test_every_length(device: Device, kind: Kind, options: dict[str, Any]) -> None:
    """Every seq_q and every seq_k from 1 to two tiles and one, in pairs that mix small with large ones."""
    step = 16 if DRY else 1
    for seq_k in range(1, 258, step):
        seq_q = seq_k * 29 % 257 or 257  # 257 is prime: each number comes once
        case = Case("", batch=(), heads_q=1, heads_k=1, seq_q=seq_q, seq_k=seq_k, head_dim=8, **options)
        try:
            check(device, kind, case, seed=seq_k)
        except AssertionError as error:
            raise AssertionError(f"seq_q {seq_q}, seq_k {seq_k}: {error}") from error


@pytest.mark.parametrize("seq_q", [0, 1, 63, 64, 65, 128, 129, 511, 513])
@pytest.mark.parametrize("seq_k", [0, 1, 64, 128, 129, 512, 513, 1100])
def test_lengths_about_tiles(device: Device, kind: Kind, seq_q: int, seq_k: int) -> None:
    shape = {"batch": (), "heads_q": 1, "heads_k": 1, "head_dim": 8}
    for causal in (False, True):
        check(device, kind, Case("", seq_q=seq_q, seq_k=seq_k, causal=causal, dlse=causal, **shape))


# ---- the calls -------------------------------------------------------------------------------------------------------


def medium(device: Device, kind: Kind, **shape: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of a call with many blocks, on the device, and its options."""
    shape = {"heads_q": 8, "heads_k": 4, "seq_q": 500, "seq_k": 700, "head_dim": 64, "causal": True, **shape}
    made = Case("", dtype=kind.dtype, dlse=True, **shape).make()
    options = {**on_device(device, made.pop("options")), "backend": kind.backend}
    return {name: device.put(x) for name, x in made.items()}, options


def test_out_and_lse_are_the_same_however_asked_for(device: Device, kind: Kind) -> None:
    arrays, options = medium(device, kind)
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    with device.poisoned():
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        alone = cuflash.attention(q, k, v, **options)
        target = device.xp.empty(out.shape, out.dtype)
        again, lse_again = cuflash.attention(q, k, v, return_lse=True, out=target, **options)
        assert again is target
        first, vjp = cuflash.attention_vjp(q, k, v, **options)
        given = cuflash.attention_backward(arrays["dout"], q, k, v, out, lse, dlse=arrays["dlse"], **options)
        pulled = vjp(arrays["dout"], arrays["dlse"])
        results = [device.get(x) for x in (out, alone, target, first)]
        np.testing.assert_array_equal(device.get(lse), device.get(lse_again))
        for result in results[1:]:
            np.testing.assert_array_equal(results[0], result)
        for name in ("dk", "dv"):
            np.testing.assert_array_equal(device.get(getattr(pulled, name)), device.get(getattr(given, name)))
        np.testing.assert_allclose(
            device.get(pulled.dq).astype(np.float64), device.get(given.dq).astype(np.float64), atol=0.02
        )
    device.check_inputs()


def test_repeated_calls_follow_their_arguments(device: Device, kind: Kind) -> None:
    """Calls of one shape, again and again, with other data, options, strides and alignments in between."""
    rng, dtype = np.random.default_rng(6), DTYPES[kind.dtype]
    mask, bias = rng.random((70, 83)) < 0.7, rng.standard_normal((70, 83)).astype(dtype)
    choices: list[dict[str, Any]] = [
        {},
        {"scale": 0.3},
        {"causal": True},
        {"causal": "top_left"},
        {"window": (9, 3)},
        {"mask": mask},
        {"bias": bias},
        {"bias": bias[::-1]},
    ]
    places = (np.ascontiguousarray, STRIDES["padded"], STRIDES["every second"], STRIDES["last axis first"])
    for turn, options in [*enumerate(choices), *enumerate(choices), *enumerate(reversed(choices))]:
        place = places[turn % len(places)]
        host = [place(rng.standard_normal((2, 2, n, 16)).astype(dtype)) for n in (70, 83, 83)]
        expectation = Expectation(problem.describe(*host, **options))
        given = {name: device.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        arrays = [device.put(x) for x in host]
        with device.poisoned():
            out, lse = cuflash.attention(*arrays, return_lse=True, backend=kind.backend, **given)
            expectation.check_forward(device.get(out), device.get(lse))
            alone = cuflash.attention(*arrays, backend=kind.backend, **given)
            np.testing.assert_array_equal(device.get(alone), device.get(out))
        device.check_inputs()


def test_lse_gradient_is_optional(device: Device, kind: Kind) -> None:
    """No dlse is a dlse of 0, and another dlse gives other gradients of q and k and the same of v."""
    arrays, options = medium(device, kind)
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    none, zero, given = (
        cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
        for dlse in (None, device.xp.zeros_like(lse), arrays["dlse"])
    )
    np.testing.assert_array_equal(device.get(none.dk), device.get(zero.dk))
    np.testing.assert_array_equal(device.get(none.dv), device.get(given.dv))
    assert not np.array_equal(device.get(none.dk), device.get(given.dk))
    assert not np.array_equal(device.get(none.dq), device.get(given.dq))


@pytest.mark.skipif(DRY, reason="a dry run has one backend")
def test_the_backend_that_runs_is_named(device: Device, kind: Kind) -> None:
    arrays, options = medium(device, kind)
    explanation = cuflash.explain(arrays["q"], arrays["k"], arrays["v"], **options)
    assert explanation.backend == kind.backend
    assert kind.backend not in explanation.reasons
    assert ("split" if kind == ("mma", "float32") else kind.backend) in explanation.variant
    assert explanation.registers
    assert explanation.spilled_bytes == 0
    assert "numpy" in explanation.reasons
    assert str(explanation)


@pytest.mark.skipif(DRY, reason="a dry run has one backend")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backend_that_lacks_a_dtype_refuses_it(device: Device, dtype: str) -> None:
    from cuflash.backends import BACKENDS

    q = device.put(np.ones((1, 4, 8), DTYPES[dtype]))
    for row in BACKENDS:
        if dtype not in row.capabilities:
            with pytest.raises(UnsupportedError, match=row.name):
                cuflash.attention(q, q, q, backend=row.name)


# ---- repeatability ---------------------------------------------------------------------------------------------------


def test_forward_gives_the_same_bits_every_time(device: Device, kind: Kind) -> None:
    arrays, options = medium(device, kind)
    runs = 3 if DRY else 100
    first = None
    for _ in range(runs):
        out, lse = cuflash.attention(arrays["q"], arrays["k"], arrays["v"], return_lse=True, **options)
        bits = device.get(out).tobytes() + device.get(lse).tobytes()
        first = first or bits
        assert bits == first


def test_backward_gives_the_same_bits_every_time(device: Device, kind: Kind) -> None:
    """dk and dv always; all of it with deterministic=True, also through `attention_vjp`."""
    arrays, options = medium(device, kind, bias="bhqk", seq_q=300, seq_k=400)
    q, k, v, dout, dlse = (arrays[name] for name in ("q", "k", "v", "dout", "dlse"))
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)

    def bits(names: tuple[str, ...], deterministic: bool | None) -> bytes:
        gradients = cuflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **options
        )
        return b"".join(device.get(getattr(gradients, name)).tobytes() for name in names)

    runs = 3 if DRY else 20
    assert len({bits(("dk", "dv"), None) for _ in range(runs)}) == 1
    found = {bits(("dq", "dk", "dv", "dbias"), True) for _ in range(runs)}
    _, vjp = cuflash.attention_vjp(q, k, v, deterministic=True, **options)
    found |= {b"".join(device.get(x).tobytes() for x in vjp(dout, dlse)) for _ in range(runs)}
    assert len(found) == 1


#: shapes whose blocks do not all fit on a device at once, or that many blocks add to
REPEATED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal-top-left": {"causal": "top_left", "seq_q": 4096, "seq_k": 1500},
    "window": {"window": (300, 200)},
    "causal-window": {"causal": True, "window": (700, None)},
    "lengths": {"lengths": (100, 2048), "causal": True},
    "mask": {"mask": "b1qk", "mask_density": 0.3},
    "softcap-alibi": {"softcap": 3.0, "alibi": "h", "causal": True},
    "group": {"heads_q": 16, "heads_k": 2, "causal": True},
    "one-key-head": {"heads_q": 8, "heads_k": 1, "batch": (1,), "seq_q": 8192, "seq_k": 4096},
    "few-queries": {"seq_q": 20, "seq_k": 30_000},
    "few-keys": {"seq_q": 30_000, "seq_k": 20},
    "bias": {"bias": "bhqk", "heads_q": 2, "heads_k": 2},
    "head-size-128": {"head_dim": 128, "causal": True},
    "head-size-256": {"head_dim": 256, "causal": True, "heads_q": 2, "heads_k": 2},
    "head-sizes-72-200": {"head_dim": 72, "head_dim_v": 200, "heads_q": 2, "heads_k": 2},
    "everything": {
        **OPTIONS["everything"],
        "mask": "qk",
        "bias": None,
        "window": (900, None),
        "lengths": (1800, 2048),
        "head_dim_v": 40,
        "heads_k": 2,
    },
}


@pytest.mark.parametrize("name", REPEATED)
def test_turns_repeat_large_gradients(device: Device, kind: Kind, name: str) -> None:
    """The same bits 20 times, and numbers that differ from those without turns by the rounding of sums alone."""
    shape = {"heads_q": 8, "heads_k": 4, "seq_q": 2048, "seq_k": 2048, "head_dim": 64, "dlse": True, **REPEATED[name]}
    if DRY:
        shape.update({key: min(shape[key], 90) for key in ("seq_q", "seq_k")})
        shape["lengths"] = shape.get("lengths") and (40, shape["seq_k"])
    made = Case("", dtype=kind.dtype, **shape).make()
    options = {**on_device(device, made.pop("options")), "backend": kind.backend}
    q, k, v, dout, dlse = (device.put(made[x]) for x in ("q", "k", "v", "dout", "dlse"))
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)

    def gradients(deterministic: bool) -> list[np.ndarray]:
        found = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **options)
        return [device.get(x) for x in found]

    first = gradients(True)
    for _ in range(2 if DRY else 19):
        for name_, x, y in zip(("dq", "dk", "dv", "dbias"), first, gradients(True), strict=False):
            assert x.tobytes() == y.tobytes(), name_
    # Each of the terms, one for 16 positions at least, is rounded once, and so is the result.
    terms = max(shape["seq_q"], shape["seq_k"]) / 16 + 1
    sums = np.float64 if kind.dtype == "float64" else np.float32
    allowed = terms * np.finfo(sums).eps + float(ml_dtypes.finfo(DTYPES[kind.dtype]).eps)
    for x, y in zip(first, gradients(False), strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        assert np.linalg.norm(x - y) <= allowed * np.linalg.norm(y)
    device.check_inputs()


@pytest.mark.parametrize("name", ["plain", "causal", "window", "lengths", "lse-gradient", "groups", "everything"])
def test_gradients_in_turns_are_right(device: Device, kind: Kind, name: str) -> None:
    options = {**OPTIONS[name], **({"bias": "bhqk"} if OPTIONS[name].get("bias") else {})}
    check(device, kind, over_tiles(name, options), deterministic=True)


@pytest.mark.parametrize("head_dim", [8, 80, 128, 192, 256])
def test_gradients_in_turns_of_other_head_sizes_are_right(device: Device, kind: Kind, head_dim: int) -> None:
    check(device, kind, Case("", head_dim=head_dim, seq_q=150, seq_k=283, causal=True), deterministic=True)


def test_an_item_alone_gives_what_it_gives_in_a_batch(device: Device, kind: Kind) -> None:
    arrays, options = medium(device, kind, batch=(5,), seq_q=200, seq_k=300)
    out, lse = cuflash.attention(arrays["q"], arrays["k"], arrays["v"], return_lse=True, **options)
    whole = cuflash.attention_backward(arrays["dout"], arrays["q"], arrays["k"], arrays["v"], out, lse, **options)
    for i in range(5):
        q, k, v, dout = (arrays[name][i : i + 1] for name in ("q", "k", "v", "dout"))
        out_i, lse_i = cuflash.attention(q, k, v, return_lse=True, **options)
        np.testing.assert_array_equal(device.get(out_i)[0], device.get(out)[i])
        np.testing.assert_array_equal(device.get(lse_i)[0], device.get(lse)[i])
        alone = cuflash.attention_backward(dout, q, k, v, out_i, lse_i, **options)
        for name in ("dk", "dv"):
            np.testing.assert_array_equal(device.get(getattr(alone, name))[0], device.get(getattr(whole, name))[i])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_blocks_at_once(device: Device, kind: Kind, head_dim: int) -> None:
    """More blocks than multiprocessors, with head sizes that people use."""
    shape = {"heads_q": 4, "seq_q": 130, "seq_k": 150, "head_dim": head_dim}
    check(device, kind, Case("", batch=(4 if DRY else 24,), causal=True, dlse=True, **shape))


# ---- the checks themselves -------------------------------------------------------------------------------------------


def test_a_wrong_result_is_noticed(device: Device, kind: Kind) -> None:
    """One element off by ten roundings, one NaN, or one gradient for a hidden key fails the comparison."""
    case = replace(Case("", dtype=kind.dtype, causal=True, seq_q=20, seq_k=10), heads_q=2)
    call, dout, _ = case.call()
    expectation = Expectation(call, dout)
    out, lse = expectation.plain["out"], expectation.plain["lse"]
    expectation.check_forward(out, lse)
    for change in (0.1, np.nan):
        wrong = out.copy()
        wrong[0, 0, 15, 3] += change
        with pytest.raises(AssertionError):
            expectation.check_forward(wrong, lse)
    wrong = out.copy()
    wrong[0, 0, 2, 3] = 1e-5  # this row sees no key
    with pytest.raises(AssertionError, match="exactly 0"):
        expectation.check_forward(wrong, lse)
    got, want = reference.forward(call)[0].astype(out.dtype), expectation.out
    assert assert_close(got, want, out, "out") <= 1


def test_a_write_into_an_input_or_beside_it_is_noticed(device: Device) -> None:
    for place in (0, -1):
        x = device.put(np.zeros((3, 4), np.float32))
        root, _ = device.inputs[-1]
        device.check_inputs()
        device.inputs.append((root, device.get(root)))
        root[place] = 0
        with pytest.raises(AssertionError, match="were written"):
            device.check_inputs()
        device.inputs.clear()
        x = device.put(np.zeros((3, 4), np.float32))
        x[2, 3] = 1
        with pytest.raises(AssertionError, match="were written"):
            device.check_inputs()
        device.inputs.clear()


@pytest.mark.skipif(DRY, reason="NumPy's allocator is not ours")
@pytest.mark.parametrize("where", ["in front of", "behind"])
def test_new_memory_is_nan_between_guards(device: Device, where: str) -> None:
    with pytest.raises(AssertionError, match=where), device.poisoned():  # noqa: PT012 - the end of the block raises
        x = device.xp.empty(100, np.float32)
        assert np.isnan(device.get(x)).all()
        beside = x.data + (-4 if where == "in front of" else x.nbytes)
        device.xp.ndarray((1,), np.float32, beside).fill(0)


def test_the_gradients_are_brought_into_order(device: Device) -> None:
    """`canonical_gradients` undoes the layout, so a swapped axis would not go unseen."""
    made = Case("", layout="bshd", heads_q=4, heads_k=2, seq_q=5, seq_k=7).make()
    call = problem.describe(made["q"], made["k"], made["v"], layout="bshd")
    q, k, v, dout = (device.put(made[name]) for name in ("q", "k", "v", "dout"))
    out, vjp = cuflash.attention_vjp(q, k, v, layout="bshd")
    gradients = vjp(dout)
    assert gradients.dq.shape == q.shape
    assert out.shape == dout.shape
    assert canonical_gradients(device, call, gradients).dq.shape == (2, 4, 5, 16)


# ---- what `warm_cache` compiles: most of the variants that the tests here and beside need -----------------------------

MAIN_ONLY = (
    *COMBINATIONS,
    *(head_size(d, d_v) for d, d_v in HEAD_SIZES),
    *(head_size(d, d, backward=False) for d in HEAD_DIMS + LARGE_HEAD_DIMS),
    *(Case("", seq_q=n, seq_k=n, head_dim=8, **options) for options in LENGTH_OPTIONS for n in (60, 70)),
    *(Case("", head_dim=32, seq_q=150, mask="qk", bias="qk", strides=x) for x in ("contiguous", "every second")),
)
EVERY_KIND = (
    *TILED,
    *(Case(name, **OPTIONS[name]) for name in ("plain", "causal", "window", "everything")),
    *(Case("", head_dim=d, seq_q=130, causal=True) for d in (64, 128)),
    Case("", head_dim=64, seq_q=130, causal=True, bias="qk"),
    *(Case("", seq_q=n, causal=True, window=(30, None), bias="qk") for n in (20, 75)),
    *(Case("", seq_q=n, head_dim=8, causal=causal) for n in (60, 130) for causal in (False, True)),
    *(Case("", seq_q=n, head_dim=16, mask="qk", bias="qk") for n in (5, 70)),
    *(Case("", head_dim=8, head_dim_v=6, mask="qk", bias="qk", strides=x) for x in ("contiguous", "every second")),
)
COMPILED_FIRST = [
    (kind, replace(case, dtype=kind.dtype))
    for kind in KINDS
    for case in (*EVERY_KIND, *(MAIN_ONLY if kind in MAIN_KINDS else ()))
]
