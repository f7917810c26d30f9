// Blocks of a bias or of its gradient: where they lie in a tensor map, and how one in shared memory is added.
#pragma once
#include "attention/index.cuh"
#include "hw/gemm_wgmma.cuh"

// Axes along which it is broadcast have one element in the map.
__device__ __forceinline__ BoxCorner bias_corner(const View& view, int batch, int head, int q, int k) {
  return {k, view.row ? q : 0, view.head ? head : 0, is_of_entry(view) ? batch : 0};
}
// In place: products -> scores.
template <class Fragment, class Tile>
__device__ __forceinline__ void add_block(Real (&s)[Fragment::kSize], const Fragment& f, Real scale, const Tile& tile) {
  for_each_pair<Fragment>(tile, f.first_row / 16 * 16, [&](int i, u32 pair) {
    s[i] = s[i] * scale + to_real(OutElement{u16(pair)});
    s[i + 1] = s[i + 1] * scale + to_real(OutElement{u16(pair >> 16)});
  });
}
