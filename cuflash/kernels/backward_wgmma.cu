// Backward on Hopper's tensor cores by wgmma (sm_90a, float16 and bfloat16).
//
// Job: one block owns a tile of keys of one (batch entry, key head) and walks over the query tiles that see it, for every
// query head of the group in turn; dK and dV stay in registers all the while and are written once.  Warpgroup 0 produces: one
// thread loads queries and dO ahead of use.  The two others own 64 keys each; S and dP are computed transposed, a row per key,
// so that P and dS are the A operands of dV += Pᵀ dO and dK += dSᵀ Q where they stand, and only dS goes through shared memory,
// for dQ = dS K, which is added to float32 sums in global memory.
// The warpgroups take turns: dQ of the step before, dV, dK, and S and dP of the next step are queued in one turn, and the
// exponentials and dS of that next step run under the products of the other warpgroup.  dQ lags a step behind so that neither
// waits for the other's dS.  Where blocks add dQ in turns, two more threads of warpgroup 0 wait for them, so that no one else does.  Where scores are changed one by one, dP is queued late, when P needs no registers beside its own.
// Where tiles are hidden, these threads are warps that pass over them, and the first tells the consumers which step it is.
// Invariants: producer and consumers walk the same steps; rows of Q, dO beyond seq_q and keys that nobody sees are zeros in
// shared memory.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2; taking turns: FlashAttention-3 (arXiv:2407.08608), section 3.1.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/fragment_simt.cuh"
#include "attention/epilogue.cuh"
#include "backward_wgmma_inputs.cuh"

constexpr int kGroups = 2;  // of consumers
constexpr int kWarps = kGroups * kWarpgroupThreads / 32;
constexpr int kTurnBarrier = 1, kGroupBarrier = kTurnBarrier + kGroups, kAllBarrier = kGroupBarrier + kGroups;
static_assert(Config::kStages == 2, "dS has two slots as well");
static_assert(Config::kBlockK == kGroups * kWarpgroupRows, "64 keys each");
// dQ of a step is shared out by query rows where there are enough, else by panels of columns.
constexpr bool kSplitsRows = Config::kBlockQ == kGroups * kWarpgroupRows;
constexpr int kDqColumns = kSplitsRows ? Config::kDqWidth : Config::kDqWidth / kGroups;
static_assert(kSplitsRows ? Config::kDqWidth <= kPanelColumns : kDqColumns == kPanelColumns, "a panel each");

typedef PanelTile<Config::kBlockK, Config::kBlockQ> GradientTile;  // dS transposed, a row per key

typedef SumTile<kGroups * kWarpgroupThreads, kDqColumns / 8> DqTile;
constexpr u32 kDqBytes = DqTile::kSize * sizeof(float);

struct SharedStorage : BiasTiles {
  InputTiles in;
  GradientTile ds[2];
  alignas(128) unsigned char dq_data[Config::kDeterministic ? 2 * kDqBytes : 16];
  InputChannels channels;
  Channel<2> gradients, dq_sums;

  // In turns a block's dQ waits here; a slot is added by a thread of its own.
  __device__ __forceinline__ float* dq(int slot) { return reinterpret_cast<float*>(dq_data + slot * kDqBytes); }
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/wgmma.py disagrees");
static_assert(!(kHasPlanes && (kAddsGradients || Config::kDeterministic)),
              "dS is lifted; what is left has other tiles");

// Segments of a pack may be shorter than a tile: warps do not add what nobody reads.
constexpr bool kLeavesRows = kPacked && !Config::kDeterministic;
constexpr bool kRecomputes = Config::kLateDp;
// The gradient of a row of a bias that is held stays with it; in fixed point a term has no room for a whole walk.
constexpr bool kKeepsKeySums = Config::kHoldsBias && kSumDigits == 0;
constexpr bool kBlocksLeave =
    Config::kReturnsBias || Config::kSumsBias;  // of the gradient of a bias, by a thread of its own

typedef MmaFragment<1, Config::kBlockQ / 8, true> ScoreFragment;

// One warpgroup.
struct Consumer {
  const Params& p;
  SharedStorage& shared;
  const Work& work;
  const int group;
  const Turns<kTurnBarrier, kGroups> turns;
  // Of the step whose P and dS are in registers; with two stages, its slot and phase are those of dS in shared memory as well.
  Cursor<Config::kStages> cursor;
  At at;
  int before = -1;         // number of the tile of queries of the step before it; at first there is none
  const bool has_no_rows;  // of dQ, this warp, in any tile
  float dk[Config::kHeadDim / 2], dv[Config::kHeadDimV / 2];
  RegisterOperand<Config::kBlockQ / 16> probabilities, gradients;
  AddedBias bias;
  float key_sums[ScoreFragment::kSlots] = {};  // of the gradient of a bias that is held

