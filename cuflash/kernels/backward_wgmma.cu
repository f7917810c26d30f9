// Backward on Hopper's tensor cores by wgmma (sm_90a, float16 and bfloat16).
//
// Job: one block owns a tile of keys of one (batch entry, key head) and walks over the query tiles that see it, for every
// query head of the group in turn; dK and dV stay in registers all the while and are written once.  Warpgroup 0 produces: one
// thread loads queries and dO ahead of use.  The two others own 64 keys each; S and dP are computed transposed, a row per key,
// so that P and dS are the A operands of dV += Pᵀ dO and dK += dSᵀ Q where they stand, and only dS goes through shared memory,
// for dQ = dS K, which is added to float32 sums in global memory.
// The warpgroups take turns: dQ of the step before, dV, dK, and S and dP of the next step are queued in one turn, and the
// exponentials and dS of that next step run under the products of the other warpgroup.  dQ lags a step behind so that neither
// waits for the other's dS.  Where scores are changed one by one, dP is queued late, when P needs no registers beside its own.
// Where blocks add dQ in turns, two more threads of warpgroup 0 wait for these and pass them on.
// Mostly blocks stay and take one tile of keys after the other: what the next one is, its keys and its first queries are on their way
// when one ends.  Where there is room, K has two places and dV and dK leave through one of their own, so that a warpgroup begins the
// next tile while the other one ends the last; else these leave through the place of dS.
// Where the gradient of a bias leaves in blocks, another kernel makes dQ of them; where it is a sum, another one makes it.
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

// Where blocks of the gradient of a bias leave, these are dS, of which another kernel makes dQ (backward_queries_wgmma.cu).
constexpr bool kLeavesDq = Config::kReturnsBias;

constexpr bool kRecomputes = Config::kLateDp;
// Blocks stay on their multiprocessor and take tiles of keys, of which one at a time has registers.
constexpr bool kStays = Config::kStays, kHasRoom = Config::kKeyStages > 1;
static_assert(!kStays || !(kHasPlanes || kPassesOver || Config::kBiasStages > 0 || Config::kHoldsBias || kRecomputes),
              "nobody told such blocks to stay");
static_assert(Config::kKeyStages <= (kStays ? 2 : 1), "a place of K for each tile that is told of");
struct TakenTile : Work {
  bool exists;  // else the block ends
};
template <bool kHas> struct TakenTiles {
  TakenTile works[2];
  Channel<2> told;
  Channel<1> values;  // V, which is free before K is
  u64 ending;         // a tile, of which the last step is asked for

  // By one thread, before a barrier of the block.
  __device__ __forceinline__ void init() {
    constexpr int kReaders = Config::kDeterministic ? 3 : 1;  // beside the consumers
    told.init(arrivals_of(kWarps) + kReaders);
    values.init(arrivals_of(kWarps));
    mbarrier_init(shared_address(&ending), 1);
  }
};
template <> struct TakenTiles<false> {
  __device__ __forceinline__ void init() {}
};

// Where K of a tile lies that is told of in that slot; what has one place has a phase for each.
__device__ __forceinline__ Cursor<Config::kKeyStages> place_of_keys(const Cursor<2>& tile) {
  return {kHasRoom ? tile.slot : 0, kHasRoom ? tile.phase : u32(tile.slot)};
}

// dV and dK of a warpgroup on their way to memory, one after the other.
typedef PanelTile<kWarpgroupRows, (Config::kHeadDim > Config::kHeadDimV ? Config::kHeadDim : Config::kHeadDimV)>
    LeavingTile;
template <bool kHas> struct LeavingTiles { LeavingTile leaving[kGroups]; };
template <> struct LeavingTiles<false> {};

struct SharedStorage : BiasTiles, LeavingTiles<kHasRoom> {
  InputTiles in;
  alignas(kLeavesDq ? 16 : 1024) unsigned char ds_data[kLeavesDq ? 16 : 2 * sizeof(GradientTile)];
  InputChannels channels;
  Channel<2> gradients;
  TurnChannels<Config::kDeterministic ? 1 : 0> turns_of_dq;
  TakenTiles<kStays> taken;

