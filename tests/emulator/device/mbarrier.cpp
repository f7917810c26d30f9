#include "mbarrier.h"
#include <cstdio>
#include "ptx_sm90.h"

namespace emu {
namespace {
struct Mbarrier {
  bool valid = false;
  u32 count = 0, pending = 0;  // arrivals per phase, arrivals still missing
  i64 tx = 0;                  // bytes announced and not yet delivered
  u64 phase = 0;               // phases completed so far
};
constexpr u64 kMark = 0x5EAB0B1EC7000000ull;  // what the opaque 64 bits hold, so that overwriting them is noticed
constexpr i64 kTxLimit = (1 << 20) - 1;
constexpr u32 kCountLimit = (1 << 20) - 1;

struct Mbarriers : AsyncUnit {
  std::vector<Mbarrier> at;  // by shared offset / 8
  void begin_block() override { at.clear(); }
} mbarriers;

size_t index_of(u64 address) { return (address - kSharedBase) / 8; }
u64* word_at(u32 address, const char* what) { return reinterpret_cast<u64*>(shared_pointer(address, 8, 8, what)); }
Mbarrier& barrier_at(u32 address, const char* what) {
  const u64* word = word_at(address, what);
  if (mbarriers.at.size() <= index_of(address) || !mbarriers.at[index_of(address)].valid)
    fail("%s on 0x%x, which is not an initialised mbarrier", what, address);
  if (*word != (kMark | address)) fail("%s: the mbarrier at 0x%x was overwritten with data", what, address);
  return mbarriers.at[index_of(address)];
}
void finish_phase(Mbarrier& b) {  // a phase ends when no arrival and no byte is missing
  if (b.pending || b.tx) return;
  b.pending = b.count;
  ++b.phase;
}
void arrive(u32 address, const char* what) {
  Mbarrier& b = barrier_at(address, what);
  if (!b.pending) fail("%s on 0x%x: more than %u arrivals in phase %llu", what, address, b.count, b.phase);
  --b.pending;
  finish_phase(b);
}
// wait(parity) passes when the latest completed phase has that parity: on a fresh barrier parity 1 passes at once.
bool passed(u64 address, u64 parity) { return (mbarriers.at[index_of(address)].phase & 1) != parity; }
std::string wait_text(u64 address, u64 parity) {
  const Mbarrier& b = mbarriers.at[index_of(address)];
  char text[256];
  snprintf(text, sizeof text,
           "mbarrier at shared offset %llu, parity %llu; %llu phases done, %u of %u arrivals and %lld bytes missing",
           address - kSharedBase, parity, b.phase, b.pending, b.count, b.tx);
  return text;
}
}  // namespace

void mbarrier_check(u32 address, const char* what) { barrier_at(address, what); }
void mbarrier_init(u32 address, u32 count) {
  if (count == 0 || count > kCountLimit) fail("mbarrier.init: count %u", count);
  *word_at(address, "mbarrier.init") = kMark | address;
  if (mbarriers.at.empty()) mbarriers.at.resize(shared_memory.size / 8);
  mbarriers.at[index_of(address)] = {true, count, count, 0, 0};
}
void mbarrier_arrive(u32 address) { arrive(address, "mbarrier.arrive"); }
void mbarrier_expect(u32 address, u32 bytes) {  // expect_tx comes before the arrival
  Mbarrier& b = barrier_at(address, "mbarrier.arrive.expect_tx");
  b.tx += bytes;
  if (b.tx > kTxLimit) fail("mbarrier 0x%x: tx-count %lld exceeds 2^20-1", address, b.tx);
  arrive(address, "mbarrier.arrive.expect_tx");
}
void mbarrier_complete(u32 address, u32 bytes) {  // may run ahead of its expect_tx inside one phase
  Mbarrier& b = barrier_at(address, "complete_tx");
  b.tx -= bytes;
  if (b.tx < -kTxLimit) fail("mbarrier 0x%x: tx-count %lld", address, b.tx);
  finish_phase(b);
}
// Every try_wait suspends until the phase is done (the hardware may also return false earlier).
bool mbarrier_try_wait(u32 address, u32 parity) {
  barrier_at(address, "mbarrier.try_wait");
  if (parity > 1) fail("mbarrier.try_wait: parity %u", parity);
  wait_until(passed, wait_text, address, parity);
  return true;
}
}  // namespace emu
