"""Calls as users make them, and the kernels that each asks for: planned without arrays' values and without a device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cuflash import decode_plan, decode_problem, plan
from cuflash.api import statistics_shapes
from cuflash.backends import described_device
from cuflash.errors import UnsupportedError
from cuflash.gradients import gradient_sums, may_be_rounded
from cuflash.modifiers import (
    ALiBi,
    BlockMask,
    Documents,
    Dropout,
    KeyLengths,
    MaskModifier,
    Modifier,
    Packed,
    Scales,
    ScoreModifier,
    Sinks,
)
from cuflash.problem import canonical, describe
from cuflash.variant import Variant
from tests import written_cases
from tests.cases import DTYPES, NARROW

ARCHS = (75, 80, 86, 89, 90, 100, 120)
HEAD_SIZES = (
    (16, 16),
    (32, 32),
    (40, 40),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    (512, 512),
)
HEADS, LENGTH = 2, 80


@dataclass(frozen=True)
class Entry:
    """One call that users make."""

    arch: int
    dtype: str
    head_dim: int
    head_dim_v: int
    options: str = "plain"
    aligned: bool = True
    seq_q: int = LENGTH
    seq_k: int = LENGTH
    deterministic: bool = False
    backend: str | None = None  # those of every device, unless another is asked for
    statistics: tuple[str, ...] = ()  # these of the forward; the backward is left out
    precision: str | None = None
    mode: str = ""  # "jvp" or "hvp" for forward mode or second derivatives in place of forward and backward

    def variants(self) -> Iterator[Variant]:
        """The kernels of its forward and backward."""
        dtype = (DTYPES | NARROW)[self.dtype]
        narrow = self.dtype in NARROW
        keywords = options(self.options, DTYPES["bfloat16"] if narrow else dtype, self.seq_q, self.seq_k)
        if narrow:
            keywords["scales"] = Scales()
        if "packed" in keywords:
            keywords["layout"] = "bshd"
        given = (self.dtype, self.dtype, self.dtype, "bfloat16" if narrow else self.dtype)
        q, k, v, out = (
            replace(self, dtype=dtype_of).place((n, HEADS, d) if "packed" in keywords else (1, HEADS, n, d))
            for dtype_of, n, d in zip(
                given,
                (self.seq_q, self.seq_k, self.seq_k, self.seq_q),
                (self.head_dim, self.head_dim, self.head_dim_v, self.head_dim_v),
                strict=True,
            )
        )
        call = describe(q, k, v, precision=self.precision, **keywords)
        q, k, v, out = call.q, call.k, call.v, canonical(out, call.problem.layout)
        problem, device = call.problem, described_device(self.arch)
        requested = self.backend or ("mma" if dtype.itemsize <= 2 else "simt")
        lse = np.zeros(problem.lse_shape, problem.accumulator)
        terms = gradient_sums(problem, call.operands, self.deterministic, may_be_rounded(problem))
        sums = {f"d{name}": np.zeros(shape, dtype_of) for name, (shape, dtype_of) in terms.items()}
        if self.mode:
            tangents = {"q": q, "k": k, "v": v} | {n: x for n, x in call.operands.items() if n in ("bias", "sinks")}
            results = {"out": out, "out_tangent": out, "lse": lse, "lse_tangent": lse}
            if self.mode == "hvp":
                tangents |= {"dout": out, "dlse": lse}
                results |= {"dout": out, "dlse": lse, "dq": q, "dk": k, "dv": v, **sums}
            make = plan.plan_hvp if self.mode == "hvp" else plan.plan_jvp
            places = plan.places_of(problem, plan.jvp_arrays(call, tangents, **results))
            yield from (step.variant for step in make(problem, device, places, requested).steps)
            return
        shapes = statistics_shapes(problem)
        statistics = {name: np.zeros(shapes[name], problem.accumulator) for name in self.statistics}
        forward = plan.forward_arrays(call, out, lse, **statistics)
        backward = plan.backward_arrays(call, out=out, lse=lse, dout=out, dq=q, dk=k, dv=v, **sums)
        forward, backward = (plan.places_of(problem, arrays) for arrays in (forward, backward))
        steps = plan.plan_forward(problem, device, forward, requested).steps
        if self.statistics or narrow:
            yield from (step.variant for step in steps)
            return
        try:
            steps += plan.plan_backward(problem, device, backward, self.deterministic, requested).steps
        except UnsupportedError:
            if (
                self.backend is None
            ):  # the backward of wgmma leaves some modifiers to mma, mma's that of float32 to simt
                raise
        for step in steps:
            yield step.variant

    def place(self, shape: tuple[int, ...]) -> np.ndarray:
        """Array whose rows can or cannot be moved in 16-byte pieces."""
        dtype = (DTYPES | NARROW)[self.dtype]
        if not self.aligned:
            return np.zeros((*shape[:-1], shape[-1] + 1), dtype)[..., 1:]
        piece = 16 // dtype.itemsize
        raw = np.zeros(int(np.prod(shape)) + piece, dtype)
        start = -raw.ctypes.data % 16 // dtype.itemsize
        return raw[start:][: int(np.prod(shape))].reshape(shape)


def options(name: str, dtype: np.dtype, seq_q: int, seq_k: int = LENGTH) -> dict:
    """Keywords of a call by name."""
    statistics = np.float64 if dtype == np.float64 else np.float32
    own = WRITTEN[statistics]
    single = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (9000, 3)},
        "softcap": {"softcap": 2.0},
        "bias": {"bias": np.ones((1, HEADS, seq_q, seq_k), dtype)},
        "shared-bias": {"bias": np.ones((1, 1, 1, seq_k), dtype)},
        "heads-bias": {"bias": np.ones((1, 1, seq_q, seq_k), dtype)},
        "mask": {"mask": np.ones((seq_q, seq_k), bool)},
        "alibi": {"modifiers": (ALiBi(np.ones(HEADS, statistics)),)},
        "lengths": {"modifiers": (KeyLengths(np.ones(1, np.int32)),)},
        "documents": {"modifiers": (Documents(np.ones(seq_q, np.int32), np.ones(seq_k, np.int32)),)},
        "blocks": {"modifiers": (BlockMask(np.ones((-(-seq_q // 16), seq_k // 16), bool), 16),)},
        "sinks": {"modifiers": (Sinks(np.ones(HEADS, statistics)),)},
        "dropout": {"modifiers": (Dropout(0.1, 1, 2),)},
        "negative-scale": {"scale": -1.0},
        "written": {"modifiers": own},
        "function": {"modifiers": FUNCTION[statistics]},
        "packed": {"packed": Packed(np.array([0, seq_q], np.int32), np.array([0, seq_k], np.int32), 1)},
    }
    parts = [single[part] for part in TOGETHER.get(name, (name,))]
    modifiers = tuple(m for part in parts for m in part.get("modifiers", ()))
    return {**{key: x for part in parts for key, x in part.items()}, "modifiers": modifiers}


def written(real: type) -> tuple[Modifier, ...]:
    """Expressions of what takes the most registers: slopes, gradients that need the score, tables, and masks."""
    heat, table, ids = np.ones(HEADS, real), np.ones((HEADS, 160), real), np.ones((1, 1), np.int32)
    text = "c * tanh(s * heat[h] / c) + table[h, q - k + 79]"
    return (
        ScoreModifier(text, c=3.0, heat=heat, table=table, gradients=("heat", "table")),
        ScoreModifier("s - slope[h] * abs(q + seq_k - seq_q - k)", slope=heat),
        MaskModifier("ids[b, q] == ids[b, k] and (q - k) % 3 != 1", ids=ids),
    )


def decode_variants(
    arch: int,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    name: str = "plain",
    *,
    rows: int = 4,
    paged: bool = False,
    appends: bool = False,
    aligned: bool = True,
    backend: str | None = None,
) -> Iterator[Variant]:
    """The kernel of a decode call with so many packed rows of queries, of the options that it takes."""
    entry = Entry(arch, dtype, head_dim, head_dim_v, aligned=aligned)
    heads_k, capacity = HEADS, 64
    chosen = {key: x for key, x in options(name, DTYPES[dtype], 1).items() if key not in ("bias", "mask")}
    of_heads = np.ones(heads_k * rows, np.float64 if dtype == "float64" else np.float32)
    chosen["modifiers"] = tuple(type(m)(of_heads) for m in chosen["modifiers"] if isinstance(m, (ALiBi, Sinks)))
    keys = (5, heads_k, 16) if paged else (2, heads_k, capacity)
    arrays = {
        "q": entry.place((2, heads_k * rows, 1, head_dim)),
        "k_cache": entry.place((*keys, head_dim)),
        "v_cache": entry.place((*keys, head_dim_v)),
    }
    if appends:
        new = {"k_new": (2, heads_k, 1, head_dim), "v_new": (2, heads_k, 1, head_dim_v)}
        arrays |= {key: entry.place(shape) for key, shape in new.items()}
    table = np.zeros((2, capacity // 16), np.int32) if paged else None
    given = dict.fromkeys(("scale", "window", "softcap")) | {"causal": False, "layout": "bhsd"} | chosen
    call = decode_problem.describe(arrays, np.zeros(2, np.int32), table, **given)
    out = entry.place((2, heads_k * rows, 1, head_dim_v))
    lse = np.zeros(call.problem.lse_shape, call.problem.accumulator)
    places = decode_plan.places_of(call, decode_plan.decode_arrays(call, out, lse))
    for step in decode_plan.plan_decode(call.decode, described_device(arch), places, backend).steps:
        yield step.variant


#: kept, because what is compiled for an expression is known as long as something has it
WRITTEN = {real: written(real) for real in (np.float32, np.float64)}
FUNCTION = {
    real: written_cases.chains((1, HEADS, LENGTH, LENGTH), real)["function"] for real in (np.float32, np.float64)
}
RANGES = ("causal", "window", "lengths")
#: several options as one
TOGETHER = {
    "everything": ("causal", "window", "softcap", "bias", "mask", "alibi", "lengths"),
    "shared-everything": ("causal", "window", "softcap", "shared-bias", "mask", "alibi", "lengths"),
    "sparse-causal": ("causal", "documents", "blocks"),
    "sparse-everything": ("causal", "window", "softcap", "bias", "mask", "alibi", "lengths", "documents", "blocks"),
    "written-everything": ("causal", "window", "softcap", "bias", "mask", "alibi", "lengths", "written"),
    "packed-causal": ("packed", "causal"),
    "sinks-causal": ("sinks", "causal"),
    "sinks-everything": ("sinks", "causal", "window", "softcap", "bias", "mask", "alibi", "lengths"),
    "packed-sinks": ("packed", "causal", "sinks"),
    "dropout-causal": ("dropout", "causal"),
    "dropout-everything": ("dropout", "sinks", "causal", "window", "softcap", "bias", "mask", "alibi", "lengths"),
    "packed-dropout": ("packed", "causal", "dropout"),
    "packed-everything": ("packed", "causal", "window", "softcap", "alibi"),
    "ranges": RANGES,
    "ranges-documents": (*RANGES, "documents"),
    "ranges-blocks": (*RANGES, "blocks"),
    "ranges-bias": (*RANGES, "bias"),
    "ranges-mask": (*RANGES, "mask"),
    "ranges-heads-bias": (*RANGES, "heads-bias"),
    "mask-heads-bias": ("mask", "heads-bias"),
    "ranges-alibi": (*RANGES, "alibi"),
}
OPTIONS = (
    "plain",
    "causal",
    "window",
    "softcap",
    "bias",
    "mask",
    "alibi",
    "lengths",
    "documents",
    "blocks",
    "packed",
    "packed-causal",
    "packed-everything",
    "sparse-causal",
    "negative-scale",
    "written",
    "everything",
    "sparse-everything",
)
