"""Kernels as scripts/sanitize.py builds them for racecheck: they end, and give the same results."""

from __future__ import annotations

import pytest

from cuflash import source
from cuflash.variant import Variant
from scripts import sanitize
from tests.cases import Case
from tests.emulator.kernels import check


@pytest.mark.parametrize("path", sanitize.AS_FOLLOWED)
def test_texts_that_are_replaced_are_there(path: str) -> None:
    text = source.read(path)
    assert sanitize.as_followed(path, text) != text


@pytest.mark.parametrize("lengths", [(70, 133), (1, 1), (200, 30)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "turns"])
def test_float64_backward_that_meets_as_a_whole(lengths: tuple[int, int], deterministic: bool) -> None:
    def text(variant: Variant) -> str:
        built = source.build(variant)
        path = f"{variant.kernel}.cu"
        return sanitize.as_followed(path, built) if path == "backward_f64.cu" else built

    seq_q, seq_k = lengths
    case = Case("whole", "float64", heads_q=4, heads_k=2, seq_q=seq_q, seq_k=seq_k, head_dim=40, causal=True)
    check(case, 90, (0, 1), text=text, deterministic=deterministic)
