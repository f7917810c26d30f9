// Backward on Hopper's tensor cores by wgmma for head sizes above 128 (sm_90a, float16 and bfloat16).
//
// Job: as in backward_wgmma.cu one block owns a tile of keys, 64 here, and walks over the queries that see it; dK and dV are
// together more than a warpgroup's registers, so the two consumers share out the work by kind:
//   values   S = K Qᵀ, P, dV += Pᵀ dO
//   keys     dP = V dOᵀ, dS, dK += dSᵀ Q
// Both compute the same 64 x 64 elements in the same threads, so that P goes from one to the other as float32 through shared
// memory, each thread's own.  dS is written there as well, and each takes every other panel of dQ = dS K.  `values` runs a step
// ahead of `keys`: its exponentials run under the products of the other.  Where dQ has a kernel of its own
// (backward_wgmma_dq.cu), dS stays in registers and nothing is added to memory.  Where tiles are hidden, the producer's warp passes over
// them and tells the consumers which step it is.
// Invariants: producer and consumers walk the same steps; keys that nobody sees are zeros in shared memory.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/epilogue.cuh"
#include "backward_wgmma_inputs.cuh"

constexpr int kGroups = 2;  // of consumers
constexpr int kGroupWarps = kWarpgroupThreads / 32;
constexpr int kGroupBarrier = 1, kAllBarrier = kGroupBarrier + kGroups;
constexpr int kDqPanels = Config::kDqWidth / kPanelColumns;
static_assert(Config::kBlockK == kWarpgroupRows && Config::kBlockQ == kWarpgroupRows, "one tile of scores");
static_assert(Config::kStages == 2, "dS has two slots as well");

typedef PanelTile<Config::kBlockK, Config::kBlockQ> GradientTile;  // dS transposed, a row per key
typedef MmaFragment<1, Config::kBlockQ / 8, true> ScoreFragment;
typedef SumTile<kWarpgroupThreads, kPanelColumns / 8> DqPanel;
typedef float Scores[ScoreFragment::kSize];

struct SharedStorage : BiasTiles {
  InputTiles in;
  GradientTile ds[2];
  float4 p[ScoreFragment::kSize / 4][kWarpgroupThreads];  // each thread's own
  InputChannels channels;
  Channel<1> probabilities;
  Channel<2> gradients;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/wgmma.py disagrees");

// One warpgroup: what both kinds have.
struct Consumer {
  const Params& p;
  SharedStorage& shared;
  const Work& work;
  const int group;
  Cursor<2> cursor;  // of the step at hand; its slot and phase are those of dS as well
  Cursor<1> p_cursor;
  At at;

  __device__ __forceinline__ Consumer(const Params& params, SharedStorage& storage, const Work& w, int g)
      : p(params), shared(storage), work(w), group(g), at(params, w) {}

  __device__ __forceinline__ u32 thread() const { return threadIdx.x % kWarpgroupThreads; }
  __device__ __forceinline__ int warp_row() const { return int(thread() / 32 * 16); }

  // dQ of a step, this warpgroup's panels one after the other, each added to the sums as soon as it is there.
  __device__ __forceinline__ void add_panels(Cursor<2> of, int tile) const {
#pragma unroll
    for (int pair = 0; pair < kDqPanels; pair += kGroups) {
      const int panel = pair + group;
      if (panel >= kDqPanels) break;
      float dq[kPanelColumns / 2];
      wgmma_fence();
      wgmma_columns_columns<Config::kBlockK>(dq, operand(shared.ds[of.slot]),
                                             operand(shared.in.k[0]) + panel * (KeyTile::kPanelBytes >> 4));
      wgmma_commit_group();
      wgmma_wait_group<0>();
      pin(dq);
      float* sums = static_cast<float*>(p.dq_sum) + (i64(tile) * kDqPanels + panel) * DqPanel::kSize;
      DqPanel::add(sums, dq, int(u32(recomputed(threadIdx.x)) % kWarpgroupThreads));
    }
  }
  __device__ __forceinline__ void add_dq(Cursor<2> of, int tile, int turn) const {
    if constexpr (Config::kDqApart) return;
    of.wait_full(shared.gradients);
    const int own = work.keys.begin / Config::kBlockK;
    if constexpr (Config::kDeterministic)
      in_turn(
          turn_counter(p, 2 * i64(tile) + group), kPassesOver ? turn : own, own + 1, thread() == 0,
          [&] { bar_sync(kGroupBarrier + group, kWarpgroupThreads); }, [&] { add_panels(of, tile); });
    else
      add_panels(of, tile);
    release_by_warp(shared.gradients, of.slot);
  }
  template <class Tile, int kSize>
  __device__ __forceinline__ void store(Tile& tile, const float (&x)[kSize], float scale, const TensorMap& map) const {
    store_gradient(tile, 0, x, scale, map, p, work, 0, kGroupBarrier + group);
    if (thread() == 0) cp_async_bulk_wait_group_read<0>();
  }
};

// S, P and dV.
struct ValueConsumer : Consumer {
  float dv[Config::kHeadDimV / 2];

