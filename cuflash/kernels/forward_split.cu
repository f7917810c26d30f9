// Forward of float32 on mma.sync tensor cores: numbers as planes of float16 (attention/planes.cuh, hw/gemm_split.cuh).
//
// Job: one block computes a tile of queries (and, of wide values, one chunk of them) against all keys it sees, as in
// forward_mma.cu, from planes that the kernels before have written.  With two stages the next keys and values travel while this
// block is worked on, one barrier per block; with one stage keys travel under the softmax and the second product, values under
// the first.
// Invariants: every thread of the block runs the same key blocks.  A block whose head the planes do not stand for does nothing:
// a kernel of plain float32 that follows has such heads.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy.cuh"
#include "hw/fragment_simt.cuh"
#include "hw/gemm_split.cuh"
#include "attention/dropout.cuh"
#include "attention/epilogue.cuh"
#include "attention/planes.cuh"

constexpr int kPlanes = Config::kPlanes;
constexpr int kWarpRows = Config::kBlockQ / Config::kWarps;
// Weights reach 2^kSlack: with this they fill what float16 has above its smallest number.
constexpr int kWeightExponent = 7;

struct SharedStorage {
  SharedTile<Config::kBlockQ, Config::kHeadDim, Half> q[kPlanes];
  SharedTile<Config::kBlockK, Config::kHeadDim, Half> k[Config::kStages][kPlanes];
  SharedTile<Config::kBlockK, Config::kChunk, Half> v[Config::kStages][kPlanes];
  const Half* volatile keys[kPlanes];  // where planes begin: the loop has no registers left to keep addresses in
  const Half* volatile values[kPlanes];
  volatile int seen_begin, seen_end;
  volatile float unscale;  // what scores are multiplied with
  volatile int last, first_query;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/split.py disagrees");

typedef MmaFragment<kWarpRows / 16, Config::kBlockK / 8> ScoreFragment;
typedef MmaFragment<kWarpRows / 16, Config::kChunk / 8> OutFragment;

// What a block works on.  Longest first: the last queries see the most keys under a causal mask.
struct Work {
  Place place;
  Range queries, columns;

  __device__ __forceinline__ Work(const Params& p, int index) {
    const int query_tiles = Place::query_tiles<Config::kBlockQ>(p);
    const int chunks = Config::kChunk < Config::kHeadDimV ? tiles_of(p.head_dim_v, Config::kChunk) : 1;
    const Assignment assigned(p, index, query_tiles * chunks, p.batch_size * p.heads_q);
    const int tile = query_tiles - 1 - assigned.tile / chunks;
    queries = {tile * Config::kBlockQ, min(p.seq_q, (tile + 1) * Config::kBlockQ)};
    columns = {assigned.tile % chunks * Config::kChunk, p.head_dim_v};
    place.set_head(p, assigned.head % p.heads_q);
    place.set_batch(p, assigned.head / p.heads_q);
    place.key_count = Visibility::key_count(p, place);
  }
};

// One plane of a head as a matrix.
__device__ __forceinline__ Matrix<const Half> plane_matrix(const Params& p, int array, int plane, int head, int width) {
  return {plane_of<kPlanes>(p, array, plane, head), width, 1};
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);

