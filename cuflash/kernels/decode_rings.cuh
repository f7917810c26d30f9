// How blocks of keys and values come to the warps of decode_mma.cu: each has a ring of its own, which it fills itself.
//
// By cp.async a warp fetches each row from where it lies, whatever strides and pages there are; rows without a key are zeros.
// By boxes of a tensor map (kTensor) one lane fetches a whole block, whose rows then lie in one page; rows that the tile does not
// see, or that are not in the cache yet, arrive as whatever the cache holds, and are replaced once they are there.
#pragma once
#include "hw/copy_rows.cuh"
#include "hw/copy_tma.cuh"
#include "attention/cache.cuh"
#include "decode_slices.cuh"

constexpr int kGroupK = group_rows<Config::kHeadDim, Element>(), kGroupV = group_rows<Config::kHeadDimV, Element>();
constexpr int kGroup = kGroupK > kGroupV ? kGroupK : kGroupV;

template <bool kTensor> struct Rings {
  SharedTile<Config::kBlockK, Config::kHeadDim, Element> k[Config::kWarps][Config::kStages];
  SharedTile<Config::kBlockK, Config::kHeadDimV, Element> v[Config::kWarps][Config::kStages];

  static __device__ __forceinline__ void announce(const Params&) {}
  __device__ __forceinline__ void open() {}

  // Where a warp's next blocks lie, looked up ahead: here, rows are looked up when they are copied.
  struct Lookout {
    __device__ __forceinline__ void move(const Params&, const Sequence&, const Unit&, u32, bool) {}
  };

  // The block at a place in the list, into a stage.
  __device__ __forceinline__ void load(const Params& p, int stage, const Sequence& sequence, const Unit& unit, u32 at,
                                       const Lookout&) {
    const int key = unit.key(at);
    const StreamPolicy policy = createpolicy_evict_first();
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    KeyRow row{nullptr, nullptr, false};
    if (lane < Config::kBlockK)
      row = key_row<Config::kPaged, Config::kAppends>(p, sequence, unit.head_k, unit.seen, key + lane);
    if (Config::kAligned && is_in_groups<Config::kPaged, Config::kBlockK, kGroup>(p, sequence, unit.seen, key)) {
      copy_groups(k[warp][stage], row.k, p.k.row, p.head_dim, policy);
      copy_groups(v[warp][stage], row.v, p.v.row, p.head_dim_v, policy);
    } else {
      copy_rows<Config::kAligned>(k[warp][stage], row.k, p.head_dim, row.column_k(p), policy);
      copy_rows<Config::kAligned>(v[warp][stage], row.v, p.head_dim_v, row.column_v(p), policy);
    }
  }
  // After each load, or in place of one.
  __device__ __forceinline__ void close_stage() { cp_async_commit_group(); }

  // Until the oldest stage is there, as it is to be read.
  __device__ __forceinline__ void await(const Params&, int, u32, const Sequence&, const Unit&, int) {
    cp_async_wait_group<Config::kStages - 1>();
    __syncwarp();
  }
};

