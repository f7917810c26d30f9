"""Plan of a decode call on a GPU: one launch whose grid depends on shapes alone, never on lengths.

Planning touches neither CuPy nor a device, as in plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from cuflash import abi, tensormap
from cuflash.backends import NUMPY_REASON, Device
from cuflash.decode_problem import DecodeCall, DecodeProblem
from cuflash.errors import UnsupportedError
from cuflash.place import Placed, address, placed
from cuflash.plan import Plan, Step, chain_names, checked, common_values, vectors
from cuflash.schedules import decode as schedule
from cuflash.schedules.wgmma import MIN_COMPILER
from cuflash.variant import Variant

#: lowest compute capability by dtype
MMA_CAPABILITIES = {"float16": 80, "bfloat16": 80}
#: that have tensor maps; so has 12.0, for which the compiler keeps a box's corner in memory
TENSOR_CAPABILITIES = (90, 100, 103)
SIMT_CAPABILITIES = {"float16": 75, "bfloat16": 75, "float32": 75, "float64": 75}


@dataclass(frozen=True, eq=False)
class DecodePlan(Plan):
    """A plan whose blocks leave results over parts of the keys; their count has to be 0 before a launch, and is after it."""

    decode: DecodeProblem | None = None
    part_rows: int = 0
    arrivals: int = 0

    def workspace(self) -> dict[str, int]:
        """Bytes by field name."""
        return self.needed

    @cached_property
    def needed(self) -> dict[str, int]:
        """The same, computed once."""
        real = np.dtype(self.problem.accumulator).itemsize
        width = self.steps[0].config.head_dim_v  # type: ignore[attr-defined]
        return {
            "parts": real * self.part_rows * width,
            "part_totals": 2 * real * self.part_rows,
            "arrivals": 4 * self.arrivals,
        }


@lru_cache(maxsize=4096)
def plan_decode(
    decode: DecodeProblem, device: Device, places: tuple[tuple[str, Placed], ...], requested: str | None = None
) -> DecodePlan:
    """Plan of a decode call for arrays at these places."""
    at = dict(places)
    problem = decode.problem
    backend, reasons = select(decode, device, requested)
    rows = [name for name in ("k", "v", "k_new", "v_new") if name in at]
    config = getattr(schedule, backend)(
        problem,
        device,
        aligned=all(at[name].aligned(16, 4) for name in rows),
        page_size=decode.page_size,
        appends=bool(decode.seq_new),
        mapped=backend == "mma" and has_maps(decode, device, at, rows),
    )
    if config.blocks_of_keys(problem) > schedule.MAX_BLOCKS_OF_KEYS:
        raise UnsupportedError(
            f"{config.blocks_of_keys(problem)} blocks of {config.block_k} keys are more than the "
            f"{schedule.MAX_BLOCKS_OF_KEYS} that the kernel counts; split the batch"
        )
    lanes = config.head_lanes
    most = max(lanes, device.multiprocessors * config.blocks_per_sm // lanes * lanes)
    blocks = min(config.blocks(problem), most)
    variant = Variant(config.kernel, problem.dtype, chain_names(problem), config)
    maps = tuple(map_of(name, decode, at[name], variant.config.box_rows[name]) for name in variant.maps)
    values = {
        **common_values(problem),
        "out_vectors": vectors(at["out"], 4),
        "q_vectors": int(at["q"].aligned(16, 4) and problem.head_dim * at["q"].itemsize % 16 == 0),
        "seq_new": decode.seq_new,
        "page_size": decode.page_size,
        "pages": decode.pages,
    }
    template, offsets = pack(decode, at, values, variant.maps)
    return DecodePlan(
        problem,
        device,
        backend,
        reasons,
        checked(Step(variant, blocks)),
        template,
        offsets,
        maps,
        decode=decode,
        part_rows=config.part_rows(blocks),
        arrivals=blocks,
    )


def has_maps(decode: DecodeProblem, device: Device, at: Mapping[str, Placed], rows: Sequence[str]) -> bool:
    """Whether the kernel can have keys and values fetched by the tensor memory accelerator."""
    if device.capability not in TENSOR_CAPABILITIES or 0 < device.compiler < MIN_COMPILER:
        return False
    try:
        for name in ("k", "v"):
            map_of(name, decode, at[name], 1)
    except UnsupportedError:  # rows are then fetched one by one
        return False
    return all(at[name].aligned(16, 4) for name in rows)


def map_of(name: str, decode: DecodeProblem, place: Placed, box_rows: int) -> tensormap.TensorMap:
    """The map of a cache, or of a pool of pages, which takes the place of the batch; UnsupportedError where it has none."""
    problem = decode.problem
    width = problem.head_dim_v if name == "v" else problem.head_dim
    if width % 8:
        raise UnsupportedError(f"rows of {name} are {width} elements, not a multiple of 16 bytes")
    rows, entries = (decode.page_size, decode.pages) if decode.page_size else (problem.seq_k, problem.batch_size)
    if not (rows and entries and problem.seq_k):
        raise UnsupportedError(f"{name} is empty, which no tensor map describes, or no page of it is in the table")
    return tensormap.described(name, problem.dtype, (width, rows, problem.heads_k, entries), place, box_rows)


def select(decode: DecodeProblem, device: Device, requested: str | None) -> tuple[str, dict[str, str]]:
    """The backend of a decode call on a device, and why not the others."""
    problem = decode.problem
    reasons = {"wgmma": "it has no decode kernel", "numpy": NUMPY_REASON}
    chosen = None
    for name, capabilities in (("mma", MMA_CAPABILITIES), ("simt", SIMT_CAPABILITIES)):
        refusal = refusal_of(problem, device, capabilities)
        if refusal is None and requested not in (None, name):
            refusal = f"backend={requested!r} was asked for"
        if refusal is None and chosen is not None:
            refusal = f"{chosen} is preferred"
        if refusal is None:
            chosen = name
        else:
            reasons[name] = refusal
    if chosen is None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"no GPU backend takes this decode call on {device}: {listed}")
    return chosen, reasons


def refusal_of(problem: Any, device: Device, capabilities: Mapping[str, int]) -> str | None:
    """Why a backend of these capabilities does not take the problem, or None."""
    if problem.dtype not in capabilities:
        return f"{problem.dtype} is not among its dtypes ({', '.join(capabilities)})"
    needed = capabilities[problem.dtype]
    if device.capability < needed:
        return f"{problem.dtype} needs compute capability {needed / 10:.1f}, {device} is older"
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > schedule.MAX_HEAD_DIM:
            return f"{name} {size} is above {schedule.MAX_HEAD_DIM}; the numpy backend has no limit"
    return None


def pack(
    decode: DecodeProblem, at: Mapping[str, Placed], values: Mapping[str, float | int], maps: tuple[str, ...]
) -> tuple[bytes, dict[str, int]]:
    """The argument record without addresses, and where the addresses go."""
    problem = decode.problem
    names = chain_names(problem)
    dtype = abi.record("decode", names, problem.accumulator, maps)
    record = np.zeros((), dtype)
    record["batch_sizes"] = [1] * (abi.BATCH_AXES - 1) + list(problem.batch)
    offsets = {}
    layout: Mapping[str, Any] = dtype.fields or {}
    for kind, name in abi.fields("decode", names, maps):
        if kind in ("View", "Pointer", "TensorMap"):
            offsets[name] = layout[name][1]
        elif name in values:
            record[name] = values[name]
        if kind == "View" and name in at:
            strides = [stride // at[name].itemsize for stride in at[name].strides]
            record[name]["batch"] = [0] * (abi.BATCH_AXES - 1) + strides[:1]
            inner = ("column",) if name == "page_table" else ("head", "row", "column")
            for field, stride in zip(inner, strides[1:], strict=False):
                record[name][field] = stride
    return record.tobytes(), offsets


def decode_arrays(call: DecodeCall, out: Any, lse: Any) -> dict[str, Any]:
    """Arrays of a call by field name."""
    names = ("q", "k", "v", "lengths", "page_table", "k_new", "v_new")
    arrays = {**{name: getattr(call, name) for name in names}, **call.operands, "out": out, "lse": lse}
    return {name: x for name, x in arrays.items() if x is not None}


def places_of(call: DecodeCall, arrays: Mapping[str, Any]) -> tuple[tuple[str, Placed], ...]:
    """Places of the arrays by field name; operands are broadcast to the scores' axes."""
    shape = call.problem.score_shape
    return tuple(
        (name, placed(x, shape if name in call.operands else x.shape, address(x))) for name, x in arrays.items()
    )
