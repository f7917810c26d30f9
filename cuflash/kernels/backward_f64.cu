// Backward for float64 by tensor cores (sm_80 and later).
//
// Job: as in backward_simt.cu, a block owns a tile of keys of one (batch entry, key head) and walks over the query tiles that see
// it, for every query head of the group in turn.  Half of the warps compute S, P, dS and dK, the other half dQ, dP and dV; a warp
// of either owns the same keys in S, dP, dK and dV.  S and dP are transposed, a row per key: then dS is an operand of dK as it
// stands.  P and dP change halves through shared memory, where dS takes the place of dP for dQ, which is summed one step
// late: products of one half run under the exponentials of the other.
// dQ is added to sums in global memory: the one sum whose order varies, unless blocks take turns.
// Invariants: all threads run the same steps; rows of Q and dO that see none of the keys, and keys that nobody sees, are zeros in
// shared memory.  Only the first half reads Q, whose next tile arrives during a whole step, and only the second dO, whose
// next tile arrives while dQ is computed.  A half never waits for all of the other, but for what it is about to read or to
// overwrite (`Barrier`), so that the two need not be at the same place.  In turns (kDeterministic): as in backward_mma.cu.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy_simt.cuh"
#include "hw/exp2_f64.cuh"
#include "hw/gemm_swizzled_f64.cuh"
#include "hw/ptx.cuh"
#include "hw/turns.cuh"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/epilogue.cuh"

constexpr int kHalf = Config::kWarps / 2, kHalfThreads = 32 * kHalf;
constexpr int kWarpKeys = Config::kBlockK / kHalf;
// Of dQ transposed, a row per column of dQ.
constexpr int kDqRows = Config::kHeadDim * Config::kQueryWarps / kHalf,
              kDqQueries = Config::kBlockQ / Config::kQueryWarps;
static_assert(kHalf * kWarpKeys == Config::kBlockK && kWarpKeys % 16 == 0, "whole products");
static_assert(kDqRows * kHalf == Config::kHeadDim * Config::kQueryWarps && kDqRows % 16 == 0, "whole products");
static_assert(kDqQueries * Config::kQueryWarps == Config::kBlockQ && kDqQueries % 8 == 0, "whole products");
static_assert(Config::kQueryWarps == 1 || kDqQueries == 8 || kDqQueries % 16 == 0, "what Pieces asks for");
// Of each half; and those at which one half waits and the other just arrives.
enum Barrier { kFirstHalf = 1, kSecondHalf, kPWritten, kPRead, kDpWritten, kDsWritten };

typedef MmaFragment<kWarpKeys / 16, Config::kBlockQ / 8, true> ScoreFragment;
typedef MmaFragment<kWarpKeys / 16, Config::kHeadDim / 8> KeyFragment;
typedef MmaFragment<kWarpKeys / 16, Config::kHeadDimV / 8> ValueFragment;
typedef MmaFragment<kDqRows / 16, kDqQueries / 8, true> QueryFragment;
constexpr int kSums = KeyFragment::kSize > ValueFragment::kSize ? KeyFragment::kSize : ValueFragment::kSize;

// Where sums of dQ lie: of a block of 8 queries and 8 columns the even queries first, then the odd ones, of each query 8 columns
// side by side; blocks of the same queries next to each other.  What a warp adds at once are neighbours.
__device__ __forceinline__ i64 first_sum(i64 query, int column) {
  const int lane = int(threadIdx.x) % 32;
  return query * Config::kHeadDim + column * 4 + lane % 4 * 8 + lane / 4;
}
__device__ __forceinline__ constexpr int sum_offset(int i) {  // of element i, from the thread's first one on
  return (i / 4 % QueryFragment::kColumnBlocks * 8 + i % 2 * 4) * Config::kHeadDim + QueryFragment::slot(i) * 32;
}

struct SharedStorage {
  SwizzledTile<Config::kBlockK, Config::kHeadDim> k;
  SwizzledTile<Config::kBlockK, Config::kHeadDimV> v;
  SwizzledTile<Config::kBlockQ, Config::kHeadDim> q[2];
  SwizzledTile<Config::kBlockQ, Config::kHeadDimV> dout;
  SwizzledTile<Config::kBlockK, Config::kBlockQ> p, ds;  // transposed, a row per key
  RowStatistics statistics[2][Config::kBlockQ];
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/f64.py disagrees");

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  const bool has_scores = int(threadIdx.x) < kHalfThreads;  // this half: S, P, dS, dK; the other: dQ, dP, dV

