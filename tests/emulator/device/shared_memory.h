// Shared memory of the running block: 32-bit addresses, bounds, poison, copies in flight, and the two proxies.
#pragma once
#include <string>
#include <vector>
#include "schedule.h"

namespace emu {
constexpr u32 kSharedBase = 1024;  // the first KB of the window belongs to the system on sm_90
constexpr u32 kChunk = 16;         // granularity of the proxy bookkeeping
constexpr u32 kWord = 4;           // granularity of cp.async in flight
constexpr int kPoison = 0xFF;      // NaN as f16, bf16, f32 and f64; -1 as a counter

struct SharedMemory : AsyncUnit {
  unsigned char* bytes = nullptr;  // dynamic shared memory; it ends at a page that faults
  u32 size = 0;                    // as launched, rounded up to the declared alignment
  u32 requested = 0;
  std::vector<u8> in_flight;  // per word: written by a cp.async that its thread has not waited for
  std::vector<u16> unfenced;  // per chunk: 1 + thread whose ordinary store is not yet visible to the async proxy;
                              // empty for kernels without instructions of that proxy
  std::vector<std::vector<u32>> stores;  // per thread: chunks stored since its last proxy fence

  void reserve(u32 bytes_wanted, u32 alignment, bool async_proxy);
  void begin_block() override;
  void end_block() override;
};
extern SharedMemory shared_memory;

// Address bits 4.. are XORed with bits 7..: the 128, 64 and 32-byte swizzles of TMA and wgmma.
inline u32 swizzled(u32 address, u32 mask) { return address ^ ((address >> 7 & mask) << 4); }

struct Range { u32 begin, end; };
inline bool overlap(Range a, Range b) { return a.begin < b.end && b.begin < a.end; }

// ---- proxies (PTX ISA, "Proxies" and fence.proxy.async) -------------------------------------------------------------
// Ordinary stores reach wgmma and TMA only after the *storing* thread has executed fence.proxy.async.  What the async
// proxy finds in a chunk that is not visible to it yet is undefined: it sees NaN, and a note is kept.  (Not a fault by
// itself: a product of undefined data may be dropped later.)
void proxy_fence();
bool async_sees(u32 address, const char* what);
void note_async_write(u32 address, u32 bytes);
extern std::vector<std::string> notes;
}  // namespace emu
