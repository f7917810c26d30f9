"""Scores made to measure: each head has a pattern, by which its scores exceed those that a forward has met before.

A pattern says by how many powers of two the scores of each block of keys exceed those of the blocks after it, for all rows
or for some: Hopper's forward walks from the last keys to the first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cuflash.problem import Call, describe
from tests.cases import DTYPES

SCALE = 0.25
LARGEST = {"float16": 6e4, "bfloat16": 3e38}


@dataclass(frozen=True)
class Pattern:
    """Scores of one head, in powers of two.

    `rise` maps the place of a block in the walk (0, 1, ...) to what is added to all its scores; `key`, to what is added to
    one key of the block only.  `rows` are the rows that it is for, the others have none of it; later rows have less of it
    by the part `tilt`.
    """

    rise: Callable[[int], float] = field(default=lambda _: 0.0)
    key: Callable[[int], float] = field(default=lambda _: 0.0)
    rows: range | None = None
    tilt: float = 0.0
    values: str = "normal"
    dtypes: tuple[str, ...] = tuple(LARGEST)


PATTERNS = {
    "still": Pattern(),
    "by 12": Pattern(lambda n: 12 * n),  # more than float16 could hold if it were not repaired, in two blocks
    "by 12 with large values": Pattern(lambda n: 12 * n, values="large"),
    "by 27": Pattern(lambda n: 27 * n),
    "by 95": Pattern(lambda n: 95 * n),
    "by 110": Pattern(lambda n: 110 * n),
    "by 140": Pattern(lambda n: 140 * n),
    "by 3000": Pattern(lambda n: 3000 * n),
    "one key by 40": Pattern(key=lambda n: 40 * (n == 3), values="huge key"),
    "one key by 300": Pattern(key=lambda n: 300 * (n == 2)),
    "one key by 300 at last": Pattern(key=lambda n: 300 * (n == 3), values="huge key"),
    "one row by 20": Pattern(lambda n: 20 * n, rows=range(21, 22)),
    "one row by 300": Pattern(lambda n: 300 * n, rows=range(21, 22)),
    "one warp by 300": Pattern(lambda n: 300 * n, rows=range(96, 112)),
    "two rows of a warp apart": Pattern(lambda n: (20, 300)[n % 2] * n, rows=range(37, 48, 5)),
    "falling": Pattern(lambda n: -50 * n),
    "negative": Pattern(lambda n: -500 + 15 * n),
    "far": Pattern(lambda n: 1e8 * (1 + min(n, 3))),
    "far and still": Pattern(lambda _: 6e8, tilt=0.5),
    "farther": Pattern(lambda n: 1e10 * (1 + min(n, 3)), tilt=0.5, dtypes=("bfloat16",)),
    "far at last": Pattern(lambda n: 3e7 * (n == 2)),
    "across far": Pattern(lambda n: 2**20 - 100 + 60 * n),
}


def pattern_scores(pattern: Pattern, block_k: int, seq_q: int, seq_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the rows, and what each key's scores get."""
    blocks = -(-seq_k // block_k)
    places = blocks - 1 - np.arange(seq_k) // block_k
    scores = np.array([pattern.rise(n) for n in range(blocks)], float)[places]
    for n in range(blocks):
        scores[min((blocks - 1 - n) * block_k + 1, seq_k - 1)] += pattern.key(n)
    weights = np.zeros(seq_q)
    rows = range(seq_q) if pattern.rows is None else pattern.rows
    weights[rows] = 1 - pattern.tilt * np.array(rows) / seq_q
    return weights, scores


def head(pattern: Pattern, block_k: int, seq_q: int, seq_k: int, sizes: tuple[int, int], dtype: str, rng) -> tuple:
    """Arrays q, k, v of one head."""
    q, k = (0.7 * rng.standard_normal((n, sizes[0])) for n in (seq_q, seq_k))
    v = rng.standard_normal((seq_k, sizes[1]))
    weights, scores = pattern_scores(pattern, block_k, seq_q, seq_k)
    logits = scores * np.log(2) / SCALE
    # Three columns add up to what one could not hold precisely enough.
    factor = 2.0 ** np.floor(np.log2(max(1, abs(logits).max())) / 2)
    for column in range(3):
        q[:, column] = weights * factor
        k[:, column] = (logits / factor).astype(DTYPES[dtype])
        logits = logits - k[:, column] * factor
        factor /= 64
    if pattern.values == "large":  # so large that 2^8 of each still adds up to a finite sum
        v = np.sign(v) * min(LARGEST[dtype], 1e33)
    if pattern.values == "huge key":
        v[scores > 0] = LARGEST[dtype]
    return q, k, v


def made(names, block_k: int, sizes, dtype: str, seq_q: int, seq_k: int, batch: int = 1, **options) -> Call:
    """A call with one head for each pattern that the dtype can hold."""
    rng = np.random.default_rng(len(names))
    names = [n for n in names if dtype in PATTERNS[n].dtypes]
    heads = [[head(PATTERNS[n], block_k, seq_q, seq_k, sizes, dtype, rng) for n in names] for _ in range(batch)]
    arrays = (np.array([[h[i] for h in entry] for entry in heads]).astype(DTYPES[dtype]) for i in range(3))
    return describe(*arrays, scale=SCALE, **options)