template <> struct Rings<true> {
  typedef PanelTile<Config::kBlockK, Config::kHeadDim> KeyTile;
  typedef PanelTile<Config::kBlockK, Config::kHeadDimV> ValueTile;

  KeyTile k[Config::kWarps][Config::kStages];
  ValueTile v[Config::kWarps][Config::kStages];
  u64 full[Config::kWarps][Config::kStages];

  // As early as possible: the first copy waits for the maps.
  template <class P> static __device__ __forceinline__ void announce(const P& p) {
    if (threadIdx.x != 0) return;
    prefetch_tensormap(&p.k_map);
    prefetch_tensormap(&p.v_map);
  }
  __device__ __forceinline__ void open() {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int stage = 0; stage < Config::kStages; ++stage) mbarrier_init(barrier(stage), 1);
      fence_mbarrier_init();
    }
    __syncwarp();
  }

  // Where a warp's next blocks lie, looked up ahead, so that no copy waits for the page table: each lane knows the page of one
  // of the next 32 blocks of a unit.
  struct Lookout {
    int page = 0, row = 0;  // of the lane's block
    int lane = 32;          // whose block is next

    // After the warp has moved on to a block, of another unit or not.
    __device__ __forceinline__ void move(const Params& p, const Sequence& sequence, const Unit& unit, u32 next,
                                         bool is_new) {
      if constexpr (!Config::kPaged) return;
      if (!is_new && ++lane < 32) return;
      lane = 0;
      const u32 mine = next + threadIdx.x % 32 * Config::kWarps;
      if (mine >= unit.end) return;
      const int key = unit.key(mine), index = key / p.page_size;
      page = page_of(p, sequence, index);
      row = key - index * p.page_size;
    }
    __device__ __forceinline__ BoxCorner corner(const Sequence& sequence, const Unit& unit, u32 at) const {
      if constexpr (!Config::kPaged) return {0, unit.key(at), unit.head_k, sequence.entry()};
      return {0, __shfl_sync(0xffffffffu, row, lane), unit.head_k, __shfl_sync(0xffffffffu, page, lane)};
    }
  };

  template <class P>
  __device__ __forceinline__ void load(const P& p, int stage, const Sequence& sequence, const Unit& unit, u32 at,
                                       const Lookout& lookout) {
    const BoxCorner corner = lookout.corner(sequence, unit, at);  // by all lanes
    if (threadIdx.x % 32 != 0) return;
    mbarrier_arrive_expect_tx(barrier(stage), KeyTile::kBytes + ValueTile::kBytes);
    copy_panels(k[warp()][stage], p.k_map, barrier(stage), corner, CachePolicy::kEvictFirst);
    copy_panels(v[warp()][stage], p.v_map, barrier(stage), corner, CachePolicy::kEvictFirst);
  }
  __device__ __forceinline__ void close_stage() {}

  __device__ __forceinline__ void await(const Params& p, int stage, u32 phase, const Sequence& sequence,
                                        const Unit& unit, int key) {
    mbarrier_wait(barrier(stage), phase);
    if (key >= unit.seen.begin && key + Config::kBlockK <= min(unit.seen.end, sequence.cached)) return;
    const int lane = int(threadIdx.x) % 32;
    KeyRow mine{nullptr, nullptr, false};
    bool stays = true;
    if (lane < Config::kBlockK) {
      mine = key_row<Config::kPaged, Config::kAppends>(p, sequence, unit.head_k, unit.seen, key + lane);
      stays = mine.k && !mine.is_new;
    }
    for (u32 rest = __ballot_sync(0xffffffffu, !stays); rest; rest &= rest - 1) {
      const int row = __ffs(int(rest)) - 1;
      replace(k[warp()][stage], row, mine.k, p.head_dim);
      replace(v[warp()][stage], row, mine.v, p.head_dim_v);
    }
    fence_proxy_async();  // before the next copy into this stage
    __syncwarp();
  }

 private:
  static __device__ __forceinline__ int warp() { return int(threadIdx.x) / 32; }
  __device__ __forceinline__ u32 barrier(int stage) const { return shared_address(&full[warp()][stage]); }

  // A row, of which its own lane has the address: a new one, or zeros.
  template <class Tile>
  static __device__ __forceinline__ void replace(Tile& tile, int row, const Element* mine, int columns) {
    const auto* from = reinterpret_cast<const Element*>(__shfl_sync(0xffffffffu, reinterpret_cast<u64>(mine), row));
    for (int column = int(threadIdx.x) % 32 * 8; column < columns; column += 32 * 8)
      *static_cast<uint4*>(tile.at(row, column)) =
          from ? *reinterpret_cast<const uint4*>(from + column) : make_uint4(0, 0, 0, 0);
  }
};
