"""Union: attention over disjoint sets of keys, put together from the results over each, with its gradients.

A result over some keys is (out, lse) with out = Σ p·v and lse = log Σ exp(s), by row.  Over the union of the sets

    lse = log Σ exp(lse_n),  out = Σ w_n · out_n  with  w_n = exp(lse_n − lse),

which is the online softmax with whole results in place of single keys (Dao, arXiv:2307.08691, section 2.3).  The weights
never exceed 1, so results whose lse are far apart lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuflash import arrays
from cuflash.arrays import Home
from cuflash.errors import ArgumentError, ShapeError
from cuflash.modifiers.base import module_of
from cuflash.problem import DTYPES, canonical, check_array, check_layout, dtype_name

Gradients = tuple[tuple[Any, ...], tuple[Any, ...]]


def merge(outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bhsd") -> tuple[Any, Any]:
    """Exact attention over all keys, from its results over disjoint sets of them.

    Parameters
    ----------
    outs
        A list or tuple of at least one output of `attention` for the same queries, each over keys of its own:
        (*batch, heads_q, seq_q, head_dim_v), float16, bfloat16, float32 or float64, all of one shape and dtype.
    lses
        The log-sum-exps that belong to them, in the same order: (*batch, heads_q, seq_q) in every layout, natural
        logarithm, float32 (float64 for float64); -inf in a row that sees none of the keys.
    layout
        "bhsd", or "bshd" with seq before heads in `outs` and the result.

    Returns
    -------
    out
        Shape, dtype and kind of an output; 0 in a row that sees no key of any set.
    lse
        Shape, dtype and kind of a log-sum-exp; -inf in a row that sees no key of any set.

    Raises
    ------
    ArgumentError
        The lists are empty or of different lengths, or hold arrays that do not belong together.
    UnsupportedError
        There is no GPU for CUDA arrays.

    Notes
    -----
    A row that is empty in one result takes nothing from it, whatever its output holds.  Source: Dao, arXiv:2307.08691,
    section 2.3.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 3, 1)), np.array([[[1.0], [3.0], [5.0]]])
    >>> first = cuflash.attention(q, k[:, :1], v[:, :1], return_lse=True)
    >>> rest = cuflash.attention(q, k[:, 1:], v[:, 1:], return_lse=True)
    >>> cuflash.merge([first[0], rest[0]], [first[1], rest[1]])[0]
    array([[[3.]]])
    """
    home, given = enter(outs, lses, {}, layout)
    out, lse = computed(home, lambda: forward(given, layout))
    return home.give(out), home.give(lse)


def merge_backward(
    dout: Any,
    outs: Sequence[Any],
    lses: Sequence[Any],
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    layout: str = "bhsd",
) -> Gradients:
    """Gradients of `merge`, from its inputs and its two results.

    Parameters
    ----------
    dout
        Gradient of the loss with respect to `out`, its shape and dtype.
    outs, lses, layout
        As in the forward call.
    out, lse
        What `merge` returned.
    dlse
        Gradient of the loss with respect to `lse`, its shape and dtype; None is 0.

    Returns
    -------
    douts
        One gradient for each of `outs`, its shape and dtype: the `dout` of that result's `attention_backward`.
    dlses
        One gradient for each of `lses`, its shape and dtype: the `dlse` of the same call.

    Raises
    ------
    ArgumentError
        As for `merge`, and for a dout, out, lse or dlse that does not belong to the call.
    UnsupportedError
        As for `merge`.

    Notes
    -----
    With w_n = exp(lse_n - lse): dout_n = w_n · dout and dlse_n = w_n · (dout·(out_n - out) + dlse), both exactly 0 where a
    row is empty.  They follow from the equations of Dao, arXiv:2307.08691, section 2.3.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> outs, lses = [np.array([[[1.0]]]), np.array([[[3.0]]])], [np.zeros((1, 1)), np.zeros((1, 1))]
    >>> out, lse = cuflash.merge(outs, lses)
    >>> douts, dlses = cuflash.merge_backward(np.ones_like(out), outs, lses, out, lse)
    >>> dlses[1]
    array([[0.5]])
    """
    named = {"dout": dout, "out": out, "lse": lse, **({} if dlse is None else {"dlse": dlse})}
    home, given = enter(outs, lses, named, layout)
    douts, dlses = computed(home, lambda: backward(given, layout))
    return tuple(map(home.give, douts)), tuple(map(home.give, dlses))


def merge_vjp(
    outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bhsd"
) -> tuple[Any, Any, Callable[..., Gradients]]:
    """`merge` and a function that pulls gradients of its results back to its inputs.

    Parameters
    ----------
    outs, lses, layout
        As for `merge`.

    Returns
    -------
    out, lse
        As from `merge`.
    vjp
        ``vjp(dout, dlse=None)`` returns (douts, dlses) as `merge_backward` does.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `merge` and `merge_backward` do.

    Notes
    -----
    `vjp` keeps the inputs and results themselves, no copies: write to none of them before its last use.  Source: Dao,
    arXiv:2307.08691, section 2.3.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 3, 1)), np.array([[[1.0], [3.0], [5.0]]])
    >>> parts = [cuflash.attention_vjp(q, k[:, at], v[:, at], return_lse=True) for at in (slice(1), slice(1, 3))]
    >>> out, lse, vjp = cuflash.merge_vjp([part[0] for part in parts], [part[1] for part in parts])
    >>> douts, dlses = vjp(np.ones_like(out))
    >>> [part[2](dout, dlse).dv.ravel() for part, dout, dlse in zip(parts, douts, dlses)]
    [array([0.33333333]), array([0.33333333, 0.33333333])]
    """
    outs, lses = kept(outs), kept(lses)
    out, lse = merge(outs, lses, layout=layout)

    def vjp(dout: Any, dlse: Any = None) -> Gradients:
        """Gradients of the inputs for a gradient of the output, and of its lse if given."""
        return merge_backward(dout, outs, lses, out, lse, dlse=dlse, layout=layout)

    return out, lse, vjp


# ---- what comes in ---------------------------------------------------------------------------------------------------
def kept(parts: Any) -> Any:
    """A copy of a list, which its owner may change; anything else stays what it is, to be refused by name."""
    return tuple(parts) if isinstance(parts, list) else parts


class Given:
    """Native arrays of a call: the parts, and what a backward adds by name."""

    def __init__(self, native: dict[str, Any], count: int) -> None:
        self.outs = [native[f"outs[{n}]"] for n in range(count)]
        self.lses = [native[f"lses[{n}]"] for n in range(count)]
        self.dout: Any = native.get("dout")
        self.out: Any = native.get("out")
        self.lse: Any = native.get("lse")
        self.dlse: Any = native.get("dlse")


def enter(outs: Any, lses: Any, named: dict[str, Any], layout: Any) -> tuple[Home, Given]:
    """Validate a call: where its arrays live, and its native arrays."""
    check_layout(layout)
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise ArgumentError(
                f"{name} is {parts!r:.80} of type {type(parts).__name__}: must be a list or tuple of arrays, one for each "
                "set of keys; make it one with list"
            )
    if not outs or len(outs) != len(lses):
        raise ArgumentError(
            f"outs has {len(outs)} arrays and lses has {len(lses)}: must be as many, at least 1; each output comes with "
            "its own log-sum-exp from attention(..., return_lse=True)"
        )
    parts = {f"{name}[{n}]": x for name, parts in (("outs", outs), ("lses", lses)) for n, x in enumerate(parts)}
    home, native = arrays.gather({**parts, **named})
    first = native["outs[0]"]
    dtype = dtype_name(first.dtype)
    if dtype not in DTYPES:
        raise ArgumentError(f"outs[0] has dtype {dtype}: must be one of {', '.join(DTYPES)}; convert it with astype")
    if first.ndim < 3:
        raise ShapeError(
            f"outs[0] has shape {first.shape}: at least 3 axes are needed, (..., heads_q, seq_q, head_dim_v) in layout "
            f"{layout!r}; add an axis of length 1 for a single head"
        )
    lse_shape = canonical(first, layout).shape[:-1]
    accumulator = "float64" if dtype == "float64" else "float32"
    for name, x in native.items():
        if name.startswith("out") or name == "dout":
            check_array(name, x, first.shape, dtype, "that of outs[0],")
        else:
            check_array(name, x, lse_shape, accumulator, "(*batch, heads_q, seq_q)")
    return home, Given(native, len(outs))


def computed(home: Home, compute: Callable[[], Any]) -> Any:
    """Results of array operations where the arrays live, without warnings of infinities that are meant."""
    if home.device is None:
        with np.errstate(all="ignore"):
            return compute()
    arrays.require_gpu()
    import cupy

    with cupy.cuda.Device(home.device):
        return compute()


# ---- the equations ---------------------------------------------------------------------------------------------------
def forward(given: Given, layout: str) -> tuple[Any, Any]:
    """Output and log-sum-exp of the union."""
    xp = module_of(given.lses[0])
    m = given.lses[0]
    for lse in given.lses[1:]:
        m = xp.maximum(m, lse)
    shift = xp.where(xp.isneginf(m), 0, m)  # an empty row: −∞ − (−∞) would be NaN
    accumulator = m.dtype
    l = xp.zeros_like(m)  # noqa: E741 (the papers' letter)
    a = xp.zeros(given.outs[0].shape, accumulator)
    for out, lse in zip(given.outs, given.lses, strict=True):
        weight = xp.exp(lse - shift)
        l += weight  # noqa: E741
        a += selected(xp, lse, weight, out.astype(accumulator), layout)
    empty = xp.isneginf(m)
    total = xp.where(empty, 1, l)
    a /= along_rows(total, layout)
    lse = xp.where(empty, -xp.inf, m + xp.log(total))
    return a.astype(given.outs[0].dtype, copy=False), lse.astype(accumulator, copy=False)


def backward(given: Given, layout: str) -> tuple[list[Any], list[Any]]:
    """Gradients of every output and every log-sum-exp."""
    xp = module_of(given.lse)
    accumulator = given.lse.dtype
    dout, out = given.dout.astype(accumulator), given.out.astype(accumulator)
    douts, dlses = [], []
    for part_out, part_lse in zip(given.outs, given.lses, strict=True):
        weight = xp.exp(part_lse - given.lse)
        difference = part_out.astype(accumulator)
        difference -= out
        difference *= dout
        slope = difference.sum(axis=-1)
        slope = slope.swapaxes(-1, -2) if layout == "bshd" else slope
        if given.dlse is not None:
            slope = slope + given.dlse
        douts.append(selected(xp, part_lse, weight, dout, layout).astype(given.dout.dtype, copy=False))
        dlse = xp.where(xp.isneginf(part_lse), 0, weight * slope)
        dlses.append(dlse.astype(accumulator, copy=False))
    return douts, dlses


def selected(xp: Any, lse: Any, weight: Any, x: Any, layout: str) -> Any:
    """``weight * x`` by row, and exactly 0 in rows that are empty, whatever stands in them."""
    return xp.where(along_rows(xp.isneginf(lse), layout), 0, along_rows(weight, layout) * x)


def along_rows(x: Any, layout: str) -> Any:
    """One number for each row, (*batch, heads_q, seq_q), as an array that broadcasts to an output."""
    return (x.swapaxes(-1, -2) if layout == "bshd" else x)[..., None]
