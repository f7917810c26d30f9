"""From a Variant to one CUDA source string: a generated prologue and the kernel's files, flattened.

The schedule starts with ``#include "variant.cuh"``, which stands for the generated part: `Config`, `Params`, the modifiers'
structs and their composition; Hopper's schedules also include "wgmma_instructions.cuh", generated likewise.  Every other
``#include "..."`` is a file below ``kernels/``.  ``#line`` keeps the compiler's messages pointing into the real files; no
include path and no system header is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources

from cuflash import abi, instructions
from cuflash.modifiers import REGISTRY, Bias, Dropout, Modifier, Packed, Scales, Written
from cuflash.variant import ELEMENTS, Variant

_INCLUDE = re.compile(r'^#include "([^"]+)"[^\n]*$', re.MULTILINE)
_GENERATED = "variant.cuh"
_INSTRUCTIONS = "wgmma_instructions.cuh"


@cache
def read(path: str) -> str:
    """Text of a file below kernels/."""
    return resources.files("cuflash").joinpath("kernels").joinpath(*path.split("/")).read_text(encoding="utf-8")


@cache
def build(variant: Variant) -> str:
    """The whole source of a variant: one string, no include left in it."""
    generated = {_GENERATED: prologue(variant)}
    if products := getattr(variant.config, "products", ()):
        generated[_INSTRUCTIONS] = instructions.wgmma(products, variant.dtype)
    return _flatten(f"{variant.kernel}.cu", generated, set())


def _flatten(path: str, generated: dict[str, str], seen: set[str]) -> str:
    if path in seen:
        return ""
    seen.add(path)
    text = generated[path] if path in generated else read(path)
    text = text.replace("#pragma once\n", "\n")
    parts, position = [f'#line 1 "{path}"\n'], 0
    for match in _INCLUDE.finditer(text):
        parts.append(text[position : match.start()])
        parts.append(_flatten(match[1], generated, seen))
        line = text.count("\n", 0, match.end()) + 1
        parts.append(f'#line {line + 1} "{path}"')
        position = match.end()
    return "".join([*parts, text[position:]]) + ("" if text.endswith("\n") else "\n")


def prologue(variant: Variant) -> str:
    """The generated part: constants, argument record, modifiers."""
    chain = [REGISTRY[name] for name in variant.modifiers]
    scored = [
        m for m in chain if m.kind == "score" and not (m is Bias and getattr(variant.config, "bias_apart", False))
    ]
    constants = "\n".join(f"  static constexpr {_constant(n, v)};" for n, v in variant.constants().items())
    return "\n".join(
        [
            f"// {variant}",
            '#include "hw/element.cuh"',
            f"typedef {ELEMENTS[variant.dtype]} Element;",
            f"typedef {ELEMENTS[variant.out_dtype or variant.dtype]} OutElement;",
            f"typedef {variant.real} Real;",
            "struct Config {",
            constants,
            "};",
            f"#define CUFLASH_ENTRY {variant.entry}",
            abi.c_struct(variant.direction, variant.modifiers, variant.maps, variant.statistics),
            f"constexpr bool kPacked = {str(Packed.name in variant.modifiers).lower()};",
            f"constexpr bool kBringsBias = {str(getattr(variant.config, 'bias_stages', 0) > 0).lower()};",
            '#include "attention/index.cuh"',
            *_sums(variant, chain),
            *(['#include "attention/expression.cuh"'] if any(issubclass(m, Written) for m in chain) else []),
            *(m.cuda.strip() for m in chain),
            *(m.curved.strip() for m in chain if m.curved and variant.direction == "hvp"),
            _score(scored, variant.direction),
            _visibility([m for m in chain if m.kind == "range"], [m for m in chain if m.kind == "mask"]),
            _sum([m for m in chain if m.kind == "sum"]),
            _drop([m for m in chain if m.kind == "drop"]),
            _units(variant, [m for m in chain if m.kind == "units"]),
            _operand_gradients(variant, scored),
            *(_gradient_sums(chain) if getattr(variant.config, "sum_digits", 0) else ()),
            *(_operand_tangents(chain) if variant.direction in ("jvp", "hvp") else ()),
        ]
    )


def _constant(name: str, value: int | bool) -> str:
    return f"bool {name} = {str(value).lower()}" if isinstance(value, bool) else f"int {name} = {value}"


_QUALIFIERS = "static __device__ __forceinline__"


def _score(chain: list[type[Modifier]], direction: str) -> str:
    names = [m.__name__ for m in chain]
    slope = " || ".join(f"{n}::kHasSlope" for n in names) or "false"
    place = "const Params& p, const Place& place, int q, int k, Real s"
    apply = "\n".join(f"    s = {n}::apply(p, place, q, k, s);" for n in names)
    added = chain[0].added if len(chain) == 1 else ""
    by_rows = f"  {_QUALIFIERS} const View& added(const Params& p) {{ return p.{added}; }}\n"
    sloped = "\n".join(f"    s = {n}::apply_with_slope(p, place, q, k, s, slope);" for n in names)
    asked = [m for m in chain if issubclass(m, Written) and m.differentiable] if direction == "backward" else []
    keeps = asked and (
        any(m.program.needs_score for m in asked) or any(m.has_slope() for m in chain[chain.index(asked[0]) + 1 :])
    )
    is_curved = direction == "hvp" and any(m.curved for m in chain)
    return f"""{_score_gradients(chain, asked)}
