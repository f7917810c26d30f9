"""The operator Attention of ONNX: all node tests of the onnx package, its reference on random calls, and what is refused."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash.onnx
from cuflash import ArgumentError, ShapeError, UnsupportedError
from tests.test_arrays import Namespaced

ROOT = Path(__file__).parents[1]
DOUBLE = cuflash.onnx.DOUBLE


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((*shape, seed)).standard_normal(shape)


# ---- the node tests --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def score() -> Any:
    pytest.importorskip("onnx", reason="onnx is in the extra named test")
    return importlib.import_module("scripts.onnx_score")


@pytest.fixture(scope="module")
def cases(score: Any) -> Any:
    return score.cases()


def test_all_node_tests_pass(score: Any, cases: Any) -> None:
    rows = score.score("numpy", cases)
    assert [row for row in rows if row["verdict"] != "passed"] == []
    assert len(rows) >= 93
    assert {row["opset"] for row in rows} >= {23, 24, 25}
    assert {row["dtype"] for row in rows} == {"float16", "bfloat16", "float32"}


def test_the_score_counts_what_is_wrong_and_what_is_refused(score: Any, cases: Any, monkeypatch: Any) -> None:
    right = cuflash.onnx.attention

    def wrong(q: Any, *rest: Any, **options: Any) -> Any:
        if q.dtype == np.float16:
            raise UnsupportedError("no float16 here")
        found = right(q, *rest, **options)
        is_judge = q.dtype == np.float64  # by whom results of 16 bits are judged, whatever type their product has
        return found._replace(Y=found.Y * 1.1) if q.ndim == 3 and not is_judge else found

    monkeypatch.setattr(cuflash.onnx, "attention", wrong)
    rows = score.score("numpy", cases)
    counted = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in score.VERDICTS}
    halves, flat = (sum(test(c.data_sets[0][0][0]) for c in cases) for test in (is_half, is_flat))
    assert counted == {"passed": len(cases) - halves - flat, "nearer": 0, "refused": halves, "failed": flat}
    assert score.summary(rows, "numpy") == f"{counted['passed']} passed, 0 nearer, {halves} refused, {flat} failed"


@pytest.mark.parametrize("factor", [1, 1.004])
def test_the_score_tells_what_is_nearer_from_what_is_wrong(
    score: Any, cases: Any, monkeypatch: Any, factor: float
) -> None:
    """With a tolerance of 0, what the package expects in 16 bits is off by more than what cuflash computes."""
    right = cuflash.onnx.attention

    def scaled(q: Any, *rest: Any, **options: Any) -> Any:
        found = right(q, *rest, **options)
        return found._replace(Y=(found.Y * factor).astype(q.dtype)) if q.dtype != np.float64 else found

    monkeypatch.setattr(cuflash.onnx, "attention", scaled)
    monkeypatch.setattr(
        score, "compare", lambda outputs, wanted, *_: np.testing.assert_array_equal(outputs[0], wanted[0])
    )
    some = [
        c for c in cases if c.name in ("test_attention_4d_fp16", "test_attention_4d", "test_attention_4d_causal_bf16")
    ]
    verdicts = {row["dtype"]: row["verdict"] for row in score.score("numpy", some)}
    wrong = {"float16": "failed", "bfloat16": "failed", "float32": "failed"}
    assert verdicts == (wrong | {"float16": "nearer", "bfloat16": "nearer"} if factor == 1 else wrong)


def is_half(x: np.ndarray) -> bool:
    return x.dtype == np.float16


def is_flat(x: np.ndarray) -> bool:
    return x.ndim == 3


def test_the_committed_score_is_a_whole_one() -> None:
    result = json.loads((ROOT / "scripts" / "results" / "cpu-onnx.json").read_text(encoding="utf-8"))
    assert len(result["rows"]) == 93
    assert {row["verdict"] for row in result["rows"]} == {"passed"}


# ---- the reference of the onnx package -------------------------------------------------------------------------------
def random_call(seed: int, step: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and attributes of a call, in float64; head sizes are multiples of `step`."""
    rng = np.random.default_rng(seed)
    flip = lambda share=0.5: rng.random() < share  # noqa: E731
    batch, heads_k, group = (int(rng.integers(1, 4)) for _ in range(3))
    seq_q, seq_k = (int(rng.integers(1, 9)) for _ in range(2))
    head_dim, head_dim_v = (step * int(rng.integers(1, 7)) for _ in range(2))
    heads_q, past = heads_k * group, 0
    given: dict[str, Any] = {
        "Q": rng.standard_normal((batch, heads_q, seq_q, head_dim)),
        "K": rng.standard_normal((batch, heads_k, seq_k, head_dim)),
        "V": rng.standard_normal((batch, heads_k, seq_k, head_dim_v)),
    }
    attributes: dict[str, Any] = {"is_causal": int(flip()), "qk_matmul_output_mode": int(rng.integers(0, 4))}
    kind = rng.integers(0, 3)
    if kind == 1:
        past = int(rng.integers(0, 7))
        given["past_key"] = rng.standard_normal((batch, heads_k, past, head_dim))
        given["past_value"] = rng.standard_normal((batch, heads_k, past, head_dim_v))
    width = seq_k + past
    if flip():
        if flip(0.3):
            width = int(rng.integers(1, width + 1))
        target = (batch, heads_q, seq_q, width)
        shape = tuple(n if axis == 3 or flip(0.7) else 1 for axis, n in enumerate(target))[int(rng.integers(0, 4)) :]
        hidden = rng.random(shape) < 0.3
        given["attn_mask"] = ~hidden if flip() else np.where(hidden, -np.inf, rng.standard_normal(shape))
    if kind == 2:
        given["nonpad_kv_seqlen"] = rng.integers(0, seq_k + 1, batch)
    for side in ("left", "right"):
        if flip(0.3):
            attributes[f"{side}_window_size"] = int(rng.integers(-1, 5))
    if flip(0.3):
        attributes["scale"] = float(rng.random() * 2)
    if flip(0.3) and attributes["qk_matmul_output_mode"] > 0:  # in mode 0 that reference has softcap's result
        attributes["softcap"] = float(rng.random() + 0.5)
    if flip():
        for name, heads in (("Q", heads_q), ("K", heads_k), ("V", heads_k)):
            x = given[name].swapaxes(1, 2)
            given[name] = x.reshape(*x.shape[:2], -1)
            attributes["q_num_heads" if name == "Q" else "kv_num_heads"] = heads
    return given, attributes


