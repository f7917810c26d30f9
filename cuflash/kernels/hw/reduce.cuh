// Sums over neighbouring lanes, 16-byte pieces of a row, and sums in global memory that many blocks add to.
#pragma once
#include "hw/ptx.cuh"

template <class Element> struct alignas(16) Chunk { Element at[16 / sizeof(Element)]; };

// Two neighbours in shared memory, the first at an even place, by one load.
template <class Item> struct alignas(2 * sizeof(Item)) Pair { Item first, second; };
template <class Item> __device__ __forceinline__ Pair<Item> load_pair(const Item* from) {
  static_assert(sizeof(Pair<Item>) <= 16, "one load");
  return *reinterpret_cast<const Pair<Item>*>(from);
}

// Over groups of kLanes lanes (a power of two); all 32 lanes take part.
template <int kLanes, class Real> __device__ __forceinline__ Real sum_over_lanes(Real x) {
#pragma unroll
  for (int bit = kLanes / 2; bit > 0; bit /= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
  return x;
}

// A tile of float32 sums in the order of the threads' registers: thread t's m16n8 block b is four numbers, laid out so that
// a warp's reductions fill whole 128-byte lines.
template <int kThreads, int kBlocks> struct SumTile {
  static constexpr int kSize = kThreads * kBlocks * 4;
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ int offset(int block, int thread, int r) {
    return (block * kThreads + thread) * 4 + r;
  }
  // The warp whose are the four numbers from a multiple of four on.
  static __device__ __forceinline__ int warp_of(int offset) { return offset / 4 % kThreads / 32; }
#else
  static __device__ __forceinline__ int offset(int block, int thread, int r) {
    return (block * 4 + r) * kThreads + thread;
  }
  static __device__ __forceinline__ int warp_of(int offset) { return offset % kThreads / 32; }
#endif
#if __CUDA_ARCH__ >= 900
  // A thread's part of a tile in shared memory.
  static __device__ __forceinline__ void store(float* tile, const float (&x)[kBlocks * 4], int thread) {
#  pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      *reinterpret_cast<float4*>(tile + offset(block, thread, 0)) =
          make_float4(x[4 * block], x[4 * block + 1], x[4 * block + 2], x[4 * block + 3]);
  }
#endif
  // Of all blocks, or the first.
  template <int kCount>
  static __device__ __forceinline__ void add(float* tile, const float (&x)[kCount], int thread = threadIdx.x) {
#if __CUDA_ARCH__ >= 900
    float* to = recomputed(tile + offset(0, thread, 0));  // one address in registers; what is added to it are constants
#endif
#pragma unroll
    for (int block = 0; block < kCount / 4; ++block) {
#if __CUDA_ARCH__ >= 900
      red_add_v4(to + offset(block, 0, 0), x[4 * block], x[4 * block + 1], x[4 * block + 2], x[4 * block + 3]);
#else
#  pragma unroll
      for (int r = 0; r < 4; ++r) atomicAdd(tile + offset(block, thread, r), x[4 * block + r]);
#endif
    }
  }
};

// Two neighbours in global memory, the first at an even place.
__device__ __forceinline__ void add_pair(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
  red_add_v2(to, x, y);
#else
  atomicAdd(to, x);
  atomicAdd(to + 1, y);
#endif
}
