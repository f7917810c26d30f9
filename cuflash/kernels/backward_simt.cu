// Backward for float32 and float64 by scalar multiply-adds.
//
// Job: a block owns a tile of keys of one (batch entry, key head) and walks over the query tiles that see it, for every query
// head of the group in turn.  Half of the warps compute S, P, dS and dK, the other half dP and dV, so that each thread's piece of a
// product is large and reads little; all of them compute dQ.  dK and dV stay in registers and are written once; P, dP and dS pass
// through shared memory; dQ is added to sums in global memory, row-major with kHeadDim columns: the one sum whose order varies,
// unless blocks take turns.
// Invariants: all threads run the same steps; rows of Q and dO that see none of the keys, and keys that nobody sees, are zeros in
// shared memory; the next Q and dO arrive while dQ is computed.  In turns (kDeterministic): as in backward_mma.cu.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy_simt.cuh"
#include "hw/gemm_simt.cuh"
#include "hw/turns.cuh"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/epilogue.cuh"
#include "attention/planes.cuh"

constexpr int kHalf = Config::kWarps / 2;
static_assert(Config::kWarps % 2 == 0, "two halves");
constexpr int kEarly = Config::kBlockQ / 8;  // queries of dV that are summed while the other half turns dP into dS

// kWarps warps over a tile: side by side, kWarpRows above each other, each a grid of lanes.
template <int kWarps, int kWarpRows, int kLaneRows> struct Layout {
  typedef Lanes<kLaneRows> Grid;
  static constexpr int kWarpColumns = kWarps / kWarpRows;
  static constexpr int kRowUnits = kWarpRows * Grid::kRows, kColumnUnits = kWarpColumns * Grid::kColumns;
  static_assert(kWarps % kWarpRows == 0, "whole rows of warps");

  template <int kRows, int kColumns, bool kRunsOfRows, bool kRunsOfColumns> struct Tile {
    static constexpr int kThreadRows = kRows / kRowUnits, kThreadColumns = kColumns / kColumnUnits;
    static_assert(kRows % kRowUnits == 0 && kColumns % kColumnUnits == 0, "whole thread tiles");
    typedef FragmentSimt<Grid, kThreadRows, kThreadColumns, kRunsOfRows ? run_length<Real>(kThreadRows) : 1,
                         kRunsOfColumns ? run_length<Real>(kThreadColumns) : 1>
        Fragment;
  };
  template <class Fragment> static __device__ __forceinline__ Fragment fragment() {
    const int warp = int(threadIdx.x) / 32 % kWarps;
    return Fragment(int(threadIdx.x) % 32, warp / kWarpColumns * Fragment::kTileRows,
                    warp % kWarpColumns * Fragment::kTileColumns);
  }
};
typedef Layout<kHalf, Config::kScoreWarpRows, Config::kScoreLaneRows> ScoreLayout;
typedef Layout<kHalf, Config::kKeyWarpRows, Config::kKeyLaneRows> KeyLayout;
typedef Layout<Config::kWarps, Config::kQueryWarpRows, Config::kQueryLaneRows> QueryLayout;
typedef ScoreLayout::Tile<Config::kBlockQ, Config::kBlockK, false, false>::Fragment ScoreFragment;
typedef KeyLayout::Tile<Config::kBlockK, Config::kHeadDim, true, true>::Fragment KeyFragment;
typedef KeyLayout::Tile<Config::kBlockK, Config::kHeadDimV, true, true>::Fragment ValueFragment;
typedef QueryLayout::Tile<Config::kBlockQ, Config::kHeadDim, false, true>::Fragment QueryFragment;
constexpr int kSums = KeyFragment::kSize > ValueFragment::kSize ? KeyFragment::kSize : ValueFragment::kSize;

constexpr int kPitch = odd_pitch(Config::kHeadDim, Vector<Real>::kSize);
constexpr int kPitchV = odd_pitch(Config::kHeadDimV, Vector<Real>::kSize);
constexpr int kPitchScore = scatter_pitch(Config::kBlockK, ScoreLayout::Grid::kColumns, sizeof(Real));

