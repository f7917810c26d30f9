"""Modifiers that users write, in the emulator: their CUDA text against the reference, and against the built-in ones bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuflash import arrays, problem, tuning
from cuflash.backends import described_device
from cuflash.modifiers import MaskModifier, Modifier, ScoreModifier
from tests import written_cases
from tests.cases import DTYPES, Case
from tests.emulator.kernels import SEEDS, backward, check_call, forward
from tests.emulator.test_mma import target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)
from tests.emulator.test_wgmma import TILE, hopper
from tests.packs import Judge, Pack
from tests.tolerance import Expectation

SIZES = (2, 4, 37, 50)
MMA, SIMT = (80, "bfloat16"), (75, "float32")


@pytest.fixture(autouse=True)
def small_tiles(mma_tile: Any, simt_tile: Any) -> None:  # noqa: F811
    """Every test runs with them."""


def made(dtype: str, chain: tuple[Modifier, ...], **options: Any) -> tuple[problem.Call, Any, Any]:
    """A call of 2 query heads for each of 2 key heads."""
    case = replace(Case("own", dtype, heads_q=4, seq_q=SIZES[2], seq_k=SIZES[3], dlse=True), **options)
    arrays = case.make()
    call = problem.describe(arrays["q"], arrays["k"], arrays["v"], **{**arrays["options"], "modifiers": chain})
    return call, arrays["dout"], arrays["dlse"]


@pytest.mark.parametrize(
    ("target", "names", "options"),
    [
        (MMA, ("composed",), {"softcap": 5.0, "bias": "hqk", "causal": True}),
        (MMA, ("table", "masks"), {"sinks": "1", "dropout": 0.2}),
        (SIMT, ("slopes", "clamped table"), {"scale": -0.3}),
        (SIMT, ("everything",), {"window": (30, 9), "lengths": (50, 31)}),
        (MMA, ("function",), {"softcap": 4.0}),
        (SIMT, ("function",), {"causal": True}),
    ],
    ids=lambda x: target_id(x) if x in (MMA, SIMT) else "-".join(x),
)
def test_chains(target: tuple[int, str], names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Values, slopes and gradients, with built-in modifiers before and behind."""
    options = dict(options)
    built_in = {name: options.pop(name, None) for name in ("lengths", "sinks", "dropout")}
    case = Case("own", **built_in, seq_k=SIZES[3]).make()["options"]["modifiers"]
    chain = (*case, *(m for name in names for m in written_cases.chains(SIZES)[name]))
    check_call(*made(target[1], chain, **options), target[0], SEEDS)


