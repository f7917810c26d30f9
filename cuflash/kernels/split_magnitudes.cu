// Before float32 arrays are split: the largest number of every tile of rows, and the smallest of its rows' largest ones.
//
// Job: a block looks at one tile; a few lanes share a row and read it in 16-byte pieces.
// Invariant: the magnitudes of every tile are written, also where a head has no rows.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/planes.cuh"
#include "hw/reduce.cuh"
#include "hw/split.cuh"

static_assert(Config::kSharedBytes == 0, "schedules/split.py disagrees");
constexpr int kRows = Config::kThreads / Config::kLanes;  // that a block looks at side by side

// Of the rows of a block's tile, kBatch at a time.
template <int kBatch>
__device__ __forceinline__ Magnitudes magnitudes_of(const Matrix<const float>& from, Range rows, int columns) {
  const int lane = threadIdx.x % Config::kLanes;
  Magnitudes found = no_magnitudes();
  for (int row = rows.begin; row < rows.end; row += kBatch * kRows) {
    const int first = row + int(threadIdx.x) / Config::kLanes, count = tiles_of(max(0, rows.end - first), kRows);
    u32 largest[kBatch] = {};
    for (int c = 4 * lane; c < columns; c += 4 * Config::kLanes) {
      Four x[kBatch];
      load_fours<Config::kAligned>(x, from.at(first, 0), kRows * from.row, count, from.column, c, columns);
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[j] = max(largest[j], magnitude(x[j].at[i]));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) found.join_row(max_over_lanes<Config::kLanes>(largest[j]));
  }
  return found;
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  __shared__ Magnitudes of_warps[Config::kThreads / 32];
  const SplitWork work = SplitWork::of<true, Config::kRows, Config::kArrays>(p, blockIdx.x);
  const View& view = view_of<Config::kArrays>(p, work.array);
  const bool of_queries = SplitShape::is_of_queries(work.array);
  const Matrix<const float> from =
      matrix<const float>(view, of_queries ? work.place.offset(view) : work.place.key_offset(view));
  const int columns = SplitShape(p, work.array).columns;
  Magnitudes found = Config::kAligned && columns % 4 == 0 ? magnitudes_of<4>(from, work.rows, columns)
                                                          : magnitudes_of<1>(from, work.rows, columns);
#pragma unroll
  for (int bit = 16; bit >= Config::kLanes; bit /= 2)
    found.join({__shfl_xor_sync(0xffffffffu, found.largest, bit), __shfl_xor_sync(0xffffffffu, found.least, bit)});
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < Config::kThreads / 32; ++warp) found.join(of_warps[warp]);
  tile_magnitudes<Config::kRows>(p, work.array, work.head)[work.tile] = found;
}
