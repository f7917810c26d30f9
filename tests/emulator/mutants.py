"""Bugs sown into kernels on purpose, and who notices them: the test of the tests.

MUTANTS = [Mutant("forward_mma", "values are read before they arrive", "cp_async_wait_group<0>();", "")]
findings = examine(mutant, source, run, seeds=range(6))      # run(source, seed) raises when something is wrong
assert findings.noticed, findings
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .build import BuildError, EmulatorError


@dataclass(frozen=True)
class Mutant:
    """One bug: a text of the kernel's source and what takes its place."""

    kernel: str
    description: str
    old: str
    new: str
    count: int = 1


@dataclass(frozen=True)
class Findings:
    """What each seed made of a mutant: F a fault of the emulator, W wrong numbers, . nothing."""

    mutant: Mutant
    marks: str
    message: str

    @property
    def noticed(self) -> bool:
        return self.marks.strip(".") != ""

    def __str__(self) -> str:
        message = self.message.splitlines()[0] if self.message else ""
        return f"{self.mutant.kernel}: {self.mutant.description} [{self.marks}] {message}"


def mutate(source: str, old: str, new: str, count: int = 1) -> str:
    """Source with `old` replaced by `new`; ValueError unless it occurs exactly `count` times."""
    found = source.count(old)
    if found != count:
        raise ValueError(f"expected {count} occurrence(s) of {old!r} in the source, found {found}")
    return source.replace(old, new)


def examine(mutant: Mutant, source: str, run: Callable[[str, int], None], seeds: Iterable[int] = range(6)) -> Findings:
    """Runs a mutant under several schedules.

    Parameters
    ----------
    source : str
        The flattened source without the bug.
    run : callable
        run(source, seed) builds, launches and checks: EmulatorError is a fault, AssertionError wrong numbers.

    Raises
    ------
    BuildError
        The mutant does not compile.
    """
    text = mutate(source, mutant.old, mutant.new, mutant.count)
    marks, messages = "", []
    for seed in seeds:
        try:
            run(text, seed)
        except BuildError:
            raise  # a mutant that does not compile tests nothing
        except EmulatorError as error:
            marks += "F"
            messages.append(str(error))
        except AssertionError as error:
            marks += "W"
            messages.append(str(error))
        else:
            marks += "."
    return Findings(mutant, marks, messages[0] if messages else "")
