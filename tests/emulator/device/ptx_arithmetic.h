// PTX arithmetic by name: conversions, approximations, moves, predicates, special registers.
//
// The approximate instructions use the host's correctly rounded functions; .ftz flushes subnormal inputs and results
// to zero.
#pragma once
#include <cmath>
#include "ptx_operands.h"

namespace emu::ptx {
// ---- conversions: the first source of a packed pair is the high half ------------------------------------------------
inline void cvt_rn_bf16x2_f32(u32& d, float high, float low) { d = u32(Bf16::round(high)) << 16 | Bf16::round(low); }
inline void cvt_rn_f16x2_f32(u32& d, float high, float low) { d = u32(F16::round(high)) << 16 | F16::round(low); }
inline void cvt_rn_satfinite_e4m3x2_f32(u16& d, float high, float low) {
  d = u16(E4m3::round(high) << 8 | E4m3::round(low));
}
inline void cvt_rn_bf16_f32(u16& d, float x) { d = Bf16::round(x); }
inline void cvt_rn_f16_f32(u16& d, float x) { d = F16::round(x); }
inline void cvt_f32_bf16(float& d, u16 x) { d = Bf16::value(x); }
inline void cvt_f32_f16(float& d, u16 x) { d = F16::value(x); }
inline void cvt_u32_u64(u32& d, u64 x) { d = u32(x); }
inline void cvt_rn_f32_f64(float& d, double x) { d = float(x); }
inline void cvt_f64_f32(double& d, float x) { d = x; }

// ---- approximations -------------------------------------------------------------------------------------------------
inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }
inline void ex2_approx_f32(float& d, float x) { d = exp2f(x); }
inline void ex2_approx_ftz_f32(float& d, float x) { d = flush(exp2f(flush(x))); }
inline void lg2_approx_f32(float& d, float x) { d = log2f(x); }
inline void lg2_approx_ftz_f32(float& d, float x) { d = log2f(flush(x)); }
inline void rcp_approx_f32(float& d, float x) { d = 1.f / x; }
inline void rcp_approx_ftz_f32(float& d, float x) { d = flush(1.f / flush(x)); }
inline void rcp_rn_f32(float& d, float x) { d = 1.f / x; }
inline void sqrt_approx_f32(float& d, float x) { d = sqrtf(x); }
inline void rsqrt_approx_f32(float& d, float x) { d = 1.f / sqrtf(x); }
inline void rsqrt_approx_ftz_f32(float& d, float x) { d = flush(1.f / sqrtf(flush(x))); }
inline void tanh_approx_f32(float& d, float x) { d = tanhf(x); }

// ---- exact arithmetic -----------------------------------------------------------------------------------------------
inline void add_f32(float& d, float a, float b) { d = a + b; }
inline void sub_f32(float& d, float a, float b) { d = a - b; }
inline void mul_f32(float& d, float a, float b) { d = a * b; }
inline void fma_rn_f32(float& d, float a, float b, float c) { d = __builtin_fmaf(a, b, c); }
inline void fma_rn_f64(double& d, double a, double b, double c) { d = __builtin_fma(a, b, c); }
inline void max_f32(float& d, float a, float b) { d = fmaxf(a, b); }
inline void min_f32(float& d, float a, float b) { d = fminf(a, b); }
inline void max_NaN_f32(float& d, float a, float b) { d = a != a || b != b ? NAN : fmaxf(a, b); }
inline void min_NaN_f32(float& d, float a, float b) { d = a != a || b != b ? NAN : fminf(a, b); }
inline void add_u32(u32& d, u32 a, u32 b) { d = a + b; }
inline void add_s32(u32& d, u32 a, u32 b) { d = a + b; }
inline void and_b32(u32& d, u32 a, u32 b) { d = a & b; }
inline void or_b32(u32& d, u32 a, u32 b) { d = a | b; }
inline void xor_b32(u32& d, u32 a, u32 b) { d = a ^ b; }
inline void shl_b32(u32& d, u32 a, u32 n) { d = n < 32 ? a << n : 0; }
inline void shr_b32(u32& d, u32 a, u32 n) { d = n < 32 ? a >> n : 0; }
inline void shr_u32(u32& d, u32 a, u32 n) { shr_b32(d, a, n); }
inline void lop3_b32(u32& d, u32 a, u32 b, u32 c, u32 table) {
  d = 0;
  for (u32 i = 0; i < 8; ++i)
    if (table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
}
inline void prmt_b32(u32& d, u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  d = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 s = selector >> (4 * i) & 15;
    u32 byte = u32(bytes >> (8 * (s & 7))) & 0xFF;
    if (s & 8) byte = byte & 0x80 ? 0xFF : 0;
    d |= byte << (8 * i);
  }
}