struct Score : ScoreGradients {{
  static constexpr bool kIdentity = {str(not chain).lower()};
  static constexpr bool kHasSlope = {slope};
  static constexpr bool kKeepsScores = {str(bool(keeps)).lower()};  // those that enter the chain
  static constexpr bool kHasCurvature = {str(is_curved).lower()};
  static constexpr bool kAddsArray = {str(bool(added)).lower()};  // and does nothing else
  {_QUALIFIERS} Real apply({place}) {{
{apply}
    return s;
  }}
  {_QUALIFIERS} Real apply_with_slope({place}, Real& slope) {{
{sloped}
    return s;
  }}
{by_rows if added else ""}{_curvature(chain, place) if is_curved else ""}}};"""


def _curvature(chain: list[type[Modifier]], place: str) -> str:
    """The score with its first and second derivative by the one that enters: (f(g))'' = f'' g'² + f' g''."""
    lines = []
    for m in chain:
        if not m.has_slope():
            lines.append(f"s = {m.__name__}::apply(p, place, q, k, s);")
            continue
        own = f"{m.__name__}Curved::apply_with_curvature(p, place, q, k, s, own, bend)"
        if not m.curved:
            own = f"{m.__name__}::apply_with_slope(p, place, q, k, s, own)"
        lines.append(
            f"{{ Real own = 1, bend = 0; s = {own}; curvature = bend * slope * slope + own * curvature; slope *= own; }}"
        )
    body = "".join(f"    {line}\n" for line in lines)
    return f"""  {_QUALIFIERS} Real apply_with_curvature({place}, Real& slope, Real& curvature) {{
{body}    return s;
  }}
"""


def _score_gradients(chain: list[type[Modifier]], asked: list[type[Written]]) -> str:
    """`Gradients::add` is given the score that enters the chain, and the gradient of the one that leaves it.

    It computes the scores in between anew, and goes back from the last modifier to the first that has gradients.
    """
    if not asked:
        return "struct ScoreGradients { static constexpr bool kAddsGradients = false; };"
    first = chain.index(asked[0])
    forth = [f"const Real s{i + 1} = {m.__name__}::apply(p, place, q, k, s{i});" for i, m in enumerate(chain[:-1])]
    back = []
    for i, m in reversed(list(enumerate(chain))[first:]):
        if m in asked:
            back.append(f"of_{m.name}.add(p, place, q, k, s{i}, ds);")
        if i > first and m.has_slope():
            back.append(f"ds *= slope_of<{m.__name__}>(p, place, q, k, s{i});")
    steps = "".join(f"      {line}\n" for line in (*forth, *back))
    members = "".join(f"    {m.__name__}::Gradients of_{m.name};\n" for m in asked)
    begins = "".join(f" of_{m.name}.begin(p, place);" for m in asked)
    ends = "".join(f" of_{m.name}.finish(p, place);" for m in asked)
    return f"""template <class Modifier>
