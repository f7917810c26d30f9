"""Where the tests' arrays live: the GPU, in memory that is NaN wherever no array is, and that no call may touch there.

With CUFLASH_TEST_BACKEND=numpy the same tests run on host arrays through the numpy backend: a dry run, which shows that
the tests are right and says nothing about a kernel.  Only tests that take the fixture `device` can do this.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import cuflash
from cuflash import problem
from cuflash.backends import BACKENDS
from cuflash.problem import canonical
from cuflash.schedules.wgmma import MIN_COMPILER
from tests.cases import DTYPES, Case
from tests.tolerance import Expectation

DRY = os.environ.get("CUFLASH_TEST_BACKEND") == "numpy"
GUARD = 1024  # bytes in front of every array and behind it; a multiple of what allocators align to
POISON = 0xFF  # repeated, it is NaN in every floating dtype and -1 in integers


class Kind(NamedTuple):
    """A backend and a dtype that it computes in."""

    backend: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.dtype}"


#: kinds whose backward is in parts another one's; test_split.py and test_split_backward_wgmma.py have them
FORWARD_ONLY = (Kind("wgmma", "float32"),)
KINDS = (
    [Kind("numpy", dtype) for dtype in DTYPES]
    if DRY
    else [
        kind
        for kind in (Kind(row.name, dtype) for row in BACKENDS for dtype in row.capabilities)
        if kind not in FORWARD_ONLY
    ]
)
#: one dtype of 16 bits and float32, for what a further dtype of the same size would not change
MAIN_KINDS = [kind for kind in KINDS if kind.dtype in ("float16", "float32")]


def image(x: np.ndarray) -> tuple[np.ndarray, int]:
    """The bytes that an array spans between guards, and where its first element is; addresses keep their alignment."""
    if x.size == 0:
        return np.full(2 * GUARD, POISON, np.uint8), GUARD
    low, high = np.lib.array_utils.byte_bounds(x)
    begin = GUARD + low % GUARD
    data = np.full(begin + high - low + GUARD, POISON, np.uint8)
    data[begin : begin + high - low] = np.frombuffer(ctypes.string_at(low, high - low), np.uint8)
    return data, begin + x.ctypes.data - low


def taken(root: np.ndarray, x: np.ndarray, first: int) -> np.ndarray:
    """Which bytes of a buffer belong to an array whose first element is at byte `first`."""
    mine = np.zeros(root.size, bool)
    if x.size:
        grid = np.ix_(*(np.arange(n) * s for n, s in zip(x.shape, x.strides, strict=True))) if x.ndim else ()
        for byte in range(x.dtype.itemsize):
            mine[first + byte + sum(grid)] = True
    return mine


class Device:
    """The GPU that is current, or in a dry run the host."""

    def __init__(self) -> None:
        if DRY:
            self.xp: Any = np
        else:
            import cupy

            self.xp = cupy
        self.inputs: list[tuple[Any, np.ndarray]] = []

    def put(self, x: np.ndarray | None) -> Any:
        """The array there, its strides and alignment kept, in the middle of NaN; `check_inputs` looks after it."""
        if x is None:
            return None
        view, root, data, _ = self.place(x)
        self.inputs.append((root, data))
        return view

    def place(self, x: np.ndarray) -> tuple[Any, Any, np.ndarray, int]:
        """The array there, the buffer that it lies in, what the buffer holds, and where in it the array starts."""
        data, first = image(x)
        if DRY:
            spare = np.empty(data.size + GUARD, np.uint8)
            root = spare[-spare.ctypes.data % GUARD :][: data.size]
            root[:] = data
            view = np.ndarray(x.shape, x.dtype, root, first, x.strides)
            view.flags.writeable = x.flags.writeable
            return view, root, data, first
        root = self.xp.asarray(data)
        return self.xp.ndarray(x.shape, x.dtype, root.data + first, x.strides), root, data, first

    def get(self, x: Any) -> np.ndarray:
        """A compact copy on the host, which has waited for the device."""
        if DRY:
            return x.copy()
        bits: np.ndarray = x.view(f"u{x.dtype.itemsize}").get()  # bfloat16 need not be copied as such
        return bits.view(x.dtype)

    def check_inputs(self) -> None:
        """Fail if a byte of an array given to `put`, or beside it, has changed."""
        for root, data in self.inputs:
            wrong = np.flatnonzero(self.get(root) != data)
            assert not wrong.size, f"{wrong.size} bytes of or beside an input were written, the first at {wrong[0]}"
        self.inputs.clear()

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """Whatever is allocated inside is NaN at first, and stands between guards that must be whole at the end."""
        if DRY:
            yield
            return
        cupy = self.xp
        pool, blocks = cupy.get_default_memory_pool(), []

        def allocate(size: int) -> Any:
            if size == 0:
                return pool.malloc(0)
            block = pool.malloc(size + 2 * GUARD)
            block.memset_async(POISON, size + 2 * GUARD)
            blocks.append((block, size))
            return block + GUARD

        with cupy.cuda.using_allocator(allocate):
            yield
        for block, size in blocks:
            for where, at in (("in front of", block), ("behind", block + (GUARD + size))):
                found = cupy.ndarray((GUARD,), np.uint8, at).get()
                assert (found == POISON).all(), f"{(found != POISON).sum()} bytes were written {where} {size} bytes"

    def free(self) -> None:
        """Let go of the arrays, and give what they took back to the device if it is much."""
        self.inputs.clear()
        if not DRY:
            pool = self.xp.get_default_memory_pool()
            if pool.total_bytes() > 1 << 30:
                pool.free_all_blocks()


def capable(device: Device, kind: Kind) -> Kind:
    """The kind; the test is skipped where the device, or its compiler, does not have it."""
    if not DRY:
        row = next(row for row in BACKENDS if row.name == kind.backend)
        needed = {**row.capabilities, **row.of_inputs}[kind.dtype]
        found = int(device.xp.cuda.Device().compute_capability)
        if found < needed or found > row.last_capability:
            pytest.skip(f"{kind} needs compute capability {needed / 10}, the device has {found / 10}")
        if kind.backend == "wgmma":
            from cuflash import jit

            if jit.compiler() < MIN_COMPILER:
                pytest.skip(f"{kind} needs NVRTC {MIN_COMPILER}, found {jit.compiler()}")
    return kind


def on_device(device: Device, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call with their arrays on the device, those of modifiers too."""
    moved = []
    for modifier in options.get("modifiers", ()):
        arrays = {name: getattr(modifier, name) for name in type(modifier).operand_attributes().values()}
        placed = {name: device.put(x) for name, x in arrays.items() if not isinstance(x, int)}
        moved.append(replace(modifier, **placed))
    arrays = {name: device.put(options.get(name)) for name in ("mask", "bias")}
    return {**options, **arrays, "modifiers": tuple(moved)}


