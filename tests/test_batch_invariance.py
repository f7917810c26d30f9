"""With batch_invariant=True the bits of a batch entry are those that it has alone: on the host, and in what is planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentError, numpy_backend, plan, problem
from cuflash.backends import described_device
from cuflash.modifiers import Modifier
from cuflash.place import compact
from cuflash.problem import Call, canonical
from tests.cases import DTYPES, OPTIONS, STRIDES, Case

ENTRIES = 7
#: a bias of the scores' full shape: the gradient of another one is a sum, over the batch if it is broadcast along it
MANY = {
    name: replace(Case(name, **(options | {"batch": (ENTRIES,)})), bias=options.get("bias") and "bhqk")
    for name, options in OPTIONS.items()
}


def many(name: str, dtype: str = "float32", **changes: Any) -> Case:
    """A case of seven batch entries, lengths of keys all different."""
    case = replace(MANY[name], dtype=dtype, **changes)
    return replace(case, lengths=case.lengths and "random")


def alone(made: dict[str, Any], entry: int) -> dict[str, Any]:
    """The arguments of one entry, in arrays of its own."""

    def part(x: Any, axes: int) -> Any:
        return x[entry : entry + 1].copy() if x is not None and x.ndim == axes and len(x) == ENTRIES else x

    options = made["options"]
    operands = {"mask": part(options["mask"], 4), "bias": part(options["bias"], 4)}
    modifiers = tuple(part_of(modifier, part) for modifier in options["modifiers"])
    arrays = {name: part(made[name], 4) for name in ("q", "k", "v", "dout")}
    dlse = None if made["dlse"] is None else made["dlse"][entry : entry + 1].copy()
    return {**arrays, "dlse": dlse, "options": {**options, **operands, "modifiers": modifiers}}


def part_of(modifier: Modifier, part: Any) -> Modifier:
    """The modifier with the entry's part of its arrays."""
    axes = {"lengths": 1, "documents": 2, "alibi": 2, "blocks": 4}[modifier.name]
    names = type(modifier).operand_attributes().values()
    return replace(modifier, **{name: part(getattr(modifier, name), axes) for name in names})


def bits(arrays: Any) -> list[bytes]:
    return [np.ascontiguousarray(x).tobytes() for x in arrays if x is not None]


def results(made: dict[str, Any], **options: Any) -> list[Any]:
    """All results of a call, forward and backward."""
    arguments = made["q"], made["k"], made["v"]
    options = {**made["options"], **options}
    found = cuflash.attention_statistics(*arguments, **options)
    gradients = cuflash.attention_backward(made["dout"], *arguments, found.out, found.lse, dlse=made["dlse"], **options)
    return [*found, *gradients]


