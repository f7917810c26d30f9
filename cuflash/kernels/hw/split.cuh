// float32 as pairs of float16: four neighbours of a row in global memory at a time.
#pragma once
#include "hw/reduce.cuh"

// x = high + low / kLowScale: so the low part keeps its 11 bits where x itself is small.
constexpr float kLowScale = 2048.f;

struct Four { float at[4]; };

// Columns c to c + 3 of a row that ends behind `columns`; zeros from there on.
template <bool kAligned>
__device__ __forceinline__ Four load_four(const float* row, i64 column_stride, int c, int columns) {
  if (kAligned && c + 4 <= columns) {
    const auto x = *reinterpret_cast<const Chunk<float>*>(row + c);
    return {x.at[0], x.at[1], x.at[2], x.at[3]};
  }
  Four x;
#pragma unroll
  for (int i = 0; i < 4; ++i) x.at[i] = c + i < columns ? row[(c + i) * column_stride] : 0.f;
  return x;
}

// What is left of x when `high` is taken away, times the low planes' scale; exact but for the last rounding.
__device__ __forceinline__ float low_part(float x, float high) { return (x - high) * kLowScale; }

// Two numbers as a pair of high parts and, with two planes, one of low parts.
template <int kPlanes>
__device__ __forceinline__ void split_pair(u32 (&to)[kPlanes], float first, float second) {
  to[0] = packed<Half>(first, second);
  if constexpr (kPlanes > 1)
    to[1] = packed<Half>(low_part(first, to_real(Half{u16(to[0])})), low_part(second, to_real(Half{u16(to[0] >> 16)})));
}

// Four numbers into places that are multiples of 8 bytes.
template <int kPlanes>
__device__ __forceinline__ void store_split(Half* const (&to)[kPlanes], const Four& x) {
  u32 first[kPlanes], second[kPlanes];
  split_pair<kPlanes>(first, x.at[0], x.at[1]);
  split_pair<kPlanes>(second, x.at[2], x.at[3]);
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
    *reinterpret_cast<uint2*>(to[plane]) = make_uint2(first[plane], second[plane]);
}

// Maxima over groups of 2 · kBit lanes (a power of two) of each of kCount numbers, shared out: a lane is left with those of some of
// the numbers, and all of a group with those of all; `take` is given them.  Half of the numbers go to the other lane at each step,
// so that there are about as many shuffles as numbers.
template <int kBit, int kCount, int kSize, class Take>
__device__ __forceinline__ void share_maxima(u32 (&x)[kSize], Take take) {
  if constexpr (kBit == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) take(x[i]);
  } else if constexpr (kCount % 2 == 0) {
    const bool upper = threadIdx.x & kBit;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const u32 kept = upper ? x[i + kCount / 2] : x[i], given = upper ? x[i] : x[i + kCount / 2];
      x[i] = max(kept, __shfl_xor_sync(0xffffffffu, given, kBit));
    }
    share_maxima<kBit / 2, kCount / 2>(x, take);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = max(x[i], __shfl_xor_sync(0xffffffffu, x[i], kBit));
    share_maxima<kBit / 2, kCount>(x, take);
  }
}