__device__ __forceinline__ Real slope_of(const Params& p, const Place& place, int q, int k, Real s) {{
  Real slope = Real(1);
  Modifier::apply_with_slope(p, place, q, k, s, slope);
  return slope;
}}
struct ScoreGradients {{
  static constexpr bool kAddsGradients = true;
  struct Gradients {{
{members}    __device__ __forceinline__ void begin(const Params& p, const Place& place) {{{begins} }}
    __device__ __forceinline__ void add(const Params& p, const Place& place, int q, int k, Real s0, Real ds) {{
{steps}    }}
    __device__ __forceinline__ void finish(const Params& p, const Place& place) {{{ends} }}
  }};
}};"""


#: stands for what queries and keys have of a mask, where it is not asked for
_MEETS_NOTHING = f"""struct NothingMet {{
  typedef int OfQuery;
  typedef int OfKey;
  {_QUALIFIERS} int of_query(const Params&, const Place&, int) {{ return 0; }}
  {_QUALIFIERS} int of_key(const Params&, const Place&, int) {{ return 0; }}
  {_QUALIFIERS} bool meet(int, int) {{ return true; }}
}};
"""


def _visibility(ranges: list[type[Modifier]], masks: list[type[Modifier]]) -> str:
    positional = [m.__name__ for m in ranges if "narrow_keys" in m.cuda]
    counting = [m.__name__ for m in ranges if "key_count" in m.cuda]
    keys = "\n".join(f"    {n}::narrow_keys(p, place, q, keys);" for n in positional)
    queries = "\n".join(f"    {n}::narrow_queries(p, place, k, queries);" for n in positional)
    count = "".join(f"    return {n}::key_count(p, place);\n" for n in counting) or "    return place.seq_k(p);\n"
    visible = " & ".join(f"{m.__name__}::visible(p, place, q, k)" for m in masks) or "true"
    hiding = [m.__name__ for m in masks if m.knows_tiles()]
    clearing = [m.__name__ for m in masks if all(m.knows_tiles() for m in masks)]
    hidden = " || ".join(f"{n}::tile_is_hidden(p, place, queries, keys)" for n in hiding) or "false"
    clear = " && ".join(f"{n}::tile_is_clear(p, place, queries, keys)" for n in clearing) or "false"
    met = masks[0].__name__ if len(masks) == 1 and "OfQuery" in masks[0].cuda else ""
    tile = "const Params& p, const Place& place, Range queries, Range keys"
    return f"""{"" if met else _MEETS_NOTHING}struct Visibility {{
  static constexpr bool kMeets = {str(bool(met)).lower()};  // what a query and a key have of the only mask tells
  typedef {met or "NothingMet"} Met;
  static constexpr bool kHasMask = {str(bool(masks)).lower()};
  static constexpr bool kNarrows = {str(bool(ranges)).lower()};  // some keys may be hidden from every query
  static constexpr bool kHidesTiles = {str(bool(hiding)).lower()};
  static constexpr bool kClearsTiles = {str(bool(clearing)).lower()};
  {_QUALIFIERS} int key_count(const Params& p, const Place& place) {{
{count}  }}
  {_QUALIFIERS} void narrow_keys(const Params& p, const Place& place, int q, Range& keys) {{
{keys}
  }}
  {_QUALIFIERS} void narrow_queries(const Params& p, const Place& place, int k, Range& queries) {{
{queries}
  }}
  {_QUALIFIERS} bool visible(const Params& p, const Place& place, int q, int k) {{ return {visible}; }}
  {_QUALIFIERS} bool tile_is_hidden({tile}) {{ return {hidden}; }}
  {_QUALIFIERS} bool tile_is_clear({tile}) {{ return {clear}; }}
}};"""


def _sum(chain: list[type[Modifier]]) -> str:
    """`sink_of(p, place)` is the logit, in powers of two, that joins the sum of every row of a place."""
    found = "".join(f"{m.__name__}::logit(p, place)" for m in chain[:1]) or "-infinity<Real>()"
    return f"""constexpr bool kHasSinks = {str(bool(chain)).lower()};
