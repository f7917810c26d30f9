// Results over parts of the keys become the result over all of them, exactly.
//
// A part is, for each row, the base m of its probabilities, their sum l and its output, both relative to 2^m.  The union has
// the largest m; sums and outputs of each part count 2^(m - that) times.  Source: FlashAttention-2 (arXiv:2307.08691),
// section 2.3, with whole parts in place of blocks.
#pragma once
#include "attention/softmax.cuh"

struct alignas(2 * sizeof(Real)) RowTotal {
  Real m, l;

  // A row that saw nothing has the output 0 and lse = -inf.
  __device__ __forceinline__ Real inverse() const { return l == Real(0) ? Real(0) : Real(1) / l; }
  __device__ __forceinline__ Real lse(const Params& p) const {
    return l == Real(0) ? -infinity<Real>() : fma_of(m, p.softmax_scale * Real(0.6931471805599453), log_of(l));
  }
};
// A row whose parts are all there, and its sink, if it has one, with them.
template <bool kSunk> struct RowEnd {
  const RowTotal& total;

  __device__ __forceinline__ RowEnd(const RowTotal& of, const Params&, const Place&, int) : total(of) {}
  __device__ __forceinline__ Real inverse() const { return total.inverse(); }
  __device__ __forceinline__ Real lse(const Params& p) const { return total.lse(p); }
};
template <> struct RowEnd<true> {
  Joined row;

  __device__ __forceinline__ RowEnd(const RowTotal& total, const Params& p, Place place, int head) {
    place.head = head;
    row = joined(total.m, total.l, sink_of(p, place), p);
  }
  __device__ __forceinline__ Real inverse() const { return row.sum == Real(0) ? Real(0) : row.weight / row.sum; }
  __device__ __forceinline__ Real lse(const Params&) const {
    return row.sum == Real(0) ? -infinity<Real>() : fma_of(row.base, Real(0.6931471805599453), log_of(row.sum));
  }
};
__device__ __forceinline__ RowTotal no_keys() { return {-infinity<Real>(), Real(0)}; }

// What a part counts in a union of that base.
__device__ __forceinline__ Real weight_in(Real base, Real m, const Params& p) {
  return m == -infinity<Real>() ? Real(0) : exp2_of((m - base) * p.softmax_scale);
}

// Of kParts parts; `part(i)` is a RowTotal.
template <int kParts, class Part> __device__ __forceinline__ RowTotal total_of(const Params& p, Part part) {
  RowTotal all = no_keys();
#pragma unroll
  for (int i = 0; i < kParts; ++i) all.m = max_of(all.m, part(i).m);
#pragma unroll
  for (int i = 0; i < kParts; ++i) all.l += part(i).l * weight_in(all.m, part(i).m, p);
  return all;
}

// A row in a thread, kWidth columns of it, to which kParts parts at a time are added.
template <int kWidth> struct RowUnion {
  RowTotal all = no_keys();
  Real o[kWidth] = {};

  template <int kParts>
  __device__ __forceinline__ void add(const RowTotal (&part)[kParts], const Real (&x)[kParts][kWidth],
                                      const Params& p) {
    Real base = all.m;
#pragma unroll
    for (int i = 0; i < kParts; ++i) base = max_of(base, part[i].m);
    const Real before = weight_in(base, all.m, p);
    all = {base, all.l * before};
#pragma unroll
    for (int c = 0; c < kWidth; ++c) o[c] *= before;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const Real weight = weight_in(base, part[i].m, p);
      all.l += weight * part[i].l;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) o[c] += weight * x[i][c];
    }
  }
};
