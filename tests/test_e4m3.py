"""8-bit inputs: what they stand for, what is refused by name, how they are planned, and the values' layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import abi, floor, instructions, plan, problem, reference, source
from cuflash.backends import described_device
from cuflash.errors import ArgumentError, CuflashError, ShapeError, UnsupportedError
from cuflash.modifiers import Scales
from tests.cases import Case
from tests.tolerance import Expectation
from tests.variants import Entry

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SHAPES = {"q": (2, 4, 9, 16), "k": (2, 2, 11, 16), "v": (2, 2, 11, 6)}
CASE = Case("e4m3", "float8_e4m3fn", heads_q=4, heads_k=2, scales=("bh", "h", "bh"), causal=True)


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(E4M3) for name, shape in SHAPES.items()}


def dequantised(given: dict[str, np.ndarray], **scales: Any) -> dict[str, np.ndarray]:
    """The same numbers in float64, times the scales of their heads."""
    found = {}
    for name, x in given.items():
        scale = np.asarray(scales.get(f"{name}_scale", 1.0), np.float64)
        found[name] = x.astype(np.float64) * (scale[..., None, None] if scale.ndim else scale)
    return found


# ---- what the arrays stand for ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "scales",
    [
        {},
        {"q_scale": 2, "k_scale": np.float32(0.5), "v_scale": 3.0},
        {"q_scale": np.linspace(0.5, 2, 8, dtype=np.float32).reshape(2, 4), "v_scale": [2.0, 0.25]},
        {"k_scale": np.array([[0.5], [2]], np.float32), "v_scale": np.full((2, 1), 3, np.float32)},
    ],
    ids=lambda scales: "-".join(scales) or "none",
)
def test_every_element_counts_times_the_scale_of_its_head(scales):
    given, options = inputs(), {"causal": True, "softcap": 2.0}
    out, lse = cuflash.attention(**given, **scales, **options, return_lse=True)
    want, want_lse = cuflash.attention(**dequantised(given, **scales), **options, return_lse=True)
    assert (out.dtype, lse.dtype) == (ml_dtypes.bfloat16, np.float32)
    np.testing.assert_allclose(out.astype(float), want, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    got, got_lse = reference.forward(problem.describe(**given, scales=described(scales), **options))
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(got_lse, want_lse, atol=1e-6)


def described(scales: dict[str, Any]) -> Scales:
    """As the calls describe them, arrays with the axes of heads."""
    return cuflash.arrays.native_scales(
        *(scales.get(name) for name in ("q_scale", "k_scale", "v_scale")), None, cuflash.arrays.HOST, str(E4M3)
    )


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", np.float16, np.dtype(ml_dtypes.bfloat16)])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_results_have_the_dtype_asked_for(out_dtype, layout):
    given = {name: problem.canonical(x, layout) for name, x in inputs().items()}
    out = cuflash.attention(**given, layout=layout, out_dtype=out_dtype)
    assert out.dtype == (out_dtype if out_dtype != "bfloat16" else ml_dtypes.bfloat16)
    target = np.empty_like(out)
    assert cuflash.attention(**given, layout=layout, out_dtype=out_dtype, out=target) is target
    np.testing.assert_array_equal(target.view(np.uint16), out.view(np.uint16))
    assert cuflash.attention(**dequantised(inputs()), out_dtype="float64").dtype == np.float64


@pytest.mark.parametrize("options", [{}, {"mask": "qk", "bias": "b1qk"}, {"window": (5, 2), "sinks": "h"}], ids=str)
def test_numpy_against_the_reference(options):
    case = replace(CASE, **options)
    call, _, _ = case.call()
    out, lse = cuflash.numpy_backend.forward(call)
    Expectation(call).check_forward(out, lse)
    alone, _ = cuflash.numpy_backend.forward(call, batch_invariant=True)
    np.testing.assert_allclose(alone.astype(float), out.astype(float), atol=2**-7)


def test_explanation():
    assert "Scales" in str(cuflash.explain(**inputs(), v_scale=2.0))


# ---- refused by name -------------------------------------------------------------------------------------------------
def test_what_takes_no_8_bit_arrays_says_so():
    given = inputs()
    out = np.zeros((2, 4, 9, 6), ml_dtypes.bfloat16)
    lse = np.zeros((2, 4, 9), np.float32)
    rows = {name: x[0].swapaxes(0, 1) for name, x in given.items()}
    for call in (
        lambda: cuflash.attention_vjp(**given),
        lambda: cuflash.attention_backward(out, **given, out=out, lse=lse),
        lambda: cuflash.attention_statistics(**given),
        lambda: cuflash.attention_varlen(**rows, cu_seqlens_q=[0, 9], cu_seqlens_k=[0, 11]),
        lambda: cuflash.attention_decode(given["q"][..., :1, :], given["k"], given["k"], [1, 2]),
    ):
        with pytest.raises(
            UnsupportedError, match=r"float8_e4m3fn arrays: attention and explain alone.*gradients.*astype"
        ):
            call()


WRONG: dict[str, tuple[dict[str, Any], type[CuflashError], tuple[str, ...]]] = {
    "bytes": (
        {"q": np.zeros(SHAPES["q"], np.uint8)},
        ArgumentError,
        ("q has dtype uint8", ".view(ml_dtypes.float8_e4"),
    ),
    "two dtypes": ({"k": np.zeros(SHAPES["k"], np.float16)}, ArgumentError, ("k float16", "one dtype")),
    "negative": ({"q_scale": -1}, ArgumentError, ("q_scale=-1", "greater than 0")),
    "no number": ({"v_scale": True}, ArgumentError, ("v_scale=True", "real number")),
    "text": ({"k_scale": "1"}, ArgumentError, ("k_scale='1'", "real number")),
    "infinite": ({"v_scale": np.inf}, ArgumentError, ("v_scale=inf", "finite")),
    "double": ({"q_scale": np.ones(4)}, ArgumentError, ("q_scale has dtype float64", "float32")),
    "of no head": ({"k_scale": np.ones(4, np.float32)}, ShapeError, ("k_scale has shape (4,)", "heads_k) = (2, 2)")),
    "zero": ({"q_scale": np.zeros(4, np.float32)}, ArgumentError, ("q_scale contains 0.0", "greater than 0")),
    "NaN": ({"v_scale": [1.0, np.nan]}, ArgumentError, ("v_scale contains nan", "finite")),
    "product": ({"q_scale": 1e30, "k_scale": 1e30}, ArgumentError, ("q_scale and k_scale", "finite")),
    "single out": ({"out_dtype": "float32"}, ArgumentError, ("out_dtype='float32'", "bfloat16 or float16")),
    "no dtype": ({"out_dtype": 7}, ArgumentError, ("out_dtype=7", "name of a dtype")),
    "out": ({"out": np.zeros((2, 4, 9, 6), np.float16)}, ArgumentError, ("out has dtype float16", "bfloat16")),
    "bias": ({"bias": np.zeros((9, 11), np.float32)}, ArgumentError, ("bias has dtype float32", "result, bfloat16")),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    changed, error, parts = WRONG[name]
    with pytest.raises(error) as found:
        cuflash.attention(**{**inputs(), **changed})
    assert all(part in str(found.value) for part in parts), found.value


@pytest.mark.parametrize(("name", "value"), [("q_scale", 1.0), ("v_scale", [1.0]), ("out_dtype", "float16")])
def test_other_arrays_have_none(name, value):
    with pytest.raises(ArgumentError, match=rf"{name}.*float64"):
        cuflash.attention(**dequantised(inputs()), **{name: value})


# ---- plans and texts -------------------------------------------------------------------------------------------------
def planned(case: Case, capability: int = 90, backend: str | None = None) -> plan.Plan:
    call, _, _ = case.call()
    out = np.zeros(call.problem.out_shape, ml_dtypes.bfloat16)
    places = plan.places_of(call.problem, plan.forward_arrays(call, out, None))
    return plan.plan_forward(call.problem, described_device(capability), places, backend)


def test_plan():
    """Two steps that share one record: what the first reads lies in it where the other has it."""
    found = planned(replace(CASE, seq_k=300, head_dim_v=48))
    values, main = found.steps
    assert found.backend == "wgmma"
    assert (values.variant.kernel, main.variant.kernel) == ("forward_values", "forward_wgmma")
    assert main.variant.entry.endswith("_e4m3_bf16_scales_causal")
    assert [m.array for m in found.maps] == ["q", "k", "out"]
    assert [m.box[0] for m in found.maps] == [128, 128, 64]
    steps = -(-300 // main.config.block_k) * main.config.block_k // 32
    assert found.workspace() == {"value_steps": 2 * 2 * steps * 32 * 48}
    whole, part = (
        abi.record("forward", step.variant.modifiers, "float32", step.variant.maps).fields for step in (main, values)
    )
    assert all(part[name][1] == whole[name][1] for name in ("v", "value_steps", "step_count", "value_words", "seq_k"))
    record = np.frombuffer(
        found.template[: main.argument_bytes],
        abi.record("forward", main.variant.modifiers, "float32", main.variant.maps),
    )[0]
    assert record["step_count"] == steps
    assert record["value_words"] == 1


@pytest.mark.parametrize("capability", [75, 80, 86, 87])
def test_devices_without_a_kernel(capability):
    refusal = (
        r"wgmma: float8_e4m3fn needs.*mma: float8_e4m3fn needs compute capability 8\.9, .* is older; convert to float16"
    )
    with pytest.raises(UnsupportedError, match=refusal):
        planned(CASE, capability)


@pytest.mark.parametrize("capability", [89, 90, 100, 103, 120, 121])
def test_plan_of_mma(capability):
    """The layout of the values is as wide as the chunks that are multiplied, and as long as the blocks that are walked over."""
    found = planned(replace(CASE, seq_k=300, head_dim=40, head_dim_v=300), capability, "mma")
    values, main = found.steps
    assert (values.variant.kernel, main.variant.kernel) == ("forward_values", "forward_mma")
    assert main.variant.entry.endswith("_e4m3_bf16_scales_causal")
    assert main.config.head_dim == 64
    assert main.config.head_dim_v == values.config.head_dim_v >= 300
    assert main.config.head_dim_v % main.config.chunk == 0
    steps = -(-300 // main.config.block_k) * main.config.block_k // 32
    assert found.workspace() == {"value_steps": 2 * 2 * steps * 32 * main.config.head_dim_v}
    whole, part = (abi.record("forward", step.variant.modifiers, "float32").fields for step in (main, values))
    assert all(part[name][1] == whole[name][1] for name in ("v", "value_steps", "step_count", "value_words", "seq_k"))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 2.0, "mask": "qk", "alibi": "h", "documents": "packed"}]
)
@pytest.mark.parametrize("capability", [89, 90])
def test_there_is_a_tile_for_every_head(capability, options):
    for head_dim, head_dim_v in ((1, 1), (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)):
        for seq_q in (1, 300):
            case = replace(CASE, seq_q=seq_q, head_dim=head_dim, head_dim_v=head_dim_v, **options)
            assert planned(case, capability, "mma").backend == "mma"


@pytest.mark.parametrize(
    "options", [{"dropout": 0.5}, {"strides": "every second"}, {"head_dim": 264}, {"seq_k": 0}], ids=str
)
def test_hopper_leaves_to_mma_what_it_does_not_take(options):
    assert planned(replace(CASE, **options)).backend == "mma"
    assert planned(CASE).backend == "wgmma"


def test_floor_counts_twice_the_rate():
    device = replace(described_device(90), clock_hz=1e9, bytes_per_second=1e18)
    wide = Case("", "float16", batch=(1,), seq_q=4096, seq_k=4096, head_dim=64).call()[0].problem
    narrow = Case("", "float8_e4m3fn", batch=(1,), seq_q=4096, seq_k=4096, head_dim=64).call()[0].problem
    assert floor.seconds(narrow, device) == floor.seconds(wide, device) / 2


def test_instructions():
    text = instructions.wgmma((64,), str(E4M3))
    assert text.count("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 ") == 2
    assert text.count("p, 1, 1;") == 2, "these have no directions"


def test_output_has_its_own_element():
    *_, main = Entry(90, str(E4M3), 64, 64, backend="wgmma").variants()
    text = source.build(main)
    assert "typedef E4m3 Element;\ntypedef Bfloat16 OutElement;" in text