  __device__ __forceinline__ Consumer(const Params& params, SharedStorage& storage, const Work& w, int g)
      : p(params),
        shared(storage),
        work(w),
        group(g),
        turns{g},
        at(params, w),
        has_no_rows(kLeavesRows && dq_row() >= w.place.seq_q(params)),
        bias(storage, storage.channels) {
    clear(dk);
    clear(dv);
  }

  // Modifiers and turns leave no registers to keep descriptors and coordinates in from step to step.
  __device__ __forceinline__ int own_rows() const { return (kRecomputes ? recomputed(group) : group) * kWarpgroupRows; }
  __device__ __forceinline__ u32 own_thread() const { return kRecomputes ? recomputed(threadIdx.x) : threadIdx.x; }
  __device__ __forceinline__ int warp_key(u32 thread) const {  // this warp's first key in the tile
    return own_rows() + int(thread % kWarpgroupThreads / 32 * 16);
  }
  // The first of the rows of dQ that this warp multiplies, in a tile.
  __device__ __forceinline__ int dq_row() const {
    const int warp = int(threadIdx.x) / 32 - kWarpgroupThreads / 32;
    return (kSplitsRows ? warp : warp % (kWarpgroupThreads / 32)) * 16;
  }
  const __device__ __forceinline__ Work& here() const { return kRecomputes ? shared.channels.work : work; }

