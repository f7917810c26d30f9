// Values of 8 bits, laid out as the second product of a forward takes them (hw/steps.cuh), for all of its blocks at once.
//
// Job: a thread turns four columns of 16 keys.  Keys and columns that do not exist become zeros.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/steps.cuh"

constexpr int kGroups = Config::kHeadDimV / 4;  // of four columns

__device__ __forceinline__ u32 four_columns(const Params& p, const Matrix<const u8>& v, int row, int column) {
  if (row >= p.seq_k) return 0;
  if (p.value_words && column + 4 <= p.head_dim_v) return *reinterpret_cast<const u32*>(v.at(row, column));
  u32 four = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (column + i < p.head_dim_v) four |= u32(*v.at(row, column + i)) << 8 * i;
  return four;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  const i64 index = i64(blockIdx.x) * Config::kThreads + threadIdx.x, half = index / kGroups;
  const int column = int(index % kGroups) * 4, halves = 2 * p.step_count, head = int(half / halves);
  if (head >= p.batch_size * p.heads_k) return;
  Place place;
  place.head_k = head % p.heads_k;
  place.set_batch(p, head / p.heads_k);
  const auto v = matrix<const u8>(p.v, place.key_offset(p.v));
  const int first = int(half % halves) * kHalfRows;

  u32 columns[4][4];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = four_columns(p, v, first + row_of_byte(4 * word + i), column);
    transpose_bytes(x);
#pragma unroll
    for (int i = 0; i < 4; ++i) columns[i][word] = x[i];
  }
  uint4* const to = static_cast<uint4*>(p.value_steps) + half * Config::kHeadDimV + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = make_uint4(columns[i][0], columns[i][1], columns[i][2], columns[i][3]);
}
