// What both decode kernels share: the list of work, and how the results of warps and of blocks become one.
//
// A unit is an entry of the batch, a head of the keys and a tile of packed query rows.  The blocks of keys of all units form
// one list, which is cut into equal slices whatever the units: a block of threads works on one slice, that is on the end of
// a unit, whole units, and the beginning of one.  So a launch is as long for any lengths, and depends on them in nothing else.
//
// Whole units are written at once.  Of a unit that is cut, blocks leave their parts, at most two each, and the one that
// arrives last adds them up in the order of the slices: results do not depend on who came last.  It also resets the count.
//
// kHeadLanes neighbouring blocks walk the same slice for neighbouring heads, which read neighbouring pieces of the same rows
// at about the same time.
#pragma once
#include "attention/packed.cuh"
#include "attention/partials.cuh"
#include "hw/arrivals.cuh"

__device__ __forceinline__ int row_tiles(const Params& p) { return tiles_of(p.seq_q * p.group, Config::kRows); }
// Units of an entry in one lane of heads.
__device__ __forceinline__ u32 units_of(const Params& p) {
  return u32(p.heads_k / Config::kHeadLanes) * u32(row_tiles(p));
}
__device__ __forceinline__ u32 lane_of_heads() { return blockIdx.x % Config::kHeadLanes; }

// The list cut into slices of one length, the last of which may be shorter: as many rounds of a block's warps as the launch
// needs for the whole list, so that there are as few slices as that allows, which leaves the fewest parts.
struct Slices {
  u32 total, length;

  Slices() = default;
  __device__ __forceinline__ explicit Slices(u32 all) : total(all) {
    const u32 round = gridDim.x / Config::kHeadLanes * Config::kWarps;
    length = max(1u, (total + round - 1) / round) * Config::kWarps;
  }
  __device__ __forceinline__ u32 begin(u32 slice) const { return min(slice * length, total); }
  __device__ __forceinline__ u32 holding(u32 at) const { return at / length; }
};

// A place at which a walk over the list may begin.
struct Start {
  u32 entry;  // of the batch
  u32 begin;  // of that entry in the list
};

// This block's part of the list, [begin, end).  Lengths are on the device, so that every warp counts the list by itself: each
// lane a few neighbouring entries.  `start` is at the first entry of the lane in whose entries the part begins, or before it.
struct Share {
  Slices slices;
  u32 slice, begin, end;
  Start start;

  __device__ __forceinline__ explicit Share(const Params& p) {
    const int each = (p.batch_size + 31) / 32, first = int(threadIdx.x) % 32 * each;
    u32 mine = 0;
#pragma unroll 4
    for (int i = 0; i < each; ++i) mine += blocks_of_entry(p, first + i);
    mine *= units_of(p);
    u32 until = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const u32 before = __shfl_up_sync(0xffffffffu, until, step);
      if (int(threadIdx.x) % 32 >= step) until += before;
    }
    slices = Slices(__shfl_sync(0xffffffffu, until, 31));
    slice = blockIdx.x / Config::kHeadLanes;
    begin = slices.begin(slice);
    end = slices.begin(slice + 1);
    const u32 past = __ballot_sync(0xffffffffu, until > begin);
    const int found = past ? __ffs(int(past)) - 1 : 0;
    start = {u32(found * each), __shfl_sync(0xffffffffu, until - mine, found)};
  }

 private:
  static __device__ __forceinline__ u32 blocks_of_entry(const Params& p, int entry) {
    if (entry >= p.batch_size) return 0;
    const Range blocks = blocks_of<Config::kBlockK>(p, Sequence(p, entry));
    return u32(blocks.end - blocks.begin);
  }
};

// New keys into their caches, shared out to all warps of the grid.
__device__ __forceinline__ void append_share(const Params& p) {
  const int first = int(blockIdx.x * Config::kWarps + threadIdx.x / 32), step = int(gridDim.x) * Config::kWarps;
  if constexpr (Config::kAppends) append<Config::kPaged>(p, first, step, int(threadIdx.x) % 32, 32);
}

// An entry of the batch in the list.
struct Walk {
  Sequence sequence;
  Range blocks;  // of keys
  u32 begin;     // in the list

