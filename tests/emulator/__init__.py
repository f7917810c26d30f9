"""CUDA kernels on the CPU: the emulator behind the kernel tests."""

from .build import BuildError, EmulatorError
from .guards import GuardedArena, check_guards, guarded
from .host import EmulatedKernel
from .mutants import Findings, Mutant, examine, must_be_noticed, mutate, sown

__all__ = [
    "BuildError",
    "EmulatedKernel",
    "EmulatorError",
    "Findings",
    "GuardedArena",
    "Mutant",
    "check_guards",
    "examine",
    "guarded",
    "must_be_noticed",
    "mutate",
    "sown",
]
