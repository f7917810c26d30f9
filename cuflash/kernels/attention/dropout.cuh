// Weights that become 0 behind the softmax, by random numbers that are a function of positions (modifiers/dropout.py).
//
// The forward drops from P before it meets V; what is left is multiplied by 1 / (1 - p) at the end, with the division by l.
// The backward needs P itself and P dropped, and dP dropped: it marks what is dropped by the sign of P, which has none.
//
// A call of the generator gives the numbers of queries i and i + 8 and keys j, j + 1, j + 8 and j + 9 of a block of 16 x 16.
#pragma once
#include "attention/philox.cuh"
#include "attention/score.cuh"
#include "attention/softmax.cuh"
#include "hw/fragment.cuh"

// Of one head; nothing where nothing is dropped.
struct DropKey { u32 low, high; };
__device__ __forceinline__ DropKey drop_key(const Params& p, const Place& place) {
  if (!kDrops) return {0, 0};
  const u64 seed = Dropout::seed(p), offset = Dropout::offset(p);
  const Words counter = {{u32(offset), u32(offset >> 32), u32(place.entry(p)), u32(place.head)}};
  const Words words = philox(counter, u32(seed), u32(seed >> 32));
  return {words.at[0], words.at[1]};
}
// Where a query and a key are counted: those that share a call have both alike.
__device__ __forceinline__ u32 query_draw(int q) { return u32(q / 16 * 8 + q % 8); }
__device__ __forceinline__ u32 key_draw(int k) { return u32(k / 16 * 4 + k % 8 / 2); }
__device__ __forceinline__ Words drawn(const DropKey& key, u32 query, u32 of_keys) {
  return philox({{of_keys, query, 0, 0}}, key.low, key.high);
}
__device__ __forceinline__ u32 half_of(u32 word, int half) { return half ? word >> 16 : word & 0xffffu; }

// `use(i, is_dropped)` for every element of a tile, wherever it lies.
template <bool kInBlocks, class Fragment> struct Drops {
  template <class Use>
  static __device__ __forceinline__ void each(const Fragment& f, const DropKey& key, u32 threshold, Corner corner,
                                              Use use) {
    typedef Positions<Fragment> At;
#pragma unroll
    for (int first = 0; first < Fragment::kSize; first += 32) {
      u32 dropped = 0;
#pragma unroll 1
      for (int i = first; i < min(first + 32, Fragment::kSize); ++i) {
        const int q = At::q(f, corner, i), k = At::k(f, corner, i);
        const Words words = drawn(key, query_draw(q), key_draw(k));
        const u32 upper = k / 8 % 2 ? words.at[1] : words.at[0], lower = k / 8 % 2 ? words.at[3] : words.at[2];
        dropped |= u32(half_of(q / 8 % 2 ? lower : upper, k % 2) < threshold) << (i - first);
      }
#pragma unroll
      for (int i = first; i < min(first + 32, Fragment::kSize); ++i) use(i, (dropped >> (i - first) & 1u) != 0);
    }
  }
};
// Accumulators of tensor cores in tiles that begin at multiples of 16 positions: a thread holds what a call gives.
template <int kRowBlocks, int kColumnBlocks> struct Drops<true, MmaFragment<kRowBlocks, kColumnBlocks, false>> {
  typedef MmaFragment<kRowBlocks, kColumnBlocks, false> Fragment;
  static_assert(kColumnBlocks % 2 == 0, "whole blocks");
  template <class Use>
  static __device__ __forceinline__ void each(const Fragment& f, const DropKey& key, u32 threshold, Corner corner,
                                              Use use) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < kColumnBlocks; c += 2) {
        const Words words =
            drawn(key, query_draw(corner.q + f.first_row + 16 * r), key_draw(corner.k + f.first_column + 8 * c));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int right = i / 4, lower = i / 2 % 2;
          use(Fragment::block(r, c) + i, half_of(words.at[2 * lower + right], i % 2) < threshold);
        }
      }
    }
  }
};
// Transposed, threads of neighbouring rows need halves of the same two calls: each makes one and they exchange.
template <int kRowBlocks, int kColumnBlocks> struct Drops<true, MmaFragment<kRowBlocks, kColumnBlocks, true>> {
  typedef MmaFragment<kRowBlocks, kColumnBlocks, true> Fragment;
  static_assert(kColumnBlocks % 2 == 0, "whole blocks");
  template <class Use>
  static __device__ __forceinline__ void each(const Fragment& f, const DropKey& key, u32 threshold, Corner corner,
                                              Use use) {
    const bool is_odd = f.first_row % 2 != 0;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < kColumnBlocks; c += 2) {
        const Words words = drawn(key, query_draw(corner.q + f.first_column + 8 * c) + is_odd,
                                  key_draw(corner.k + f.first_row + 16 * r));
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const u32 upper = words.at[2 * right], lower = words.at[2 * right + 1];  // keys
          const u32 even = (upper & 0xffffu) | lower << 16, odd = upper >> 16 | (lower & 0xffff0000u);
          const u32 own = is_odd ? odd : even, other = Fragment::of_neighbour_row(is_odd ? even : odd);
          const u32 queries[2] = {is_odd ? other : own, is_odd ? own : other};
#pragma unroll
          for (int i = 0; i < 4; ++i)
            use(Fragment::block(r, c + right) + i, half_of(queries[i % 2], i / 2) < threshold);
        }
      }
    }
  }
};

// What weights that stay are multiplied with.
__device__ __forceinline__ Real drop_scale(const Params& p) { return kDrops ? Dropout::scale(p) : Real(1); }

// Forward, in place: P -> what of it is left, not yet scaled.
template <bool kInBlocks, class Fragment>
__device__ __forceinline__ void drop(Real (&s)[Fragment::kSize], const Fragment& f, const DropKey& key, const Params& p,
                                     Corner corner) {
  if constexpr (kDrops)
    Drops<kInBlocks, Fragment>::each(f, key, Dropout::threshold(p), corner, [&](int i, bool is_dropped) {
      if (is_dropped) s[i] = Real(0);
    });
}

// Backward, in place: P -> P, below 0 where it is dropped.
template <bool kInBlocks, class Fragment>
__device__ __forceinline__ void mark_dropped(Real (&s)[Fragment::kSize], const Fragment& f, const DropKey& key,
                                             const Params& p, Corner corner) {
  if constexpr (kDrops)
    Drops<kInBlocks, Fragment>::each(f, key, Dropout::threshold(p), corner, [&](int i, bool is_dropped) {
      if (is_dropped) s[i] = -s[i];
    });
}
// `use` of what is left of marked ones.
template <int kSize, class Use> __device__ __forceinline__ void with_kept(const Real (&s)[kSize], Use use) {
  if constexpr (kDrops) {
    Real kept[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) kept[i] = s[i] < Real(0) ? Real(0) : s[i];
    use(kept);
  } else {
    use(s);
  }
}
// Gradient of the score that enters the softmax, from a marked one and from dP before dropout.
__device__ __forceinline__ Real marked_gradient(Real marked, Real dp, Real delta, const Params& p) {
  if constexpr (kDrops) return score_gradient(fabs(marked), marked < Real(0) ? Real(0) : dp * drop_scale(p), delta);
  return score_gradient(marked, dp, delta);
}
