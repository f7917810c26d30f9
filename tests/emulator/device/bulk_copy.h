// Asynchronous bulk copies in flight: TMA tensor loads and stores, 1-D loads, 1-D reductions (PTX ISA,
// "cp.async.bulk").
#pragma once
#include "shared_memory.h"

namespace emu {
// Races of an access to shared memory with bulk copies in flight; `write`: the access writes.
void check_against_copies(Range range, bool write, const char* what);
// Is a range read by a wgmma that nobody has waited for?  (wgmma.cpp)
bool wgmma_reads(Range range);
}  // namespace emu
