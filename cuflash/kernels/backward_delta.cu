// Before the backward: per query, lse in the units of the exponent and delta = dout·out - dlse; the sums of dq start at 0.
// Where rows have sinks, what each of them adds to the gradients of their logits.
// Where these are added to in turns, the turn starts with the first tile of keys that adds, and no block has started.
//
// Job: a few lanes share a row and read it in 16-byte pieces, several rows of one tile after the other, all on their way at once;
// rows from seq_q to rows_padded get statistics that make their probabilities 0, so that the main kernel needs no test for them.
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

constexpr int kRows = Config::kThreads / Config::kLanes;  // of a block at a time, that often:
constexpr int kPasses = Config::kPasses;
constexpr bool kIsOfOneTile = Config::kBlockQ % (kRows * kPasses) == 0;
static_assert(kPasses == 1 || kIsOfOneTile, "schedules/rows.py disagrees");

// Adds the products of a piece of each of the thread's rows.
__device__ __forceinline__ void add_products(Real (&sums)[kPasses], const Matrix<const Element>& x,
                                             const Matrix<const Element>& y, const int (&rows)[kPasses], int begin,
                                             int end) {
  if (Config::kAligned && begin + kChunk <= end) {
    Chunk<Element> a[kPasses], b[kPasses];  // all on their way at once
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      a[i] = *reinterpret_cast<const Chunk<Element>*>(x.data + rows[i] * x.row + begin);
      b[i] = *reinterpret_cast<const Chunk<Element>*>(y.data + rows[i] * y.row + begin);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int j = 0; j < kChunk; ++j) sums[i] = fma_of(to_real(a[i].at[j]), to_real(b[i].at[j]), sums[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll 1
      for (int c = begin; c < min(begin + kChunk, end); ++c)
        sums[i] = fma_of(to_real(*x.at(rows[i], c)), to_real(*y.at(rows[i], c)), sums[i]);
  }
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

// The last rows come first: the main kernel begins with the first ones, and finds them in the second-level cache.
__device__ __forceinline__ u32 block_number() { return gridDim.x - 1 - blockIdx.x; }

// The first row of a thread, among those of all (batch, head) padded to whole tiles.
struct Line {
  int index, padded_row;  // the (batch, head), and the row in it
  bool exists;

  __device__ __forceinline__ explicit Line(const Params& p) : exists(true) {
    if constexpr (kIsOfOneTile) {  // all of one head: a division of 32 bits
      const u32 blocks = u32(p.rows_padded) / (kRows * kPasses);
      index = int(block_number() / blocks);
      padded_row = int(block_number() % blocks) * (kRows * kPasses) + int(threadIdx.x) / Config::kLanes;
    } else {
      const i64 line = i64(block_number()) * kRows + threadIdx.x / Config::kLanes;
      exists = line < i64(p.batch_size) * p.heads_q * p.rows_padded;
      padded_row = int(line % p.rows_padded);
      index = int(line / p.rows_padded);
    }
  }
};

// Whether the main kernel's sums of a tile, from a multiple of four on, have rows that exist: some of its warps' have none.
template <class P> __device__ __forceinline__ bool is_summed(const P&, int offset, int rows) {
  if constexpr (Config::kSumWarps == 0 || !kIsOfOneTile) return true;
  constexpr int kWarps = Config::kSumWarps > 0 ? Config::kSumWarps : 1;
  constexpr int kWarpRows = Config::kBlockQ * Config::kSumWarpColumns / kWarps;
  return SumTile<32 * kWarps, 1>::warp_of(offset) / Config::kSumWarpColumns * kWarpRows < rows;
}

// Of the block's rows, which lie together; the tile that they are in has so many.
__device__ __forceinline__ void clear_sums(const Params& p, int tile_rows) {
  constexpr int kReals = 16 / sizeof(Real);
  const i64 lines = i64(p.batch_size) * p.heads_q * p.rows_padded, first = i64(block_number()) * (kRows * kPasses);
  const int size = int(min(i64(kRows * kPasses), lines - first)) * p.dq_width;
  Real* const sums = static_cast<Real*>(p.dq_sum) + first * p.dq_width;
  if (p.dq_width % kReals == 0) {
#pragma unroll 4
    for (int i = int(threadIdx.x) * kReals; i < size; i += Config::kThreads * kReals)
      if (is_summed(p, int(first % Config::kBlockQ) * p.dq_width + i, tile_rows))
        *reinterpret_cast<Chunk<Real>*>(sums + i) = Chunk<Real>{};
  } else {
    for (int i = int(threadIdx.x); i < size; i += Config::kThreads) sums[i] = Real(0);
  }
}

// Where blocks take turns, by the same search as that of a block which waits, whatever the offsets.
__device__ __forceinline__ int enter_row(const Params& p, Place& place, int padded_row) {
  return kIsOfOneTile && Config::kTurns == 0 ? place.enter_row_by_warp<Config::kBlockQ>(p, padded_row)
                                             : place.enter_row<Config::kBlockQ>(p, padded_row);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 4) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  const Line at(p);
  const int lane = threadIdx.x % Config::kLanes;
  Place place;
  place.set_head(p, at.index % p.heads_q);
  place.set_batch(p, at.exists ? at.index / p.heads_q : 0);
  const int first_row = enter_row(p, place, at.padded_row), seq_q = place.seq_q(p);
  const i64 first_line = i64(at.index) * p.rows_padded + at.padded_row;
  if constexpr (Config::kTurns > 0) {
    if (first_line == 0 && lane == 0) *static_cast<u32*>(p.turns) = 0;
  }
  if (Config::kCounts && block_number() == 0 && threadIdx.x == 0) *static_cast<u32*>(p.turns) = 0;
  const int tile_rows = seq_q - first_row + at.padded_row % Config::kBlockQ;
  if (kPacked && kIsOfOneTile && tile_rows <= 0) return;  // the number of a tile that its segment has no rows for

  // A lane finishes the row of one pass; what it needs for that is on its way beside the rows.
  static_assert(kPasses <= Config::kLanes, "schedules/rows.py disagrees");
  const int pass = lane < kPasses ? lane : 0, row = first_row + pass * kRows;
  const bool is_real = at.exists && row < seq_q;
  Real lse = lse_of_nothing(), dlse = 0;
  if (is_real && lane < kPasses) {
    lse = static_cast<const Real*>(p.lse.data)[place.offset(p.lse) + row * p.lse.row];
    if (p.dlse.data) dlse = static_cast<const Real*>(p.dlse.data)[place.offset(p.dlse) + row * p.dlse.row];
  }
  Real sums[kPasses] = {};
  if (at.exists && seq_q > 0) {
    int rows[kPasses];  // the last one stands for those that do not exist
#pragma unroll
    for (int i = 0; i < kPasses; ++i) rows[i] = min(first_row + i * kRows, seq_q - 1);
    const Matrix<const Element> out = matrix<const Element>(p.out, place.offset(p.out));
    const Matrix<const Element> dout = matrix<const Element>(p.dout, place.offset(p.dout));
    for (int c = lane * kChunk; c < p.head_dim_v; c += Config::kLanes * kChunk)
      add_products(sums, out, dout, rows, c, p.head_dim_v);
  }
  if (p.dq_sum) clear_sums(p, tile_rows);
  Real delta = 0;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const Real sum = sum_over_lanes<Config::kLanes>(sums[i]);
    if (pass == i) delta = sum;
  }
  if (!at.exists) return;
  const i64 line = first_line + pass * kRows;
  if (lane < kPasses) {
    RowStatistics statistics = is_real ? row_statistics(lse, delta - dlse) : no_row_statistics();
    if constexpr (kHasSinks) store_sink_gradient(p, place, row, statistics);
    if constexpr (Config::kBiasApart) {
      if (is_real && !sees_nothing(lse)) {
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
      constexpr int kTileRows = Config::kStatisticsRows;
      TileStatistics<kTileRows>& tile = static_cast<TileStatistics<kTileRows>*>(p.statistics)[line / kTileRows];
      tile.shift[line % kTileRows] = statistics.shift;
      tile.delta[line % kTileRows] = statistics.delta;
    } else {
      static_cast<RowStatistics*>(p.statistics)[line] = statistics;
    }
  }
  if constexpr (Config::kTurns > 0) {
    u32* turns = static_cast<u32*>(p.turns);
    if (row % Config::kBlockQ == 0 && lane < kPasses) {
      place.key_count = Visibility::key_count(p, place);
      const int first = first_key_tile<Config::kBlockQ, Config::kKeyTile>(p, place, row / Config::kBlockQ);
      for (int i = 0; i < Config::kTurns; ++i) turns[1 + line / Config::kBlockQ * Config::kTurns + i] = first;
    }
  }
}
