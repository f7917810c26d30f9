"""The calls that every backend is tested on: shapes, options, values and strides, as data.

`SMALL` fits a slow machine such as the emulator; `FULL` sweeps lengths, head sizes, groups, options, layouts, strides
and values.  Both are float32: `in_dtypes` multiplies them.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import problem
from cuflash.modifiers import ALiBi, BlockMask, Documents, Dropout, KeyLengths, Modifier, Scales, Sinks
from cuflash.problem import canonical

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
#: of inputs alone, with scales
NARROW = {"float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class Case:
    """One call.

    `mask`, `bias`, `blocks` and `sinks` say their axes by letters: "qk" is (seq_q, seq_k), "b11k" (*batch, 1, 1, seq_k);
    those of `blocks` count blocks.  `documents` is a key of `DOCUMENTS`.  `strides` is for q, k, v, dout, mask and bias alike.
    `scales` of q, k and v, and `out_dtype`, are for 8-bit dtypes; of the letters "h" are the heads that the array has.
    """

    name: str
    dtype: str = "float32"
    batch: tuple[int, ...] = (2,)
    heads_q: int = 2
    heads_k: int = 2
    seq_q: int = 33
    seq_k: int = 45
    head_dim: int = 16
    head_dim_v: int | None = None
    scale: float | None = None
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    mask: str | None = None
    mask_density: float = 0.6
    bias: str | None = None
    alibi: str | None = None
    lengths: tuple[int, ...] | str | None = None
    documents: str | None = None
    blocks: str | None = None
    block_size: tuple[int, int] = (16, 16)
    block_density: float = 0.4
    sinks: str | None = None
    scales: tuple[str | float | None, str | float | None, str | float | None] = (None, None, None)
    out_dtype: str = "bfloat16"
    dropout: float | None = None
    dlse: bool = False
    values: str = "normal"
    strides: str = "contiguous"
    layout: str = "bhsd"

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"

    def make(self, seed: int = 0) -> dict[str, Any]:
        """Arrays q, k, v, dout, dlse (or None) in the case's layout, and `options`: keywords for the call."""
        rng = np.random.default_rng(seed)
        dtype, head_dim_v = (DTYPES | NARROW)[self.dtype], self.head_dim_v or self.head_dim
        narrow = self.dtype in NARROW
        stored = DTYPES[self.out_dtype] if narrow else dtype  # of what is not q, k or v
        statistics = np.float64 if self.dtype == "float64" else np.float32
        q, k, v = VALUES[self.values](
            rng,
            (*self.batch, self.heads_q, self.seq_q, self.head_dim),
            (*self.batch, self.heads_k, self.seq_k, self.head_dim),
            (*self.batch, self.heads_k, self.seq_k, head_dim_v),
        )
        dout = rng.standard_normal((*self.batch, self.heads_q, self.seq_q, head_dim_v))
        arrays = {
            name: self.place(canonical(x, self.layout).astype(stored if name == "dout" else dtype, order="C"))
            for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()
        }
        dlse = rng.standard_normal((*self.batch, self.heads_q, self.seq_q)).astype(statistics) if self.dlse else None
        modifiers: list[Modifier] = []
        if self.alibi is not None:
            slopes = {"h": (self.heads_q,), "bh": (*self.batch, self.heads_q), "1": (1,)}[self.alibi]
            modifiers.append(ALiBi(rng.uniform(0.05, 0.5, slopes).astype(statistics)))
        if self.lengths is not None:
            random = self.lengths == "random"
            lengths = (
                rng.integers(0, self.seq_k + 1, self.batch) if random else np.broadcast_to(self.lengths, self.batch)
            )
            modifiers.append(KeyLengths(lengths.astype(np.int32)))
        if self.documents is not None:
            ids = DOCUMENTS[self.documents]
            modifiers.append(Documents(*(ids(rng, self.batch, n).astype(np.int32) for n in (self.seq_q, self.seq_k))))
        if self.blocks is not None:
            counts = [-(-n // size) for n, size in zip((self.seq_q, self.seq_k), self.block_size, strict=True)]
            shape = replace(self, seq_q=counts[0], seq_k=counts[1]).axes(self.blocks)
            modifiers.append(BlockMask(rng.random(shape) < self.block_density, self.block_size))
        if self.sinks is not None:
            logits = 1.5 * rng.standard_normal(self.axes(self.sinks)) + 1
            modifiers.append(Sinks(logits.astype(statistics)))
        if self.dropout is not None:
            seed_of_call, offset = (int(rng.integers(1 << 63)) * 2 + 1 for _ in range(2))
            modifiers.append(Dropout(self.dropout, seed_of_call, offset))
        options = {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "mask": self.mask and self.place(rng.random(self.axes(self.mask)) < self.mask_density),
            "bias": self.bias and self.place(rng.standard_normal(self.axes(self.bias)).astype(stored)),
            "modifiers": tuple(modifiers),
            "layout": self.layout,
        }
        if narrow:
            options["scales"] = self.make_scales(rng)
        return {**arrays, "dlse": dlse, "options": options}

    def call(self, seed: int = 0) -> tuple[problem.Call, np.ndarray, np.ndarray | None]:
        """The described call, and dout (axes (*batch, heads_q, seq_q, head_dim_v)) and dlse for its backward."""
        made = self.make(seed)
        call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
        return call, canonical(made["dout"], self.layout), made["dlse"]

    def make_scales(self, rng: np.random.Generator) -> Scales:
        """Scales about 1 of the heads, numbers as they are."""
        logit_scale, value_scale, arrays = 1.0, 1.0, {}
        for name, given in zip("qkv", self.scales, strict=True):
            if isinstance(given, str):
                axes = replace(self, heads_q=self.heads_q if name == "q" else self.heads_k).axes(given)
                arrays[f"{name}_scale"] = rng.uniform(0.5, 1.5, axes).astype(np.float32)
            elif given is not None and name == "v":
                value_scale = given
            elif given is not None:
                logit_scale *= given
        return Scales(self.out_dtype, value_scale, logit_scale, **arrays)

    def axes(self, letters: str) -> tuple[int, ...]:
        sizes = {"h": (self.heads_q,), "q": (self.seq_q,), "k": (self.seq_k,), "b": self.batch, "1": (1,)}
        return tuple(n for letter in letters for n in sizes[letter])

    def place(self, x: np.ndarray) -> np.ndarray:
        return STRIDES[self.strides](x)


# ---- documents -------------------------------------------------------------------------------------------------------


def packed(rng: np.random.Generator, batch: tuple[int, ...], seq: int) -> np.ndarray:
    """Documents of random lengths, one after the other, each batch entry its own."""
    return np.sort(rng.integers(-2, 3, (*batch, seq)), axis=-1)


DOCUMENTS: dict[str, Any] = {
    "packed": packed,
    "packed alike": lambda rng, batch, seq: packed(rng, (), seq),
    "halves": lambda rng, batch, seq: np.arange(seq) * 2 // max(seq, 1),
    "mixed": lambda rng, batch, seq: rng.integers(0, 3, (*batch, seq)),
    "one": lambda rng, batch, seq: np.zeros(1, int),
    "strangers": lambda rng, batch, seq: np.full((seq,), rng.integers(1 << 30)),
    "extreme ids": lambda rng, batch, seq: np.sort(rng.choice([-(1 << 31), -1, (1 << 31) - 1], seq)),
}

# ---- values ----------------------------------------------------------------------------------------------------------


def normal(factor: float) -> Any:
    return lambda rng, *shapes: tuple(factor * rng.standard_normal(shape) for shape in shapes)


def constant(value: float) -> Any:
    return lambda rng, *shapes: tuple(np.full(shape, value) for shape in shapes)


def shifted(logit: float) -> Any:
    """Every logit near `logit`, which is negative: with the default scale a mean of -a against a gives -a²·√d."""

    def make(rng: np.random.Generator, *shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        mean = np.sqrt(-logit / np.sqrt(shapes[0][-1]))
        q, k, v = (rng.standard_normal(shape) for shape in shapes)
        return q - mean, k + mean, v

    return make


def late(rng: np.random.Generator, *shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """The last key outweighs all others: the running maximum grows in the last tile."""
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    k[..., -1:, :] += 3
    return q + 1, k, v


VALUES: dict[str, Any] = {
    "normal": normal(1),
    "x3": normal(3),
    "x30": normal(30),
    "constant": constant(0.5),
    "logits about -200": shifted(-200),
    "logits about -1e5": shifted(-1e5),
    "dominant key late": late,
    "133120": constant(133120),
}


# ---- strides ---------------------------------------------------------------------------------------------------------


def surroundings(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that no result may come from: NaN, for a mask True."""
    return np.ones(shape, bool) if dtype.kind == "b" else np.full(shape, np.nan, dtype)


def padded(x: np.ndarray) -> np.ndarray:
    """A view that starts one element into a larger array."""
    inner = (slice(1, -2),) * (x.ndim > 1) + (slice(1, -1),)
    outer = surroundings((*x.shape[:-2], *(n + 3 for n in x.shape[-2:-1]), x.shape[-1] + 2), x.dtype)
    outer[(..., *inner)] = x
    return outer[(..., *inner)]


def every_second(x: np.ndarray) -> np.ndarray:
    """Every second element of the last axis."""
    outer = surroundings((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    outer[..., ::2] = x
    return outer[..., ::2]


def reversed_axes(x: np.ndarray) -> np.ndarray:
    """Negative strides along every axis."""
    backwards = (slice(None, None, -1),) * x.ndim
    return x[backwards].copy()[backwards]


def last_first(x: np.ndarray) -> np.ndarray:
    """The last axis is the slowest in memory."""
    return np.moveaxis(np.moveaxis(x, -1, 0).copy(), 0, -1)


def repeated(x: np.ndarray) -> np.ndarray:
    """The first value of every axis but the last two, with stride 0."""
    first = x[(slice(0, 1),) * (x.ndim - 2)] if x.ndim > 2 else x
    return np.broadcast_to(first, x.shape)


STRIDES: dict[str, Any] = {
    "contiguous": lambda x: x,
    "padded": padded,
    "every second": every_second,
    "reversed": reversed_axes,
    "last axis first": last_first,
    "stride 0": repeated,
}


# ---- the lists -------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "scale-negative": {"scale": -0.3},
    "scale-zero": {"scale": 0.0},
    "causal": {"causal": True},
    "causal-top-left": {"causal": "top_left"},
    "causal-more-queries": {"causal": True, "seq_q": 45, "seq_k": 33},
    "causal-top-left-more-queries": {"causal": "top_left", "seq_q": 45, "seq_k": 33},
    "window": {"window": (5, 3)},
    "window-left": {"window": (7, None)},
    "window-right-zero": {"window": (None, 0)},
    "window-zero": {"window": (0, 0)},
    "window-huge": {"window": (2**40, 2**40)},
    "window-top-left": {"window": (4, 2), "causal": "top_left"},
    "softcap": {"softcap": 1.5},
    "mask": {"mask": "bhqk"},
    "mask-sparse": {"mask": "hqk", "mask_density": 0.03},
    "mask-key": {"mask": "b11k"},
    "mask-query": {"mask": "q1", "mask_density": 0.5},
    "bias": {"bias": "bhqk"},
    "bias-head": {"bias": "1hqk"},
    "bias-batch": {"bias": "b1qk"},
    "bias-matrix": {"bias": "qk"},
    "bias-key": {"bias": "b11k"},
    "bias-row": {"bias": "hq1"},
    "bias-number": {"bias": "1"},
    "alibi": {"alibi": "h"},
    "alibi-causal": {"alibi": "bh", "causal": True},
    "alibi-top-left": {"alibi": "1", "causal": "top_left"},
    "lengths": {"lengths": "random"},
    "lengths-zero": {"lengths": (0, 45)},
    "lengths-causal": {"lengths": (20, 41), "causal": True},
    "documents": {"documents": "packed"},
    "documents-causal": {"documents": "packed alike", "causal": True, "dlse": True},
    "documents-mixed": {"documents": "mixed", "window": (20, 9)},
    "documents-one": {"documents": "one"},
    "documents-strangers": {"documents": "strangers"},
    "documents-extreme": {"documents": "extreme ids", "heads_q": 4, "lengths": (45, 20)},
    "blocks": {"blocks": "bhqk"},
    "blocks-causal": {"blocks": "hqk", "causal": True, "dlse": True, "heads_q": 4},
    "blocks-uneven": {"blocks": "b1qk", "block_size": (7, 33), "block_density": 0.5},
    "blocks-single": {"blocks": "qk", "block_size": (1, 1), "block_density": 0.3},
    "blocks-huge": {"blocks": "h11", "block_size": (1 << 40, 1 << 30), "block_density": 0.5},
    "blocks-row": {"blocks": "hq1", "block_density": 0.5},
    "blocks-few": {"blocks": "hqk", "block_density": 0.1},
    "sparse-everything": {
        "heads_q": 4,
        "causal": True,
        "window": (30, None),
        "softcap": 3.0,
        "mask": "b1qk",
        "bias": "h1k",
        "alibi": "h",
        "lengths": (37, 45),
        "documents": "packed alike",
        "blocks": "bhqk",
        "block_density": 0.7,
        "dlse": True,
    },
    "lse-gradient": {"dlse": True, "causal": True},
    "groups": {"heads_q": 6, "heads_k": 2, "causal": True},
    "groups-window-bias": {"heads_q": 4, "heads_k": 1, "window": (6, 2), "bias": "hqk"},
    "wide-values": {"head_dim": 24, "head_dim_v": 40},
    "narrow-values": {"head_dim": 40, "head_dim_v": 8},
    "softcap-bias": {"softcap": 2.0, "bias": "bhqk"},
    "everything": {
        "heads_q": 4,
        "scale": 0.4,
        "causal": True,
        "window": (30, None),
        "softcap": 3.0,
        "mask": "b1qk",
        "bias": "h1k",
        "alibi": "h",
        "lengths": (37, 45),
        "dlse": True,
        "head_dim_v": 12,
    },
    "everything-mostly-hidden": {
        "causal": "top_left",
        "softcap": 1.0,
        "mask": "hqk",
        "mask_density": 0.1,
        "bias": "qk",
        "lengths": (3, 45),
        "dlse": True,
    },
}

#: What acts behind the scores, in tests of its own.
SINKS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": "h", "dlse": True},
    "sinks-batch": {"sinks": "bh", "heads_q": 4, "causal": True, "seq_q": 45, "seq_k": 33, "dlse": True},
    "sinks-number": {"sinks": "1", "scale": -0.3, "lengths": (0, 45)},
    "sinks-everything": {**OPTIONS["everything"], "sinks": "b1"},
}

DROPOUT: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3, "dlse": True},
    "dropout-causal": {"dropout": 0.75, "heads_q": 4, "causal": True, "seq_q": 45, "seq_k": 33, "dlse": True},
    "dropout-few": {"dropout": 2**-16, "scale": -0.3, "window": (9, 30), "batch": (2, 1, 2)},
    "dropout-everything": {**OPTIONS["everything"], "sinks": "b1", "dropout": 0.5, "documents": "packed alike"},
}

#: Every option once, at lengths that cross the edge of a 64-wide tile.
SMALL: list[Case] = [
    replace(Case(name), **{"batch": (2,), "seq_q": 70, "seq_k": 83, "head_dim": 16, **options})
    for name, options in OPTIONS.items()
]

LENGTHS = (0, 1, 2, 7, 16, 31, 64, 65, 129, 200)
HEAD_DIMS = (1, 2, 3, 7, 8, 16, 24, 33, 64, 80, 96, 128, 160, 192, 256)

FULL: list[Case] = [
    *(Case(name, **options) for name, options in OPTIONS.items()),
    *(
        Case(
            f"{q}x{k}{'-causal' * causal}", batch=(), heads_q=1, heads_k=1, seq_q=q, seq_k=k, head_dim=8, causal=causal
        )
        for q, k, causal in product(LENGTHS, LENGTHS, (False, True))
    ),
    *(Case(f"dim-{d}", batch=(1,), head_dim=d, head_dim_v=d, causal=True, seq_q=19, seq_k=21) for d in HEAD_DIMS),
    *(Case(f"dim-{d}-value-{d_v}", head_dim=d, head_dim_v=d_v) for d, d_v in ((64, 1), (1, 64), (192, 128), (5, 9))),
    *(
        Case(f"group-{n}", batch=(1,), heads_q=2 * n, heads_k=2, seq_q=n_q, causal=True, window=(9, None), bias="hqk")
        for n, n_q in product((1, 2, 3, 5, 6, 7, 8, 12), (1, 20))
    ),
    *(
        Case(f"{values}{'-causal' * causal}", values=values, causal=causal, dlse=causal)
        for values, causal in product(VALUES, (False, True))
    ),
    Case("133120-one-key", values="133120", seq_q=1, seq_k=1, head_dim=64),
    *(
        Case(f"{strides}-{layout}", strides=strides, layout=layout, mask="bhqk", bias="b1qk", causal=True, dlse=True)
        for strides, layout in product(STRIDES, ("bhsd", "bshd"))
    ),
    *(
        Case(
            f"batch-{'x'.join(map(str, batch))}",
            batch=batch,
            bias="b1qk",
            mask="h1k",
            lengths="random",
            seq_q=9,
            seq_k=11,
        )
        for batch in ((), (1,), (3, 2), (2, 1, 3), (0,), (40,))
    ),
    Case("many-tiny", batch=(300,), heads_q=4, heads_k=2, seq_q=3, seq_k=5, head_dim=4, mask="b1qk", bias="hqk"),
    Case("long", batch=(1,), heads_q=1, heads_k=1, seq_q=300, seq_k=1100, causal=True, dlse=True),
]


def in_dtypes(cases: list[Case], dtypes: Any = tuple(DTYPES)) -> list[Case]:
    """The cases in each dtype, without those whose values a dtype cannot hold."""
    return [
        replace(case, dtype=dtype)
        for case, dtype in product(cases, dtypes)
        if not (case.values == "133120" and dtype == "float16")
    ]
