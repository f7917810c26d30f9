// Forward on mma.sync tensor cores (sm_75 float16; sm_80 and later float16 and bfloat16; sm_89 and later 8-bit inputs with
// 16-bit outputs).
//
// Job: one block computes a tile of queries (and, beyond 256 value columns, one chunk of them) against all keys it sees.
// Warps own query rows, so that no partial output is ever merged.  With two stages the next keys and values travel while
// this block is worked on, one barrier per block; with one stage keys travel under the softmax and the second product,
// values under the first.
// Invariants: every thread of the block runs the same key blocks; keys are walked in ascending order, past hidden blocks.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/copy.cuh"
#include "hw/gemm_mma.cuh"
#include "attention/dropout.cuh"
#include "attention/epilogue.cuh"
#include "attention/units.cuh"

constexpr int kWarpRows = Config::kBlockQ / Config::kWarps;
constexpr bool kIsNarrow = sizeof(Element) == 1;                          // forward_values.cu has laid out the values
constexpr int kScoreDepth = Config::kHeadDim * int(sizeof(Element)) / 2;  // of the product that makes scores

template <bool kInSteps> struct Values { typedef SharedTile<Config::kBlockK, Config::kChunk, Element> Tile; };
template <> struct Values<true> { typedef StepTile<Config::kBlockK, Config::kChunk> Tile; };

struct InputStorage {
  SharedTile<Config::kBlockQ, Config::kHeadDim, Element> q;
  SharedTile<Config::kBlockK, Config::kHeadDim, Element> k[Config::kStages];
  Values<kIsNarrow>::Tile v[Config::kStages];
  const Element* volatile keys;  // where K and V begin: the loop has no registers left to keep addresses in
  const Element* volatile values;
};
union SharedStorage {
  InputStorage in;
  SharedTile<Config::kBlockQ, Config::kChunk, OutElement> out;  // once nothing else is read any more
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/mma.py disagrees");

typedef MmaFragment<kWarpRows / 16, Config::kBlockK / 8> ScoreFragment;
typedef MmaFragment<kWarpRows / 16, Config::kChunk / 8> OutFragment;
// No registers are left for the bounds of rows; packed sequences have bounds of their own.
constexpr bool kIsFull = !kPacked && ScoreFragment::kSize + OutFragment::kSize >= 192;

// What a block works on.  Longest first: the last queries see the most keys under a causal mask.
struct Work {
  Place place;
  Range queries, columns;

