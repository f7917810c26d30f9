// mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
#pragma once
#include "shared_memory.h"

namespace emu {
// What a copy does to its barrier; the instructions of threads are declared in ptx_sm90.h.
void mbarrier_check(u32 address, const char* what);  // a fault unless an intact mbarrier lies there
void mbarrier_complete(u32 address, u32 bytes);
}  // namespace emu
