"""g++ builds of translated kernels: runtime objects for all of them, one shared library per source, cached by content.

The cache is a folder of files named by the hash of everything that decides their content.  A file appears there under
its final name only when it is complete, so several processes may build at once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .translate import translate

DEVICE = Path(__file__).resolve().parent / "device"
# What debug information calls that folder: a library is the same whichever checkout built it, and the cache shares it.
RECORDED_DEVICE = "/device"
FLAGS = [
    *("-std=c++17", "-march=native", "-w"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
    "-fstack-clash-protection",  # a large local array cannot step over the page below a stack
]
# Linked into every kernel, so without debug information, which would be nine tenths of each library.
RUNTIME_FLAGS = [*FLAGS, "-O2", "-ftree-vectorize"]
# A kernel runs a few small cases, most of whose time is the runtime's: with -O2 it would take twice as long to build.
# Faults are told by lines of its source, never by its variables, which a ninth of a build would be spent on following.
KERNEL_FLAGS = [
    *(*FLAGS, "-Og"),
    *("-g1", "-gdwarf-4"),  # in version 5, behind a precompiled header, addr2line takes one file for another
    *("-fno-var-tracking", "-fno-var-tracking-assignments"),
]
# Undefined behaviour that a GPU does not forgive either ends in a trap instruction, which the runtime reports.
SANITIZE_FLAGS = [
    "-fsanitize=bounds-strict,shift,integer-divide-by-zero,signed-integer-overflow,alignment,unreachable,return",
    "-fsanitize-undefined-trap-on-error",
    "-ftrivial-auto-var-init=pattern",  # registers that were never written hold -1.7e38
]
ENVIRONMENT = {**os.environ, "LC_ALL": "C"}  # messages in English, with plain quotes


class EmulatorError(Exception):
    """A kernel could not be built or launched, or its launch found a fault (deadlock, race, bad address, ...)."""


class BuildError(EmulatorError):
    """A kernel does not compile for the emulator."""


def cache_folder() -> Path:
    """Where libraries are kept: $CUFLASH_EMULATOR_CACHE, or a folder of this user in the temporary directory."""
    default = Path(tempfile.gettempdir()) / f"cuflash-emulator-{os.getuid()}"
    folder = Path(os.environ.get("CUFLASH_EMULATOR_CACHE") or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def compiler() -> str:
    """Path of g++; EmulatorError without one or on another processor."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if not found or platform.machine() != "x86_64":
        raise EmulatorError(f"the emulator needs g++ on x86-64; found compiler {found} on {platform.machine()}")
    return found


@functools.cache
def environment_key() -> str:
    """Hash of the emulator's C++ text, the compiler and the processor (the code is built for this machine)."""
    digest = hashlib.sha256(RECORDED_DEVICE.encode())
    for path in sorted(DEVICE.iterdir()):
        digest.update(path.read_bytes())
    digest.update(subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout)
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        digest.update(next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "").encode())
    return digest.hexdigest()


def content_key(*parts: str) -> str:
    return hashlib.sha256("\0".join([environment_key(), *parts]).encode()).hexdigest()[:20]


@functools.cache
def linker() -> list[str]:
    """The flag that asks for the linker which is quicker by far with small libraries, where it is installed."""
    return ["-fuse-ld=gold"] if shutil.which("ld.gold") else []


def run_compiler(arguments: list[str], text: str = "", folder: Path = DEVICE) -> subprocess.CompletedProcess:
    """Run the compiler, on `text` if any, in a folder that debug information calls the runtime's."""
    maps = [f"-fdebug-prefix-map={f}={RECORDED_DEVICE}" for f in dict.fromkeys((folder, DEVICE))]
    command = [compiler(), *maps, *arguments, *(["-"] if text else [])]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT)


def build(
    path: Path, arguments: list[str], text: str = "", folder: Path = DEVICE
) -> subprocess.CompletedProcess | None:
    """Compile `text`, if any, in a folder to `path` unless it exists; the compiler's result if it failed."""
    if path.exists():
        return None
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling the same
        if path.exists():
            return None
        partial = path.with_suffix(f".{os.getpid()}.partial")
        result = run_compiler([*arguments, "-I", str(DEVICE), "-o", str(partial)], text, folder)
        if result.returncode:
            return result
        partial.rename(path)
        return None


