"""8-bit inputs on the device: every tile, scales, options, lengths, layouts, and how far from float64 long sequences are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import KeyLengths, plan, problem, tuning
from cuflash.backends import BACKENDS
from cuflash.modifiers import Scales
from cuflash.schedules import mma
from tests.cases import STRIDES, Case
from tests.gpu.device import DRY, Device, Kind, described, on_device
from tests.tolerance import Expectation

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
KINDS = [Kind("numpy", E4M3.name)] if DRY else [Kind(b.name, E4M3.name) for b in BACKENDS if E4M3.name in b.of_inputs]
pytestmark = pytest.mark.parametrize("kind", KINDS, ids=str, indirect=True)
#: the tensor cores keep about 13 bits of a sum of 8-bit products, in place of float32's 23, of which four units are allowed;
#: they cut off the rest after every 32 terms, so that errors of sums of one sign add up
COARSER = 2.0**10
CASE = Case("fp8", "float8_e4m3fn", heads_q=4, seq_q=300, seq_k=391, head_dim=128, scales=("bh", "bh", "bh"))


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """Plans made with another table are not kept."""
    plan.plan_forward.cache_clear()
    yield
    plan.plan_forward.cache_clear()


def arguments(device: Device, kind: Kind, made: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the public call."""
    options = on_device(device, {name: x for name, x in made["options"].items() if name != "scales"})
    scales: Scales = made["options"]["scales"]
    given = {"q_scale": scales.q_scale, "k_scale": scales.k_scale, "v_scale": scales.v_scale}
    given = {name: device.put(x) for name, x in given.items()}
    if scales.logit_scale != 1:
        name = "q_scale" if scales.q_scale is None else "k_scale"
        given[name] = scales.logit_scale
    if scales.value_scale != 1:
        given["v_scale"] = scales.value_scale
    return {**options, **given, "out_dtype": scales.out_dtype, "backend": kind.backend}


def expected(call: problem.Call) -> Expectation:
    expectation = Expectation(call)
    expectation.floors["lse"] = expectation.floors["lse"] * COARSER
    return expectation


def check(device: Device, kind: Kind, case: Case, seed: int = 0, **changed: Any) -> float:
    made = {**case.make(seed), **changed}
    q, k, v = (device.put(made[name]) for name in "qkv")
    with device.poisoned():
        out, lse = cuflash.attention(q, k, v, return_lse=True, **arguments(device, kind, made))
        assert str(out.dtype) == case.out_dtype
        got = device.get(problem.canonical(out, case.layout)), device.get(lse)
    device.check_inputs()
    return expected(described(made)).check_forward(*got)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("row", tuning.FORWARD_WGMMA_E4M3, ids=lambda row: f"{row.max_head_dim}-{row[1]}x{row[2]}")
