// Where a thread's elements of a tile live when products are sums of scalar multiply-adds.
//
// A warp is a small grid of lanes.  Bit 0 of the lane number counts rows and bit 1 counts columns: a 128-bit load from shared
// memory that is the same for lanes differing in bit 0 (or in bit 1) takes two passes instead of four.
#pragma once

template <int kLaneRows> struct Lanes {
  static constexpr int kRows = kLaneRows, kColumns = 32 / kLaneRows;
  static_assert(kLaneRows >= 2 && kLaneRows <= 16 && 32 % kLaneRows == 0, "2, 4, 8 or 16 rows of lanes");

  static __device__ __forceinline__ int row(int lane) { return (lane & 1) | lane / (2 * kColumns) * 2; }
  static __device__ __forceinline__ int column(int lane) { return lane / 2 % kColumns; }
};

// kRows x kColumns elements a thread.  Rows come in runs of kRowRun neighbours, runs of one thread lie kRows-of-lanes runs apart;
// columns likewise.  Element i is in the thread's row i / kColumns and column i % kColumns.
template <class Lanes, int kRows_, int kColumns_, int kRowRun_, int kColumnRun_, bool kIsTransposed = false>
struct FragmentSimt {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kRowRun = kRowRun_, kColumnRun = kColumnRun_;
  static constexpr int kSize = kRows * kColumns, kSlots = kRows;
  static constexpr bool kTransposed = kIsTransposed, kSpreads = false;
  static constexpr int kTileRows = kRows * Lanes::kRows, kTileColumns = kColumns * Lanes::kColumns;  // of a warp
  static constexpr int kRowStep = Lanes::kRows * kRowRun, kColumnStep = Lanes::kColumns * kColumnRun;
  static_assert(kRows % kRowRun == 0 && kColumns % kColumnRun == 0, "whole runs");

  int first_row, first_column;

  // The warp's tile starts at (row, column).
  __device__ __forceinline__ FragmentSimt(int lane, int row, int column)
      : first_row(row + Lanes::row(lane) * kRowRun), first_column(column + Lanes::column(lane) * kColumnRun) {}

  static __device__ __forceinline__ constexpr int slot(int i) { return i / kColumns; }
  static __device__ __forceinline__ constexpr int column_index(int i) { return i % kColumns; }
  // From the thread's first row or column.
  static __device__ __forceinline__ constexpr int row_offset(int slot) {
    return slot / kRowRun * kRowStep + slot % kRowRun;
  }
  static __device__ __forceinline__ constexpr int column_offset(int i) {
    return i % kColumns / kColumnRun * kColumnStep + i % kColumns % kColumnRun;
  }
  __device__ __forceinline__ int row(int slot) const { return first_row + row_offset(slot); }
  __device__ __forceinline__ int column(int i) const { return first_column + column_offset(i); }
  __device__ __forceinline__ bool leads_row() const { return first_column == 0; }

  // One of the lanes that share a row, or a column.
  static __device__ __forceinline__ bool leads_lanes_of_row() { return Lanes::column(int(threadIdx.x) % 32) == 0; }
  static __device__ __forceinline__ bool leads_lanes_of_column() { return Lanes::row(int(threadIdx.x) % 32) == 0; }

  // Whether it holds for any thread that shares a row with this one, and for as many more as vote at once.
  static __device__ __forceinline__ bool any(bool x) { return __any_sync(~0u, x); }
  // Over the lanes that share a row.
  static __device__ __forceinline__ Real row_max(Real x) {
#pragma unroll
    for (int bit = 2; bit < 2 * Lanes::kColumns; bit *= 2) x = max_of(x, __shfl_xor_sync(~0u, x, bit));
    return x;
  }
  static __device__ __forceinline__ Real row_sum(Real x) {
#pragma unroll
    for (int bit = 2; bit < 2 * Lanes::kColumns; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
  }
  // Over the lanes that share a column.
  static __device__ __forceinline__ Real column_sum(Real x) {
    x += __shfl_xor_sync(~0u, x, 1);
#pragma unroll
    for (int bit = 2 * Lanes::kColumns; bit < 32; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
  }
};

// Two neighbours of one row by one aligned store.
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
__device__ __forceinline__ void store_pair(double* to, double x, double y) {
  *reinterpret_cast<double2*>(to) = make_double2(x, y);
}