  __device__ __forceinline__ ValueConsumer(const Params& params, SharedStorage& storage, const Work& w)
      : Consumer(params, storage, w, 0) {
    clear(dv);
  }
  __device__ __forceinline__ void issue_scores(Scores& s) const {
    cursor.wait_full(shared.channels.queries);
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDim, KeyTile, QueryTile>(s, operand(shared.in.k[0]),
                                                          operand(shared.in.q[cursor.slot]));
    wgmma_commit_group();
  }
  // S -> P for dV, and P times the slopes of the modifiers for the other warpgroup.
  __device__ __forceinline__ void form_probabilities(Scores& s, RegisterOperand<Config::kBlockQ / 16>& probabilities) {
    const ScoreFragment s_at(warp_row(), 0, threadIdx.x);
    const Step step = at.step(shared.channels, cursor.slot);
    const Corner corner{step.tile * Config::kBlockQ, work.keys.begin};
    Place place = work.place;
    place.head = step.head;
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<true>(s, slopes, s_at, p, place, corner,
                    at.is_open(shared.channels, cursor.slot, p, place, step.queries(), corner.k, 0));
    probabilities_of(s, s_at, shared.channels.statistics[cursor.slot], p);
    probabilities.pack<Element>(s);
    p_cursor.wait_empty(shared.probabilities);
#pragma unroll
    for (int j = 0; j < ScoreFragment::kSize; j += 4)
      shared.p[j / 4][thread()] =
          make_float4(s[j] * slopes[j], s[j + 1] * slopes[j + 1], s[j + 2] * slopes[j + 2], s[j + 3] * slopes[j + 3]);
    arrive_by_warp(p_cursor.full(shared.probabilities));
    p_cursor.advance();
  }
  __device__ __forceinline__ void walk() {
    Scores s;
    RegisterOperand<Config::kBlockQ / 16> probabilities;
    int before = -1, turn_before = 0;
    issue_scores(s);
#pragma unroll 1
    for (int rest = work.steps; rest > 0; --rest) {
      wgmma_wait_group<0>();
      pin(s);
      form_probabilities(s, probabilities);
      const int tile = at.step(shared.channels, cursor.slot).number();
      const int turn = at.turn(shared.channels, cursor.slot);
      if (kPassesOver) rest = at.is_last(shared.channels, cursor.slot) ? 1 : 2;
      release_by_warp(shared.channels.queries, cursor.slot);
      cursor.wait_full(shared.channels.douts);
      pin(probabilities);
      pin(dv);
      wgmma_fence();
      wgmma_registers_columns(dv, probabilities, operand(shared.in.dout[cursor.slot]));
      wgmma_commit_group();
      const Cursor<2> now = cursor;
      cursor.advance();
      at.advance(p, work);
      if (rest > 1) {
        issue_scores(s);
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      pin(dv);
      pin(probabilities);
      release_by_warp(shared.channels.douts, now.slot);
      if (before >= 0) add_dq(now.previous(), before, turn_before);
      if constexpr (Config::kDqApart) {  // else dQ has waited: no product may be under way where the loop turns
        wgmma_wait_group<0>();
        pin(s);
      }
      before = tile;
      turn_before = turn;
    }
    add_dq(cursor.previous(), before, turn_before);
  }
};

// dP, dS and dK.
struct KeyConsumer : Consumer {
  float dk[Config::kHeadDim / 2];

