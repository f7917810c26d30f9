"""Decoding: attention of a few new queries over a long cache of keys and values, contiguous or in pages.

Sources: FlashAttention-2 (arXiv:2307.08691) for the recurrence, PagedAttention (arXiv:2309.06180, section 4.1) for pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cuflash import api, arrays, decode_problem, numpy_backend
from cuflash.arrays import Home
from cuflash.decode_problem import DecodeCall
from cuflash.errors import ArgumentError
from cuflash.explanation import Explanation
from cuflash.modifiers import Modifier
from cuflash.problem import canonical, check_array, dtype_name, in_layout

_launch: Any = None  # cuflash.decode_launch, once a call on a device has imported it whole


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any = None,
    *,
    page_table: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    scale: float | None = None,
    causal: bool | str = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    checked: bool = False,
    return_lse: bool = False,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Exact attention of one or a few new queries over a cache of keys and values, in one launch and without a backward.

    Parameters
    ----------
    q
        (batch, heads_q, seq_q, head_dim), float16, bfloat16, float32 or float64: the last seq_q positions of each entry.
    k_cache
        (batch, heads_k, capacity, head_dim), dtype of q; with `page_table` a pool (pages, heads_k, page_size, head_dim).
    v_cache
        As k_cache with head_dim_v in place of head_dim.
    lengths
        int32, (batch,): keys that each entry of the batch has in its cache, those of `k_new` not counted; None is all
        positions.  A sequence or NumPy array is checked; an array on the device is not read by the host, and values
        outside are clamped to [0, capacity] there, so that a captured CUDA graph takes new lengths.
    page_table
        int32, (batch, pages of an entry): which page of the pool holds positions [n · page_size, (n + 1) · page_size) of
        an entry; the capacity is then pages of an entry times page_size.  Places that the lengths do not reach may hold
        anything.  Any page_size.  A table on the host is checked where the lengths are known there.
    k_new, v_new
        (batch, heads_k, seq_new, head_dim) and (..., head_dim_v): keys and values that belong behind the `lengths` ones.
        They are attended to, and written into the caches in place.
    scale
        Multiplies the logits q·k; None is 1/√head_dim.
    causal
        True or "bottom_right": query i sees key j iff j <= i + n - seq_q, with n the keys of its entry, new ones included.
        False: all of them.
    window
        (left, right), inclusive distances in positions from that diagonal; None is unbounded.
    softcap
        Positive c: a scaled logit s becomes c·tanh(s/c).
    modifiers
        `ALiBi(slopes)`, whose distances count from that diagonal, and `Sinks(logits)`.
    layout
        "bhsd" is the order of axes above; "bshd" has seq before heads in all of them, and in pages: (pages, page_size,
        heads_k, head_dim).
    checked
        Also check lengths and tables that are on a device, and name what is out of range.  This waits for the device, and
        cannot be captured.  Otherwise a page number outside the pool reads as a page of zeros and is never written, and
        new keys beyond the capacity are dropped.
    return_lse
        Also return the log-sum-exp of each row's logits.
    out
        Array to write the result into: its shape, dtype and kind, any strides, no memory shared with an input.
    backend
        None chooses; "numpy" (host), "mma" or "simt" (CUDA) insists.

    Returns
    -------
    out
        (batch, heads_q, seq_q, head_dim_v) in the layout, dtype of q; 0 in a row that sees no key.
    lse
        With `return_lse` only: (batch, heads_q, seq_q) in every layout, natural logarithm, float32 (float64 for float64);
        -inf in a row that sees no key.

    Raises
    ------
    ArgumentError
        An argument has a value, shape, dtype, kind or device that the call cannot take.  Nothing was written.
    UnsupportedError
        No backend, or not the one asked for, offers the combination; or there is no GPU for CUDA arrays.

    Notes
    -----
    The query heads of a group share one read of their keys.  On a device the keys of all entries are dealt out evenly to
    all multiprocessors, whatever the lengths, and parts are added up in a fixed order: equal calls on one device give equal
    bits.  What a cache holds beyond the lengths is never used, NaN included.  Sources: Dao, arXiv:2307.08691, section 2.3;
    pages: Kwon et al., arXiv:2309.06180, section 4.1.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 4, 1)), np.full((1, 1, 4, 1), np.nan)
    >>> v[0, 0, :2, 0] = 1, 3
    >>> cuflash.attention_decode(q, k, v, [2], k_new=np.zeros((1, 1, 1, 1)), v_new=np.full((1, 1, 1, 1), 8.0)).item()
    4.0
    >>> v.ravel()
    array([ 1.,  3.,  8., nan])
    """
    api.check_flag("return_lse", return_lse)
    key, given = None, {"k_cache": k_cache, "v_cache": v_cache, **api.present(k_new=k_new, v_new=v_new)}
    if _launch is not None and out is None and not modifiers and not checked:
        named = {"q": q, "k": k_cache, "v": v_cache, "lengths": lengths, "page_table": page_table}
        named |= {"k_new": k_new, "v_new": v_new}
        key = _launch.signature(named, (scale, causal, window, softcap, layout, return_lse, backend))
        replayed = _launch.replay(key, named, return_lse)
        if replayed is not None:
            return replayed if return_lse else replayed[0]
    home, native = arrays.gather({"q": q, **given, **api.present(out=out)})
    api.check_backend(backend, home)
    call = enter(
        home, native, lengths, page_table, scale, causal, window, softcap, api.keep(modifiers), layout, checked
    )
    problem = call.problem
    check_written(call, home, native)
    if out is not None:
        check_array("out", native["out"], in_layout(problem.out_shape, problem.layout), problem.dtype, "the result's")
        arrays.check_out(native["out"], home, inputs_of(call))
    to = None if out is None else canonical(native["out"], problem.layout)
    if home.device is None:
        if to is None:
            to = canonical(np.empty(in_layout(problem.out_shape, problem.layout), call.q.dtype), problem.layout)
        o, lse = numpy_backend.decode(call, to)
    else:
        o, lse = launcher().decode(call, to, return_lse, backend, key)
    if call.decode.seq_new:
        home.wait(native["k_cache"])
    if out is None:
        out = home.give(canonical(o, problem.layout))
    else:
        home.wait(o)
    return (out, home.give(lse)) if return_lse else out


