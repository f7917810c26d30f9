// Backward for float32 on mma.sync tensor cores (sm_80 and later), every number as a pair of float16 ones.
//
// Job: one block owns a tile of keys of one (batch entry, key head) and walks over the query tiles that see it, for every
// query head of the group in turn; dK and dV stay in registers all the while and are written once.  S and dP are computed
// transposed, a row per key.  P and dS pass through shared memory, split like the inputs: P in one scale, since it is at most
// 1, dS in one that the tile's largest decides.  Each step's products begin with fresh accumulators.  dQ is added to float32
// sums in global memory, row-major with kHeadDim columns: the one sum whose order varies, unless blocks take turns.
// Heads whose values do not suit the pairs are left to backward_simt.cu, which leaves the others (attention/planes.cuh).
// Invariants: all threads run the same steps; rows of Q, dO beyond seq_q and keys that nobody sees are zeros in shared memory.
// In turns (kDeterministic): as in backward_mma.cu.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2; Ootomo, Yokota, "Recovering single precision accuracy from Tensor
// Cores while surpassing the FP32 theoretical peak performance" (arXiv:2203.03341).
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy.cuh"
#include "hw/fragment_simt.cuh"
#include "hw/split_tiles.cuh"
#include "hw/reduce.cuh"
#include "hw/turns.cuh"
#include "attention/dropout.cuh"
#include "attention/epilogue.cuh"
#include "attention/planes.cuh"

constexpr int kKeyWarps = Config::kWarps / Config::kQueryWarps;
constexpr int kWarpKeys = Config::kBlockK / kKeyWarps, kWarpQueries = Config::kBlockQ / Config::kQueryWarps;
constexpr int kWarpWidth = Config::kHeadDim / Config::kQueryWarps,
              kWarpWidthV = Config::kHeadDimV / Config::kQueryWarps;
constexpr int kDqWarpRows = Config::kBlockQ / (Config::kWarps / Config::kDqWarpColumns);
constexpr int kDqWarpWidth = Config::kHeadDim / Config::kDqWarpColumns;
// In turns every tile of queries is worked on, the hidden ones too: each walk over it passes the turn on.
constexpr bool kPassesOver = Visibility::kHidesTiles && !Config::kDeterministic;
constexpr int kPlanes = Config::kPlanes;
constexpr int kKeptA = Config::kStages == 1 ? 64 : 32;  // registers
constexpr int kWeightExponent = 14;                     // P · 2^14

struct SharedStorage {
  SharedTile<Config::kBlockK, Config::kHeadDim, Half> k[kPlanes];
  SharedTile<Config::kBlockK, Config::kHeadDimV, Half> v[kPlanes];
  SharedTile<Config::kBlockQ, Config::kHeadDim, Half> q[Config::kStages][kPlanes];
  SharedTile<Config::kBlockQ, Config::kHeadDimV, Half> dout[Config::kDoutStages][kPlanes];
  SharedTile<Config::kBlockK, Config::kBlockQ, Half> p[kPlanes], ds[kPlanes];  // transposed, a row per key
  RowStatistics statistics[Config::kStages][Config::kBlockQ];
  const Half* volatile q_from[kPlanes];  // of the batch entry: the loop has no registers left to keep addresses in
  const Half* volatile dout_from[kPlanes];
  alignas(16) float largest[(Config::kWarps + 3) / 4 * 4];  // dS of each warp
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/split.py disagrees");

typedef MmaFragment<kWarpKeys / 16, kWarpQueries / 8, true> ScoreFragment;
typedef MmaFragment<kWarpKeys / 16, kWarpWidth / 8> KeyFragment;
typedef MmaFragment<kWarpKeys / 16, kWarpWidthV / 8> ValueFragment;
typedef MmaFragment<kDqWarpRows / 16, kDqWarpWidth / 8> QueryFragment;

// Rows of a head into the planes of a tile; `from` is where the planes of the first of its heads begin.
template <int kThreads, class Tile>
__device__ __forceinline__ void copy_planes(Tile (&to)[kPlanes], const Half* const volatile (&from)[kPlanes],
                                            i64 rows_before, int width, int first_row, Range valid) {
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
    copy_tile<kThreads, true>(to[plane], Matrix<const Half>{from[plane] + rows_before * width, width, 1}, first_row,
                              valid, width);
}

// Exponents of the heads that a step works on, as one number.
struct Exponents {
  u32 packed;  // each + 128

