// Backward of float32 on Hopper's tensor cores by wgmma (sm_90a): numbers as two planes of float16 (attention/planes.cuh,
// hw/gemm_split_wgmma.cuh), for heads that leave room in registers for all that is summed.
//
// Job: one block owns a tile of keys of one (batch entry, key head) and walks over the query tiles that see it, for every
// query head of the group in turn; dK and dV stay in registers all the while and are written once.  Warpgroup 0 produces: one
// thread loads the planes of queries and dO ahead of use.  The two others own 64 keys each and never wait for each other: S and
// dP are computed transposed, a row per key, P and dS are split where they stand, and dS goes through shared memory for
// dQ = dS K of the own keys, which is added to float32 sums in global memory.
// Each of the five products is first the sum of its low parts, then, at its scale, that of its high ones, and begins anew in
// every step; while one of them is waited for, the next one is under way.
// Invariants: producer and consumers walk the same steps; rows of Q, dO beyond seq_q and keys that nobody sees are zeros in
// shared memory.  A block whose head the planes do not stand for does nothing: backward_simt.cu has such heads.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/fragment_simt.cuh"
#include "attention/epilogue.cuh"
#include "backward_split_wgmma_inputs.cuh"

constexpr int kGroups = 2;  // of consumers
constexpr int kWarps = kGroups * kWarpgroupThreads / 32;
constexpr int kGroupBarrier = 1, kAllBarrier = kGroupBarrier + kGroups;
static_assert(Config::kBlockK == kGroups * kWarpgroupRows, "64 keys each");
static_assert(Config::kBlockQ == kWarpgroupRows && Config::kDqWidth <= kPanelColumns, "dQ of a step is one product");

typedef PanelTile<kWarpgroupRows, Config::kBlockQ> GradientTile;  // dS transposed, a row per key
typedef SumTile<kWarpgroupThreads, Config::kDqWidth / 8> DqTile;
typedef MmaFragment<1, Config::kBlockQ / 8, true> ScoreFragment;
constexpr int kScoreSteps = Config::kBlockQ / kStepDepth;

struct SharedStorage {
  KeyTile k[kPlanes];
  ValueTile v[kPlanes];
  QueryTile q[Config::kStages][kPlanes];
  DoutTile dout[Config::kStages][kPlanes];
  GradientTile ds[kGroups][kPlanes];
  InputChannels channels;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/split_wgmma.py disagrees");

// One warpgroup.
struct Consumer {
  const Params& p;
  SharedStorage& shared;
  const Work& work;
  const int group;
  Cursor<Config::kStages> cursor;
  Step at;
  float dk[Config::kHeadDim / 2], dv[Config::kHeadDimV / 2];

  __device__ __forceinline__ Consumer(const Params& params, SharedStorage& storage, const Work& w, int g)
      : p(params), shared(storage), work(w), group(g), at(params, w) {
    clear(dk);
    clear(dv);
  }
  __device__ __forceinline__ int own_rows() const { return group * kWarpgroupRows; }
  __device__ __forceinline__ int warp_row() const {  // of the group's 64
    return recomputed(threadIdx.x) % kWarpgroupThreads / 32 * 16;
  }
  __device__ __forceinline__ void step() {
    const SplitOperand<kPlanes, KeyTile> keys(shared.k, own_rows());
    const SplitOperand<kPlanes, ValueTile> values(shared.v, own_rows());
    const SplitOperand<kPlanes, QueryTile> queries(shared.q[0]);
    const SplitOperand<kPlanes, DoutTile> douts(shared.dout[0]);
    const int slot = cursor.slot;
    float s[ScoreFragment::kSize], dp[ScoreFragment::kSize];

    // S and dP.
    cursor.wait_full(shared.channels.queries);
    wgmma_fence();
    wgmma_low_high_rows<Config::kHeadDim>(s, keys, queries, slot);
    wgmma_high_low_rows<Config::kHeadDim>(s, keys, queries, slot);
    wgmma_commit_group();
    cursor.wait_full(shared.channels.douts);
    wgmma_fence();
    wgmma_low_high_rows<Config::kHeadDimV>(dp, values, douts, slot);
    wgmma_high_low_rows<Config::kHeadDimV>(dp, values, douts, slot);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    take_low(s);
    wgmma_fence();
    wgmma_high_rows<Config::kHeadDim>(s, keys, queries, slot);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    take_low(dp);
    wgmma_fence();
    wgmma_high_rows<Config::kHeadDimV>(dp, values, douts, slot);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    pin(s);

    // P.
    const ScoreFragment s_at(own_rows() + warp_row(), 0, recomputed(threadIdx.x));
    Place place = work.place;
    place.head = at.head;
    const auto& units = in_units(p, shared.channels);
    const Corner corner{at.tile * Config::kBlockQ, work.keys.begin};
    const int first_key = corner.k + own_rows();
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<true>(
        s, slopes, s_at, p, place, corner,
        tile_is_open(p, place, {corner.q, corner.q + Config::kBlockQ}, {first_key, first_key + kWarpgroupRows}),
        units.scale);
    const Statistics& statistics = shared.channels.statistics[slot];
    probabilities_of(s, s_at, statistics, units);
    SplitRegisters<kPlanes, kScoreSteps> probabilities, gradients;
    probabilities.pack(s, 1.f);
    pin(probabilities);
    float part_v[Config::kHeadDimV / 2];
    wgmma_fence();
    wgmma_low_high_columns(part_v, probabilities, douts, slot);
    wgmma_high_low_columns(part_v, probabilities, douts, slot);
    wgmma_commit_group();

    // dS.
    wgmma_wait_group<1>();
    pin(dp);
    score_gradients_of(s, dp, s_at, statistics, units);
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i) s[i] *= slopes[i];
    gradients.pack(s, 1.f);
    bar_sync(kGroupBarrier + group, kWarpgroupThreads);  // dS of the step before has been read
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      store_operand(shared.ds[group][plane], warp_row(), gradients.plane[plane]);
    fence_proxy_async();
    bar_sync(kGroupBarrier + group, kWarpgroupThreads);