def seq_q_of(given: dict[str, Any]) -> int:
    return given["Q"].shape[2 if given["Q"].ndim == 4 else 1]


@pytest.mark.parametrize("part", range(4))
def test_random_calls_against_the_reference_of_onnx(part: int) -> None:
    pytest.importorskip("onnx", reason="onnx is in the extra named test")
    reference = importlib.import_module("onnx.reference.ops.op_attention")._compute_attention
    seen = set()
    for seed in range(part * 150, part * 150 + 150):
        given, attributes = random_call(seed)
        plain = dict(given)
        if "attn_mask" in given:  # that reference takes the number of queries of a causal mask from this one
            mask = np.atleast_2d(given["attn_mask"])
            plain["attn_mask"] = np.broadcast_to(mask, (*mask.shape[:-2], seq_q_of(given), mask.shape[-1]))
        with np.errstate(all="ignore"):
            wanted = reference(**plain, **attributes, _validate_attention25=False)
        before = {name: x.copy() for name, x in given.items()}
        found = cuflash.onnx.attention(**given, **attributes, return_qk_matmul_output=True)
        for name, got, want in zip(found._fields, found, wanted, strict=True):
            if got is None:
                assert "past_key" not in given
                continue
            np.testing.assert_allclose(got, want, atol=1e-12, err_msg=f"seed {seed}, {name}: {attributes}")
        assert all((given[name] == x).all() for name, x in before.items())
        alone = cuflash.onnx.attention(**given, **attributes)
        assert alone.qk_matmul_output is None
        np.testing.assert_array_equal(alone.Y, found.Y)
        seen.add(tuple(name in given for name in ("attn_mask", "past_key", "nonpad_kv_seqlen")))
    assert len(seen) == 6, "some kinds of call did not come up"


# ---- what the reference does not say ---------------------------------------------------------------------------------
def test_mode_0_is_before_softcap() -> None:
    q, k = numbers(1, 1, 3, 4), numbers(1, 1, 5, 4, seed=1)
    found = cuflash.onnx.attention(q, k, k, softcap=0.5, scale=2.0, return_qk_matmul_output=True)
    np.testing.assert_allclose(found.qk_matmul_output, 2 * q @ k.swapaxes(2, 3), atol=1e-14)


