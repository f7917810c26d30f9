// PTX instructions of sm_75, sm_80 and sm_89 by name: ldmatrix, mma.sync, cp.async.
#pragma once
#include "ptx_operands.h"

namespace emu {
// warp_matrix.cpp
void load_matrix(u32 count, bool transposed, u32 address, u32* r);
void store_matrix(u32 count, bool transposed, u32 address, const u32* r);
void mma_m16n8k8_f16(float* d, const u32* a, const u32* b, const float* c);
void mma_m16n8k8_bf16(float* d, const u32* a, const u32* b, const float* c);
void mma_m16n8k16_f16(float* d, const u32* a, const u32* b, const float* c);
void mma_m16n8k16_bf16(float* d, const u32* a, const u32* b, const float* c);
void mma_m16n8k32_e4m3(float* d, const u32* a, const u32* b, const float* c);
void mma_m8n8k4_f64(double* d, const double* a, const double* b, const double* c);
void mma_m16n8k4_f64(double* d, const double* a, const double* b, const double* c);
void mma_m16n8k8_f64(double* d, const double* a, const double* b, const double* c);
void mma_m16n8k16_f64(double* d, const double* a, const double* b, const double* c);
// async_copy.cpp
void copy_async(u32 shared, u64 global, u32 bytes, u32 source_bytes);
void copy_async_commit();
void copy_async_wait(u32 pending);
void copy_async_wait_all();
}  // namespace emu

namespace emu::ptx {
// ---- ldmatrix -------------------------------------------------------------------------------------------------------
template <int N>
inline void load_matrix(const List<u32, N>& r, u32 address, bool transposed) {
  Values<u32, N> v;
  emu::load_matrix(N, transposed, address, v.value);
  v.assign_to(r);
}
inline void ldmatrix_sync_aligned_m8n8_x1_shared_b16(List<u32, 1> r, u32 a) { load_matrix(r, a, false); }
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(List<u32, 2> r, u32 a) { load_matrix(r, a, false); }
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(List<u32, 4> r, u32 a) { load_matrix(r, a, false); }
inline void ldmatrix_sync_aligned_m8n8_x1_trans_shared_b16(List<u32, 1> r, u32 a) { load_matrix(r, a, true); }
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(List<u32, 2> r, u32 a) { load_matrix(r, a, true); }
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(List<u32, 4> r, u32 a) { load_matrix(r, a, true); }

// ---- mma.sync -------------------------------------------------------------------------------------------------------
template <class A, class C, int kA, int kB, int kC>
inline void multiply(void (*product)(C*, const A*, const A*, const C*), const List<C, kC>& d,
                     const List<const A, kA>& a, const List<const A, kB>& b, const List<const C, kC>& c) {
  const Values<A, kA> va(a);
  const Values<A, kB> vb(b);
  const Values<C, kC> vc(c);
  Values<C, kC> vd;
  product(vd.value, va.value, vb.value, vc.value);
  vd.assign_to(d);
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32(List<float, 4> d, List<const u32, 2> a,
                                                             List<const u32, 1> b, List<const float, 4> c) {
  multiply(mma_m16n8k8_f16, d, a, b, c);
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32(List<float, 4> d, List<const u32, 2> a,
                                                               List<const u32, 1> b, List<const float, 4> c) {
  multiply(mma_m16n8k8_bf16, d, a, b, c);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(List<float, 4> d, List<const u32, 4> a,
                                                              List<const u32, 2> b, List<const float, 4> c) {
  multiply(mma_m16n8k16_f16, d, a, b, c);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(List<float, 4> d, List<const u32, 4> a,
                                                                List<const u32, 2> b, List<const float, 4> c) {
  multiply(mma_m16n8k16_bf16, d, a, b, c);
}
inline void mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32(List<float, 4> d, List<const u32, 4> a,
                                                                List<const u32, 2> b, List<const float, 4> c) {
  multiply(mma_m16n8k32_e4m3, d, a, b, c);
}
inline void mma_sync_aligned_m8n8k4_row_col_f64_f64_f64_f64(List<double, 2> d, List<const double, 1> a,
                                                            List<const double, 1> b, List<const double, 2> c) {
  multiply(mma_m8n8k4_f64, d, a, b, c);
}
inline void mma_sync_aligned_m16n8k4_row_col_f64_f64_f64_f64(List<double, 4> d, List<const double, 2> a,
                                                             List<const double, 1> b, List<const double, 4> c) {
  multiply(mma_m16n8k4_f64, d, a, b, c);
}
inline void mma_sync_aligned_m16n8k8_row_col_f64_f64_f64_f64(List<double, 4> d, List<const double, 4> a,
                                                             List<const double, 2> b, List<const double, 4> c) {
  multiply(mma_m16n8k8_f64, d, a, b, c);
}
inline void mma_sync_aligned_m16n8k16_row_col_f64_f64_f64_f64(List<double, 4> d, List<const double, 8> a,
                                                              List<const double, 4> b, List<const double, 4> c) {
  multiply(mma_m16n8k16_f64, d, a, b, c);
}

constexpr u64 kEvictFirst = 0x12F0000000000000ull;

// ---- cp.async -------------------------------------------------------------------------------------------------------
inline void cp_async_ca_shared_global(u32 shared, u64 global, u32 bytes, u32 source_bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async.ca of %u bytes: 4, 8 or 16", bytes);
  copy_async(shared, global, bytes, source_bytes);
}
inline void cp_async_ca_shared_global(u32 shared, u64 global, u32 bytes) {
  cp_async_ca_shared_global(shared, global, bytes, bytes);
}
inline void cp_async_cg_shared_global(u32 shared, u64 global, u32 bytes, u32 source_bytes) {
  if (bytes != 16) fail("cp.async.cg of %u bytes: only 16", bytes);
  copy_async(shared, global, bytes, source_bytes);
}
inline void cp_async_cg_shared_global(u32 shared, u64 global, u32 bytes) {
  cp_async_cg_shared_global(shared, global, bytes, bytes);
}
inline void cp_async_cg_shared_global_L2_cache_hint(u32 shared, u64 global, u32 bytes, u32 source_bytes, u64 policy) {
  if (policy != kEvictFirst) fail("cp.async with a cache policy 0x%llx that createpolicy did not make", policy);
  cp_async_cg_shared_global(shared, global, bytes, source_bytes);
}
inline void createpolicy_fractional_L2_evict_first_b64(u64& policy, float fraction) {
  if (!(fraction > 0.f && fraction <= 1.f)) fail("createpolicy: a fraction of %g is not in (0, 1]", fraction);
  policy = kEvictFirst;
}
inline void cp_async_commit_group() { copy_async_commit(); }
inline void cp_async_wait_group(u32 pending) { copy_async_wait(pending); }
inline void cp_async_wait_all() { copy_async_wait_all(); }
}  // namespace emu::ptx
