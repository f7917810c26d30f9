// The CUDA language on the host: qualifiers, built-in variables, vector types, warp functions, atomics, arithmetic.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include "numbers.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __builtin_assume(condition)
#define __builtin_assume_aligned(pointer, ...) (pointer)

// ---- vector types, aligned as on the device -------------------------------------------------------------------------
#define EMU_VECTOR_TYPES(element, name, alignment2, alignment4)                        \
  struct name##1 { element x; };                                                       \
  struct alignas(alignment2) name##2 { element x, y; };                                \
  struct name##3 { element x, y, z; };                                                 \
  struct alignas(alignment4) name##4 { element x, y, z, w; };                          \
  inline name##1 make_##name##1(element x) { return {x}; }                             \
  inline name##2 make_##name##2(element x, element y) { return {x, y}; }               \
  inline name##3 make_##name##3(element x, element y, element z) { return {x, y, z}; } \
  inline name##4 make_##name##4(element x, element y, element z, element w) { return {x, y, z, w}; }
EMU_VECTOR_TYPES(signed char, char, 2, 4)
EMU_VECTOR_TYPES(unsigned char, uchar, 2, 4)
EMU_VECTOR_TYPES(short, short, 4, 8)
EMU_VECTOR_TYPES(unsigned short, ushort, 4, 8)
EMU_VECTOR_TYPES(int, int, 8, 16)
EMU_VECTOR_TYPES(unsigned, uint, 8, 16)
EMU_VECTOR_TYPES(float, float, 8, 16)
EMU_VECTOR_TYPES(long long, longlong, 16, 16)
EMU_VECTOR_TYPES(unsigned long long, ulonglong, 16, 16)
EMU_VECTOR_TYPES(double, double, 16, 16)
#undef EMU_VECTOR_TYPES
struct dim3 : emu::Dim3 {
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : emu::Dim3{a, b, c} {}
};

#define threadIdx (emu::thread_index)
#define blockIdx (emu::block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)
constexpr int warpSize = 32;

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned z = 0;
  for (int i = 0; i < 4; ++i) z |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return z;
}

// ---- synchronisation ------------------------------------------------------------------------------------------------
inline void __syncthreads() { emu::block_barrier(); }
inline int __syncthreads_count(int predicate) { return int(emu::block_barrier_count(predicate != 0)); }
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(predicate == 0) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { emu::sync_warp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emu::sleep(); }
[[noreturn]] inline void __trap() { emu::fail("trap"); }
inline long long clock64() { return (long long)emu::switches; }  // a clock that only ever advances

// ---- warp functions: the full mask only -----------------------------------------------------------------------------
template <class T>
inline T emu_shuffle(emu::Shuffle kind, unsigned mask, T value, unsigned operand, int width) {
  static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
  emu::u64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = emu::shuffle(kind, mask, bits, operand, unsigned(width));
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T> inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
  return emu_shuffle(emu::Shuffle::Index, mask, v, unsigned(lane), width);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  return emu_shuffle(emu::Shuffle::Xor, mask, v, unsigned(bits), width);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T v, unsigned n, int width = 32) {
  return emu_shuffle(emu::Shuffle::Down, mask, v, n, width);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T v, unsigned n, int width = 32) {
  return emu_shuffle(emu::Shuffle::Up, mask, v, n, width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return emu::ballot(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == ~0u; }

// ---- atomics: fibers only switch where they block, so plain code is atomic ------------------------------------------
template <class T, class V> inline T atomicAdd(T* p, V v) {
  const T old = *p;
  *p = T(old + v);
  return old;
}
template <class T, class V> inline T atomicSub(T* p, V v) {
  const T old = *p;
  *p = T(old - v);
  return old;
}
template <class T, class V> inline T atomicMax(T* p, V v) {
  const T old = *p;
  if (T(v) > old) *p = T(v);
  return old;
}
template <class T, class V> inline T atomicMin(T* p, V v) {
  const T old = *p;
  if (T(v) < old) *p = T(v);
  return old;
}
template <class T, class V> inline T atomicOr(T* p, V v) {
  const T old = *p;
  *p = T(old | v);
  return old;
}
template <class T, class V> inline T atomicAnd(T* p, V v) {
  const T old = *p;
  *p = T(old & v);
  return old;
}
template <class T, class V> inline T atomicExch(T* p, V v) {
  const T old = *p;
  *p = T(v);
  return old;
}
template <class T, class V> inline T atomicCAS(T* p, V expected, V v) {
  const T old = *p;
  if (old == T(expected)) *p = T(v);
  return old;
}
inline unsigned atomicInc(unsigned* p, unsigned last) {
  const unsigned old = *p;
  *p = old >= last ? 0 : old + 1;
  return old;
}

// ---- loads and stores with a cache hint -----------------------------------------------------------------------------
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
#define __cvta_generic_to_shared(p) (size_t(emu::shared_address(p)))
#define __cvta_generic_to_global(p) (size_t(p))

// ---- bit patterns and conversions -----------------------------------------------------------------------------------
inline float __int_as_float(int x) { return emu::bits_of<float>(x); }
inline float __uint_as_float(unsigned x) { return emu::bits_of<float>(x); }
inline int __float_as_int(float x) { return emu::bits_of<int>(x); }
inline unsigned __float_as_uint(float x) { return emu::bits_of<unsigned>(x); }
inline double __longlong_as_double(long long x) { return emu::bits_of<double>(x); }
inline long long __double_as_longlong(double x) { return emu::bits_of<long long>(x); }
inline int __double2hiint(double x) { return int(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return int(__double_as_longlong(x)); }
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double((long long)((unsigned long long)unsigned(high) << 32 | unsigned(low)));
}
inline float __double2float_rn(double x) { return float(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline int __float2int_rz(float x) { return int(x); }

// ---- integers -------------------------------------------------------------------------------------------------------
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}

// ---- floating point: max and min return the operand that is not NaN, as on the device -------------------------------
template <class A, class B>
constexpr std::common_type_t<A, B> max(A x, B y) {
  using T = std::common_type_t<A, B>;
  const T a = T(x), b = T(y);
  return a < b || a != a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A x, B y) {
  using T = std::common_type_t<A, B>;
  const T a = T(x), b = T(y);
  return b < a || a != a ? b : a;
}
using std::abs;
using std::ceil;
using std::copysign;
using std::cos;
using std::erf;
using std::exp;
using std::exp2;
using std::expm1;
using std::fabs;
using std::floor;
using std::fma;
using std::fmax;
using std::fmin;
using std::fmod;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::ldexp;
using std::log;
using std::log1p;
using std::log2;
using std::pow;
using std::rint;
using std::signbit;
using std::sin;
using std::sqrt;
using std::tanh;
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float rsqrt(float x) { return 1.f / sqrtf(x); }
inline double rsqrt(double x) { return 1. / std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
