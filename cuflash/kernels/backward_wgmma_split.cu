// Backward on Hopper's tensor cores by wgmma for head sizes above 128 (sm_90a, float16 and bfloat16).
//
// Job: as in backward_wgmma.cu one block owns a tile of keys, and walks over the queries that see it; dK and dV of 64 keys are
// together more than a warpgroup's registers, so the two consumers share out the work by kind:
//   values   S = K Qᵀ, P, dV += Pᵀ dO
//   keys     dP = V dOᵀ, dS, dK += dSᵀ Q
// Both compute the same 64 x 64 elements in the same threads, so that P goes from one to the other as float32 through shared
// memory, each thread's own.  dS is written there as well, and each takes every other panel of dQ = dS K.  `values` runs ahead of
// `keys`: its exponentials run under the products of the other.  Where dQ has a kernel of its own (backward_wgmma_dq.cu), dS stays in
// registers and nothing is added to memory.
// With 64 keys a block additions to dQ set the pace.  Where dK and dV leave the registers, a block has 128 keys in two parts, which
// a step goes through one after the other, and adds dQ of both: half the additions.  Panels of dQ then lag a step behind, and leave
// one by one through shared memory, from where a thread of the producers' warpgroup adds them.  Where blocks take turns, its warps
// wait for these and pass them on.  Where tiles are hidden, they pass over them, and the first tells the consumers which step it is.
// Invariants: producer and consumers walk the same steps; keys that nobody sees are zeros in shared memory.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/epilogue.cuh"
#include "backward_wgmma_inputs.cuh"

constexpr int kGroups = 2;  // of consumers
constexpr int kGroupWarps = kWarpgroupThreads / 32;
constexpr int kGroupBarrier = 1, kAllBarrier = kGroupBarrier + kGroups;
constexpr int kDqPanels = Config::kDqWidth / kPanelColumns;
constexpr int kMiddlePanel = kDqPanels / 2, kLastPanel = kDqPanels - 1;
constexpr int kParts = Config::kBlockK / kWarpgroupRows;  // of the keys, one tile of scores each
static_assert(Config::kBlockQ == kWarpgroupRows, "one tile of scores");
static_assert(Config::kStages == 2, "dS has two slots as well");
static_assert(kParts == 1 || (kParts == 2 && kDqPanels == 3), "the middle panel of dQ is that of the consumer for dV");
static_assert(!Config::kLeavesDq || (kParts == 2 && !Config::kDeterministic), "panels leave in the order of that walk");
// Counters of a tile of queries where blocks take turns: with two parts each panel has one, since they are added far apart in time.
constexpr int kSharers = !Config::kDeterministic ? 0 : kParts > 1 ? kDqPanels : kGroups;

typedef PanelTile<Config::kBlockK, Config::kBlockQ> GradientTile;  // dS transposed, a row per key
typedef MmaFragment<1, Config::kBlockQ / 8, true> ScoreFragment;
typedef SumTile<kWarpgroupThreads, kPanelColumns / 8> DqPanel;
typedef float Scores[ScoreFragment::kSize];
typedef float Panel[kPanelColumns / 2];

// Of a panel of dQ, as far as a head has any.
__device__ constexpr int columns_of_panel(int panel) {
  return Config::kHeadDim - panel * kPanelColumns < kPanelColumns ? Config::kHeadDim - panel * kPanelColumns
                                                                  : kPanelColumns;
}
// Panels of dQ by the order in which they leave.
__device__ constexpr int place_of_panel(int panel) { return panel == kMiddlePanel ? 0 : panel == 0 ? 1 : 2; }
__device__ constexpr int panel_at(int place) { return place == 0 ? kMiddlePanel : place == 1 ? 0 : kLastPanel; }
__device__ constexpr int place_before(int place) { return place == 0 ? kDqPanels - 1 : place - 1; }

