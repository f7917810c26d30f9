"""Plan: one call on a GPU as steps, packed arguments and workspace; planned once per problem and strides, then replayed.

Planning touches neither CuPy nor a device: launch.py runs the steps on a GPU, tests run the same steps in the emulator.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash import abi, tensormap
from cuflash.backends import Device, select
from cuflash.errors import UnsupportedError
from cuflash.gradients import score_operands
from cuflash.modifiers import REGISTRY, Bias, Scaled, Scales
from cuflash.place import Placed, address, compact, merged_batch, placed
from cuflash.problem import Call, Problem, operand_title
from cuflash.schedules import order, rows, split, split_wgmma, wgmma
from cuflash.schedules.base import Config
from cuflash.schedules.lists import SegmentLists
from cuflash.schedules.mma import BackwardConvert
from cuflash.schedules.steps import ForwardValues
from cuflash.tensormap import TensorMap
from cuflash.variant import ITEMSIZE, Variant

LOG2_E = 1.4426950408889634
MAX_BLOCKS = (1 << 31) - 1  # of grid.x
MAX_STEP = (1 << 31) - 1  # bytes between neighbouring rows or columns of an operand
WORD = 8  # bytes of a word of a sum in fixed point
BOUNDS_BYTES = 16  # of a batch entry: Bounds of kernels/attention/sums.cuh
MAX_ENCODED = 1024  # tensor maps that a plan keeps; memory pools give the same addresses again and again
_POINTER = struct.Struct("=Q")


@dataclass(frozen=True)
class Step:
    """One launch."""

    variant: Variant
    blocks: int

    @property
    def config(self) -> Config:
        return self.variant.config  # type: ignore[no-any-return]

    @property
    def argument_bytes(self) -> int:
        """Of the argument record: the kernel's own part of the plan's."""
        variant = self.variant
        accumulator = "float64" if variant.real == "double" else "float32"
        return abi.record(variant.direction, variant.modifiers, accumulator, variant.maps, variant.statistics).itemsize


@dataclass(frozen=True, eq=False)  # a plan is itself: it is made once
class Plan:
    """Launches that share one argument record, and the workspace they need in bytes."""

    problem: Problem
    device: Device
    backend: str
    reasons: Mapping[str, str]
    steps: tuple[Step, ...]
    template: bytes
    offsets: Mapping[str, int]  # of the pointers and tensor maps, by field name
    maps: tuple[TensorMap, ...] = ()
    statistics_bytes: int = 0
    dq_sum_bytes: int = 0
    turns_bytes: int = 0
    bounds_bytes: int = 0
    passes_bytes: Mapping[str, int] = field(default_factory=dict)  # what first passes write
    #: what of the workspace is 0 when the steps begin, by field name: first byte and size; the rest may hold anything
    zeroed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()  # gradients of operands that need not be 0 before
    #: operands whose gradients were offered in the type of the result, and are summed in memory (gradients.py)
    widened: frozenset[str] = frozenset()
    encoded: dict[tuple[str, int], bytes] = field(default_factory=dict)  # tensor maps by array and address

    @property
    def main(self) -> Step:
        """The launch that does most of the work."""
        found = (step for step in self.steps if hasattr(step.config, "block_k"))
        return next(step for step in found if not getattr(step.config, "is_beside", False))

    def workspace(self) -> dict[str, int]:
        """Bytes by field name, without those that are not needed."""
        needed = {"statistics": self.statistics_bytes, "dq_sum": self.dq_sum_bytes, "turns": self.turns_bytes}
        needed |= {"bounds": self.bounds_bytes, **self.passes_bytes}
        return {name: size for name, size in needed.items() if size}

    def arguments(
        self, pointers: Mapping[str, int], encode: Callable[[TensorMap, int], bytes] = tensormap.encode
    ) -> bytearray:
        """The argument record with these addresses and a call's own numbers; those not named are null."""
        record = bytearray(self.template)
        for name, pointer in pointers.items():
            _POINTER.pack_into(record, self.offsets[name], pointer)
        for tensor_map in self.maps:
            key = (tensor_map.array, pointers[tensor_map.memory or tensor_map.array])
            encoded = self.encoded.get(key)
            if encoded is None:
                if len(self.encoded) >= MAX_ENCODED:
                    self.encoded.clear()
                encoded = self.encoded[key] = encode(tensor_map, key[1])
            at = self.offsets[f"{tensor_map.array}_map"]
            record[at : at + abi.MAP_BYTES] = encoded
        return record


