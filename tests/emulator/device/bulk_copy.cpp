// A load lands in two parts and then completes on its mbarrier; a store first reads shared memory, then writes global
// memory.  The scheduler decides when each step happens.
#include "bulk_copy.h"
#include <algorithm>
#include <cstring>
#include "mbarrier.h"
#include "ptx_sm90.h"
#include "tensor_map.h"

namespace emu {
namespace {
struct BulkCopy {
  enum Kind { TensorLoad, LinearLoad, TensorStore, TensorAddF32, ReduceAddF32 } kind;
  EncodedMap map{};
  int corner[kMaxRank] = {};
  u32 shared = 0, bytes = 0, barrier = 0, split = 0;
  unsigned char* global = nullptr;
  u32 thread = 0;
  u64 group = 0;  // stores: the issuing thread's bulk group
  int step = 0;
  std::vector<unsigned char> staging;

  bool load() const { return kind == TensorLoad || kind == LinearLoad; }
  bool tensor() const { return kind == TensorLoad || kind == TensorStore || kind == TensorAddF32; }
  Work work() const { return load() ? Loads : Stores; }
  Range range() const { return {shared, shared + bytes}; }
  u32 rows() const { return tensor() ? box_rows(map) : bytes / kChunk; }
};
struct BulkGroups {
  u64 open = 0, read_waited = 0;  // index of the group being filled; groups whose reads were waited for
  bool dirty = false;             // the open group has a store
};

void land(const BulkCopy& c, u32 first, u32 last) {
  if (c.kind == BulkCopy::TensorLoad) return box_to_shared(c.map, c.corner, c.shared, first, last);
  const u32 bytes = (last - first) * kChunk;
  if (bytes)
    memcpy(shared_pointer(c.shared + first * kChunk, bytes, kChunk, "bulk load"), c.global + first * kChunk, bytes);
}
bool step_load(BulkCopy& c) {  // true when finished
  switch (c.step++) {
    case 0:
      land(c, 0, c.split);
      return false;
    case 1:
      land(c, c.split, c.rows());
      return false;
    default:
      mbarrier_complete(c.barrier, c.bytes);
      return true;
  }
}
bool step_store(BulkCopy& c) {
  if (c.step++ == 0) {
    for (u32 a = c.shared; a < c.shared + c.bytes; a += kChunk)
      if (!async_sees(a, "bulk store")) memset(shared_pointer(a, kChunk, kChunk, "bulk store"), kPoison, kChunk);
    if (c.tensor())
      c.staging = box_from_shared(c.map, c.shared);
    else {
      const unsigned char* p = shared_pointer(c.shared, c.bytes, kChunk, "bulk reduce");
      c.staging.assign(p, p + c.bytes);
    }
    return false;
  }
  if (c.tensor())
    box_to_global(c.map, c.corner, c.staging, c.kind == BulkCopy::TensorAddF32);
  else
    for (u32 i = 0; i < c.bytes / 4; ++i)
      reinterpret_cast<float*>(c.global)[i] += reinterpret_cast<const float*>(c.staging.data())[i];
  return true;
}

struct BulkUnit : AsyncUnit {
  std::vector<BulkCopy> flying;
  std::vector<BulkGroups> groups;  // per thread

