// Emulated TMA tensor maps: the 128 opaque bytes hold base, dims, strides and box, written by a stand-in of
// cuTensorMapEncodeTiled with the driver's argument list and its constraints.
#pragma once
#include "shared_memory.h"

namespace emu {
constexpr int kMaxRank = 5;

struct EncodedMap {  // lies inside the 128 bytes of the kernel parameter
  u64 magic;
  unsigned char* base;
  u64 strides[kMaxRank - 1];  // bytes, of dims 1..
  u32 dims[kMaxRank];
  u16 box[kMaxRank];
  unsigned char rank, element_bytes, swizzle_mask;
};
static_assert(sizeof(EncodedMap) <= 128, "must fit the opaque struct");

const EncodedMap& decode_map(const void* map);
inline u32 box_row_bytes(const EncodedMap& m) { return m.box[0] * m.element_bytes; }
u32 box_rows(const EncodedMap& m);
inline u32 box_bytes(const EncodedMap& m) { return box_rows(m) * box_row_bytes(m); }

// Rows of the box between global and shared memory.  Elements outside the tensor read as zero and are not written.
void box_to_shared(const EncodedMap& m, const int* corner, u32 shared, u32 first_row, u32 last_row);
std::vector<unsigned char> box_from_shared(const EncodedMap& m, u32 shared);
void box_to_global(const EncodedMap& m, const int* corner, const std::vector<unsigned char>& box, bool adds = false);
}  // namespace emu
