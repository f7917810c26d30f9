// Where a block stands: batch entry and head, ranges of positions, offsets into arrays of any strides.
//
// Invariants: positions are 32-bit (the host refuses longer sequences), every offset into memory is 64-bit.
//
// Packed sequences (kPacked) are segments of one axis: seq_q and seq_k of the arguments then count the rows of all of them, and
// a block first enters the segment that its tile belongs to.  From there on positions count from the segment's first row, as if
// it lay alone.  Tiles are numbered along each side: those of segment i from offset / tile + i on, which leaves it as many as
// it needs, at most one more, and lets a block find its segment by bisection.  Behind the last segment stands one more, of
// the rows that belong to none: it has queries without keys, or keys without queries.
//
// Offsets may be anything, since the host may not have looked at them: they are clamped to the arrays.
#pragma once

struct Range {  // half-open interval of positions
  int begin, end;
};

__device__ __forceinline__ int tiles_of(int length, int tile) { return (length + tile - 1) / tile; }
__device__ __forceinline__ bool is_empty(Range positions) { return positions.begin >= positions.end; }

// A row of an array as cuflash/tensormap.py describes it: its place along the axis of rows, and along the outermost one.  Rows
// behind the last one of a packed segment lie outside the array.
struct DescribedRow { int row, batch; };

// A tile of a head; heads are counted over all batch entries.
struct Assignment {
  int tile, head;

  __device__ __forceinline__ Assignment() : tile(0), head(0) {}
  // Of the block with that number.  Some heads at a time (the host's `section`), so that what their blocks read stays in the
  // cache; among these tile by tile: where the first tiles take longest, no head begins its longest when others are done.
  template <class P> __device__ __forceinline__ Assignment(const P& p, int index, int tiles, int heads) {
    const u32 section = p.section, first = u32(index) / (section * tiles) * section;
    const u32 width = min(section, heads - first), rest = index - first * tiles;
    tile = int(rest / width);
    head = int(first + rest % width);
  }
  // The same where the last `late` tiles of every head come behind those of all heads.
  template <class P> __device__ __forceinline__ Assignment(const P& p, int index, int tiles, int heads, int late) {
    const int early = tiles - late, rest = index - early * heads;
    if (rest < 0) {
      *this = Assignment(p, index, early, heads);
    } else {
      tile = early + rest / heads;
      head = rest % heads;
    }
  }
};

// A segment in a list of tiles that has those of long walks first (segment_lists.cu).
struct alignas(16) ListedSegment {
  int index, before;    // and how many tiles of each head the list has in front of its own
  Range queries, keys;  // its rows of the arrays
  int unused[2];
};
// In front of each list.
struct alignas(16) ListHead {
  int tiles;  // of each head
  u32 taken;  // by blocks that stay, beyond those that they begin with
  int unused[6];
};
static_assert(sizeof(ListHead) == sizeof(ListedSegment), "an element of the list");

