"""Any lengths, values, strides and schedule, in kernels that the other tests build: what they never wrote down.

Which kernels a call asks for is checked against those that the cases of the other tests ask for, so that nothing is built
for this.  CUFLASH_DRAWN_CALLS=20 makes twenty times as many calls, and others each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import problem, source
from cuflash.problem import canonical
from cuflash.variant import Variant
from tests.cases import OPTIONS, Case
from tests.drawn_calls import Drawn, drawn_calls, placed, variations
from tests.emulator.kernels import check, check_call
from tests.emulator.test_mma import target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)

TARGETS = ((80, "bfloat16"), (80, "float32"), (80, "float64"))
targets = pytest.mark.parametrize("target", TARGETS, ids=target_id)
CHOSEN = ("causal", "window", "bias", "lengths", "groups", "everything")
STRIDED = Case("strides", mask="bhqk", bias="b1qk", causal=True, dlse=True)  # as in `test_strides`
LONGEST, SEEDS = 70, st.integers(0, 99)


@pytest.fixture(autouse=True)
def small_tiles(mma_tile: Any, simt_tile: Any) -> None:  # noqa: F811
    """Every test runs with them."""


@cache
def kernels_of(cases: tuple[Case, ...], arch: int) -> set[Variant]:
    """The kernels that some cases ask for."""
    found: set[Variant] = set()

    def remember(variant: Variant) -> str:
        found.add(variant)
        return source.build(variant)

    for case in cases:
        check(replace(case, seq_q=1, seq_k=1), arch, (0,), text=remember)
        if case.bias is not None:  # whose gradient is stored where it is not broadcast, else added up
            for axes in ("bhqk", "1"):
                check(replace(case, seq_q=2, seq_k=1, bias=axes), arch, (0,), text=remember)
    return found


def run(call: Drawn, arch: int, seed: int, built: Iterable[Case]) -> None:
    """Run a call forward and backward under a schedule, in kernels that these cases ask for."""
    known = kernels_of(tuple(built), arch)

    def text(variant: Variant) -> str:
        assert variant in known, f"{variant} would be built for this call alone"
        return source.build(variant)

    made = call.make()
    described = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    check_call(described, canonical(made["dout"], call.case.layout), made["dlse"], arch, (seed,), text=text)


@targets
@drawn_calls(30)
@given(data=st.data())
def test_options(target: tuple[int, str], data: Any) -> None:
    arch, dtype = target
    base = Case("drawn", dtype, **OPTIONS[data.draw(st.sampled_from(CHOSEN))])
    call = Drawn(data.draw(variations(base, LONGEST)), data.draw(SEEDS))
    run(call, arch, data.draw(SEEDS), [base])


@targets
@drawn_calls(30)
@given(data=st.data())
def test_strides(target: tuple[int, str], data: Any) -> None:
    arch, dtype = target
    head_dim = data.draw(st.sampled_from((15, 16))) if dtype == "bfloat16" else 15
    base = replace(STRIDED, dtype=dtype, head_dim=head_dim)
    built = [base, *(replace(base, strides=name) for name in ("padded", "every second"))]
    run(data.draw(placed(base, LONGEST)), arch, data.draw(SEEDS), built)
