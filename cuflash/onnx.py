"""The operator Attention of ONNX, opsets 23 to 25, for arrays: its inputs, attributes and outputs, by their own names.

The onnx package is not needed.  Source: https://onnx.ai/onnx/operators/onnx__Attention.html.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cuflash import api, arrays, decode
from cuflash.errors import ArgumentError, ShapeError
from cuflash.modifiers import KeyLengths
from cuflash.modifiers.base import device_of, module_of
from cuflash.problem import Layout, canonical, dtype_name, finite, in_layout, softcap_or_none
from cuflash.schedules.decode import MAX_HEAD_DIM

DOUBLE = 11
#: values of softmax_precision, as TensorProto.DataType numbers them
PRECISIONS = {1: "FLOAT", 10: "FLOAT16", DOUBLE: "DOUBLE", 16: "BFLOAT16"}
RAW, CAPPED, BIASED, SOFTMAX = range(4)  # values of qk_matmul_output_mode
#: inputs of 16 bits with so few numbers are computed in float32: launching takes longer than what that costs
MAX_WIDENED = 2**18


class Outputs(NamedTuple):
    """The outputs of the operator; those that a call does not have are None.

    Parameters
    ----------
    Y
        The output.
    present_key, present_value
        The past and new keys and values, one behind the other.
    qk_matmul_output
        Scores or weights.
    """

    Y: Any
    present_key: Any = None
    present_value: Any = None
    qk_matmul_output: Any = None


def attention(
    Q: Any,  # noqa: N803 (the operator's names)
    K: Any,  # noqa: N803
    V: Any,  # noqa: N803
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    return_qk_matmul_output: bool = False,
    backend: str | None = None,
) -> Outputs:
    """The operator Attention of ONNX: inputs in its order, attributes by name.

    Parameters
    ----------
    Q
        (batch, heads_q, seq_q, head_dim), or (batch, seq_q, heads_q · head_dim) with `q_num_heads`: float16, bfloat16,
        float32 or float64, of any kind that `cuflash.attention` takes.
    K
        (batch, heads_k, seq_k, head_dim), or (batch, seq_k, heads_k · head_dim); dtype of Q.
    V
        (batch, heads_k, seq_k, head_dim_v), or (batch, seq_k, heads_k · head_dim_v); dtype of Q.
    attn_mask
        bool, True = visible, or logits to add, of the dtype of Q; broadcastable to (batch, heads_q, seq_q, total), where
        total is past and new keys.  Its last axis is never broadcast: keys beyond it are hidden.
    past_key, past_value
        (batch, heads_k, past, head_dim) and (batch, heads_k, past, head_dim_v), for 3-D inputs, too: they stand before
        K and V.
    nonpad_kv_seqlen
        int64 or int32, (batch,): keys that each entry has; K and V are then a whole cache, and there is no past.  Values
        on a device are not read by the host.
    is_causal
        1: query i sees key j iff j <= i + offset.  The offset is the length of the past; with `nonpad_kv_seqlen` it is
        that of the entry less seq_q; else 0.
    kv_num_heads, q_num_heads
        Heads of 3-D inputs; for 4-D ones None or what their shapes say.
    left_window_size, right_window_size
        Inclusive distances from the position i + offset; -1 is unbounded.
    qk_matmul_output_mode
        What `qk_matmul_output` is: 0 the scaled products, 1 after softcap, 2 with mask and bias, hidden ones -∞, 3 the
        weights.
    scale
        Multiplies the logits, at least 0; None is 1/√head_dim.
    softcap
        c > 0: a scaled logit s becomes c·tanh(s/c); 0 is none.
    softmax_precision
        11, DOUBLE: everything is computed in float64.  1, 10 and 16 (FLOAT, FLOAT16, BFLOAT16) and None: in float32, for
        float64 in float64, which is never less than what is asked for.  The weights are then rounded to the dtype of V, as
        the operator does, but not in small calls without `backend`, where Q, K and V have 2**18 numbers or fewer.
    return_qk_matmul_output
        Also return `qk_matmul_output`, the operator's fourth output.
    backend
        As for `cuflash.attention`.

    Returns
    -------
    Outputs
        A named tuple of arrays of the kind of Q; what a call does not have is None.

    Y
        (batch, heads_q, seq_q, head_dim_v), or (batch, seq_q, heads_q · head_dim_v) for 3-D inputs; dtype of Q; 0 in a row
        that sees no key.
    present_key, present_value
        With a past: (batch, heads_k, total, head_dim) and (batch, heads_k, total, head_dim_v).
    qk_matmul_output
        If asked for: (batch, heads_q, seq_q, total), dtype of Q; in mode 3 a row that sees no key is 0.

    Raises
    ------
    ArgumentError, ShapeError
        An input or attribute has a value, shape, dtype, kind or device that the call cannot take.
    UnsupportedError
        As for `cuflash.attention`.

    Notes
    -----
    Source: https://onnx.ai/onnx/operators/onnx__Attention.html.  Y is computed by `cuflash.attention`, with
    `nonpad_kv_seqlen` beside is_causal or a window by `cuflash.attention_decode`, in memory linear in the lengths.  Two
    things are quadratic: `qk_matmul_output`, a plain product of matrices in the dtype of the sums, of which mode 3 is
    exp(s - lse); and what tells the entries' offsets where they meet an attn_mask, a boolean mask for all heads.
    A float mask's -∞ hides its key as False does, so that no NaN comes from what stands there.

    Examples
    --------
    >>> import numpy as np, cuflash.onnx
    >>> Q, K, V = np.zeros((1, 2, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> cuflash.onnx.attention(Q, K, V, is_causal=1, q_num_heads=1, kv_num_heads=1).Y
    array([[[1.],
            [2.]]])
    """
    causal = choice("is_causal", is_causal, {0: "no", 1: "yes"})
    mode = choice(
        "qk_matmul_output_mode", qk_matmul_output_mode, dict(enumerate(("raw", "softcap", "bias", "softmax")))
    )
    if softmax_precision is not None:
        softmax_precision = choice("softmax_precision", softmax_precision, PRECISIONS)
    api.check_flag("return_qk_matmul_output", return_qk_matmul_output)
    left, right = window_size("left_window_size", left_window_size), window_size("right_window_size", right_window_size)
    given = {"Q": Q, "K": K, "V": V, **api.present(attn_mask=attn_mask, past_key=past_key, past_value=past_value)}
    home, native = arrays.gather(given)
    if home.device is not None:
        arrays.require_gpu()
    layout = layout_of(native, q_num_heads, kv_num_heads)
    q = with_heads("Q", native["Q"], "q_num_heads", q_num_heads)
    k, v = (with_heads(name, native[name], "kv_num_heads", kv_num_heads) for name in "KV")
    dtype = q.dtype
    lengths = lengths_of(nonpad_kv_seqlen, home, q.shape[0], k.shape[2])
    with device_of(q), np.errstate(all="ignore"):
        past = past_of(native, k, v, lengths)
        if past:
            k, v = behind(native["past_key"], k), behind(native["past_value"], v)
        node = Node(
            q=q,
            k=k,
            v=v,
            mask=mask_of(native.get("attn_mask"), (*q.shape[:3], k.shape[2]), q.dtype),
            lengths=lengths,
            offset=past,
            left=left,
            right=0 if causal else right,
            scale=scale_of(scale, q),
            softcap=softcap_or_none(softcap, dtype_name(q.dtype)),
        )
        if softmax_precision == DOUBLE:
            node = node.widened(np.float64)
        elif backend is None and node.is_small:
            node = node.widened(np.float32)
        y, lse = computed(node, layout, backend)
        y = y.astype(dtype, copy=False)
        scores = None
        if return_qk_matmul_output:
            scores = home.give(matmul_output(node, lse, mode).astype(dtype, copy=False))
    if layout == "bshd":
        y = y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])
    present_key, present_value = (home.give(x) if "past_key" in native else None for x in (k, v))
    return Outputs(home.give(y), present_key, present_value, scores)


@dataclass(frozen=True)
class Node:
    """A validated call, in native arrays with the axes (batch, heads, seq, dim)."""

    q: Any
    k: Any
    v: Any
    mask: Any
    lengths: Any
    offset: int
    left: int | None
    right: int | None
    scale: float
    softcap: float | None

    def widened(self, dtype: Any) -> Node:
        """The same call with inputs of more bits."""
        names = ("q", "k", "v") if self.bias is None else ("q", "k", "v", "mask")
        return replace(self, **{name: getattr(self, name).astype(dtype) for name in names})

    @property
    def is_small(self) -> bool:
        """Whether the inputs have 16 bits and more of them would cost nothing that is noticed."""
        numbers: int = self.q.size + self.k.size + self.v.size
        return bool(self.q.dtype.itemsize == 2) and numbers <= MAX_WIDENED

    @property
    def sums(self) -> Any:
        """The type of sums and of the log-sum-exp."""
        return np.float64 if self.q.dtype == np.float64 else np.float32

    @property
    def bias(self) -> Any:
        """A mask that is added, or None."""
        return self.mask if self.mask is not None and self.mask.dtype != bool else None

    @property
    def width(self) -> int:
        """Keys from which on all are hidden because the mask ends."""
        keys: int = self.k.shape[2] if self.mask is None else self.mask.shape[-1]
        return keys

    @property
    def has_band(self) -> bool:
        """Whether visibility depends on positions."""
        return self.left is not None or self.right is not None

    def allowed(self) -> Any:
        """Which keys the mask lets through, (..., seq_q, width), or None if there is none."""
        if self.bias is None:
            return self.mask
        return ~module_of(self.mask).isneginf(self.bias.astype(self.sums))  # CuPy's knows no bfloat16

    def band(self, keys: int) -> Any:
        """Which of the first keys causal masks and windows let through, (batch or 1, 1, seq_q, keys)."""
        xp = module_of(self.q)
        j = xp.arange(keys)
        at = xp.arange(self.q.shape[2])[:, None]
        if self.lengths is None:
            at = (at + self.offset)[None, None]
        else:
            at = at + (xp.asarray(self.lengths).astype(np.int64) - self.q.shape[2])[:, None, None, None]
        seen = xp.ones((*at.shape[:3], keys), bool)
        if self.left is not None:
            seen &= j >= at - self.left
        if self.right is not None:
            seen &= j <= at + self.right
        return seen


# ---- what comes in ---------------------------------------------------------------------------------------------------
def choice(name: str, value: Any, values: dict[int, str]) -> int:
    """An attribute that is one of a few integers."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number not in values:
        listed = ", ".join(f"{number} ({word})" for number, word in values.items())
        raise ArgumentError(f"{name}={value!r:.80}: must be one of {listed}")
    return number


def window_size(name: str, value: Any) -> int | None:
    """A bound of the window; None is unbounded."""
    try:
        bound = operator.index(value)
    except TypeError:
        bound = -2
    if bound < -1 or isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r:.80}: must be an integer of at least 0, or -1 for unbounded")
    return None if bound == -1 else bound


def scale_of(scale: Any, q: Any) -> float:
    """The factor of the logits: the operator multiplies Q and K by its square root."""
    if scale is None:
        return float(max(q.shape[3], 1) ** -0.5)
    factor = finite("scale", scale, dtype_name(q.dtype))
    if factor < 0:
        raise ArgumentError(
            f"scale={scale!r}: must be at least 0, because its square root multiplies Q and K; negate Q"
        )
    return factor


def layout_of(native: dict[str, Any], q_num_heads: Any, kv_num_heads: Any) -> Layout:
    """What the inputs' axes are: "bshd" for 3-D inputs, whose last axis is that of heads and head_dim together."""
    axes = {name: native[name].ndim for name in "QKV"}
    if set(axes.values()) not in ({3}, {4}):
        found = ", ".join(f"{name} {native[name].shape}" for name in axes)
        raise ShapeError(f"Q, K and V must all have 3 axes, or all 4, found {found}; reshape them to one form")
    if axes["Q"] == 3 and None in (q_num_heads, kv_num_heads):
        raise ArgumentError(
            f"q_num_heads={q_num_heads!r} and kv_num_heads={kv_num_heads!r}: inputs of 3 axes, such as Q {native['Q'].shape}, "
            "need both; pass the number of heads, or arrays of 4 axes"
        )
    return "bhsd" if axes["Q"] == 4 else "bshd"


def with_heads(name: str, x: Any, attribute: str, count: Any) -> Any:
    """View of an input with the axes (batch, heads, seq, dim)."""
    try:
        heads = None if count is None else operator.index(count)
    except TypeError:
        heads = 0
    if heads is not None and heads < 1:
        raise ArgumentError(f"{attribute}={count!r:.80}: must be an integer of at least 1")
    if x.ndim == 4:
        if heads not in (None, x.shape[1]):
            raise ArgumentError(
                f"{attribute}={heads}: {name} {x.shape} has {x.shape[1]} heads; leave the attribute away for 4-D inputs"
            )
        return x
    if x.shape[2] % heads:
        raise ShapeError(f"{name} has shape {x.shape}: its last axis must be a multiple of {attribute}={heads}")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def lengths_of(nonpad_kv_seqlen: Any, home: arrays.Home, batch: int, seq_k: int) -> Any:
    """Keys of each entry, in a native array, or None; values on the host are checked."""
    if nonpad_kv_seqlen is None:
        return None
    name = "nonpad_kv_seqlen"
    x = arrays.modifier_array(name, nonpad_kv_seqlen, home)
    if x.shape != (batch,):
        raise ShapeError(f"{name} has shape {x.shape}: must be (batch,) = {(batch,)}, one length for each entry")
    if str(x.dtype) not in ("int32", "int64") and x.size:
        raise ArgumentError(f"{name} has dtype {x.dtype}: must be int64 or int32; convert it with astype")
    if isinstance(x, np.ndarray) and x.size and (x.min() < 0 or x.max() > seq_k):
        wrong = x[(x < 0) | (x > seq_k)][0]
        raise ArgumentError(f"{name} contains {wrong}: each must be from 0 to {seq_k}, the keys of K and V")
    return x


def past_of(native: dict[str, Any], k: Any, v: Any, lengths: Any) -> int:
    """Length of the past."""
    found = [name for name in ("past_key", "past_value") if name in native]
    if not found:
        return 0
    if len(found) == 1:
        missing = "past_value" if found == ["past_key"] else "past_key"
        raise ArgumentError(f"{found[0]} is given and {missing} is not: every key needs a value; pass both or neither")
    if lengths is not None:
        raise ArgumentError(
            "nonpad_kv_seqlen and past_key are given: with nonpad_kv_seqlen, K and V are the whole cache; pass one of both"
        )
    for name, x in (("past_key", k), ("past_value", v)):
        past = native[name]
        if past.ndim != 4 or (*past.shape[:2], past.shape[3]) != (*x.shape[:2], x.shape[3]):
            wanted = f"({x.shape[0]}, {x.shape[1]}, past, {x.shape[3]})"
            raise ShapeError(f"{name} has shape {past.shape}: must be {wanted}, as the new ones of shape {x.shape}")
        if past.dtype != x.dtype:
            raise ArgumentError(f"{name} has dtype {past.dtype}: must be that of the new ones, {x.dtype}; use astype")
    lengths_differ = native["past_key"].shape[2] != native["past_value"].shape[2]
    if lengths_differ:
        shapes = ", ".join(f"{name} {native[name].shape}" for name in found)
        raise ShapeError(f"{shapes}: must be equally long; every key needs a value")
    past_length: int = native["past_key"].shape[2]
    return past_length


def behind(past: Any, x: Any) -> Any:
    """A new array: the past, and x behind it."""
    seq = past.shape[2]
    joined = module_of(x).empty((*x.shape[:2], seq + x.shape[2], x.shape[3]), x.dtype)
    joined[:, :, :seq] = past
    joined[:, :, seq:] = x
    return joined


def mask_of(mask: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The mask, if it fits."""
    if mask is None:
        return None
    if mask.dtype not in (np.dtype(bool), dtype):
        raise ArgumentError(
            f"attn_mask has dtype {mask.dtype}: must be bool (True = visible), or that of Q, {dtype}, to be added; "
            "convert it with astype"
        )
    lead, target = mask.shape[:-1], shape[:-1]
    fits = 1 <= mask.ndim <= 4 and mask.shape[-1] <= shape[-1]
    if not fits or any(n not in (1, full) for n, full in zip(lead[::-1], target[::-1], strict=False)):
        raise ShapeError(
            f"attn_mask has shape {mask.shape}, which does not broadcast to (batch, heads_q, seq_q, total) = {shape}; only "
            "the last axis may be shorter, whose further keys are hidden"
        )
    return mask


# ---- what is computed ------------------------------------------------------------------------------------------------
def computed(node: Node, layout: Layout, backend: str | None) -> tuple[Any, Any]:
    """Y in the layout, and the log-sum-exp (batch, heads_q, seq_q)."""
    if node.lengths is None:
        return attended(node, layout, backend)
    widest = max(node.q.shape[3], node.v.shape[3])
    if not node.has_band or node.mask is not None or widest > MAX_HEAD_DIM or backend == "wgmma":
        band = node.band(node.width) if node.has_band else None
        return called(node, node.q.shape[2], node.width, layout, backend, band=band)
    causal = node.right == 0
    window = (node.left, None if causal else node.right)
    q, k, v = (canonical(x, layout) for x in (node.q, node.k, node.v))
    result: tuple[Any, Any] = decode.attention_decode(
        q,
        k,
        v,
        node.lengths.astype(np.int32, copy=False),
        causal=causal,
        window=None if window == (None, None) else window,
        scale=node.scale,
        softcap=node.softcap,
        layout=layout,
        return_lse=True,
        backend=backend,
    )
    return result


def attended(node: Node, layout: Layout, backend: str | None) -> tuple[Any, Any]:
    """The same where all entries have one offset.

    `attention` counts from a diagonal that ends in the last query's last key.  So keys that no query sees are left away,
    and queries that see no key; what then still lies between its diagonal and the operator's is added to the window.
    """
    seq_q, keys = node.q.shape[2], node.width
    rows = seq_q if node.left is None else min(max(keys - node.offset + node.left, 0), seq_q)
    if node.right is not None:
        keys = min(max(rows + node.offset + node.right, 0), keys)
    shift = node.offset - (keys - rows)
    left = None if node.left is None else node.left - shift
    right = None if node.right is None else node.right + shift
    if rows == 0 or keys == 0:
        return nothing(node, layout)
    causal = right == 0
    window = (left, None if causal else right)
    y, lse = called(node, rows, keys, layout, backend, causal=causal, window=window)
    if rows == seq_q:
        return y, lse
    whole_y, whole_lse = nothing(node, layout)
    canonical(whole_y, layout)[:, :, :rows] = canonical(y, layout)
    whole_lse[:, :, :rows] = lse
    return whole_y, whole_lse


def called(
    node: Node,
    rows: int,
    keys: int,
    layout: Layout,
    backend: str | None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    band: Any = None,
) -> tuple[Any, Any]:
    """`attention` of the first queries and keys; a `band` is one more mask."""
    parts = (node.q[:, :, :rows], node.k[:, :, :keys], node.v[:, :, :keys])
    q, k, v = (canonical(x, layout) for x in parts)
    allowed = cut(node.allowed(), rows, keys)
    if band is not None:
        allowed = band if allowed is None else band & allowed
    modifiers: tuple[KeyLengths, ...] = ()
    if node.lengths is not None:
        modifiers = (KeyLengths(module_of(node.lengths).minimum(node.lengths, keys)),)
    result: tuple[Any, Any] = api.attention(
        q,
        k,
        v,
        scale=node.scale,
        causal=causal,
        window=None if window == (None, None) else window,
        mask=allowed,
        bias=cut(node.bias, rows, keys),
        softcap=node.softcap,
        modifiers=modifiers,
        layout=layout,
        return_lse=True,
        backend=backend,
    )
    return result


def cut(mask: Any, rows: int, keys: int) -> Any:
    """A mask's part for the first queries and keys."""
    if mask is None:
        return None
    return mask[..., :rows, :keys] if mask.ndim > 1 else mask[:keys]


def nothing(node: Node, layout: Layout) -> tuple[Any, Any]:
    """What rows that see no key have."""
    xp = module_of(node.q)
    y = xp.zeros(in_layout((*node.q.shape[:3], node.v.shape[3]), layout), node.q.dtype)
    return y, xp.full(node.q.shape[:3], -np.inf, node.sums)


def matmul_output(node: Node, lse: Any, mode: int) -> Any:
    """The operator's fourth output, (batch, heads_q, seq_q, total), in the dtype of the sums."""
    xp = module_of(node.q)
    sums = node.sums
    batch, heads_q, seq_q, head_dim = node.q.shape
    heads_k, total = node.k.shape[1:3]
    stacked = node.q.astype(sums).reshape(batch, heads_k, heads_q // heads_k * seq_q, head_dim) * sums(node.scale)
    s = xp.matmul(stacked, node.k.astype(sums).swapaxes(2, 3)).reshape(batch, heads_q, seq_q, total)
    if mode >= CAPPED and node.softcap is not None:
        s = xp.tanh(s / sums(node.softcap)) * sums(node.softcap)
    if mode < BIASED:
        return s
    seen = visible(node, total)
    if node.bias is not None:
        s[..., : node.width] += node.bias.astype(sums)
    if mode == BIASED:
        return xp.where(seen, s, -np.inf)
    lse = lse[..., None]
    return xp.where(seen & ~xp.isneginf(lse), xp.exp(s - lse), 0)


def visible(node: Node, total: int) -> Any:
    """Which scores are seen, broadcastable to (batch, heads_q, seq_q, total)."""
    xp = module_of(node.q)
    seen = node.band(total)
    if node.lengths is not None:
        seen &= xp.arange(total) < xp.asarray(node.lengths)[:, None, None, None]
    allowed = node.allowed()
    if allowed is None:
        return seen
    padded = xp.zeros((*allowed.shape[:-1], total), bool)
    padded[..., : node.width] = allowed
    return seen & padded