  __device__ __forceinline__ GradientTile& ds(int slot) { return reinterpret_cast<GradientTile*>(ds_data)[slot]; }
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/wgmma.py disagrees");
static_assert(!(kHasPlanes && (kAddsGradients || Config::kDeterministic)),
              "dS is lifted; what is left has other tiles");

// Segments of a pack may be shorter than a tile: warps do not add what nobody reads.
constexpr bool kLeavesRows = kPacked && !Config::kDeterministic;
// The gradient of a row of a bias that is held stays with it; in fixed point a term has no room for a whole walk.
constexpr bool kKeepsKeySums = Config::kHoldsBias && kSumDigits == 0;
// Gradients of operands that this kernel makes; of a bias some leave in blocks, by a thread of its own.
constexpr bool kAddsOwnGradients = kAddsGradients && !Config::kDbiasApart;

typedef MmaFragment<1, Config::kBlockQ / 8, true> ScoreFragment;

// One warpgroup.
template <class Storage> struct Consumer {
  const Params& p;
  Storage& shared;
  const Work& work;
  const int group;
  const Turns<kTurnBarrier, kGroups> turns;
  // Of the step whose P and dS are in registers; with two stages, its slot and phase are those of dS in shared memory as well.
  Cursor<Config::kStages> cursor;
  At at;
  const int key_slot;      // of K
  int before = -1;         // number of the tile of queries of the step before it; at first there is none
  const bool has_no_rows;  // of dQ, this warp, in any tile
  float dk[Config::kHeadDim / 2], dv[Config::kHeadDimV / 2];
  RegisterOperand<Config::kBlockQ / 16> probabilities, gradients;
  AddedBias bias;
  float key_sums[ScoreFragment::kSlots] = {};  // of the gradient of a bias that is held

  __device__ __forceinline__ Consumer(const Params& params, Storage& storage, const Work& w, int g,
                                      const Cursor<Config::kStages>& first = {}, int slot = 0)
      : p(params),
        shared(storage),
        work(w),
        group(g),
        turns{g},
        cursor(first),
        at(params, w),
        key_slot(slot),
        has_no_rows(kLeavesRows && dq_row() >= w.place.seq_q(params)),
        bias(storage, storage.channels) {
    clear(dk);
    clear(dv);
  }

  // Modifiers, and turns in packs, leave no registers to keep descriptors and coordinates in from step to step.
  __device__ __forceinline__ int own_rows() const { return (kRecomputes ? recomputed(group) : group) * kWarpgroupRows; }
  __device__ __forceinline__ int own_keys() const { return kRecomputes ? recomputed(key_slot) : key_slot; }
  __device__ __forceinline__ u32 own_thread() const {
    constexpr bool kHasNone = kRecomputes || (kHasRoom && kPacked && Config::kDeterministic);
    return kHasNone ? recomputed(threadIdx.x) : threadIdx.x;
  }
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
    wgmma_rows_rows<Config::kHeadDim, KeyTile, QueryTile>(s, operand(shared.in.k[key_slot], own_rows()),
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
    wgmma_columns_columns<Config::kBlockK>(dq, operand(shared.ds(of.slot)) + (kSplitsRows ? group * kDsPanel : 0),
                                           operand(shared.in.k[own_keys()]) + (kSplitsRows ? 0 : group * kKeyPanel));
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
    shared.turns_of_dq.await(of, 0);
    DqTile::add(static_cast<float*>(p.dq_sum) + i64(before) * DqTile::kSize, dq, sum_thread);
    shared.turns_of_dq.leave(of, 0);
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
    if constexpr (!kAddsOwnGradients) scale_by(s, slopes);
    if constexpr (Config::kLateDp) issue_dp(dp);
    wgmma_wait_group<0>();
    pin(dp);
    score_gradients_of(s, dp, s_at, statistics, units);
    if constexpr (kAddsOwnGradients) {  // they are gradients of what comes behind the slopes
      if constexpr (kKeepsKeySums) {
#pragma unroll
        for (int slot = 0; slot < ScoreFragment::kSlots; ++slot)
          key_sums[slot] += thread_row_sum<ScoreFragment>(s, slot);
      } else if constexpr (!Config::kReturnsBias) {
        for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(s, s_at, view, p, place, corner); });
      }
      add_score_gradients(s, slopes, s_at, p, place, corner);
      scale_by(s, slopes);
    }
    gradients.pack<Element>(s);
    bias.hand_over(gradients, s_at);
    if constexpr (kLeavesDq) return;
    cursor.wait_empty(shared.gradients);
    store_operand(shared.ds(cursor.slot), warp_key(own_thread()), gradients);
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
    if constexpr (kHasRoom) await_values(key_slot);
    if (!Config::kLateDp) issue_dp(dp);
    enter_head();
    if constexpr (kStays && !kHasRoom) await_place();
    form_gradients(s, dp);
  }
  // Takes the turn, and hands it on once S and dP of the next step are queued.
  __device__ __forceinline__ void advance() {
    const int slot = cursor.slot;
    [[maybe_unused]] float dq[kDqColumns / 2];
    float s[ScoreFragment::kSize], dp[ScoreFragment::kSize];
    turns.take();
    if constexpr (!kLeavesDq) issue_dq(dq, cursor.previous());
    issue_dv_dk(slot);
    if constexpr (!kLeavesDq) {
      wgmma_wait_group<2>();
      finish_dq(dq, cursor.previous());
    }
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
    [[maybe_unused]] float dq[kDqColumns / 2];
    if constexpr (kStays) release_by_warp(shared.taken.values, 0);
    turns.take();
    if constexpr (!kLeavesDq) issue_dq(dq, cursor.previous());
    issue_dv_dk(cursor.slot);
    if constexpr (!kLeavesDq) {
      wgmma_wait_group<2>();
      finish_dq(dq, cursor.previous());
    }
    if (group == 0) turns.pass();
    wgmma_wait_group<0>();
    pin(dv);
    pin(dk);
    if constexpr (kStays) {
      release_by_warp(shared.channels.douts, cursor.slot);
      release_by_warp(shared.channels.queries, cursor.slot);
    }
    if constexpr (kLeavesDq) return;
    before = at.step(shared.channels, cursor.slot).number();
    issue_dq(dq, cursor);
    if constexpr (kHasRoom) leave_with_values(p);
    wgmma_wait_group<0>();
    if constexpr (kStays) release_keys();
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

  // ---- blocks that stay ----
  // V of the tile that is told of in that slot.
  __device__ __forceinline__ void await_values(int slot) const {
    Cursor<1>{0, u32(slot)}.wait_full(shared.taken.values);
  }
  __device__ __forceinline__ void release_keys() const {
    if (threadIdx.x % kWarpgroupThreads == 0) mbarrier_arrive(shared_address(&shared.channels.keys.empty[key_slot]));
  }
  // When K is there.
  __device__ __forceinline__ void enter(const Cursor<2>& tile) const {
    if constexpr (!kHasRoom) await_values(tile.slot);
    place_of_keys(tile).wait_full(shared.channels.keys);
    constexpr int kThreads = kGroups * kWarpgroupThreads;
    clear_unseen_keys<kAllBarrier, kThreads>(p, work, [&](Range rows, int thread) {
      await_values(tile.slot);
      clear_rows_outside<kThreads>(shared.in.k[key_slot], rows, thread);
      clear_rows_outside<kThreads>(shared.in.v, rows, thread);
    });
  }
  // The place through which gradients leave, one after the other, may be written again when they have left.
  __device__ __forceinline__ void await_place() const {
    if (threadIdx.x % kWarpgroupThreads == 0) cp_async_bulk_wait_group_read<0>();
    bar_sync(kGroupBarrier + group, kWarpgroupThreads);
  }
  template <int kSize>
  __device__ __forceinline__ void leave(const float (&x)[kSize], float scale, const TensorMap& map) {
    const int row = group * kWarpgroupRows;
    if constexpr (kHasRoom) {
      typedef PanelTile<kWarpgroupRows, 2 * kSize> Tile;
      store_gradient(reinterpret_cast<Tile&>(shared.leaving[group]), 0, x, scale, map, p, work, row,
                     kGroupBarrier + group);
    } else {
      typedef PanelTile<Config::kBlockK, 2 * kSize> Tile;
      static_assert(sizeof(Tile) <= 2 * sizeof(GradientTile), "dS has less");
      store_gradient(reinterpret_cast<Tile&>(shared.ds_data), row, x, scale, map, p, work, row, kGroupBarrier + group);
    }
  }
  template <class P> __device__ __forceinline__ void leave_with_values(const P& p) {
    await_place();
    leave(dv, 1.f, p.dv_map);
  }
  // A tile from its beginning to its end; afterwards the cursor stands where the next one begins.
  template <class P> __device__ __forceinline__ void walk_and_leave(const P& p, int slot) {
    if (work.steps > 0) {
      walk();
      cursor.advance();
      if constexpr (!kHasRoom) {
        Cursor<Config::kStages> last = cursor;  // of the last two steps, whose dS both warpgroups have read
        last.advance();
        cursor.wait_empty(shared.gradients);
        last.wait_empty(shared.gradients);
        leave(dv, 1.f, p.dv_map);
      }
    } else {
      await_values(slot);
      release_by_warp(shared.taken.values, 0);
      release_keys();
      leave_with_values(p);
    }
    await_place();
    leave(dk, p.scale, p.dk_map);
  }

  // ---- what is left ----
  template <class Tile, int kSize>
  __device__ __forceinline__ void store(Tile& tile, const float (&x)[kSize], float scale, const TensorMap& map) const {
    const int row = group * kWarpgroupRows;
    store_gradient(tile, row, x, scale, map, p, shared.channels.work, row, kGroupBarrier + group);
  }
};

