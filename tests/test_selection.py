"""What a run of all tests leaves out shows nothing that what it has does not show."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, is_dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cuflash
from tests import nvrtc, selection
from tests.emulator import Mutant
from tests.selection import FEW, FEW_SOWN, LEAST, SHARE_SOWN, chosen, left_out, of_emulator, shown

PACKAGE = Path(cuflash.__file__).parent


@dataclass(frozen=True, eq=False)
class Case:
    """What the choice looks at."""

    nodeid: str
    callspec: Any
    path: Path = selection.EMULATOR / "test_x.py"


def cases_of(axes: dict[str, list[Any]], test: str = "tests/emulator/test_x.py::test_x") -> list[Any]:
    """Cases of a test with these values of each parameter."""
    return [
        Case(f"{test}[{'-'.join(map(str, values))}]", SimpleNamespace(params=dict(zip(axes, values, strict=True))))
        for values in product(*axes.values())
    ]


def options(count: int, **others: list[Any]) -> dict[str, list[Any]]:
    return {"option": list(range(count)), **others}


def values_of(cases: Any) -> set[Any]:
    return {value for case in cases for value in shown(case)}


def test_a_share_of_many_cases_has_each_value_of_each_parameter() -> None:
    cases = cases_of(options(20, backend=["simt", "mma", "wgmma"], seed=[0, 1, 2, 3, 4]))
    kept = chosen(cases)
    assert len(kept) == round(LEAST * len(cases))
    assert values_of(kept) == values_of(cases)
    assert [case.nodeid for case in chosen(reversed(cases))] == [case.nodeid for case in kept]


def test_few_cases_all_run() -> None:
    assert len(chosen(cases_of(options(FEW)))) == FEW
    assert chosen([Case("tests/emulator/test_x.py::test_x", None)])


def test_values_that_one_test_leaves_out_another_has_or_they_are_added() -> None:
    first, second = (cases_of(options(50), f"tests/emulator/test_x.py::test_{name}") for name in "ab")
    kept = of_emulator(first + second)
    assert values_of(kept) == values_of(first)
    assert len(kept) < 70
    both = of_emulator(first + cases_of(options(60), "tests/emulator/test_x.py::test_b"))
    assert values_of(both) == {("option", repr(n)) for n in range(60)}


def test_of_sown_bugs_a_share_of_each_kernel_runs() -> None:
    bugs = [Mutant(kernel, str(n), "", "") for kernel, n in product(("forward", "backward"), range(20))]
    kept = of_emulator(cases_of({"bug": bugs}, "tests/emulator/test_x.py::test_bug_is_noticed"))
    assert len(kept) == round(SHARE_SOWN * len(bugs))
    assert {case.callspec.params["bug"].kernel for case in kept} == {"forward", "backward"}
    few = cases_of({"bug": bugs[:FEW_SOWN]}, "tests/emulator/test_x.py::test_mutant_is_noticed")
    assert of_emulator(few) == set(few)


def test_what_is_named_runs_whole(monkeypatch) -> None:
    cases = cases_of(options(50, backend=["simt", "mma"]))
    monkeypatch.delenv("CUFLASH_FULL_EMULATOR", raising=False)
    for given in ([], ["tests"], ["tests/emulator"]):
        assert left_out(cases, given)
    for given in (["tests/emulator/test_x.py"], ["tests/emulator/test_x.py::test_x[0-mma]"]):
        assert not left_out(cases, given)
    monkeypatch.setenv("CUFLASH_FULL_EMULATOR", "1")
    assert not left_out(cases, ["tests"])


def texts(value: Any) -> Iterator[str]:
    """The strings of a case, however it holds them."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from texts(astuple(value))
    elif isinstance(value, tuple):
        for part in value:
            yield from texts(part)


def sown_cases() -> Iterator[tuple[str, Any]]:
    """Every bug that the emulator's tests sow, with the place of its test."""
    for path in sorted(selection.EMULATOR.glob("test_*.py")):
        module = importlib.import_module(f"tests.emulator.{path.stem}")
        named = {name: x for table in vars(module).values() if isinstance(table, dict) for name, x in table.items()}
        for test, function in vars(module).items():
            for mark in getattr(function, "pytestmark", []) if selection.SOWN.search(test) else []:
                known = mark.name == "parametrize" and "without" not in test and mark.args[0] != "target"
                for case in mark.args[1] if known else []:
                    yield f"{path.name}::{test}", named.get(case, case) if isinstance(case, str) else case


def test_bugs_are_sown_where_something_grows() -> None:
    """What a bug takes the place of stands in a kernel still, whether or not it is among those that run."""

    def plain(text: str) -> str:
        return " ".join(text.split())

    files = (file for pattern in ("kernels/**/*.cu*", "**/*.py") for file in sorted(PACKAGE.glob(pattern)))
    source = plain("".join(file.read_text() for file in files))
    cases = list(sown_cases())
    assert len(cases) > 300
    for test, case in cases:
        bug = getattr(case, "mutant", case)
        wanted = [bug.old] if isinstance(bug, Mutant) else [text for text in texts(bug) if len(text) > 5]
        assert any(plain(text) in source for text in wanted), f"{test}: {bug}"


@nvrtc.needed
def test_each_tile_and_each_set_of_options_of_a_kernel_is_compiled() -> None:
    from tests.test_compile_matrix import decode_matrix, matrix

    cases: list[Any] = [
        Case(f"{selection.MATRIX}[{of.id}]", SimpleNamespace(params={"arch": of.values[0], "variant": of.values[1]}))
        for of in (*matrix(), *decode_matrix())
    ]
    wanted = [tuple(case.callspec.params.values()) for case in cases]
    kept = [tuple(case.callspec.params.values()) for case in selection.of_matrix(cases)]
    assert len(kept) < len(wanted)
    for traits in (
        lambda arch, v: (v.kernel, v.config),
        lambda arch, v: (v.kernel, v.modifiers),
        lambda arch, v: (v.kernel, v.dtype, v.out_dtype),
        lambda arch, v: (v.kernel, arch),
    ):
        assert {traits(*x) for x in kept} == {traits(*x) for x in wanted}


@pytest.mark.parametrize("of", ["emulator", "matrix"])
def test_an_order_of_collection_changes_nothing(of) -> None:
    cases = cases_of(options(30, backend=["simt", "mma"]))
    if of == "matrix":
        variants = [
            SimpleNamespace(kernel="k", config=n % 7, dtype="f", out_dtype="", modifiers=("causal",) * (n % 3))
            for n in range(60)
        ]
        cases = cases_of({"arch": [80, 90], "variant": variants}, selection.MATRIX)
    choose = getattr(selection, f"of_{of}")
    assert {case.nodeid for case in choose(cases)} == {case.nodeid for case in choose(cases[::-1])}
