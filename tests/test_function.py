"""Functions in CUDA that users write: their types, derivatives and twins, and where a compiler's complaint points."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import (
    ArgumentError,
    CudaFunction,
    MaskModifier,
    ScoreModifier,
    UnsupportedError,
    problem,
    reference,
    source,
)
from cuflash.modifiers.function import located
from tests import nvrtc, written_cases
from tests.test_reference import central_difference
from tests.test_written import assert_same_bits, inputs, results, variant_of
from tests.variants import Entry

CAP = """
Real cap(Real s, Real c) { return c * tanh_of(s / c); }
Real cap_by_s(Real s, Real c) {
  const Real t = tanh_of(s / c);
  return 1 - t * t;
}
"""
TWINS: dict[str, Any] = {"cap": lambda s, c: c * np.tanh(s / c), "cap_by_s": lambda s, c: 1 - np.tanh(s / c) ** 2}


def cap(text: str = CAP, **options: Any) -> CudaFunction:
    return CudaFunction(text, "cap", derivatives={"s": "cap_by_s"}, **options)


def test_as_the_expression() -> None:
    own = ScoreModifier("cap(s, c)", cap=cap(twins=TWINS), c=2.0)
    assert_same_bits(results(own), results(ScoreModifier("c * tanh(s / c)", c=2.0)))


def test_derivatives_by_finite_differences() -> None:
    """By the score and by an array, through what stands around the call."""
    rng = np.random.default_rng(1)
    q, k, v, g = (rng.standard_normal((2, 3, 2)) for _ in range(4))
    a = rng.uniform(0.2, 0.9, 3)

    def call(x: np.ndarray, y: np.ndarray) -> problem.Call:
        own = ScoreModifier(
            "bent(s * s + q, a[k] * a[q], 2) * s + a[0]", a=y, bent=written_cases.function(), gradients="a"
        )
        return problem.describe(x, k, v, modifiers=[own])

    def loss(x: np.ndarray, y: np.ndarray) -> Any:
        return np.vdot(g, reference.forward(call(x, y))[0])

    found = reference.backward(call(q, a), g)
    np.testing.assert_allclose(found.dq, central_difference(lambda x: loss(x, a), q, 1e-4), atol=1e-7)
    chain: Any = call(q, a).problem.modifiers[0]
    got = chain.gradient("a", {name: getattr(found, f"d{name}") for name in chain.differentiable})
    np.testing.assert_allclose(got, central_difference(lambda y: loss(q, y), a, 1e-4), atol=1e-7)


def test_whole_numbers_and_conditions() -> None:
    text = "int half(int x, bool up) { return (x + up) / 2; }"
    half = CudaFunction(text, "half", twins={"half": lambda x, up: (x + up) // 2})
    own, same = (
        MaskModifier("half(q, k > 3) <= k", half=half),
        MaskModifier("(q + (1 if k > 3 else 0)) // 2 <= k"),
    )
    assert_same_bits(results(own), results(same))


def test_what_is_compiled() -> None:
    """The text is, twins and arrays are not."""
    made = [
        ScoreModifier("cap(s, c)", cap=f, c=2.0)
        for f in (cap(), cap(twins=TWINS), cap(CAP.replace("1 - t", "Real(1) - t")), cap(f"{CAP}\n"))
    ]
    assert made[0] == made[1]
    assert len({type(m) for m in made}) == 3
    assert variant_of(made[:1]) == variant_of(made[1:2])
    assert pickle.loads(pickle.dumps(made[0])) == made[0]
    assert hash(cap()) == hash(cap(twins=TWINS))
    # Beside themselves, too: each stands in a namespace of its own.
    two = [made[0], ScoreModifier("cap(s, c) + 1.5", cap=cap(), c=3.0)]
    assert source.build(variant_of(two)[0]).count('#line 1 "CudaFunction cap"') == 2


def test_what_loops_is_called() -> None:
    """Unless its author decided, and nothing else is."""
    text = CudaFunction(
        """
        // Real for(Real s) { while (true) {} }
        Real once(Real s) { return s < 0 ? Real(0) : s; }
        Real often(Real s, int n) { for (int i = 0; i < n; ++i) { s = once(s); } return s; }
        static inline Real
        while_positive(Real s) { while (s > 0) s -= 1; return s; }
        __forceinline__ Real pasted(Real s) { for (int i = 0; i < 2; ++i) s *= s; return s; }
        Real last(Real forward) { return forward; }
        """,
        "often",
    ).cuda("own")
    assert text.count("__noinline__") == 2
    assert "__noinline__ Real often" in text
    assert "__noinline__ static inline Real\n" in text


def test_without_twins_the_host_refuses_by_name() -> None:
    q, k, v = inputs()
    for own in (
        ScoreModifier("cap(s, c)", cap=cap(), c=2.0),
        MaskModifier("kin(q, k, 3)", kin=CudaFunction(written_cases.KIN, "kin")),
    ):
        with pytest.raises(UnsupportedError, match=r"Modifier\('.*\) on the host: CudaFunction (cap|kin) has no twins"):
            cuflash.attention(q, k, v, modifiers=[own])
        call = problem.describe(q, k, v, modifiers=[own])
        with pytest.raises(UnsupportedError, match="the numpy backend and the reference run no CUDA; give twins="):
            reference.forward(call)
        with pytest.raises(UnsupportedError, match="has no twins"):
            cuflash.attention_weights(q, k, [1], modifiers=[own])


def test_a_twin_of_another_type() -> None:
    kin = CudaFunction(written_cases.KIN, "kin", twins={"kin": lambda q, k, limit: q - k})
    with pytest.raises(ArgumentError, match=r"twins\['kin'\] returned dtype int32, and the function's value is bool"):
        results(MaskModifier("kin(q, k, 3)", kin=kin))


# ---- refusals ----------------------------------------------------------------------------------------------------------
ONE = "Real one(Real s) { return 1; }"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "other"}, "source defines no function other; it defines: one"),
    "no name": ({"name": "one()"}, "must be the name of a function in source"),
    "inner": ({"source": f"struct X {{ {ONE} }};"}, "source defines no function one; it defines: none"),
    "declared": ({"source": "Real one(Real s);"}, "source defines no function one"),
    "comment": ({"source": f"// {ONE}"}, "source defines no function one"),
    "no text": ({"source": b"x"}, "source must be a text"),
    "float": ({"source": "\n\nfloat one(Real s) { return 1; }"}, "line 3: one returns float: must be Real, int or bool"),
    "parameter": ({"source": "Real one(const float& s) { return 1; }"}, "line 1: the parameter s is float&: must be"),
    "double": ({"source": "Real one(double s) { return 1; }"}, "the parameter s is double: must be Real, int or bool; Real"),
    "nameless": ({"source": "Real one(Real) { return 1; }"}, "must be a type and a name, such as Real s"),
    "two names": ({"source": "Real one(Real s, int s) { return 1; }"}, "two parameters of one have one name"),
    "twice": ({"source": f"{ONE}\n{ONE}"}, "line 2: defines one a second time"),
    "open": ({"source": f"{ONE}\nReal two() {{"}, "line 2: opens a brace that is never closed"),
    "closed": ({"source": f"{ONE} }}"}, "line 1: closes a brace that was never opened"),
    "open comment": ({"source": f"{ONE} /* and"}, "begins a comment or string that never ends"),
    "include": ({"source": f"{ONE}\n  #include <cmath>"}, "line 2: has a line for the preprocessor"),
    "macro": ({"source": f"#define Params int\n{ONE}"}, "line 1: has a line for the preprocessor"),
    "joined": ({"source": f"{ONE} // \\\n"}, "ends in \\; join the lines"),
    "derivatives": ({"derivatives": "one"}, "derivatives='one' must be a mapping"),
    "by what": ({"derivatives": {"x": "one"}}, "derivatives names 'x', which is no Real parameter of one(Real s); there are: s"),
    "absent": ({"derivatives": {"s": "two"}}, "source defines no function two"),
    "other parameters": (
        {"source": f"{ONE} Real two(int s) {{ return 1; }}", "derivatives": {"s": "two"}},
        "the derivative two(int s) must have the parameters of one(Real s)",
    ),
    "whole derivative": (
        {"source": f"{ONE} int two(Real s) {{ return 1; }}", "derivatives": {"s": "two"}},
        "the derivative two must return Real",
    ),
    "of a whole number": (
        {"source": "int one(Real s) { return 1; } Real two(Real s) { return 1; }", "derivatives": {"s": "two"}},
        "returns int, which has no derivatives",
    ),
    "twins": ({"twins": {"two": abs}}, "twins has two; give one for each of one, or none"),
    "no twin": ({"twins": {"one": 1}}, "twins['one']=1 must be a function of arrays"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions(name: str) -> None:
    given, part = WRONG[name]
    with pytest.raises(ArgumentError) as raised:
        CudaFunction(**{"source": ONE, "name": "one", **given})
    assert part in str(raised.value)
    assert str(raised.value).startswith("CudaFunction ")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("cap(s)", "cap has 1 arguments here, and is cap(Real s, Real c) of CudaFunction cap"),
        ("cap(s, c=1.5)", "cap takes its arguments in order: it is cap(Real s, Real c)"),
        ("cap(q < k, 1.5)", "s of cap(Real s, Real c) is a real number, this is True or False"),
        ("kap(s, 1.5)", "kap is no function here; did you mean cap?"),
        ("s + cap", "cap is a function; give it its arguments in brackets"),
        ("cap[h] + s", "cap is a function"),
        ("s + 1", "cap is given and not in the expression"),
        ("cap(s, s)", "CudaFunction cap: the derivative by c is needed and not given"),
    ],
)
def test_wrong_calls_point_into_the_expression(text: str, part: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        ScoreModifier(text, cap=cap())
    assert part in str(raised.value)


def test_a_real_number_for_a_whole_one() -> None:
    with pytest.raises(
        ArgumentError, match=r"limit of kin\(int q, int k, int limit\) is a whole number, this is a real"
    ):
        MaskModifier("kin(q, k, 3.5)", kin=CudaFunction(written_cases.KIN, "kin"))


def test_equal_names() -> None:
    with pytest.raises(ArgumentError, match="nothing can be given as exp="):
        ScoreModifier("exp(s, 1.5)", exp=cap())


# ---- the compiler ------------------------------------------------------------------------------------------------------
BROKEN = "\nReal cap(Real s, Real c) {\n  return c * tanhh(s / c);\n}\nReal cap_by_s(Real s, Real c) { return 1; }"


@nvrtc.needed
def test_messages_point_into_the_function() -> None:
    from cuflash import jit

    variant, _ = variant_of([ScoreModifier("cap(s, c)", cap=cap(BROKEN), c=2.0)])
    with pytest.raises(nvrtc.CompilationError) as raised:
        nvrtc.compile_variant(variant, 80)
    found = jit.faults(str(raised.value), variant)
    assert found == 'CudaFunction cap, line 3: identifier "tanhh" is undefined\n    return c * tanhh(s / c);'
    assert jit.faults('attention/score.cuh(3): error: expected a ";"', variant) == ""


def test_only_what_it_knows() -> None:
    assert located("CudaFunction other(2): error: x", {"CudaFunction cap": cap()}) == ""


@nvrtc.needed
def test_variants_compile() -> None:
    """In every kernel, without a warning, a spill where a call saves registers, or a long wait."""
    for target, dtype, backend in ((80, "bfloat16", ""), (80, "float64", ""), (90, "float16", "wgmma")):
        for variant in Entry(target, dtype, 64, 64, "function", backend=backend).variants():
            report = nvrtc.compile_variant(variant, target)
            assert report.clean, report
            assert len(report.cubin) < 200_000, "the assembler's time grows with more than this"
