// A warp looks ahead along a sequence for members that a test holds for: each lane at one of them, 32 at a time, so that the
// loads of 32 tests take no longer than those of one.
#pragma once

// What was found of 32 members, with kMarks more bits of each.
template <int kMarks> struct Lookout {
  static constexpr int kWords = kMarks > 0 ? kMarks : 1;
  int first = -32;  // lane i has looked at member first + i
  u32 found = 0, marked[kWords];

  // The first member from `index` on for which `look(member, marks)` is true, `end` if there is none before it.  All lanes call
  // it alike; indices of one sequence ascend from call to call.
  template <class Look> __device__ __forceinline__ int next(int index, int end, Look look) {
    while (index < end) {
      if (index >= first + 32) {
        const int own = index + int(threadIdx.x) % 32;
        bool marks[kWords] = {};
        found = __ballot_sync(0xffffffffu, own < end && look(own, marks));
#pragma unroll
        for (int mark = 0; mark < kMarks; ++mark) marked[mark] = __ballot_sync(0xffffffffu, marks[mark]);
        first = index;
      }
      const u32 rest = found >> (index - first);
      if (rest) return index + __ffs(int(rest)) - 1;
      index = first + 32;
    }
    return end;
  }
  // Bits of a member that has been looked at last.
  __device__ __forceinline__ u32 marks(int index) const {
    u32 bits = 0;
#pragma unroll
    for (int mark = 0; mark < kMarks; ++mark) bits |= (marked[mark] >> (index - first) & 1) << mark;
    return bits;
  }
};
