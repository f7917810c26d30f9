// What a finished tile writes: the normalised output, lse and other statistics, and gradients, each element exactly once.
#pragma once
#include "attention/score.cuh"
#include "attention/softmax.cuh"
#include "attention/sums.cuh"

// Rows of an accumulator times a factor per row, rounded, into global memory.  Fragment elements 2j and 2j + 1 are
// neighbours in a row; `pairs` tells that two such elements may be written by one aligned store.
template <class Fragment, class T, class Factor>
__device__ __forceinline__ void store_rows(const Real (&x)[Fragment::kSize], const Fragment& f, Matrix<T> to,
                                           Range rows, Range columns, bool pairs, Factor factor) {
#pragma unroll
  for (int i = 0; i < Fragment::kSize; i += 2) {
    const int r = rows.begin + f.row(Fragment::slot(i)), c = columns.begin + f.column(i);
    if (r >= rows.end) continue;
    const Real scale = factor(Fragment::slot(i));
    if (pairs && c + 1 < columns.end) {
      store_pair(to.at(r, c), x[i] * scale, x[i + 1] * scale);
    } else {
      if (c < columns.end) *to.at(r, c) = Rounded<T>::of(x[i] * scale);
      if (c + 1 < columns.end) *to.at(r, c + 1) = Rounded<T>::of(x[i + 1] * scale);
    }
  }
}

// A number per row; `to` may be no array.
template <class Fragment, class Value>
__device__ __forceinline__ void store_row_values(const View& to, const Fragment& f, const Place& place, Range rows,
                                                 Value value) {
  if (!to.data || !f.leads_row()) return;
  Real* values = static_cast<Real*>(to.data) + place.offset(to);
#pragma unroll
  for (int slot = 0; slot < Fragment::kSlots; ++slot) {
    const int r = rows.begin + f.row(slot);
    if (u32(r) < u32(rows.end)) values[r * to.row] = value(slot);  // none before the first, either
  }
}
template <class Softmax, class Fragment, class P>
__device__ __forceinline__ void store_lse(const Softmax& softmax, const Fragment& f, const Params& p,
                                          const Place& place, Range rows, const P& units) {
  store_row_values(p.lse, f, place, rows, [&](int slot) { return softmax.lse(slot, units); });
}
template <class Softmax, class Fragment>
__device__ __forceinline__ void store_lse(const Softmax& softmax, const Fragment& f, const Params& p,
                                          const Place& place, Range rows) {
  store_lse(softmax, f, p, place, rows, p);
}
// Largest score and entropy, as far as they are asked for; the record has their views only then.
template <bool kMaximum, bool kEntropy, class Softmax, class Fragment, class Record>
__device__ __forceinline__ void store_statistics(const Softmax& softmax, const Fragment& f, const Record& p,
                                                 const Place& place, Range rows) {
  if constexpr (kMaximum)
    store_row_values(p.maximum, f, place, rows, [&](int slot) { return softmax.maximum(slot, p); });
  if constexpr (kEntropy) store_row_values(p.entropy, f, place, rows, [&](int slot) { return softmax.entropy(slot); });
}

// Sums of a fragment over the thread's elements of one row, and of one column.
template <class Fragment> __device__ __forceinline__ Real thread_row_sum(const Real (&x)[Fragment::kSize], int slot) {
  Real sum = 0;
#pragma unroll
  for (int i = 0; i < Fragment::kSize; ++i)
    if (Fragment::slot(i) == slot) sum += x[i];
  return sum;
}
template <class Fragment>
__device__ __forceinline__ Real thread_column_sum(const Real (&x)[Fragment::kSize], int first) {
  Real sum = 0;
#pragma unroll
  for (int i = 0; i < Fragment::kSize; ++i)
    if (Fragment::column_index(i) == Fragment::column_index(first)) sum += x[i];
  return sum;
}

