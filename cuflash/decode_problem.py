"""The description of one decode call and the only place that validates it: a few queries against a cache of keys.

A cache is contiguous, one row of positions for each entry of the batch, or paged: positions of an entry lie in pages of a
pool, and a table says in which.  Both are described by the `Problem` of full caches; how many positions of an entry are
taken stands in `lengths`, which may be on a device and is then not read here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuflash.errors import ArgumentError, ShapeError
from cuflash.modifiers import ALiBi, Modifier, Sinks, Softcap
from cuflash.problem import (
    MAX_SEQ,
    Call,
    Problem,
    canonical,
    check_array,
    check_dtypes,
    check_layout,
    dtype_name,
    finite,
    in_layout,
    operand,
    positions,
    shape_misfit,
    softcap_of,
    user_modifiers,
)


@dataclass(frozen=True)
class DecodeProblem:
    """One call without its arrays.  `problem.seq_k` is the capacity: the positions that an entry of the batch has."""

    problem: Problem
    seq_new: int = 0  # keys to append
    page_size: int = 0  # positions of a page; 0 where the cache is contiguous
    pages: int = 0  # of the pool

    def __str__(self) -> str:
        paged = f", {self.pages} pages of {self.page_size}" if self.page_size else ""
        return f"{self.problem}{paged}" + (f", {self.seq_new} new keys" if self.seq_new else "")


@dataclass(frozen=True)
class DecodeCall:
    """A problem and its native arrays; k, v, k_new and v_new have the axes (batch or pages, heads_k, seq, dim).

    `lengths` (batch,) and `page_table` (batch, pages of an entry) are int32; what a call does not have is None.
    """

    decode: DecodeProblem
    q: Any
    k: Any
    v: Any
    lengths: Any
    page_table: Any
    k_new: Any
    v_new: Any
    operands: Mapping[str, Any]

    @property
    def problem(self) -> Problem:
        return self.decode.problem


def describe(
    native: Mapping[str, Any],
    lengths: Any,
    page_table: Any,
    *,
    scale: float | None,
    causal: Any,
    window: Any,
    softcap: Any,
    modifiers: tuple[Modifier, ...],
    layout: Any,
) -> DecodeCall:
    """Validate the arguments; `native` holds q, k_cache, v_cache and, where keys are appended, k_new and v_new."""
    layout = check_layout(layout)
    for name, x in native.items():
        if name != "out" and x.ndim != 4:
            order = "heads, seq" if layout == "bhsd" else "seq, heads"
            first = "pages" if page_table is not None and name.endswith("cache") else "batch"
            raise ShapeError(
                f"{name} has shape {x.shape}: must have the 4 axes ({first}, {order}, head_dim) in layout {layout!r}; add "
                "an axis of length 1, or merge batch axes with reshape"
            )
    names = ("q", "k_cache", "v_cache")
    dtype = check_dtypes(native["q"], native["k_cache"], native["v_cache"], names)
    q, k, v = (canonical(native[name], layout) for name in names)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_k, head_dim_v = v.shape[1], v.shape[3]
    page_size = pages = 0
    if page_table is not None:
        page_size, pages = k.shape[2], k.shape[0]
        capacity = capacity_of_pages(native, page_table, batch, page_size, layout)
    else:
        capacity = k.shape[2]
    check_shapes(native, page_table, capacity, layout)
    seq_new = check_new(native, (batch, heads_k, head_dim, head_dim_v), dtype, layout)
    if lengths is not None:
        check_array("lengths", lengths, (batch,), "int32", "(batch,)")
    alignment, chain = positions(causal, window)
    if alignment == "top_left":
        raise ArgumentError(
            "causal='top_left': a decode call counts from the last key of each entry; use causal=True, or "
            "cuflash.attention with KeyLengths"
        )
    if softcap is not None:
        chain.append(Softcap(softcap_of(softcap, dtype)))
    chain.extend(modifiers)
    chain.sort(key=lambda m: m.order)
    problem = Problem(
        dtype=dtype,
        batch=(batch,),
        heads_q=heads_q,
        heads_k=heads_k,
        seq_q=seq_q,
        seq_k=capacity,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=head_dim**-0.5 if scale is None else finite("scale", scale, dtype),
        modifiers=tuple(m.bare() for m in chain),
        layout=layout,
    )
    return DecodeCall(
        DecodeProblem(problem, seq_new, page_size, pages),
        q,
        k,
        v,
        lengths,
        page_table,
        canonical(native["k_new"], layout) if seq_new else None,
        canonical(native["v_new"], layout) if seq_new else None,
        {name: operand(m, name, x, problem) for m in chain for name, x in m.arrays().items()},
    )


def check_modifiers(modifiers: Any) -> None:
    """Raise unless all of them are offered here."""
    for m in user_modifiers(modifiers):
        if not isinstance(m, (ALiBi, Sinks)):
            remedy = (
                "the lengths are an argument of their own: lengths="
                if m.name == "lengths"
                else "call cuflash.attention, which takes it, on the keys and values of contiguous caches"
            )
            raise ArgumentError(f"modifiers contains {m.title}: attention_decode takes ALiBi and Sinks only; {remedy}")


def capacity_of_pages(native: Mapping[str, Any], table: Any, batch: int, page_size: int, layout: str) -> int:
    """Positions that the pages of one entry have."""
    if table.ndim != 2 or table.shape[0] != batch:
        raise ShapeError(
            f"page_table has shape {table.shape}: must be (batch, pages of an entry) with the batch of q, {batch}; give "
            "entries with fewer pages any number in the places that they do not use"
        )
    if dtype_name(table.dtype) != "int32":
        raise ArgumentError(f"page_table has dtype {table.dtype}: must be int32; convert it with astype")
    if page_size < 1:
        raise ShapeError(
            f"k_cache has shape {native['k_cache'].shape}: pages must have at least 1 position in layout {layout!r}; is "
            "the layout the one you meant?"
        )
    capacity = int(table.shape[1]) * page_size
    if capacity > MAX_SEQ:
        raise ShapeError(
            f"page_table has {table.shape[1]} pages of {page_size} positions for each entry, more than the {MAX_SEQ} "
            "positions that are counted; give it fewer columns"
        )
    return capacity


def check_shapes(native: Mapping[str, Any], table: Any, capacity: int, layout: Any) -> None:
    """Raise unless q and the caches fit each other."""
    q, k, v = (canonical(native[name], layout).shape for name in ("q", "k_cache", "v_cache"))
    if table is not None:
        if k[0] != v[0]:
            raise ShapeError(
                f"k_cache has {k[0]} pages and v_cache {v[0]}: one page table serves both; make the pools equally long"
            )
        if k[2] != v[2]:
            raise ShapeError(f"pages of k_cache have {k[2]} positions and those of v_cache {v[2]}: must be as many")
        k, v = ((q[0], x[1], capacity, x[3]) for x in (k, v))
    if misfit := shape_misfit(q, k, v):
        reason, remedy = misfit
        shapes = ", ".join(f"{name} {native[name].shape}" for name in ("q", "k_cache", "v_cache"))
        order = "(batch, heads, seq, head_dim)" if layout == "bhsd" else "(batch, seq, heads, head_dim)"
        first = ", in caches pages instead of batch," if table is not None else ""
        raise ShapeError(f"{reason}: {shapes} with axes {order}{first} in layout {layout!r}; {remedy}")


def check_new(native: Mapping[str, Any], sizes: tuple[int, int, int, int], dtype: str, layout: Any) -> int:
    """How many keys are appended."""
    batch, heads_k, head_dim, head_dim_v = sizes
    given = [name for name in ("k_new", "v_new") if name in native]
    if not given:
        return 0
    if len(given) == 1:
        missing = "v_new" if given == ["k_new"] else "k_new"
        raise ArgumentError(f"{given[0]} is given and {missing} is not: every key needs a value; pass both or neither")
    seq_new: int = canonical(native["k_new"], layout).shape[2]
    for name, width in (("k_new", head_dim), ("v_new", head_dim_v)):
        shape = in_layout((batch, heads_k, seq_new, width), layout)
        order = "(batch, heads_k, seq_new, dim)" if layout == "bhsd" else "(batch, seq_new, heads_k, dim)"
        check_array(name, native[name], shape, dtype, order)
    return seq_new


# ---- lengths and tables whose values the host knows -------------------------------------------------------------------
def check_lengths(lengths: Any, capacity: int, seq_new: int) -> None:
    """Raise unless all lengths, on the host, leave room for the new keys."""
    limit = capacity - seq_new
    if limit < 0:
        raise ArgumentError(
            f"k_new has {seq_new} keys, the cache {capacity} positions for an entry; pass fewer or enlarge the cache"
        )
    for entry, length in enumerate(np.asarray(lengths).tolist()):
        if not 0 <= length <= limit:
            room = f" less the {seq_new} new keys" if seq_new else ""
            raise ArgumentError(
                f"lengths[{entry}] is {length}: must be from 0 to {limit}, the {capacity} positions of the cache{room}; "
                "enlarge the cache or drop keys"
            )


def check_pages(call: DecodeCall, lengths: Any, page_table: Any) -> None:
    """Raise unless all entries of the table, on the host, that the lengths reach are pages of the pool."""
    decode = call.decode
    taken = lengths_of(call, lengths)
    for entry, length in enumerate(taken):
        used = -(-length // decode.page_size)
        wrong = np.flatnonzero((page_table[entry, :used] < 0) | (page_table[entry, :used] >= decode.pages))
        if wrong.size:
            at = int(wrong[0])
            raise ArgumentError(
                f"page_table[{entry}, {at}] is {page_table[entry, at]}: must be from 0 to {decode.pages - 1}, the pool has "
                f"{decode.pages} pages, and entry {entry} uses its first {used}; correct the table or the length"
            )


def lengths_of(call: DecodeCall, lengths: Any) -> list[int]:
    """Keys of each entry, the new ones included, for lengths on the host; those out of range as kernels take them."""
    problem = call.problem
    cached = [problem.seq_k] * problem.batch[0] if lengths is None else np.asarray(lengths).tolist()
    return [min(min(max(int(n), 0), problem.seq_k) + call.decode.seq_new, problem.seq_k) for n in cached]


def integer_array(name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An int32 array of one on the host."""
    if x.dtype.kind not in "iu" and x.size:
        raise ArgumentError(f"{name} has dtype {x.dtype}: must be int32; convert it with astype")
    limits = np.iinfo(np.int32)
    if x.size and (x.min() < limits.min or x.max() > limits.max):
        wrong = x[(x < limits.min) | (x > limits.max)].flat[0]
        raise ArgumentError(f"{name} contains {operator.index(wrong)}: each must fit in int32")
    return x.astype(np.int32, copy=False)


