// Sums in fixed point: the same bits in whatever order terms arrive, so that nobody waits for a turn.
//
// A sum is as many words as it has digits; the word of digit i counts 2^(28 i) units.  A term is split into digits of 28 bits,
// which leaves each word room for 2^34 of them before anything would have to be carried on.  What is smaller than a unit is
// dropped from a term, whatever the sum holds by then.  A term that is not finite, or not below the unit's limit, is not added:
// it sets marks for its sign in the first word, in two bits that no sum of digits reaches.
// Source: Kulisch, "Computer Arithmetic and Validity", chapter 8; of terms below a bound, Demmel and Nguyen, "Parallel
// Reproducible Summation", IEEE Transactions on Computers 64 (2015).
#pragma once
#include "hw/element.cuh"

constexpr int kDigitBits = 28;
constexpr u64 kDigitMask = (u64(1) << kDigitBits) - 1;
constexpr u64 kPositiveMark = u64(1) << 62, kNegativeMark = u64(1) << 63;

// 2^e, for e whose power is a normal number.
template <class Real> __device__ __forceinline__ Real two_to(int e);
template <> __device__ __forceinline__ float two_to<float>(int e) { return __int_as_float((e + 127) << 23); }
template <> __device__ __forceinline__ double two_to<double>(int e) {
  return __longlong_as_double(i64(e + 1023) << 52);
}
// The largest such e.
template <class Real> constexpr int kLargestPower = sizeof(Real) == 4 ? 127 : 1023;

// An e with |x| < 2^(e - kLargestPower<Real> + 1), and 0 where x is not finite: exponents as they stand in the bits.
__device__ __forceinline__ u32 exponent_bits(float x) {
  const u32 bits = __float_as_uint(x) >> 23 & 0xffu;
  return bits == 0xffu ? 0u : bits;
}
__device__ __forceinline__ u32 exponent_bits(double x) {
  const u32 bits = u32(__double2hiint(x)) >> 20 & 0x7ffu;
  return bits == 0x7ffu ? 0u : bits;
}
template <class Real> __device__ __forceinline__ int power_above(u32 exponent) {
  return int(exponent) - kLargestPower<Real> + 1;
}
// The least e with n <= 2^e.
__device__ __forceinline__ int log_above(int n) { return n > 1 ? 32 - __clz(n - 1) : 0; }

// A unit is 2^-power; terms of fewer than 2^limit units are added.
struct FixedUnit { int power, limit; };

template <class Real, int kDigits> struct FixedSum {
  u64 digits[kDigits];

  // Of terms whose sizes are together below 2^kRoom units.
  static constexpr int kRoom = kDigitBits * (kDigits - 1) + 62;

  __device__ __forceinline__ void add(Real x, FixedUnit unit) {
    Real rest = x * two_to<Real>(unit.power);
    if (!(fabs(rest) < two_to<Real>(unit.limit))) {
      atomicOr(&digits[0], x != x ? kPositiveMark | kNegativeMark : x < Real(0) ? kNegativeMark : kPositiveMark);
      return;
    }
    i64 digit[kDigits];
#pragma unroll
    for (int i = kDigits - 1; i >= 0; --i) {
      digit[i] = i64(rest * two_to<Real>(-kDigitBits * i));
      rest -= Real(digit[i]) * two_to<Real>(kDigitBits * i);
    }
    if (digit[0] < 0) {  // the first word never is, for the sake of the marks
      digit[0] += i64(1) << kDigitBits;
      digit[1] -= 1;
    }
#pragma unroll
    for (int i = 0; i < kDigits; ++i)
      if (digit[i] != 0) atomicAdd(&digits[i], u64(digit[i]));
  }

  // The sum, once all terms are in it.
  __device__ __forceinline__ Real value(FixedUnit unit) const {
    const u64 marks = digits[0] & (kPositiveMark | kNegativeMark);
    if (marks) {
      const Real large = marks == kNegativeMark ? -infinity<Real>() : infinity<Real>();
      return marks == (kPositiveMark | kNegativeMark) ? large - large : large;
    }
    i64 digit[kDigits];
    bool is_negative = false;
    carry([&](int i) { return i64(digits[i]); }, digit);
    if (digit[kDigits - 1] < 0) {
      is_negative = true;
      carry([&](int i) { return -digit[i]; }, digit);
    }
    double sum = 0;  // of parts of one sign: nothing cancels
#pragma unroll
    for (int i = kDigits - 1; i >= 0; --i) sum = sum * double(kDigitMask + 1) + double(digit[i]);
    sum *= two_to<double>(-unit.power);
    return Real(is_negative ? -sum : sum);
  }

 private:
  // Digits from 0 to 2^28 - 1, but for the last one, which has what is left.
  template <class Word> static __device__ __forceinline__ void carry(Word word, i64 (&digit)[kDigits]) {
    i64 over = 0;
#pragma unroll
    for (int i = 0; i < kDigits; ++i) {
      const i64 whole = word(i) + over;
      over = i + 1 < kDigits ? whole >> kDigitBits : 0;
      digit[i] = i + 1 < kDigits ? i64(u64(whole) & kDigitMask) : whole;
    }
  }
};