  __device__ __forceinline__ Walk(const Params& p, const Start& start)
      : sequence(p, int(start.entry)), blocks(blocks_of<Config::kBlockK>(p, sequence)), begin(start.begin) {}
};

// The entry that a place in the list belongs to, at or behind `from`, which moves there.  Only `from` is kept between two
// calls: what can be computed anew costs less than the registers that it would take.
__device__ __forceinline__ Walk moved_to(Start& from, const Params& p, u32 at) {
  while (true) {
    const Walk walk(p, from);
    const u32 size = u32(walk.blocks.end - walk.blocks.begin) * units_of(p);
    if (at - walk.begin < size) return walk;
    ++from.entry;
    from.begin += size;
  }
}

// The unit that a place in the list belongs to.
struct Unit {
  int head_k, first_row;
  int first_block;  // of keys
  u32 begin, end;   // in the list
  Range seen;       // keys that some query of the tile sees

  __device__ __forceinline__ Unit(const Params& p, const Walk& walk, u32 at) {
    const u32 length = walk.blocks.end - walk.blocks.begin, tiles = row_tiles(p), index = (at - walk.begin) / length;
    const u32 head = tiles == 1 ? index : index / tiles;
    head_k = int(head * Config::kHeadLanes + lane_of_heads());
    first_row = int(index - head * tiles) * Config::kRows;
    first_block = walk.blocks.begin;
    begin = walk.begin + index * length;
    end = begin + length;
    seen = keys_seen_by_any(p, walk.sequence.place, queries(p, walk.sequence));
  }
  __device__ __forceinline__ Range queries(const Params& p, const Sequence& sequence) const {
    return sequence.positions(queries_of_rows<Config::kRows>(p, first_row));
  }
  // The key that a place in the list begins with.
  __device__ __forceinline__ int key(u32 at) const { return (first_block + int(at - begin)) * Config::kBlockK; }
};

// Queries of a unit as rows of a tile, zeros behind the last; by all threads.
template <int kTileRows, int kColumns, class Put>
__device__ __forceinline__ void load_queries(const Params& p, const Sequence& sequence, const Unit& unit, Put put) {
#pragma unroll 1
  for (int index = int(threadIdx.x); index < kTileRows * kColumns; index += Config::kThreads) {
    const int row = index / kColumns, column = index % kColumns;
    Element x = {};
    if (row < Config::kRows && is_packed_row(p, unit.first_row + row) && column < p.head_dim) {
      const PackedRow packed = packed_row(p, unit.head_k, unit.first_row + row);
      x = row_of<Element>(p.q, sequence.entry(), packed.head, packed.query)[column * p.q.column];
    }
    put(row, column, x);
  }
}

// The same in pieces of 16 bytes, which are on their way between a request and the time when they are put into the tile.
template <int kTileRows, int kColumns> struct QueriesAhead {
  static constexpr int kChunk = 16 / int(sizeof(Element)), kRowChunks = kColumns / kChunk;
  static constexpr int kAll = kTileRows * kRowChunks, kMine = (kAll + Config::kThreads - 1) / Config::kThreads;
  uint4 chunks[kMine];

  __device__ __forceinline__ void request(const Params& p, const Sequence& sequence, const Unit& unit) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = int(threadIdx.x) + i * Config::kThreads, row = index / kRowChunks;
      const int column = index % kRowChunks * kChunk;
      chunks[i] = make_uint4(0, 0, 0, 0);
      if (row < Config::kRows && is_packed_row(p, unit.first_row + row) && column < p.head_dim) {
        const PackedRow packed = packed_row(p, unit.head_k, unit.first_row + row);
        const Element* from = row_of<Element>(p.q, sequence.entry(), packed.head, packed.query) + column;
        chunks[i] = *reinterpret_cast<const uint4*>(from);
      }
    }
  }
  template <class Tile> __device__ __forceinline__ void put(Tile& tile) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int index = int(threadIdx.x) + i * Config::kThreads;
      if (kAll % Config::kThreads == 0 || index < kAll)
        *reinterpret_cast<uint4*>(tile.at(index / kRowChunks, index % kRowChunks * kChunk)) = chunks[i];
    }
  }
};

