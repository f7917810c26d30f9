"""Descriptors of arrays for Hopper's tensor memory accelerator (TMA): what they say, and the driver's encoding.

A map describes a 4-dimensional array (column, row, head, batch entry) of 16-bit elements, walked in boxes of 64 columns, or
of 8-bit ones in boxes of 128: 128 bytes, which is also the swizzle span (kernels/hw/copy_tma.cuh).  Source: CUDA driver API,
"Tensor Map Object Management".

Where sequences are packed, the hardware keeps each apart from the next: rows outside the map are read as zeros and not written,
so a map has to end where a sequence does.  Its fourth axis, which no batch needs, walks over rows a second time.  A sequence is
laid against the end of the axis of rows, and the fourth axis brings it back to its place: its row i, of n that end before
row e of the array's `rows`, has the coordinates rows - n + i and e, and lies e - n + i rows behind the beginning of the array
if the map begins `rows` rows before it.  Only rows from 0 on are ever reached (attention/index.cuh, `described`), and no box
lies outside as a whole: for those the hardware seems to look at the map's beginning, where there may be no memory.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

from cuflash.abi import MAP_ALIGNMENT, MAP_BYTES
from cuflash.errors import UnsupportedError
from cuflash.place import Placed, merged_batch
from cuflash.problem import Problem

PANEL_COLUMNS, PANEL_BYTES = 64, 128  # of 16-bit elements
PANEL_ALIGNMENT = 1024  # bytes, of what swizzled copies fill
ELEMENTS = {
    "float8_e4m3fn": 0,
    "float16": 6,
    "float32": 7,
    "bfloat16": 9,
}  # CUtensorMapDataType, which has bytes for 8-bit floats
SWIZZLE_NONE, SWIZZLE_128B, PROMOTION_L2_128B = 0, 3, 2
MAX_STRIDE = 1 << 40
ARRAYS = ("q", "k", "v", "out", "dout", "dk", "dv")  # those that kernels reach through maps
OTHER = "other_"  # in front of the name of an array that another kernel reaches through a map of its own
_VALUE_WIDE = ("v", "out", "dout", "dv")  # arrays of head_dim_v columns


def panel_bytes(rows: int, columns: int, itemsize: int = 2) -> int:
    """Shared memory of a PanelTile of hw/copy_tma.cuh."""
    return -(-columns * itemsize // PANEL_BYTES) * rows * PANEL_BYTES


@dataclass(frozen=True)
class TensorMap:
    """A map without its address."""

    array: str  # field name of the array
    element: int
    sizes: tuple[int, int, int, int]  # columns, rows, heads, batch entries
    strides: tuple[int, int, int]  # bytes between rows, heads, batch entries
    box_rows: int
    origin: int = 0  # bytes from the memory's beginning to where all coordinates are 0
    itemsize: int = 2
    memory: str = ""  # field name of the memory, where it is not the array's own
    box_columns: int = 0  # of one that is not swizzled

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Elements of one copy along each axis."""
        return self.box_columns or PANEL_BYTES // self.itemsize, self.box_rows, 1, 1

    @property
    def swizzle(self) -> int:
        """How a copy is laid out."""
        return SWIZZLE_NONE if self.box_columns else SWIZZLE_128B


def describe(name: str, problem: Problem, place: Placed, box_rows: int) -> TensorMap:
    """The map of an array of a call; UnsupportedError where it has none."""
    width = problem.head_dim_v if name in _VALUE_WIDE else problem.head_dim
    rows, heads = (
        (problem.seq_k, problem.heads_k) if name.removeprefix("d") in ("k", "v") else (problem.seq_q, problem.heads_q)
    )
    axes = len(problem.batch)
    batch_sizes, batch_strides = merged_batch(problem.batch, {name: place.strides[:axes]})
    if any(size > 1 for size in batch_sizes[:-1]):
        raise UnsupportedError(f"the batch axes {problem.batch} of {name} cannot be merged into one")
    head_stride, row_stride, step = place.strides[axes : axes + 3]
    merged = replace(place, strides=(batch_strides[name][-1], head_stride, row_stride, step))
    dtype = problem.out_dtype if name == "out" else problem.dtype
    whole = described(name, dtype, (width, rows, heads, batch_sizes[-1]), merged, box_rows)
    return ending_with_sequences(whole) if problem.is_packed else whole


