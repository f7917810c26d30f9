// Tiles whose rows are several heads: row r is head r % group, of those that share a key head, of query r / group.
//
// Rows behind the last query repeat it: they stay finite and are never stored.
#pragma once
#include "attention/cache.cuh"

__device__ __forceinline__ bool holds(Range all, Range part) { return all.begin <= part.begin && part.end <= all.end; }

struct PackedRow { int query, head; };

__device__ __forceinline__ PackedRow packed_row(const Params& p, int head_k, int row) {
  const int query = row / p.group;
  return {min(query, p.seq_q - 1), head_k * p.group + row - query * p.group};
}
__device__ __forceinline__ bool is_packed_row(const Params& p, int row) { return row < p.seq_q * p.group; }

// Queries of kRows rows from `first` on.
template <int kRows> __device__ __forceinline__ Range queries_of_rows(const Params& p, int first) {
  return {first / p.group, min(p.seq_q, (first + kRows - 1) / p.group + 1)};
}

// What a thread knows of its rows.
template <class Fragment> struct PackedRows {
  int head[Fragment::kSlots];
  int position[Fragment::kSlots];
  Range keys[Fragment::kSlots];

  __device__ __forceinline__ PackedRows(const Fragment& f, const Params& p, const Sequence& sequence, int head_k,
                                        int first) {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      const PackedRow row = packed_row(p, head_k, first + f.row(slot));
      head[slot] = row.head;
      position[slot] = sequence.first_query + row.query;
      keys[slot] = visible_keys(p, sequence.place, position[slot]);
    }
  }
  __device__ __forceinline__ bool contains(int slot, int key) const {
    return key >= keys[slot].begin && key < keys[slot].end;
  }
};

// In place: products with the keys from `first` on -> scores.  `open`: every row sees every key.
template <class Fragment>
__device__ __forceinline__ void packed_scores(Real (&s)[Fragment::kSize], const Fragment& f,
                                              const PackedRows<Fragment>& rows, const Params& p, Place place, int first,
                                              bool open) {
  if constexpr (!Score::kIdentity) {
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      const int slot = Fragment::slot(i), key = first + f.column(i);
      place.head = rows.head[slot];
      s[i] = open || rows.contains(slot, key) ? Score::apply(p, place, rows.position[slot], key, s[i] * p.scale)
                                              : -infinity<Real>();
    }
  } else if (!open) {
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i)
      if (!rows.contains(Fragment::slot(i), first + f.column(i))) s[i] = -infinity<Real>();
  }
}