  // ---- products: issued as one group each ----
  __device__ __forceinline__ void issue_scores(float (&s)[ScoreFragment::kSize]) const {
    cursor.wait_full(shared.channels.queries);
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDim, KeyTile, QueryTile>(s, operand(shared.in.k, own_rows()),
                                                          operand(shared.in.q[cursor.slot]));
    wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_dp(float (&dp)[ScoreFragment::kSize]) const {
    cursor.wait_full(shared.channels.douts);
    wgmma_fence();
    wgmma_rows_rows<Config::kHeadDimV, ValueTile, DoutTile>(dp, operand(shared.in.v, own_rows()),
                                                            operand(shared.in.dout[cursor.slot]));
    wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_dv_dk(int slot) {
    pin(probabilities);
    pin(dv);
    wgmma_fence();
    wgmma_registers_columns(dv, probabilities, operand(shared.in.dout[slot]));
    wgmma_commit_group();
    pin(gradients);
    pin(dk);
    wgmma_fence();
    wgmma_registers_columns(dk, gradients, operand(shared.in.q[slot]));
    wgmma_commit_group();
  }
  // Of the step that `of` stands at.  Before the first there is none: the wait passes at once, and what is computed is
  // dropped; one body for all steps keeps the compiler within its registers.
  __device__ __forceinline__ void issue_dq(float (&dq)[kDqColumns / 2], Cursor<2> of) const {
    of.wait_full(shared.gradients);
    constexpr u64 kDsPanel = GradientTile::kPanelBytes >> 4, kKeyPanel = KeyTile::kPanelBytes >> 4;
    wgmma_fence();
    wgmma_columns_columns<Config::kBlockK>(dq, operand(shared.ds[of.slot]) + (kSplitsRows ? group * kDsPanel : 0),
                                           operand(shared.in.k) + (kSplitsRows ? 0 : group * kKeyPanel));
    wgmma_commit_group();
  }
  __device__ __forceinline__ void finish_dq(float (&dq)[kDqColumns / 2], Cursor<2> of) const {
    pin(dq);
    if (before < 0) return;
    if (threadIdx.x % kWarpgroupThreads == 0) of.release(shared.gradients);
    if (kLeavesRows && has_no_rows) return;
    // The order of backward_convert_mma.cu: warps that share rows are neighbours.
    const u32 thread = u32(recomputed(threadIdx.x)) - kWarpgroupThreads, warp = thread / 32;
    const u32 sum_warp = kSplitsRows ? warp : warp % 4 * kGroups + warp / 4;
    const int sum_thread = int(sum_warp * 32 + thread % 32);
    if constexpr (Config::kDeterministic) {
      of.wait_empty(shared.dq_sums);
      DqTile::store(shared.dq(of.slot), dq, sum_thread);
      fence_proxy_async();
      arrive_by_warp(of.full(shared.dq_sums));
    } else {
      DqTile::add(static_cast<float*>(p.dq_sum) + i64(before) * DqTile::kSize, dq, sum_thread);
    }
  }
  static __device__ __forceinline__ void scale_by(float (&x)[ScoreFragment::kSize],
                                                  const ScoreSlopes<ScoreFragment>& slopes) {
#pragma unroll
    for (int j = 0; j < ScoreFragment::kSize; ++j) x[j] *= slopes[j];
  }

  // ---- between the products: S -> P, dP -> dS of the step `at` ----
  __device__ __forceinline__ void form_gradients(float (&s)[ScoreFragment::kSize], float (&dp)[ScoreFragment::kSize]) {
    wgmma_wait_group<Config::kLateDp ? 0 : 1>();
    pin(s);
    if constexpr (kPassesOver) {  // else the assembler runs short of registers on its way past the tests of elements
#pragma unroll
      for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] = __int_as_float(recomputed(__float_as_int(s[i])));
    }
    const Work& now = here();
    const u32 thread = own_thread();
    const ScoreFragment s_at(warp_key(thread), 0, thread);
    const Step step = at.step(shared.channels, cursor.slot);
    const Corner corner{step.tile * Config::kBlockQ, now.keys.begin};
    const int first_key = corner.k + own_rows();
    Place place = now.place;
    place.head = step.head;
    const auto& units = in_units(p, shared.channels);
    ScoreSlopes<ScoreFragment> slopes;
    bias.stand_at(cursor);
    scores_of<true>(s, slopes, s_at, p, place, corner,
                    at.is_open(shared.channels, cursor.slot, p, place, step.queries(), first_key, group), units.scale,
                    bias);
    const Statistics& statistics = shared.channels.statistics[cursor.slot];
    probabilities_of(s, s_at, statistics, units);
    probabilities.pack<Element>(s);
    if constexpr (!kAddsGradients) scale_by(s, slopes);
    if constexpr (Config::kLateDp) issue_dp(dp);
    wgmma_wait_group<0>();
    pin(dp);
    score_gradients_of(s, dp, s_at, statistics, units);
    if constexpr (kAddsGradients) {  // they are gradients of what comes behind the slopes
      if constexpr (kKeepsKeySums) {
#pragma unroll
        for (int slot = 0; slot < ScoreFragment::kSlots; ++slot)
          key_sums[slot] += thread_row_sum<ScoreFragment>(s, slot);
      } else if constexpr (!kBlocksLeave) {
        for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(s, s_at, view, p, place, corner); });
      }
      bias.hand_over(s, s_at);
      add_score_gradients(s, slopes, s_at, p, place, corner);
      scale_by(s, slopes);
    }
    gradients.pack<Element>(s);
    bias.hand_over(gradients, s_at);
    cursor.wait_empty(shared.gradients);
    store_operand(shared.ds[cursor.slot], warp_key(own_thread()), gradients);
    fence_proxy_async();
    arrive_by_warp(cursor.full(shared.gradients));
  }

  // Where a bias is held: what it is for the queries of the head at hand ...
  __device__ __forceinline__ void enter_head() {
    if constexpr (Config::kHoldsBias) {
      Place place = work.place;
      place.head = at.head;
      const u32 thread = recomputed(threadIdx.x);
      bias.enter(p, place, work.keys.begin, ScoreFragment(warp_key(thread), 0, thread));
    }
  }
  // ... and its gradient from them.
  __device__ __forceinline__ void leave_head(int head) {
    if constexpr (kKeepsKeySums) {
      Place place = work.place;
      place.head = head;
      const u32 thread = recomputed(threadIdx.x);
      const ScoreFragment s_at(warp_key(thread), 0, thread);
      for_each_operand_gradient(
          p, [&](const View& view) { add_key_gradients(key_sums, s_at, view, p, place, work.keys.begin); });
      clear(key_sums);
    }
  }

