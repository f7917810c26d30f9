"""Sums in fixed point (kernels/hw/fixed.cuh) in the emulator: their values against exact ones, in any order of terms."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cuflash import source
from tests.emulator.guards import GuardedArena
from tests.emulator.host import EmulatedKernel

KERNEL = """
#include "hw/fixed.cuh"
typedef FixedSum<REAL, DIGITS> Sum;

// All terms into each sum, by as many threads as there are.
extern "C" __global__ void add_up(const REAL* terms, int count, Sum* sums, int power, int limit) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) sums->add(terms[i], {power, limit});
}
extern "C" __global__ void read(const Sum* sums, REAL* values, int power) { *values = sums->value({power, 0}); }
"""


def text(real: str, digits: int) -> str:
    flat = source._flatten("test.cu", {"test.cu": KERNEL}, set())
    return flat.replace("REAL", real).replace("DIGITS", str(digits))


def summed(terms: np.ndarray, digits: int, power: int, limit: int, seed: int) -> Any:
    """The sum and its words, of terms in an order that the seed shuffles."""
    real = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}[terms.dtype]
    terms = np.random.default_rng(seed).permutation(terms)
    add, read = (EmulatedKernel(text(real, digits), name, sanitize=True) for name in ("add_up", "read"))
    with GuardedArena() as arena:
        x = arena.constant(terms, "terms")
        sums, value = arena.copy(np.zeros(digits, np.uint64), "sums"), arena.empty((1,), terms.dtype, "value")
        add.launch((-(-len(x) // 64),), 64, [x, np.int32(len(x)), sums, np.int32(power), np.int32(limit)], 0, seed)
        words = sums.copy()
        read.launch((1,), 32, [sums, value, np.int32(power)], 0, seed)
        return value[0].copy(), words


@pytest.mark.parametrize(("dtype", "digits"), [(np.float32, 2), (np.float32, 3), (np.float64, 3), (np.float64, 4)])
def test_sums_are_exact_but_for_what_is_below_the_unit(dtype: Any, digits: int) -> None:
    """Of terms that cancel, of all sizes, and whose digits overflow many times."""
    rng = np.random.default_rng(digits)
    limit = 28 * (digits - 1) + 62 - 10
    power = limit - 6  # terms up to 2^6
    wide = (rng.standard_normal(700) * 2.0 ** rng.integers(-limit - 4, 5, 700)).astype(dtype)
    for name, terms in {
        "wide": wide,
        "cancelling": np.concatenate([wide, -wide, wide[:1] / 2]),
        "minus one unit": np.array([-(2.0**-power)], dtype),
        "just below 0": np.array([1, -1, -(2.0**-power) * 3], dtype),
        "largest": np.full(900, np.nextafter(dtype(64), dtype(0))),
        "largest negative": np.full(900, -np.nextafter(dtype(64), dtype(0))),
        "none": np.zeros(3, dtype),
    }.items():
        units = sum(int(Fraction(float(x)) * 2**power) for x in terms)  # towards 0, as the digits are taken
        want = dtype(float(Fraction(units, 2**power)))
        found = [summed(terms, digits, power, limit, seed) for seed in range(3)]
        assert all(
            abs(Fraction(float(value)) - Fraction(units, 2**power)) <= abs(Fraction(float(np.spacing(want))))
            for value, _ in found
        ), name
        assert len({words.tobytes() for _, words in found}) == 1, name


@pytest.mark.parametrize(
    ("special", "want"),
    [
        ([np.inf], np.inf),
        ([-np.inf, -np.inf], -np.inf),
        ([np.inf, -np.inf], np.nan),
        ([np.nan], np.nan),
        ([np.nan, np.inf], np.nan),
        ([3e38], np.inf),  # more than the unit has room for
        ([-3e38], -np.inf),
    ],
    ids=str,
)
def test_what_is_not_finite_stays(special: list[float], want: float) -> None:
    """Whenever it comes, and however often."""
    terms = np.array([*special, *np.linspace(-60, 60, 200)], np.float32)
    found = [summed(terms, 2, 60, 70, seed) for seed in range(3)]
    np.testing.assert_array_equal([value for value, _ in found], [want] * 3)
    assert len({words.tobytes() for _, words in found}) == 1
