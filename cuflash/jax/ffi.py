"""XLA's C interface for foreign calls, in ctypes: a Python function as a handler, with no compiler involved.

Structures are those of xla/ffi/api/c_api.h, whose versions 0.1 to 0.4 agree in everything that is used here.  XLA calls a
handler from a thread of its own choice; ctypes takes the interpreter lock for as long as the handler runs.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from cuflash.errors import ArgumentError, CompileError, UnsupportedError

OLDEST_API, NEWEST_API = (0, 1), (0, 4)
METADATA = 1  # XLA_FFI_Extension_Metadata
EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
ALIGNMENT = 16  # the largest that XLA_FFI_DeviceMemory_Allocate takes; what it gives is aligned to 256

#: XLA_FFI_DataType
DTYPES = {
    1: np.dtype(np.bool_),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    16: np.dtype(ml_dtypes.bfloat16),
}
#: XLA_FFI_Error_Code by the exception that becomes one; the first that fits
ERROR_CODES = ((ArgumentError, 3), (UnsupportedError, 12), (CompileError, 13), (MemoryError, 8), (BaseException, 13))


# ---- structures ------------------------------------------------------------------------------------------------------
class Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base; since version 0.4 XLA_FFI_InternalExtension."""


Extension._fields_ = [
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(Extension)),
]


class Sized(ctypes.Structure):
    """What every other structure begins with."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(Extension)),
    )


class ApiVersion(Sized):
    """XLA_FFI_Api_Version."""

    _fields_ = (("major_version", ctypes.c_int), ("minor_version", ctypes.c_int))


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, up to what a handler without state fills in."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("api_version", ApiVersion), ("traits", ctypes.c_uint32))


class MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (("extension_base", Extension), ("metadata", ctypes.POINTER(Metadata)))


class ByteSpan(ctypes.Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = (("ptr", ctypes.c_void_p), ("len", ctypes.c_size_t))


class BufferStruct(Sized):
    """XLA_FFI_Buffer."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class Buffers(Sized):
    """XLA_FFI_Args and XLA_FFI_Rets, whose elements are all buffers."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(BufferStruct))),
    )


class Attributes(Sized):
    """XLA_FFI_Attrs, of which only strings are read."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.POINTER(ctypes.POINTER(ByteSpan))),
        ("attrs", ctypes.POINTER(ctypes.POINTER(ByteSpan))),
    )


class ErrorCreate(Sized):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (("message", ctypes.c_char_p), ("errc", ctypes.c_int))


class ErrorDetails(Sized):
    """XLA_FFI_Error_GetMessage_Args; since version 0.4 XLA_FFI_Error_GetDetails_Args, one field longer."""

    _fields_ = (("error", ctypes.c_void_p), ("message", ctypes.c_char_p), ("errc", ctypes.c_int))


class ErrorDestroy(Sized):
    """XLA_FFI_Error_Destroy_Args."""

    _fields_ = (("error", ctypes.c_void_p),)


class StreamGet(Sized):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = (("ctx", ctypes.c_void_p), ("stream", ctypes.c_void_p))


