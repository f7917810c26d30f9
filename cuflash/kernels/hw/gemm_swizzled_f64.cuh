// Products of float64 tiles that are read both along their rows and down their columns, by tensor cores (sm_80 and later).
//
// Operands as in hw/gemm_f64.cuh, in their own order, and all of them loaded one by one: the registers of an operand are
// neighbours, and what a wider load brings, or what is an accumulator, would have to be copied there.
//
// A tile has no padding; its columns change places within 16, by a function of the row for which half a warp finds all banks
// when it reads 4 columns of rows 0 to 3 or 4 to 7 of 8, and a quarter when it writes pairs of 8 columns of two rows.
#pragma once
#include "hw/gemm_f64.cuh"
#include "hw/ptx.cuh"

template <int kRows_, int kColumns_> struct alignas(16) SwizzledTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kPitch = kColumns_;
  static_assert(kRows % 8 == 0 && kColumns % 8 == 0, "whole blocks");
  double data[kRows * kPitch];

  // Rows of 16n + 8 columns start in other banks by themselves.
  static __device__ __forceinline__ constexpr int swizzle(int row) {
    return row / 2 % 2 * 4 + (kColumns % 16 == 0 ? row % 2 * 8 : 0);
  }
  __device__ __forceinline__ double* at(int row, int column) { return data + row * kPitch + (column ^ swizzle(row)); }
};

// An element of a tile and those at fixed distances from it: of 16 columns, each piece of 4 is reached from an address of its own.
template <class Tile> struct Pieces {
  double* piece[4];

  __device__ __forceinline__ Pieces(Tile& tile, int row, int column) {
#pragma unroll
    for (int i = 0; i < 4; ++i) piece[i] = tile.at(row, column ^ 4 * i);
  }
  // `rows` are a multiple of 4, which have the same swizzle; `columns` one of 4 that has no bit in common with the column that
  // the pieces were made for.
  __device__ __forceinline__ double* at(int rows, int columns) const {
    return piece[columns / 4 % 4] + rows * Tile::kPitch + columns / 16 * 16;
  }
};

// c += a · bᵀ over all columns: rows of c are those of a from `row` on, its columns are all rows of b.  Operands are loaded a
// step ahead, so that a warp keeps the tensor cores busy by itself.
template <class F, class A, class B>
__device__ __forceinline__ void multiply_rows_f64(double (&c)[F::kSize], A& a, int row, B& b) {
  static_assert(A::kColumns == B::kColumns && A::kColumns % 16 == 0 && F::kColumnBlocks * 8 == B::kRows,
                "the same depth");
  const int lane = recomputed(int(threadIdx.x)) % 32;
  const Pieces<A> left(a, row + lane / 4, lane % 4);
  const Pieces<B> right(b, lane / 4, lane % 4);
  double x[2][F::kRowBlocks][4], y[2][F::kColumnBlocks][2];
  const auto load = [&](int stage, int k) {
    const int side = 8 * stage;
#pragma unroll
    for (int block = 0; block < F::kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[stage][block][i] = left.at(16 * block + i % 2 * 8, side + i / 2 * 4)[k];
    }
#pragma unroll
    for (int column = 0; column < F::kColumnBlocks; ++column) {
      y[stage][column][0] = right.at(8 * column, side)[k];
      y[stage][column][1] = right.at(8 * column, side + 4)[k];
    }
  };
  const auto multiply = [&](int stage) {
#pragma unroll
    for (int column = 0; column < F::kColumnBlocks; ++column) {
#pragma unroll
      for (int block = 0; block < F::kRowBlocks; ++block)
        mma_f64(c + F::block(block, column), x[stage][block], y[stage][column]);
    }
  };
  load(0, 0);
#pragma unroll 1
  for (int k = 0; k < A::kColumns - 16; k += 16) {
    load(1, k);
    multiply(0);
    load(0, k + 16);
    multiply(1);
  }
  load(1, A::kColumns - 16);
  multiply(0);
  multiply(1);
}

// c += a · b over all rows of b: rows of c are those of a from `row` on.  Of a all is loaded first: then the warp needs it no
// longer and `loaded` is called.
template <class F, class A, class B, class Loaded>
__device__ __forceinline__ void multiply_rows_columns_f64(double (&c)[F::kSize], A& a, int row, B& b, Loaded loaded) {
  static_assert(A::kColumns == B::kRows && F::kColumnBlocks * 8 == B::kColumns, "the same depth");
  const int lane = recomputed(int(threadIdx.x)) % 32;
  const Pieces<A> left(a, row + lane / 4, lane % 4);
  const Pieces<B> right(b, lane % 4, lane / 4);
  double x[B::kRows / 8][F::kRowBlocks][4];
#pragma unroll
  for (int k = 0; k < B::kRows; k += 8) {
#pragma unroll
    for (int block = 0; block < F::kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[k / 8][block][i] = *left.at(16 * block + i % 2 * 8, k + i / 2 * 4);
    }
  }
  loaded();
#pragma unroll
  for (int k = 0; k < B::kRows; k += 8) {
#pragma unroll
    for (int column = 0; column < F::kColumnBlocks; ++column) {
      const double y[2] = {*right.at(k, 8 * column), *right.at(k + 4, 8 * column)};
#pragma unroll
      for (int block = 0; block < F::kRowBlocks; ++block) mma_f64(c + F::block(block, column), x[k / 8][block], y);
    }
  }
}

