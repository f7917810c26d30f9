"""What holds for forwards of 8-bit inputs by any backend, in the emulator; `forward(call, seed)` runs one, with the tile of a test."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import problem, reference
from cuflash.modifiers import KeyLengths, Scales
from cuflash.problem import Call
from tests.cases import Case
from tests.emulator.kernels import SEEDS
from tests.tolerance import Expectation

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
CASE = Case("e4m3", "float8_e4m3fn", heads_k=1, seq_q=150, seq_k=75, scales=("bh", "bh", "bh"))

Forward = Callable[..., tuple[Any, Any]]


def widened(x: np.ndarray) -> np.ndarray:
    """The same array in rows of whole 16-byte pieces, NaN behind their ends."""
    step = 16 // x.dtype.itemsize
    outer = np.full((*x.shape[:-1], -(-x.shape[-1] // step) * step), np.nan, x.dtype)
    outer[..., : x.shape[-1]] = x
    return outer[..., : x.shape[-1]]


def widened_call(case: Case) -> Call:
    made = case.make()
    return problem.describe(*(widened(made[name]) for name in "qkv"), **made["options"])


def check_weights_far_below_the_largest(forward: Forward) -> None:
    """One key outweighs each other by 2^12; the others, a thousand of them, still make a fifth of the sum."""
    q, k = np.zeros((1, 64, 16), E4M3), np.zeros((1, 1024, 16), E4M3)
    v = np.full((1, 1024, 16), 1, E4M3)
    q[..., 0], k[:, 5, 0], v[:, 5] = 1, 1, 0
    call = problem.describe(q, k, v, scale=12 * np.log(2), scales=Scales())
    got, _ = forward(call)
    np.testing.assert_allclose(got.astype(float), reference.forward(call)[0], rtol=2**-4)


def check_what_no_row_sees(forward: Forward, queries: int) -> None:
    """Keys beyond a length, beyond the last query, and in front of the first; also inside half a step."""
    lengths = (KeyLengths(np.array(101, np.int32)),)
    for seq_q, hidden, options in (
        (queries, slice(101, None), {"window": (None, None), "modifiers": lengths}),
        (100, slice(100, None), {"window": (None, 0), "causal": "top_left"}),
        (30, slice(0, 117), {"window": (3, None)}),
    ):
        made = replace(CASE, batch=(), seq_q=seq_q, seq_k=150).make()
        q, k, v = (made[name] for name in "qkv")
        call = problem.describe(q, k, v, scales=made["options"]["scales"], **options)
        want = forward(call)
        Expectation(call).check_forward(*want)
        k[:, hidden] = v[:, hidden] = np.nan
        for seed in SEEDS:
            for got, wanted in zip(forward(call, seed), want, strict=True):
                np.testing.assert_array_equal(got, wanted)


def check_who_sees_a_nan(forward: Forward, tile_begins: int = 256) -> None:
    """The rows from its key's own on, in its column, and no other but those of the same tile."""
    made = replace(CASE, batch=(), heads_q=1, seq_q=300, seq_k=300).make()
    q, k, v = (made[name] for name in "qkv")
    v[0, 270, 3] = np.nan
    out = forward(problem.describe(q, k, v, causal=True, scales=Scales()))[0].astype(float)
    assert np.isfinite(out[:, :tile_begins]).all()
    assert np.isnan(out[:, 270:, 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=-1)).all()
