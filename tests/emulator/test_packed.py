"""Packed sequences in the emulator: every kernel, segments of all lengths, and the same bits alone and in a pack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cuflash import segments
from cuflash.problem import Call
from tests.emulator import kernels
from tests.emulator.test_mma import target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)
from tests.packs import Judge, Pack, alone

#: small tiles: 32 x 16 forward and 32 x 32 backward for 16 bits, 16 x 32 and 16 x 16 for the others
TARGETS = ((75, "float16"), (80, "bfloat16"), (90, "bfloat16"), (75, "float32"), (80, "float64"), (90, "float32"))
targets = pytest.mark.parametrize("target", TARGETS, ids=target_id)

LENGTHS_Q, LENGTHS_K = (33, 0, 7, 64, 1, 20, 0), (40, 9, 0, 50, 65, 20, 0)
PACK = Pack(LENGTHS_Q, LENGTHS_K, behind=(9, 37))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "dlse": True},
    "top-left": {"causal": "top_left", "window": (9, 30)},
    "window": {"window": (12, 3), "dlse": True},
    "left": {"window": (None, 0), "heads_q": 4, "heads_k": 1},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi": True, "dlse": True},
    "negative-scale": {"scale": -0.4},
    "groups": {"heads_q": 6, "heads_k": 2, "causal": True, "dlse": True},
    "wide": {"head_dim": 24, "head_dim_v": 40},
    "narrow": {"head_dim": 40, "head_dim_v": 8, "causal": True},
    "everything": {
        **{"heads_q": 4, "heads_k": 2, "causal": True, "window": (30, None), "softcap": 3.0, "alibi": True},
        **{"scale": 0.4, "head_dim": 17, "head_dim_v": 12, "dlse": True},
    },
}


@pytest.fixture(autouse=True)
def small_tiles(mma_tile: Any, simt_tile: Any) -> None:  # noqa: F811
    """Every test runs with them."""


def check(pack: Pack, arch: int, seeds: Iterable[int] = kernels.SEEDS, **options: Any) -> None:
    call, dout, dlse = pack.call()
    judge = Judge(call, dout, dlse)
    for seed in seeds:
        out, lse = kernels.forward(call, arch, seed)
        judge.check_forward(out, lse)
        judge.check_backward(kernels.backward(call, out, lse, dout, dlse, arch, seed, **options))


@targets
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, target: tuple[int, str]) -> None:
    """Each under three seeds of the schedule, and in turns under the other three."""
    pack = replace(PACK, dtype=target[1], **OPTIONS[name])
    check(pack, target[0], (0, 1, 2))
    check(pack, target[0], (3, 4, 5), deterministic=True)