# ---- planning -----------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def plan_forward(
    problem: Problem, device: Device, places: tuple[tuple[str, Placed], ...], requested: str | None = None
) -> Plan:
    """Plan of the forward for arrays at these places; those of statistics among them say which are computed."""
    at = dict(places)
    backend, reasons = select(problem, device, at, requested=requested)
    axes = len(problem.out_shape)
    copied = "qk" if problem.scales else "qkv"  # the others come in steps
    aligned = all(at[name].aligned(16, axes) for name in copied)
    kept = {name: True for name in ("maximum", "entropy") if name in at}  # of each row, in the forward's own pass
    schedule = backend.schedule_of(problem)
    if schedule is wgmma:
        config: Any = wgmma.forward(problem, device.shared_limit, aligned, wgmma.bias_form(problem, at))
    else:
        config = schedule.forward(problem, device.shared_limit, aligned, **kept)
    names = chain_names(problem)
    variant = variant_of(problem, names, config)
    steps = [Step(variant, grid(config, problem, device))]
    passes_bytes: Mapping[str, int] = {}
    zeroed: Mapping[str, tuple[int, int]] = {}
    of_segments: Mapping[str, int] = {}
    other: Any = None
    if problem.is_packed and schedule is wgmma:
        lists = SegmentLists("forward", of_keys=False, tile=config.block_q)
        if found := wgmma.forward_of_long(problem, device.shared_limit):
            other, (long, most) = config, found
            lists = replace(lists, long_tile=long.block_q, most_keys=most)
            config = replace(long, segment_list=1)
            variant = variant_of(problem, names, config)
            steps.insert(0, Step(variant, grid(config, problem, device)))
        steps[:0] = steps_of(problem, names, lists)
        passes_bytes = {"segment_lists": lists.bytes_of(problem)}
        of_segments = {"listed_tiles": lists.room(problem)}
    if planes := getattr(config, "planes", 0):
        before = split.splitting(problem, device, planes, aligned)
        rest = split.rest(problem, device.shared_limit, aligned, config)
        steps = [*steps_of(problem, split.names(names), before), *steps, *steps_of(problem, names, rest)]
        passes_bytes, zeroed = before.workspace(problem), before.zeroed(problem)
    of_values: dict[str, int] = {}
    if problem.scales:  # the second product wants the values in another order
        count = config.step_count(problem)
        of_heads = problem.batch_size * problem.heads_k * count
        first = ForwardValues(config.head_dim_v)
        steps.insert(0, Step(Variant(first.kernel, problem.dtype, (Scales.name,), first), first.blocks_of(of_heads)))
        passes_bytes = {"value_steps": first.bytes_of(of_heads)}
        of_values = {"step_count": count, "value_words": int(at["v"].aligned(4, axes))}
    if "column_sums" in at:  # a pass over the scores that follows, because it needs lse
        columns = schedule.columns(problem, device.shared_limit, all(at[n].aligned(16, axes) for n in "qk"))
        steps.append(Step(Variant(columns.kernel, problem.dtype, names, columns), columns.blocks(problem)))
    ahead, ahead_bytes, ahead_places = looking_ahead(problem, names, "forward")
    planned, passes_bytes = checked(*ahead, *steps), {**passes_bytes, **ahead_bytes}
    values = {
        **common_values(problem, getattr(config, "bias_apart", False)),
        "out_vectors": vectors(at["out"], axes),
        **order.of_forward(problem, config, device.cache_bytes),
        **of_values,
        **of_segments,
    }
    with_statistics = any(name in at for name in abi.STATISTICS)
    template, offsets = pack("forward", problem, at | ahead_places, values, variant.maps, with_statistics)
    maps = tensor_maps(variant, problem, at, other)
    return Plan(
        problem,
        device,
        backend.name,
        reasons,
        planned,
        template,
        offsets,
        maps,
        passes_bytes=passes_bytes,
        zeroed=zeroed,
    )


