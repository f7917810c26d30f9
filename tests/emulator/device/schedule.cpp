#include "schedule.h"
#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>
#include "faults.h"
#include "residents.h"
#include "shared_memory.h"

namespace emu {
Fiber* current;
Dim3 thread_index, block_index, block_size, grid_size;
u64 switches;
Block block;
Policy policy;
std::string failure;

namespace {
void* scheduler_stack_pointer;
AsyncUnit* first_unit;
}  // namespace

AsyncUnit::AsyncUnit() : next(first_unit) { first_unit = this; }

// ---- fibers ---------------------------------------------------------------------------------------------------------
// Saves the callee-saved registers of the System V x86-64 ABI on the old stack and continues on the new one.
extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
.type emu_switch,@function
emu_switch:
 push %rbp
 push %rbx
 push %r12
 push %r13
 push %r14
 push %r15
 mov %rsp,(%rdi)
 mov %rsi,%rsp
 pop %r15
 pop %r14
 pop %r13
 pop %r12
 pop %rbx
 pop %rbp
 ret
)");

namespace {
// The host keeps the stacks, each above a page that faults.  Their tops are staggered, because stacks that all begin at
// the same offset of a page would compete for the same few cache sets.
void place_stacks(const Launch& parameters) {
  block.fibers.resize(parameters.threads);
  for (u32 t = 0; t < parameters.threads; ++t) {
    block.fibers[t].stack_end = parameters.stacks + t * size_t(parameters.stack_bytes);
    block.fibers[t].stack_top = block.fibers[t].stack_end + parameters.stack_bytes - t % 32 * 320;
  }
}

void (*kernel_entry)(void* context);
void* kernel_context;

void fiber_entry() {
  kernel_entry(kernel_context);
  current->done = true;
  --block.live;
  to_scheduler();
  abort();
}
void prepare_stack(Fiber& f) {
  void** top = reinterpret_cast<void**>(f.stack_top);
  *--top = nullptr;  // keeps the ABI's alignment at entry
  *--top = reinterpret_cast<void*>(fiber_entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.stack_pointer = top;
}
bool runnable(const Fiber& f) {
  if (f.done) return false;
  if (!f.waiting) return true;
  return f.wait.counter ? *f.wait.counter != f.wait.value : f.wait.ready(f.wait.id, f.wait.value);
}

// One visit of a warp: its lanes run one after another, each until it blocks.  A blocked lane hands over to the next
// one without passing through the scheduler (lanes wait at the same call, so the processor predicts where the switch
// returns to).
struct Visit {
  u32 first_thread = 0, next = 0, count = 0;
  u32 awake = 0;
  u32 offset = 0;
  bool descending = false;
  bool progress = false, skipped = false;

  Fiber* next_fiber() {
    while (next < count) {
      const u32 i = next++;
      u32 lane = i + offset < count ? i + offset : i + offset - count;
      if (descending) lane = count - 1 - lane;
      Fiber& f = block.fibers[first_thread + lane];
      if (f.done) continue;
      if (!(awake >> lane & 1)) {
        skipped = true;
        continue;
      }
      if (!runnable(f)) continue;
      progress = true;
      return &f;
    }
    return nullptr;
  }
};
Visit visit;

void resume(void** save, Fiber* f) {
  current = f;
  thread_index = f->index;
  ++switches;
  emu_switch(save, f->stack_pointer);
}
}  // namespace

void to_scheduler() {
  Fiber* self = current;
  Fiber* next = failure.empty() ? visit.next_fiber() : nullptr;
  if (next) {
    resume(&self->stack_pointer, next);
  } else {
    current = nullptr;
    emu_switch(&self->stack_pointer, scheduler_stack_pointer);
  }
}
namespace {
u64 sleeps;      // visits to a thread that ended in one
u64 events_run;  // of asynchronous units
bool probing;    // a deadlock is being reported: blocked threads tell where they are

void suspend() {
  to_scheduler();
  while (probing) {
    record_stack();
    to_scheduler();
  }
}
}  // namespace

void wait_until(Condition ready, Description describe, u64 id, u64 value) {
  Fiber* self = current;
  self->wait = {nullptr, ready, describe, id, value};
  self->waiting = true;
  while (!ready(id, value)) suspend();
  self->waiting = false;
}
void wait_for_change(const u64& counter, u64 before, Description describe, u64 id) {
  Fiber* self = current;
  self->wait = {&counter, nullptr, describe, id, before};
  self->waiting = true;
  while (counter == before) suspend();
  self->waiting = false;
}
void sleep() {
  current->wait = {nullptr, nullptr, [](u64, u64) { return std::string("nanosleep, again and again"); }, 0, 0};
  ++sleeps;
  suspend();
}

// ---- policy ---------------------------------------------------------------------------------------------------------
namespace {
constexpr Pace kPaces[6][kWorkKinds] = {// loads, stores, products
                                        {Eager, Eager, Eager}, {Last, Last, Last},  {Random, Random, Random},
                                        {Last, Eager, Eager},  {Eager, Last, Last}, {Random, Last, Random}};
constexpr u32 kIdleness[] = {0, 8, 8, 15};
constexpr u32 kAllLanes = ~0u;
constexpr u32 kLatestStart = 64;  // visits
}  // namespace

void Policy::start_launch(u64 seed) {
  seed_ = seed;
  state_ = seed * 0x9E3779B97F4A7C15ull + 1;
}
u32 Policy::random(u32 n) {
  state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
  return u32(state_ >> 33) % n;
}
Pace Policy::pace(Work kind) const { return kPaces[seed_ % 6][kind]; }
void Policy::draw_order() {
  for (u32 i = kWorkKinds - 1; i > 0; --i) std::swap(order_[i], order_[random(i + 1)]);
}
void Policy::start_block(u32 warps) {
  idleness_.assign(warps, 0);
  naps_.assign(warps, {kAllLanes, 0});
  if (!shuffled()) return;
  draw_order();
  for (u32& i : idleness_) i = kIdleness[random(4)];
  for (Nap& n : naps_)  // some warps begin late
    if (random(2)) n = {0, random(kLatestStart)};
}
// Lanes may drift apart between two rendezvous: now and then some of a warp's lanes sleep for a number of visits, fewer
// when the lanes that are awake have to wait for them.
u32 Policy::awake_lanes(u32 warp) {
  Nap& n = naps_[warp];
  if (n.visits)
    --n.visits;
  else if (shuffled() && random(16) == 0)
    n = {random(0x7FFFFFFF) << 1 | random(2), random(48)};
  return n.visits ? n.awake : kAllLanes;
}

void Policy::shorten_nap(u32 warp) {
  if (naps_[warp].awake) naps_[warp].visits /= 2;
}

// ---- scheduler ------------------------------------------------------------------------------------------------------
namespace {
void run_warp(u32 warp, u32 awake) {
  visit = {};
  visit.first_thread = warp * kWarp;
  visit.count = std::min(kWarp, block.threads - visit.first_thread);
  visit.awake = awake;
  if (policy.shuffled()) {
    visit.descending = policy.random(2);
    visit.offset = policy.random(visit.count);
  }
  if (Fiber* f = visit.next_fiber()) resume(&scheduler_stack_pointer, f);
  current = nullptr;
  if (!failure.empty()) throw Failure(failure);
}
bool run_event(Work kind) {  // one event of that kind, drawn from all units
  size_t total = 0;
  for (AsyncUnit* u = first_unit; u; u = u->next) total += u->events(kind);
  if (!total) return false;
  size_t pick = policy.shuffled() ? policy.random(u32(total)) : 0;
  for (AsyncUnit* u = first_unit; u; u = u->next) {
    const size_t n = u->events(kind);
    if (pick < n) {
      u->run(kind, pick);
      ++events_run;
      return true;
    }
    pick -= n;
  }
  return false;
}
bool run_fast_events() {  // between visits of warps
  bool progress = false;
  for (int k = 0; k < kWorkKinds; ++k) {
    const Work kind = Work(k);
    const Pace pace = policy.pace(kind);
    if (pace == Eager)
      while (run_event(kind)) progress = true;
    if (pace == Random && policy.random(4) == 0) progress |= run_event(kind);
  }
  return progress;
}
bool force_event() {  // no thread can run: the fastest kind that has work
  if (policy.shuffled() && policy.random(256) == 0) policy.draw_order();
  for (Pace pace : {Eager, Random, Last})
    for (int k = 0; k < kWorkKinds; ++k)
      if (policy.pace(policy.order()[k]) == pace && run_event(policy.order()[k])) return true;
  return false;
}
std::string thread_ranges(const std::vector<u32>& threads) {
  std::string text;
  for (size_t i = 0; i < threads.size();) {
    size_t j = i;
    while (j + 1 < threads.size() && threads[j + 1] == threads[j] + 1) ++j;
    text += (text.empty() ? "" : ",") + std::to_string(threads[i]) + (j > i ? "-" + std::to_string(threads[j]) : "");
    i = j + 1;
  }
  return text;
}
// Names the blocked threads by what they wait for; the call stack of the first one of each group is recorded.
[[noreturn]] void report_deadlock() {
  std::map<std::string, std::vector<u32>> waiting;
  for (const Fiber& f : block.fibers)
    if (!f.done) waiting[f.wait.describe(f.wait.id, f.wait.value)].push_back(f.thread);
  std::string text = "deadlock:";
  probing = true;
  for (const auto& [what, who] : waiting) {
    text += "\n  threads " + thread_ranges(who) + " wait: " + what;
    visit = {};
    resume(&scheduler_stack_pointer, &block.fibers[who[0]]);
    current = nullptr;
  }
  probing = false;
  if (block.live < block.threads) text += "\n  " + std::to_string(block.threads - block.live) + " threads have exited";
  fail("%s\n ", text.c_str());
}
void run_block() {
  const u32 warps = u32(block.warps.size());
  policy.start_block(warps);
  bool visit_all = false;
  while (block.live) {
    bool progress = false, skipped = false;
    const u64 before = switches - sleeps + events_run;
    const u32 first = policy.shuffled() ? policy.random(warps) : 0;
    for (u32 i = 0; i < warps; ++i) {
      const u32 w = (first + i) % warps;
      if (!visit_all && policy.skips(w)) {
        skipped = true;
        continue;
      }
      run_warp(w, visit_all ? kAllLanes : policy.awake_lanes(w));
      progress |= visit.progress;
      if (!visit.progress) policy.shorten_nap(w);
      skipped |= visit.skipped;
      progress |= run_fast_events();
    }
    visit_all = !progress && skipped;
    // A block's copies end at last, too, while its threads do nothing but look whether others are done.
    const bool moves = switches - sleeps + events_run != before;
    if (!moves && !skipped && !force_event() && !progress) report_deadlock();
    if (rest(switches - sleeps + events_run != before)) report_deadlock();
  }
}
void start_fibers() {
  block.live = block.threads;
  ++block.number;
  for (u32 t = 0; t < block.threads; ++t) {
    Fiber& f = block.fibers[t];
    f.thread = t;
    f.index = {t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
    f.done = f.waiting = false;
    prepare_stack(f);
  }
  for (Warp& w : block.warps) w = {};
}
void run_block(u64 number) {
  block_index = {u32(number % grid_size.x), u32(number / grid_size.x % grid_size.y),
                 u32(number / grid_size.x / grid_size.y)};
  start_fibers();
  for (AsyncUnit* u = first_unit; u; u = u->next) u->begin_block();
  run_block();
  for (AsyncUnit* u = first_unit; u; u = u->next) u->end_block();
}
// Blocks start in the grid's order or (seed other than 0) in a random one.
std::vector<u64> block_order;
void draw_block_order() {
  block_order.resize(u64(grid_size.x) * grid_size.y * grid_size.z);
  std::iota(block_order.begin(), block_order.end(), 0);
  if (policy.shuffled())
    for (u64 i = block_order.size(); i > 1; --i) std::swap(block_order[i - 1], block_order[policy.random(u32(i))]);
}
void run_blocks(u32 resident, const void* context) {
  const Launch& parameters = *static_cast<const Launch*>(context);
  if (resident && policy.shuffled())
    policy.start_launch(parameters.seed + 6 * 1000 * resident);  // of the same paces: `pace` takes the seed modulo 6
  place_stacks(parameters);
  shared_memory.reserve(parameters.shared_bytes, parameters.shared_alignment, parameters.async_proxy);
  FaultHandlers handlers(parameters.time_limit);
  switches = sleeps = events_run = 0;
  block.running = true;
  for (u64 i = take_number(); i < block_order.size(); i = take_number()) run_block(block_order[i]);
}
std::string last_error;
}  // namespace

int refuse_launch(const char* reason) {
  last_error = reason;
  return 1;
}
int launch(const Launch& parameters) {
  if (parameters.threads == 0 || parameters.threads > kMaxThreads || parameters.threads % kWarp)
    return refuse_launch("launch: threads must be a multiple of 32 up to 1024");
  last_error.clear();
  failure.clear();
  forget_stacks();
  grid_size = parameters.grid;
  block_size = {parameters.threads, 1, 1};
  block.threads = parameters.threads;
  block.warps.resize(parameters.threads / kWarp);
  kernel_entry = parameters.entry;
  kernel_context = parameters.context;
  policy.start_launch(parameters.seed);
  draw_block_order();
  last_error = run_residents(parameters.residents, parameters.seed, run_blocks, &parameters);
  block.running = false;
  current = nullptr;
  return last_error.empty() ? 0 : 1;
}
}  // namespace emu

extern "C" EMU_EXPORT const char* emu_last_error() { return emu::last_error.c_str(); }
extern "C" EMU_EXPORT unsigned long long emu_switches() { return emu::switches; }
