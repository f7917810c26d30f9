// Forward on Hopper's tensor cores by wgmma (sm_90a, float16 and bfloat16).
//
// Job: blocks stay on their multiprocessor and work through tiles of queries.  Warpgroup 0 produces: one thread has the tensor
// memory accelerator load queries, keys and values ahead of use.  The other warpgroups own 64 query rows each and keep two
// products in flight: the scores of a block of keys, and P V of the block before, so that the softmax of one block runs under
// the product of the other.  Where a second tile of queries fits, this pipeline does not stop between tiles.  Warpgroups take
// turns at issuing, so that the softmax of one runs under the products of the other.
// Invariants: producer and consumers walk the same blocks in the same order, at least one per tile; keys are walked in
// descending order, so that hidden ones come first; a tile's number travels with its queries, -1 after the last.
// Source: FlashAttention-3 (arXiv:2407.08608), algorithms 1 and 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/gemm_mma.cuh"
#include "hw/gemm_wgmma.cuh"
#include "attention/epilogue.cuh"

constexpr int kGroups = Config::kBlockQ / kWarpgroupRows;  // of consumers
constexpr int kTurnBarrier = 1, kGroupBarrier = kTurnBarrier + kGroups, kAllBarrier = kGroupBarrier + kGroups;

typedef PanelTile<Config::kBlockQ, Config::kHeadDim> QueryTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDim> KeyTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDimV> ValueTile;
typedef PanelTile<Config::kBlockQ, Config::kHeadDimV> OutTile;

struct SharedStorage {
  QueryTile q[Config::kQueryStages];
  KeyTile k[Config::kStages];
  ValueTile v[Config::kStages];
  alignas(Config::kSeparateOut ? 1024 : 16) unsigned char out_data[Config::kSeparateOut ? OutTile::kBytes : 16];
  Channel<Config::kQueryStages> queries;
  Channel<Config::kStages> keys, values;
  int tile[Config::kQueryStages];

  // Without a place of its own, the output of a warpgroup takes that of its queries, panel by panel.
  __device__ __forceinline__ OutTile& out() {
    return *reinterpret_cast<OutTile*>(Config::kSeparateOut ? out_data : q[0].data);
  }
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/wgmma.py disagrees");
static_assert(Config::kSeparateOut || (Config::kQueryStages == 1 && OutTile::kPanels <= QueryTile::kPanels),
              "the output may only take the place of a single tile of queries that is as wide");
static_assert(!Visibility::kHidesTiles && !Visibility::kClearsTiles,
              "schedules/wgmma.py refuses them: Work knows intervals");
static_assert(!Config::kContinuous || (Config::kSeparateOut && Config::kQueryStages > 1),
              "the next queries arrive before this output is stored");

typedef MmaFragment<1, Config::kBlockK / 8> ScoreFragment;
typedef MmaFragment<1, Config::kHeadDimV / 8> OutFragment;
typedef OnlineSoftmax<ScoreFragment> Softmax;

// Where scores are plain products the softmax guesses, and a warp whose guess is lost multiplies again, by mma.sync since the
// other warps of its group do not.  Queries and keys are then handed back by each warp, otherwise once for a warpgroup.
constexpr bool kGuesses = Config::kOptimistic && Score::kIdentity && !Visibility::kHasMask;
constexpr int kReaderThreads = kGuesses ? 32 : kWarpgroupThreads,
              kReaders = kGroups * kWarpgroupThreads / kReaderThreads;

// A tile of queries.  Some heads at a time, so that their keys and values stay in the cache; among these the tiles that see
// the most keys first, the last queries under a causal mask.
struct Work {
  Place place;
  Range queries;
  int batch;        // entry, all batch axes merged
  int first, last;  // blocks of keys
  Range open;       // those that every query sees whole