// The rows that a block works in: here, all of them.
template <bool kIsPacked> struct Segment {
  static __device__ __forceinline__ int seq_q(const Params& p) { return p.seq_q; }
  static __device__ __forceinline__ int seq_k(const Params& p) { return p.seq_k; }
  // To work in the same rows.
  static __device__ __forceinline__ void take_rows(const Segment&) {}
  // What causal masks, windows and distances count from, of what the host made it.
  static __device__ __forceinline__ int diagonal(int of_all) { return of_all; }
  static __device__ __forceinline__ i64 query_offset(const View&) { return 0; }
  static __device__ __forceinline__ i64 key_offset(const View&) { return 0; }
  static __device__ __forceinline__ DescribedRow described_query(const Params&, int row, int batch) {
    return {row, batch};
  }
  static __device__ __forceinline__ DescribedRow described_key(const Params&, int row, int batch) {
    return {row, batch};
  }
  // Row, among those padded to whole tiles, at which the segment's begin.
  template <int kTile> static __device__ __forceinline__ int padded_row() { return 0; }
  // Tiles of one head.
  template <int kTile> static __device__ __forceinline__ int query_tiles(const Params& p) {
    return tiles_of(p.seq_q, kTile);
  }
  template <int kTile> static __device__ __forceinline__ int key_tiles(const Params& p) {
    return tiles_of(p.seq_k, kTile);
  }
  // Tiles of one head in the order in which they are listed, and where blocks that stay count those taken.
  template <int kList, int kTile> static __device__ __forceinline__ int listed_queries(const Params& p) {
    return query_tiles<kTile>(p);
  }
  template <int kTile> static __device__ __forceinline__ int listed_keys(const Params& p) {
    return key_tiles<kTile>(p);
  }
  template <int kList, class P> static __device__ __forceinline__ u32* taken(const P& p) {
    return static_cast<u32*>(p.tile_counter);
  }
  // Enter the segment of the tile with that place in the list of all heads'; the tile's number in it, and the head.
  template <int kList, int kTile, class P>
  static __device__ __forceinline__ Assignment enter_listed_queries(const P& p, int place, int heads) {
    return Assignment(p, place, query_tiles<kTile>(p), heads, p.late);
  }
  template <int kTile>
  static __device__ __forceinline__ Assignment enter_listed_keys(const Params& p, int place, int heads) {
    return Assignment(p, place, key_tiles<kTile>(p), heads);
  }
  // Enter the segment of a tile; the tile's number in it, which may be one that it has no rows for.
  template <int kTile> static __device__ __forceinline__ int enter_queries(const Params&, int tile) { return tile; }
  template <int kTile> static __device__ __forceinline__ int enter_keys(const Params&, int tile) { return tile; }
  // The same of a row among those padded to whole tiles.
  template <int kTile> static __device__ __forceinline__ int enter_row(const Params&, int row) { return row; }
  // By all lanes of a warp, for rows of the same tile.
  template <int kTile> static __device__ __forceinline__ int enter_row_by_warp(const Params&, int row) { return row; }
  template <int kTileQ, int kTileK> static __device__ __forceinline__ bool has_all_tiles(const Params&) { return true; }
  template <class Where> static __device__ __forceinline__ int entry(const Params& p, const Where& place) {
    int number = 0;
#pragma unroll
    for (int axis = 0; axis < kBatchAxes; ++axis) number = number * p.batch_sizes[axis] + place.batch[axis];
    return number;
  }
  // Whether it is made of the rows that belong to no sequence.
  static __device__ __forceinline__ bool is_of_none(const Params&) { return false; }
};

// Where the segments of one side begin: of segment i, and behind the last one.
struct Offsets {
  const int* at;
  i64 stride;
  int count, total;

  __device__ __forceinline__ Offsets(const View& view, int segments, int rows)
      : at(static_cast<const int*>(view.data)), stride(view.row), count(segments), total(rows) {}
  __device__ __forceinline__ int begin(int i) const {
    const int there =
        min(max(at[min(i, count) * stride], 0), total);  // read in any case, so that no load waits for a branch
    return i == 0 ? 0 : i > count ? total : there;
  }
  __device__ __forceinline__ Range rows(int i) const {
    const int first = begin(i);
    return {first, max(first, begin(i + 1))};
  }
  // Number of the segment's first tile.
  __device__ __forceinline__ int first_tile(int i, int tile) const { return begin(i) / tile + i; }
  // The segment that a tile is numbered with; by all lanes of a warp, for the same tile.
  __device__ __forceinline__ int segment_by_warp(int number, int tile) const {
    int low = 0, last = count;
    while (low < last) {
      const int step = (last - low + 31) / 32, probe = low + (int(threadIdx.x) % 32 + 1) * step;
      const bool begins = probe <= last && first_tile(probe, tile) <= number;
      const int passed = __popc(__ballot_sync(0xffffffffu, begins));
      low += passed * step;
      last = min(last, low + step - 1);
    }
    return low;
  }
  // The same by one thread.
  __device__ __forceinline__ int segment_of(int number, int tile) const {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_tile(middle, tile) <= number)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }
};

