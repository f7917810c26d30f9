// float32 arrays -> planes of float16 with the exponents of their heads, and which heads these stand for, in one pass.
//
// Job: a block reads a tile of rows into registers and posts how large its numbers are; when all tiles of its head have posted, it
// splits what it kept.  Heads whose exponents are found in common are one unit.  The last block that is done with what the tiles
// of a unit posted says what was found; the last unit of those that belong to a head of keys decides whether the planes stand for
// them.
// Invariants: nobody relies on blocks that run at once.  A block waits for a while only, then gives up its tile; tiles that were
// given up are split by the last block of the unit, which waits for nobody, from memory.  Posts and counters are 0 before the
// launch.  `attention/planes.cuh` says what is written; every exponent and decision is.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/planes.cuh"
#include "hw/arrivals.cuh"
#include "hw/copy.cuh"
#include "hw/split.cuh"

constexpr int kSide = Config::kThreads / Config::kLanes;  // rows that a block looks at side by side
constexpr int kWarps = Config::kThreads / 32;
constexpr int kPatience = 64;  // looks at what is posted, before a block gives up

// Rows of one array that a block of threads works on.
struct Work {
  int array, head;        // counted over all batch entries
  int first_head, heads;  // of the unit
  int tile, tiles;        // of the head
  Range rows;             // in one part or several
  Matrix<const float> from;
  int columns;

  Work() = default;
  // Blocks are counted array by array, head by head.
  __device__ __forceinline__ Work(const Params& p, int index) {
    array = 0;
#pragma unroll
    for (int before = 0; before + 1 < Config::kArrays; ++before) {
      const int blocks = SplitShape(p, before).heads * tiles_of_head<Config>(p, before);
      if (array == before && index >= blocks) {
        index -= blocks;
        ++array;
      }
    }
    tiles = tiles_of_head<Config>(p, array);
    enter(p, index / tiles, index % tiles);
  }
  // Another tile of the same array.
  __device__ __forceinline__ void enter(const Params& p, int of_head, int index) {
    head = of_head;
    tile = index;
    const bool of_queries = SplitShape::is_of_queries(array);
    const int entry_heads = of_queries ? p.heads_q : p.heads_k;
    heads = heads_of_unit<Config>(p, array);
    first_head = head / heads * heads;
    Place place;
    place.set_head(p, head % entry_heads * (of_queries ? 1 : p.group));
    place.set_batch(p, head / entry_heads);
    const int end = of_queries ? p.seq_q : Visibility::key_count(p, place);
    const int size = rows_of_tile<Config>(p, array);
    rows = {tile * size, min(end, (tile + 1) * size)};
    const View& view = view_of<Config::kArrays>(p, array);
    from = matrix<const float>(view, of_queries ? place.offset(view) : place.key_offset(view));
    columns = SplitShape(p, array).columns;
  }
  __device__ __forceinline__ int unit_tiles() const { return heads * tiles; }
  __device__ __forceinline__ int tile_of_unit() const { return (head - first_head) * tiles + tile; }
  // The head of keys that it belongs to.
  __device__ __forceinline__ int key_head(const Params& p) const {
    return SplitShape::is_of_queries(array) ? head / p.heads_q * p.heads_k + head % p.heads_q / p.group : head;
  }
};

