// float32 arrays as planes of float16, and which heads they stand for.
//
// x · 2^e = high + low / kLowScale, with one exponent e for each head of an array, chosen so that its largest magnitude lies
// in [2^14, 2^15).  Together the planes carry 23 bits of every number down to 2^-28 of that largest one; below, they are off
// by 2^-51 of it at most.  Where that might be felt, because the largest number of some row is too small beside that of its
// head, or where a number is not finite, the planes do not stand for the head: kernels of plain float32 answer it.
//
// Heads are decided on together: those of a group of queries with the keys and values that they share.
//
// Memory: `planes` holds q, k, v and, for a backward, dout, of each array first all high parts, then all low ones, contiguous
// as (batch * heads, rows, plane_width(columns)), zeros behind the columns; rows of keys behind the length of a batch entry
// are not written.  `magnitudes` holds the exponents of these arrays' heads, the decisions, and what they were made from.
#pragma once
#include "attention/mask.cuh"
#include "hw/element.cuh"

constexpr int kLargestExponent = 14;  // of a head's largest number in its high plane
constexpr int kRowSpan = 12;          // a row's largest number is at least 2^-kRowSpan of its head's
constexpr int kMostTiles = 256;       // of a head, of which the magnitudes are found apart

enum SplitArray { kSplitQ, kSplitK, kSplitV, kSplitDout, kSplitArrays };

__device__ __forceinline__ constexpr int plane_width(int columns) { return (columns + 15) / 16 * 16; }

// One of the arrays.
struct SplitShape {
  int heads;  // of all batch entries
  int rows, columns;

  template <class P>
  __device__ __forceinline__ SplitShape(const P& p, int array)
      : heads(p.batch_size * (is_of_queries(array) ? p.heads_q : p.heads_k)),
        rows(is_of_queries(array) ? p.seq_q : p.seq_k),
        columns(array == kSplitQ || array == kSplitK ? p.head_dim : p.head_dim_v) {}
  static __device__ __forceinline__ bool is_of_queries(int array) { return array == kSplitQ || array == kSplitDout; }
  __device__ __forceinline__ i64 size() const { return i64(heads) * rows * plane_width(columns); }
  // Rows whose magnitudes are found together, and how often that is in a head.
  __device__ __forceinline__ int tile_rows(int least) const { return max(least, tiles_of(rows, kMostTiles)); }
  __device__ __forceinline__ int tiles(int least) const { return max(1, tiles_of(rows, tile_rows(least))); }
};

// Where a head of an array begins in its high plane, `plane` 0, or its low one.
template <int kPlanes, class P>
__device__ __forceinline__ Half* plane_of(const P& p, int array, int plane, int head) {
  Half* at = static_cast<Half*>(p.planes);
#pragma unroll
  for (int before = 0; before < kSplitArrays; ++before)
    if (before < array) at += kPlanes * SplitShape(p, before).size();
  const SplitShape shape(p, array);
  return at + plane * shape.size() + i64(head) * shape.rows * plane_width(shape.columns);
}

// Exponents of the heads of all four arrays, whether there is a dout or not; behind them the decisions.
template <class P> __device__ __forceinline__ int* exponents(const P& p, int array) {
  int* at = static_cast<int*>(p.magnitudes);
#pragma unroll
  for (int before = 0; before < kSplitArrays; ++before)
    if (before < array) at += SplitShape(p, before).heads;
  return at;
}
template <class P> __device__ __forceinline__ int* decisions(const P& p) { return exponents(p, kSplitArrays); }

// Numbers of heads over all batch entries.
__device__ __forceinline__ int query_head(const Params& p, const Place& place) {
  return place.entry(p) * p.heads_q + place.head;
}
__device__ __forceinline__ int key_head(const Params& p, const Place& place) {
  return place.entry(p) * p.heads_k + place.head_k;
}
__device__ __forceinline__ bool is_split(const Params& p, const Place& place) {
  return decisions(p)[key_head(p, place)] != 0;
}

