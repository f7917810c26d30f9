"""Compiling kernels for any architecture without a GPU, with what the assembler says about them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest

from cuflash import source
from cuflash.variant import Variant

try:
    from cupy.cuda import nvrtc

    from cuflash import jit
except ImportError:
    nvrtc = None

#: in CI these tests fail where nothing can be compiled, elsewhere they say so
needed = pytest.mark.skipif(
    nvrtc is None and not os.environ.get("CI"), reason="CuPy is not installed: nothing can be compiled"
)

#: what CuPy's RawModule adds to the options (cupy/cuda/compiler.py), and the assembler's report
ADDED = ("-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v")


@dataclass(frozen=True)
class Report:
    """One compilation."""

    log: str
    registers: int
    stack_bytes: int
    spilled_bytes: int
    complaints: tuple[str, ...]  # warnings of the compiler, and notes of the assembler on slow code
    cubin: bytes = field(default=b"", repr=False)

    @property
    def clean(self) -> bool:
        return not self.spilled_bytes and not self.stack_bytes and not self.complaints

    def __str__(self) -> str:
        found = "; ".join(self.complaints)
        return (
            f"{self.registers} registers, stack {self.stack_bytes}, spilled {self.spilled_bytes} bytes {found}".strip()
        )


class CompilationError(Exception):
    """The compiler refused the source; the text is its log."""


#: source and options -> log and machine code
Compiler = Callable[[str, tuple[str, ...]], tuple[str, bytes]]


def compile_variant(variant: Variant, arch: int, compiler: Compiler | None = None) -> Report:
    """Compile the kernel of a variant as the library does."""
    return compile_source(source.build(variant), arch, variant.target, compiler)


def compile_source(text: str, arch: int, target: str = "", compiler: Compiler | None = None) -> Report:
    """Compile one kernel's source, by CuPy's compiler or another; CompilationError with the log if it is refused.

    `target` is the suffix of the architecture (cuflash/variant.py); CuPy names the one without it as well.
    """
    log, cubin = (compiler or by_cupy)(text, (*jit.options(target, arch), f"-arch=sm_{arch}", *ADDED))
    return replace(report(log), cubin=cubin)


def by_cupy(text: str, options: tuple[str, ...]) -> tuple[str, bytes]:
    """Log and machine code of a kernel, by the compiler that CuPy has loaded."""
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            raise CompilationError(nvrtc.getProgramLog(program)) from None
        # Without the byte behind it that the bindings cut off.
        return nvrtc.getProgramLog(program), nvrtc.getCUBIN(program) + b"\0"
    finally:
        nvrtc.destroyProgram(program)


@cache
def oldest() -> Compiler:
    """The oldest compiler that knows Hopper's kernels, beside CuPy's: package nvidia-cuda-nvrtc-cu12 brings it."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    folders = (spec.submodule_search_locations if spec else None) or ()
    (path,) = (path for folder in folders for path in Path(folder).glob("lib/libnvrtc.so.12"))
    return compiler_at(path)


def compiler_at(path: Path) -> Compiler:
    """The compiler of a library."""
    functions = ctypes.CDLL(str(path))

    def call(name: str, *arguments: object) -> None:
        if code := getattr(functions, name)(*arguments):
            raise CompilationError(f"{name} of {path} returned {code}")

    def result(name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{name}", program, found)
        return found.raw

    def compiled(text: str, options: tuple[str, ...]) -> tuple[str, bytes]:
        program = ctypes.c_void_p()
        call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            try:
                call("nvrtcCompileProgram", program, len(options), given)
            except CompilationError:
                raise CompilationError(result("ProgramLog", program).decode()) from None
            return result("ProgramLog", program).decode(), result("CUBIN", program)
        finally:
            call("nvrtcDestroyProgram", ctypes.byref(program))

    return compiled


def report(log: str) -> Report:
    """What a log says."""
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.findall(r"Used (\d+) registers", log)
    if len(used) != 1 or len(spills) < 1:
        raise CompilationError(f"the log has no report of one kernel:\n{log}")
    complaints = [
        line.strip()
        for line in log.splitlines()
        if re.search(r"warning|\(C7\d\d\d\)|potential performance|advisory", line, re.IGNORECASE)
    ]
    return Report(
        log=log,
        registers=int(used[0]),
        stack_bytes=sum(int(s[0]) for s in spills),
        spilled_bytes=sum(int(s[1]) + int(s[2]) for s in spills),
        complaints=tuple(complaints),
    )
