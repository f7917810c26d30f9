// What both backward schedules on wgmma load, and the thread that loads it.
//
// K and V of a block arrive once, queries with their statistics and dO through channels, in the order of the walk.
#pragma once
#include "attention/softmax.cuh"
#include "attention/walk.cuh"
#include "hw/copy_tma.cuh"
#include "hw/turns.cuh"

typedef PanelTile<Config::kBlockK, Config::kDqWidth> KeyTile;
typedef PanelTile<Config::kBlockK, Config::kHeadDimV> ValueTile;
typedef PanelTile<Config::kBlockQ, Config::kHeadDim> QueryTile;
typedef PanelTile<Config::kBlockQ, Config::kHeadDimV> DoutTile;

struct InputTiles {
  KeyTile k;
  ValueTile v;
  QueryTile q[Config::kStages];
  DoutTile dout[Config::kStages];
};
struct InputChannels {
  RowStatistics statistics[Config::kStages][Config::kBlockQ];
  Channel<1> keys;
  Channel<Config::kStages> queries, douts;
  u32 started;  // blocks before this one, where they take turns

  // By one thread, before a barrier of the block; `readers` give back a slot.
  __device__ __forceinline__ void init(int readers) {
    keys.init(1);
    queries.init(readers);
    douts.init(readers);
  }
};

// The number of this block: its place in the grid, or where blocks wait for each other, in the order in which they start.
__device__ __forceinline__ int block_number(const InputChannels& channels) {
  return Config::kDeterministic ? int(channels.started) : recomputed(blockIdx.x);
}
// Of the sums of one tile of queries, one for each consumer.
__device__ __forceinline__ u32* turn_counter(const Params& p, int tile, int group) {
  return static_cast<u32*>(p.turns) + 1 + 2 * i64(tile) + group;
}

// One thread: loads in the order in which the consumers use what is loaded.
__device__ __forceinline__ void produce(const Params& p, InputTiles& tiles, InputChannels& channels, const Work& work) {
  const u32 full = shared_address(&channels.keys.full[0]);
  mbarrier_arrive_expect_tx(full, KeyTile::kBytes + ValueTile::kBytes);
  const BoxCorner at{0, work.keys.begin, work.place.head_k, work.batch};
  copy_panels(tiles.k, p.k_map, full, at, CachePolicy::kEvictFirst);
  copy_panels(tiles.v, p.v_map, full, at, CachePolicy::kEvictFirst);
  Step step(p, work);
  Cursor<Config::kStages> cursor;
  for (int i = 0; i < work.steps; ++i) {
    const BoxCorner corner{0, step.tile * Config::kBlockQ, step.head, work.batch};
    constexpr u32 kStatisticsBytes = Config::kBlockQ * sizeof(RowStatistics);
    const i64 line = i64(step.number()) * Config::kBlockQ;
    const u32 q_full = cursor.full(channels.queries), dout_full = cursor.full(channels.douts);
    cursor.wait_empty(channels.queries);
    mbarrier_arrive_expect_tx(q_full, QueryTile::kBytes + kStatisticsBytes);
    copy_panels(tiles.q[cursor.slot], p.q_map, q_full, corner, CachePolicy::kEvictLast);
    cp_async_bulk_load(shared_address(channels.statistics[cursor.slot]),
                       static_cast<const RowStatistics*>(p.statistics) + line, kStatisticsBytes, q_full);
    cursor.wait_empty(channels.douts);
    mbarrier_arrive_expect_tx(dout_full, DoutTile::kBytes);
    copy_panels(tiles.dout[cursor.slot], p.dout_map, dout_full, corner, CachePolicy::kEvictLast);
    step.advance(p, work);
    cursor.advance();
  }
}
