// Second derivatives for float32 and float64 by scalar multiply-adds: tangents of dQ, or (kOwnsKeys) of dK and dV.
//
// Job: a block owns a tile of queries and walks over the keys that they see, or owns a tile of keys and walks over the queries that
// see it, for every query head of the group in turn.  Both are the same work: with X of the owned side (Q or K), Y (dO or V), and
// what is walked over likewise, S and dP are products of X and of Y, all with their tangents, and what is summed is a product of
// the gradients of the scores with the other X, and for keys one of the weights with the other Y.  A warp owns whole rows of it,
// so that nothing is added up in global memory but the gradients of operands, by the blocks that own queries.
// Invariants: one buffer for each array; what is walked over has arrived at the first barrier of a step and is free after the
// second.  A tangent that is no array reads as zeros.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2, differentiated.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy_simt.cuh"
#include "hw/differential_simt.cuh"
#include "attention/hessian.cuh"
#include "attention/epilogue.cuh"

typedef Lanes<Config::kLaneRows> Grid;
constexpr int kOwned = Config::kWarps * Config::kLaneRows * Config::kThreadRows, kWalked = Config::kWalked;
constexpr int kBlockQ = Config::kOwnsKeys ? kWalked : kOwned, kBlockK = Config::kOwnsKeys ? kOwned : kWalked;
template <int kWidth> struct Sums {
  static constexpr int kColumns = kWidth / Grid::kColumns;
  static_assert(kWidth % (2 * Grid::kColumns) == 0, "pairs of columns");
  typedef FragmentSimt<Grid, Config::kThreadRows, kColumns, 1, run_length<Real>(kColumns)> Fragment;
};
typedef FragmentSimt<Grid, Config::kThreadRows, kWalked / Grid::kColumns, 1, 1, Config::kOwnsKeys> ScoreFragment;
typedef Sums<Config::kHeadDim>::Fragment XFragment;
typedef Sums<Config::kHeadDimV>::Fragment YFragment;

constexpr int kPitch = odd_pitch(Config::kHeadDim, Vector<Real>::kSize);
constexpr int kPitchV = odd_pitch(Config::kHeadDimV, Vector<Real>::kSize);
constexpr int kPitchScore = scatter_pitch(kWalked, Grid::kColumns, sizeof(Real));

