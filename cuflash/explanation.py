"""Explanation: what `cuflash.explain` answers, readable when printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Explanation:
    """The backend of a call, why the others were not chosen, and what the plan takes from the device.

    Fields that a backend does not have (a grid on the host, say) are None and are not printed.

    Parameters
    ----------
    backend
        Name of the backend that computes the call.
    reasons
        Why each other backend was not chosen, by its name.
    problem
        The call in one line: dtype, shapes, options.
    device
        Where it runs.
    variant
        Name of the compiled kernel.
    tile
        (queries, keys) of one step.
    grid
        Blocks of threads that are launched.
    threads
        Threads of a block.
    registers
        32-bit registers of a thread.
    spilled_bytes
        Local memory of a thread, in bytes; 0 is what a good kernel has.
    shared_bytes
        Shared memory of a block, in bytes.
    floor_ms
        Time in milliseconds that the device's peak arithmetic and bandwidth allow at best.
    notes
        Further remarks, one a line.
    """

    backend: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    device: str = ""
    variant: str = ""
    tile: tuple[int, int] | None = None
    grid: int | tuple[int, ...] | None = None
    threads: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    floor_ms: float | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One `name: value` a line, then the refused backends and the notes."""
        values = {
            "backend": self.backend,
            "problem": self.problem,
            "device": self.device,
            "variant": self.variant,
            "tile": self.tile and f"{self.tile[0]} queries x {self.tile[1]} keys",
            "grid": self.grid if isinstance(self.grid, int) else self.grid and " x ".join(map(str, self.grid)),
            "threads": self.threads,
            "registers": self.registers,
            "spilled": None if self.spilled_bytes is None else f"{self.spilled_bytes} bytes a thread",
            "shared": None if self.shared_bytes is None else f"{self.shared_bytes / 1024:.1f} KiB a block",
            "floor": None if self.floor_ms is None else f"{self.floor_ms:.4g} ms",
        }
        lines = [f"{name + ':':<11}{value}" for name, value in values.items() if value not in (None, "")]
        lines += [f"not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])
