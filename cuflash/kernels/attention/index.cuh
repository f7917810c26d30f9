// Where a block stands: batch entry and head, ranges of positions, offsets into arrays of any strides.
//
// Invariants: positions are 32-bit (the host refuses longer sequences), every offset into memory is 64-bit.
#pragma once

struct Range {  // half-open interval of positions
  int begin, end;
};

// The batch entry and head that a block of threads works on.
struct Place {
  int batch[kBatchAxes];
  int head;       // of the queries
  int head_k;     // of the keys and values that this head shares with its group
  int key_count;  // keys that exist for this batch entry: seq_k, or its own length

  __device__ __forceinline__ i64 batch_offset(const View& view) const {
    i64 at = 0;
#pragma unroll
    for (int axis = 0; axis < kBatchAxes; ++axis) at += batch[axis] * view.batch[axis];
    return at;
  }
  __device__ __forceinline__ i64 offset(const View& view) const { return batch_offset(view) + head * view.head; }
  __device__ __forceinline__ i64 key_offset(const View& view) const { return batch_offset(view) + head_k * view.head; }

  __device__ __forceinline__ void set_batch(const Params& p, int index) {
#pragma unroll
    for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
      const int size = p.batch_sizes[axis];
      batch[axis] = size == 1 ? 0 : index % size;
      if (size != 1) index /= size;
    }
  }
  __device__ __forceinline__ void set_head(const Params& p, int index) {
    head = index;
    head_k = index / p.group;
  }
};

// Memory of one (batch entry, head), as rows and columns.
template <class T> struct Matrix {
  T* data;
  i64 row, column;  // strides in elements

  __device__ __forceinline__ T* at(i64 r, i64 c) const { return data + r * row + c * column; }
};
template <class T> __device__ __forceinline__ Matrix<T> matrix(const View& view, i64 offset) {
  return {static_cast<T*>(view.data) + offset, view.row, view.column};
}

__device__ __forceinline__ int tiles_of(int length, int tile) { return (length + tile - 1) / tile; }
// Tiles that hold some of the positions.
template <int kTile> __device__ __forceinline__ Range tiles_over(Range positions) {
  return {positions.begin / kTile, tiles_of(positions.end, kTile)};
}
