"""Any lengths, values and strides on the device, for options whose kernels the other tests compile as well.

Each run makes the same calls; CUFLASH_DRAWN_CALLS=20 makes twenty times as many, and others each time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from cuflash import UnsupportedError
from tests.cases import OPTIONS, Case
from tests.drawn_calls import Drawn, check, drawn_calls, placed, variations
from tests.gpu.device import KINDS, Device, Kind, on_device

#: one of 16 bits and one of 32 for each backend that has it
CHOSEN_KINDS = [kind for kind in KINDS if kind.dtype in ("bfloat16", "float32")]
CHOSEN = ("causal", "bias", "everything")
STRIDED = Case("strides", mask="bhqk", bias="b1qk", causal=True, dlse=True)
LONGEST = 200
booleans = st.booleans()


def run(device: Device, kind: Kind, call: Drawn) -> None:
    """Judge a call.  Hopper's kernels take no empty one."""
    device.inputs.clear()  # of a call that has failed
    call = replace(call, case=replace(call.case, dtype=kind.dtype))
    try:
        check(device, call, kind.backend, moved=on_device)
    except UnsupportedError:
        if kind.backend != "wgmma":
            raise
        reject()


@pytest.mark.parametrize("kind", CHOSEN_KINDS, ids=str, indirect=True)
@drawn_calls(20)
@given(data=st.data())
def test_options(device: Device, kind: Kind, data: Any) -> None:
    base = Case("drawn", **OPTIONS[data.draw(st.sampled_from(CHOSEN))])
    case = data.draw(variations(base, LONGEST))
    gives_out, invariant = data.draw(booleans), data.draw(booleans)
    order = data.draw(st.sampled_from((None, True)))
    seed = data.draw(st.integers(0, 99))
    run(device, kind, Drawn(case, seed, gives_out=gives_out, deterministic=order, batch_invariant=invariant))


@pytest.mark.parametrize("kind", [k for k in CHOSEN_KINDS if k.backend != "wgmma"], ids=str, indirect=True)
@drawn_calls(20)
@given(data=st.data())
def test_strides(device: Device, kind: Kind, data: Any) -> None:
    call = data.draw(placed(replace(STRIDED, head_dim=data.draw(st.sampled_from((15, 16)))), LONGEST))
    run(device, kind, replace(call, respelled=data.draw(booleans), gives_out=data.draw(booleans)))
