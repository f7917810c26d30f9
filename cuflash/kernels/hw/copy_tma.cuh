// Tiles that the tensor memory accelerator fills and wgmma reads, and the channels that hand them from warp to warp.
//
// A tile is a row of panels, each kRows x 64 elements of 16 bits or x 128 of 8: rows of 128 bytes whose 16-byte chunks are
// swizzled by the row modulo 8 (CU_TENSOR_MAP_SWIZZLE_128B).  Columns and rows outside the array arrive as zeros and are not
// stored.
#pragma once
#include "hw/ptx_sm90.cuh"
#include "hw/steps.cuh"

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;

__device__ constexpr int panels_of(int columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

template <int kTileRows, int kColumns, int kElementBytes = 2> struct PanelTile {
  static constexpr int kRows = kTileRows;
  static constexpr int kWidth = kPanelRowBytes / kElementBytes;  // columns of a panel
  static constexpr int kPanels = (kColumns + kWidth - 1) / kWidth;
  static constexpr u32 kPanelBytes = kRows * kPanelRowBytes;
  static constexpr u32 kBytes = kPanels * kPanelBytes;
  alignas(1024) unsigned char data[kBytes];

  __device__ __forceinline__ u32 address() const { return shared_address(data); }
  // Of the 16-byte chunk that begins with a column.
  static __device__ __forceinline__ u32 offset(int row, int column) {
    const int panel = column / kWidth, place = column % kWidth / (16 / kElementBytes);
    return panel * kPanelBytes + row * kPanelRowBytes + ((place ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ void* at(int row, int column) { return data + offset(row, column); }
  __device__ __forceinline__ u32 chunk(int row, int column) const { return address() + offset(row, column); }
};

// In columns of 16 bits.
template <int kRows, int kColumns>
__device__ __forceinline__ Pairs<PanelTile<kRows, kColumns, 1>> in_pairs(PanelTile<kRows, kColumns, 1>& tile) {
  return {tile};
}
template <int kRows, int kColumns>
__device__ __forceinline__ PanelTile<kRows, kColumns, 2>& in_pairs(PanelTile<kRows, kColumns, 2>& tile) {
  return tile;
}

// One row, not swizzled.
template <int kColumns> struct RowTile {
  static constexpr u32 kBytes = kColumns * 2;
  alignas(128) u16 data[kColumns];

  __device__ __forceinline__ u32 address() const { return shared_address(data); }
};

// Loads a whole tile, or its first panels, whose bytes were announced on `barrier`; `at` is its corner in the array.  Where a box
// of the map has fewer rows than the tile, from `row` of the tile on.
template <class Tile>
__device__ __forceinline__ void copy_panels(Tile& to, const TensorMap& map, u32 barrier, BoxCorner at,
                                            CachePolicy policy, int panels = Tile::kPanels, int row = 0) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    if (panel >= panels) break;
    const u32 place = to.address() + panel * Tile::kPanelBytes + row * kPanelRowBytes;
    cp_async_bulk_tensor_load(place, &map, barrier, at, policy);
    at.column += Tile::kWidth;
  }
}
// As many rows of a tile as a box of the map has, from `row` on.
template <class Tile>
__device__ __forceinline__ void copy_rows(Tile& to, int row, const TensorMap& map, u32 barrier, BoxCorner at,
                                          CachePolicy policy) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    cp_async_bulk_tensor_load(to.address() + panel * Tile::kPanelBytes + row * kPanelRowBytes, &map, barrier, at,
                              policy);
    at.column += Tile::kWidth;
  }
}
// The same where the tile is all that the barrier waits for.
template <class Tile>
__device__ __forceinline__ void load_panels(Tile& to, const TensorMap& map, u32 barrier, BoxCorner at,
                                            CachePolicy policy) {
  mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
  copy_panels(to, map, barrier, at, policy);
}
// The same of as many rows as a box of the map has, from `row` of the tile on.
template <int kRows, class Tile>
__device__ __forceinline__ void load_rows(Tile& to, int row, const TensorMap& map, u32 barrier, BoxCorner at,
                                          CachePolicy policy) {
  mbarrier_arrive_expect_tx(barrier, Tile::kPanels * kRows * kPanelRowBytes);
  copy_panels(to, map, barrier, at, policy, Tile::kPanels, row);
}
// The same where the array may have no more than `columns` of its columns, 1 at least: panels behind these are left alone.
template <class Tile>
__device__ __forceinline__ void load_inside(Tile& to, const TensorMap& map, u32 barrier, BoxCorner at, int columns,
                                            CachePolicy policy) {
  const int panels = min(Tile::kPanels, (columns + Tile::kWidth - 1) / Tile::kWidth);
  mbarrier_arrive_expect_tx(barrier, panels * Tile::kPanelBytes);
  copy_panels(to, map, barrier, at, policy, panels);
}
template <int kColumns>
__device__ __forceinline__ void load_inside(RowTile<kColumns>& to, const TensorMap& map, u32 barrier, BoxCorner at, int,
                                            CachePolicy policy) {
  mbarrier_arrive_expect_tx(barrier, to.kBytes);
  cp_async_bulk_tensor_load(to.address(), &map, barrier, at, policy);
}
// Stores a whole tile, of the panels those that begin inside the array's `columns`; the caller commits.
template <class Tile>
__device__ __forceinline__ void store_inside(Tile& from, const TensorMap& map, BoxCorner at, int columns) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    if (panel * Tile::kWidth >= columns) break;
    cp_async_bulk_tensor_store(&map, from.address() + panel * Tile::kPanelBytes, at);
    at.column += Tile::kWidth;
  }
}
// Stores as many rows of a tile as a box of the map has, from `row` on, or of its first panels; the caller commits.
template <class Tile>
__device__ __forceinline__ void store_panels(Tile& from, int row, const TensorMap& map, BoxCorner at,
                                             int panels = Tile::kPanels) {
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    if (panel >= panels) break;
    cp_async_bulk_tensor_store(&map, from.address() + panel * Tile::kPanelBytes + row * kPanelRowBytes, at);
    at.column += Tile::kWidth;
  }
}
// Rows of a tile, of `count` from `first` on, that lie outside `valid` become zeros, written by kThreads threads; the caller fences
// and synchronises.
template <int kThreads, class Tile, class Rows>
__device__ __forceinline__ void clear_rows_outside(Tile& tile, Rows valid, int thread, int first = 0,
                                                   int count = Tile::kRows) {
  constexpr int kChunks = int(Tile::kBytes) / 16 / Tile::kRows;
#pragma unroll 1
  for (int index = first * kChunks + thread; index < (first + count) * kChunks; index += kThreads) {
    const int row = index / kChunks;
    if (row >= valid.begin && row < valid.end) continue;
    const int panel = index % kChunks / 8, chunk = index % 8;
    st_shared_v4(tile.address() + panel * Tile::kPanelBytes + row * kPanelRowBytes + chunk * 16, 0, 0, 0, 0);
  }
}

