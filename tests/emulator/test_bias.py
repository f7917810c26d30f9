"""A bias of every broadcast shape in the emulator: each of its four axes full or of length 1, values and gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from cuflash.backends import described_device
from tests.cases import Case
from tests.emulator.kernels import check
from tests.emulator.test_mma import FORWARD, target_id
from tests.emulator.test_mma import tile as mma_tile  # noqa: F401 (a fixture)
from tests.emulator.test_simt import tile as simt_tile  # noqa: F401 (a fixture)

PATTERNS = ["".join(axes) for axes in product("b1", "h1", "q1", "k1")]
TARGETS = [(80, "bfloat16"), (75, "float32"), (75, "float64")]


@pytest.fixture(autouse=True)
def small_tiles(mma_tile: object, simt_tile: object) -> None:  # noqa: F811
    """Every test runs with them."""


def case_of(pattern: str, dtype: str, head_dim: int = 24, **options: object) -> Case:
    """Two groups of two heads, edges of tiles on both sides."""
    sizes = {"heads_q": 4, "heads_k": 2, "seq_q": 37, "seq_k": 50}
    return Case("bias", dtype, head_dim=head_dim, bias=pattern, **{**sizes, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("target", TARGETS, ids=target_id)
def test_patterns(target: tuple[int, str], pattern: str) -> None:
    """One schedule for each pattern, another for the next."""
    check(case_of(pattern, target[1]), target[0], [PATTERNS.index(pattern) % 6])


@pytest.mark.parametrize("pattern", [x for x in PATTERNS if x[3] == "k"])
@pytest.mark.parametrize("options", [{}, {"mask": "hqk", "causal": True}], ids=["alone", "masked"])
def test_rows_in_pieces(mma_tile: Any, options: dict[str, object], pattern: str) -> None:  # noqa: F811
    """Rows that start at multiples of 16 bytes, in tiles that lie inside and in one at the edge."""
    mma_tile(FORWARD._replace(block_k=32))
    check(case_of(pattern, "float16", seq_k=72, **options), 80, [1, 4])
    check(
        case_of(pattern, "bfloat16", 64, batch=(2,), seq_k=264, **options),
        90,
        [2],
        requested="wgmma",
        with_backward=False,
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("head_dim", [64, 128, 136])
def test_patterns_on_hopper(head_dim: int, pattern: str) -> None:
    """By both schedules of its backward, and by that of split roles."""
    case = case_of(pattern, "bfloat16", head_dim, batch=(2,), seq_q=70)
    check(case, described_device(90), [PATTERNS.index(pattern) % 6], requested="wgmma")