    // dV, dK and dQ.
    float part_k[Config::kHeadDim / 2];
    pin(gradients);
    wgmma_fence();
    wgmma_low_high_columns(part_k, gradients, queries, slot);
    wgmma_high_low_columns(part_k, gradients, queries, slot);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    take_low(part_v);
    wgmma_fence();
    wgmma_high_columns(part_v, probabilities, douts, slot, 0, kScoreSteps);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    take_low(part_k);
    wgmma_fence();
    wgmma_high_columns(part_k, gradients, queries, slot, 0, kScoreSteps);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    take(dv, part_v);
    pin(probabilities);
    release_by_warp(shared.channels.douts, slot);
    float dq[Config::kDqWidth / 2];
    const SplitOperand<kPlanes, GradientTile> own_ds(shared.ds[group]);
    wgmma_fence();
    wgmma_plane_columns_columns<true, kWarpgroupRows>(dq, own_ds.plane(1), keys.plane(0));
    wgmma_plane_columns_columns<false, kWarpgroupRows>(dq, own_ds.plane(0), keys.plane(1));
    wgmma_commit_group();
    wgmma_wait_group<1>();
    take(dk, part_k);
    pin(gradients);
    release_by_warp(shared.channels.queries, slot);
    wgmma_wait_group<0>();
    take_low(dq);
    wgmma_fence();
    wgmma_plane_columns_columns<false, kWarpgroupRows>(dq, own_ds.plane(0), keys.plane(0));
    wgmma_commit_group();
    wgmma_wait_group<0>();
    pin(dq);
    DqTile::add(static_cast<float*>(p.dq_sum) + i64(at.number()) * DqTile::kSize, dq,
                recomputed(threadIdx.x) % kWarpgroupThreads);
    at.advance(p, work);
    cursor.advance();
  }
};

__device__ __forceinline__ void consume(const Params& p, SharedStorage& shared, const Work& work, int group) {
  Consumer consumer(p, shared, work, group);
  await_keys<kAllBarrier, kGroups * kWarpgroupThreads>(p, shared, work);
#pragma unroll 1
  for (int rest = work.steps; rest > 0; --rest) consumer.step();
  const GradientExponents exponent(p, work.place);
  const int key = consumer.own_rows() + consumer.warp_row();
  store_plane_gradient(p.dv, key, consumer.dv, exponent.dv(), 1.f, p.head_dim_v, p.dv_vectors, work);
  store_plane_gradient(p.dk, key, consumer.dk, exponent.dk(), p.scale, p.head_dim, p.dk_vectors, work);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    set_work(p, shared.channels);
    shared.channels.init(arrivals_of(kWarps));
    fence_mbarrier_init();
  }
  __syncthreads();
  const Work work = shared.channels.work;
  if (!is_split(p, work.place)) return;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce_planes(p, shared, work);
  } else {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    consume(p, shared, work, group - 1);
  }
}
