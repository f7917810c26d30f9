// Column sums of P on mma.sync tensor cores, from the lse of a forward (sm_75 float16; sm_80 and later bfloat16, too).
//
// Job: one block owns a tile of keys of one (batch entry, query head) and walks over the tiles of queries that see it.  Scores
// are computed transposed, a row per key, and warps own rows: a sum never leaves its warp, and is written once.
// Invariants: all threads run the same steps; queries are walked over in ascending order, so that equal calls give equal bits.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2, of which this is the first product alone.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy.cuh"
#include "hw/gemm_mma.cuh"
#include "attention/columns.cuh"
#include "attention/epilogue.cuh"

constexpr int kWarpKeys = Config::kBlockK / Config::kWarps;

struct SharedStorage {
  SharedTile<Config::kBlockK, Config::kHeadDim, Element> k;
  SharedTile<Config::kBlockQ, Config::kHeadDim, Element> q[Config::kStages];
  Real shift[Config::kStages][Config::kBlockQ];
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/mma.py disagrees");

typedef MmaFragment<kWarpKeys / 16, Config::kBlockQ / 8, true> ScoreFragment;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);

  // Longest first: under a causal mask the first keys are seen by the most queries.
  const Assignment assigned(p, blockIdx.x, tiles_of(p.seq_k, Config::kBlockK), p.batch_size * p.heads_q);
  const int tile = assigned.tile;
  Place place;
  place.set_head(p, assigned.head % p.heads_q);
  place.set_batch(p, assigned.head / p.heads_q);
  place.key_count = Visibility::key_count(p, place);

  const Range keys{tile * Config::kBlockK, min(p.seq_k, (tile + 1) * Config::kBlockK)};
  const Range rows{0, p.seq_q};
  const Range walk = tiles_over<Config::kBlockQ>(queries_seeing_any(p, place, keys));
  const int head_dim = Config::kExact ? Config::kHeadDim : p.head_dim;  // known to the compiler where nothing is padded
  const auto load_queries = [&](int query_tile, int stage) {
    const int row = query_tile * Config::kBlockQ;
    const auto q = matrix<const Element>(p.q, place.offset(p.q));
    copy_tile<Config::kThreads, Config::kAligned>(shared.q[stage], q, row, rows, head_dim);
    cp_async_commit_group();
    load_shifts<Config::kThreads>(shared.shift[stage], p, place, row);
  };

  const int warp_key = int(threadIdx.x) / 32 * kWarpKeys;
  const ScoreFragment s_at(warp_key, 0);
  ColumnSums<ScoreFragment> sums;
  OperandA<Config::kHeadDim, ScoreFragment> k_operand;  // used where kKInRegisters

  const int first = next_seeing_tile<Config::kBlockQ>(p, place, keys, walk.begin, walk.end);
  if (first < walk.end) {
    copy_tile<Config::kThreads, Config::kAligned>(shared.k, matrix<const Element>(p.k, place.key_offset(p.k)),
                                                  keys.begin, keys_seen_by_any(p, place, rows), head_dim);
    load_queries(first, 0);
  }
  int next;
  for (int query_tile = first, stage = 0; query_tile < walk.end; query_tile = next, stage ^= Config::kStages - 1) {
    next = next_seeing_tile<Config::kBlockQ>(p, place, keys, query_tile + 1, walk.end);
    cp_async_wait_group<0>();
    __syncthreads();  // this tile has arrived, the previous one is no longer read
    if (Config::kStages == 2 && next < walk.end) load_queries(next, stage ^ 1);

    float s[ScoreFragment::kSize];
    clear(s);
    if constexpr (Config::kKInRegisters) {
      if (query_tile == first) k_operand.load(shared.k, warp_key);
      gemm_operand_rows<Config::kHeadDim, ScoreFragment, Element>(s, k_operand, shared.q[stage], 0);
    } else {
      gemm_rows_rows<Config::kHeadDim, ScoreFragment, Element, 2>(s, shared.k, warp_key, shared.q[stage], 0);
    }
    const Corner corner{query_tile * Config::kBlockQ, keys.begin};
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<false>(
        s, slopes, s_at, p, place, corner,
        tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, {corner.k, corner.k + Config::kBlockK}));
    sums.add(s, shared.shift[stage], s_at, p);
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // this tile is no longer read
      if (next < walk.end) load_queries(next, 0);
    }
  }

  sums.finish();
  store_row_values(p.column_sums, s_at, place, keys, [&](int slot) { return sums.sum[slot]; });
}
