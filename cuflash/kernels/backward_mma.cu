// Backward on mma.sync tensor cores (sm_75 float16; sm_80 and later float16 and bfloat16).
//
// Job: one block owns a tile of keys of one (batch entry, key head) and walks over the query tiles that see it, for every
// query head of the group in turn; dK and dV stay in registers all the while and are written once.  Warps own key rows:
// S and dP are computed transposed, so that P and dS are already the A operands of dV += Pᵀ dO and dK += dSᵀ Q; only dS goes
// through shared memory, for dQ = dS K, which is added to float32 sums in global memory (the one sum whose order varies).
// Beyond 128 columns a block computes one chunk of the columns of dK, dV and dQ, from the whole S and dP.
// Invariants: all threads run the same steps; rows of Q, dO beyond seq_q and keys that nobody sees are zeros in shared memory.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy.cuh"
#include "hw/gemm_mma.cuh"
#include "hw/reduce.cuh"
#include "attention/epilogue.cuh"

constexpr int kWarpKeys = Config::kBlockK / Config::kWarps;
constexpr int kDqWarpRows = Config::kBlockQ / (Config::kWarps / Config::kDqWarpColumns);
constexpr int kDqWarpWidth = Config::kChunk / Config::kDqWarpColumns;
constexpr bool kChunked = Config::kChunk < Config::kHeadDim || Config::kChunkV < Config::kHeadDimV;