  const Work work(p, blockIdx.x);
  const Place& place = work.place;
  const Range queries = work.queries;
  if (!is_split(p, place)) return;
  const Range seen = keys_seen_by_any(p, place, queries);
  int first = seen.begin / Config::kBlockK;
  const int last = tiles_of(seen.end, Config::kBlockK);
  if constexpr (Visibility::kHidesTiles) first = next_visible_block<Config::kBlockK>(p, place, queries, first, last);
  constexpr int width = Config::kHeadDim, width_v = Config::kWidthV;
  const int of_keys = key_head(p, place);
  const auto load_k = [&](int block, int stage) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      copy_tile<Config::kThreads, true>(shared.k[stage][plane], Matrix<const Half>{shared.keys[plane], width, 1},
                                        block * Config::kBlockK, Range{shared.seen_begin, shared.seen_end}, width);
    cp_async_commit_group();
  };
  const auto load_v = [&](int block, int stage) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      copy_tile<Config::kThreads, true>(shared.v[stage][plane], Matrix<const Half>{shared.values[plane], width_v, 1},
                                        block * Config::kBlockK, Range{shared.seen_begin, shared.seen_end},
                                        width_v - work.columns.begin);
    cp_async_commit_group();
  };

  const int warp_row = int(threadIdx.x) / 32 * kWarpRows;
  const ScoreFragment s_at(warp_row, 0);
  OnlineSoftmax<ScoreFragment, Config::kMaximum, Config::kEntropy> softmax;
  float o[OutFragment::kSize];
  clear(o);
  const DropKey key = drop_key(p, place);
  const float unscale = power_of_two(-exponents(p, kSplitQ)[query_head(p, place)] - exponents(p, kSplitK)[of_keys]);

  if (first < last) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      copy_tile<Config::kThreads, true>(shared.q[plane], plane_matrix(p, kSplitQ, plane, query_head(p, place), width),
                                        queries.begin, queries, width);
    if (threadIdx.x < kPlanes) {
      shared.keys[threadIdx.x] = plane_of<kPlanes>(p, kSplitK, threadIdx.x, of_keys);
      shared.values[threadIdx.x] = plane_of<kPlanes>(p, kSplitV, threadIdx.x, of_keys) + work.columns.begin;
    }
    if (threadIdx.x == 0) {
      shared.seen_begin = seen.begin;
      shared.seen_end = seen.end;
      shared.last = last;
      shared.first_query = queries.begin;
      shared.unscale = power_of_two(-exponents(p, kSplitQ)[query_head(p, place)] - exponents(p, kSplitK)[of_keys]);
    }
    __syncthreads();
    load_k(first, 0);
    load_v(first, 0);
  }
  int stage = 0;
  bool more = first < last;
  int hidden = 0;  // blocks behind the current one that the queries do not see and that are passed over
  for (int block = first; more; block += 1 + hidden, stage ^= Config::kStages - 1) {
    if constexpr (Visibility::kHidesTiles) {
      const int end = tiles_of(seen.end, Config::kBlockK);
      hidden = next_visible_block<Config::kBlockK>(p, place, queries, block + 1, end) - (block + 1);
    }
    more = block + 1 + hidden < shared.last;
    const Corner corner{shared.first_query, block * Config::kBlockK};
    if constexpr (Config::kStages == 2) {
      cp_async_wait_group<0>();
      __syncthreads();  // this block has arrived, the previous one is no longer read
      if (more) {
        load_k(block + 1 + hidden, stage ^ 1);
        load_v(block + 1 + hidden, stage ^ 1);
      }
    } else {
      cp_async_wait_group<1>();
      __syncthreads();  // keys have arrived
    }

    float s[ScoreFragment::kSize];
    split_rows_rows<kPlanes, Config::kHeadDim, Config::kScorePart, ScoreFragment>(s, shared.q, warp_row,
                                                                                  shared.k[stage], 0);
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // keys are no longer read
      if (more) load_k(block + 1 + hidden, 0);
    }
    const float unscale = shared.unscale;
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= unscale;

    ScoreSlopes<ScoreFragment> slopes;
    scores_of<false>(
        s, slopes, s_at, p, place, corner,
        tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, {corner.k, corner.k + Config::kBlockK}));
    softmax.step<OutFragment>(s, o, p);
    drop<true>(s, s_at, key, p, corner);
    const SplitOperandA<kPlanes, ScoreFragment> weights(s, power_of_two(kWeightExponent));

    if constexpr (Config::kStages == 1) {
      if (more)
        cp_async_wait_group<1>();
      else
        cp_async_wait_group<0>();
      __syncthreads();  // values have arrived
    }
    split_operand_columns<kPlanes, 16, ScoreFragment, OutFragment>(o, weights, shared.v[stage], 0);
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // values are no longer read
      if (more) load_v(block + 1 + hidden, 0);
    }
  }

  softmax.finish();
  const Work done(p, recomputed(blockIdx.x));
  softmax.join_sink(p, done.place);
  float factor[OutFragment::kSlots];
#pragma unroll
  for (int slot = 0; slot < OutFragment::kSlots; ++slot)
    factor[slot] = softmax.inverse(slot) * drop_scale(p) * power_of_two(-kWeightExponent);
#pragma unroll
  for (int i = 0; i < OutFragment::kSize; ++i) o[i] *= factor[OutFragment::slot(i)];
  // By itself: the product of both factors may be no number.
  const float unscale_v = power_of_two(-exponents(p, kSplitV)[key_head(p, done.place)]);
  const OutFragment o_at(recomputed(threadIdx.x) / 32 * kWarpRows, 0);
  store_rows(o, o_at, matrix<float>(p.out, done.place.offset(p.out)), done.queries, done.columns, p.out_vectors,
             [&](int) { return unscale_v; });
  if (done.columns.begin == 0) {
    store_lse(softmax, s_at, p, done.place, done.queries);
    store_statistics<Config::kMaximum, Config::kEntropy>(softmax, s_at, p, done.place, done.queries);
  }
}