  __device__ __forceinline__ KeyConsumer(const Params& params, SharedStorage& storage, const Work& w)
      : Consumer(params, storage, w, 1) {
    clear(dk);
  }
  __device__ __forceinline__ void issue_dp(Scores& dp) const {
    cursor.wait_full(shared.channels.douts);
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDimV, ValueTile, DoutTile>(dp, operand(shared.in.v),
                                                            operand(shared.in.dout[cursor.slot]));
    wgmma_commit_group();
  }
  // dP -> dS, for dK and, through shared memory, for dQ.
  __device__ __forceinline__ void form_gradients(const Scores& dp, RegisterOperand<Config::kBlockQ / 16>& gradients) {
    const ScoreFragment s_at(warp_row(), 0, threadIdx.x);
    cursor.wait_full(shared.channels.queries);  // brings the statistics
    p_cursor.wait_full(shared.probabilities);
    Scores s;
#pragma unroll
    for (int j = 0; j < ScoreFragment::kSize; j += 4) {
      const float4 part = shared.p[j / 4][thread()];
      s[j] = part.x;
      s[j + 1] = part.y;
      s[j + 2] = part.z;
      s[j + 3] = part.w;
    }
    score_gradients_of(s, dp, s_at, shared.channels.statistics[cursor.slot], p);
    release_by_warp(shared.probabilities, 0);
    p_cursor.advance();
    if constexpr (kAddsGradients) {  // no modifier has slopes or is asked for its scores (schedules/wgmma.py)
      const Step step = at.step(shared.channels, cursor.slot);
      const Work& told = shared.channels.work;  // no registers are left to keep it in
      Place place = told.place;
      place.head = step.head;
      const Corner corner{step.tile * Config::kBlockQ, told.keys.begin};
      const ScoreFragment here(warp_row(), 0, recomputed(threadIdx.x));
      for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(s, here, view, p, place, corner); });
      add_score_gradients(s, ScoreSlopes<ScoreFragment>(), here, p, place, corner);
    }
    gradients.pack<Element>(s);
    if constexpr (!Config::kDqApart) {
      cursor.wait_empty(shared.gradients);
      store_operand(shared.ds[cursor.slot], warp_row(), gradients);
      fence_proxy_async();
      arrive_by_warp(cursor.full(shared.gradients));
    }
  }
  __device__ __forceinline__ void walk() {
    Scores dp;
    RegisterOperand<Config::kBlockQ / 16> gradients;
    issue_dp(dp);
#pragma unroll 1
    for (int rest = work.steps; rest > 0; --rest) {
      wgmma_wait_group<0>();
      pin(dp);
      release_by_warp(shared.channels.douts, cursor.slot);
      form_gradients(dp, gradients);
      pin(gradients);
      pin(dk);
      wgmma_fence();
      wgmma_registers_columns(dk, gradients, operand(shared.in.q[cursor.slot]));
      wgmma_commit_group();
      const int tile = at.step(shared.channels, cursor.slot).number();
      const int turn = at.turn(shared.channels, cursor.slot);
      if (kPassesOver) rest = at.is_last(shared.channels, cursor.slot) ? 1 : 2;
      const Cursor<2> now = cursor;
      cursor.advance();
      at.advance(p, work);
      if (rest > 1) {
        issue_dp(dp);
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      pin(dk);
      pin(gradients);
      release_by_warp(shared.channels.queries, now.slot);
      add_dq(now, tile, turn);
      if constexpr (Config::kDqApart) {
        wgmma_wait_group<0>();
        pin(dp);
      }
    }
  }
};

__device__ __forceinline__ void await_keys(const Params& p, SharedStorage& shared, const Work& work) {
  await_keys<kAllBarrier, kGroups * kWarpgroupThreads>(p, shared.in, shared.channels, work);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if constexpr (Config::kDeterministic) start_number(static_cast<u32*>(p.turns), &shared.channels.started);
  if (threadIdx.x == 0) {
    set_work(p, shared.channels);
    shared.channels.init(arrivals_of(kGroups * kGroupWarps));
    shared.probabilities.init(arrivals_of(kGroupWarps), arrivals_of(kGroupWarps));
    shared.gradients.init(arrivals_of(kGroups * kGroupWarps), arrivals_of(kGroupWarps));
    fence_mbarrier_init();
  }
  __syncthreads();
  const Work work = shared.channels.work;
  if (kPacked && is_empty(work.keys)) return;  // the number of a tile that its segment has no rows for
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < kProducers) produce<Config::kDeterministic>(p, shared.in, shared.channels, shared, work);
  } else if (group == 1) {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    await_keys(p, shared, work);
    ValueConsumer consumer(p, shared, work);
    if (work.steps > 0 && (!kPassesOver || is_told_any(shared.channels))) consumer.walk();
    bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);  // nobody reads K or V any more
    consumer.store(shared.in.v, consumer.dv, 1.f, p.dv_map);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    await_keys(p, shared, work);
    KeyConsumer consumer(p, shared, work);
    if (work.steps > 0 && (!kPassesOver || is_told_any(shared.channels))) consumer.walk();
    bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);
    consumer.store(shared.in.k[0], consumer.dk, p.scale, p.dk_map);
  }
}