def steps_of(problem: Problem, names: tuple[str, ...], *configs: Config) -> list[Step]:
    """Launches of kernels with these modifiers."""
    return [Step(variant_of(problem, names, c), c.blocks(problem)) for c in configs]


def looking_ahead(
    problem: Problem, names: tuple[str, ...], direction: str
) -> tuple[list[Step], dict[str, int], dict[str, Placed]]:
    """What kernels that pass over hidden tiles need to know before they start: launches, bytes by field name, and places."""
    if problem.modifier("documents") is None:
        return [], {}, {}
    first = rows.DocumentBounds(direction)
    return steps_of(problem, names, first), first.bytes_of(problem), first.places(problem)


def variant_of(problem: Problem, names: tuple[str, ...], config: Config) -> Variant:
    """A kernel with these modifiers; what it multiplies may be planes in place of the arrays' elements."""
    elements = getattr(config, "elements", problem.dtype)
    return Variant(config.kernel, elements, names, config, "" if elements == problem.out_dtype else problem.out_dtype)


@lru_cache(maxsize=4096)
def plan_jvp(
    problem: Problem, device: Device, places: tuple[tuple[str, Placed], ...], requested: str | None = None
) -> Plan:
    """Plan of the forward mode for arrays at these places; tangents that are not among them are 0."""
    at = dict(places)
    backend, reasons = select(problem, device, at, requested=requested, offer="jvp")
    axes = len(problem.out_shape)
    moving = [name for n in "qkv" for name in (n, f"{n}_tangent") if name in at]
    config = backend.schedule.jvp(problem, device.shared_limit, all(at[name].aligned(16, axes) for name in moving))
    names = chain_names(problem)
    step = Step(Variant(config.kernel, problem.dtype, names, config), grid(config, problem, device))
    ahead, ahead_bytes, ahead_places = looking_ahead(problem, names, "jvp")
    values = {
        **common_values(problem),
        "out_vectors": vectors(at["out"], axes),
        "out_tangent_vectors": vectors(at["out_tangent"], axes),
        "section": order.section(problem, device.cache_bytes),
    }
    template, offsets = pack("jvp", problem, at | ahead_places, values)
    steps = checked(*ahead, step)
    return Plan(problem, device, backend.name, reasons, steps, template, offsets, passes_bytes=ahead_bytes)


@lru_cache(maxsize=4096)
def plan_hvp(
    problem: Problem, device: Device, places: tuple[tuple[str, Placed], ...], requested: str | None = None
) -> Plan:
    """Plan of second derivatives, behind a forward mode: statistics, then the blocks that own keys and those that own queries."""
    at = dict(places)
    backend, reasons = select(problem, device, at, requested=requested, offer="hvp")
    axes = len(problem.out_shape)
    moving = [name for n in ("q", "k", "v", "dout") for name in (n, f"{n}_tangent") if name in at]
    aligned = all(at[name].aligned(16, axes) for name in moving)
    names = chain_names(problem)
    configs = [rows.hvp_delta(problem)]
    configs += [backend.schedule.hvp(problem, device.shared_limit, aligned, owns_keys) for owns_keys in (True, False)]
    ahead, ahead_bytes, ahead_places = looking_ahead(problem, names, "hvp")
    steps = checked(*ahead, *steps_of(problem, names, *configs))
    values = {
        **common_values(problem),
        "section": order.section(problem, device.cache_bytes),
        **{f"{name}_vectors": vectors(at[name], axes) for name in ("dq", "dk", "dv")},
    }
    template, offsets = pack("hvp", problem, at | ahead_places, values)
    lines = problem.batch_size * problem.heads_q * problem.seq_q
    statistics_bytes = 4 * np.dtype(problem.accumulator).itemsize * lines
    return Plan(
        problem,
        device,
        backend.name,
        reasons,
        steps,
        template,
        offsets,
        statistics_bytes=statistics_bytes,
        passes_bytes=ahead_bytes,
    )


