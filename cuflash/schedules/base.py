"""What every schedule's configuration offers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from cuflash.modifiers import Packed
from cuflash.problem import Problem

# By what kernels multiply: the main kernel of each direction tells it as `method`.
MULTIPLY_ADDS = "multiply-adds, without tensor cores"
MMA = "tensor cores by mma.sync"
WGMMA = "tensor cores by wgmma"


class Config(Protocol):
    """A frozen dataclass of ints and bools, compiled in, with the formulas that follow from them."""

    @property
    def kernel(self) -> str:
        """Stem of the kernel's file."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    def shared_bytes(self, itemsize: int) -> int:
        """Dynamic shared memory of a block for elements of that size."""

    def blocks(self, problem: Problem) -> int:
        """Length of the grid, all of it on grid.x."""


def in_turns(main: Any, sum_digits: int) -> Any:
    """A backward whose blocks add to dq in turns, and to gradients of operands in so many words of fixed point."""
    return replace(main, deterministic=True, sum_digits=sum_digits)


def tiles(length: int, tile: int) -> int:
    """Tiles that cover a length."""
    return -(-length // tile)


def query_tiles(problem: Problem, tile: int) -> int:
    """Tiles of queries of one head."""
    return side_tiles(problem, problem.seq_q, tile)


def key_tiles(problem: Problem, tile: int) -> int:
    """Tiles of keys of one head."""
    return side_tiles(problem, problem.seq_k, tile)


def side_tiles(problem: Problem, length: int, tile: int) -> int:
    """Tiles of one side; where segments are packed, the numbers that kernels/attention/index.cuh gives to theirs."""
    packed = problem.modifier(Packed.name)
    return length // tile + packed.count + 1 if isinstance(packed, Packed) else tiles(length, tile)


def padded(length: int, multiple: int) -> int:
    """The length rounded up to a multiple."""
    return tiles(length, multiple) * multiple
