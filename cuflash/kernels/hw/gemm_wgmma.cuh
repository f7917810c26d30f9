// Products of warpgroups (128 threads) on Hopper's tensor cores, asynchronous: accumulator (+)= A · B, 64 rows of A.
//
// Operands lie in panels (hw/copy_tma.cuh); A may also lie in registers, where the accumulator map of two neighbouring 64 x 8
// blocks is the A map of one 16-wide step, so that an accumulator becomes an operand in place.  Warp w of the group holds rows
// 16w .. 16w + 15, within which the map is that of mma.m16n8 (hw/fragment.cuh).  A step is 32 bytes wide: of 8-bit elements
// two lie where one of 16 bits would, and depths count such pairs.
// Invariants: between a product's issue and its wait nobody may touch the registers it uses; `pin` keeps the compiler from
// moving accesses across those points.
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions", "Shared memory matrix descriptor".
#pragma once
#include "hw/copy_tma.cuh"
#include "hw/fragment.cuh"
#include "wgmma_instructions.cuh"  // generated: Wgmma<columns>

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;

// ---- descriptors: address, stride between panels (which counts where the contraction runs down the columns), 128-byte swizzle
__device__ __forceinline__ u64 descriptor(u32 address, u32 panel_bytes) {
  constexpr u64 kEightRows = 8 * kPanelRowBytes, kSwizzle128 = 1ull << 62;
  return u64((address & 0x3ffff) >> 4) | u64(panel_bytes >> 4) << 16 | (kEightRows >> 4) << 32 | kSwizzle128;
}
constexpr int kStepDepth = 16;  // of one instruction's contraction

// An operand in shared memory, from one of its rows (a multiple of 8) on.
template <class Tile> __device__ __forceinline__ u64 operand(const Tile& tile, int row = 0) {
  return descriptor(tile.address() + row * kPanelRowBytes, Tile::kPanelBytes);
}
// The same of a tile of steps, which is not swizzled: halves of a step, then eight of its columns, lie so far apart.
template <int kDepth, int kColumns> __device__ __forceinline__ u64 operand(const StepTile<kDepth, kColumns>& tile) {
  typedef StepTile<kDepth, kColumns> Tile;
  return u64((tile.address() & 0x3ffff) >> 4) | u64(Tile::kHalfBytes >> 4) << 16 |
         u64(8 * Tile::kColumnBytes >> 4) << 32;
}
// Distance in descriptor units to a step of the contraction along the rows ...
template <class Tile> __device__ constexpr u64 along_rows(int step) {
  constexpr int kSteps = kPanelColumns / kStepDepth;
  return u64(step / kSteps * (Tile::kPanelBytes >> 4) + step % kSteps * (kStepDepth * 2 >> 4));
}
// ... and down the columns.
__device__ constexpr u64 down_columns(int step) { return u64(step * (kStepDepth * kPanelRowBytes >> 4)); }

// ---- registers ----------------------------------------------------------------------------------------------------------
template <int kSize> __device__ __forceinline__ void pin(float (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kSize> __device__ __forceinline__ void add(float (&to)[kSize], const float (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) to[i] += x[i];
}
// A of every step of a contraction, packed from an accumulator.
template <int kSteps> struct RegisterOperand {
  u32 step[kSteps][4];

  template <class Element, int kSize> __device__ __forceinline__ void pack(const float (&x)[kSize]) {
    static_assert(kSize * sizeof(Element) == 16 * kSteps, "an accumulator of 32 bytes of columns per step");
    if constexpr (sizeof(Element) == 1) {
      // Columns of two blocks in the order of hw/steps.cuh.
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) step[i][j] = packed_half<Element>(x + 16 * i + j / 2 * 8 + j % 2 * 2);
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) step[i][j] = packed<Element>(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
    }
  }
};
template <int kSteps> __device__ __forceinline__ void pin(RegisterOperand<kSteps>& x) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(x.step[i][j])::"memory");
}

// ---- products; the caller fences before the first and commits after the last of a group --------------------------------------
// Both operands with the contraction along their rows: c = A Bᵀ.  Descriptors of the steps are sums of one that is kept and a
// constant; kept themselves they would overflow the uniform registers, and come back one by one in front of the products.
template <int kDepth, class TileA, class TileB, int kSize>
__device__ __forceinline__ void wgmma_rows_rows(float (&c)[kSize], u64 a, u64 b) {
  u32 low_a = u32(a), low_b = u32(b);
  asm volatile("" : "+r"(low_a), "+r"(low_b));
#pragma unroll
  for (int i = 0; i < kDepth / kStepDepth; ++i)
    Wgmma<2 * kSize>::template multiply<0, 0>(c, a >> 32 << 32 | (low_a + u32(along_rows<TileA>(i))),
                                              b >> 32 << 32 | (low_b + u32(along_rows<TileB>(i))), i != 0);
}
// A in registers, B with the contraction down its columns: c += A B.
template <int kSteps, int kSize>
__device__ __forceinline__ void wgmma_registers_columns(float (&c)[kSize], const RegisterOperand<kSteps>& a, u64 b) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) Wgmma<2 * kSize>::template multiply<1>(c, a.step[i], b + down_columns(i), 1);
}
// A in registers, B a tile of steps: c += A B, or where kFresh c = A B.
template <bool kFresh, class Tile, int kSteps, int kSize>
__device__ __forceinline__ void wgmma_registers_steps(float (&c)[kSize], const RegisterOperand<kSteps>& a, u64 b) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    Wgmma<2 * kSize>::template multiply<0>(c, a.step[i], b + i * (Tile::kStepBytes >> 4), !kFresh || i != 0);
}
// A with the contraction along its rows, B down its columns: c += A B.
template <int kDepth, class TileA, int kSize>
__device__ __forceinline__ void wgmma_rows_columns(float (&c)[kSize], u64 a, u64 b) {
#pragma unroll
  for (int i = 0; i < kDepth / kStepDepth; ++i)
    Wgmma<2 * kSize>::template multiply<0, 1>(c, a + along_rows<TileA>(i), b + down_columns(i), 1);
}
// Both operands with the contraction down their columns: c = Aᵀ B.
template <int kDepth, int kSize> __device__ __forceinline__ void wgmma_columns_columns(float (&c)[kSize], u64 a,
                                                                                       u64 b) {
#pragma unroll
  for (int i = 0; i < kDepth / kStepDepth; ++i)
    Wgmma<2 * kSize>::template multiply<1, 1>(c, a + down_columns(i), b + down_columns(i), i != 0);
}

