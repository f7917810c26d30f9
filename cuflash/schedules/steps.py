"""Host side of forward_values.cu: values of 8 bits, laid out in steps before a forward multiplies them."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.problem import Problem
from cuflash.schedules.base import padded, tiles

VALUE_STEP = 32  # keys of a step of hw/steps.cuh


@dataclass(frozen=True)
class ForwardValues:
    """Constants of forward_values.cu."""

    kernel = "forward_values"

    head_dim_v: int  # as the forward pads it
    threads: int = 128

    def shared_bytes(self, itemsize: int) -> int:
        return 0

    def blocks_of(self, steps: int) -> int:
        """Blocks that lay out so many steps: a thread has four columns of half of one."""
        return tiles(2 * steps * (self.head_dim_v // 4), self.threads)

    def bytes_of(self, steps: int) -> int:
        """Memory that so many steps take."""
        return steps * VALUE_STEP * self.head_dim_v


def steps_of_head(problem: Problem, block_k: int) -> int:
    """Steps of the values of a head, for a forward that walks over so many keys at a time."""
    return padded(problem.seq_k, block_k) // VALUE_STEP
