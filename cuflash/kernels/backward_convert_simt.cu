// After the backward of the simt schedule: dq = scale · the sums, in the caller's strides.
//
// The sums lie row by row, (batch, heads_q, rows_padded, dq_width).
#include "variant.cuh"  // generated: Config, Params, modifiers

static_assert(Config::kSharedBytes == 0, "schedules/rows.py disagrees");

// Of one head; those of packed segments are padded to whole tiles.
__device__ __forceinline__ int rows_of(const Params& p) { return kPacked ? p.rows_padded : p.seq_q; }

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  const i64 line = i64(blockIdx.x) * Config::kRows + threadIdx.x / Config::kLanes;
  if (line >= i64(p.batch_size) * p.heads_q * rows_of(p)) return;
  const int padded_row = int(line % rows_of(p)), index = int(line / rows_of(p));
  Place place;
  place.set_head(p, index % p.heads_q);
  place.set_batch(p, index / p.heads_q);
  const int row = place.enter_row<Config::kBlockQ>(p, padded_row);
  if (kPacked && row >= place.seq_q(p)) return;
  const Real* const sums = static_cast<const Real*>(p.dq_sum) + (i64(index) * p.rows_padded + padded_row) * p.dq_width;
  // Of a block of 8 rows and 8 columns, where its rows begin.
  const Real* const blocks = sums + i64(padded_row % 2 * 4 - padded_row % 8) * p.dq_width + padded_row % 8 / 2 * 8;
  const Matrix<Element> dq = matrix<Element>(p.dq, place.offset(p.dq));
  for (int c = threadIdx.x % Config::kLanes; c < p.head_dim; c += Config::kLanes)
    *dq.at(row, c) = Rounded<Element>::of((Config::kInBlocks ? blocks[c / 8 * 32 + c % 8] : sums[c]) * p.scale);
}