def explain_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any = None,
    *,
    page_table: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    scale: float | None = None,
    causal: bool | str = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Iterable[Modifier] = (),
    layout: str = "bhsd",
    backend: str | None = None,
    measure: bool = False,
) -> Explanation:
    """How `attention_decode` would compute a call; as `explain`.

    Parameters
    ----------
    q, k_cache, v_cache, lengths, page_table, k_new, v_new, scale, causal, window, softcap, modifiers, layout, backend
        As for `attention_decode`; nothing is computed, and no cache is written.
    measure
        As for `explain`; lengths and table are those given, and random numbers stand for the caches, in as much memory again.

    Returns
    -------
    Explanation
        Readable when printed.  `grid` and `slices` depend on shapes alone: the blocks cut the keys of all entries into so many
        slices at most.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `attention_decode` does, and `explain` for `measure`.

    Notes
    -----
    The floor time is that of the keys within the lengths, which are read for it, on a device as well (arXiv:2307.08691,
    section 2.3, and arXiv:2309.06180 for pages).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, cache = np.zeros((1, 4, 1, 8), np.float32), np.zeros((1, 2, 32, 8), np.float32)
    >>> cuflash.explain_decode(q, cache, cache, [20]).backend
    'numpy'
    """
    api.check_flag("measure", measure)
    given = {"k_cache": k_cache, "v_cache": v_cache, **api.present(k_new=k_new, v_new=v_new)}
    home, native = arrays.gather({"q": q, **given})
    api.check_backend(backend, home)
    call = enter(home, native, lengths, page_table, scale, causal, window, softcap, api.keep(modifiers), layout, False)
    check_written(call, home, native)
    if home.device is None:
        return api.explained_on_host(home, call.problem, str(call.decode), measure)
    found: Explanation = launcher().explain(call, backend, measure)
    return found


