"""Tangents for the calls of tests/cases.py: directions in which everything that may moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuflash.problem import Call

#: inputs of a forward, and what its backward is given besides
INPUTS = ("q", "k", "v", "bias", "sinks")
COTANGENTS = ("dout", "dlse")


def tangents_of(call: Call, dout: Any = None, dlse: Any = None, *, seed: int = 5, size: float = 1.0) -> dict[str, Any]:
    """Random tangents of the call's inputs by name and, if they are given, of dout and dlse."""
    rng = np.random.default_rng(seed)
    given = {"q": call.q, "k": call.k, "v": call.v, **{n: x for n, x in call.operands.items() if n in INPUTS}}
    given |= {name: x for name, x in (("dout", dout), ("dlse", dlse)) if x is not None}
    return {name: (size * rng.standard_normal(x.shape)).astype(x.dtype) for name, x in given.items()}


def fields_of(tangents: dict[str, Any]) -> dict[str, Any]:
    """The tangents by the names of `cuflash.attention_jvp`."""
    return {f"d{name}": x for name, x in tangents.items()}