__device__ __forceinline__ Real sink_of(const Params& p, const Place& place) {{ return {found}; }}"""


def _drop(chain: list[type[Modifier]]) -> str:
    """Whether weights are dropped; without it the numbers by which they are do not matter."""
    if chain:
        return "constexpr bool kDrops = true;"
    none = " ".join(
        f"{_QUALIFIERS} {kind} {name}(const Params&) {{ return 0; }}"
        for kind, name in (("u64", "seed"), ("u64", "offset"), ("u32", "threshold"), ("Real", "scale"))
    )
    return f"constexpr bool kDrops = false;\nstruct {Dropout.__name__} {{ {none} }};"


def _units(variant: Variant, chain: list[type[Modifier]]) -> str:
    """Whether heads have scales of their own; without them what `Scales` says does not matter.

    Those of planes are found by the kernels that write these (kernels/attention/plane_units.cuh).
    """
    if getattr(variant.config, "has_planes", False):
        return "constexpr bool kHasPlanes = true, kHasScales = true;\nstruct PlaneScales;\ntypedef PlaneScales Scales;"
    if chain:
        return "constexpr bool kHasPlanes = false, kHasScales = true;"
    none = " ".join(
        f"{_QUALIFIERS} Real {name}(const Params&, const Place&) {{ return 1; }}" for name in ("of_scores", "of_values")
    )
    return f"constexpr bool kHasPlanes = false, kHasScales = false;\nstruct {Scales.__name__} {{ {none} }};"


def _sums(variant: Variant, chain: list[type[Modifier]]) -> Iterator[str]:
    """Digits of the sums of operands' gradients, 0 where they are numbers, and how much larger than a score's own a term may be.

    Terms of a bias are sums over a warp's part of a tile; expressions multiply by derivatives.
    """
    written = any(issubclass(m, Written) and m.differentiable for m in chain)
    yield f"constexpr int kSumDigits = {getattr(variant.config, 'sum_digits', 0)}, kSumSpan = {40 if written else 14};"
    yield f"constexpr bool kStoresGradients = {str(getattr(variant.config, 'stores_gradients', False)).lower()};"
    yield '#include "hw/fixed.cuh"'
    yield '#include "attention/sums.cuh"'


def _gradient_sums(chain: list[type[Modifier]]) -> Iterator[str]:
    """`for_each_gradient_sum(p, f)` calls f(view, rows, columns, is_table) for the gradient of every operand of the scores."""
    calls = []
    for m in chain:
        if m.kind == "score" and issubclass(m, Written):
            calls += [f"f(p.d{name}, {', '.join(m.program.access(name).lengths)});" for name in m.differentiable]
        elif m.kind == "score":
            calls += [f"f(p.d{name}, p.seq_q, p.seq_k, false);" for name in m.differentiable]
    yield "template <class Function>"
    yield f"__device__ __forceinline__ void for_each_gradient_sum(const Params& p, Function f) {{ {' '.join(calls)} }}"


def _operand_gradients(variant: Variant, chain: list[type[Modifier]]) -> str:
    """`for_each_operand_gradient(p, f)` calls f with the view of the gradient of every operand that is added to scores."""
    added = [m for m in chain if m.kind == "score" and not issubclass(m, Written)]  # `Score` has those of expressions
    views = [f"d{name}" for m in added for name in m.differentiable] if variant.direction in ("backward", "hvp") else []
    calls = " ".join(f"f(p.{view});" for view in views)
    return f"""constexpr bool kHasOperandGradients = {str(bool(views)).lower()};
template <class Function> __device__ __forceinline__ void for_each_operand_gradient(const Params& p, Function f) {{ {calls} }}"""


def _operand_tangents(chain: list[type[Modifier]]) -> Iterator[str]:
    """`for_each_operand_tangent(p, f)` calls f with the view of the tangent of every operand that is added to scores.

    `sink_tangent(p)` is the view of that of the sinks, which may be no array.
    """
    views = [f"p.{name}_tangent" for m in chain if m.kind == "score" for name in m.movable]
    calls = " ".join(f"f({view});" for view in views)
    yield "template <class Function>"
    yield f"__device__ __forceinline__ void for_each_operand_tangent(const Params& p, Function f) {{ {calls} }}"
    sinks = [f"p.{name}_tangent" for m in chain if m.kind == "sum" for name in m.movable]
    yield f"__device__ __forceinline__ View sink_tangent(const Params& p) {{ return {(*sinks, 'View{}')[0]}; }}"