// The rows that a block works in: those of one of many sequences.
template <> struct Segment<true> {
  int index;
  Range queries, keys;  // rows of the arrays
  int from_diagonal;

  template <class P> __device__ __forceinline__ int seq_q(const P&) const { return queries.end - queries.begin; }
  template <class P> __device__ __forceinline__ int seq_k(const P&) const { return keys.end - keys.begin; }
  __device__ __forceinline__ void take_rows(const Segment& of) { *this = of; }
  __device__ __forceinline__ int diagonal(int of_all) const { return of_all + from_diagonal; }
  __device__ __forceinline__ i64 query_offset(const View& view) const { return queries.begin * view.row; }
  __device__ __forceinline__ i64 key_offset(const View& view) const { return keys.begin * view.row; }
  template <class P> __device__ __forceinline__ DescribedRow described_query(const P& p, int row, int) const {
    return described(queries, p.seq_q, row);
  }
  template <class P> __device__ __forceinline__ DescribedRow described_key(const P& p, int row, int) const {
    return described(keys, p.seq_k, row);
  }
  template <int kTile> __device__ __forceinline__ int padded_row() const {
    return (queries.begin / kTile + index) * kTile;
  }
  template <int kTile, class P> static __device__ __forceinline__ int query_tiles(const P& p) {
    return p.seq_q / kTile + p.segment_count + 1;
  }
  template <int kTile, class P> static __device__ __forceinline__ int key_tiles(const P& p) {
    return p.seq_k / kTile + p.segment_count + 1;
  }

  template <int kList, int kTile, class P> static __device__ __forceinline__ int listed_queries(const P& p) {
    return head_of_list<kList>(p)->tiles;
  }
  template <int kTile, class P> static __device__ __forceinline__ int listed_keys(const P& p) {
    return head_of_list<0>(p)->tiles;
  }
  template <int kList, class P> static __device__ __forceinline__ u32* taken(const P& p) {
    return &head_of_list<kList>(p)->taken;
  }
  template <int kList, int kTile, class P>
  __device__ __forceinline__ Assignment enter_listed_queries(const P& p, int place, int heads) {
    return enter_listed<kList>(p, place, heads, [&] { return tiles_of(seq_q(p), kTile); });
  }
  template <int kTile, class P>
  __device__ __forceinline__ Assignment enter_listed_keys(const P& p, int place, int heads) {
    return enter_listed<0>(p, place, heads, [&] { return tiles_of(seq_k(p), kTile); });
  }
  // Enter the one with that number, which has queries or keys alone where it is made of the rows that belong to none.
  template <bool kOfKeys, class P> __device__ __forceinline__ void enter(const P& p, int number) {
    index = number;
    look_up(p);
    if (index == p.segment_count) (kOfKeys ? queries : keys) = {0, 0};
  }
  template <int kTile, class P> __device__ __forceinline__ int enter_queries(const P& p, int tile) {
    enter<false>(p, offsets_q(p).segment_of(tile, kTile));
    return tile - (queries.begin / kTile + index);
  }
  template <int kTile, class P> __device__ __forceinline__ int enter_keys(const P& p, int tile) {
    enter<true>(p, offsets_k(p).segment_of(tile, kTile));
    return tile - (keys.begin / kTile + index);
  }
  template <class Where> static __device__ __forceinline__ int entry(const Params&, const Where& place) {
    return place.index;
  }
  template <class P> __device__ __forceinline__ bool is_of_none(const P& p) const { return index == p.segment_count; }
  template <class P> __device__ __forceinline__ void recall(const P& p) {
    index = recomputed(index);
    look_up(p);
  }
  template <int kTile, class P> __device__ __forceinline__ int enter_row(const P& p, int row) {
    return enter_queries<kTile>(p, row / kTile) * kTile + row % kTile;
  }
  template <int kTile, class P> __device__ __forceinline__ int enter_row_by_warp(const P& p, int row) {
    const int tile = row / kTile;
    enter<false>(p, offsets_q(p).segment_by_warp(tile, kTile));
    return (tile - (queries.begin / kTile + index)) * kTile + row % kTile;
  }
  // Whether every tile of the segment is numbered with it, on both sides.  Blocks that wait for each other's tiles rely on it;
  // it is so wherever offsets do not decrease.
  template <int kTileQ, int kTileK, class P> __device__ __forceinline__ bool has_all_tiles(const P& p) const {
    return is_whole<kTileQ>(offsets_q(p), queries) && is_whole<kTileK>(offsets_k(p), keys);
  }

 private:
  template <int kList, class P> static __device__ __forceinline__ ListHead* head_of_list(const P& p) {
    return static_cast<ListHead*>(p.segment_lists) + i64(kList) * (p.listed_tiles + 1);
  }
  template <int kList, class P, class Tiles>
  __device__ __forceinline__ Assignment enter_listed(const P& p, int place, int heads, Tiles tiles) {
    const ListHead* const head = head_of_list<kList>(p);
    const int rank = place / heads;
    // Asked for beside the length of the list, behind which there may be anything.
    const ListedSegment listed = reinterpret_cast<const ListedSegment*>(head)[1 + rank];
    index = listed.index;
    queries = listed.queries;
    keys = listed.keys;
    set_diagonal(p);
    if (rank >= head->tiles) {
      queries = keys = {0, 0};
      return Assignment();
    }
    return Assignment(p, place - listed.before * heads, tiles(), heads);
  }
  template <class P> static __device__ __forceinline__ Offsets offsets_q(const P& p) {
    return Offsets(p.segments_q, p.segment_count, p.seq_q);
  }
  template <class P> static __device__ __forceinline__ Offsets offsets_k(const P& p) {
    return Offsets(p.segments_k, p.segment_count, p.seq_k);
  }
  template <class P> __device__ __forceinline__ void look_up(const P& p) {
    queries = offsets_q(p).rows(index);
    keys = offsets_k(p).rows(index);
    set_diagonal(p);
  }
  template <class P> __device__ __forceinline__ void set_diagonal(const P& p) {
    from_diagonal = p.segments_end_together ? seq_k(p) - seq_q(p) : 0;
  }
  // Along the axis of rows a segment ends where the array does; the outermost axis brings it to its place.
  static __device__ __forceinline__ DescribedRow described(Range rows, int total, int row) {
    const int length = rows.end - rows.begin;
    return {total - length + min(row, length), rows.end};
  }
  // Tiles between two of one segment are of the same: bisection takes the same turns for them.
  template <int kTile> __device__ __forceinline__ bool is_whole(const Offsets& offsets, Range rows) const {
    if (is_empty(rows)) return true;
    const int first = offsets.first_tile(index, kTile), last = first + (rows.end - rows.begin - 1) / kTile;
    return offsets.segment_of(first, kTile) == index && offsets.segment_of(last, kTile) == index;
  }
};

