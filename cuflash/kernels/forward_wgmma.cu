// Forward on Hopper's tensor cores by wgmma (sm_90a, float16 and bfloat16; 8-bit inputs with 16-bit outputs).
//
// Job: blocks stay on their multiprocessor and work through tiles of queries.  Warpgroup 0 produces: one thread has the tensor
// memory accelerator load queries, keys and values ahead of use, and in packs or with planes another one looks for the next tile.
// The other warpgroups own 64 query rows each and keep two products in flight: the scores of a block of keys, and P V of the
// block before, so that the softmax of one block runs under the product of the other.  Where a second tile of queries fits, this
// pipeline does not stop between tiles, or if the output has no room beside them, leaves it in the place of its queries until the
// next tile is at work.  Where one fits, but part of the output beside it, each warpgroup fetches its own rows of the next tile
// as soon as it is done with those before: one stores while the other still multiplies.
// Invariants: producer and consumers walk the same blocks in the same order, at least one per tile; keys are walked in
// descending order, so that hidden ones come first, and a warpgroup hands back unread what none of its own rows sees; what a
// tile is travels with its queries, and where hidden blocks are passed over, which block it is with its keys; rows that the
// arrays or a packed segment do not have are zeros.
// Source: FlashAttention-3 (arXiv:2407.08608), algorithms 1 and 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/fragment_simt.cuh"
#include "hw/gemm_mma.cuh"
#include "hw/gemm_wgmma.cuh"
#include "hw/lookout.cuh"
#include "attention/epilogue.cuh"
#include "attention/plane_units.cuh"
#include "attention/units.cuh"
#include "wgmma_bias.cuh"

constexpr int kGroups = Config::kBlockQ / kWarpgroupRows;  // of consumers
constexpr int kGroupBarrier = 1, kAllBarrier = kGroupBarrier + kGroups;

constexpr int kBytes = sizeof(Element);
constexpr bool kIsNarrow = kBytes == 1;                     // forward_values.cu has laid out the values
constexpr int kScoreDepth = Config::kHeadDim * kBytes / 2;  // of the products that make scores
constexpr bool kIsWide = sizeof(OutElement) == 4;           // the output goes straight from registers into the array

typedef PanelTile<Config::kBlockQ, Config::kHeadDim, kBytes> QueryTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDim, kBytes> KeyTile;
template <bool kInSteps> struct Values { typedef PanelTile<Config::kBlockK, Config::kHeadDimV> Tile; };
template <> struct Values<true> { typedef StepTile<Config::kBlockK, Config::kHeadDimV> Tile; };
typedef Values<kIsNarrow>::Tile ValueTile;
// Where warpgroups fetch queries by themselves, the next ones come while the output leaves, in parts of so many panels.
constexpr bool kFetches = Config::kOutPanels > 0;
typedef PanelTile<Config::kBlockQ, kFetches ? Config::kOutPanels * kPanelColumns : Config::kHeadDimV> OutTile;
constexpr int kOutParts = (panels_of(Config::kHeadDimV) + OutTile::kPanels - 1) / OutTile::kPanels;
// Where the output takes the place of its queries and others lie in another, nobody waits until it has left.
constexpr bool kStaysBehind = !Config::kSeparateOut && Config::kQueryStages > 1;
constexpr int kTileSlots = kFetches ? 2 : Config::kQueryStages;  // in which consumers are told what the tiles are

// A tile of queries, and the rows of the sequence that it belongs to.
struct Tile : Segment<kPacked>, HeadScales<kHasScales> {
  int row;                  // the first one, which where tiles count from the end may lie before the sequence
  int head, head_k, batch;  // of the queries; that of the keys; entry, all batch axes merged
  int key_count;
  Range blocks;  // of keys, that some of the queries see

  // What takes the place of a tile after the last one.
  __device__ __forceinline__ void set_none() { row = -Config::kBlockQ; }
  __device__ __forceinline__ bool exists() const { return row > -Config::kBlockQ; }
  __device__ __forceinline__ Range queries() const { return {row, row + Config::kBlockQ}; }
};

// A block of keys where hidden ones are passed over: which one, and what else consumers need to know.
struct Told {
  int number;
  bool open;  // no element needs a test
  bool last;  // of its tile
};

// One channel for each warpgroup, of which nobody waits for the empty side: who fetches is who has read.
template <bool kFetched> struct FetchedQueries {};
template <> struct FetchedQueries<true> { Channel<1> fetched[kGroups]; };

struct SharedStorage : BiasTiles, BiasChannels, FetchedQueries<kFetches> {
  QueryTile q[Config::kQueryStages];
  KeyTile k[Config::kStages];
  ValueTile v[Config::kStages];
  static constexpr bool kHoldsOut = Config::kSeparateOut && !kIsWide;
  alignas(kHoldsOut ? 1024 : 16) unsigned char out_data[kHoldsOut ? OutTile::kBytes : 16];
  Channel<kTileSlots> queries;
  Channel<Config::kStages> keys, values;
  Tile tiles[2 * kTileSlots];  // twice as many: one is still asked about when its queries have been replaced
  Tile coming;                 // that another thread has found
  Channel<1> comings;
  Told told[Config::kStages];  // of the keys in the slots