// ---- results ---------------------------------------------------------------------------------------------------------
constexpr int kPiece = 16 / int(sizeof(Real));  // columns that a thread works on
constexpr int kPieces = Config::kHeadDimV / kPiece;
static_assert(Config::kHeadDimV % kPiece == 0, "whole pieces");

struct MergeStorage {
  Chunk<Real> o[Config::kWarps][Config::kRows][kPieces + 1];  // the last one spreads rows over banks
  Real m[Config::kWarps][Config::kRows], l[Config::kWarps][Config::kRows];
  RowTotal total[Config::kRows];
  u32 is_last;  // whether all other parts of the unit are in memory
};

__device__ __forceinline__ Chunk<Real> merged_piece(const MergeStorage& merge, int row, int piece) {
  Chunk<Real> sum = merge.o[0][row][piece];
#pragma unroll
  for (int warp = 1; warp < Config::kWarps; ++warp) {
    const Chunk<Real> x = merge.o[warp][row][piece];
#pragma unroll
    for (int c = 0; c < kPiece; ++c) sum.at[c] += x.at[c];
  }
  return sum;
}

template <class T, int kWidth> struct alignas(sizeof(T) * kWidth) Columns { T at[kWidth]; };

// Neighbouring columns of a row, from `column` on.
template <int kWidth>
__device__ __forceinline__ void write_columns(const Params& p, int entry, const Unit& unit, int row, int column,
                                              const Real (&o)[kWidth], const RowTotal& total) {
  const PackedRow packed = packed_row(p, unit.head_k, unit.first_row + row);
  Element* to = row_of<Element>(p.out, entry, packed.head, packed.query);
  const RowEnd<kHasSinks> end(total, p, kHasSinks ? Sequence(p, entry).place : Place(), packed.head);
  const Real inverse = end.inverse();
  if (p.out_vectors && column + kWidth <= p.head_dim_v) {
    Columns<Element, kWidth> x;
#pragma unroll
    for (int c = 0; c < kWidth; ++c) x.at[c] = Rounded<Element>::of(o[c] * inverse);
    *reinterpret_cast<Columns<Element, kWidth>*>(to + column) = x;
  } else {
#pragma unroll
    for (int c = 0; c < kWidth; ++c)
      if (column + c < p.head_dim_v) to[(column + c) * p.out.column] = Rounded<Element>::of(o[c] * inverse);
  }
  if (column == 0 && p.lse.data) *row_of<Real>(p.lse, entry, packed.head, packed.query) = end.lse(p);
}

// The parts of a unit are added up by half a piece in each thread, so that many of them are under way at once.
constexpr int kHalf = kPiece / 2, kHalves = 2 * kPieces, kParts = sizeof(Real) == 4 ? 16 : 8;

