// 8-bit operands B whose contraction runs down their columns, laid out as tensor cores take them: column by column.
//
// The contraction is cut into steps of 32 rows, these into halves of 16: a half holds the 16 bytes of its rows for one column
// after the other.  Within them stand rows 2t, 2t + 1, 2t + 8, 2t + 9 for t = 0 .. 3: of an accumulator whose columns are those
// rows, lane t of four holds just these four elements, so that rounded to 8 bits they are its register of operand A.
// Whole tiles are contiguous in memory, and neither copies nor products of them meet bank conflicts.
// Source: PTX ISA, "Matrix fragments for mma.m16n8k32", "wgmma: Register fragments", "Canonical layouts" without swizzle.
#pragma once
#include "hw/ptx.cuh"

constexpr int kStepRows = 32, kHalfRows = 16;

template <int kDepth, int kTileColumns> struct StepTile {
  static constexpr int kRows = kDepth, kColumns = kTileColumns;
  static constexpr u32 kColumnBytes = kHalfRows, kHalfBytes = kColumns * kColumnBytes, kStepBytes = 2 * kHalfBytes;
  static constexpr u32 kBytes = kDepth / kStepRows * kStepBytes;
  static_assert(kDepth % kStepRows == 0, "whole steps only");
  alignas(128) unsigned char data[kBytes];

  __device__ __forceinline__ u32 address() const { return shared_address(data); }
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