def grid(config: Config, problem: Problem, device: Device) -> int:
    """Blocks of a launch; persistent ones are as many as the device runs at once."""
    blocks = config.blocks(problem)
    return min(blocks, device.multiprocessors) if getattr(config, "persistent", False) else blocks


def tensor_maps(
    variant: Variant, problem: Problem, at: Mapping[str, Placed], other: Any = None
) -> tuple[TensorMap, ...]:
    """Maps of the arrays that a kernel reaches through them; in front of them those of another kernel's config."""
    if getattr(variant.config, "planes", 0) and variant.maps:
        return split_wgmma.maps(problem, variant.config)
    names = [name for name in variant.maps if not name.startswith(tensormap.OTHER)]
    own = tuple(map_of(name, problem, at[name], variant.config) for name in names)
    if other is None:
        return own
    others = (map_of(name, problem, at[name], other) for name in names)
    return (*(replace(of, array=tensormap.OTHER + of.array, memory=of.array) for of in others), *own)


def map_of(name: str, problem: Problem, place: Placed, config: Any) -> TensorMap:
    """The map of one array of a kernel."""
    rows = config.box_rows[name]
    if name == "dbias":
        return tensormap.of_bias(problem, place, rows, 0, name, problem.dtype)
    if name == "bias":
        return tensormap.of_bias(problem, place, rows, config.block_k if rows == 1 else 0)
    return tensormap.describe(name, problem, place, rows)


