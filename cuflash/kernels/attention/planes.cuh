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
// Both in a word that is not 0, with room for a mark; without rows the least is the largest that 31 bits hold.
constexpr u64 kPosted = u64(1) << 63, kGivenUp = u64(1) << 62;
__device__ __forceinline__ u64 in_a_word(const Magnitudes& x) {
  return kPosted | u64(min(x.least, 0x7fffffffu)) << 31 | x.largest;
}
__device__ __forceinline__ Magnitudes of_a_word(u64 word) {
  return {u32(word) & 0x7fffffffu, u32(word >> 31) & 0x7fffffffu};
}
__device__ __forceinline__ u32 magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ u32 magnitude(u32 bits) { return bits < 0x00800000u ? 0 : bits; }

// Of one of the arrays, what split_planes.cu works on.  Heads whose exponents are found in common are a unit: with kGrouped, those
// of queries that share keys, which lie side by side.
template <class Config, class P> __device__ __forceinline__ int heads_of_unit(const P& p, int array) {
  return Config::kGrouped && SplitShape::is_of_queries(array) ? p.group : 1;
}
// Rows of a tile: a part that registers hold, or several where a unit had more than kMostTiles.
template <class Config, class P> __device__ __forceinline__ int rows_of_tile(const P& p, int array) {
  const int parts = tiles_of(SplitShape(p, array).rows, Config::kRows) * heads_of_unit<Config>(p, array);
  return Config::kRows * max(1, tiles_of(parts, Config::kMostTiles));
}
template <class Config, class P> __device__ __forceinline__ int tiles_of_head(const P& p, int array) {
  return max(1, tiles_of(SplitShape(p, array).rows, rows_of_tile<Config>(p, array)));
}

// Behind the decisions, magnitudes of units, in the places of their first heads.
template <int kArrays, class P>
__device__ __forceinline__ Magnitudes* unit_magnitudes(const P& p, int array, int head) {
  const int words = 2 * p.batch_size * (p.heads_q + p.heads_k) + p.batch_size * p.heads_k;
  Magnitudes* at = reinterpret_cast<Magnitudes*>(static_cast<int*>(p.magnitudes) + (words + 1) / 2 * 2) + head;
#pragma unroll
  for (int before = 0; before < kArrays; ++before)
    if (before < array) at += SplitShape(p, before).heads;
  return at;
}
// Behind these, 0 before the launch, a word of 8 bytes of which the first half counts: how many blocks of a unit are done with what
// is posted; as array kArrays, how many units of a head of keys are known.
template <int kArrays, class P> __device__ __forceinline__ u32* unit_counter(const P& p, int array, int head) {
  u64* at = reinterpret_cast<u64*>(unit_magnitudes<kArrays>(p, kArrays, 0)) + head;
#pragma unroll
  for (int before = 0; before < kArrays; ++before)
    if (before < array) at += SplitShape(p, before).heads;
  return reinterpret_cast<u32*>(at);
}
// Behind them, what the tiles of a head post.
template <class Config, class P> __device__ __forceinline__ u64* tile_posts(const P& p, int array, int head) {
  u64* at = reinterpret_cast<u64*>(unit_counter<Config::kArrays>(p, Config::kArrays, p.batch_size * p.heads_k));
#pragma unroll
  for (int before = 0; before < Config::kArrays; ++before)
    if (before < array) at += i64(SplitShape(p, before).heads) * tiles_of_head<Config>(p, before);
  return at + i64(head) * tiles_of_head<Config>(p, array);
}

template <int kArrays, class P> const __device__ __forceinline__ View& view_of(const P& p, int array) {
  if constexpr (kArrays > kSplitDout)
    if (array == kSplitDout) return p.dout;
  return array == kSplitQ ? p.q : array == kSplitK ? p.k : p.v;
}
