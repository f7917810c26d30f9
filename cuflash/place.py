"""Where the arrays of a call lie: strides, alignment, and batch axes merged to the few that kernels walk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuflash.abi import BATCH_AXES
from cuflash.errors import UnsupportedError
from cuflash.problem import Layout, canonical


@dataclass(frozen=True)
class Placed:
    """Where an array lies: byte strides of (*batch, heads, row, column), 0 where broadcast, and the address modulo 16."""

    strides: tuple[int, ...]
    itemsize: int
    misalignment: int

    def aligned(self, to: int, axes: int) -> bool:
        """Whether rows of `axes` axes can be moved in pieces of `to` bytes."""
        return (
            self.misalignment % to == 0
            and self.strides[axes - 1] == self.itemsize
            and all(s % to == 0 for s in self.strides[: axes - 1])
        )

    def is_broadcast(self, shape: tuple[int, ...]) -> bool:
        """Whether an element stands for several of that shape."""
        return any(n > 1 and not stride for n, stride in zip(shape, self.strides, strict=True))

    def widened(self, itemsize: int) -> Placed:
        """An aligned array of larger elements with the same strides in elements."""
        return Placed(tuple(s // self.itemsize * itemsize for s in self.strides), itemsize, 0)


def placed(array: Any, shape: tuple[int, ...], address: int) -> Placed:
    """Place of an array that is broadcast to `shape`."""
    strides = tuple(
        0 if n == 1 and full != 1 else s for n, s, full in zip(array.shape, array.strides, shape, strict=True)
    )
    return Placed(strides, array.dtype.itemsize, address % 16)


def address(array: Any) -> int:
    """Address of the first element of a NumPy or CuPy array."""
    return int(array.ctypes.data) if isinstance(array, np.ndarray) else int(array.data.ptr)


def compact(array: Any, layout: Layout) -> Any:
    """The array itself where it lies as a new one of the layout would, else a copy that does.

    Axes are (*batch, heads, seq, dim).  Strides of axes of length 1 count, too: tiles and backends are chosen by them.
    """
    x = canonical(array, layout)
    strides, step = [], x.dtype.itemsize
    for n in reversed(x.shape):
        strides.append(step)
        step *= n
    if x.size == 0 or (x.strides == tuple(reversed(strides)) and address(x) % 16 == 0):
        return array
    return canonical(as_bytes(lambda of_bytes: of_bytes.copy(order="C"), x), layout)


def as_bytes(function: Callable[[Any], Any], x: Any) -> Any:
    """What a function that only moves elements makes of an array; those that CuPy has no code for are moved as bytes."""
    return function(x.view(np.uint8)).view(x.dtype) if x.dtype.kind == "V" and x.dtype.itemsize == 1 else function(x)


def merged_batch(
    sizes: tuple[int, ...], strides: Mapping[str, tuple[int, ...]]
) -> tuple[list[int], dict[str, list[int]]]:
    """Batch axes merged wherever every array allows it, then padded in front to `BATCH_AXES`."""
    merged_sizes: list[int] = []
    merged: dict[str, list[int]] = {name: [] for name in strides}
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        if merged_sizes and all(merged[n][-1] == strides[n][axis] * size for n in strides):
            merged_sizes[-1] *= size
            for n in strides:
                merged[n][-1] = strides[n][axis]
        else:
            merged_sizes.append(size)
            for n in strides:
                merged[n].append(strides[n][axis])
    missing = BATCH_AXES - len(merged_sizes)
    if missing < 0:
        raise UnsupportedError(
            f"batch axes {sizes} of these strides cannot be merged to {BATCH_AXES}; make the arrays contiguous"
        )
    return [1] * missing + merged_sizes, {n: [0] * missing + s for n, s in merged.items()}