  __device__ __forceinline__ Work(const Params& p, int tile) {
    const int heads = p.batch_size * p.heads_q, query_tiles = tiles_of(p.seq_q, Config::kBlockQ);
    const int first_head = tile / (p.section * query_tiles) * p.section, width = min(p.section, heads - first_head);
    const int rest = tile - first_head * query_tiles, head = first_head + rest % width;
    const int row = (query_tiles - 1 - rest / width) * Config::kBlockQ;
    queries = {row, min(p.seq_q, row + Config::kBlockQ)};
    batch = head / p.heads_q;
    place.set_head(p, head % p.heads_q);
    place.set_batch(p, batch);
    place.key_count = Visibility::key_count(p, place);
    const Range seen = keys_seen_by_any(p, place, queries);
    first = seen.begin / Config::kBlockK;
    last = max(first + 1, tiles_of(seen.end, Config::kBlockK));
    const Range all = keys_seen_by_all(p, place, queries);
    open = {tiles_of(all.begin, Config::kBlockK), all.end / Config::kBlockK};
  }
  __device__ __forceinline__ bool is_open(int block) const { return block >= open.begin && block < open.end; }
};

__device__ __forceinline__ int tile_count(const Params& p) {
  return p.batch_size * p.heads_q * tiles_of(p.seq_q, Config::kBlockQ);
}

// What the producer needs to know of a tile.
struct Source {
  int tile, row, head, head_k, batch, first, last;

