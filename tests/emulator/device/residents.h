// Blocks that run at once, as the resident blocks of a GPU do: each in a process of its own, one of which runs at a time.
//
// A process has every unit of the emulator to itself, so that no unit has to know of other blocks; it shares with the others
// the arrays that the host maps for sharing (guards.py).  At the end of a scheduler's round the running one may hand over to
// another, drawn from the seed, so a launch repeats exactly.
#pragma once
#include "schedule.h"

namespace emu {
// Runs `work(resident, context)` in so many processes, or below 2 in this one; an empty text, or the first fault.
std::string run_residents(u32 residents, u64 seed, void (*work)(u32 resident, const void*), const void* context);
// 0, 1, 2 ..., each to one process: the blocks in the order in which they start.
u64 take_number();

// After each round of the scheduler; `happened`: a thread or an asynchronous unit did something other than wait.
// True when nothing has happened for so long that nothing will.
bool rest(bool happened);
}  // namespace emu
