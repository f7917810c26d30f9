// setmaxnreg (PTX ISA, "setmaxnreg"): warps trade registers inside the pool that the launch reserved, registers at
// launch x threads; a warp that asks for more waits.
#include <algorithm>
#include <string>
#include "ptx_sm90.h"
#include "schedule.h"

namespace emu {
namespace {
struct RegisterPool : AsyncUnit {
  std::vector<u32> per_warp;
  u32 at_launch = 0;

  void begin_block() override {
    at_launch = std::min(255u, 65536 / block.threads) / 8 * 8;
    per_warp.assign(block.warps.size(), at_launch);
  }
  bool allows(u32 warp, u32 registers) const {
    u32 used = 0;
    for (u32 r : per_warp) used += r;
    return used - per_warp[warp] + registers <= at_launch * u32(per_warp.size());
  }
} pool;
}  // namespace

void set_registers(u32 registers, bool grow) {
  const char* name = grow ? "setmaxnreg.inc" : "setmaxnreg.dec";
  converge(name);
  const u32 warp = warp_number(), now = pool.per_warp[warp];
  if (registers < 24 || registers > 256 || registers % 8) fail("%s %u: multiples of 8 in 24..256", name, registers);
  if (now == registers) return;
  if (grow ? registers < now : registers > now) fail("%s from %u to %u registers", name, now, registers);
  wait_until([](u64 w, u64 n) { return pool.per_warp[w] == n || pool.allows(u32(w), u32(n)); },
             [](u64, u64 n) { return "setmaxnreg.inc " + std::to_string(n) + ": the launch's registers are used up"; },
             warp, registers);
  pool.per_warp[warp] = registers;
}
}  // namespace emu
