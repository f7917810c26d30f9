"""The examples of all docstrings run, and the reference that is printed from them is that of this version."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import cuflash
from cuflash import compat
from tests.test_package import load_script

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "api.md"
api_reference = load_script("api_reference")
#: modules that need a device, or run when they are imported
LEFT_OUT = {"cuflash.__main__", "cuflash.launch", "cuflash.decode_launch", "cuflash.jit", "cuflash.jax.ffi"}
#: libraries that an example needs besides
EXTRAS = {"cuflash.jax": "jax", "cuflash.picture": "matplotlib"}


def modules() -> list[str]:
    """Every module of the package."""
    found = [m.name for m in pkgutil.walk_packages(cuflash.__path__, "cuflash.", onerror=lambda _: None)]
    return sorted({"cuflash", *found} - LEFT_OUT)


def examples(module: Any) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]


WITH_EXAMPLES = [name for name in modules() if ">>> " in Path(importlib.util.find_spec(name).origin or "").read_text()]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str) -> None:
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name], reason=f"the extra of {name} is not installed")
    module = importlib.import_module(name)
    assert examples(module)
    assert doctest.testmod(module).failed == 0


def test_every_module_with_an_example_is_listed() -> None:
    """The list comes from the folder: it has the files in which examples stand, and no file is passed over unseen."""
    files = {path for path in (ROOT / "cuflash").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")}
    listed = {Path(importlib.util.find_spec(name).origin or "").resolve() for name in WITH_EXAMPLES}
    assert listed == {path.resolve() for path in files}


def public() -> dict[str, Any]:
    """What users call or make, by name."""
    found = {f"cuflash.{name}": getattr(cuflash, name) for name in cuflash.__all__ if name != "__version__"}
    calls = ("flash_attn_func", "flash_attn_with_kvcache", "scaled_dot_product_attention")
    return found | {f"cuflash.compat.{name}": getattr(compat, name) for name in calls}


@pytest.mark.parametrize("name", public())
def test_what_is_public_has_a_summary_and_an_example(name: str) -> None:
    x = public()[name]
    doc = inspect.getdoc(x) or ""
    assert doc.partition("\n")[0].endswith(".")
    results = isinstance(x, type) and (issubclass(x, Exception) or name.endswith(("Explanation", "Statistics")))
    assert results or ">>> " in doc


def test_the_reference_is_up_to_date() -> None:
    pytest.importorskip("jax", reason="the reference has a chapter on cuflash.jax")
    assert REFERENCE.read_text(encoding="utf-8") == api_reference.text(), (
        "print it anew: python scripts/api_reference.py >docs/api.md"
    )


def test_the_reference_has_all_that_is_public() -> None:
    headings = set(re.findall(r"^### `(.+)`$", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(public()) <= headings
    assert "cuflash.jax.attention" in headings
    assert "cuflash.onnx.attention" in headings


def test_links_of_the_reference_lead_somewhere() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    anchors = {api_reference.anchor(heading) for heading in re.findall(r"^##+ (.+)$", text, re.MULTILINE)}
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert len(links) > 20
    assert links <= anchors


def test_text_becomes_markdown() -> None:
    anchors = {"attention": "cuflashattention"}
    assert (
        api_reference.prose("a * b, _x, heads_q <= 1, <b> `a * b`", anchors)
        == "a \\* b, \\_x, heads_q <= 1, \\<b> `a * b`"
    )
    assert api_reference.prose("as `attention` and ``attention(q)``", anchors) == (
        "as [`attention`](#cuflashattention) and `attention(q)`"
    )
    assert list(api_reference.items("q, k\n    Two\n    lines.\nv\n    One.", {})) == [
        "* `q`, `k`: Two\n  lines.",
        "* `v`: One.",
    ]

    def function(x: int, *more: Any, last: str = "y") -> None:
        pass

    assert api_reference.signature("f", function) == "f(x: int, *more: Any, last: str = 'y')"