// Gradient of an additive operand, whose axes of stride 0 are sums: a warp adds up its part of a tile along them before it adds
// to memory.  Elements that do not exist have gradients of 0.
template <class Fragment>
__device__ __forceinline__ void add_operand_gradient(const Real (&ds)[Fragment::kSize], const Fragment& f,
                                                     const View& view, const Params& p, const Place& place,
                                                     Corner corner) {
  typedef Positions<Fragment> At;
  static_assert(i64(32 * Fragment::kSize) < i64(1) << kSumSpan, "what a warp adds up is more than a unit has room for");
  if (!view.data) return;
  const i64 offset = place.offset(view);
  const SumUnit unit = OperandSums::unit(p, place, view, false);
  // Each element is one term, which needs no addition; many modifiers leave no registers to tell.
  const bool is_whole = kStoresGradients || (Score::kAddsArray && SummedAxes(p, view, false).none());
  const auto add = [&](int i, Real sum) {  // to where element i belongs
    const int q = At::q(f, corner, i), k = At::k(f, corner, i);
    OperandSum* to = element_at<OperandSum>(view, offset, q, k);
    if (!((q < place.seq_q(p)) & (k < place.key_count) & (sum != Real(0)))) return;
    if (is_whole)
      OperandSums::set(to, sum, unit);
    else
      OperandSums::add(to, sum, unit);
  };
  const bool sums_rows = !kStoresGradients && (Fragment::kTransposed ? view.column : view.row) == 0;
  const bool sums_columns = !kStoresGradients && (Fragment::kTransposed ? view.row : view.column) == 0;
  if (sums_rows) {
    Real total = 0;
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      if (Fragment::slot(i) != 0) continue;  // one for each of the thread's columns
      const Real sum = Fragment::column_sum(thread_column_sum<Fragment>(ds, i));
      if (sums_columns)
        total += sum;
      else if (Fragment::leads_lanes_of_column())
        add(i, sum);
    }
    if (sums_columns) {
      total = Fragment::row_sum(total);
      if (Fragment::leads_lanes_of_row() && Fragment::leads_lanes_of_column() && total != Real(0))
        OperandSums::add(element_at<OperandSum>(view, offset, 0, 0), total, unit);
    }
  } else if (sums_columns) {
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      if (Fragment::column_index(i) != 0) continue;  // one for each of the thread's rows
      const Real sum = Fragment::row_sum(thread_row_sum<Fragment>(ds, Fragment::slot(i)));
      if (Fragment::leads_lanes_of_row()) add(i, sum);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      if (i % 2 == 0) corner = {recomputed(corner.q), recomputed(corner.k)};  // as in scores_of
      add(i, ds[i]);
    }
  }
}

// The same of an operand that has one row for all queries, from what each thread has summed of its keys by itself over the walk
// over a head's queries.
template <class Fragment>
__device__ __forceinline__ void add_key_gradients(const Real (&sums)[Fragment::kSlots], const Fragment& f,
                                                  const View& view, const Params& p, const Place& place, int first) {
  static_assert(Fragment::kTransposed, "a key for each row");
  if (!view.data) return;
#pragma unroll
  for (int slot = 0; slot < Fragment::kSlots; ++slot) {
    const Real sum = Fragment::row_sum(sums[slot]);
    const int k = first + f.row(slot);
    if (Fragment::leads_lanes_of_row() && k < place.key_count && sum != Real(0))
      OperandSums::add(element_at<OperandSum>(view, place.offset(view), 0, k), sum, {});
  }
}

// Whether the backward adds to gradients of anything that scores are made of.
constexpr bool kAddsGradients = kHasOperandGradients || Score::kAddsGradients;

// `Score`, looked into only where it has gradients.
template <class> struct WithGradients : Score {};

// Gradients of what the expressions of users read.
template <class Fragment>
__device__ __forceinline__ void add_score_gradients(const Real (&ds)[Fragment::kSize],
                                                    const ScoreSlopes<Fragment>& slopes, const Fragment& f,
                                                    const Params& p, const Place& place, Corner corner) {
  if constexpr (Score::kAddsGradients) {
    typedef Positions<Fragment> At;
    typename WithGradients<Fragment>::Gradients gradients;
    gradients.begin(p, place);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      const int q = At::q(f, corner, i), k = At::k(f, corner, i);
      if (q < place.seq_q(p) && k < place.key_count && ds[i] != Real(0))
        gradients.add(p, place, q, k, slopes.score(i), ds[i]);
    }
    gradients.finish(p, place);
  }
}
