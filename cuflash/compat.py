"""The calls of other systems, by their own names, arguments, layouts, defaults and alignments, computed by cuflash.

`flash_attn_func`, `flash_attn_qkvpacked_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` are those of flash-attn
2.8 (https://github.com/Dao-AILab/flash-attention), `scaled_dot_product_attention` is that of PyTorch 2.11.  Arrays may be of
any kind that cuflash takes; the systems themselves are not needed.  These calls go forward only: for gradients there are
`cuflash.attention_vjp` and `cuflash.attention_varlen_vjp`.  An argument that cuflash cannot honour is refused, never ignored.

Dropout is that of the originals in what it does to weights, with other random numbers: no call here knows their generators,
nor what `torch.manual_seed` has set.  Without a `dropout_seed`, which the originals do not have, each call asks the operating
system for a seed of its own; with one, equal calls give equal bits, and `cuflash.dropout_mask` tells which weights stay.
"""

from __future__ import annotations

import operator
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any

import numpy as np

from cuflash import api, arrays, decode
from cuflash.errors import ArgumentError, ShapeError, UnsupportedError
from cuflash.modifiers import ALiBi, Dropout, Modifier
from cuflash.modifiers.base import device_of, module_of
from cuflash.problem import finite, softcap_or_none

UNBOUNDED = (-1, -1)
#: cuflash's names of arguments that errors may name, and the callers'
SEED = {"seed": "dropout_seed[0]", "offset": "dropout_seed[1]"}
FLASH = {"scale": "softmax_scale", "window": "window_size", "slopes of ALiBi": "alibi_slopes", **SEED}
CACHE = {**FLASH, "lengths": "cache_seqlens", "page_table": "block_table", "k_new": "k", "v_new": "v"}
TORCH = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "attn_mask",
    "bias": "attn_mask",
    "causal": "is_causal",
    **SEED,
}


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str | None = None,
    dropout_seed: tuple[Any, Any] | None = None,
) -> Any:
    """`flash_attn_func` of flash-attn 2.8, by `cuflash.attention`.

    Parameters
    ----------
    q
        (batch, seq_q, heads_q, head_dim), float16, bfloat16, float32 or float64.
    k, v
        (batch, seq_k, heads_k, head_dim) and (batch, seq_k, heads_k, head_dim_v), dtype of q; heads_q is a multiple of
        heads_k.
    dropout_p
        From 0 to less than 1: the probability with which each weight becomes 0, the others are multiplied by 1 / (1 - p).
        The random numbers are not those of the original.
    softmax_scale
        Multiplies the logits; None is 1/√head_dim.
    causal
        True: query i sees key j iff j <= i + seq_k - seq_q, the bottom right corner, as in flash-attn since 2.1.
    window_size
        (left, right), inclusive distances in positions from that diagonal; -1 is unbounded, 0 is a bound.
    softcap
        c > 0: a scaled logit s becomes c·tanh(s/c); 0.0 is none.
    alibi_slopes
        (heads_q,) or (batch, heads_q): -slope·|i + seq_k - seq_q - j| is added to the logits.
    deterministic
        True or False: the forward always repeats bit for bit.
    return_attn_probs
        Also return the log-sum-exp, and None where the original has what dropout left of the weights; refused together with
        dropout.
    backend
        As for `cuflash.attention`; the original has none.
    dropout_seed
        (seed, offset) of `cuflash.Dropout`; None is a new seed for each call.  The original has none.

    Returns
    -------
    out
        (batch, seq_q, heads_q, head_dim_v), dtype and kind of q; 0 in a row that sees no key.
    softmax_lse
        With `return_attn_probs` only: (batch, heads_q, seq_q), natural logarithm, float32 (float64 for float64); -inf in a row
        that sees no key, where flash-attn 2 has +inf and its successors -inf.
    S_dmask
        With `return_attn_probs` only: None.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `cuflash.attention` does, and for what is not offered.

    Notes
    -----
    Source: flash_attn/flash_attn_interface.py of flash-attn 2.8.  Algorithm: Dao, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.compat import flash_attn_func
    >>> q, k = np.zeros((1, 1, 1, 4)), np.zeros((1, 2, 1, 4))
    >>> v = np.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> flash_attn_func(q, k, v, causal=True).item()  # the bottom right corner: the one query sees both keys
    2.0
    """
    check_backward_only(deterministic)
    check_probabilities(return_attn_probs, dropout_p)
    dropout = dropout_of(dropout_p, dropout_seed)
    options = flash_options(dropout, softmax_scale, causal, window_size, softcap, alibi_slopes)
    with named(FLASH):
        out, lse = api.attention(q, k, v, layout="bshd", return_lse=True, backend=backend, **options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str | None = None,
    dropout_seed: tuple[Any, Any] | None = None,
) -> Any:
    """`flash_attn_qkvpacked_func` of flash-attn 2.8, by `cuflash.attention`.

    Parameters
    ----------
    qkv
        (batch, seq, 3, heads, head_dim): queries, keys and values in one array, which is not copied.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, backend, dropout_seed
        As for `flash_attn_func`.

    Returns
    -------
    out, softmax_lse, S_dmask
        As from `flash_attn_func`.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `flash_attn_func` does.

    Notes
    -----
    Source: flash_attn/flash_attn_interface.py of flash-attn 2.8.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.compat import flash_attn_qkvpacked_func
    >>> qkv = np.zeros((1, 2, 3, 1, 1))
    >>> qkv[0, :, 2, 0, 0] = 1, 3
    >>> flash_attn_qkvpacked_func(qkv, causal=True).ravel()
    array([1., 2.])
    """
    home, native = arrays.gather({"qkv": qkv})
    packed = native["qkv"]
    if packed.ndim != 5 or packed.shape[2] != 3:
        raise ShapeError(
            f"qkv has shape {packed.shape}: must be (batch, seq, 3, heads, head_dim); pass queries, keys and values of other "
            "shapes to flash_attn_func"
        )
    check_probabilities(return_attn_probs, dropout_p)
    if alibi_slopes is not None:
        alibi_slopes = arrays.modifier_array("alibi_slopes", alibi_slopes, home)
    found = flash_attn_func(
        packed[:, :, 0],
        packed[:, :, 1],
        packed[:, :, 2],
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        backend=backend,
        dropout_seed=dropout_seed,
    )
    return (home.give(found[0]), home.give(found[1]), None) if return_attn_probs else home.give(found)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    backend: str | None = None,
    dropout_seed: tuple[Any, Any] | None = None,
) -> Any:
    """`flash_attn_varlen_func` of flash-attn 2.8, by `cuflash.attention_varlen`.

    Parameters
    ----------
    q
        (total_q, heads_q, head_dim).
    k, v
        (total_k, heads_k, head_dim) and (total_k, heads_k, head_dim_v), dtype of q.
    cu_seqlens_q, cu_seqlens_k
        int32, (batch + 1,): where each sequence begins, and where the last ends.
    max_seqlen_q, max_seqlen_k
        No sequence is longer; offsets on a device are then not read by the host.
    dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, backend, dropout_seed
        As for `flash_attn_func`, with the positions and lengths of each sequence.
    alibi_slopes
        (heads_q,); slopes of each sequence, (batch, heads_q), are refused.
    block_table
        None; pages are refused.

    Returns
    -------
    out
        (total_q, heads_q, head_dim_v), dtype and kind of q.
    softmax_lse
        With `return_attn_probs` only: (heads_q, total_q).
    S_dmask
        With `return_attn_probs` only: None.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `cuflash.attention_varlen` does, and for what is not offered.

    Notes
    -----
    Source: flash_attn/flash_attn_interface.py of flash-attn 2.8.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.compat import flash_attn_varlen_func
    >>> q, k, v = np.zeros((3, 1, 1)), np.zeros((3, 1, 1)), np.array([1.0, 3.0, 9.0]).reshape(3, 1, 1)
    >>> flash_attn_varlen_func(q, k, v, [0, 2, 3], [0, 2, 3], 2, 2).ravel()
    array([2., 2., 9.])
    """
    check_backward_only(deterministic)
    api.check_flag("return_attn_probs", return_attn_probs)
    if block_table is not None:
        raise UnsupportedError(
            "block_table: packed sequences have no pages here; flash_attn_with_kvcache takes a block_table, for equally many "
            "queries in each entry, or gather the pages first"
        )
    if alibi_slopes is not None and np.ndim(alibi_slopes) > 1:
        raise UnsupportedError(
            f"alibi_slopes has shape {np.shape(alibi_slopes)}: packed sequences take one slope for each head, (heads_q,); call "
            "flash_attn_func for each sequence, or for a padded batch"
        )
    check_probabilities(return_attn_probs, dropout_p)
    dropout = dropout_of(dropout_p, dropout_seed)
    options = flash_options(dropout, softmax_scale, causal, window_size, softcap, alibi_slopes)
    with named(FLASH):
        out, lse = api.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            return_lse=True,
            backend=backend,
            **options,
        )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    backend: str | None = None,
) -> Any:
    """`flash_attn_with_kvcache` of flash-attn 2.8, by `cuflash.attention_decode`.

    Parameters
    ----------
    q
        (batch, seq_q, heads_q, head_dim).
    k_cache, v_cache
        (batch, capacity, heads_k, head_dim) and the same with head_dim_v; with `block_table` pools of pages, (pages,
        page_size, heads_k, head_dim), of any page_size; with `cache_batch_idx` of any number of entries.
    k, v
        (batch, seq_new, heads_k, head_dim) and the same with head_dim_v: new keys and values, attended to and written into
        the caches in place, behind the `cache_seqlens` ones.
    rotary_cos, rotary_sin
        (seq, rotary_dim / 2), dtype of q, with k and v only: k is rotated to positions cache_seqlens, cache_seqlens + 1, ...;
        q likewise if `causal` or a window is given, else all of q to position cache_seqlens.  At least as long as the
        capacity.
    cache_seqlens
        Keys in the cache: an integer for all entries, or int32, (batch,), also on a device; None, without k, is all.
    cache_batch_idx
        int32, (batch,): which entry of the caches each entry of q has.
    cache_leftpad
        None; anything else is refused.
    block_table
        int32, (batch, pages of an entry): the pages of each entry, in their order.
    softmax_scale, window_size, softcap, alibi_slopes, backend
        As for `flash_attn_func`.
    causal
        True: query i sees key j iff j <= i + n - seq_q, with n the keys of its entry, new ones included.
    rotary_interleaved
        True: dimensions 0 and 1, 2 and 3, ... are rotated together; False: the first and the second half of rotary_dim.
    num_splits
        0: keys are dealt out to all multiprocessors in any case.
    return_softmax_lse
        Also return the log-sum-exp.

    Returns
    -------
    out
        (batch, seq_q, heads_q, head_dim_v), dtype and kind of q.
    softmax_lse
        With `return_softmax_lse` only: (batch, heads_q, seq_q), as from `flash_attn_func`.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `cuflash.attention_decode` does, and for what is not offered.

    Notes
    -----
    Source: flash_attn/flash_attn_interface.py of flash-attn 2.8; rotary embedding: Su et al., arXiv:2104.09864, section 3.4.
    The rotation is a few operations of arrays before the kernel, in float32 (float64 for float64).

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.compat import flash_attn_with_kvcache
    >>> q, k_cache, v_cache = np.zeros((1, 1, 1, 1)), np.zeros((1, 4, 1, 1)), np.zeros((1, 4, 1, 1))
    >>> v_cache[0, :2, 0, 0] = 1, 3
    >>> new = np.zeros((1, 1, 1, 1)), np.full((1, 1, 1, 1), 8.0)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=2).item()
    4.0
    >>> v_cache.ravel()
    array([1., 3., 8., 0.])
    """
    options = flash_options((), softmax_scale, causal, window_size, softcap, alibi_slopes)
    for name, flag in (("rotary_interleaved", rotary_interleaved), ("return_softmax_lse", return_softmax_lse)):
        api.check_flag(name, flag)
    if cache_leftpad is not None:
        raise UnsupportedError(
            "cache_leftpad: caches begin with their first key here; move the keys of an entry to the front, or give them "
            "pages of their own with block_table"
        )
    if isinstance(num_splits, bool) or num_splits != 0:
        raise UnsupportedError(
            f"num_splits={num_splits!r:.80}: keys are dealt out evenly to all multiprocessors; pass 0"
        )
    home, native = arrays.gather({"q": q, "k_cache": k_cache, "v_cache": v_cache, **api.present(k=k, v=v)})
    for name, x in native.items():
        if x.ndim != 4:
            raise ShapeError(f"{name} has shape {x.shape}: must have the 4 axes (batch or pages, seq, heads, head_dim)")
    if len(native) == 4:
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ArgumentError(f"{given} is given and {missing} is not: every key needs a value; pass both or neither")
    if k is not None and cache_seqlens is None:
        raise ArgumentError("cache_seqlens=None with k: where do the new keys belong?  Pass the keys in each cache")
    lengths = lengths_of(cache_seqlens, native["q"].shape[0])
    table = block_table
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ArgumentError(
                "cache_batch_idx and block_table are both given: the table says it all; pass one of both"
            )
        table = pages_of(cache_batch_idx, home)
    if rotary_cos is not None or rotary_sin is not None:
        if k is None:
            raise ArgumentError(
                "rotary_cos and rotary_sin without k and v: pass the new keys, which they rotate, or neither"
            )
        capacity = native["k_cache"].shape[1] * (1 if block_table is None else np.shape(block_table)[-1])
        cos, sin = rotary_tables(home, native, {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}, capacity)
        with device_of(native["q"]):
            at = first_positions(lengths, home, native["q"])
            together = not causal and options["window"] is None
            q = home.give(rotated(native["q"], cos, sin, at, rotary_interleaved, together))
            k = home.give(rotated(native["k"], cos, sin, at, rotary_interleaved))
    with named(CACHE if cache_batch_idx is None else {**CACHE, "page_table": "cache_batch_idx"}):
        return decode.attention_decode(
            q,
            k_cache,
            v_cache,
            lengths,
            page_table=table,
            k_new=k,
            v_new=v,
            layout="bshd",
            return_lse=bool(return_softmax_lse),
            backend=backend,
            **options,
        )


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backend: str | None = None,
    dropout_seed: tuple[Any, Any] | None = None,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention` of PyTorch 2.11, by `cuflash.attention`.

    Parameters
    ----------
    query
        (*batch, heads_q, seq_q, head_dim), float16, bfloat16, float32 or float64; also (seq_q, head_dim).
    key, value
        (*batch, heads_k, seq_k, head_dim) and (*batch, heads_k, seq_k, head_dim_v), dtype of `query`.
    attn_mask
        Broadcastable to (*batch, heads_q, seq_q, seq_k): bool, True = the key takes part; or logits to add, dtype of `query`.
        Not together with `is_causal`.
    dropout_p
        From 0 to less than 1: the probability with which each weight becomes 0, the others are multiplied by 1 / (1 - p).
        The random numbers are not those of the original, which also takes 1.
    is_causal
        True: query i sees key j iff j <= i, the top left corner, whatever the lengths.
    scale
        Multiplies the logits; None is 1/√head_dim.
    enable_gqa
        True: heads_q may be a multiple of heads_k; False: they are equal.
    backend
        As for `cuflash.attention`; the original has none.
    dropout_seed
        As for `flash_attn_func`.

    Returns
    -------
    out
        (*batch, heads_q, seq_q, head_dim_v), dtype and kind of `query`; 0 in a row that sees no key.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `cuflash.attention` does, and for what is not offered.

    Notes
    -----
    Source: https://docs.pytorch.org/docs/2.11/generated/torch.nn.functional.scaled_dot_product_attention.html.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.compat import scaled_dot_product_attention
    >>> query, key = np.zeros((1, 1, 4)), np.zeros((1, 2, 4))
    >>> value = np.array([[[1.0], [3.0]]])
    >>> scaled_dot_product_attention(query, key, value, is_causal=True).item()  # the top left corner: the first key alone
    1.0
    """
    dropout = dropout_of(dropout_p, dropout_seed)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        api.check_flag(name, flag)
    given = {"query": query, "key": key, "value": value, **api.present(attn_mask=attn_mask)}
    home, native = arrays.gather(given)
    q, k, v = (native[name] for name in ("query", "key", "value"))
    mask = native.get("attn_mask")
    if mask is not None and is_causal:
        raise ArgumentError(
            "attn_mask and is_causal=True are both given: pass a mask that has the causal one in it, or neither"
        )
    if mask is not None and mask.dtype not in (np.dtype(bool), q.dtype):
        raise ArgumentError(
            f"attn_mask has dtype {mask.dtype}: must be bool (True = visible), or that of query, {q.dtype}, to be added; convert "
            "it with astype"
        )
    single = q.ndim == k.ndim == v.ndim == 2
    if single:
        q, k, v = q[None], k[None], v[None]
    if not enable_gqa and q.ndim >= 3 and k.ndim >= 3 and q.shape[-3] != k.shape[-3]:
        raise ArgumentError(
            f"query has {q.shape[-3]} heads and key {k.shape[-3]}: pass enable_gqa=True if some heads of query share one of key"
        )
    is_bias = mask is not None and mask.dtype != bool
    with named(TORCH):
        out = api.attention(
            q,
            k,
            v,
            scale=scale,
            causal="top_left" if is_causal else False,
            mask=None if is_bias else mask,
            bias=mask if is_bias else None,
            modifiers=dropout,
            backend=backend,
        )
    return home.give(out[0] if single else out)


# ---- what comes in ---------------------------------------------------------------------------------------------------
@contextmanager
def named(names: dict[str, str]) -> Iterator[None]:
    """Errors that are raised inside say what the arguments that they name are called by the caller."""
    try:
        yield
    except (ArgumentError, UnsupportedError) as error:
        found = [f"{own} is {other} here" for own, other in names.items() if re.search(rf"\b{own}\b", str(error))]
        if not found:
            raise
        raise type(error)(f"{error} ({', '.join(found)})") from error


def dropout_of(dropout_p: Any, dropout_seed: Any) -> tuple[Modifier, ...]:
    """The dropout of a call; with a seed of its own where none is given."""
    p = finite("dropout_p", dropout_p, "float64")
    if not 0 <= p < 1:
        raise ArgumentError(
            f"dropout_p={dropout_p!r:.80}: must be from 0 to less than 1, the probability to drop a weight"
        )
    if dropout_seed is None:
        if p == 0:
            return ()
        dropout_seed = secrets.randbits(64), 0
    if not isinstance(dropout_seed, (tuple, list)) or len(dropout_seed) != 2:
        raise ArgumentError(
            f"dropout_seed={dropout_seed!r:.80}: must be a pair (seed, offset) as cuflash.Dropout takes them, or None for a new "
            "seed at each call"
        )
    with named({"p": "dropout_p"}):
        return (Dropout(p, *dropout_seed),)


def check_probabilities(return_attn_probs: Any, dropout_p: Any) -> None:
    """Raise where what dropout left of the weights is asked for: they are never stored."""
    api.check_flag("return_attn_probs", return_attn_probs)
    if return_attn_probs and finite("dropout_p", dropout_p, "float64") != 0:
        raise UnsupportedError(
            f"return_attn_probs=True with dropout_p={dropout_p!r:.80}: the weights are never stored; for the log-sum-exp call "
            "cuflash.attention(..., return_lse=True) with modifiers=(cuflash.Dropout(p, seed, offset),), of which "
            "cuflash.dropout_mask tells the weights that stay"
        )


def check_backward_only(deterministic: Any) -> None:
    """An argument that says something about a backward alone needs only be a flag: the forward keeps either promise."""
    api.check_flag("deterministic", deterministic)


def flash_options(
    dropout: tuple[Modifier, ...], softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, alibi_slopes: Any
) -> dict[str, Any]:
    """Options of cuflash's calls that mean what those of flash-attn do."""
    api.check_flag("causal", causal)
    cap = softcap_or_none(softcap, "float64")
    return {
        "scale": None if softmax_scale is None else finite("softmax_scale", softmax_scale, "float64"),
        "causal": bool(causal),
        "window": window_of(window_size),
        "softcap": cap,
        "modifiers": dropout if alibi_slopes is None else (*dropout, ALiBi(alibi_slopes)),
    }


def window_of(window_size: Any) -> tuple[int, int] | None:
    """The window of cuflash's calls, in which -1 is unbounded, too."""
    try:
        left, right = (operator.index(bound) for bound in window_size)
    except (TypeError, ValueError):
        left = right = -2
    if min(left, right) < -1:
        raise ArgumentError(
            f"window_size={window_size!r:.80}: must be a pair (left, right) of integers of at least 0, or -1 for unbounded"
        )
    return None if (left, right) == UNBOUNDED else (left, right)


def lengths_of(cache_seqlens: Any, batch: int) -> Any:
    """Keys of each entry, as attention_decode takes them."""
    if not isinstance(cache_seqlens, (Number, np.generic)):
        return cache_seqlens
    try:
        length = operator.index(cache_seqlens)  # type: ignore[arg-type]
    except TypeError:
        length = -1
    if length < 0 or isinstance(cache_seqlens, bool):
        raise ArgumentError(
            f"cache_seqlens={cache_seqlens!r:.80}: must be an integer of at least 0, or int32, (batch,)"
        )
    return np.full(batch, length, np.int32)


def pages_of(cache_batch_idx: Any, home: arrays.Home) -> Any:
    """A page table: each entry of the caches is a page, and an entry of the call has one of them."""
    index = arrays.modifier_array("cache_batch_idx", cache_batch_idx, home)
    if index.ndim != 1:
        raise ShapeError(f"cache_batch_idx has shape {index.shape}: must be (batch,)")
    return index[:, None] if isinstance(index, np.ndarray) else home.give(index[:, None])


# ---- rotary embedding ------------------------------------------------------------------------------------------------
def rotary_tables(home: arrays.Home, rows: dict[str, Any], given: dict[str, Any], capacity: int) -> tuple[Any, Any]:
    """Cosines and sines in the dtype of sums, if they fit."""
    missing = [name for name, x in given.items() if x is None]
    if missing:
        raise ArgumentError(f"{missing[0]}=None: a rotation needs rotary_cos and rotary_sin; pass both or neither")
    where, native = arrays.gather(given)
    if where != home:
        raise ArgumentError(f"rotary_cos is {where}, but q is {home}; move or convert it first")
    cos, sin = native.values()
    q, head_dim = rows["q"], min(rows[name].shape[-1] for name in "qk")
    for name, x in native.items():
        if x.dtype != q.dtype:
            raise ArgumentError(f"{name} has dtype {x.dtype}: must be that of q, {q.dtype}; convert it with astype")
        if x.ndim != 2 or x.shape != cos.shape or 2 * x.shape[1] > head_dim or x.shape[0] < capacity:
            raise ShapeError(
                f"{name} has shape {x.shape}: both must be (seq, rotary_dim / 2) with seq at least the capacity of the caches, "
                f"{capacity}, and rotary_dim at most head_dim, {head_dim}"
            )
    sums = np.float64 if q.dtype == np.float64 else np.float32
    return cos.astype(sums), sin.astype(sums)


def first_positions(lengths: Any, home: arrays.Home, q: Any) -> Any:
    """Where the new keys of each entry begin, (batch, 1), where q is."""
    native = arrays.modifier_array("cache_seqlens", lengths, home)
    if native.shape != q.shape[:1]:
        raise ShapeError(f"cache_seqlens has shape {native.shape}: must be (batch,) = {q.shape[:1]}, or an integer")
    return module_of(q).asarray(native).reshape(-1, 1)


def rotated(x: Any, cos: Any, sin: Any, at: Any, interleaved: bool, together: bool = False) -> Any:
    """(batch, seq, heads, head_dim) with the first dimensions rotated to the positions behind `at`, or all to `at`."""
    xp = module_of(x)
    positions = at if together else at + xp.arange(x.shape[1])
    positions = xp.clip(positions, 0, cos.shape[0] - 1)  # beyond are only those that attention_decode refuses or drops
    c, s = (table[positions][:, :, None, :] for table in (cos, sin))
    half = cos.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    a, b = x[..., first].astype(cos.dtype), x[..., second].astype(cos.dtype)
    result = x.copy()
    result[..., first] = (a * c - b * s).astype(x.dtype)
    result[..., second] = (a * s + b * c).astype(x.dtype)
    return result
