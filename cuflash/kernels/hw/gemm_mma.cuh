// Products of warps on tensor cores: accumulator += A · B over 16-wide steps of the contraction.
//
// Operand A comes from a tile in shared memory or from an accumulator (packed in place: the accumulator map of two
// neighbouring m16n8 blocks is the A map of one k16 step); B from a tile stored either way round.  Names say how the tile
// lies in memory: `rows` means that the contraction runs along a row, `columns` that it runs down a column (ldmatrix.trans).
#pragma once
#include "hw/fragment.cuh"
#include "hw/ptx.cuh"
#include "hw/steps.cuh"

enum class Along { kRows, kColumns };
// Row and column of the 16 bytes whose address a lane gives to ldmatrix, in an operand's 16 x 16 block of a tile: of A, lanes
// 8 to 15 have the rows of c beyond 8 and lanes 16 to 31 the depth beyond 8, of B the other way round.
template <Along kAlong, bool kIsA> struct LanePlace {
  int row, column;

  __device__ __forceinline__ LanePlace() {
    constexpr bool kRowsFirst = kIsA == (kAlong == Along::kRows);
    const int lane = threadIdx.x % 32;
    row = kRowsFirst ? lane % 16 : lane / 16 * 8 + lane % 8;
    column = kRowsFirst ? lane / 16 * 8 : lane / 8 % 2 * 8;
  }
};
template <Along kAlong> __device__ __forceinline__ void load_block(u32 (&r)[4], u32 address) {
  if constexpr (kAlong == Along::kRows)
    ldmatrix_x4(r, address);
  else
    ldmatrix_x4_trans(r, address);
}
template <Along kAlong, bool kIsA, class Tile>
__device__ __forceinline__ void load_block_of(u32 (&r)[4], Tile& tile, int row, int column) {
  const LanePlace<kAlong, kIsA> at;
  load_block<kAlong>(r, shared_address(tile.at(row + at.row, column + at.column)));
}

// A, 16 rows from `row` on, step at `k`: contraction along the row.
template <class Tile> __device__ __forceinline__ void load_a_rows(u32 (&a)[4], Tile& tile, int row, int k) {
  load_block_of<Along::kRows, true>(a, tile, row, k);
}
// A, 16 rows that are columns `row` .. of the tile: contraction down the column.
template <class Tile> __device__ __forceinline__ void load_a_columns(u32 (&a)[4], Tile& tile, int row, int k) {
  load_block_of<Along::kColumns, true>(a, tile, k, row);
}
// B, 16 columns that are rows `column` .. of the tile: b[0], b[1] for the first eight, b[2], b[3] for the others.
template <class Tile> __device__ __forceinline__ void load_b_rows(u32 (&b)[4], Tile& tile, int column, int k) {
  load_block_of<Along::kRows, false>(b, tile, column, k);
}
// B, 16 columns of the tile: contraction down the column.
template <class Tile> __device__ __forceinline__ void load_b_columns(u32 (&b)[4], Tile& tile, int column, int k) {
  load_block_of<Along::kColumns, false>(b, tile, k, column);
}

// An operand of a whole product, whose first row or column (along kRows, along kColumns) is `first` of the tile and whose
// contraction begins at `start`; `load` brings 16 of its rows or columns from `block` on, the step at `k`.
template <Along kAlong, bool kIsA, class Tile> struct TileOperand {
  Tile& tile;
  int first, start;

  __device__ __forceinline__ TileOperand(Tile& tile, int first, int start = 0)
      : tile(tile), first(first), start(start) {}
  __device__ __forceinline__ void load(u32 (&r)[4], int block, int k) const {
    if constexpr (kAlong == Along::kRows)
      load_block_of<kAlong, kIsA>(r, tile, first + block, start + k);
    else
      load_block_of<kAlong, kIsA>(r, tile, start + k, first + block);
  }
};
// The same from one address, to which loads add constants.  Compilers that see how the address came about compute that of each
// load anew (NVRTC 13.0 takes two or three instructions for it).
template <Along kAlong, bool kIsA, class Tile> struct LaneAddress {
  u32 base;

  __device__ __forceinline__ LaneAddress(Tile& tile, int first, int start = 0) {
    const LanePlace<kAlong, kIsA> at;
    base = u32(recomputed(int(shared_address(kAlong == Along::kRows ? tile.at(first + at.row, start + at.column)
                                                                    : tile.at(start + at.row, first + at.column)))));
  }
  __device__ __forceinline__ void load(u32 (&r)[4], int block, int k) const {
    constexpr bool kRows = kAlong == Along::kRows;
    load_block<kAlong>(r, base + 2 * (kRows ? block * Tile::kPitch + k : k * Tile::kPitch + block));
  }
};