  // Without a place of its own, the output of a warpgroup takes that of its queries, panel by panel.
  __device__ __forceinline__ OutTile& out(int query_slot) {
    return *reinterpret_cast<OutTile*>(Config::kSeparateOut ? out_data : q[query_slot].data);
  }
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/wgmma.py disagrees");
static_assert(Config::kSeparateOut || OutTile::kPanels <= QueryTile::kPanels,
              "the output may only take the place of queries that are as wide");
constexpr bool kTells = Visibility::kHidesTiles || Visibility::kClearsTiles;
static_assert(!kTells || !(kPacked || kHasPlanes),
              "one thread passes over tiles that are nobody's, or another kernel's");
static_assert(!kFetches || (Config::kSeparateOut && Config::kQueryStages == 1 && !kIsWide && !kBringsBias),
              "a warpgroup fetches into the only tile of queries, beside a place of the output");
static_assert(!Config::kContinuous || (Config::kSeparateOut && Config::kQueryStages > 1),
              "the next queries arrive before this output is stored");

typedef MmaFragment<1, Config::kBlockK / 8> ScoreFragment;
template <> constexpr bool kRangesAsBits<ScoreFragment> = true;
typedef MmaFragment<1, Config::kHeadDimV / 8> OutFragment;
typedef OnlineSoftmax<ScoreFragment> Softmax;

// Where scores are plain products, of a whole block, the softmax guesses, and a warp whose guess is lost multiplies again, by mma.sync since the
// other warps of its group do not.  Queries and keys are then handed back by each warp, otherwise once for a warpgroup.  A bias
// that was brought is kept until then, too.
constexpr bool kGuesses = Config::kOptimistic && (Score::kIdentity || AddedBias::kIsAtHand) &&
                          (!Visibility::kHasMask || Visibility::kClearsTiles);
constexpr bool kAsksAnew = AddedBias::kIsAtHand && Visibility::kNarrows;  // no register is left to remember it in
constexpr int kReaderThreads = kGuesses ? 32 : kWarpgroupThreads,
              kReaders = kGroups * kWarpgroupThreads / kReaderThreads;

// Longest first: the last queries see the most keys under a causal mask.
__device__ __forceinline__ Tile tile_of(const Params& p, int index) {
  Tile tile;
  Place place;
  const Assignment assigned =
      place.enter_listed_queries<Config::kSegmentList, Config::kBlockQ>(p, index, p.batch_size * p.heads_q);
  const int rows = place.seq_q(p);
  if constexpr (Config::kFromEnd)
    tile.row = tiles_of(rows, kWarpgroupRows) * kWarpgroupRows - (assigned.tile + 1) * Config::kBlockQ;
  else
    tile.row = (tiles_of(rows, Config::kBlockQ) - 1 - assigned.tile) * Config::kBlockQ;
  const HeadOfEntry of(p, assigned.head, p.heads_q);
  tile.head = of.head;
  tile.batch = of.batch;
  tile.take_rows(place);
  place.set_head(p, tile.head);
  place.set_batch(p, tile.batch);
  tile.head_k = place.head_k;
  tile.read_scales(p, place);
  place.key_count = tile.key_count = Visibility::key_count(p, place);
  const Range seen = keys_seen_by_any(
      p, place, {Config::kFromEnd ? max(tile.row, 0) : tile.row, min(tile.seq_q(p), tile.row + Config::kBlockQ)});
  const int first = seen.begin / Config::kBlockK;
  tile.blocks = {first, max(first + 1, tiles_of(seen.end, Config::kBlockK))};
  return tile;
}
// Where a tile's queries and keys lie.
__device__ __forceinline__ Place place_of(const Params& p, const Tile& tile) {
  Place place;
  place.take_rows(tile);
  place.head = tile.head;
  place.head_k = tile.head_k;
  place.set_batch(p, tile.batch);
  place.key_count = tile.key_count;
  return place;
}
__device__ __forceinline__ Range keys_of_block(int block) {
  return {block * Config::kBlockK, (block + 1) * Config::kBlockK};
}
__device__ __forceinline__ int tile_count(const Params& p) {
  return p.batch_size * p.heads_q * Place::listed_queries<Config::kSegmentList, Config::kBlockQ>(p);
}

// What a warpgroup has to do with a tile.
constexpr bool kSkips = Visibility::kNarrows && !kTells;  // blocks that only others see
struct Work {
  Place place;
  int first, last;  // blocks of keys that its own rows see
  int skipped;      // blocks behind them that only others see
  Range open;       // those that all of its rows see whole