  void begin_block() override {
    flying.clear();
    groups.assign(block.threads, {});
  }
  void end_block() override {
    for (size_t t = 0; t < groups.size(); ++t)
      if (groups[t].dirty || groups[t].open > groups[t].read_waited)
        fail("thread %zu ends without waiting until its bulk stores have read shared memory", t);
    for (const BulkCopy& c : flying)
      if (c.load()) fail("the block ends while a bulk load to 0x%x is in flight", c.shared);
    while (!flying.empty()) run(Stores, 0);
  }
  size_t events(Work kind) override {
    if (flying.empty()) return 0;
    return size_t(std::count_if(flying.begin(), flying.end(), [&](const BulkCopy& c) { return c.work() == kind; }));
  }
  void run(Work kind, size_t event) override {
    size_t i = 0;
    while (flying[i].work() != kind || event-- > 0) ++i;
    const bool finished = kind == Loads ? step_load(flying[i]) : step_store(flying[i]);
    if (finished) flying.erase(flying.begin() + std::ptrdiff_t(i));
  }
} bulk_unit;

// From the issue on, the destination is undefined: poison, so that a stage given back too early shows.
void issue_load(BulkCopy c) {
  if (c.bytes % kChunk) fail("bulk load of %u bytes: not a multiple of 16", c.bytes);
  mbarrier_check(c.barrier, "bulk load");
  check_against_copies(c.range(), true, "bulk load");
  if (wgmma_reads(c.range()))
    fail("race: bulk load to 0x%x while a wgmma that nobody has waited for reads it (stage released too early?)",
         c.shared);
  memset(shared_pointer(c.shared, c.bytes, kChunk, "bulk load"), kPoison, c.bytes);
  note_async_write(c.shared, c.bytes);
  c.thread = current->thread;
  c.split = policy.shuffled() ? policy.random(c.rows() + 1) : c.rows() / 2;
  bulk_unit.flying.push_back(std::move(c));
}
void issue_store(BulkCopy c) {
  shared_pointer(c.shared, c.bytes, kChunk, "bulk store");
  check_against_copies(c.range(), false, "bulk store");
  c.thread = current->thread;
  BulkGroups& g = bulk_unit.groups[current->thread];
  c.group = g.open;
  g.dirty = true;
  bulk_unit.flying.push_back(std::move(c));
}
BulkCopy tensor_copy(BulkCopy::Kind kind, u64 map, const int* corner, int rank, u32 shared, u32 barrier) {
  BulkCopy c{kind};
  c.map = decode_map(reinterpret_cast<const void*>(map));
  if (c.map.rank != rank) fail("tensor copy with %d coordinates on a map of rank %d", rank, c.map.rank);
  // A tensor copy needs 128-byte alignment; with a swizzle the pattern repeats every 8 rows.
  const u32 alignment = c.map.swizzle_mask ? 128 * (c.map.swizzle_mask + 1) : 128;
  if (shared % alignment) fail("tensor copy: shared address 0x%x is not aligned to %u", shared, alignment);
  std::copy(corner, corner + rank, c.corner);
  c.shared = shared;
  c.bytes = box_bytes(c.map);  // expect_tx counts the whole box, also where it is clipped
  c.barrier = barrier;
  return c;
}
BulkCopy linear_copy(BulkCopy::Kind kind, u32 shared, u64 global, u32 bytes, u32 barrier) {
  BulkCopy c{kind};
  c.shared = shared;
  c.global = global_pointer(global, kChunk, "bulk copy");
  c.bytes = bytes;
  c.barrier = barrier;
  return c;
}

// value = 2 * number of leading groups to wait for + (1: reads only)
bool waited(u64 thread, u64 value) {
  for (const BulkCopy& c : bulk_unit.flying)
    if (!c.load() && c.thread == thread && c.group < value / 2 && !(value % 2 && c.step > 0)) return false;
  return true;
}
std::string wait_text(u64, u64 value) { return std::string("cp.async.bulk.wait_group") + (value % 2 ? ".read" : ""); }
}  // namespace

void check_against_copies(Range range, bool write, const char* what) {
  for (const BulkCopy& c : bulk_unit.flying) {
    if (!overlap(c.range(), range)) continue;
    if (c.load()) fail("race: %s at 0x%x while a bulk load to 0x%x is in flight", what, range.begin, c.shared);
    if (write && c.step == 0) fail("race: %s at 0x%x, which a bulk store has not read yet", what, range.begin);
  }
}
void tensor_load(u32 shared, u64 map, const int* corner, int rank, u32 barrier) {
  issue_load(tensor_copy(BulkCopy::TensorLoad, map, corner, rank, shared, barrier));
}
// A box may begin before the array where it is read, but not where it is written (CUDA C++ Programming Guide, "Tensor Memory
// Access"): an H200 calls the instruction illegal.
void check_written_corner(const int* corner, int rank) {
  for (int axis = 0; axis < rank; ++axis)
    if (corner[axis] < 0) fail("a box that is written begins at %d on axis %d", corner[axis], axis);
}
void tensor_store(u64 map, const int* corner, int rank, u32 shared) {
  check_written_corner(corner, rank);
  issue_store(tensor_copy(BulkCopy::TensorStore, map, corner, rank, shared, 0));
}
void tensor_add_f32(u64 map, const int* corner, int rank, u32 shared) {
  check_written_corner(corner, rank);
  const BulkCopy c = tensor_copy(BulkCopy::TensorAddF32, map, corner, rank, shared, 0);
  if (c.map.element_bytes != 4) fail("a tensor reduction of float32 on a map of %d bytes", c.map.element_bytes);
  issue_store(c);
}
void check_tensor_map(u64 map) { decode_map(reinterpret_cast<const void*>(map)); }
void linear_load(u32 shared, u64 global, u32 bytes, u32 barrier) {
  issue_load(linear_copy(BulkCopy::LinearLoad, shared, global, bytes, barrier));
}
void linear_reduce_add_f32(u64 global, u32 shared, u32 bytes) {
  issue_store(linear_copy(BulkCopy::ReduceAddF32, shared, global, bytes, 0));
}
void bulk_commit() {
  BulkGroups& g = bulk_unit.groups[current->thread];
  ++g.open;
  g.dirty = false;
}
void bulk_wait(u32 pending, bool read_only) {
  BulkGroups& g = bulk_unit.groups[current->thread];
  const u64 leading = g.open > pending ? g.open - pending : 0;
  wait_until(waited, wait_text, current->thread, 2 * leading + read_only);
  g.read_waited = std::max(g.read_waited, leading);
}
}  // namespace emu
