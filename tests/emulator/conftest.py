"""Which cases of the emulator's tests run by default: building all of their kernels takes two cores half an hour.

A file that is named runs whole, and CUFLASH_FULL_EMULATOR=1 runs all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from zlib import crc32

import pytest

FULL = os.environ.get("CUFLASH_FULL_EMULATOR") == "1"
HERE = Path(__file__).parent

#: cases of one test that all run, and the shares of more that do, at least and at most
FEW, LEAST, MOST = 8, 0.2, 0.4


def values(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """The parameters of a case, as text."""
    call = getattr(item, "callspec", None)
    for name, value in (call.params if call else {}).items():
        yield name, getattr(value, "name", None) or repr(value)


def chosen(cases: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Cases of one test that have as many values of its parameters as may be, by their names, which say nothing.

    So what is left out for one backend is not for another, and a test that is added changes nothing for others.
    """
    found = sorted(cases, key=lambda case: crc32(case.nodeid.encode()))
    seen: set[tuple[str, str]] = set()
    first, rest = [], []
    for case in found:
        new = set(values(case)) - seen
        (first if new else rest).append(case)
        seen |= new
    least, most = (max(FEW, round(share * len(found))) for share in (LEAST, MOST))
    return first[:most] + rest[: max(0, least - len(first))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases that say what others say, unless all were asked for or a file was named."""
    if FULL or any("::" in given or given.endswith(".py") for given in config.args):
        return
    own = [item for item in items if HERE in item.path.parents]
    owned, kept = set(own), set[pytest.Item]()
    for _, cases in groupby(own, key=lambda item: item.nodeid.partition("[")[0]):
        kept.update(chosen(cases))
    left = [item for item in own if item not in kept]
    if left:
        items[:] = [item for item in items if item in kept or item not in owned]
        config.hook.pytest_deselected(items=left)
