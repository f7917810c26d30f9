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

// Columns c to c + 3 of kBatch rows, `step` elements apart, of which `count` exist and the others are zeros: all loads are under
// way together.  With more than one row, their columns are those of a 16-byte piece.
template <bool kAligned, int kBatch>
__device__ __forceinline__ void load_fours(Four (&x)[kBatch], const float* row, i64 step, int count, i64 column_stride,
                                           int c, int columns) {
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    if (j >= count)
      x[j] = Four{};
    else if constexpr (kBatch > 1)
      x[j] = load_four<true>(row + j * step, 1, c, c + 4);
    else
      x[j] = load_four<kAligned>(row, column_stride, c, columns);
  }
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

// The largest over groups of kLanes lanes (a power of two); all 32 lanes take part.
template <int kLanes> __device__ __forceinline__ u32 max_over_lanes(u32 x) {
#pragma unroll
  for (int bit = kLanes / 2; bit > 0; bit /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, bit));
  return x;
}
