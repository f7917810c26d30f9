// Which keys a query sees: intervals and glances for whole tiles, tests for single elements.
//
// `Visibility` (generated) composes the modifiers of the variant.  Every interval moves monotonically with the position, so
// the first and the last query of a tile bound what the tile sees.  Where a modifier can tell that nothing in a tile is
// visible (kHidesTiles), schedules walk from one tile that may be to the next; all threads of a block find the same one.
#pragma once

// Look the bounds of a packed segment up again: until then, registers need to hold its number alone.
template <class Where> __device__ __forceinline__ void recall(const Params& p, Where& place) {
  if constexpr (kPacked) {
    place.recall(p);
    place.key_count = Visibility::key_count(p, place);
  }
}

// Keys that one query sees, before any element mask.
__device__ __forceinline__ Range visible_keys(const Params& p, const Place& place, int q) {
  Range keys{0, place.key_count};
  Visibility::narrow_keys(p, place, q, keys);
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
  Range queries{0, k < place.key_count ? place.seq_q(p) : 0};
  Visibility::narrow_queries(p, place, k, queries);
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

// Whether no element of the tile needs a test: all queries exist and see all keys, as far as intervals and glances tell.
// Where a mask has to be asked about each element, only the intervals are looked at.
__device__ __forceinline__ bool tile_is_open(const Params& p, const Place& place, Range queries, Range keys) {
  if (queries.end > place.seq_q(p)) return false;
  const Range all = keys_seen_by_all(p, place, queries);
  const bool open = all.begin <= keys.begin && keys.end <= all.end;
  if constexpr (Visibility::kClearsTiles) return open && Visibility::tile_is_clear(p, place, queries, keys);
  return open;
}

// Whether none of the queries sees any of the keys, as far as a glance tells; both intervals start inside the arrays.
__device__ __forceinline__ bool tile_is_hidden(const Params& p, const Place& place, Range queries, Range keys) {
  return Visibility::tile_is_hidden(p, place, {queries.begin, min(queries.end, place.seq_q(p))},
                                    {keys.begin, min(keys.end, place.key_count)});
}

// Where the first tile of keys begins, of those at `begin`, `begin` + kBlockK ... before `end`, that is not hidden from the
// queries; at or beyond `end` if there is none.
template <int kBlockK>
__device__ __forceinline__ int next_visible_keys(const Params& p, const Place& place, Range queries, int begin,
                                                 int end) {
  if constexpr (Visibility::kHidesTiles)
    while (begin < end && tile_is_hidden(p, place, queries, {begin, begin + kBlockK})) begin += kBlockK;
  return begin;
}

// The same for tiles counted in blocks from the first key: the first one from `block` on; `last` or more if there is none.
template <int kBlockK>
__device__ __forceinline__ int next_visible_block(const Params& p, const Place& place, Range queries, int block,
                                                  int last) {
  return next_visible_keys<kBlockK>(p, place, queries, block * kBlockK, last * kBlockK) / kBlockK;
}

// Tiles of queries that one tile of keys is seen by: `tiles` of them (in blocks from the first query), of one head after the
// other.  (head, tile) moves on to the first that is not hidden, `left` counts the tiles from there to the last.
template <int kBlockQ>
__device__ __forceinline__ void skip_hidden_queries(const Params& p, Place place, Range keys, Range tiles, int& head,
                                                    int& tile, int& left) {
  if constexpr (Visibility::kHidesTiles) {
    for (; left > 0; --left) {
      place.head = head;
      if (!tile_is_hidden(p, place, {tile * kBlockQ, (tile + 1) * kBlockQ}, keys)) return;
      if (++tile == tiles.end) {
        tile = tiles.begin;
        ++head;
      }
    }
  }
}

// The first tile of queries from `tile` on, before `last`, that a glance does not tell to be blind to the keys; `last` if there
// is none.
template <int kBlockQ>
__device__ __forceinline__ int next_seeing_tile(const Params& p, const Place& place, Range keys, int tile, int last) {
  if constexpr (Visibility::kHidesTiles)
    while (tile < last && tile_is_hidden(p, place, {tile * kBlockQ, (tile + 1) * kBlockQ}, keys)) ++tile;
  return tile;
}
