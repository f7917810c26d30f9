// Gradient of a bias on Hopper's tensor cores by wgmma, where heads or entries of the batch share it (sm_90a, float16 and bfloat16).
//
// Job: beside backward_wgmma.cu, which makes the other gradients.  There every block would add its dS to sums in memory, four bytes
// for each score; here scores are made a second time, and nothing but the bias and its gradient has their size in memory.  Blocks
// stay and take the next tile of queries and keys that nobody has, each with all heads that share it; warpgroup 0 produces, the other
// two own 64 rows each:
//   S = Q Kᵀ + bias, P, dP = dO Vᵀ, dbias += dS
// The bias is brought once.  Factors come in pairs, those of S and those of dP, in a ring as long as there is room, which does not
// stop between tiles.  The warpgroups take turns at queueing S and dP, so that P and dS of one are formed under the products of the
// other; where a mask leaves no registers to dP, it is queued when P is there.
// Invariants: producer and consumers pass over the same heads, those of which the tile sees nothing; keys that nobody sees are zeros
// in V; the whole gradient is written, each element once, by a sum of one order.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/fragment_simt.cuh"
#include "hw/gemm_wgmma.cuh"
#include "bias_blocks.cuh"
#include "attention/epilogue.cuh"

constexpr int kGroups = Config::kBlockQ / kWarpgroupRows;  // of consumers
constexpr int kAllBarrier = 1, kTurnBarrier = 2, kConsumers = kGroups * kWarpgroupThreads;
constexpr int kBoxes = Config::kBlockQ / Config::kBoxOfQueries;  // of rows of a tile
static_assert(!kPacked && !Visibility::kHidesTiles && !Visibility::kClearsTiles, "nothing but a bias changes scores");

typedef PanelTile<Config::kBlockQ, Config::kHeadDim> QueryTile;
typedef PanelTile<Config::kBlockQ, Config::kHeadDimV> DoutTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDim> KeyTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDimV> ValueTile;
typedef PanelTile<Config::kBlockQ, Config::kBlockK> BiasTile;
typedef MmaFragment<1, Config::kBlockK / 8> ScoreFragment;
typedef TileStatistics<Config::kBoxOfQueries> Statistics;
constexpr bool kLateDp = Visibility::kHasMask;
constexpr int kStatisticsStages = (Config::kStages + 1) / 2;  // every other pair has some

// What an element of the gradient becomes.
template <bool kRounds> struct SumOf { typedef float Type; };
template <> struct SumOf<true> { typedef OutElement Type; };
typedef SumOf<Config::kRounds>::Type Sum;

// Factors of a product.
template <class A, class B> struct Pair {
  A a;
  B b;
};
union Slot {
  Pair<QueryTile, KeyTile> scores;
  Pair<DoutTile, ValueTile> dp;
};

__device__ __forceinline__ int tile_count(const Params& p) {
  const int biases = (is_of_entry(p.dbias) ? p.batch_size : 1) * (p.dbias.head != 0 ? p.heads_q : 1);
  return tiles_of(p.seq_k, Config::kBlockK) * tiles_of(p.seq_q, Config::kBlockQ) * biases;
}
// A tile of the gradient, and who shares it.
struct Tile {
  Range queries, keys;
  Range entries, heads;  // of the batch, all axes merged; of the queries
  bool exists;           // else the block ends

  Tile() = default;
  __device__ __forceinline__ Tile(const Params& p, int index) {
    const int key_tiles = tiles_of(p.seq_k, Config::kBlockK), query_tiles = tiles_of(p.seq_q, Config::kBlockQ);
    exists = index < tile_count(p);
    const int k = index % key_tiles * Config::kBlockK, rest = index / key_tiles;
    const int q = rest % query_tiles * Config::kBlockQ, matrix = rest / query_tiles;
    keys = {k, min(k + Config::kBlockK, p.seq_k)};
    queries = {q, min(q + Config::kBlockQ, p.seq_q)};
    const bool has_heads = p.dbias.head != 0;
    const int head = matrix % (has_heads ? p.heads_q : 1), entry = matrix / (has_heads ? p.heads_q : 1);
    heads = has_heads ? Range{head, head + 1} : Range{0, p.heads_q};
    entries = is_of_entry(p.dbias) ? Range{entry, entry + 1} : Range{0, p.batch_size};
  }
};

