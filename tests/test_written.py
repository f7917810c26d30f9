"""Modifiers that users write: equal to the built-in ones, differentiated rightly, and wrong ones refused where they are wrong."""

import ast
import copy
import gc
import inspect
import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import cuflash
from cuflash import (
    ALiBi,
    ArgumentError,
    Documents,
    MaskModifier,
    ScoreModifier,
    ShapeError,
    UnsupportedError,
    arrays,
    numpy_backend,
    plan,
    problem,
    reference,
    source,
)
from cuflash.backends import described_device
from cuflash.gradients import gradient_sums
from cuflash.modifiers import REGISTRY, expression, written
from cuflash.modifiers.written import CLASSES, KEPT
from tests import written_cases
from tests.cases import DTYPES, Case
from tests.test_reference import central_difference
from tests.tolerance import Expectation
from tests.variants import Entry

BATCH, HEADS, SEQ_Q, SEQ_K = SIZES = (2, 4, 33, 45)
CAUSAL = "k <= q + seq_k - seq_q"


def inputs(dtype="float32", sizes=SIZES, dim=8):
    rng = np.random.default_rng(3)
    batch, heads, seq_q, seq_k = sizes
    shapes = [(batch, heads, seq_q, dim), (batch, heads // 2, seq_k, dim), (batch, heads // 2, seq_k, dim)]
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def results(*chain, dtype="float32", **options):
    """Output, lse and gradients by name, from the numpy backend."""
    q, k, v = inputs(dtype)
    out, lse, vjp = cuflash.attention_vjp(q, k, v, modifiers=chain, return_lse=True, **options)
    rng = np.random.default_rng(4)
    gradients = vjp(rng.standard_normal(out.shape).astype(out.dtype), rng.standard_normal(lse.shape).astype(lse.dtype))
    return {"out": out, "lse": lse, **gradients._asdict()}


def assert_same_bits(got, want, names=("out", "lse", "dq", "dk", "dv")):
    for name in names:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


# ---- as the built-in ones ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi(dtype):
    slopes = np.array([0.5, 0.25, 0.125, 0.0625])
    own = ScoreModifier("s - slope[h] * abs(q + seq_k - seq_q - k)", slope=slopes)
    assert_same_bits(results(own, dtype=dtype), results(ALiBi(slopes), dtype=dtype))


def test_softcap():
    got, want = results(ScoreModifier("c * tanh(s / c)", c=2.0)), results(softcap=2.0)
    assert_same_bits(got, want, ("out", "lse", "dv"))
    for name in ("dq", "dk"):  # the derivative is the same up to rounding
        np.testing.assert_allclose(got[name], want[name], atol=1e-5)


@pytest.mark.parametrize("letters", ["bhqk", "hqk", "bhq", "k", "h", "bk"])
def test_bias_and_its_gradient(letters):
    """Of every broadcast shape, in any order of axes, with another name for the gradient."""
    lengths = dict(zip("bhqk", SIZES, strict=True))
    bias = (
        np.random.default_rng(0).standard_normal([lengths[x] if x in letters else 1 for x in "bhqk"]).astype(np.float32)
    )
    want = results(bias=bias)
    for order in (letters, letters[::-1]):
        table = bias.reshape([lengths[x] for x in letters]).transpose([letters.index(x) for x in order])
        got = results(ScoreModifier(f"s + table[{', '.join(order)}]", table=table, gradients=("table",)))
        assert_same_bits(got, want)
        assert got["dtable"].shape == table.shape
        back = got["dtable"].transpose([order.index(x) for x in letters]).reshape(bias.shape)
        np.testing.assert_array_equal(back, want["dbias"])


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (CAUSAL, lambda q, k: k <= q + SEQ_K - SEQ_Q),
        ("k < prefix or k <= q", lambda q, k: (k < 7) | (k <= q)),
        ("(q - k) % 3 == 0 and abs(q - k) < 30", lambda q, k: ((q - k) % 3 == 0) & (abs(q - k) < 30)),
        ("q // 8 == k // 8 if h % 2 == 1 else k < 40", lambda q, k: np.stack([k + 0 * q < 40, q // 8 == k // 8] * 2)),
        ("not 3 <= k < 9", lambda q, k: (k < 3) | (k >= 9)),
        ("True", lambda q, k: q + k >= 0),
    ],
    ids=["causal", "prefix", "dilated", "by head", "chain", "constant"],
)
def test_masks(text, seen):
    mask = seen(np.arange(SEQ_Q)[:, None], np.arange(SEQ_K)[None, :])
    own = MaskModifier(text, **({"prefix": 7} if "prefix" in text else {}))
    assert_same_bits(results(own), results(mask=mask))
    assert_same_bits(results(own, causal=True, softcap=3.0), results(mask=mask, causal=True, softcap=3.0))


def test_documents():
    ids_q, ids_k = (np.sort(np.random.default_rng(0).integers(0, 3, (BATCH, n))) for n in (SEQ_Q, SEQ_K))
    own = MaskModifier("doc_q[b, q] == doc_k[b, k]", doc_q=ids_q, doc_k=ids_k)
    assert_same_bits(results(own), results(Documents(ids_q, ids_k)))
    one = MaskModifier("ids[q] == ids[k]", ids=np.arange(50)[:SEQ_Q] // 9)
    square = [np.ones((1, 2, SEQ_Q, 4), np.float32) for _ in range(3)]
    want = cuflash.attention(*square, modifiers=[Documents(np.arange(SEQ_Q) // 9, np.arange(SEQ_Q) // 9)])
    np.testing.assert_array_equal(cuflash.attention(*square, modifiers=[one]), want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_relative_table(dtype):
    """T5's: a bucket for each distance, a number for each bucket and head; an index beyond the table is its last one."""
    rng = np.random.default_rng(0)
    table, bucket = rng.standard_normal((6, HEADS)).astype(dtype), np.minimum(np.arange(60) // 9, 5)
    q, k = np.arange(SEQ_Q)[:, None], np.arange(SEQ_K)[None, :]
    at = bucket[np.clip(q - k + 40, 0, 59)]
    want = results(bias=table[at].transpose(2, 0, 1).copy(), dtype=dtype)
    rel = ScoreModifier("s + table[bucket[q - k + 40], h]", table=table, bucket=bucket, gradients="table")
    got = results(rel, dtype=dtype)
    assert_same_bits(got, want)
    summed = np.zeros((6, HEADS))
    np.add.at(summed, at, want["dbias"].astype(np.float64).transpose(1, 2, 0))
    np.testing.assert_allclose(got["dtable"], summed, atol=1e-10 if dtype == "float64" else 1e-4)


# ---- every backend's twin ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", written_cases.NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_tiles(name, dtype):
    """In tiles of few rows and columns, and whatever heads share a chunk."""
    real = np.float64 if dtype == "float64" else np.float32
    made = Case("own", dtype, heads_q=4, dlse=True).make()
    made["options"]["modifiers"] = written_cases.chains(SIZES, real)[name]
    call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
    expectation = Expectation(call, made["dout"], made["dlse"])
    for blocks in ({"block_q": 16, "block_k": 16}, {}):
        out, lse = numpy_backend.forward(call, **blocks)
        expectation.check_forward(out, lse)
        expectation.check_backward(numpy_backend.backward(call, out, lse, made["dout"], made["dlse"], **blocks))


def test_heads_and_entries_have_their_numbers_in_every_chunk(monkeypatch):
    monkeypatch.setattr(numpy_backend, "TILE_SCORES", 400)
    q, k, v = inputs("float64")
    chain = [ScoreModifier("s * (1 + h) + b * k / (1.0 + kv)"), MaskModifier("(k + h + b) % 3 != 0")]
    call = problem.describe(q, k, v, modifiers=chain)
    assert len(list(numpy_backend.chunks(call, 16, 16))) == BATCH * HEADS // 2
    out, lse = numpy_backend.forward(call, block_q=16, block_k=16)
    np.testing.assert_allclose(out, reference.forward(call)[0], atol=1e-12)
    found = numpy_backend.backward(call, out, lse, q, block_q=16, block_k=16)
    for got, want in zip(found, reference.backward(call, q), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-11)


def test_batch_axes_count_as_one():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 2, 2, 9, 4)) for _ in range(3))
    ids, heat = rng.integers(0, 2, (6, 9)), rng.standard_normal(6)
    chain = [
        MaskModifier("ids[b, k] == 0 or k == b", ids=ids),
        ScoreModifier("s * heat[b] + b", heat=heat, gradients="heat"),
    ]
    out, vjp = cuflash.attention_vjp(q, k, v, modifiers=chain)
    flat, flat_vjp = cuflash.attention_vjp(*(x.reshape(6, 2, 9, 4) for x in (q, k, v)), modifiers=chain)
    np.testing.assert_array_equal(out.reshape(flat.shape), flat)
    for got, want in zip(vjp(out), flat_vjp(flat), strict=True):
        np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-13)


def test_rows_of_weights():
    """Looking at a row reads the row's own part of arrays, and tables as a whole."""
    q, k, v = inputs()
    for chain in written_cases.chains(SIZES).values():
        want = reference.weights(problem.describe(q, k, v, modifiers=chain))
        got = cuflash.attention_weights(q, k, [4, 20], modifiers=chain)
        np.testing.assert_allclose(got, want[..., [4, 20], :], atol=1e-5)


def test_packed_sequences():
    """Positions and lengths are those of each sequence."""
    rng = np.random.default_rng(0)
    x, offsets, slope = rng.standard_normal((40, 2, 4)), [0, 13, 13, 40], np.array([0.5, 0.1])
    chain = [
        ScoreModifier("s - slope[h] * (q % 5) + rel[q - k] / seq_k", slope=slope, rel=rng.standard_normal(9)),
        MaskModifier("k <= q or k > seq_q - 3"),
    ]
    out, vjp = cuflash.attention_varlen_vjp(x, x, x, offsets, offsets, modifiers=chain)
    gradients = vjp(x)
    for first, last in ((0, 13), (13, 40)):
        part = x[first:last]
        want, part_vjp = cuflash.attention_vjp(part, part, part, modifiers=chain, layout="bshd")
        np.testing.assert_allclose(out[first:last], want, atol=1e-14)
        np.testing.assert_allclose(gradients.dk[first:last], part_vjp(part).dk, atol=1e-13)


# ---- derivatives -------------------------------------------------------------------------------------------------------
DERIVATIVES = [
    "s + a[k]", "s - a[k]", "s * a[k]", "s / (2 + a[k])", "a[k] / (3 + s)", "-s * -a[k]", "+s ** 3 * a[k] ** 2",
    "abs(s) * abs(a[k])", "exp(s / 3) * exp(a[k])", "log(3 + s) + log(3 + a[k])", "tanh(s * a[k])", "sqrt(3 + s * a[k])",
    "s + floor(s) * a[k]", "min(s, a[k])", "max(s, a[k], 0.25)", "where(s > a[k], s * s, a[k] * s)",
    "s * a[k] if k % 2 == 1 else exp(a[k]) * s", "s + a[int(q / 2)]", "s * a[k] * a[q] + tanh(a[(q + k) % 3])",
    "s / (1 + exp(-a[h] * s)) * (q // 2 + kv)", "c * tanh(s / c) - a[0] * abs(q - k)",
]  # fmt: skip


@pytest.mark.parametrize("text", DERIVATIVES)
def test_derivatives_by_finite_differences(text):
    """By the score, through the gradient of q, and by the array."""
    rng = np.random.default_rng(1)
    q, k, v, g = (rng.standard_normal((2, n, 2)) for n in (3, 3, 3, 3))
    a, numbers = rng.uniform(0.2, 0.9, 3 if "a[h" not in text else 2), {"c": 1.5} if "c *" in text else {}

    def call(x, y):
        own = ScoreModifier(text, a=y, gradients="a", **numbers)
        return problem.describe(x, k, v, modifiers=[own])

    def loss(x, y):
        return np.vdot(g, reference.forward(call(x, y))[0])

    found = reference.backward(call(q, a), g)
    np.testing.assert_allclose(found.dq, central_difference(lambda x: loss(x, a), q, 1e-4), atol=1e-8)
    assert_close = np.testing.assert_allclose
    chain = call(q, a).problem.modifiers[0]
    got = chain.gradient("a", {name: getattr(found, f"d{name}") for name in chain.differentiable})
    assert_close(got, central_difference(lambda y: loss(q, y), a, 1e-4), atol=1e-8)


def test_every_function_and_operation_is_differentiated_above():
    used = {x for text in DERIVATIVES for x in expression.FUNCTIONS if f"{x}(" in text}
    assert used == set(expression.FUNCTIONS)
    parts = {type(x) for text in DERIVATIVES for x in ast.walk(ast.parse(text))}
    assert {ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd, ast.IfExp, ast.Subscript} <= parts


def test_a_slope_of_one_is_known():
    for text, has_slope in (
        ("s + 2 * k", False),
        ("q - (k - s)", False),
        ("s * 1", False),
        ("2 * s", True),
        ("-s", True),
    ):
        assert ScoreModifier(text).has_slope() == has_slope, text


def test_a_hidden_score_of_minus_infinity():
    """An expression may hide what it likes, too."""
    assert_same_bits(
        results(ScoreModifier(f"s if {CAUSAL} else -inf")), results(mask=np.tri(SEQ_Q, SEQ_K, SEQ_K - SEQ_Q) > 0)
    )


# ---- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("(q - 4) // 3", lambda q, k: (q - 4) // 3),
        ("(q - 4) % 3 - (q - 4) % -3", lambda q, k: (q - 4) % 3 - (q - 4) % -3),
        ("q // (k - 1) + q % (k - 1)", lambda q, k: np.where(k == 1, 0, q // np.where(k == 1, 1, k - 1) + q % np.where(k == 1, 1, k - 1))),
        ("q * 2147483647 * 2", lambda q, k: -2 * q),
        ("int(q / 2 - k / 4) + int(-1.5)", lambda q, k: np.trunc(q / 2 - k / 4) - 1),
        ("int(1e30) - 2147483520 + int(inf - inf)", lambda q, k: 0),
        ("min(q, k, 3) + max(q, 1)", lambda q, k: np.minimum(np.minimum(q, k), 3) + np.maximum(q, 1)),
        ("seq_q * 100 + seq_k + b + 10 * h + 7 * kv", lambda q, k: 100 * 5 + 6 + 10 * np.arange(4)[:, None, None] + 7 * (np.arange(4)[:, None, None] // 2)),
        ("rel[q - 2] + rel[k + 100] + rel[-9]", lambda q, k: np.maximum(q - 2, 0) + 4.0),
        ("(7 if on else 8) + n + x", lambda q, k: 7 + 3 + 0.5),
    ],
)  # fmt: skip
def test_numbers(text, want):
    """Whole numbers round down and wrap, an index stays inside of its array."""
    q, k = np.arange(5)[:, None], np.arange(6)[None, :]
    given = {"rel": np.arange(5.0)} if "rel" in text else {"on": True, "n": 3, "x": 0.5} if "on" in text else {}
    own = ScoreModifier(text, **given)
    call = problem.describe(*(np.zeros((4 // n, m, 2)) for n, m in ((1, 5), (2, 6), (2, 6))), modifiers=[own])
    got = own.apply(np.zeros((4, 5, 6)), reference.whole(call))
    np.testing.assert_allclose(got, np.broadcast_to(want(q, k), got.shape), atol=1e-12)


# ---- what is compiled --------------------------------------------------------------------------------------------------
def variant_of(chain, **options):
    q, k, v = inputs()
    call = problem.describe(q, k, v, modifiers=chain, **options)
    found = plan.forward_arrays(call, np.zeros_like(q), np.zeros(call.problem.lse_shape, np.float32))
    made = plan.plan_forward(call.problem, described_device(80), plan.places_of(call.problem, found))
    return made.steps[0].variant, made.template


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("wgmma", "float16"), ("mma", "float16"), ("simt", "float32"), ("simt", "float64")]
)
@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize("name", written_cases.FORMS)
def test_tile_of_the_built_in_one(name: str, capability: int, backend: str, dtype: str, head_dim: int) -> None:
    """So that sums have one order, and the forward the same bits."""
    if backend == "wgmma" and (capability < 90 or name == "documents"):
        pytest.skip("Hopper's, whose blocks pass over the tiles that Documents hides")
    if (name, dtype, head_dim) == ("documents", "float64", 256):
        pytest.skip("Documents has no registers there for the tile of its expression")
    sizes = (1, 4, 200, 330)  # rows of a bias of whole pieces come another way on Hopper
    q, k = (np.zeros((1, 4, n, head_dim), dtype) for n in sizes[2:])
    own, options = written_cases.forms(sizes, DTYPES[dtype])[name]
    tiles = []
    for given in ({"modifiers": own}, options):
        call = problem.describe(q, k, k, **given)
        found = plan.places_of(
            call.problem, plan.forward_arrays(call, q, np.zeros(q.shape[:-1], call.problem.accumulator))
        )
        at = tuple((x, replace(place, misalignment=0)) for x, place in found)
        tiles.append(plan.plan_forward(call.problem, described_device(capability), at, backend).steps[-1].config)
    assert tiles[0] == tiles[1]


def test_other_numbers_arrays_and_lengths_compile_nothing():
    text = "s - c * table[q - k + 3]"
    first, record = variant_of([ScoreModifier(text, c=1.0, table=np.ones(7, np.float32))])
    again, other = variant_of([ScoreModifier("s-c*(table[q - k+3])", c=2.0, table=np.zeros(9, np.float32))])
    assert first == again
    assert record != other
    assert source.build(first) is source.build(again)
    for changed in (
        ScoreModifier("s - c * table[q - k + 4]", c=1.0, table=np.ones(7, np.float32)),
        ScoreModifier(text, c=1, table=np.ones(7, np.float32)),
        ScoreModifier(text, c=1.0, table=np.ones(7, np.int32)),
        ScoreModifier(text, c=1.0, table=np.ones(7, np.float32), gradients="table"),
    ):
        assert variant_of([changed])[0] != first


def test_the_name_is_the_same_in_every_process():
    """It is part of the key under which compiled kernels are kept on disk."""
    own = ScoreModifier("s - slope[h] * abs(q - k)", slope=[1.0])
    assert own.name == "score_62bd8e06e82351c3"
    assert REGISTRY[own.name] is type(own)
    assert f"struct {type(own).__name__} " in own.cuda
    assert '#line 1 "s - slope[h] * abs(q - k)"' in own.cuda


def test_classes_do_not_pile_up():
    kept = ScoreModifier("s + 0.123")
    for i in range(KEPT + 50):
        ScoreModifier(f"s + {i}.5")
    gc.collect()
    assert len(CLASSES) <= KEPT + 40
    assert REGISTRY[kept.name] is type(kept)
    assert type(ScoreModifier("s + 0.123")) is type(kept)


def test_copies_and_equality():
    own = ScoreModifier("s * c + x[h]", c=2.0, x=np.ones(4, np.float32), gradients="x")
    for other in (copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert other == own
        assert hash(other) == hash(own)
        np.testing.assert_array_equal(other.given["x"].value, own.given["x"].value)
    assert own == own.bare()
    assert own.bare().arrays() == {}
    assert pickle.loads(pickle.dumps(own.bare())) == own
    assert own != ScoreModifier("s * c + x[h]", c=3.0, x=np.ones(4, np.float32), gradients="x")
    assert repr(own) == "ScoreModifier('s * c + x[h]', c=2.0, gradients=('x',))"


def test_nothing_of_the_text_is_executed():
    calls = {
        x.func.id
        for module in (expression, written)
        for x in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)
    }
    assert not calls & {"eval", "exec", "compile", "__import__"}


# ---- gradients ---------------------------------------------------------------------------------------------------------
def test_gradients_are_of_the_kind_of_their_array():
    q, k, v = inputs()
    own = ScoreModifier("s * x[h] + y[h, k]", x=np.ones(4, np.float16), y=np.ones((1, SEQ_K)), gradients=("y", "x"))
    out, vjp = cuflash.attention_vjp(q, k, v, modifiers=[own], bias=np.zeros((SEQ_Q, SEQ_K), np.float32))
    found = vjp(out)
    assert found._fields == ("dq", "dk", "dv", "dy", "dx", "dbias")
    assert found.dx.dtype == np.float16
    assert (found.dy.dtype, found.dy.shape) == (np.float64, (1, SEQ_K))


def test_one_array_read_twice_has_one_gradient():
    q, k, v = inputs()
    rng = np.random.default_rng(0)
    x = rng.standard_normal(50).astype(np.float32)
    _, vjp = cuflash.attention_vjp(
        q, k, v, modifiers=[ScoreModifier("s + x[q % 50] * 2 + x[49 - k]", x=x, gradients="x")]
    )
    two = ScoreModifier("s + x[q % 50] * 2 + y[49 - k]", x=x, y=x, gradients=("x", "y"))
    _, both = cuflash.attention_vjp(q, k, v, modifiers=[two])
    g = rng.standard_normal(q.shape).astype(np.float32)
    np.testing.assert_allclose(vjp(g).dx, both(g).dx + both(g).dy, atol=1e-4)


def test_gradients_that_share_a_name():
    q, k, v = inputs()
    x = np.ones(4, np.float32)
    two = [ScoreModifier("s + x[h]", x=x, gradients="x"), ScoreModifier("s * x[h]", x=x, gradients="x")]
    with pytest.raises(ArgumentError, match=r"gradients of two modifiers are called dx: .*rename"):
        cuflash.attention_vjp(q, k, v, modifiers=two)
    own = ScoreModifier("s + sinks[h]", sinks=x, gradients="sinks")
    with pytest.raises(ArgumentError, match="called dsinks"):
        cuflash.attention(q, k, v, modifiers=[own, cuflash.Sinks(x)])
    bias = ScoreModifier("s + bias[h]", bias=x, gradients="bias")
    with pytest.raises(ArgumentError, match="called dbias"):
        cuflash.attention(q, k, v, modifiers=[bias], bias=np.zeros((SEQ_Q, SEQ_K), np.float32))


@pytest.mark.parametrize("index", ["h", "h, q - k", "b, h, q, k"])
def test_sums_that_repeat(index):
    """A gradient that is a sum over blocks is summed in fixed point where its bits have to repeat; of the scores' own shape it is none."""
    x = np.ones({"h": (4,), "h, q - k": (4, 9)}.get(index, SIZES), np.float32)
    q, k, v = inputs()
    call = problem.describe(q, k, v, modifiers=[ScoreModifier(f"s + x[{index}]", x=x, gradients="x")])
    lse = np.zeros(call.problem.lse_shape, np.float32)
    for deterministic in (False, True):
        sums = {f"d{n}": np.zeros(*of) for n, of in gradient_sums(call.problem, call.operands, deterministic).items()}
        found = plan.backward_arrays(call, out=q, lse=lse, dout=q, dq=q, dk=k, dv=v, **sums)
        places = plan.places_of(call.problem, found)
        made = plan.plan_backward(call.problem, described_device(80), places, deterministic)
        assert made.main.config.sum_digits == (3 if deterministic and index != "b, h, q, k" else 0)


# ---- refusals ----------------------------------------------------------------------------------------------------------
def test_hopper_leaves_slopes_beside_others_to_mma():
    """Its kernels take any expression; where heads are large its backward has no room for slopes beside what else changes scores."""
    for head_dim, kernels in ((64, ["forward_wgmma", "backward_wgmma"]), (128, ["forward_wgmma"])):
        entry = Entry(90, "bfloat16", head_dim, head_dim, "written", seq_q=300, backend="wgmma")
        assert [v.kernel for v in entry.variants() if v.kernel.endswith("_wgmma")] == kernels
    kernels = {v.kernel for v in Entry(90, "bfloat16", 128, 128, "written", seq_q=300, backend="mma").variants()}
    assert {"forward_mma", "backward_mma"} <= kernels


WRONG_CALLS = {
    "axis": (ScoreModifier("s + x[h]", x=[1.0, 2.0]), ShapeError, "x of ScoreModifier has shape (2,)", "indexed by h", "length 4"),
    "axis of keys": (MaskModifier("x[q, k]", x=np.ones((1, 9), bool)), ShapeError, "x of MaskModifier", "axis 1", "k", "length 45"),
    "entry": (MaskModifier("x[b, k] > 0", x=np.ones((3, 45))), ShapeError, "x of MaskModifier", "axis 0", "b", "length 2"),
    "empty": (ScoreModifier("s + x[q // 2]", x=np.ones(0)), ShapeError, "x of ScoreModifier", "axis 0 is empty"),
    "integers": (MaskModifier("x[k] > 0", x=[1 << 40] * 45), ArgumentError, "x of MaskModifier contains 1099511627776", "int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls(name):
    own, error, *parts = WRONG_CALLS[name]
    with pytest.raises(error) as raised:
        cuflash.attention(*inputs(), modifiers=[own])
    for part in parts:
        assert part in str(raised.value)


def test_twice():
    own = ScoreModifier("s + x[h]", x=np.ones(4))
    with pytest.raises(ArgumentError, match=r"modifiers contains ScoreModifier\('s \+ x\[h\]'\) 2 times"):
        cuflash.attention(*inputs(), modifiers=[own, own])


@pytest.mark.parametrize(
    ("own", "part"),
    [
        (MaskModifier("x[q] == x[k]", x=np.ones(9, np.int32)), "x with an axis for each q in MaskModifier"),
        (ScoreModifier("s + x[k]", x=np.ones(9)), "x with an axis for each k in ScoreModifier"),
        (ScoreModifier("s + b"), "b in ScoreModifier"),
        (ScoreModifier("s + x[b]", x=np.ones(1)), "b in ScoreModifier"),
        (ScoreModifier("s + x[h]", x=np.ones(2), gradients="x"), "the gradient of x in ScoreModifier"),
    ],
)
def test_packed_sequences_refuse_by_name(own, part):
    x = np.ones((9, 2, 4))
    with pytest.raises(UnsupportedError) as raised:
        cuflash.attention_varlen(x, x, x, [0, 9], [0, 9], modifiers=[own])
    assert str(raised.value).startswith(f"{part} with packed sequences")


def test_decoding_refuses_by_name():
    x = np.ones((1, 2, 4, 4), np.float32)
    with pytest.raises(ArgumentError, match="contains ScoreModifier: attention_decode takes ALiBi and Sinks only"):
        cuflash.attention_decode(x[:, :, :1], x, x, modifiers=[ScoreModifier("s + 1.5")])


#: text, what is given, where the mark stands (column and width), parts of the message
WRONG = [
    ("s +", {}, (3, 1), "this is no expression (invalid syntax)"),
    ("(s", {}, (0, 1), "never closed"),
    ("s))", {}, (1, 1), "unmatched"),
    ("s) + (s", {}, (1, 1), "unmatched"),
    ("s - slop[h]", {"slope": [1.0]}, (4, 4), "unknown name slop; did you mean slope?"),
    ("s + Q", {}, (4, 1), "unknown name Q", "there are s, b, h, kv, q, k, seq_q, seq_k, inf"),
    ("s - slope * q", {"slope": [1.0]}, (4, 5), "slope is an array of 1 axes; index it, such as slope[h]"),
    ("s - x[h]", {"x": [[1.0]]}, (4, 4), "x has 2 axes, and this is an index for 1"),
    ("s + x[h]", {"x": 1.0}, (4, 1), "x is a number and cannot be indexed"),
    ("s + q[h]", {}, (4, 1), "q is a whole number and cannot be indexed"),
    ("s + (s * 2)[0]", {}, (5, 5), "only an array that is given by name can be indexed"),
    ("s + x[q / 2]", {"x": [1.0]}, (6, 5), "an index must be a whole number, this is a real number"),
    ("s + x[1:2]", {"x": [1.0]}, (4, 6), "a slice is no element"),
    ("s + x[q // 2, k // 2, q + k]", {"x": np.ones((1, 1, 1))}, (4, 24), "more than two axes"),
    ("s + (q < k)", {}, (5, 5), "arithmetic with True or False", "where(..., 1, 0)"),
    ("s if q else k", {}, (5, 1), "a condition must be True or False, this is a whole number", "x != 0"),
    ("where(q < k, s, q < 1)", {}, (0, 22), "both values must be of one kind"),
    ("not s", {}, (4, 1), "a condition must be True or False, this is a real number"),
    ("s // 2", {}, (0, 1), "// and % are for whole numbers", "floor(x / y)"),
    ("s ** 0.5", {}, (5, 3), "the exponent must be a number from 1 to 16"),
    ("q < k", {}, (0, 5), "a score must be a number", "MaskModifier"),
    ("s + (q is k)", {}, (5, 6), "only < <= > >= == != compare"),
    ("s if (q < k) < (k < q) else 0", {}, (5, 17), "by == and != with each other alone"),
    ("s if q < k & 1 else 0", {}, (9, 5), "write and, or, !="),
    ("~q + s", {}, (0, 2), "write not"),
    ("s @ s", {}, (0, 5), "MatMult is not part"),
    ("sqr(s)", {}, (0, 3), "sqr is no function here; did you mean sqrt?"),
    ("tanh(s, 2)", {}, (0, 10), "tanh takes 1 argument"),
    ("min(s)", {}, (0, 6), "min takes 2 to 8 arguments"),
    ("exp(x=s)", {}, (0, 8), "exp takes 1 argument"),
    ("exp + s", {}, (0, 3), "exp is a function"),
    ("s + 4294967296", {}, (4, 10), "does not fit in 32 bits", "4294967296.0"),
    ("s + 1j", {}, (4, 2), "1j is no number"),
    ("s + 'text'", {}, (4, 6), "'text' is no number"),
    ("s  # twice", {}, (3, 7), "no comments"),
    ("s.real", {}, (0, 6), "Attribute is not part"),
    ("__import__('os').system('true')", {}, (0, 23), "is no function here"),
    ("(lambda: s)()", {}, (1, 9), "is no function here"),
    ("[s for s in q][0]", {}, (0, 14), "only an array"),
    ("(s := 3)", {}, (1, 6), "NamedExpr is not part"),
    ("{s}", {}, (0, 3), "Set is not part"),
    ("f'{s}'", {}, (0, 6), "JoinedStr is not part"),
    ("é + s", {}, (0, 1), "unknown name é"),
    ("s +\n  exp(slop)", {}, (6, 4), "line 2, column 7: unknown name slop"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "given", "mark", "parts"), [(t, g, m, p) for t, g, m, *p in WRONG], ids=[w[0] for w in WRONG]
)
def test_errors_point_into_the_expression(text, given, mark, parts):
    with pytest.raises(ArgumentError) as raised:
        ScoreModifier(text, **given)
    message, line, below = str(raised.value).split("\n")
    assert message.startswith("ScoreModifier, ")
    assert line.removeprefix("    ") in text.split("\n")
    assert (below.index("^") - 4, below.count("^")) == mark
    for part in parts:
        assert part in message


WRONG_ARGUMENTS = {
    "no text": (lambda: ScoreModifier(["s"]), "ScoreModifier(['s']): must be a text"),
    "empty": (lambda: MaskModifier("  "), "MaskModifier('  '): is empty"),
    "no names": (lambda: ScoreModifier("s", gradients=3), "gradients=3 of ScoreModifier: must be a name"),
    "long": (lambda: ScoreModifier("s" + " + s" * 600), "the expression has 2401 characters"),
    "deep": (lambda: ScoreModifier("-" * 1990 + "s"), "nested more than 100 deep"),
    "many": (lambda: ScoreModifier(" + ".join(f"exp(s*{i})*{i}.5" for i in range(90))), "more than 500 operations"),
    "a score in a mask": (lambda: MaskModifier("s > 0"), "a mask does not depend on the score s"),
    "a mask of numbers": (lambda: MaskModifier("q - k"), "a mask must be True where the key may be seen"),
    "not used": (lambda: ScoreModifier("s + 1.0", x=[1.0]), "x is given and not in the expression"),
    "a name that means something": (lambda: ScoreModifier("s", q=[1.0]), "nothing can be given as q="),
    "no name": (lambda: ScoreModifier("s", **{"a b": 1}), "'a b' is no name"),
    "nothing": (lambda: ScoreModifier("s + x[h]", x=None), "x of ScoreModifier is None"),
    "complex": (lambda: ScoreModifier("s + x[h]", x=[1j]), "x of ScoreModifier has dtype complex128"),
    "ragged": (lambda: ScoreModifier("s + x[h]", x=[[1], [1, 2]]), "x of ScoreModifier=[[1], [1, 2]] is no array"),
    "a large number": (lambda: ScoreModifier("s + x", x=1 << 31), "x of ScoreModifier=2147483648: does not fit"),
    "gradient of what is not there": (lambda: ScoreModifier("s", gradients="x"), "'x' is no array of real numbers; given are: none"),
    "gradient of integers": (lambda: ScoreModifier("s + x[h]", x=[1], gradients="x"), "'x' is no array of real numbers"),
    "gradient of nothing": (lambda: ScoreModifier("s + floor(x[h])", x=[1.0], gradients="x"), "is 0 everywhere"),
    "gradient of what the score finds": (lambda: ScoreModifier("s + x[int(s)]", x=[1.0], gradients="x"), "whose index depends"),
    "gradient called dq": (lambda: ScoreModifier("s + v[h]", v=[1.0], gradients="v"), "dv is the gradient of v itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments(name):
    make, part = WRONG_ARGUMENTS[name]
    with pytest.raises(ArgumentError) as raised:
        make()
    assert part in str(raised.value)


def test_arrays_of_every_kind_are_converted_once():
    """Real numbers as the sums' dtype, whole ones as int32, bool as bool."""
    own = ScoreModifier(
        "s + x[h] + n[h] + where(t[h], 1, 0)", x=np.ones(4, np.float16), n=np.ones(4, np.int8), t=[True] * 4
    )
    for dtype, real in (("bfloat16", "float32"), ("float64", "float64")):
        (made,) = arrays.native_modifiers([own], arrays.HOST, dtype, 7)
        assert [made.given[name].value.dtype for name in "nxt"] == [np.int32, real, bool]


def test_product_of_options():
    """Beside every built-in option, against the reference."""
    q, k, v = inputs("float64")
    chain = written_cases.chains(SIZES, np.float64)["everything"]
    for causal, softcap, name in product((False, True), (None, 2.0), ("alibi", "none")):
        modifiers = [*chain, *([ALiBi(np.array([0.5, 0.2, 0.1, 0.05]))] if name == "alibi" else [])]
        options = {"modifiers": modifiers, "causal": causal, "softcap": softcap, "window": (40, 9)}
        want = reference.forward(problem.describe(q, k, v, **options))[0]
        np.testing.assert_allclose(cuflash.attention(q, k, v, **options), want, atol=1e-12)