template <int kRows> struct Side {
  PitchedTile<kRows, Config::kHeadDim, kPitch, Real> x, x_tangent;
  PitchedTile<kRows, Config::kHeadDimV, kPitchV, Real> y, y_tangent;
};
struct SharedStorage {
  Side<kOwned> owned;
  Side<kWalked> walked;
  PitchedTile<kOwned, kWalked, kPitchScore, Real> left, left_tangent;
  MovingRowStatistics statistics[kBlockQ];
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/simt.py disagrees");

// sum += a' · b + a · b', which stands alone before it joins the others, if there are registers for it.
template <class F, int kPitchB, class B>
__device__ __forceinline__ void add_moving(Real (&sum)[F::kSize], const F& f, const SharedStorage& shared, const B& b,
                                           const B& b_tangent) {
  const MovingOperand<Real> left = {shared.left.data, shared.left_tangent.data}, right = {b.data, b_tangent.data};
  if constexpr (F::kSize * sizeof(Real) <= 160) {
    Real alone[F::kSize];
    clear(alone);
    multiply_moving_ab<false, F, kWalked, kPitchScore, kPitchB>(alone, alone, f, left, right);
#pragma unroll
    for (int i = 0; i < F::kSize; ++i) sum[i] += alone[i];
  } else {
    multiply_moving_ab<false, F, kWalked, kPitchScore, kPitchB>(sum, sum, f, left, right);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);

  // Longest first: under a causal mask the last queries see the most keys, and the first keys are seen by the most queries.
  const int tiles = Config::kOwnsKeys ? Place::key_tiles<kBlockK>(p) : Place::query_tiles<kBlockQ>(p);
  const int heads = Config::kOwnsKeys ? p.heads_k : p.heads_q;
  const Assignment assigned(p, blockIdx.x, tiles, p.batch_size * heads);
  const int head = assigned.head % heads, batch_index = assigned.head / heads;
  const int tile = Config::kOwnsKeys ? assigned.tile : tiles - 1 - assigned.tile;
  Place place;
  place.set_head(p, Config::kOwnsKeys ? head * p.group : head);
  place.set_batch(p, batch_index);
  place.key_count = Visibility::key_count(p, place);
  const int first_head = place.head;

  const Range owned{tile * kOwned, min(Config::kOwnsKeys ? p.seq_k : p.seq_q, (tile + 1) * kOwned)};
  const Range keys = keys_seen_by_any(p, place, Config::kOwnsKeys ? Range{0, p.seq_q} : owned);
  const Range queries = Config::kOwnsKeys ? queries_seeing_any(p, place, owned) : owned;
  const Range walk = Config::kOwnsKeys ? tiles_over<kWalked>(queries) : tiles_over<kWalked>(keys);

  const auto load = [&](auto& to, const View& view, i64 offset, Range rows, int columns, int first) {
    const CopySource<Element> source{static_cast<Element*>(view.data) + offset,
                                     view.row,
                                     view.column,
                                     rows.begin,
                                     rows.end,
                                     view.data ? columns : 0};
    copy_tile<Config::kThreads, Config::kAligned>(to, source, first);
  };
  const auto load_keys = [&](auto& side, int first) {
    load(side.x, p.k, place.key_offset(p.k), keys, p.head_dim, first);
    load(side.x_tangent, p.k_tangent, place.key_offset(p.k_tangent), keys, p.head_dim, first);
    load(side.y, p.v, place.key_offset(p.v), keys, p.head_dim_v, first);
    load(side.y_tangent, p.v_tangent, place.key_offset(p.v_tangent), keys, p.head_dim_v, first);
  };
  const auto load_queries = [&](auto& side, int first) {
    load(side.x, p.q, place.offset(p.q), queries, p.head_dim, first);
    load(side.x_tangent, p.q_tangent, place.offset(p.q_tangent), queries, p.head_dim, first);
    load(side.y, p.dout, place.offset(p.dout), queries, p.head_dim_v, first);
    load(side.y_tangent, p.dout_tangent, place.offset(p.dout_tangent), queries, p.head_dim_v, first);
    load_statistics<Config::kThreads>(shared.statistics, p, (i64(batch_index) * p.heads_q + place.head) * p.seq_q,
                                      first);
  };

  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * ScoreFragment::kTileRows;
  const ScoreFragment s_at(lane, warp_row, 0);
  const XFragment x_at(lane, warp_row, 0);
  const YFragment y_at(lane, warp_row, 0);
  Real x_sum[XFragment::kSize], y_sum[YFragment::kSize];
  clear(x_sum);
  clear(y_sum);

  // Where the walk goes on from a tile: past what is hidden, and for keys to the next head of their group.
  int walked = walk.begin;
  const auto settle = [&] {
    if constexpr (Config::kOwnsKeys) {
      int left = walk.end - walk.begin > 0 ? (first_head + p.group - place.head) * (walk.end - walk.begin) : 0;
      left -= left > 0 ? walked - walk.begin : 0;
      int next_head = place.head;
      skip_hidden_queries<kBlockQ>(p, place, owned, walk, next_head, walked, left);
      place.head = next_head;
      return left > 0;
    } else {
      walked = next_visible_block<kBlockK>(p, place, owned, walked, walk.end);
      return walked < walk.end;
    }
  };
  const auto load_walked = [&] {
    if constexpr (Config::kOwnsKeys)
      load_queries(shared.walked, walked * kWalked);
    else
      load_keys(shared.walked, walked * kWalked);
  };

  bool more = settle();
  if (more) {
    if constexpr (Config::kOwnsKeys)
      load_keys(shared.owned, owned.begin);
    else
      load_queries(shared.owned, owned.begin);
    load_walked();
  }
  while (more) {
    const Corner corner =
        Config::kOwnsKeys ? Corner{walked * kWalked, owned.begin} : Corner{owned.begin, walked * kWalked};
    wait_for_copies();
    __syncthreads();  // all has arrived

    Real s[ScoreFragment::kSize], ds[ScoreFragment::kSize], dp[ScoreFragment::kSize], dp_moved[ScoreFragment::kSize];
    clear(s);
    clear(ds);
    multiply_moving_abt<ScoreFragment, Config::kHeadDim, kPitch, kPitch, Real>(
        s, ds, s_at, {shared.owned.x.data, shared.owned.x_tangent.data},
        {shared.walked.x.data, shared.walked.x_tangent.data});
    ScoreSlopes<ScoreFragment> slopes;
    moving_weights(s, ds, slopes, s_at, shared.statistics, drop_key(p, place), p, place, corner,
                   tile_is_open(p, place, {corner.q, corner.q + kBlockQ}, {corner.k, corner.k + kBlockK}));
    const auto store_left = [&](const auto& value, const auto& moved) {
      __syncwarp();  // the warp has read the previous one
      store_tile<ScoreFragment, kPitchScore>(value, s_at, shared.left.data);
      store_tile<ScoreFragment, kPitchScore>(moved, s_at, shared.left_tangent.data);
      __syncwarp();
    };
    if constexpr (Config::kOwnsKeys) {
      with_kept(s, ds, store_left);
      add_moving<YFragment, kPitchV>(y_sum, y_at, shared, shared.walked.y, shared.walked.y_tangent);
    }
    clear(dp);
    clear(dp_moved);
    multiply_moving_abt<ScoreFragment, Config::kHeadDimV, kPitchV, kPitchV, Real>(
        dp, dp_moved, s_at, {shared.owned.y.data, shared.owned.y_tangent.data},
        {shared.walked.y.data, shared.walked.y_tangent.data});
    moving_gradients(s, ds, dp, dp_moved, s_at, shared.statistics, p);
    if constexpr (!Config::kOwnsKeys)
      for_each_operand_gradient(p, [&](const View& view) { add_operand_gradient(ds, s_at, view, p, place, corner); });
    moving_slopes(s, ds, slopes);
    store_left(s, ds);
    add_moving<XFragment, kPitch>(x_sum, x_at, shared, shared.walked.x, shared.walked.x_tangent);
    __syncthreads();  // nothing of the walked side is read any more

    ++walked;
    if (Config::kOwnsKeys && walked == walk.end) {
      walked = walk.begin;
      ++place.head;
    }
    more = settle();
    if (more) load_walked();
  }

  const auto store = [&](const auto& sum, const auto& at, const View& view, i64 offset, int columns, bool vectors,
                         Real factor) {
    store_rows(sum, at, matrix<Element>(view, offset), owned, {0, columns}, vectors, [&](int) { return factor; });
  };
  if constexpr (Config::kOwnsKeys) {
    store(x_sum, x_at, p.dk, place.key_offset(p.dk), p.head_dim, p.dk_vectors, p.scale);
    store(y_sum, y_at, p.dv, place.key_offset(p.dv), p.head_dim_v, p.dv_vectors, drop_scale(p));
  } else {
    store(x_sum, x_at, p.dq, place.offset(p.dq), p.head_dim, p.dq_vectors, p.scale);
  }
}
