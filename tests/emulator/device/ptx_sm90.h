// PTX instructions of sm_90a by name: mbarrier, bulk copies (TMA), wgmma, stmatrix, register reallocation.
#pragma once
#include "ptx_sm80.h"

namespace emu {
// mbarrier.cpp
void mbarrier_init(u32 address, u32 count);
void mbarrier_arrive(u32 address);
void mbarrier_expect(u32 address, u32 bytes);
bool mbarrier_try_wait(u32 address, u32 parity);
// bulk_copy.cpp
void tensor_load(u32 shared, u64 map, const int* corner, int rank, u32 barrier);
void tensor_store(u64 map, const int* corner, int rank, u32 shared);
void tensor_add_f32(u64 map, const int* corner, int rank, u32 shared);
void check_tensor_map(u64 map);
void linear_load(u32 shared, u64 global, u32 bytes, u32 barrier);
void linear_reduce_add_f32(u64 global, u32 shared, u32 bytes);
void bulk_commit();
void bulk_wait(u32 pending, bool read_only);
// shared_memory.cpp
void proxy_fence();
// register_pool.cpp
void set_registers(u32 registers, bool grow);
// wgmma.cpp
struct WgmmaForm {
  u32 n = 0;
  bool a_in_registers = false, accumulate = false, a_mn = false, b_mn = false;
  enum Type { F16, Bf16, E4m3 } type = F16;
  u64 a = 0, b = 0;  // descriptors
};
void wgmma_fence();
void wgmma_issue(const WgmmaForm& form, float* registers, const u32* fragment);
void wgmma_commit();
void wgmma_wait(u32 pending);
}  // namespace emu

namespace emu::ptx {
// ---- mbarrier -------------------------------------------------------------------------------------------------------
inline void mbarrier_init_shared_b64(u32 bar, u32 count) { emu::mbarrier_init(bar, count); }
inline void fence_mbarrier_init_release_cluster() {}
inline void mbarrier_arrive_shared_b64(u32 bar) { emu::mbarrier_arrive(bar); }
inline void mbarrier_arrive_expect_tx_shared_b64(u32 bar, u32 bytes) { emu::mbarrier_expect(bar, bytes); }
inline void mbarrier_try_wait_parity_shared_b64(bool& p, u32 bar, u32 parity) {
  p = emu::mbarrier_try_wait(bar, parity);
}

// ---- clusters: one block runs at a time, so there is nobody to talk to ----------------------------------------------
[[noreturn]] inline void no_cluster() { fail("clusters of more than one block are not modelled"); }
inline void mapa_shared_cluster_u32(u32&, u32, u32) { no_cluster(); }
inline void mbarrier_arrive_shared_cluster_b64(u32) { no_cluster(); }
inline void mbarrier_arrive_release_cluster_shared_cluster_b64(u32) { no_cluster(); }
inline void barrier_cluster_arrive() { no_cluster(); }
inline void barrier_cluster_wait() { no_cluster(); }
inline void barrier_cluster_arrive_release() { no_cluster(); }
inline void barrier_cluster_wait_acquire() { no_cluster(); }
template <class... A> inline void cp_async_bulk_shared_cluster_shared_mbarrier_complete_tx_bytes(A&&...) {
  no_cluster();
}
template <class... A> inline void
cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(A&&...) {
  no_cluster();
}
template <class... A> inline void
cp_async_bulk_tensor_4d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster_L2_cache_hint(A&&...) {
  no_cluster();
}

// ---- election, register reallocation --------------------------------------------------------------------------------
inline void elect_sync(u32& leader, bool& p, u32 mask) {
  if (mask != ~0u) fail("elect.sync with the partial mask 0x%x is not modelled", mask);
  converge("elect.sync");
  leader = 0;
  p = thread_index.x % kWarp == 0;
}
inline void elect_sync(bool& p, u32 mask) {
  u32 leader;
  elect_sync(leader, p, mask);
}
inline void setmaxnreg_dec_sync_aligned_u32(u32 n) { set_registers(n, false); }
inline void setmaxnreg_inc_sync_aligned_u32(u32 n) { set_registers(n, true); }

// ---- bulk copies ----------------------------------------------------------------------------------------------------
template <class T, int N>
struct Corner {
  int at[N];
  Corner(const List<T, N>& l) {
    for (int i = 0; i < N; ++i) at[i] = int(*l.at[i]);
  }
};
template <class T, int N> inline void load_box(u32 dst, u64 map, const List<T, N>& at, u32 bar) {
  tensor_load(dst, map, Corner<T, N>(at).at, N, bar);
}
template <class T, int N> inline void store_box(u64 map, const List<T, N>& at, u32 src) {
  tensor_store(map, Corner<T, N>(at).at, N, src);
}
inline void check_cache_policy(u64 policy) {
  if (policy >> 56 != 0x10 && policy >> 56 != 0x12 && policy >> 56 != 0x14) fail("unknown cache policy 0x%llx", policy);
}
#define EMU_TENSOR_COPIES(rank)                                                                              \
  template <class T>                                                                                         \
  inline void cp_async_bulk_tensor_##rank##d_shared_cluster_global_mbarrier_complete_tx_bytes(               \
      u32 dst, u64 map, List<T, rank> at, u32 bar) {                                                         \
    load_box(dst, map, at, bar);                                                                             \
  }                                                                                                          \
  template <class T>                                                                                         \
  inline void cp_async_bulk_tensor_##rank##d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint( \
      u32 dst, u64 map, List<T, rank> at, u32 bar, u64 policy) {                                             \
    check_cache_policy(policy);                                                                              \
    load_box(dst, map, at, bar);                                                                             \
  }                                                                                                          \
  template <class T>                                                                                         \
  inline void cp_async_bulk_tensor_##rank##d_global_shared_bulk_group(u64 map, List<T, rank> at, u32 src) {  \
    store_box(map, at, src);                                                                                 \
  }                                                                                                          \
  template <class T>                                                                                         \
  inline void cp_reduce_async_bulk_tensor_##rank##d_global_shared_add_tile_bulk_group(                       \
      u64 map, List<T, rank> at, u32 src) {                                                                  \
    tensor_add_f32(map, Corner<T, rank>(at).at, rank, src);                                                  \
  }