  __device__ __forceinline__ Work(const Params& p, const Tile& tile, int group)
      : place(place_of(p, tile)), first(tile.blocks.begin), last(tile.blocks.end), skipped(0) {
    const int own = tile.row + group * kWarpgroupRows, seq_q = place.seq_q(p);
    const Range rows{min(own, seq_q - 1), min(own + kWarpgroupRows, seq_q)};
    if constexpr (kSkips) {
      // Keys are skipped before values are, so no more than there is room for beside the first that are used.
      const int seen = tiles_of(keys_seen_by_any(p, place, rows).end, Config::kBlockK);
      skipped = min(last - max(first + 1, min(last, seen)), Config::kStages - 1);
      last -= skipped;
    }
    const Range all = keys_seen_by_all(p, place, rows);
    open = {tiles_of(all.begin, Config::kBlockK), all.end / Config::kBlockK};
  }
  __device__ __forceinline__ bool is_open(int block) const { return block >= open.begin && block < open.end; }
};

// The block of keys that a warpgroup is at: counted, or as the producer tells.
struct Block {
  int number = 0;
  bool told_open = false, told_last = false;

  // The first of a tile, once its keys are there.
  __device__ __forceinline__ void enter(const Work& work, const Told& told) {
    number = work.last;
    advance(told);
  }
  // The next one, once its keys are there.
  __device__ __forceinline__ void advance(const Told& told) {
    --number;
    if constexpr (kTells) {
      number = told.number;
      told_open = told.open;
      told_last = told.last;
    }
  }
  __device__ __forceinline__ bool is_last(const Work& work) const { return kTells ? told_last : number <= work.first; }
  __device__ __forceinline__ bool is_open(const Work& work) const { return kTells ? told_open : work.is_open(number); }
};

// One thread of each block, when it takes no more: the last one leaves both words, tiles taken and blocks done, as they were
// found, so that the next launch on the same stream starts anew.
__device__ __forceinline__ void restart_counter(u32* taken) {
  __threadfence();
  if (atomicAdd(taken + 1, 1u) == gridDim.x - 1) taken[0] = taken[1] = 0;
}

__device__ __forceinline__ int place_of(const Cursor<kTileSlots>& at) {  // of a tile in `tiles`
  return at.slot + int(at.phase) * kTileSlots;
}

// How many tiles there are: the length of a list is kept.
template <bool kIsKept> struct KeptCount {
  __device__ __forceinline__ explicit KeptCount(const Params&) {}
  __device__ __forceinline__ int count(const Params& p) const { return tile_count(p); }
};
template <> struct KeptCount<true> {
  int kept;
  __device__ __forceinline__ explicit KeptCount(const Params& p) : kept(tile_count(p)) {}
  __device__ __forceinline__ int count(const Params&) const { return kept; }
};

// Takes tiles, by one thread: the first are the blocks' own numbers; then each takes the next one that nobody has, or without a
// counter every gridDim-th.
struct Taker : KeptCount<kPacked> {
  u32* taken;
  int index;