def entries_that_differ(case: Case, **options: Any) -> Iterator[int]:
    """Entries some bits of which depend on the others."""
    made = case.make()
    whole = results(made, **options)
    for entry in range(ENTRIES):
        single = results(alone(made, entry), **options)
        if bits(single) != bits(x[entry : entry + 1] for x in whole):
            yield entry


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_host(name: str, dtype: str) -> None:
    assert not list(entries_that_differ(many(name, dtype), batch_invariant=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", [name for name in STRIDES if name != "stride 0"])
def test_host_with_strides(strides: str, layout: str) -> None:
    """A BLAS may be given rows as they lie: one that is not contiguous has a pitch of its own in the batch."""
    case = many("everything", strides=strides, layout=layout, head_dim=48, head_dim_v=48)
    assert not list(entries_that_differ(case, batch_invariant=True))


def test_host_with_larger_products() -> None:
    case = replace(many("lengths-causal"), heads_q=4, seq_q=300, seq_k=700, head_dim=64)
    assert not list(entries_that_differ(case, batch_invariant=True))


def test_without_it_the_others_show() -> None:
    """What the tests here could not see if results never depended on the batch."""
    assert list(entries_that_differ(many("lengths-causal")))


@pytest.mark.parametrize("entries", [1, 3, 300])
def test_the_number_of_entries(entries: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((entries, 2, n, 8)).astype(np.float32) for n in (3, 5, 5))
    rng = np.random.default_rng(1)
    q[0], k[0], v[0] = (rng.standard_normal((2, n, 8)) for n in (3, 5, 5))
    out = cuflash.attention(q, k, v, batch_invariant=True)
    np.testing.assert_array_equal(out[0], cuflash.attention(q[0], k[0], v[0], batch_invariant=True))


def test_a_nan_of_another_entry_stays_there() -> None:
    case = replace(many("causal"), dtype="float64")
    made = case.make()
    clean = numpy_backend.forward(described(made), batch_invariant=True)
    made["v"][3, :, 7] = np.inf
    other = numpy_backend.forward(described(made), batch_invariant=True)
    for entry in (0, 1, 2, 4, 5, 6):
        assert bits(x[entry] for x in clean) == bits(x[entry] for x in other)


def described(made: dict[str, Any]) -> Call:
    return problem.describe(made["q"], made["k"], made["v"], **made["options"])


# ---- what is planned for a device ------------------------------------------------------------------------------------
def planned(made: dict[str, Any], arch: int, compacted: bool) -> list[tuple[Any, ...]]:
    """Backend and compiled kernels of both directions."""
    call, device = described(made), described_device(arch)
    made_problem = call.problem
    lse = np.zeros(made_problem.lse_shape, made_problem.accumulator)
    out = dout = canonical(made["dout"], made_problem.layout)
    gradients = {
        f"d{name}": compact(np.zeros(x.shape, x.dtype), "bhsd")
        for name, x in zip("qkv", (call.q, call.k, call.v), strict=True)
    }
    if "bias" in call.operands:
        gradients["dbias"] = np.zeros(call.operands["bias"].shape, made_problem.accumulator)
    directions = [
        (plan.plan_forward, plan.forward_arrays(call, out, lse), ()),
        (plan.plan_backward, plan.backward_arrays(call, out=out, lse=lse, dout=dout, **gradients), (True,)),
    ]
    found = []
    for make, arrays, options in directions:
        arrays = plan.compacted(made_problem, arrays) if compacted else arrays
        made_plan = make(made_problem, device, plan.places_of(made_problem, arrays), *options)
        found.append((made_plan.backend, *(step.variant for step in made_plan.steps)))
    return found


@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("strides", STRIDES)
def test_plans_are_those_of_an_entry_alone(strides: str, arch: int) -> None:
    differed = 0
    for dtype, head_dim, layout in product(DTYPES, (16, 20, 128), ("bhsd", "bshd")):
        if dtype == "bfloat16" and arch < 80:
            continue
        made = many("causal", dtype, strides=strides, layout=layout, head_dim=head_dim).make()
        single = alone(made, 3)
        assert planned(made, arch, True) == planned(single, arch, True)
        assert planned(made, arch, True) == planned(alone(made, 6), arch, True)
        differed += planned(made, arch, False) != planned(single, arch, False)
    chooses = strides != "contiguous" and (
        strides != "stride 0" or arch == 90
    )  # only tensor maps mind what is repeated
    assert bool(differed) == chooses, "the test must be able to fail"


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("strides", STRIDES)
def test_compact_keeps_values_and_copies_only_what_it_must(strides: str, layout: Any) -> None:
    x = canonical(STRIDES[strides](canonical(np.random.default_rng(0).random((2, 3, 4, 5)), layout).copy()), layout)
    y = compact(x, layout)
    np.testing.assert_array_equal(x, y)
    assert canonical(y, layout).flags.c_contiguous
    assert (y is x) == (strides == "contiguous")
    assert compact(y, layout) is y


def test_compact_looks_at_axes_of_length_1() -> None:
    x = np.lib.stride_tricks.as_strided(np.zeros(64), (1, 2, 4, 8), (8, 256, 64, 8))
    assert x.flags.c_contiguous
    assert compact(x, "bhsd").strides == (512, 256, 64, 8)
    empty = np.zeros((0, 2, 4, 8))[:, ::-1]
    assert compact(empty, "bhsd") is empty


# ---- the calls -------------------------------------------------------------------------------------------------------
def test_backwards_are_deterministic_with_it() -> None:
    made = Case("order").make()
    q, k, v = made["q"], made["k"], made["v"]
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    with pytest.raises(ArgumentError, match="deterministic=False with batch_invariant=True"):
        cuflash.attention_backward(made["dout"], q, k, v, out, lse, deterministic=False, batch_invariant=True)
    with pytest.raises(ArgumentError, match="deterministic=False with batch_invariant=True"):
        cuflash.attention_vjp(q, k, v, deterministic=False, batch_invariant=True)
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cuflash.api,
            "run_backward",
            lambda *given: asked.append(given) or numpy_backend.backward(given[1], out, lse, made["dout"]),
        )
        cuflash.attention_backward(made["dout"], q, k, v, out, lse, batch_invariant=True)
        cuflash.attention_vjp(q, k, v, batch_invariant=True)[1](made["dout"])
        cuflash.attention_backward(made["dout"], q, k, v, out, lse)
    assert [(given[3], given[5]) for given in asked] == [(True, True), (True, True), (None, False)]


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_what_is_no_flag_is_refused(value: Any) -> None:
    made = Case("flags").make()
    q, k, v = made["q"], made["k"], made["v"]
    for call in (cuflash.attention, cuflash.attention_vjp, cuflash.attention_statistics):
        with pytest.raises(ArgumentError, match=f"batch_invariant={value!r}: must be True or False"):
            call(q, k, v, batch_invariant=value)