def described(
    name: str,
    dtype: str,
    sizes: tuple[int, int, int, int],
    place: Placed,
    box_rows: int,
    memory: str = "",
    origin: int = 0,
) -> TensorMap:
    """The map of an array of these columns, rows, heads and batch entries; UnsupportedError where it has none."""
    if not place.aligned(16, 4):
        raise UnsupportedError(f"rows of {name} are not contiguous, or do not start at multiples of 16 bytes")
    batch_stride, head_stride, row_stride, _ = place.strides
    strides = (row_stride, head_stride, batch_stride)
    for axis, size, stride in zip(("seq", "heads", "batch"), sizes[1:], strides, strict=True):
        if size > 1 and not 0 < stride < MAX_STRIDE:
            raise UnsupportedError(
                f"{name} has a stride of {stride} bytes along its {axis} axis; TMA takes positive ones below 2^40"
            )
    used = tuple(s if n > 1 else 16 for n, s in zip(sizes[1:], strides, strict=True))
    strides = used[0], used[1], used[2]
    return TensorMap(name, ELEMENTS[dtype], sizes, strides, box_rows, origin, place.itemsize, memory)


def of_bias(
    problem: Problem, place: Placed, box_rows: int, row_columns: int = 0, name: str = "bias", dtype: str = ""
) -> TensorMap:
    """The map of a bias or of its gradient, or UnsupportedError; where it has one row, a copy has `row_columns` of it.

    Axes along which it is broadcast have the length 1.  Nothing depends on the length of the batch, so that an entry's bits do
    not (CONTRIBUTING.md, "What bits depend on"): the strides of axes of length 1 count as well.
    """
    if len(problem.batch) > 1:
        raise UnsupportedError("a bias along several batch axes has no map")
    place = replace(place, strides=(*(0,) * (1 - len(problem.batch)), *place.strides))
    batch, head, row, _ = place.strides
    if not row and problem.seq_k % 8:
        raise UnsupportedError("a row of bias is no whole number of 16 bytes, and is only at times the only one")
    lengths = zip((problem.seq_q, problem.heads_q, problem.batch_size), (row, head, batch), strict=True)
    rows, heads, entries = (n if stride else 1 for n, stride in lengths)
    found = described(name, dtype or problem.out_dtype, (problem.seq_k, rows, heads, entries), place, box_rows)
    return replace(found, box_columns=row_columns)


def ending_with_sequences(whole: TensorMap) -> TensorMap:
    """The map of an array of packed sequences, of one batch entry."""
    columns, rows, heads, _ = whole.sizes
    row, head, _ = whole.strides
    return replace(whole, sizes=(columns, rows, heads, rows + 1), strides=(row, head, row), origin=-rows * row)


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """The 128 bytes of a map, by the driver; a CUDA context must be current."""
    memory = (ctypes.c_uint64 * (2 * MAP_BYTES // 8))()
    at = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    long, word, rank = ctypes.c_uint64, ctypes.c_uint32, len(tensor_map.sizes)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        ctypes.c_int(tensor_map.element),
        word(rank),
        ctypes.c_void_p(address + tensor_map.origin),
        (long * rank)(*tensor_map.sizes),
        (long * (rank - 1))(*tensor_map.strides),
        (word * rank)(*tensor_map.box),
        (word * rank)(*(1,) * rank),
        *map(ctypes.c_int, (0, tensor_map.swizzle, PROMOTION_L2_128B, 0)),
    )
    if code:
        raise UnsupportedError(
            f"the driver refuses a tensor map of {tensor_map} at address {address:#x} (cuTensorMapEncodeTiled: {code}); "
            "ask for backend='mma'"
        )
    return ctypes.string_at(at, MAP_BYTES)


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuTensorMapEncodeTiled.restype = ctypes.c_int
    return library