def test_numbers() -> None:
    """Whole numbers wrap and round down as on the host, and nothing is undefined."""
    text = (
        "s + ((q - 9) // 4 + (q - 9) // -4 + (q - 9) % 5 - (q - 9) % -5 + q // (k - 7) + q % (k - 7) + (k - 9) // (q - 5)) / 8"
        " + (q * 2147483647 * 2 + 2 * q + abs(-2147483647 - 1 - q + q) // 536870912 + (-2147483647 - 1) // -1 % 7) / 4.0"
        " + int(q / 2 - k / 4) * 0.125 + int(1e30) // 536870912 + int(-inf) // 536870912 + int(inf - inf)"
        " + floor(k / 4) / 16 + abs(-s) / 4 + rel[q * k - 100] + rel[-q] + (0.5 if not (q < k) == (k % 2 == 0) else h / 4)"
    )
    rel = np.random.default_rng(0).standard_normal(60).astype(np.float32)
    call, dout, dlse = made("float32", (ScoreModifier(text, rel=rel),))
    check_call(call, dout, dlse, 75, (0, 1), sanitize=True)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("mma", name) for name in written_cases.FORMS),
        *(("simt", name) for name in ("alibi", "softcap in CUDA", "documents")),
        *(("wgmma", name) for name in ("alibi", "softcap", "dilated")),  # it leaves Documents to mma
    ],
)
def test_as_the_built_in_one(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits of every result, with sums in a fixed order."""
    monkeypatch.setattr(tuning, "FORWARD_WGMMA", (TILE,))
    dtype = "float32" if backend == "simt" else "bfloat16"
    device = {"mma": described_device(80), "simt": described_device(75), "wgmma": hopper()}[backend]
    own, options = written_cases.forms(SIZES, DTYPES[dtype])[name]
    found = []
    for given in ({"modifiers": own}, options):
        case = Case("own", dtype, heads_q=4, seq_q=SIZES[2], seq_k=SIZES[3], dlse=True)
        made = case.make()
        call = problem.describe(made["q"], made["k"], made["v"], **{**made["options"], "modifiers": (), **given})
        out, lse = forward(call, device, 3, requested=backend)
        results = [out, lse]
        if "bias" not in given:
            gradients = backward(
                call, out, lse, made["dout"], made["dlse"], device, 3, deterministic=True, requested=backend
            )
            results += gradients[:3]
        found.append(results)
    for got, want in zip(*found, strict=False):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("strides", ["contiguous", "stride 0"])
def test_batch_axes_count_as_one(strides: str) -> None:
    """Whether kernels walk them as one axis, or their strides keep them apart."""
    rng = np.random.default_rng(0)
    ids, heat = rng.integers(0, 2, (6, SIZES[3])).astype(np.int32), rng.standard_normal(6).astype(np.float32)
    chain = (
        ScoreModifier("s * heat[b] + b", heat=heat, gradients="heat"),
        MaskModifier("ids[b, k] == 0 or k == b", ids=ids),
    )
    check_call(*made("float32", chain, batch=(2, 1, 3), strides=strides), 75, (0, 1))


@pytest.mark.parametrize(
    ("backend", "name"),
    [("mma", "table"), ("mma", "slopes"), ("simt", "composed"), ("float64", "everything"), ("wgmma", "table")],
)
def test_gradients_that_repeat(backend: str, name: str) -> None:
    """Of elements that scores anywhere read, and of numbers for whole heads: the same bits, and right ones, in any order of blocks."""
    device = {"mma": described_device(80), "simt": described_device(75), "wgmma": hopper()}.get(
        backend, described_device(90)
    )
    dtype = {"mma": "bfloat16", "simt": "float32", "wgmma": "bfloat16"}.get(backend, backend)
    chain = written_cases.chains(SIZES, np.float64 if dtype == "float64" else np.float32)[name]
    options = {"requested": "wgmma"} if backend == "wgmma" else {}
    call, dout, dlse = made(dtype, chain, head_dim=64 if options else 24)
    expectation, results = Expectation(call, dout, dlse), set()
    names = [f"d{field}" for m in chain for field in m.differentiable]

    def note(found: Mapping[str, np.ndarray]) -> None:
        results.add(b"".join(found[x].tobytes() for x in ("dq_sum", "dq", "dk", "dv", *names)))

    out, lse = expectation.plain["out"], expectation.lse.astype(call.problem.accumulator)
    for seed in SEEDS:
        given = (call, out, lse, dout, dlse, device, seed)
        expectation.check_backward(backward(*given, deterministic=True, residents=3, watch=note, **options))
    assert len(results) == 1


@pytest.mark.parametrize("backend", ["mma", "wgmma"])
def test_packed_sequences(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions and lengths are those of each sequence."""
    monkeypatch.setattr(tuning, "FORWARD_WGMMA", (TILE,))
    device = described_device(80) if backend == "mma" else hopper()
    rel, slope = np.linspace(-1, 1, 9, dtype=np.float32), np.array([0.5, 0.1], np.float32)
    chain = (
        ScoreModifier("s - slope[h] * (q % 5) + rel[q - k] / seq_k", slope=slope, rel=rel),
        MaskModifier("k <= q or k > seq_q - 3"),
    )
    made = Pack((33, 0, 7), (40, 9, 20), dtype="bfloat16", behind=(9, 17)).make()
    packed = arrays.native_packed(*made["offsets"], None, None, len(made["q"]), len(made["k"]), arrays.HOST)
    call = problem.describe_packed(made["q"], made["k"], made["v"], packed, modifiers=chain)
    dout = made["dout"].swapaxes(0, 1)
    judge = Judge(call, dout)
    for seed in SEEDS:
        out, lse = forward(call, device, seed, requested=backend)
        judge.check_forward(out, lse)
        judge.check_backward(backward(call, out, lse, dout, None, device, seed, requested=backend))


@pytest.mark.parametrize("head_dim", [24, 136])
def test_hopper(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes, and gradients that need the scores; by split roles, where there is room for no slopes beside these."""
    monkeypatch.setattr(tuning, "FORWARD_WGMMA", (TILE,))
    chain = written_cases.chains(SIZES)["composed" if head_dim == 24 else "table"]
    check_call(*made("bfloat16", chain, head_dim=head_dim), hopper(), SEEDS, requested="wgmma")