@lru_cache(maxsize=4096)
def plan_backward(
    problem: Problem,
    device: Device,
    places: tuple[tuple[str, Placed], ...],
    deterministic: bool = False,
    requested: str | None = None,
    batch_invariant: bool = False,
) -> Plan:
    """Plan of the backward: statistics, the main kernel, and where sums need it their conversion.

    Whether the gradient of a bias is a sum depends on the length of the batch, and the tile on that unless `batch_invariant`.
    """
    at = dict(places)
    offer = "in_turns" if deterministic else ""
    backend, reasons = select(problem, device, at, requested=requested, backward=True, offer=offer)
    axes = len(problem.out_shape)
    itemsize = ITEMSIZE[problem.dtype]
    aligned = all(at[name].aligned(16, axes) for name in ("q", "k", "v", "dout"))
    schedule = backend.schedule_of(problem)
    form = wgmma.bias_form(problem, at) if schedule is wgmma and not batch_invariant else ""

    def chosen(dbias: Placed | None) -> Any:
        if schedule is wgmma:
            return wgmma.backward(problem, device.shared_limit, aligned, form, dbias, deterministic)
        return schedule.backward(problem, device.shared_limit, aligned)

    main, widened = chosen(at.get("dbias")), False
    if "dbias" in at and at["dbias"].itemsize == itemsize < 4:
        sums = at["dbias"].is_broadcast(problem.score_shape)
        widened = sums and not getattr(main, "dbias_apart", False)
        if widened:
            at["dbias"] = at["dbias"].widened(2 * WORD if deterministic else np.dtype(problem.accumulator).itemsize)
            main = chosen(at["dbias"])
        elif not sums:
            main = replace(main, stores_gradients=True)
    delta_aligned = all(at[name].aligned(16, axes) for name in ("out", "dout"))
    has_planes = getattr(main, "has_planes", False)
    delta = rows.delta(problem, itemsize, main.block_q, delta_aligned, main.statistics_rows, has_planes)
    apart = getattr(main, "bias_apart", False)
    delta = replace(delta, bias_apart=apart)
    padded = delta.rows_padded(problem)
    lines = problem.batch_size * problem.heads_q * padded
    counters = heads_in_turns = 0
    returns_bias, dbias_apart = getattr(main, "returns_bias", False), getattr(main, "dbias_apart", False)
    # Else it is made of the blocks of dbias, or of scores of its own.
    sums_dq = not (returns_bias or getattr(main, "dq_apart", False))
    if deterministic and lines:  # without a query nothing is summed
        words = words_of_sums(problem, at)
        main = schedule.in_turns(main, words) if sums_dq else replace(main, sum_digits=words)
        delta = replace(delta, sum_digits=words)
        if sums_dq:
            delta = replace(delta, key_tile=main.block_k, turns=main.dq_chunks)
            counters = 1 + lines // main.block_q * main.dq_chunks  # the first one counts blocks
            heads_in_turns = schedule.turns_section(problem, main)
    if (dbias_apart or getattr(main, "persistent", False)) and not counters:
        delta, counters = replace(delta, counts=True), 1
    convert = schedule.convert(problem, main)
    if problem.is_packed and isinstance(convert, BackwardConvert):
        delta = replace(delta, sum_warps=convert.warps, sum_warp_columns=convert.dq_warp_columns)
    names = chain_names(problem)
    steps = [Step(variant_of(problem, names, c), grid(c, problem, device)) for c in (delta, main, convert)]
    if dbias_apart:
        sum_of_bias = wgmma.sum_of_bias(problem, main, device.shared_limit, at["dbias"])
        blocks = min(sum_of_bias.blocks(problem) * wgmma.biases(problem, at["dbias"]), device.multiprocessors)
        steps.insert(1, Step(variant_of(problem, names, sum_of_bias), blocks))  # it leaves turns as it finds them
    split_bytes: Mapping[str, int] = {}
    zeroed: Mapping[str, tuple[int, int]] = {}
    of_segments: Mapping[str, int] = {}
    if problem.is_packed and schedule is wgmma:
        lists = SegmentLists("backward", of_keys=True, tile=main.block_k)
        steps[:0] = steps_of(problem, names, lists)
        split_bytes = {"segment_lists": lists.bytes_of(problem)}
        of_segments = {"listed_tiles": lists.room(problem)}
    if planes := getattr(main, "planes", 0):
        before = split.splitting(problem, device, planes, aligned, backward=True, grouped=has_planes)
        rest = schedule.backward_rest(problem, device.shared_limit, aligned, main)
        rest = replace(rest, deterministic=main.deterministic, sum_digits=main.sum_digits)
        steps = [*steps_of(problem, split.names(names), before), *steps_of(problem, names, delta, main, rest, convert)]
        split_bytes, zeroed = before.workspace(problem), before.zeroed(problem)
    bounds_bytes = BOUNDS_BYTES * (problem.batch_size + 1) if main.sum_digits else 0
    if main.sum_digits:
        zeroed = {**zeroed, "bounds": (0, bounds_bytes)}
        around = rows.BackwardBounds(), rows.BackwardSums(main.sum_digits)
        before_all, after_all = steps_of(problem, names, *around)
        steps = [before_all, *steps, after_all]
    ahead, ahead_bytes, ahead_places = looking_ahead(problem, names, "backward")
    planned = checked(*ahead, *steps)
    variant = variant_of(problem, names, main)
    values = {
        **common_values(problem, apart),
        "rows_padded": padded,
        "dq_width": main.dq_width,
        "section": order.section(problem, device.cache_bytes, backward=True, turns=heads_in_turns),
        **{f"{name}_vectors": vectors(at[name], axes) for name in ("dq", "dk", "dv")},
        **of_segments,
    }
    template, offsets = pack("backward", problem, at | ahead_places, values, variant.maps)
    real = np.dtype(problem.accumulator).itemsize
    return Plan(
        problem,
        device,
        backend.name,
        reasons,
        planned,
        template,
        offsets,
        tensor_maps(variant, problem, at),
        statistics_bytes=2 * real * lines,
        dq_sum_bytes=real * lines * main.dq_width if sums_dq else 0,
        turns_bytes=4 * counters,
        bounds_bytes=bounds_bytes,
        passes_bytes={**split_bytes, **ahead_bytes},
        zeroed=zeroed,
        overwritten=frozenset({"dbias"} if returns_bias or dbias_apart else ()),
        widened=frozenset({"bias"} if widened else ()),
    )


