// Turns: blocks that add to one place of global memory do so in a fixed order, which gives a sum the same bits every time.
//
// A counter says whose turn it is.  One thread of a block waits for the block's number, a barrier lets the others follow; all
// add; another barrier, and one thread passes the turn on.  One thread suffices on either side: release and acquire are
// cumulative, so additions that other threads made before a barrier are seen by threads behind the next block's barrier (PTX
// ISA, "Memory Consistency Model", causality order).
//
// Within a turn additions stay `red`: each place belongs to one thread, so their order is that of the turns, and no thread
// waits for a load of the old sum or keeps it in registers.
//
// No wait lasts for ever if a block waits only for blocks that started before it.  CUDA promises no order in which blocks
// start, so blocks that take turns number themselves as they start.
#pragma once

// How many blocks have started before this one.  All threads of the block call it; `word` is any word of its shared memory.
__device__ __forceinline__ u32 start_number(u32* started, void* word) {
  if (threadIdx.x == 0) *static_cast<u32*>(word) = atomicAdd(started, 1u);
  __syncthreads();
  const u32 number = *static_cast<u32*>(word);
  __syncthreads();  // the word is free again
  return number;
}

__device__ __forceinline__ void wait_for_turn(const u32* counter, u32 turn) {
  u32 now;
  while (true) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    if (now == turn) break;
    __nanosleep(32);
  }
}
__device__ __forceinline__ void pass_turn(u32* counter, u32 next) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(next) : "memory");
}

// Everything that `add` adds, by threads that `meet` at a barrier and of which one leads, when the counter has come to `turn`.
template <class Meet, class Add>
__device__ __forceinline__ void in_turn(u32* counter, u32 turn, bool leads, Meet meet, Add add) {
  if (leads) wait_for_turn(counter, turn);
  meet();  // it is this block's turn
  add();
  meet();  // all have added
  if (leads) pass_turn(counter, turn + 1);
}
// The same by all threads of a block.
template <class Add> __device__ __forceinline__ void in_turn(u32* counter, u32 turn, Add add) {
  in_turn(counter, turn, threadIdx.x == 0, [] { __syncthreads(); }, add);
}