struct SharedStorage {
  Slot slots[Config::kStages];
  BiasTile bias[Config::kBiasPlaces];
  Statistics statistics[kStatisticsStages][kBoxes];  // beside the factors of S
  Channel<Config::kStages> pairs;
  Channel<Config::kBiasPlaces> biases;
  Channel<2> told;
  Tile tiles[2];
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/wgmma.py disagrees");

// `act(place, entry)` for each head, of each entry, of which some queries of the tile see some keys.
template <class Act> __device__ __forceinline__ void for_each_sharer(const Params& p, const Tile& tile, Act act) {
#pragma unroll 1
  for (int entry = tile.entries.begin; entry < tile.entries.end; ++entry) {
    Place place;
    place.set_batch(p, entry);
    place.set_head(p, tile.heads.begin);
    place.key_count = Visibility::key_count(p, place);
    const Range seen = keys_seen_by_any(p, place, tile.queries);
    if (min(seen.end, tile.keys.end) <= max(seen.begin, tile.keys.begin)) continue;
#pragma unroll 1
    for (int head = tile.heads.begin; head < tile.heads.end; ++head) {
      place.set_head(p, head);
      act(place, entry);
    }
  }
}

// The next tile that nobody has.  Each block asks until there is none, so that as many ask as there are tiles, and the last one leaves
// the counter at 0, as it was found, for who comes behind.
__device__ __forceinline__ int take_next(const Params& p) {
  u32* const taken = static_cast<u32*>(p.turns);
  const u32 before = atomicAdd(taken, 1u);
  if (before == u32(tile_count(p)) - 1) *taken = 0;
  return int(before + gridDim.x);
}

// One thread: tells what the tiles are, and loads in the order in which the consumers use what is loaded.
__device__ __forceinline__ void produce(const Params& p, SharedStorage& shared) {
  Cursor<2> told_at;
  Cursor<Config::kBiasPlaces> bias_at;
  Cursor<Config::kStages> at;
  Cursor<kStatisticsStages> statistics_at;
#pragma unroll 1
  for (int index = blockIdx.x;; index = take_next(p)) {
    told_at.wait_empty(shared.told);
    Tile& tile = shared.tiles[told_at.slot];
    tile = Tile(p, index);
    mbarrier_arrive(told_at.full(shared.told));
    if (!tile.exists) return;
    told_at.advance();
    const int q = tile.queries.begin, k = tile.keys.begin;
    const int boxes = min(kBoxes, tiles_of(p.seq_q - q, Config::kBoxOfQueries));  // that begin inside the arrays
    const auto load_bias = [&](int entry, int head) {
      constexpr u32 kBoxBytes = Config::kBoxOfQueries * kPanelRowBytes;
      const int panels = min(BiasTile::kPanels, tiles_of(p.seq_k - k, BiasTile::kWidth));
      const View& view = WithArray<Params>::added(p);
      bias_at.wait_empty(shared.biases);
      const u32 full = bias_at.full(shared.biases);
      mbarrier_arrive_expect_tx(full, panels * boxes * kBoxBytes);
      for (int box = 0; box < boxes; ++box)
        copy_panels(shared.bias[bias_at.slot], p.bias_map, full,
                    bias_corner(view, entry, head, q + box * Config::kBoxOfQueries, k), CachePolicy::kEvictFirst,
                    panels, box * Config::kBoxOfQueries);
      bias_at.advance();
    };
    const auto copy_queries = [&](auto& to, const TensorMap& map, u32 full, int head, int entry) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        // Where there is none, rows that nobody looks at: no box may lie outside as a whole.
        const int row = box < boxes ? q + box * Config::kBoxOfQueries : q;
        copy_panels(to, map, full, {0, row, head, entry}, CachePolicy::kEvictLast, to.kPanels,
                    box * Config::kBoxOfQueries);
      }
    };
    bool has_bias = false;
    for_each_sharer(p, tile, [&](const Place& place, int entry) {
      if (!has_bias) load_bias(entry, place.head);
      has_bias = true;
      at.wait_empty(shared.pairs);
      u32 full = at.full(shared.pairs);
      auto& scores = shared.slots[at.slot].scores;
      mbarrier_arrive_expect_tx(full, QueryTile::kBytes + KeyTile::kBytes + boxes * u32(sizeof(Statistics)));
      copy_queries(scores.a, p.q_map, full, place.head, entry);
      copy_panels(scores.b, p.k_map, full, {0, k, place.head_k, entry}, CachePolicy::kEvictLast);
      const i64 line = (i64(entry) * p.heads_q + place.head) * p.rows_padded + q;
      cp_async_bulk_load(shared_address(shared.statistics[statistics_at.slot]),
                         static_cast<const Statistics*>(p.statistics) + line / Config::kBoxOfQueries,
                         boxes * u32(sizeof(Statistics)), full);
      statistics_at.advance();
      at.advance();
      at.wait_empty(shared.pairs);
      full = at.full(shared.pairs);
      auto& dp = shared.slots[at.slot].dp;
      mbarrier_arrive_expect_tx(full, DoutTile::kBytes + ValueTile::kBytes);
      copy_queries(dp.a, p.dout_map, full, place.head, entry);
      copy_panels(dp.b, p.v_map, full, {0, k, place.head_k, entry}, CachePolicy::kEvictLast);
      at.advance();
    });
  }
}

