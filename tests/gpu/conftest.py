"""What the GPU tests share: the device, the kernels compiled beforehand on all cores, and the marker `big`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cuflash import UnsupportedError
from tests.gpu.device import DRY, KINDS, Device, Kind, capable

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: reasons for which an array has no tensor map
WITHOUT_MAP = (
    "^rows of d?. are not|^rows of d?out are not|has a stride of|cannot be merged into one|an array is empty|no tile of"
    "|no registers to pass over the tiles|no room for the slopes|random numbers of Dropout"
)
#: what float32 on tensor cores leaves to plain float32, which takes it as a kind of its own; the last is decoding
OF_SPLIT = "packed|forward mode|float32 is not among its dtypes"
MANY = 200  # tests from which on it pays to compile on all cores first


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "big: takes up to 60 GiB of GPU memory; leave out with -m 'not big'")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a dry run, what takes the fixture `device` is not skipped for want of a GPU."""
    for item in items:
        if DRY and HERE in item.path.parents and "device" in getattr(item, "fixturenames", ()):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of `test_kernels` into CuPy's cache, in as many processes as there are cores.

    NVRTC takes about a second a kernel and the library compiles one at a time.  What goes wrong here is left to the
    tests to report.
    """
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    if not DRY and alone and len(request.session.items) >= MANY:
        count = os.cpu_count() or 1
        command = [sys.executable, "-m", "tests.gpu.warm_cache"]
        running = [
            subprocess.Popen(
                [*command, str(i), str(count)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for i in range(count)
        ]
        for process in running:
            process.wait(timeout=300)


@pytest.fixture
def device(compiled: None) -> Iterator[Device]:
    found = Device()
    yield found
    found.free()


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest, device: Device) -> Kind:
    """Every backend with each of its dtypes, where the device's compute capability suffices."""
    return capable(device, request.param)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """A call that Hopper's kernels refuse for its strides, as empty or for its modifiers is skipped with the reason.

    So are packed sequences, forward mode and caches of float32 on tensor cores.

    `tests/test_backends.py` says which of the calls here they must take, `test_hopper.py` tests those in other layouts.
    """
    try:
        return (yield)
    except UnsupportedError as error:
        kind = pyfuncitem.funcargs.get("kind")
        reason = str(error).partition("wgmma: ")[2].partition("; mma: ")[0]
        if isinstance(kind, Kind) and kind.backend == "wgmma" and re.search(WITHOUT_MAP, reason):
            pytest.skip(f"wgmma does not take this call: {reason}")
        reason = str(error).partition("; mma: ")[2].partition("; simt: ")[0]
        if isinstance(kind, Kind) and (kind.backend, kind.dtype) == ("mma", "float32") and re.search(OF_SPLIT, reason):
            pytest.skip(f"mma does not take this call of float32: {reason}")
        raise


@pytest.fixture
def cupy() -> Any:
    """CuPy, for tests of what only a device has."""
    import cupy

    return cupy