def test_every_tile(
    device: Device,
    kind: Kind,
    fresh_plans: None,
    monkeypatch: pytest.MonkeyPatch,
    row: tuning.ForwardWgmmaTile,
    causal: bool,
) -> None:
    if kind.backend == "mma":
        pytest.skip("tiles of wgmma")
    monkeypatch.setattr(tuning, "FORWARD_WGMMA_E4M3", (row._replace(max_keys=1 << 31, max_weight=1 << 31),))
    check_tile(device, kind, row.max_head_dim, causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("row", tuning.FORWARD_MMA_E4M3, ids=lambda row: "-".join(str(int(x)) for x in row))
def test_every_tile_of_mma(
    device: Device,
    kind: Kind,
    fresh_plans: None,
    monkeypatch: pytest.MonkeyPatch,
    row: tuning.ForwardTile,
    causal: bool,
) -> None:
    if kind.backend == "wgmma":
        pytest.skip("tiles of mma")
    monkeypatch.setattr(tuning, "FORWARD_MMA_E4M3", (row,))
    monkeypatch.setattr(mma, "narrow_registers", lambda *_: 1 << 31)
    check_tile(device, kind, 64, causal)


def check_tile(device: Device, kind: Kind, head_dim: int, causal: bool) -> None:
    many = 1 if DRY else 12
    for batch, heads_q, seq_k in ((1, 2, 391), (1, 2, 384), (many, 12, 257)):
        case = replace(CASE, batch=(batch,), heads_q=heads_q, heads_k=1, seq_q=300, seq_k=seq_k, causal=causal)
        check(device, kind, replace(case, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
def test_head_sizes(device: Device, kind: Kind, head_dim: int) -> None:
    for head_dim_v in (head_dim, 80):
        check(device, kind, replace(CASE, head_dim=head_dim, head_dim_v=head_dim_v, causal=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "numbers": {"scales": (0.5, None, 3.0)},
    "of keys": {"scales": (2.0, "bh", None), "heads_k": 2},
    "of heads": {"scales": ("h", None, "h"), "heads_k": 4},
    "half": {"out_dtype": "float16", "causal": True},
    "bshd": {"layout": "bshd", "causal": True, "heads_k": 1},
    "softcap": {"softcap": 3.0},
    "bias and mask": {"bias": "b1qk", "mask": "qk", "scale": -0.1},
    "ranges": {"causal": True, "window": (90, 15), "lengths": "random", "alibi": "h"},
    "sinks": {"sinks": "h", "causal": True},
    "dropout": {"dropout": 0.3, "causal": True},
    "documents and blocks": {"documents": "packed", "blocks": "hqk", "block_size": (64, 128)},
    "batch axes": {"batch": (2, 3), "causal": "top_left"},
    "everything": {"causal": True, "softcap": 2.0, "bias": "hqk", "alibi": "h", "window": (200, 40), "sinks": "h"},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(device: Device, kind: Kind, name: str, head_dim: int) -> None:
    check(device, kind, replace(replace(CASE, heads_k=2, head_dim=head_dim), **OPTIONS[name]))


@pytest.mark.parametrize("values", ["x3", "x30", "constant", "logits about -200", "dominant key late"])
def test_values(device: Device, kind: Kind, values: str) -> None:
    check(device, kind, replace(CASE, values=values, scales=(None, None, None), seq_k=1000))


def test_many_lengths(device: Device, kind: Kind) -> None:
    rng = np.random.default_rng(0)
    for seed in range(10 if DRY else 60):
        seq_q, seq_k = (int(n) for n in rng.integers(1, 900, 2))
        causal = bool(rng.random() < 0.5)
        try:
            check(
                device, kind, replace(CASE, heads_k=2, seq_q=seq_q, seq_k=seq_k, causal=causal, lengths="random"), seed
            )
        except AssertionError as error:
            raise AssertionError(f"{seq_q} x {seq_k}, causal {causal}: {error}") from error


@pytest.mark.parametrize("strides", STRIDES)
def test_arrays_may_lie_anyhow(device: Device, kind: Kind, strides: str) -> None:
    """Hopper's queries and keys have tensor maps, and rows in one piece."""
    for name in "v" if kind.backend == "wgmma" else "qkv":
        check(device, kind, CASE, **{name: STRIDES[strides](CASE.make()[name])})


def test_what_no_row_sees_never_reaches_a_result(device: Device, kind: Kind) -> None:
    made = replace(CASE, batch=(2,)).make()
    lengths = np.array([205, 391], np.int32)
    options = {**made["options"], "modifiers": (KeyLengths(lengths),)}
    for x in (made["k"], made["v"]):
        x[0, :, 205:] = np.nan
    check(device, kind, CASE, k=made["k"], v=made["v"], options=options)


def test_bytes_and_other_callers_arrays(device: Device, kind: Kind) -> None:
    """Arrays of bytes as the views that they have to be made, `out=`, and the bits of equal calls."""
    made = replace(CASE, scales=(None, None, None)).make()
    q, k, v = (device.xp.asarray(made[name].view(np.uint8)).view(E4M3) for name in "qkv")
    attention = partial(cuflash.attention, backend=kind.backend)
    out, lse = attention(q, k, v, return_lse=True)
    expected(described(made)).check_forward(device.get(out), device.get(lse))
    target = device.xp.zeros(out.shape, out.dtype)
    assert attention(q, k, v, out=target) is target
    for again in (target, attention(q, k, v), attention(q, k, v, batch_invariant=True)):
        np.testing.assert_array_equal(device.get(again).view(np.uint16), device.get(out).view(np.uint16))
    with pytest.raises(cuflash.ArgumentError, match=r"\.view\(ml_dtypes.float8_e4m3fn\)"):
        attention(q.view(np.uint8), k.view(np.uint8), v.view(np.uint8))


def test_batch_invariant_copies(device: Device, kind: Kind) -> None:
    """Arrays that lie otherwise are copied, as bytes where CuPy has no code for their elements."""
    made = replace(CASE, scales=(None, None, None), batch=(3,)).make()
    q, k, v = (device.put(STRIDES["every second"](made[name])) for name in "qkv")
    options: dict[str, Any] = {"batch_invariant": True, "backend": kind.backend}
    out = cuflash.attention(q, k, v, **options)
    one = cuflash.attention(*(device.put(made[name][1:2]) for name in "qkv"), **options)
    np.testing.assert_array_equal(device.get(out[1:2]).view(np.uint16), device.get(one).view(np.uint16))


def test_a_captured_call(device: Device, kind: Kind) -> None:
    if DRY:
        pytest.skip("graphs are of a device")
    cupy = device.xp
    made = CASE.make()
    q, k, v = (device.put(made[name]) for name in "qkv")
    options = arguments(device, kind, made)
    want = cuflash.attention(q, k, v, **options)
    target, stream = cupy.zeros(want.shape, want.dtype), cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuflash.attention(q, k, v, out=target, **options)
        target.view(np.uint16).fill(0)
        stream.begin_capture()
        cuflash.attention(q, k, v, out=target, **options)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    np.testing.assert_array_equal(device.get(target).view(np.uint16), device.get(want).view(np.uint16))


@pytest.mark.parametrize("seq", [512] if DRY else [1024, 4096, 16384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_error_of_long_sequences(device: Device, kind: Kind, head_dim: int, seq: int) -> None:
    """The error relative to the output, in norm, against float64: rounding of the weights alone makes about 0.02."""
    rng = np.random.default_rng(seq + head_dim)
    q, k, v = (rng.standard_normal((1, 1, seq, head_dim)).astype(E4M3) for _ in range(3))
    rows = slice(0, 64)
    out = cuflash.attention(*(device.put(x) for x in (q, k, v)), backend=kind.backend)
    exact = [x[0, 0].astype(np.float64) for x in (q, k, v)]
    s = exact[0][rows] @ exact[1].T * head_dim**-0.5
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    want = p / p.sum(axis=-1, keepdims=True) @ exact[2]
    got = device.get(out)[0, 0, rows].astype(np.float64)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(f"head_dim {head_dim}, seq {seq}: {error:.4f}")
    assert error < 0.05
