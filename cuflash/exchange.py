"""DLPack's C functions: what a library offers to have its arrays looked at, and new ones made, without Python in between.

A type has them behind ``__dlpack_c_exchange_api__`` (DLPack 1.3, "C Exchange API": dlpack.h, `DLPackExchangeAPI`).  They order
nothing: whoever uses them works on the stream that the library calls its current one.  Here only repeated calls do, and only
while that is CuPy's current stream, too; all others go through ``__dlpack__``, which is told CuPy's stream (arrays.py).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from struct import Struct
from typing import Any

ATTRIBUTE, CAPSULE = "__dlpack_c_exchange_api__", b"dlpack_exchange_api"
MAJOR = 1  # of the version whose structs these are
CUDA = 2  # kDLCUDA
FLOAT32, FLOAT64 = (2 | bits << 8 | 1 << 16 for bits in (32, 64))  # DLDataType: kDLFloat, bits, lanes
#: DLTensor: data, device (type, number), axes, dtype (code, bits, lanes), shape, strides, byte_offset
TENSOR = Struct("=QiiiBBHQQQ")
_LOOK = Struct("=6Q")  # the same in words: device is one, axes and dtype are the next
#: DLManagedTensorVersioned: version, context, deleter and flags, then a DLTensor
_MANAGED = ctypes.c_uint64 * 10
_DATA, _OFFSET = 4, 9  # words of it
_LAYOUT = 5  # where a signature has axes and dtype of the first array

#: error_ctx, kind, message
_SetError = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
#: these hold the interpreter's lock, and a Python error that they leave is raised
_View = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
_Allocate = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, _SetError)
_Give = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_Stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_release = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_DecRef", ctypes.pythonapi))


class Table(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("managed_tensor_allocator", ctypes.c_void_p),
        ("managed_tensor_from_py_object_no_sync", ctypes.c_void_p),
        ("managed_tensor_to_py_object_no_sync", ctypes.c_void_p),
        ("dltensor_from_py_object_no_sync", ctypes.c_void_p),
        ("current_work_stream", ctypes.c_void_p),
    )


class Scratch:
    """What C functions write into, for one call at a time."""

    def __init__(self) -> None:
        self.tensor = bytearray(TENSOR.size)
        self.word, self.object = ctypes.c_uint64(), ctypes.py_object()
        self._whole = (ctypes.c_char * TENSOR.size).from_buffer(self.tensor)
        self.at_tensor = ctypes.addressof(self._whole)
        self.at_word, self.at_object = ctypes.addressof(self.word), ctypes.addressof(self.object)


@_SetError  # type: ignore[untyped-decorator]
def _forget(context: Any, kind: Any, message: Any) -> None:
    """An allocation that fails is tried again through CuPy, which says why."""


class Prototype:
    """The DLTensor of an array to be made."""

    def __init__(self, shape: tuple[int, ...], dtype: int, device: int) -> None:
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        at_shape = ctypes.addressof(self.shape)
        words = TENSOR.pack(0, CUDA, device, len(shape), dtype & 0xFF, dtype >> 8 & 0xFF, dtype >> 16, at_shape, 0, 0)
        self.tensor = ctypes.create_string_buffer(words, len(words))
        self.address = ctypes.addressof(self.tensor)


class Exchange:
    """The functions of one type of arrays."""

    def __init__(self, kind: type, table: Table) -> None:
        self.kind = kind
        self._view = _View(table.dltensor_from_py_object_no_sync)
        self._allocate = _Allocate(table.managed_tensor_allocator)
        self._give = _Give(table.managed_tensor_to_py_object_no_sync)
        self._stream = _Stream(table.current_work_stream)
        self._unused: list[Scratch] = []

    def signature(self, arrays: tuple[Any, ...], options: Any) -> tuple[Any, tuple[int, ...]]:
        """What two calls have in common that run the same plan, and the addresses; None for calls that are not replayed.

        Arrays that are None are told from others.  One that is tracked for automatic differentiation is left to
        ``__dlpack__``, which refuses it.
        """
        kind, key, pointers = self.kind, [self, options], []
        scratch = self._scratch()
        tensor, at = scratch.tensor, scratch.at_tensor
        try:
            for x in arrays:
                if x is None:
                    key.append(None)
                    continue
                if type(x) is not kind or getattr(x, "requires_grad", False) or self._view(x, at):
                    return None, ()
                data, device, layout, shape, strides, offset = _LOOK.unpack(tensor)
                length = 8 * (layout & 0xFFFFFFFF)
                if not (data and shape and strides):
                    return None, ()
                data += offset
                key += (_bytes_at(shape, length), _bytes_at(strides, length), device, layout, data & 15)
                pointers.append(data)
        except (
            BufferError,
            RuntimeError,
            TypeError,
            ValueError,
        ):  # such as an array without memory: `__dlpack__` says so
            return None, ()
        finally:
            self._unused.append(scratch)
        return tuple(key), tuple(pointers)

    @staticmethod
    def dtype(key: tuple[Any, ...]) -> int:
        """DLDataType of the first array of a signature."""
        return int(key[_LAYOUT]) >> 32

    def stream(self, device: int) -> int:
        """Address of the stream that the library works on; -1 if it does not tell."""
        scratch = self._scratch()
        try:
            return scratch.word.value if not self._stream(CUDA, device, scratch.at_word) else -1
        finally:
            self._unused.append(scratch)

    def make(self, prototype: Prototype) -> tuple[Any, int]:
        """A new array and its address."""
        scratch = self._scratch()
        try:
            if self._allocate(prototype.address, scratch.at_word, None, _forget):
                raise MemoryError
            managed = scratch.word.value
            words = _MANAGED.from_address(managed)
            pointer = words[_DATA] + words[_OFFSET]
            if self._give(managed, scratch.at_object):
                raise MemoryError
            made = scratch.object.value
            _release(made)  # the reference that came from the library, beside the one just taken
            return made, pointer
        finally:
            self._unused.append(scratch)

    def _scratch(self) -> Scratch:
        try:
            return self._unused.pop()
        except IndexError:
            return Scratch()


@lru_cache(maxsize=256)
def exchange_of(kind: Any) -> Exchange | None:
    """The functions of a type's arrays, if the type itself, not one that it is derived from, has all of them."""
    capsule = vars(kind).get(ATTRIBUTE)
    if capsule is None or not _is_capsule(capsule, CAPSULE):
        return None
    address = _capsule_pointer(capsule, CAPSULE)
    while address:
        table = Table.from_address(address)
        if table.major == MAJOR:
            whole = all(getattr(table, name) for name, _ in Table._fields_[3:])
            return Exchange(kind, table) if whole else None
        address = table.previous
    return None


_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
