// Rows of a matrix in global memory -> a padded tile in shared memory, missing rows and columns zero-filled.
//
// The pitch of a tile is its width plus 16 bytes: an odd number of 16-byte chunks, so that the eight rows of an ldmatrix
// block fall into different banks for every width, and all addresses are one base plus constants.
// Aligned matrices (16-byte rows, column stride 1) come by cp.async from sm_80 on; others element by element.
#pragma once
#include "hw/ptx.cuh"

template <int kRows, int kColumns, class Element> struct SharedTile {
  static constexpr int kPitch = kColumns + 16 / sizeof(Element);
  alignas(16) Element data[kRows * kPitch];

  __device__ __forceinline__ Element* at(int row, int column) { return data + row * kPitch + column; }
};

// The same tile in columns of 16 bits: pairs of smaller elements.
template <class Tile> struct Pairs {
  Tile& tile;
  __device__ __forceinline__ void* at(int row, int column) const { return tile.at(row, 2 * column); }
};
template <class Tile> struct PitchedPairs : Pairs<Tile> { static constexpr int kPitch = Tile::kPitch / 2; };
template <int kRows, int kColumns>
__device__ __forceinline__ PitchedPairs<SharedTile<kRows, kColumns, E4m3>> in_pairs(
    SharedTile<kRows, kColumns, E4m3>& tile) {
  return {{tile}};
}
template <int kRows, int kColumns, class Element>
__device__ __forceinline__ SharedTile<kRows, kColumns, Element>& in_pairs(SharedTile<kRows, kColumns, Element>& tile) {
  return tile;
}

// The first `present` elements of a 16-byte chunk, zeros behind them; with none, `from` is not read.
template <class Element> __device__ __forceinline__ void copy_chunk(Element* to, const Element* from, int present) {
#if __CUDA_ARCH__ >= 800
  cp_async_16(shared_address(to), from, present * int(sizeof(Element)));
#else
  constexpr int kChunk = 16 / sizeof(Element);
  uint4 chunk = make_uint4(0, 0, 0, 0);
  if (present == kChunk) {
    chunk = *reinterpret_cast<const uint4*>(from);
  } else {
    Element* parts = reinterpret_cast<Element*>(&chunk);
#  pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (i < present) parts[i] = from[i];
  }
  *reinterpret_cast<uint4*>(to) = chunk;
#endif
}

// Rows [first, first + kRows) of `from`; those outside `valid` and the columns from `columns` on read as zero.  Where the compiler
// `kKnows` that a thread's number is not negative, it knows that its column lies in the row, and sizes are constants.
template <int kThreads, bool kAligned, bool kKnows = false, int kRows, int kColumns, class Element, class Source,
          class Rows>
__device__ __forceinline__ void copy_tile(SharedTile<kRows, kColumns, Element>& to, const Source& from, int first,
                                          Rows valid, int columns) {
  constexpr int kChunk = 16 / sizeof(Element);
  if constexpr (kAligned) {
    // A power of two of threads per row, so that each thread keeps its column and walks down the rows.
    constexpr int kLanes = power_of_two_from(kColumns / kChunk);
    constexpr int kStep = kThreads / kLanes;
    static_assert(kThreads % kLanes == 0, "a row has more chunks than the block has threads");
    const int thread = recomputed(threadIdx.x);
    const int lane_row = kKnows ? int(u32(thread) / kLanes) : thread / kLanes;
    const int column = (kKnows ? int(u32(thread) % kLanes) : thread % kLanes) * kChunk;
    const int present = min(max(columns - column, 0), kChunk);
    if (kLanes * kChunk != kColumns && column >= kColumns) return;
    int at = first + lane_row;
    const Element* source = from.data + at * from.row + column;
    Element* target = to.at(lane_row, column);
    if (first >= valid.begin && first + kRows <= valid.end) {
#pragma unroll
      for (int row = 0; row < kRows; row += kStep) {
        if (kRows % kStep != 0 && row + lane_row >= kRows) break;
        copy_chunk(target + row * to.kPitch, source, present);
        source += kStep * from.row;
      }
      return;
    }
#pragma unroll
    for (int row = 0; row < kRows; row += kStep) {
      if (kRows % kStep != 0 && row + lane_row >= kRows) break;
      copy_chunk(target + row * to.kPitch, source, at >= valid.begin && at < valid.end ? present : 0);
      at += kStep;
      source += kStep * from.row;
    }
  } else {
    for (int index = int(threadIdx.x); index < kRows * kColumns; index += kThreads) {
      const int row = index / kColumns, column = index % kColumns, at = first + row;
      Element x = {};
      if (at >= valid.begin && at < valid.end && column < columns) x = *from.at(at, column);
      *to.at(row, column) = x;
    }
  }
}

// The other way: kColumns columns of the tile into rows [first, first + kRows) of `to`, those inside `valid` and the first
// `columns` columns; `vectors` tells that rows of `to` start at multiples of 16 bytes and have column stride 1.
template <int kThreads, int kColumns, int kRows, int kTileColumns, class Element, class Target, class Rows>
__device__ __forceinline__ void store_tile(SharedTile<kRows, kTileColumns, Element>& from, const Target& to, int first,
                                           Rows valid, int columns, bool vectors) {
  constexpr int kChunk = 16 / sizeof(Element);
  constexpr int kLanes = power_of_two_from(kColumns / kChunk);
  constexpr int kStep = kThreads / kLanes;
  const int lane_row = int(threadIdx.x) / kLanes, column = int(threadIdx.x) % kLanes * kChunk;
  if (column >= kColumns || column >= columns) return;
  Element* target = to.at(first + lane_row, column);
#pragma unroll 4
  for (int row = lane_row; row < kRows; row += kStep) {
    const int at = first + row;
    if (at >= valid.end) return;
    const Element* source = from.at(row, column);
    if (vectors && column + kChunk <= columns) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if (column + i < columns) target[i * to.column] = source[i];
    }
    target += kStep * to.row;
  }
}

// A contiguous array of kLength items whose address is a multiple of 16 bytes, as is its size.
template <int kThreads, bool kLoops = false, class Item, int kLength> __device__ __forceinline__ void copy_line(
    Item (&to)[kLength], const Item* from) {
  constexpr int kPieces = kLength * int(sizeof(Item)) / 16;
  static_assert(kLength * sizeof(Item) % 16 == 0, "whole 16-byte pieces only");
  const auto copy = [&](int i) {
    copy_chunk(reinterpret_cast<float*>(to) + 4 * i, reinterpret_cast<const float*>(from) + 4 * i, 4);
  };
  if constexpr (kPieces <= kThreads && !kLoops) {  // fewer instructions, but more registers
    if (int(threadIdx.x) < kPieces) copy(int(threadIdx.x));
  } else {
    for (int i = int(threadIdx.x); i < kPieces; i += kThreads) copy(i);
  }
}
