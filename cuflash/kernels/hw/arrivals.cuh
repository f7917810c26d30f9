// Arrivals: blocks that work on one thing count themselves in, and the last one finishes it; nobody waits.
//
// A block writes, meets at a barrier, and one thread counts it in.  The count is a release and an acquire, and both are
// cumulative: what all threads of earlier blocks wrote is seen by all threads of the last one behind its next barrier (PTX
// ISA, "Memory Consistency Model", causality order).
#pragma once
#include "hw/reduce.cuh"

// How many have arrived before this one.
__device__ __forceinline__ u32 arrive(u32* counter) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(1u) : "memory");
  return before;
}
// How many have arrived so far; what they wrote may be read.
__device__ __forceinline__ u32 arrived(const u32* counter) {
  u32 now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// A word that says all there is to say: who sees it needs to see nothing else.
__device__ __forceinline__ void post(u64* at, u64 word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}
__device__ __forceinline__ u64 posted(const u64* at) {
  u64 word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}

// What other blocks wrote, 8 or 16 bytes of it, past the first-level cache.
template <int kBytes> struct Words;
template <> struct Words<8> { typedef uint2 Type; };
template <> struct Words<16> { typedef uint4 Type; };
template <class Item> __device__ __forceinline__ Item load_written(const Item* from) {
  typedef typename Words<sizeof(Item)>::Type Type;
  const Type words = __ldcg(reinterpret_cast<const Type*>(from));
  return *reinterpret_cast<const Item*>(&words);
}
