// What both backward schedules of two planes on wgmma load, the thread that loads it, and how their sums of products grow.
#pragma once
#include "hw/gemm_split_wgmma.cuh"
#include "backward_wgmma_inputs.cuh"

constexpr int kPlanes = Config::kPlanes;
static_assert(kPlanes == 2, "high and low parts");

// Planes of a tile from a row of a head on, whose bytes were announced: each a tile of its own ...
template <class Tile>
__device__ __forceinline__ void copy_planes(Tile (&to)[kPlanes], const TensorMap& map, u32 full, int row, int head,
                                            CachePolicy policy) {
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) copy_panels(to[plane], map, full, {0, row, head, plane}, policy);
}
// ... or on top of each other in the panels of one.
template <int kRows, int kColumns>
__device__ __forceinline__ void copy_planes(PanelTile<kRows, kColumns>& to, const TensorMap& map, u32 full, int row,
                                            int head, CachePolicy policy) {
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
    copy_panels(to, map, full, {0, row, head, plane}, policy, to.kPanels, plane * (kRows / kPlanes));
}

// One thread: loads in the order in which the consumers use what is loaded.
template <class Storage>
__device__ __forceinline__ void produce_planes(const Params& p, Storage& shared, const Work& work) {
  InputChannels& channels = shared.channels;
  const u32 full = shared_address(&channels.keys.full[0]);
  mbarrier_arrive_expect_tx(full, sizeof(shared.k) + sizeof(shared.v));
  const int of_keys = work.batch * p.heads_k + work.place.head_k, of_queries = work.batch * p.heads_q;
  copy_planes(shared.k, p.k_map, full, work.keys.begin, of_keys, CachePolicy::kEvictFirst);
  copy_planes(shared.v, p.v_map, full, work.keys.begin, of_keys, CachePolicy::kEvictFirst);
  Step step(p, work);
  Cursor<Config::kStages> cursor;
  for (int i = 0; i < work.steps; ++i) {
    const int row = step.tile * Config::kBlockQ, head = of_queries + step.head;
    const u32 q_full = cursor.full(channels.queries), dout_full = cursor.full(channels.douts);
    cursor.wait_empty(channels.queries);
    mbarrier_arrive_expect_tx(q_full, sizeof(shared.q[0]) + sizeof(Statistics));
    copy_planes(shared.q[cursor.slot], p.q_map, q_full, row, head, CachePolicy::kEvictNormal);
    cp_async_bulk_load(shared_address(&channels.statistics[cursor.slot]),
                       static_cast<const Statistics*>(p.statistics) + step.number(), sizeof(Statistics), q_full);
    cursor.wait_empty(channels.douts);
    mbarrier_arrive_expect_tx(dout_full, sizeof(shared.dout[0]));
    copy_planes(shared.dout[cursor.slot], p.dout_map, dout_full, row, head, CachePolicy::kEvictNormal);
    step.advance(p, work);
    cursor.advance();
  }
}

// All consumers, before the walk.
template <int kBarrier, int kThreads, class Storage>
__device__ __forceinline__ void await_keys(const Params& p, Storage& shared, const Work& work) {
  await_keys<kBarrier, kThreads>(p, shared.channels, work, [&](Range rows, int thread) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      clear_rows_outside<kThreads>(shared.k[plane], rows, thread);
      clear_rows_outside<kThreads>(shared.v[plane], rows, thread);
    }
  });
}

// When sums of low parts are there.
template <int kSize> __device__ __forceinline__ void take_low(float (&c)[kSize]) {
  pin(c);
  low_to_high(c);
}
// When the whole sum of a step is: it is added in float32, from an element on.
template <int kTo, int kSize>
__device__ __forceinline__ void take(float (&to)[kTo], float (&part)[kSize], int first = 0) {
  pin(part);
#pragma unroll
  for (int i = 0; i < kSize; ++i) to[first + i] += part[i];
}