  __device__ __forceinline__ Exponents(const Params& p, int of_queries, int of_keys) : packed(0) {
#pragma unroll
    for (int array = 0; array < kSplitArrays; ++array) {
      const int head = SplitShape::is_of_queries(array) ? of_queries : of_keys;
      packed |= u32(exponents(p, array)[head] + 128) << (8 * array);
    }
  }
  __device__ __forceinline__ int of(int array) const { return int(packed >> (8 * array) & 0xffu) - 128; }
};

// Where the parts of a warp begin: in S and dP, in dK and dV, in dQ.
struct WarpParts {
  int warp;

  // Computed anew wherever they are needed: that is cheaper than registers for all of them.
  __device__ __forceinline__ WarpParts() : warp(recomputed(threadIdx.x) / 32) {}
  __device__ __forceinline__ int key() const { return warp / Config::kQueryWarps * kWarpKeys; }
  __device__ __forceinline__ int query() const { return warp % Config::kQueryWarps * kWarpQueries; }
  __device__ __forceinline__ int column() const { return warp % Config::kQueryWarps * kWarpWidth; }
  __device__ __forceinline__ int column_v() const { return warp % Config::kQueryWarps * kWarpWidthV; }
  __device__ __forceinline__ int dq_row() const { return warp / Config::kDqWarpColumns * kDqWarpRows; }
  __device__ __forceinline__ int dq_column() const { return warp % Config::kDqWarpColumns * kDqWarpWidth; }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);

  // Longest first: under a causal mask the first keys are seen by the most queries.
  const int key_tiles = Place::key_tiles<Config::kBlockK>(p);
  int index = blockIdx.x;
  if constexpr (Config::kDeterministic) index = int(start_number(static_cast<u32*>(p.turns), shared_memory));
  const Assignment assigned(p, index, key_tiles, p.batch_size * p.heads_k);
  const int batch_index = assigned.head / p.heads_k, tile = assigned.tile;
  Place place;
  place.head_k = assigned.head % p.heads_k;
  place.set_batch(p, batch_index);
  place.key_count = Visibility::key_count(p, place);
  const int first_head = place.head_k * p.group;
  if (!is_split(p, place)) return;

  const Range keys{tile * Config::kBlockK, min(p.seq_k, (tile + 1) * Config::kBlockK)};
  const Range walk = tiles_over<Config::kBlockQ>(queries_seeing_any(p, place, keys));
  const int first = walk.begin, last = walk.end;
  int steps = last > first ? (last - first) * p.group : 0;  // without the hidden ones that were passed over

  const int width = Config::kExact ? Config::kHeadDim : plane_width(p.head_dim);
  const int width_v = Config::kExact ? Config::kHeadDimV : plane_width(p.head_dim_v);
  const int first_of_batch = batch_index * p.heads_q;
  const Range rows{0, p.seq_q};
  const auto load_queries = [&](int head, int query_tile, int stage) {
    const int row = query_tile * Config::kBlockQ;
    copy_planes<Config::kThreads>(shared.q[stage], shared.q_from, i64(recomputed(head)) * p.seq_q, width, row, rows);
    copy_line<Config::kThreads>(
        shared.statistics[stage],
        static_cast<const RowStatistics*>(p.statistics) + i64(recomputed(first_of_batch + head)) * p.rows_padded + row);
    cp_async_commit_group();
  };
  const auto load_dout = [&](int head, int query_tile, int stage) {
    const int row = query_tile * Config::kBlockQ;
    copy_planes<Config::kThreads>(shared.dout[stage], shared.dout_from, i64(recomputed(head)) * p.seq_q, width_v, row,
                                  rows);
    cp_async_commit_group();
  };

