// Forward mode on mma.sync tensor cores: output, lse, and their tangents.
//
// Job: as in forward_mma.cu, one block computes a tile of queries (and, where two accumulators are wider than registers, one chunk
// of value columns) against all keys it sees, and warps own query rows; beside each input lies its tangent.  Keys travel under
// the softmax and the second product, values under the first.
// Invariants: every thread of the block runs the same key blocks; keys are walked in ascending order, past hidden blocks.  A
// tangent that is no array reads as zeros.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1, differentiated.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy.cuh"
#include "hw/gemm_mma.cuh"
#include "attention/tangent.cuh"
#include "attention/epilogue.cuh"

constexpr int kWarpRows = Config::kBlockQ / Config::kWarps;

struct InputStorage {
  SharedTile<Config::kBlockQ, Config::kHeadDim, Element> q, q_tangent;
  SharedTile<Config::kBlockK, Config::kHeadDim, Element> k, k_tangent;
  SharedTile<Config::kBlockK, Config::kChunk, Element> v, v_tangent;
};
union SharedStorage {
  InputStorage in;
  SharedTile<Config::kBlockQ, Config::kChunk, Element> out;  // once nothing else is read any more
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/mma.py disagrees");

typedef MmaFragment<kWarpRows / 16, Config::kBlockK / 8> ScoreFragment;
typedef MmaFragment<kWarpRows / 16, Config::kChunk / 8> OutFragment;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  InputStorage& shared = reinterpret_cast<SharedStorage*>(shared_memory)->in;
  auto& out_tile = reinterpret_cast<SharedStorage*>(shared_memory)->out;

  // Longest first: the last queries see the most keys under a causal mask.
  const int query_tiles = Place::query_tiles<Config::kBlockQ>(p);
  const int chunks = Config::kChunk < Config::kHeadDimV ? tiles_of(p.head_dim_v, Config::kChunk) : 1;
  const Assignment assigned(p, blockIdx.x, query_tiles * chunks, p.batch_size * p.heads_q);
  Place place;
  place.set_head(p, assigned.head % p.heads_q);
  place.set_batch(p, assigned.head / p.heads_q);
  place.key_count = Visibility::key_count(p, place);
  const int tile = query_tiles - 1 - assigned.tile / chunks, column = assigned.tile % chunks * Config::kChunk;
  const int columns = p.head_dim_v - column;

  const Range queries{tile * Config::kBlockQ, min(p.seq_q, (tile + 1) * Config::kBlockQ)};
  const Range seen = keys_seen_by_any(p, place, queries);
  const int last = tiles_of(seen.end, Config::kBlockK);
  const int first = next_visible_block<Config::kBlockK>(p, place, queries, seen.begin / Config::kBlockK, last);

  const auto load_queries = [&](auto& to, const View& view) {
    copy_tile<Config::kThreads, Config::kAligned>(to, matrix<const Element>(view, place.offset(view)), queries.begin,
                                                  queries, view.data ? p.head_dim : 0);
  };
  const auto load_keys = [&](auto& to, const View& view, int from, int count, int block) {
    const auto source = matrix<const Element>(view, place.key_offset(view) + from * view.column);
    copy_tile<Config::kThreads, Config::kAligned>(to, source, block * Config::kBlockK, seen, view.data ? count : 0);
  };
  const auto load_k = [&](int block) {
    load_keys(shared.k, p.k, 0, p.head_dim, block);
    load_keys(shared.k_tangent, p.k_tangent, 0, p.head_dim, block);
    cp_async_commit_group();
  };
  const auto load_v = [&](int block) {
    load_keys(shared.v, p.v, column, columns, block);
    load_keys(shared.v_tangent, p.v_tangent, column, columns, block);
    cp_async_commit_group();
  };

  const int warp_row = int(threadIdx.x) / 32 * kWarpRows;
  const ScoreFragment s_at(warp_row, 0);
  MovingSoftmax<ScoreFragment> softmax;
  float o[OutFragment::kSize], u[OutFragment::kSize];  // of the output, and of its tangent
  clear(o);
  clear(u);
  const DropKey key = drop_key(p, place);

  if (first < last) {
    load_queries(shared.q, p.q);
    load_queries(shared.q_tangent, p.q_tangent);
    load_k(first);
    load_v(first);
  }
  int next;
  for (int block = first; block < last; block = next) {
    next = next_visible_block<Config::kBlockK>(p, place, queries, block + 1, last);
    const Corner corner{queries.begin, block * Config::kBlockK};
    cp_async_wait_group<1>();
    __syncthreads();  // keys have arrived

    float s[ScoreFragment::kSize], ds[ScoreFragment::kSize];
    clear(s);
    clear(ds);
    gemm_rows_rows<Config::kHeadDim, ScoreFragment, Element, 2>(s, shared.q, warp_row, shared.k, 0);
    gemm_rows_rows<Config::kHeadDim, ScoreFragment, Element, 2>(ds, shared.q_tangent, warp_row, shared.k, 0);
    gemm_rows_rows<Config::kHeadDim, ScoreFragment, Element, 2>(ds, shared.q, warp_row, shared.k_tangent, 0);
    __syncthreads();  // keys are no longer read
    if (next < last) load_k(next);

    ScoreSlopes<ScoreFragment> slopes;
    scores_of<true>(
        s, slopes, s_at, p, place, corner,
        tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, {corner.k, corner.k + Config::kBlockK}));
    score_tangents(ds, s, slopes, s_at, p, place, corner);
    softmax.step<OutFragment>(s, ds, o, u, p);
    drop<true>(s, ds, s_at, key, p, corner);

    if (next < last)
      cp_async_wait_group<1>();
    else
      cp_async_wait_group<0>();
    __syncthreads();  // values have arrived
    gemm_registers_columns<ScoreFragment, OutFragment, Element>(o, s, shared.v, 0);
    gemm_registers_columns<ScoreFragment, OutFragment, Element>(u, s, shared.v_tangent, 0);
    gemm_registers_columns<ScoreFragment, OutFragment, Element>(u, ds, shared.v, 0);
    __syncthreads();  // values are no longer read
    if (next < last) load_v(next);
  }

  softmax.finish(p, place);
  softmax.settle<OutFragment>(u, o);
  const OutFragment o_at(warp_row, 0);
  const auto store = [&](const auto& x, const View& view, bool vectors) {
    __syncthreads();  // nothing in shared memory is read any more
    store_fragment(out_tile, x, o_at, [&](int slot) { return softmax.inverse(slot) * drop_scale(p); });
    __syncthreads();
    const Matrix<Element> to = matrix<Element>(view, place.offset(view) + column * view.column);
    store_tile<Config::kThreads, Config::kChunk>(out_tile, to, queries.begin, queries, columns, vectors);
  };
  store(o, p.out, p.out_vectors);
  store(u, p.out_tangent, p.out_tangent_vectors);
  if (column == 0) {
    store_lse(softmax, s_at, p, place, queries);
    store_row_values(p.lse_tangent, s_at, place, queries, [&](int slot) { return softmax.moved[slot]; });
  }
}
