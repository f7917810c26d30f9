// Rows of a few numbers in one warp, without tensor cores: a column of a product for each lane, and columns of an output.
#pragma once
#include "hw/reduce.cuh"

// kRows rows of 32 columns: lane l holds column l of each.
template <int kRows> struct LaneFragment {
  static constexpr int kSize = kRows, kSlots = kRows;

  static __device__ __forceinline__ constexpr int slot(int i) { return i; }
  __device__ __forceinline__ int row(int slot) const { return slot; }
  __device__ __forceinline__ int column(int) const { return int(threadIdx.x) % 32; }
  __device__ __forceinline__ bool leads_row() const { return threadIdx.x % 32 == 0; }

  static __device__ __forceinline__ bool any(bool x) { return __any_sync(0xffffffffu, x); }
  template <class T> static __device__ __forceinline__ T row_max(T x) {
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) x = max_of(x, __shfl_xor_sync(0xffffffffu, x, bit));
    return x;
  }
  template <class T> static __device__ __forceinline__ T row_sum(T x) { return sum_over_lanes<32>(x); }
};

// kRows rows of 32 · kColumns columns: lane l holds columns l, l + 32 ... of each.
template <int kRows, int kColumns> struct LaneColumns {
  static constexpr int kSize = kRows * kColumns, kSlots = kRows;

  static __device__ __forceinline__ constexpr int slot(int i) { return i / kColumns; }
  __device__ __forceinline__ int row(int slot) const { return slot; }
  __device__ __forceinline__ int column(int i) const { return int(threadIdx.x) % 32 + i % kColumns * 32; }
};

// Products of this lane's row in global memory with rows of a tile in shared memory; both end with `columns`.
template <bool kAligned, int kRows, int kColumns, class Real, class Element>
__device__ __forceinline__ void multiply_rows(Real (&c)[kRows], const Real (&tile)[kRows][kColumns], const Element* row,
                                              int columns, i64 column_stride) {
  constexpr int kChunk = 16 / int(sizeof(Element));
  static_assert(kColumns % kChunk == 0, "whole chunks");
#pragma unroll 2
  for (int first = 0; first < kColumns; first += kChunk) {
    Chunk<Element> x = {};
    if (kAligned && first + kChunk <= columns) {
      x = *reinterpret_cast<const Chunk<Element>*>(row + first);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if (first + i < columns) x.at[i] = row[(first + i) * column_stride];
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const Real factor = to_real(x.at[i]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) c[r] = fma_of(tile[r][first + i], factor, c[r]);
    }
  }
}

// Adds a row in global memory, times a factor for each row of the output.
template <int kRows, int kColumns, class Real, class Element>
__device__ __forceinline__ void add_row(Real (&o)[kRows * kColumns], const Real (&factor)[kRows], const Element* row,
                                        int columns, i64 column_stride) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int column = int(threadIdx.x) % 32 + 32 * j;
    if (column >= columns) break;
    const Real x = to_real(row[column * column_stride]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) o[r * kColumns + j] = fma_of(factor[r], x, o[r * kColumns + j]);
  }
}
