// Products of warpgroups of tiles that stand for float32 numbers as planes of float16 (hw/split.cuh).
//
// Of x · y the products low · high' and high · low' are summed first; brought to their scale, these sums are what the products
// high · high' are added to.  That is one accumulator for all three, and what tensor cores truncate of it they truncate of a
// sum of one contraction, or of so many steps of it as are asked for.  With one plane it is the product of the numbers rounded
// to float16.
//
// Source of three terms: Markidis et al., arXiv:1803.04014; of scaled low parts: Ootomo and Yokota, arXiv:2203.03341.
#pragma once
#include "hw/gemm_wgmma.cuh"
#include "hw/split.cuh"

// Operands of all planes of a tile, from one of its rows on; tiles of the same kind lie behind it.
template <int kPlanes, class Tile> struct SplitOperand {
  u64 first;

  __device__ __forceinline__ explicit SplitOperand(const Tile (&tile)[kPlanes], int row = 0)
      : first(operand(tile[0], row)) {}
  __device__ __forceinline__ u64 plane(int plane, int slot = 0) const {
    return first + (slot * kPlanes + plane) * (Tile::kBytes >> 4);
  }
};

// The same of a tile in whose panels the planes lie on top of each other: from the first plane on it is one operand with the
// columns of both, high ones first.
template <int kPlanes, class Tile> struct StackedOperand {
  u64 first;

  __device__ __forceinline__ explicit StackedOperand(const Tile& tile, int panel = 0)
      : first(operand(tile) + panel * (Tile::kPanelBytes >> 4)) {}
  __device__ __forceinline__ u64 plane(int plane, int = 0) const {
    return first + plane * (Tile::kPanelBytes / kPlanes >> 4);
  }
};

// A of every step of a contraction, packed from an accumulator and split.
template <int kPlanes, int kSteps> struct SplitRegisters {
  RegisterOperand<kSteps> plane[kPlanes];

  template <int kSize> __device__ __forceinline__ void pack(const float (&x)[kSize], float scale) {
    static_assert(kSize == 8 * kSteps, "an accumulator of 16 columns per step");
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 pair[kPlanes];
        split_pair<kPlanes>(pair, x[8 * i + 2 * j] * scale, x[8 * i + 2 * j + 1] * scale);
#pragma unroll
        for (int n = 0; n < kPlanes; ++n) plane[n].step[i][j] = pair[n];
      }
  }
};
template <int kPlanes, int kSteps> __device__ __forceinline__ void pin(SplitRegisters<kPlanes, kSteps>& x) {
#pragma unroll
  for (int n = 0; n < kPlanes; ++n) pin(x.plane[n]);
}

// From sums of low parts to what high parts are added to.
template <int kSize> __device__ __forceinline__ void low_to_high(float (&c)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) c[i] *= 1.f / kLowScale;
}

// ---- products; the caller fences before and commits behind ---------------------------------------------------------------
// c (+)= A Bᵀ, both contractions along rows.
template <bool kIsFresh, int kDepth, class TileA, class TileB, int kSize>
__device__ __forceinline__ void wgmma_plane_rows(float (&c)[kSize], u64 a, u64 b) {
  u32 low_a = u32(a), low_b = u32(b);  // as in wgmma_rows_rows
  asm volatile("" : "+r"(low_a), "+r"(low_b));
#pragma unroll
  for (int i = 0; i < kDepth / kStepDepth; ++i)
    Wgmma<2 * kSize>::template multiply<0, 0>(c, a >> 32 << 32 | (low_a + u32(along_rows<TileA>(i))),
                                              b >> 32 << 32 | (low_b + u32(along_rows<TileB>(i))), !kIsFresh || i != 0);
}
// The same of A in registers, B's contraction down its columns, and of steps of it.
template <int kSteps, int kSize>
__device__ __forceinline__ void wgmma_plane_columns(float (&c)[kSize], const RegisterOperand<kSteps>& a, u64 b,
                                                    bool is_fresh, int first, int end) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    if (i >= first && i < end)
      Wgmma<2 * kSize>::template multiply<1>(c, a.step[i], b + down_columns(i), !is_fresh || i != first);
}
// c (+)= Aᵀ B, both contractions down their columns.
template <bool kIsFresh, int kDepth, int kSize>
__device__ __forceinline__ void wgmma_plane_columns_columns(float (&c)[kSize], u64 a, u64 b) {
#pragma unroll
  for (int i = 0; i < kDepth / kStepDepth; ++i)
    Wgmma<2 * kSize>::template multiply<1, 1>(c, a + down_columns(i), b + down_columns(i), !kIsFresh || i != 0);
}

// c = the low parts of A times the high ones of B; c += the high ones of A times the low ones of B; and, when these are there
// and at their scale, c += the high ones of A Bᵀ.
template <int kDepth, int kPlanes, class TileA, class TileB, int kSize>
__device__ __forceinline__ void wgmma_low_high_rows(float (&c)[kSize], const SplitOperand<kPlanes, TileA>& a,
                                                    const SplitOperand<kPlanes, TileB>& b, int slot) {
  wgmma_plane_rows<true, kDepth, TileA, TileB>(c, a.plane(1), b.plane(0, slot));
}
template <int kDepth, int kPlanes, class TileA, class TileB, int kSize>
__device__ __forceinline__ void wgmma_high_low_rows(float (&c)[kSize], const SplitOperand<kPlanes, TileA>& a,
                                                    const SplitOperand<kPlanes, TileB>& b, int slot) {
  wgmma_plane_rows<false, kDepth, TileA, TileB>(c, a.plane(0), b.plane(1, slot));
}
template <int kDepth, int kPlanes, class TileA, class TileB, int kSize>
__device__ __forceinline__ void wgmma_high_rows(float (&c)[kSize], const SplitOperand<kPlanes, TileA>& a,
                                                const SplitOperand<kPlanes, TileB>& b, int slot) {
  wgmma_plane_rows<kPlanes == 1, kDepth, TileA, TileB>(c, a.plane(0), b.plane(0, slot));
}
// The same of A B, A in registers, the high ones in chains of steps: the first one goes on where the low parts, or with one
// plane the steps before, have ended, others begin anew.
template <int kPlanes, int kSteps, class Operand, int kSize>
__device__ __forceinline__ void wgmma_low_high_columns(float (&c)[kSize], const SplitRegisters<kPlanes, kSteps>& a,
                                                       const Operand& b, int slot) {
  wgmma_plane_columns(c, a.plane[1], b.plane(0, slot), true, 0, kSteps);
}
template <int kPlanes, int kSteps, class Operand, int kSize>
__device__ __forceinline__ void wgmma_high_low_columns(float (&c)[kSize], const SplitRegisters<kPlanes, kSteps>& a,
                                                       const Operand& b, int slot) {
  wgmma_plane_columns(c, a.plane[0], b.plane(1, slot), false, 0, kSteps);
}
template <int kPlanes, int kSteps, class Operand, int kSize>
__device__ __forceinline__ void wgmma_high_columns(float (&c)[kSize], const SplitRegisters<kPlanes, kSteps>& a,
                                                   const Operand& b, int slot, int first, int end) {
  wgmma_plane_columns(c, a.plane[0], b.plane(0, slot), first > 0, first, end);
}