// The results of the warps for their part of a unit, [from, to) in the list, become one; a whole unit is written, of a cut
// one the part is left, or the sum of all parts written.  `between` is run when all warps are done with the unit.
template <class Softmax, class ScoreFragment, class OutFragment, class Between>
__device__ __forceinline__ void finish_part(MergeStorage& merge, const Params& p, const Share& share, int entry,
                                            const Unit& unit, Softmax& softmax, const ScoreFragment& s_at,
                                            const Real (&o)[OutFragment::kSize], const OutFragment& o_at,
                                            Between between) {
  const int warp = int(threadIdx.x) / 32;
  const u32 first = share.slices.holding(unit.begin), last = share.slices.holding(unit.end - 1);
  const bool whole = first == last;
  u32* const arrivals = static_cast<u32*>(p.arrivals) + first * Config::kHeadLanes + lane_of_heads();
  u32 before = 0;  // where all others are in already, this part need not be written
  if (!whole && threadIdx.x == 0) before = arrived(arrivals);

  softmax.finish();
  if (s_at.leads_row()) {
#pragma unroll
    for (int slot = 0; slot < ScoreFragment::kSlots; ++slot) {
      merge.m[warp][s_at.row(slot)] = softmax.m[slot];
      merge.l[warp][s_at.row(slot)] = softmax.l[slot];
    }
  }
  __syncthreads();  // bases and sums of all warps
  const auto total = [&](int row) {
    return total_of<Config::kWarps>(p, [&](int i) { return RowTotal{merge.m[i][row], merge.l[i][row]}; });
  };
  Real factor[OutFragment::kSlots];
#pragma unroll
  for (int slot = 0; slot < OutFragment::kSlots; ++slot) {
    const int row = o_at.row(slot);
    factor[slot] = weight_in(total(row).m, merge.m[warp][row], p);
  }
#pragma unroll
  for (int i = 0; i < OutFragment::kSize; ++i) {
    const int slot = OutFragment::slot(i), column = o_at.column(i);
    merge.o[warp][o_at.row(slot)][column / kPiece].at[column % kPiece] = o[i] * factor[slot];
  }
  if (threadIdx.x < Config::kRows) merge.total[threadIdx.x] = total(threadIdx.x);
  if (threadIdx.x == 0) merge.is_last = before == last - first;
  between();
  __syncthreads();  // outputs of all warps, all at the base of the total

  const int rows = min(Config::kRows, p.seq_q * p.group - unit.first_row);
  if (whole) {
    for (int index = int(threadIdx.x); index < rows * kPieces; index += Config::kThreads) {
      const int row = index / kPieces, piece = index % kPieces;
      write_columns(p, entry, unit, row, piece * kPiece, merged_piece(merge, row, piece).at, merge.total[row]);
    }
    return;
  }

  // A slice's first part has slot 0; a part that begins within the slice, where another came before it, has slot 1.
  const auto slot_of = [&](u32 of) {
    const u32 block = of * Config::kHeadLanes + lane_of_heads();
    return 2 * block + (of == first && share.slices.begin(first) < unit.begin ? 1 : 0);
  };
  Chunk<Real>* const parts = static_cast<Chunk<Real>*>(p.parts);
  RowTotal* const totals = static_cast<RowTotal*>(p.part_totals);
  if (!merge.is_last) {
    const u32 slot = slot_of(share.slice);
    for (int index = int(threadIdx.x); index < rows * kPieces; index += Config::kThreads) {
      const int row = index / kPieces, piece = index % kPieces;
      parts[(slot * Config::kRows + row) * kPieces + piece] = merged_piece(merge, row, piece);
      if (piece == 0) totals[slot * Config::kRows + row] = merge.total[row];
    }
    __syncthreads();  // the part is written
    if (threadIdx.x == 0) merge.is_last = arrive(arrivals) == last - first;
    __syncthreads();
    if (!merge.is_last) return;
  }
  if (threadIdx.x == 0) *arrivals = 0;
  typedef Columns<Real, kHalf> Half;
  for (int index = int(threadIdx.x); index < rows * kHalves; index += Config::kThreads) {
    const int row = index / kHalves, half = index % kHalves;
    const Chunk<Real> whole_piece = merged_piece(merge, row, half / 2);
    RowUnion<kHalf> sum;
#pragma unroll 1
    for (u32 of = first; of <= last; of += kParts) {
      RowTotal part[kParts];
      Real x[kParts][kHalf];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        // Behind the first part lie those with slot 0, at equal distances.
        const u32 slot = i ? 2 * (of * Config::kHeadLanes + lane_of_heads()) + 2 * Config::kHeadLanes * i : slot_of(of);
        const u32 from = slot * Config::kRows + row;
        part[i] = no_keys();
        Half o = {};
        if (of + i <= last) {
          part[i] = load_written(totals + from);
          o = load_written(reinterpret_cast<const Half*>(parts) + from * kHalves + half);
        }
        if (of + i == share.slice) {
          part[i] = merge.total[row];
#pragma unroll
          for (int c = 0; c < kHalf; ++c) o.at[c] = half % 2 ? whole_piece.at[kHalf + c] : whole_piece.at[c];
        }
#pragma unroll
        for (int c = 0; c < kHalf; ++c) x[i][c] = o.at[c];
      }
      sum.template add<kParts>(part, x, p);
    }
    write_columns(p, entry, unit, row, half * kHalf, sum.o, sum.all);
  }
}
