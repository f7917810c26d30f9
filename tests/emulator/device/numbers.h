// 16-bit floating-point formats.
#pragma once
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
  static float value(u16 bits) { return bits_of<float>(u32(bits) << 16); }
  static u16 round(float x) {  // to nearest, ties to even
    if (x != x) return 0x7FFF;
    const u32 u = bits_of<u32>(x);
    return u16((u + 0x7FFF + (u >> 16 & 1)) >> 16);
  }
};
struct F16 {
  static float value(u16 bits) { return float(bits_of<_Float16>(bits)); }
  static u16 round(float x) { return x != x ? 0x7FFF : bits_of<u16>(_Float16(x)); }
};
}  // namespace emu
