"""Every kernel that a call can ask for compiles for every architecture: no spill, no stack, no warning, no slow-code note.

Each kernel also asserts, at compile time, that its shared memory has the size that Python computes.

A full product of dtypes, head sizes, options, alignments and architectures has thousands of members; CUFLASH_FULL_MATRIX=1
compiles them.  Without it sm_90 and sm_75, the ends of the range that differ in instructions, have every head size, with
one 16-bit dtype each (the other differs in the name of one instruction) and the options that take the most registers;
the sizes that have come near a spill, 64 and 128, have more of them.  sm_86 and sm_89 share sm_80's instructions and
differ in shared memory, which decides the tile, so they compile the kernels whose tile sm_80 does not have.  A run of all
tests has of these what tests/selection.py chooses.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from zlib import crc32

import pytest

from cuflash import jit, source
from cuflash.abi import STATISTICS
from cuflash.errors import UnsupportedError
from cuflash.schedules import wgmma
from cuflash.variant import Variant
from tests import nvrtc
from tests.cases import DTYPES, NARROW
from tests.variants import ARCHS, HEAD_SIZES, LENGTH, OPTIONS, TOGETHER, Entry, decode_variants

FULL = os.environ.get("CUFLASH_FULL_MATRIX") == "1"

pytestmark = nvrtc.needed

#: (head_dim and head_dim_v, dtype) -> architectures on which no tile of the backward fits into shared memory
REFUSED = {
    (512, "float16"): {75},
    (512, "float32"): {75},
    (512, "float64"): {75, 80, 86, 89, 120},
    (256, "float64"): {75},
}


HALVES = ("float16", "bfloat16")
HOPPER_SIZES = (*(sizes for sizes in HEAD_SIZES if max(sizes) <= wgmma.MAX_HEAD_DIM), (192, 192))
#: queries and keys of calls that have tiles of their own
SHORT, MEDIUM, LONG = (LENGTH, LENGTH), (300, LENGTH), (300, 16384)


def hopper(dtype: str, sizes: tuple[int, int], option: str, lengths: tuple[int, int] = MEDIUM) -> Entry:
    """A call that asks for Hopper's own kernels."""
    return Entry(90, dtype, *sizes, option, seq_q=lengths[0], seq_k=lengths[1], backend="wgmma")