def words_of_sums(problem: Problem, at: Mapping[str, Placed]) -> int:
    """Words of a sum of an operand's gradient, as the caller laid them out (gradients.py, gradient_sums); 0 for numbers."""
    sizes = {at[f"d{name}"].itemsize for name in score_operands(problem.modifiers)}
    return max(sizes, default=0) // WORD if sizes - {np.dtype(problem.accumulator).itemsize} else 0


def chain_names(problem: Problem) -> tuple[str, ...]:
    """Names of the modifiers that are compiled in.

    Raw products can stand for scores only while a larger product is a larger score: other scales compile the scaling in.
    """
    names = tuple(m.name for m in problem.modifiers)
    scored = any(m.kind == "score" for m in problem.modifiers)
    return names if scored or problem.scale > 0 else (Scaled.name, *names)


def common_values(problem: Problem, bias_apart: bool = False) -> dict[str, float | int]:
    """Scalar fields that every kernel has; scores may be made without a bias."""
    left_out = {Bias.name} if bias_apart else set()
    scored = any(REGISTRY[name].kind == "score" for name in set(chain_names(problem)) - left_out)
    values: dict[str, float | int] = {
        "batch_size": problem.batch_size,
        "heads_q": problem.heads_q,
        "heads_k": problem.heads_k,
        "group": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "scale": problem.scale,
        # the exponent is 2^(score · softmax_scale): scores are raw products unless a modifier wants logits
        "softmax_scale": LOG2_E * (1 if scored else problem.scale),
    }
    for modifier in problem.modifiers:
        values.update(modifier.values(problem))
    return values


def vectors(place: Placed, axes: int) -> int:
    """Whether the rows of a result may be written 16 bytes at a time."""
    return int(place.aligned(16, axes))


