// dQ of the backward on Hopper's tensor cores by wgmma, for wide heads (sm_90a, float16 and bfloat16).
//
// Job: beside backward_wgmma_split.cu, which makes dK and dV.  There a step of 64 queries and 64 keys would add as many bytes to sums
// of dq as it loads, at less than half the rate; here scores are made a second time and dq leaves once.  A block owns a tile of
// queries, of which Q and dO stay in shared memory, and walks over the keys that they see: warpgroup 0 produces, and the other two
// own 64 rows each:
//   S = Q Kᵀ, P, dP = dO Vᵀ, dS, dQ += dS K
// dS becomes an operand in its registers.  S of the next keys is queued in front of dQ, so that P of one step is formed under dQ of
// the step before; dP is queued behind P, when V has had time to arrive.
// Invariants: producer and consumers walk the same keys in ascending order, and a warpgroup hands back unread what none of its own
// rows sees; keys that nobody sees are zeros in shared memory; sums have one order.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/epilogue.cuh"
#include "hw/fragment_simt.cuh"
#include "hw/gemm_wgmma.cuh"

constexpr int kGroups = Config::kBlockQ / kWarpgroupRows;  // of consumers
constexpr int kAllBarrier = 1, kConsumers = kGroups * kWarpgroupThreads;
static_assert(Score::kIdentity && !Visibility::kHasMask,
              "scores are not made twice where they are looked at one by one");

typedef PanelTile<Config::kBlockQ, Config::kHeadDim> QueryTile;
typedef PanelTile<Config::kBlockQ, Config::kHeadDimV> DoutTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDim> KeyTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDimV> ValueTile;
typedef MmaFragment<1, Config::kBlockK / 8> ScoreFragment;
typedef MmaFragment<1, Config::kHeadDim / 8> QueryFragment;

// A tile of queries and the blocks of keys that some of them see.
struct Work {
  Place place;
  int batch, row;  // entry, all batch axes merged; the tile's first
  Range blocks;

  Work() = default;
  // Longest first, as in the forward.
  __device__ __forceinline__ Work(const Params& p, int index) {
    const int tiles = Place::query_tiles<Config::kBlockQ>(p);
    const Assignment assigned(p, index, tiles, p.batch_size * p.heads_q);
    row = place.enter_queries<Config::kBlockQ>(p, tiles - 1 - assigned.tile) * Config::kBlockQ;
    const HeadOfEntry of(p, assigned.head, p.heads_q);
    batch = of.batch;
    place.set_head(p, of.head);
    place.set_batch(p, batch);
    place.key_count = Visibility::key_count(p, place);
    blocks = blocks_of(p, Config::kBlockQ, 0);
  }
  // Those that some rows see, of so many from a row of the tile on.
  __device__ __forceinline__ Range blocks_of(const Params& p, int count, int first) const {
    const Range rows = rows_of(p, count, first);
    if (is_empty(rows)) return {0, 0};
    const Range seen = keys_seen_by_any(p, place, rows);
    return is_empty(seen) ? Range{0, 0} : tiles_over<Config::kBlockK>(seen);
  }
  __device__ __forceinline__ Range rows_of(const Params& p, int count, int first) const {
    return {row + first, min(row + first + count, place.seq_q(p))};
  }
};

struct SharedStorage {
  QueryTile q;
  DoutTile dout;
  KeyTile k[Config::kKeyStages];
  ValueTile v[Config::kValueStages];
  Channel<1> queries, douts;
  Channel<Config::kKeyStages> keys;
  Channel<Config::kValueStages> values;
  Work work;
};
static_assert(sizeof(SharedStorage) <= Config::kSharedBytes, "schedules/wgmma.py disagrees");

