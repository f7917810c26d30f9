"""Which cases a run of everything has, where building all of their kernels takes two cores an hour.

Of the emulator's cases and of the compile matrix those are left out that show no value of a parameter that others do not
show: each option, dtype, tile, length and architecture stays, not each pair of them.  A file that is named runs whole, and
CUFLASH_FULL_EMULATOR=1 and CUFLASH_FULL_MATRIX=1 run all, the latter with kernels that no file's name asks for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Iterable
from itertools import groupby
from pathlib import Path
from zlib import crc32

import pytest

EMULATOR = Path(__file__).parent / "emulator"
MATRIX = "test_compile_matrix.py::test_compiles_well"

#: cases of one test of the emulator that all run, and the shares of more that do, at least and at most
FEW, LEAST, MOST = 1, 0.1, 0.12
#: the same of bugs that are sown into kernels, whose every case is a value of its own
SOWN = re.compile(r"bugs?_|mutant")
FEW_SOWN, SHARE_SOWN = 3, 0.2

Values = Callable[[pytest.Item], Iterable[Hashable]]


def parameters(item: pytest.Item) -> dict[str, object]:
    """The parameters of a case by name."""
    call = getattr(item, "callspec", None)
    return call.params if call else {}


def shown(item: pytest.Item) -> set[Hashable]:
    """The values of a case of the emulator, as text; of a sown bug the kernel, if it says which."""
    texts = set()
    for name, value in parameters(item).items():
        kernel = getattr(getattr(value, "mutant", value), "kernel", None)
        texts.add((name, getattr(value, "name", None) or kernel or repr(value)))
    return texts


def compiled(item: pytest.Item) -> set[Hashable]:
    """What a kernel of the matrix has of its own: its tile with every flag, its dtype, its options, the architecture."""
    arch, variant = parameters(item)["arch"], parameters(item)["variant"]
    dtypes = variant.dtype, variant.out_dtype
    traits = (arch, str(variant.config), dtypes, *variant.modifiers, variant.modifiers)
    return {(variant.kernel, trait) for trait in traits}


def by_name(item: pytest.Item) -> int:
    """An order that says nothing, so that what is left out for one backend is not for another."""
    return crc32(item.nodeid.encode())


def most_options_first(item: pytest.Item) -> tuple[int, int]:
    """An order in which a tile shows with the options that take the most registers."""
    return -len(parameters(item)["variant"].modifiers), by_name(item)


def cover(cases: Iterable[pytest.Item], values: Values, seen: set[Hashable]) -> list[pytest.Item]:
    """Those cases, in their order, that show what was not seen; and now it is."""
    new = []
    for case in cases:
        if not seen.issuperset(found := set(values(case))):
            new.append(case)
            seen |= found
    return new


def chosen(cases: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Of one test of the emulator the cases that show the most; a test that is added changes nothing for others."""
    found = sorted(cases, key=by_name)
    few, *shares = (FEW_SOWN, SHARE_SOWN, SHARE_SOWN) if sown(found[0]) else (FEW, LEAST, MOST)
    least, most = (max(few, round(share * len(found))) for share in shares)
    first = cover(found, shown, set())[:most]
    return first + [case for case in found if case not in first][: max(0, least - len(first))]


def sown(item: pytest.Item) -> bool:
    """Whether a case is about a bug."""
    return bool(SOWN.search(item.nodeid.rpartition("::")[2].partition("[")[0]))


def of_emulator(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Some cases of each test, and whatever shows a value that is in none of them."""
    tests = [list(group) for _, group in groupby(cases, key=lambda case: case.nodeid.partition("[")[0])]
    kept = {case for test in tests for case in chosen(test)}
    seen = {value for case in kept for value in shown(case)}
    for test in tests:
        if not sown(test[0]):
            kept.update(cover(sorted(test, key=by_name), shown, seen))
    return kept


def of_matrix(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Kernels of each test that have together what all have."""
    tests = (list(group) for _, group in groupby(cases, key=lambda case: case.nodeid.partition("[")[0]))
    return {case for test in tests for case in cover(sorted(test, key=most_options_first), compiled, set())}


def left_out(items: list[pytest.Item], named: Iterable[str]) -> set[pytest.Item]:
    """The cases that a run leaves out, given what it was asked for."""
    if any("::" in given or given.endswith(".py") for given in named):
        return set()
    emulated = [item for item in items if EMULATOR in item.path.parents]
    kernels = [item for item in items if MATRIX in item.nodeid]
    left: set[pytest.Item] = set()
    if os.environ.get("CUFLASH_FULL_EMULATOR") != "1":
        left.update(set(emulated) - of_emulator(emulated))
    if os.environ.get("CUFLASH_FULL_MATRIX") != "1":
        left.update(set(kernels) - of_matrix(kernels))
    return left
