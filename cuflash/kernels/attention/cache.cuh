// The keys of a decode call: how many each entry of the batch has, and where one of them lies, in pages or not.
//
// Modifiers count from the diagonal of a cache that is filled to its last position.  An entry with fewer keys shifts its
// queries instead: query i stands at i + key_count - seq_k, so that the last query stands at the last key of its own.
// New keys are read where the caller passed them, never where `append` writes them: no block waits for another.
#pragma once
#include "attention/mask.cuh"

struct Sequence {
  Place place;      // of the entry; heads are set by whoever works on one
  int cached;       // keys in the cache before this call
  int first_query;  // position of the first query

  __device__ __forceinline__ Sequence(const Params& p, int entry) {
#pragma unroll
    for (int axis = 0; axis < kBatchAxes; ++axis) place.batch[axis] = axis + 1 < kBatchAxes ? 0 : entry;
    const int* lengths = static_cast<const int*>(p.lengths.data);
    cached = lengths ? min(max(lengths[place.batch_offset(p.lengths)], 0), p.seq_k) : p.seq_k;
    place.key_count = min(cached + p.seq_new, p.seq_k);
    first_query = place.key_count - p.seq_k;
  }
  __device__ __forceinline__ int entry() const { return place.batch[kBatchAxes - 1]; }
  // Positions of some of the queries.
  __device__ __forceinline__ Range positions(Range queries) const {
    return {first_query + queries.begin, first_query + queries.end};
  }
};

// Blocks of keys that some query of an entry sees; where there are none, one block, of which nothing will be read.
template <int kBlock> __device__ __forceinline__ Range blocks_of(const Params& p, const Sequence& sequence) {
  const Range keys = keys_seen_by_any(p, sequence.place, sequence.positions({0, p.seq_q}));
  if (keys.end <= keys.begin) return {0, 1};
  return tiles_over<kBlock>(keys);
}

// A key in memory, null where it does not exist.
struct KeyRow {
  Element* k;
  Element* v;
  bool is_new;  // not in the cache

  __device__ __forceinline__ i64 column_k(const Params& p) const { return is_new ? p.k_new.column : p.k.column; }
  __device__ __forceinline__ i64 column_v(const Params& p) const { return is_new ? p.v_new.column : p.v.column; }
};

template <class T> __device__ __forceinline__ T* row_of(const View& view, i64 entry, int head, int row) {
  return static_cast<T*>(view.data) + entry * view.batch[kBatchAxes - 1] + head * view.head + row * view.row;
}

// The page that holds the keys of an entry from index * page_size on.
__device__ __forceinline__ int page_of(const Params& p, const Sequence& sequence, int index) {
  const i64 at = sequence.place.batch_offset(p.page_table) + index * p.page_table.column;
  return static_cast<const int*>(p.page_table.data)[at];
}

// Where the cache has a position.  A page that the pool does not have is no memory.
template <bool kPaged>
__device__ __forceinline__ KeyRow cached_row(const Params& p, const Sequence& sequence, int head_k, int position) {
  if constexpr (kPaged) {
    const int index = position / p.page_size, row = position - index * p.page_size;
    const int page = page_of(p, sequence, index);
    if (page < 0 || page >= p.pages) return {nullptr, nullptr, false};
    return {row_of<Element>(p.k, page, head_k, row), row_of<Element>(p.v, page, head_k, row), false};
  } else {
    const int entry = sequence.entry();
    return {row_of<Element>(p.k, entry, head_k, position), row_of<Element>(p.v, entry, head_k, position), false};
  }
}

// Where a key is read, if it is one of those that are `seen`.
template <bool kPaged, bool kAppends>
__device__ __forceinline__ KeyRow key_row(const Params& p, const Sequence& sequence, int head_k, Range seen,
                                          int position) {
  if (position < seen.begin || position >= seen.end) return {nullptr, nullptr, false};
  if (kAppends && position >= sequence.cached) {
    const int entry = sequence.entry(), row = position - sequence.cached;
    return {row_of<Element>(p.k_new, entry, head_k, row), row_of<Element>(p.v_new, entry, head_k, row), true};
  }
  return cached_row<kPaged>(p, sequence, head_k, position);
}

// Whether a block of keys that begins at a position is seen as a whole and in the cache, each group of kGroup side by side.
template <bool kPaged, int kBlock, int kGroup>
__device__ __forceinline__ bool is_in_groups(const Params& p, const Sequence& sequence, Range seen, int position) {
  if (kPaged && p.page_size % kGroup != 0) return false;
  return position >= seen.begin && position + kBlock <= min(seen.end, sequence.cached);
}

// New keys and values into the cache, as far as it has room; each by `lanes` threads of which this is number `lane`.
template <bool kPaged>
__device__ __forceinline__ void append(const Params& p, int first, int step, int lane, int lanes) {
  const i64 rows = i64(p.batch_size) * p.heads_k * p.seq_new;
  for (i64 at = first; at < rows; at += step) {
    const int row = int(at % p.seq_new), head_k = int(at / p.seq_new % p.heads_k);
    const Sequence sequence(p, int(at / p.seq_new / p.heads_k));
    const int position = sequence.cached + row;
    if (position >= p.seq_k) continue;
    const KeyRow to = cached_row<kPaged>(p, sequence, head_k, position);
    if (!to.k) continue;
    const Element* k = row_of<Element>(p.k_new, sequence.entry(), head_k, row);
    const Element* v = row_of<Element>(p.v_new, sequence.entry(), head_k, row);
    for (int c = lane; c < p.head_dim; c += lanes) to.k[c * p.k.column] = k[c * p.k_new.column];
    for (int c = lane; c < p.head_dim_v; c += lanes) to.v[c * p.v.column] = v[c * p.v_new.column];
  }
}
