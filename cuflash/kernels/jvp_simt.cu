// Forward mode for float32 and float64 by scalar multiply-adds: output, lse, and their tangents.
//
// Job: as in forward_simt.cu, a block owns a tile of queries and walks over the keys that they see, and a warp owns whole rows of
// scores; beside each input lies its tangent.
// Invariants: K and V have one buffer each, as have their tangents.  V arrives while the scores are computed, the next K while the
// output is; at each of the two barriers of a step, what was on its way has arrived and the other buffers are free.  A tangent
// that is no array reads as zeros.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1, differentiated.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy_simt.cuh"
#include "hw/differential_simt.cuh"
#include "attention/tangent.cuh"
#include "attention/epilogue.cuh"

typedef MovingRowProducts<Real, Config::kLaneRows, Config::kThreadRows, Config::kHeadDim, Config::kBlockK,
                          Config::kHeadDimV>
    Products;
typedef Products::First ScoreFragment;
typedef Products::Second OutFragment;
constexpr int kBlockQ = Config::kWarps * Products::kRows;

struct SharedStorage : Products::Middles<Config::kWarps> {
  PitchedTile<kBlockQ, Config::kHeadDim, Products::kPitchA, Real> q, q_tangent;
  PitchedTile<Config::kBlockK, Config::kHeadDim, Products::kPitchB, Real> k, k_tangent;
  PitchedTile<Config::kBlockK, Config::kHeadDimV, Products::kPitchC, Real> v, v_tangent;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/simt.py disagrees");

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);

  // Longest first: the last queries see the most keys under a causal mask.
  const int query_tiles = Place::query_tiles<kBlockQ>(p);
  const Assignment assigned(p, blockIdx.x, query_tiles, p.batch_size * p.heads_q);
  Place place;
  place.set_head(p, assigned.head % p.heads_q);
  place.set_batch(p, assigned.head / p.heads_q);
  const int tile = query_tiles - 1 - assigned.tile;
  place.key_count = Visibility::key_count(p, place);

  const Range queries{tile * kBlockQ, min(p.seq_q, (tile + 1) * kBlockQ)};
  const Range keys = keys_seen_by_any(p, place, queries);
  const auto source = [&](const View& view, i64 offset, Range rows, int columns) {
    return CopySource<Element>{static_cast<Element*>(view.data) + offset,
                               view.row,
                               view.column,
                               rows.begin,
                               rows.end,
                               view.data ? columns : 0};
  };
  const auto load_queries = [&](auto& to, const View& view) {
    copy_tile<Config::kThreads, Config::kAligned>(to, source(view, place.offset(view), queries, p.head_dim),
                                                  queries.begin);
  };
  const auto load_keys = [&](auto& to, const View& view, int columns, int first) {
    copy_tile<Config::kThreads, Config::kAligned>(to, source(view, place.key_offset(view), keys, columns), first);
  };

  const int warp = int(threadIdx.x) / 32;
  const Products products(warp, shared);
  const Range warp_queries{queries.begin + warp * Products::kRows, queries.begin + (warp + 1) * Products::kRows};
  MovingSoftmax<ScoreFragment> softmax;
  const DropKey key = drop_key(p, place);
  Real o[OutFragment::kSize], u[OutFragment::kSize];  // of the output, and of its tangent
  clear(o);
  clear(u);

  const int first = next_visible_keys<Config::kBlockK>(p, place, queries, keys.begin, keys.end);
  if (first < keys.end) {
    load_queries(shared.q, p.q);
    load_queries(shared.q_tangent, p.q_tangent);
    load_keys(shared.k, p.k, p.head_dim, first);
    load_keys(shared.k_tangent, p.k_tangent, p.head_dim, first);
  }
  int next;
  for (Corner corner{queries.begin, first}; corner.k < keys.end; corner.k = next) {
    wait_for_copies();
    __syncthreads();  // K has arrived, V is no longer read
    load_keys(shared.v, p.v, p.head_dim_v, corner.k);
    load_keys(shared.v_tangent, p.v_tangent, p.head_dim_v, corner.k);

    Real s[ScoreFragment::kSize], ds[ScoreFragment::kSize];
    products.multiply_first(s, ds, shared.q, shared.q_tangent, shared.k, shared.k_tangent);
    wait_for_copies();
    __syncthreads();  // V has arrived, K is no longer read
    next = next_visible_keys<Config::kBlockK>(p, place, queries, corner.k + Config::kBlockK, keys.end);
    if (next < keys.end) {
      load_keys(shared.k, p.k, p.head_dim, next);
      load_keys(shared.k_tangent, p.k_tangent, p.head_dim, next);
    }

    ScoreSlopes<ScoreFragment> slopes;
    scores_of<true>(s, slopes, products.first, p, place, corner,
                    tile_is_open(p, place, warp_queries, {corner.k, corner.k + Config::kBlockK}));
    score_tangents(ds, s, slopes, products.first, p, place, corner);
    softmax.step<OutFragment>(s, ds, o, u, p);
    drop<false>(s, ds, products.first, key, p, corner);
    products.multiply_second(o, u, s, ds, shared.v, shared.v_tangent);
  }

  softmax.finish(p, place);
  softmax.settle<OutFragment>(u, o);
  const auto factor = [&](int slot) { return softmax.inverse(slot) * drop_scale(p); };
  const Range columns{0, p.head_dim_v};
  store_rows(o, products.second, matrix<Element>(p.out, place.offset(p.out)), queries, columns, p.out_vectors, factor);
  store_rows(u, products.second, matrix<Element>(p.out_tangent, place.offset(p.out_tangent)), queries, columns,
             p.out_tangent_vectors, factor);
  store_lse(softmax, products.first, p, place, queries);
  store_row_values(p.lse_tangent, products.first, place, queries, [&](int slot) { return softmax.moved[slot]; });
}
