// Before second derivatives: per query, lse in the units of the exponent, delta = dout·out - dlse, and the tangents of both.
// Where rows have sinks, what each of them adds to the tangents of the gradients of their logits.
//
// Job: a few lanes share a row.  Invariant: every element of `statistics` is written.
// Source: FlashAttention-2 (arXiv:2307.08691), section 3.1.2, differentiated.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/mask.cuh"
#include "attention/hessian.cuh"
#include "hw/reduce.cuh"

static_assert(Config::kSharedBytes == 0, "schedules/rows.py disagrees");

// A row of a matrix; of no array, zeros.
struct Row {
  const Element* at;
  i64 column;

  __device__ __forceinline__ Row(const View& view, const Place& place, int row)
      : at(view.data ? static_cast<const Element*>(view.data) + place.offset(view) + row * view.row : nullptr),
        column(view.column) {}
  __device__ __forceinline__ Real operator[](int c) const { return at ? to_real(at[c * column]) : Real(0); }
};
__device__ __forceinline__ Real row_value(const View& view, const Place& place, int row) {
  return view.data ? static_cast<const Real*>(view.data)[place.offset(view) + row * view.row] : Real(0);
}
template <class P>
__device__ __forceinline__ void store_sink_gradient(const P& p, const Place& place, int row,
                                                    const MovingRowStatistics& statistics) {
  static_cast<Real*>(p.dsinks.data)[place.offset(p.dsinks) + row * p.dsinks.row] =
      sink_gradient_tangent(sink_of(p, place), sink_tangent_of(p, place), statistics);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  const i64 line = (i64(blockIdx.x) * Config::kThreads + threadIdx.x) / Config::kLanes;  // of (batch, head, row)
  const int lane = int(threadIdx.x) % Config::kLanes;
  const bool exists = line < i64(p.batch_size) * p.heads_q * p.seq_q;
  const int row = int(line % p.seq_q), index = int(line / p.seq_q);
  Place place;
  place.set_head(p, index % p.heads_q);
  place.set_batch(p, exists ? index / p.heads_q : 0);

  Real delta = 0, delta_moved = 0;
  if (exists) {
    const Row out(p.out, place, row), out_moved(p.out_tangent, place, row);
    const Row dout(p.dout, place, row), dout_moved(p.dout_tangent, place, row);
    for (int c = lane; c < p.head_dim_v; c += Config::kLanes) {
      delta = fma_of(dout[c], out[c], delta);
      delta_moved = fma_of(dout_moved[c], out[c], fma_of(dout[c], out_moved[c], delta_moved));
    }
  }
  delta = sum_over_lanes<Config::kLanes>(delta);
  delta_moved = sum_over_lanes<Config::kLanes>(delta_moved);
  if (!exists || lane != 0) return;
  const MovingRowStatistics statistics =
      moving_row_statistics(row_value(p.lse, place, row), row_value(p.lse_tangent, place, row),
                            delta - row_value(p.dlse, place, row), delta_moved - row_value(p.dlse_tangent, place, row));
  if constexpr (kHasSinks) store_sink_gradient(p, place, row, statistics);
  static_cast<MovingRowStatistics*>(p.statistics)[line] = statistics;
}