// One thread: loads in the order in which the consumers use what is loaded.
__device__ __forceinline__ void produce(const Params& p, SharedStorage& shared) {
  const Work& work = shared.work;
  const Place& place = work.place;
  const auto load_rows = [&](auto& to, const TensorMap& map, u32 full) {
    mbarrier_arrive_expect_tx(full, to.kBytes);
#pragma unroll
    for (int first = 0; first < Config::kBlockQ; first += kWarpgroupRows) {
      // Where there is none, rows that nobody looks at: no box may lie outside as a whole.
      const int row = work.row + first < place.seq_q(p) ? work.row + first : work.row;
      const DescribedRow at = place.described_query(p, row, work.batch);
      copy_panels(to, map, full, {0, at.row, place.head, at.batch}, CachePolicy::kEvictFirst, to.kPanels, first);
    }
  };
  Cursor<Config::kKeyStages> k_at;
  Cursor<Config::kValueStages> v_at;
  const auto load_keys = [&](auto& to, const TensorMap& map, u32 full, int block) {
    const DescribedRow at = place.described_key(p, block * Config::kBlockK, work.batch);
    load_panels(to, map, full, {0, at.row, place.head_k, at.batch}, CachePolicy::kEvictLast);
  };
  load_rows(shared.q, p.q_map, shared_address(&shared.queries.full[0]));
  for (int block = work.blocks.begin; block < work.blocks.end; ++block) {
    k_at.wait_empty(shared.keys);
    load_keys(shared.k[k_at.slot], p.k_map, k_at.full(shared.keys), block);
    k_at.advance();
    if (block == work.blocks.begin) load_rows(shared.dout, p.dout_map, shared_address(&shared.douts.full[0]));
    v_at.wait_empty(shared.values);
    load_keys(shared.v[v_at.slot], p.v_map, v_at.full(shared.values), block);
    v_at.advance();
  }
}

// One warpgroup.
struct Consumer {
  const Params& p;
  SharedStorage& shared;
  const int group;
  Cursor<Config::kKeyStages> k_at;
  Cursor<Config::kValueStages> v_at;
  int block;
  Range open;  // blocks that all of the warpgroup's rows see whole
  float shift[ScoreFragment::kSlots], delta[ScoreFragment::kSlots];
  float dq[QueryFragment::kSize];

  __device__ __forceinline__ Consumer(const Params& params, SharedStorage& storage, int g)
      : p(params), shared(storage), group(g), block(storage.work.blocks.begin), open{0, 0} {
    clear(dq);
  }
  __device__ __forceinline__ int warp_row() const {
    return group * kWarpgroupRows + int(recomputed(threadIdx.x)) % kWarpgroupThreads / 32 * 16;
  }
  __device__ __forceinline__ ScoreFragment scores_at() const {
    return ScoreFragment(warp_row(), 0, recomputed(threadIdx.x));
  }

  // Keys that no query sees may be anything, and must not meet a gradient of 0.
  template <class Tile> __device__ __forceinline__ void clean(Tile& tile) const {
    if constexpr (Visibility::kNarrows) {
      const Place& place = shared.work.place;
      const Range alive = keys_seen_by_any(p, place, {0, place.seq_q(p)});
      const int begin = block * Config::kBlockK, end = min(begin + Config::kBlockK, place.seq_k(p));
      if (begin >= alive.begin && end <= alive.end) return;
      clear_rows_outside<kConsumers>(tile, Range{alive.begin - begin, alive.end - begin},
                                     recomputed(int(threadIdx.x)) - kWarpgroupThreads);
      fence_proxy_async();
      bar_sync(kAllBarrier, kConsumers);
    }
  }
  __device__ __forceinline__ void await_keys() const {
    k_at.wait_full(shared.keys);
    clean(shared.k[k_at.slot]);
  }
  __device__ __forceinline__ void await_values() const {
    v_at.wait_full(shared.values);
    clean(shared.v[v_at.slot]);
  }
  // Blocks that none of the warpgroup's rows sees.
  __device__ __forceinline__ void pass_until(int end) {
    for (; block < end; ++block) {
      await_keys();
      release_by_warp(shared.keys, k_at.slot);
      k_at.advance();
      await_values();
      release_by_warp(shared.values, v_at.slot);
      v_at.advance();
    }
  }
  __device__ __forceinline__ void read_statistics() {
    const Work& work = shared.work;
    const ScoreFragment at = scores_at();
    const i64 head = i64(work.batch) * p.heads_q + work.place.head;
    const i64 first = head * p.rows_padded + work.place.padded_row<Config::kStatisticsRows>();
#pragma unroll
    for (int slot = 0; slot < ScoreFragment::kSlots; ++slot) {
      const int q = work.row + at.row(slot);
      const RowStatistics of = q < work.place.seq_q(p) ? statistics_of<Config::kStatisticsRows>(p.statistics, first + q)
                                                       : no_row_statistics();
      shift[slot] = of.shift;
      delta[slot] = of.delta;
    }
  }