// c += aᵀ · b over all rows of both: columns of a and b from these on.
template <class F, class A, class B>
__device__ __forceinline__ void multiply_transposed_f64(double (&c)[F::kSize], A& a, int column_a, B& b, int column_b) {
  static_assert(A::kRows == B::kRows, "the same depth");
  const int lane = recomputed(int(threadIdx.x)) % 32;
  const Pieces<A> left(a, lane % 4, column_a + lane / 4);
  const Pieces<B> right(b, lane % 4, column_b + lane / 4);
#pragma unroll 1
  for (int k = 0; k < A::kRows; k += 8) {
    double x[F::kRowBlocks][4];
#pragma unroll
    for (int block = 0; block < F::kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[block][i] = *left.at(k + i / 2 * 4, 16 * block + i % 2 * 8);
    }
#pragma unroll
    for (int column = 0; column < F::kColumnBlocks; ++column) {
      const double y[2] = {*right.at(k, 8 * column), *right.at(k + 4, 8 * column)};
#pragma unroll
      for (int block = 0; block < F::kRowBlocks; ++block) mma_f64(c + F::block(block, column), x[block], y);
    }
  }
}

// A thread's pairs of an accumulator into rows of a tile from `row` on, and from them.
template <class F, class Tile> __device__ __forceinline__ void store_rows_f64(Tile& to, int row,
                                                                              const double (&x)[F::kSize]) {
  const int lane = recomputed(int(threadIdx.x)) % 32;
  const Pieces<Tile> pieces(to, row + lane / 4, lane % 4 * 2);
#pragma unroll
  for (int i = 0; i < F::kSize; i += 2)
    store_pair(pieces.at(F::slot(i) * 8, i / 4 % F::kColumnBlocks * 8), x[i], x[i + 1]);
}
template <class F, class Tile> __device__ __forceinline__ void load_rows_f64(double (&x)[F::kSize], Tile& from,
                                                                             int row) {
  const int lane = recomputed(int(threadIdx.x)) % 32;
  const Pieces<Tile> pieces(from, row + lane / 4, lane % 4 * 2);
#pragma unroll
  for (int i = 0; i < F::kSize; i += 2) {
    const auto pair = Vector<double>::load(pieces.at(F::slot(i) * 8, i / 4 % F::kColumnBlocks * 8));
    x[i] = pair[0];
    x[i + 1] = pair[1];
  }
}

// Rows of the source from `first` on, by kThreads threads of which this one is number `thread`; as copy_tile of PitchedTile.
template <int kThreads, bool kVectors, int kRows, int kColumns>
__device__ __forceinline__ void copy_tile(SwizzledTile<kRows, kColumns>& to, const CopySource<double>& from, int first,
                                          int thread) {
  constexpr int kElements = kVectors ? 2 : 1;
  constexpr int kPerRow = kColumns / kElements;
  constexpr int kLanes = power_of_two_from(kPerRow) < kThreads ? power_of_two_from(kPerRow) : kThreads;
  constexpr int kStep = kThreads / kLanes;
  static_assert(kThreads % kLanes == 0, "whole rows of threads");
  thread = recomputed(thread);
  const int lane_row = thread / kLanes;
  if constexpr (kVectors && kLanes == kPerRow) {
    // Whole rows that are all there, as most tiles are: a tenth of the instructions.
    if (first >= from.begin && first + kRows <= from.end && kColumns <= from.columns) {
      constexpr int kAlike = kStep % 4 == 0 ? kStep : 4;  // rows at this distance have the same swizzle
      const int c = thread % kLanes * kElements;
      const double* source = from.data + (first + lane_row) * from.row + c;
#pragma unroll
      for (int r = 0; r < kRows; r += kStep) {
        if (kRows % kStep != 0 && r + lane_row >= kRows) break;
        copy_bytes<16>(to.at(lane_row + r % kAlike, c) + r / kAlike * kAlike * kColumns, source, 16);
        source += kStep * from.row;
      }
      return;
    }
  }
#pragma unroll
  for (int begin = 0; begin < kColumns; begin += kLanes * kElements) {
    const int c = begin + thread % kLanes * kElements;
    if ((kColumns - begin) % (kLanes * kElements) != 0 && c >= kColumns) break;
    const int left = from.columns - c, present = left <= 0 ? 0 : left < kElements ? left : kElements;
    int row = first + lane_row;
    const double* source = from.data + row * from.row + c * from.column;
#pragma unroll 4
    for (int r = lane_row; r < kRows; r += kStep) {
      const int valid = row >= from.begin && row < from.end ? present : 0;
      copy_bytes<8 * kElements>(to.at(r, c), valid ? source : from.data, valid * int(sizeof(double)));
      row += kStep;
      source += kStep * from.row;
    }
  }
}
