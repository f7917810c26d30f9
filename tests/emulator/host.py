"""Launches CUDA kernels on the CPU: every thread a fiber, inline PTX emulated, schedules drawn from a seed.

>>> kernel = EmulatedKernel(source, "cuflash_forward")
>>> with GuardedArena() as arena:
...     q = arena.constant(q_host, name="q")
...     out = arena.empty(shape, np.float32, name="out")
...     kernel.launch(grid=(4, 2), threads=128, params=record.tobytes(), shared_bytes=9216, seed=3)
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from cuflash.tensormap import TensorMap

from .build import BuildError, EmulatorError, library, source_lines
from .guards import PAGE, GuardedArena, check_guards, describe_address, guarded, open_pages, reserve_pages
from .translate import TranslationError

__all__ = ["BuildError", "EmulatedKernel", "EmulatorError", "GuardedArena", "check_guards", "guarded"]

Argument = np.ndarray | np.generic | bytes | bytearray
MAX_PARAMETERS, MAX_FRAMES = 64, 1024
MAX_THREADS, STACK_BYTES = 1024, 192 << 10
_dlclose = ctypes.CDLL(None).dlclose
_dlclose.argtypes = [ctypes.c_void_p]
_launching = threading.Lock()  # signal handlers and stacks belong to the process


class LaunchRequest(ctypes.Structure):
    """`emu::LaunchRequest` of device/runtime.h."""

    _fields_ = (
        ("seed", ctypes.c_ulonglong),
        ("stacks", ctypes.c_void_p),
        ("stack_bytes", ctypes.c_uint),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("time_limit", ctypes.c_uint),
        ("residents", ctypes.c_uint),
    )


@functools.cache
def stack_memory() -> int:
    """Address of the stacks of 1024 threads."""
    return reserve_pages(MAX_THREADS * STACK_BYTES)


@functools.cache
def open_stack(thread: int) -> None:
    """Let the stack of a thread be used; the page below it faults.  Each is one more mapping for a fork to copy."""
    open_pages(stack_memory() + thread * STACK_BYTES + PAGE, STACK_BYTES - PAGE)


def stacks(threads: int) -> int:
    """Address of the stacks, so many of which are open."""
    for thread in range(min(threads, MAX_THREADS)):
        open_stack(thread)
    return stack_memory()


class EmulatedKernel:
    """One `extern "C" __global__` function of a flattened CUDA source, built for the CPU.

    Parameters
    ----------
    source : str
        CUDA text without includes; kernels of one source share one build.
    name : str
        The function to launch.
    sanitize : bool
        Also stop at undefined behaviour (indices outside local arrays, misaligned pointers, shifts by too much, signed
        overflow) and fill registers that were never written with -1.7e38.
    arch : int
        What `__CUDA_ARCH__ / 10` is (80: sm_80).

    Raises
    ------
    EmulatorError
        The source does not compile, uses a PTX instruction that is not modelled, or has no kernel of that name.
    """

    def __init__(self, source: str, name: str, sanitize: bool = False, *, arch: int = 80) -> None:
        self.name = name
        try:
            self.path = library(source, arch, sanitize)
        except TranslationError as error:
            raise BuildError(str(error)) from error
        self._library = ctypes.CDLL(str(self.path))
        weakref.finalize(self, _dlclose, self._library._handle).atexit = False
        self._library.emu_last_error.restype = self._library.emu_notes.restype = ctypes.c_char_p
        self._library.emu_switches.restype = ctypes.c_ulonglong
        try:
            self._launch = getattr(self._library, f"emu_launch_{name}")
        except AttributeError:
            raise EmulatorError(f'the source has no extern "C" __global__ function {name}') from None
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        sizes = (ctypes.c_uint * MAX_PARAMETERS)()
        count = getattr(self._library, f"emu_parameters_{name}")(sizes)
        self.parameter_sizes = list(sizes[:count])

    def launch(
        self,
        grid: Sequence[int],
        threads: int,
        params: bytes | Sequence[Argument],
        shared_bytes: int = 0,
        seed: int = 0,
        time_limit: int = 20,
        residents: int = 1,
    ) -> None:
        """Runs all blocks of the grid under the schedule of one seed.

        Parameters
        ----------
        grid : sequence of int
            Blocks along x, y, z.
        threads : int
            Threads of a block, a multiple of 32.
        params : bytes or sequence
            The kernel's only parameter by value; or one entry for each parameter: an array (its address is passed),
            a NumPy scalar, or the bytes of a struct.
        shared_bytes : int
            Dynamic shared memory of a block.
        seed : int
            0 is the orderly schedule; `seed % 6` sets the pace of asynchronous work.  Use at least 6 seeds.
        time_limit : int
            Seconds of processor time that a thread may run without blocking.
        residents : int
            Blocks that run at once, up to 16, each in a process of its own: their arrays must be guarded ones, which are
            shared; `notes` and variables of the source are not.

        Raises
        ------
        EmulatorError
            The kernel broke a rule; the message names block, thread and source line.
        """
        arguments = [params] if isinstance(params, (bytes, bytearray)) else list(params)
        values = [argument_bytes(a) for a in arguments]
        if [len(v) for v in values] != self.parameter_sizes:
            given = [len(v) for v in values]
            raise EmulatorError(f"{self.name} takes parameters of {self.parameter_sizes} bytes, not {given}")
        keep = [aligned_copy(v) for v in values]
        pointers = (ctypes.c_void_p * len(keep))(*[k.ctypes.data for k in keep])
        extents = (ctypes.c_uint * 3)(*(*(int(g) for g in grid), 1, 1)[:3])
        request = LaunchRequest(
            seed, stacks(threads), STACK_BYTES, extents, threads, shared_bytes, time_limit, residents
        )
        with _launching:
            failed = self._launch(ctypes.byref(request), pointers)
        if failed:
            raise EmulatorError(self._fault(seed))

    def _fault(self, seed: int) -> str:
        message = self._library.emu_last_error().decode(errors="replace")
        offsets = (ctypes.c_ulonglong * MAX_FRAMES)()
        count = self._library.emu_fault_frames(offsets, MAX_FRAMES)
        places = source_lines(self.path, list(offsets[:count]))
        head, *lines = message.split("\n")
        if len(places) == 1 and not lines:
            return f"{self.name}, seed {seed}: {describe_address(head)}\n  at {places[0]}"
        blocked = [f"{line}\n    at {place}" for line, place in zip(lines, places, strict=False)]  # of a deadlock
        return "\n".join([f"{self.name}, seed {seed}: {head}", *blocked, *lines[len(blocked) :]])

    def tensor_map(
        self,
        data_type: int,
        address: int,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
    ) -> bytes:
        """The 128 bytes of a TMA tensor map, encoded as cuTensorMapEncodeTiled does, with its argument checks.

        Parameters
        ----------
        data_type, swizzle : int
            Values of CUtensorMapDataType and CUtensorMapSwizzle.
        address : int
            Of element 0.
        dims, box : sequence of int
            Elements along each dimension, the contiguous one first.
        strides : sequence of int
            Bytes, of the second dimension on.
        """
        rank = len(dims)
        raw = aligned_copy(bytes(128))
        long, word = ctypes.c_ulonglong, ctypes.c_uint
        rejected = self._library.emu_encode_tiled(
            *(ctypes.c_void_p(raw.ctypes.data), data_type, rank, ctypes.c_void_p(address)),
            *((long * rank)(*dims), (long * rank)(*strides), (word * rank)(*box), (word * rank)(*[1] * rank)),
            *(0, swizzle, 0, 0),
        )
        if rejected:
            given = f"dims {tuple(dims)}, strides {tuple(strides)}, box {tuple(box)}, swizzle {swizzle}"
            raise EmulatorError(f"tensor map rejected: {given}")
        return raw.tobytes()

    def encode(self, tensor_map: TensorMap, address: int) -> bytes:
        """The same for a map of a plan."""
        m = tensor_map
        return self.tensor_map(m.element, address + m.origin, m.sizes, m.strides, m.box, m.swizzle)

    def constant(self, name: str) -> int:
        """Value of an `extern "C" __device__ const int` of the source."""
        return ctypes.c_int.in_dll(self._library, name).value

    def notes(self) -> str:
        """Hazards of the last launch that are no faults by themselves (an asynchronous read of undefined data)."""
        return self._library.emu_notes().decode()

    def switches(self) -> int:
        """How often the last launch changed between threads: its work, whatever the machine."""
        return self._library.emu_switches()


def argument_bytes(argument: Argument) -> bytes:
    """What a kernel parameter holds: the address of an array, or the bytes of a value."""
    if isinstance(argument, np.ndarray):
        return np.uint64(argument.ctypes.data).tobytes()
    return bytes(argument) if isinstance(argument, (bytes, bytearray)) else argument.tobytes()


def aligned_copy(data: bytes, alignment: int = 128) -> np.ndarray:
    """Copy at an address that tensor maps and vector types accept."""
    raw = np.zeros(len(data) + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    view = raw[start : start + len(data)]
    view[:] = np.frombuffer(data, np.uint8)
    return view
