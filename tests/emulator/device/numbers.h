// 16-bit and 8-bit floating-point formats.
#pragma once
#include <cmath>
#include <cstring>
#include "runtime.h"

namespace emu {
template <class To, class From>
inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "a bit pattern keeps its size");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
struct Bf16 {
  typedef u16 Bits;
  static float value(u16 bits) { return bits_of<float>(u32(bits) << 16); }
  static u16 round(float x) {  // to nearest, ties to even
    if (x != x) return 0x7FFF;
    const u32 u = bits_of<u32>(x);
    return u16((u + 0x7FFF + (u >> 16 & 1)) >> 16);
  }
};
struct F16 {
  typedef u16 Bits;
  static float value(u16 bits) { return float(bits_of<_Float16>(bits)); }
  static u16 round(float x) { return x != x ? 0x7FFF : bits_of<u16>(_Float16(x)); }
};
// 4 bits of exponent with a bias of 7, 3 of fraction, no infinities; all bits set is NaN (OCP 8-bit floating point, E4M3).
struct E4m3 {
  typedef unsigned char Bits;
  static float value(Bits bits) {
    if ((bits & 0x7F) == 0x7F) return bits_of<float>(0x7FC00000u);
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    const float size = exponent ? ldexpf(float(8 + fraction), exponent - 10) : ldexpf(float(fraction), -9);
    return bits & 0x80 ? -size : size;
  }
  static Bits round(float x) {  // to nearest, ties to even; what is larger than 448 becomes that
    if (x != x) return 0x7F;
    const Bits sign = bits_of<u32>(x) >> 31 << 7;
    const float size = std::fabs(x);
    if (size >= 448.f) return sign | 0x7E;
    int exponent = size < 0x1p-6f ? -6 : std::ilogb(size);
    const int fraction = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 8 .. 16, below 8 when denormal
    return sign | Bits(fraction + ((exponent + 6) << 3));                      // a carry moves into the exponent
  }
};
}  // namespace emu