// ---- accumulators into tiles ---------------------------------------------------------------------------------------------------
// This warp's 16 rows, rounded, each element through `value(i)`; `row` is the first of them in the tile.
template <class Element, int kSize, class Tile, class Value>
__device__ __forceinline__ void store_accumulator(Tile& to, int row, Value value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kSize; j += 8)
    stmatrix_x4(to.chunk(row + lane % 16, 2 * j + lane / 16 * 8), packed<Element>(value(j), value(j + 1)),
                packed<Element>(value(j + 2), value(j + 3)), packed<Element>(value(j + 4), value(j + 5)),
                packed<Element>(value(j + 6), value(j + 7)));
}
// The same of an operand that was packed from an accumulator.
template <int kSteps, class Tile>
__device__ __forceinline__ void store_operand(Tile& to, int row, const RegisterOperand<kSteps>& x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    stmatrix_x4(to.chunk(row + lane % 16, 16 * i + lane / 16 * 8), x.step[i][0], x.step[i][1], x.step[i][2],
                x.step[i][3]);
}

// The same from a column on, where no registers are left to keep addresses in: they differ by constants from one that is computed
// anew.
template <int kColumn, int kSteps, class Tile>
__device__ __forceinline__ void store_operand_anew(Tile& to, int row, const RegisterOperand<kSteps>& x) {
  static_assert(kColumn + 16 * kSteps <= kPanelColumns, "in one panel");
  const int lane = recomputed(int(threadIdx.x)) % 32;
  const u32 own = u32(recomputed(int(to.chunk(row + lane % 16, lane / 16 * 8))));
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    stmatrix_x4(own ^ u32((kColumn + 16 * i) * 2), x.step[i][0], x.step[i][1], x.step[i][2], x.step[i][3]);
}

// The same of an operand whose rows are the tile's columns, from `column` on.
template <int kSteps, class Tile>
__device__ __forceinline__ void store_operand_columns(Tile& to, int column, const RegisterOperand<kSteps>& x) {
  const int lane = threadIdx.x % 32;
  const u32 own = to.chunk(lane / 16 * 8 + lane % 8, column + lane / 8 % 2 * 8);
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    stmatrix_x4_trans(own + 16 * i * kPanelRowBytes, x.step[i][0], x.step[i][1], x.step[i][2], x.step[i][3]);
}

// ---- tiles into the order of accumulators -------------------------------------------------------------------------------------
// What a tile of 16-bit elements has at this warp's rows, from `row` on: `take(i, pair)` is given elements i and i + 1.  Where
// accumulators are transposed, their rows are columns of the tile.
template <class Fragment, class Tile, class Take>
__device__ __forceinline__ void for_each_pair(const Tile& from, int row, Take take) {
  const int lane = threadIdx.x % 32;
  const u32 own = Fragment::kTransposed ? from.chunk(lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8)
                                        : from.chunk(row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int j = 0; j < Fragment::kSize; j += 8) {
    u32 words[4];
    const u32 panel = 2 * j / Tile::kWidth * Tile::kPanelBytes, within = 2 * j % Tile::kWidth * 2;
    if constexpr (Fragment::kTransposed)
      ldmatrix_x4_trans(words, own + 2 * j * kPanelRowBytes);
    else
      ldmatrix_x4(words, (own ^ within) + panel);
#pragma unroll
    for (int word = 0; word < 4; ++word) take(j + 2 * word, words[word]);
  }
}
template <class Fragment, int kColumns, class Take>
__device__ __forceinline__ void for_each_pair(const RowTile<kColumns>& from, int, Take take) {
  static_assert(!Fragment::kTransposed, "a number for each column");
  const u16* const own = from.data + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < Fragment::kSize; j += 4) {
    const u32 pair = *reinterpret_cast<const u32*>(own + 2 * j);
    take(j, pair);
    take(j + 2, pair);
  }
}

// ---- warpgroups taking turns at issuing products, by named barriers kFirst .. kFirst + kGroups - 1 -----------------------------
template <int kFirst, int kGroups> struct Turns {
  int group;

  // The last group hands the first turn to group 0.
  __device__ __forceinline__ void open() const {
    if (group == kGroups - 1) pass();
  }
  __device__ __forceinline__ void take() const { bar_sync(kFirst + group, 2 * kWarpgroupThreads); }
  __device__ __forceinline__ void pass() const {
    bar_arrive(kFirst + (group + 1 == kGroups ? 0 : group + 1), 2 * kWarpgroupThreads);
  }
};