// Rows of a tile from one on, shared out to the threads of a block: a few lanes have a row, a thread has some of `kCount` rows, kSide
// apart.
template <int kCount> struct Part {
  static constexpr int kRows = kCount * kSide, kPieces = kCount * Config::kColumns;
  Four x[kPieces];

  __device__ __forceinline__ Part(const Work& work, int begin) {
    const int first = first_row(begin), count = rows_from(work, first);
    const float* row = work.from.at(first, 0);
    const i64 step = kSide * work.from.row;
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int i = 0; i < Config::kColumns; ++i) {
        Four& to = x[j * Config::kColumns + i];
        if (j >= count || column(i) >= work.columns)
          to = Four{};
        else if constexpr (Config::kAligned)  // columns are whole pieces
          to = load_four<true>(row + j * step, 1, column(i), column(i) + 4);
        else
          to = load_four<false>(row + j * step, work.from.column, column(i), work.columns);
      }
  }
  // What `request` has brought into shared memory, where threads have their pieces side by side.
  __device__ __forceinline__ explicit Part(const Four* held) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) x[i] = held[i * Config::kThreads + threadIdx.x];
  }
  static __device__ __forceinline__ void request(Four* held, const Work& work, int begin) {
    const int first = first_row(begin), count = rows_from(work, first);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int i = 0; i < Config::kColumns; ++i) {
        Four* to = held + (j * Config::kColumns + i) * Config::kThreads + threadIdx.x;
        const bool exists = j < count && column(i) < work.columns;
        const float* row = work.from.at(exists ? first + j * kSide : 0, 0);
        if constexpr (Config::kAligned)
          cp_async_16(shared_address(to), row + (exists ? column(i) : 0), exists ? 16 : 0);
        else
          *to = exists ? load_four<false>(row, work.from.column, column(i), work.columns) : Four{};
      }
  }

  // Of a thread, the first row and how many there are from a row on.
  static __device__ __forceinline__ int first_row(int begin) { return begin + int(threadIdx.x) / Config::kLanes; }
  static __device__ __forceinline__ int rows_from(const Work& work, int first) {
    return tiles_of(max(0, work.rows.end - first), kSide);
  }
  static __device__ __forceinline__ int column(int piece) {
    return 4 * (int(threadIdx.x) % Config::kLanes + piece * Config::kLanes);
  }

  // Of some rows; those of all rows are with the threads of a warp.
  __device__ __forceinline__ Magnitudes magnitudes() const {
    constexpr int kTogether = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
    Magnitudes found = no_magnitudes();
#pragma unroll
    for (int first = 0; first < kCount; first += kTogether) {
      u32 largest[kTogether] = {};
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
#pragma unroll
        for (int i = 0; i < Config::kColumns; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            largest[j] = max(largest[j], magnitude_bits(x[(first + j) * Config::kColumns + i].at[c]));
      share_maxima<Config::kLanes / 2, kTogether>(largest, [&](u32 row) { found.join_row(magnitude(row)); });
    }
    return found;
  }

  // Times a factor, into the planes of their head.
  __device__ __forceinline__ void store(const Params& p, const Work& work, int begin, float scale) const {
    const int width = plane_width(work.columns), first = first_row(begin), count = rows_from(work, first);
    Half* planes[Config::kPlanes];
#pragma unroll
    for (int plane = 0; plane < Config::kPlanes; ++plane)
      planes[plane] = plane_of<Config::kPlanes>(p, work.array, plane, work.head) + i64(first) * width;
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int i = 0; i < Config::kColumns; ++i) {
        if (j >= count || column(i) >= width) continue;
        Four scaled = x[j * Config::kColumns + i];
#pragma unroll
        for (int c = 0; c < 4; ++c) scaled.at[c] *= scale;
        Half* to[Config::kPlanes];
#pragma unroll
        for (int plane = 0; plane < Config::kPlanes; ++plane) to[plane] = planes[plane] + j * kSide * width + column(i);
        store_split<Config::kPlanes>(to, scaled);
      }
  }
};
template <> struct Part<0> {
  static constexpr int kRows = 0;
  __device__ __forceinline__ Part(const Work&, int) {}
  __device__ __forceinline__ Magnitudes magnitudes() const { return no_magnitudes(); }
  __device__ __forceinline__ void store(const Params&, const Work&, int, float) const {}
};
typedef Part<Config::kThreadRows> Kept;  // in registers
typedef Part<4 / Config::kColumns> Few;  // in shared memory, or read to be used at once
static_assert(Config::kRows == Kept::kRows + Config::kParts * Few::kRows, "schedules/split.py disagrees");

