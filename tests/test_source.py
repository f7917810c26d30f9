"""From a variant to one source text: flattening, lines that messages point to, and the law of layers."""

import re
from importlib import resources

import pytest

from cuflash import source
from cuflash.modifiers import REGISTRY
from cuflash.variant import Variant
from tests import nvrtc
from tests.variants import Entry, decode_variants

KERNELS = resources.files("cuflash").joinpath("kernels")
PATHS = sorted(
    str(path.relative_to(str(KERNELS))).replace("\\", "/")
    for path in KERNELS.rglob("*")  # type: ignore[attr-defined]
    if path.suffix in (".cu", ".cuh")
)
CODE = {path: re.sub(r"//[^\n]*", "", source.read(path)) for path in PATHS}
SCHEDULES = [p for p in PATHS if p.endswith(".cu")]
ATTENTION = [p for p in PATHS if p.startswith("attention/")]
HARDWARE = [p for p in PATHS if p.startswith("hw/")]


def variants() -> list[Variant]:
    """One of each kernel, with every modifier."""
    found = {}
    for dtype in ("bfloat16", "float32"):
        for variant in Entry(80, dtype, 64, 64, "everything").variants():
            found[variant.kernel, dtype] = variant
        for variant in decode_variants(80, dtype, 64, 64, "everything"):
            found[variant.kernel, dtype] = variant
    return list(found.values())


VARIANTS = variants()
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.entry)


# ---- flattening ------------------------------------------------------------------------------------------------------
@each_variant
def test_one_text_without_includes(variant):
    text = source.build(variant)
    assert not re.search(r"^\s*#\s*(include|pragma once)", text, re.MULTILINE)
    for path in re.findall(r'^#line 1 "([^"]+)"$', text, re.MULTILINE):
        assert text.count(f'#line 1 "{path}"') == 1, f"{path} is there twice"
    assert text.count('extern "C"') == 1
    assert "#define CUFLASH_ENTRY " + variant.entry in text


@each_variant
def test_every_line_knows_where_it_came_from(variant):
    """Walk the text as a compiler does: each line must be the one that its file has at that number."""
    path, number = None, 0
    files = {"variant.cuh": source.prologue(variant).splitlines()}
    checked = 0
    for line in source.build(variant).splitlines():
        if directive := re.fullmatch(r'#line (\d+) "([^"]+)"', line):
            number, path = int(directive[1]), directive[2]
            continue
        lines = files.setdefault(path, source.read(path).splitlines() if path != "variant.cuh" else [])
        original = lines[number - 1] if number <= len(lines) else ""
        assert line == ("" if original == "#pragma once" else original), f"{path}:{number}"
        checked += bool(line.strip())
        number += 1
    assert checked > 100


@nvrtc.needed
@pytest.mark.parametrize("path", ["attention/score.cuh", "hw/copy.cuh", "attention/epilogue.cuh", "forward_mma.cu"])
def test_messages_name_file_and_line(path, monkeypatch):
    variant = next(v for v in VARIANTS if v.kernel == "forward_mma")
    lines = source.read(path).splitlines()
    at = max(i for i, line in enumerate(lines) if not line.strip())  # a blank line: no comment, no macro around it
    lines[at] = "static_assert(false_statement_of_a_test);"
    broken = "\n".join(lines) + "\n"
    genuine = source.read
    monkeypatch.setattr(source, "read", lambda p: broken if p == path else genuine(p))
    with pytest.raises(nvrtc.CompilationError) as error:
        nvrtc.compile_source(source.build.__wrapped__(variant), 80)
    assert re.search(rf"^{re.escape(path)}\({at + 1}\): error", str(error.value), re.MULTILINE), str(error.value)[:500]


def test_a_text_depends_on_the_variant_alone():
    variant = VARIANTS[0]
    assert source.build.__wrapped__(variant) == source.build(variant)


# ---- names -----------------------------------------------------------------------------------------------------------
@each_variant
def test_names_read_well_in_a_profiler(variant):
    assert re.fullmatch(r"cuflash_(forward|backward|decode)_[a-z0-9_]+", variant.entry)
    assert variant.kernel in variant.entry
    for name in variant.modifiers:
        assert name in variant.entry.split("_")
    assert f"// {variant}\n" in source.build(variant)


@each_variant
def test_constants_are_those_of_the_configuration(variant):
    text = source.build(variant)
    for name, value in variant.constants().items():
        kind = "bool" if isinstance(value, bool) else "int"
        assert f"static constexpr {kind} {name} = {str(value).lower()};" in text


# ---- the law of layers -----------------------------------------------------------------------------------------------
INSTRUCTIONS = r"asm\b|__CUDA_ARCH__|__shared__|shared_memory|SharedTile|ldmatrix|mma|cp_async|wgmma|red_add|sm_\d\d"
ATTENTION_WORDS = r"query|queries|\bkeys?\b|softmax|causal|\bmask\b|bias|Visibility|\bScore|seq_q|seq_k|\blse\b"
MATHEMATICS = r"\bexp2?f?\b|exp2_of|log_of|infinity|tanh"


@pytest.mark.parametrize("path", ATTENTION)
def test_attention_names_no_hardware(path):
    assert not re.findall(INSTRUCTIONS, CODE[path])
    assert not re.findall(r'#include "hw/(?!element|fragment)', CODE[path])


@pytest.mark.parametrize("path", HARDWARE)
def test_hardware_names_no_attention(path):
    assert not re.findall(ATTENTION_WORDS, CODE[path])
    assert '#include "attention/' not in CODE[path]


@pytest.mark.parametrize("path", SCHEDULES)
def test_schedules_only_say_when(path):
    assert not re.findall(MATHEMATICS, CODE[path])
    assert not re.findall(r"__CUDA_ARCH__|asm\b", CODE[path])
    # positions of single elements are compared by the headers of attention/
    assert not re.findall(r"\.(?:row|column)\([^()]*(?:\([^()]*\))?[^()]*\)\s*(?:<|>|<=|>=|==)\s", CODE[path])


@pytest.mark.parametrize("name", REGISTRY)
def test_modifiers_name_no_hardware(name):
    assert not re.findall(INSTRUCTIONS, REGISTRY[name].cuda)


@pytest.mark.parametrize("path", PATHS)
def test_no_system_header(path):
    assert not re.findall(r"#\s*include\s*<", source.read(path))
    for included in re.findall(r'#include "([^"]+)"', source.read(path)):
        assert included in ("variant.cuh", "wgmma_instructions.cuh") or included in PATHS  # the first two are generated
    assert "std::" not in CODE[path]


@pytest.mark.parametrize("path", PATHS)
def test_every_file_says_its_job(path):
    first = source.read(path).splitlines()[0]
    assert first.startswith("// ")
    assert len(first) > 30
