// Before a backward that sums gradients of operands in fixed point: the largest numbers of dout, v, out and dlse in each batch
// entry, and in all of them, as exponents.
//
// Job: a warp looks at one row.  What no query sees, and what a query that sees nothing has, may hold anything and is left out.
// Invariant: `bounds` holds zeros when it starts.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/sums.cuh"

static_assert(Config::kSharedBytes == 0, "schedules/rows.py disagrees");

// Of a row, by all lanes of a warp.
__device__ __forceinline__ u32 largest_exponent(const View& view, i64 offset, int columns) {
  const Element* row = static_cast<const Element*>(view.data) + offset;
  u32 largest = 0;
  for (int c = int(threadIdx.x) % 32; c < columns; c += 32)
    largest = max(largest, exponent_bits(to_real(row[c * view.column])));
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, bit));
  return largest;
}

// Most rows have nothing new to tell.
__device__ __forceinline__ void raise(u32& to, u32 x) {
  if (x > to) atomicMax(&to, x);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  i64 line = (i64(blockIdx.x) * Config::kThreads + threadIdx.x) / 32;
  const i64 lines_q = i64(p.batch_size) * p.heads_q * p.seq_q, lines_k = i64(p.batch_size) * p.heads_k * p.seq_k;
  if (line >= lines_q + lines_k) return;
  const bool is_query = line < lines_q;
  if (!is_query) line -= lines_q;
  const int rows = is_query ? p.seq_q : p.seq_k, heads = is_query ? p.heads_q : p.heads_k;
  const int row = int(line % rows), index = int(line / rows), entry = index / heads;
  Place place;
  place.set_head(p, is_query ? index % heads : index % heads * p.group);
  place.set_batch(p, entry);
  place.key_count = Visibility::key_count(p, place);

  Bounds found{0, 0, 0, 0};
  if (is_query) {
    if (sees_nothing(static_cast<const Real*>(p.lse.data)[place.offset(p.lse) + row * p.lse.row])) return;
    found.dout = largest_exponent(p.dout, place.offset(p.dout) + row * p.dout.row, p.head_dim_v);
    found.out = largest_exponent(p.out, place.offset(p.out) + row * p.out.row, p.head_dim_v);
    if (p.dlse.data)
      found.dlse = exponent_bits(static_cast<const Real*>(p.dlse.data)[place.offset(p.dlse) + row * p.dlse.row]);
  } else {
    if (is_empty(seeing_queries(p, place, row))) return;
    found.v = largest_exponent(p.v, place.key_offset(p.v) + row * p.v.row, p.head_dim_v);
    if (found.v)
      found.v += log_above(1 + int(min(drop_scale(p), Real(1 << 30))));  // what is left of them weighs that much more
  }
  if (threadIdx.x % 32 != 0) return;
  for (int of_all = 0; of_all < 2; ++of_all) {
    Bounds& largest = static_cast<Bounds*>(p.bounds)[of_all ? p.batch_size : entry];
    raise(largest.dout, found.dout);
    raise(largest.v, found.v);
    raise(largest.out, found.out);
    raise(largest.dlse, found.dlse);
  }
}
