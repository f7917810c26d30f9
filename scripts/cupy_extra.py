"""Prints which CuPy extra fits this machine's NVIDIA driver: "cuda13", "cuda12", or nothing.  Standard library only.

The driver library itself is asked, since it is what CuPy will load: a CUDA version of 13.0 means driver 580 or newer,
12.0 means 525 or newer.  The reason for the answer goes to stderr.
"""

import ctypes
import sys

CUDA_12, CUDA_13 = 12000, 13000


def main() -> None:
    if sys.platform == "darwin":
        print("no CUDA on macOS: NumPy only", file=sys.stderr)
        return
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        print("no NVIDIA driver found: NumPy only", file=sys.stderr)
        return
    version, devices = ctypes.c_int(0), ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version))
    status = status or driver.cuDeviceGetCount(ctypes.byref(devices))
    found = f"NVIDIA driver with CUDA {version.value // 1000}.{version.value % 1000 // 10}, {devices.value} GPU(s)"
    if status or not devices.value:
        print(f"{found}, not usable (CUDA error {status}): NumPy only", file=sys.stderr)
    elif version.value >= CUDA_12:
        extra = "cuda13" if version.value >= CUDA_13 else "cuda12"
        print(f"{found}: {extra}", file=sys.stderr)
        print(extra)
    else:
        print(f"{found} is too old, CUDA 12.0 (driver 525) is needed: NumPy only", file=sys.stderr)


if __name__ == "__main__":
    main()