def entries() -> Iterator[Entry]:
    """The calls of the matrix."""
    if FULL:
        for arch, dtype, sizes, option, aligned in product(ARCHS, DTYPES, HEAD_SIZES, OPTIONS, (True, False)):
            if not (dtype == "bfloat16" and arch < 80):
                yield Entry(arch, dtype, *sizes, option, aligned)
                yield Entry(arch, dtype, *sizes, option, aligned, seq_q=1)
                yield Entry(arch, dtype, *sizes, option, aligned, deterministic=True)
                yield Entry(arch, dtype, *sizes, option, aligned, statistics=STATISTICS)
                if "packed" not in option:
                    yield Entry(arch, dtype, *sizes, option, aligned, mode="jvp")
                    if DTYPES[dtype].itemsize > 2:
                        yield Entry(arch, dtype, *sizes, option, aligned, mode="hvp")
        for dtype, sizes, option in product(HALVES, HOPPER_SIZES, (*OPTIONS, *TOGETHER)):
            for lengths in (SHORT, MEDIUM, LONG):
                yield hopper(dtype, sizes, option, lengths)
        yield from narrow_entries()
        yield from split_entries()
        return
    for (arch, dtype), sizes in product(((90, "bfloat16"), (75, "float16")), HEAD_SIZES):
        near = sizes in ((64, 64), (128, 128))
        yield Entry(arch, dtype, *sizes, "everything")
        if near or arch == 90 or max(sizes) > 64:
            yield Entry(arch, dtype, *sizes, "causal")
            yield Entry(arch, dtype, *sizes, "everything", aligned=False)
        if near:
            yield Entry(arch, dtype, *sizes, "plain")
            yield Entry(arch, dtype, *sizes, "plain", aligned=False)
    for (arch, dtype), sizes in product(((75, "float32"), (90, "float64")), HEAD_SIZES):
        yield Entry(arch, dtype, *sizes, "everything")
    for (arch, dtype), size in product(((90, "float32"), (75, "float64")), (64, 128, 256)):
        yield Entry(arch, dtype, size, size, "everything")
    for dtype, option, aligned in product(("float32", "float64"), ("plain", "causal"), (True, False)):
        yield Entry(90, dtype, 64, 64, option, aligned)
    for option in OPTIONS:
        yield Entry(90, "float16", 128, 128, option)
    for option in ("plain", "causal", "bias", "everything"):
        yield Entry(90, "float16", 64, 64, option, seq_q=1)
    for sizes in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        yield Entry(80, "bfloat16", *sizes, "causal")
        yield Entry(80, "bfloat16", *sizes, "everything")
    for size in (64, 128):
        yield Entry(120, "bfloat16", size, size, "causal")
    for sizes in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        yield Entry(120, "bfloat16", *sizes, "everything")
    for arch, sizes in product((86, 89), HEAD_SIZES):
        yield Entry(arch, "bfloat16", *sizes, "everything")
    for size in (64, 128, 256):
        yield Entry(86, "bfloat16", size, size, "causal")
    yield Entry(100, "bfloat16", 128, 128, "everything")
    for arch, dtype in product((80, 86, 89, 120), ("float32", "float64")):
        yield Entry(arch, dtype, 128, 128, "everything")
    for (arch, dtype, option), size in product(
        ((90, "bfloat16", "everything"), (75, "float16", "plain")), (40, 64, 128, 256, 512)
    ):
        yield Entry(arch, dtype, size, size, option, deterministic=True)
    for (arch, dtype), size in product(((90, "bfloat16"), (80, "float16")), (64, 128)):
        yield Entry(arch, dtype, size, size, "causal", deterministic=True)
    for arch, dtype, size in product((75, 90), ("float32", "float64"), (64, 128)):
        yield Entry(arch, dtype, size, size, "everything", deterministic=True)
    for arch, dtype, size in (
        *((75, "float16", 128), (80, "bfloat16", 128), (90, "bfloat16", 64)),
        *((90, "float32", 128), (90, "float64", 128)),
    ):
        yield Entry(arch, dtype, size, size, "shared-everything", deterministic=True)
    yield Entry(75, "float32", 64, 64, "written-everything", deterministic=True)
    for arch, dtype in ((75, "float16"), (80, "bfloat16"), (75, "float32"), (90, "float32"), (90, "float64")):
        yield Entry(arch, dtype, 128, 128, "sparse-everything")
    for arch, dtype in ((75, "float16"), (80, "bfloat16"), (90, "float32")):
        yield Entry(arch, dtype, 64, 64, "sparse-causal")
        yield Entry(arch, dtype, 128, 128, "sparse-causal", aligned=False)
    for (arch, dtype), sizes in product(((75, "float16"), (90, "bfloat16")), ((64, 64), (128, 128))):
        yield Entry(arch, dtype, *sizes, "packed-causal")
    for arch, dtype in ((75, "float16"), (80, "bfloat16")):
        yield Entry(arch, dtype, 128, 128, "packed-causal", deterministic=True)
    for arch, dtype in ((75, "float32"), (90, "float32"), (90, "float64")):
        yield Entry(arch, dtype, 128, 128, "packed-causal", deterministic=True)
    for arch, dtype in ((75, "float16"), (80, "bfloat16"), (90, "float32")):
        yield Entry(arch, dtype, 128, 128, "packed-everything", aligned=False, deterministic=True)
    for (arch, dtype), size in product(((90, "bfloat16"), (75, "float16")), (64, 128, 512)):
        for option in ("causal", "everything") if size == 128 else ("everything",):
            yield Entry(arch, dtype, size, size, option, statistics=STATISTICS)
    for arch, dtype in product((75, 90), ("float32", "float64")):
        yield Entry(arch, dtype, 128, 128, "everything", statistics=STATISTICS)
    for arch, dtype in ((80, "bfloat16"), (90, "float64")):
        yield Entry(arch, dtype, 128, 128, "sinks-causal")
    yield Entry(80, "bfloat16", 128, 128, "sinks-everything", statistics=STATISTICS)
    for size, lengths in ((64, LONG), (128, MEDIUM)):
        yield hopper("bfloat16", (size, size), "sinks-causal", lengths)
    yield Entry(80, "bfloat16", 128, 128, "dropout-causal")
    yield Entry(80, "bfloat16", 128, 128, "packed-dropout", deterministic=True)
    for arch, dtype, size in ((75, "float16", 128), (90, "bfloat16", 256), (90, "float32", 128)):
        yield Entry(arch, dtype, size, size, "dropout-everything")
    for arch, dtype, size in ((90, "bfloat16", 64), (75, "float16", 128), (90, "float32", 128), (75, "float64", 64)):
        yield Entry(arch, dtype, size, size, "everything", mode="jvp")
    for option in ("causal", "everything"):
        yield Entry(90, "bfloat16", 128, 128, option, mode="jvp")
    for arch, dtype, option in ((80, "bfloat16", "sparse-everything"), (90, "float64", "dropout-everything")):
        yield Entry(arch, dtype, 128, 128, option, aligned=False, mode="jvp")
    yield Entry(75, "float32", 128, 128, "everything", mode="hvp")
    yield Entry(90, "float64", 64, 64, "everything", aligned=False, mode="hvp")
    yield Entry(80, "float32", 128, 128, "dropout-everything", mode="hvp")
    for name, option in product(STATISTICS, ("plain", "sparse-everything")):
        yield Entry(80, "bfloat16", 128, 128, option, aligned=option == "plain", statistics=(name,))
    for (arch, dtype), option in product(((75, "float32"), (80, "bfloat16")), ("written-everything",)):
        yield Entry(arch, dtype, 64, 64, option, aligned=False)
    # What takes the most registers of each tile; what many modifiers take is much the same for all head sizes.
    for sizes, option in product(HOPPER_SIZES, ("plain", "causal")):
        yield hopper("bfloat16", sizes, option)
    for sizes, option in product(((64, 64), (128, 128), (192, 128), (192, 192), (256, 256)), ("ranges", "alibi")):
        yield hopper("bfloat16", sizes, option)
    for sizes in ((64, 64), (128, 128), (192, 192), (256, 256)):
        yield hopper("bfloat16", sizes, "everything")
    for sizes, option in product(
        ((64, 64), (128, 128), (192, 128), (256, 256)), ("sparse-causal", "sparse-everything")
    ):
        yield hopper("bfloat16", sizes, option)
    for size, option, lengths in product((64, 128, 192), ("bias", "shared-bias", "ranges-bias"), (MEDIUM, LONG)):
        yield hopper("bfloat16", (size, size), option, lengths)
    for size, option in product((64, 128), ("heads-bias", "ranges-heads-bias", "mask-heads-bias")):
        yield hopper("bfloat16", (size, size), option)
    for sizes, option in product(
        ((64, 64), (128, 128), (192, 128), (256, 256)), ("documents", "blocks", "ranges-documents", "ranges-blocks")
    ):
        yield replace(hopper("bfloat16", sizes, option), deterministic="ranges" in option)
    yield hopper("bfloat16", (128, 128), "written")
    for sizes, option in product(((16, 16), (64, 64), (72, 72), (128, 128)), ("plain", "causal", "ranges")):
        yield hopper("bfloat16", sizes, option, LONG)
    for option in ("plain", "ranges"):
        yield hopper("bfloat16", (64, 64), option, SHORT)
    for size, lengths in ((64, MEDIUM), (64, LONG), (128, MEDIUM), (128, LONG), (256, MEDIUM)):
        yield hopper("float16", (size, size), "causal", lengths)
    for sizes in ((64, 64), (128, 128), (192, 128), (256, 256)):
        yield replace(hopper("bfloat16", sizes, "causal"), deterministic=True)
    yield hopper("float16", (192, 128), "plain")
    yield hopper("bfloat16", (136, 64), "ranges")
    yield replace(hopper("bfloat16", (136, 64), "ranges"), deterministic=True)
    for size in (64, 128, 256):
        yield replace(hopper("bfloat16", (size, size), "shared-bias"), deterministic=True)
    for sizes in ((64, 64), (128, 128), (192, 128), (256, 256)):
        yield hopper("bfloat16", sizes, "packed")
        yield hopper("bfloat16", sizes, "packed-causal", LONG)
        yield replace(hopper("bfloat16", sizes, "packed-causal"), deterministic=True)
    for dtype, size, option in (("bfloat16", 64, "packed-everything"), ("float16", 128, "packed-causal")):
        yield hopper(dtype, (size, size), option)
    for size, option in (
        *((64, "window"), (64, "everything"), (128, "ranges"), (128, "alibi"), (128, "everything")),
        *((192, "ranges"), (256, "ranges"), (256, "ranges-alibi"), (256, "everything")),
    ):
        yield hopper("float8_e4m3fn", (size, size), option)
    yield from narrow_entries()
    yield from split_entries()


