// What both backward schedules on wgmma load, the thread that loads it, and what their consumers do alike.
//
// K and V of a block arrive once, queries with their statistics and dO through channels, in the order of the walk.
#pragma once
#include "hw/lookout.cuh"  // for the walk

#include "attention/plane_units.cuh"
#include "attention/softmax.cuh"
#include "attention/walk.cuh"
#include "hw/gemm_wgmma.cuh"
#include "hw/reduce.cuh"
#include "hw/turns.cuh"
#include "wgmma_bias.cuh"

typedef PanelTile<Config::kBlockK, Config::kDqWidth> KeyTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDimV> ValueTile;
typedef PanelTile<Config::kBlockQ, Config::kHeadDim> QueryTile;
typedef PanelTile<Config::kBlockQ, Config::kHeadDimV> DoutTile;

struct InputTiles {
  KeyTile k[Config::kKeyStages];
  ValueTile v;
  QueryTile q[Config::kStages];
  DoutTile dout[Config::kStages];
};
typedef TileStatistics<Config::kBlockQ> Statistics;

// A step where hidden tiles are passed over, as the producer tells it with the queries.
struct Told {
  Step step;
  u32 open;  // bit i: no element of the i-th 64 keys needs a test
  u32 last;  // none follows
};
template <bool kTold> struct ToldSteps {
  Told told[Config::kStages];
  __device__ __forceinline__ void tell(int slot, const Told& step) { told[slot] = step; }
  __device__ __forceinline__ Told heard(int slot) const { return told[slot]; }
};
template <> struct ToldSteps<false> {
  __device__ __forceinline__ void tell(int, const Told&) {}
  __device__ __forceinline__ Told heard(int) const { return Told(); }
};

struct InputChannels : GradientUnits<kHasPlanes>, BiasChannels, ToldSteps<kPassesOver> {
  Statistics statistics[Config::kStages];
  Channel<Config::kKeyStages> keys;
  Channel<Config::kStages> queries, douts;
  Work work;
  u32 started;  // blocks before this one, where they take turns

  // By one thread, before a barrier of the block; `readers` give back a slot, `key_readers` a tile of keys.
  __device__ __forceinline__ void init(int readers, int key_readers = 1) {
    keys.init(key_readers);
    queries.init(readers);
    douts.init(readers);
  }
};

// One thread, before a barrier of the block: the block's number is its place in the grid, or where blocks wait for each other,
// the order in which they start.
__device__ __forceinline__ void set_work(const Params& p, InputChannels& channels) {
  channels.work = Work(p, Config::kDeterministic ? int(channels.started) : int(blockIdx.x));
  channels.read_units(p, channels.work.place);
}
// Of one step; `tell` writes what consumers need to know of it, when its slot is free.
template <class Tell>
__device__ __forceinline__ void load_step(const Params& p, InputTiles& tiles, InputChannels& channels, const Work& work,
                                          const Step& step, const Cursor<Config::kStages>& cursor, bool leads,
                                          Tell tell) {
  const DescribedRow query = work.place.described_query(p, step.tile * Config::kBlockQ, work.batch);
  const BoxCorner corner{0, query.row, step.head, query.batch};
  constexpr u32 kStatisticsBytes = sizeof(Statistics);
  const u32 q_full = cursor.full(channels.queries), dout_full = cursor.full(channels.douts);
  cursor.wait_empty(channels.queries);
  if (leads) {
    tell();
    mbarrier_arrive_expect_tx(q_full, QueryTile::kBytes + kStatisticsBytes);
    copy_panels(tiles.q[cursor.slot], p.q_map, q_full, corner, CachePolicy::kEvictNormal);
    cp_async_bulk_load(shared_address(&channels.statistics[cursor.slot]),
                       static_cast<const Statistics*>(p.statistics) + step.number(), kStatisticsBytes, q_full);
  }
  cursor.wait_empty(channels.douts);
  if (leads) {
    mbarrier_arrive_expect_tx(dout_full, DoutTile::kBytes);
    copy_panels(tiles.dout[cursor.slot], p.dout_map, dout_full, corner, CachePolicy::kEvictNormal);
  }
}

