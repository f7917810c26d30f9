// Forward of float32 on Hopper's tensor cores by wgmma (sm_90a): numbers as planes of float16 (attention/planes.cuh,
// hw/gemm_split_wgmma.cuh).
//
// Job: one block computes a tile of queries against all keys it sees.  Warpgroup 0 produces: one thread has the tensor memory
// accelerator load the planes of queries, keys and values that the kernels before have written.  The other warpgroups own 64
// rows each and keep two products in flight: the scores of a block of keys, and P V of the block before, each first in its low
// parts, then in its high ones; the softmax runs under the last of them.  Where it is worth it they take turns at issuing them.
// Invariants: producer and consumers walk the same blocks in ascending order, at least one; a warpgroup hands back unread what
// none of its own rows sees; where hidden blocks are passed over, which block it is comes with its keys.  A block whose head
// the planes do not stand for does nothing: a kernel of plain float32 that follows has such heads.
// Source: FlashAttention-3 (arXiv:2407.08608), algorithms 1 and 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/fragment_simt.cuh"
#include "hw/gemm_split_wgmma.cuh"
#include "attention/dropout.cuh"
#include "attention/epilogue.cuh"
#include "attention/planes.cuh"

constexpr int kPlanes = Config::kPlanes;
constexpr int kGroups = Config::kBlockQ / kWarpgroupRows;  // of consumers
constexpr int kAllBarrier = 1;
constexpr int kTurnBarrier = 2;  // and the ones behind it
// Weights reach 2^kSlack: with this they fill what float16 has above its smallest number.
constexpr int kWeightExponent = 7;
// Tensor cores truncate their sums, which shows where all terms have one sign: the error grows with the steps of a chain.  So
// P V of a block is several chains of three steps or fewer, added to the output in float32.  With one plane nothing is gained.
constexpr int kSteps = Config::kBlockK / kStepDepth;
constexpr int kChains = kPlanes > 1 ? (kSteps + 2) / 3 : 1;
constexpr int kChainSteps = (kSteps + kChains - 1) / kChains;
static_assert(kChains <= 3, "more than the products of the scores that they are issued between");
constexpr bool kTells = Visibility::kHidesTiles || Visibility::kClearsTiles;

typedef PanelTile<Config::kBlockQ, Config::kHeadDim> QueryTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDim> KeyTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDimV> ValueTile;

// A block of keys where hidden ones are passed over: which one, and what else consumers need to know.
struct Told {
  int number;
  bool open;  // no element needs a test
  bool last;  // of the walk
};

struct SharedStorage {
  QueryTile q[kPlanes];
  KeyTile k[Config::kStages][kPlanes];
  ValueTile v[Config::kStages][kPlanes];
  Channel<1> queries;
  Channel<Config::kStages> keys, values;
  Told told[Config::kStages];  // of the keys in the slots
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/split_wgmma.py disagrees");

typedef MmaFragment<1, Config::kBlockK / 8> ScoreFragment;
typedef MmaFragment<1, Config::kHeadDimV / 8> OutFragment;

__device__ __forceinline__ Range keys_of_block(int block) {
  return {block * Config::kBlockK, (block + 1) * Config::kBlockK};
}

// What a block works on.  Longest first: the last queries see the most keys under a causal mask.
struct Work {
  Place place;
  int row;       // the first one
  Range blocks;  // of keys, that some of the queries see; one at least