def narrow_entries() -> Iterator[Entry]:
    """Forwards of 8-bit inputs by mma.sync: on sm_89 and sm_120 as they are, elsewhere by way of float16."""
    if FULL:
        for arch, sizes, option, aligned in product(ARCHS, HEAD_SIZES, (*OPTIONS, *TOGETHER), (True, False)):
            if arch >= 89 and "packed" not in option:
                yield narrow(arch, sizes, option, aligned)
        return
    for arch, size in product((89, 90), (64, 128, 256)):
        yield narrow(arch, (size, size), "plain")
        yield narrow(arch, (size, size), "everything", aligned=False)
    for arch, size, option in (
        *(
            (100, 128, "everything"),
            (100, 64, "causal"),
            (120, 64, "ranges"),
            (120, 128, "everything"),
            (120, 256, "plain"),
        ),
        *((90, 16, "everything"), (89, 512, "everything"), (90, 192, "causal")),
        *((90, 128, "sparse-everything"), (89, 128, "sparse-everything"), (120, 64, "dropout-everything")),
    ):
        yield narrow(arch, (size, size), option)


def narrow(arch: int, sizes: tuple[int, int], option: str, aligned: bool = True) -> Entry:
    return Entry(arch, "float8_e4m3fn", *sizes, option, aligned, seq_q=300, backend="mma")