// What is not kept of a tile from a row on.
__device__ __forceinline__ void split_few(const Params& p, const Work& work, int begin, float scale) {
#pragma unroll 1
  for (; begin < work.rows.end; begin += Few::kRows) Few(work, begin).store(p, work, begin, scale);
}

__device__ __forceinline__ Magnitudes joined_in_warp(Magnitudes found) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2)
    found.join({__shfl_xor_sync(0xffffffffu, found.largest, bit), __shfl_xor_sync(0xffffffffu, found.least, bit)});
  return found;
}

// Whether 2^-(x + y) is a number.
__device__ __forceinline__ bool go_together(const Magnitudes& x, const Magnitudes& y) {
  const int sum = x.exponent() + y.exponent();
  return -126 <= sum && sum <= 126;
}

// By one warp, when all units of a head of keys are known: whether the planes stand for it, its values, and all that belongs to
// its queries.
__device__ __forceinline__ bool decide(const Params& p, int key_head) {
  const auto found = [&](int array, int head) {
    return load_written(unit_magnitudes<Config::kArrays>(p, array, head));
  };
  const Magnitudes k = found(kSplitK, key_head), v = found(kSplitV, key_head);
  const int step = heads_of_unit<Config>(p, kSplitQ);
  const int first = key_head / p.heads_k * p.heads_q + key_head % p.heads_k * p.group;
  bool suits = k.suits() && v.suits();
  for (int head = first + int(threadIdx.x) * step; head < first + p.group; head += 32 * step) {
    const Magnitudes q = found(kSplitQ, head);
    suits = suits && q.suits() && go_together(q, k);
    if constexpr (Config::kArrays > kSplitDout) {
      const Magnitudes dout = found(kSplitDout, head);
      suits = suits && dout.suits() && go_together(dout, v);
    }
  }
  return __all_sync(0xffffffffu, suits);
}

// By one warp of the last block: what was found of a unit, and if it is the last of its head of keys, the decision.
__device__ __forceinline__ void announce(const Params& p, const Work& work, const Magnitudes& found) {
  const int lane = threadIdx.x, key_head = work.key_head(p);
  for (int i = lane; i < work.heads; i += 32) exponents(p, work.array)[work.first_head + i] = found.exponent();
  u32* const units = unit_counter<Config::kArrays>(p, Config::kArrays, key_head);
  bool last = false;
  if (lane == 0) {
    *unit_magnitudes<Config::kArrays>(p, work.array, work.first_head) = found;
    const int of_queries = (Config::kArrays - 2) * (p.group / heads_of_unit<Config>(p, kSplitQ));
    last = int(arrive(units)) == 2 + of_queries - 1;
  }
  if (!__shfl_sync(0xffffffffu, int(last), 0)) return;
  const bool suits = decide(p, key_head);
  if (lane == 0) decisions(p)[key_head] = suits;
}

// What a block knows of its tile, out of the registers that hold it.
struct Shared {
  alignas(16) Four held[Config::kParts ? Config::kParts : 1][Few::kPieces * Config::kThreads];
  Work work;
  Magnitudes of_warps[kWarps];
  bool there;        // all tiles of the unit have posted
  bool last;         // all other blocks of the unit are done with what was posted
  Magnitudes found;  // of the unit
};

static_assert(sizeof(Shared) <= Config::kSharedBytes, "schedules/split.py disagrees");

// By one warp: of the unit, if all of its tiles have posted, and whether some of them were given up.
__device__ __forceinline__ bool read_posts(const u64* posts, int count, Magnitudes& found, bool& given_up) {
  found = no_magnitudes();
  bool there = true;
  given_up = false;
  for (int tile = threadIdx.x; tile < count; tile += 32) {
    const u64 word = posted(posts + tile);
    there = there && word != 0;
    given_up = given_up || (word & kGivenUp);
    found.join(of_a_word(word));
  }
  given_up = __any_sync(0xffffffffu, given_up);
  return __all_sync(0xffffffffu, there);
}

