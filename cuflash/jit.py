"""Compiling and loading: the only user of cupy.RawModule.  One kernel per variant and device, kept for the process.

CuPy compiles with NVRTC for the device's architecture and keeps the result in its cache folder (CUPY_CACHE_DIR), written
atomically; a folder that cannot be written costs a compilation per process and one warning, never an error.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy

from cuflash import source
from cuflash.errors import CompileError
from cuflash.modifiers import REGISTRY, Written
from cuflash.modifiers.function import located
from cuflash.variant import Variant

OPTIONS = ("--std=c++17",)


def options(target: str, capability: int) -> tuple[str, ...]:
    """Compiler options of a kernel; CuPy adds the architecture, without the suffix that some instructions need."""
    return (*OPTIONS, f"-arch=sm_{capability}{target}") if target else OPTIONS


_kernels: dict[tuple[Variant, int], Kernel] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel; `function` is the driver's handle."""

    function: int
    registers: int
    local_bytes: int
    raw: Any  # keeps the module alive


def compiler() -> int:
    """Version of NVRTC, 1209 for 12.9; 0 without one."""
    try:
        major, minor = cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, ImportError, AttributeError):  # not found: the first compilation says so
        return 0
    return 100 * int(major) + int(minor)


def load(variant: Variant, device: int) -> Kernel:
    """The kernel of a variant on a device, compiled at first use."""
    kernel = _kernels.get((variant, device))
    if kernel is None:
        with _lock:  # compilers and loaders are not promised to be thread-safe
            kernel = _kernels.get((variant, device))
            if kernel is None:
                kernel = _kernels[variant, device] = _compile(variant, device)
    return kernel


def faults(log: str, variant: Variant) -> str:
    """What a compiler's log says about functions of the user; empty where they are not at fault."""
    written = [m for m in (REGISTRY[name] for name in variant.modifiers) if issubclass(m, Written)]
    return located(log, {x.title: x for m in written for _, x in m.program.functions})


def _compile(variant: Variant, device: int) -> Kernel:
    code = source.build(variant)
    with cupy.cuda.Device(device):
        try:
            raw = _raw_kernel(code, variant, device)
        except OSError as error:  # the cache folder cannot be read or written
            folder = os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")
            _warn_once(
                f"CuPy's kernel cache {folder} cannot be used ({error.strerror}); kernels are compiled in every process. "
                "Set CUPY_CACHE_DIR to a folder that can be written"
            )
            with _memory_cache():
                raw = _raw_kernel(code, variant, device)
        raw.max_dynamic_shared_size_bytes = variant.constants()["kSharedBytes"]
        return Kernel(raw.kernel.ptr, raw.num_regs, raw.local_size_bytes, raw)


def _raw_kernel(code: str, variant: Variant, device: int) -> Any:
    entry = variant.entry
    capability = int(cupy.cuda.Device(device).compute_capability)
    try:
        raw = cupy.RawModule(code=code, options=options(variant.target, capability)).get_function(entry)
        raw.compile()
    except cupy.cuda.compiler.CompileException as error:
        message = faults(str(error), variant) or f"{entry} did not compile:\n{error}"
        raise CompileError(message, variant=entry, log=str(error), source=code) from error
    except RuntimeError as error:
        if "nvrtc" in str(error).lower() or "CUDA headers" in str(error):
            raise CompileError(
                f"NVRTC, the run-time compiler, was not found ({error}); install it with cuflash[cuda13] or cuflash[cuda12]",
                variant=entry,
            ) from error
        raise
    return raw


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@contextmanager
def _memory_cache() -> Iterator[None]:
    """CuPy's switch to compile without its cache folder, for the time of a block."""
    name = "CUPY_CACHE_IN_MEMORY"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
