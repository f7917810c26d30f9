// Backward on mma.sync tensor cores (sm_75 float16; sm_80 and later float16 and bfloat16).
//
// Job: one block owns a tile of keys of one (batch entry, key head) and walks over the query tiles that see it, for every
// query head of the group in turn; dK and dV stay in registers all the while and are written once.  S and dP are computed
// transposed, a row per key.  With one column of warps, P and dS are already the A operands of dV += Pᵀ dO and dK += dSᵀ Q and
// only dS goes through shared memory, for dQ = dS K; with two, pairs of warps share rows and both go through shared memory, at
// least the other warp's half (kOwnHalf), which costs less traffic than it saves where head sizes are large.  dQ is added to
// float32 sums in global memory, the one sum whose order varies, unless blocks take turns.  Beyond 256 columns of dK and dV
// together a block computes one chunk of them, from the whole S and dP.
// Order of a step: Q and dO have arrived and the next copies start; S, P; own half of dV; dP, dS; own half of dK; the other
// halves; dQ.  A step late (kLate), dQ is that of the step before: half of the warps computes it at the start of a step and the
// others at the end, so that products of some run under exponentials of others, and all warps wait for each other but once.
// Invariants: all threads run the same steps; rows of Q, dO beyond seq_q and keys that nobody sees are zeros in shared memory.
// All warps write and read a tile of dS, so a barrier of all lies between its writing and dQ, and one before it is written again.
// Of kLate's two tiles, which alternate, the start of a step is both barriers.  P is read by a pair of warps alone.
// In turns (kDeterministic): tiles of keys add to a tile of queries in ascending order.  Each counter starts at the first tile of
// keys that adds and grows by one with each (attention/mask.cuh, first_key_tile), so that a block's turn has the number of its
// tile.  It waits for earlier tiles of the same heads alone, whose blocks started before it.  Queries are walked over from the
// last to the first: a block then begins where under a causal mask all blocks before it begin, too, and under a window none has
// to come before it.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy.cuh"
#include "hw/gemm_mma.cuh"
#include "hw/reduce.cuh"
#include "hw/turns.cuh"
#include "attention/dropout.cuh"
#include "attention/epilogue.cuh"

constexpr int kKeyWarps = Config::kWarps / Config::kQueryWarps;
constexpr int kWarpKeys = Config::kBlockK / kKeyWarps, kWarpQueries = Config::kBlockQ / Config::kQueryWarps;
constexpr int kWarpWidth = Config::kChunk / Config::kQueryWarps, kWarpWidthV = Config::kChunkV / Config::kQueryWarps;
constexpr bool kSharesRows = Config::kQueryWarps > 1;
static_assert(Config::kQueryWarps <= 2, "a row has two halves");
constexpr int kDqWarpRows = Config::kBlockQ / (Config::kWarps / Config::kDqWarpColumns);
constexpr int kDqWarpWidth = Config::kChunk / Config::kDqWarpColumns;
// In turns every tile of queries is worked on, the hidden ones too: each walk over it passes the turn on.
constexpr bool kPassesOver = Visibility::kHidesTiles && !Config::kDeterministic;
// In turns other blocks wait for dQ, so it is added at once.
constexpr bool kLate = Config::kLate && !Config::kDeterministic;
constexpr int kDsTiles = kLate ? 2 : 1;
static_assert(!kLate || (Config::kStages == 2 && Config::kDoutStages == 2),
              "no barrier of all is left to reuse a stage");
constexpr bool kChunked = Config::kChunk < Config::kHeadDim || Config::kChunkV < Config::kHeadDimV;
// Of shared rows a warp multiplies its own half from registers, where that fills the time until the pair's barrier; chunks have
// no registers left for it.
constexpr bool kOwnHalf = kSharesRows && kLate && !kChunked;
constexpr int kOtherQueries = kOwnHalf ? kWarpQueries : Config::kBlockQ;