// Loads in the order in which the consumers use what is loaded: one thread, or where hidden tiles are passed over, a warp.
constexpr int kProducers = kPassesOver ? 32 : 1;
__device__ __forceinline__ void produce(const Params& p, InputTiles& tiles, InputChannels& channels, BiasTiles& biases,
                                        const Work& work) {
  const bool leads = kProducers == 1 || threadIdx.x == 0;
  if (leads) {
    const u32 full = shared_address(&channels.keys.full[0]);
    mbarrier_arrive_expect_tx(full, KeyTile::kBytes + ValueTile::kBytes);
    const DescribedRow key = work.place.described_key(p, work.keys.begin, work.batch);
    const BoxCorner at{0, key.row, work.place.head_k, key.batch};
    copy_panels(tiles.k[0], p.k_map, full, at, CachePolicy::kEvictFirst);
    copy_panels(tiles.v, p.v_map, full, at, CachePolicy::kEvictFirst);
  }
  Cursor<Config::kStages> cursor;
  BiasWriter<Config::kBiasStages> bias;
  const auto load = [&](const Step& step, auto tell) {
    load_step(p, tiles, channels, work, step, cursor, leads, tell);
    bias.load(p, biases, channels, work.batch, step.head, step.tile * Config::kBlockQ, work.keys.begin, leads);
  };
  if constexpr (kPassesOver) {
    Walk<Config::kBlockK / kWarpgroupRows, false> walk(p, work);
    if (walk.ends() && leads) {
      Step none;
      none.tile = -1;
      channels.tell(0, {none, 0, 1});
      mbarrier_arrive(cursor.full(channels.queries));
    }
    while (!walk.ends()) {
      const Step step = walk.step();
      const u32 open = walk.open();
      walk.advance();
      load(step, [&] { channels.tell(cursor.slot, {step, open, walk.ends()}); });
      cursor.advance();
    }
  } else {
    Step step(p, work);
    for (int i = 0; i < work.steps; ++i) {
      load(step, [] {});
      step.advance(p, work);
      cursor.advance();
    }
  }
}

// ---- turns ----------------------------------------------------------------------------------------------------------
// Where blocks add to dq in turns, one warp of the producers' warpgroup waits for them ahead of use, and others pass them on when
// all is added, so that no consumer waits for global memory.  Sharers of a tile of queries, each with a counter of its own, add at
// times of their own.  Slots are those of the steps, in both channels: a turn that has come, and what was added in it.
template <int kSharers> struct TurnChannels {
  Channel<Config::kStages> come[kSharers], added[kSharers];

  // By one thread, before a barrier of the block; of each sharer so many warps add.
  __device__ __forceinline__ void init(int warps) {
#pragma unroll
    for (int sharer = 0; sharer < kSharers; ++sharer) {
      come[sharer].init(1);
      added[sharer].init(1, arrivals_of(warps));
    }
  }
  // A consumer's warp, before it adds and when it has.
  __device__ __forceinline__ void await(const Cursor<Config::kStages>& of, int sharer) { of.wait_full(come[sharer]); }
  __device__ __forceinline__ void leave(const Cursor<Config::kStages>& of, int sharer) {
    arrive_by_warp(of.full(added[sharer]));
  }
};
template <> struct TurnChannels<0> {  // blocks add as they come
  __device__ __forceinline__ void init(int) {}
  __device__ __forceinline__ void await(const Cursor<Config::kStages>&, int) {}
  __device__ __forceinline__ void leave(const Cursor<Config::kStages>&, int) {}
};

