// Threads of one block as fibers on one OS thread, and the scheduler that interleaves them.
//
// A fiber runs until it blocks.  The scheduler visits warps in an order drawn from the seed and, between visits, lets
// the asynchronous units (copies, wgmma) make steps.  Nothing here knows an instruction: a blocked fiber carries a
// condition and a description, an asynchronous unit offers events.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>
#include "runtime.h"

namespace emu {
struct Wait {                                  // why a fiber does not run
  const u64* counter = nullptr;                // runs when it differs from `value`; if null,
  bool (*ready)(u64 id, u64 value) = nullptr;  // runs when this holds
  std::string (*describe)(u64 id, u64 value) = nullptr;
  u64 id = 0, value = 0;
};
struct Fiber {
  void* stack_pointer = nullptr;
  char *stack_top = nullptr, *stack_end = nullptr;  // the end is a page that faults
  u32 thread = 0;
  Dim3 index{};
  bool done = false;
  bool waiting = false;
  Wait wait;
};
struct Warp {  // rendezvous of 32 lanes for one .sync instruction
  void* slot[kWarp] = {};
  u32 arrived = 0;
  u64 generation = 0;
  const char* operation = nullptr;
};
struct Block {
  u32 threads = 0, live = 0;
  u64 number = 0;  // blocks started so far in this process
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  bool running = false;
};
extern Block block;

inline u32 lane() { return current->thread % kWarp; }
inline u32 warp_number() { return current->thread / kWarp; }

struct Failure : std::runtime_error { using std::runtime_error::runtime_error; };
extern std::string failure;  // first fault found by a fiber; the launch stops there

// Suspends the running fiber until ready(id, value), or until a counter differs from `before`.
using Condition = bool (*)(u64 id, u64 value);
using Description = std::string (*)(u64 id, u64 value);
void wait_until(Condition ready, Description describe, u64 id, u64 value);
void wait_for_change(const u64& counter, u64 before, Description describe, u64 id);
void to_scheduler();

// ---- asynchronous units ---------------------------------------------------------------------------------------------
// Work that proceeds without a thread: each event is one step that may happen now.
enum Work { Loads, Stores, Products, kWorkKinds };
struct AsyncUnit {
  AsyncUnit* next;
  AsyncUnit();  // joins the list that the scheduler visits
  virtual void begin_block() = 0;
  virtual void end_block() {}  // fails when work was left behind
  virtual size_t events(Work) { return 0; }
  virtual void run(Work, size_t) {}  // event number, below events(kind)
};

// ---- policy ---------------------------------------------------------------------------------------------------------
// Seed 0: all warps in turn, asynchronous work at once.  Other seeds: random order of blocks, warps and lanes, some
// warps slow, and a pace for each kind of asynchronous work: at once, at random times, or last (only when no thread
// can run and no faster kind has work left: the latest time the hardware could choose).
enum Pace { Eager, Random, Last };
class Policy {
 public:
  void start_launch(u64 seed);
  void start_block(u32 warps);
  u32 random(u32 n);
  bool shuffled() const { return seed_ != 0; }
  Pace pace(Work kind) const;
  void draw_order();  // which kind of one pace goes first
  const Work* order() const { return order_; }
  bool skips(u32 warp) { return idleness_[warp] && random(16) < idleness_[warp]; }
  u32 awake_lanes(u32 warp);
  void shorten_nap(u32 warp);  // its other lanes wait already

 private:
  struct Nap { u32 awake, visits; };
  u64 seed_ = 0, state_ = 0;
  std::vector<u32> idleness_;  // of each warp: visits skipped out of 16
  std::vector<Nap> naps_;
  Work order_[kWorkKinds] = {Loads, Stores, Products};
};
extern Policy policy;
}  // namespace emu