  float dk[KeyFragment::kSize], dv[ValueFragment::kSize];
  clear(dk);
  clear(dv);
  int start_head = first_head, start_tile = Config::kDeterministic ? last - 1 : first;
  if constexpr (kPassesOver)
    skip_hidden_queries<Config::kBlockQ>(p, place, keys, {first, last}, start_head, start_tile, steps);
  if (steps > 0) {
    const Range seen = keys_seen_by_any(p, place, {0, p.seq_q});
    if (threadIdx.x < kPlanes) {
      shared.q_from[threadIdx.x] = plane_of<kPlanes>(p, kSplitQ, threadIdx.x, first_of_batch);
      shared.dout_from[threadIdx.x] = plane_of<kPlanes>(p, kSplitDout, threadIdx.x, first_of_batch);
    }
    __syncthreads();
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const Half *const k = plane_of<kPlanes>(p, kSplitK, plane, assigned.head), *const v = plane_of<kPlanes>(
                                                                                     p, kSplitV, plane, assigned.head);
      copy_tile<Config::kThreads, true>(shared.k[plane], Matrix<const Half>{k, width, 1}, keys.begin, seen, width);
      copy_tile<Config::kThreads, true>(shared.v[plane], Matrix<const Half>{v, width_v, 1}, keys.begin, seen, width_v);
    }
    load_queries(start_head, start_tile, 0);
    load_dout(start_head, start_tile, 0);
  }
  place.head = start_head;
  DropKey key = drop_key(p, place);
  Exponents exponent(p, first_of_batch + start_head, assigned.head);
  int query_tile = start_tile, next_head = start_head, next_tile = start_tile;
  for (int step = 0; step < steps; ++step) {
    const int stage = Config::kStages == 2 ? step & 1 : 0, dout_stage = Config::kDoutStages == 2 ? step & 1 : 0;
    bool more = step + 1 < steps;
    if (Config::kDeterministic ? next_tile-- == first : ++next_tile == last) {
      next_tile = Config::kDeterministic ? last - 1 : first;
      ++next_head;
    }
    if constexpr (kPassesOver) {
      int left = steps - (step + 1);
      skip_hidden_queries<Config::kBlockQ>(p, place, keys, {first, last}, next_head, next_tile, left);
      steps = step + 1 + left;
      more = left > 0;
    }
    cp_async_wait_group<0>();
    __syncthreads();  // this tile has arrived; the previous one and its dS are no longer read
    if (Config::kStages == 2 && more) load_queries(next_head, next_tile, stage ^ 1);
    if (Config::kDoutStages == 2 && more) load_dout(next_head, next_tile, dout_stage ^ 1);

    const WarpParts parts;
    float s[ScoreFragment::kSize], dp[ScoreFragment::kSize];
    split_rows_rows<kPlanes, Config::kHeadDim, kWarpQueries, ScoreFragment>(s, shared.k, parts.key(), shared.q[stage],
                                                                            parts.query());
    const ScoreFragment s_at(parts.key(), parts.query(), recomputed(threadIdx.x));
    const float score_unit = power_of_two(-exponent.of(kSplitK) - exponent.of(kSplitQ));
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= score_unit;
    const Corner corner{query_tile * Config::kBlockQ, keys.begin};
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<true>(
        s, slopes, s_at, p, place, corner,
        tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, {corner.k, corner.k + Config::kBlockK}));
    const RowStatistics* statistics = shared.statistics[recomputed(stage)];
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; i += 2) {
      const Pair<RowStatistics> row = load_pair(statistics + s_at.column(i));
      s[i] = probability(s[i], row.first.shift, p);
      s[i + 1] = probability(s[i + 1], row.second.shift, p);
    }

    mark_dropped<true>(s, s_at, key, p, corner);
    with_kept(
        s, [&](const auto& weights) { store_split_fragment(shared.p, weights, s_at, power_of_two(kWeightExponent)); });
    split_rows_rows<kPlanes, Config::kHeadDimV, kWarpQueries, ScoreFragment>(
        dp, shared.v, WarpParts().key(), shared.dout[dout_stage], WarpParts().query());
    const float dp_unit = power_of_two(-exponent.of(kSplitV) - exponent.of(kSplitDout));
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; i += 2) {
      const Pair<RowStatistics> row = load_pair(statistics + s_at.column(i));
      s[i] = marked_gradient(s[i], dp[i] * dp_unit, row.first.delta, p);
      s[i + 1] = marked_gradient(s[i + 1], dp[i + 1] * dp_unit, row.second.delta, p);
    }
    for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(s, s_at, view, p, place, corner); });
    add_score_gradients(s, slopes, s_at, p, place, corner);
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= slopes[i];
    const float largest_of_warp = largest_finite(s);
    if (threadIdx.x % 32 == 0) shared.largest[WarpParts().warp] = largest_of_warp;
    __syncthreads();  // P is complete, the largest dS is known

    float largest = shared.largest[0];