struct SharedStorage {
  SharedTile<Config::kBlockK, Config::kHeadDim, Element> k;
  SharedTile<Config::kBlockK, Config::kHeadDimV, Element> v;
  SharedTile<Config::kBlockQ, Config::kHeadDim, Element> q[Config::kStages];
  SharedTile<Config::kBlockQ, Config::kHeadDimV, Element> dout[Config::kStages];
  SharedTile<Config::kBlockK, Config::kBlockQ, Element> ds;  // transposed: a row per key
  RowStatistics statistics[Config::kStages][Config::kBlockQ];
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/mma.py disagrees");

typedef MmaFragment<kWarpKeys / 16, Config::kBlockQ / 8, true> ScoreFragment;
typedef MmaFragment<kWarpKeys / 16, Config::kChunk / 8> KeyFragment;
typedef MmaFragment<kWarpKeys / 16, Config::kChunkV / 8> ValueFragment;
typedef MmaFragment<kDqWarpRows / 16, kDqWarpWidth / 8> QueryFragment;
typedef SumTile<Config::kThreads, QueryFragment::kSize / 4> DqTile;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);

  // Longest first: under a causal mask the first keys are seen by the most queries.
  const int key_tiles = tiles_of(p.seq_k, Config::kBlockK);
  const int chunks = kChunked ? max(tiles_of(p.head_dim, Config::kChunk), tiles_of(p.head_dim_v, Config::kChunkV)) : 1;
  int index = blockIdx.x;
  const int tile = index % key_tiles;
  index /= key_tiles;
  const int chunk = index % chunks;
  index /= chunks;
  Place place;
  place.head_k = index % p.heads_k;
  place.set_batch(p, index / p.heads_k);
  place.key_count = Visibility::key_count(p, place);
  const int first_head = place.head_k * p.group, batch_index = index / p.heads_k;

  const Range keys{tile * Config::kBlockK, min(p.seq_k, (tile + 1) * Config::kBlockK)};
  const Range queries = queries_seeing_any(p, place, keys);
  const int first = queries.begin / Config::kBlockQ, last = tiles_of(queries.end, Config::kBlockQ);
  const int steps = last > first ? (last - first) * p.group : 0;
  const int column = chunk * Config::kChunk, column_v = chunk * Config::kChunkV;
  const int query_tiles = tiles_of(p.rows_padded, Config::kBlockQ);

  const auto load_queries = [&](int step, int stage) {
    const int head = first_head + step / (last - first), row = (first + step % (last - first)) * Config::kBlockQ;
    const Range rows{0, p.seq_q};
    const i64 q_at = place.batch_offset(p.q) + head * p.q.head, dout_at = place.batch_offset(p.dout) + head * p.dout.head;
    copy_tile<Config::kThreads, Config::kAligned>(shared.q[stage], matrix<const Element>(p.q, q_at), row, rows, p.head_dim);
    copy_tile<Config::kThreads, Config::kAligned>(shared.dout[stage], matrix<const Element>(p.dout, dout_at), row, rows, p.head_dim_v);
    const i64 line = (i64(batch_index) * p.heads_q + head) * p.rows_padded + row;
    copy_line<Config::kThreads>(shared.statistics[stage], static_cast<const RowStatistics*>(p.statistics) + line);
    cp_async_commit_group();
  };

  float dk[KeyFragment::kSize], dv[ValueFragment::kSize];
  clear(dk);
  clear(dv);
  const int warp = int(threadIdx.x) / 32, warp_key = warp * kWarpKeys;
  const int dq_row = warp / Config::kDqWarpColumns * kDqWarpRows, dq_column = warp % Config::kDqWarpColumns * kDqWarpWidth;
  const ScoreFragment s_at(warp_key, 0);

  if (steps > 0) {
    const Range seen = keys_seen_by_any(p, place, {0, p.seq_q});
    copy_tile<Config::kThreads, Config::kAligned>(shared.k, matrix<const Element>(p.k, place.key_offset(p.k)), keys.begin, seen, p.head_dim);
    copy_tile<Config::kThreads, Config::kAligned>(shared.v, matrix<const Element>(p.v, place.key_offset(p.v)), keys.begin, seen, p.head_dim_v);
    load_queries(0, 0);
  }
  for (int step = 0; step < steps; ++step) {
    const int stage = Config::kStages == 2 ? step & 1 : 0;
    place.head = first_head + step / (last - first);
    const int query_tile = first + step % (last - first);
    cp_async_wait_group<0>();
    __syncthreads();  // this tile has arrived; the previous one and its dS are no longer read
    if (Config::kStages == 2 && step + 1 < steps) load_queries(step + 1, stage ^ 1);

    float s[ScoreFragment::kSize], dp[ScoreFragment::kSize];
    clear(s);
    gemm_rows_rows<Config::kHeadDim, ScoreFragment, Element>(s, shared.k, warp_key, shared.q[stage], 0);
    const Corner corner{query_tile * Config::kBlockQ, keys.begin};
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<true>(s, slopes, s_at, p, place, corner,
                    tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, {corner.k, corner.k + Config::kBlockK}));
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] = probability(s[i], shared.statistics[stage][s_at.column(i)].shift, p);

    clear(dp);
    gemm_rows_rows<Config::kHeadDimV, ScoreFragment, Element>(dp, shared.v, warp_key, shared.dout[stage], 0);
    if (!kChunked || column_v < Config::kHeadDimV)
      gemm_registers_columns<ScoreFragment, ValueFragment, Element>(dv, s, shared.dout[stage], column_v);
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] = score_gradient(s[i], dp[i], shared.statistics[stage][s_at.column(i)].delta);
    if (!kChunked || chunk == 0)
      for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(s, s_at, view, p, place, corner); });
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= slopes[i];
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; i += 2)
      store_pair(shared.ds.at(s_at.row(ScoreFragment::slot(i)), s_at.column(i)), s[i], s[i + 1]);
    __syncthreads();  // dS is complete

    if (!kChunked || column < Config::kHeadDim) {
      gemm_registers_columns<ScoreFragment, KeyFragment, Element>(dk, s, shared.q[stage], column);
      if constexpr (Config::kStages == 1) {
        __syncthreads();  // queries are no longer read
        if (step + 1 < steps) load_queries(step + 1, 0);
      }
      float dq[QueryFragment::kSize];
      clear(dq);
      gemm_columns_columns<Config::kBlockK, QueryFragment, Element>(dq, shared.ds, dq_row, shared.k, column + dq_column);
      const i64 tile_index = (i64(batch_index) * p.heads_q + place.head) * query_tiles + query_tile;
      const int dq_chunks = Config::kHeadDim / Config::kChunk;
      DqTile::add(static_cast<float*>(p.dq_sum) + (tile_index * dq_chunks + (kChunked ? chunk : 0)) * DqTile::kSize, dq);
    } else if constexpr (Config::kStages == 1) {
      __syncthreads();  // queries are no longer read
      if (step + 1 < steps) load_queries(step + 1, 0);
    }
  }

  const KeyFragment dk_at(warp_key, 0);
  const ValueFragment dv_at(warp_key, 0);
  store_rows(dk, dk_at, matrix<Element>(p.dk, place.key_offset(p.dk)), keys, {column, p.head_dim}, p.dk_pairs, [&](int) { return p.scale; });
  store_rows(dv, dv_at, matrix<Element>(p.dv, place.key_offset(p.dv)), keys, {column_v, p.head_dim_v}, p.dv_pairs, [&](int) { return 1.f; });
}
