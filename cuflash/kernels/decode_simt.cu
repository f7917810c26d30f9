// Decode by scalar multiply-adds, for every dtype and architecture: a few queries against a long cache, in one launch.
//
// Job: as decode_mma.cu, of which it is the plain form.  A warp takes 32 keys at a time: a lane computes the scores of one of
// them with all rows, and then a few columns of the output.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 1; the list is that of Stream-K (arXiv:2301.03598).
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/lanes.cuh"
#include "attention/softmax.cuh"
#include "decode_slices.cuh"

typedef LaneFragment<Config::kRows> ScoreFragment;
typedef LaneColumns<Config::kRows, Config::kHeadDimV / 32> OutFragment;
static_assert(Config::kBlockK == 32, "a key for each lane");

struct SharedStorage {
  alignas(16) Real q[Config::kRows][Config::kHeadDim];
  MergeStorage merge;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/decode.py disagrees");

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;

  const Share share(p);
  append_share(p);
  if (share.begin == share.end) return;
  const u32 end = share.end;
  u32 at = share.begin;  // where the next unit begins, or the rest of one

  Start here = share.start;
  u32 current = at + warp;  // block of keys that is worked on next
  const auto load_q = [&] {
    if (at >= end) return;
    const Walk walk = moved_to(here, p, at);
    load_queries<Config::kRows, Config::kHeadDim>(
        p, walk.sequence, Unit(p, walk, at),
        [&](int row, int column, Element x) { shared.q[row][column] = to_real(x); });
  };
  load_q();
  __syncthreads();
  while (at < end) {
    const Walk walk(p, here);
    const Unit unit(p, walk, at);
    at = min(end, unit.end);
    const ScoreFragment s_at;
    const OutFragment o_at;
    const PackedRows<ScoreFragment> rows(s_at, p, walk.sequence, unit.head_k, unit.first_row);
    const Range seen_by_all = keys_seen_by_all(p, walk.sequence.place, unit.queries(p, walk.sequence));
    OnlineSoftmax<ScoreFragment> softmax;
    Real o[OutFragment::kSize];
    clear(o);
#pragma unroll 1
    for (; current < at; current += Config::kWarps) {
      const int key = unit.key(current);
      const KeyRow row =
          key_row<Config::kPaged, Config::kAppends>(p, walk.sequence, unit.head_k, unit.seen, key + lane);
      Real s[ScoreFragment::kSize];
      clear(s);
      if (row.k) multiply_rows<Config::kAligned>(s, shared.q, row.k, p.head_dim, row.column_k(p));
      packed_scores(s, s_at, rows, p, walk.sequence.place, key, holds(seen_by_all, {key, key + Config::kBlockK}));
      Real alpha[ScoreFragment::kSlots];
      bool subtracted = false;
      if (softmax.rebase(s, alpha, subtracted, p)) softmax.rescale<OutFragment>(o, alpha);
      softmax.exponentiate(s, subtracted, p);
#pragma unroll 4
      for (int source = 0; source < Config::kBlockK; ++source) {
        const u64 v = __shfl_sync(0xffffffffu, reinterpret_cast<u64>(row.v), source);
        const i64 column_stride = __shfl_sync(0xffffffffu, row.column_v(p), source);
        Real probability[Config::kRows];
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) probability[r] = __shfl_sync(0xffffffffu, s[r], source);
        if (v)
          add_row<Config::kRows, Config::kHeadDimV / 32>(o, probability, reinterpret_cast<const Element*>(v),
                                                         p.head_dim_v, column_stride);
      }
    }
    finish_part(shared.merge, p, share, walk.sequence.entry(), unit, softmax, s_at, o, o_at, load_q);
  }
}
