// Forward mode: what a direction in which the inputs move makes of scores, weights and sums.
//
// s' = scale (q'·k + q·k') times the slopes of the modifiers, plus the tangents of what is added.  With P = exp(s - L), the
// row's L moves by r = sum of P·s', and the output by sum of P·(s'·v + v') - r·o.  So a row keeps one more number, the sum of
// exp(s - m)·s', and one more accumulator, of exp(s - m)·(s'·v + v'); both change base as l and the output do.
#pragma once
#include "attention/dropout.cuh"
#include "attention/score.cuh"
#include "attention/softmax.cuh"

// In place: tangents of products -> of scores, which are at hand; 0 where the key is hidden, whatever its tangent holds.
template <class Fragment>
__device__ __forceinline__ void score_tangents(Real (&ds)[Fragment::kSize], const Real (&s)[Fragment::kSize],
                                               const ScoreSlopes<Fragment>& slopes, const Fragment& f, const Params& p,
                                               const Place& place, Corner corner) {
  typedef Positions<Fragment> At;
#pragma unroll
  for (int i = 0; i < Fragment::kSize; ++i) ds[i] = s[i] == -infinity<Real>() ? Real(0) : ds[i] * p.scale * slopes[i];
  for_each_operand_tangent(p, [&](const View& view) {
    if (!view.data) return;
    const Element* from = static_cast<const Element*>(view.data) + place.offset(view);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) {
      const int q = At::q(f, corner, i), k = At::k(f, corner, i);
      if (s[i] != -infinity<Real>()) ds[i] += to_real(from[q * view.row + k * view.column]);
    }
  });
}

// The tangent of the logit of a place's sink.
__device__ __forceinline__ Real sink_tangent_of(const Params& p, const Place& place) {
  const View view = sink_tangent(p);
  return view.data ? static_cast<const Real*>(view.data)[place.offset(view)] : Real(0);
}

// The online softmax with the sums that tangents add.  Weights stay at most 1, so that times a tangent they are no larger than it:
// 16-bit types may not hold more.
template <class Fragment> struct MovingSoftmax : OnlineSoftmax<Fragment, false, false, false> {
  typedef OnlineSoftmax<Fragment, false, false, false> Base;
  Real moved[Fragment::kSlots];  // sum of exp(s - m)·s', of this thread's columns only, until `finish`

  __device__ __forceinline__ MovingSoftmax() { clear(moved); }

  // One block of keys: scores -> probabilities relative to m, their tangents -> times these; both accumulators are brought to
  // the new base.
  template <class Accumulator, int kSize>
  __device__ __forceinline__ void step(Real (&s)[Fragment::kSize], Real (&ds)[Fragment::kSize], Real (&o)[kSize],
                                       Real (&u)[kSize], const Params& p) {
    Real alpha[Fragment::kSlots];
    bool subtracted = false;
    if (this->rebase(s, alpha, subtracted, p)) {
      Base::template rescale<Accumulator>(o, alpha);
      Base::template rescale<Accumulator>(u, alpha);
#pragma unroll
      for (int slot = 0; slot < Fragment::kSlots; ++slot) moved[slot] *= alpha[slot];
    }
    this->exponentiate(s, subtracted, p);
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) ds[i] *= s[i];
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) moved[Fragment::slot(i)] += ds[i];
  }

  // After the last block and the sinks: `moved` becomes the tangent of lse, 0 in a row that saw nothing.
  __device__ __forceinline__ void finish(const Params& p, const Place& place) {
    Base::finish();
    this->join_sink(p, place);
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      moved[slot] = Fragment::row_sum(moved[slot]) * this->inverse(slot);
      if constexpr (kHasSinks) {
        const Real part = this->l[slot] == Real(0) ? Real(0) : exp2_of(sink_of(p, place) - this->base[slot]);
        if (part != Real(0)) moved[slot] += part / this->l[slot] * sink_tangent_of(p, place);
      }
    }
  }
  // In place: the accumulator of tangents without what all weights of a row lose as L moves.
  template <class Accumulator, int kSize>
  __device__ __forceinline__ void settle(Real (&u)[kSize], const Real (&o)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) u[i] -= moved[Accumulator::slot(i)] * o[i];
  }
};

// In place: P and P·s' -> what of them is left, not yet scaled.
template <bool kInBlocks, class Fragment>
__device__ __forceinline__ void drop(Real (&s)[Fragment::kSize], Real (&ds)[Fragment::kSize], const Fragment& f,
                                     const DropKey& key, const Params& p, Corner corner) {
  if constexpr (kDrops)
    Drops<kInBlocks, Fragment>::each(f, key, Dropout::threshold(p), corner, [&](int i, bool is_dropped) {
      if (is_dropped) s[i] = ds[i] = Real(0);
    });
}
