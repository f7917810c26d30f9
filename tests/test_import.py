"""Importing cuflash loads neither CuPy nor a driver, works without CuPy, and survives a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ATTENTION = "import numpy, cuflash; x = numpy.ones((1, 2, 3)); cuflash.attention_vjp(x, x, x)[1](x); "
LIBRARIES = {"cupy", "cupyx", "cuda", "torch", "jax", "jaxlib", "numba", "scipy", "matplotlib", "pytest"}


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder that holds a module called cupy, which can be imported anywhere."""
    (tmp_path / "cupy.py").write_text("ndarray = type('ndarray', (), {})\n")
    return tmp_path


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The same, but its import fails as CuPy's own does where a library is missing."""
    (tmp_path / "cupy.py").write_text("raise ImportError('libnothing.so: cannot open shared object file')\n")
    return tmp_path


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in which warnings are errors; `folders` come first on its path."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join([*map(str, folders), str(root), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": path}
    )


def modules_after(code: str, *folders: Path) -> set[str]:
    """Names of the top-level modules that some code loads."""
    done = run(code + "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})", *folders)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("code", ["import cuflash", ATTENTION])
def test_no_array_library_is_loaded(code: str, stub: Path) -> None:
    found = modules_after(code, stub)
    assert {"cuflash", "numpy"} <= found
    assert not found & LIBRARIES


def test_that_test_sees_cupy_when_it_is_loaded(stub: Path) -> None:
    assert "cupy" in modules_after("import cuflash, cupy", stub)


def test_works_where_cupy_cannot_be_imported(broken: Path) -> None:
    done = run(ATTENTION, broken)
    assert done.returncode == 0, done.stderr


def test_that_cupy_cannot_be_imported_there(broken: Path) -> None:
    done = run("import cupy", broken)
    assert done.returncode == 1
    assert "libnothing.so" in done.stderr


def test_asking_for_a_gpu_says_what_is_wrong_with_cupy(broken: Path) -> None:
    code = "import numpy, cuflash; x = numpy.ones((1, 2, 3)); cuflash.attention(x, x, x, backend='simt')"
    done = run(code, broken)
    assert done.returncode == 1
    assert "UnsupportedError" in done.stderr
    assert "libnothing.so" in done.stderr
    assert "pip install" in done.stderr


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the libraries of a process there")
def test_no_driver_is_loaded(stub: Path) -> None:
    show = "print(open('/proc/self/maps').read())"
    assert "libcuda" not in run(ATTENTION + show, stub).stdout
    assert "python" in run(ATTENTION + show, stub).stdout.lower()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_after_import() -> None:
    code = (
        "import os, sys, numpy, cuflash\n"
        "x = numpy.ones((1, 2, 3)); want = cuflash.attention(x, x, x)\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if (cuflash.attention(x, x, x) == want).all() else 3)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = run(code.replace("import os", "import warnings; warnings.simplefilter('ignore'); import os", 1))
    assert done.returncode == 0, done.stderr


def test_the_package_is_typed_and_versioned() -> None:
    import cuflash

    assert (Path(cuflash.__file__).parent / "py.typed").exists()
    assert cuflash.__version__.count(".") == 2
    assert all(hasattr(cuflash, name) for name in cuflash.__all__)