  __device__ __forceinline__ void issue_scores(float (&s)[ScoreFragment::kSize]) const {
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDim, QueryTile, KeyTile>(s, operand(shared.q, group * kWarpgroupRows),
                                                          operand(shared.k[k_at.slot]));
    wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_dp(float (&dp)[ScoreFragment::kSize]) const {
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDimV, DoutTile, ValueTile>(dp, operand(shared.dout, group * kWarpgroupRows),
                                                            operand(shared.v[v_at.slot]));
    wgmma_commit_group();
  }
  // S -> P.
  __device__ __forceinline__ void form_probabilities(float (&s)[ScoreFragment::kSize]) const {
    const Work& work = shared.work;
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<false>(s, slopes, scores_at(), p, work.place, {work.row, block * Config::kBlockK},
                     block >= open.begin && block < open.end);
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] = probability(s[i], shift[ScoreFragment::slot(i)], p);
  }
  // dS of the block at hand, whose S is queued, and unless it is the first, behind that dQ of the block before.
  template <bool kFirst>
  __device__ __forceinline__ void form_gradients(float (&s)[ScoreFragment::kSize], float (&dp)[ScoreFragment::kSize],
                                                 RegisterOperand<Config::kBlockK / 16>& gradients) {
    wgmma_wait_group<kFirst ? 0 : 1>();
    pin(s);
    form_probabilities(s);
    await_values();
    issue_dp(dp);
    if constexpr (!kFirst) {
      wgmma_wait_group<1>();
      pin(dq);
      pin(gradients);
      release_by_warp(shared.keys, k_at.previous().slot);
    }
    wgmma_wait_group<0>();
    pin(dp);
    release_by_warp(shared.values, v_at.slot);
    v_at.advance();
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] = score_gradient(s[i], dp[i], delta[ScoreFragment::slot(i)]);
    gradients.pack<Element>(s);
  }
  __device__ __forceinline__ void issue_dq(const RegisterOperand<Config::kBlockK / 16>& gradients, int slot) {
    wgmma_fence();
    wgmma_registers_columns(dq, gradients, operand(shared.k[slot]));
    wgmma_commit_group();
  }
  // Over the blocks that the warpgroup's rows see, one at least.
  __device__ __forceinline__ void walk(int end) {
    float s[ScoreFragment::kSize], dp[ScoreFragment::kSize];
    RegisterOperand<Config::kBlockK / 16> gradients;
    await_keys();
    mbarrier_wait(shared_address(&shared.queries.full[0]), 0);
    issue_scores(s);
    mbarrier_wait(shared_address(&shared.douts.full[0]), 0);
    form_gradients<true>(s, dp, gradients);
#pragma unroll 1
    for (++block; block < end; ++block) {
      const int before = k_at.slot;
      k_at.advance();
      await_keys();
      pin(gradients);
      pin(dq);
      issue_scores(s);
      issue_dq(gradients, before);
      form_gradients<false>(s, dp, gradients);
    }
    pin(gradients);
    pin(dq);
    issue_dq(gradients, k_at.slot);
    wgmma_wait_group<0>();
    pin(dq);
    pin(gradients);
    release_by_warp(shared.keys, k_at.slot);
    k_at.advance();
  }
  __device__ __forceinline__ void run() {
    const Work& work = shared.work;
    Range own = work.blocks_of(p, kWarpgroupRows, group * kWarpgroupRows);
    if (!is_empty(own)) {
      const Range all = keys_seen_by_all(p, work.place, work.rows_of(p, kWarpgroupRows, group * kWarpgroupRows));
      open = {tiles_of(all.begin, Config::kBlockK), all.end / Config::kBlockK};
      read_statistics();
      pass_until(own.begin);
      walk(own.end);
    }
    pass_until(work.blocks.end);
  }
  __device__ __forceinline__ void store() {
    const Work& work = shared.work;
    store_rows(dq, QueryFragment(warp_row(), 0, recomputed(threadIdx.x)),
               matrix<Element>(p.dq, work.place.offset(p.dq)), work.rows_of(p, Config::kBlockQ, 0),
               Range{0, p.head_dim}, p.dq_vectors, [&](int) { return p.scale; });
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.work = Work(p, int(blockIdx.x));
    shared.queries.init(1);
    shared.douts.init(1);
    shared.keys.init(arrivals_of(kConsumers / 32));
    shared.values.init(arrivals_of(kConsumers / 32));
    fence_mbarrier_init();
  }
  __syncthreads();
  if (kPacked && shared.work.row >= shared.work.place.seq_q(p)) return;  // a tile that its segment has no rows for
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0 && !is_empty(shared.work.blocks)) produce(p, shared);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    Consumer consumer(p, shared, group - 1);
    consumer.run();
    consumer.store();
  }
}