// What `scores_of` adds: the tile that has been brought.
struct BroughtBias {
  static constexpr bool kIsAtHand = true;
  const BiasTile& tile;

  template <class Fragment>
  __device__ __forceinline__ void add_to(Real (&s)[Fragment::kSize], const Fragment& f, Real scale) const {
    add_block(s, f, scale, tile);
  }
};

// One warpgroup.
struct Consumer {
  const Params& p;
  SharedStorage& shared;
  const int group;
  const Turns<kTurnBarrier, kGroups> turns;
  Cursor<2> told_at;
  Cursor<Config::kBiasPlaces> bias_at;
  Cursor<Config::kStages> cursor;
  Cursor<kStatisticsStages> statistics_at;
  float sums[ScoreFragment::kSize];

  __device__ __forceinline__ Consumer(const Params& params, SharedStorage& storage, int g)
      : p(params), shared(storage), group(g), turns{g} {}

  __device__ __forceinline__ ScoreFragment fragment() const {
    const u32 thread = recomputed(threadIdx.x);
    return ScoreFragment(group * kWarpgroupRows + int(thread) % kWarpgroupThreads / 32 * 16, 0, thread);
  }
  // Keys that no query sees may be anything, and must not meet a weight of 0: those of the pair behind the one at hand.
  __device__ __forceinline__ void clean(const Tile& tile, const Place& place) const {
    if constexpr (Visibility::kNarrows) {
      const Range alive = keys_seen_by_any(p, place, {0, p.seq_q});
      const int begin = tile.keys.begin;
      if (begin >= alive.begin && tile.keys.end <= alive.end) return;
      Cursor<Config::kStages> next = cursor;
      next.advance();
      next.wait_full(shared.pairs);
      clear_rows_outside<kConsumers>(shared.slots[next.slot].dp.b, Range{alive.begin - begin, alive.end - begin},
                                     recomputed(int(threadIdx.x)) - kWarpgroupThreads);
      fence_proxy_async();
      bar_sync(kAllBarrier, kConsumers);
    }
  }
  __device__ __forceinline__ void issue_scores(float (&s)[ScoreFragment::kSize]) const {
    const auto& factors = shared.slots[cursor.slot].scores;
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDim, QueryTile, KeyTile>(s, operand(factors.a, group * kWarpgroupRows),
                                                          operand(factors.b));
    wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_dp(float (&dp)[ScoreFragment::kSize]) const {
    cursor.wait_full(shared.pairs);
    const auto& factors = shared.slots[cursor.slot].dp;
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDimV, DoutTile, ValueTile>(dp, operand(factors.a, group * kWarpgroupRows),
                                                            operand(factors.b));
    wgmma_commit_group();
  }
  // dS of one head.
  __device__ __forceinline__ void add(const Tile& tile, const Place& place) {
    float s[ScoreFragment::kSize], dp[ScoreFragment::kSize];
    const int first = tile.queries.begin + group * kWarpgroupRows;
    const Range rows{min(first, p.seq_q - 1), min(first + kWarpgroupRows, p.seq_q)};
    const Range all = keys_seen_by_all(p, place, rows);
    const bool open = all.begin <= tile.keys.begin && all.end >= tile.keys.begin + Config::kBlockK;
    clean(tile, place);
    const int of_scores = cursor.slot;
    cursor.wait_full(shared.pairs);
    turns.take();
    issue_scores(s);
    cursor.advance();
    if (!kLateDp) issue_dp(dp);
    turns.pass();
    bias_at.wait_full(shared.biases);
    wgmma_wait_group<kLateDp ? 0 : 1>();
    pin(s);
    ScoreSlopes<ScoreFragment> slopes;
    const ScoreFragment at = fragment();
    BroughtBias bias{shared.bias[bias_at.slot]};
    scores_of<false>(s, slopes, at, p, place, {tile.queries.begin, tile.keys.begin}, open, p.scale, bias);
    RowStatistics of[ScoreFragment::kSlots];
#pragma unroll
    for (int slot = 0; slot < ScoreFragment::kSlots; ++slot) {
      const int row = at.row(slot);
      const Statistics& there = shared.statistics[statistics_at.slot][row / Config::kBoxOfQueries];
      of[slot] = {there.shift[row % Config::kBoxOfQueries], there.delta[row % Config::kBoxOfQueries]};
    }
    release_by_warp(shared.pairs, of_scores);
    statistics_at.advance();
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] = probability(s[i], of[ScoreFragment::slot(i)].shift, p);
    if (kLateDp) issue_dp(dp);
    wgmma_wait_group<0>();
    pin(dp);
    release_by_warp(shared.pairs, cursor.slot);
    cursor.advance();
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i)
      sums[i] += score_gradient(s[i], dp[i], of[ScoreFragment::slot(i)].delta);
  }
  __device__ __forceinline__ void store(const Tile& tile) const {
    Place place;
    place.set_batch(p, tile.entries.begin);
    place.set_head(p, tile.heads.begin);
    const Matrix<Sum> to = matrix<Sum>(p.dbias, place.offset(p.dbias));
    const bool pairs = to.column == 1 && to.row % 2 == 0 && reinterpret_cast<u64>(to.data) % (2 * sizeof(Sum)) == 0;
    store_rows(sums, fragment(), to, tile.queries, tile.keys, pairs, [](int) { return 1.f; });
  }
  __device__ __forceinline__ void run() {
    turns.open();
#pragma unroll 1
    while (true) {
      told_at.wait_full(shared.told);
      const Tile& tile = shared.tiles[told_at.slot];  // no registers are left to keep it in
      if (!tile.exists) break;
      clear(sums);
      bool has_bias = false;
      for_each_sharer(p, tile, [&](const Place& place, int) {
        add(tile, place);
        has_bias = true;
      });
      if (has_bias) {
        release_by_warp(shared.biases, bias_at.slot);
        bias_at.advance();
      }
      store(tile);
      release_by_warp(shared.told, told_at.slot);
      told_at.advance();
    }
    if (group == 0) turns.take();  // nobody leaves a turn behind
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.pairs.init(arrivals_of(kConsumers / 32));
    shared.biases.init(arrivals_of(kConsumers / 32));
    shared.told.init(arrivals_of(kConsumers / 32));
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, shared);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    Consumer(p, shared, group - 1).run();
  }
}
