"""What all tests share.

Tests that need a GPU are marked `gpu`, and skip with the reason where there is none; a run of all tests leaves out cases that
say what others say (tests/selection.py).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tests.selection import left_out

pytest.register_assert_rewrite("tests.tolerance")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves a GPU's memory to the other libraries

GPU_TESTS = Path(__file__).parent / "gpu"


@functools.cache
def missing_gpu() -> str:
    """Why no test can run on a GPU here; empty where they can."""
    try:
        import cupy
    except (ImportError, OSError) as error:
        return f"CuPy cannot be imported: {error}"
    return "" if cupy.cuda.is_available() else "no NVIDIA GPU"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything below tests/gpu needs a GPU, and so does what is marked elsewhere; some cases are enough for a run of all."""
    if left := left_out(items, config.args):
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=list(left))
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and missing_gpu():
            item.add_marker(pytest.mark.skip(reason=missing_gpu()))
