// After the backward by wgmma of a bias whose gradient leaves in blocks (sm_90a): these are dS, rounded, so that dq = scale · dS K is
// one product more, and no block adds to sums.
//
// Job: blocks stay on their multiprocessor and work through tiles of queries.  Warpgroup 0 produces: one thread loads dS and keys ahead
// of use; the others own 64 query rows each.  It is bound by reading dS.
// Invariants: producer and consumers walk the same steps; dS is there for every key that some query of the tile sees.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/epilogue.cuh"
#include "hw/fragment_simt.cuh"
#include "hw/gemm_wgmma.cuh"

constexpr int kGroups = Config::kBlockQ / kWarpgroupRows;  // of consumers
constexpr int kAllBarrier = 1, kConsumers = kGroups * kWarpgroupThreads;

typedef PanelTile<Config::kBlockQ, Config::kBlockK> GradientTile;
typedef PanelTile<Config::kBlockK, Config::kDqWidth> KeyTile;
typedef MmaFragment<1, Config::kHeadDim / 8> QueryFragment;

struct SharedStorage {
  GradientTile ds[Config::kStages];
  KeyTile k[Config::kStages];
  Channel<Config::kStages> steps;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/wgmma.py disagrees");

// A tile of queries and the blocks of keys that some of them see.
struct Tile {
  Place place;
  int batch, row, key_count;
  Range blocks;

  // Longest first, as in the forward.
  __device__ __forceinline__ Tile(const Params& p, int index) {
    const int query_tiles = Place::query_tiles<Config::kBlockQ>(p);
    const Assignment assigned(p, index, query_tiles, p.batch_size * p.heads_q);
    row = (query_tiles - 1 - assigned.tile) * Config::kBlockQ;
    batch = assigned.head / p.heads_q;
    place.set_head(p, assigned.head % p.heads_q);
    place.set_batch(p, batch);
    place.key_count = Visibility::key_count(p, place);
    const Range seen = keys_seen_by_any(p, place, {row, min(p.seq_q, row + Config::kBlockQ)});
    blocks = {seen.begin / Config::kBlockK, tiles_of(seen.end, Config::kBlockK)};
  }
};
__device__ __forceinline__ int tile_count(const Params& p) {
  return p.batch_size * p.heads_q * Place::query_tiles<Config::kBlockQ>(p);
}
// Panels of a block of keys, and boxes of rows of a tile, that begin inside the arrays: others have none of their elements.
__device__ __forceinline__ int panels_inside(const Params& p, int block) {
  return min(GradientTile::kPanels, tiles_of(p.seq_k - block * Config::kBlockK, GradientTile::kWidth));
}

__device__ __forceinline__ void produce(const Params& p, SharedStorage& shared) {
  Cursor<Config::kStages> at;
  for (int index = blockIdx.x; index < tile_count(p); index += gridDim.x) {
    const Tile tile(p, index);
    const int boxes = min(Config::kBlockQ / Config::kBiasRows, tiles_of(p.seq_q - tile.row, Config::kBiasRows));
    for (int block = tile.blocks.begin; block < tile.blocks.end; ++block) {
      constexpr u32 kBoxBytes = Config::kBiasRows * kPanelRowBytes;
      const int k = block * Config::kBlockK, panels = panels_inside(p, block);
      at.wait_empty(shared.steps);
      const u32 full = at.full(shared.steps);
      mbarrier_arrive_expect_tx(full, KeyTile::kBytes + panels * boxes * kBoxBytes);
      for (int panel = 0; panel < panels; ++panel)
        for (int box = 0; box < boxes; ++box)
          cp_async_bulk_tensor_load(
              shared.ds[at.slot].address() + panel * GradientTile::kPanelBytes + box * kBoxBytes, &p.dbias_map, full,
              {k + panel * GradientTile::kWidth, tile.row + box * Config::kBiasRows, tile.place.head, tile.batch},
              CachePolicy::kEvictFirst);
      copy_panels(shared.k[at.slot], p.k_map, full, {0, k, tile.place.head_k, tile.batch}, CachePolicy::kEvictLast);
      at.advance();
    }
  }
}

// What is not in the arrays must be zeros on both sides, and keys that no query sees may be anything.
__device__ __forceinline__ void clean(const Params& p, const Tile& tile, int block, GradientTile& ds, KeyTile& keys) {
  const int begin = block * Config::kBlockK, panels = panels_inside(p, block);
  const Range alive = keys_seen_by_any(p, tile.place, {0, p.seq_q});
  const bool all_alive = begin >= alive.begin && min(begin + Config::kBlockK, p.seq_k) <= alive.end;
  if (all_alive && panels == GradientTile::kPanels) return;
  const int thread = int(threadIdx.x) - kWarpgroupThreads;
  if (!all_alive) clear_rows_outside<kConsumers>(keys, Range{alive.begin - begin, alive.end - begin}, thread);
  for (u32 at = panels * GradientTile::kPanelBytes + thread * 16; at < GradientTile::kBytes; at += kConsumers * 16)
    st_shared_v4(ds.address() + at, 0, 0, 0, 0);
  fence_proxy_async();
  bar_sync(kAllBarrier, kConsumers);
}

// One warpgroup.
__device__ __forceinline__ void consume(const Params& p, SharedStorage& shared, int group) {
  Cursor<Config::kStages> at;
  for (int index = blockIdx.x; index < tile_count(p); index += gridDim.x) {
    const Tile tile(p, index);
    float dq[QueryFragment::kSize] = {};
    for (int block = tile.blocks.begin; block < tile.blocks.end; ++block) {
      at.wait_full(shared.steps);
      clean(p, tile, block, shared.ds[at.slot], shared.k[at.slot]);
      pin(dq);
      wgmma_fence();
      wgmma_rows_columns<Config::kBlockK, GradientTile>(dq, operand(shared.ds[at.slot], group * kWarpgroupRows),
                                                        operand(shared.k[at.slot]));
      wgmma_commit_group();
      wgmma_wait_group<0>();
      pin(dq);
      release_by_warp(shared.steps, at.slot);
      at.advance();
    }
    const QueryFragment fragment(group * kWarpgroupRows + int(threadIdx.x % kWarpgroupThreads / 32 * 16), 0,
                                 threadIdx.x);
    store_rows(dq, fragment, matrix<Element>(p.dq, tile.place.offset(p.dq)),
               Range{tile.row, min(p.seq_q, tile.row + Config::kBlockQ)}, Range{0, p.head_dim}, p.dq_vectors,
               [&](int) { return p.scale; });
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    shared.steps.init(arrivals_of(kConsumers / 32));
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) produce(p, shared);
  if (threadIdx.x >= kWarpgroupThreads) consume(p, shared, int(threadIdx.x) / kWarpgroupThreads - 1);
}