// 2^e, for e from -126 to 127.
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// Magnitudes of the rows of a tile, as bits without sign, which order as the numbers do, NaN above all; of numbers that
// arithmetic takes for 0, 0.
struct Magnitudes {
  u32 largest;
  u32 least;  // of the rows' largest ones, without those of rows of zeros

  __device__ __forceinline__ void join(const Magnitudes& other) {
    largest = max(largest, other.largest);
    least = min(least, other.least);
  }
  __device__ __forceinline__ void join_row(u32 row) { join({row, row == 0 ? 0xffffffffu : row}); }
  __device__ __forceinline__ bool suits() const {
    return largest < 0x7f800000u && (largest == 0 || int(largest >> 23) - int(least >> 23) <= kRowSpan);
  }
  __device__ __forceinline__ int exponent() const {
    return largest == 0 ? 0 : min(kLargestExponent + 127 - int(min(largest, 0x7f7fffffu) >> 23), 126);
  }
};
__device__ __forceinline__ Magnitudes no_magnitudes() { return {0, 0xffffffffu}; }
__device__ __forceinline__ u32 magnitude(float x) {
  const u32 bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x00800000u ? 0 : bits;
}

// Magnitudes of a head's tiles, behind the decisions.
template <int kRows, class P>
__device__ __forceinline__ Magnitudes* tile_magnitudes(const P& p, int array, int head) {
  const int words = 2 * p.batch_size * (p.heads_q + p.heads_k) + p.batch_size * p.heads_k;
  Magnitudes* at = reinterpret_cast<Magnitudes*>(static_cast<int*>(p.magnitudes) + (words + 1) / 2 * 2);
#pragma unroll
  for (int before = 0; before < kSplitArrays; ++before) {
    const SplitShape shape(p, before);
    if (before < array) at += i64(shape.heads) * shape.tiles(kRows);
  }
  return at + i64(head) * SplitShape(p, array).tiles(kRows);
}

// Rows of one head of an array that a block of threads works on.
struct SplitWork {
  int array, head;  // counted over all batch entries
  Range rows;
  int tile;
  Place place;

  // Blocks are counted array by array, head by head; `kTile` rows each, or what `tile_rows` makes of them.
  template <bool kWide, int kTile, int kArrays, class P>
  __device__ __forceinline__ static SplitWork of(const P& p, i64 index) {
    SplitWork work;
    work.array = 0;
#pragma unroll
    for (int array = 0; array + 1 < kArrays; ++array) {
      const SplitShape shape(p, array);
      const i64 blocks = i64(shape.heads) * (kWide ? shape.tiles(kTile) : max(1, tiles_of(shape.rows, kTile)));
      if (work.array == array && index >= blocks) {
        index -= blocks;
        ++work.array;
      }
    }
    const SplitShape shape(p, work.array);
    const int tiles = kWide ? shape.tiles(kTile) : max(1, tiles_of(shape.rows, kTile));
    const int tile_rows = kWide ? shape.tile_rows(kTile) : kTile;
    work.tile = int(index % tiles);
    work.head = int(index / tiles);
    const bool of_queries = SplitShape::is_of_queries(work.array);
    const int heads = of_queries ? p.heads_q : p.heads_k;
    work.place.set_head(p, work.head % heads * (of_queries ? 1 : p.group));
    work.place.set_batch(p, work.head / heads);
    work.place.key_count = Visibility::key_count(p, work.place);
    const int end = of_queries ? p.seq_q : work.place.key_count;
    work.rows = {work.tile * tile_rows, min(end, (work.tile + 1) * tile_rows)};
    return work;
  }
};
template <int kArrays, class P> const __device__ __forceinline__ View& view_of(const P& p, int array) {
  if constexpr (kArrays > kSplitDout)
    if (array == kSplitDout) return p.dout;
  return array == kSplitQ ? p.q : array == kSplitK ? p.k : p.v;
}