  __device__ __forceinline__ Work(const Params& p, int index) {
    const int query_tiles = Place::query_tiles<Config::kBlockQ>(p);
    const int chunks = Config::kChunk < Config::kHeadDimV ? tiles_of(p.head_dim_v, Config::kChunk) : 1;
    const Assignment assigned(p, index, query_tiles * chunks, p.batch_size * p.heads_q);
    const int tile = place.enter_queries<Config::kBlockQ>(p, query_tiles - 1 - assigned.tile / chunks);
    queries = {tile * Config::kBlockQ, min(place.seq_q(p), (tile + 1) * Config::kBlockQ)};
    columns = {assigned.tile % chunks * Config::kChunk, Config::kExact ? Config::kHeadDimV : p.head_dim_v};
    place.set_head(p, assigned.head % p.heads_q);
    place.set_batch(p, assigned.head / p.heads_q);
    place.key_count = Visibility::key_count(p, place);
  }
};

// Where the values begin that the block sums.
template <class Record> __device__ __forceinline__ auto values_of(const Record& p, const Work& work) {
  if constexpr (kIsNarrow) {
    const i64 head = i64(work.place.entry(p)) * p.heads_k + work.place.head_k;
    return static_cast<const Element*>(p.value_steps) + head * p.step_count * (kStepRows * Config::kHeadDimV) +
           work.columns.begin * kHalfRows;
  } else {
    return matrix<const Element>(p.v, work.place.key_offset(p.v) + work.columns.begin * p.v.column).data;
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  InputStorage& shared = reinterpret_cast<SharedStorage*>(shared_memory)->in;
  auto& out_tile = reinterpret_cast<SharedStorage*>(shared_memory)->out;

  const Work work(p, blockIdx.x);
  const Place& place = work.place;
  const Range queries = work.queries, columns = work.columns;
  if (kPacked && is_empty(queries)) return;
  const Range seen = keys_seen_by_any(p, place, queries);
  int first = seen.begin / Config::kBlockK;
  const int last = tiles_of(seen.end, Config::kBlockK);
  if constexpr (Visibility::kHidesTiles) first = next_visible_block<Config::kBlockK>(p, place, queries, first, last);
  const int head_dim = Config::kExact ? Config::kHeadDim : p.head_dim;  // known to the compiler where nothing is padded

  const auto load_k = [&](const Element* keys, int block, int stage) {
    const Matrix<const Element> k{keys, p.k.row, p.k.column};
    copy_tile<Config::kThreads, Config::kAligned, true>(shared.k[stage], k, block * Config::kBlockK, seen, head_dim);
    cp_async_commit_group();
  };
  const auto load_v = [&](const Element* values, int block, int stage) {
    const auto copy = [&](auto& to) {
      if constexpr (kIsNarrow) {
        copy_steps<Config::kThreads, Config::kHeadDimV>(to,
                                                        values + i64(block) * (Config::kBlockK * Config::kHeadDimV));
      } else {
        const Matrix<const Element> v{values, p.v.row, p.v.column};
        copy_tile<Config::kThreads, Config::kAligned, true>(to, v, block * Config::kBlockK, seen,
                                                            columns.end - columns.begin);
      }
    };
    copy(shared.v[stage]);
    cp_async_commit_group();
  };
  // Values that no query sees must not meet a weight of 0: they may be anything, NaN as well.  Others arrive as zeros.
  const auto clean_values = [&](auto& values, Range keys) {
    if constexpr (kIsNarrow && Visibility::kNarrows) {
      if (keys.begin >= seen.begin && min(keys.end, place.seq_k(p)) <= seen.end) return;
      clear_rows_outside<Config::kThreads>(values, Range{seen.begin - keys.begin, seen.end - keys.begin},
                                           int(threadIdx.x));
      __syncthreads();
    }
  };

  const int warp_row = int(threadIdx.x) / 32 * kWarpRows;
  const ScoreFragment s_at(warp_row, 0);
  OnlineSoftmax<ScoreFragment, Config::kMaximum, Config::kEntropy> softmax;
  float o[OutFragment::kSize];
  clear(o);
  const DropKey key = drop_key(p, place);
  OperandA<kScoreDepth, ScoreFragment> q_operand;  // used where kQInRegisters
  HeadScales<kHasScales> scales;
  scales.read_scales(p, place);
  const auto held_units = units_of<kHasScales>(p, scales);
  const auto& units = in_units(p, held_units);

  if (first < last) {
    const auto q = matrix<const Element>(p.q, place.offset(p.q));
    const Element* keys = matrix<const Element>(p.k, place.key_offset(p.k)).data;
    const Element* values = values_of(p, work);
    copy_tile<Config::kThreads, Config::kAligned, true>(shared.q, q, queries.begin, queries, head_dim);
    load_k(keys, first, 0);
    load_v(values, first, 0);
    if (threadIdx.x == 0) {
      shared.keys = keys;
      shared.values = values;
    }
  }
  int stage = 0;
  bool more = first < last;
  int hidden = 0;  // blocks behind the current one that the queries do not see and that are passed over
  for (int block = first; more; block += 1 + hidden, stage ^= Config::kStages - 1) {
    if constexpr (Visibility::kHidesTiles) {
      const int end = tiles_of(seen.end, Config::kBlockK);
      hidden = next_visible_block<Config::kBlockK>(p, place, queries, block + 1, end) - (block + 1);
    }
    more = block + 1 + hidden < tiles_of(recomputed(seen.end), Config::kBlockK);
    const Corner corner{kIsFull ? recomputed(queries.begin) : queries.begin, block * Config::kBlockK};
    const Range keys{corner.k, corner.k + Config::kBlockK};
    if constexpr (Config::kStages == 2) {
      cp_async_wait_group<0>();
      __syncthreads();  // this block has arrived, the previous one is no longer read
      if (more) {
        load_k(shared.keys, block + 1 + hidden, stage ^ 1);
        load_v(shared.values, block + 1 + hidden, stage ^ 1);
      }
    } else {
      cp_async_wait_group<1>();
      __syncthreads();  // keys have arrived
    }
    auto&& q_pairs = in_pairs(shared.q);
    auto&& k_pairs = in_pairs(shared.k[stage]);
    if (Config::kQInRegisters && block == first) q_operand.load(q_pairs, warp_row);

    float s[ScoreFragment::kSize];
    clear(s);
    if constexpr (Config::kQInRegisters) {
      gemm_operand_rows<kScoreDepth, ScoreFragment, Element, true>(s, q_operand, k_pairs, 0);
    } else {
      gemm_rows_rows<kScoreDepth, ScoreFragment, Element, 2, true>(s, q_pairs, warp_row, k_pairs, 0);
    }
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // keys are no longer read
      if (more) load_k(shared.keys, block + 1 + hidden, 0);
    }

    ScoreSlopes<ScoreFragment> slopes;
    scores_of<false>(s, slopes, s_at, p, place, corner,
                     tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, keys), units.scale);
    softmax.step<OutFragment>(s, o, units);
    drop<true>(s, s_at, key, p, corner);

    if constexpr (Config::kStages == 1) {
      if (more)
        cp_async_wait_group<1>();
      else
        cp_async_wait_group<0>();
      __syncthreads();  // values have arrived
    }
    clean_values(shared.v[stage], keys);
    [&](auto& values) {
      if constexpr (kIsNarrow)
        gemm_registers_steps<ScoreFragment, OutFragment, Element>(o, s, values);
      else
        gemm_registers_columns<ScoreFragment, OutFragment, Element, true>(o, s, values, 0);
    }(shared.v[stage]);
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // values are no longer read
      if (more) load_v(shared.values, block + 1 + hidden, 0);
    }
  }

  softmax.finish();
  const Work done(p, recomputed(blockIdx.x));
  softmax.join_sink(p, done.place, units);
  __syncthreads();  // nothing in shared memory is read any more
  const OutFragment o_at(recomputed(threadIdx.x) / 32 * kWarpRows, 0);
  HeadScales<kHasScales> done_scales;
  done_scales.read_scales(p, done.place);
  store_fragment(out_tile, o, o_at,
                 [&](int slot) { return softmax.inverse(slot) * drop_scale(p) * value_scale(done_scales); });
  __syncthreads();
  const Matrix<OutElement> out =
      matrix<OutElement>(p.out, done.place.offset(p.out) + done.columns.begin * p.out.column);
  store_tile<Config::kThreads, Config::kChunk>(out_tile, out, done.queries.begin, done.queries,
                                               done.columns.end - done.columns.begin, p.out_vectors);
  if (done.columns.begin == 0) {
    store_lse(softmax, s_at, p, done.place, done.queries, units);
    store_statistics<Config::kMaximum, Config::kEntropy>(softmax, s_at, p, done.place, done.queries);
  }
}
