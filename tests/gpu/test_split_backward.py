"""The backward of float32 on tensor cores: as exact as plain float32, whatever the numbers; repeatable in turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import problem, reference
from tests.cases import DROPOUT, OPTIONS, SINKS, STRIDES, VALUES, Case
from tests.gpu.device import DRY, Device, check
from tests.gpu.test_kernels import over_tiles
from tests.gpu.test_split import INPUTS, SPLIT, mixed, random
from tests.gpu.test_split import capable as capable  # a fixture

NAMES = ("dq", "dk", "dv")
SEQ = 200 if DRY else 700


# ---- options, shapes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: Device, name: str) -> None:
    check(device, SPLIT, over_tiles(name, OPTIONS[name]))


@pytest.mark.parametrize("name", [*SINKS, *DROPOUT])
def test_options_behind_the_scores(device: Device, name: str) -> None:
    check(device, SPLIT, over_tiles(name, {**SINKS, **DROPOUT}[name]))


@pytest.mark.parametrize("head_dim", [1, 16, 33, 64, 80, 96, 128, 160])
@pytest.mark.parametrize("causal", [False, True])
def test_head_sizes(device: Device, head_dim: int, causal: bool) -> None:
    case = Case("", seq_q=300, seq_k=411, head_dim=head_dim, causal=causal, dlse=True)
    check(device, SPLIT, case)
    check(device, SPLIT, replace(case, head_dim_v=40))


@pytest.mark.parametrize("head_dim", [192, 256])
def test_wide_heads(device: Device, head_dim: int) -> None:
    if not DRY and device.xp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"] < 227 * 1024:
        pytest.skip("tiles of wide heads need 227 KiB of shared memory")
    check(device, SPLIT, Case("", seq_q=300, seq_k=411, head_dim=head_dim, causal=True, heads_q=4))
    check(device, SPLIT, Case("", seq_q=300, seq_k=411, head_dim=head_dim, heads_q=4, **SOME))


SOME: dict[str, Any] = {"softcap": 2.0, "bias": "b1qk", "alibi": "h", "window": (200, 30)}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_lengths(device: Device, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    for _ in range(4 if DRY else 25):
        seq_q, seq_k = (int(n) for n in rng.integers(1, 400, 2))
        window = (int(rng.integers(0, 300)), int(rng.integers(0, 300))) if rng.random() < 0.5 else None
        case = Case("", seq_q=seq_q, seq_k=seq_k, heads_q=3, heads_k=1, head_dim=head_dim, window=window)
        try:
            check(device, SPLIT, replace(case, lengths="random", causal=bool(rng.random() < 0.5)))
        except AssertionError as error:
            raise AssertionError(f"{seq_q} x {seq_k}, window {window}: {error}") from error


@pytest.mark.parametrize("name", STRIDES)
def test_strides(device: Device, name: str) -> None:
    for layout in ("bhsd", "bshd"):
        check(device, SPLIT, Case("", seq_q=150, seq_k=283, strides=name, layout=layout, head_dim=40, causal=True))


@pytest.mark.parametrize("values", VALUES)
def test_values(device: Device, values: str) -> None:
    check(device, SPLIT, Case("", seq_q=150, seq_k=283, head_dim=64, values=values, causal=True, dlse=True))


# ---- beside plain float32 ----------------------------------------------------------------------------------------------
def gradients(device: Device, backend: str, arrays: Any, **options: Any) -> dict[str, np.ndarray]:
    """Of q, k, v and dout on the host.

    out and lse are the same backend's: where scores are large, their rounding is then the same in both directions.
    """
    q, k, v, dout = (device.put(x) for x in arrays)
    forward = {name: x for name, x in options.items() if name != "deterministic"}
    backend = "numpy" if DRY else backend
    out, lse = cuflash.attention(q, k, v, return_lse=True, backend=backend, **forward)
    with device.poisoned():
        found = cuflash.attention_backward(dout, q, k, v, out, lse, backend=backend, **options)
        return {name: device.get(getattr(found, name)) for name in NAMES}


def errors(arrays: Any, found: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Root mean square and largest error of each gradient, of each head in units of its largest value."""
    *inputs, dout = arrays
    want, result = reference.backward(problem.describe(*inputs), dout), {}
    for name, got in found.items():
        right = getattr(want, name)
        error = abs(got.astype(np.float64) - right) / abs(right).max(axis=(-2, -1), keepdims=True)
        result[name] = np.sqrt((error**2).mean(axis=(-2, -1))), error.max(axis=(-2, -1))
    return result


def with_dout(name: str, head_dim: int) -> tuple[np.ndarray, ...]:
    q, k, v = INPUTS[name](*random(1, SEQ, head_dim))
    dout = random(2, SEQ, head_dim)[0]
    if name == "huge":
        dout *= np.float32(1e-30)  # dq would overflow
    if "mixed" in name or "suit" in name:
        dout = mixed(dout, 10 if "mixed" in name else 30)
    return q, k, v, dout


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", INPUTS)
def test_as_exact_as_plain_float32(device: Device, name: str, head_dim: int) -> None:
    check_exactness(device, "mma", name, head_dim)


