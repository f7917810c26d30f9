"""CUDA C++ with inline PTX -> C++ for the emulator; line numbers stay.

* `asm [volatile]("text" : outputs : inputs : clobbers)` becomes one call per PTX instruction of the text: the opcode
  with every separator as '_' in namespace emu::ptx, operands in the order of the text (so a swapped %n in a wrapper is
  a bug here as well).  No instruction is known here: an opcode without a function fails to compile, by name.
* `extern __shared__ T name[];` becomes a pointer to the block's dynamic shared memory, a `__shared__` variable a
  reference to guarded memory of its own.
* Every `extern "C" __global__` function gets an entry point; the host can read `extern "C" __device__` variables.

The input is preprocessed text (`g++ -E`): macros are expanded, comments are gone.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class TranslationError(Exception):
    """The source uses a construct that the emulator cannot translate."""


class Translation(NamedTuple):
    """C++ text, and the PTX opcode of each function name that it calls (to explain a compile error)."""

    text: str
    opcodes: dict[str, str]


# ---- scanning --------------------------------------------------------------------------------------------------------


def string_end(text: str, i: int) -> int:
    """Index after the string literal that begins at `i`."""
    i += 1
    while text[i] != '"':
        i += 2 if text[i] == "\\" else 1
    return i + 1


def balanced_end(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`; string literals are skipped."""
    depth, i = 0, start
    while True:
        c = text[i]
        if c == '"':
            i = string_end(text, i)
            continue
        depth += (c in "([{") - (c in ")]}")
        i += 1
        if depth == 0:
            return i


