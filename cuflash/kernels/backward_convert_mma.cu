// After the backward of a tensor-core schedule: dq = scale · the float32 sums, rounded, in the caller's strides.
//
// The sums lie in the order of the main kernel's registers (SumTile); the same fragment tells their rows and columns.  Where
// that multiplies planes, those of the heads that these do not stand for lie row by row, as backward_simt.cu adds them up.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy.cuh"
#include "hw/fragment_simt.cuh"
#include "hw/fragment.cuh"
#include "hw/reduce.cuh"
#include "attention/epilogue.cuh"
#include "attention/plane_units.cuh"

constexpr int kDqWarpRows = Config::kBlockQ / (Config::kWarps / Config::kDqWarpColumns);
constexpr int kDqWarpWidth = Config::kChunk / Config::kDqWarpColumns;
typedef MmaFragment<kDqWarpRows / 16, kDqWarpWidth / 8> QueryFragment;
typedef SumTile<Config::kThreads, QueryFragment::kSize / 4> DqTile;
typedef SharedTile<Config::kBlockQ, Config::kChunk, Element> OutTile;
static_assert(sizeof(OutTile) == Config::kSharedBytes, "schedules/mma.py disagrees");

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  OutTile& tile = *reinterpret_cast<OutTile*>(shared_memory);
  // What the main kernel has added to last comes first, while it is in the second-level cache.
  const int number = int(gridDim.x - 1 - blockIdx.x);
  constexpr int kChunks = Config::kHeadDim / Config::kChunk;
  const int query_tiles = p.rows_padded / Config::kBlockQ;
  const float* sums = static_cast<const float*>(p.dq_sum) + i64(number) * DqTile::kSize;
  int index = number;
  const int chunk = index % kChunks;
  index /= kChunks;
  const int padded_row = index % query_tiles * Config::kBlockQ;
  index /= query_tiles;
  Place place;
  place.set_head(p, index % p.heads_q);
  place.set_batch(p, index / p.heads_q);
  const int row = place.enter_row_by_warp<Config::kBlockQ>(p, padded_row);
  if (kPacked && row >= place.seq_q(p)) return;  // the number of a tile that its segment has no rows for

  const int warp = int(threadIdx.x) / 32;
  const bool has_rows = !kPacked || row + warp / Config::kDqWarpColumns * kDqWarpRows < place.seq_q(p);
  float dq[QueryFragment::kSize];
#pragma unroll
  for (int i = 0; i < QueryFragment::kSize; ++i)
    dq[i] = has_rows ? sums[DqTile::offset(i / 4, threadIdx.x, i % 4)] : 0.f;
  const QueryFragment at(warp / Config::kDqWarpColumns * kDqWarpRows, warp % Config::kDqWarpColumns * kDqWarpWidth);
  if constexpr (kHasPlanes) {
    if (is_split(p, place)) {
      const PowerOfTwo unit = GradientExponents(p, place).dq();
#pragma unroll
      for (int i = 0; i < QueryFragment::kSize; ++i) dq[i] = unit.times(dq[i]);
    } else {
#pragma unroll
      for (int i = 0; i < QueryFragment::kSize; ++i)
        dq[i] = sums[at.row(QueryFragment::slot(i)) * Config::kChunk + at.column(i)];
    }
  }
  store_fragment(tile, dq, at, [&](int) { return p.scale; });
  __syncthreads();
  const int column = chunk * Config::kChunk;
  const Matrix<Element> to = matrix<Element>(p.dq, place.offset(p.dq) + column * p.dq.column);
  store_tile<Config::kThreads, Config::kChunk>(tile, to, row, Range{0, place.seq_q(p)}, p.head_dim - column,
                                               p.dq_vectors);
}
