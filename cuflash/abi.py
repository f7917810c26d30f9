"""One field table for the kernels' only argument: its NumPy record and its C struct come from here, so they cannot differ.

A kernel takes one ``Params`` by value.  A ``View`` is an array of any strides; an axis that is broadcast has stride 0.
Tensor maps (tensormap.py) come last, so that kernels without them take the same record, cut short.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from cuflash.modifiers import REGISTRY

BATCH_AXES = 3  # leading axes are merged; more than this many that cannot be merged need a copy

#: strides in elements, in the order of the C struct
VIEW = np.dtype(
    [("data", "u8"), ("batch", "i8", (BATCH_AXES,)), ("head", "i8"), ("row", "i8"), ("column", "i8")], align=True
)

#: of a tensor map (CUDA driver API, CUtensorMap)
MAP_BYTES, MAP_ALIGNMENT = 128, 64

Fields = tuple[tuple[str, str], ...]

_SHAPE: Fields = (
    ("int[]", "batch_sizes"),
    ("int", "batch_size"),
    ("int", "heads_q"),
    ("int", "heads_k"),
    ("int", "group"),
    ("int", "seq_q"),
    ("int", "seq_k"),
    ("int", "head_dim"),
    ("int", "head_dim_v"),
    ("Real", "scale"),
    ("Real", "softmax_scale"),
)
_INPUTS: Fields = (("View", "q"), ("View", "k"), ("View", "v"), ("View", "out"), ("View", "lse"))
_GRADIENTS: Fields = (
    ("View", "dout"),
    ("View", "dlse"),
    ("View", "dq"),
    ("View", "dk"),
    ("View", "dv"),
    ("Pointer", "statistics"),
    ("Pointer", "dq_sum"),
    ("int", "rows_padded"),
    ("int", "dq_width"),
    ("int", "dq_vectors"),
    ("int", "dk_vectors"),
    ("int", "dv_vectors"),
)
#: of forward mode; a null one is 0, or not asked for
TANGENTS = ("q", "k", "v", "out", "lse")
_TANGENTS: Fields = (*(("View", f"{name}_tangent") for name in TANGENTS), ("int", "out_tangent_vectors"))
#: of second derivatives, where dq, dk and dv are tangents of these gradients
_HESSIAN: Fields = (
    *(("View", f"{name}{suffix}") for name in ("dout", "dlse") for suffix in ("", "_tangent")),
    *(("View", f"d{name}") for name in ("q", "k", "v")),
    ("Pointer", "statistics"),
    *(("int", f"d{name}_vectors") for name in ("q", "k", "v")),
)
#: null unless gradients of operands of the scores are summed in fixed point
_BOUNDS: Fields = (("Pointer", "bounds"),)
#: null unless dq is summed in turns, or blocks of the main kernel stay and count the tiles that they take
_TURNS: Fields = (("Pointer", "turns"),)
#: beside lse; a null one is not asked for.  Behind the modifiers' fields, so that kernels without them take the same record
STATISTICS = ("maximum", "entropy", "column_sums")
_STATISTICS: Fields = tuple(("View", name) for name in STATISTICS)
#: heads whose tiles are worked on side by side
_ORDER: Fields = (("int", "section"),)
#: what kernels that multiply float32 in planes of float16 keep between them, null for others; in front of the modifiers'
#: fields, so that those that look at no score are the same for all
_SPLIT: Fields = (("Pointer", "planes"), ("Pointer", "magnitudes"))
#: and tiles of each head, the last ones, that come behind those of all heads
_PERSISTENT: Fields = (("Pointer", "tile_counter"), ("int", "late"))
#: `parts` and `part_totals` hold results over parts of the keys, `arrivals` counts them
_DECODE: Fields = (
    ("View", "lengths"),
    ("View", "page_table"),
    ("View", "k_new"),
    ("View", "v_new"),
    ("Pointer", "parts"),
    ("Pointer", "part_totals"),
    ("Pointer", "arrivals"),
    ("int", "q_vectors"),
    ("int", "seq_new"),
    ("int", "page_size"),
    ("int", "pages"),
)
_C_TYPES = {"View": "View", "Pointer": "void*", "u64": "u64", "int": "int", "Real": "Real", "TensorMap": "TensorMap"}


@cache
def fields(direction: str, modifiers: tuple[str, ...], maps: tuple[str, ...] = (), statistics: bool = False) -> Fields:
    """The field table of a kernel; `modifiers` are names in chain order.

    `direction` is "forward", "backward", "jvp" (forward mode), "hvp" (second derivatives) or "decode"; `maps` are
    names of arrays that the kernel reaches through tensor maps; `statistics` adds the views of `STATISTICS`.
    """
    own: dict[str, Fields] = {"backward": _GRADIENTS, "jvp": _TANGENTS, "hvp": _TANGENTS + _HESSIAN}
    table = _INPUTS + own.get(direction, ()) + _SHAPE + (("int", "out_vectors"),)
    if direction in ("forward", "backward"):
        table += _SPLIT
    for name in modifiers:
        table += REGISTRY[name].fields
        if direction == "backward":
            table += tuple(("View", f"d{operand}") for operand in REGISTRY[name].differentiable)
        if direction in ("jvp", "hvp"):
            table += tuple(("View", f"{operand}_tangent") for operand in REGISTRY[name].movable)
        if direction == "hvp":
            table += tuple(("View", f"d{operand}") for operand in REGISTRY[name].movable)
    if direction == "backward" and any(REGISTRY[m].kind == "score" and REGISTRY[m].differentiable for m in modifiers):
        table += _BOUNDS
    if direction != "decode":
        table += _ORDER
    if direction == "backward":
        table += _TURNS
    elif direction == "decode":
        table += _DECODE
    elif maps:
        table += _PERSISTENT
    if statistics:
        table += _STATISTICS
    return table + tuple(("TensorMap", f"{name}_map") for name in maps)


@cache
def record(
    direction: str,
    modifiers: tuple[str, ...],
    accumulator: str,
    maps: tuple[str, ...] = (),
    statistics: bool = False,
) -> np.dtype[Any]:
    """The table as a NumPy record with C alignment."""
    types: dict[str, Any] = {"View": VIEW, "Pointer": "u8", "u64": "u8", "int": "i4", "Real": accumulator}
    layout: list[Any] = []
    for kind, name in fields(direction, modifiers, maps, statistics):
        if kind != "TensorMap":
            layout.append((name, "i4", (BATCH_AXES,)) if kind == "int[]" else (name, types[kind]))
    plain = np.dtype(layout, align=True)
    if not maps:
        return plain
    start = -(-plain.itemsize // MAP_ALIGNMENT) * MAP_ALIGNMENT
    names = list(plain.names or ())
    placed: Any = plain.fields
    return np.dtype(
        {
            "names": names + [f"{name}_map" for name in maps],
            "formats": [placed[name][0] for name in names] + [f"V{MAP_BYTES}"] * len(maps),
            "offsets": [placed[name][1] for name in names] + [start + MAP_BYTES * i for i in range(len(maps))],
            "itemsize": start + MAP_BYTES * len(maps),
        }
    )


def c_struct(direction: str, modifiers: Sequence[str], maps: tuple[str, ...] = (), statistics: bool = False) -> str:
    """The table as C text."""
    lines = [
        f"constexpr int kBatchAxes = {BATCH_AXES};",
        "struct View {  // an array: address, and strides in elements (0 where it is broadcast)",
        "  void* data;",
        "  i64 batch[kBatchAxes], head, row, column;",
        "};",
        f"struct alignas({MAP_ALIGNMENT}) TensorMap {{ u64 opaque[{MAP_BYTES // 8}]; }};",
        "struct Params {",
    ]
    for kind, name in fields(direction, tuple(modifiers), maps, statistics):
        lines.append(f"  int {name}[kBatchAxes];" if kind == "int[]" else f"  {_C_TYPES[kind]} {name};")
    return "\n".join([*lines, "};"])
