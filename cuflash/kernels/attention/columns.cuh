// Column sums of P: the attention that each key receives, summed over the queries of a head.
//
// P comes back as exp(s - lse), as in a backward.  Source: FlashAttention-2 (arXiv:2307.08691), section 3.1.2.
#pragma once
#include "attention/score.cuh"
#include "attention/softmax.cuh"

// `Fragment` is a transposed one: its rows are keys, so that a column of P is a row of it.
template <class Fragment> struct ColumnSums {
  static_assert(Fragment::kTransposed, "a row per key");
  Real sum[Fragment::kSlots];  // of this thread's queries only, until `finish`

  __device__ __forceinline__ ColumnSums() { clear(sum); }

  // A tile of scores; `shift` is where those of its first query lie.  A tile's sum stands alone before it joins the others:
  // chains of roundings are as long as a tile, not as all queries.
  __device__ __forceinline__ void add(const Real (&s)[Fragment::kSize], const Real* shift, const Fragment& f,
                                      const Params& p) {
    Real part[Fragment::kSlots];
    clear(part);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) part[Fragment::slot(i)] += seen_probability(s[i], shift[f.column(i)], p);
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) sum[slot] += part[slot];
  }

  // After the last tile.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) sum[slot] = Fragment::row_sum(sum[slot]);
  }
};

// What `add` subtracts from the scores of each query from `first` on, by all threads of a block: its lse in powers of two.
template <int kThreads, int kBlockQ>
__device__ __forceinline__ void load_shifts(Real (&to)[kBlockQ], const Params& p, const Place& place, int first) {
  const Real* lse = static_cast<const Real*>(p.lse.data) + place.offset(p.lse);
  for (int i = int(threadIdx.x); i < kBlockQ; i += kThreads) {
    const int q = first + i;
    to[i] = (q < p.seq_q ? row_statistics(lse[q * p.lse.row], Real(0)) : no_row_statistics()).shift;
  }
}