def split_entries() -> Iterator[Entry]:
    """Calls of float32 that ask for tensor cores."""
    if FULL:
        for arch, sizes, option, aligned in product(ARCHS[1:], HEAD_SIZES[:-1], OPTIONS, (True, False)):
            yield split(arch, sizes, option, aligned=aligned)
            yield split(arch, sizes, option, precision="tf32")
            yield split(arch, sizes, option, statistics=STATISTICS)
        for sizes, option, precision in product(HOPPER_SIZES, (*OPTIONS, *TOGETHER), (None, "tf32")):
            left = () if max(sizes) <= 128 else ("sparse-everything", "written-everything")  # to mma
            if "packed" not in option and option not in left and (precision or max(sizes) <= 128):
                yield split(90, sizes, option, backend="wgmma", precision=precision)
        return
    for size, option in product((64, 128), ("causal", "sparse-everything")):
        yield split(90, (size, size), option)
    for size, option in ((64, "plain"), (128, "plain"), (128, "everything"), (256, "everything")):
        yield split(90, (size, size), option)
    yield split(90, (128, 128), "causal", deterministic=True)
    yield split(90, (128, 128), "shared-everything", deterministic=True)
    yield split(90, (64, 64), "written-everything")
    yield split(80, (128, 128), "everything", aligned=False)
    yield split(86, (128, 128), "sparse-everything")
    yield split(120, (256, 256), "everything")
    yield split(100, (64, 64), "everything", statistics=STATISTICS)
    yield split(89, (128, 128), "causal", precision="tf32")
    for size, option in product((64, 128), ("causal", "alibi", "sparse-everything")):
        yield split(90, (size, size), option, backend="wgmma")
    for sizes, option in (
        *(((128, 128), "plain"), ((128, 128), "ranges-bias"), ((16, 80), "dropout-everything")),
        *(((128, 128), "ranges-mask"), ((128, 128), "softcap"), ((96, 80), "ranges-alibi"), ((24, 112), "plain")),
    ):
        yield split(90, sizes, option, backend="wgmma")
    for size, option in (
        *((64, "ranges"), (128, "everything"), (256, "causal"), (128, "ranges"), (64, "alibi"), (128, "softcap")),
        *((128, "ranges-mask"), (192, "ranges"), (96, "plain"), (64, "sparse-everything")),
    ):
        yield split(90, (size, size), option, backend="wgmma", precision="tf32")
    for size, option in ((64, "ranges-mask"), (64, "softcap"), (32, "ranges"), (64, "plain")):
        yield split(90, (size, size), option, backend="wgmma")