def pack(
    direction: str,
    problem: Problem,
    at: Mapping[str, Placed],
    values: Mapping[str, float | int],
    maps: tuple[str, ...] = (),
    statistics: bool = False,
) -> tuple[bytes, dict[str, int]]:
    """The argument record without addresses, and where the addresses go."""
    names = chain_names(problem)
    for modifier in (REGISTRY[name] for name in names):
        for kind, name in modifier.fields:
            for operand in (name, f"d{name}"):
                if kind == "View" and operand in at:
                    check_operand(operand, at[operand])
    dtype = abi.record(direction, names, problem.accumulator, maps, statistics)
    record = np.zeros((), dtype)
    sizes, strides = merged_batch(problem.batch, {n: p.strides[: len(problem.batch)] for n, p in at.items()})
    record["batch_sizes"] = sizes
    offsets = {}
    layout: Mapping[str, Any] = dtype.fields or {}
    for kind, name in abi.fields(direction, names, maps, statistics):
        if kind in ("View", "Pointer", "u64", "TensorMap"):
            offsets[name] = layout[name][1]
        elif name in values:
            record[name] = values[name]
        if kind == "View" and name in at:
            place = at[name]
            inner = [s // place.itemsize for s in place.strides[len(problem.batch) :]]
            record[name]["batch"] = [s // place.itemsize for s in strides[name]]
            record[name]["head"], record[name]["row"] = inner[0], inner[1]
            record[name]["column"] = inner[2] if len(inner) > 2 else 0
    return record.tobytes(), offsets


def check_operand(name: str, place: Placed) -> None:
    """Raise if kernels cannot step from one row or column of an operand to the next (attention/index.cuh, element_at)."""
    for axis, stride in zip(("queries", "keys"), place.strides[-2:], strict=True):
        if not -MAX_STEP <= stride <= MAX_STEP:
            raise UnsupportedError(
                f"{operand_title(name)}: neighbours along its axis of {axis} lie {stride} bytes apart, and kernels step over "
                f"{MAX_STEP} at most; pass an array that lies closer together, such as a contiguous copy"
            )


def is_mergeable(problem: Problem, arrays: Mapping[str, Any]) -> bool:
    """Whether the kernels can walk the batch axes of these arrays as they lie."""
    if sum(n > 1 for n in problem.batch) <= abi.BATCH_AXES:
        return True
    strides = {name: place.strides[: len(problem.batch)] for name, place in places_of(problem, arrays)}
    try:
        merged_batch(problem.batch, strides)
    except UnsupportedError:
        return False
    return True


def checked(*steps: Step) -> tuple[Step, ...]:
    """The steps; raises if the grid cannot hold the blocks of one."""
    for step in steps:
        if step.blocks > MAX_BLOCKS:
            raise UnsupportedError(
                f"{step.variant.entry} would need {step.blocks} blocks, the grid holds {MAX_BLOCKS}; split the batch"
            )
    return steps


# ---- arrays of a call ---------------------------------------------------------------------------------------------------
def places_of(problem: Problem, arrays: Mapping[str, Any]) -> tuple[tuple[str, Placed], ...]:
    """Places of the arrays by field name; operands are broadcast to the scores' axes."""
    found = []
    for name, array in arrays.items():
        shape = array.shape
        if len(shape) > len(problem.score_shape):  # sums in fixed point, whose last axis are the words of one
            place = placed(array[..., 0], problem.score_shape, address(array))
            found.append((name, replace(place, itemsize=array.dtype.itemsize * shape[-1])))
            continue
        of = name.removesuffix("_tangent").removeprefix("d")
        if len(shape) == len(problem.score_shape) and of not in ("q", "k", "v", "out"):
            shape = problem.score_shape
        found.append((name, placed(array, shape, address(array))))
    return tuple(found)


def compacted(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, those of elements of the call's dtype in one place whatever batch they were cut from.

    Tiles and backends are chosen by dtype, sizes, and how these arrays lie; nothing else that a row's bits depend on, so that
    with this they do not depend on what else is in the batch.
    """
    names = ("q", "k", "v", "out", "dout")
    found = {
        name: compact(x, problem.layout) if name.removesuffix("_tangent") in names else x for name, x in arrays.items()
    }
    bias = arrays.get("bias")
    if bias is not None and all(bias.strides):  # one that is broadcast lies the same in every batch
        found["bias"] = compact(bias, "bhsd")
    return found


def pointers_of(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Addresses of the arrays by field name."""
    return {name: address(array) for name, array in arrays.items()}


def arguments_of(call: Call, arrays: Mapping[str, Any]) -> dict[str, int]:
    """The same, and the numbers of the call itself."""
    return {**pointers_of(arrays), **call.numbers}


def forward_arrays(call: Call, out: Any, lse: Any, **statistics: Any) -> dict[str, Any]:
    """Arrays of a forward by field name; `statistics` are some of `abi.STATISTICS`."""
    arrays = {"q": call.q, "k": call.k, "v": call.v, "out": out, **call.operands, **statistics}
    return arrays if lse is None else {**arrays, "lse": lse}


def backward_arrays(call: Call, **arrays: Any) -> dict[str, Any]:
    """Arrays of a backward by field name; those that are None are left out."""
    given = {"q": call.q, "k": call.k, "v": call.v, **call.operands, **arrays}
    return {name: array for name, array in given.items() if array is not None}


def jvp_arrays(call: Call, tangents: Mapping[str, Any], **results: Any) -> dict[str, Any]:
    """Arrays of a forward mode by field name; `results` are out, out_tangent, lse and lse_tangent."""
    moving = {f"{name}_tangent": x for name, x in tangents.items()}
    return {"q": call.q, "k": call.k, "v": call.v, **call.operands, **moving, **results}


def hvp_arrays(call: Call, tangents: Mapping[str, Any], **arrays: Any) -> dict[str, Any]:
    """Arrays of second derivatives by field name; those that are None are left out."""
    return {name: x for name, x in jvp_arrays(call, tangents, **arrays).items() if x is not None}