// The first word counts the blocks.
__device__ __forceinline__ u32* turn_counter(const Params& p, i64 number) {
  return static_cast<u32*>(p.turns) + 1 + number;
}
// `act(step, turn)` for every step of the walk, by one of kProducers threads; kInTurns: the turn is looked up where tiles of keys
// before the block's own may not add.
template <bool kInTurns, class Act>
__device__ __forceinline__ void for_each_step(const Params& p, const Work& work, Act act) {
  const int own = work.keys.begin / Config::kBlockK;
  if constexpr (kPassesOver) {
    for (Walk<0, kInTurns> walk(p, work); !walk.ends(); walk.advance()) {
      const int turn = kInTurns ? walk.turn() : own;
      if (threadIdx.x % 32 == 0) act(walk.step(), turn);
    }
  } else {
    Step step(p, work);
    for (int i = 0; i < work.steps; ++i) {
      act(step, own);
      step.advance(p, work);
    }
  }
}
// The one that waits, for the sharers in the order in which they add; its cursor behind the last step.
template <int kSharers>
__device__ __forceinline__ Cursor<Config::kStages> await_turns(const Params& p, TurnChannels<kSharers>& turns,
                                                               const Work& work, Cursor<Config::kStages> cursor = {}) {
  for_each_step<true>(p, work, [&](const Step& step, int turn) {
#pragma unroll
    for (int sharer = 0; sharer < kSharers; ++sharer) {
      cursor.wait_empty(turns.come[sharer]);
      wait_for_turn(turn_counter(p, i64(step.number()) * kSharers + sharer), turn);
      mbarrier_arrive(cursor.full(turns.come[sharer]));
    }
    cursor.advance();
  });
  return cursor;
}
// One of two that pass them on, of every other sharer.
template <int kSharers>
__device__ __forceinline__ Cursor<Config::kStages> pass_turns(const Params& p, TurnChannels<kSharers>& turns,
                                                              const Work& work, int first,
                                                              Cursor<Config::kStages> cursor = {}) {
  const u32 next = work.keys.begin / Config::kBlockK + 1;
  for_each_step<false>(p, work, [&](const Step& step, int) {
#pragma unroll
    for (int sharer = first; sharer < kSharers; sharer += 2) {
      cursor.wait_full(turns.added[sharer]);
      cursor.release(turns.come[sharer]);
      pass_turn(turn_counter(p, i64(step.number()) * kSharers + sharer), next);
    }
    cursor.advance();
  });
  return cursor;
}
// Warps 1 and on of the producers' warpgroup, of which `leader` is the first thread of those that walk together.
template <int kSharers>
__device__ __forceinline__ void keep_turns(const Params& p, TurnChannels<kSharers>& turns, const Work& work,
                                           u32 leader) {
  if constexpr (kSharers > 0) {
    if (leader == 32) await_turns(p, turns, work);
    if (leader == 64) pass_turns(p, turns, work, 0);
    if (leader == 96 && kSharers > 1) pass_turns(p, turns, work, 1);
  }
}

// ---- what one warpgroup hands over to another: float32 numbers of each thread, for that of the same place ----------------
template <int kSize> struct HandedOver {
  float4 own[kSize / 4][kWarpgroupThreads];

  // `number(i)` is the i-th, `thread()` the place.
  template <class Thread, class Number> __device__ __forceinline__ void store(Thread thread, Number number) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4)
      own[i / 4][thread()] = make_float4(number(i), number(i + 1), number(i + 2), number(i + 3));
  }
  // From the `kFirst`-th on.
  template <int kFirst, int kCount, class Thread>
  __device__ __forceinline__ void load(Thread thread, float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 part = own[(kFirst + i) / 4][thread()];
      x[i] = part.x;
      x[i + 1] = part.y;
      x[i + 2] = part.z;
      x[i + 3] = part.w;
    }
  }
};

// ---- consumers ------------------------------------------------------------------------------------------------------
// Where a consumer is in the walk: it counts, or where it is told, looks up what the producer told of the slot at hand, which costs
// less than registers do.
struct At : Step {
  __device__ __forceinline__ At(const Params& p, const Work& work) : Step(p, work) {}
  __device__ __forceinline__ Step step(const InputChannels& channels, int slot) const {
    return kPassesOver ? channels.heard(slot).step : static_cast<const Step&>(*this);
  }
  // Where it is told: whether it is the last step.
  __device__ __forceinline__ bool is_last(const InputChannels& channels, int slot) const {
    return channels.heard(slot).last;
  }
  // Whether no element of a step's queries and 64 keys, the `part`-th of the block, needs a test.
  __device__ __forceinline__ bool is_open(const InputChannels& channels, int slot, const Params& p, const Place& place,
                                          Range queries, int first_key, int part) const {
    return kPassesOver ? channels.heard(slot).open >> part & 1
                       : tile_is_open(p, place, queries, {first_key, first_key + kWarpgroupRows});
  }
  __device__ __forceinline__ void advance(const Params& p, const Work& work) {
    if constexpr (!kPassesOver) Step::advance(p, work);
  }
};
// Whether not all steps are passed over.
__device__ __forceinline__ bool is_told_any(InputChannels& channels) {
  mbarrier_wait(shared_address(&channels.queries.full[0]), 0);
  return channels.heard(0).step.tile >= 0;
}

