"""Kernel buffers whose surroundings are guarded: a page that faults at one edge, poison that is checked at the other.

An array's end (or start) lies at a page without access rights, so a kernel that runs over it faults at that very
instruction.  Between the array and the other edge of its pages lie bytes that read as NaN; writing them is found by
`check_guards`.
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import numpy as np

from .build import EmulatorError

PAGE = 4096
GUARD = np.uint16(0xFFF9)  # NaN as float16, bfloat16, float32 and float64, and no pattern that arithmetic produces
FILL = 0xFF  # arrays start as NaN (-1 as an integer)
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED_ANONYMOUS, MAP_PRIVATE_ANONYMOUS = 0x21, 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

if TYPE_CHECKING:
    from typing_extensions import Self

Edge = Literal["end", "start"]


def reserve_pages(nbytes: int, shared: bool = False) -> int:
    """Address of fresh pages that fault at any access; forked processes see one memory if it is shared, else copies."""
    address = _libc.mmap(None, nbytes, PROT_NONE, MAP_SHARED_ANONYMOUS if shared else MAP_PRIVATE_ANONYMOUS, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no memory for {nbytes} guarded bytes")
    return address


def open_pages(address: int, nbytes: int) -> None:
    """Let pages be read and written."""
    if _libc.mprotect(address, nbytes, PROT_READ | PROT_WRITE):
        raise MemoryError(f"mprotect failed: {os.strerror(ctypes.get_errno())} (too many mappings in this process?)")


class GuardedBuffer:
    """The pages of one guarded array; they live as long as any view of the array."""

    def __init__(self, name: str, nbytes: int, edge: Edge, alignment: int) -> None:
        pages = max(-(-nbytes // PAGE), 1) * PAGE
        self.mapped = pages + 2 * PAGE
        self.base = reserve_pages(self.mapped, shared=True)  # resident blocks run in processes of their own
        self.first, self.pages = self.base + PAGE, pages
        open_pages(self.first, pages)
        self.rights = PROT_READ | PROT_WRITE
        self.name, self.nbytes = name, nbytes
        self.start = self.first if edge == "start" else self.first + (pages - nbytes) // alignment * alignment
        memory = (ctypes.c_ubyte * pages).from_address(self.first)
        weakref.finalize(memory, _libc.munmap, self.base, self.mapped)
        self.all_bytes = np.frombuffer(memory, np.uint8)
        self.all_bytes.view(np.uint16)[:] = GUARD
        self.offset = self.start - self.first
        self.bytes = self.all_bytes[self.offset : self.offset + nbytes]
        self.bytes[:] = FILL

    def touched(self) -> list[int]:
        """Offsets from the array's start of guard bytes that were overwritten."""
        pattern = np.full(self.pages // 2, GUARD).view(np.uint8)
        head = np.flatnonzero(self.all_bytes[: self.offset] != pattern[: self.offset])
        end = self.offset + self.nbytes
        tail = np.flatnonzero(self.all_bytes[end:] != pattern[end:])
        return [*(head - self.offset).tolist(), *(tail + self.nbytes).tolist()]

    def protect(self) -> None:
        self.rights = PROT_READ
        self.reopen()

    def close(self) -> None:
        """Let nobody touch the array until it is opened again."""
        _libc.mprotect(self.first, self.pages, PROT_NONE)

    def reopen(self) -> None:
        _libc.mprotect(self.first, self.pages, self.rights)


_live: weakref.WeakSet[GuardedBuffer] = weakref.WeakSet()


def guarded(
    shape: tuple[int, ...] | int, dtype: np.dtype | type, name: str = "array", edge: Edge = "end", alignment: int = 16
) -> tuple[np.ndarray, GuardedBuffer]:
    """An array of NaN and the guard around it, for `check_guards`."""
    dtype = np.dtype(dtype)
    buffer = GuardedBuffer(
        name, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, edge, max(alignment, dtype.itemsize)
    )
    _live.add(buffer)
    return buffer.bytes.view(dtype).reshape(shape), buffer


def check_guards(*buffers: GuardedBuffer) -> None:
    """EmulatorError when a kernel wrote into the bytes around an array."""
    for buffer in buffers:
        if offsets := buffer.touched():
            where = f"{offsets[0]} to {offsets[-1]}" if len(offsets) > 1 else f"{offsets[0]}"
            raise EmulatorError(
                f"written outside array '{buffer.name}' of {buffer.nbytes} bytes, at byte offsets {where}"
            )


def live_buffers() -> list[GuardedBuffer]:
    """Those of all arrays that somebody still has."""
    return list(_live)


def describe_address(message: str) -> str:
    """A fault's message with the array next to the address that it names."""
    if not (m := re.search(r"bad address 0x([0-9a-f]+)", message)):
        return message
    address = int(m[1], 16)
    for buffer in _live:
        if buffer.base <= address < buffer.base + buffer.mapped:
            offset = address - buffer.start
            place = "which is read-only or closed" if 0 <= offset < buffer.nbytes else "outside it"
            return f"{message}: byte offset {offset} of array '{buffer.name}' of {buffer.nbytes} bytes, {place}"
    return message


class GuardedArena:
    """Guarded arrays of one launch.

    Parameters
    ----------
    edge : {"end", "start"}
        Which edge of every array lies at the page that faults.
    alignment : int
        Bytes to which the start of an array is aligned (allocators of the device align to at least 256).

    Notes
    -----
    As a context manager the arena checks its guards when the block ends without an exception.
    """

    def __init__(self, edge: Edge = "end", alignment: int = 16) -> None:
        self.edge: Edge = edge
        self.alignment = alignment
        self._owned: list[GuardedBuffer] = []

    def empty(self, shape: tuple[int, ...] | int, dtype: np.dtype | type, name: str = "array") -> np.ndarray:
        """Array of NaN (all bytes 0xFF)."""
        array, buffer = guarded(shape, dtype, name, self.edge, self.alignment)
        self._owned.append(buffer)
        return array

    def zeros(self, shape: tuple[int, ...] | int, dtype: np.dtype | type, name: str = "array") -> np.ndarray:
        """Array of zeros."""
        array = self.empty(shape, dtype, name)
        array[...] = 0
        return array

    def copy(self, values: np.ndarray, name: str = "array") -> np.ndarray:
        """Contiguous copy that the kernel may write."""
        array = self.empty(values.shape, values.dtype, name)
        array[...] = values
        return array

    def constant(self, values: np.ndarray, name: str = "array") -> np.ndarray:
        """Contiguous copy that nobody may write: a store to it is a fault."""
        array = self.copy(values, name)
        self._owned[-1].protect()
        array.flags.writeable = False
        return array

    def check(self) -> None:
        """EmulatorError when a kernel wrote outside an array."""
        check_guards(*self._owned)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.check()
