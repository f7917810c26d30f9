// Warp and block collectives: rendezvous of 32 lanes, shuffles, votes, named barriers.
#include <cstring>
#include <string>
#include "schedule.h"

namespace emu {
// ---- rendezvous of a warp -------------------------------------------------------------------------------------------
namespace {
std::string missing_lanes(u64 warp, u64) {
  const Warp& w = block.warps[warp];
  std::string missing, exited;
  for (u32 l = 0; l < kWarp; ++l) {
    if (w.slot[l]) continue;
    const u32 thread = u32(warp) * kWarp + l;
    (block.fibers[thread].done ? exited : missing) += " " + std::to_string(thread);
  }
  std::string text = std::string("warp-wide ") + w.operation;
  if (!missing.empty()) text += ", missing threads" + missing;
  if (!exited.empty()) text += ", exited threads" + exited;
  return text;
}
}  // namespace

void rendezvous(const char* operation, void* mine, void (*apply)(void** all)) {
  Warp& w = block.warps[warp_number()];
  if (w.arrived && w.operation != operation && strcmp(w.operation, operation))
    fail("divergent warp: %s meets %s, where %u threads of warp %u wait", operation, w.operation, w.arrived,
         warp_number());
  w.operation = operation;
  w.slot[lane()] = mine;
  if (++w.arrived < kWarp) return wait_for_change(w.generation, w.generation, missing_lanes, warp_number());
  apply(w.slot);
  memset(w.slot, 0, sizeof w.slot);
  w.arrived = 0;
  ++w.generation;
}
void converge(const char* operation) {
  int nothing = 0;
  rendezvous(operation, &nothing, [](void**) {});
}
void sync_warp(u32 mask) {
  if (mask != ~0u) fail("__syncwarp with the partial mask 0x%x is not modelled", mask);
  converge("__syncwarp");
}

// ---- shuffles and votes ---------------------------------------------------------------------------------------------
namespace {
struct Exchange {
  Shuffle kind;
  u32 operand, width;
  u64 value, result;
};
// Segments of `width` lanes shuffle among themselves; a lane whose source lies outside keeps its own value.
u32 source_lane(const Exchange& x, u32 l) {
  const u32 first = l & ~(x.width - 1), last = first + x.width - 1;
  switch (x.kind) {
    case Shuffle::Index:
      return first + (x.operand & (x.width - 1));
    case Shuffle::Xor:
      return (l ^ x.operand) <= last ? l ^ x.operand : l;
    case Shuffle::Down:
      return l + x.operand <= last ? l + x.operand : l;
    default:
      return l >= first + x.operand ? l - x.operand : l;
  }
}
}  // namespace

u64 shuffle(Shuffle kind, u32 mask, u64 bits, u32 operand, u32 width) {
  static const char* const names[] = {"shfl.idx", "shfl.bfly", "shfl.down", "shfl.up"};
  if (mask != ~0u) fail("%s with the partial mask 0x%x is not modelled", names[int(kind)], mask);
  if (width == 0 || width > kWarp || (width & (width - 1)))
    fail("%s: width %u is not a power of two up to 32", names[int(kind)], width);
  Exchange mine{kind, operand, width, bits, 0};
  rendezvous(names[int(kind)], &mine, [](void** all) {
    for (u32 l = 0; l < kWarp; ++l) {
      Exchange& x = *static_cast<Exchange*>(all[l]);
      x.result = static_cast<Exchange*>(all[source_lane(x, l)])->value;
    }
  });
  return mine.result;
}
u32 ballot(u32 mask, bool predicate) {
  if (mask != ~0u) fail("vote with the partial mask 0x%x is not modelled", mask);
  u32 vote = predicate;
  rendezvous("vote", &vote, [](void** all) {
    u32 bits = 0;
    for (u32 l = 0; l < kWarp; ++l) bits |= *static_cast<u32*>(all[l]) << l;
    for (u32 l = 0; l < kWarp; ++l) *static_cast<u32*>(all[l]) = bits;
  });
  return vote;
}

// ---- named barriers (PTX ISA, "bar / barrier") ----------------------------------------------------------------------
namespace {
constexpr u32 kBarriers = 16;
struct NamedBarrier {
  u32 expected = 0, arrived = 0;
  u64 generation = 0, warps_here = 0;
};
struct NamedBarriers : AsyncUnit {
  NamedBarrier at[kBarriers];
  u32 counting = 0, counted = 0;  // __syncthreads_count: of the running and of the completed phase
  void begin_block() override {
    for (NamedBarrier& b : at) b = {};
    counting = 0;
  }
} barriers;

std::string barrier_text(u64 id, u64) {
  const NamedBarrier& b = barriers.at[id];
  return "bar.sync " + std::to_string(id) + ", " + std::to_string(b.arrived) + " of " + std::to_string(b.expected) +
         " threads have arrived";
}
// Arrival of one whole warp: the hardware counts warps, so the thread count is a multiple of 32.
void arrive_warp(u32 id, u32 threads) {
  if (id >= kBarriers) fail("named barrier %u: ids are 0..15", id);
  if (threads == 0 || threads % kWarp) fail("named barrier %u: thread count %u is not a multiple of 32", id, threads);
  NamedBarrier& b = barriers.at[id];
  if (b.arrived && b.expected != threads)
    fail("named barrier %u used with two thread counts, %u and %u", id, b.expected, threads);
  const u64 bit = 1ull << warp_number();
  if (b.warps_here & bit) fail("named barrier %u: warp %u arrives twice in one phase", id, warp_number());
  b.expected = threads;
  b.warps_here |= bit;
  if ((b.arrived += kWarp) < threads) return;
  b.arrived = 0;
  b.warps_here = 0;
  barriers.counted = barriers.counting;
  barriers.counting = 0;
  ++b.generation;
}
void named_barrier(const char* operation, u32 id, u32 threads, bool wait, bool predicate) {
  struct Arguments {
    u32 id, threads, predicate;
    u64 generation;
  } mine{id, threads, predicate, 0};
  rendezvous(operation, &mine, [](void** slots) {
    Arguments** all = reinterpret_cast<Arguments**>(slots);
    for (u32 l = 1; l < kWarp; ++l)
      if (all[l]->id != all[0]->id || all[l]->threads != all[0]->threads)
        fail("named barrier: operands differ inside a warp");
    for (u32 l = 0; l < kWarp; ++l) {
      all[l]->generation = barriers.at[all[0]->id % kBarriers].generation;
      barriers.counting += all[l]->predicate;
    }
    arrive_warp(all[0]->id, all[0]->threads);
  });
  if (wait) wait_for_change(barriers.at[id].generation, mine.generation, barrier_text, id);
}
void check_all_alive(const char* operation) {
  if (block.live != block.threads)
    fail("%s, but %u of the block's threads have exited", operation, block.threads - block.live);
}
}  // namespace

void named_barrier(u32 id, u32 threads, bool wait) {
  named_barrier(wait ? "bar.sync" : "bar.arrive", id, threads, wait, false);
}
void block_barrier() {
  check_all_alive("__syncthreads");
  named_barrier("__syncthreads", 0, block.threads, true, false);
}
u32 block_barrier_count(bool predicate) {
  check_all_alive("__syncthreads_count");
  named_barrier("__syncthreads_count", 0, block.threads, true, predicate);
  const u32 count = barriers.counted;
  block_barrier();  // nobody starts the next count before everyone has read this one
  return count;
}
}  // namespace emu