  __device__ __forceinline__ Source(const Params& p, int index) : tile(index < tile_count(p) ? index : -1) {
    if (tile < 0) return;
    const Work work(p, tile);
    row = work.queries.begin;
    head = work.place.head;
    head_k = work.place.head_k;
    batch = work.batch;
    first = work.first;
    last = work.last;
  }
};

// One thread of each block, when it takes no more: the last one leaves both words, tiles taken and blocks done, as they were
// found, so that the next launch on the same stream starts anew.
__device__ __forceinline__ void restart_counter(u32* taken) {
  __threadfence();
  if (atomicAdd(taken + 1, 1u) == gridDim.x - 1) taken[0] = taken[1] = 0;
}

// One thread: loads in the order in which the consumers use what is loaded.
__device__ __forceinline__ void produce(const Params& p, SharedStorage& shared) {
  Cursor<Config::kQueryStages> q_at;
  Cursor<Config::kStages> k_at, v_at;
  const auto load_q = [&](const Source& from) {
    q_at.wait_empty(shared.queries);
    shared.tile[q_at.slot] = from.tile;
    const u32 full = q_at.full(shared.queries);
    if (from.tile < 0)
      mbarrier_arrive(full);
    else
      load_panels(shared.q[q_at.slot], p.q_map, full, {0, from.row, from.head, from.batch}, CachePolicy::kEvictFirst);
    q_at.advance();
  };
  const auto load_k = [&](const Source& from, int block) {
    k_at.wait_empty(shared.keys);
    load_panels(shared.k[k_at.slot], p.k_map, k_at.full(shared.keys),
                {0, block * Config::kBlockK, from.head_k, from.batch}, CachePolicy::kEvictLast);
    k_at.advance();
  };
  const auto load_v = [&](const Source& from, int block) {
    v_at.wait_empty(shared.values);
    load_panels(shared.v[v_at.slot], p.v_map, v_at.full(shared.values),
                {0, block * Config::kBlockK, from.head_k, from.batch}, CachePolicy::kEvictLast);
    v_at.advance();
  };

  // The first tiles are the blocks' own numbers; then each takes the next one that nobody has, or without a counter every
  // gridDim-th.
  u32* taken = static_cast<u32*>(p.tile_counter);
  int index = blockIdx.x;
  Source now(p, index);
  load_q(now);
  load_k(now, now.last - 1);
  while (now.tile >= 0) {
    index = (taken ? int(atomicAdd(taken, 1u)) : index) + int(gridDim.x);
    const Source next(p, index);
    bool announced = false;
    for (int block = now.last - 2; block >= now.first; --block) {
      load_k(now, block);
      // With the third block of keys the consumers have left the tile before, and its queries are free.
      if (Config::kQueryStages > 1 && now.last - block == 3) {
        load_q(next);
        announced = true;
      }
      load_v(now, block + 1);
    }
    if (Config::kQueryStages > 1) {
      if (!announced) load_q(next);
      if (next.tile >= 0) load_k(next, next.last - 1);
      load_v(now, now.first);
    } else {  // the next queries wait for the epilogue, keys and values need not
      load_v(now, now.first);
      if (next.tile >= 0) load_k(next, next.last - 1);
      load_q(next);
    }
    now = next;
  }
  if (taken) restart_counter(taken);
}

// One warpgroup.
__device__ __forceinline__ void consume(const Params& p, SharedStorage& shared, int group) {
  const int thread = int(threadIdx.x % kWarpgroupThreads);
  const bool elected = thread == 0, hands_back = thread % kReaderThreads == 0;
  // Worked out anew where it is rarely needed.
  const auto warp_row = [&] { return group * kWarpgroupRows + recomputed(threadIdx.x) % kWarpgroupThreads / 32 * 16; };
  const ScoreFragment s_at(group * kWarpgroupRows + thread / 32 * 16, 0, threadIdx.x);
  const Turns<kTurnBarrier, kGroups> turns{group};
  const u64 q_operand = operand(shared.q[0], group * kWarpgroupRows), k_operand = operand(shared.k[0]),
            v_operand = operand(shared.v[0]);
  Cursor<Config::kQueryStages> q_at;
  Cursor<Config::kStages> k_at, v_at;
  float s[ScoreFragment::kSize], o[OutFragment::kSize], alpha[ScoreFragment::kSlots];
  RegisterOperand<Config::kBlockK / 16> probabilities;

  const auto next_tile = [&] {
    q_at.wait_full(shared.queries);
    return shared.tile[q_at.slot];
  };
  const auto issue_scores = [&] {
    wgmma_rows_rows<Config::kHeadDim, QueryTile, KeyTile>(s, q_operand + q_at.slot * (QueryTile::kBytes >> 4),
                                                          k_operand + k_at.slot * (KeyTile::kBytes >> 4));
    wgmma_commit_group();
  };
  const auto issue_output = [&] {
    wgmma_registers_columns(o, probabilities, v_operand + v_at.slot * (ValueTile::kBytes >> 4));
    wgmma_commit_group();
  };
  const auto release_queries = [&] {
    if (Config::kSeparateOut ? hands_back : elected) q_at.release(shared.queries);
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
      const Range alive = keys_seen_by_any(p, work.place, {0, p.seq_q});
      const int begin = block * Config::kBlockK, end = min(begin + Config::kBlockK, p.seq_k);
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
  const auto softmax_step = [&](Softmax& softmax, const Work& work, int block, bool open, bool guesses) {
    bool moved = false, found = false;
    if (guesses) {
      found = softmax.guess(s, alpha, moved, p, release_keys, [&] {
        clear(s);
        gemm_rows_rows<Config::kHeadDim, ScoreFragment, Element, 1>(s, shared.q[q_at.slot], warp_row(),
                                                                    shared.k[k_at.slot], recomputed(0));
        __syncwarp();  // all lanes have read
      });
    } else {
      release_keys();
    }
    k_at.advance();
    if (found && !moved) return false;
    if (!found) {
      ScoreSlopes<ScoreFragment> slopes;
      scores_of<false>(s, slopes, s_at, p, work.place, {work.queries.begin, block * Config::kBlockK}, open);
      bool subtracted = false;
      moved = softmax.rebase(s, alpha, subtracted, p);
      softmax.exponentiate(s, subtracted, p);
    }
    if constexpr (kGuesses) trusted = softmax.may_guess(p);
    return moved;
  };
  const auto first_step = [&](Softmax& softmax, const Work& work) {
    const int block = work.last - 1;
    softmax_step(softmax, work, block, work.is_open(block), false);
  };
  const auto store = [&](Softmax& softmax, int tile) {
    const Work done(p, tile);
    softmax.finish();
    OutTile& out = shared.out();
    if (Config::kSeparateOut) {
      if (elected) cp_async_bulk_wait_group_read<0>();
      bar_sync(kGroupBarrier + group, kWarpgroupThreads);
    }
    const float inverse[] = {softmax.inverse(0), softmax.inverse(1)};
    store_accumulator<Element, OutFragment::kSize>(out, warp_row(), [&](int i) {
      const float factor = inverse[OutFragment::slot(i)];
      return factor == 0.f ? 0.f : o[i] * factor;  // by selection: an accumulator that no key entered may hold NaN
    });
    fence_proxy_async();
    bar_sync(kGroupBarrier + group, kWarpgroupThreads);
    if (elected) {
      const int first = group * kWarpgroupRows;
      store_panels(out, first, p.out_map, {0, done.queries.begin + first, done.place.head, done.batch});
      cp_async_bulk_commit_group();
      if (!Config::kSeparateOut) cp_async_bulk_wait_group_read<0>();
    }
    if (!Config::kSeparateOut) release_queries();
    store_lse(softmax, ScoreFragment(warp_row(), 0, recomputed(threadIdx.x)), p, done.place, done.queries);
  };

  if (Config::kTakesTurns) turns.open();
  int tile = next_tile();  // the grid is no larger than the number of tiles
  Work work(p, tile);
  Softmax softmax;
  k_at.wait_full(shared.keys);
  wgmma_fence();
  issue_scores();
  wgmma_wait_group<0>();
  pin(s);
  first_step(softmax, work);
  for (;;) {
    probabilities.pack<Element>(s);
    clear(o);
    for (int block = work.last - 2; block >= work.first; --block) {
      clean_values(work, block + 1);
      k_at.wait_full(shared.keys);
      if (Config::kTakesTurns) turns.take();
      pin(probabilities);
      wgmma_fence();
      issue_scores();
      v_at.wait_full(shared.values);
      wgmma_fence();
      issue_output();
      if (Config::kTakesTurns) turns.pass();
      // Only the first block reaches beyond the last key.
      const bool open = !Visibility::kNarrows || work.is_open(block);
      const bool guesses = kGuesses && open && trusted;
      wgmma_wait_group<1>();
      pin(s);
      const bool moved = softmax_step(softmax, work, block, open, guesses);
      wgmma_wait_group<0>();
      pin(o);
      pin(probabilities);
      release_values();
      probabilities.pack<Element>(s);
      if (moved) Softmax::rescale<OutFragment>(o, alpha);
    }

    if (Config::kSeparateOut) release_queries();
    clean_values(work, work.first);
    Softmax done = softmax;
    const int done_tile = tile;
    softmax = Softmax();
    if constexpr (Config::kContinuous) {
      q_at.advance();
      tile = next_tile();
      if (tile >= 0) k_at.wait_full(shared.keys);
      if (Config::kTakesTurns) turns.take();
      pin(probabilities);
      wgmma_fence();
      issue_scores();  // after the last tile: of what lies there, and not used
      v_at.wait_full(shared.values);
      wgmma_fence();
      issue_output();
      if (Config::kTakesTurns) turns.pass();
      wgmma_wait_group<1>();
      pin(s);
      if (tile >= 0) {
        work = Work(p, tile);
        first_step(softmax, work);
      }
      wgmma_wait_group<0>();
      pin(o);
      pin(probabilities);
      release_values();
      store(done, done_tile);
      if (tile < 0) break;
    } else {
      v_at.wait_full(shared.values);
      pin(probabilities);
      pin(o);
      wgmma_fence();
      issue_output();
      wgmma_wait_group<0>();
      pin(o);
      pin(probabilities);
      release_values();
      store(done, done_tile);
      q_at.advance();
      tile = next_tile();
      if (tile < 0) break;
      work = Work(p, tile);
      k_at.wait_full(shared.keys);
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
    shared.values.init(kGroups);
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
    prefetch_tensormap(&p.out_map);
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, shared);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume(p, shared, group - 1);
  }
}
