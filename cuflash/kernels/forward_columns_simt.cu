// Column sums of P for float32 and float64 by scalar multiply-adds, from the lse of a forward.
//
// Job: one block owns a tile of keys of one (batch entry, query head) and walks over the tiles of queries that see it.  Scores
// are computed transposed, a row per key, and warps own rows: a sum never leaves its warp, and is written once.
// Invariants: all threads run the same steps; queries are walked over in ascending order, so that equal calls give equal bits.
// The next queries arrive while the weights of the current ones are summed.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2, of which this is the first product alone.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy_simt.cuh"
#include "hw/gemm_simt.cuh"
#include "attention/columns.cuh"
#include "attention/epilogue.cuh"

typedef Lanes<Config::kLaneRows> Grid;
typedef FragmentSimt<Grid, Config::kThreadRows, Config::kThreadColumns, 1, 1, true> ScoreFragment;
constexpr int kBlockK = Config::kWarps * ScoreFragment::kTileRows, kBlockQ = ScoreFragment::kTileColumns;
constexpr int kPitch = odd_pitch(Config::kHeadDim, Vector<Real>::kSize);

struct SharedStorage {
  PitchedTile<kBlockK, Config::kHeadDim, kPitch, Real> k;
  PitchedTile<kBlockQ, Config::kHeadDim, kPitch, Real> q;
  alignas(16) Real shift[2][kBlockQ];
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/simt.py disagrees");

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);

  // Longest first: under a causal mask the first keys are seen by the most queries.
  const Assignment assigned(p, blockIdx.x, tiles_of(p.seq_k, kBlockK), p.batch_size * p.heads_q);
  const int tile = assigned.tile;
  Place place;
  place.set_head(p, assigned.head % p.heads_q);
  place.set_batch(p, assigned.head / p.heads_q);
  place.key_count = Visibility::key_count(p, place);

  const Range keys{tile * kBlockK, min(p.seq_k, (tile + 1) * kBlockK)};
  const Range rows{0, p.seq_q};
  const Range walk = tiles_over<kBlockQ>(queries_seeing_any(p, place, keys));
  const auto source = [&](const View& view, i64 offset, Range rows) {
    return CopySource<Element>{
        static_cast<Element*>(view.data) + offset, view.row, view.column, rows.begin, rows.end, p.head_dim};
  };
  const auto load_queries = [&](int query_tile, int buffer) {
    copy_tile<Config::kThreads, Config::kAligned>(shared.q, source(p.q, place.offset(p.q), rows), query_tile * kBlockQ);
    load_shifts<Config::kThreads>(shared.shift[buffer], p, place, query_tile * kBlockQ);
  };

  const ScoreFragment s_at(int(threadIdx.x) % 32, int(threadIdx.x) / 32 * ScoreFragment::kTileRows, 0);
  ColumnSums<ScoreFragment> sums;

  const int first = next_seeing_tile<kBlockQ>(p, place, keys, walk.begin, walk.end);
  if (first < walk.end) {
    const Range seen = keys_seen_by_any(p, place, rows);
    copy_tile<Config::kThreads, Config::kAligned>(shared.k, source(p.k, place.key_offset(p.k), seen), keys.begin);
    load_queries(first, 0);
  }
  int next;
  for (int query_tile = first, buffer = 0; query_tile < walk.end; query_tile = next, buffer ^= 1) {
    next = next_seeing_tile<kBlockQ>(p, place, keys, query_tile + 1, walk.end);
    wait_for_copies();
    __syncthreads();  // this tile has arrived

    Real s[ScoreFragment::kSize];
    clear(s);
    multiply_abt<ScoreFragment, Config::kHeadDim, kPitch, kPitch>(s, s_at, shared.k.data, shared.q.data);
    __syncthreads();  // queries are no longer read
    if (next < walk.end) load_queries(next, buffer ^ 1);

    const Corner corner{query_tile * kBlockQ, keys.begin};
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<false>(s, slopes, s_at, p, place, corner,
                     tile_is_open(p, place, {corner.q, corner.q + kBlockQ}, {corner.k, corner.k + kBlockK}));
    sums.add(s, shared.shift[buffer], s_at, p);
  }

  sums.finish();
  store_row_values(p.column_sums, s_at, place, keys, [&](int slot) { return sums.sum[slot]; });
}