  // ---- the walk ----
  // Slots are given back by every warp, since each has read the statistics by ordinary loads.
  __device__ __forceinline__ void start() {
    float s[ScoreFragment::kSize], dp[ScoreFragment::kSize];
    issue_scores(s);
    if (!Config::kLateDp) issue_dp(dp);
    enter_head();
    form_gradients(s, dp);
  }
  // Takes the turn, and hands it on once S and dP of the next step are queued.
  __device__ __forceinline__ void advance() {
    const int slot = cursor.slot;
    float dq[kDqColumns / 2], s[ScoreFragment::kSize], dp[ScoreFragment::kSize];
    turns.take();
    issue_dq(dq, cursor.previous());
    issue_dv_dk(slot);
    wgmma_wait_group<2>();
    finish_dq(dq, cursor.previous());
    if constexpr (kPassesOver) before = at.step(shared.channels, slot).number();
    wgmma_wait_group<1>();
    pin(dv);
    pin(probabilities);
    release_by_warp(shared.channels.douts, slot);
    cursor.advance();
    issue_scores(s);
    if constexpr (kSplitsRows) {  // registers: dS must be free before dP is there
      wgmma_wait_group<1>();
      pin(dk);
      pin(gradients);
      release_by_warp(shared.channels.queries, slot);
    }
    if (!Config::kLateDp) issue_dp(dp);
    turns.pass();
    if constexpr (!kSplitsRows) {
      wgmma_wait_group<Config::kLateDp ? 1 : 2>();
      pin(dk);
      pin(gradients);
      release_by_warp(shared.channels.queries, slot);
    }
    if constexpr (!kPassesOver) before = at.number();
    const int head = at.head;
    at.advance(p, here());
    if (Config::kHoldsBias && at.head != head) {
      leave_head(head);
      enter_head();
    }
    form_gradients(s, dp);
  }
  __device__ __forceinline__ void finish() {
    float dq[kDqColumns / 2];
    turns.take();
    issue_dq(dq, cursor.previous());
    issue_dv_dk(cursor.slot);
    wgmma_wait_group<2>();
    finish_dq(dq, cursor.previous());
    if (group == 0) turns.pass();
    wgmma_wait_group<0>();
    pin(dv);
    pin(dk);
    before = at.step(shared.channels, cursor.slot).number();
    issue_dq(dq, cursor);
    wgmma_wait_group<0>();
    finish_dq(dq, cursor);
  }
  __device__ __forceinline__ void walk() {
    turns.open();
    start();
#pragma unroll 1
    for (int rest = work.steps - 1; kPassesOver ? !at.is_last(shared.channels, cursor.slot) : rest > 0; --rest)
      advance();
    leave_head(at.head);
    finish();
  }

  // ---- what stays ----
  template <class Tile, int kSize>
  __device__ __forceinline__ void store(Tile& tile, const float (&x)[kSize], float scale, const TensorMap& map) const {
    store_gradient(tile, group * kWarpgroupRows, x, scale, map, p, shared.channels.work, kGroupBarrier + group);
  }
};

// All consumers, when nobody reads queries any more: what no query of the tile's heads sees has a gradient of 0.
__device__ __forceinline__ void clear_hidden_bias(const Params& p, SharedStorage& shared, const Work& work) {
  if constexpr (Config::kReturnsBias && Visibility::kNarrows) {
    typedef PanelTile<Config::kBlockQ, kPanelColumns> Panel;
    static_assert(Panel::kBytes <= sizeof(QueryTile), "a panel of zeros in the place of queries");
    Panel& zeros = *reinterpret_cast<Panel*>(shared.in.q[0].data);
    clear_rows_outside<kGroups * kWarpgroupThreads>(zeros, Range{0, 0}, int(threadIdx.x) - kWarpgroupThreads);
    fence_proxy_async();
    bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);
    if (threadIdx.x != kWarpgroupThreads) return;
    const Range seen = work.steps > 0 ? Range{work.first, work.last} : Range{0, 0};
    for (int head = work.place.head; head < work.place.head + p.group; ++head)
      for (int tile = 0; tile < Place::query_tiles<Config::kBlockQ>(p); ++tile)
        if (tile < seen.begin || tile >= seen.end)
          store_bias_panels(p, zeros, work.batch, head, tile * Config::kBlockQ, work.keys.begin);
    cp_async_bulk_commit_group();
  }
}