  __device__ __forceinline__ explicit Taker(const Params& p)
      : KeptCount<kPacked>(p), taken(Place::taken<Config::kSegmentList>(p)), index(blockIdx.x) {}
  __device__ __forceinline__ void advance() { index = (taken ? int(atomicAdd(taken, 1u)) : index) + int(gridDim.x); }
  // The tile at hand, or with heads that planes do not stand for, the first one after these.
  __device__ __forceinline__ Tile tile(const Params& p) {
    Tile tile;
    tile.set_none();
    while (index < this->count(p)) {
      tile = tile_of(p, index);
      if (!kHasPlanes || decisions(p)[tile.batch * p.heads_k + tile.head_k]) break;
      tile.set_none();
      advance();
    }
    return tile;
  }
};

// It takes time to find a tile's segment in packs, and what planes count, so another thread looks for the next tile.  The one that
// loads has no registers for that either.
constexpr bool kLooksForTiles = kPacked || kHasPlanes;
__device__ __forceinline__ void look_for_tiles(const Params& p, SharedStorage& shared) {
  Cursor<1> at;
  Taker taker(p);
  while (true) {
    const Tile tile = taker.tile(p);
    shared.coming = tile;
    mbarrier_arrive(at.full(shared.comings));
    if (!tile.exists()) break;
    at.advance();
    at.wait_empty(shared.comings);
    taker.advance();
  }
  if (!kPacked && taker.taken) restart_counter(taker.taken);
}

// A block takes its next tile when it has to load so many blocks of keys of this one, or fewer: early enough for what has to be
// looked up first, and late enough that whoever is done first takes the longest tile that is left.  With two stages and consumers
// that do not stop between tiles a look-up in the middle of a tile would be waited for: there the next one is taken when a tile
// begins, and so it is where the producer has no registers left.
constexpr int kBlocksAhead = 4;
constexpr bool kTakesLate = !(kPacked || kTells || kBringsBias) &&
                            (kLooksForTiles || Config::kStages > 2 || !(Config::kContinuous || kIsNarrow));

// One thread: loads in the order in which the consumers use what is loaded.  Where it passes over hidden blocks a whole warp,
// whose lanes look at one block each, 32 ahead; the first one does the rest.
constexpr int kProducers = kTells ? 32 : 1;
__device__ __forceinline__ void produce(const Params& p, SharedStorage& shared) {
  const bool leads = kProducers == 1 || threadIdx.x == 0;
  Cursor<kTileSlots> q_at;
  Cursor<Config::kStages> k_at, v_at;
  BiasWriter<Config::kBiasStages> bias;
  const auto load_q = [&](const Tile& tile) {
    q_at.wait_empty(shared.queries);
    if (leads) {
      shared.tiles[place_of(q_at)] = tile;
      const u32 full = q_at.full(shared.queries);
      if (kFetches || !tile.exists()) {
        mbarrier_arrive(full);
      } else {
        const DescribedRow at = tile.described_query(p, tile.row, tile.batch);
        load_panels(shared.q[q_at.slot], p.q_map, full, {0, at.row, tile.head, at.batch}, CachePolicy::kEvictFirst);
      }
    }
    q_at.advance();
  };
  // A sequence without keys has nothing to load: its rows are hidden, whatever the slots hold.
  const auto load_keys = [&](auto& to, const TensorMap& map, u32 full, const Tile& tile, int block) {
    if (kPacked && tile.seq_k(p) == 0) {
      mbarrier_arrive(full);
      return;
    }
    const DescribedRow at = tile.described_key(p, block * Config::kBlockK, tile.batch);
    load_panels(to, map, full, {0, at.row, tile.head_k, at.batch}, CachePolicy::kEvictLast);
  };
  const auto load_v = [&](const Tile& tile, int block) {
    v_at.wait_empty(shared.values);
    const auto load = [&](const auto& p, auto& to) {
      if constexpr (kIsNarrow) {
        const i64 head = i64(tile.batch) * p.heads_k + tile.head_k, step = block * (Config::kBlockK / kStepRows);
        const auto* steps = static_cast<const unsigned char*>(p.value_steps);
        load_steps(to, steps + (head * p.step_count + step) * to.kStepBytes, v_at.full(shared.values));
      } else {
        load_keys(to, p.v_map, v_at.full(shared.values), tile, block);
      }
    };
    if (leads) load(p, shared.v[v_at.slot]);
    v_at.advance();
  };
  Lookout<1> lookout;  // over the blocks of a tile, the last one first
  // The block from `block` on towards the first that the queries may see; below the tile's first if there is none.
  const auto visible_from = [&](const Tile& tile, int block) {
    if constexpr (kTells) {
      const Place place = place_of(p, tile);
      const int last = tile.blocks.end - 1;
      block = last - lookout.next(last - block, tile.blocks.end - tile.blocks.begin, [&](int index, auto& marks) {
        const Range keys = keys_of_block(last - index);
        if (tile_is_hidden(p, place, tile.queries(), keys)) return false;
        marks[0] = tile_is_open(p, place, tile.queries(), keys);
        return true;
      });
    }
    return block;
  };
  // The first block of a tile, hidden or not if there is but one; and the one behind a block.
  const auto first_block = [&](const Tile& tile) {
    lookout = Lookout<1>();
    return max(tile.blocks.begin, visible_from(tile, tile.blocks.end - 1));
  };
  // Loads the keys of a block, and returns the one behind it.
  const auto load_k = [&](const Tile& tile, int block) {
    const bool open = kTells && lookout.marks(tile.blocks.end - 1 - block);
    const int next = visible_from(tile, block - 1);
    k_at.wait_empty(shared.keys);
    if (leads) {
      if constexpr (kTells) shared.told[k_at.slot] = {block, open, next < tile.blocks.begin};
      load_keys(shared.k[k_at.slot], p.k_map, k_at.full(shared.keys), tile, block);
    }
    k_at.advance();
    bias.load(p, shared, shared, tile.batch, tile.head, tile.row, block * Config::kBlockK, leads);
    return next;
  };

  Taker taker(p);
  Cursor<1> coming_at;
  // Both lie in shared memory where another thread looks for them, the one at hand also where registers are few.
  constexpr bool kKeepsTile = !(kLooksForTiles || kStaysBehind);
  Tile kept, kept_next;
  Tile& next = kLooksForTiles ? shared.coming : kept_next;
  const auto take_next = [&] {
    if constexpr (kLooksForTiles) {
      coming_at.release(shared.comings);
      coming_at.advance();
    } else {
      if (leads) taker.advance();
      if constexpr (kProducers > 1) taker.index = __shfl_sync(0xffffffffu, taker.index, 0);
      next = taker.tile(p);
    }
  };
  const auto await_next = [&] {
    if constexpr (kLooksForTiles) coming_at.wait_full(shared.comings);
  };

  if constexpr (!kLooksForTiles) next = taker.tile(p);
  await_next();
  load_q(next);
  int block = 0, behind = 0;  // the last one whose keys are loaded, and the one that follows it
  const auto begin_tile = [&] {
    if (!next.exists()) return;
    block = first_block(next);
    behind = load_k(next, block);
  };
  begin_tile();
  while (next.exists()) {
    if constexpr (kKeepsTile) kept = next;
    const Tile& now = kKeepsTile ? kept : shared.tiles[place_of(q_at.previous())];
    bool taken = !kTakesLate, announced = false;
    if constexpr (!kTakesLate) take_next();
    for (int count = 2; behind >= now.blocks.begin; ++count) {
      const int before = block;
      block = behind;
      behind = load_k(now, block);
      if (kTakesLate && !taken && behind - now.blocks.begin < kBlocksAhead) {
        take_next();
        taken = true;
      }
      // With the third block of keys the consumers have left the tile before, and its queries are free.  Where its output lies in
      // their place, a warpgroup frees them in its first step with two blocks, before which it may pass over kStages - 1.
      constexpr int kFree = kStaysBehind ? Config::kStages + 2 : 3;
      if (kTileSlots > 1 && (kTakesLate ? taken && !announced && count >= kFree : count == kFree)) {
        await_next();
        load_q(next);
        announced = true;
      }
      load_v(now, before);
    }
    if (kTakesLate && !taken) take_next();
    const int last = block;
    if (!announced) await_next();
    if (kTileSlots > 1) {
      if (!announced) load_q(next);
      if (kFetches) load_v(now, last);  // in the order of use
      begin_tile();
      if (!kFetches) load_v(now, last);
    } else {  // the next queries wait for the epilogue, keys and values need not
      load_v(now, last);
      begin_tile();
      load_q(next);
    }
  }
  if (!kLooksForTiles && leads && taker.taken) restart_counter(taker.taken);
}

// One warpgroup.
__device__ __forceinline__ void consume(const Params& p, SharedStorage& shared, int group) {
  const int thread = int(threadIdx.x % kWarpgroupThreads);
  const bool elected = thread == 0, hands_back = thread % kReaderThreads == 0;
  // Worked out anew where it is rarely needed.
  const auto warp_row = [&] { return group * kWarpgroupRows + recomputed(threadIdx.x) % kWarpgroupThreads / 32 * 16; };
  const ScoreFragment s_at(group * kWarpgroupRows + thread / 32 * 16, 0, threadIdx.x);
  const u64 q_operand = operand(shared.q[0], group * kWarpgroupRows), k_operand = operand(shared.k[0]),
            v_operand = operand(shared.v[0]);
  Cursor<kTileSlots> q_at;
  Cursor<Config::kStages> k_at, v_at;
  float s[ScoreFragment::kSize], o[OutFragment::kSize], alpha[ScoreFragment::kSlots];
  float part[OutFragment::kSize];  // of the output, of one block of keys
  float (&product)[OutFragment::kSize] = Config::kMerged ? part : o;
  RegisterOperand<Config::kBlockK * kBytes / 32> probabilities;
  HeldUnits<kHasScales> held_units;  // of the tile whose scores are at hand
  AddedBias bias(shared, shared);
  Softmax softmax;

  const auto query_slot = [&] { return kFetches ? 0 : q_at.slot; };
  // Waits for it; where it stands in `tiles`, -1 after the last.
  const auto next_tile = [&] {
    q_at.wait_full(shared.queries);
    return shared.tiles[place_of(q_at)].exists() ? place_of(q_at) : -1;
  };
  const auto issue_scores = [&] {
    wgmma_rows_rows<kScoreDepth, QueryTile, KeyTile>(s, q_operand + query_slot() * (QueryTile::kBytes >> 4),
                                                     k_operand + k_at.slot * (KeyTile::kBytes >> 4));
    wgmma_commit_group();
  };
  const auto issue_output = [&] {
    [&](auto& c, u64 values) {
      if constexpr (kIsNarrow)
        wgmma_registers_steps<Config::kMerged, ValueTile>(c, probabilities, values);
      else
        wgmma_registers_columns(c, probabilities, values);
    }(product, v_operand + v_at.slot * (ValueTile::kBytes >> 4));
    wgmma_commit_group();
  };
  // Behind no product of scores.
  const auto issue_last_output = [&] {
    v_at.wait_full(shared.values);
    pin(probabilities);
    pin(o);
    wgmma_fence();
    issue_output();
  };
  // When the product is there.
  const auto pin_output = [&] {
    pin(product);
    if constexpr (Config::kMerged) add(o, part);
  };
  const auto release_queries = [&] {
    if (Config::kSeparateOut ? hands_back : elected) q_at.release(shared.queries);
  };
  // So the queries' place is handed back a step later.
  bool owes = false;
  const auto release_stored = [&] {
    if (!kStaysBehind || !owes) return;
    owes = false;
    if (elected) {
      cp_async_bulk_wait_group_read<0>();
      q_at.previous().release(shared.queries);
    }
  };
  // Asks for this warpgroup's own rows of a tile, once none of its warps needs those that are there.
  const auto fetch_queries = [&](const auto& p, auto& shared, int tile) {
    if constexpr (kFetches) {
      bar_sync(kGroupBarrier + group, kWarpgroupThreads);
      if (!elected || tile < 0) return;
      const Tile& of = shared.tiles[tile];
      const int own = group * kWarpgroupRows, row = of.row + own;
      // Where it has none, others that nobody looks at: no box may lie outside as a whole.
      const bool exists = row < of.seq_q(p) && (!Config::kFromEnd || row > -kWarpgroupRows);
      const DescribedRow at = of.described_query(p, exists ? row : Config::kFromEnd ? 0 : of.row, of.batch);
      load_rows<kWarpgroupRows>(shared.q[0], own, p.q_map, shared_address(&shared.fetched[group].full[0]),
                                {0, at.row, of.head, at.batch}, CachePolicy::kEvictFirst);
    }
  };
  const auto await_queries = [&](auto& shared) {  // every other tile of those told is of one parity
    if constexpr (kFetches) mbarrier_wait(shared_address(&shared.fetched[group].full[0]), q_at.slot);
  };
  const auto release_keys = [&] {
    if (hands_back) k_at.release(shared.keys);
  };
  const auto release_values = [&] {
    if (elected) v_at.release(shared.values);
    v_at.advance();
  };
  // Values that no query sees must not meet a probability of 0: they may be anything, NaN as well.
  const auto clean_values = [&](const Work& work, int block) {
    if constexpr (Visibility::kNarrows) {
      const Range alive = keys_seen_by_any(p, work.place, {0, work.place.seq_q(p)});
      const int begin = block * Config::kBlockK, end = min(begin + Config::kBlockK, work.place.seq_k(p));
      if (begin >= alive.begin && end <= alive.end) return;
      v_at.wait_full(shared.values);
      clear_rows_outside<kGroups * kWarpgroupThreads>(shared.v[v_at.slot],
                                                      Range{alive.begin - begin, alive.end - begin},
                                                      recomputed(int(threadIdx.x) - kWarpgroupThreads));
      fence_proxy_async();
      bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);
    }
  };
  // Scores -> probabilities in place; tells whether the output must be rescaled by `alpha`.  Hands back the keys.
  bool trusted = false;  // whether the rows' maxima so far are fit for a guess
  int tile = -1;         // where the one at hand stands in `tiles`
  Block block;
  const auto softmax_step = [&](Softmax& softmax, const Work& work, bool open, bool guesses) {
    bool moved = false, found = false;
    const auto& units = in_units(p, held_units);
    if (kAsksAnew ? guesses && softmax.may_guess(units) : guesses) {
      bias.try_on(s, s_at, units.scale);
      found = softmax.guess(s, alpha, moved, units, release_keys, [&] {
        clear(s);
        auto&& queries = in_pairs(shared.q[query_slot()]);
        auto&& keys = in_pairs(shared.k[k_at.slot]);
        gemm_rows_rows<kScoreDepth, ScoreFragment, Element, 1>(s, queries, warp_row(), keys, recomputed(0));
        __syncwarp();  // all lanes have read
      });
    } else {
      release_keys();
    }
    k_at.advance();
    if (found) bias.release();
    if (found && !moved) return false;
    if (!found) {
      ScoreSlopes<ScoreFragment> slopes;
      if constexpr (kTells) {  // tests of elements take the registers: what they need is looked up
        const Tile& now = shared.tiles[recomputed(tile)];
        const ScoreFragment at(warp_row(), 0, recomputed(threadIdx.x));
        scores_of<false>(s, slopes, at, p, place_of(p, now), {now.row, block.number * Config::kBlockK}, open,
                         units.scale, bias);
      } else {
        scores_of<false>(s, slopes, s_at, p, work.place, {shared.tiles[tile].row, block.number * Config::kBlockK}, open,
                         units.scale, bias);
      }
      bool subtracted = false;
      moved = softmax.rebase(s, alpha, subtracted, units);
      softmax.exponentiate(s, subtracted, units);
    }
    if constexpr (kGuesses && !kAsksAnew) trusted = softmax.may_guess(units);
    return moved;
  };
  // Nobody may hand back before all have seen that it is there: who comes late, without a product to hold the others, would
  // find the slot full again and take it for the time before.
  const auto skip_keys = [&](const Work& work) {
    for (int rest = work.skipped; rest > 0; --rest) {
      k_at.wait_full(shared.keys);
      if (kGuesses)
        __syncwarp();
      else
        bar_sync(kGroupBarrier + group, kWarpgroupThreads);
      release_keys();
      k_at.advance();
      bias.skip();
    }
  };
  // What is told is read before the product: once that is there, another warp may hand the keys back.
  const auto await_first = [&](const Work& work) {
    skip_keys(work);
    k_at.wait_full(shared.keys);
    block.enter(work, shared.told[k_at.slot]);
  };
  // At the first block, behind which are those that were skipped: no register is left to remember how many.
  const auto skip_values = [&](const Work& work) {
    if constexpr (kSkips)
      for (int rest = shared.tiles[tile].blocks.end - 1 - block.number; rest > 0; --rest) {
        clean_values(work, block.number + rest);
        v_at.wait_full(shared.values);
        bar_sync(kGroupBarrier + group, kWarpgroupThreads);
        release_values();
      }
  };
  const auto first_step = [&](Softmax& softmax, const Work& work) {
    softmax_step(softmax, work, block.is_open(work), false);
  };
  // By selection: an accumulator that no key entered may hold NaN.
  const auto scaled = [](float x, float factor) { return factor == 0.f ? 0.f : x * factor; };
  const auto rows_of = [&](const Tile& done) {
    Place place;
    place.take_rows(done);
    place.head = done.head;
    place.set_batch(p, done.batch);
    return place;
  };
  const auto finish = [&](Softmax& softmax, const Tile& done, const auto& units) {
    softmax.finish();
    if constexpr (kHasSinks || Config::kBiasApart) {
      const Place place = rows_of(done);
      if constexpr (Config::kBiasApart) {
        const ScoreFragment at(warp_row(), 0, recomputed(threadIdx.x));
#pragma unroll
        for (int slot = 0; slot < ScoreFragment::kSlots; ++slot)
          softmax.move(slot, bias_apart(p, place, max(done.row + at.row(slot), 0)), units);
      }
      softmax.join_sink(p, place, units);
    }
  };
  const auto store_statistics = [&](Softmax& softmax, const Tile& done) {
    const auto held = units_of<kHasScales>(p, done);
    const Place place = rows_of(done);
    const auto rows = [&]() -> Range { return {done.row, min(place.seq_q(p), done.row + Config::kBlockQ)}; };
    store_lse(softmax, ScoreFragment(warp_row(), 0, recomputed(threadIdx.x)), p, place, rows(), in_units(p, held));
  };
  // As much of the output as there is room for at once.
  const auto store_part = [&](const auto& p, int part, const Tile& done,
                              const float (&factors)[ScoreFragment::kSlots]) {
    if constexpr (!kIsWide) {
      constexpr int kSize = kOutParts == 1 ? OutFragment::kSize : OutTile::kPanels * OutTile::kWidth / 2;
      const int begin = part * kSize;
      OutTile& out = shared.out(q_at.slot);
      if (Config::kSeparateOut) {
        if (elected) cp_async_bulk_wait_group_read<0>();
        bar_sync(kGroupBarrier + group, kWarpgroupThreads);
      }
      store_accumulator<OutElement, kSize>(out, warp_row(), [&](int i) {
        return begin + i < OutFragment::kSize ? scaled(o[begin + i], factors[OutFragment::slot(i)]) : 0.f;
      });
      fence_proxy_async();
      bar_sync(kGroupBarrier + group, kWarpgroupThreads);
      if (elected) {
        const int first = group * kWarpgroupRows;
        const DescribedRow at = done.described_query(p, done.row + first, done.batch);
        if ((!kPacked || done.row + first < done.seq_q(p)) && (!Config::kFromEnd || done.row + first > -kWarpgroupRows))
          store_panels(out, first, p.out_map, {2 * begin, at.row, done.head, at.batch},
                       panels_of(Config::kHeadDimV - 2 * begin));
        cp_async_bulk_commit_group();
        if (!Config::kSeparateOut && !kStaysBehind) cp_async_bulk_wait_group_read<0>();
      }
    }
  };
  // After the last block of a tile: the factors of the output of a thread's rows.
  const auto conclude = [&](Softmax& softmax, const Tile& done, float (&factors)[ScoreFragment::kSlots]) {
    const auto held = units_of<kHasScales>(p, done);
    finish(softmax, done, in_units(p, held));
#pragma unroll
    for (int slot = 0; slot < ScoreFragment::kSlots; ++slot)
      factors[slot] = softmax.inverse(slot) * (kIsWide ? 1.f : value_scale(done));
  };
  // The output, or as much of it as there is room for at once.
  const auto store = [&](const Tile& done, const float (&factors)[ScoreFragment::kSlots]) {
    if constexpr (!kIsWide) {
      store_part(p, 0, done, factors);
      if constexpr (kStaysBehind)
        owes = true;
      else if (!Config::kSeparateOut)
        release_queries();
    } else {
      const Place place = rows_of(done);
      const auto rows = [&]() -> Range { return {done.row, min(place.seq_q(p), done.row + Config::kBlockQ)}; };
#pragma unroll
      for (int i = 0; i < OutFragment::kSize; ++i) o[i] = scaled(o[i], factors[OutFragment::slot(i)]);
      // By itself: the product of both factors may be no number.
      const float unit = value_scale(done);
      store_rows(o, OutFragment(warp_row(), 0, recomputed(threadIdx.x)), matrix<OutElement>(p.out, place.offset(p.out)),
                 rows(), {0, p.head_dim_v}, p.out_vectors, [&](int) { return unit; });
    }
  };

