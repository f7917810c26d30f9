"""The versions of JAX that this package works with, and what is named differently in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cuflash.errors import VersionError

OLDEST, NEWEST = (0, 6, 2), (0, 11)  # from the first to all patches of the last
SUPPORTED = ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))
INSTALL = "install one of these, with: pip install 'cuflash[jax]', or on an NVIDIA GPU 'cuflash[jax,cuda13]' and 'jax[cuda13]'"


def check(version: str) -> None:
    """Raise a `VersionError` unless JAX of this version is supported."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if not (numbers >= OLDEST and numbers[: len(NEWEST)] <= NEWEST):
        raise VersionError(f"JAX {version} is installed, and cuflash.jax works with {SUPPORTED}; {INSTALL}")


def require() -> Any:
    """The module jax; raises a `VersionError` where it is absent or of a version that is not supported."""
    try:
        import jax
    except ImportError as error:
        raise VersionError(
            f"cuflash.jax works with JAX {SUPPORTED}, which cannot be imported ({error}); {INSTALL}"
        ) from error
    check(jax.__version__)
    return jax


jax = require()


def varying(x: Any) -> frozenset[str]:
    """Axes of the mesh along which an array differs, inside of shard_map."""
    kind = jax.typeof(x)
    found: frozenset[str] = kind.mat.varying if hasattr(kind, "mat") else kind.vma
    return found


def vary(x: Any, axes: frozenset[str]) -> Any:
    """The array, as one that differs along these axes of the mesh; its gradient is a sum over those that are new."""
    missing = tuple(sorted(axes - varying(x)))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)


def results(shapes: Sequence[tuple[tuple[int, ...], Any]], like: Any) -> Any:
    """What XLA is told of results of these shapes and dtypes, which differ along the same axes of the mesh as an array."""
    # How that is said depends on the version; the shape of a function's result says it in all of them.
    return jax.eval_shape(lambda x: [jax.numpy.full_like(x, 0, dtype, shape) for shape, dtype in shapes], like)