__device__ __forceinline__ void consume(const Params& p, SharedStorage& shared, const Work& work, int group) {
  Consumer consumer(p, shared, work, group);
  await_keys<kAllBarrier, kGroups * kWarpgroupThreads>(p, shared.in, shared.channels, work);
  if (work.steps > 0 && (!kPassesOver || is_told_any(shared.channels))) consumer.walk();
  [&](const auto& p) {
    if constexpr (kHasPlanes) {
      const GradientExponents exponent(p, shared.channels.work.place);
      const int key = consumer.warp_key(threadIdx.x);
      store_plane_gradient(p.dv, key, consumer.dv, exponent.dv(), 1.f, p.head_dim_v, p.dv_vectors,
                           shared.channels.work);
      store_plane_gradient(p.dk, key, consumer.dk, exponent.dk(), p.scale, p.head_dim, p.dk_vectors,
                           shared.channels.work);
    } else {
      consumer.store(shared.in.v, consumer.dv, 1.f, p.dv_map);
      bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);  // both have finished reading K
      clear_hidden_bias(p, shared, shared.channels.work);
      consumer.store(shared.in.k, consumer.dk, p.scale, p.dk_map);
      if (threadIdx.x % kWarpgroupThreads == 0) cp_async_bulk_wait_group_read<0>();
    }
  }(p);
}

// Adds dQ of every second step when it is the block's turn, while the consumers go on: one of kProducers threads.
__device__ __forceinline__ void add_in_turns(const Params& p, SharedStorage& shared, const Work& work, int slot) {
  Cursor<2> cursor;
  const auto add = [&](const Step& step, u32 turn) {
    u32* const counter = turn_counter(p, step.number());
    const u32 own = work.keys.begin / Config::kBlockK;
    cursor.wait_full(shared.dq_sums);
    wait_for_turn(counter, kPassesOver ? turn : own);
    cp_reduce_async_bulk_add(static_cast<float*>(p.dq_sum) + i64(step.number()) * DqTile::kSize,
                             shared_address(shared.dq(slot)), kDqBytes);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
    pass_turn(counter, own + 1);
    cursor.release(shared.dq_sums);
  };
  if constexpr (kPassesOver) {
    int count = 0;
    for (Walk<0, true> walk(p, work); !walk.ends(); walk.advance(), ++count) {
      if (count % 2 != slot) continue;
      const int turn = walk.turn();
      cursor = {slot, u32(count) / 2 % 2};
      if (threadIdx.x % 32 == 0) add(walk.step(), turn);
    }
  } else {
    Step step(p, work);
    for (int i = 0; i < work.steps; ++i) {
      if (cursor.slot == slot) add(step, 0);
      step.advance(p, work);
      cursor.advance();
    }
  }
}

// One thread: what consumers make of the gradient of a bias.
__device__ __forceinline__ void return_bias(const Params& p, SharedStorage& shared, const Work& work) {
  Step step(p, work);
  BiasReturner<kBlocksLeave ? Config::kBiasStages : 0> returner;
  for (int i = 0; i < work.steps; ++i) {
    returner.store(p, shared, shared.channels, work.batch, step.head, step.tile * Config::kBlockQ, work.keys.begin);
    step.advance(p, work);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if constexpr (Config::kDeterministic) start_number(static_cast<u32*>(p.turns), &shared.channels.started);
  if (threadIdx.x == 0) {
    set_work(p, shared.channels);
    shared.channels.init(arrivals_of(kWarps));
    shared.gradients.init(kGroups, arrivals_of(kWarps));
    shared.channels.init_bias(kWarps);
    if constexpr (Config::kDeterministic) shared.dq_sums.init(1, arrivals_of(kWarps));
    fence_mbarrier_init();
  }
  __syncthreads();
  const Work work = shared.channels.work;
  if (kPacked && is_empty(work.keys)) return;  // the number of a tile that its segment has no rows for
  if (kHasPlanes && !is_split(p, work.place)) return;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    const u32 leader = threadIdx.x / kProducers * kProducers;  // of those that walk together
    if (leader == 0) produce<false>(p, shared.in, shared.channels, shared, work);
    if (Config::kDeterministic && (leader == 32 || leader == 64)) add_in_turns(p, shared, work, int(leader) / 32 - 1);
    if (kBlocksLeave && threadIdx.x == 96) return_bias(p, shared, work);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume(p, shared, work, group - 1);
  }
}
