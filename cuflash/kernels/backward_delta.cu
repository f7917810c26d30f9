// Before the backward: per query, lse in the units of the exponent and delta = dout·out - dlse; the sums of dq start at 0.
// Where rows have sinks, what each of them adds to the gradients of their logits.
// Where these are added to in turns, the turn starts with the first tile of keys that adds, and no block has started.
//
// Job: a few lanes share a row and read it in 16-byte pieces; rows from seq_q to rows_padded get statistics that make their
// probabilities 0, so that the main kernel needs no test for them.
// Invariant: every element of `statistics`, `dq_sum` and, if there are any, `turns` is written.  Where the main kernel multiplies
// planes, statistics of the heads that these stand for are in its units.
// Source: FlashAttention-2 (arXiv:2307.08691), section 3.1.2; delta replaces the sum over keys of p·dp.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/mask.cuh"
#include "attention/plane_units.cuh"
#include "attention/score.cuh"
#include "attention/softmax.cuh"
#include "hw/reduce.cuh"

constexpr int kChunk = 16 / sizeof(Element);
static_assert(Config::kSharedBytes == 0, "schedules/rows.py disagrees");

__device__ __forceinline__ Real dot(const Element* x, i64 x_column, const Element* y, i64 y_column, int begin,
                                    int end) {
  Real sum = 0;
  if (Config::kAligned && begin + kChunk <= end) {
    const auto a = *reinterpret_cast<const Chunk<Element>*>(x + begin),
               b = *reinterpret_cast<const Chunk<Element>*>(y + begin);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum = fma_of(to_real(a.at[i]), to_real(b.at[i]), sum);
  } else {
    for (int i = begin; i < min(begin + kChunk, end); ++i)
      sum = fma_of(to_real(x[i * x_column]), to_real(y[i * y_column]), sum);
  }
  return sum;
}

// Of one row; the rows of a head are summed elsewhere.
template <class P>
__device__ __forceinline__ void store_sink_gradient(const P& p, const Place& place, int row,
                                                    const RowStatistics& statistics) {
  if (row < place.seq_q(p))
    static_cast<Real*>(p.dsinks.data)[place.offset(p.dsinks) + row * p.dsinks.row] =
        sink_gradient(sink_of(p, place), statistics);
}

// Of a bias that is the same for all keys (attention/score.cuh, `bias_apart`): the sum of the gradients of a row's scores, which is
// that of lse but for what the sink has of it.
template <class P>
__device__ __forceinline__ void add_bias_gradient(const P& p, const Place& place, int row, Real dlse,
                                                  const RowStatistics& statistics, Real lse) {
  if (!p.dbias.data || sees_nothing(lse)) return;
  Real sum = dlse + (lse - lse) + (statistics.delta - statistics.delta);  // NaN where scores or their gradients are
  if constexpr (kHasSinks) sum -= sink_gradient(sink_of(p, place), statistics);
  if (sum != Real(0))
    OperandSums::add(element_at<OperandSum>(p.dbias, place.offset(p.dbias), row, 0), sum,
                     OperandSums::unit(p, place, p.dbias, false));
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  const i64 line = (i64(blockIdx.x) * Config::kThreads + threadIdx.x) / Config::kLanes;  // of (batch, head, row)
  const int lane = threadIdx.x % Config::kLanes;
  const i64 lines = i64(p.batch_size) * p.heads_q * p.rows_padded;
  const bool exists = line < lines;
  const int padded_row = int(line % p.rows_padded);
  const int index = int(line / p.rows_padded);
  Place place;
  place.set_head(p, index % p.heads_q);
  place.set_batch(p, exists ? index / p.heads_q : 0);
  const int row = place.enter_row<Config::kBlockQ>(p, padded_row);

  Real delta = 0;
  if (exists && row < place.seq_q(p)) {
    const Matrix<const Element> out = matrix<const Element>(p.out, place.offset(p.out));
    const Matrix<const Element> dout = matrix<const Element>(p.dout, place.offset(p.dout));
    for (int c = lane * kChunk; c < p.head_dim_v; c += Config::kLanes * kChunk)
      delta += dot(out.at(row, 0), out.column, dout.at(row, 0), dout.column, c, p.head_dim_v);
  }
  delta = sum_over_lanes<Config::kLanes>(delta);
  if (!exists) return;
  if (lane == 0) {
    RowStatistics statistics = no_row_statistics();
    Real lse = lse_of_nothing(), dlse = 0;
    if (row < place.seq_q(p)) {
      if (p.dlse.data) dlse = static_cast<const Real*>(p.dlse.data)[place.offset(p.dlse) + row * p.dlse.row];
      lse = static_cast<const Real*>(p.lse.data)[place.offset(p.lse) + row * p.lse.row];
      statistics = row_statistics(lse, delta - dlse);
    }
    if constexpr (kHasSinks) store_sink_gradient(p, place, row, statistics);
    if constexpr (Config::kBiasApart) {
      if (row < place.seq_q(p) && !sees_nothing(lse)) {
        add_bias_gradient(p, place, row, dlse, statistics, lse);
        statistics = row_statistics(lse - bias_apart(p, place, row), statistics.delta);
      }
    }
    if constexpr (kHasPlanes) {
      if (is_split(p, place)) {
        statistics.shift -= kProbabilityLift;
        statistics.delta = GradientExponents(p, place).delta().times(statistics.delta);
      }
    }
    if constexpr (Config::kStatisticsRows > 1) {
      constexpr int kRows = Config::kStatisticsRows;
      TileStatistics<kRows>& tile = static_cast<TileStatistics<kRows>*>(p.statistics)[line / kRows];
      tile.shift[line % kRows] = statistics.shift;
      tile.delta[line % kRows] = statistics.delta;
    } else {
      static_cast<RowStatistics*>(p.statistics)[line] = statistics;
    }
  }
  if (p.dq_sum)
    for (int c = lane; c < p.dq_width; c += Config::kLanes)
      static_cast<Real*>(p.dq_sum)[line * p.dq_width + c] = Real(0);
  if constexpr (Config::kTurns > 0) {
    u32* turns = static_cast<u32*>(p.turns);
    if (line == 0 && lane == 0) *turns = 0;
    if (row % Config::kBlockQ == 0 && lane == 0) {
      place.key_count = Visibility::key_count(p, place);
      const int first = first_key_tile<Config::kBlockQ, Config::kKeyTile>(p, place, row / Config::kBlockQ);
      for (int i = 0; i < Config::kTurns; ++i) turns[1 + line / Config::kBlockQ * Config::kTurns + i] = first;
    }
  }
}
