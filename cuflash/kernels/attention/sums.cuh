// What gradients of a bias, and of arrays that expressions read, are summed in: numbers, or fixed point (hw/fixed.cuh) where many
// blocks add to one element and the order in which they come must not show (kSumDigits, generated; 0 for numbers).
//
// The unit follows from a bound of what is added: |dS| = P |dP - delta|, where P is at most 1, dP = dO·v and delta = dO·o - dlse,
// from the largest numbers of these arrays (backward_bounds.cu).  Expressions multiply dS by derivatives that nobody bounds, and
// have 2^kSumSpan more room for them.  Elements that belong to one batch entry depend on nothing but that entry.
//
// The generated part includes hw/fixed.cuh before it.
#pragma once
#include "hw/element.cuh"

// Exponents of the largest numbers of a batch entry; behind the last one, of all together.
struct Bounds { u32 dout, v, out, dlse; };
// Of a row that sees no key.
__device__ __forceinline__ Real lse_of_nothing() { return -infinity<Real>(); }
// Whether a row adds nothing to any gradient, whatever its dout is.
__device__ __forceinline__ bool sees_nothing(Real lse) { return lse == lse_of_nothing(); }

// Which axes of the scores an element of a gradient is a sum over.
struct SummedAxes {
  bool batch, heads, queries, keys;

  __device__ __forceinline__ bool none() const { return !(batch | heads | queries | keys); }

  // Elements of tables may be read at any position.
  template <class P> __device__ __forceinline__ SummedAxes(const P& p, const View& view, bool is_table) {
    batch = false;
#pragma unroll
    for (int axis = 0; axis < kBatchAxes; ++axis) batch |= p.batch_sizes[axis] > 1 && view.batch[axis] == 0;
    heads = is_table || view.head == 0;
    queries = is_table || view.row == 0;
    keys = is_table || view.column == 0;
  }
};

template <int kDigits> struct GradientSums {
  typedef FixedSum<Real, kDigits> Sum;
  typedef FixedUnit Unit;

  // Of the gradient's elements that a place adds to; sums over more than one entry have one unit for all.
  template <class P>
  static __device__ __forceinline__ Unit unit(const P& p, const Place& place, const View& view, bool is_table) {
    const SummedAxes axes(p, view, is_table);
    const Bounds& largest = static_cast<const Bounds*>(p.bounds)[axes.batch ? p.batch_size : place.entry(p)];
    const int dout = power_above<Real>(largest.dout) + log_above(p.head_dim_v);
    const int dp = dout + power_above<Real>(largest.v);
    const int delta = max(dout + power_above<Real>(largest.out), power_above<Real>(largest.dlse)) + 1;
    const int bound = min(max(dp, delta) + 1, kLargestPower<Real> + 1);
    const int terms = (axes.batch ? log_above(p.batch_size) : 0) + (axes.heads ? log_above(p.heads_q) : 0) +
                      (axes.queries ? log_above(p.seq_q) : 0) + (axes.keys ? log_above(p.seq_k) : 0);
    const int limit = min(Sum::kRoom - terms, kLargestPower<Real>);
    return {min(limit - kSumSpan - bound, kLargestPower<Real> - 1), limit};
  }
  static __device__ __forceinline__ void add(Sum* sum, Real x, Unit unit) { sum->add(x, unit); }
  static __device__ __forceinline__ void set(Sum* sum, Real x, Unit unit) { add(sum, x, unit); }
};
template <> struct GradientSums<0> {
  typedef Real Sum;
  struct Unit {};

  template <class P> static __device__ __forceinline__ Unit unit(const P&, const Place&, const View&, bool) {
    return {};
  }
  static __device__ __forceinline__ void add(Sum* sum, Real x, Unit) { atomicAdd(sum, x); }
  // The only term of a sum.
  static __device__ __forceinline__ void set(Sum* sum, Real x, Unit) { *sum = x; }
};
// Elements of single terms (kStoresGradients, generated), in the type of the result.
template <class T> struct GradientElements : GradientSums<0> {
  typedef T Sum;

  static __device__ __forceinline__ void set(Sum* to, Real x, Unit) { *to = Rounded<T>::of(x); }
  static __device__ __forceinline__ void add(Sum* to, Real x, Unit unit) { set(to, x, unit); }
};
template <bool kStores, class T> struct GradientsOf { typedef GradientSums<kSumDigits> Sums; };
template <class T> struct GradientsOf<true, T> { typedef GradientElements<T> Sums; };
typedef GradientsOf<kStoresGradients, OutElement>::Sums OperandSums;
typedef OperandSums::Sum OperandSum;
typedef OperandSums::Unit SumUnit;