struct SharedStorage {
  PitchedTile<Config::kBlockK, Config::kHeadDim, kPitch, Real> k;
  PitchedTile<Config::kBlockK, Config::kHeadDimV, kPitchV, Real> v;
  PitchedTile<Config::kBlockQ, Config::kHeadDim, kPitch, Real> q;
  PitchedTile<Config::kBlockQ, Config::kHeadDimV, kPitchV, Real> dout;
  PitchedTile<Config::kBlockQ, Config::kBlockK, kPitchScore, Real> p, ds;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/simt.py disagrees");

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  const bool has_scores = int(threadIdx.x) < Config::kThreads / 2;  // this half: S, P, dS, dK; the other: dP, dV

  // Longest first: under a causal mask the first keys are seen by the most queries.
  const int key_tiles = Place::key_tiles<Config::kBlockK>(p);
  int index = blockIdx.x;
  if constexpr (Config::kDeterministic) index = int(start_number(static_cast<u32*>(p.turns), shared_memory));
  if constexpr (Config::kDeterministic && Config::kRest) index -= gridDim.x;  // as many blocks of backward_split.cu
  const Assignment assigned(p, index, key_tiles, p.batch_size * p.heads_k);
  const int batch_index = assigned.head / p.heads_k;
  Place place;
  place.head_k = assigned.head % p.heads_k;
  place.set_batch(p, batch_index);
  if constexpr (Config::kRest)
    if (is_split(p, place)) return;
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
  const auto tile_at = [&](int step) {
    const int passed = step % (last - first);
    return Config::kDeterministic ? last - 1 - passed : first + passed;
  };
  // The first step from there on whose queries may see the keys.  In turns all are worked on: each passes the turn on.
  const auto visible_from = [&](int step) {
    if (Config::kDeterministic) return step;
    int head = first_head + step / (last - first), tile = first + step % (last - first), left = steps - step;
    skip_hidden_queries<Config::kBlockQ>(p, place, keys, {first, last}, head, tile, left);
    return steps - left;
  };
  const auto load_queries = [&](int step) {
    const int head = first_head + step / (last - first), row = tile_at(step) * Config::kBlockQ;
    const i64 q_at = place.offset(p.q, head), dout_at = place.offset(p.dout, head);
    copy_tile<Config::kThreads, Config::kAligned>(shared.q, source(p.q, q_at, queries, p.head_dim), row);
    copy_tile<Config::kThreads, Config::kAligned>(shared.dout, source(p.dout, dout_at, queries, p.head_dim_v), row);
  };

  const ScoreFragment s_at = ScoreLayout::fragment<ScoreFragment>();
  const KeyFragment dk_at = KeyLayout::fragment<KeyFragment>();
  const ValueFragment dv_at = KeyLayout::fragment<ValueFragment>();
  const QueryFragment dq_at = QueryLayout::fragment<QueryFragment>();
  Real sums[kSums];  // dK or dV
  clear(sums);