def split(arch: int, sizes: tuple[int, int], option: str, **fields) -> Entry:
    return Entry(arch, "float32", *sizes, option, **{"seq_q": 300, "backend": "mma", **fields})


def matrix() -> list:
    """Each different kernel once, with the first call that asks for it."""
    found: dict[tuple[int, Variant], Entry] = {}
    for entry in entries():
        try:
            for variant in entry.variants():
                family = entry.arch
                if not FULL:
                    # The code of plain float32 and one test before it; the backward's in tiles that are given to it.
                    compiled = ("causal",) if variant.kernel == "forward_simt" else ("causal", "everything")
                    if getattr(variant.config, "rest", False) and entry.options not in compiled:
                        continue
                    if variant.dtype not in NARROW:
                        family = {86: 80, 89: 80}.get(family, family)
                    # Half of the kernels that nobody has measured there, or, on Hopper, that are sm_80's.
                    others = family in (75, 100, 120) or (family == 90 and not variant.target)
                    if others and crc32(f"{variant.entry} {family}".encode()) % 2:
                        continue
                    if variant.kernel.startswith(("backward_delta", "backward_convert", "hvp_delta", "split_")):
                        family = min(family, 80)  # these kernels have no instruction of their own
                        if not getattr(variant.config, "turns", 0):  # and look at no score
                            variant = replace(variant, modifiers=tuple(m for m in variant.modifiers if m == "packed"))
                found.setdefault((family, variant), entry)
        except UnsupportedError:  # test_heads_that_no_tile_fits knows them
            continue
    return [
        pytest.param(
            entry.arch, variant, id=f"sm_{entry.arch}-{variant.entry}-{'aligned' if entry.aligned else 'unaligned'}-{i}"
        )
        for i, ((_, variant), entry) in enumerate(found.items())
    ]


