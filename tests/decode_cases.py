"""Decode calls as data: caches that are NaN wherever no key is, in pages or not, and what each call must return.

What is expected comes from plain attention of each entry of the batch over the keys that it has.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash import decode_problem, problem
from cuflash.modifiers import ALiBi, Modifier, Sinks
from cuflash.problem import canonical
from tests.cases import DTYPES, STRIDES
from tests.tolerance import Expectation

UNUSED = -77  # what a table holds where the lengths do not reach


@dataclass(frozen=True)
class DecodeCase:
    """One call; `lengths` are keys in the cache, `seq_new` more are appended to each entry."""

    name: str = "case"
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = (45, 17)
    heads_q: int = 4
    heads_k: int = 2
    seq_q: int = 1
    seq_new: int = 0
    head_dim: int = 16
    head_dim_v: int | None = None
    capacity: int = 64
    page_size: int = 0
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi: str | None = None
    sinks: str | None = None
    strides: str = "contiguous"
    layout: str = "bhsd"
    values: float = 1.0
    full: bool = False  # no lengths are passed: all positions are taken

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"

    @property
    def sizes(self) -> str:
        """Head sizes and queries, as a name."""
        return f"{self.head_dim}x{self.head_dim_v or self.head_dim}-{self.seq_q}"

    def make(self, seed: int = 0) -> "Made":
        """Its arrays, in the layout, and what they must become."""
        rng = np.random.default_rng(seed)
        dtype, head_dim_v = DTYPES[self.dtype], self.head_dim_v or self.head_dim
        batch = len(self.lengths)
        totals = [min(n + self.seq_new, self.capacity) for n in self.lengths]

        def numbers(*shape: int) -> np.ndarray:
            return (self.values * rng.standard_normal(shape)).astype(dtype)

        q = numbers(batch, self.heads_q, self.seq_q, self.head_dim)
        keys = [numbers(self.heads_k, n, self.head_dim) for n in totals]
        values = [numbers(self.heads_k, n, head_dim_v) for n in totals]
        table = self.table(rng, totals) if self.page_size else None
        pages = 3 + int(max(table.max(initial=0), 0)) if table is not None else batch
        rows = self.page_size or self.capacity

        def cache(parts: list[np.ndarray], until: list[int]) -> np.ndarray:
            width = self.head_dim if parts is keys else head_dim_v
            x = np.full((pages, self.heads_k, rows, width), np.nan, dtype)
            for entry, (part, n) in enumerate(zip(parts, until, strict=True)):
                for position in range(n):
                    page, row = divmod(position, rows)
                    x[entry if table is None else table[entry, page], :, row] = part[:, position]
            return x

        new = {}
        if self.seq_new:
            for name, parts, width in (("k_new", keys, self.head_dim), ("v_new", values, head_dim_v)):
                x = np.full((batch, self.heads_k, self.seq_new, width), np.nan, dtype)
                for entry, (part, n) in enumerate(zip(parts, self.lengths, strict=True)):
                    x[entry, :, : totals[entry] - n] = part[:, n:]
                new[name] = x
        place, cached = STRIDES[self.strides], list(self.lengths)
        arrays = {
            name: place(np.ascontiguousarray(canonical(x, self.layout)))
            for name, x in {"q": q, "k_cache": cache(keys, cached), "v_cache": cache(values, cached), **new}.items()
        }
        shapes = {"h": (self.heads_q,), "bh": (batch, self.heads_q)}
        statistics = np.float64 if self.dtype == "float64" else np.float32
        chain: list[Modifier] = []
        if self.alibi:
            chain.append(ALiBi(rng.uniform(0.05, 0.5, shapes[self.alibi]).astype(statistics)))
        if self.sinks:
            chain.append(Sinks(rng.standard_normal(shapes[self.sinks]).astype(statistics)))
        options = {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "modifiers": tuple(chain),
            "layout": self.layout,
        }
        lengths = None if self.full else np.array(self.lengths, np.int32)
        after = (cache(keys, totals), cache(values, totals))
        return Made(self, arrays, lengths, table, options, q, keys, values, after)

    def table(self, rng: np.random.Generator, totals: list[int]) -> np.ndarray:
        """Pages in random order, no number in the places that are not used."""
        columns = -(-self.capacity // self.page_size)
        used = [-(-n // self.page_size) for n in totals]
        order = iter(rng.permutation(sum(used) + 2))
        table = np.full((len(totals), columns), UNUSED, np.int32)
        for entry, n in enumerate(used):
            table[entry, :n] = [next(order) for _ in range(n)]
        return table


@dataclass(frozen=True)
class Made:
    """The arrays of a case."""

    case: DecodeCase
    arrays: dict[str, np.ndarray]
    lengths: np.ndarray | None
    table: np.ndarray | None
    options: dict[str, Any]
    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    after: tuple[np.ndarray, np.ndarray]  # caches when the call has run, (batch or pages, heads_k, seq, dim)

    def call(self) -> decode_problem.DecodeCall:
        """The described call."""
        return decode_problem.describe(self.arrays, self.lengths, self.table, **self.options)

    def modifiers(self, place: Callable[[np.ndarray], Any]) -> tuple[Modifier, ...]:
        """The modifiers, their arrays placed somewhere else."""
        attributes = [(m, *m.operand_attributes().values()) for m in self.options["modifiers"]]
        return tuple(replace(m, **{name: place(getattr(m, name))}) for m, name in attributes)

    def expectations(self) -> list[Expectation]:
        """What each entry must return."""
        found = []
        for entry, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            options = {**self.options, "layout": "bhsd"}
            options["modifiers"] = self.modifiers(lambda x, entry=entry: x[entry] if x.ndim == 2 else x)
            found.append(Expectation(problem.describe(self.q[entry], k, v, **options)))
        return found

    def check(self, out: np.ndarray, lse: np.ndarray | None) -> float:
        """Judge results with the axes (batch, heads_q, seq_q, ...); the largest error in units of what is allowed."""
        ratios = [0.0]
        for entry, expectation in enumerate(self.expectations()):
            try:
                ratios.append(expectation.check_forward(out[entry], None if lse is None else lse[entry]))
            except AssertionError as error:
                raise AssertionError(f"entry {entry} of {self.case}: {error}") from error
        return max(ratios)

    def check_caches(self, k_cache: np.ndarray, v_cache: np.ndarray) -> None:
        """Fail unless the new keys stand where they belong, and nothing else has changed; arrays in the layout."""
        for name, found, want in zip(("k_cache", "v_cache"), (k_cache, v_cache), self.after, strict=True):
            bits = [
                np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (canonical(found, self.case.layout), want)
            ]
            wrong = np.argwhere(bits[0] != bits[1])
            assert not wrong.size, f"{name}{wrong[0].tolist()} differs after {self.case}, and {len(wrong) - 1} more"


PAGE_SIZES = (1, 7, 16, 64, 256)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"causal": False},
    "causal": {"seq_q": 3},
    "not-causal": {"seq_q": 3, "causal": False},
    "window": {"seq_q": 3, "window": (11, 0)},
    "window-ahead": {"seq_q": 4, "window": (5, 1), "causal": False},
    "window-zero": {"seq_q": 3, "window": (0, 0), "causal": False},
    "window-huge": {"seq_q": 3, "window": (2**40, 2**40)},
    "window-right": {"seq_q": 4, "window": (None, -1), "causal": False},
    "window-open": {"seq_q": 6, "window": (None, 2), "causal": False, "lengths": (3, 60)},
    "softcap": {"softcap": 2.0, "seq_q": 2},
    "alibi": {"alibi": "h", "seq_q": 2},
    "alibi-by-entry": {"alibi": "bh", "window": (20, None)},
    "sinks": {"sinks": "h", "seq_q": 2},
    "sinks-by-entry": {"sinks": "bh", "alibi": "h", "lengths": (33, 0)},
    "negative-scale": {"scale": -1.5},
    "append": {"seq_q": 2, "seq_new": 2},
    "append-more": {"seq_q": 1, "seq_new": 5, "causal": False},
    "append-in-pages": {"seq_q": 2, "seq_new": 3, "page_size": 7},
    "full": {"full": True, "lengths": (64, 64)},
    "everything": {
        "seq_q": 3,
        "seq_new": 3,
        "page_size": 16,
        "window": (30, 2),
        "softcap": 3.0,
        "alibi": "bh",
        "layout": "bshd",
    },
}


def named(name: str, **changes: Any) -> DecodeCase:
    """The case of an option."""
    return replace(DecodeCase(name), **{**OPTIONS[name], **changes})
