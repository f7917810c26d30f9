"""The backends as rows of data: which devices, dtypes and sizes each takes; `select` says which one and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from cuflash.errors import UnsupportedError
from cuflash.place import Placed
from cuflash.problem import NARROW, Problem
from cuflash.schedules import mma, simt, split, split_wgmma, wgmma


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU."""

    capability: int  # 90 for compute capability 9.0
    shared_limit: int  # bytes of shared memory that one block may ask for
    name: str = ""
    index: int = 0
    multiprocessors: int = 1
    clock_hz: float = 0.0  # 0 where unknown
    bytes_per_second: float = 0.0
    cache_bytes: int = 0  # of the second level; 0 where unknown
    compiler: int = 0  # NVRTC, 1209 for 12.9; 0 where unknown

    def __str__(self) -> str:
        return f"{self.name or 'a device'} (compute capability {self.capability // 10}.{self.capability % 10})"


#: shared memory per block by compute capability (CUDA C++ Programming Guide, "Technical Specifications")
SHARED_LIMITS = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}


def described_device(capability: int) -> Device:
    """A device by its compute capability alone, for planning and compiling without one."""
    if capability not in SHARED_LIMITS:
        known = ", ".join(map(str, SHARED_LIMITS))
        raise UnsupportedError(f"capability={capability}: known are {known}")
    return Device(capability=capability, shared_limit=SHARED_LIMITS[capability] * 1024)


@dataclass(frozen=True)
class Backend:
    """One family of kernels: the lowest capability for each dtype, the largest head, and its host side."""

    name: str
    summary: str
    capabilities: Mapping[str, int]
    max_head_dim: int
    schedule: ModuleType
    last_capability: int = 1 << 30
    schedules: Mapping[str, ModuleType] = field(default_factory=dict)  # of dtypes that have one of their own
    #: the lowest capability for each dtype that inputs of a forward may have, and results not
    of_inputs: Mapping[str, int] = field(default_factory=dict)

    def schedule_of(self, problem: Problem) -> ModuleType:
        """The host side for a problem's dtype."""
        return self.schedules.get(problem.dtype, self.schedule)

    def refusal(
        self, problem: Problem, device: Device, at: Mapping[str, Placed], backward: bool, offer: str = ""
    ) -> str | None:
        """Why this backend does not take the problem with arrays at these places, or None."""
        if offer and not hasattr(self.schedule_of(problem), offer):
            return f"it has no {OFFERS[offer]}" + (f" of {problem.dtype}" if hasattr(self.schedule, offer) else "")
        needed = {**self.capabilities, **self.of_inputs}.get(problem.dtype)
        if needed is None:
            return f"{problem.dtype} is not among its dtypes ({', '.join(self.capabilities)})"
        if device.capability < needed:
            older = f"{problem.dtype} needs compute capability {needed / 10:.1f}, {device} is older"
            if problem.dtype == "float32":
                return older
            wider = {NARROW: "float16", "bfloat16": "float16 or float32"}.get(problem.dtype, "float32")
            return f"{older}; convert to {wider}"
        if device.capability > self.last_capability:
            return f"its instructions exist on compute capability {self.last_capability / 10:.1f} only"
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if size > self.max_head_dim:
                return f"{name} {size} is above {self.max_head_dim}; the numpy backend has no limit"
        if problem.precision and problem.dtype not in self.schedules:
            return f"it multiplies float32 as it is, and precision={problem.precision!r} was asked for"
        refuse = getattr(self.schedule_of(problem), "refusal", None)
        return refuse(problem, device, at, backward) if refuse else None

    def hesitation(self, problem: Problem) -> str | None:
        """Why this backend takes the problem on request only, or None."""
        hesitate = getattr(self.schedule_of(problem), "hesitation", None)
        return hesitate(problem) if hesitate else None


BACKENDS = (
    Backend(
        "wgmma",
        "Hopper's warpgroup tensor cores, fed by TMA",
        {"float16": 90, "bfloat16": 90, "float32": 90},
        wgmma.MAX_HEAD_DIM,
        wgmma,
        last_capability=90,
        schedules={"float32": split_wgmma},
        of_inputs={NARROW: 90},
    ),
    Backend(
        "mma",
        "tensor cores by mma.sync",
        {"float16": 75, "bfloat16": 80, "float32": 80},
        512,
        mma,
        schedules={"float32": split},
        of_inputs={NARROW: 89},
    ),
    Backend("simt", "plain FMA units, true float32 and float64", {"float32": 75, "float64": 75}, 512, simt),
)
#: what not every backend has, by the name of the function that chooses its tile
OFFERS = {
    "jvp": "forward mode",
    "hvp": "Hessian-vector products, which simt has for float32 and float64",
    "in_turns": "deterministic backward",
}
NUMPY_REASON = "the arrays are on a GPU; it takes arrays on the host"


def select(
    problem: Problem,
    device: Device,
    at: Mapping[str, Placed],
    *,
    requested: str | None = None,
    backward: bool = False,
    offer: str = "",
) -> tuple[Backend, dict[str, str]]:
    """The backend for a problem on a device, and why each other one was not chosen; `offer` is a key of `OFFERS`."""
    chosen: Backend | None = None
    reasons: dict[str, str] = {}
    for backend in BACKENDS:
        refusal = backend.refusal(problem, device, at, backward, offer)
        if refusal is None and requested not in (None, backend.name):
            refusal = f"backend={requested!r} was asked for"
        if refusal is None and requested is None:
            refusal = backend.hesitation(problem)
        if refusal is None and chosen is not None:
            refusal = f"{chosen.name} is preferred"
        if refusal is None:
            chosen = backend
        else:
            reasons[backend.name] = refusal
    if chosen is None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"no GPU backend takes this call on {device}: {listed}")
    return chosen, {**reasons, "numpy": NUMPY_REASON}
