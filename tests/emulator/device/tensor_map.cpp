#include "tensor_map.h"
#include <algorithm>
#include <cstring>

namespace emu {
namespace {
constexpr u64 kMagic = 0x50414D5554454D45ull;

// Calls visit(row inside the box, global address of its first element or null, first and last element inside the
// tensor).
template <class Visit>
void for_each_box_row(const EncodedMap& m, const int* corner, u32 first_row, u32 last_row, Visit visit) {
  for (u32 row = first_row; row < last_row; ++row) {
    u32 rest = row;
    i64 offset = 0;
    bool inside = true;
    for (int d = 1; d < m.rank; ++d) {
      const i64 c = corner[d] + i64(rest % m.box[d]);
      rest /= m.box[d];
      inside = inside && c >= 0 && c < i64(m.dims[d]);
      offset += c * i64(m.strides[d - 1]);
    }
    const i64 begin = std::max(i64(0), -i64(corner[0])), end = std::min(i64(m.box[0]), i64(m.dims[0]) - corner[0]);
    inside = inside && begin < end;
    visit(row, inside ? m.base + offset + i64(corner[0]) * m.element_bytes : nullptr, u32(inside ? begin : 0),
          u32(inside ? end : 0));
  }
}
// Shared memory of box row r, byte b: rows follow each other, 16-byte chunks swizzled by address bits.
unsigned char* box_chunk(const EncodedMap& m, u32 shared, u32 row, u32 byte, const char* what) {
  return shared_pointer(swizzled(shared + row * box_row_bytes(m) + byte, m.swizzle_mask), kChunk, kChunk, what);
}
}  // namespace

const EncodedMap& decode_map(const void* map) {
  const auto* m = static_cast<const EncodedMap*>(map);
  if (reinterpret_cast<uintptr_t>(map) % 64) fail("tensor map: the 128 bytes are not aligned to 64");
  if (m->magic != kMagic) fail("tensor map: not an encoded map");
  return *m;
}
u32 box_rows(const EncodedMap& m) {
  u32 n = 1;
  for (int d = 1; d < m.rank; ++d) n *= m.box[d];
  return n;
}
void box_to_shared(const EncodedMap& m, const int* corner, u32 shared, u32 first_row, u32 last_row) {
  const u32 row_bytes = box_row_bytes(m), e = m.element_bytes;
  std::vector<unsigned char> line(row_bytes);
  for_each_box_row(m, corner, first_row, last_row, [&](u32 row, const unsigned char* global, u32 begin, u32 end) {
    std::fill(line.begin(), line.end(), 0);
    if (global) memcpy(line.data() + begin * e, global + begin * e, (end - begin) * e);
    for (u32 b = 0; b < row_bytes; b += kChunk)
      memcpy(box_chunk(m, shared, row, b, "TMA load"), line.data() + b, kChunk);
  });
}
std::vector<unsigned char> box_from_shared(const EncodedMap& m, u32 shared) {
  const u32 row_bytes = box_row_bytes(m);
  std::vector<unsigned char> box(box_bytes(m));
  for (u32 row = 0; row < box_rows(m); ++row)
    for (u32 b = 0; b < row_bytes; b += kChunk)
      memcpy(&box[row * row_bytes + b], box_chunk(m, shared, row, b, "TMA store"), kChunk);
  return box;
}
void box_to_global(const EncodedMap& m, const int* corner, const std::vector<unsigned char>& box, bool adds) {
  const u32 row_bytes = box_row_bytes(m), e = m.element_bytes;
  for_each_box_row(m, corner, 0, box_rows(m), [&](u32 row, unsigned char* global, u32 begin, u32 end) {
    if (!global) return;
    const unsigned char* from = &box[row * row_bytes];
    if (!adds) memcpy(global + begin * e, from + begin * e, (end - begin) * e);
    for (u32 i = begin; adds && i < end; ++i)
      reinterpret_cast<float*>(global)[i] += reinterpret_cast<const float*>(from)[i];
  });
}
}  // namespace emu

// The driver's argument list; 1 = CUDA_ERROR_INVALID_VALUE.
extern "C" EMU_EXPORT int emu_encode_tiled(void* out, int data_type, unsigned rank, void* base,
                                           const unsigned long long* dims, const unsigned long long* strides,
                                           const unsigned* box, const unsigned* element_strides, int interleave,
                                           int swizzle, int, int fill) {
  using namespace emu;
  static const unsigned char bytes_of[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (data_type < 0 || data_type > 12 || rank < 1 || rank > kMaxRank || interleave != 0 || swizzle < 0 || swizzle > 3 ||
      fill != 0)
    return 1;
  if (reinterpret_cast<uintptr_t>(out) % 64 || reinterpret_cast<uintptr_t>(base) % 16) return 1;
  EncodedMap m{};
  m.magic = kMagic;
  m.base = static_cast<unsigned char*>(base);
  m.rank = u8(rank);
  m.element_bytes = bytes_of[data_type];
  m.swizzle_mask = swizzle ? (1 << swizzle) - 1 : 0;
  for (u32 d = 0; d < rank; ++d) {
    if (dims[d] == 0 || dims[d] > (1ull << 32) || box[d] == 0 || box[d] > 256 || element_strides[d] != 1) return 1;
    m.dims[d] = u32(dims[d]);
    m.box[d] = u16(box[d]);
    if (d && (strides[d - 1] % 16 || strides[d - 1] >= (1ull << 40))) return 1;
    if (d) m.strides[d - 1] = strides[d - 1];
  }
  const u32 inner = box_row_bytes(m);
  if (inner % 16 || (swizzle && inner > (16u << swizzle))) return 1;  // the inner box lies within the swizzle span
  memset(out, 0, 128);
  memcpy(out, &m, sizeof m);
  return 0;
}