__device__ __forceinline__ void consume(const Params& p, SharedStorage& shared, const Work& work, int group) {
  Consumer<SharedStorage> consumer(p, shared, work, group);
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
      consumer.store(shared.in.k[0], consumer.dk, p.scale, p.dk_map);
      if (threadIdx.x % kWarpgroupThreads == 0) cp_async_bulk_wait_group_read<0>();
    }
  }(p);
}

// ---- blocks that stay ----
// One thread: tells of one tile of keys after the other, each when the one before is about to end, and loads its K and V.
template <class Storage> __device__ __forceinline__ void take_tiles(const Params& p, Storage& shared) {
  // Where blocks take turns, a tile waits for those that were taken before it.
  u32 number = Config::kDeterministic ? shared.channels.started : blockIdx.x;
  Cursor<2> at;
  while (true) {
    at.wait_empty(shared.taken.told);
    TakenTile& work = shared.taken.works[at.slot];
    work.exists = number < u32(Place::listed_keys<Config::kBlockK>(p) * p.batch_size * p.heads_k);
    if (work.exists) work.take(p, int(number));
    mbarrier_arrive(at.full(shared.taken.told));
    if (!work.exists) return;
    const DescribedRow key = work.place.described_key(p, work.keys.begin, work.batch);
    const BoxCorner corner{0, key.row, work.place.head_k, key.batch};
    const Cursor<1> one{0, u32(at.slot)};
    const auto load_keys = [&] {
      const Cursor<Config::kKeyStages> keys = place_of_keys(at);
      const u32 full = keys.full(shared.channels.keys);
      keys.wait_empty(shared.channels.keys);
      mbarrier_arrive_expect_tx(full, KeyTile::kBytes);
      copy_panels(shared.in.k[keys.slot], p.k_map, full, corner, CachePolicy::kEvictFirst);
    };
    if (kHasRoom) load_keys();
    const u32 full = one.full(shared.taken.values);
    one.wait_empty(shared.taken.values);
    mbarrier_arrive_expect_tx(full, ValueTile::kBytes);
    copy_panels(shared.in.v, p.v_map, full, corner, CachePolicy::kEvictFirst);
    if (!kHasRoom) load_keys();  // V is free before K is
    mbarrier_wait(shared_address(&shared.taken.ending), one.phase);
    at.advance();
    number = atomicAdd(static_cast<u32*>(p.turns), 1u);
    if (!Config::kDeterministic) number += gridDim.x;
  }
}
// `act(work)` for each tile, by a thread that reads what it is.
template <class Storage, class Act> __device__ __forceinline__ void for_each_tile(Storage& shared, Act act) {
  Cursor<2> at;
  while (true) {
    at.wait_full(shared.taken.told);
    const TakenTile& work = shared.taken.works[at.slot];
    if (!work.exists) return;
    act(work);
    at.release(shared.taken.told);
    at.advance();
  }
}
// One thread: queries and dO.
template <class Storage> __device__ __forceinline__ void load_queries(const Params& p, Storage& shared) {
  Cursor<Config::kStages> cursor;
  for_each_tile(shared, [&](const Work& work) {
    const auto end = [&] { mbarrier_arrive(shared_address(&shared.taken.ending)); };
    Step step(p, work);
    if (work.steps == 0) end();
    for (int rest = work.steps; rest > 0; --rest) {
      if (rest == 1) end();
      load_step(p, shared.in, shared.channels, work, step, cursor, true, [] {});
      step.advance(p, work);
      cursor.advance();
    }
  });
}
// Two more, where blocks take turns.
template <class Storage> __device__ __forceinline__ void keep_turns_of_tiles(const Params& p, Storage& shared) {
  if constexpr (Config::kDeterministic) {
    Cursor<Config::kStages> cursor;
    if (threadIdx.x == 64)
      for_each_tile(shared, [&](const Work& work) { cursor = await_turns(p, shared.turns_of_dq, work, cursor); });
    if (threadIdx.x == 96)
      for_each_tile(shared, [&](const Work& work) { cursor = pass_turns(p, shared.turns_of_dq, work, 0, cursor); });
  }
}
template <class Storage> __device__ __forceinline__ void consume_tiles(const Params& p, Storage& shared, int group) {
  Cursor<Config::kStages> cursor;
  Cursor<2> at;
  while (true) {
    at.wait_full(shared.taken.told);
    // The same number of all lanes, which is known to the compiler then.
    if (!__shfl_sync(0xffffffffu, int(shared.taken.works[at.slot].exists), 0)) break;
    const Work work = shared.taken.works[at.slot];
    release_by_warp(shared.taken.told, at.slot);
    const int key_slot = kHasRoom ? __shfl_sync(0xffffffffu, at.slot, 0) : 0;
    Consumer<Storage> consumer(p, shared, work, group, cursor, key_slot);
    consumer.enter(at);
    consumer.walk_and_leave(p, at.slot);
    cursor = consumer.cursor;
    at.advance();
  }
  if (threadIdx.x % kWarpgroupThreads == 0) cp_async_bulk_wait_group_read<0>();
}
template <class Storage> __device__ __forceinline__ void stay(const Params& p, Storage& shared) {
  if constexpr (kStays) {
    const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
    if (group == 0) {
      setmaxnreg_dec<Config::kProducerRegisters>();
      if (threadIdx.x == 0) load_queries(p, shared);
      if (threadIdx.x == 32) take_tiles(p, shared);
      keep_turns_of_tiles(p, shared);
    } else {
      setmaxnreg_inc<Config::kConsumerRegisters>();
      consume_tiles(p, shared, group - 1);
    }
  }
}