  __device__ __forceinline__ Work(const Params& p, int index) {
    const int query_tiles = Place::query_tiles<Config::kBlockQ>(p);
    const Assignment assigned(p, index, query_tiles, p.batch_size * p.heads_q);
    row = (query_tiles - 1 - assigned.tile) * Config::kBlockQ;
    place.set_head(p, assigned.head % p.heads_q);
    place.set_batch(p, assigned.head / p.heads_q);
    place.key_count = Visibility::key_count(p, place);
    const Range seen = keys_seen_by_any(p, place, {row, min(p.seq_q, row + Config::kBlockQ)});
    const int first = seen.begin / Config::kBlockK;
    blocks = {first, max(first + 1, tiles_of(seen.end, Config::kBlockK))};
  }
  __device__ __forceinline__ Range queries() const { return {row, row + Config::kBlockQ}; }
};

// One thread; where it passes over hidden blocks a whole warp, whose lanes look at one block each and the first one does the rest.
constexpr int kProducers = kTells ? 32 : 1;
__device__ __forceinline__ void produce(const Params& p, SharedStorage& shared) {
  const Work work(p, blockIdx.x);
  const Place& place = work.place;
  const bool leads = kProducers == 1 || threadIdx.x == 0;
  const int of_queries = query_head(p, place), of_keys = key_head(p, place);
  Cursor<Config::kStages> k_at, v_at;
  // All planes of a tile, which are all that the barrier waits for.
  const auto load = [&](auto& to, const TensorMap& map, u32 full, int row, int head, CachePolicy policy) {
    mbarrier_arrive_expect_tx(full, sizeof(to));
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) copy_panels(to[plane], map, full, {0, row, head, plane}, policy);
  };
  // The block from `block` on that the queries may see; at the walk's end or beyond if there is none.
  const auto visible_from = [&](int block) {
    if constexpr (kTells) {
      for (; block < work.blocks.end; block += 32) {
        const int own = block + int(threadIdx.x);
        const u32 seen = __ballot_sync(
            0xffffffffu, own < work.blocks.end && !tile_is_hidden(p, place, work.queries(), keys_of_block(own)));
        if (seen) return block + __ffs(int(seen)) - 1;
      }
    }
    return block;
  };
  // Loads the keys of a block, and returns the one behind it.
  const auto load_k = [&](int block) {
    const int next = visible_from(block + 1);
    k_at.wait_empty(shared.keys);
    if (leads) {
      if constexpr (kTells)
        shared.told[k_at.slot] = {block, tile_is_open(p, place, work.queries(), keys_of_block(block)),
                                  next >= work.blocks.end};
      load(shared.k[k_at.slot], p.k_map, k_at.full(shared.keys), block * Config::kBlockK, of_keys,
           CachePolicy::kEvictLast);
    }
    k_at.advance();
    return next;
  };
  const auto load_v = [&](int block) {
    v_at.wait_empty(shared.values);
    if (leads)
      load(shared.v[v_at.slot], p.v_map, v_at.full(shared.values), block * Config::kBlockK, of_keys,
           CachePolicy::kEvictLast);
    v_at.advance();
  };

  if (leads) load(shared.q, p.q_map, Cursor<1>().full(shared.queries), work.row, of_queries, CachePolicy::kEvictFirst);
  int block = min(visible_from(work.blocks.begin), work.blocks.end - 1);  // hidden or not if there is but one
  int behind = load_k(block);
  while (behind < work.blocks.end) {
    const int before = block;
    block = behind;
    behind = load_k(block);
    load_v(before);
  }
  load_v(block);
}