// Which of them a product takes.  Before sm_80 kernels copy through registers and have none left for an address.
template <bool kOneAddress, Along kAlong, bool kIsA, class Tile> struct OperandChoice {
  typedef TileOperand<kAlong, kIsA, Tile> Type;
};
#if __CUDA_ARCH__ >= 800
template <Along kAlong, bool kIsA, class Tile> struct OperandChoice<true, kAlong, kIsA, Tile> {
  typedef LaneAddress<kAlong, kIsA, Tile> Type;
};
#endif
template <bool kOneAddress, Along kAlong, bool kIsA, class Tile>
using Operand = typename OperandChoice<kOneAddress, kAlong, kIsA, Tile>::Type;

// A from an accumulator of `Fragment`: blocks (tile_row, 2·step) and (tile_row, 2·step + 1), rounded.
template <class Fragment, class Element>
__device__ __forceinline__ void pack_a(u32 (&a)[4], const float (&x)[Fragment::kSize], int tile_row, int step) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* c = x + Fragment::block(tile_row, 2 * step + half);
    a[2 * half] = packed<Element>(c[0], c[1]);
    a[2 * half + 1] = packed<Element>(c[2], c[3]);
  }
}

// A of every step of a contraction of kDepth, kept in registers.
template <int kDepth, class Fragment> struct OperandA {
  u32 step[kDepth / 16][Fragment::kRowBlocks][4];

  template <class Tile> __device__ __forceinline__ void load(Tile& tile, int row) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 16)
#pragma unroll
      for (int r = 0; r < Fragment::kRowBlocks; ++r) load_a_rows(step[k / 16][r], tile, row + 16 * r, k);
  }
};

// One step: A in registers, B's contraction along its rows or down its columns.
template <class Fragment, class Element, class OperandB>
__device__ __forceinline__ void multiply_step(float (&c)[Fragment::kSize], const u32 (&a)[Fragment::kRowBlocks][4],
                                              const OperandB& from, int k) {
#pragma unroll
  for (int j = 0; j < Fragment::kColumnBlocks; j += 2) {
    u32 b[4];
    from.load(b, 8 * j, k);
#pragma unroll
    for (int r = 0; r < Fragment::kRowBlocks; ++r) {
      mma_m16n8k16<Element>(c + Fragment::block(r, j), a[r], b[0], b[1]);
      mma_m16n8k16<Element>(c + Fragment::block(r, j + 1), a[r], b[2], b[3]);
    }
  }
}

// Both operands with the contraction along their rows: c += A Bᵀ.  Unrolled whole, the compiler loads far ahead; where
// registers are full, two steps at a time keep it from spilling for that.
template <int kDepth, class Fragment, class Element, int kUnroll = kDepth / 16, bool kOneAddress = false, class TileA,
          class TileB>
__device__ __forceinline__ void gemm_rows_rows(float (&c)[Fragment::kSize], TileA& a_tile, int a_row, TileB& b_tile,
                                               int b_row) {
  const Operand<kOneAddress, Along::kRows, true, TileA> from_a(a_tile, a_row);
  const Operand<kOneAddress, Along::kRows, false, TileB> from_b(b_tile, b_row);
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; k += 16) {
    u32 a[Fragment::kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < Fragment::kRowBlocks; ++r) from_a.load(a[r], 16 * r, k);
    multiply_step<Fragment, Element>(c, a, from_b, k);
  }
}
// The same with A in registers.
template <int kDepth, class Fragment, class Element, bool kOneAddress = false, class TileB>
__device__ __forceinline__ void gemm_operand_rows(float (&c)[Fragment::kSize], const OperandA<kDepth, Fragment>& a,
                                                  TileB& b_tile, int b_row) {
  const Operand<kOneAddress, Along::kRows, false, TileB> from_b(b_tile, b_row);
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) multiply_step<Fragment, Element>(c, a.step[k / 16], from_b, k);
}

