// Rows of global memory, from anywhere or side by side -> a padded tile in shared memory, by one warp.
#pragma once
#include "hw/copy.cuh"

// Lane r holds the address of row r, null for a row of zeros, and its column stride; columns from `columns` on read as zero.
template <bool kAligned, int kRows, int kColumns, class Element>
__device__ __forceinline__ void copy_rows(SharedTile<kRows, kColumns, Element>& to, const Element* from, int columns,
                                          i64 column_stride, StreamPolicy policy) {
  static_assert(kRows <= 32, "a lane has one address");
  const int lane = int(threadIdx.x) % 32;
  const auto address_of = [&](int row) {
    return reinterpret_cast<const Element*>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(from), row));
  };
  if constexpr (kAligned) {
    constexpr int kChunk = 16 / sizeof(Element);
    constexpr int kLanes = power_of_two_from(kColumns / kChunk), kStep = 32 / kLanes;
    static_assert(kLanes <= 32 && kRows % kStep == 0, "whole rows at a time");
    const int lane_row = lane / kLanes, column = lane % kLanes * kChunk;
    const int present = min(max(columns - column, 0), kChunk) * int(sizeof(Element));
    const u32 target = shared_address(to.at(lane_row, column));
#pragma unroll
    for (int row = 0; row < kRows; row += kStep) {
      const Element* source = address_of(row + lane_row);
      if (kLanes * kChunk != kColumns && column >= kColumns) continue;
      cp_async_16(target + row * to.kPitch * int(sizeof(Element)), source + column, source ? present : 0, policy);
    }
  } else {
    static_assert(kRows * kColumns % 32 == 0, "all lanes take part in every exchange");
#pragma unroll 1
    for (int index = lane; index < kRows * kColumns; index += 32) {
      const int row = index / kColumns, column = index % kColumns;
      const Element* source = address_of(row);
      const i64 stride = __shfl_sync(0xffffffffu, column_stride, row);
      Element x = {};
      if (source && column < columns) x = source[column * stride];
      *to.at(row, column) = x;
    }
  }
}

// Rows of a group: at least 8, and as many as a warp copies at once.
template <int kColumns, class Element> __device__ constexpr int group_rows() {
  return 32 / power_of_two_from(kColumns * int(sizeof(Element)) / 16) > 8
             ? 32 / power_of_two_from(kColumns * int(sizeof(Element)) / 16)
             : 8;
}

// The same where rows lie at equal distances from the first of each group on, or the whole group is zeros: a third of the
// instructions.
template <int kRows, int kColumns, class Element>
__device__ __forceinline__ void copy_groups(SharedTile<kRows, kColumns, Element>& to, const Element* from,
                                            i64 row_stride, int columns, StreamPolicy policy) {
  constexpr int kChunk = 16 / sizeof(Element), kGroup = group_rows<kColumns, Element>();
  constexpr int kLanes = power_of_two_from(kColumns / kChunk), kStep = 32 / kLanes;
  static_assert(kLanes <= 32 && kRows % kGroup == 0 && kGroup % kStep == 0, "whole groups");
  const int lane = int(threadIdx.x) % 32, lane_row = lane / kLanes, column = lane % kLanes * kChunk;
  const int present = min(max(columns - column, 0), kChunk) * int(sizeof(Element));
  const u32 target = shared_address(to.at(lane_row, column));
  const i64 offset = lane_row * row_stride + column;
#pragma unroll
  for (int group = 0; group < kRows; group += kGroup) {
    const u64 first = __shfl_sync(0xffffffffu, reinterpret_cast<u64>(from), group);
    const int bytes = first ? present : 0;
    const Element* source = reinterpret_cast<const Element*>(first) + offset;
    if (kLanes * kChunk != kColumns && column >= kColumns) continue;
#pragma unroll
    for (int row = 0; row < kGroup; row += kStep) {
      cp_async_16(target + (group + row) * to.kPitch * int(sizeof(Element)), source, bytes, policy);
      source += kStep * row_stride;
    }
  }
}