def decode_entries() -> Iterator[tuple[int, Variant]]:
    """The decode kernels: with pages and new keys, and without, in narrow tiles and full ones."""
    wide = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
    sizes = HEAD_SIZES[:-1] if FULL else wide
    for arch, size, rows, both in product((80, 90, 100, 120), sizes, (4, 16), (False, True)):
        options = (
            ("plain", "causal", "softcap", "alibi", "everything") if FULL else ("everything" if both else "plain",)
        )
        if not (both or FULL) and (arch != 90 or size == (192, 128)):
            continue  # the others take the most registers
        if arch > 90 and size not in ((64, 64), (256, 256)) and not FULL:
            continue
        for option in options:
            found = decode_variants(arch, "bfloat16", *size, option, rows=rows, paged=both, appends=both)
            yield from ((arch, variant) for variant in found)
    for size, rows, both in product(((64, 64), (40, 72), (256, 256)), (4, 16), (False, True) if FULL else (True,)):
        kinds = {"rows": rows, "paged": both, "appends": both, "aligned": False}
        yield from ((80, v) for v in decode_variants(80, "float16", *size, "everything", **kinds))
    for size, rows in product(((16, 16), (128, 128)), (4, 16)):
        for option in ("causal", "alibi"):
            yield from ((90, v) for v in decode_variants(90, "float16", *size, option, rows=rows))
    yield from ((80, v) for v in decode_variants(80, "bfloat16", 128, 128, "sinks", paged=True))
    plain = ((75, "float16"), (75, "bfloat16"), (75, "float32"), (90, "float32"), (90, "float64"), (120, "float64"))
    for (arch, dtype), size, rows in product(plain, ((64, 64), (256, 256)), (1, 4, 16)):
        if not FULL and (arch, dtype) not in plain[::3] and (size[0] == 64) != (rows == 4):
            continue  # half of them for each type
        kinds = {"rows": rows, "paged": rows > 1, "appends": rows > 1, "aligned": rows < 16}
        yield from ((arch, v) for v in decode_variants(arch, dtype, *size, "everything", **kinds))


def decode_matrix() -> list:
    """Each different kernel once."""
    return [
        pytest.param(arch, variant, id=f"sm_{arch}-{variant.entry}-rows{variant.config.rows}-{i}")
        for i, (arch, variant) in enumerate(dict.fromkeys(decode_entries()))
    ]


@pytest.mark.parametrize(("arch", "variant"), [*matrix(), *decode_matrix()])
def test_compiles_well(arch, variant):
    report = nvrtc.compile_variant(variant, arch)
    assert report.clean, f"{variant} on sm_{arch}: {report}"
    limit = 65536 // (variant.config.threads * getattr(variant.config, "blocks_per_sm", 1))
    assert report.registers <= limit, (
        f"{variant} on sm_{arch}: {report}, at most {limit} let its blocks share a multiprocessor"
    )


HOPPER_CASES = [case for case in matrix() if case.values[1].target and case.values[1].dtype not in {*NARROW, "float16"}]
#: bytes of spills with that compiler alone, once a tile
SPILLED_BY_THE_OLDEST = {"cuflash_forward_wgmma_d64_bf16_causal_packed": 20}


@pytest.mark.skipif(sys.platform != "linux", reason="the package of the oldest compiler was tried on Linux")
@pytest.mark.parametrize(("arch", "variant"), HOPPER_CASES)
def test_compiles_well_with_the_oldest_compiler(arch, variant):
    """Another compiler, other registers: Hopper's kernels use all that there are.

    Those of 8 bits are left out: with NVRTC 12.9 and 13.0 the forward of 128 columns has up to 58 bytes of spills.
    """
    report = nvrtc.compile_variant(variant, arch, nvrtc.oldest())
    spilled = SPILLED_BY_THE_OLDEST.get(variant.entry, 0)
    assert report.clean or (report.spilled_bytes <= spilled and not report.complaints), f"{variant}: {report}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_no_tile_fits(dtype):
    """All others have a forward and a backward on every architecture."""
    refused = {}
    for arch, sizes in product(ARCHS, HEAD_SIZES):
        if dtype == "bfloat16" and arch < 80:
            continue
        try:
            list(Entry(arch, dtype, *sizes, "everything", aligned=False).variants())
        except UnsupportedError:
            refused.setdefault((sizes[0], dtype), set()).add(arch)
    assert refused == {key: archs for key, archs in REFUSED.items() if key[1] == dtype}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", [80])
def test_shared_memory_that_differs_does_not_compile(arch, dtype, monkeypatch):
    for variant in (*Entry(arch, dtype, 64, 64).variants(), *decode_variants(arch, dtype, 64, 64)):
        wrong = replace_constant(source.build(variant), "kSharedBytes", variant.constants()["kSharedBytes"] + 16)
        with pytest.raises(nvrtc.CompilationError, match="disagrees"):
            nvrtc.compile_source(wrong, arch)


