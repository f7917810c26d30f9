// What products count whose operands are one plane of float16 each (attention/planes.cuh): powers of two.
//
// P of a backward is lifted by a constant.  dS is lifted so far that no element overflows: they are at most
// 2 · head_dim_v · 2^15 · 2^15 in units of the planes' products, since delta, as dO·out, is a mean of dO·v.  Heads of queries
// that share keys have their exponents in common there, so that their gradients add up in one unit.
#pragma once
#include "attention/planes.cuh"
#include "attention/softmax.cuh"
#include "hw/element.cuh"

struct PlaneScales {
  static __device__ __forceinline__ Real of_scores(const Params& p, const Place& place) {
    return power_of_two(-exponents(p, kSplitQ)[query_head(p, place)] - exponents(p, kSplitK)[key_head(p, place)]);
  }
  static __device__ __forceinline__ Real of_values(const Params& p, const Place& place) {
    return power_of_two(-exponents(p, kSplitV)[key_head(p, place)]);
  }
};

constexpr int kProbabilityLift = 14;
constexpr int kLargestGradient = 15;  // dS reaches 2^kLargestGradient

// Of the backward of one head of queries: results are sums of products times 2^-n.
struct GradientExponents {
  int q, k, v, dout;  // of the planes
  int ds;             // dS is lifted by 2^ds

  __device__ __forceinline__ GradientExponents(const Params& p, const Place& place) {
    q = exponents(p, kSplitQ)[query_head(p, place)];
    k = exponents(p, kSplitK)[key_head(p, place)];
    v = exponents(p, kSplitV)[key_head(p, place)];
    dout = exponents(p, kSplitDout)[query_head(p, place)];
    ds = v + dout - (2 * (kLargestExponent + 1) + 1 + bits_of(p.head_dim_v)) + kLargestGradient;
  }
  // Of a delta, so that it may be taken from dP in the units of lifted P.
  __device__ __forceinline__ PowerOfTwo delta() const { return PowerOfTwo(ds - kProbabilityLift); }
  __device__ __forceinline__ PowerOfTwo dq() const { return PowerOfTwo(-ds - k); }
  __device__ __forceinline__ PowerOfTwo dk() const { return PowerOfTwo(-ds - q); }
  __device__ __forceinline__ PowerOfTwo dv() const { return PowerOfTwo(-kProbabilityLift - dout); }

 private:
  static __device__ __forceinline__ int bits_of(int n) { return 32 - __clz(n - 1); }  // 2^bits >= n
};

// What a block of the backward multiplies scores and dP with, in shared memory: it has no registers left.
template <bool kHasPlanes> struct GradientUnits {
  Real scale, softmax_scale, of_dp;

  __device__ __forceinline__ void read_units(const Params& p, const Place& place) {
    const Real unit = PlaneScales::of_scores(p, place);
    const GradientExponents exponent(p, place);
    scale = Score::kIdentity ? p.scale : p.scale * unit;
    softmax_scale = Score::kIdentity ? p.softmax_scale * unit : p.softmax_scale;
    of_dp = power_of_two(exponent.ds - kProbabilityLift - exponent.v - exponent.dout);
  }
};
template <> struct GradientUnits<false> {
  __device__ __forceinline__ void read_units(const Params&, const Place&) {}
};
const __device__ __forceinline__ auto& in_units(const Params&, const GradientUnits<true>& units) { return units; }
const __device__ __forceinline__ auto& in_units(const Params& p, const GradientUnits<false>&) { return p; }

__device__ __forceinline__ Real score_gradient(Real probability, Real dp, Real delta,
                                               const GradientUnits<true>& units) {
  return probability * fma_of(dp, units.of_dp, -delta);
}
__device__ __forceinline__ Real score_gradient(Real probability, Real dp, Real delta, const Params&) {
  return score_gradient(probability, dp, delta);
}
