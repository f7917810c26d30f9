"""Explanation: what `cuflash.explain` answers, readable when printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cuflash.variant import ITEMSIZE

if TYPE_CHECKING:
    from cuflash.plan import Plan
    from cuflash.problem import Problem


@dataclass(frozen=True)
class Explanation:
    """The backend of a call, why the others were not chosen, and what the plan takes from the device.

    Fields that a backend does not have (a grid on the host, say) are None or empty and are not printed.

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
    method
        How it multiplies, and in which dtype it sums.
    schedule
        Kernels that are launched, one after the other; a name is that of a file of ``cuflash/kernels``.
    variant
        Name of the compiled kernel that does most of the work; what follows is about this one.
    tile
        (queries, keys) of one step; queries of heads that share their keys are rows of the same tile when decoding.
    grid
        Blocks of threads that are launched.
    slices
        Slices that a decode call's keys are cut into at most, equal ones whatever the lengths; each is for a part of the blocks.
    threads
        Threads of a block.
    registers
        32-bit registers of a thread.
    spilled_bytes
        Local memory of a thread, in bytes; 0 is what a good kernel has.
    shared_bytes
        Shared memory of a block, in bytes.
    workspace_bytes
        Memory of the device that all kernels need beside inputs and results, in bytes.
    floor_ms
        Time in milliseconds that the device's peak arithmetic and bandwidth allow at best.
    measured_ms
        Time in milliseconds that the call took, where it was measured.
    notes
        Further remarks, one a line.
    """

    backend: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    device: str = ""
    method: str = ""
    schedule: tuple[str, ...] = ()
    variant: str = ""
    tile: tuple[int, int] | None = None
    grid: int | tuple[int, ...] | None = None
    slices: int | None = None
    threads: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    workspace_bytes: int | None = None
    floor_ms: float | None = None
    measured_ms: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float | None:
        """Which part of the measured time would do at best; None where it was not measured."""
        return self.floor_ms / self.measured_ms if self.floor_ms is not None and self.measured_ms else None

    def __str__(self) -> str:
        """One `name: value` a line, then the refused backends and the notes."""
        share = "" if self.share is None else f", of which {self.share:.0%} are the floor"
        workspace = f"{self.workspace_bytes / 1024:,.1f} KiB" if self.workspace_bytes else "none"
        values = {
            "backend": self.backend,
            "problem": self.problem,
            "device": self.device,
            "method": self.method,
            "schedule": ", ".join(self.schedule),
            "variant": self.variant,
            "tile": self.tile and f"{self.tile[0]} queries x {self.tile[1]} keys",
            "grid": self.grid if isinstance(self.grid, int) else self.grid and " x ".join(map(str, self.grid)),
            "slices": None if self.slices is None else f"{self.slices} at most",
            "threads": self.threads,
            "registers": self.registers,
            "spilled": None if self.spilled_bytes is None else f"{self.spilled_bytes} bytes a thread",
            "shared": None if self.shared_bytes is None else f"{self.shared_bytes / 1024:.1f} KiB a block",
            "workspace": None if self.workspace_bytes is None else workspace,
            "floor": None if self.floor_ms is None else f"{self.floor_ms:.4g} ms",
            "measured": None if self.measured_ms is None else f"{self.measured_ms:.4g} ms{share}",
        }
        lines = [f"{name + ':':<11}{value}" for name, value in values.items() if value not in (None, "")]
        lines += [f"not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def of_host(problem: Problem, title: str, reasons: Mapping[str, str]) -> Explanation:
    """Of a call that the numpy backend computes; `title` is the call in one line."""
    return Explanation(
        backend="numpy",
        reasons=reasons,
        problem=title,
        device="the host",
        method=f"matrix products of NumPy, tile by tile, sums in {problem.accumulator}",
    )


def of_plan(
    plan: Plan,
    title: str,
    *,
    registers: int | None = None,
    spilled_bytes: int | None = None,
    floor_seconds: float | None = None,
    measured_ms: float | None = None,
) -> Explanation:
    """Of a planned call; what only its compiled kernel or a device tells is None where there is none."""
    step = plan.main
    config: Any = step.config  # with the fields that the main kernels of all forwards have
    slices = config.slices(step.blocks) if hasattr(config, "slices") else None
    return Explanation(
        backend=plan.backend,
        reasons=plan.reasons,
        problem=title,
        device=str(plan.device),
        method=f"{config.method}, sums in {plan.problem.accumulator}",
        schedule=tuple(s.variant.kernel for s in plan.steps),
        variant=step.variant.entry,
        tile=(config.rows if slices is not None else config.block_q, config.block_k),
        grid=step.blocks,
        slices=slices,
        threads=config.threads,
        registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=config.shared_bytes(ITEMSIZE[plan.problem.dtype]),
        workspace_bytes=sum(plan.workspace().values()),
        floor_ms=None if floor_seconds is None else 1e3 * floor_seconds,
        measured_ms=measured_ms,
        notes=tuple(notes_on(plan, has_floor=floor_seconds is not None)),
    )


def notes_on(plan: Plan, has_floor: bool) -> Iterator[str]:
    """What the figures do not tell."""
    problem, config = plan.problem, plan.main.config
    if not getattr(config, "aligned", True):
        yield "rows are not 16-byte aligned: elements are copied one by one"
    if getattr(config, "persistent", False):
        yield f"blocks stay and take {config.blocks(problem)} tiles of queries in turn"
    if getattr(config, "tensor", False) and hasattr(config, "slices"):
        yield "keys and values come as boxes of tensor maps"
    if any(getattr(step.config, "rest", False) for step in plan.steps):
        yield "heads that float16 planes do not stand for are left to the last kernel; the device decides"
    if problem.is_packed:
        yield from notes_on_sequences(plan)
    hiding = [m.title for m in problem.modifiers if m.kind == "mask"]
    if hiding and has_floor:
        yield f"the floor counts the pairs that {', '.join(hiding)} hides as if they were visible"


def notes_on_sequences(plan: Plan) -> Iterator[str]:
    """Which packed sequences the tile is for."""
    configs: list[Any] = [step.config for step in plan.steps]
    most = next((config.most_keys for config in configs if getattr(config, "long_tile", 0)), 0)
    if not most:
        yield "all sequences have this tile, whatever their lengths, and the grid has room for any of them"
        return
    _, short = (config for config in configs if config.kernel == plan.main.config.kernel)
    others = f"{short.block_q} queries x {short.block_k} keys"
    yield f"sequences of more than {most} keys have this tile, others {others}; the grid has room for any of them"