@pytest.mark.parametrize("mask", ["float", "bool"])
def test_nan_behind_a_mask_reaches_nothing(mask: str) -> None:
    """Neither NaN in hidden keys and values nor in a query that sees none."""
    q, k, v = numbers(1, 1, 3, 4), numbers(1, 1, 5, 4, seed=1), numbers(1, 1, 5, 4, seed=2)
    seen = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], bool)
    want = cuflash.onnx.attention(q, k, v, seen).Y
    k[..., [2, 4], :] = v[..., [2, 4], :] = q[..., 1, :] = np.nan
    given = seen if mask == "bool" else np.where(seen, 0, -np.inf)
    found = cuflash.onnx.attention(q, k, v, given, qk_matmul_output_mode=3, return_qk_matmul_output=True)
    np.testing.assert_allclose(found.Y, want, atol=1e-14)
    np.testing.assert_array_equal(found.qk_matmul_output[~seen[None, None]], 0)


def test_a_row_whose_scores_are_all_minus_infinity_has_no_weights() -> None:
    q, k = np.array([[[[-np.inf], [1.0]]]]), np.ones((1, 1, 3, 1))
    found = cuflash.onnx.attention(q, k, k, qk_matmul_output_mode=3, return_qk_matmul_output=True)
    np.testing.assert_allclose(found.Y.ravel(), [0, 1])
    np.testing.assert_allclose(found.qk_matmul_output[0, 0], [[0] * 3, [1 / 3] * 3])


def test_double_precision_is_double() -> None:
    given = [numbers(2, 2, 5, 8, seed=seed).astype(np.float32) for seed in range(3)]
    options = {"softcap": 1.5, "is_causal": 1, "qk_matmul_output_mode": 3, "return_qk_matmul_output": True}
    wide = cuflash.onnx.attention(*(x.astype(np.float64) for x in given), **options)
    found = cuflash.onnx.attention(*given, softmax_precision=DOUBLE, **options)
    for got, want in ((found.Y, wide.Y), (found.qk_matmul_output, wide.qk_matmul_output)):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want.astype(np.float32))
    single = cuflash.onnx.attention(*given, **options)
    assert (single.Y != found.Y).any()
    for code in cuflash.onnx.PRECISIONS.keys() - {DOUBLE}:
        np.testing.assert_array_equal(cuflash.onnx.attention(*given, softmax_precision=code, **options).Y, single.Y)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(("seq", "backend", "wide"), [(100, None, True), (600, None, False), (100, "numpy", False)])
