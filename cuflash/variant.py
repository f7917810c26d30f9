"""Variant: everything that is compiled into a kernel and nothing that is not.

What varies at run time (lengths, strides, scale, slopes) is never compiled in; dtype, head sizes, tile, modifier kinds and
flags always are.  The fields of `config` become the constants of `struct Config` in CUDA, by name: ``block_q`` is
``Config::kBlockQ``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from cuflash.abi import STATISTICS

ELEMENTS = {
    "float8_e4m3fn": "E4m3",
    "float16": "Half",
    "bfloat16": "Bfloat16",
    "float32": "float",
    "float64": "double",
}
ITEMSIZE = {"float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SHORT = {"float8_e4m3fn": "e4m3", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: schedule, dtype, modifiers by name, and the schedule's constants."""

    kernel: str  # file stem in kernels/: "forward_mma"
    dtype: str
    modifiers: tuple[str, ...]
    config: Any  # a frozen dataclass of ints and bools
    out_dtype: str = ""  # of the result, where it is not that of the inputs

    @property
    def direction(self) -> str:
        return getattr(self.config, "direction", self.kernel.partition("_")[0])

    @property
    def maps(self) -> tuple[str, ...]:
        """Arrays that the kernel reaches through tensor maps."""
        return tuple(getattr(self.config, "box_rows", ()))

    @property
    def statistics(self) -> bool:
        """Whether the kernel is given the arrays of statistics beside lse."""
        return bool(getattr(self.config, "statistics", False))

    @property
    def target(self) -> str:
        """Suffix of the architecture: "a" for instructions that only this one has (PTX ISA, "Target ISA")."""
        return "a" if self.maps else ""

    @property
    def real(self) -> str:
        """C type of sums and statistics."""
        return "double" if self.dtype == "float64" else "float"

    @property
    def entry(self) -> str:
        """Name of the kernel, readable in a profiler."""
        parts = ["cuflash", self.kernel]
        if hasattr(self.config, "head_dim"):
            parts.append(f"d{self.config.head_dim}")
            if getattr(self.config, "head_dim_v", self.config.head_dim) != self.config.head_dim:
                parts.append(f"v{self.config.head_dim_v}")
        if hasattr(self.config, "owns_keys"):
            parts.insert(2, "keys" if self.config.owns_keys else "queries")
        kept = [name for name in STATISTICS if getattr(self.config, name, False)]
        dtypes = [SHORT[dtype] for dtype in (self.dtype, self.out_dtype) if dtype]
        return "_".join([*parts, *dtypes, *self.modifiers, *kept])

    def constants(self) -> dict[str, int | bool]:
        """Constant name in CUDA -> value; the kernel checks its shared memory against `kSharedBytes` by static_assert."""
        given = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        constants = {camel(name): value for name, value in given.items() if not isinstance(value, str)}
        shared_bytes = self.config.shared_bytes(ITEMSIZE[self.dtype])
        return {**constants, "kThreads": self.config.threads, "kSharedBytes": shared_bytes}

    def __str__(self) -> str:
        constants = " ".join(f"{n}={int(v)}" for n, v in self.constants().items())
        dtypes = f"{self.dtype} to {self.out_dtype}" if self.out_dtype else self.dtype
        return f"{self.kernel} {dtypes} modifiers=({', '.join(self.modifiers)}) {constants}"


def camel(name: str) -> str:
    return "k" + "".join(part.capitalize() for part in name.split("_"))
