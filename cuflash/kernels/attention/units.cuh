// What scores and values count where arrays have scales beside their elements, one for each head.
//
// Scores take theirs on the way to powers of two, where something is multiplied anyway, and the output takes that of the values.
#pragma once

// Of one head.
template <bool kScaled> struct HeadScales {
  Real of_scores, of_values;
  __device__ __forceinline__ void read_scales(const Params& p, const Place& place) {
    of_scores = Scales::of_scores(p, place);
    of_values = Scales::of_values(p, place);
  }
};
template <> struct HeadScales<false> {
  __device__ __forceinline__ void read_scales(const Params&, const Place&) {}
};

// What the softmax and the modifiers multiply scores with, as `Params` has it for all heads.
struct Units { Real scale, softmax_scale; };
template <bool kScaled> struct HeldUnits { Units units; };
template <> struct HeldUnits<false> {};

template <bool kScaled>
__device__ __forceinline__ HeldUnits<kScaled> units_of(const Params& p, const HeadScales<kScaled>& head) {
  if constexpr (kScaled)
    return {Score::kIdentity ? Units{p.scale, p.softmax_scale * head.of_scores}
                             : Units{p.scale * head.of_scores, p.softmax_scale}};
  else
    return {};
}
__device__ __forceinline__ auto& in_units(const Params&, const HeldUnits<true>& held) { return held.units; }
__device__ __forceinline__ auto& in_units(const Params& p, const HeldUnits<false>&) { return p; }

__device__ __forceinline__ Real value_scale(const HeadScales<true>& head) { return head.of_values; }
__device__ __forceinline__ Real value_scale(const HeadScales<false>&) { return Real(1); }
