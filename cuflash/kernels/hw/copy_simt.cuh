// Tiles from global to shared memory, row-major, without a change of type.
//
// On sm_80 and later the copies are asynchronous (PTX ISA, "cp.async"): they have happened for the whole block after
// `wait_for_copies` and a block barrier.  On sm_75 the same calls copy at once.
#pragma once

// kBytes to shared memory, of which the first `valid` are read and the others become 0.
template <int kBytes> __device__ __forceinline__ void copy_bytes(void* to, const void* from, int valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes of cp.async");
#if __CUDA_ARCH__ >= 800
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(to));
  const u64 global = reinterpret_cast<u64>(from);
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
  else if constexpr (kBytes == 8)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
#else
  // Whole words only: valid is a multiple of 4, as elements are.
  const u32* words = static_cast<const u32*>(from);
  if constexpr (kBytes == 16) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (valid == 16) {
      x = *static_cast<const uint4*>(from);
    } else {
      if (valid > 0) x.x = words[0];
      if (valid > 4) x.y = words[1];
      if (valid > 8) x.z = words[2];
    }
    *static_cast<uint4*>(to) = x;
  } else if constexpr (kBytes == 8) {
    uint2 x = make_uint2(0, 0);
    if (valid) x = *static_cast<const uint2*>(from);
    *static_cast<uint2*>(to) = x;
  } else {
    *static_cast<u32*>(to) = valid ? words[0] : 0;
  }
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// A row-major tile in shared memory.
template <int kRows_, int kColumns_, int kPitch_, class T> struct alignas(16) PitchedTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kPitch = kPitch_;
  static_assert(kPitch * sizeof(T) % 16 == 0 && kPitch >= kColumns, "rows start at a multiple of 16 bytes");
  T data[kRows * kPitch];
};

// A strided matrix, of which rows [begin, end) and so many columns are read.
template <class T> struct CopySource {
  const T* data;
  i64 row, column;  // strides
  int begin, end, columns;
};

// Rows of the source from `first` on, by all threads of a block; what is not to be read becomes 0.  kVectors: the column stride is
// 1, data and row stride are multiples of 16 bytes.
template <int kThreads, bool kVectors, class Tile, class T>
__device__ __forceinline__ void copy_tile(Tile& to, const CopySource<T>& from, int first) {
  constexpr int kElements = kVectors ? 16 / int(sizeof(T)) : 1;
  constexpr int kPerRow = Tile::kColumns / kElements, kPieces = Tile::kRows * kPerRow;
  static_assert(Tile::kColumns % kElements == 0, "whole vectors");
  constexpr int kLanes = power_of_two_from(kPerRow);
  if constexpr (kVectors && kLanes <= kThreads) {
    // A power of two of threads per row: each keeps its column and walks down the rows.
    constexpr int kStep = kThreads / kLanes;
    const int lane_row = int(threadIdx.x) / kLanes, c = int(threadIdx.x) % kLanes * kElements;
    if (kLanes != kPerRow && c >= Tile::kColumns) return;
    const int left = from.columns - c, present = left <= 0 ? 0 : left < kElements ? left : kElements;
    int row = first + lane_row;
    const T* source = from.data + row * from.row + c;
    T* target = to.data + lane_row * Tile::kPitch + c;
#pragma unroll
    for (int r = 0; r < Tile::kRows; r += kStep) {
      if (Tile::kRows % kStep && r + lane_row >= Tile::kRows) break;
      const int valid = row >= from.begin && row < from.end ? present : 0;
      copy_bytes<16>(target + r * Tile::kPitch, source, valid * int(sizeof(T)));
      row += kStep;
      source += kStep * from.row;
    }
  } else {
#pragma unroll 4
    for (int step = 0; step < (kPieces + kThreads - 1) / kThreads; ++step) {
      const int piece = step * kThreads + int(threadIdx.x);
      if (kPieces % kThreads && piece >= kPieces) break;
      const int r = piece / kPerRow, c = piece % kPerRow * kElements, row = first + r;
      const int left = row >= from.begin && row < from.end ? from.columns - c : 0;
      const int valid = left <= 0 ? 0 : left < kElements ? left : kElements;
      const T* source = valid ? from.data + row * from.row + c * from.column : from.data;
      copy_bytes<kElements* int(sizeof(T))>(to.data + r * Tile::kPitch + c, source, valid * int(sizeof(T)));
    }
  }
}