// A from an accumulator, B with the contraction down its columns: c += A B.
template <class FragmentA, class Fragment, class Element, bool kOneAddress = false, class TileB>
__device__ __forceinline__ void gemm_registers_columns(float (&c)[Fragment::kSize], const float (&x)[FragmentA::kSize],
                                                       TileB& b_tile, int b_column, int start = 0) {
  const Operand<kOneAddress, Along::kColumns, false, TileB> from_b(b_tile, b_column, start);
#pragma unroll
  for (int step = 0; step < FragmentA::kColumnBlocks / 2; ++step) {
    u32 a[Fragment::kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < Fragment::kRowBlocks; ++r) pack_a<FragmentA, Element>(a[r], x, r, step);
    multiply_step<Fragment, Element>(c, a, from_b, 16 * step);
  }
}

// The same with 8-bit elements, of which a step has 32, and B laid out for them.
template <class FragmentA, class Fragment, class Element, int kDepth, int kColumns>
__device__ __forceinline__ void gemm_registers_steps(float (&c)[Fragment::kSize], const float (&x)[FragmentA::kSize],
                                                     StepTile<kDepth, kColumns>& b_tile) {
  static_assert(kDepth == 8 * FragmentA::kColumnBlocks, "the tile has a row for each column of A");
  PairsDownColumns<StepTile<kDepth, kColumns>> b_pairs{b_tile};
  const TileOperand<Along::kRows, false, PairsDownColumns<StepTile<kDepth, kColumns>>> from_b(b_pairs, 0);
#pragma unroll
  for (int step = 0; step < kDepth / kStepRows; ++step) {
    u32 a[Fragment::kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < Fragment::kRowBlocks; ++r)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        a[r][j] = packed_half<Element>(x + FragmentA::block(r, 4 * step + j / 2 * 2) + j % 2 * 2);
    multiply_step<Fragment, Element>(c, a, from_b, 16 * step);
  }
}

// A with the contraction along its rows, B down its columns, from `start` on: c += A B.
template <int kDepth, class Fragment, class Element, bool kOneAddress = false, class TileA, class TileB>
__device__ __forceinline__ void gemm_rows_columns(float (&c)[Fragment::kSize], TileA& a_tile, int a_row, TileB& b_tile,
                                                  int b_column, int start = 0) {
  const Operand<kOneAddress, Along::kRows, true, TileA> from_a(a_tile, a_row, start);
  const Operand<kOneAddress, Along::kColumns, false, TileB> from_b(b_tile, b_column, start);
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    u32 a[Fragment::kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < Fragment::kRowBlocks; ++r) from_a.load(a[r], 16 * r, k);
    multiply_step<Fragment, Element>(c, a, from_b, k);
  }
}

// Both operands with the contraction down their columns: c += Aᵀ B.
template <int kDepth, class Fragment, class Element, bool kOneAddress = false, class TileA, class TileB>
__device__ __forceinline__ void gemm_columns_columns(float (&c)[Fragment::kSize], TileA& a_tile, int a_column,
                                                     TileB& b_tile, int b_column) {
  const Operand<kOneAddress, Along::kColumns, true, TileA> from_a(a_tile, a_column);
  const Operand<kOneAddress, Along::kColumns, false, TileB> from_b(b_tile, b_column);
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    u32 a[Fragment::kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < Fragment::kRowBlocks; ++r) from_a.load(a[r], 16 * r, k);
    multiply_step<Fragment, Element>(c, a, from_b, k);
  }
}

// The transposed product of 8 rows, A from an accumulator, B with the contraction down its columns: cᵀ += Bᵀ Aᵀ.  It takes
// half the instructions and registers of the product with 16 rows.
template <class FragmentA, class Fragment, class Element, class TileB>
__device__ __forceinline__ void gemm_columns_registers(float (&c)[Fragment::kSize], const float (&x)[FragmentA::kSize],
                                                       TileB& b_tile) {
#pragma unroll
  for (int step = 0; step < FragmentA::kColumnBlocks / 2; ++step) {
    const u32 x0 = packed<Element>(x[4 * step], x[4 * step + 1]);
    const u32 x1 = packed<Element>(x[4 * step + 2], x[4 * step + 3]);
#pragma unroll
    for (int block = 0; block < Fragment::kColumnBlocks; ++block) {
      u32 b[4];
      load_a_columns(b, b_tile, 16 * block, 16 * step);
      mma_m16n8k16<Element>(c + 4 * block, b, x0, x1);
    }
  }
}