struct SharedStorage : BiasTiles {
  InputTiles in;
  GradientTile ds[2];
  HandedOver<ScoreFragment::kSize> p;
  alignas(128) float dq[Config::kLeavesDq ? DqPanel::kSize : 4];  // a panel on its way to the sums
  InputChannels channels;
  Channel<1> probabilities;
  Channel<2> gradients;
  Channel<kDqPanels> panels;  // of dQ, in the order in which they leave
  TurnChannels<kSharers> turns;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/wgmma.py disagrees");

// Two parts of the keys, changes of scores and hidden tiles leave no registers to keep what a block works on.
constexpr bool kLooksUp = kParts > 1 || kPassesOver || !Score::kIdentity;

// One warpgroup: what both kinds have.
template <int kGroup> struct Consumer {
  const Params& p;
  SharedStorage& shared;
  const Work& work;
  static constexpr int group = kGroup;
  Cursor<2> cursor;  // of the step at hand; its slot and phase are those of dS as well
  Cursor<1> p_cursor;
  At at;

  __device__ __forceinline__ Consumer(const Params& params, SharedStorage& storage, const Work& w)
      : p(params), shared(storage), work(w), at(params, w) {}

  __device__ __forceinline__ u32 thread() const { return threadIdx.x % kWarpgroupThreads; }
  __device__ __forceinline__ int warp_row() const { return int(thread() / 32 * 16); }

  // One panel of dQ of a step ...
  template <int kPanel> __device__ __forceinline__ void issue_panel(Panel& dq, Cursor<2> of) const {
    wgmma_fence();
    wgmma_columns_columns<Config::kBlockK>(dq, operand(shared.ds[of.slot]),
                                           operand(shared.in.k[0]) + kPanel * (KeyTile::kPanelBytes >> 4));
    wgmma_commit_group();
  }
  // ... which is added to the sums when it is there, as far as the last panel has columns.
  template <int kPanel> __device__ __forceinline__ void add_panel(Panel& dq, int tile) const {
    constexpr int kColumns = columns_of_panel(kPanel);
    pin(dq);
    float* sums = static_cast<float*>(p.dq_sum) + (i64(tile) * kDqPanels + kPanel) * DqPanel::kSize;
    DqPanel::add(sums, reinterpret_cast<float (&)[kColumns / 2]>(dq),
                 int(u32(recomputed(threadIdx.x)) % kWarpgroupThreads));
  }
  // All of this warpgroup's panels, one after the other.
  template <int kPanel = kGroup> __device__ __forceinline__ void add_panels(Panel& dq, Cursor<2> of, int tile) const {
    if constexpr (kPanel < kDqPanels) {
      issue_panel<kPanel>(dq, of);
      wgmma_wait_group<0>();
      add_panel<kPanel>(dq, tile);
      add_panels<kPanel + kGroups>(dq, of, tile);
    }
  }
  __device__ __forceinline__ void add_dq(Cursor<2> of, int tile) const {
    if constexpr (Config::kDqApart) return;
    of.wait_full(shared.gradients);
    constexpr int kSharer = kGroups - 1 - kGroup;
    shared.turns.await(of, kSharer);
    Panel dq;
    add_panels(dq, of, tile);
    shared.turns.leave(of, kSharer);
    release_by_warp(shared.gradients, of.slot);
  }
  // What is queued for the next step: no product may be under way where the loop turns.
  __device__ __forceinline__ void settle(Scores& next) const {
    if constexpr (!Config::kDqApart) return;  // dQ has waited for it
    wgmma_wait_group<0>();
    pin(next);
  }
  // Two parts of the keys: a panel of the step before the one at hand.  Where blocks add as they come, it leaves through shared
  // memory, so that no warp stands still until its additions have been taken: the middle one, then the first, then the last.
  template <int kPanel> __device__ __forceinline__ void add_in_parts(Panel& dq, int tile) const {
    if constexpr (Config::kLeavesDq) {
      constexpr int kPlace = place_of_panel(kPanel), kBefore = place_before(kPlace);
      const u32 step = cursor.previous().slot;  // the last bit of its number, and so the phase of its panels
      pin(dq);
      mbarrier_wait(shared_address(&shared.panels.empty[kBefore]), kPlace == 0 ? step ^ 1 : step);
      DqPanel::store(shared.dq, dq, int(u32(recomputed(threadIdx.x)) % kWarpgroupThreads));
      fence_proxy_async();
      arrive_by_warp(shared_address(&shared.panels.full[kPlace]));
    } else {
      shared.turns.await(cursor.previous(), kPanel);
      add_panel<kPanel>(dq, tile);
      shared.turns.leave(cursor.previous(), kPanel);
    }
  }
  template <class Tile, int kSize>
  __device__ __forceinline__ void store(Tile& tile, const float (&x)[kParts][kSize], float scale,
                                        const TensorMap& map) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int row = part * kWarpgroupRows;
      store_gradient(tile, row, x[part], scale, map, p, work, row, kGroupBarrier + group);
    }
    if (thread() == 0) cp_async_bulk_wait_group_read<0>();
  }
};

// S, P and dV.
struct ValueConsumer : Consumer<0> {
  float dv[kParts][Config::kHeadDimV / 2];

