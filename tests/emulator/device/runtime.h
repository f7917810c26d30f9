// What a translated kernel may call: the running block and thread, faults, warp and block collectives, shared memory.
//
// Kernels are rebuilt often, so this header stays light; the work is done by the .cpp files of this folder, which are
// compiled once for all kernels.
#pragma once
#include <cstddef>
#include <cstdint>

// Seen by the host: everything else stays inside the library of its kernel.
#define EMU_EXPORT __attribute__((visibility("default"), used))

namespace emu {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kWarp = 32;
constexpr u32 kWarpgroup = 128;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kSharedLimit = 232448;  // 227 KB, the most that a block of sm_90 may ask for

struct Dim3 { unsigned x, y, z; };

// ---- the running thread and block -----------------------------------------------------------------------------------
struct Fiber;              // schedule.h
extern Fiber* current;     // null while the scheduler runs
extern Dim3 thread_index;  // of `current`
extern Dim3 block_index, block_size, grid_size;
extern u64 switches;  // grows with every change of thread: the emulator's clock

// Ends the launch with this message; never returns to the kernel.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
// Lets other threads run; a block whose threads do nothing else any more is in a deadlock.
void sleep();

// ---- warp and block collectives -------------------------------------------------------------------------------------
// All 32 lanes of the warp meet in one .sync instruction; the last one runs `apply` on everybody's arguments.
void rendezvous(const char* operation, void* mine, void (*apply)(void** all));
template <class Arguments, void (*kApply)(Arguments** all)>
inline void collective(const char* operation, Arguments& mine) {
  rendezvous(operation, &mine, [](void** all) { kApply(reinterpret_cast<Arguments**>(all)); });
}
void converge(const char* operation);
enum class Shuffle { Index, Xor, Down, Up };
u64 shuffle(Shuffle kind, u32 mask, u64 bits, u32 operand, u32 width);
u32 ballot(u32 mask, bool predicate);
void sync_warp(u32 mask);

void named_barrier(u32 id, u32 threads, bool wait);
void block_barrier();                     // __syncthreads
u32 block_barrier_count(bool predicate);  // __syncthreads_count: threads of the block whose predicate holds

// ---- shared memory --------------------------------------------------------------------------------------------------
unsigned char* dynamic_shared();
u32 shared_address(const void* pointer);  // of a pointer into shared memory; a fault elsewhere
unsigned char* shared_pointer(u32 address, u32 bytes, u32 alignment, const char* what);
// Checked access of an ordinary (generic proxy) instruction to shared memory.
unsigned char* shared_read(u32 address, u32 bytes, const char* what);
unsigned char* shared_write(u32 address, u32 bytes, const char* what);
// Checked address of a global access: the hardware refuses what is not aligned to its size.
inline unsigned char* global_pointer(u64 address, u32 alignment, const char* what) {
  if (address % alignment) fail("%s: global address 0x%llx is not aligned to %u", what, address, alignment);
  return reinterpret_cast<unsigned char*>(address);
}

// A __shared__ variable declared with a size: its end lies before a page that faults, and it is poison when a block
// begins.
struct StaticRegion {
  unsigned char* bytes = nullptr;
  u64 poisoned_in_block = 0;
};
unsigned char* static_shared(StaticRegion& region, u32 bytes);
template <class T>
struct StaticShared {
  StaticRegion region;
  T& variable() { return *reinterpret_cast<T*>(static_shared(region, sizeof(T))); }
};

// ---- launch ---------------------------------------------------------------------------------------------------------
// What the host asks for; host.py declares the same fields.
struct LaunchRequest {
  u64 seed;
  char* stacks;  // of 1024 threads, one after another, shared by all kernels of the process
  u32 stack_bytes;
  Dim3 grid;
  u32 threads, shared_bytes;
  u32 time_limit;  // seconds that a thread may run without blocking
  u32 residents;   // blocks that run at once; below 2 they run one after another
};
struct Launch : LaunchRequest {
  u32 shared_alignment;
  bool async_proxy;  // the kernel uses bulk copies or wgmma
  void (*entry)(void* context);
  void* context;
};
int launch(const Launch& parameters);  // 0, or 1 with the fault kept for emu_last_error
int refuse_launch(const char* reason);
}  // namespace emu