def launcher() -> Any:
    """The module that runs calls on devices, where there are any; importing it imports CuPy."""
    global _launch
    arrays.require_gpu()
    if _launch is None:
        from cuflash import decode_launch

        _launch = decode_launch
    return _launch


# ---- what comes in ---------------------------------------------------------------------------------------------------
def enter(
    home: Home,
    native: dict[str, Any],
    lengths: Any,
    page_table: Any,
    scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    modifiers: Any,
    layout: Any,
    checked: Any,
) -> DecodeCall:
    """Validate a call."""
    if not isinstance(checked, (bool, np.bool_)):
        raise ArgumentError(f"checked={checked!r}: must be True or False")
    decode_problem.check_modifiers(modifiers)
    taken = {"lengths": integers("lengths", lengths, home), "page_table": integers("page_table", page_table, home)}
    call = decode_problem.describe(
        native,
        taken["lengths"],
        taken["page_table"],
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        modifiers=arrays.native_modifiers(modifiers, home, dtype_name(native["q"].dtype), 0),
        layout=layout,
    )
    if checked and home.device is not None:
        arrays.require_gpu()
        taken = {name: x.get() if hasattr(x, "get") else x for name, x in taken.items()}
    known = {name: x for name, x in taken.items() if x is None or isinstance(x, np.ndarray)}
    if "lengths" in known:
        cached = known["lengths"]
        capacity = call.problem.seq_k
        full = np.full(call.problem.batch[0], capacity) if cached is None else cached
        if cached is not None or call.decode.seq_new:
            decode_problem.check_lengths(full, capacity, call.decode.seq_new)
        if known.get("page_table") is not None:
            decode_problem.check_pages(call, cached, known["page_table"])
    if home.device is None:
        return call
    return decode_problem.moved(call, lambda x: uploaded(x, home.device))


def integers(name: str, x: Any, home: Home) -> Any:
    """An int32 array: NumPy, or where the call's arrays are."""
    if x is None:
        return None
    native = arrays.modifier_array(name, x, home)
    if isinstance(native, np.ndarray):
        return decode_problem.integer_array(name, native)
    return native


def uploaded(x: Any, device: Any) -> Any:
    """A NumPy array on the device of a call; others as they are."""
    if not isinstance(x, np.ndarray):
        return x
    arrays.require_gpu()
    import cupy

    with cupy.cuda.Device(device):
        return cupy.asarray(x)


def inputs_of(call: DecodeCall) -> dict[str, Any]:
    """Arrays by the names that a user knows."""
    named = {"q": call.q, "k_cache": call.k, "v_cache": call.v, "k_new": call.k_new, "v_new": call.v_new}
    named |= {"lengths": call.lengths, "page_table": call.page_table, **call.operands}
    return {name: x for name, x in named.items() if x is not None}


def check_written(call: DecodeCall, home: Home, native: dict[str, Any]) -> None:
    """Raise unless the caches can take new keys without changing anything else."""
    if not call.decode.seq_new:
        return
    inputs = inputs_of(call)
    for name in ("k_cache", "v_cache"):
        x = native[name]
        if home.library in arrays.IMMUTABLE:
            raise ArgumentError(
                f"{name} is {home}, and such arrays cannot be written: k_new is appended in place; pass CuPy arrays, or "
                "make the new cache yourself and leave k_new away"
            )
        if isinstance(x, np.ndarray) and not x.flags.writeable:
            raise ArgumentError(f"{name} is read-only, and k_new is appended in place; pass a copy")
        if arrays.overlaps_itself(x) and x.size:
            raise ArgumentError(
                f"{name} of shape {x.shape} and strides {x.strides} bytes has elements that share memory, and k_new is "
                "appended in place; pass a copy that was not broadcast"
            )
        for other, y in inputs.items():
            if other != name and arrays.overlaps(x, y):
                raise ArgumentError(
                    f"{name} overlaps {other}, and k_new is appended in place; pass arrays of their own memory"
                )