// ---- moves, predicates ----------------------------------------------------------------------------------------------
template <class D, class S>
inline void move(D& d, const S& s) {
  if constexpr (sizeof(D) == sizeof(S))
    memcpy(&d, &s, sizeof d);
  else
    d = D(s);  // an integer literal
}
template <class Whole, class Part>
inline void unpack(const List<Part, 2>& d, Whole s) {
  static_assert(2 * sizeof(Part) == sizeof(Whole), "mov: a pair has the size of the whole");
  memcpy(d.at[0], &s, sizeof(Part));
  memcpy(d.at[1], reinterpret_cast<const char*>(&s) + sizeof(Part), sizeof(Part));
}
template <class Whole, class Part>
inline void pack(Whole& d, const List<Part, 2>& s) {
  static_assert(2 * sizeof(Part) == sizeof(Whole), "mov: a pair has the size of the whole");
  memcpy(&d, s.at[0], sizeof(Part));
  memcpy(reinterpret_cast<char*>(&d) + sizeof(Part), s.at[1], sizeof(Part));
}
template <class D, class S> inline void mov_u16(D& d, S s) { move(d, s); }
template <class D, class S> inline void mov_b16(D& d, S s) { move(d, s); }
template <class D, class S> inline void mov_u32(D& d, S s) { move(d, s); }
template <class D, class S> inline void mov_s32(D& d, S s) { move(d, s); }
template <class D, class S> inline void mov_u64(D& d, S s) { move(d, s); }
template <class D, class S> inline void mov_f32(D& d, S s) { move(d, s); }
template <class D, class S> inline void mov_b32(D& d, S s) { move(d, s); }
template <class P> inline void mov_b32(const List<P, 2>& d, u32 s) { unpack(d, s); }
template <class P> inline void mov_b32(u32& d, List<P, 2> s) { pack(d, s); }
template <class D, class S> inline void mov_b64(D& d, S s) { move(d, s); }
template <class P, class S> inline void mov_b64(const List<P, 2>& d, S s) { unpack(d, s); }
template <class D, class P> inline void mov_b64(D& d, List<P, 2> s) { pack(d, s); }

template <class T> inline void setp_eq(bool& p, T a, T b) { p = a == b; }
template <class T> inline void setp_ne(bool& p, T a, T b) { p = a != b; }
template <class T> inline void setp_lt(bool& p, T a, T b) { p = a < b; }
template <class T> inline void setp_le(bool& p, T a, T b) { p = a <= b; }
template <class T> inline void setp_gt(bool& p, T a, T b) { p = a > b; }
template <class T> inline void setp_ge(bool& p, T a, T b) { p = a >= b; }
inline void selp_u32(u32& d, u32 a, u32 b, bool p) { d = p ? a : b; }
inline void selp_b32(u32& d, u32 a, u32 b, bool p) { d = p ? a : b; }
inline void selp_f32(float& d, float a, float b, bool p) { d = p ? a : b; }

// ---- special registers, control -------------------------------------------------------------------------------------
inline u32 special_laneid() { return thread_index.x % kWarp; }
inline u32 special_tid_x() { return thread_index.x; }
inline u32 special_ntid_x() { return block_size.x; }
inline u32 special_ctaid_x() { return block_index.x; }
inline u32 special_ctaid_y() { return block_index.y; }
inline u32 special_ctaid_z() { return block_index.z; }
inline u32 special_nctaid_x() { return grid_size.x; }
inline u32 special_smid() { return 0; }
inline u32 special_clock() { return u32(switches); }
inline u64 special_clock64() { return switches; }
inline u64 special_globaltimer() { return switches; }
inline u32 special_cluster_ctarank() { return 0; }
[[noreturn]] inline void trap() { fail("trap"); }
inline void nanosleep_u32(u32) { sleep(); }
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline void bar_sync(u32 id, u32 threads) { named_barrier(id, threads, true); }
inline void bar_arrive(u32 id, u32 threads) { named_barrier(id, threads, false); }
inline void barrier_sync(u32 id, u32 threads) { named_barrier(id, threads, true); }
}  // namespace emu::ptx
