// Forward for float32 and float64: by scalar multiply-adds, float64 by tensor cores where there are any (kTensor).
//
// Job: a block owns a tile of queries and walks over the keys that they see.  A warp owns whole rows of scores, so the softmax
// never leaves it.
// Invariants: K and V have one buffer each.  V arrives while the scores are computed, the next K while the output is; at each of
// the two barriers of a step, what was on its way has arrived and the other buffer is free.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy_simt.cuh"
#include "hw/gemm_simt.cuh"
#include "hw/gemm_f64.cuh"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/epilogue.cuh"
#include "attention/planes.cuh"

template <bool> struct Choice {
  typedef RowProducts<Real, Config::kLaneRows, Config::kThreadRows, Config::kHeadDim, Config::kBlockK,
                      Config::kHeadDimV>
      Type;
};
template <> struct Choice<true> {
  typedef RowProductsF64<Config::kLaneRows * Config::kThreadRows, Config::kHeadDim, Config::kBlockK, Config::kHeadDimV>
      Type;
};
typedef Choice<Config::kTensor>::Type Products;
typedef Products::First ScoreFragment;
typedef Products::Second OutFragment;
constexpr int kBlockQ = Config::kWarps * Products::kRows;

struct SharedStorage : Products::Middles<Config::kWarps> {
  PitchedTile<kBlockQ, Config::kHeadDim, Products::kPitchA, Real> q;
  PitchedTile<Config::kBlockK, Config::kHeadDim, Products::kPitchB, Real> k;
  PitchedTile<Config::kBlockK, Config::kHeadDimV, Products::kPitchC, Real> v;
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
  if constexpr (Config::kRest)
    if (is_split(p, place)) return;
  const int tile = place.enter_queries<kBlockQ>(p, query_tiles - 1 - assigned.tile);
  place.key_count = Visibility::key_count(p, place);

  const Range queries{tile * kBlockQ, min(place.seq_q(p), (tile + 1) * kBlockQ)};
  if (kPacked && is_empty(queries)) return;
  const Range keys = keys_seen_by_any(p, place, queries);
  const auto source = [&](const View& view, i64 offset, Range rows, int columns) {
    return CopySource<Element>{
        static_cast<Element*>(view.data) + offset, view.row, view.column, rows.begin, rows.end, columns};
  };
  const auto q = source(p.q, place.offset(p.q), queries, p.head_dim);
  const auto k = source(p.k, place.key_offset(p.k), keys, p.head_dim);
  const auto v = source(p.v, place.key_offset(p.v), keys, p.head_dim_v);

  const int warp = int(threadIdx.x) / 32;
  const Products products(warp, shared);
  const Range warp_queries{queries.begin + warp * Products::kRows, queries.begin + (warp + 1) * Products::kRows};
  OnlineSoftmax<ScoreFragment, Config::kMaximum, Config::kEntropy> softmax;
  const DropKey key = drop_key(p, place);
  Real o[OutFragment::kSize];
  clear(o);

  const int first = next_visible_keys<Config::kBlockK>(p, place, queries, keys.begin, keys.end);
  if (first < keys.end) {
    copy_tile<Config::kThreads, Config::kAligned>(shared.q, q, queries.begin);
    copy_tile<Config::kThreads, Config::kAligned>(shared.k, k, first);
  }
  int next;
  for (Corner corner{queries.begin, first}; corner.k < keys.end; corner.k = next) {
    wait_for_copies();
    __syncthreads();  // K has arrived, V is no longer read
    copy_tile<Config::kThreads, Config::kAligned>(shared.v, v, corner.k);

    Real s[ScoreFragment::kSize];
    products.multiply_first(s, shared.q, shared.k);
    wait_for_copies();
    __syncthreads();  // V has arrived, K is no longer read
    next = next_visible_keys<Config::kBlockK>(p, place, queries, corner.k + Config::kBlockK, keys.end);
    if (next < keys.end) copy_tile<Config::kThreads, Config::kAligned>(shared.k, k, next);

    ScoreSlopes<ScoreFragment> slopes;
    scores_of<false>(s, slopes, products.first, p, place, corner,
                     tile_is_open(p, place, warp_queries, {corner.k, corner.k + Config::kBlockK}));
    softmax.step<OutFragment>(s, o, p);
    drop<false>(s, products.first, key, p, corner);
    products.multiply_second(o, s, shared.v);
  }

  softmax.finish();
  softmax.join_sink(p, place);
  store_rows(o, products.second, matrix<Element>(p.out, place.offset(p.out)), queries, {0, p.head_dim_v}, p.out_vectors,
             [&](int slot) { return softmax.inverse(slot) * drop_scale(p); });
  store_lse(softmax, products.first, p, place, queries);
  store_statistics<Config::kMaximum, Config::kEntropy>(softmax, products.first, p, place, queries);
}
