// Products of tiles that stand for float32 numbers as planes of float16, on tensor cores.
//
// x = high + low / kLowScale; of x · y the products high · high', low · high' and high · low' are summed, the last two apart,
// because they are small: tensor cores truncate each sum to 24 bits, and one that holds small terms only loses nothing that
// counts.  Every product begins a sum of its own, so that no chain of truncations is longer than one contraction.  With one
// plane it is the product of the numbers rounded to float16.
//
// Source of three terms: Markidis et al., arXiv:1803.04014; of scaled low parts and sums apart: Ootomo and Yokota,
// arXiv:2203.03341.
#pragma once
#include "hw/gemm_mma.cuh"
#include "hw/split.cuh"

template <bool kIs> struct Flag { static constexpr bool value = kIs; };

// Blocks j and j + 1 of every row of blocks.
template <bool kIsFirst, class Part>
__device__ __forceinline__ void multiply_blocks(float (&c)[Part::kSize], const u32 (&a)[Part::kRowBlocks][4],
                                                const u32 (&b)[4], int j) {
#pragma unroll
  for (int r = 0; r < Part::kRowBlocks; ++r) {
    if constexpr (kIsFirst) {
      mma_m16n8k16_first(c + Part::block(r, j), a[r], b[0], b[1]);
      mma_m16n8k16_first(c + Part::block(r, j + 1), a[r], b[2], b[3]);
    } else {
      mma_m16n8k16<Half>(c + Part::block(r, j), a[r], b[0], b[1]);
      mma_m16n8k16<Half>(c + Part::block(r, j + 1), a[r], b[2], b[3]);
    }
  }
}

// One step of the contraction for a part of the columns: A in registers, B's contraction along its rows or down its columns.
// The first one begins the sums.
template <int kPlanes, Along kB, bool kIsFirst, class Part, class TileB>
__device__ __forceinline__ void multiply_split_step(float (&high)[Part::kSize], float (&low)[Part::kSize],
                                                    const u32 (&a)[kPlanes][Part::kRowBlocks][4],
                                                    TileB (&b_tile)[kPlanes], int b_first, int k) {
#pragma unroll
  for (int j = 0; j < Part::kColumnBlocks; j += 2) {
    u32 b[kPlanes][4];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      if constexpr (kB == Along::kRows)
        load_b_rows(b[plane], b_tile[plane], b_first + 8 * j, k);
      else
        load_b_columns(b[plane], b_tile[plane], b_first + 8 * j, k);
    }
    // Instructions that wait for each other's sums lie apart.
    if constexpr (kPlanes > 1) multiply_blocks<kIsFirst, Part>(low, a[1], b[0], j);
    multiply_blocks<kIsFirst, Part>(high, a[0], b[0], j);
    if constexpr (kPlanes > 1) multiply_blocks<false, Part>(low, a[0], b[1], j);
  }
}

// The sum of a part: of the high parts, and of what `low` has.
template <int kPlanes>
__device__ __forceinline__ float joined_sum(float high, float low) {
  return kPlanes > 1 ? fmaf(low, 1.f / kLowScale, high) : high;
}

// c = A Bᵀ, both contractions along rows.  kPart columns at a time have sums of low parts beside those of the high ones.
template <int kPlanes, int kDepth, int kPart, class Fragment, int kUnroll = 2, class TileA, class TileB>
__device__ __forceinline__ void split_rows_rows(float (&c)[Fragment::kSize], TileA (&a_tile)[kPlanes], int a_row,
                                                TileB (&b_tile)[kPlanes], int b_row) {
  typedef MmaFragment<Fragment::kRowBlocks, kPart / 8> Part;
  static_assert(Fragment::kColumnBlocks * 8 % kPart == 0 && kPart % 16 == 0, "whole parts");
#pragma unroll
  for (int first = 0; first < Fragment::kColumnBlocks; first += Part::kColumnBlocks) {
    float high[Part::kSize], low[Part::kSize];
    const auto step = [&](int k, auto is_first) {
      u32 a[kPlanes][Fragment::kRowBlocks][4];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
        for (int r = 0; r < Fragment::kRowBlocks; ++r) load_a_rows(a[plane][r], a_tile[plane], a_row + 16 * r, k);
      multiply_split_step<kPlanes, Along::kRows, is_first.value, Part>(high, low, a, b_tile, b_row + 8 * first, k);
    };
    step(0, Flag<true>{});
#pragma unroll kUnroll
    for (int k = 16; k < kDepth; k += 16) step(k, Flag<false>{});
#pragma unroll
    for (int r = 0; r < Part::kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < 4 * Part::kColumnBlocks; ++i)
        c[Fragment::block(r, first) + i] = joined_sum<kPlanes>(high[Part::block(r, 0) + i], low[Part::block(r, 0) + i]);
  }
}

// A from an accumulator, split in registers.
template <int kPlanes, class Fragment> struct SplitOperandA {
  static constexpr int kSteps = Fragment::kColumnBlocks / 2;
  u32 step[kSteps][kPlanes][Fragment::kRowBlocks][4];

  __device__ __forceinline__ SplitOperandA(const float (&x)[Fragment::kSize], float scale) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int r = 0; r < Fragment::kRowBlocks; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* from = x + Fragment::block(r, 2 * k + i / 2) + i % 2 * 2;
          u32 pair[kPlanes];
          split_pair<kPlanes>(pair, from[0] * scale, from[1] * scale);
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) step[k][plane][r][i] = pair[plane];
        }
  }
};

// c += A B, A in registers, B with the contraction down its columns; kPart columns at a time are summed apart.
template <int kPlanes, int kPart, class FragmentA, class Fragment, class TileB>
__device__ __forceinline__ void split_operand_columns(float (&c)[Fragment::kSize],
                                                      const SplitOperandA<kPlanes, FragmentA>& a,
                                                      TileB (&b_tile)[kPlanes], int b_column) {
  typedef MmaFragment<Fragment::kRowBlocks, kPart / 8> Part;
  static_assert(Fragment::kColumnBlocks * 8 % kPart == 0 && kPart % 16 == 0, "whole parts");
#pragma unroll
  for (int first = 0; first < Fragment::kColumnBlocks; first += Part::kColumnBlocks) {
    float high[Part::kSize], low[Part::kSize];
    multiply_split_step<kPlanes, Along::kColumns, true, Part>(high, low, a.step[0], b_tile, b_column + 8 * first, 0);
#pragma unroll
    for (int k = 1; k < a.kSteps; ++k)
      multiply_split_step<kPlanes, Along::kColumns, false, Part>(high, low, a.step[k], b_tile, b_column + 8 * first,
                                                                 16 * k);
#pragma unroll
    for (int r = 0; r < Part::kRowBlocks; ++r)
#pragma unroll
      for (int i = 0; i < 4 * Part::kColumnBlocks; ++i)
        c[Fragment::block(r, first) + i] +=
            joined_sum<kPlanes>(high[Part::block(r, 0) + i], low[Part::block(r, 0) + i]);
  }
}
