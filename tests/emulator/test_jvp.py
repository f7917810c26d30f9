"""Forward mode in the emulator: every option, tile and dtype, under several schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import problem, source, tuning
from cuflash.backends import Device, described_device
from cuflash.errors import UnsupportedError
from cuflash.schedules import mma, simt
from tests.cases import DROPOUT, OPTIONS, SINKS, STRIDES, Case
from tests.emulator import Mutant, examine, kernels
from tests.emulator.kernels import SEEDS
from tests.tangents import tangents_of
from tests.tolerance import Expectation

EVERY = {**OPTIONS, **SINKS, **DROPOUT}
TARGETS = ((75, "float16"), (80, "bfloat16"), (75, "float32"), (90, "float64"))
MAIN_TARGETS = ((80, "bfloat16"), (75, "float32"))
#: every schedule on the main targets, and the other ones, too
CORE = ("plain", "groups", "sparse-everything", "dropout-everything")
#: what each modifier and shape does is tested with plain forwards; here is what meets a tangent
SOME = (
    *("scale-negative", "scale-zero", "causal-more-queries", "window", "softcap", "mask-sparse", "alibi-causal"),
    *("bias", "bias-head", "bias-row", "bias-number", "lengths-zero", "documents-strangers", "blocks-uneven"),
    *("groups-window-bias", "wide-values", "narrow-values", "everything-mostly-hidden", "sinks-everything"),
    *("sinks-batch", "sinks-number", "dropout-causal", "dropout-few"),
)
TILE = tuning.JvpTile(32, 16, 2, 1)


@pytest.fixture
def tile(monkeypatch):
    """A small tile, so that there are many."""
    monkeypatch.setattr(tuning, "JVP_MMA", (TILE,))


def target_id(target: tuple[int, str]) -> str:
    return f"sm_{target[0]}-{target[1]}"


def check(case: Case, device: Device | int, seeds: Iterable[int] = SEEDS, **options: Any) -> None:
    """Run a case under each schedule and judge all that it returns, which must be the same bits each time."""
    call, _, _ = case.call()
    expectation, tangents = Expectation(call), tangents_of(call)
    results = set()
    for seed in seeds:
        found = kernels.jvp(call, tangents, device, seed, **options)
        expectation.check_jvp(tangents, *found)
        results.add(b"".join(x.tobytes() for x in found))
    assert len(results) == 1


@pytest.mark.parametrize("target", TARGETS, ids=target_id)
@pytest.mark.parametrize("name", CORE)
def test_core_options(tile, name, target):
    arch, dtype = target
    case = Case(name, dtype, **{"seq_q": 37, "seq_k": 45, **EVERY[name]})
    check(case, arch, SEEDS if target in MAIN_TARGETS else (0, 3))


@pytest.mark.parametrize("name", SOME)
def test_options(tile, name):
    case = Case(name, "bfloat16", **{"seq_q": 37, "seq_k": 45, **EVERY[name]})
    check(case, 80, (0, 3))
    if "number" in name or "zero" in name:
        check(replace(case, dtype="float32"), 80, (0,))


@pytest.mark.parametrize("row", range(len(tuning.JVP_MMA)))
def test_every_tile(monkeypatch, row):
    made = tuning.JVP_MMA[row]
    monkeypatch.setattr(tuning, "JVP_MMA", (made,))
    case = Case("tile", "float16", batch=(), heads_q=2, heads_k=1, seq_q=made.block_q + 1, seq_k=2 * made.block_k + 1)
    check(replace(case, causal=True), 75 if row % 2 else 80, (row, row + 1))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (7, 33), (40, 24), (136, 280)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_head_sizes(head_dim, head_dim_v, dtype):
    case = Case("dims", dtype, batch=(), heads_q=2, heads_k=1, head_dim=head_dim, head_dim_v=head_dim_v, causal=True)
    check(case, 80, (0, 5))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_without_undefined_behaviour(tile, dtype):
    check(Case("everything", dtype, **DROPOUT["dropout-everything"]), 80, sanitize=True)


@pytest.mark.parametrize("values", ["x30", "constant", "logits about -200", "logits about -1e5", "dominant key late"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values(tile, values, dtype):
    """Maxima that grow late, and scores so far that they are subtracted before they are scaled."""
    check(Case(values, dtype, values=values, causal=True, seq_k=70), 80, (0,))


def test_large_tangents_do_not_overflow(tile):
    """A weight times a tangent is no larger than the tangent: the maximum never lags behind."""
    case = Case("large", "float16", values="dominant key late", scale=1.0, seq_k=70)
    call, _, _ = case.call()
    tangents = {"k": tangents_of(call)["k"] * np.float16(500)}
    assert 4000 < abs(call.q.astype(float) @ tangents["k"].astype(float).swapaxes(-1, -2)).max() < 60000
    Expectation(call).check_jvp(tangents, *kernels.jvp(call, tangents, 80))


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_strides(tile, strides, dtype):
    case = Case("strides", dtype, strides=strides, layout="bshd", head_dim=15, mask="bhqk", bias="b1qk", causal=True)
    call, _, _ = case.call()
    tangents = {name: case.place(x.swapaxes(-3, -2)).swapaxes(-3, -2) for name, x in tangents_of(call).items()}
    expectation = Expectation(call)
    expectation.check_jvp(tangents, *kernels.jvp(call, tangents, 80, place=STRIDES["padded"]))


@pytest.mark.parametrize("batch", [(), (3, 2), (2, 1, 3)], ids=str)
def test_batch_axes(tile, batch):
    for dtype in ("float16", "float32"):
        case = Case("batch", dtype, batch=batch, seq_q=9, seq_k=11, mask="b1qk", bias="b11k", lengths="random")
        check(case, 80, (0, 2))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("arch", "dtype"), [(75, "float16"), (80, "bfloat16"), (75, "float32"), (80, "float32")])
def test_tangents_that_are_no_arrays_are_zeros(tile, arch, dtype, aligned):
    case = Case("none", dtype, bias="h1k", sinks="h", causal=True, strides="contiguous" if aligned else "every second")
    call, _, _ = case.call()
    expectation, whole = Expectation(call), tangents_of(call)
    for names in ((), ("q", "v"), ("k",), ("bias", "sinks")):
        tangents = {name: whole[name] for name in names}
        found = kernels.jvp(call, tangents, arch)
        expectation.check_jvp(tangents, *found)
        assert names or not (found[1].any() or found[3].any())


@pytest.mark.parametrize(("arch", "dtype"), [(75, "float16"), (80, "bfloat16"), (80, "float32")])
def test_a_nan_reaches_what_sees_it(tile, arch, dtype):
    case = Case("nan", dtype, batch=(), heads_q=1, heads_k=1, seq_q=45, seq_k=45, causal=True)
    call, _, _ = case.call()
    for name in ("q", "k"):
        tangents = tangents_of(call)
        tangents[name][0, 20] = np.nan
        out, dout, lse, dlse = kernels.jvp(call, tangents, arch)
        assert np.isfinite(out).all()
        assert np.isfinite(lse).all()
        rows = [20] if name == "q" else range(20, 45)
        for x in (dout.astype(float).sum(axis=-1), dlse):
            assert np.flatnonzero(np.isnan(x[0])).tolist() == list(rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_keys_beyond_the_length_are_never_used(tile, dtype):
    made = Case("lengths", dtype, lengths=(20, 0), causal="top_left").make()
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    tangents = tangents_of(call)
    for array in (made["k"], made["v"], tangents["k"], tangents["v"]):
        array[0, :, 20:] = np.nan
        array[1] = np.inf
    Expectation(call).check_jvp(tangents, *kernels.jvp(call, tangents, 80))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("empty", [{"seq_k": 0}, {"seq_q": 0}, {"batch": (0,)}], ids=str)
def test_empty(tile, empty, dtype):
    check(replace(Case("empty", dtype), **empty), 80, (0,))


@pytest.mark.parametrize(("arch", "dtype"), [(80, "bfloat16"), (80, "float32")])
def test_expressions(tile, arch, dtype):
    made = Case("written", dtype, seq_q=37, heads_q=4).make()
    own = cuflash.ScoreModifier(
        "tanh(s * heat[h]) + near[q % 4]", heat=np.float32([1, 2, 3, 4]), near=np.float32([0, 1, 2, 3])
    )
    call = problem.describe(made["q"], made["k"], made["v"], softcap=3.0, modifiers=[own])
    tangents = tangents_of(call)
    Expectation(call).check_jvp(tangents, *kernels.jvp(call, tangents, arch))


# ---- bugs sown on purpose --------------------------------------------------------------------------------------------
BUGS = [
    Mutant("jvp_mma", "the tangents' accumulator keeps its base", "Base::template rescale<Accumulator>(u, alpha);", ""),
    Mutant("jvp_mma", "their sum keeps its base", "moved[slot] *= alpha[slot];", ";"),
    Mutant("jvp_mma", "what all weights lose is forgotten", "u[i] -= moved[Accumulator::slot(i)] * o[i];", ";"),
    Mutant("jvp_mma", "lanes are not summed", "Fragment::row_sum(moved[slot])", "moved[slot]"),
    Mutant("jvp_mma", "the scale is forgotten", "ds[i] * p.scale * slopes[i]", "ds[i] * slopes[i]"),
    Mutant("jvp_mma", "the slope is forgotten", "ds[i] * p.scale * slopes[i]", "ds[i] * p.scale"),
    Mutant("jvp_mma", "keys are overwritten while they are read", "__syncthreads();  // keys are no", "// keys are no"),
    Mutant(
        "jvp_mma",
        "keys are read before they arrive",
        "cp_async_wait_group<1>();\n    __syncthreads();  // keys",
        "__syncthreads();  // keys",
    ),
    Mutant("jvp_mma", "values are read before they arrive", "cp_async_wait_group<0>();", ""),
    Mutant("jvp_mma", "values are overwritten while they are read", "__syncthreads();  // values are", "// values are"),
    Mutant(
        "jvp_simt",
        "values are read before they arrive",
        "wait_for_copies();\n    __syncthreads();  // V has",
        "__syncthreads();  // V has",
    ),
    Mutant("jvp_simt", "the next keys come too early", "__syncthreads();  // V has", "// V has"),
    Mutant("jvp_simt", "the next values come too early", "__syncthreads();  // K has", "// K has"),
    Mutant(
        "jvp_simt", "warps run ahead of their scores", "__syncwarp();\n    const MovingOperand", "const MovingOperand"
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.kernel}: {bug.description}")
def test_bug_is_noticed(tile, bug):
    dtype = "float32" if bug.kernel.endswith("simt") else "float16"
    case = Case("bug", dtype, heads_k=1, causal=True, softcap=20.0, seq_q=70, seq_k=53, head_dim=24, scale=0.7)
    call, _, _ = replace(case, values="dominant key late").call()
    expectation, tangents, found = Expectation(call), tangents_of(call), []

    def note(variant):
        found.append(variant)
        return source.build(variant)

    expectation.check_jvp(tangents, *kernels.jvp(call, tangents, 80, text=note))

    def run(text, seed):
        expectation.check_jvp(tangents, *kernels.jvp(call, tangents, 80, seed, text=lambda _: text))

    is_race = "__sync" in bug.old or "wait" in bug.old
    findings = examine(bug, source.build(found[0]), run, SEEDS if is_race else (0,))
    assert findings.noticed, findings


def test_hopper_leaves_it_to_mma():
    call, _, _ = Case("hopper", "bfloat16", head_dim=64).call()
    with pytest.raises(UnsupportedError, match="wgmma: it has no forward mode"):
        kernels.jvp(call, tangents_of(call), 90, requested="wgmma")
    check(Case("hopper", "bfloat16", head_dim=64), 90, (0,))


@pytest.mark.parametrize("limit", [64, 99, 163, 227])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_there_is_a_tile_for_heads_of_usual_sizes(limit, dtype):
    """Beyond, inputs and their tangents need more shared memory than there is: such calls are refused by name."""
    most = {"float16": 512 if limit > 64 else 256, "float32": 512 if limit > 99 else 256, "float64": 128}[dtype]
    for head_dim, options in product((1, 16, 40, 64, 128, 256, 512), ({}, OPTIONS["everything"])):
        call = Case("heads", dtype, **{**options, "head_dim": head_dim, "head_dim_v": head_dim}).call()[0]
        schedule = mma if dtype == "float16" else simt
        if head_dim <= most:
            config = schedule.jvp(call.problem, limit * 1024, True)
            assert config.shared_bytes(np.dtype(dtype).itemsize) <= limit * 1024
        elif limit == 64:
            with pytest.raises(UnsupportedError, match="forward mode"):
                schedule.jvp(call.problem, limit * 1024, True)
    assert described_device(75).shared_limit == 64 * 1024