def replace_constant(text: str, name: str, value: int) -> str:
    head, found, tail = text.partition(f"static constexpr int {name} = ")
    assert found, f"no constant {name}"
    return f"{head}{found}{value}{tail[tail.index(';') :]}"


def test_a_spill_is_seen():
    """The report that the matrix relies on: a kernel that needs more registers than it may have."""
    wide = """extern "C" __global__ void __launch_bounds__(1024, 2) f(float* x) {
      float a[200];
      for (int i = 0; i < 200; ++i) a[i] = x[i * 1024 + threadIdx.x];
      __syncthreads();
      float s = 0;
      for (int i = 0; i < 200; ++i) s = s * a[i] + a[199 - i];
      x[threadIdx.x] = s;
    }"""
    report = nvrtc.compile_source(wide, 80)
    assert report.spilled_bytes
    assert not report.clean


def test_a_warning_is_seen():
    report = nvrtc.compile_source('extern "C" __global__ void f(int* x) { int unused = 3; *x = 1; }', 80)
    assert report.complaints
    assert not report.clean


# ---- Hopper's own kernels ----------------------------------------------------------------------------------------------
#: of the machine code: products, copies in and out, registers given away
HOPPER_INSTRUCTIONS = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG")


def hopper_variant(**fields) -> Variant:
    """The forward for heads of 64 elements."""
    return next(hopper("bfloat16", (64, 64), "plain", **fields).variants())


def test_hopper_kernels_are_compiled_for_its_own_instructions():
    assert "-arch=sm_90a" in jit.options(hopper_variant().target, 90)
    for variant in Entry(90, "bfloat16", 64, 64).variants():
        assert jit.options(variant.target, 90) == jit.OPTIONS
    with pytest.raises(nvrtc.CompilationError, match="wgmma"):
        nvrtc.compile_source(source.build(hopper_variant()), 90)


def test_hopper_kernels_are_what_the_machine_has(tmp_path):
    """The machine code holds the instructions that the kernel is named for, and products that stay in flight."""
    disassembler = find_disassembler()
    if disassembler is None:
        pytest.skip("no cuobjdump (package nvidia-cuda-cuobjdump): the machine code cannot be read")
    path = tmp_path / "kernel.cubin"
    path.write_bytes(nvrtc.compile_variant(hopper_variant(), 90).cubin)
    text = subprocess.run([disassembler, "-sass", path], capture_output=True, text=True, check=True).stdout
    assert "sm_90a" in text
    for instruction in HOPPER_INSTRUCTIONS:
        assert instruction in text, f"{instruction} is not in the machine code"
    assert not re.search(r"\b(STL|LDL)\b", text)
    assert text.count("HMMA") <= text.count("HGMMA"), "mma.sync is there for lost guesses alone, in a rolled loop"
    assert re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", text), "no product runs under the softmax"


def find_disassembler() -> str | None:
    """Path of cuobjdump: on PATH, or where its package puts it."""
    packages = Path(sysconfig.get_path("purelib"), "nvidia")
    return shutil.which("cuobjdump") or next(map(str, sorted(packages.glob("*/bin/cuobjdump"))), None)


def test_products_that_are_taken_one_by_one_are_seen():
    """The assembler's note that it waits for each product, which costs most of the speed and changes no result."""
    text = source.build(hopper_variant())
    old = "wgmma_fence();\n      issue_output();"
    assert old in text
    report = nvrtc.compile_source(text.replace(old, "issue_output();\n      if (p.seq_k == 3) return;", 1), 90, "a")
    assert any("wgmma" in complaint for complaint in report.complaints), report
    assert not report.clean


@pytest.mark.parametrize("code", [7505, 7508, 7510, 7511, 7512, 7514, 7515, 7517, 7520])
def test_every_note_on_products_is_a_complaint(code):
    """Those of the assembler on serialised wgmma, ignored register counts and injected waits, by number."""
    log = "ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 8 registers\n"
    assert nvrtc.report(log).clean
    assert not nvrtc.report(f"ptxas info    : (C{code}) something in function 'f'\n{log}").clean