def split(text: str, separator: str) -> list[str]:
    """Parts between separators at top level, outside brackets and strings."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            i = string_end(text, i)
            continue
        depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [p.strip() for p in [*parts, text[start:]]]


def string_value(text: str) -> str:
    """Adjacent string literals as one string."""
    joined = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text))
    return joined.replace("\\n", "\n").replace("\\t", " ").replace('\\"', '"')


# ---- PTX opcodes -----------------------------------------------------------------------------------------------------

# Modifiers that change speed or memory order, not the result: the emulator's threads are sequentially consistent.
HINTS = re.compile(
    r"""\. (?: L1::(?:no_allocate|evict_\w+) | L2::(?:\d+B|evict_\w+|cache_hint)   # caches
          | nc | ca | cg | cs | lu | cv | wb | wt
          | relaxed | acquire | release | acq_rel | weak | volatile              # order
          | cta | gpu | sys | cluster                                            # scope
        ) (?![\w:])""",
    re.VERBOSE,
)
MEMORY = re.compile(r"(ld|st)\.(global|shared)(?:\.v([24]))?\.(\w+)")
ATOMIC = re.compile(r"(red|atom)\.(global|shared)\.(\w+)(?:\.v([24]))?(?:\.noftz)?\.(\w+)")
COMPARISON = re.compile(r"setp\.(\w+)\.(\w+)")
WGMMA = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(k16\.f32\.(?:bf16|f16)|k32\.f32\.e4m3)\.(bf16|f16|e4m3)"
)


def function_name(opcode: str) -> str:
    """Name, with template arguments, of the function that emulates an opcode."""
    opcode = opcode.replace("shared::cta", "shared")
    if opcode.startswith(("ld.", "st.", "red.", "atom.")):
        opcode = HINTS.sub("", opcode)
        if m := MEMORY.fullmatch(opcode):
            return f"{m[1]}_{m[2]}<emu::ptx::{m[4]}, {m[3] or 1}>"
        if m := ATOMIC.fullmatch(opcode):
            return f"{m[1]}_{m[2]}<emu::ptx::{m[5]}, {m[4] or 1}, emu::ptx::{m[3].capitalize()}>"
    if opcode.startswith("cp.async.c"):
        opcode = re.sub(r"\.L2::\d+B", "", opcode)
    if m := COMPARISON.fullmatch(opcode):
        return f"setp_{m[1]}<emu::ptx::{m[2]}>"
    if (m := WGMMA.fullmatch(opcode)) and m[2].endswith(f".{m[3]}"):
        return f"wgmma<{m[1]}, emu::{m[3].capitalize()}>"
    return re.sub(r"[.:]+", "_", opcode)


# ---- asm statements --------------------------------------------------------------------------------------------------

REGISTER_TYPES = {
    "pred": "bool",
    **dict.fromkeys(("b16", "u16", "s16"), "emu::u16"),
    **dict.fromkeys(("b32", "u32", "s32"), "emu::u32"),
    **dict.fromkeys(("b64", "u64", "s64"), "emu::u64"),
    "f32": "float",
    "f64": "double",
}
CONSTRAINT_TYPES = {"h": "emu::u16", "r": "emu::u32", "l": "emu::u64", "f": "float", "d": "double"}


def operand(text: str) -> str:
    """One operand of a PTX instruction as C++ arguments."""
    text = text.strip()
    if text.startswith("["):
        return ", ".join(operand(p) for p in split(text[1:-1], ","))
    if text.startswith("{"):
        return "emu::ptx::list(" + ", ".join(operand(p) for p in split(text[1:-1], ",")) + ")"
    if m := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return f"emu::bits_of<float>(0x{m[1]}u)"
    if m := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return f"emu::bits_of<double>(0x{m[1]}ull)"
    text = re.sub(r"%%([\w.]+)", lambda m: f"emu::ptx::special_{m[1].replace('.', '_')}()", text)
    return re.sub(r"%(\d+)", r"operand\1_", text)


def instruction(text: str, opcodes: dict[str, str]) -> str:
    """One PTX statement as a C++ statement."""
    if m := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text):
        if m[1] not in REGISTER_TYPES:
            raise TranslationError(f"PTX register type .{m[1]} is not modelled: {text}")
        return f"{REGISTER_TYPES[m[1]]} {m[2]};"
    if m := re.match(r"([A-Za-z_$][\w$]*)\s*:\s*(?!:)", text):
        return f"{m[1]}: {instruction(text[m.end() :], opcodes)}"
    if not text:
        return ";"
    guard = ""
    if m := re.match(r"@(!?)\s*([\w%]+)\s+", text):
        guard, text = f"if ({m[1]}{operand(m[2])}) ", text[m.end() :]
    opcode, _, rest = text.partition(" ")
    if opcode in ("bra", "bra.uni"):
        return f"{guard}goto {rest};"
    arguments = [operand(o) for part in split(rest, ",") for o in part.split("|") if o.strip() not in ("_", "")]
    name = function_name(opcode)
    opcodes[name.partition("<")[0]] = opcode
    return f"{guard}emu::ptx::{name}({', '.join(arguments)});"


def bindings(section: str, first: int, is_input: bool) -> list[str]:
    """Declarations of the operands of one section of an asm statement."""
    found = []
    for index, part in enumerate(split(section, ",") if section.strip() else [], first):
        end = string_end(part, 0)
        constraint, expression = part[1 : end - 1].strip("=+&"), part[end:].strip()[1:-1]
        if is_input and constraint == "n":
            found.append(f"const auto operand{index}_ = {expression};")
        elif constraint not in CONSTRAINT_TYPES:
            raise TranslationError(f'asm constraint "{constraint}" is not modelled')
        elif is_input:
            found.append(
                f"const auto& operand{index}_ = emu::ptx::input<{CONSTRAINT_TYPES[constraint]}>({expression});"
            )
        else:
            found.append(f"auto& operand{index}_ = emu::ptx::output<{CONSTRAINT_TYPES[constraint]}>({expression});")
    return found


def statement(body: str, opcodes: dict[str, str]) -> str:
    """The inside of asm(...) as a C++ block."""
    sections = [*split(body, ":"), "", "", ""]
    text = re.sub(r"//[^\n]*", "", string_value(sections[0])).strip()
    if not text:
        return "do {} while (0)"  # an anchor for the device compiler
    if text.startswith("{") and text.endswith("}") and balanced_end(text, 0) == len(text):
        text = text[1:-1]
    outputs = bindings(sections[1], 0, is_input=False)
    inputs = bindings(sections[2], len(outputs), is_input=True)
    labels = re.findall(r"(?:^|[;{])\s*([A-Za-z_$][\w$]*)\s*:(?!:)", text)
    if labels:
        outputs.insert(0, f"__label__ {', '.join(labels)};")  # of this statement only
    code = [instruction(" ".join(s.split()), opcodes) for s in text.split(";") if s.strip()]
    return "do { " + " ".join(outputs + inputs + code) + " } while (0)"


def translate_asm(source: str, opcodes: dict[str, str]) -> str:
    out, position = [], 0
    for m in re.finditer(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(", source):
        if m.start() < position:
            continue
        end = balanced_end(source, m.end() - 1)
        out.append(source[position : m.start()])
        out.append(statement(source[m.end() : end - 1], opcodes) + "\n" * source.count("\n", m.start(), end))
        position = end
    return "".join(out) + source[position:]


# ---- shared memory, kernels ------------------------------------------------------------------------------------------

ALIGNMENT = r"(?:(?:__align__|alignas) \s* \( (?P<alignment>[^)]*) \) \s*)?"
DYNAMIC_SHARED = re.compile(
    rf"""extern \s+ __shared__ \s+ {ALIGNMENT}
    (?P<type>[\w: ]+?) \s+ (?P<name>\w+) \s* \[ \s* \]""",
    re.VERBOSE,
)
STATIC_SHARED = re.compile(
    rf"""(?:static \s+)? __shared__ \s+ {ALIGNMENT}
    (?P<type>[\w:]+ (?:\s*<[^;=]*?>)? (?:\s+\w+)*?) \s+ (?P<name>\w+) \s* (?P<extents>(?:\[[^\]]*\])*) \s* ;""",
    re.VERBOSE,
)


def dynamic_shared(match: re.Match[str]) -> str:
    before = match.string[: match.start()]
    if before.count("{") == before.count("}"):
        raise TranslationError(f"declare the dynamic shared memory inside the kernel: {match[0]}")
    kind, name = match["type"], match["name"]
    return f"{kind}* const {name} = reinterpret_cast<{kind}*>(emu::dynamic_shared())"


def static_shared(match: re.Match[str]) -> str:
    kind, name = match["type"] + match["extents"], match["name"]
    return f"static emu::StaticShared<{kind}> {name}_shared_; auto& {name} = {name}_shared_.variable();"


def translate_shared(source: str) -> tuple[str, int]:
    """Text without __shared__ declarations, and the alignment that dynamic shared memory needs."""
    declared = [m["alignment"] for m in DYNAMIC_SHARED.finditer(source)]
    alignment = max([128, *(int(a) for a in declared if a and a.strip().isdigit())])
    text = STATIC_SHARED.sub(static_shared, DYNAMIC_SHARED.sub(dynamic_shared, source))
    if "__shared__" in text:
        line = next(line for line in text.splitlines() if "__shared__" in line)
        raise TranslationError(f"this __shared__ declaration is not modelled: {line.strip()}")
    return text, alignment


def find_kernels(source: str) -> dict[str, str]:
    """Names of the kernels and the first argument of their __launch_bounds__ (0 without)."""
    found = {}
    for start in re.finditer(r'extern\s+"C"\s+__global__\b', source):
        bound, position = "0", start.end()
        while m := re.compile(r"[^;{(]*?(\w+)\s*\(").match(source, position):
            position = balanced_end(source, m.end() - 1)
            if m[1] == "__launch_bounds__":
                bound = split(source[m.end() : position - 1], ",")[0]
            elif m[1] != "__cluster_dims__":
                found[m[1]] = bound
                break
    return found


def translate(source: str) -> Translation:
    """Complete translation unit of preprocessed CUDA text, with an entry point for each kernel."""
    kernels = find_kernels(source)
    opcodes: dict[str, str] = {}
    if not kernels:
        raise TranslationError('no extern "C" __global__ function in the source')
    async_proxy = "true" if re.search(r"cp\.(?:reduce\.)?async\.bulk|wgmma\.", source) else "false"
    source = re.sub(r'extern\s+"C"\s+(?:__device__|__constant__)', 'extern "C" EMU_EXPORT', source)
    text, alignment = translate_shared(translate_asm(source, opcodes))
    entries = "".join(f"EMU_KERNEL({k}, {bound}, {alignment}, {async_proxy})\n" for k, bound in kernels.items())
    return Translation(f'#include "kernel.h"\n{text}\n{entries}', opcodes)
