// 8-bit operands B whose contraction runs down their columns, laid out as tensor cores take them: column by column.
//
// The contraction is cut into steps of 32 rows, these into halves of 16: a half holds the 16 bytes of its rows for one column
// after the other.  Within them stand rows 2t, 2t + 1, 2t + 8, 2t + 9 for t = 0 .. 3: of an accumulator whose columns are those
// rows, lane t of four holds just these four elements, so that rounded to 8 bits they are its register of operand A.
// Whole tiles are contiguous in memory, and neither copies nor products of them meet bank conflicts.
// Source: PTX ISA, "Matrix fragments for mma.m16n8k32", "wgmma: Register fragments", "Canonical layouts" without swizzle.
#pragma once
#include "hw/copy.cuh"

constexpr int kStepRows = 32, kHalfRows = 16;

template <int kDepth, int kTileColumns> struct StepTile {
  static constexpr int kRows = kDepth, kColumns = kTileColumns;
  static constexpr u32 kColumnBytes = kHalfRows, kHalfBytes = kColumns * kColumnBytes, kStepBytes = 2 * kHalfBytes;
  static constexpr u32 kBytes = kDepth / kStepRows * kStepBytes;
  static_assert(kDepth % kStepRows == 0, "whole steps only");
  alignas(128) unsigned char data[kBytes];

  __device__ __forceinline__ u32 address() const { return shared_address(data); }
};

// The same for ldmatrix, which takes 16 bytes for a row: columns, and pairs of rows in the order of the bytes.
template <class Tile> struct PairsDownColumns {
  Tile& tile;
  __device__ __forceinline__ void* at(int column, int pair) const {
    return tile.data + pair / 8 * Tile::kHalfBytes + column * Tile::kColumnBytes;
  }
};

// Row, of the 16 of a half, that a byte of a column stands for.
__device__ __forceinline__ constexpr int row_of_byte(int byte) { return byte / 4 * 2 + byte % 2 + byte % 4 / 2 * 8; }

// Four bytes of four rows -> those of four columns.
__device__ __forceinline__ void transpose_bytes(u32 (&x)[4]) {
  const u32 a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
  const u32 c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, b, 0x5410);
  x[1] = __byte_perm(a, b, 0x7632);
  x[2] = __byte_perm(c, d, 0x5410);
  x[3] = __byte_perm(c, d, 0x7632);
}

// Of an accumulator whose columns are the rows of a half, those of one of its rows, from `c` in the first of two blocks on.
template <class Element> __device__ __forceinline__ u32 packed_half(const float* c);
#if __CUDA_ARCH__ >= 890
template <> __device__ __forceinline__ u32 packed_half<E4m3>(const float* c) {
  return packed_e4m3(c[0], c[1], c[4], c[5]);
}
#endif

// Columns of a whole tile out of those of a matrix of kWidth, from `from` on.
template <int kThreads, int kWidth, int kDepth, int kColumns>
__device__ __forceinline__ void copy_steps(StepTile<kDepth, kColumns>& to, const E4m3* from) {
  constexpr int kPieces = kDepth / kHalfRows * kColumns;
  E4m3* const data = reinterpret_cast<E4m3*>(to.data);
#pragma unroll
  for (int first = 0; first < kPieces; first += kThreads) {
    const int index = first + int(threadIdx.x);
    if (kPieces % kThreads != 0 && index >= kPieces) break;
    const int place = kWidth == kColumns ? index : index / kColumns * kWidth + index % kColumns;
    copy_chunk(data + index * kHalfRows, from + place * kHalfRows, kHalfRows);
  }
}
// Rows of a tile that lie outside `valid` become zeros, written by kThreads threads; the caller fences and synchronises.
template <int kThreads, int kDepth, int kColumns, class Rows>
__device__ __forceinline__ void clear_rows_outside(StepTile<kDepth, kColumns>& tile, Rows valid, int thread) {
#pragma unroll 1
  for (int index = thread; index < kDepth / kHalfRows * kColumns; index += kThreads) {
    const int first = index / kColumns * kHalfRows;
    if (first >= valid.begin && first + kHalfRows <= valid.end) continue;
    uint4* const at = reinterpret_cast<uint4*>(tile.data + index * kHalfRows);
    u32 kept[4] = {};
#pragma unroll
    for (int byte = 0; byte < kHalfRows; ++byte) {
      const int row = first + row_of_byte(byte);
      if (row < valid.end && row >= valid.begin) kept[byte / 4] |= 0xffu << byte % 4 * 8;
    }
    const uint4 x = *at;
    st_shared_v4(tile.address() + index * kHalfRows, x.x & kept[0], x.y & kept[1], x.z & kept[2], x.w & kept[3]);
  }
}
