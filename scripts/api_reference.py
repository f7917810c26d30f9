"""Print the reference of all public calls and objects from their docstrings: python scripts/api_reference.py >docs/api.md.

Docstrings have numpydoc's sections.  A test compares the file with what this prints.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import cuflash  # noqa: E402 (this checkout's)

HEAD = """\
# Reference

<!-- Printed by scripts/api_reference.py from the docstrings of the package; change those, then print it anew. -->

Every public call and object of cuflash {version}. How they are used together stands in [README](../README.md).
"""
#: headings, and names of the package under each
CHAPTERS = {
    "Attention": (
        "attention",
        "attention_backward",
        "attention_vjp",
        "attention_jvp",
        "attention_hvp",
        "explain",
        "Explanation",
    ),
    "Packed sequences": ("attention_varlen", "attention_varlen_backward", "attention_varlen_vjp", "explain_varlen"),
    "Decoding": ("attention_decode", "explain_decode"),
    "Results over parts of the keys": ("merge", "merge_backward", "merge_vjp"),
    "Looking inside": ("attention_statistics", "Statistics", "attention_weights"),
    "Modifiers": (
        *("ALiBi", "KeyLengths", "Documents", "BlockMask", "Sinks", "Dropout", "dropout_mask"),
        *("ScoreModifier", "MaskModifier", "CudaFunction"),
    ),
    "Pictures": ("draw_attention", "draw_tiles", "draw_recurrence", "draw_costs"),
    "Errors": (*("CuflashError", "ArgumentError", "ShapeError", "UnsupportedError", "VersionError", "CompileError"),),
}
#: modules beside it, all of whose public functions are listed
MODULES = ("cuflash.jax", "cuflash.compat", "cuflash.onnx")
WIDTH = 100
SECTION = re.compile(r"^(\w[\w ]*)\n-+$", re.MULTILINE)
CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
#: what Markdown would not print as it is: a star, a bracket, a tag, an underscore that begins or ends a word
SPECIAL = re.compile(r"[*\[\]]|<(?=[\w/!])|(?<!\w)_|_(?!\w)")
LISTS = ("Parameters", "Returns", "Raises")


def main() -> int:
    sys.stdout.write(text())
    return 0


def text() -> str:
    """The whole file."""
    chapters: dict[str, list[tuple[str, Any]]] = {
        title: [(f"cuflash.{name}", getattr(cuflash, name)) for name in names] for title, names in CHAPTERS.items()
    }
    introductions = {}
    for module in map(importlib.import_module, MODULES):
        chapters[f"`{module.__name__}`"] = [
            (f"{module.__name__}.{name}", x) for name, x in vars(module).items() if is_public(module, name, x)
        ]
        introductions[f"`{module.__name__}`"] = inspect.getdoc(module) or ""
    anchors = {
        name.rpartition(".")[2]: anchor(f"`{name}`") for entries in reversed(chapters.values()) for name, _ in entries
    }
    parts = [HEAD.format(version=cuflash.__version__)]
    parts.append("\n".join(f"* [{title}](#{anchor(title)})" for title in chapters) + "\n")
    for title, entries in chapters.items():
        parts.append(f"## {title}\n")
        if title in introductions:
            parts.append(prose(introductions[title], anchors) + "\n")
        parts.extend(entry(name, x, anchors) for name, x in entries)
    return "\n".join(parts)


def is_public(module: Any, name: str, x: Any) -> bool:
    """Whether a module defines a function for users: those have examples."""
    own = inspect.isfunction(x) and x.__module__ == module.__name__ and not name.startswith("_")
    return own and "\nExamples\n" in (inspect.getdoc(x) or "")


def anchor(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def entry(name: str, x: Any, anchors: dict[str, str]) -> str:
    """One call or object."""
    lines = [f"### `{name}`\n"]
    if not (inspect.isclass(x) and issubclass(x, Exception)):
        lines.append(f"```python\n{signature(name, x)}\n```\n")
    doc = inspect.getdoc(x) or ""
    summary, *rest = SECTION.split(doc)
    lines.append(prose(summary.strip(), anchors) + "\n")
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        lines.append(f"**{title}**\n")
        if title == "Examples":
            lines.append(f"```pycon\n{body.strip()}\n```\n")
        elif title in LISTS:
            lines.append("\n".join(items(body, anchors)) + "\n")
        else:
            lines.append(prose(body.strip(), anchors) + "\n")
    return "\n".join(lines)


def signature(name: str, x: Any) -> str:
    """How it is called, one parameter a line where one line is too short."""
    parts, kinds, star = [], [], False
    for p in inspect.signature(x).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        shown = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        if p.annotation is not p.empty:
            shown += f": {annotation(p.annotation)}"
        if p.default is not p.empty:
            shown += f" = {p.default!r}" if ":" in shown else f"={p.default!r}"
        parts.append(shown)
        kinds.append(p.kind)
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        parts.insert(kinds.count(inspect.Parameter.POSITIONAL_ONLY), "/")
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def annotation(x: Any) -> str:
    return x if isinstance(x, str) else getattr(x, "__forward_arg__", None) or getattr(x, "__name__", str(x))


def items(body: str, anchors: dict[str, str]) -> Iterator[str]:
    """Names with what is said about each."""
    for block in re.split(r"\n(?=\S)", body.strip("\n")):
        names, _, said = block.partition("\n")
        said = "\n".join(line.strip() for line in said.strip().splitlines())
        shown = ", ".join(f"`{name}`" for name in names.split(", "))
        said = prose(said, anchors).replace("\n", "\n  ").replace("\n  \n", "\n\n")
        yield f"* {shown}" + (f": {said}" if said else "")


def prose(text: str, anchors: dict[str, str]) -> str:
    """Text as Markdown: signs that mean something there are escaped, names of the reference become links."""
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = SPECIAL.sub(r"\\\g<0>", part)
            continue
        code = part.strip("`")
        parts[i] = f"[`{code}`](#{anchors[code]})" if code in anchors else f"`{code}`"
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main())
