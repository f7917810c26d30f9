"""float32 on tensor cores: as exact as plain float32, whatever the numbers; TF32 where it is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import problem
from tests.cases import DROPOUT, OPTIONS, SINKS, STRIDES, VALUES, Case
from tests.gpu.device import DRY, FORWARD_ONLY, Device, Kind, capable, check
from tests.gpu.test_kernels import over_tiles
from tests.tolerance import Expectation

SPLIT = Kind("numpy" if DRY else "mma", "float32")
SPLITS = [SPLIT] if DRY else [SPLIT, *FORWARD_ONLY]
WIDEST_BY_WGMMA = 128


@pytest.fixture(params=SPLITS, ids=str)
def split(request: pytest.FixtureRequest, device: Device) -> Kind:
    """float32 on tensor cores by mma.sync, and on Hopper by wgmma."""
    return capable(device, request.param)


@pytest.fixture(autouse=True)
def on_tensor_cores(device: Device) -> None:
    capable(device, SPLIT)


# ---- options, shapes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: Device, split: Kind, name: str) -> None:
    check(device, split, over_tiles(name, OPTIONS[name]), backward=False)


@pytest.mark.parametrize("name", [*SINKS, *DROPOUT])
def test_options_behind_the_scores(device: Device, split: Kind, name: str) -> None:
    check(device, split, over_tiles(name, {**SINKS, **DROPOUT}[name]), backward=False)


@pytest.mark.parametrize("head_dim", [1, 16, 33, 64, 80, 128, 160, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_head_sizes(device: Device, split: Kind, head_dim: int, causal: bool) -> None:
    if split.backend == "wgmma" and head_dim > WIDEST_BY_WGMMA:
        pytest.skip("left to mma: test_wide_heads_are_left_to_mma")
    check(device, split, Case("", seq_q=300, seq_k=411, head_dim=head_dim, causal=causal), backward=False)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 256), (1, 40), (72, 120)])
def test_other_sizes_of_values(device: Device, split: Kind, head_dim: int, head_dim_v: int) -> None:
    if split.backend == "wgmma" and max(head_dim, head_dim_v) > WIDEST_BY_WGMMA:
        pytest.skip("left to mma: test_wide_heads_are_left_to_mma")
    case = Case("", seq_q=300, seq_k=411, head_dim=head_dim, head_dim_v=head_dim_v, heads_q=4)
    check(device, split, case, backward=False)


@pytest.mark.parametrize("name", STRIDES)
def test_strides(device: Device, split: Kind, name: str) -> None:
    for layout in ("bhsd", "bshd"):
        case = Case("", seq_q=150, seq_k=283, strides=name, layout=layout, head_dim=40, causal=True)
        check(device, split, case, backward=False)


@pytest.mark.parametrize("values", VALUES)
def test_values(device: Device, split: Kind, values: str) -> None:
    check(device, split, Case("", seq_q=150, seq_k=283, head_dim=64, values=values, causal=True), backward=False)


# ---- beside plain float32 ----------------------------------------------------------------------------------------------
def errors(device: Device, backend: str, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Root mean square and largest error of the output, of each head in units of its largest value."""
    call = problem.describe(q, k, v, **options)
    want = Expectation(call).out
    arrays = [device.put(x) for x in (q, k, v)]
    out = device.get(cuflash.attention(*arrays, backend="numpy" if DRY else backend, **options)).astype(np.float64)
    error = abs(out - want) / abs(want).max(axis=(-2, -1), keepdims=True)
    return np.sqrt((error**2).mean(axis=(-2, -1))), error.max(axis=(-2, -1))


def random(seed: int, seq: int, head_dim: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((1, 2, seq, head_dim)).astype(np.float32) for _ in range(3))


def mixed(x: np.ndarray, powers: int) -> np.ndarray:
    """Rows whose magnitudes span so many powers of two."""
    rng = np.random.default_rng(9)
    return (x * np.exp2(-rng.integers(0, powers + 1, (*x.shape[:-1], 1)))).astype(np.float32)


