// Second derivatives: what a direction in which the inputs move makes of the gradients.
//
// With A = P·(dP - delta), the gradient of the score that enters the softmax: P' = P·(s' - L') and
// A' = P'·(dP - delta) + P·(dP' - delta').  Back through the modifiers both are multiplied by their slope, and A' grows by A
// times their curvature times the tangent of the score that enters them.
#pragma once
#include "attention/tangent.cuh"

// Of a query: lse in the units of the exponent and its tangent in natural ones, delta = dout·out - dlse and its tangent.
struct alignas(16) MovingRowStatistics { Real shift, moved, delta, delta_moved; };

__device__ __forceinline__ MovingRowStatistics moving_row_statistics(Real lse, Real moved, Real delta,
                                                                     Real delta_moved) {
  const RowStatistics row = row_statistics(lse, delta);
  const bool empty = lse == -infinity<Real>();
  return {row.shift, empty ? Real(0) : moved, row.delta, empty ? Real(0) : delta_moved};
}

// Those of the queries from `first` on, by all threads of a block; `line` is that of query 0.
template <int kThreads, int kBlockQ>
__device__ __forceinline__ void load_statistics(MovingRowStatistics (&to)[kBlockQ], const Params& p, i64 line,
                                                int first) {
  const MovingRowStatistics* from = static_cast<const MovingRowStatistics*>(p.statistics) + line;
  for (int i = int(threadIdx.x); i < kBlockQ; i += kThreads)
    to[i] = first + i < p.seq_q ? from[first + i] : moving_row_statistics(-infinity<Real>(), Real(0), Real(0), Real(0));
}

// Tangent of the gradient of a sink's logit, in powers of two, by one row; `moved` is that of the logit.
__device__ __forceinline__ Real sink_gradient_tangent(Real sink, Real moved, const MovingRowStatistics& row) {
  const Real weight = exp2_of(min_or_nan(sink - row.shift, Real(0)));
  return weight == Real(0) ? Real(0) : -weight * ((moved - row.moved) * row.delta + row.delta_moved);
}

// Number of an element's query in its tile.
template <class Fragment> __device__ __forceinline__ int query_in_tile(const Fragment& f, int i) {
  return Fragment::kTransposed ? f.column(i) : f.row(Fragment::slot(i));
}

// In place: products and their tangents -> P, below 0 where it is dropped, and P'.
template <class Fragment, int kBlockQ>
__device__ __forceinline__ void moving_weights(Real (&s)[Fragment::kSize], Real (&ds)[Fragment::kSize],
                                               ScoreSlopes<Fragment>& slopes, const Fragment& f,
                                               const MovingRowStatistics (&rows)[kBlockQ], const DropKey& key,
                                               const Params& p, const Place& place, Corner corner, bool open) {
  scores_of<true>(s, slopes, f, p, place, corner, open);
  if constexpr (Score::kHasCurvature) {
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i)
      slopes.bend[i] = s[i] == -infinity<Real>() ? Real(0) : slopes.bend[i] * (ds[i] * p.scale);
  }
  score_tangents(ds, s, slopes, f, p, place, corner);
#pragma unroll
  for (int i = 0; i < Fragment::kSize; ++i) {
    const MovingRowStatistics& row = rows[query_in_tile(f, i)];
    s[i] = seen_probability(s[i], row.shift, p);
    ds[i] = s[i] == Real(0) ? Real(0) : s[i] * (ds[i] - row.moved);
  }
  mark_dropped<false>(s, f, key, p, corner);
}

// `use` of what is left of marked weights and of their tangents.
template <int kSize, class Use>
__device__ __forceinline__ void with_kept(const Real (&s)[kSize], const Real (&ds)[kSize], Use use) {
  if constexpr (kDrops) {
    Real kept[kSize], moved[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      kept[i] = s[i] < Real(0) ? Real(0) : s[i];
      moved[i] = s[i] < Real(0) ? Real(0) : ds[i];
    }
    use(kept, moved);
  } else {
    use(s, ds);
  }
}

// In place: marked P and P' -> A and A', from dP and dP'.
template <class Fragment, int kBlockQ>
__device__ __forceinline__ void moving_gradients(Real (&s)[Fragment::kSize], Real (&ds)[Fragment::kSize],
                                                 const Real (&dp)[Fragment::kSize],
                                                 const Real (&dp_moved)[Fragment::kSize], const Fragment& f,
                                                 const MovingRowStatistics (&rows)[kBlockQ], const Params& p) {
#pragma unroll
  for (int i = 0; i < Fragment::kSize; ++i) {
    const MovingRowStatistics& row = rows[query_in_tile(f, i)];
    const bool is_dropped = kDrops && s[i] < Real(0);
    const Real weight = kDrops ? fabs(s[i]) : s[i];
    const Real gradient = (is_dropped ? Real(0) : dp[i] * drop_scale(p)) - row.delta;
    const Real moved = (is_dropped ? Real(0) : dp_moved[i] * drop_scale(p)) - row.delta_moved;
    ds[i] = fma_of(ds[i], gradient, weight * moved);
    s[i] = weight * gradient;
  }
}

// In place, back through the modifiers: A' first, which needs the A that enters.
template <class Fragment>
__device__ __forceinline__ void moving_slopes(Real (&a)[Fragment::kSize], Real (&moved)[Fragment::kSize],
                                              const ScoreSlopes<Fragment>& slopes) {
#pragma unroll
  for (int i = 0; i < Fragment::kSize; ++i) {
    moved[i] *= slopes[i];
    if constexpr (Score::kHasCurvature) moved[i] = fma_of(a[i], slopes.curvature(i), moved[i]);
    a[i] *= slopes[i];
  }
}
