"""A batch of seven against each entry alone in the emulator, bit for bit: the forward, its statistics, the backward in turns.

What is planned for a batch and for an entry of it is the same (tests/test_batch_invariance.py); here the kernels run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cuflash import abi, problem, tuning
from cuflash.schedules import simt
from tests.cases import Case
from tests.emulator import kernels
from tests.emulator.kernels import SEEDS
from tests.emulator.test_simt import forced_backward
from tests.test_batch_invariance import ENTRIES, alone, bits, many

TARGETS = ((75, "float16"), (80, "bfloat16"), (75, "float32"), (80, "float32"), (90, "float64"))
RESIDENTS = 3


@pytest.fixture
def tile(monkeypatch):
    """Tiles small enough for many blocks."""
    monkeypatch.setattr(tuning, "FORWARD_MMA", (tuning.ForwardTile(32, 16, 2, 2, 1),))
    monkeypatch.setattr(tuning, "COLUMNS_MMA", (tuning.ColumnsTile(16, 32, 2, 2, 1),))
    monkeypatch.setattr(tuning, "COLUMNS_SIMT", (tuning.ColumnsSimtTile(2, 4, 2, 2),))
    monkeypatch.setattr(tuning, "BACKWARD_MMA", (tuning.BackwardTile(32, 32, 2, 1, 2, 2, 1),))
    monkeypatch.setattr(simt, "backward", forced_backward("one warp a half"))


def results(made: dict[str, Any], arch: int, seed: int, names: tuple[str, ...], **options: Any) -> list[Any]:
    """All results of a call under one schedule."""
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    out, lse, found = kernels.statistics(call, arch, seed, names, residents=RESIDENTS, **options)
    gradients = kernels.backward(
        call, out, lse, made["dout"], made["dlse"], arch, seed, deterministic=True, residents=RESIDENTS, **options
    )
    return [out, lse, *found.values(), *gradients]


def check(case: Case, arch: int, names: tuple[str, ...] = abi.STATISTICS, **options: Any) -> None:
    """The batch under one schedule, each entry under another."""
    made = case.make()
    whole = results(made, arch, 1, names, **options)
    for entry in range(ENTRIES):
        single = results(alone(made, entry), arch, SEEDS[entry % len(SEEDS)], names, **options)
        assert bits(single) == bits(x[entry : entry + 1] for x in whole), f"entry {entry}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{target[0]}-{target[1]}")
@pytest.mark.parametrize("name", ["lengths-causal", "sparse-everything"])
def test_kernels(tile, name, target):
    arch, dtype = target
    check(replace(many(name, dtype), heads_q=2, heads_k=1, seq_q=37, seq_k=45), arch)


@pytest.mark.parametrize(
    "target", [(80, "bfloat16"), (75, "float32")], ids=lambda target: f"sm_{target[0]}-{target[1]}"
)
def test_a_gradient_that_is_a_sum_within_each_entry(tile, target):
    """Its unit follows from the largest numbers of the entry alone, whose sizes differ."""
    arch, dtype = target
    made = replace(many("plain", dtype), heads_q=2, heads_k=1, seq_q=37, seq_k=45, bias="b11k", dlse=True).make()
    for entry in range(ENTRIES):
        made["dout"][entry] = made["dout"][entry] * 2.0 ** (12 * entry)
    whole = results(made, arch, 1, ())
    for entry in range(ENTRIES):
        single = results(alone(made, entry), arch, SEEDS[entry % len(SEEDS)], ())
        assert bits(single) == bits(x[entry : entry + 1] for x in whole), f"entry {entry}"


@pytest.mark.parametrize("name", ["plain", "lengths-causal"])
def test_hopper_kernels(name):
    """Blocks stay and take tile after tile: which ones, and after which others, depends on the batch."""
    case = replace(many(name, "bfloat16"), heads_q=2, heads_k=1, seq_q=70, seq_k=90, head_dim=64)
    check(case, 90, (), requested="wgmma")


def test_values_that_outgrow_the_maximum(tile):
    """Whether a row changes its base depends on the rows beside it, which are of its own entry."""
    made = replace(many("causal", "bfloat16"), heads_q=1, heads_k=1, values="x30")
    check(made, 80)
