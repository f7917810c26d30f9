// Where a block of a bias or of its gradient lies in its tensor map.
#pragma once
#include "attention/index.cuh"
#include "hw/ptx_sm90.cuh"

// Whether entries of the batch have one each.
__device__ __forceinline__ bool is_of_entry(const View& view) {
  bool found = false;
#pragma unroll
  for (int axis = 0; axis < kBatchAxes; ++axis) found |= view.batch[axis] != 0;
  return found;
}
// Axes along which it is broadcast have one element in the map.
__device__ __forceinline__ BoxCorner bias_corner(const View& view, int batch, int head, int q, int k) {
  return {k, view.row ? q : 0, view.head ? head : 0, is_of_entry(view) ? batch : 0};
}