EMU_TENSOR_COPIES(1)
EMU_TENSOR_COPIES(2)
EMU_TENSOR_COPIES(3)
EMU_TENSOR_COPIES(4)
EMU_TENSOR_COPIES(5)
#undef EMU_TENSOR_COPIES
inline void prefetch_tensormap(u64 map) { check_tensor_map(map); }
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(u32 dst, u64 src, u32 bytes, u32 bar) {
  linear_load(dst, src, bytes, bar);
}
inline void cp_reduce_async_bulk_global_shared_bulk_group_add_f32(u64 dst, u32 src, u32 bytes) {
  linear_reduce_add_f32(dst, src, bytes);
}
inline void cp_async_bulk_commit_group() { bulk_commit(); }
inline void cp_async_bulk_wait_group(u32 n) { bulk_wait(n, false); }
inline void cp_async_bulk_wait_group_read(u32 n) { bulk_wait(n, true); }
inline void fence_proxy_async_shared() { proxy_fence(); }
inline void fence_proxy_async() { proxy_fence(); }

// ---- wgmma ----------------------------------------------------------------------------------------------------------
inline void wgmma_fence_sync_aligned() { wgmma_fence(); }
inline void wgmma_commit_group_sync_aligned() { wgmma_commit(); }
inline void wgmma_wait_group_sync_aligned(u32 n) { wgmma_wait(n); }
template <int N>
inline WgmmaForm wgmma_form(u64 b, bool accumulate, int scale_a, int scale_b, int b_mn, WgmmaForm::Type type) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma: N is a multiple of 8 up to 256");
  if (scale_a != 1 || scale_b != 1) fail("wgmma: negated operands are not modelled");
  WgmmaForm m;
  m.n = N;
  m.b = b;
  m.accumulate = accumulate;
  m.b_mn = b_mn;
  m.type = type;
  return m;
}
template <class Type>
inline WgmmaForm::Type wgmma_type() {
  return sizeof(typename Type::Bits) == 1 ? WgmmaForm::E4m3
         : std::is_same<Type, F16>::value ? WgmmaForm::F16
                                          : WgmmaForm::Bf16;
}
template <int N, class Type>  // A and B in shared memory; 8-bit operands have no directions
inline void wgmma(List<float, N / 2> d, u64 a, u64 b, bool accumulate, int scale_a, int scale_b, int a_mn = 0,
                  int b_mn = 0) {
  WgmmaForm m = wgmma_form<N>(b, accumulate, scale_a, scale_b, b_mn, wgmma_type<Type>());
  m.a = a;
  m.a_mn = a_mn;
  wgmma_issue(m, array_of(d), nullptr);
}
template <int N, class Type>  // A in registers
inline void wgmma(List<float, N / 2> d, List<const u32, 4> a, u64 b, bool accumulate, int scale_a, int scale_b,
                  int b_mn = 0) {
  WgmmaForm m = wgmma_form<N>(b, accumulate, scale_a, scale_b, b_mn, wgmma_type<Type>());
  m.a_in_registers = true;
  wgmma_issue(m, array_of(d), array_of(a));
}

// ---- stmatrix -------------------------------------------------------------------------------------------------------
template <int N>
inline void store_matrix(u32 address, const List<const u32, N>& r, bool transposed) {
  emu::store_matrix(N, transposed, address, Values<u32, N>(r).value);
}
inline void stmatrix_sync_aligned_m8n8_x1_shared_b16(u32 a, List<const u32, 1> r) { store_matrix(a, r, false); }
inline void stmatrix_sync_aligned_m8n8_x2_shared_b16(u32 a, List<const u32, 2> r) { store_matrix(a, r, false); }
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 a, List<const u32, 4> r) { store_matrix(a, r, false); }
inline void stmatrix_sync_aligned_m8n8_x1_trans_shared_b16(u32 a, List<const u32, 1> r) { store_matrix(a, r, true); }
inline void stmatrix_sync_aligned_m8n8_x2_trans_shared_b16(u32 a, List<const u32, 2> r) { store_matrix(a, r, true); }
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32 a, List<const u32, 4> r) { store_matrix(a, r, true); }
}  // namespace emu::ptx
