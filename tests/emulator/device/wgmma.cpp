// Warpgroup matrix multiply (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions").
//
// A wgmma is queued by each of the 128 threads and computed once, at a time the scheduler chooses between its issue by
// the last thread and the wait_group that covers it.  From the issue to that wait its accumulator registers hold a
// marked NaN: reading them early gives NaN, writing them is reported, and so is changing A registers that are still in
// use.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include "bulk_copy.h"
#include "numbers.h"
#include "ptx_sm90.h"

namespace emu {
namespace {
// ---- operands in shared memory --------------------------------------------------------------------------------------
struct Descriptor { u32 start, leading, stride, mask, row_bytes; };  // without a swizzle mask 0 and rows of 16 bytes
Descriptor decode_descriptor(u64 d, const char* operand) {
  // bits 0-13 start, 16-29 leading offset, 32-45 stride offset (all / 16), 49-51 base offset, 62-63 swizzle; the rest
  // is zero
  constexpr u64 kReserved = (3ull << 14) | (3ull << 30) | (7ull << 46) | (1023ull << 52);
  if (d & kReserved)
    fail("wgmma descriptor of %s, 0x%016llx: reserved bits set (an address ran over its 14 bits?)", operand, d);
  if (d >> 49 & 7) fail("wgmma descriptor of %s: a base offset is not modelled", operand);
  const u32 code = u32(d >> 62);
  if (!code) return {u32(d & 0x3FFF) << 4, u32(d >> 16 & 0x3FFF) << 4, u32(d >> 32 & 0x3FFF) << 4, 0, kChunk};
  Descriptor r{u32(d & 0x3FFF) << 4, u32(d >> 16 & 0x3FFF) << 4, u32(d >> 32 & 0x3FFF) << 4, (8u >> (code - 1)) - 1,
               128u >> (code - 1)};
  // Without a base offset the start lies in the first row of a swizzle atom (8 rows).
  if (r.start >> 7 & r.mask)
    fail("wgmma descriptor of %s: start 0x%x is not in the first row of a swizzle atom", operand, r.start);
  return r;
}
// Contiguous dimension = k: rows of one panel, 8-row atoms `stride` apart.  One step of 32 bytes lies inside a row; without a
// swizzle its halves are `leading` apart.
u32 k_major_address(const Descriptor& d, u32 row, u32 byte) {
  return d.start + row / 8 * d.stride + row % 8 * d.row_bytes + (d.mask ? byte : byte / kChunk * d.leading);
}
// Contiguous dimension = m or n: panels of row_bytes / 2 elements `leading` apart, atoms of 8 k `stride` apart.
u32 mn_major_address(const Descriptor& d, u32 mn, u32 k) {
  const u32 panel = d.row_bytes / 2;
  return d.start + mn / panel * d.leading + k / 8 * d.stride + k % 8 * d.row_bytes + mn % panel * 2;
}
Range operand_range(const Descriptor& d, u32 extent, bool mn_major) {  // the atoms touched, gaps included
  const u32 atom = 8 * d.row_bytes, panel = d.row_bytes / 2;
  if (!d.mask) {
    if (mn_major) fail("wgmma: the unswizzled layout is modelled with the contraction along rows only");
    return {d.start, k_major_address(d, extent - 8, kChunk) + atom};
  }
  const u32 last = mn_major ? mn_major_address(d, (extent - 1) / panel * panel, 8) : k_major_address(d, extent - 8, 0);
  return {d.start / atom * atom, last / atom * atom + atom};
}
constexpr u16 kUndefined[8] = {0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF};  // NaN in every type
template <class Type> constexpr u32 kDepth = 32 / sizeof(typename Type::Bits);                   // of one step
// visit(row or column, k, value) for all elements; 16-byte chunks as the swizzle moves them.
template <class Type, class Visit>
void read_operand(const Descriptor& d, u32 extent, bool mn_major, Visit visit) {
  typedef typename Type::Bits Bits;
  constexpr u32 kPart = kChunk / sizeof(Bits);
  for (u32 outer = 0; outer < (mn_major ? kDepth<Type> : extent); ++outer)
    for (u32 inner = 0; inner < (mn_major ? extent : kDepth<Type>); inner += kPart) {
      const u32 linear = mn_major ? mn_major_address(d, inner, outer) : k_major_address(d, outer, inner * sizeof(Bits));
      const u32 address = swizzled(linear, d.mask);
      const Bits* p = reinterpret_cast<const Bits*>(shared_pointer(address, kChunk, kChunk, "wgmma operand"));
      if (!async_sees(address, "wgmma")) p = reinterpret_cast<const Bits*>(kUndefined);
      for (u32 i = 0; i < kPart; ++i)
        mn_major ? visit(inner + i, outer, Type::value(p[i])) : visit(outer, inner + i, Type::value(p[i]));
    }
}

// ---- state ----------------------------------------------------------------------------------------------------------
// Accumulators of one register array from its first queued wgmma to the wait that hands them back.
struct Accumulator {
  u32 n;
  std::vector<float> value;  // [64][n]
};
struct Fragments { u32 at[kWarpgroup][4]; };
struct Product {  // one instruction of the warpgroup
  WgmmaForm form;
  u32 arrived = 0;
  std::shared_ptr<Accumulator> d;
  std::unique_ptr<Fragments> fragments;  // A registers of all threads at issue
  Range range_a{0, 0}, range_b{0, 0};
};
struct ThreadProducts {  // what one thread has in flight
  struct Result {
    float* registers;
    std::shared_ptr<Accumulator> d;
    size_t last;
  };
  struct Source {
    const u32* registers;
    u32 copy[4];
    size_t product;
  };
  struct Known {
    const void* registers;
    std::vector<u32> at_fence;
  };
  size_t issued = 0;
  std::vector<size_t> groups;  // committed groups: number of products issued up to each commit
  bool fenced = false;
  std::vector<Result> results;
  std::vector<Source> sources;
  std::vector<Known> known;  // register arrays used so far, as they were at the latest fence
};
struct Warpgroup {
  std::vector<Product> products;
  size_t computed = 0, first_unwaited = 0;
  ThreadProducts threads[kWarpgroup];
};
constexpr u32 kInFlight = 0x7FBADF1Du;  // NaN held by accumulator registers in flight

// Accumulator map: thread t of the warpgroup, register i.
u32 accumulator_row(u32 t, u32 i) { return 16 * (t / 32) + t % 32 / 4 + 8 * (i >> 1 & 1); }
u32 accumulator_column(u32 t, u32 i) { return 8 * (i / 4) + 2 * (t % 4) + (i & 1); }

// ---- arithmetic -----------------------------------------------------------------------------------------------------
void multiply(float* c, const float* a, const float* b, u32 n, u32 depth) {  // c[64][n] += a[64][depth] b[depth][n]
  for (u32 m = 0; m < 64; ++m)
    for (u32 k = 0; k < depth; ++k) {
      const float x = a[m * depth + k];
      for (u32 j = 0; j < n; ++j) c[m * n + j] += x * b[k * n + j];
    }
}
// A fragment: register r holds row 16w + l/4 + 8(r&1), k = 2(l%4) + {0,1} + 8(r>>1), low half first; of 8-bit elements
// k = 4(l%4) + {0,1,2,3} + 16(r>>1), lowest byte first.
template <class Type>
void unpack_fragments(const Fragments& f, float* a) {
  constexpr u32 kPacked = 4 / sizeof(typename Type::Bits), kHalf = kDepth<Type> / 2;
  for (u32 t = 0; t < kWarpgroup; ++t)
    for (u32 r = 0; r < 4; ++r)
      for (u32 h = 0; h < kPacked; ++h)
        a[(16 * (t / 32) + t % 32 / 4 + 8 * (r & 1)) * kDepth<Type> + kPacked * (t % 4) + h + kHalf * (r >> 1)] =
            Type::value(typename Type::Bits(f.at[t][r] >> (32 / kPacked * h)));
}
template <class Type>
void compute(Product& p) {
  static float a[64 * kDepth<Type>], b[kDepth<Type> * 256];
  const u32 n = p.form.n;
  if (p.form.a_in_registers)
    unpack_fragments<Type>(*p.fragments, a);
  else
    read_operand<Type>(decode_descriptor(p.form.a, "A"), 64, p.form.a_mn,
                       [](u32 m, u32 k, float x) { a[m * kDepth<Type> + k] = x; });
  read_operand<Type>(decode_descriptor(p.form.b, "B"), n, p.form.b_mn,
                     [n](u32 j, u32 k, float x) { b[k * n + j] = x; });
  if (!p.form.accumulate)
    std::fill(p.d->value.begin(), p.d->value.end(), 0.f);  // scale-d = 0: D = A B, the old D is ignored
  multiply(p.d->value.data(), a, b, n, kDepth<Type>);
}

struct WgmmaUnit : AsyncUnit {
  std::vector<Warpgroup> warpgroups;  // empty until the block's first wgmma instruction

