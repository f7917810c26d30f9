// Decode on mma.sync tensor cores (sm_80 and later, float16 and bfloat16): a few queries against a long cache, in one launch.
//
// Job: a block of threads walks its slice of the list of blocks of keys (decode_slices.cuh).  Its warps take them in turn,
// each with a softmax and an output of its own, which become one where a unit ends.
// A warp feeds itself: it copies the blocks that it will work on into a ring of its own, past the ends of units, so that
// copies never wait for another warp, and what happens at the end of a unit hides behind copies that are under way.
// Invariant: a block of keys is read once for all heads of a group, which are rows of one tile.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1; the list is that of Stream-K (arXiv:2301.03598).
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/gemm_mma.cuh"
#include "attention/softmax.cuh"
#include "decode_rings.cuh"
#include "decode_slices.cuh"

constexpr int kKeyBlocks = Config::kBlockK / 8;
typedef MmaFragment<1, kKeyBlocks> ProductFragment;

// Tiles of 16 rows, and of 8: their output is computed transposed.
template <int kRows> struct Shape {
  typedef ProductFragment ScoreFragment;
  struct OutFragment : MmaFragment<1, Config::kHeadDimV / 8> {
    __device__ __forceinline__ OutFragment() : MmaFragment<1, Config::kHeadDimV / 8>(0, 0) {}
    static __device__ __forceinline__ void from_rows(float (&to)[2], const float (&x)[2]) {
      to[0] = x[0];
      to[1] = x[1];
    }
  };
  static __device__ __forceinline__ void take(float (&s)[ScoreFragment::kSize],
                                              const float (&product)[ProductFragment::kSize]) {
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] = product[i];
  }
  template <class Tile>
  static __device__ __forceinline__ void multiply(float (&o)[OutFragment::kSize],
                                                  const float (&probability)[ScoreFragment::kSize], Tile& v) {
    gemm_registers_columns<ScoreFragment, MmaFragment<1, Config::kHeadDimV / 8>, Element>(o, probability, v, 0);
  }
};
template <> struct Shape<8> {
  typedef UpperFragment<kKeyBlocks> ScoreFragment;
  typedef TransposedFragment<Config::kHeadDimV / 16> OutFragment;
  static __device__ __forceinline__ void take(float (&s)[ScoreFragment::kSize],
                                              const float (&product)[ProductFragment::kSize]) {
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] = product[i / 2 * 4 + i % 2];
  }
  template <class Tile>
  static __device__ __forceinline__ void multiply(float (&o)[OutFragment::kSize],
                                                  const float (&probability)[ScoreFragment::kSize], Tile& v) {
    gemm_columns_registers<ScoreFragment, OutFragment, Element>(o, probability, v);
  }
};
typedef Shape<Config::kRows> Tiles;
typedef Tiles::ScoreFragment ScoreFragment;
typedef Tiles::OutFragment OutFragment;

struct SharedStorage {
  Rings<Config::kTensor> rings;
  SharedTile<16, Config::kHeadDim, Element> q;
  MergeStorage merge;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/decode.py disagrees");

// What a warp copies from.
struct Source {
  Sequence sequence;
  Unit unit;

  __device__ __forceinline__ Source(const Params& p, Start& ahead, u32 at) : Source(p, moved_to(ahead, p, at), at) {}
  __device__ __forceinline__ Source(const Params& p, const Walk& walk, u32 at)
      : sequence(walk.sequence), unit(p, walk, at) {}
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  const int warp = int(threadIdx.x) / 32;
  auto& rings = shared.rings;

  rings.announce(p);
  rings.open();
  if constexpr (Config::kProgrammatic) {
    // The next launch takes the places of blocks that end, and waits for all of them.  Every block waits, so that a launch
    // that has ended tells the next one that those in front of it have.
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
  }
  const Share share(p);
  if (share.begin == share.end) return append_share(p);
  const u32 end = share.end;
  u32 at = share.begin;  // where the next unit begins, or the rest of one

  Start ahead = share.start;
  u32 next = at + warp;  // block of keys that is copied next
  Source source(p, ahead, min(next, end - 1));
  typename Rings<Config::kTensor>::Lookout lookout;
  lookout.move(p, source.sequence, source.unit, next, true);
  const auto load = [&](int stage) {
    if (next < end) rings.load(p, stage, source.sequence, source.unit, next, lookout);
    rings.close_stage();
    next += Config::kWarps;
    if (next >= end) return;
    const bool is_new = next >= source.unit.end;
    if (is_new) source = Source(p, ahead, next);
    lookout.move(p, source.sequence, source.unit, next, is_new);
  };
#pragma unroll 1
  for (int stage = 0; stage < Config::kStages; ++stage) load(stage);

  Start here = share.start;
  u32 current = at + warp;  // block of keys that is worked on next
  int stage = 0;
  u32 phase = 0;
  // Queries of the unit at `at`: requested early, put into the tile when nobody reads those before.
  QueriesAhead<16, Config::kHeadDim> queries;
  const bool is_early = Config::kQueriesAhead && p.q_vectors;
  const auto request_queries = [&] {
    if (at >= end || !is_early) return;
    const Walk walk = moved_to(here, p, at);
    queries.request(p, walk.sequence, Unit(p, walk, at));
  };
  const auto put_queries = [&] {
    if (is_early) return queries.put(shared.q);
    if (at >= end) return;
    const Walk walk = moved_to(here, p, at);
    load_queries<16, Config::kHeadDim>(p, walk.sequence, Unit(p, walk, at),
                                       [&](int row, int column, Element x) { *shared.q.at(row, column) = x; });
  };
  request_queries();
  append_share(p);
  put_queries();
  __syncthreads();
  while (at < end) {
    const Walk walk(p, here);
    const Unit unit(p, walk, at);
    at = min(end, unit.end);
    request_queries();
    const ScoreFragment s_at(0, 0);
    const OutFragment o_at;
    const PackedRows<ScoreFragment> rows(s_at, p, walk.sequence, unit.head_k, unit.first_row);
    const Range seen_by_all = keys_seen_by_all(p, walk.sequence.place, unit.queries(p, walk.sequence));
    OnlineSoftmax<ScoreFragment> softmax;
    float o[OutFragment::kSize];
    clear(o);
#pragma unroll 1
    for (; current < at; current += Config::kWarps) {
      const int key = unit.key(current);
      rings.await(p, stage, phase, walk.sequence, unit, key);
      float product[ProductFragment::kSize], s[ScoreFragment::kSize];
      clear(product);
      gemm_rows_rows<Config::kHeadDim, ProductFragment, Element>(product, shared.q, 0, rings.k[warp][stage], 0);
      Tiles::take(s, product);
      packed_scores(s, s_at, rows, p, walk.sequence.place, key, holds(seen_by_all, {key, key + Config::kBlockK}));
      float alpha[ScoreFragment::kSlots];
      bool subtracted = false;
      if (softmax.rebase(s, alpha, subtracted, p)) {
        float factor[OutFragment::kSlots];
        OutFragment::from_rows(factor, alpha);
#pragma unroll
        for (int i = 0; i < OutFragment::kSize; ++i) o[i] *= factor[OutFragment::slot(i)];
      }
      softmax.exponentiate(s, subtracted, p);
      Tiles::multiply(o, s, rings.v[warp][stage]);
      __syncwarp();  // the block is no longer read
      load(stage);
      if (++stage == Config::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    finish_part(shared.merge, p, share, walk.sequence.entry(), unit, softmax, s_at, o, o_at, put_queries);
  }
}