  // Longest first: under a causal mask the first keys are seen by the most queries.
  const int key_tiles = Place::key_tiles<Config::kBlockK>(p);
  int index = blockIdx.x;
  if constexpr (Config::kDeterministic) index = int(start_number(static_cast<u32*>(p.turns), shared_memory));
  const Assignment assigned(p, index, key_tiles, p.batch_size * p.heads_k);
  const int batch_index = assigned.head / p.heads_k;
  Place place;
  place.head_k = assigned.head % p.heads_k;
  place.set_batch(p, batch_index);
  const int tile = place.enter_keys<Config::kBlockK>(p, assigned.tile);
  place.key_count = Visibility::key_count(p, place);
  const int first_head = place.head_k * p.group;

  const Range keys{tile * Config::kBlockK, min(place.seq_k(p), (tile + 1) * Config::kBlockK)};
  if (kPacked && is_empty(keys)) return;
  const Range queries = queries_seeing_any(p, place, keys);
  const Range walk = tiles_over<Config::kBlockQ>(queries);
  const int first = walk.begin, last = walk.end;
  int steps = last > first ? (last - first) * p.group : 0;
  if (Config::kDeterministic && !place.has_all_tiles<Config::kBlockQ, Config::kBlockK>(p)) steps = 0;

  const auto source = [&](const View& view, i64 offset, Range rows, int columns) {
    return CopySource<Element>{
        static_cast<Element*>(view.data) + offset, view.row, view.column, rows.begin, rows.end, columns};
  };
  // Of all tiles of queries, as many as 31 bits number: a block of the conversion has fewer rows.
  const auto number_of = [&](int head, int query_tile) {
    return (batch_index * p.heads_q + head) * (p.rows_padded / Config::kBlockQ) +
           place.padded_row<Config::kBlockQ>() / Config::kBlockQ + query_tile;
  };
  const auto load_queries = [&](int head, int query_tile, int stage) {
    const auto q = source(p.q, place.offset(p.q, head), queries, p.head_dim);
    copy_tile<kHalfThreads, Config::kAligned>(shared.q[stage], q, query_tile * Config::kBlockQ, int(threadIdx.x));
    const RowStatistics* rows =
        static_cast<const RowStatistics*>(p.statistics) + i64(number_of(head, query_tile)) * Config::kBlockQ;
    for (int row = int(threadIdx.x); row < Config::kBlockQ; row += kHalfThreads)
      copy_bytes<16>(&shared.statistics[stage][row], rows + row, 16);
  };
  const auto skip_hidden = [&](int& head, int& query_tile, int& left) {  // in turns, they pass the turn on
    if constexpr (!Config::kDeterministic)
      skip_hidden_queries<Config::kBlockQ>(p, place, keys, {first, last}, head, query_tile, left);
  };

  const int warp = int(threadIdx.x) / 32 % kHalf, warp_key = warp * kWarpKeys;
  const Exp2F64 exp2_f64;
  Real sums[kSums];  // dK or dV
  clear(sums);