// One warpgroup.
__device__ __forceinline__ void consume(const Params& p, SharedStorage& shared, int group) {
  const Work work(p, blockIdx.x);
  const Place& place = work.place;
  const bool elected = threadIdx.x % kWarpgroupThreads == 0;
  const auto warp_row = [&] { return group * kWarpgroupRows + recomputed(threadIdx.x) % kWarpgroupThreads / 32 * 16; };
  const ScoreFragment s_at(warp_row(), 0);
  const SplitOperand<kPlanes, QueryTile> queries(shared.q, group * kWarpgroupRows);
  const SplitOperand<kPlanes, KeyTile> keys(shared.k[0]);
  const SplitOperand<kPlanes, ValueTile> values(shared.v[0]);
  const DropKey key = drop_key(p, place);
  const float unscale =
      power_of_two(-exponents(p, kSplitQ)[query_head(p, place)] - exponents(p, kSplitK)[key_head(p, place)]);

  // Blocks that its own rows see, and those that all of them see whole.
  const int own = work.row + group * kWarpgroupRows;
  const Range rows{min(own, p.seq_q - 1), min(own + kWarpgroupRows, p.seq_q)};
  int end = work.blocks.end;
  if constexpr (Visibility::kNarrows && !kTells)
    end = min(end, max(work.blocks.begin + 1, tiles_of(keys_seen_by_any(p, place, rows).end, Config::kBlockK)));
  const Range all = keys_seen_by_all(p, place, rows);
  const Range open{tiles_of(all.begin, Config::kBlockK), all.end / Config::kBlockK};

  float s[ScoreFragment::kSize], o[OutFragment::kSize], alpha[ScoreFragment::kSlots];
  float part[OutFragment::kSize];  // of the output: of one chain
  SplitRegisters<kPlanes, kSteps> weights;
  OnlineSoftmax<ScoreFragment> softmax;
  Cursor<Config::kStages> k_at, v_at;
  clear(o);

  // The block of keys at hand: counted, or as the producer tells.  What is told is read before the product.
  int block = work.blocks.begin - 1;
  bool told_open = false, told_last = false;
  const auto await_keys = [&] {
    k_at.wait_full(shared.keys);
    ++block;
    if constexpr (kTells) {
      const Told told = shared.told[k_at.slot];
      block = told.number;
      told_open = told.open;
      told_last = told.last;
    }
  };
  const auto is_last = [&] { return kTells ? told_last : block + 1 >= end; };

  const auto issue_low_queries = [&] {
    wgmma_fence();
    wgmma_low_high_rows<Config::kHeadDim>(s, queries, keys, k_at.slot);
    wgmma_commit_group();
  };
  const auto issue_low_keys = [&] {
    wgmma_fence();
    wgmma_high_low_rows<Config::kHeadDim>(s, queries, keys, k_at.slot);
    wgmma_commit_group();
  };
  const auto issue_scores = [&] {
    wgmma_fence();
    wgmma_high_rows<Config::kHeadDim>(s, queries, keys, k_at.slot);
    wgmma_commit_group();
  };
  const auto issue_low_weights = [&] {
    wgmma_fence();
    wgmma_low_high_columns(part, weights, values, v_at.slot);
    wgmma_commit_group();
  };
  const auto issue_low_values = [&] {
    wgmma_fence();
    wgmma_high_low_columns(part, weights, values, v_at.slot);
    wgmma_commit_group();
  };
  float (&product)[OutFragment::kSize] = kPlanes > 1 ? part : o;
  const auto issue_output = [&](int chain) {
    wgmma_fence();
    wgmma_high_columns(product, weights, values, v_at.slot, chain * kChainSteps,
                       min(kSteps, (chain + 1) * kChainSteps));
    wgmma_commit_group();
  };
  // What is there: sums of low parts, which high ones are to be added to; a chain; the last one.
  const auto take_low = [&](auto& c) {
    pin(c);
    low_to_high(c);
  };
  const auto take_chain = [&] {
    pin(product);
    if constexpr (kPlanes > 1) add(o, part);
  };
  const auto take_output = [&] {
    pin(weights);
    if (elected) v_at.release(shared.values);
    v_at.advance();
    take_chain();
  };
  // Values that do not exist must not meet a weight of 0: nobody has written their planes.
  const auto clean_values = [&](int block) {
    if constexpr (Visibility::kNarrows) {
      const Range range = keys_of_block(block);
      if (place.key_count >= min(range.end, p.seq_k)) return;
      v_at.wait_full(shared.values);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane)
        clear_rows_outside<kGroups * kWarpgroupThreads>(shared.v[v_at.slot][plane],
                                                        Range{0, place.key_count - range.begin},
                                                        recomputed(int(threadIdx.x) - kWarpgroupThreads));
      fence_proxy_async();
      bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);
    }
  };
  // Scores -> weights in place, when the product is there; tells whether the output must be rescaled by `alpha`.
  const auto softmax_step = [&] {
    pin(s);
    if (elected) k_at.release(shared.keys);
    k_at.advance();
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= unscale;
    // Where blocks are passed over no register is left to keep the row in.
    const Corner corner{kTells ? Work(p, recomputed(blockIdx.x)).row : work.row, block * Config::kBlockK};
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<false>(s, slopes, s_at, p, place, corner, kTells ? told_open : block >= open.begin && block < open.end);
    bool subtracted = false;
    const bool moved = softmax.rebase(s, alpha, subtracted, p);
    softmax.exponentiate(s, subtracted, p);
    drop<true>(s, s_at, key, p, corner);
    return moved;
  };

  Cursor<1>().wait_full(shared.queries);
  await_keys();
  if constexpr (kPlanes > 1) {
    issue_low_queries();
    issue_low_keys();
    wgmma_wait_group<0>();
    take_low(s);
  }
  issue_scores();
  wgmma_wait_group<0>();
  softmax_step();
  weights.pack(s, power_of_two(kWeightExponent));
  const Turns<kTurnBarrier, kGroups> turns{group};
  if constexpr (Config::kTurns) turns.open();
  while (!is_last()) {
    clean_values(block);
    await_keys();
    pin(weights);
    if constexpr (Config::kTurns) turns.take();
    // When one product is waited for, the next one has been issued.
    if constexpr (kPlanes == 1) {
      issue_scores();
      v_at.wait_full(shared.values);
    } else if constexpr (kChains == 1) {
      issue_low_queries();
      issue_low_keys();
      v_at.wait_full(shared.values);
      issue_low_weights();
      issue_low_values();
      wgmma_wait_group<2>();
      take_low(s);
      issue_scores();
      wgmma_wait_group<1>();
      take_low(part);
    } else {  // the scores' products are issued between the chains; their registers are those that low weights had
      v_at.wait_full(shared.values);
      issue_low_weights();
      issue_low_values();
      wgmma_wait_group<1>();
      pin(weights.plane[kPlanes - 1]);
      issue_low_queries();
      wgmma_wait_group<1>();
      take_low(part);
      if constexpr (kChains == 3) {
        issue_output(0);
        issue_low_keys();
        wgmma_wait_group<1>();
        take_chain();
      } else {
        issue_low_keys();
      }
      issue_output(kChains - 2);
      wgmma_wait_group<1>();
      take_low(s);
      issue_scores();
      wgmma_wait_group<1>();
      take_chain();
    }
    issue_output(kChains - 1);
    if constexpr (Config::kTurns) turns.pass();
    wgmma_wait_group<1>();
    const bool moved = softmax_step();
    wgmma_wait_group<0>();
    take_output();
    if (moved) softmax.rescale<OutFragment>(o, alpha);
    weights.pack(s, power_of_two(kWeightExponent));
  }
  clean_values(block);
  v_at.wait_full(shared.values);
  pin(weights);
  if constexpr (kPlanes > 1) {
    issue_low_weights();
    issue_low_values();
    wgmma_wait_group<0>();
    take_low(part);
  }
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) {
    issue_output(chain);
    wgmma_wait_group<0>();
    if (chain < kChains - 1) take_chain();
  }
  take_output();

  if constexpr (Visibility::kNarrows && !kTells) {
    for (int rest = end; rest < work.blocks.end; ++rest) {
      if constexpr (Config::kTurns) {
        turns.take();
        turns.pass();
      }
      clean_values(rest);
      // By one thread alone: another one might come when the slot is full again.
      if (elected) {
        k_at.wait_full(shared.keys);
        k_at.release(shared.keys);
        v_at.wait_full(shared.values);
        v_at.release(shared.values);
      }
      __syncwarp();
      k_at.advance();
      v_at.advance();
    }
  }

  softmax.finish();
  const Work done(p, recomputed(blockIdx.x));
  softmax.join_sink(p, done.place);
  float factor[OutFragment::kSlots];