  tile = next_tile();                               // the grid is no larger than the number of tiles
  if ((kPacked || kHasPlanes) && tile < 0) return;  // but they may all be empty, or another kernel's
  fetch_queries(p, shared, tile);
  Work work(p, shared.tiles[tile], group);
  held_units = units_of<kHasScales>(p, shared.tiles[tile]);
  await_first(work);
  await_queries(shared);
  wgmma_fence();
  issue_scores();
  wgmma_wait_group<0>();
  pin(s);
  first_step(softmax, work);
  for (;;) {
    probabilities.pack<Element>(s);
    clear(o);
    skip_values(work);
    while (!block.is_last(work)) {
      clean_values(work, block.number);
      k_at.wait_full(shared.keys);
      block.advance(shared.told[k_at.slot]);
      pin(probabilities);
      wgmma_fence();
      issue_scores();
      v_at.wait_full(shared.values);
      wgmma_fence();
      issue_output();
      release_stored();
      // Only the first block reaches beyond the last key.
      const bool open = !(Visibility::kNarrows || kTells) || block.is_open(work);
      const bool guesses = kGuesses && open && (kAsksAnew || trusted);
      wgmma_wait_group<1>();
      pin(s);
      const bool moved = softmax_step(softmax, work, open, guesses);
      wgmma_wait_group<0>();
      pin_output();
      pin(probabilities);
      release_values();
      probabilities.pack<Element>(s);
      if (moved) Softmax::rescale<OutFragment>(o, alpha);
    }

    if (Config::kSeparateOut) release_queries();
    release_stored();
    clean_values(work, block.number);
    const Tile& done = shared.tiles[tile];
    Softmax of_done = softmax;
    softmax = Softmax();
    float factors[ScoreFragment::kSlots];
    // What needs no output yet, under its last product.
    const auto conclude_early = [&] {
      conclude(of_done, done, factors);
      store_statistics(of_done, done);
    };
    if constexpr (Config::kContinuous) {
      q_at.advance();
      tile = next_tile();
      if (tile >= 0) {
        work = Work(p, shared.tiles[tile], group);
        held_units = units_of<kHasScales>(p, shared.tiles[tile]);
        await_first(work);
      }
      pin(probabilities);
      wgmma_fence();
      issue_scores();  // after the last tile: of what lies there, and not used
      v_at.wait_full(shared.values);
      wgmma_fence();
      issue_output();
      wgmma_wait_group<1>();
      pin(s);
      if (tile >= 0) first_step(softmax, work);
      wgmma_wait_group<0>();
      pin_output();
      pin(probabilities);
      release_values();
      conclude(of_done, done, factors);
      store(done, factors);
      store_statistics(of_done, done);
      if (tile < 0) break;
    } else if constexpr (kFetches) {
      q_at.advance();
      tile = next_tile();
      fetch_queries(p, shared, tile);
      issue_last_output();
      conclude_early();
      if (tile >= 0) {
        work = Work(p, shared.tiles[tile], group);
        held_units = units_of<kHasScales>(p, shared.tiles[tile]);
      }
      wgmma_wait_group<0>();
      pin_output();
      pin(probabilities);
      release_values();
      store(done, factors);
      if (tile >= 0) {
        await_first(work);
        await_queries(shared);
      }
      wgmma_fence();
      issue_scores();  // after the last tile: of what lies there, and not used
#pragma unroll
      for (int part = 1; part < kOutParts; ++part) store_part(p, part, done, factors);
      wgmma_wait_group<0>();
      pin(s);
      if (tile < 0) break;
      first_step(softmax, work);
    } else {
      issue_last_output();
      conclude_early();
      wgmma_wait_group<0>();
      pin_output();
      pin(probabilities);
      release_values();
      store(done, factors);
      q_at.advance();
      tile = next_tile();
      if (tile < 0) break;
      work = Work(p, shared.tiles[tile], group);
      held_units = units_of<kHasScales>(p, shared.tiles[tile]);
      await_first(work);
      wgmma_fence();
      issue_scores();
      wgmma_wait_group<0>();
      pin(s);
      first_step(softmax, work);
    }
  }
  if (elected) cp_async_bulk_wait_group<0>();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.queries.init(Config::kSeparateOut ? kReaders : kGroups);
    shared.keys.init(kReaders);
    shared.init_bias(kGroups * kWarpgroupThreads / 32);
    shared.values.init(kGroups);
    if constexpr (kLooksForTiles) shared.comings.init(1);
    [](auto& shared) {
      if constexpr (kFetches)
        for (auto& queries : shared.fetched) queries.init(1);
    }(shared);
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    [](const auto& p) {
      if constexpr (!kIsNarrow) prefetch_tensormap(&p.v_map);
      if constexpr (!kIsWide) prefetch_tensormap(&p.out_map);
    }(p);
  }
  if constexpr (Config::kProgrammatic) griddepcontrol_wait();  // in front of the first look at an array, by every block
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < kProducers) produce(p, shared);
    if (kLooksForTiles && threadIdx.x == 32) look_for_tiles(p, shared);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume(p, shared, group - 1);
  }
}