struct SharedStorage {
  SharedTile<Config::kBlockK, Config::kHeadDim, Element> k;
  SharedTile<Config::kBlockK, Config::kHeadDimV, Element> v;
  SharedTile<Config::kBlockQ, Config::kHeadDim, Element> q[Config::kStages];
  SharedTile<Config::kBlockQ, Config::kHeadDimV, Element> dout[Config::kDoutStages];
  SharedTile<Config::kBlockK, Config::kBlockQ, Element>
      scores[kDsTiles + kSharesRows];  // transposed, a row per key: dS, P
  RowStatistics statistics[Config::kStages][Config::kBlockQ];
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/mma.py disagrees");

typedef MmaFragment<kWarpKeys / 16, kWarpQueries / 8, true> ScoreFragment;
typedef MmaFragment<kWarpKeys / 16, kWarpWidth / 8> KeyFragment;
typedef MmaFragment<kWarpKeys / 16, kWarpWidthV / 8> ValueFragment;
typedef MmaFragment<kDqWarpRows / 16, kDqWarpWidth / 8> QueryFragment;
typedef SumTile<Config::kThreads, QueryFragment::kSize / 4> DqTile;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);

  auto& p_tile = shared.scores[kSharesRows ? kDsTiles : 0];

  // Longest first: under a causal mask the first keys are seen by the most queries.
  const int key_tiles = Place::key_tiles<Config::kBlockK>(p);
  const int chunks = kChunked ? max(tiles_of(p.head_dim, Config::kChunk), tiles_of(p.head_dim_v, Config::kChunkV)) : 1;
  int index = blockIdx.x;
  if constexpr (Config::kDeterministic) index = int(start_number(static_cast<u32*>(p.turns), shared_memory));
  const Assignment assigned(p, index, key_tiles * chunks, p.batch_size * p.heads_k);
  const int chunk = assigned.tile % chunks, batch_index = assigned.head / p.heads_k;
  Place place;
  place.head_k = assigned.head % p.heads_k;
  place.set_batch(p, batch_index);
  const int tile = place.enter_keys<Config::kBlockK>(p, assigned.tile / chunks);
  place.key_count = Visibility::key_count(p, place);
  const int first_head = place.head_k * p.group;

  const Range keys{tile * Config::kBlockK, min(place.seq_k(p), (tile + 1) * Config::kBlockK)};
  if (kPacked && is_empty(keys)) return;
  const Range queries = queries_seeing_any(p, place, keys);
  const Range walk = tiles_over<Config::kBlockQ>(queries);
  const int first = walk.begin, last = walk.end;
  int steps = last > first ? (last - first) * p.group : 0;  // without the hidden ones that were passed over
  if (Config::kDeterministic && !place.has_all_tiles<Config::kBlockQ, Config::kBlockK>(p)) steps = 0;
  const int column = chunk * Config::kChunk, column_v = chunk * Config::kChunkV;
  const bool has_columns = !kChunked || column < Config::kHeadDim;
  const bool has_columns_v = !kChunked || column_v < Config::kHeadDimV;
  const int head_dim = Config::kExact ? Config::kHeadDim : p.head_dim;  // known to the compiler where nothing is padded
  const int head_dim_v = Config::kExact ? Config::kHeadDimV : p.head_dim_v;
  const int query_tiles = tiles_of(p.rows_padded, Config::kBlockQ);

  Range rows{0, place.seq_q(p)};
  const auto recall_rows = [&] {  // of packed segments: the loop has no registers left to keep their bounds in
    recall(p, place);
    if (kPacked) rows.end = place.seq_q(p);
  };
  const auto load_queries = [&](int head, int query_tile, int stage) {
    const int row = query_tile * Config::kBlockQ;
    const auto q = matrix<const Element>(p.q, place.offset(p.q, head));
    copy_tile<Config::kThreads, Config::kAligned>(shared.q[stage], q, row, rows, head_dim);
    const i64 line = (i64(batch_index) * p.heads_q + head) * p.rows_padded + place.padded_row<Config::kBlockQ>() + row;
    copy_line<Config::kThreads, !kLate>(shared.statistics[stage],
                                        static_cast<const RowStatistics*>(p.statistics) + line);
    cp_async_commit_group();
  };
  const auto load_dout = [&](int head, int query_tile, int stage) {
    const auto dout = matrix<const Element>(p.dout, place.offset(p.dout, head));
    copy_tile<Config::kThreads, Config::kAligned>(shared.dout[stage], dout, query_tile * Config::kBlockQ, rows,
                                                  head_dim_v);
    cp_async_commit_group();
  };

  float dk[KeyFragment::kSize], dv[ValueFragment::kSize];
  clear(dk);
  clear(dv);
  const int warp = int(threadIdx.x) / 32;
  const int warp_key = warp / Config::kQueryWarps * kWarpKeys, warp_query = warp % Config::kQueryWarps * kWarpQueries;
  const int other_query = kOwnHalf ? warp_query ^ kWarpQueries : 0;
  const int warp_column = warp % Config::kQueryWarps * kWarpWidth,
            warp_column_v = warp % Config::kQueryWarps * kWarpWidthV;
  const int dq_row = warp / Config::kDqWarpColumns * kDqWarpRows,
            dq_column = warp % Config::kDqWarpColumns * kDqWarpWidth;
  const ScoreFragment s_at(warp_key, warp_query);
  const auto as_it_is = [](int) { return 1.f; };

  const auto add_queries = [&](int buffer, i64 tile_index) {
    if (!has_columns) return;
    float dq[QueryFragment::kSize];
    clear(dq);
    gemm_columns_columns<Config::kBlockK, QueryFragment, Element, kLate>(dq, shared.scores[buffer], dq_row, shared.k,
                                                                         column + dq_column);
    recall_rows();
    const int dq_chunks = Config::kHeadDim / Config::kChunk;
    const i64 sum = tile_index * dq_chunks + (kChunked ? chunk : 0);
    const auto add = [&] { DqTile::add(static_cast<float*>(p.dq_sum) + sum * DqTile::kSize, dq); };
    if constexpr (Config::kDeterministic)
      in_turn(static_cast<u32*>(p.turns) + 1 + sum, tile, add);
    else
      add();
  };

  int start_head = first_head, start_tile = Config::kDeterministic ? last - 1 : first;
  if constexpr (kPassesOver)
    skip_hidden_queries<Config::kBlockQ>(p, place, keys, {first, last}, start_head, start_tile, steps);
  if (steps > 0) {
    const Range seen = keys_seen_by_any(p, place, {0, place.seq_q(p)});
    copy_tile<Config::kThreads, Config::kAligned>(shared.k, matrix<const Element>(p.k, place.key_offset(p.k)),
                                                  keys.begin, seen, head_dim);
    copy_tile<Config::kThreads, Config::kAligned>(shared.v, matrix<const Element>(p.v, place.key_offset(p.v)),
                                                  keys.begin, seen, head_dim_v);
    load_queries(start_head, start_tile, 0);
    load_dout(start_head, start_tile, 0);
  }
  place.head = start_head;
  DropKey key = drop_key(p, place);
  int query_tile = start_tile, next_head = start_head, next_tile = start_tile;
  i64 before = -1;
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
    __syncthreads();  // this tile has arrived; the previous one, its P and, unless it is late, its dS are no longer read
    recall_rows();
    if (Config::kStages == 2 && more) load_queries(next_head, next_tile, stage ^ 1);
    if (Config::kDoutStages == 2 && more) load_dout(next_head, next_tile, dout_stage ^ 1);
    const int buffer = kLate ? step & 1 : 0;
    auto& ds_tile = shared.scores[buffer];
    if (kLate && step > 0 && warp < Config::kWarps / 2) add_queries(buffer ^ 1, before);

    // Products of this warp's P and dS.
    const auto add_values = [&](const auto& weights) {
      gemm_registers_columns<ScoreFragment, ValueFragment, Element, kLate>(dv, weights, shared.dout[dout_stage],
                                                                           column_v + warp_column_v, warp_query);
    };
    const auto add_keys = [&](const auto& gradients) {
      gemm_registers_columns<ScoreFragment, KeyFragment, Element, kLate>(dk, gradients, shared.q[stage],
                                                                         column + warp_column, warp_query);
    };
    float s[ScoreFragment::kSize], dp[ScoreFragment::kSize];
    clear(s);
    gemm_rows_rows<Config::kHeadDim, ScoreFragment, Element, Config::kHeadDim / 16, kLate>(s, shared.k, warp_key,
                                                                                           shared.q[stage], warp_query);
    recall_rows();
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
    if constexpr (kSharesRows)
      with_kept(s, [&](const auto& weights) {
        store_fragment(p_tile, weights, s_at, as_it_is);
        if constexpr (kOwnHalf) add_values(weights);
      });
    clear(dp);
    gemm_rows_rows<Config::kHeadDimV, ScoreFragment, Element, Config::kHeadDimV / 16, kLate>(
        dp, shared.v, warp_key, shared.dout[dout_stage], warp_query);
    if constexpr (!kSharesRows) {
      if (has_columns_v) with_kept(s, add_values);
    }
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; i += 2) {
      const Pair<RowStatistics> row = load_pair(statistics + s_at.column(i));
      s[i] = marked_gradient(s[i], dp[i], row.first.delta, p);
      s[i + 1] = marked_gradient(s[i + 1], dp[i + 1], row.second.delta, p);
    }
    if (!kChunked || chunk == 0) {
      for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(s, s_at, view, p, place, corner); });
      add_score_gradients(s, slopes, s_at, p, place, corner);
    }
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= slopes[i];
    store_fragment(ds_tile, s, s_at, as_it_is);
    if constexpr (kOwnHalf) add_keys(s);
    if constexpr (!kLate)
      __syncthreads();  // P and dS are complete
    else if constexpr (kSharesRows)
      bar_sync(1 + warp / 2, 64);  // P and dS of this pair's keys are complete

    if constexpr (kSharesRows) {
      if (has_columns_v)
        gemm_rows_columns<kOtherQueries, ValueFragment, Element, kLate>(dv, p_tile, warp_key, shared.dout[dout_stage],
                                                                        column_v + warp_column_v, other_query);
      if (Config::kDoutStages == 1) __syncthreads();  // dO is no longer read
    }
    recall_rows();
    if (Config::kDoutStages == 1 && more) load_dout(next_head, next_tile, 0);
    if (has_columns) {
      if constexpr (kSharesRows)
        gemm_rows_columns<kOtherQueries, KeyFragment, Element, kLate>(dk, ds_tile, warp_key, shared.q[stage],
                                                                      column + warp_column, other_query);
      else
        add_keys(s);
    }
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // queries are no longer read
      if (more) load_queries(next_head, next_tile, 0);
    }
    const i64 tile_index = (i64(batch_index) * p.heads_q + place.head) * query_tiles +
                           place.padded_row<Config::kBlockQ>() / Config::kBlockQ + query_tile;
    if constexpr (kLate) {
      if (step > 0 && warp >= Config::kWarps / 2) add_queries(buffer ^ 1, before);
      before = tile_index;
    } else {
      add_queries(0, tile_index);
    }
    if (kDrops && next_head != place.head) {
      place.head = next_head;
      key = drop_key(p, place);
    }
    place.head = next_head;
    query_tile = next_tile;
  }

  if (kLate && steps > 0) {
    __syncthreads();  // the last dS is complete
    add_queries((steps - 1) & 1, before);
  }
  __syncthreads();  // K and V are no longer read: their tiles carry dK and dV out
  store_fragment(shared.k, dk, KeyFragment(warp_key, warp_column), [&](int) { return p.scale; });
  store_fragment(shared.v, dv, ValueFragment(warp_key, warp_column_v), [&](int) { return drop_scale(p); });
  __syncthreads();
  recall_rows();
  const Matrix<Element> dk_to = matrix<Element>(p.dk, place.key_offset(p.dk) + column * p.dk.column);
  const Matrix<Element> dv_to = matrix<Element>(p.dv, place.key_offset(p.dv) + column_v * p.dv.column);
  store_tile<Config::kThreads, Config::kChunk>(shared.k, dk_to, keys.begin, keys, head_dim - column, p.dk_vectors);
  store_tile<Config::kThreads, Config::kChunkV>(shared.v, dv_to, keys.begin, keys, head_dim_v - column_v, p.dv_vectors);
}
