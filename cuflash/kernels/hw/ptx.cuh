// PTX instructions of sm_75 and sm_80 as functions that carry the instruction's name.  Source: PTX ISA 8.x, sections
// "ldmatrix", "st", "mma", "cp.async", "createpolicy", "red".
#pragma once

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// ---- named barriers (1 to 15; 0 is __syncthreads) ----------------------------------------------------------------------
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- ldmatrix: 8 x 8 blocks of 16-bit elements; lanes 8i .. 8i+7 address the rows of block i ---------------------------
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ---- st: 16 bytes of shared memory ----------------------------------------------------------------------------------------
__device__ __forceinline__ void st_shared_v4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// ---- mma.m16n8k16, float32 accumulation; sm_75 has k8 for float16 only, so one k16 step is two of them -----------------
template <class Element> __device__ __forceinline__ void mma_m16n8k16(float* c, const u32 (&a)[4], u32 b0, u32 b1);
template <> __device__ __forceinline__ void mma_m16n8k16<Half>(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}
#if __CUDA_ARCH__ >= 800
// The same where a sum begins, which takes no registers before.
__device__ __forceinline__ void mma_m16n8k16_first(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
      "%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
template <> __device__ __forceinline__ void mma_m16n8k16<Bfloat16>(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// ---- mma.m16n8k32: 8-bit elements fill the registers of a k16 step of 16-bit ones -----------------------------------------
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ void mma_m16n8k32_e4m3(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma_m16n8k16<E4m3>(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  mma_m16n8k32_e4m3(c, a, b0, b1);
}
#endif

// ---- cp.async: 16 bytes from global to shared memory, the last ones zero-filled ----------------------------------------
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void cp_async_16(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same for what is read once: it leaves the second-level cache first.
struct StreamPolicy { u64 bits; };
__device__ __forceinline__ StreamPolicy createpolicy_evict_first() {
  StreamPolicy policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}
__device__ __forceinline__ void cp_async_16(u32 to, const void* from, int bytes, StreamPolicy policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
               "l"(policy.bits)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#else  // sm_75 copies through registers, at once
__device__ __forceinline__ void cp_async_commit_group() {}
template <int kPending> __device__ __forceinline__ void cp_async_wait_group() {}
#endif

#if __CUDA_ARCH__ >= 900
// ---- red: float32 sums in global memory, two or four, aligned to their size ---------------------------------------------
__device__ __forceinline__ void red_add_v2(float* to, float a, float b) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void red_add_v4(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
#endif
