// Where the accumulators of mma.m16n8 (and, row for row, wgmma) live in a warp's threads.
//
// Source: PTX ISA, "Matrix fragments for mma.m16n8k16": of a 16 x 8 block, lane l holds rows l/4 and l/4 + 8, columns
// 2(l%4) and 2(l%4) + 1.  A warp holds kTilesRow x kTilesColumn such blocks; element i = 4·block + r.
#pragma once

template <int kTilesRow, int kTilesColumn, bool kIsTransposed = false> struct MmaFragment {
  static constexpr bool kTransposed = kIsTransposed;
  static constexpr bool kSpreads = !kIsTransposed && kTilesColumn % 4 == 0;  // takes rows in 16-byte pieces
  static constexpr int kRowBlocks = kTilesRow, kColumnBlocks = kTilesColumn;
  static constexpr int kSize = kTilesRow * kTilesColumn * 4;
  static constexpr int kSlots = kTilesRow * 2;
  int first_row, first_column;  // of this thread, in the tile

  // `row` and `column`: corner of the warp's part in the tile.
  __device__ __forceinline__ MmaFragment(int row, int column)
      : first_row(row + int(threadIdx.x) % 32 / 4), first_column(column + int(threadIdx.x) % 4 * 2) {}
  __device__ __forceinline__ MmaFragment(int row, int column, u32 thread)
      : first_row(row + int(thread % 32 / 4)), first_column(column + int(thread % 4 * 2)) {}

  static __device__ __forceinline__ constexpr int slot(int i) { return i / (4 * kTilesColumn) * 2 + i / 2 % 2; }
  static __device__ __forceinline__ constexpr int block(int tile_row, int tile_column) {
    return (tile_row * kTilesColumn + tile_column) * 4;
  }
  // Which of the thread's columns.
  static __device__ __forceinline__ constexpr int column_index(int i) { return i / 4 % kTilesColumn * 2 + i % 2; }
  __device__ __forceinline__ int row(int slot) const { return first_row + slot / 2 * 16 + slot % 2 * 8; }
  __device__ __forceinline__ int column(int i) const { return first_column + i / 4 % kTilesColumn * 8 + i % 2; }
  // One of the four lanes that share a row.
  __device__ __forceinline__ bool leads_row() const { return threadIdx.x % 4 == 0; }
  // One of the lanes that share a row, or a column.
  static __device__ __forceinline__ bool leads_lanes_of_row() { return threadIdx.x % 4 == 0; }
  static __device__ __forceinline__ bool leads_lanes_of_column() { return threadIdx.x % 32 < 4; }

  // Swaps with the thread that holds the same columns of the next row, where this one is even, else of the row before.
  static __device__ __forceinline__ u32 of_neighbour_row(u32 x) { return __shfl_xor_sync(0xffffffffu, x, 4); }
  // From 16-byte pieces of rows to the order of the accumulators: of 32 columns of a row, the lanes that share it hold eight
  // 16-bit elements each, as pairs; word b becomes the thread's two columns of block b.
  static __device__ __forceinline__ void spread(u32 (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      const bool upper = threadIdx.x & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & bit) continue;
        const u32 other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i ^ bit], bit);
        words[i] = upper ? other : words[i];
        words[i ^ bit] = upper ? words[i ^ bit] : other;
      }
    }
  }
  // Whether it holds for any thread that shares a row with this one, and for as many more as vote at once.
  static __device__ __forceinline__ bool any(bool x) { return __any_sync(0xffffffffu, x); }
  template <class T> static __device__ __forceinline__ T row_max(T x) {
    x = max_of(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return max_of(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }
  template <class T> static __device__ __forceinline__ T row_sum(T x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }
  template <class T> static __device__ __forceinline__ T column_sum(T x) {
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
  }
};

// Rows 0 to 7 of an MmaFragment of one row of blocks: all that a tile of 8 rows needs of a product of 16.
template <int kTilesColumn> struct UpperFragment : MmaFragment<1, kTilesColumn> {
  static constexpr int kSize = kTilesColumn * 2, kSlots = 1;
  static constexpr bool kSpreads = false;
  using MmaFragment<1, kTilesColumn>::MmaFragment;

  static __device__ __forceinline__ constexpr int slot(int) { return 0; }
  __device__ __forceinline__ int column(int i) const { return this->first_column + i / 2 * 8 + i % 2; }
};

// Accumulators of a transposed product: of the tile, 8 rows and 16 columns a block.
template <int kTilesColumn> struct TransposedFragment {
  static constexpr int kColumnBlocks = kTilesColumn;
  static constexpr int kSize = kTilesColumn * 4, kSlots = 2;
  int first_row, first_column;

  __device__ __forceinline__ TransposedFragment()
      : first_row(int(threadIdx.x) % 4 * 2), first_column(int(threadIdx.x) % 32 / 4) {}

  static __device__ __forceinline__ constexpr int slot(int i) { return i % 2; }
  __device__ __forceinline__ int row(int slot) const { return first_row + slot; }
  __device__ __forceinline__ int column(int i) const { return first_column + i / 4 * 16 + i / 2 % 2 * 8; }

  // From a number for each row, as the threads of an UpperFragment hold it, those of this thread's rows.
  template <class T> static __device__ __forceinline__ void from_rows(T (&to)[2], const T (&x)[1]) {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) to[slot] = __shfl_sync(0xffffffffu, x[0], threadIdx.x % 4 * 8 + slot * 4);
  }
};

template <class Element> __device__ __forceinline__ void store_pair(Element* to, float first, float second) {
  *reinterpret_cast<u32*>(to) = packed<Element>(first, second);
}

// An accumulator, each row times its factor and rounded, into a tile in shared memory.
template <class Fragment, class Tile, class Factor>
__device__ __forceinline__ void store_fragment(Tile& to, const float (&x)[Fragment::kSize], const Fragment& at,
                                               Factor factor) {
#pragma unroll
  for (int i = 0; i < Fragment::kSize; i += 2) {
    const float scale = factor(Fragment::slot(i));
    store_pair(to.at(at.row(Fragment::slot(i)), at.column(i)), x[i] * scale, x[i + 1] * scale);
  }
}
