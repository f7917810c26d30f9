// cp.async (PTX ISA, "cp.async"): the data lands at some time before the wait that covers its group; until then the
// destination is poison, and an access to it is a race until the issuing thread has waited.
#include <cstring>
#include <string>
#include "ptx_sm80.h"
#include "shared_memory.h"

namespace emu {
namespace {
struct Copy {
  u32 shared, bytes;
  u64 group;
  unsigned char data[16];
};
struct ThreadCopies {
  std::vector<Copy> queue;  // issued and not yet waited for, in order
  size_t landed = 0;        // of the queue
  u64 open = 0;             // index of the group being filled
  bool listed = false;      // in AsyncCopies::flying
};
struct AsyncCopies : AsyncUnit {
  std::vector<ThreadCopies> threads;
  std::vector<u32> flying;  // threads that may have a copy that has not landed

  void begin_block() override {
    threads.resize(block.threads);
    for (ThreadCopies& t : threads) t = {};
    flying.clear();
  }
  void end_block() override {
    for (size_t t = 0; t < threads.size(); ++t)
      if (!threads[t].queue.empty())
        fail("thread %zu ends without waiting for its cp.async to shared offset %u", t,
             threads[t].queue[0].shared - kSharedBase);
  }
  size_t events(Work kind) override { return kind == Loads ? flying.size() : 0; }
  void run(Work, size_t pick) override {
    ThreadCopies& t = threads[flying[pick]];
    if (t.landed < t.queue.size()) land(t);
    t.listed = t.landed < t.queue.size();
    if (t.listed) return;
    flying[pick] = flying.back();
    flying.pop_back();
  }
  void issue(u32 thread, const Copy& c) {
    ThreadCopies& t = threads[thread];
    if (!t.listed) flying.push_back(thread);
    t.listed = true;
    t.queue.push_back(c);
    mark(c, 1);
  }
  void complete(ThreadCopies& t, u64 groups) {  // hands over the copies of the first `groups` groups
    size_t n = 0;
    for (; n < t.queue.size() && t.queue[n].group < groups; ++n) mark(t.queue[n], 0);
    while (t.landed < n) land(t);
    t.queue.erase(t.queue.begin(), t.queue.begin() + std::ptrdiff_t(n));
    t.landed -= n;
  }
  static void land(ThreadCopies& t) {
    const Copy& c = t.queue[t.landed++];
    memcpy(shared_pointer(c.shared, c.bytes, c.bytes, "cp.async"), c.data, c.bytes);
  }
  static void mark(const Copy& c, u8 in_flight) {
    memset(&shared_memory.in_flight[(c.shared - kSharedBase) / kWord], in_flight, c.bytes / kWord);
  }
} async_copies;
}  // namespace

void copy_async(u32 shared, u64 global, u32 bytes, u32 source_bytes) {
  if (source_bytes > bytes) fail("cp.async: source size %u exceeds the copy's %u bytes", source_bytes, bytes);
  const unsigned char* source = global_pointer(global, bytes, "cp.async");
  unsigned char* destination = shared_write(shared, bytes, "cp.async");
  Copy c{shared, bytes, async_copies.threads[current->thread].open, {}};
  memcpy(c.data, source, source_bytes);
  memset(destination, kPoison, bytes);
  async_copies.issue(current->thread, c);
}
void copy_async_commit() { ++async_copies.threads[current->thread].open; }
void copy_async_wait(u32 pending) {
  ThreadCopies& t = async_copies.threads[current->thread];
  if (t.open > pending) async_copies.complete(t, t.open - pending);
}
void copy_async_wait_all() { async_copies.complete(async_copies.threads[current->thread], ~0ull); }
}  // namespace emu