# ---- entry by entry, on the host ---------------------------------------------------------------------------------------
def append(call: DecodeCall) -> None:
    """Write the new keys and values behind those of their entries."""
    cached = lengths_of(replace_new(call, 0), call.lengths)
    for entry, length in enumerate(cached):
        for row in range(min(call.decode.seq_new, call.problem.seq_k - length)):
            at = place_of(call, entry, length + row)
            call.k[at] = call.k_new[entry, :, row]
            call.v[at] = call.v_new[entry, :, row]


def place_of(call: DecodeCall, entry: int, position: int) -> tuple[Any, ...]:
    """Index of a position of an entry in the caches."""
    if call.page_table is None:
        return entry, slice(None), position
    page, row = divmod(position, call.decode.page_size)
    return int(call.page_table[entry, page]), slice(None), row


def entries(call: DecodeCall) -> Iterator[tuple[int, Call]]:
    """Each entry of the batch as a call of plain attention over the keys that it has, gathered from their pages."""
    problem = call.problem
    for entry, length in enumerate(lengths_of(call, call.lengths)):
        k, v = (gathered(call, x, entry, length) for x in (call.k, call.v))
        operands = {name: x[entry if x.shape[0] > 1 else 0] for name, x in call.operands.items()}
        yield entry, Call(replace(problem, batch=(), seq_k=length), call.q[entry], k, v, operands)


def gathered(call: DecodeCall, cache: Any, entry: int, length: int) -> Any:
    """Keys or values of an entry, (heads_k, length, dim)."""
    if call.page_table is None:
        return cache[entry, :, :length]
    used = -(-length // call.decode.page_size)
    pages = cache[call.page_table[entry, :used]]  # (pages, heads_k, positions, dim)
    heads_k, dim = cache.shape[1], cache.shape[3]
    return pages.swapaxes(0, 1).reshape(heads_k, used * call.decode.page_size, dim)[:, :length]


def replace_new(call: DecodeCall, seq_new: int) -> DecodeCall:
    """The same call with another number of new keys."""
    return replace(call, decode=replace(call.decode, seq_new=seq_new))


def moved(call: DecodeCall, move: Callable[[Any], Any]) -> DecodeCall:
    """The same call with lengths and table somewhere else."""
    return replace(call, lengths=move(call.lengths), page_table=move(call.page_table))
