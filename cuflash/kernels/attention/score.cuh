// From products q·k to scores: modifiers, then -inf where the key is hidden.
//
// `Score` (generated) composes the score modifiers.  Without any, scores stay raw products and the scale is folded into the
// exponent (`p.softmax_scale` = scale · log2 e); with some, scores are natural logits and `p.softmax_scale` = log2 e.
//
// A fragment tells where a thread's elements live: `kSize` elements, element i in column `column(i)` and in the thread's
// row `row(slot(i))` of the tile.  `kTransposed` fragments have keys as rows and queries as columns.
#pragma once
#include "attention/mask.cuh"

// Positions of a tile's corner.
struct Corner { int q, k; };

template <class Fragment> struct Positions {
  static __device__ __forceinline__ int q(const Fragment& f, Corner corner, int i) {
    return corner.q + (Fragment::kTransposed ? f.column(i) : f.row(Fragment::slot(i)));
  }
  static __device__ __forceinline__ int k(const Fragment& f, Corner corner, int i) {
    return corner.k + (Fragment::kTransposed ? f.row(Fragment::slot(i)) : f.column(i));
  }
};

// Columns of the tile that each of the thread's rows may see.
template <class Fragment> struct RowRanges {
  Range columns[Fragment::kSlots];

  __device__ __forceinline__ RowRanges(const Fragment& f, const Params& p, const Place& place, Corner corner) {
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      const int origin = Fragment::kTransposed ? corner.q : corner.k;
      const Range seen = Fragment::kTransposed ? seeing_queries(p, place, corner.k + f.row(slot))
                                               : visible_keys(p, place, corner.q + f.row(slot));
      columns[slot] = {seen.begin - origin, seen.end - origin};
    }
  }
  __device__ __forceinline__ bool contains(const Fragment& f, int i) const {
    const Range r = columns[Fragment::slot(i)];
    return f.column(i) >= r.begin && f.column(i) < r.end;
  }
};

// Scores of the backward also carry the derivative of the modifiers, 1 where there is none.
template <int kSize, bool kKept> struct Slopes {
  Real value[kSize];
  __device__ __forceinline__ Real operator[](int i) const { return value[i]; }
  __device__ __forceinline__ Real& slot(int i) { return value[i]; }
};
template <int kSize> struct Slopes<kSize, false> {
  __device__ __forceinline__ Real operator[](int) const { return Real(1); }
};
// Scores as they enter the modifiers, where gradients of what these read depend on them.
template <int kSize, bool kKept> struct EnteringScores {
  Real entering[kSize];
  __device__ __forceinline__ Real score(int i) const { return entering[i]; }
  __device__ __forceinline__ void keep(int i, Real s) { entering[i] = s; }
};
template <int kSize> struct EnteringScores<kSize, false> {
  __device__ __forceinline__ Real score(int) const { return Real(0); }
  __device__ __forceinline__ void keep(int, Real) {}
};
// Second derivatives, where those of the backward are wanted.
template <int kSize, bool kKept> struct Curvatures {
  Real bend[kSize];
  __device__ __forceinline__ Real curvature(int i) const { return bend[i]; }
};
template <int kSize> struct Curvatures<kSize, false> {
  __device__ __forceinline__ Real curvature(int) const { return Real(0); }
};
template <class Fragment>
struct ScoreSlopes : Slopes<Fragment::kSize, Score::kHasSlope>,
                     EnteringScores<Fragment::kSize, Score::kKeepsScores>,
                     Curvatures<Fragment::kSize, Score::kHasCurvature> {};

// `Score`, looked into only where it has second derivatives.
template <class> struct WithCurvature : Score {};

// In place: products -> scores.  `open` tiles need no tests (attention/mask.cuh, tile_is_open), except those of masks that
// have to be asked about each element.
template <bool kWithSlope, class Fragment>
__device__ __forceinline__ void scores_of(Real (&s)[Fragment::kSize], ScoreSlopes<Fragment>& slopes, const Fragment& f,
                                          const Params& p, const Place& place, Corner corner, bool open) {
  typedef Positions<Fragment> At;
  const bool clear = Visibility::kClearsTiles && open;
  if (!Score::kIdentity || (Visibility::kHasMask && !clear)) {
    // Operands are only read where the element exists and is visible.
    const RowRanges<Fragment> ranges(f, p, place, corner);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      const int q = At::q(f, corner, i), k = At::k(f, corner, i);
      const bool seen = clear || (ranges.contains(f, i) && q < place.seq_q(p) && Visibility::visible(p, place, q, k));
      if constexpr (kWithSlope && Score::kHasSlope) slopes.slot(i) = Real(1);
      if constexpr (kWithSlope && Score::kHasCurvature) slopes.bend[i] = Real(0);
      if constexpr (kWithSlope && Score::kKeepsScores) slopes.keep(i, seen ? s[i] * p.scale : Real(0));
      if (!seen) {
        s[i] = -infinity<Real>();
      } else if constexpr (!Score::kIdentity) {
        if constexpr (kWithSlope && Score::kHasCurvature)
          s[i] = WithCurvature<Fragment>::apply_with_curvature(p, place, q, k, s[i] * p.scale, slopes.slot(i),
                                                               slopes.bend[i]);
        else if constexpr (kWithSlope && Score::kHasSlope)
          s[i] = Score::apply_with_slope(p, place, q, k, s[i] * p.scale, slopes.slot(i));
        else
          s[i] = Score::apply(p, place, q, k, s[i] * p.scale);
      }
    }
  } else if (!open) {
    const RowRanges<Fragment> ranges(f, p, place, corner);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i)
      if (!ranges.contains(f, i)) s[i] = -infinity<Real>();
  }
}
