"""What this machine is: processor, GPUs, driver, and the versions that matter to a measurement."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import cuflash
from cuflash.cli.shape import host_dtype
from cuflash.problem import DTYPES

#: CuPy may be missing, and its import may fail on a missing library or an unwritable cache folder.
IMPORT_ERRORS = (ImportError, OSError, RuntimeError)
INSTALL = "pip install 'cuflash[cuda13]' with driver 580 or newer, 'cuflash[cuda12]' with 525 or newer"


@dataclass(frozen=True)
class Device:
    """One GPU; memory and shared memory in bytes."""

    name: str
    capability: int  # 90 for compute capability 9.0
    multiprocessors: int
    memory: int
    shared_memory: int  # a block may ask for, at most


@dataclass(frozen=True)
class Machine:
    """Processor, GPUs, driver, versions; `no_gpu` says why there is no GPU to use, empty where there is one."""

    system: str
    processor: str
    cores: int
    driver: str
    devices: tuple[Device, ...]
    no_gpu: str
    versions: dict[str, str]
    cache: str
    notes: tuple[str, ...] = field(default=())

    @property
    def gpu(self) -> str | None:
        """Name of the GPU that is measured."""
        return self.devices[0].name if self.devices else None

    @property
    def headline(self) -> str:
        """The device that computes, in a few words."""
        if not self.devices:
            return f"{self.processor}, {self.cores} cores"
        more = f" and {len(self.devices) - 1} more" if len(self.devices) > 1 else ""
        return f"{self.devices[0].name}{more} (sm_{self.devices[0].capability}), driver {self.driver}"

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def this_machine() -> Machine:
    """Look at this machine; imports CuPy if it is there."""
    versions = {"cuflash": cuflash.__version__, "python": platform.python_version()}
    versions |= {name: found for name in ("numpy", "ml_dtypes") if (found := installed(name))}
    devices: tuple[Device, ...] = ()
    driver = driver_version()
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError:
        reason = "CuPy is not installed" + (f": {INSTALL}" if driver else ", and there is no NVIDIA driver")
    except IMPORT_ERRORS as error:
        reason = f"CuPy cannot be imported: {' '.join(str(error).split())}"
    else:
        versions["cupy"] = cupy.__version__
        versions["nvrtc"] = nvrtc_version(cupy)
        devices, reason = gpus(cupy)
    if devices:
        versions["cuda driver"] = dotted(cupy.cuda.runtime.driverGetVersion())
    cache = os.environ.get("CUPY_CACHE_DIR") or str(Path.home() / ".cupy" / "kernel_cache")
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor(),
        cores=cores(),
        driver=driver or "unknown",
        devices=devices,
        no_gpu=reason,
        versions=versions,
        cache=cache,
        notes=doubled_cupy(),
    )


def stamp(machine: Machine, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Measured rows together with where, when, and by which command they were measured."""
    return {
        "gpu": machine.gpu,
        "driver": machine.driver if machine.devices else None,
        "processor": f"{machine.processor}, {machine.cores} cores",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": machine.versions,
        "command": command_line(),
        "rows": rows,
    }


def command_line() -> str:
    program = Path(sys.argv[0])
    first = "python -m cuflash" if program.name in ("__main__.py", "cuflash") else f"python scripts/{program.name}"
    return " ".join([first, *sys.argv[1:]])


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nvrtc_version(cupy: Any) -> str:
    try:
        return ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except IMPORT_ERRORS:
        return "missing: pip install 'cuda-toolkit[nvrtc,cudart]'"


def gpus(cupy: Any) -> tuple[tuple[Device, ...], str]:
    runtime = cupy.cuda.runtime
    if not cupy.cuda.is_available():
        return (), "no NVIDIA driver" if runtime.driverGetVersion() == 0 else "no usable NVIDIA GPU"
    found = []
    for index in range(runtime.getDeviceCount()):
        p = runtime.getDeviceProperties(index)
        name = p["name"].decode() if isinstance(p["name"], bytes) else str(p["name"])
        found.append(
            Device(
                name=name,
                capability=10 * int(p["major"]) + int(p["minor"]),
                multiprocessors=int(p["multiProcessorCount"]),
                memory=int(p["totalGlobalMem"]),
                shared_memory=int(p["sharedMemPerBlockOptin"]),
            )
        )
    return tuple(found), ""


def driver_version() -> str | None:
    """Version of the NVIDIA driver, from its management library or the kernel module."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0:
            status = nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96))
            nvml.nvmlShutdown()
            if status == 0:
                return text.value.decode()
    except (OSError, AttributeError):
        pass
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((w for w in words if w.replace(".", "").isdigit() and "." in w), None)


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def doubled_cupy() -> tuple[str, ...]:
    """Two CuPy packages in one environment overwrite each other's files."""
    names = {str(d.metadata["Name"]).lower() for d in metadata.distributions() if d.metadata["Name"]}
    wheels = sorted(n for n in names if n == "cupy" or n.startswith(("cupy-cuda", "cupy_cuda")))
    return (f"more than one CuPy is installed ({', '.join(wheels)}): keep one",) if len(wheels) > 1 else ()


def array_library(machine: Machine) -> Any:
    """CuPy where there is a GPU, else NumPy."""
    return importlib.import_module("cupy") if machine.devices else np


def on_device(xp: Any, array: Any) -> Any:
    """A NumPy array as an array of `xp`; bfloat16, which CuPy may not take from NumPy, travels as its bits."""
    if xp is np or array.dtype.kind == "f":
        return xp.asarray(array)
    return xp.asarray(array.view(np.uint16)).view(array.dtype)


def on_host(array: Any) -> Any:
    """The array as NumPy has it."""
    if not hasattr(array, "get"):
        return array
    return array.get() if array.dtype.kind == "f" else array.view(np.uint16).get().view(array.dtype)


def backends(machine: Machine) -> dict[str, str]:
    """Every backend by name, with what keeps it from ordinary calls here; empty where nothing does."""
    xp = array_library(machine)
    found: dict[str, str] = {}
    for dtype in DTYPES:
        x = on_device(xp, np.zeros((1, 1, 64, 64), host_dtype(dtype)))
        answer = cuflash.explain(x, x, x)
        found = dict(answer.reasons) | found | {answer.backend: ""}
    if machine.no_gpu:
        found = {name: reason and machine.no_gpu for name, reason in found.items()}
    return dict(sorted(found.items(), key=lambda item: bool(item[1])))
