"""The choice of a backend: what each takes, in which order, and every reason not to."""

from dataclasses import replace

import numpy as np
import pytest

from cuflash import plan, tuning
from cuflash.backends import BACKENDS, Device, described_device, select
from cuflash.errors import UnsupportedError
from cuflash.problem import Call
from cuflash.schedules import wgmma
from cuflash.schedules.split_wgmma import MAX_SPLIT
from tests.cases import STRIDES, Case
from tests.gpu.test_kernels import TILED
from tests.test_plan import call_of, contiguous, places

HOPPER = described_device(90)


def chosen(call: Call, device: Device = HOPPER, **options) -> tuple[str, dict[str, str]]:
    """Name of the backend, and why none of the others, for contiguous arrays."""
    direction = "backward" if options.get("backward") else "forward"
    backend, reasons = select(call.problem, device, dict(places(call, direction)), **options)
    return backend.name, reasons


def refused(call: Call, device: Device = HOPPER, **options) -> str:
    """Why Hopper's kernels, asked for, do not take a call."""
    with pytest.raises(UnsupportedError, match="no GPU backend takes this call") as error:
        chosen(call, device, requested="wgmma", **options)
    return str(error.value).partition("wgmma: ")[2].partition("; mma: ")[0]


def test_every_backend_is_chosen_or_has_a_reason():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        name, reasons = chosen(call_of(dtype=dtype))
        assert name == ("wgmma" if dtype.endswith("16") else "simt")
        assert {name, *reasons} == {row.name for row in BACKENDS} | {"numpy"}


# ---- Hopper's kernels ------------------------------------------------------------------------------------------------
def test_hopper_kernels_are_preferred_to_those_of_every_device():
    for dtype in ("float16", "bfloat16"):
        for backward in (False, True):
            name, reasons = chosen(call_of(dtype=dtype), backward=backward)
            assert name == "wgmma"
            assert reasons["mma"] == "wgmma is preferred"
            name, reasons = chosen(call_of(dtype=dtype), requested="mma", backward=backward)
            assert name == "mma"
            assert reasons["wgmma"] == "backend='mma' was asked for"


def test_dtypes_of_more_than_16_bits():
    assert refused(call_of(dtype="float64")) == "float64 is not among its dtypes (float16, bfloat16, float32)"
    assert chosen(call_of(dtype="float32"), requested="wgmma")[0] == "wgmma"
    wide = call_of((1, 4, 100, 129), dtype="float32")
    assert refused(wide, backward=True) == f"its backward of float32 takes heads of {MAX_SPLIT} at most"


@pytest.mark.parametrize("capability", [80, 89, 100, 103, 120])
def test_other_architectures(capability):
    reason = refused(call_of(), described_device(capability))
    if capability < 90:
        assert "float16 needs compute capability 9.0" in reason
    else:
        assert reason == "its instructions exist on compute capability 9.0 only"


@pytest.mark.parametrize("compiler", [0, 1204, 1208, 1209, 1300, 1305])
def test_compilers(compiler):
    """Before 12.9 NVRTC takes no second -arch; 0 is a compiler that nobody has asked."""
    device = replace(HOPPER, compiler=compiler)
    if compiler in (1204, 1208):
        assert refused(call_of(), device) == f"NVRTC {compiler // 100}.{compiler % 100} is older than 12.9"
        assert chosen(call_of(), device)[0] == "mma"
    else:
        assert chosen(call_of(), device, requested="wgmma")[0] == "wgmma"


@pytest.mark.parametrize(
    ("head_dim", "options", "reason"),
    [
        (128, {"softcap": 2.0}, None),
        (96, {"softcap": 2.0, "mask": True}, None),
        (104, {"softcap": 2.0, "mask": True}, "no room for the slopes of softcap beside mask at head size 104"),
        (256, {"mask": True}, None),
    ],
)
def test_backward(head_dim, options, reason):
    """Derivatives of the softcap stay in registers for a while, which wide heads and other modifiers need as well."""
    if "mask" in options:
        options = {**options, "mask": np.ones((33, 45), bool)}
    call = call_of((2, 4, 33, head_dim), **options)
    if reason:
        assert reason in refused(call, backward=True)
    else:
        assert chosen(call, requested="wgmma", backward=True)[0] == "wgmma"


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(264, 64), (64, 264)])
def test_heads_above_256(head_dim, head_dim_v):
    reason = refused(call_of((2, 4, 33, head_dim), head_dim_v=head_dim_v))
    assert reason == (
        f"head_dim{'_v' * (head_dim_v > 256)} {max(head_dim, head_dim_v)} is above 256; the numpy backend has no limit"
    )