#pragma unroll
    for (int i = 1; i < Config::kWarps; ++i) largest = max_of(largest, shared.largest[i]);
    const int ds_exponent = exponent_for(largest, kLargestExponent);
    store_split_fragment(shared.ds, s, s_at, power_of_two(ds_exponent));
    const PowerOfTwo dv_unit(-kWeightExponent - exponent.of(kSplitDout));
    split_tiles_columns<kPlanes, Along::kRows, Config::kBlockQ, 16, kKeptA, ValueFragment>(
        shared.p, WarpParts().key(), shared.dout[dout_stage], WarpParts().column_v(), [&](int i, float x, float y) {
          dv[i] = dv_unit.times_plus(x, dv[i]);
          dv[i + 1] = dv_unit.times_plus(y, dv[i + 1]);
        });
    __syncthreads();  // dS is complete; P, and the one dO, are no longer read
    if (Config::kDoutStages == 1 && more) load_dout(next_head, next_tile, 0);
    const PowerOfTwo dk_unit(-ds_exponent - exponent.of(kSplitQ));
    split_tiles_columns<kPlanes, Along::kRows, Config::kBlockQ, 16, kKeptA, KeyFragment>(
        shared.ds, WarpParts().key(), shared.q[stage], WarpParts().column(), [&](int i, float x, float y) {
          dk[i] = dk_unit.times_plus(x, dk[i]);
          dk[i + 1] = dk_unit.times_plus(y, dk[i + 1]);
        });
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // queries are no longer read
      if (more) load_queries(next_head, next_tile, 0);
    } else {
      __syncwarp();  // the compiler would begin dQ before the registers of dK are free
    }
    const PowerOfTwo dq_unit(-ds_exponent - exponent.of(kSplitK));
    const i64 line = i64(recomputed(first_of_batch + place.head)) * p.rows_padded + corner.q;
    const WarpParts dq_parts;
    const QueryFragment dq_at(dq_parts.dq_row(), dq_parts.dq_column(), recomputed(threadIdx.x));
    float* sums = static_cast<float*>(p.dq_sum) + line * Config::kHeadDim;
    const auto multiply_ds_k = [&](auto use) {
      split_tiles_columns<kPlanes, Along::kColumns, Config::kBlockK, 16, kKeptA, QueryFragment, true>(
          shared.ds, dq_parts.dq_row(), shared.k, dq_parts.dq_column(), use);
    };
    const auto add = [&](int i, float x, float y) {
      add_pair(sums + dq_at.row(QueryFragment::slot(i)) * Config::kHeadDim + dq_at.column(i), x, y);
    };
    if constexpr (Config::kDeterministic) {
      float dq[QueryFragment::kSize];
      multiply_ds_k([&](int i, float x, float y) {
        dq[i] = dq_unit.times(x);
        dq[i + 1] = dq_unit.times(y);
      });
      in_turn(static_cast<u32*>(p.turns) + 1 + line / Config::kBlockQ, tile, [&] {
#pragma unroll
        for (int i = 0; i < QueryFragment::kSize; i += 2) add(i, dq[i], dq[i + 1]);
      });
    } else {
      multiply_ds_k([&](int i, float x, float y) { add(i, dq_unit.times(x), dq_unit.times(y)); });
    }
    if (next_head != place.head) {
      place.head = next_head;
      if (more) exponent = Exponents(p, first_of_batch + next_head, assigned.head);
      if (kDrops) key = drop_key(p, place);
    }
    query_tile = next_tile;
  }

  const WarpParts parts;
  store_rows<KeyFragment>(dk, KeyFragment(parts.key(), parts.column()), matrix<Element>(p.dk, place.key_offset(p.dk)),
                          keys, {0, p.head_dim}, p.dk_vectors, [&](int) { return p.scale; });
  store_rows<ValueFragment>(dv, ValueFragment(parts.key(), parts.column_v()),
                            matrix<Element>(p.dv, place.key_offset(p.dv)), keys, {0, p.head_dim_v}, p.dv_vectors,
                            [&](int) { return drop_scale(p); });
}