  __device__ __forceinline__ ValueConsumer(const Params& params, SharedStorage& storage, const Work& w)
      : Consumer(params, storage, w) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) clear(dv[part]);
  }
  __device__ __forceinline__ void issue_scores(Scores& s, int part) const {
    cursor.wait_full(shared.channels.queries);
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDim, KeyTile, QueryTile>(s, operand(shared.in.k[0], part * kWarpgroupRows),
                                                          operand(shared.in.q[cursor.slot]));
    wgmma_commit_group();
  }
  // S -> P for dV, and P times the slopes of the modifiers for the other warpgroup.
  __device__ __forceinline__ void form_probabilities(Scores& s, RegisterOperand<Config::kBlockQ / 16>& probabilities,
                                                     int part) {
    const ScoreFragment s_at(warp_row(), 0, threadIdx.x);
    const Step step = at.step(shared.channels, cursor.slot);
    const Corner corner{step.tile * Config::kBlockQ, work.keys.begin + part * kWarpgroupRows};
    Place place = work.place;
    place.head = step.head;
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<true>(s, slopes, s_at, p, place, corner,
                    at.is_open(shared.channels, cursor.slot, p, place, step.queries(), corner.k, part));
    probabilities_of(s, s_at, shared.channels.statistics[cursor.slot], p);
    probabilities.pack<Element>(s);
    p_cursor.wait_empty(shared.probabilities);
    shared.p.store([&] { return thread(); }, [&](int i) { return s[i] * slopes[i]; });
    arrive_by_warp(p_cursor.full(shared.probabilities));
    p_cursor.advance();
  }
  __device__ __forceinline__ void walk(int steps) {
    Scores s;
    RegisterOperand<Config::kBlockQ / 16> probabilities;
    int before = -1;
    issue_scores(s, 0);
#pragma unroll 1
    for (int rest = steps; rest > 0; --rest) {
      wgmma_wait_group<0>();
      pin(s);
      form_probabilities(s, probabilities, 0);
      const int tile = at.step(shared.channels, cursor.slot).number();
      if (kPassesOver) rest = at.is_last(shared.channels, cursor.slot) ? 1 : 2;
      release_by_warp(shared.channels.queries, cursor.slot);
      cursor.wait_full(shared.channels.douts);
      pin(probabilities);
      pin(dv[0]);
      wgmma_fence();
      wgmma_registers_columns(dv[0], probabilities, operand(shared.in.dout[cursor.slot]));
      wgmma_commit_group();
      const Cursor<2> now = cursor;
      cursor.advance();
      at.advance(p, work);
      if (rest > 1) {
        issue_scores(s, 0);
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      pin(dv[0]);
      pin(probabilities);
      release_by_warp(shared.channels.douts, now.slot);
      if (before >= 0) add_dq(now.previous(), before);
      settle(s);
      before = tile;
    }
    add_dq(cursor.previous(), before);
  }
  // Two parts of the keys: dQ of the step before is queued behind dV of the first, when its registers are those of the scores.
  __device__ __forceinline__ void walk_parts() {
    Scores s;
    RegisterOperand<Config::kBlockQ / 16> probabilities;
    int before = -1;
    int rest = work.steps;
#pragma unroll 1
    do {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        issue_scores(s, part);
        wgmma_wait_group<1>();
        pin(dv[1 - part]);
        pin(probabilities);
        if (part == 0 && before >= 0) release_by_warp(shared.channels.douts, cursor.previous().slot);
        wgmma_wait_group<0>();
        pin(s);
        form_probabilities(s, probabilities, part);
        if (part == 0)
          cursor.wait_full(shared.channels.douts);
        else
          release_by_warp(shared.channels.queries, cursor.slot);
        pin(probabilities);
        pin(dv[part]);
        wgmma_fence();
        wgmma_registers_columns(dv[part], probabilities, operand(shared.in.dout[cursor.slot]));
        wgmma_commit_group();
        if (part > 0) continue;
        issue_middle(s);
        wgmma_wait_group<0>();
        pin(s);
        if (before >= 0) add_in_parts<kMiddlePanel>(s, before);
      }
      before = at.step(shared.channels, cursor.slot).number();
      cursor.advance();
      at.advance(p, work);
    } while (--rest > 0);
    wgmma_wait_group<0>();
    pin(dv[kParts - 1]);
    pin(probabilities);
    issue_middle(s);
    wgmma_wait_group<0>();
    add_in_parts<kMiddlePanel>(s, before);
  }
  // Of the step before the one at hand.
  __device__ __forceinline__ void issue_middle(Panel& dq) const {
    cursor.previous().wait_full(shared.gradients);
    issue_panel<kMiddlePanel>(dq, cursor.previous());
  }
};

