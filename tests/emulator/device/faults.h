// Faults: how a launch ends when a kernel does something the hardware forbids.
#pragma once
#include <csignal>
#include <vector>
#include "runtime.h"

namespace emu {
// Keeps the call stack of the running thread for the host, which knows its source lines.
void record_stack();
void forget_stacks();
std::vector<void*>& recorded_stacks();  // return addresses, innermost frame first, a null behind each stack

// Turns wild addresses, undefined arithmetic and endless loops of a kernel into faults of the launch instead of the
// process.
class FaultHandlers {
 public:
  explicit FaultHandlers(u32 seconds_without_switch);
  ~FaultHandlers();

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
  static constexpr int kSignalCount = sizeof(kSignals) / sizeof(kSignals[0]);
  struct sigaction old_[kSignalCount];
  stack_t old_stack_{};
};
}  // namespace emu
