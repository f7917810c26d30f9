"""2^x in float64 without a branch (kernels/hw/exp2_f64.cuh) in the emulator."""

from __future__ import annotations

import numpy as np

from cuflash import source
from tests.emulator.guards import GuardedArena
from tests.emulator.host import EmulatedKernel

KERNEL = """
#include "hw/element.cuh"
#include "hw/exp2_f64.cuh"

extern "C" __global__ void powers(const double* x, double* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = Exp2F64()(x[i]);
}
"""


def powers(x: np.ndarray) -> np.ndarray:
    """2^x, by the kernel's function."""
    kernel = EmulatedKernel(source._flatten("test.cu", {"test.cu": KERNEL}, set()), "powers", sanitize=True)
    padded = np.concatenate([x, np.zeros(-len(x) % 32)])
    with GuardedArena() as arena:
        given, y = arena.constant(padded, "x"), arena.empty(padded.shape, padded.dtype, "y")
        kernel.launch((len(padded) // 32,), 32, [given, y], 0, 0)
        return y[: len(x)].copy()


def test_powers_are_within_three_roundings() -> None:
    """Near 0, anywhere, next to where the root changes, and at the end of normal numbers."""
    rng = np.random.default_rng(0)
    edges = -(rng.integers(0, 900 * 64, 500) / 64)
    x = np.concatenate(
        [
            -rng.random(1000) * 2.0 ** rng.integers(-40, 10, 1000),
            np.nextafter(edges, -np.inf),
            np.nextafter(edges, np.inf),
            edges,
            -np.arange(1022.0),
            [-1021.999999],
        ]
    )
    x = x[(x > -1022) & (x <= 0)]
    assert np.abs(powers(x) / np.exp2(x.astype(np.longdouble)) - 1).max() < 5e-16


def test_ends() -> None:
    """Rounding may have lifted x above 0; hidden keys have -infinity; a NaN is passed on; there are no denormal results."""
    x = np.array([0.0, -0.0, 1e-300, 3.5, np.inf, -1022, -1023.5, -1100, -1e30, -1e300, -np.inf, np.nan, -np.nan])
    want = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, np.nan, np.nan])
    np.testing.assert_array_equal(powers(x), want)