class MemoryAllocate(Sized):
    """XLA_FFI_DeviceMemory_Allocate_Args."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("alignment", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
    )


class MemoryFree(Sized):
    """XLA_FFI_DeviceMemory_Free_Args."""

    _fields_ = (("ctx", ctypes.c_void_p), ("size", ctypes.c_size_t), ("data", ctypes.c_void_p))


Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # returns an error, or null


class Api(Sized):
    """XLA_FFI_Api, up to the last function that is called."""

    _fields_ = (
        ("api_version", ApiVersion),
        ("internal_api", ctypes.c_void_p),
        ("error_create", Function),
        ("error_get_message", Function),
        ("error_destroy", Function),
        ("handler_register", Function),
        ("stream_get", Function),
        ("type_register", Function),
        ("context_get", Function),
        ("state_set", Function),
        ("state_get", Function),
        ("device_memory_allocate", Function),
        ("device_memory_free", Function),
    )


class CallFrame(Sized):
    """XLA_FFI_CallFrame, without the future that a handler may return."""

    _fields_ = (
        ("api", ctypes.POINTER(Api)),
        ("ctx", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", Buffers),
        ("rets", Buffers),
        ("attrs", Attributes),
    )


Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))


# ---- one call --------------------------------------------------------------------------------------------------------
class Buffer:
    """An argument or a result: where it lies, contiguous in the order of its axes, and what it holds."""

    __slots__ = ("dtype", "pointer", "shape")

    def __init__(self, struct: BufferStruct) -> None:
        self.pointer: int = struct.data or 0
        self.shape: tuple[int, ...] = tuple(struct.dims[: struct.rank])
        self.dtype = DTYPES[struct.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


class Frame:
    """One call: its arguments, results and attributes, and what XLA lends to it; valid until the handler returns."""

    def __init__(self, struct: CallFrame) -> None:
        self.struct = struct

    @cached_property
    def arguments(self) -> list[Buffer]:
        args = self.struct.args
        return [Buffer(args.buffers[i].contents) for i in range(args.size)]

    @cached_property
    def results(self) -> list[Buffer]:
        rets = self.struct.rets
        return [Buffer(rets.buffers[i].contents) for i in range(rets.size)]

    def attribute(self, name: bytes) -> bytes:
        """The text of an attribute."""
        attrs = self.struct.attrs
        for i in range(attrs.size):
            if text_of(attrs.names[i].contents) == name:
                return text_of(attrs.attrs[i].contents)
        raise RuntimeError(f"the call has no attribute {name.decode()}; was it compiled by another version of cuflash?")

    @property
    def stream(self) -> int:
        """XLA's own stream, a CUstream."""
        arguments = StreamGet(ctypes.sizeof(StreamGet), None, self.struct.ctx, None)
        self.ask("stream_get", arguments)
        return int(arguments.stream or 0)

    def allocate(self, size: int) -> int:
        """Device memory of XLA's own allocator, to be freed before the handler returns."""
        arguments = MemoryAllocate(ctypes.sizeof(MemoryAllocate), None, self.struct.ctx, size, ALIGNMENT, None)
        try:
            self.ask("device_memory_allocate", arguments)
        except RuntimeError as error:
            raise MemoryError(f"{size} bytes of workspace: {error}") from error
        return int(arguments.data or 0)

    def free(self, pointer: int, size: int) -> None:
        """Give it back; what is launched already on the call's stream may still use it."""
        self.ask("device_memory_free", MemoryFree(ctypes.sizeof(MemoryFree), None, self.struct.ctx, size, pointer))

    def ask(self, function: str, arguments: Sized) -> None:
        """Call a function of XLA; raises a RuntimeError with XLA's text."""
        api = self.struct.api.contents
        error = getattr(api, function)(ctypes.byref(arguments))
        if error:
            details = ErrorDetails(ctypes.sizeof(ErrorDetails), None, error, None, 0)
            api.error_get_message(ctypes.byref(details))
            text = (details.message or b"").decode(errors="replace")
            api.error_destroy(ctypes.byref(ErrorDestroy(ctypes.sizeof(ErrorDestroy), None, error)))
            raise RuntimeError(text)

    def error(self, raised: BaseException) -> int:
        """An error of XLA with the text of an exception; it belongs to XLA when it is returned."""
        code = next(code for kind, code in ERROR_CODES if isinstance(raised, kind))
        text = f"cuflash: {type(raised).__name__}: {raised}".encode()
        arguments = ErrorCreate(ctypes.sizeof(ErrorCreate), None, text, code)
        return int(self.struct.api.contents.error_create(ctypes.byref(arguments)) or 0)


def text_of(span: ByteSpan) -> bytes:
    return ctypes.string_at(span.ptr, span.len) if span.len else b""


# ---- handlers --------------------------------------------------------------------------------------------------------
@dataclass
class Activity:
    """Which threads are inside of a handler, and how often one was entered."""

    threads: set[int] = field(default_factory=set)
    entered: int = 0


def handler(run: Callable[[Frame], None], activity: Activity) -> Any:
    """A function of one call as XLA takes it; whatever it raises becomes an error of XLA."""

    def callback(pointer: Any) -> int | None:
        struct = pointer.contents
        extension = struct.extension_start
        if extension and extension.contents.type == METADATA:
            introduce(struct)
            return None
        frame, thread = Frame(struct), threading.get_ident()
        activity.threads.add(thread)
        activity.entered += 1
        try:
            if struct.stage == EXECUTE:
                run(frame)
        except BaseException as error:  # noqa: BLE001 (nothing may pass through the caller's C++)
            return frame.error(error)
        finally:
            activity.threads.discard(thread)
        return None

    return Handler(callback)


def introduce(struct: CallFrame) -> None:
    """Tell XLA which version of the interface a handler speaks: the newest one that both know."""
    version = OLDEST_API
    if struct.api:  # the oldest version has none to show here
        spoken = struct.api.contents.api_version
        version = min((spoken.major_version, spoken.minor_version), NEWEST_API)
    extension = ctypes.cast(struct.extension_start, ctypes.POINTER(MetadataExtension)).contents
    metadata = extension.metadata.contents
    metadata.api_version.major_version, metadata.api_version.minor_version = version
    metadata.traits = 0  # not for XLA's command buffers: a first call compiles
