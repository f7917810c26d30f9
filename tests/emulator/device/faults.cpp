#include "faults.h"
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <sys/time.h>
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>
#include "schedule.h"

namespace emu {
namespace {
constexpr int kMaxFrames = 48, kPage = 4096;
std::vector<void*> frames;
pthread_t launching_thread;

// A kernel that neither blocks nor ends is stopped after some processor time, counted in ticks of one second.
u64 switches_at_tick;
u32 ticks_without_switch, tick_limit;
}  // namespace

void record_stack() {
  void* stack[kMaxFrames];
  const int count = backtrace(stack, kMaxFrames);
  frames.insert(frames.end(), stack, stack + count);
  frames.push_back(nullptr);
}
void forget_stacks() { frames.clear(); }
std::vector<void*>& recorded_stacks() { return frames; }

void fail(const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::string message(text, std::min<size_t>(length, sizeof text - 1));
  message += " [block " + std::to_string(block_index.x) + "," + std::to_string(block_index.y) + "," +
             std::to_string(block_index.z);
  if (current) message += ", thread " + std::to_string(current->thread);
  message += "]";
  if (!current) throw Failure(message);
  record_stack();
  failure = message;
  to_scheduler();  // never resumed
  abort();
}

namespace {
void on_tick() {
  if (!pthread_equal(pthread_self(), launching_thread)) {
    pthread_kill(launching_thread, SIGVTALRM);
    return;
  }
  if (!current) return;
  ticks_without_switch = switches == switches_at_tick ? ticks_without_switch + 1 : 0;
  switches_at_tick = switches;
  if (ticks_without_switch >= tick_limit)
    fail("the thread runs for ever: %u seconds without reaching a barrier, a collective or its end", tick_limit);
}
// The handler runs on its own stack and leaves it for the scheduler's.
void on_signal(int number, siginfo_t* info, void*) {
  if (number == SIGVTALRM) return on_tick();
  if (!block.running || !current) {
    signal(number, SIG_DFL);
    return;
  }
  switch (number) {
    case SIGFPE:
      fail("integer division by zero or overflow");
    case SIGILL:
      fail("undefined behaviour: index outside a local array, shift by too much, misaligned pointer or __builtin_trap");
    default:
      break;
  }
  // A misaligned vector access is reported by the processor without its address.
  if (!info->si_addr) fail("bad address: a null pointer, or a pointer that is misaligned for its type");
  const char* address = static_cast<const char*>(info->si_addr);
  if (address >= current->stack_end && address < current->stack_end + kPage)
    fail("stack overflow: the thread's local arrays are too large");
  fail("bad address %p", info->si_addr);
}
}  // namespace

FaultHandlers::FaultHandlers(u32 seconds_without_switch) {
  static std::unique_ptr<char[]> stack(new char[64 << 10]);
  static bool prepared = false;
  void* frame;
  if (!prepared) backtrace(&frame, 1);  // loads the unwinder now, not inside a signal handler
  prepared = true;
  frames.reserve(64 * kMaxFrames);
  tick_limit = seconds_without_switch;
  launching_thread = pthread_self();
  ticks_without_switch = 0;
  stack_t alternate{};
  alternate.ss_sp = stack.get();
  alternate.ss_size = 64 << 10;
  sigaltstack(&alternate, &old_stack_);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &action, &old_[i]);
  const itimerval every_second{{1, 0}, {1, 0}};
  setitimer(ITIMER_VIRTUAL, &every_second, nullptr);
}
FaultHandlers::~FaultHandlers() {
  const itimerval never{};
  setitimer(ITIMER_VIRTUAL, &never, nullptr);
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &old_[i], nullptr);
  sigaltstack(&old_stack_, nullptr);
}
}  // namespace emu

// Offsets inside this library of the recorded call stacks, innermost frame first, a 0 behind each; returns their
// number.
extern "C" EMU_EXPORT int emu_fault_frames(unsigned long long* offsets, int capacity) {
  int n = 0;
  Dl_info here, info;
  if (!dladdr(reinterpret_cast<void*>(&emu::fail), &here)) return 0;
  for (void* frame : emu::frames) {
    if (n == capacity) break;
    if (!frame)
      offsets[n++] = 0;
    else if (dladdr(frame, &info) && info.dli_fbase == here.dli_fbase)
      offsets[n++] = static_cast<char*>(frame) - static_cast<char*>(here.dli_fbase);
  }
  return n;
}