def test_heads_that_fit_no_tile():
    assert chosen(call_of((2, 4, 33, 128), head_dim_v=256), requested="wgmma")[0] == "wgmma"
    assert chosen(call_of((2, 4, 33, 256), head_dim_v=128), requested="wgmma")[0] == "wgmma"
    assert "no tile" in refused(call_of((2, 4, 33, 256)), replace(HOPPER, shared_limit=64 * 1024))


def test_more_tiles_than_are_counted():
    """The grid stays small however many tiles there are, so that its limit is none on them."""
    fits, more = ((2**n, 2, 1, 16) for n in (29, 30))
    assert chosen(call_of(fits, seq_k=1), requested="wgmma")[0] == "wgmma"
    assert "2147483648 tiles are more than the 1073741824" in refused(call_of(more, seq_k=1))


@pytest.mark.parametrize("empty", [{"shape_q": (0, 4, 33, 64)}, {"shape_q": (2, 4, 0, 64)}, {"seq_k": 0}], ids=str)
def test_empty_arrays(empty):
    assert refused(call_of(**empty)) == "an array is empty, which no tensor map describes"
    assert chosen(call_of(**empty))[0] == "mma"


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_arrays_without_a_tensor_map(name):
    """One is enough, and mma takes it; statistics and operands need none."""
    made = call_of((2, 4, 33, 64), seq_k=33, heads_k=4)
    at = dict(places(made))
    at[name] = contiguous(made.q.shape, 2, misalignment=2)
    with pytest.raises(UnsupportedError, match=f"wgmma: rows of {name} are not contiguous, or do not start"):
        select(made.problem, HOPPER, at, requested="wgmma")
    assert select(made.problem, HOPPER, at)[0].name == "mma"


def test_the_device_tests_reach_hopper_kernels():
    """Of the options that are tested on a device, all but those with rows of 12 elements are taken by the forward."""
    refusals = set()
    for case in TILED:
        call, _, _ = replace(case, dtype="float16").call()
        out = np.zeros(call.problem.out_shape, np.float16)
        lse = np.zeros(call.problem.lse_shape, np.float32)
        at = plan.places_of(call.problem, plan.forward_arrays(call, out, lse))
        try:
            assert select(call.problem, HOPPER, dict(at), requested="wgmma")[0].name == "wgmma"
        except UnsupportedError:
            refusals.add(case.name)
    assert {name.rpartition("-")[2] for name in refusals} == {"everything"}
    assert len(refusals) < len(TILED) / 2


@pytest.mark.parametrize("strides", STRIDES)
def test_operands_of_any_strides(strides):
    call, _, _ = Case("operands", "float16", mask="bhqk", bias="bhqk").call()
    operands = {name: STRIDES[strides](x) for name, x in call.operands.items()}
    at = dict(places(call)) | dict(plan.places_of(call.problem, operands))
    assert select(call.problem, HOPPER, at, requested="wgmma")[0].name == "wgmma"


def test_weight_of_modifiers_chooses_the_tile():
    """More modifiers, a later row of the table; all options together are taken at every head size."""
    weights = []
    for head_dim in range(8, 257, 8):
        rows = []
        for options in ({}, {"softcap": 1.0}, {"softcap": 1.0, "scale": -1.0, "window": (3, 5), "causal": True}):
            call = call_of((2, 4, 33, head_dim), **options)
            config = plan.plan_forward(call.problem, HOPPER, places(call), "wgmma").steps[0].config
            weights.append(wgmma.weight(call.problem))
            rows.append(
                next(
                    i
                    for i, row in enumerate(tuning.FORWARD_WGMMA)
                    if (row.block_q, row.block_k, row.stages) == (config.block_q, config.block_k, config.stages)
                    and row.max_weight >= weights[-1]
                    and row.max_head_dim >= config.head_dim
                )
            )
        assert rows == sorted(rows)
        assert rows[0] < rows[2]
    assert set(weights) == {0, 8, 19}
