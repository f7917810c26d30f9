// Products of split tiles that both lie in shared memory, and what a backward keeps of them.
#pragma once
#include "hw/gemm_split.cuh"

// Largest magnitude of a warp's numbers; of those that are not finite, none.
template <int kSize> __device__ __forceinline__ float largest_finite(const float (&x)[kSize]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float magnitude = fabs(x[i]);
    largest = max_of(largest, magnitude < infinity<float>() ? magnitude : 0.f);
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) largest = max_of(largest, __shfl_xor_sync(0xffffffffu, largest, bit));
  return largest;
}
// e such that 2^top <= largest · 2^e < 2^(top + 1), as far as 2^e and 2^-e are normal numbers.
__device__ __forceinline__ int exponent_for(float largest, int top) {
  return top + 127 - max(__float_as_int(largest) >> 23, top + 1);
}

// A Bᵀ or A B with both operands in shared memory: A's contraction along its rows or down its columns, B's down its columns.
// kPart columns at a time are complete and given to `use(i, x, y)`, x and y elements i and i + 1 of an accumulator of `Fragment`.  Where A of all
// steps stays in registers while it is small, so that it is loaded once for all parts.
template <int kPlanes, Along kA, int kDepth, int kPart, int kKeptA, class Fragment, bool kOneByOne = false, class TileA,
          class TileB, class Use>
__device__ __forceinline__ void split_tiles_columns(TileA (&a_tile)[kPlanes], int a_first, TileB (&b_tile)[kPlanes],
                                                    int b_column, Use use) {
  typedef MmaFragment<Fragment::kRowBlocks, kPart / 8> Part;
  static_assert(Fragment::kColumnBlocks * 8 % kPart == 0 && kPart % 16 == 0, "whole parts");
  constexpr int kSteps = kDepth / 16;
  constexpr bool kKept = Fragment::kColumnBlocks * 8 > kPart && kSteps * kPlanes * Fragment::kRowBlocks * 4 <= kKeptA;
  u32 a[kKept ? kSteps : 1][kPlanes][Fragment::kRowBlocks][4];
  const auto load = [&](u32(&to)[kPlanes][Fragment::kRowBlocks][4], int k) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
      for (int r = 0; r < Fragment::kRowBlocks; ++r) {
        if constexpr (kA == Along::kRows)
          load_a_rows(to[plane][r], a_tile[plane], a_first + 16 * r, k);
        else
          load_a_columns(to[plane][r], a_tile[plane], a_first + 16 * r, k);
      }
  };
  if constexpr (kKept) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load(a[step], 16 * step);
  }
#pragma unroll
  for (int first = 0; first < Fragment::kColumnBlocks; first += Part::kColumnBlocks) {
    float high[Part::kSize], low[Part::kSize];
    const auto multiply = [&](int step, auto is_first) {
      if constexpr (!kKept) load(a[0], 16 * step);
      multiply_split_step<kPlanes, Along::kColumns, is_first.value, Part>(high, low, a[kKept ? step : 0], b_tile,
                                                                          b_column + 8 * first, 16 * step);
    };
    multiply(0, Flag<true>{});
#pragma unroll
    for (int step = 1; step < kSteps; ++step) multiply(step, Flag<false>{});
#pragma unroll
    for (int r = 0; r < Part::kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < 4 * Part::kColumnBlocks; i += 2) {
        const int at = Part::block(r, 0) + i;
        use(Fragment::block(r, first) + i, joined_sum<kPlanes>(high[at], low[at]),
            joined_sum<kPlanes>(high[at + 1], low[at + 1]));
      }
    if constexpr (kOneByOne) __syncwarp();
  }
}

// An accumulator times a factor, split, into planes of a tile.
template <class Fragment, int kPlanes, class Tile>
__device__ __forceinline__ void store_split_fragment(Tile (&to)[kPlanes], const float (&x)[Fragment::kSize],
                                                     const Fragment& at, float factor) {
#pragma unroll
  for (int i = 0; i < Fragment::kSize; i += 2) {
    u32 pair[kPlanes];
    split_pair<kPlanes>(pair, x[i] * factor, x[i + 1] * factor);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      *reinterpret_cast<u32*>(to[plane].at(at.row(Fragment::slot(i)), at.column(i))) = pair[plane];
  }
}
