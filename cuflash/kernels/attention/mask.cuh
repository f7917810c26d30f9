// Which keys a query sees: intervals for whole tiles, tests for single elements.
//
// `Visibility` (generated) composes the modifiers of the variant.  Every interval moves monotonically with the position, so
// the first and the last query of a tile bound what the tile sees.
#pragma once

// Keys that one query sees, before any element mask.
__device__ __forceinline__ Range visible_keys(const Params& p, const Place& place, int q) {
  Range keys{0, place.key_count};
  Visibility::narrow_keys(p, q, keys);
  return keys;
}

// Keys that at least one of the queries sees.
__device__ __forceinline__ Range keys_seen_by_any(const Params& p, const Place& place, Range queries) {
  return {visible_keys(p, place, queries.begin).begin, visible_keys(p, place, queries.end - 1).end};
}

// Keys that every one of the queries sees.
__device__ __forceinline__ Range keys_seen_by_all(const Params& p, const Place& place, Range queries) {
  return {visible_keys(p, place, queries.end - 1).begin, visible_keys(p, place, queries.begin).end};
}

// Queries that see one key, before any element mask.
__device__ __forceinline__ Range seeing_queries(const Params& p, const Place& place, int k) {
  Range queries{0, k < place.key_count ? p.seq_q : 0};
  Visibility::narrow_queries(p, k, queries);
  return queries;
}

// Queries that see at least one of the keys.
__device__ __forceinline__ Range queries_seeing_any(const Params& p, const Place& place, Range keys) {
  keys.end = min(keys.end, place.key_count);
  if (keys.begin >= keys.end) return {0, 0};
  return {seeing_queries(p, place, keys.begin).begin, seeing_queries(p, place, keys.end - 1).end};
}

// The first tile of keys that walks over a tile of queries: a tile of keys walks over tiles_over(queries_seeing_any).
//
// Walks of later keys begin no earlier and end no earlier, because intervals move monotonically.  So walks that begin at or
// before a tile of queries are those of the first tiles of keys, walks that end behind it those of the last, and both together
// those of neighbours without a gap: whoever counts from the first one up by one per walk meets the tiles' own numbers.
template <int kBlockQ, int kBlockK>
__device__ __forceinline__ int first_key_tile(const Params& p, const Place& place, int query_tile) {
  int low = 0, high = tiles_of(place.key_count, kBlockK);
  while (low < high) {
    const int middle = (low + high) / 2;
    const Range queries = queries_seeing_any(p, place, {middle * kBlockK, (middle + 1) * kBlockK});
    if (tiles_over<kBlockQ>(queries).end > query_tile)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Whether no element of the tile needs an interval test: all queries exist and see all keys.
__device__ __forceinline__ bool tile_is_open(const Params& p, const Place& place, Range queries, Range keys) {
  if (queries.end > p.seq_q) return false;
  const Range all = keys_seen_by_all(p, place, queries);
  return all.begin <= keys.begin && keys.end <= all.end;
}