def check_exactness(device: Device, backend: str, name: str, head_dim: int, most: int = 2) -> None:
    """The error may be twice that of plain float32, and beside it a few units in the last place of the largest value.

    It is mostly less; single numbers differ more (scripts/bench.py --suite inputs), up to `most` times.
    """
    arrays = with_dout(name, head_dim)
    split, plain = (errors(arrays, gradients(device, asked, arrays)) for asked in (backend, "simt"))
    unit = 2.0**-24
    for gradient in NAMES:
        (rms, largest), (plain_rms, plain_largest) = split[gradient], plain[gradient]
        assert (rms <= 2 * plain_rms + 4 * unit).all(), f"{gradient}: rms {rms}, plain {plain_rms}"
        assert (largest <= most * plain_largest + 32 * unit).all(), f"{gradient}: {largest}, plain {plain_largest}"


def test_long_sums_are_not_truncated(device: Device) -> None:
    """Sums over many queries and keys of one sign, where truncation would show as a bias."""
    arrays = [abs(x) for x in random(3, 1000 if DRY else 6000, 64)]
    arrays.append(abs(random(4, arrays[0].shape[2], 64)[0]))
    found = errors(arrays, gradients(device, "mma", arrays))
    assert (found["dv"][1] < 32 * 2.0**-23).all(), found["dv"]


def test_tf32(device: Device) -> None:
    if DRY:
        pytest.skip("the host computes no TF32")
    arrays = with_dout("normal", 128)
    exact, coarse = (errors(arrays, gradients(device, "mma", arrays, precision=x)) for x in (None, "tf32"))
    for gradient in NAMES:
        assert (exact[gradient][0] < 2.0**-20).all()
        assert (coarse[gradient][0] > 2.0**-16).all()
        assert (coarse[gradient][1] < 2.0**-7).all()


@pytest.mark.parametrize("part", range(4), ids=["q", "k", "v", "dout"])
def test_heads_that_do_not_suit(device: Device, part: int) -> None:
    """One head is left to plain float32; the other does not notice."""
    arrays = [*random(5, 600, 64), random(6, 600, 64)[0]]
    before = gradients(device, "mma", arrays, deterministic=True)
    arrays[part][0, 1, 17] *= np.float32(1e-6)
    after, plain = (gradients(device, backend, arrays, deterministic=True) for backend in ("mma", "simt"))
    for gradient in NAMES:
        np.testing.assert_array_equal(after[gradient][0, 0], before[gradient][0, 0])
        np.testing.assert_allclose(after[gradient][0, 1], plain[gradient][0, 1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_head(device: Device, bad: float) -> None:
    for part in range(4):
        arrays = [*random(7, 300, 64), random(8, 300, 64)[0]]
        clean = gradients(device, "mma", arrays, deterministic=True)
        arrays[part][0, 0, 5, 7] = bad
        found = gradients(device, "mma", arrays, deterministic=True)
        for gradient in NAMES:
            np.testing.assert_array_equal(found[gradient][0, 1], clean[gradient][0, 1])
        assert not all(np.isfinite(found[gradient][0, 0]).all() for gradient in NAMES)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_repeats_in_turns(device: Device, head_dim: int, causal: bool) -> None:
    arrays = [*random(9, 2 * SEQ, head_dim), random(10, 2 * SEQ, head_dim)[0]]
    arrays[1][0, 1, 3] *= np.float32(1e-7)  # a head of plain float32
    first = gradients(device, "mma", arrays, causal=causal, deterministic=True)
    for _ in range(1 if DRY else 5):
        again = gradients(device, "mma", arrays, causal=causal, deterministic=True)
        for gradient in NAMES:
            np.testing.assert_array_equal(again[gradient], first[gradient])


def test_gradients_of_operands(device: Device) -> None:
    """dbias, from heads of both kinds."""
    made = Case("", seq_q=300, seq_k=411, head_dim=64, bias="b1qk", causal=True).make()
    made["k"][0, 1, 9] *= np.float32(1e-7)
    bias = made["options"]["bias"]
    call = problem.describe(made["q"], made["k"], made["v"], bias=bias, causal=True)
    want = reference.backward(call, made["dout"])
    q, k, v, dout, bias = map(device.put, (*(made[name] for name in ("q", "k", "v", "dout")), bias))
    _, vjp = cuflash.attention_vjp(q, k, v, bias=bias, causal=True, backend=SPLIT.backend)
    np.testing.assert_allclose(device.get(vjp(dout).dbias), want.dbias, rtol=1e-3, atol=2e-5)