  int head = first_head, query_tile = Config::kDeterministic ? last - 1 : first, stage = 0, before = -1;
  skip_hidden(head, query_tile, steps);
  if (steps > 0) {
    const Range seen = keys_seen_by_any(p, place, {0, place.seq_q(p)});
    copy_tile<Config::kThreads, Config::kAligned>(shared.k, source(p.k, place.key_offset(p.k), seen, p.head_dim),
                                                  keys.begin, int(threadIdx.x));
    copy_tile<Config::kThreads, Config::kAligned>(shared.v, source(p.v, place.key_offset(p.v), seen, p.head_dim_v),
                                                  keys.begin, int(threadIdx.x));
    if (has_scores) load_queries(head, query_tile, 0);
    wait_for_copies();
  }
  __syncthreads();  // K, V and the first Q have arrived
  // `steps` is what is left, with this one; `before` the number of the previous tile of queries.
  while (true) {
    int next_head = head, next_tile = query_tile, next_steps = steps - 1;
    if (Config::kDeterministic ? next_tile-- == first : ++next_tile == last) {
      next_tile = Config::kDeterministic ? last - 1 : first;
      ++next_head;
    }
    skip_hidden(next_head, next_tile, next_steps);
    place.head = head;
    const Corner corner{query_tile * Config::kBlockQ, keys.begin};

    // What the score half carries over its wait for dP; in the other half `s` is dP.
    const ScoreFragment s_at(warp_key, 0, u32(recomputed(int(threadIdx.x))));
    ScoreSlopes<ScoreFragment> slopes;
    Real s[ScoreFragment::kSize];
    if (has_scores) {
      if (steps <= 0) break;
      if (next_steps > 0) load_queries(next_head, next_tile, stage ^ 1);
      clear(s);
      multiply_rows_f64<ScoreFragment>(s, shared.k, warp_key, shared.q[stage]);
      scores_of<true>(
          s, slopes, s_at, p, place, corner,
          tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, {corner.k, corner.k + Config::kBlockK}));
#pragma unroll
      for (int i = 0; i < ScoreFragment::kSize; ++i)
        s[i] = probability_by(exp2_f64, s[i], shared.statistics[stage][s_at.column(i)].shift, p);
      mark_dropped<Config::kBlockQ % 16 == 0>(s, s_at, drop_key(p, place), p, corner);
      if (before >= 0) bar_sync(kPRead, Config::kThreads);
      with_kept(s, [&](const auto& weights) { store_rows_f64<ScoreFragment>(shared.p, warp_key, weights); });
      bar_arrive(kPWritten, Config::kThreads);
      bar_sync(kDpWritten, Config::kThreads);
    } else {
      if (before >= 0) bar_sync(kDsWritten, Config::kThreads);  // and dO is no longer read
      if (steps > 0)
        copy_tile<kHalfThreads, Config::kAligned>(shared.dout,
                                                  source(p.dout, place.offset(p.dout), queries, p.head_dim_v), corner.q,
                                                  int(threadIdx.x) - kHalfThreads);
      if (before >= 0) {
        Real dq[QueryFragment::kSize];
        clear(dq);
        const int column = warp / Config::kQueryWarps * kDqRows, query = warp % Config::kQueryWarps * kDqQueries;
        multiply_transposed_f64<QueryFragment>(dq, shared.k, column, shared.ds, query);
        const auto add = [&] {
          Real* const to = static_cast<Real*>(p.dq_sum) + first_sum(i64(before) * Config::kBlockQ + query, column);
#pragma unroll
          for (int i = 0; i < QueryFragment::kSize; ++i) atomicAdd(to + sum_offset(i), dq[i]);
        };
        const auto meet = [] { bar_sync(kSecondHalf, kHalfThreads); };
        if constexpr (Config::kDeterministic)
          in_turn(static_cast<u32*>(p.turns) + 1 + before, tile, int(threadIdx.x) == kHalfThreads, meet, add);
        else
          add();
      }
      if (steps <= 0) break;
      wait_for_copies();
      bar_sync(kSecondHalf, kHalfThreads);  // dO has arrived, dQ no longer reads the previous dS
      clear(s);
      multiply_rows_f64<ScoreFragment>(s, shared.v, warp_key, shared.dout);
      store_rows_f64<ScoreFragment>(shared.ds, warp_key, s);
      bar_arrive(kDpWritten, Config::kThreads);
      bar_sync(kPWritten, Config::kThreads);
    }

    if (has_scores) {
      Real dp[ScoreFragment::kSize];
      load_rows_f64<ScoreFragment>(dp, shared.ds, warp_key);
#pragma unroll
      for (int i = 0; i < ScoreFragment::kSize; ++i)
        s[i] = marked_gradient(s[i], dp[i], shared.statistics[stage][s_at.column(i)].delta, p);
      for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(s, s_at, view, p, place, corner); });
      add_score_gradients(s, slopes, s_at, p, place, corner);
#pragma unroll
      for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= slopes[i];
      store_rows_f64<ScoreFragment>(shared.ds, warp_key, s);
      __syncwarp();  // this warp's dS is complete
      multiply_rows_columns_f64<KeyFragment>(part<KeyFragment::kSize>(sums), shared.ds, warp_key, shared.q[stage],
                                             [] { bar_arrive(kDsWritten, Config::kThreads); });
      wait_for_copies();
      bar_sync(kFirstHalf, kHalfThreads);  // the next Q has arrived, this one is no longer read
    } else {
      multiply_rows_columns_f64<ValueFragment>(part<ValueFragment::kSize>(sums), shared.p, warp_key, shared.dout, [&] {
        if (next_steps > 0) bar_arrive(kPRead, Config::kThreads);
      });
    }
    before = number_of(head, query_tile);
    head = next_head;
    query_tile = next_tile;
    steps = next_steps;
    stage ^= 1;
  }

  if (has_scores)
    store_rows<KeyFragment>(part<KeyFragment::kSize>(sums), KeyFragment(warp_key, 0),
                            matrix<Element>(p.dk, place.key_offset(p.dk)), keys, {0, p.head_dim}, p.dk_vectors,
                            [&](int) { return p.scale; });
  else
    store_rows<ValueFragment>(part<ValueFragment::kSize>(sums), ValueFragment(warp_key, 0),
                              matrix<Element>(p.dv, place.key_offset(p.dv)), keys, {0, p.head_dim_v}, p.dv_vectors,
                              [&](int) { return drop_scale(p); });
}
