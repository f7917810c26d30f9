"""Any call is what the reference says: shapes, dtypes, strides and options that nobody wrote down, forward and backward.

Each run makes the same calls; CUFLASH_DRAWN_CALLS=20 makes twenty times as many, and others each time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash.problem import canonical
from tests.decode_cases import DecodeCase
from tests.drawn_calls import Drawn, Host, cases, check, decode_cases, drawn, drawn_calls, expected, packs
from tests.packs import Judge, Pack


@drawn_calls(300)
@given(drawn())
def test_attention(call: Drawn) -> None:
    check(Host(), call)


@drawn_calls(100)
@given(cases(), st.integers(0, 99), st.booleans())
def test_statistics_and_weights(case: Any, seed: int, batch_invariant: bool) -> None:
    made = case.make(seed)
    q, k, v, options = made["q"], made["k"], made["v"], made["options"]
    _, expectation = expected(made, case)
    found = cuflash.attention_statistics(q, k, v, batch_invariant=batch_invariant, **options)
    expectation.check_forward(canonical(found.out, case.layout), found.lse)
    expectation.check_statistics({name: getattr(found, name) for name in ("maximum", "entropy", "column_sums")})


@drawn_calls(60)
@given(packs(), st.integers(0, 99), st.booleans())
def test_packed_calls(pack: Pack, seed: int, with_longest: bool) -> None:
    made = pack.make(seed)
    judge = Judge(*pack.call(seed))
    names, options = ("max_seqlen_q", "max_seqlen_k"), dict(made["options"])
    if with_longest:
        options |= {name: int(np.diff(x).max(initial=0)) for name, x in zip(names, made["offsets"], strict=True)}
    inputs = [made[name] for name in "qkv"]
    out, lse, vjp = cuflash.attention_varlen_vjp(*inputs, *made["offsets"], return_lse=True, **options)
    judge.check_forward(out.swapaxes(0, 1), lse)
    found = vjp(made["dout"], made["dlse"])
    of_rows, of_operands = (x.swapaxes(0, 1) for x in found[:3]), (x[:, None, None] for x in found[3:])
    judge.check_backward(type(found)(*of_rows, *of_operands))


@drawn_calls(80)
@given(decode_cases(), st.integers(0, 99))
def test_decode_calls(case: DecodeCase, seed: int) -> None:
    made = case.make(seed)
    out, lse = cuflash.attention_decode(
        **made.arrays, lengths=made.lengths, page_table=made.table, return_lse=True, **made.options
    )
    made.check(canonical(out, case.layout), lse)
    made.check_caches(made.arrays["k_cache"], made.arrays["v_cache"])