@functools.cache
def runtime_objects() -> list[str]:
    """Everything that does not depend on the kernel."""

    def compile_file(file: Path) -> Path:
        path = cache_folder() / f"{file.stem}-{content_key(file.name, *RUNTIME_FLAGS)}.o"
        if failed := build(path, [*RUNTIME_FLAGS, "-c", "-x", "c++"], f'#include "{file.name}"\n'):
            raise BuildError(f"the emulator's runtime does not compile:\n{failed.stderr}")
        return path

    with ThreadPoolExecutor(2) as pool:
        return [str(p) for p in pool.map(compile_file, sorted(DEVICE.glob("*.cpp")))]


@functools.cache
def header_folder(*flags: str) -> Path:
    """A folder with kernel.h precompiled for these flags, where a kernel is built a third sooner.

    The header does not ask for the architecture.  A compiler that cannot use the file reads the header itself.
    """
    folder = cache_folder() / f"header-{content_key(*flags)}"
    folder.mkdir(exist_ok=True)
    if failed := build(folder / "kernel.h.gch", [*flags, "-x", "c++-header", "kernel.h"]):
        raise BuildError(f"the emulator's headers do not compile:\n{failed.stderr}")
    return folder


def explain(stderr: str, opcodes: dict[str, str]) -> str:
    """The compiler's errors, with unknown PTX opcodes named as the source spells them."""
    missing = sorted({opcodes.get(n, n) for n in re.findall(r"'(\w+)' is not a member of 'emu::ptx'", stderr)})
    head = "".join(f"PTX instruction {name} is not modelled\n" for name in missing)
    errors = [line for line in stderr.splitlines() if "error:" in line]
    return head + "\n".join(errors[:20] or [stderr])


def library(source: str, arch: int, sanitize: bool) -> Path:
    """Shared library of all kernels of a flattened CUDA source, compiled for an architecture (80: sm_80)."""
    flags = [*KERNEL_FLAGS, *(SANITIZE_FLAGS if sanitize else [])]
    path = cache_folder() / f"kernel-{content_key(source, str(arch), *flags)}.so"
    if path.exists():
        return path
    preprocessed = run_compiler(["-E", f"-D__CUDA_ARCH__={10 * arch}", "-D__CUDACC__=1", "-x", "c++"], source)
    if preprocessed.returncode:
        raise BuildError(f"the source could not be preprocessed:\n{preprocessed.stderr}")
    translation = translate(preprocessed.stdout)
    arguments = [*flags, f"-D__CUDA_ARCH__={10 * arch}", *linker(), "-shared", *runtime_objects(), "-x", "c++"]
    failed = build(path, arguments, translation.text, header_folder(*flags))
    if failed:
        raise BuildError(f"the translated kernel does not compile:\n{explain(failed.stderr, translation.opcodes)}")
    return path


def source_lines(library_path: Path, offsets: list[int]) -> list[str]:
    """Kernel source lines ("file:line < caller's file:line") of each call stack; a 0 offset ends a stack."""
    tool = shutil.which("addr2line")
    if not tool or not offsets:
        return []
    # A return address lies behind its call; -a prints the address before the (possibly inlined) places.
    command = [tool, "-a", "-i", "-e", str(library_path), *(hex(max(o - 1, 0)) for o in offsets)]
    stacks: list[list[str]] = [[]]
    for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
        place = re.sub(r" \(discriminator \d+\)", "", line)
        if re.fullmatch("0x0+", place):
            stacks.append([])
        elif place.startswith(RECORDED_DEVICE) and not place.endswith(":?"):
            name = os.path.relpath(place, RECORDED_DEVICE)
            if not (DEVICE / name.rpartition(":")[0]).is_file():  # a kernel's line, not one of the runtime's
                stacks[-1].append(name)
    return [" < ".join(dict.fromkeys(stack)) for stack in stacks[:-1]]