// All of them, before the walk: keys that no query sees may be anything, and must not meet a gradient of 0: `clear(rows, thread)`
// makes zeros of what lies outside these rows.
template <int kBarrier, int kThreads, class Clear>
__device__ __forceinline__ void clear_unseen_keys(const Params& p, const Work& work, Clear clear) {
  if constexpr (Visibility::kNarrows) {
    const Range alive = keys_seen_by_any(p, work.place, {0, work.place.seq_q(p)});
    if (work.keys.begin >= alive.begin && work.keys.end <= alive.end) return;
    const Range rows{alive.begin - work.keys.begin, alive.end - work.keys.begin};
    clear(rows, int(threadIdx.x) - kWarpgroupThreads);
    fence_proxy_async();
    bar_sync(kBarrier, kThreads);
  }
}
// The same when K and V have come.
template <int kBarrier, int kThreads, class Clear>
__device__ __forceinline__ void await_keys(const Params& p, InputChannels& channels, const Work& work, Clear clear) {
  mbarrier_wait(shared_address(&channels.keys.full[0]), 0);
  clear_unseen_keys<kBarrier, kThreads>(p, work, clear);
}
template <int kBarrier, int kThreads>
__device__ __forceinline__ void await_keys(const Params& p, InputTiles& tiles, InputChannels& channels,
                                           const Work& work) {
  await_keys<kBarrier, kThreads>(p, channels, work, [&](Range rows, int thread) {
    clear_rows_outside<kThreads>(tiles.k[0], rows, thread);
    clear_rows_outside<kThreads>(tiles.v, rows, thread);
  });
}

// In place: scores -> P, a row per key; elements 4j .. 4j + 3 are two rows of the same two columns.
template <class Fragment, class P>
__device__ __forceinline__ void probabilities_of(float (&s)[Fragment::kSize], const Fragment& f,
                                                 const Statistics& statistics, const P& p) {
  constexpr int kLift = kHasPlanes ? kProbabilityLift : 0;
#pragma unroll
  for (int i = 0; i < Fragment::kSize; i += 4) {
    const Pair<float> shift = load_pair(statistics.shift + f.column(i));
    s[i] = probability<kLift>(s[i], shift.first, p);
    s[i + 1] = probability<kLift>(s[i + 1], shift.second, p);
    s[i + 2] = probability<kLift>(s[i + 2], shift.first, p);
    s[i + 3] = probability<kLift>(s[i + 3], shift.second, p);
  }
}
// In place: P -> the gradients of the scores; of planes both are lifted, as is delta.
template <class Fragment, class P>
__device__ __forceinline__ void score_gradients_of(float (&s)[Fragment::kSize], const float (&dp)[Fragment::kSize],
                                                   const Fragment& f, const Statistics& statistics, const P& p) {
#pragma unroll
  for (int i = 0; i < Fragment::kSize; i += 4) {
    const Pair<float> delta = load_pair(statistics.delta + f.column(i));
    s[i] = score_gradient(s[i], dp[i], delta.first, p);
    s[i + 1] = score_gradient(s[i + 1], dp[i + 1], delta.second, p);
    s[i + 2] = score_gradient(s[i + 2], dp[i + 2], delta.first, p);
    s[i + 3] = score_gradient(s[i + 3], dp[i + 3], delta.second, p);
  }
}

// One warp's dK or dV of products of planes, from row `key` of the block on: float32 numbers go straight into the array.
template <int kSize>
__device__ __forceinline__ void store_plane_gradient(const View& to, int key, float (&x)[kSize], PowerOfTwo unit,
                                                     float scale, int columns, bool pairs, const Work& work) {
  typedef MmaFragment<1, kSize / 4> Fragment;
#pragma unroll
  for (int i = 0; i < kSize; ++i) x[i] = unit.times(x[i]);
  store_rows<Fragment>(x, Fragment(key, 0), matrix<OutElement>(to, work.place.key_offset(to)), work.keys, {0, columns},
                       pairs, [&](int) { return scale; });
}
// One warpgroup's dK or dV: through a place, from its row on, into the array, from a row of the tile of keys on.
template <class Tile, int kSize>
__device__ __forceinline__ void store_gradient(Tile& tile, int row, const float (&x)[kSize], float scale,
                                               const TensorMap& map, const Params& p, const Work& work, int own_row,
                                               int barrier) {
  const u32 thread = threadIdx.x % kWarpgroupThreads;
  store_accumulator<Element, kSize>(tile, row + int(thread / 32 * 16), [&](int i) { return x[i] * scale; });
  fence_proxy_async();
  bar_sync(barrier, kWarpgroupThreads);
  if (thread == 0) {
    const int key = work.keys.begin + own_row;
    const DescribedRow at = work.place.described_key(p, key, work.batch);
    if (!kPacked || key < work.place.seq_k(p)) store_panels(tile, row, map, {0, at.row, work.place.head_k, at.batch});
    cp_async_bulk_commit_group();
  }
}