// ---- tiles of steps ---------------------------------------------------------------------------------------------------
// Loads a whole tile from where it lies contiguously; it is all that the barrier waits for.
template <int kDepth, int kColumns>
__device__ __forceinline__ void load_steps(StepTile<kDepth, kColumns>& to, const void* from, u32 barrier) {
  mbarrier_arrive_expect_tx(barrier, to.kBytes);
  cp_async_bulk_load(to.address(), from, to.kBytes, barrier);
}

// ---- channels: a ring of slots in shared memory, filled by some, emptied by others ------------------------------------
template <int kSlotCount> struct Channel {
  static constexpr int kSlots = kSlotCount;
  u64 full[kSlots], empty[kSlots];

  // By one thread, before a barrier of the block; `writers` arrive when a slot is full, `readers` when it may be filled again.
  __device__ __forceinline__ void init(int readers, int writers = 1) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      mbarrier_init(shared_address(&full[slot]), writers);
      mbarrier_init(shared_address(&empty[slot]), readers);
    }
  }
};

// One arrival for a whole warp, when all of its lanes are done.  A checker of races that does not follow __syncwarp wants every
// lane to arrive (scripts/sanitize.py); `arrivals_of` tells what a channel then counts.
constexpr u32 kArrivingLanes = 1;
__device__ constexpr int arrivals_of(int warps) { return warps * int(kArrivingLanes); }
__device__ __forceinline__ void arrive_by_warp(u32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kArrivingLanes) mbarrier_arrive(barrier);
}
template <class Slots> __device__ __forceinline__ void release_by_warp(Slots& channel, int slot) {
  arrive_by_warp(shared_address(&channel.empty[slot]));
}

// One side's place in a channel.  A slot is filled for the first time without waiting.
template <int kSlots> struct Cursor {
  int slot = 0;
  u32 phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  // The place before this one; before the first, one whose wait for a full slot passes at once.
  __device__ __forceinline__ Cursor previous() const {
    return {slot ? slot - 1 : kSlots - 1, slot ? phase : phase ^ 1};
  }
  __device__ __forceinline__ u32 full(Channel<kSlots>& channel) const { return shared_address(&channel.full[slot]); }
  __device__ __forceinline__ void wait_full(Channel<kSlots>& channel) const { mbarrier_wait(full(channel), phase); }
  __device__ __forceinline__ void wait_empty(Channel<kSlots>& channel) const {
    mbarrier_wait(shared_address(&channel.empty[slot]), phase ^ 1);
  }
  __device__ __forceinline__ void release(Channel<kSlots>& channel) const {
    mbarrier_arrive(shared_address(&channel.empty[slot]));
  }
};