// Two warps that have nothing else to do: what no query of the tile's heads sees has a gradient of 0.
template <class P> __device__ __forceinline__ void clear_hidden_bias(const P& p, const Work& work) {
  if constexpr (Config::kReturnsBias && Visibility::kNarrows) {
    typedef Chunk<Element> Piece;
    constexpr int kPieces = Config::kBlockK * sizeof(Element) / sizeof(Piece), kRows = 64 / kPieces;
    const int thread = int(threadIdx.x) - 32;
    const int k = work.keys.begin + thread % kPieces * int(sizeof(Piece) / sizeof(Element));
    if (k >= p.seq_k) return;
    const int first = work.steps > 0 ? work.first * Config::kBlockQ : 0;
    const int last = work.steps > 0 ? work.last * Config::kBlockQ : 0;
    const i64 step = kRows * p.dbias.row;
#pragma unroll 1
    for (int head = work.place.head; head < work.place.head + p.group; ++head)
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        int row = (part ? last : 0) + thread / kPieces;
        Element* at = element_at<Element>(p.dbias, work.place.offset(p.dbias, head), row, k);
#pragma unroll 1
        for (; row < (part ? p.seq_q : first); row += kRows, at += step) *reinterpret_cast<Piece*>(at) = Piece{};
      }
  }
}

