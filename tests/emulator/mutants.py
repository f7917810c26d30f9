"""Bugs sown into kernels on purpose, and who notices them: the test of the tests.

MUTANTS = [Mutant("forward_mma", "values are read before they arrive", "cp_async_wait_group<0>();", "")]
findings = examine(mutant, source, run, seeds=range(6))      # run(source, seed) raises when something is wrong
assert findings.noticed, findings
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cuflash import source
from cuflash.variant import Variant

from .build import BuildError, EmulatorError

Sources = Callable[[Variant], str]


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


def sown(old: str, new: str, kernel: str = "", count: int = 1) -> Sources:
    """The sources of variants with a bug: those of one kernel, or of every kernel that has the text."""

    def text(variant: Variant) -> str:
        built = source.build(variant)
        grows = variant.kernel == kernel if kernel else old in built
        return mutate(built, old, new, count) if grows else built

    return text


def must_be_noticed(mutant: Mutant, run: Callable[[Sources, int], None], seeds: Iterable[int]) -> None:
    """Fails unless a schedule shows the bug; `run` takes what builds the kernels of a call, and passes without the bug."""
    first, *others = seeds
    run(source.build, first)
    text = sown(mutant.old, mutant.new, mutant.kernel, mutant.count)
    for seed in (first, *others):
        try:
            run(text, seed)
        except BuildError:
            raise  # a mutant that does not compile tests nothing
        except (AssertionError, EmulatorError):
            return
    raise AssertionError(f"nobody noticed that {mutant.description}")
