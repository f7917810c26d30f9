// Numbers: fixed-width integers, 16-bit elements as raw bits, conversions and the few functions of them that kernels use.
//
// No system header is included anywhere: NVRTC ships none, and 16-bit types are bits plus PTX conversions.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

__device__ constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

// A number that 32 bits hold; the compiler does not see that it had 64, and multiplies 32.
__device__ __forceinline__ int low_word(i64 x) {
  int word;
  asm("cvt.u32.u64 %0, %1;" : "=r"(word) : "l"(x));
  return word;
}

// The same value, but what follows from it is computed anew here instead of being kept in registers from before.
__device__ __forceinline__ int recomputed(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class T> __device__ __forceinline__ T* recomputed(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

struct Half { u16 bits; };      // IEEE binary16
struct Bfloat16 { u16 bits; };  // the upper half of a binary32
struct E4m3 { u8 bits; };       // OCP's 8-bit float without infinities: 4 bits of exponent, 3 of fraction

// ---- elements to the type of computation ---------------------------------------------------------------------------
__device__ __forceinline__ float to_real(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_real(Bfloat16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float to_real(float x) { return x; }
__device__ __forceinline__ double to_real(double x) { return x; }

// ---- and back, to nearest even -------------------------------------------------------------------------------------
template <class Element> struct Rounded;
template <> struct Rounded<Half> {
  static __device__ __forceinline__ Half of(float x) {
    Half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};
template <> struct Rounded<Bfloat16> {
  static __device__ __forceinline__ Bfloat16 of(float x) {
#if __CUDA_ARCH__ >= 800
    Bfloat16 y;
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.f), "f"(x));
    y.bits = u16(pair);
    return y;
#else
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {u16((bits >> 16) | 0x40u)};  // NaN stays NaN
    return {u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
#endif
  }
};
template <> struct Rounded<float> {
  static __device__ __forceinline__ float of(float x) { return x; }
};
template <> struct Rounded<double> {
  static __device__ __forceinline__ double of(double x) { return x; }
};

// Two rounded elements in one register, `low` in the lower half.
template <class Element> __device__ __forceinline__ u32 packed(float low, float high);
template <> __device__ __forceinline__ u32 packed<Half>(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return u32(Rounded<Half>::of(low).bits) | u32(Rounded<Half>::of(high).bits) << 16;
#endif
}
template <> __device__ __forceinline__ u32 packed<Bfloat16>(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return u32(Rounded<Bfloat16>::of(low).bits) | u32(Rounded<Bfloat16>::of(high).bits) << 16;
#endif
}

#if __CUDA_ARCH__ >= 890
// Four rounded elements in one register, the first in its lowest byte; what is beyond 448, the largest one, becomes that.
__device__ __forceinline__ u32 packed_e4m3(float a, float b, float c, float d) {
  u32 four;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}
#endif

// ---- functions -----------------------------------------------------------------------------------------------------
template <class Real> __device__ __forceinline__ Real infinity();
template <> __device__ __forceinline__ float infinity<float>() { return __int_as_float(0x7f800000); }
template <> __device__ __forceinline__ double infinity<double>() { return __longlong_as_double(0x7ff0000000000000ll); }

// 2^x; the float form has a relative error of 2^-22 and flushes denormal results (PTX ISA, "ex2").
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }
__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float log2_of(float x) { return log2f(x); }
__device__ __forceinline__ double log2_of(double x) { return log2(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float max_of(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double max_of(double x, double y) { return fmax(x, y); }
// The smaller one, or NaN if x is NaN (fminf would drop it).
__device__ __forceinline__ float min_or_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#else
  return x > y ? y : x;
#endif
}
__device__ __forceinline__ double min_or_nan(double x, double y) { return x > y ? y : x; }
__device__ __forceinline__ float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fma_of(double a, double b, double c) { return fma(a, b, c); }

// x · 2^n for |n| up to 252, as two factors: it overflows or vanishes only where the result does.
struct PowerOfTwo {
  float first, second;

  __device__ __forceinline__ explicit PowerOfTwo(int n)
      : first(__int_as_float((n / 2 + 127) << 23)), second(__int_as_float((n - n / 2 + 127) << 23)) {}
  __device__ __forceinline__ float times(float x) const { return x * first * second; }
  __device__ __forceinline__ float times_plus(float x, float y) const { return fma_of(x * first, second, y); }
};

// ---- arrays in registers -------------------------------------------------------------------------------------------
template <int kSize, class T> __device__ __forceinline__ void clear(T (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] = T(0);
}