// One thread: what consumers make of the gradient of a bias.
__device__ __forceinline__ void return_bias(const Params& p, SharedStorage& shared, const Work& work) {
  Step step(p, work);
  BiasReturner<Config::kReturnsBias ? Config::kBiasStages : 0> returner;
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
    if (!kStays) set_work(p, shared.channels);
    shared.channels.init(arrivals_of(kWarps), kStays ? kGroups : 1);
    shared.taken.init();
    shared.gradients.init(kGroups, arrivals_of(kWarps));
    shared.channels.init_bias(kWarps);
    shared.turns_of_dq.init(kWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (kStays) {
    stay(p, shared);
    return;
  }
  const Work work = shared.channels.work;
  if (kPacked && is_empty(work.keys)) return;  // the number of a tile that its segment has no rows for
  if (kHasPlanes && !is_split(p, work.place)) return;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    const u32 leader = threadIdx.x / kProducers * kProducers;  // of those that walk together
    if (leader == 0) produce(p, shared.in, shared.channels, shared, work);
    keep_turns(p, shared.turns_of_dq, work, leader);
    if (Config::kReturnsBias && threadIdx.x == 96) return_bias(p, shared, work);
    if (threadIdx.x >= 32 && threadIdx.x < 96) clear_hidden_bias(p, shared.channels.work);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume(p, shared, work, group - 1);
  }
}