def test_small_calls_of_16_bits_are_computed_in_float32(
    monkeypatch: Any, dtype: Any, seq: int, backend: str | None, wide: bool
) -> None:
    """Unless a backend is named; the bias goes along, and the result is rounded once."""
    right, seen = cuflash.api.attention, []

    def spied(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append({x.dtype.name for x in (q, k, v, options["bias"])})
        return right(q, k, v, **options)

    monkeypatch.setattr(cuflash.api, "attention", spied)
    q, k, v = (numbers(1, 2, seq, 96, seed=seed).astype(dtype) for seed in range(3))
    bias = numbers(seq, seq).astype(dtype)
    found = cuflash.onnx.attention(q, k, v, bias, backend=backend).Y
    assert seen == [{"float32"} if wide else {np.dtype(dtype).name}]
    assert found.dtype == dtype
    if wide:
        single = cuflash.onnx.attention(*(x.astype(np.float32) for x in (q, k, v, bias))).Y
        np.testing.assert_array_equal(found, single.astype(dtype))


@pytest.mark.parametrize("options", [{}, {"is_causal": 1}, {"left_window_size": 1}, {"is_causal": 1, "mask": True}])
def test_lengths_in_lists(options: dict[str, Any]) -> None:
    q, k = numbers(2, 1, 3, 4), numbers(2, 1, 5, 4, seed=1)
    mask = np.ones((3, 5), bool) if "mask" in options else None
    options = {name: x for name, x in options.items() if name != "mask"}
    found = cuflash.onnx.attention(q, k, k, mask, nonpad_kv_seqlen=[5, 2], **options).Y
    for entry, length in enumerate((5, 2)):
        one = (q[entry : entry + 1], *[k[entry : entry + 1, :, :length]] * 2)
        wanted = cuflash.onnx.attention(*one, nonpad_kv_seqlen=np.array([length], np.int32), **options).Y
        np.testing.assert_allclose(found[entry], wanted[0], atol=1e-15)


def test_memory_is_linear() -> None:
    seq_q, seq_k = 512, 2048
    q = np.zeros((1, 1, seq_q, 8), np.float32)
    k = np.zeros((1, 1, seq_k, 8), np.float32)
    one_matrix = 4 * seq_q * seq_k
    calls: list[dict[str, Any]] = [
        {"is_causal": 1, "left_window_size": 100},
        {"is_causal": 1, "nonpad_kv_seqlen": [1500]},
        {"is_causal": 1, "past_key": k, "past_value": k},
        {"nonpad_kv_seqlen": [1500], "attn_mask": np.ones(seq_k, bool)},
    ]
    for options in calls:
        tracemalloc.start()
        cuflash.onnx.attention(q, k, k, **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < one_matrix / 2, options.keys()


def test_arrays_of_another_library() -> None:
    q, k = numbers(1, 2, 3, 4), numbers(1, 2, 5, 4)
    options = {"past_key": k, "past_value": k, "is_causal": 1, "return_qk_matmul_output": True}
    moved = {name: Namespaced(x) if name.startswith("past") else x for name, x in options.items()}
    found = cuflash.onnx.attention(Namespaced(q), Namespaced(k), Namespaced(k), **moved)
    for got, want in zip(found, cuflash.onnx.attention(q, k, k, **options), strict=True):
        assert type(got) is Namespaced
        np.testing.assert_array_equal(got.array, want)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_stay(dtype: Any) -> None:
    q, k = numbers(1, 2, 3, 4).astype(dtype), numbers(1, 2, 5, 4).astype(dtype)
    bias = numbers(3, 10).astype(dtype)
    found = cuflash.onnx.attention(q, k, k, bias, k, k, return_qk_matmul_output=True)
    assert [x.dtype for x in found] == [np.dtype(dtype)] * 4


def test_onnx_is_not_imported() -> None:
    code = (
        "import sys, numpy, cuflash.onnx; x = numpy.ones((1, 1, 2, 3)); cuflash.onnx.attention(x, x, x)\n"
        "assert 'onnx' not in sys.modules and 'cupy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- what is refused -------------------------------------------------------------------------------------------------
Q, K, V = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)


def refused(words: tuple[str, ...], error: type[Exception] = ArgumentError, **changes: Any) -> Any:
    return pytest.param(changes, words, error, id=f"{'-'.join(changes)}: {words[0]}")


@pytest.mark.parametrize(
    ("changes", "words", "error"),
    [
        refused(("is_causal=2", "0 (no), 1 (yes)"), is_causal=2),
        refused(("is_causal='yes'", "one of"), is_causal="yes"),
        refused(("qk_matmul_output_mode=4", "3 (softmax)"), qk_matmul_output_mode=4),
        refused(("softmax_precision=5", "11 (DOUBLE)"), softmax_precision=5),
        refused(("left_window_size=-2", "-1 for unbounded"), left_window_size=-2),
        refused(("right_window_size=1.5", "integer"), right_window_size=1.5),
        refused(("left_window_size=True", "integer"), left_window_size=True),
        refused(("scale=-1", "at least 0", "square root"), scale=-1),
        refused(("scale=nan", "finite"), scale=np.nan),
        refused(("softcap=-2.0", "0.0 for none"), softcap=-2.0),
        refused(("softcap='x'", "real number"), softcap="x"),
        refused(("return_qk_matmul_output=1", "True or False"), return_qk_matmul_output=1),
        refused(("backend='tpu'", "numpy"), backend="tpu"),
        refused(("backend='mma'", "q is a numpy array"), UnsupportedError, backend="mma"),
        refused(("q_num_heads=3", "Q (2, 4, 5, 8)", "4 heads"), q_num_heads=3),
        refused(("kv_num_heads=4", "K (2, 2, 7, 8)", "leave the attribute away"), kv_num_heads=4),
        refused(("q_num_heads=0", "at least 1"), q_num_heads=0),
        refused(("all have 3 axes, or all 4", "Q (2, 5, 32)"), ShapeError, Q=numbers(2, 5, 32)),
        refused(("q_num_heads=None", "need both"), Q=numbers(2, 5, 32), K=numbers(2, 7, 16), V=numbers(2, 7, 12)),
        refused(
            ("K has shape (2, 7, 16)", "multiple of kv_num_heads=3"),
            ShapeError,
            Q=numbers(2, 5, 32),
            K=numbers(2, 7, 16),
            V=numbers(2, 7, 12),
            q_num_heads=4,
            kv_num_heads=3,
        ),
        refused(("K is [", "numpy.asarray"), K=[1.0]),
        refused(("q float64", "k float32", "common"), K=numbers(*K).astype(np.float32)),
        refused(("heads of q (4)", "(3)"), ShapeError, K=numbers(2, 3, 7, 8), V=numbers(2, 3, 7, 6)),
        refused(("past_key is given and past_value is not",), past_key=numbers(*K)),
        refused(("past_value is given and past_key is not",), past_value=numbers(*V)),
        refused(
            ("past_key has shape (2, 2, 3, 9)", "(2, 2, past, 8)"),
            ShapeError,
            past_key=numbers(2, 2, 3, 9),
            past_value=numbers(2, 2, 3, 6),
        ),
        refused(
            ("past_value has dtype float32", "float64"),
            past_key=numbers(2, 2, 3, 8),
            past_value=numbers(2, 2, 3, 6).astype(np.float32),
        ),
        refused(
            ("past_key (2, 2, 3, 8), past_value (2, 2, 4, 6)", "equally long"),
            ShapeError,
            past_key=numbers(2, 2, 3, 8),
            past_value=numbers(2, 2, 4, 6),
        ),
        refused(
            ("nonpad_kv_seqlen and past_key",),
            past_key=numbers(2, 2, 3, 8),
            past_value=numbers(2, 2, 3, 6),
            nonpad_kv_seqlen=[1, 2],
        ),
        refused(("nonpad_kv_seqlen has shape (3,)", "(2,)"), ShapeError, nonpad_kv_seqlen=[1, 2, 3]),
        refused(("nonpad_kv_seqlen has dtype float64", "int64"), nonpad_kv_seqlen=[1.0, 2.0]),
        refused(("nonpad_kv_seqlen contains 8", "from 0 to 7"), nonpad_kv_seqlen=[1, 8]),
        refused(("nonpad_kv_seqlen contains -1",), nonpad_kv_seqlen=np.array([-1, 2])),
        refused(("attn_mask has dtype int32", "True = visible"), attn_mask=np.ones((5, 7), np.int32)),
        refused(("attn_mask has dtype float32", "float64"), attn_mask=np.ones((5, 7), np.float32)),
        refused(("attn_mask has shape (5, 8)", "(2, 4, 5, 7)"), ShapeError, attn_mask=np.ones((5, 8), bool)),
        refused(("attn_mask has shape (4, 7)", "may be shorter"), ShapeError, attn_mask=np.ones((4, 7), bool)),
        refused(("attn_mask has shape ()", "may be shorter"), ShapeError, attn_mask=np.ones((), bool)),
        refused(("attn_mask has shape (1, 2, 4, 5, 7)",), ShapeError, attn_mask=np.ones((1, 2, 4, 5, 7), bool)),
    ],
)
def test_bad_calls(changes: dict[str, Any], words: tuple[str, ...], error: type[Exception]) -> None:
    with pytest.raises((ArgumentError, UnsupportedError)) as caught:
        cuflash.onnx.attention(**({"Q": numbers(*Q), "K": numbers(*K), "V": numbers(*V)} | changes))
    assert type(caught.value) is error
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_names_are_those_of_the_operator() -> None:
    schemas = pytest.importorskip("onnx", reason="onnx is in the extra named test").defs
    schema = schemas.get_schema("Attention", 25)
    parameters = list(inspect.signature(cuflash.onnx.attention).parameters)
    assert parameters[:7] == [x.name for x in schema.inputs]
    assert set(parameters[7:]) == {*schema.attributes, "return_qk_matmul_output", "backend"}
    assert list(cuflash.onnx.Outputs._fields) == [x.name for x in schema.outputs]


def test_documentation() -> None:
    text = inspect.getdoc(cuflash.onnx.attention) or ""
    listed = text.partition("\nParameters\n")[2].partition("\nReturns\n")[0]
    documented = {name for line in listed.splitlines() if not line.startswith(" ") for name in line.split(", ")}
    assert set(inspect.signature(cuflash.onnx.attention).parameters) <= documented
    result = doctest.testmod(cuflash.onnx)
    assert result.attempted > 0
    assert result.failed == 0
