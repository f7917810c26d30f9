// float32 arrays -> planes of float16 with the exponents of their heads, and which heads these stand for.
//
// Job: a block finds the magnitudes of its head from those of the head's tiles, which the kernel before has found, and splits
// a tile of rows; the first block of each head of keys decides for all heads that go with it.  Blocks run through the arrays
// backwards: what was looked at last is still in the cache.
// Invariants: `attention/planes.cuh` says what is written; every exponent and decision is.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/planes.cuh"
#include "hw/split.cuh"

static_assert(Config::kSharedBytes == 0, "schedules/split.py disagrees");
constexpr int kRows = Config::kThreads / Config::kLanes;  // that a block splits side by side

// Of a head, or where they are found in common, of all heads of queries that share keys with it: these lie side by side.
__device__ __forceinline__ Magnitudes magnitudes_of(const Params& p, int array, int head) {
  int heads = 1;
  if (Config::kGrouped && SplitShape::is_of_queries(array)) {
    heads = p.group;
    head = head / heads * heads;
  }
  const Magnitudes* tiles = tile_magnitudes<Config::kTileRows>(p, array, head);
  Magnitudes found = no_magnitudes();
  for (int tile = int(threadIdx.x) % 32; tile < heads * SplitShape(p, array).tiles(Config::kTileRows); tile += 32)
    found.join(tiles[tile]);
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2)
    found.join({__shfl_xor_sync(0xffffffffu, found.largest, bit), __shfl_xor_sync(0xffffffffu, found.least, bit)});
  return found;
}

// Whether 2^-(x + y) is a number.
__device__ __forceinline__ bool go_together(const Magnitudes& x, const Magnitudes& y) {
  const int sum = x.exponent() + y.exponent();
  return -126 <= sum && sum <= 126;
}

// By one warp: whether the planes stand for a head of keys, its values, and all that belongs to its queries.
__device__ __forceinline__ bool decide(const Params& p, int key_head) {
  const Magnitudes k = magnitudes_of(p, kSplitK, key_head), v = magnitudes_of(p, kSplitV, key_head);
  bool suits = k.suits() && v.suits();
  const int first = key_head / p.heads_k * p.heads_q + key_head % p.heads_k * p.group;
  for (int head = first; suits && head < first + p.group; ++head) {
    const Magnitudes q = magnitudes_of(p, kSplitQ, head);
    suits = q.suits() && go_together(q, k);
    if constexpr (Config::kArrays > kSplitDout) {
      const Magnitudes dout = magnitudes_of(p, kSplitDout, head);
      suits = suits && dout.suits() && go_together(dout, v);
    }
  }
  return suits;
}

// The rows of a block's tile, times a factor, into the planes of their head; kBatch rows at a time.
template <int kBatch>
__device__ __forceinline__ void split_rows(Half* const (&planes)[Config::kPlanes], const Matrix<const float>& from,
                                           Range rows, int columns, float scale) {
  const int lane = threadIdx.x % Config::kLanes, width = plane_width(columns);
  for (int row = rows.begin + int(threadIdx.x) / Config::kLanes; row < rows.end; row += kBatch * kRows) {
    const int count = tiles_of(rows.end - row, kRows);
    for (int c = 4 * lane; c < width; c += 4 * Config::kLanes) {
      Four x[kBatch];
      load_fours<Config::kAligned>(x, from.at(row, 0), kRows * from.row, count, from.column, c, columns);
      const i64 first = i64(row) * width + c;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j >= count) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[j].at[i] *= scale;
        Half* to[Config::kPlanes];
#pragma unroll
        for (int plane = 0; plane < Config::kPlanes; ++plane) to[plane] = planes[plane] + first + j * kRows * width;
        store_split<Config::kPlanes>(to, x[j]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  const SplitWork work = SplitWork::of<false, Config::kRows, Config::kArrays>(p, i64(gridDim.x) - 1 - blockIdx.x);
  if (work.array == kSplitK && work.tile == 0 && threadIdx.x < 32) {
    const bool suits = decide(p, work.head);
    if (threadIdx.x == 0) decisions(p)[work.head] = suits;
  }
  const int exponent = magnitudes_of(p, work.array, work.head).exponent();
  if (work.tile == 0 && threadIdx.x == 0) exponents(p, work.array)[work.head] = exponent;

  const View& view = view_of<Config::kArrays>(p, work.array);
  const bool of_queries = SplitShape::is_of_queries(work.array);
  const Matrix<const float> from =
      matrix<const float>(view, of_queries ? work.place.offset(view) : work.place.key_offset(view));
  const int columns = SplitShape(p, work.array).columns;
  Half* planes[Config::kPlanes];
#pragma unroll
  for (int plane = 0; plane < Config::kPlanes; ++plane)
    planes[plane] = plane_of<Config::kPlanes>(p, work.array, plane, work.head);
  const float scale = power_of_two(exponent);
  if (Config::kAligned && columns == plane_width(columns))
    split_rows<4>(planes, from, work.rows, columns, scale);
  else
    split_rows<1>(planes, from, work.rows, columns, scale);
}
