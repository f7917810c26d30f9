#include "residents.h"
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include "faults.h"

namespace emu {
namespace {
constexpr u32 kMostResidents = 16, kMostFrames = 256;
constexpr u32 kIdleRounds = 400;  // longer than a lane sleeps or a warp begins late

struct Shared {
  u64 next, random, switches;
  u32 idle, residents;
  bool live[kMostResidents];
  sem_t may_run[kMostResidents];
  bool failed;
  char message[8192];
  u32 frame_count;
  void* frames[kMostFrames];
};
Shared alone;
Shared* shared = &alone;
u32 self;

u32 draw(u32 n) {
  shared->random = shared->random * 6364136223846793005ull + 1442695040888963407ull;
  return u32(shared->random >> 33) % n;
}
u32 another() {  // a live process other than this one; this one if there is none
  u32 candidates[kMostResidents], n = 0;
  for (u32 i = 0; i < shared->residents; ++i)
    if (shared->live[i] && i != self) candidates[n++] = i;
  return n ? candidates[draw(n)] : self;
}
[[noreturn]] void leave() {
  shared->live[self] = false;
  shared->switches += switches;
  const u32 next = another();
  if (next != self) sem_post(&shared->may_run[next]);
  _exit(0);
}
void wait_to_run() {
  while (sem_wait(&shared->may_run[self])) {}  // a timer's signal interrupts it
  if (shared->failed) leave();
}
}  // namespace

u64 take_number() { return shared->next++; }

bool rest(bool happened) {
  shared->idle = happened ? 0 : shared->idle + 1;
  if (shared->idle > kIdleRounds * shared->residents) return true;
  if (shared->residents == 1 || (happened && draw(2))) return false;
  const u32 next = another();
  if (next == self) return false;
  sem_post(&shared->may_run[next]);
  wait_to_run();
  return false;
}

namespace {
std::string fault_of(void (*work)(u32, const void*), u32 resident, const void* context) {
  try {
    work(resident, context);
  } catch (const Failure& f) {
    return f.what();
  }
  return "";
}
}  // namespace

std::string run_residents(u32 residents, u64 seed, void (*work)(u32 resident, const void*), const void* context) {
  if (residents < 2) {
    alone = {};
    alone.residents = 1;
    return fault_of(work, 0, context);
  }
  if (residents > kMostResidents) return "launch: more than 16 resident blocks";
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return "launch: no memory for resident blocks";
  shared = static_cast<Shared*>(memory);
  shared->random = seed * 0x9E3779B97F4A7C15ull + 1;
  shared->residents = residents;
  for (u32 i = 0; i < residents; ++i) {
    sem_init(&shared->may_run[i], 1, 0);
    shared->live[i] = true;
  }
  pid_t group = 0;
  const pid_t parent = getpid();
  u32 started = 0;
  for (; started < residents; ++started) {
    const pid_t child = fork();
    if (child < 0) break;
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(0);
      setpgid(0, group);
      self = started;
      wait_to_run();
      const std::string fault = fault_of(work, self, context);
      if (!fault.empty()) {
        shared->failed = true;
        strncpy(shared->message, fault.c_str(), sizeof shared->message - 1);
        shared->frame_count = std::min<u32>(kMostFrames, u32(recorded_stacks().size()));
        std::copy_n(recorded_stacks().begin(), shared->frame_count, shared->frames);
      }
      leave();
    }
    if (!group) group = child;
    setpgid(child, group);  // here as well: whoever comes first
  }
  if (started < residents) {
    shared->failed = true;
    strcpy(shared->message, "launch: fork failed");
    for (u32 i = 0; i < started; ++i) sem_post(&shared->may_run[i]);
  } else {
    sem_post(&shared->may_run[draw(residents)]);
  }
  for (u32 ended = 0; ended < started;) {
    int status = 0;
    if (waitpid(-group, &status, 0) < 0) {
      if (errno == EINTR) continue;
      break;
    }
    ++ended;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    if (!shared->failed) strcpy(shared->message, "a resident block's process was killed by a signal");
    shared->failed = true;
    kill(-group, SIGKILL);  // the others wait for it
  }
  const std::string fault = shared->failed ? shared->message : "";
  for (u32 i = 0; i < shared->frame_count; ++i) recorded_stacks().push_back(shared->frames[i]);
  switches = shared->switches;
  munmap(memory, sizeof(Shared));
  shared = &alone;
  return fault;
}
}  // namespace emu
