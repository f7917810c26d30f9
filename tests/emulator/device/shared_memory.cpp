#include "shared_memory.h"
#include <sys/mman.h>
#include <algorithm>
#include <cstring>
#include "bulk_copy.h"

namespace emu {
SharedMemory shared_memory;
std::vector<std::string> notes;

namespace {
constexpr u32 kPage = 4096;
constexpr u32 kWindow = (kSharedLimit + kPage - 1) / kPage * kPage;
constexpr u32 kStaticBase = 1 << 20;  // shared addresses of __shared__ variables lie above the dynamic ones

u32 round_up(u32 n, u32 step) { return (n + step - 1) / step * step; }

// Memory that goes when the library is unloaded.
struct Mappings {
  std::vector<std::pair<void*, size_t>> all;
  ~Mappings() {
    for (const auto& [memory, bytes] : all) munmap(memory, bytes);
  }
} mappings;

// Pages between two pages that fault.
unsigned char* guarded_pages(u32 bytes) {
  void* memory = mmap(nullptr, bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw Failure("no memory for shared memory");
  mappings.all.emplace_back(memory, bytes + 2 * kPage);
  unsigned char* first = static_cast<unsigned char*>(memory) + kPage;
  mprotect(first, bytes, PROT_READ | PROT_WRITE);
  return first;
}
struct StaticVariable {
  unsigned char* bytes;
  u32 size, address;
};
std::vector<StaticVariable> static_variables;
}  // namespace

// ---- dynamic shared memory ------------------------------------------------------------------------------------------
// The block's bytes end at the end of the window, so that a pointer that runs over them faults; whole pages before
// them fault too, the rest of their first page holds poison, which is checked when the block ends.
void SharedMemory::reserve(u32 bytes_wanted, u32 alignment, bool async_proxy) {
  static unsigned char* const window = guarded_pages(kWindow);
  requested = bytes_wanted;
  size = round_up(bytes_wanted, std::max(alignment, kChunk));
  bytes = window + kWindow - size;
  const u32 closed = (kWindow - size) / kPage * kPage;
  mprotect(window, kWindow, PROT_READ | PROT_WRITE);
  memset(window + closed, kPoison, kWindow - closed);
  if (closed) mprotect(window, closed, PROT_NONE);
  in_flight.assign(size / kWord, 0);
  unfenced.assign(async_proxy ? size / kChunk : 0, 0);
  stores.resize(block.threads);
  notes.clear();
}
void SharedMemory::begin_block() {
  memset(bytes, kPoison, size);
  std::fill(in_flight.begin(), in_flight.end(), 0);
  std::fill(unfenced.begin(), unfenced.end(), 0);
  for (std::vector<u32>& s : stores) s.clear();
}
void SharedMemory::end_block() {
  const auto untouched = [](unsigned char b) { return b == kPoison; };
  unsigned char* page = bytes - reinterpret_cast<uintptr_t>(bytes) % kPage;
  if (!std::all_of(page, bytes, untouched)) fail("the block wrote before the begin of its dynamic shared memory");
  if (!std::all_of(bytes + requested, bytes + size, untouched))
    fail("the block wrote beyond the %u bytes of its dynamic shared memory", requested);
}

unsigned char* dynamic_shared() { return shared_memory.bytes; }

// ---- __shared__ variables -------------------------------------------------------------------------------------------
unsigned char* static_shared(StaticRegion& region, u32 bytes) {
  const u32 size = round_up(bytes, kChunk);
  if (!region.bytes) {
    const u32 pages = round_up(size, kPage);
    region.bytes = guarded_pages(pages) + pages - size;
    const u32 address = static_variables.empty()
                            ? kStaticBase
                            : static_variables.back().address + round_up(static_variables.back().size, 1024);
    static_variables.push_back({region.bytes, size, address});
  }
  if (region.poisoned_in_block != block.number) memset(region.bytes, kPoison, size);
  region.poisoned_in_block = block.number;
  return region.bytes;
}

// ---- addresses ------------------------------------------------------------------------------------------------------
u32 shared_address(const void* pointer) {
  const unsigned char* p = static_cast<const unsigned char*>(pointer);
  if (p >= shared_memory.bytes && p <= shared_memory.bytes + shared_memory.size)
    return kSharedBase + u32(p - shared_memory.bytes);
  for (const StaticVariable& v : static_variables)
    if (p >= v.bytes && p <= v.bytes + v.size) return v.address + u32(p - v.bytes);
  fail("__cvta_generic_to_shared of a pointer outside shared memory");
}
unsigned char* shared_pointer(u32 address, u32 bytes, u32 alignment, const char* what) {
  if (address % alignment) fail("%s: shared address 0x%x is not aligned to %u", what, address, alignment);
  const SharedMemory& m = shared_memory;
  if (address >= kSharedBase && u64(address) + bytes <= kSharedBase + m.requested)
    return m.bytes + (address - kSharedBase);
  for (const StaticVariable& v : static_variables)
    if (address >= v.address && address + bytes <= v.address + v.size) return v.bytes + (address - v.address);
  fail("%s: shared address 0x%x + %u outside the block's %u bytes", what, address, bytes, m.requested);
}

// ---- accesses of ordinary instructions ------------------------------------------------------------------------------
namespace {
bool is_dynamic(u32 address) { return address < kStaticBase; }
void check_in_flight(u32 address, u32 bytes, const char* what) {
  const u8* first = &shared_memory.in_flight[(address - kSharedBase) / kWord];
  const u8* last = &shared_memory.in_flight[(address + bytes - 1 - kSharedBase) / kWord];
  for (const u8* w = first; w <= last; ++w)
    if (*w)
      fail("race: %s at shared offset %u while a cp.async to it is in flight (its thread has not waited)", what,
           address - kSharedBase);
}
void note_generic_store(u32 address, u32 bytes) {
  SharedMemory& m = shared_memory;
  if (m.unfenced.empty()) return;  // no unit of the async proxy in this kernel
  for (u32 c = (address - kSharedBase) / kChunk; c <= (address + bytes - 1 - kSharedBase) / kChunk; ++c) {
    m.unfenced[c] = u16(current->thread + 1);
    m.stores[current->thread].push_back(c);
  }
}
}  // namespace

unsigned char* shared_read(u32 address, u32 bytes, const char* what) {
  unsigned char* p = shared_pointer(address, bytes, bytes, what);
  if (!is_dynamic(address)) return p;
  check_in_flight(address, bytes, what);
  check_against_copies({address, address + bytes}, false, what);
  return p;
}
unsigned char* shared_write(u32 address, u32 bytes, const char* what) {
  unsigned char* p = shared_pointer(address, bytes, bytes, what);
  if (!is_dynamic(address)) return p;
  check_in_flight(address, bytes, what);
  check_against_copies({address, address + bytes}, true, what);
  note_generic_store(address, bytes);
  return p;
}

// ---- proxies --------------------------------------------------------------------------------------------------------
void proxy_fence() {
  SharedMemory& m = shared_memory;
  if (m.unfenced.empty()) return;
  for (u32 c : m.stores[current->thread])
    if (m.unfenced[c] == current->thread + 1) m.unfenced[c] = 0;
  m.stores[current->thread].clear();
}
bool async_sees(u32 address, const char* what) {
  if (shared_memory.unfenced.empty()) return true;
  const u16 writer = shared_memory.unfenced[(address - kSharedBase) / kChunk];
  if (!writer) return true;
  if (notes.size() < 4)
    notes.push_back(std::string(what) + " read shared offset " + std::to_string(address - kSharedBase) +
                    ", stored by thread " + std::to_string(writer - 1) + " without fence.proxy.async before");
  return false;
}
void note_async_write(u32 address, u32 bytes) {
  SharedMemory& m = shared_memory;
  if (m.unfenced.empty()) return;
  for (u32 c = (address - kSharedBase) / kChunk; c <= (address + bytes - 1 - kSharedBase) / kChunk; ++c)
    m.unfenced[c] = 0;
}
}  // namespace emu

extern "C" EMU_EXPORT const char* emu_notes() {
  static std::string text;
  text.clear();
  for (const std::string& n : emu::notes) text += n + "\n";
  return text.c_str();
}