INPUTS: dict[str, Any] = {
    "normal": lambda q, k, v: (q, k, v),
    "x30": lambda q, k, v: (30 * q, 30 * k, 30 * v),
    "dominant key": lambda q, k, v: (q + 1, np.concatenate([k[..., :-1, :], k[..., -1:, :] + 3], axis=-2), v),
    "tiny": lambda q, k, v: (q, k, np.float32(1e-30) * v),
    "huge": lambda q, k, v: (np.float32(1e-30) * q, np.float32(1e30) * k, np.float32(1e30) * v),
    "mixed rows": lambda q, k, v: (mixed(q, 10), mixed(k, 10), mixed(v, 10)),
    "rows that do not suit": lambda q, k, v: (mixed(q, 30), mixed(k, 30), mixed(v, 30)),
    "offset": lambda q, k, v: (q + 3, k, v + 3),
    "positive": lambda q, k, v: (abs(q), abs(k), abs(v)),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", INPUTS)
def test_as_exact_as_plain_float32(device: Device, split: Kind, name: str, head_dim: int) -> None:
    """The error may be a half larger than that of plain float32, and beside it a few units in the last place.

    Tensor cores truncate their sums, which shows where all terms have one sign, or where plain float32 has hardly any error.
    """
    q, k, v = INPUTS[name](*random(1, 1024, head_dim))
    found, plain = (errors(device, backend, q, k, v) for backend in (split.backend, "simt"))
    unit = 2.0**-24
    assert (found[0] <= 1.5 * plain[0] + 3 * unit).all(), f"rms {found[0]}, plain {plain[0]}"
    assert (found[1] <= 1.5 * plain[1] + 32 * unit).all(), f"largest {found[1]}, plain {plain[1]}"


def test_heads_that_do_not_suit_have_the_bits_of_plain_float32(device: Device, split: Kind) -> None:
    """And the others do not notice."""
    if DRY:
        pytest.skip("about two kernels")
    q, k, v = random(2, 600, 64)
    before = cuflash.attention(*map(device.put, (q, k, v)), backend=split.backend, return_lse=True)
    k[0, 1, 17] *= np.float32(1e-6)
    found, plain = (
        cuflash.attention(*map(device.put, (q, k, v)), backend=backend, return_lse=True)
        for backend in (split.backend, "simt")
    )
    for got, want, old in zip(found, plain, before, strict=True):
        np.testing.assert_array_equal(device.get(got[0, 1]), device.get(want[0, 1]))
        np.testing.assert_array_equal(device.get(got[0, 0]), device.get(old[0, 0]))
        assert (device.get(want[0, 0]) != device.get(old[0, 0])).any(), (
            "both backends have the same bits: is it one kernel?"
        )


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_goes_where_it_went(device: Device, split: Kind, bad: float) -> None:
    for name in range(3):
        arrays = random(3, 300, 64)
        arrays[name][0, 0, 5, 7] = bad
        found = [
            device.get(cuflash.attention(*map(device.put, arrays), backend="numpy" if DRY else backend, causal=True))
            for backend in (split.backend, "simt")
        ]
        np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(found[1]))
        assert np.isfinite(found[0][0, 1]).all()


def test_repeats(device: Device, split: Kind) -> None:
    q, k, v = map(device.put, random(4, 700, 128))
    first = device.get(cuflash.attention(q, k, v, backend=split.backend))
    for _ in range(5):
        with device.poisoned():
            np.testing.assert_array_equal(device.get(cuflash.attention(q, k, v, backend=split.backend)), first)


@pytest.mark.parametrize("precision", [None, "tf32"])
def test_calls_that_run_at_once(device: Device, split: Kind, precision: str | None) -> None:
    """Blocks of a head wait for each other, but not for long, and give up what takes longer: bits are the same."""
    if DRY:
        pytest.skip("about streams of a device")
    cupy = device.xp
    arrays = [tuple(map(device.put, random(seed, 1500, 64))) for seed in range(4)]
    options = {"backend": split.backend, "precision": precision, "causal": True}
    want = [cuflash.attention(*x, **options) for x in arrays]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in arrays]
    cupy.cuda.Device().synchronize()
    for _ in range(10):
        found = []
        for x, stream in zip(arrays, streams, strict=True):
            with stream:
                found.append([cuflash.attention(*x, **options) for _ in range(3)])
        cupy.cuda.Device().synchronize()
        for results, right in zip(found, want, strict=True):
            for out in results:
                cupy.testing.assert_array_equal(out, right)


def test_a_graph_replays_planes(device: Device, split: Kind) -> None:
    if DRY:
        pytest.skip("about graphs of a device")
    cupy = device.xp
    q, k, v = map(device.put, random(0, 700, 64))
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            cuflash.attention(q, k, v, out=out, backend=split.backend, precision="tf32")
        stream.begin_capture()
        cuflash.attention(q, k, v, out=out, backend=split.backend, precision="tf32")
        graph = stream.end_capture()
    for seed in (1, 2, 3):
        new = tuple(map(device.put, random(seed, 700, 64)))
        for x, y in zip((q, k, v), new, strict=True):
            x[...] = y
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        cupy.testing.assert_array_equal(out, cuflash.attention(*new, backend=split.backend, precision="tf32"))