// By one warp: the magnitudes of a block's tile are posted, and those of its unit waited for.
__device__ __forceinline__ void settle(const Params& p, Shared& shared) {
  const Work& work = shared.work;
  Magnitudes found = joined_in_warp(threadIdx.x < kWarps ? shared.of_warps[threadIdx.x] : no_magnitudes());
  u64* const posts = tile_posts<Config>(p, work.array, work.first_head);
  if (threadIdx.x == 0) post(posts + work.tile_of_unit(), in_a_word(found));
  bool there = false, given_up;
  for (int look = 0; !there && look < kPatience; ++look) {
    if (look > 0) __nanosleep(32);
    there = read_posts(posts, work.unit_tiles(), found, given_up);
  }
  found = joined_in_warp(found);
  if (threadIdx.x == 0) {
    if (!there) post(posts + work.tile_of_unit(), posted(posts + work.tile_of_unit()) | kGivenUp);
    shared.there = there;
    shared.found = found;
  }
}

// By one thread: the block is done with what was posted, and whether it is the last.  Whoever is sees all marks.
__device__ __forceinline__ bool leave(const Params& p, const Work& work) {
  u32* const counter = unit_counter<Config::kArrays>(p, work.array, work.first_head);
  return int(arrive(counter)) == work.unit_tiles() - 1;
}

// By the last block of a unit: what was found, and the tiles that were given up.
__device__ __forceinline__ void finish_unit(const Params& p, Shared& shared) {
  Work work = shared.work;
  u64* const posts = tile_posts<Config>(p, work.array, work.first_head);
  const int count = work.unit_tiles();
  if (threadIdx.x < 32) {
    Magnitudes found;
    bool given_up;
    read_posts(posts, count, found, given_up);
    found = joined_in_warp(found);
    if (threadIdx.x == 0) {
      shared.found = found;
      shared.there = !given_up;
    }
    announce(p, work, found);
  }
  __syncthreads();
  if (!shared.there) {
    const float scale = power_of_two(shared.found.exponent());
    for (int tile = 0; tile < count; ++tile) {
      if (!(posted(posts + tile) & kGivenUp)) continue;
      work.enter(p, work.first_head + tile / work.tiles, tile % work.tiles);
      split_few(p, work, work.rows.begin, scale);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  const Work work(p, blockIdx.x);
  if (threadIdx.x == 0) shared.work = work;
#pragma unroll
  for (int i = 0; i < Config::kParts; ++i)
    Few::request(shared.held[i], work, work.rows.begin + Kept::kRows + i * Few::kRows);
  cp_async_commit_group();
  Magnitudes found = no_magnitudes();
#pragma unroll 1
  for (int begin = work.rows.begin + Config::kRows; begin < work.rows.end; begin += Few::kRows)
    found.join(Few(work, begin).magnitudes());
  const Kept kept(work, work.rows.begin);
  found.join(kept.magnitudes());
  cp_async_wait_group<0>();
#pragma unroll 1
  for (int i = 0; i < Config::kParts; ++i) found.join(Few(shared.held[i]).magnitudes());
  found = joined_in_warp(found);
  if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x < 32) settle(p, shared);
  __syncthreads();
  if (threadIdx.x == 0) shared.last = leave(p, shared.work);
  if (shared.there) {
    const float scale = power_of_two(shared.found.exponent());
    int begin = shared.work.rows.begin;
    kept.store(p, shared.work, begin, scale);
    begin += Kept::kRows;
#pragma unroll 1
    for (int i = 0; i < Config::kParts; ++i, begin += Few::kRows)
      Few(shared.held[i]).store(p, shared.work, begin, scale);
    split_few(p, shared.work, begin, scale);
  }
  __syncthreads();
  if (shared.last) finish_unit(p, shared);
}
