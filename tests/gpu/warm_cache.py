"""Compile the kernels that the GPU tests need into CuPy's cache: ``python -m tests.gpu.warm_cache PART PARTS``."""

from __future__ import annotations

import sys
from contextlib import suppress

import numpy as np

import cuflash
from tests.gpu import test_decode
from tests.gpu.device import KINDS, Device, on_device
from tests.gpu.test_kernels import COMPILED_FIRST


def main(part: int, parts: int) -> None:
    """Run every `parts`-th case once."""
    device = Device()
    for kind, case in COMPILED_FIRST[part::parts]:
        # A case that fails, fails in its test as well, where it is reported.
        with suppress(Exception):
            made = case.make()
            q, k, v, dout = (device.put(made[name]) for name in ("q", "k", "v", "dout"))
            options = {**on_device(device, made["options"]), "backend": kind.backend}
            out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
            cuflash.attention_backward(dout, q, k, v, out, lse, **options)
            device.check_inputs()
    for kind, case in test_decode.COMPILED_FIRST[part::parts]:
        with suppress(Exception):
            arguments, _ = test_decode.on_device(device, case.make(), backend=kind.backend)
            cuflash.attention_decode(**arguments)


if __name__ == "__main__":
    assert KINDS
    np.seterr(all="ignore")
    main(*map(int, sys.argv[1:]))
