"""The emulator itself: each instruction against NumPy, and each kind of fault is noticed.

Every test states its kernel as CUDA text; all of them are compiled as one source.  Fragment layouts are written down here a second
time, from the tables of the PTX ISA, so that the emulator's own idea of them is not its judge.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import EmulatedKernel, EmulatorError, GuardedArena, Mutant, check_guards, examine, guarded, mutate
from tests.emulator.build import runtime_objects
from tests.emulator.translate import function_name

LANES = np.arange(32)
SEEDS = range(6)
SOURCES: list[str] = [
    """
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
__device__ __forceinline__ u32 address_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
"""
]


def cuda(text: str) -> str:
    """Adds a kernel to the common source."""
    SOURCES.append(text)
    return text


def launch(
    name: str,
    *arguments: np.ndarray | np.generic,
    threads: int = 32,
    shared: int = 0,
    seed: int = 0,
    blocks: int = 1,
    **options: int,
) -> None:
    EmulatedKernel("".join(SOURCES), name, arch=90).launch((blocks,), threads, arguments, shared, seed, **options)


def bits(x: np.ndarray) -> np.ndarray:
    """16-bit floating-point numbers as the kernel's u16."""
    return np.ascontiguousarray(x).view(np.uint16)


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit numbers in a register, the first one in the low half."""
    return bits(low).astype(np.uint32) | bits(high).astype(np.uint32) << 16


def integers(*shape: int, seed: int = 0, limit: int = 8) -> np.ndarray:
    """Whole numbers small enough that every product and sum is exact."""
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape)


# ---- language --------------------------------------------------------------------------------------------------------
cuda("""
struct Shape { static constexpr int kRows = 4; __device__ static int cells(int columns) { return kRows * columns; } };
template <int kCount> struct Sum {
  float value[kCount] = {};
  __device__ __forceinline__ void add(const float* x) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] += x[i];
  }
};
struct LanguageParams { const float* x; float* out; int n; };
extern "C" __global__ void __launch_bounds__(Shape::kRows * 32, 1) language(const __grid_constant__ LanguageParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  struct Storage { float row[4][32]; float total; };
  Storage& shared = *reinterpret_cast<Storage*>(memory);
  __shared__ float partial[Shape::kRows];
  const int warp = threadIdx.x / warpSize, lane = threadIdx.x % 32;
  Sum<2> sum;
  sum.add(p.x + 2 * threadIdx.x);
  auto both = [&](int i) { return sum.value[i] + float(Shape::cells(0)); };
  shared.row[warp][lane] = both(0) + both(1);
  __syncthreads();
  if (lane == 0) {
    partial[warp] = 0;
#pragma unroll 4
    for (int i = 0; i < 32; ++i) partial[warp] += shared.row[warp][i];
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.total = partial[0] + partial[1] + partial[2] + partial[3];
  __syncthreads();
  const float4 v = make_float4(shared.total, float(blockIdx.x), float(gridDim.x), float(__CUDA_ARCH__));
  if (threadIdx.x == 0) reinterpret_cast<float4*>(p.out)[blockIdx.x] = v;
}
extern "C" __device__ const int language_shared_bytes = 1234;
""")


@pytest.mark.parametrize("seed", SEEDS)
def test_language(seed: int) -> None:
    kernel = EmulatedKernel("".join(SOURCES), "language", arch=90)
    assert kernel.constant("language_shared_bytes") == 1234
    with GuardedArena() as arena:
        x = arena.constant(integers(256).astype(np.float32), "x")
        out = arena.empty((3, 4), np.float32, "out")
        record = np.array([(x.ctypes.data, out.ctypes.data, 256, 0)], "u8,u8,i4,i4")
        kernel.launch((3,), 128, record.tobytes(), 528, seed)
    np.testing.assert_array_equal(out, [[x.sum(), i, 3, 900] for i in range(3)])


cuda("""
extern "C" __global__ void builtins(const float* x, const double* y, float* f, double* d, int* i) {
  const float a = x[0], b = x[1], nan = __int_as_float(0x7fffffff);
  const float results[] = {max(a, b), fminf(a, b), max(nan, b), fmaxf(a, nan), fmaf(a, b, 1.f), exp2f(a), __expf(a), __logf(b), log2f(b), tanhf(a),
                           rsqrtf(b), fabsf(a), __double2float_rn(y[0]), __frcp_rn(b), __fdividef(a, b), float(isnan(nan) && !isinf(a)), __ldg(x + 1)};
  for (int n = 0; n < 17; ++n) f[n] = results[n];
  const double wide[] = {max(y[0], y[1]), fma(y[0], y[1], 1.), exp2(y[0]), exp(y[0]), log(y[1]), tanh(y[0]), rsqrt(y[1]), abs(y[0])};
  for (int n = 0; n < 8; ++n) d[n] = wide[n];
  const int whole[] = {max(3, 5u) == 5, min(-3, 2), (int)__umulhi(0x80000000u, 6u), __popc(0xF0F0u), __clz(1), __ffs(8), (int)sizeof(double2), abs(-7)};
  for (int n = 0; n < 8; ++n) i[n] = whole[n];
}
""")


def test_builtin_functions() -> None:
    x, y = np.array([-1.5, 2.5], np.float32), np.array([-0.3, 4.0])
    f, d, i = np.zeros(17, np.float32), np.zeros(8), np.zeros(8, np.int32)
    launch("builtins", x, y, f, d, i)
    a, b = x.astype(np.float64)
    want = [
        b,
        a,
        b,
        a,
        a * b + 1,
        2**a,
        np.exp(a),
        np.log(b),
        np.log2(b),
        np.tanh(a),
        b**-0.5,
        -a,
        y[0],
        1 / b,
        a / b,
        1,
        b,
    ]
    np.testing.assert_allclose(f, want, rtol=2e-7)
    np.testing.assert_allclose(
        d, [4, y[0] * 4 + 1, 2 ** y[0], np.exp(y[0]), np.log(4), np.tanh(y[0]), 0.5, 0.3], rtol=1e-15
    )
    assert i.tolist() == [1, -3, 3, 8, 31, 4, 16, 7]


# ---- warp and block functions ----------------------------------------------------------------------------------------
cuda("""
template <class T> __device__ void shuffle_all(const T* x, T* out) {
  const int l = threadIdx.x;
  const T v = x[l];
  const T results[] = {__shfl_sync(~0u, v, 5), __shfl_xor_sync(~0u, v, 3), __shfl_down_sync(~0u, v, 2), __shfl_up_sync(~0u, v, 2),
                       __shfl_sync(~0u, v, 1, 8), __shfl_down_sync(~0u, v, 1, 4), __shfl_xor_sync(~0u, v, 16)};
  for (int n = 0; n < 7; ++n) out[32 * n + l] = results[n];
}
extern "C" __global__ void shuffles(const float* f, const double* d, const int* i, const u32* u, float* of, double* od, int* oi, u32* ou) {
  shuffle_all(f, of);
  shuffle_all(d, od);
  shuffle_all(i, oi);
  shuffle_all(u, ou);
}
extern "C" __global__ void votes(u32* out) {
  const u32 ballot = __ballot_sync(~0u, threadIdx.x % 3 == 0);
  const int any = __any_sync(~0u, threadIdx.x == 40), all = __all_sync(~0u, threadIdx.x < 32);
  const int count = __syncthreads_count(threadIdx.x < 37), some = __syncthreads_or(threadIdx.x == 63), every = __syncthreads_and(threadIdx.x < 63);
  if (threadIdx.x % 32 == 0) {
    u32* row = out + 6 * (threadIdx.x / 32);
    row[0] = ballot; row[1] = any; row[2] = all; row[3] = count; row[4] = some; row[5] = every;
  }
}
""")


def test_shuffles() -> None:
    values = [
        integers(32, seed=n, limit=100).astype(t) for n, t in enumerate((np.float32, np.float64, np.int32, np.uint32))
    ]
    results = [np.zeros((7, 32), v.dtype) for v in values]
    launch("shuffles", *values, *results)
    sources = [
        np.full(32, 5),
        LANES ^ 3,
        np.where(LANES + 2 < 32, LANES + 2, LANES),
        np.where(LANES >= 2, LANES - 2, LANES),
        LANES // 8 * 8 + 1,
        np.where(LANES % 4 < 3, LANES + 1, LANES),
        LANES ^ 16,
    ]
    for value, result in zip(values, results, strict=True):
        np.testing.assert_array_equal(result, value[sources])


@pytest.mark.parametrize("seed", SEEDS)
def test_votes(seed: int) -> None:
    out = np.zeros((2, 6), np.uint32)
    launch("votes", out, threads=64, seed=seed)
    ballots = [sum(1 << int(lane) for lane in LANES if (32 * w + lane) % 3 == 0) for w in range(2)]
    assert out.tolist() == [[ballots[0], 0, 1, 37, 1, 0], [ballots[1], 1, 0, 37, 1, 0]]


# ---- matrix products: PTX ISA, "Matrix Fragments for mma.*" ----------------------------------------------------------
G, T = LANES // 4, LANES % 4
HALF_PRODUCTS = {"f16_k8": ("f16", 8), "bf16_k8": ("bf16", 8), "f16_k16": ("f16", 16), "bf16_k16": ("bf16", 16)}
DOUBLE_PRODUCTS = {"f64_m8k4": (8, 4), "f64_m16k4": (16, 4), "f64_m16k8": (16, 8), "f64_m16k16": (16, 16)}


def registers(prefix: str, first: int, count: int) -> tuple[str, str]:
    """PTX operand list and the C expressions of a fragment."""
    names = ", ".join(f"%{first + i}" for i in range(count))
    return "{" + names + "}", prefix + "[" + f"], {prefix}[".join(map(str, range(count))) + "]"


def product_kernel(
    name: str, opcode: str, counts: tuple[int, int, int], types: tuple[str, str], constraints: tuple[str, str]
) -> str:
    """A kernel that loads the fragments of one mma as they are and stores the result's."""
    nc, na, nb = counts
    lists = [registers(p, first, n) for p, first, n in (("c", 0, nc), ("a", nc, na), ("b", nc + na, nb))]
    out, *ins = [
        ", ".join(f'"{kind}"({x})' for x in expressions.split(", "))
        for kind, (_, expressions) in zip(("+" + constraints[1], constraints[0], constraints[0]), lists, strict=True)
    ]
    c, a, b = (text for text, _ in lists)
    return f"""
extern "C" __global__ void {name}(const {types[0]}* pa, const {types[0]}* pb, {types[1]}* pc) {{
  {types[0]} a[{na}], b[{nb}];
  {types[1]} c[{nc}];
  for (int i = 0; i < {na}; ++i) a[i] = pa[{na} * threadIdx.x + i];
  for (int i = 0; i < {nb}; ++i) b[i] = pb[{nb} * threadIdx.x + i];
  for (int i = 0; i < {nc}; ++i) c[i] = pc[{nc} * threadIdx.x + i];
  asm volatile("{opcode} {c}, {a}, {b}, {c};" : {out} : {", ".join(ins)});
  for (int i = 0; i < {nc}; ++i) pc[{nc} * threadIdx.x + i] = c[i];
}}
"""


for _name, (_type, _k) in HALF_PRODUCTS.items():
    _opcode = f"mma.sync.aligned.m16n8k{_k}.row.col.f32.{_type}.{_type}.f32"
    cuda(product_kernel(_name, _opcode, (4, _k // 4, _k // 8), ("u32", "float"), ("r", "f")))
for _name, (_m, _k) in DOUBLE_PRODUCTS.items():
    _opcode = f"mma.sync.aligned.m{_m}n8k{_k}.row.col.f64.f64.f64.f64"
    cuda(product_kernel(_name, _opcode, (_m // 4, _m * _k // 32, _k // 4), ("double", "double"), ("d", "d")))


@pytest.mark.parametrize("name", HALF_PRODUCTS)
def test_half_products(name: str) -> None:
    kind, k = HALF_PRODUCTS[name]
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    a, b, c = integers(16, k, seed=1), integers(k, 8, seed=2), integers(16, 8, seed=3).astype(np.float32)
    row, column = [G, G + 8, G, G + 8], [2 * T, 2 * T, 2 * T + 8, 2 * T + 8]
    fragment_a = np.stack(
        [pairs(a[row[i], column[i]].astype(dtype), a[row[i], column[i] + 1].astype(dtype)) for i in range(k // 4)], 1
    )
    fragment_b = np.stack(
        [pairs(b[2 * T + 8 * i, G].astype(dtype), b[2 * T + 8 * i + 1, G].astype(dtype)) for i in range(k // 8)], 1
    )
    rows_c, columns_c = np.stack([G, G, G + 8, G + 8], 1), np.stack([2 * T, 2 * T + 1] * 2, 1)
    fragment_c = np.ascontiguousarray(c[rows_c, columns_c])
    launch(name, np.ascontiguousarray(fragment_a), np.ascontiguousarray(fragment_b), fragment_c)
    np.testing.assert_array_equal(fragment_c, (a @ b + c)[rows_c, columns_c])


@pytest.mark.parametrize("name", DOUBLE_PRODUCTS)
def test_double_products(name: str) -> None:
    m, k = DOUBLE_PRODUCTS[name]
    a, b, c = (integers(*s, seed=n).astype(np.float64) for n, s in enumerate(((m, k), (k, 8), (m, 8))))
    bands = m // 8
    fragment_a = np.stack([a[G + 8 * (i % bands), T + 4 * (i // bands)] for i in range(m * k // 32)], 1)
    fragment_b = np.stack([b[T + 4 * i, G] for i in range(k // 4)], 1)
    rows_c = np.stack([G + 8 * (i // 2) for i in range(m // 4)], 1)
    columns_c = np.stack([2 * T + i % 2 for i in range(m // 4)], 1)
    fragment_c = np.ascontiguousarray(c[rows_c, columns_c])
    launch(name, np.ascontiguousarray(fragment_a), np.ascontiguousarray(fragment_b), fragment_c)
    np.testing.assert_array_equal(fragment_c, (a @ b + c)[rows_c, columns_c])


def matrix_kernel(name: str, count: int, modifier: str) -> str:
    """ldmatrix from rows given per lane, stmatrix back to another place."""
    names, values = registers("r", 0, count)
    outputs = ", ".join(f'"=r"({v})' for v in values.split(", "))
    inputs = ", ".join(f'"r"({v})' for v in values.split(", "))
    stored = ", ".join(f"%{1 + i}" for i in range(count))
    return f"""
extern "C" __global__ void {name}(const u16* x, const int* row_of, u32* loaded, u16* stored) {{
  extern __shared__ __align__(128) unsigned char memory[];
  u16* shared = reinterpret_cast<u16*>(memory);
  for (int i = threadIdx.x; i < 32 * 8; i += 32) shared[i] = x[i];
  __syncwarp();
  u32 r[{count}];
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16 {names}, [%{count}];"
               : {outputs} : "r"(address_of(shared + 8 * row_of[threadIdx.x])) : "memory");
  for (int i = 0; i < {count}; ++i) loaded[{count} * threadIdx.x + i] = r[i];
  asm volatile("stmatrix.sync.aligned.m8n8.x{count}{modifier}.shared::cta.b16 [%0], {{{stored}}};"
               :: "r"(address_of(shared + 8 * (32 + threadIdx.x))), {inputs} : "memory");
  __syncwarp();
  for (int i = threadIdx.x; i < {count} * 64; i += 32) stored[i] = shared[256 + i];
}}
"""


MATRIX_ACCESSES = {f"matrix_x{n}{'_trans' * (m != '')}": (n, m) for n in (1, 2, 4) for m in ("", ".trans")}
for _name, (_count, _modifier) in MATRIX_ACCESSES.items():
    cuda(matrix_kernel(_name, _count, _modifier))


@pytest.mark.parametrize("name", MATRIX_ACCESSES)
def test_ldmatrix_and_stmatrix(name: str) -> None:
    count, modifier = MATRIX_ACCESSES[name]
    x = np.arange(256, dtype=np.uint16).reshape(32, 8)
    rows = np.random.default_rng(0).permutation(32).astype(np.int32)
    loaded, stored = np.zeros((32, count), np.uint32), np.zeros((count, 8, 8), np.uint16)
    launch(name, x, rows, loaded, stored, shared=1024)
    matrices = x[rows].reshape(4, 8, 8)[:count]
    seen = matrices.swapaxes(1, 2) if modifier else matrices
    np.testing.assert_array_equal(loaded, np.stack([pairs(m[G, 2 * T], m[G, 2 * T + 1]) for m in seen], 1))
    np.testing.assert_array_equal(stored, matrices)


# ---- cp.async --------------------------------------------------------------------------------------------------------
cuda("""
extern "C" __global__ void copies(const unsigned char* x, unsigned char* out, const int* valid) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 to = address_of(memory) + 16 * threadIdx.x;
  const unsigned char* from = x + 16 * threadIdx.x;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(to + 512), "l"(from), "r"(min(valid[threadIdx.x], 8)) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.ca.shared::cta.global [%0], [%1], 16;" ::"r"(to + 1024), "l"(from) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to + 1536), "l"(from), "r"(valid[threadIdx.x]) : "memory");
  asm volatile("cp.async.wait_group %0;" ::"n"(1) : "memory");
  for (int i = 0; i < 4; ++i) out[16 * threadIdx.x + i] = memory[16 * threadIdx.x + i];
  for (int i = 0; i < 8; ++i) out[512 + 16 * threadIdx.x + i] = memory[512 + 16 * threadIdx.x + i];
  asm volatile("cp.async.wait_all;" ::: "memory");
  for (int i = 0; i < 16; ++i) out[1024 + 16 * threadIdx.x + i] = memory[1024 + 16 * threadIdx.x + i];
  for (int i = 0; i < 16; ++i) out[1536 + 16 * threadIdx.x + i] = memory[1536 + 16 * threadIdx.x + i];
}
""")


@pytest.mark.parametrize("seed", SEEDS)
def test_cp_async(seed: int) -> None:
    x = np.random.default_rng(0).integers(0, 255, (32, 16)).astype(np.uint8)
    valid = (LANES % 17).astype(np.int32)
    out = np.full((4, 32, 16), 7, np.uint8)
    launch("copies", x, out, valid, shared=2048, seed=seed)
    filled = np.where(np.arange(16) < valid[:, None], x, 0)
    np.testing.assert_array_equal(out[0, :, :4], x[:, :4])
    np.testing.assert_array_equal(out[1, :, :8], filled[:, :8])
    np.testing.assert_array_equal(out[2], x)
    np.testing.assert_array_equal(out[3], filled)


# ---- loads, stores, reductions ---------------------------------------------------------------------------------------
cuda(r"""
extern "C" __global__ void moves(const u32* x, const double* y, u32* out, double* wide) {
  extern __shared__ __align__(128) unsigned char memory[];
  u32 a, b, c, d;
  u16 h;
  float f, g;
  double p, q;
  u64 l;
  const u32 shared = address_of(memory);
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(x));
  asm volatile("st.global.L1::evict_first.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(out), "r"(d), "r"(c), "r"(b), "r"(a) : "memory");
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2+16];" : "=r"(a), "=r"(b) : "l"(x));
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(a), "r"(b) : "memory");
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(c), "=r"(d) : "r"(shared) : "memory");
  asm volatile("st.global.v2.u32 [%0 + 16], {%1, %2};" ::"l"(out), "r"(d), "r"(c) : "memory");
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(h) : "l"(x + 6));
  asm volatile("st.global.u16 [%0], %1;" ::"l"(out + 6), "h"(h) : "memory");
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared + 16), "f"(1.5f) : "memory");
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(f) : "r"(shared + 16) : "memory");
  asm volatile("st.shared.v4.f32 [%0], {%1, %1, %1, %1};" ::"r"(shared + 32), "f"(f) : "memory");
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f), "=f"(g) : "r"(shared + 40) : "memory");
  __shared__ u32 variable[2];
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_of(&variable[1])), "r"(5) : "memory");
  out[7] = f + g == 3.f ? variable[1] : 0;
  asm volatile("ld.global.v2.f64 {%0, %1}, [%2];" : "=d"(p), "=d"(q) : "l"(y));
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(shared + 64), "d"(q), "d"(p) : "memory");
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(p), "=d"(q) : "r"(shared + 64) : "memory");
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(l) : "r"(shared + 72) : "memory");
  wide[0] = p;
  wide[1] = q;
  wide[2] = __longlong_as_double((long long)l);
}
extern "C" __global__ void reductions(float* f, double* d, u32* u) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(f), "f"(1.f) : "memory");
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(f + 2), "f"(1.f), "f"(2.f) : "memory");
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(f + 4), "f"(1.f), "f"(2.f), "f"(3.f), "f"(4.f) : "memory");
  asm volatile("red.gpu.global.add.f64 [%0], %1;" ::"l"(d), "d"(0.5) : "memory");
  u32 ticket;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(ticket) : "l"(u), "r"(1) : "memory");
  u[4 + ticket] = 1;
  asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, 5; @p red.global.max.u32 [%0], %1; @!p red.global.add.u32 [%0+4], 1; }" ::"l"(u + 1), "r"(threadIdx.x) : "memory");
  atomicAdd(f + 1, 2.f);
  atomicAdd(d + 1, 0.25);
  atomicAdd(u + 3, 3u);
}
""")


def test_loads_and_stores() -> None:
    x, y = np.arange(100, 108, dtype=np.uint32), np.array([1.25, -7.0])
    x[6] = 0xABCD1234
    out, wide = np.zeros(8, np.uint32), np.zeros(3)
    launch("moves", x, y, out, wide, shared=128)
    assert out.tolist() == [103, 102, 101, 100, 105, 104, 0x1234, 5]
    assert wide.tolist() == [-7.0, 1.25, 1.25]


def test_reductions() -> None:
    f, d, u = np.zeros(8, np.float32), np.zeros(2), np.zeros(4 + 64, np.uint32)
    launch("reductions", f, d, u, threads=64, seed=1)
    assert f.tolist() == [64, 128, 64, 128, 64, 128, 192, 256]
    assert d.tolist() == [32, 16]
    assert u[:4].tolist() == [64, 4, 59, 192]
    assert u[4:].tolist() == [1] * 64


# ---- conversions, approximations -------------------------------------------------------------------------------------
cuda("""
extern "C" __global__ void conversions(const float* x, const u16* h, u32* packed, u16* narrow, float* wide) {
  const int i = threadIdx.x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed[i]) : "f"(x[i]), "f"(x[i + 1]));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed[32 + i]) : "f"(x[i]), "f"(x[i + 1]));
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow[i]) : "f"(x[i]));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow[32 + i]) : "f"(x[i]));
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide[i]) : "h"(h[i]));
  asm("cvt.f32.bf16 %0, %1;" : "=f"(wide[32 + i]) : "h"(h[i]));
}
extern "C" __global__ void approximations(const float* x, float* out) {
  const float v = x[threadIdx.x];
  float r[8];
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r[0]) : "f"(v));
  asm("lg2.approx.f32 %0, %1;" : "=f"(r[1]) : "f"(v));
  asm("rcp.approx.f32 %0, %1;" : "=f"(r[2]) : "f"(v));
  asm("tanh.approx.f32 %0, %1;" : "=f"(r[3]) : "f"(v));
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r[4]) : "f"(v));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r[5]) : "f"(v), "f"(1.f));
  asm("max.f32 %0, %1, 0f3F800000;" : "=f"(r[6]) : "f"(v));
  asm("ex2.approx.f32 %0, %1;" : "=f"(r[7]) : "f"(v));
  for (int i = 0; i < 8; ++i) out[32 * i + threadIdx.x] = r[i];
}
""")


def test_conversions() -> None:
    special = [
        0.0,
        -0.0,
        1.0,
        65504.0,
        65519.0,
        65520.0,
        1e-8,
        6e-8,
        3.3895e38,
        np.inf,
        -np.inf,
        np.nan,
        1 + 2**-8,
        1 + 3 * 2**-8,
    ]
    x = np.concatenate([special, np.random.default_rng(0).standard_normal(19)]).astype(np.float32)
    h = np.random.default_rng(1).integers(0, 1 << 16, 32).astype(np.uint16)
    packed, narrow, wide = np.zeros((2, 32), np.uint32), np.zeros((2, 32), np.uint16), np.zeros((2, 32), np.float32)
    launch("conversions", x, h, packed, narrow, wide)
    for row, dtype in enumerate((ml_dtypes.bfloat16, np.float16)):
        with np.errstate(over="ignore"):
            want = x.astype(dtype)
        for got, values in ((narrow[row], want[:32]), (packed[row] >> 16, want[:32]), (packed[row] & 0xFFFF, want[1:])):
            got = got.astype(np.uint16).view(dtype)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(values))
            np.testing.assert_array_equal(bits(got)[~np.isnan(got)], bits(values)[~np.isnan(got)])
    np.testing.assert_array_equal(wide[0], h.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(wide[1], h.view(ml_dtypes.bfloat16).astype(np.float32))


def test_approximations() -> None:
    x = np.concatenate([[-130.0, -126.0, 0.0, np.inf, -np.inf, np.nan, 1e-40], np.linspace(-5, 5, 25)]).astype(
        np.float32
    )
    out = np.zeros((8, 32), np.float32)
    launch("approximations", x, out)
    v = x.astype(np.float64)
    flushed = np.where(np.abs(v) < 2.0**-126, 0, v)
    with np.errstate(all="ignore"):
        power = np.exp2(v)
        want = [
            *(np.where(power < 2.0**-126, 0, power), np.log2(v), 1 / v, np.tanh(v), 1 / np.sqrt(flushed)),
            *(np.where(np.isnan(v), v, np.maximum(v, 1)), np.fmax(v, 1), power),
        ]
        np.testing.assert_allclose(out, np.array(want).astype(np.float32), rtol=3e-7)


# ---- Hopper: TMA, mbarrier, wgmma, named barriers --------------------------------------------------------------------
HOPPER = cuda(r"""
struct alignas(64) TensorMap { unsigned char opaque[128]; };
struct HopperParams { TensorMap a, b, c; float* sums; };
__device__ __forceinline__ void wait_parity(u32 bar, u32 parity) {
  asm volatile("{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 address) { return (u64)(address >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
extern "C" __global__ void __launch_bounds__(160, 1) hopper(const __grid_constant__ HopperParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  struct Storage { u16 a[64][64], b[64][64], c[64][64]; float sums[64]; u64 full; };
  Storage& s = *reinterpret_cast<Storage*>(memory);
  const u32 full = address_of(&s.full);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full), "r"(1) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(24));
    u32 leader;
    asm volatile("{ .reg .pred p; .reg .b32 r; elect.sync r|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(leader));
    if (leader) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(16384) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                   ::"r"(address_of(s.a)), "l"(&p.a), "r"(0), "r"(0), "r"(full) : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                   ::"r"(address_of(s.b)), "l"(&p.b), "r"(0), "r"(0), "r"(full) : "memory");
    }
  } else {
    wait_parity(full, 0);
    float d[8] = {};
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int n = 0; n < 64; n += 16) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int k = 0; k < 4; ++k)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;"
                     "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0; }"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                     : "l"(descriptor(address_of(s.a)) + 2 * k), "l"(descriptor(address_of(s.b)) + 8 * n + 2 * k), "r"(k));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      for (int i = 0; i < 8; ++i) {
        u16 x;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x) : "f"(d[i]));
        s.c[row + (i & 2) * 4][n + column + (i & 4) * 2 + (i & 1)] = x;
      }
    }
    if (threadIdx.x < 64) asm volatile("st.shared.f32 [%0], %1;" ::"r"(address_of(&s.sums[threadIdx.x])), "f"((float)threadIdx.x) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, %1;" ::"r"(1), "r"(128) : "memory");
    if (threadIdx.x == 0) {
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&p.c), "r"(0), "r"(0), "r"(address_of(s.c)) : "memory");
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(p.sums), "r"(address_of(s.sums)), "r"(256) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
  }
}
""")
BF16, NO_SWIZZLE, SWIZZLE_128B = 9, 0, 3


def run_hopper(source: str, seed: int) -> None:
    """C = A B^T on 64 x 64 numbers, of which A and C have only 50 rows; and sums + 0..63."""
    kernel = EmulatedKernel(source, "hopper", arch=90)
    with GuardedArena() as arena:
        a, b = (bits(integers(rows, 64, seed=rows).astype(ml_dtypes.bfloat16)) for rows in (50, 64))
        a, b = arena.constant(a, "a"), arena.constant(b, "b")
        c, sums = arena.empty((50, 64), np.uint16, "c"), arena.copy(np.ones(64, np.float32), "sums")
        maps = [
            kernel.tensor_map(BF16, x.ctypes.data, x.shape[::-1], x.strides[:1], (64, 64), swizzle)
            for x, swizzle in ((a, SWIZZLE_128B), (b, SWIZZLE_128B), (c, NO_SWIZZLE))
        ]
        record = b"".join(maps) + np.uint64(sums.ctypes.data).tobytes() + bytes(56)
        kernel.launch((1,), 160, record, 3 * 8192 + 256 + 8, seed)
    product = a.view(ml_dtypes.bfloat16).astype(np.float32) @ b.view(ml_dtypes.bfloat16).astype(np.float32).T
    np.testing.assert_array_equal(c.view(ml_dtypes.bfloat16), product.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(sums, np.arange(64) + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_hopper(seed: int) -> None:
    run_hopper(SOURCES[0] + HOPPER, seed)


HOPPER_MUTANTS = [
    Mutant("hopper", "the full barrier is not waited for", "    wait_parity(full, 0);\n", ""),
    Mutant("hopper", "the wrong parity is waited for", "wait_parity(full, 0);", "wait_parity(full, 1);"),
    Mutant("hopper", "fewer bytes are expected than arrive", '"r"(16384)', '"r"(16368)'),
    Mutant("hopper", "no wgmma.fence", 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', ""),
    Mutant("hopper", "wgmma is not waited for", 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");', ""),
    Mutant(
        "hopper", "no proxy fence before the store", 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', ""
    ),
    Mutant(
        "hopper", "the store is not waited for", 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");', ""
    ),
    Mutant(
        "hopper",
        "mbarrier used without a barrier after its init",
        "  }\n  __syncthreads();\n  if (threadIdx.x >= 128)",
        "  }\n  if (threadIdx.x >= 128)",
    ),
]


@pytest.mark.parametrize("mutant", HOPPER_MUTANTS, ids=lambda m: m.description.replace(" ", "-"))
def test_hopper_mutants(mutant: Mutant) -> None:
    findings = examine(mutant, SOURCES[0] + HOPPER, run_hopper)
    assert findings.noticed, findings


# ---- faults: addresses -----------------------------------------------------------------------------------------------
cuda("""
extern "C" __global__ void touch(float* x, int at, int write) {
  if (threadIdx.x != 37) return;
  if (write) x[at] = 1.f;  // the store of `touch`
  else x[0] = x[at];
}
extern "C" __global__ void touch_shared(int at, int how, float* out) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float variable[32];
  float value = 0;
  if (how == 0) reinterpret_cast<float*>(memory)[at] = 1.f;
  if (how == 1) value = variable[at];
  if (how == 2) asm volatile("st.shared.f32 [%0], %1;" ::"r"(address_of(memory) + 4 * at), "f"(1.f) : "memory");
  if (how == 3) asm volatile("ld.shared.v4.f32 {%0, %0, %0, %0}, [%1];" : "=f"(value) : "r"(address_of(memory) + 4 * at) : "memory");
  if (how == 4) asm volatile("ld.global.v2.f32 {%0, %0}, [%1];" : "=f"(value) : "l"(out + at) : "memory");
  if (how == 5) value = float(1000 / (at - 1));
  if (how == 6) while (reinterpret_cast<volatile float*>(memory)[0] != 0) {}
  if (how == 7) value = *reinterpret_cast<float*>((u64)(at - 1));
  out[threadIdx.x] = value;
}
extern "C" __global__ void large_local_array(float* out) {
  volatile float local[60000];
  local[threadIdx.x] = 1.f;
  __syncwarp();
  out[threadIdx.x] = local[threadIdx.x];
}
""")


def fault(name: str, *arguments: np.ndarray | np.generic, **options: int) -> str:
    """Message of a launch that must fail."""
    with pytest.raises(EmulatorError) as caught:
        launch(name, *arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("write", [0, 1])
@pytest.mark.parametrize(("edge", "at"), [("end", 100), ("start", -1)])
def test_global_access_beside_an_array_is_a_fault(edge: str, at: int, write: int) -> None:
    x, _ = guarded(100, np.float32, "x", edge)
    message = fault("touch", x, np.int32(at), np.int32(write), threads=64)
    assert f"byte offset {4 * at} of array 'x' of 400 bytes, outside it" in message
    assert "block 0,0,0, thread 37" in message


def test_fault_names_the_source_line() -> None:
    marked = "".join(SOURCES).replace(
        'extern "C" __global__ void touch(', '#line 100 "kernels/touch.cu"\nextern "C" __global__ void touch('
    )
    x, _ = guarded(100, np.float32)
    with pytest.raises(EmulatorError, match=r"at kernels/touch\.cu:102"):
        EmulatedKernel(marked, "touch", arch=90).launch((1,), 64, [x, np.int32(100), np.int32(1)])


@pytest.mark.parametrize(("edge", "at"), [("end", -1), ("start", 100)])
def test_global_write_at_the_other_edge_is_found_afterwards(edge: str, at: int) -> None:
    x, guard = guarded(100, np.float32, "x", edge)
    check_guards(guard)
    launch("touch", x, np.int32(at), np.int32(1), threads=64)
    with pytest.raises(EmulatorError, match=f"outside array 'x' of 400 bytes, at byte offsets {4 * at} to"):
        check_guards(guard)


@pytest.mark.parametrize("at", [-1, 100])
def test_global_read_beside_an_array_is_nan(at: int) -> None:
    with GuardedArena("end" if at < 0 else "start") as arena:
        x = arena.zeros(100, np.float32)
        launch("touch", x, np.int32(at), np.int32(0), threads=64)
    assert np.isnan(x[0])
    assert not x[1:].any()


def test_a_constant_array_cannot_be_written() -> None:
    with GuardedArena() as arena:
        x = arena.constant(np.zeros(100, np.float32), "x")
        message = fault("touch", x, np.int32(3), np.int32(1), threads=64)
    assert "byte offset 12 of array 'x' of 400 bytes, which is read-only" in message


SHARED_FAULTS = {
    "the store runs over dynamic shared memory": (0, 256, "bad address"),
    "the load runs over a __shared__ array": (1, 32, "bad address"),
    "st.shared beyond the block's bytes": (
        2,
        256,
        "st.shared: shared address 0x800 + 4 outside the block's 1024 bytes",
    ),
    "st.shared before the block's bytes": (2, -1, "outside the block's 1024 bytes"),
    "ld.shared.v4 at 4 bytes": (3, 1, "ld.shared: shared address 0x404 is not aligned to 16"),
    "ld.global.v2 at 4 bytes": (4, 1, "is not aligned to 8"),
    "division by zero": (5, 1, "division by zero"),
    "endless loop": (6, 1, "runs for ever"),
    "null pointer": (7, 1, "null pointer"),
}


@pytest.mark.parametrize("name", SHARED_FAULTS)
def test_faults_of_one_thread(name: str) -> None:
    how, at, message = SHARED_FAULTS[name]
    out = np.zeros(32, np.float32)
    found = fault("touch_shared", np.int32(at), np.int32(how), out, shared=1024, time_limit=1)
    assert message in found
    assert "block 0,0,0, thread 0]" in found


def test_a_write_before_shared_memory_is_found_when_the_block_ends() -> None:
    assert "before the begin" in fault("touch_shared", np.int32(-1), np.int32(0), np.zeros(32, np.float32), shared=1024)


def test_a_stack_overflow_is_a_fault() -> None:
    assert "stack overflow" in fault("large_local_array", np.zeros(32, np.float32))


def test_the_process_survives_faults() -> None:
    test_faults_of_one_thread("null pointer")
    test_language(0)


# ---- faults: undefined behaviour, only with sanitize -----------------------------------------------------------------
UNDEFINED = """
extern "C" __global__ void undefined(const float* x, float* out, int at) {
  float registers[4] = {x[0], x[1], x[2], x[3]};
  volatile int shift = 30 + at;
  out[0] = registers[at] + float(1 << shift);
  out[1] = reinterpret_cast<const float2*>(x + at)->x;
}
"""


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_undefined_behaviour_is_a_fault_when_asked_for(at: int) -> None:
    x, out = np.ones(8, np.float32), np.zeros(2, np.float32)
    kernel = EmulatedKernel(UNDEFINED, "undefined", sanitize=True)
    if at == 0:
        return kernel.launch((1,), 32, [x, out, np.int32(at)])
    with pytest.raises(EmulatorError, match="undefined behaviour"):
        kernel.launch((1,), 32, [x, out, np.int32(at)])
    return EmulatedKernel(UNDEFINED, "undefined").launch((1,), 32, [x, out, np.int32(at)])


def test_registers_that_were_never_written_show_when_asked_for() -> None:
    source = """extern "C" __global__ void unset(float* out, int n) {
  float registers[8];
  for (int i = 0; i < n; ++i) registers[i] = 1.f;
  for (int i = 0; i < 8; ++i) out[i] = registers[i];
}"""
    out = np.zeros(8, np.float32)
    EmulatedKernel(source, "unset", sanitize=True).launch((1,), 32, [out, np.int32(6)])
    np.testing.assert_array_equal(out < -1e38, np.arange(8) >= 6)


# ---- faults: divergence, deadlock ------------------------------------------------------------------------------------
cuda("""
extern "C" __global__ void diverge(int how, float* out) {
  float d[4] = {};
  u32 a[4] = {}, b[2] = {};
  const bool first_half = threadIdx.x % 32 < 16;
  auto multiply = [&] {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  };
  if (how == 0) { if (first_half) multiply(); else __syncwarp(); }
  if (how == 1) { if (first_half) multiply(); }
  if (how == 2) { if (threadIdx.x < 32) return; __syncthreads(); }
  if (how == 3) { if (threadIdx.x < 64) __syncthreads(); else asm volatile("bar.sync 3, 128;" ::: "memory"); }
  if (how == 4) { if (first_half) __syncthreads(); else __syncwarp(); }
  if (how == 5) asm volatile("bar.sync 3, 100;" ::: "memory");
  if (how == 6) out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.f, 1);
  out[threadIdx.x] = d[0];
}
""")
DIVERGENCE = {
    "half a warp multiplies, half synchronises": (0, ["divergent warp: ", "mma.m16n8k16.f16", "__syncwarp"]),
    "half a warp multiplies": (1, ["deadlock", "threads 0-15 wait: warp-wide mma.m16n8k16.f16, exited threads 16 17"]),
    "a warp has left before __syncthreads": (2, ["threads have exited"]),
    "two warps wait at another barrier": (
        3,
        ["threads 0-63 wait: bar.sync 0, 64 of 128", "threads 64-127 wait: bar.sync 3, 64 of 128 threads have arrived"],
    ),
    "half a warp is at __syncthreads": (4, ["divergent warp", "__syncthreads", "__syncwarp"]),
    "a barrier of 100 threads": (5, ["thread count 100 is not a multiple of 32"]),
    "a shuffle of half a warp": (6, ["partial mask 0xffff is not modelled"]),
}


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("name", DIVERGENCE)
def test_divergence_and_deadlock(name: str, seed: int) -> None:
    how, parts = DIVERGENCE[name]
    message = fault("diverge", np.int32(how), np.zeros(128, np.float32), threads=128, seed=seed)
    for part in parts:
        assert part in message


# ---- blocks that run at once -----------------------------------------------------------------------------------------
HAND_OVER = """
typedef unsigned int u32;
struct HandOverParams { u32* turn; float* order; int fault; };
extern "C" __global__ void hand_over(const __grid_constant__ HandOverParams p) {  // the last block is the first to go
  const u32 mine = gridDim.x - 1 - blockIdx.x;
  if (threadIdx.x == 0) {
    u32 now;
    do {
      __nanosleep(20);
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(p.turn) : "memory");
    } while (now != mine);
    p.order[mine] = blockIdx.x;
    if (p.fault == int(blockIdx.x)) p.order[gridDim.x] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p.turn), "r"(mine + 1) : "memory");
}
"""


def hand_over(blocks: int, seed: int, residents: int, wrong_block: int = -1) -> tuple[list[float], int]:
    kernel = EmulatedKernel(HAND_OVER, "hand_over")
    with GuardedArena() as arena:
        turn, order = arena.zeros(1, np.uint32, "turn"), arena.empty(blocks, np.float32, "order")
        record = np.array([(turn.ctypes.data, order.ctypes.data, wrong_block, 0)], "u8,u8,i4,i4").tobytes()
        kernel.launch((blocks,), 64, record, seed=seed, residents=residents)
    return order.tolist(), kernel.switches()


@pytest.mark.parametrize("seed", SEEDS)
def test_resident_blocks_can_wait_for_each_other(seed: int) -> None:
    assert hand_over(4, seed, residents=4)[0] == [3, 2, 1, 0]
    assert hand_over(4, seed, residents=16)[0] == [3, 2, 1, 0], "more than there are blocks"


@pytest.mark.parametrize("residents", [1, 3])
def test_a_block_that_waits_for_one_that_cannot_start_is_in_a_deadlock(residents: int) -> None:
    with pytest.raises(EmulatorError, match=r"deadlock") as found:
        hand_over(4, 0, residents)
    assert "threads 0 wait: nanosleep, again and again\n    at <stdin>:9" in str(found.value)
    assert "threads 32-63 wait: bar.sync 0" in str(found.value)


def test_a_seed_repeats_the_schedule_of_resident_blocks() -> None:
    switches = [hand_over(5, seed, residents=5)[1] for seed in (1, 2, 1)]
    assert switches[0] == switches[2] != switches[1]


def test_a_fault_of_a_resident_block_is_told() -> None:
    with pytest.raises(EmulatorError, match=r"\[block 1,0,0, thread 0\].*'order' .* outside it\n  at <stdin>:13"):
        hand_over(4, 3, residents=4, wrong_block=1)
    assert hand_over(4, 3, residents=4)[0] == [3, 2, 1, 0], "the next launch is a whole one"


def test_too_many_residents_are_refused() -> None:
    with pytest.raises(EmulatorError, match="more than 16 resident blocks"):
        hand_over(4, 0, residents=17)


# ---- bugs that only some schedules show ------------------------------------------------------------------------------
PIPELINE = """
typedef unsigned int u32;
struct PipelineParams { const float* x; float* out; int blocks; };
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
extern "C" __global__ void pipeline(const __grid_constant__ PipelineParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* stage = reinterpret_cast<float*>(memory);
  auto load = [&](int block) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address(stage + block % 2 * 128 + threadIdx.x)), "l"(p.x + block * 128 + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  load(0);
  float sum = 0;
  for (int block = 0; block < p.blocks; ++block) {
    if (block + 1 < p.blocks) load(block + 1);
    else asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();  // the block has arrived
    for (int i = 0; i < 4; ++i) sum += stage[block % 2 * 128 + (threadIdx.x + 32 * i + 1) % 128];
    __syncthreads();  // the block is no longer read
  }
  p.out[threadIdx.x] = sum;
}
"""
PIPELINE_MUTANTS = [
    Mutant(
        "pipeline",
        "the copy is not waited for",
        'asm volatile("cp.async.wait_group 1;" ::: "memory");',
        'asm volatile("cp.async.wait_group 2;" ::: "memory");',
    ),
    Mutant("pipeline", "no wait at all", '    asm volatile("cp.async.wait_group 1;" ::: "memory");\n', ""),
    Mutant("pipeline", "no barrier after the copy", "__syncthreads();  // the block has arrived", ""),
    Mutant("pipeline", "no barrier after the last read", "__syncthreads();  // the block is no longer read", ""),
    Mutant("pipeline", "the other stage is read", "sum += stage[block % 2", "sum += stage[(block + 1) % 2"),
]


def run_pipeline(source: str, seed: int) -> None:
    with GuardedArena() as arena:
        x = arena.constant(integers(5, 4, 32, seed=7).astype(np.float32), "x")
        out = arena.empty(128, np.float32, "out")
        record = np.array([(x.ctypes.data, out.ctypes.data, 5, 0)], "u8,u8,i4,i4")
        EmulatedKernel(source, "pipeline").launch((1,), 128, record.tobytes(), 1024, seed)
    np.testing.assert_array_equal(out.reshape(4, 32), np.broadcast_to(np.roll(x.sum(axis=(0, 1)), -1), (4, 32)))


@pytest.mark.parametrize("seed", SEEDS)
def test_pipeline(seed: int) -> None:
    run_pipeline(PIPELINE, seed)


@pytest.mark.parametrize("mutant", PIPELINE_MUTANTS, ids=lambda m: m.description.replace(" ", "-"))
def test_pipeline_mutants(mutant: Mutant) -> None:
    findings = examine(mutant, PIPELINE, run_pipeline)
    assert findings.noticed, findings


cuda("""
extern "C" __global__ void neighbours(int step, float* out) {
  __shared__ float value[32];
  value[threadIdx.x] = float(threadIdx.x);
  out[threadIdx.x] = value[(threadIdx.x + step) & 31];  // no __syncwarp between the write and the read
}
extern "C" __global__ void unwaited(const float* x, float* out) {
  extern __shared__ __align__(16) unsigned char memory[];
  if (threadIdx.x > 0) return;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address_of(memory)), "l"(x) : "memory");
  float y;
  if (x[1] > 0)
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(y) : "r"(address_of(memory)) : "memory");
  out[0] = y;
}
extern "C" __global__ void uninitialised(float* out) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float variable[32];
  out[threadIdx.x] = reinterpret_cast<float*>(memory)[threadIdx.x];
  out[32 + threadIdx.x] = variable[threadIdx.x];
  variable[threadIdx.x] = reinterpret_cast<float*>(memory)[threadIdx.x] = 1.f;
}
""")


@pytest.mark.parametrize("step", [-1, 1])
def test_lanes_run_in_different_orders(step: int) -> None:
    seen = []
    for seed in SEEDS:
        out = np.zeros(32, np.float32)
        launch("neighbours", np.int32(step), out, seed=seed)
        seen.append(np.isnan(out[1:31]).any())
    assert any(seen)


def test_a_read_of_a_copy_in_flight_is_a_race() -> None:
    out = np.zeros(1, np.float32)
    assert "race: ld.shared at shared offset 0" in fault("unwaited", np.ones(2, np.float32), out, shared=16)
    assert "ends without waiting for its cp.async" in fault("unwaited", np.zeros(2, np.float32), out, shared=16)


def test_shared_memory_is_poison_in_every_block() -> None:
    out = np.zeros(64, np.float32)
    launch("uninitialised", out, shared=128, blocks=3)
    assert np.isnan(out).all()


def test_a_seed_repeats_its_schedule() -> None:
    kernel = EmulatedKernel(PIPELINE, "pipeline")
    switches = []
    for seed in (3, 5, 3):
        run_pipeline(PIPELINE, seed)
        switches.append(kernel.switches())
    assert switches[0] == switches[2] != switches[1]


# ---- building, launching ---------------------------------------------------------------------------------------------
def test_an_unknown_instruction_is_named() -> None:
    source = 'extern "C" __global__ void k(unsigned* x) { asm volatile("dp4a.u32.u32 %0, %0, %0, %0;" : "+r"(x[0])); }'
    with pytest.raises(EmulatorError, match=r"PTX instruction dp4a\.u32\.u32 is not modelled"):
        EmulatedKernel(source, "k")


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ('"=r"(x[0]) : "l"(y)', "size of an output"),
        ('"=l"(x[0]) : "r"(x)', "input is larger"),
        ('"=f"(x[0]) : "l"(y)', "kind differs"),
        ('"=q"(x[0]) : "l"(y)', 'constraint "q" is not modelled'),
    ],
)
def test_operands_must_fit_their_constraints(operands: str, message: str) -> None:
    source = f'extern "C" __global__ void k(unsigned long long* x, int y) {{ asm volatile("mov.u64 %0, %1;" : {operands}); }}'
    with pytest.raises(EmulatorError, match=message):
        EmulatedKernel(source, "k")


def test_a_compile_error_names_the_file() -> None:
    with pytest.raises(EmulatorError, match=r"kernels/k\.cu:7:.*undeclared_name"):
        EmulatedKernel('#line 7 "kernels/k.cu"\nextern "C" __global__ void k(int x) { undeclared_name = x; }', "k")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 64}, "__launch_bounds__"),
        ({"threads": 24}, "multiple of 32"),
        ({"shared_bytes": 300_000}, "shared memory"),
        ({"params": b"1234"}, r"takes parameters of \[8, 4\] bytes, not \[4\]"),
    ],
)
def test_launches_that_are_refused(options: dict[str, object], message: str) -> None:
    source = 'extern "C" __global__ void __launch_bounds__(32) k(float* x, int n) { x[0] = float(n); }'
    kernel = EmulatedKernel(source, "k")
    given = {"grid": (1,), "threads": 32, "params": [np.zeros(1, np.float32), np.int32(1)]}
    kernel.launch(**given)
    with pytest.raises(EmulatorError, match=message):
        kernel.launch(**{**given, **options})
    with pytest.raises(EmulatorError, match="function missing"):
        EmulatedKernel(source, "missing")


def test_opcodes_lose_only_their_hints() -> None:
    assert function_name("ld.global.nc.L1::no_allocate.L2::128B.v4.f32") == "ld_global<emu::ptx::f32, 4>"
    assert (
        function_name("ld.volatile.global.u32")
        == function_name("ld.relaxed.gpu.global.u32")
        == "ld_global<emu::ptx::u32, 1>"
    )
    assert function_name("red.release.gpu.global.add.v2.f32") == "red_global<emu::ptx::f32, 2, emu::ptx::Add>"
    assert function_name("cp.async.cg.shared::cta.global.L2::64B") == "cp_async_cg_shared_global"
    assert function_name("ex2.approx.ftz.f32") == "ex2_approx_ftz_f32"


def test_mutate_insists_on_its_place() -> None:
    assert mutate("a b a", "b", "c") == "a c a"
    assert mutate("a b a", "a", "c", count=2) == "c b c"
    for old, count in (("a", 1), ("d", 1), ("b", 2)):
        with pytest.raises(ValueError, match="occurrence"):
            mutate("a b a", old, "c", count)


def test_an_equivalent_mutant_is_not_noticed() -> None:
    findings = examine(
        Mutant("pipeline", "nothing changes", "float sum = 0;", "float sum = 0.f;"), PIPELINE, run_pipeline
    )
    assert (findings.noticed, findings.marks) == (False, "......")


def test_processes_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_objects()
    monkeypatch.setenv("CUFLASH_EMULATOR_CACHE", str(tmp_path))
    source = 'extern \\"C\\" __global__ void k(float* x) { x[threadIdx.x] = 1.f; }'
    code = f'from tests.emulator import EmulatedKernel; import numpy as np; x = np.zeros(32, "f4"); EmulatedKernel("{source}", "k").launch((1,), 32, [x]); assert x.all()'
    root = Path(__file__).resolve().parent.parent
    for compiled in runtime_objects():
        shutil.copy(compiled, tmp_path)
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=root) for _ in range(2)]
    assert [p.wait() for p in processes] == [0, 0]
    assert not list(tmp_path.glob("*.partial"))
    assert len(list(tmp_path.glob("kernel-*.so"))) == 1


def test_the_readme_example_runs() -> None:
    text = (Path(__file__).parent / "emulator" / "README.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    names: dict[str, np.ndarray] = {}
    exec(example, names)
    np.testing.assert_array_equal(names["out"], 2 * names["x"])
    with pytest.raises(EmulatorError, match="byte offset 400 of array 'x' of 400 bytes, outside it"):
        exec(mutate(example, "i < p.n", "i <= p.n"), {})