  void begin_block() override { warpgroups.clear(); }
  void end_block() override {
    for (const Warpgroup& w : warpgroups)
      for (const ThreadProducts& t : w.threads)
        if (!t.results.empty()) fail("the block ends with a wgmma in flight that was never waited for");
  }
  static bool runnable(const Warpgroup& w) {
    return w.computed < w.products.size() && w.products[w.computed].arrived == kWarpgroup;
  }
  size_t events(Work kind) override {
    if (kind != Products) return 0;
    return size_t(std::count_if(warpgroups.begin(), warpgroups.end(), runnable));
  }
  void run(Work, size_t event) override {  // the products of one warpgroup execute in issue order
    for (Warpgroup& w : warpgroups) {
      if (!runnable(w) || event-- > 0) continue;
      Product& p = w.products[w.computed++];
      p.form.type == WgmmaForm::E4m3  ? compute<E4m3>(p)
      : p.form.type == WgmmaForm::F16 ? compute<F16>(p)
                                      : compute<Bf16>(p);
      p.fragments.reset();
      p.d.reset();
      return;
    }
  }
} wgmma_unit;

Warpgroup& my_warpgroup() {
  if (wgmma_unit.warpgroups.empty())
    wgmma_unit.warpgroups = std::vector<Warpgroup>((block.threads + kWarpgroup - 1) / kWarpgroup);
  return wgmma_unit.warpgroups[current->thread / kWarpgroup];
}
ThreadProducts& my_products() { return my_warpgroup().threads[current->thread % kWarpgroup]; }

// ---- rules ----------------------------------------------------------------------------------------------------------
void check_fenced(ThreadProducts& t, const void* registers, u32 n, const char* role) {
  for (auto& k : t.known) {
    if (k.registers != registers) continue;
    if (k.at_fence.size() == n && memcmp(k.at_fence.data(), registers, 4 * n))
      fail("%s registers of a wgmma were written after the last wgmma.fence", role);
    return;
  }
  const auto* words = static_cast<const u32*>(registers);
  t.known.push_back({registers, std::vector<u32>(words, words + n)});
}
// Hands back what is complete; only now are the registers defined.
void retire(ThreadProducts& t, size_t done, u32 thread) {
  for (size_t i = 0; i < t.sources.size();) {
    const auto& s = t.sources[i];
    if (s.product >= done) {
      ++i;
      continue;
    }
    if (memcmp(s.registers, s.copy, sizeof s.copy))
      fail("A registers of a wgmma were changed before the wait that covers it");
    t.sources.erase(t.sources.begin() + std::ptrdiff_t(i));
  }
  for (size_t i = 0; i < t.results.size();) {
    auto& r = t.results[i];
    if (r.last >= done) {
      ++i;
      continue;
    }
    for (u32 j = 0; j < r.d->n / 2; ++j) {
      if (bits_of<u32>(r.registers[j]) != kInFlight)
        fail("accumulator register %u of a wgmma in flight was written before the wait that covers it", j);
      r.registers[j] = r.d->value[accumulator_row(thread, j) * r.d->n + accumulator_column(thread, j)];
    }
    for (auto& k : t.known)  // what wgmma itself wrote needs no fence
      if (k.registers == r.registers) memcpy(k.at_fence.data(), r.registers, k.at_fence.size() * 4);
    t.results.erase(t.results.begin() + std::ptrdiff_t(i));
  }
}
bool is_done(u64 thread, u64 products) { return wgmma_unit.warpgroups[thread / kWarpgroup].computed >= products; }
std::string wait_text(u64 thread, u64 products) {
  const Warpgroup& w = wgmma_unit.warpgroups[thread / kWarpgroup];
  char text[128];
  snprintf(text, sizeof text,
           "wgmma.wait_group for instruction %llu; %zu computed, %u of 128 threads have issued the next", products,
           w.computed, w.computed < w.products.size() ? w.products[w.computed].arrived : 0);
  return text;
}
std::shared_ptr<Accumulator> find_result(ThreadProducts& t, const float* registers, size_t product) {
  for (auto& r : t.results)
    if (r.registers == registers) {
      r.last = product;
      return r.d;
    }
  return nullptr;
}
// First thread of the warpgroup to issue its next instruction.
void open_product(Warpgroup& w, const WgmmaForm& form, std::shared_ptr<Accumulator> d) {
  w.products.emplace_back();
  Product& p = w.products.back();
  p.form = form;
  p.d = d ? d : std::make_shared<Accumulator>(Accumulator{form.n, std::vector<float>(64 * form.n)});
  if (form.a_in_registers)
    p.fragments.reset(new Fragments);
  else
    p.range_a = operand_range(decode_descriptor(form.a, "A"), 64, form.a_mn);
  p.range_b = operand_range(decode_descriptor(form.b, "B"), form.n, form.b_mn);
  if (!form.a_in_registers) check_against_copies(p.range_a, false, "wgmma");
  check_against_copies(p.range_b, false, "wgmma");
}
bool same(const WgmmaForm& x, const WgmmaForm& y) {
  return x.n == y.n && x.a_in_registers == y.a_in_registers && x.accumulate == y.accumulate && x.a_mn == y.a_mn &&
         x.b_mn == y.b_mn && x.type == y.type && x.a == y.a && x.b == y.b;
}
void join_accumulator(Product& p, ThreadProducts& t, std::shared_ptr<Accumulator> mine, float* registers,
                      size_t index) {
  if (mine) {
    if (mine != p.d) fail("wgmma: the threads of a warpgroup name different accumulators");
    return;
  }
  const u32 n = p.form.n;
  if (p.form.accumulate) check_fenced(t, registers, n / 2, "accumulator");
  if (!t.fenced) fail("wgmma on registers that were free to change, without wgmma.fence");
  const u32 thread = current->thread % kWarpgroup;
  for (u32 j = 0; j < n / 2; ++j) {
    p.d->value[accumulator_row(thread, j) * n + accumulator_column(thread, j)] = registers[j];
    registers[j] = bits_of<float>(kInFlight);
  }
  t.results.push_back({registers, p.d, index});
}
}  // namespace

// Operands of a wgmma that no thread has waited for.
bool wgmma_reads(Range range) {
  for (const Warpgroup& w : wgmma_unit.warpgroups)
    for (size_t i = w.first_unwaited; i < w.products.size(); ++i)
      if (overlap(w.products[i].range_a, range) || overlap(w.products[i].range_b, range)) return true;
  return false;
}

// ---- instructions ---------------------------------------------------------------------------------------------------
// Registers written by other instructions are only seen by wgmma after wgmma.fence (PTX ISA, "wgmma.fence").
void wgmma_fence() {
  my_products().fenced = true;
  for (auto& k : my_products().known) memcpy(k.at_fence.data(), k.registers, k.at_fence.size() * 4);
}
void wgmma_issue(const WgmmaForm& form, float* registers, const u32* fragment) {
  Warpgroup& w = my_warpgroup();
  ThreadProducts& t = my_products();
  const size_t index = t.issued++;
  auto mine = find_result(t, registers, index);
  if (index == w.products.size()) open_product(w, form, mine);
  Product& p = w.products[index];
  if (!same(p.form, form))
    fail(
        "wgmma: shape, descriptors or scale-d differ between the threads of a warpgroup (0x%llx, 0x%llx against "
        "0x%llx, 0x%llx)",
        form.a, form.b, p.form.a, p.form.b);
  join_accumulator(p, t, mine, registers, index);
  if (fragment) {
    check_fenced(t, fragment, 4, "A");
    memcpy(p.fragments->at[current->thread % kWarpgroup], fragment, 16);
    ThreadProducts::Source s{fragment, {}, index};
    memcpy(s.copy, fragment, 16);
    t.sources.push_back(s);
  }
  ++p.arrived;
}
void wgmma_commit() { my_products().groups.push_back(my_products().issued); }
void wgmma_wait(u32 pending) {  // at most `pending` of the youngest groups stay in flight
  ThreadProducts& t = my_products();
  const size_t groups = t.groups.size() > pending ? t.groups.size() - pending : 0;
  const size_t done = groups ? t.groups[groups - 1] : 0;
  wait_until(is_done, wait_text, current->thread, done);
  Warpgroup& w = my_warpgroup();
  w.first_unwaited = std::max(w.first_unwaited, done);
  retire(t, done, current->thread % kWarpgroup);
  t.fenced = false;
}
}  // namespace emu
