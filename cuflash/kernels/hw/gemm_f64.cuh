// Products of float64 tiles in shared memory by tensor cores (sm_80 and later).
//
// Source: PTX ISA, "Matrix fragments for mma.m8n8k4" and "mma.m16n8k8" with .f64: of A, lane l holds row l/4 (and l/4 + 8) of
// columns l%4 and l%4 + 4; of B, column l/4 of the same rows; accumulators lie as in MmaFragment.  The order of a contraction is
// free: here l%4 + 4i stands for position 2(l%4) + i, in A and B alike.  So two neighbours in memory serve both i, and an
// accumulator is an A operand as it stands.
#pragma once
#include "hw/fragment.cuh"
#include "hw/fragment_simt.cuh"
#include "hw/gemm_simt.cuh"

// d += a · b of 16 x 8 with a depth of 8: a[2i + half], b[i].
__device__ __forceinline__ void mma_f64(double* d, const double (&a)[4], const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#elif __CUDA_ARCH__ >= 800
#  pragma unroll
  for (int i = 0; i < 2; ++i) {
#  pragma unroll
    for (int half = 0; half < 2; ++half)
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                   : "+d"(d[2 * half]), "+d"(d[2 * half + 1])
                   : "d"(a[2 * i + half]), "d"(b[i]));
  }
#endif
}

// The same contract as RowProducts (hw/gemm_simt.cuh); here s is passed on in registers.
template <int kWarpRows, int kDepth, int kMiddle, int kWidth> struct RowProductsF64 {
  static_assert(kWarpRows % 16 == 0 && kDepth % 8 == 0 && kMiddle % 8 == 0 && kWidth % 8 == 0, "whole products");
  typedef MmaFragment<kWarpRows / 16, kMiddle / 8> First;
  typedef MmaFragment<kWarpRows / 16, kWidth / 8> Second;

  static constexpr int kRows = kWarpRows;
  // Rows read as pairs along the depth, 2 rows of 4 lanes at a time; and c column by column, 4 pairs of rows at a time.
  static constexpr int kPitchA = pair_pitch(kDepth), kPitchB = kPitchA, kPitchC = kWidth + 2 + (8 - kWidth % 8) % 8;
  template <int kWarps> struct Middles {};

  First first;
  Second second;

  template <class Shared> __device__ __forceinline__ RowProductsF64(int warp, Shared&)
      : first(warp * kRows, 0), second(warp * kRows, 0) {}

  template <class A, class B>
  __device__ __forceinline__ void multiply_first(double (&s)[First::kSize], const A& a, const B& b) const {
    clear(s);
    const double* const left = a.data + first.first_row * kPitchA + first.first_column;
    const double* const right = b.data + int(threadIdx.x) % 32 / 4 * kPitchB + first.first_column;
#pragma unroll 2
    for (int k = 0; k < kDepth; k += 8) {
      double x[First::kRowBlocks][4];
#pragma unroll
      for (int block = 0; block < First::kRowBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto pair = Vector<double>::load(left + (16 * block + 8 * half) * kPitchA + k);
          x[block][half] = pair[0];
          x[block][2 + half] = pair[1];
        }
      }
#pragma unroll
      for (int column = 0; column < First::kColumnBlocks; ++column) {
        const auto pair = Vector<double>::load(right + 8 * column * kPitchB + k);
        const double y[2] = {pair[0], pair[1]};
#pragma unroll
        for (int block = 0; block < First::kRowBlocks; ++block) mma_f64(s + First::block(block, column), x[block], y);
      }
    }
  }

  template <class C>
  __device__ __forceinline__ void multiply_second(double (&o)[Second::kSize], const double (&s)[First::kSize],
                                                  const C& c) const {
    const double* const right = c.data + second.first_column * kPitchC + int(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int k = 0; k < kMiddle; k += 8) {
      double x[First::kRowBlocks][4];
#pragma unroll
      for (int block = 0; block < First::kRowBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[block][i] = s[First::block(block, k / 8) + 2 * (i % 2) + i / 2];
      }
#pragma unroll
      for (int column = 0; column < Second::kColumnBlocks; ++column) {
        const double y[2] = {right[k * kPitchC + 8 * column], right[(k + 1) * kPitchC + 8 * column]};
#pragma unroll
        for (int block = 0; block < First::kRowBlocks; ++block) mma_f64(o + Second::block(block, column), x[block], y);
      }
    }
  }
};
