"""Statistics: what `cuflash.attention_statistics` returns."""

from __future__ import annotations

from typing import Any, NamedTuple


class Statistics(NamedTuple):
    """The results of attention, and what was asked for of its scores and weights; the others are None.

    Parameters
    ----------
    out, lse
        As from `attention`.
    maximum
        Largest score of each row.
    entropy
        Entropy of each row's weights, in nats.
    column_sums
        Sum of each key's weights over the queries.
    """

    out: Any
    lse: Any
    maximum: Any = None
    entropy: Any = None
    column_sums: Any = None
