"""The kernels' argument record: what Python packs is what C++ and the CUDA compiler read, field by field."""

from itertools import combinations

import numpy as np
import pytest

from cuflash import abi
from cuflash.modifiers import REGISTRY
from tests import nvrtc
from tests.emulator import EmulatedKernel, EmulatorError

ALL = tuple(REGISTRY)
CHAINS = {
    "none": (),
    "causal": ("causal",),
    "bias": ("bias",),
    "softcap-lengths": ("softcap", "lengths"),
    "alibi-window-mask": ("alibi", "window", "mask"),
    "all": ALL,
}
TYPES = """
typedef long long i64;
typedef unsigned long long u64;
typedef {real} Real;
"""

records = pytest.mark.parametrize("accumulator", ["float32", "float64"])
directions = pytest.mark.parametrize("direction", ["forward", "backward", "jvp", "hvp", "decode"])
WITHOUT_MAPS = ("jvp", "hvp", "decode")
chains = pytest.mark.parametrize("chain", CHAINS)
MAPS = ("q", "k", "v", "out")


def header(
    direction: str, chain: tuple[str, ...], accumulator: str, maps: tuple[str, ...] = (), statistics: bool = False
) -> str:
    real = {"float32": "float", "float64": "double"}[accumulator]
    return TYPES.replace("{real}", real) + abi.c_struct(direction, chain, maps, statistics)


def members(dtype: np.dtype, prefix: str = "", offset: int = 0) -> list[tuple[str, int, np.dtype]]:
    """(C expression, offset, dtype) of every number in a record."""
    found = []
    for name, (kind, at, *_) in dtype.fields.items():
        base, shape = kind.subdtype or (kind, ())
        if base.kind == "V" and not base.fields:  # a tensor map is 16 words
            words = np.dtype("u8")
            found += [(f"{prefix}{name}.opaque[{i}]", offset + at + 8 * i, words) for i in range(base.itemsize // 8)]
            continue
        for i in range(shape[0] if shape else 1):
            expression = f"{prefix}{name}" + (f"[{i}]" if shape else "")
            place = offset + at + i * base.itemsize
            found += members(base, f"{expression}.", place) if base.fields else [(expression, place, base)]
    return found


@records
@directions
@chains
@pytest.mark.parametrize("maps", [(), MAPS, ("k",)], ids=lambda maps: "-".join(maps) or "no maps")
def test_kernel_reads_what_python_packs(chain, direction, accumulator, maps):
    """A kernel that echoes every number of a record whose numbers are all different."""
    if maps and (accumulator == "float64" or direction in WITHOUT_MAPS):
        return  # arrays with maps are of 16 bits, and these kernels have none
    check_echo(direction, CHAINS[chain], accumulator, maps, False)


@records
@pytest.mark.parametrize("chain", ["none", "softcap-lengths", "all"])
def test_kernel_reads_the_views_of_statistics(chain, accumulator):
    """They lie behind all else: a kernel without them takes the front of the same record."""
    check_echo("forward", CHAINS[chain], accumulator, (), True)
    whole, plain = (abi.record("forward", CHAINS[chain], accumulator, (), flag) for flag in (True, False))
    assert whole.names == (*plain.names, *abi.STATISTICS)
    assert all(whole.fields[name] == plain.fields[name] for name in plain.names)
    assert whole.itemsize >= plain.itemsize


def check_echo(direction, chain, accumulator, maps, statistics):
    dtype = abi.record(direction, chain, accumulator, maps, statistics)
    numbers = members(dtype)
    assert len({at for _, at, _ in numbers}) == len(numbers)
    lines = [
        f"  x[{i}] = double({'u64(p.' + name + ')' if kind == np.uint64 else 'p.' + name});"
        for i, (name, _, kind) in enumerate(numbers)
    ]
    text = header(direction, chain, accumulator, maps, statistics) + (
        '\nextern "C" __global__ void echo(const Params p, double* x) {\n'
        + "\n".join(lines)
        + f"\n  x[{len(numbers)}] = sizeof(Params);\n}}\n"
    )
    packed = bytearray(dtype.itemsize)
    want = np.arange(1.0, len(numbers) + 1)
    for value, (_, offset, kind) in zip(want, numbers, strict=True):
        packed[offset : offset + kind.itemsize] = kind.type(value).tobytes()
    got = np.full(len(numbers) + 1, np.nan)
    EmulatedKernel(text, "echo").launch((1,), 32, [bytes(packed), got])
    np.testing.assert_array_equal(got, [*want, dtype.itemsize])


def test_a_record_of_another_size_is_refused():
    text = header("forward", (), "float32") + '\nextern "C" __global__ void f(const Params p) {}'
    with pytest.raises(EmulatorError, match="takes parameters of"):
        EmulatedKernel(text, "f").launch((1,), 32, bytes(abi.record("forward", (), "float32").itemsize + 8))


@nvrtc.needed
@records
@directions
@chains
@pytest.mark.parametrize("maps", [(), MAPS], ids=["no maps", "maps"])
def test_cuda_compiler_agrees(chain, direction, accumulator, maps):
    if maps and (accumulator == "float64" or direction in WITHOUT_MAPS):
        return  # arrays with maps are of 16 bits, and these kernels have none
    dtype = abi.record(direction, CHAINS[chain], accumulator, maps)
    asserts = [f'static_assert(__builtin_offsetof(Params, {n}) == {at}, "{n}");' for n, at, _ in members(dtype)]
    asserts.append(f'static_assert(sizeof(Params) == {dtype.itemsize}, "size");')
    kernel = 'extern "C" __global__ void f(const __grid_constant__ Params p, i64* x) { *x = p.seq_q; }'
    text = "\n".join([header(direction, CHAINS[chain], accumulator, maps), *asserts, kernel])
    nvrtc.compile_source(text, 80)
    with pytest.raises(nvrtc.CompilationError, match="static assertion failed"):
        nvrtc.compile_source(text.replace(f"== {dtype.itemsize},", f"== {dtype.itemsize + 8},"), 80)


@directions
def test_fields_have_names_of_their_own(direction):
    """No two modifiers of any pair share a field with each other or with the kernel."""
    for pair in (ALL, *combinations(ALL, 2)):
        names = [name for _, name in abi.fields(direction, pair)]
        assert len(names) == len(set(names))


def test_gradients_of_operands_are_fields_of_the_backward_alone():
    assert ("View", "dbias") in abi.fields("backward", ("bias",))
    assert ("View", "dbias") not in abi.fields("forward", ("bias",))
    assert ("Pointer", "bounds") in abi.fields("backward", ("bias",))
    assert ("Pointer", "bounds") not in abi.fields("backward", ("sinks", "causal"))
