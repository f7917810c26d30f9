// Random words: Philox4x32-10, a function of a counter and a key.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11), section 4.3.
#pragma once

struct Words { u32 at[4]; };

__device__ __forceinline__ Words philox(Words x, u32 low, u32 high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = u64(0xd2511f53u) * x.at[0], second = u64(0xcd9e8d57u) * x.at[2];
    x = {{u32(second >> 32) ^ x.at[1] ^ low, u32(second), u32(first >> 32) ^ x.at[3] ^ high, u32(first)}};
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  }
  return x;
}
