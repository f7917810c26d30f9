// 2^x in float64 for x up to 0, without a branch, so that those of many elements run side by side.
//
// x is n / 32 and a rest of at most 1/64: 2^x is a power of two, the root 2^(n % 32 / 32), which one of the lanes holds, and a
// polynomial of degree 5.  10 operations of float64 in place of some 20; the relative error is below 5e-16.
#pragma once

class Exp2F64 {
  double root;  // 2^(lane / 32)

 public:
  __device__ __forceinline__ Exp2F64() : root(exp2_of(int(threadIdx.x) % 32 / 32.)) {}

  // All lanes of a warp call it together.  1 for what is above 0, NaN for NaN, and 0 for what no normal number holds.
  __device__ __forceinline__ double operator()(double x) const {
    constexpr double kRounds = 1.5 * 4503599627370496. / 32;  // where neighbours are 1/32 apart
    const double shifted = x + kRounds, rest = x - (shifted - kRounds);
    const int n = __double2loint(shifted);
    const double near = __shfl_sync(0xffffffffu, root, n & 31);
    double y = fma_of(rest, 0.0013333604694153824, 0.009618176115571158);
    y = fma_of(rest, y, 0.05550410866453748);
    y = fma_of(rest, y, 0.24022650695623157);
    y = fma_of(rest, y, 0.6931471805599453) * rest;
    const double scaled = __hiloint2double(int(u32(__double2hiint(near)) + (u32(n >> 5) << 20)), __double2loint(near));
    y = fma_of(scaled, y, scaled);
    // By the upper word alone: no less than 0, and -1022 and less down to -infinity.
    const u32 upper = u32(__double2hiint(x));
    const bool is_one = upper <= 0x7ff00000u, is_zero = upper - 0xc08ff000u <= 0xfff00000u - 0xc08ff000u;
    const int high = is_zero ? 0 : __double2hiint(y), low = is_one | is_zero ? 0 : __double2loint(y);
    return __hiloint2double(is_one ? 0x3ff00000 : high, low);
  }
};