def check(
    device: Device,
    kind: Kind,
    case: Case,
    *,
    seed: int = 0,
    backward: bool = True,
    deterministic: bool | None = None,
) -> float:
    """Run a case forward and backward and judge all results; the largest error in units of what is allowed."""
    case = replace(case, dtype=kind.dtype)
    made = case.make(seed)
    call = described(made)
    dout = canonical(made["dout"].copy(), case.layout) if backward else None
    expectation = Expectation(call, dout, made["dlse"] if backward else None)
    if kind.dtype == "float64":
        allow_reference_error(expectation)
    q, k, v, dout, dlse = (device.put(made[name]) for name in ("q", "k", "v", "dout", "dlse"))
    options = {**on_device(device, made["options"]), "backend": kind.backend}
    with device.poisoned():
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        assert type(out) is type(q)
        assert out.flags.c_contiguous
        ratio = expectation.check_forward(device.get(canonical(out, case.layout)), device.get(lse))
        if backward:
            options["deterministic"] = deterministic
            gradients = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
            ratio = max(ratio, expectation.check_backward(canonical_gradients(device, call, gradients)))
    device.check_inputs()
    return ratio


def described(made: dict[str, Any]) -> problem.Call:
    """The call of a case's arrays, in compact copies, with which NumPy is faster."""
    options = made["options"]
    copies = {name: options[name].copy() for name in ("mask", "bias") if options[name] is not None}
    return problem.describe(*(made[name].copy() for name in ("q", "k", "v")), **{**options, **copies})


def allow_reference_error(expectation: Expectation) -> None:
    """Allow what the float64 reference itself may be off by: a unit in the last place for each term of its sums.

    With equal weights 1/n of n keys, all rounded the same way, it comes to that; a kernel may well be nearer.
    """
    problem = expectation.call.problem
    unit = (problem.seq_q + problem.seq_k) * np.finfo(np.float64).eps
    for name, floor in expectation.floors.items():
        x = np.nan_to_num(abs(expectation.plain[name]), posinf=0)
        size = x.max(axis=-1 if name == "lse" else (-2, -1), initial=0)
        expectation.floors[name] = floor + unit * size


def canonical_gradients(device: Device, call: problem.Call, gradients: Any) -> Any:
    """Gradients on the host with the axes of the call's arrays, as `Expectation` takes them."""
    found = []
    for name in gradients._fields:
        x = device.get(getattr(gradients, name))
        operand = call.operands.get(name[1:])
        found.append(canonical(x, call.problem.layout) if operand is None else x.reshape(operand.shape))
    return type(gradients)(*found)