#pragma unroll
  for (int slot = 0; slot < OutFragment::kSlots; ++slot)
    factor[slot] = softmax.inverse(slot) * drop_scale(p) * power_of_two(-kWeightExponent);
#pragma unroll
  for (int i = 0; i < OutFragment::kSize; ++i) o[i] *= factor[OutFragment::slot(i)];
  // By itself: the product of both factors may be no number.
  const float unscale_v = power_of_two(-exponents(p, kSplitV)[key_head(p, done.place)]);
  const Range queries_done{done.row, min(p.seq_q, done.row + Config::kBlockQ)};
  store_rows(o, OutFragment(warp_row(), 0), matrix<float>(p.out, done.place.offset(p.out)), queries_done,
             {0, p.head_dim_v}, p.out_vectors, [&](int) { return unscale_v; });
  store_lse(softmax, ScoreFragment(warp_row(), 0), p, done.place, queries_done);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if (!is_split(p, Work(p, blockIdx.x).place)) return;
  if (threadIdx.x == 0) {
    shared.queries.init(kGroups);
    shared.keys.init(kGroups);
    shared.values.init(kGroups);
    fence_mbarrier_init();
    prefetch_tensormap(&p.q_map);
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < kProducers) produce(p, shared);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume(p, shared, group - 1);
  }
}
