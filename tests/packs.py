"""Packed calls that the backends are tested on, and the judge of their results: each segment as a call of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from cuflash import arrays, problem, reference, segments
from cuflash.modifiers import ALiBi, Dropout, Modifier, Sinks
from cuflash.problem import Call
from tests.cases import DTYPES, STRIDES
from tests.tolerance import Expectation, assert_close, assert_zero


@dataclass(frozen=True)
class Pack:
    """One packed call; `behind` rows on either side belong to no segment."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...] = ()  # as lengths_q
    behind: tuple[int, int] = (0, 0)
    dtype: str = "float32"
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    scale: float | None = None
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    dropout: float | None = None
    dlse: bool = False
    strides: str = "contiguous"

    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        q, k = self.lengths_q, self.lengths_k or self.lengths_q
        return tuple(np.array([0, *accumulate(lengths)], np.int32) for lengths in (q, k))  # type: ignore[return-value]

    def make(self, seed: int = 0) -> dict[str, Any]:
        """Arrays q, k, v, dout, dlse (or None), offsets, and `options`: keywords for the call."""
        rng = np.random.default_rng(seed)
        dtype, head_dim_v = DTYPES[self.dtype], self.head_dim_v or self.head_dim
        statistics = np.float64 if self.dtype == "float64" else np.float32
        offsets = self.offsets()
        total_q, total_k = (int(x[-1]) + n for x, n in zip(offsets, self.behind, strict=True))
        shapes = {
            "q": (total_q, self.heads_q, self.head_dim),
            "k": (total_k, self.heads_k, self.head_dim),
            "v": (total_k, self.heads_k, head_dim_v),
            "dout": (total_q, self.heads_q, head_dim_v),
        }
        made = {n: STRIDES[self.strides](rng.standard_normal(s).astype(dtype)) for n, s in shapes.items()}
        chain: tuple[Modifier, ...] = (
            (ALiBi(rng.uniform(0.05, 0.5, self.heads_q).astype(statistics)),) if self.alibi else ()
        )
        if self.sinks:
            chain += (Sinks(rng.standard_normal(self.heads_q).astype(statistics)),)
        if self.dropout is not None:
            chain += (Dropout(self.dropout, 1 << 40, 3),)
        options = {name: getattr(self, name) for name in ("scale", "causal", "window", "softcap")}
        return {
            **made,
            "dlse": rng.standard_normal((self.heads_q, total_q)).astype(statistics) if self.dlse else None,
            "offsets": offsets,
            "options": {**options, "modifiers": chain},
        }

    def call(self, seed: int = 0) -> tuple[Call, np.ndarray, np.ndarray | None]:
        """The described call, and dout (axes (heads_q, total_q, head_dim_v)) and dlse for its backward."""
        made = self.make(seed)
        q, k, v, options = made["q"], made["k"], made["v"], made["options"]
        packed = arrays.native_packed(*made["offsets"], None, None, len(q), len(k), arrays.HOST)
        call = problem.describe_packed(q, k, v, packed, **options)
        return call, made["dout"].swapaxes(0, 1), made["dlse"]


class Judge:
    """What a packed call must return; arrays have the axes (heads, total, dim)."""

    def __init__(self, call: Call, dout: Any = None, dlse: Any = None) -> None:
        self.parts = [
            (
                part,
                Expectation(
                    part.call,
                    None if dout is None else dout[..., part.rows, :],
                    None if dlse is None else dlse[..., part.rows],
                ),
            )
            for part in segments.cut(call)
        ]
        self.rows, self.columns = (
            slice(max((getattr(part, side).stop for part, _ in self.parts), default=0), None)
            for side in ("rows", "columns")
        )

    def check_forward(self, out: Any, lse: Any = None) -> None:
        """Check an output and, if given, a log-sum-exp."""
        for part, expectation in self.parts:
            expectation.check_forward(out[..., part.rows, :], None if lse is None else lse[..., part.rows])
        assert_zero(out[..., self.rows, :], True, "out behind the last segment")
        assert lse is None or np.isneginf(lse[..., self.rows]).all()

    def check_backward(self, gradients: Any) -> None:
        """Check a `Gradients`; those of operands are sums over the segments."""
        references = [reference.backward(part.call, e.dout, e.dlse) for part, e in self.parts]
        for (part, expectation), own in zip(self.parts, references, strict=True):
            at = {"dq": part.rows, "dk": part.columns, "dv": part.columns}
            rows = {name: getattr(gradients, name)[..., positions, :] for name, positions in at.items()}
            shared = {name: getattr(own, name).astype(getattr(gradients, name).dtype) for name in own._fields[3:]}
            expectation.check_backward(gradients._replace(**rows, **shared))
        for name in gradients._fields[3:] if self.parts else ():
            want = sum(getattr(own, name) for own in references)
            plain = sum(e.plain[name] for _, e in self.parts)
            floor = sum(e.floors[name] for _, e in self.parts)
            assert_close(getattr(gradients, name), want, plain, name, floor)
        behind = {"dq": self.rows, "dk": self.columns, "dv": self.columns}
        for name, at in behind.items():
            assert_zero(getattr(gradients, name)[..., at, :], True, f"{name} behind the last segment")


def alone(call: Call, number: int) -> tuple[Call, segments.Segment]:
    """One segment as a packed call of its own, and where it lies in the pack."""
    part = list(segments.cut(call))[number]
    packed = next(m for m in call.problem.modifiers if m.name == "packed")
    chain = tuple(replace(m, count=1) if m is packed else m for m in call.problem.modifiers)
    offsets = {
        "segments_q": np.array([0, part.call.problem.seq_q], np.int32)[None, :, None],
        "segments_k": np.array([0, part.call.problem.seq_k], np.int32)[None, :, None],
    }
    single = replace(part.call.problem, modifiers=chain)
    return replace(part.call, problem=single, operands={**part.call.operands, **offsets}), part