def test_chosen_where_calls_are_large(device: Device) -> None:
    if DRY:
        pytest.skip("about a device")
    large, small = (tuple(map(device.put, random(5, seq, 64))) for seq in (1024, 64))
    best = "wgmma" if int(device.xp.cuda.Device().compute_capability) == 90 else "mma"
    assert cuflash.explain(*large).backend == best
    assert cuflash.explain(*small).backend == "simt"
    assert cuflash.explain(*large, backend="simt").backend == "simt"
    assert cuflash.explain(*small, precision="tf32").backend == best


def test_batch_invariance(device: Device) -> None:
    """A batch entry with large numbers beside it."""
    q, k, v = random(6, 300, 64)
    alone = device.get(cuflash.attention(*map(device.put, (q, k, v)), batch_invariant=True))
    more = [device.put(np.concatenate([x * np.float32(1e6), x])) for x in (q, k, v)]
    np.testing.assert_array_equal(device.get(cuflash.attention(*more, batch_invariant=True))[1:], alone)


# ---- TF32 --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_tf32(device: Device, split: Kind, options: dict[str, Any]) -> None:
    """Errors of 11 bits: more than float32 has, and few enough."""
    q, k, v = random(7, 600, 64)
    if DRY:
        with pytest.raises(cuflash.UnsupportedError, match="precision='tf32' is computed on an NVIDIA GPU"):
            cuflash.attention(q, k, v, precision="tf32", **options)
        return
    want = Expectation(problem.describe(q, k, v, **options)).out
    options = {**options, "backend": split.backend}
    arrays = tuple(map(device.put, (q, k, v)))
    error = abs(device.get(cuflash.attention(*arrays, precision="tf32", **options)) - want).max()
    assert 1e-5 < error < 4e-3
    replayed = cuflash.attention(*arrays, precision="tf32", **options)
    assert abs(device.get(replayed) - want).max() == error
    exact = device.get(cuflash.attention(*arrays, **options))
    assert abs(exact - want).max() < 1e-5, "precision of one call is not that of the next"


def test_tf32_is_refused_elsewhere(device: Device) -> None:
    arrays = tuple(map(device.put, random(8, 64, 64)))
    if DRY:
        return
    with pytest.raises(cuflash.UnsupportedError, match="simt: it multiplies float32 as it is"):
        cuflash.attention(*arrays, precision="tf32", backend="simt")
    with pytest.raises(cuflash.ArgumentError, match="precision='tf32' with float64 arrays"):
        cuflash.attention(*(x.astype("float64") for x in arrays), precision="tf32")


def test_workspace_is_linear(device: Device, split: Kind) -> None:
    """A call takes as much beside its results as its inputs have, and a little for each head."""
    if DRY:
        pytest.skip("about the memory of a device")
    q, k, v = (device.xp.ones((1, 2, 4096, 64), device.xp.float32) for _ in range(3))
    taken: list[int] = []

    def allocate(size: int) -> Any:
        taken.append(size)
        return device.xp.get_default_memory_pool().malloc(size)

    with device.xp.cuda.using_allocator(allocate):
        cuflash.attention(q, k, v, backend=split.backend)
    assert sum(taken) <= q.nbytes + sum(x.nbytes for x in (q, k, v)) + (1 << 16)


def test_wide_heads_are_left_to_mma(device: Device) -> None:
    if DRY:
        pytest.skip("about a device")
    for size in (136, 256):
        q, k, v = map(device.put, random(9, 300, size))
        assert cuflash.explain(q, k, v).backend == "mma"


def test_wide_heads_are_left_to_simt(device: Device) -> None:
    if DRY:
        pytest.skip("about a device")
    q, k, v = map(device.put, random(9, 300, 264))
    assert cuflash.explain(q, k, v).backend == "simt"
    with pytest.raises(cuflash.UnsupportedError, match="head_dim 264 is above 256"):
        cuflash.attention(q, k, v, backend="mma")


def test_long_rows(device: Device, split: Kind) -> None:
    """Chains of sums of 16384 keys."""
    case = Case("", batch=(), heads_q=1, heads_k=1, seq_q=64, seq_k=16384, head_dim=64)
    for values in ("normal", "constant"):
        check(device, split, replace(case, values=values), backward=False)