  const int first_step = steps > 0 ? visible_from(0) : 0;
  if (first_step < steps) {
    const Range seen = keys_seen_by_any(p, place, {0, place.seq_q(p)});
    copy_tile<Config::kThreads, Config::kAligned>(shared.k, source(p.k, place.key_offset(p.k), seen, p.head_dim),
                                                  keys.begin);
    copy_tile<Config::kThreads, Config::kAligned>(shared.v, source(p.v, place.key_offset(p.v), seen, p.head_dim_v),
                                                  keys.begin);
    load_queries(first_step);
  }
  int next_step;
  for (int step = first_step; step < steps; step = next_step) {
    place.head = first_head + step / (last - first);
    const Corner corner{tile_at(step) * Config::kBlockQ, keys.begin};
    const i64 line =
        (i64(batch_index) * p.heads_q + place.head) * p.rows_padded + place.padded_row<Config::kBlockQ>() + corner.q;
    wait_for_copies();
    __syncthreads();  // this tile has arrived; the previous dS is no longer read

    // What the score half carries over the barrier at which the halves meet; in the other half `s` is dP.
    RowStatistics statistics[ScoreFragment::kSlots];
    ScoreSlopes<ScoreFragment> slopes;
    Real s[ScoreFragment::kSize];
    clear(s);
    if (has_scores) {
#pragma unroll
      for (int slot = 0; slot < ScoreFragment::kSlots; ++slot)
        statistics[slot] = statistics_of<Config::kStatisticsRows>(p.statistics, line + s_at.row(slot));
      multiply_abt<ScoreFragment, Config::kHeadDim, kPitch, kPitch>(s, s_at, shared.q.data, shared.k.data);
      scores_of<true>(
          s, slopes, s_at, p, place, corner,
          tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, {corner.k, corner.k + Config::kBlockK}));
#pragma unroll
      for (int i = 0; i < ScoreFragment::kSize; ++i)
        s[i] = probability(s[i], statistics[ScoreFragment::slot(i)].shift, p);
      mark_dropped<false>(s, s_at, drop_key(p, place), p, corner);
      with_kept(s, [&](const auto& weights) { store_tile<ScoreFragment, kPitchScore>(weights, s_at, shared.p.data); });
    } else {
      multiply_abt<ScoreFragment, Config::kHeadDimV, kPitchV, kPitchV>(s, s_at, shared.dout.data, shared.v.data);
      store_tile<ScoreFragment, kPitchScore>(s, s_at, shared.ds.data);
    }
    __syncthreads();  // P and dP are complete

    if (has_scores) {
      Real dp[ScoreFragment::kSize];
      load_tile<ScoreFragment, kPitchScore>(dp, s_at, shared.ds.data);
#pragma unroll
      for (int i = 0; i < ScoreFragment::kSize; ++i)
        s[i] = marked_gradient(s[i], dp[i], statistics[ScoreFragment::slot(i)].delta, p);
      for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(s, s_at, view, p, place, corner); });
      add_score_gradients(s, slopes, s_at, p, place, corner);
#pragma unroll
      for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= slopes[i];
      store_tile<ScoreFragment, kPitchScore>(s, s_at, shared.ds.data);
    } else {
      multiply_atb<ValueFragment, kEarly, kPitchScore, kPitchV>(part<ValueFragment::kSize>(sums), dv_at, shared.p.data,
                                                                shared.dout.data);
    }
    __syncthreads();  // dS is complete
    if (has_scores) {
      multiply_atb<KeyFragment, Config::kBlockQ, kPitchScore, kPitch>(part<KeyFragment::kSize>(sums), dk_at,
                                                                      shared.ds.data, shared.q.data);
    } else {
      multiply_atb<ValueFragment, Config::kBlockQ - kEarly, kPitchScore, kPitchV>(
          part<ValueFragment::kSize>(sums), dv_at, shared.p.data + kEarly * kPitchScore,
          shared.dout.data + kEarly * kPitchV);
    }
    __syncthreads();  // Q and dO are no longer read
    next_step = step + 1 < steps ? visible_from(step + 1) : steps;
    if (next_step < steps) load_queries(next_step);

    Real dq[QueryFragment::kSize];
    clear(dq);
    multiply_ab<QueryFragment, Config::kBlockK, kPitchScore, kPitch>(dq, dq_at, shared.ds.data, shared.k.data);
    const auto add = [&] {
      add_tile<QueryFragment, Config::kHeadDim>(dq, dq_at, static_cast<Real*>(p.dq_sum) + line * Config::kHeadDim);
    };
    if constexpr (Config::kDeterministic)
      in_turn(static_cast<u32*>(p.turns) + 1 + line / Config::kBlockQ, tile, add);
    else
      add();
  }

  if (has_scores)
    store_rows<KeyFragment>(part<KeyFragment::kSize>(sums), dk_at, matrix<Element>(p.dk, place.key_offset(p.dk)), keys,
                            {0, p.head_dim}, p.dk_vectors, [&](int) { return p.scale; });
  else
    store_rows<ValueFragment>(part<ValueFragment::kSize>(sums), dv_at, matrix<Element>(p.dv, place.key_offset(p.dv)),
                              keys, {0, p.head_dim_v}, p.dv_vectors, [&](int) { return drop_scale(p); });
}