// dP, dS and dK.
struct KeyConsumer : Consumer<1> {
  float dk[kParts][Config::kHeadDim / 2];

  __device__ __forceinline__ KeyConsumer(const Params& params, SharedStorage& storage, const Work& w)
      : Consumer(params, storage, w) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) clear(dk[part]);
  }
  __device__ __forceinline__ void issue_dp(Scores& dp, int part) const {
    cursor.wait_full(shared.channels.douts);
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDimV, ValueTile, DoutTile>(dp, operand(shared.in.v, part * kWarpgroupRows),
                                                            operand(shared.in.dout[cursor.slot]));
    wgmma_commit_group();
  }
  // dP -> dS, for dK and, through shared memory, for dQ.
  __device__ __forceinline__ void form_gradients(const Scores& dp, RegisterOperand<Config::kBlockQ / 16>& gradients) {
    const ScoreFragment s_at(warp_row(), 0, threadIdx.x);
    cursor.wait_full(shared.channels.queries);  // brings the statistics
    p_cursor.wait_full(shared.probabilities);
    Scores s;
    shared.p.load<0>([&] { return thread(); }, s);
    score_gradients_of(s, dp, s_at, shared.channels.statistics[cursor.slot], p);
    release_by_warp(shared.probabilities, p_cursor.slot);
    p_cursor.advance();
    if constexpr (kAddsGradients) {  // no modifier has slopes or is asked for its scores (schedules/wgmma.py)
      const Step step = at.step(shared.channels, cursor.slot);
      Place place = work.place;
      place.head = step.head;
      const Corner corner{step.tile * Config::kBlockQ, work.keys.begin};
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
  // dS of one part of the keys, some queries after the other, so that few of them are in registers at a time.
  template <int kFirst = 0> __device__ __forceinline__ void form_pieces(const Scores& dp, int part) {
    constexpr int kPiece = 16;  // queries
    typedef MmaFragment<1, kPiece / 8, true> Piece;
    if constexpr (kFirst == ScoreFragment::kSize) {
      release_by_warp(shared.probabilities, p_cursor.slot);
      p_cursor.advance();
      fence_proxy_async();
      if (part == kParts - 1) arrive_by_warp(cursor.full(shared.gradients));
    } else {
      if constexpr (kFirst == 0) {
        cursor.wait_full(shared.channels.queries);  // brings the statistics
        p_cursor.wait_full(shared.probabilities);
      }
      constexpr int kColumn = kFirst / 4 * 8;
      const u32 thread = recomputed(threadIdx.x);
      float s[Piece::kSize], own_dp[Piece::kSize];
#pragma unroll
      for (int j = 0; j < Piece::kSize; ++j) own_dp[j] = dp[kFirst + j];
      shared.p.load<kFirst>([&] { return this->thread(); }, s);
      score_gradients_of(s, own_dp, Piece(0, kColumn, thread), shared.channels.statistics[cursor.slot], p);
      RegisterOperand<kPiece / 16> gradients;
      gradients.template pack<Element>(s);
      store_operand_anew<kColumn>(shared.ds[cursor.slot],
                                  part * kWarpgroupRows + int(thread) % kWarpgroupThreads / 32 * 16, gradients);
      form_pieces<kFirst + Piece::kSize>(dp, part);
    }
  }
  __device__ __forceinline__ void walk(int steps) {
    Scores dp;
    RegisterOperand<Config::kBlockQ / 16> gradients;
    issue_dp(dp, 0);
#pragma unroll 1
    for (int rest = steps; rest > 0; --rest) {
      wgmma_wait_group<0>();
      pin(dp);
      release_by_warp(shared.channels.douts, cursor.slot);
      form_gradients(dp, gradients);
      pin(gradients);
      pin(dk[0]);
      wgmma_fence();
      wgmma_registers_columns(dk[0], gradients, operand(shared.in.q[cursor.slot]));
      wgmma_commit_group();
      const int tile = at.step(shared.channels, cursor.slot).number();
      if (kPassesOver) rest = at.is_last(shared.channels, cursor.slot) ? 1 : 2;
      const Cursor<2> now = cursor;
      cursor.advance();
      at.advance(p, work);
      if (rest > 1) {
        issue_dp(dp, 0);
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      pin(dk[0]);
      pin(gradients);
      release_by_warp(shared.channels.queries, now.slot);
      add_dq(now, tile);
      settle(dp);
    }
  }
  // Two parts of the keys.  A panel of dQ of the step before is queued behind each part's dS, in front of dK, and added under it.  dK
  // leaves no registers for dQ beside dP, nor for dS, which is read from where it lies for dQ.  Nobody tells when a slot of dS may
  // be filled again: `values` reads it before it hands over the last P of the step behind.
  __device__ __forceinline__ void walk_parts() {
    int before = -1;
    int rest = work.steps;
#pragma unroll 1
    do {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        Scores dp;
        issue_dp(dp, part);
        wgmma_wait_group<0>();
        pin(dp);
        pin(dk[1 - part]);
        if (part == 0 && before >= 0) release_by_warp(shared.channels.queries, cursor.previous().slot);
        if (part > 0) release_by_warp(shared.channels.douts, cursor.slot);
        form_pieces(dp, part);
        bar_sync(kGroupBarrier + group, kWarpgroupThreads);  // all of dS is there
        issue_own_panel(dp, part);
        pin(dk[part]);
        wgmma_fence();
        wgmma_rows_columns<Config::kBlockQ, GradientTile>(
            dk[part], operand(shared.ds[cursor.slot], part * kWarpgroupRows), operand(shared.in.q[cursor.slot]));
        wgmma_commit_group();
        wgmma_wait_group<1>();
        pin(dp);
        if (before >= 0) add_own_panel(dp, part, before);
      }
      before = at.step(shared.channels, cursor.slot).number();
      cursor.advance();
      at.advance(p, work);
    } while (--rest > 0);
    wgmma_wait_group<0>();
    pin(dk[kParts - 1]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      Panel dq;
      issue_own_panel(dq, part);
      wgmma_wait_group<0>();
      add_own_panel(dq, part, before);
    }
  }
  // Of the step before the one at hand: the first panel or the last.
  __device__ __forceinline__ void issue_own_panel(Panel& dq, int part) const {
    if (part == 0)
      issue_panel<0>(dq, cursor.previous());
    else
      issue_panel<kLastPanel>(dq, cursor.previous());
  }
  __device__ __forceinline__ void add_own_panel(Panel& dq, int part, int tile) const {
    if (part == 0)
      add_in_parts<0>(dq, tile);
    else
      add_in_parts<kLastPanel>(dq, tile);
  }
};

// One thread: adds panels of dQ as they come.
__device__ __forceinline__ void add_leaving(const Params& p, SharedStorage& shared, const Work& work) {
  if constexpr (Config::kLeavesDq) {
    Cursor<kDqPanels> at;
    for_each_step<false>(p, work, [&](const Step& step, int) {
#pragma unroll
      for (int place = 0; place < kDqPanels; ++place) {
        const int panel = panel_at(place), columns = columns_of_panel(panel);
        float* sums = static_cast<float*>(p.dq_sum) + (i64(step.number()) * kDqPanels + panel) * DqPanel::kSize;
        at.wait_full(shared.panels);
        cp_reduce_async_bulk_add(sums, shared_address(shared.dq), columns * Config::kBlockQ * sizeof(float));
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
        at.release(shared.panels);
        at.advance();
      }
    });
  }
}

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
    shared.panels.init(1, arrivals_of(kGroupWarps));
    shared.turns.init(kGroupWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  const Work work = shared.channels.work;
  if (kPacked && is_empty(work.keys)) return;  // the number of a tile that its segment has no rows for
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    const u32 leader = threadIdx.x / kProducers * kProducers;  // of those that walk together
    if (leader == 0) produce(p, shared.in, shared.channels, shared, work);
    keep_turns(p, shared.turns, work, leader);
    if (leader == 32) add_leaving(p, shared, work);
  } else if (group == 1) {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    await_keys(p, shared, work);
    ValueConsumer consumer(p, shared, kLooksUp ? shared.channels.work : work);
    if (work.steps > 0 && (!kPassesOver || is_told_any(shared.channels)))
      kParts > 1 ? consumer.walk_parts() : consumer.walk(work.steps);
    bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);  // nobody reads K or V any more
    consumer.store(shared.in.v, consumer.dv, 1.f, p.dv_map);
  } else {
    setmaxnreg_inc<Config::kKeyRegisters>();
    await_keys(p, shared, work);
    KeyConsumer consumer(p, shared, kLooksUp ? shared.channels.work : work);
    if (work.steps > 0 && (!kPassesOver || is_told_any(shared.channels)))
      kParts > 1 ? consumer.walk_parts() : consumer.walk(work.steps);
    bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);
    consumer.store(shared.in.k[0], consumer.dk, p.scale, p.dk_map);
  }
}