// The batch entry and head that a block of threads works on.
struct Place : Segment<kPacked> {
  int batch[kBatchAxes];
  int head;       // of the queries
  int head_k;     // of the keys and values that this head shares with its group
  int key_count;  // keys that exist for this batch entry: seq_k, or its own length

  // Number of the sequence: of its batch entry, all batch axes merged, or of its segment.
  __device__ __forceinline__ int entry(const Params& p) const { return Segment::entry(p, *this); }
  __device__ __forceinline__ i64 batch_offset(const View& view) const {
    i64 at = 0;
    if constexpr (!kPacked) {  // segments take the place of batch axes
#pragma unroll
      for (int axis = 0; axis < kBatchAxes; ++axis) at += batch[axis] * view.batch[axis];
    }
    return at;
  }
  __device__ __forceinline__ i64 offset(const View& view, int of_head) const {
    return batch_offset(view) + of_head * view.head + Segment::query_offset(view);
  }
  __device__ __forceinline__ i64 offset(const View& view) const { return offset(view, head); }
  __device__ __forceinline__ i64 key_offset(const View& view) const {
    return batch_offset(view) + head_k * view.head + Segment::key_offset(view);
  }

  __device__ __forceinline__ void set_batch(const Params& p, int index) {
    if constexpr (!kPacked) {
#pragma unroll
      for (int axis = kBatchAxes - 1; axis >= 0; --axis) {
        const int size = p.batch_sizes[axis];
        batch[axis] = size == 1 ? 0 : index % size;
        if (size != 1) index /= size;
      }
    }
  }
  __device__ __forceinline__ void set_head(const Params& p, int index) {
    head = index;
    head_k = index / p.group;
  }
};

// Memory of one (batch entry, head), as rows and columns.
template <class T> struct Matrix {
  T* data;
  i64 row, column;  // strides in elements

  __device__ __forceinline__ T* at(i64 r, i64 c) const { return data + r * row + c * column; }
};
template <class T> __device__ __forceinline__ Matrix<T> matrix(const View& view, i64 offset) {
  return {static_cast<T*>(view.data) + offset, view.row, view.column};
}

// An element of an operand, from `offset` on in its batch entry and head.  Rows and columns of operands lie less than 2^31 bytes
// apart (plan.py, check_operand), so that each takes one multiplication from 32 bits to 64.
template <class T>
__device__ __forceinline__ T* element_at(const View& view, i64 offset, int row, int column) {
  const int row_bytes = low_word(view.row * i64(sizeof(T))), column_bytes = low_word(view.column * i64(sizeof(T)));
  char* first = reinterpret_cast<char*>(static_cast<T*>(view.data) + offset);
  return reinterpret_cast<T*>(first + i64(row) * row_bytes + i64(column) * column_bytes);
}

// Whether entries of the batch have one each.
__device__ __forceinline__ bool is_of_entry(const View& view) {
  bool found = false;
#pragma unroll
  for (int axis = 0; axis < kBatchAxes; ++axis) found |= view.batch[axis] != 0;
  return found;
}
// A head and its batch entry, by their number: heads of an entry follow each other, or entries of a head where blocks of a bias are
// brought that entries share, so that these are read side by side.
struct HeadOfEntry {
  int head, batch;

  template <class P> __device__ __forceinline__ HeadOfEntry(const P& p, int number, int heads) {
    bool entries_first = false;
    if constexpr (kBringsBias) entries_first = (p.bias.head != 0) & !is_of_entry(p.bias);
    head = entries_first ? number / p.batch_size : number % heads;
    batch = entries_first ? number % p.batch_size : number / heads;
  }
};

// Tiles that hold some of the positions.
template <int kTile> __device__ __forceinline__ Range tiles_over(Range positions) {
  return {positions.begin / kTile, tiles_of(positions.end, kTile)};
}
