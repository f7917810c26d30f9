// Backward of float32 on Hopper's tensor cores by wgmma (sm_90a) for head sizes above 64, and for scores with slopes: numbers as
// two planes of float16 (attention/planes.cuh, hw/gemm_split_wgmma.cuh).
//
// Job: one block owns 64 keys of one (batch entry, key head) and walks over the query tiles that see them, for every query head of
// the group in turn.  dK, dV and what a step adds to them are together more than a warpgroup's registers, so three consumers share
// out the work by kind:
//   values    S = K Qᵀ, P, dV += Pᵀ dO
//   keys      dP = V dOᵀ, dS, dK += dSᵀ Q
//   queries   dQ = dS K, which it adds to float32 sums in global memory
// The first two compute the same 64 x 64 elements in the same threads, so that P goes from one to the other as float32 through
// shared memory, each thread's own.  dS is written there as planes for the third.  What one of them does beside products runs
// under those of the others; additions to dQ are what is not hidden yet.
// S and dP are sums of low and of high parts side by side.  The other products, which have half of their columns each, are first the
// sum of their low parts, then, at its scale, that of the high ones, and begin anew in every step; while one half is waited for,
// the other is under way.
// Invariants: producer and consumers walk the same steps; rows of Q, dO beyond seq_q and keys that nobody sees are zeros in
// shared memory.  A block whose head the planes do not stand for does nothing: backward_simt.cu has such heads.
// Source: FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "hw/fragment_simt.cuh"
#include "attention/epilogue.cuh"
#include "backward_split_wgmma_inputs.cuh"

constexpr int kGroups = 3;  // of consumers
constexpr int kGroupWarps = kWarpgroupThreads / 32;
constexpr int kAllBarrier = 1;
static_assert(Config::kBlockK == kWarpgroupRows && Config::kBlockQ == kWarpgroupRows, "one tile of scores");

typedef PanelTile<kPlanes * Config::kBlockQ, Config::kHeadDim> QueryPlanes;
typedef PanelTile<kPlanes * Config::kBlockQ, Config::kHeadDimV> DoutPlanes;
typedef PanelTile<Config::kBlockK, Config::kBlockQ> GradientTile;  // dS transposed, a row per key
typedef MmaFragment<1, Config::kBlockQ / 8, true> ScoreFragment;
typedef float Scores[ScoreFragment::kSize];
constexpr int kScoreSteps = Config::kBlockQ / kStepDepth;
typedef SplitRegisters<kPlanes, kScoreSteps> Weights;

struct SharedStorage {
  KeyTile k[kPlanes];
  ValueTile v[kPlanes];
  QueryPlanes q[Config::kStages];
  DoutPlanes dout[Config::kStages];
  GradientTile ds[kPlanes];
  HandedOver<ScoreFragment::kSize> p;
  InputChannels channels;
  Channel<1> probabilities, gradients;
};
static_assert(sizeof(SharedStorage) == Config::kSharedBytes, "schedules/split_wgmma.py disagrees");

// ---- values and keys ---------------------------------------------------------------------------------------------------
// What both have; "near" is the array of queries that they multiply by keys, "far" the one that they multiply by what they made.
struct Kind {
  const Params& p;
  SharedStorage& shared;
  const Work& work;
  Cursor<Config::kStages> cursor;  // of the step at hand
  Cursor<1> p_cursor;
  Step at;

  __device__ __forceinline__ Kind(const Params& params, SharedStorage& storage, const Work& w)
      : p(params), shared(storage), work(w), at(params, w) {}
  __device__ __forceinline__ int thread() const { return int(recomputed(threadIdx.x) % kWarpgroupThreads); }
  __device__ __forceinline__ int warp_row() const { return thread() / 32 * 16; }
  __device__ __forceinline__ ScoreFragment fragment() const {
    return ScoreFragment(warp_row(), 0, recomputed(threadIdx.x));
  }
  const __device__ __forceinline__ Statistics& statistics() const { return shared.channels.statistics[cursor.slot]; }
};

struct Values : Kind {
  using Kind::Kind;
  typedef KeyTile KeyPlane;
  typedef QueryPlanes Near;
  typedef DoutPlanes Far;
  static constexpr int kDepth = Config::kHeadDim, kColumns = Config::kHeadDimV;
  __device__ __forceinline__ auto& keys() const { return shared.k; }
  __device__ __forceinline__ auto& near() const { return shared.q; }
  __device__ __forceinline__ auto& far() const { return shared.dout; }
  __device__ __forceinline__ auto& near_channel() const { return shared.channels.queries; }
  __device__ __forceinline__ auto& far_channel() const { return shared.channels.douts; }

  // S -> P, for dV, and for the keys.
  __device__ __forceinline__ void form(Scores& s, Weights& weights) {
    const ScoreFragment s_at = fragment();
    const auto& units = in_units(p, shared.channels);
    Place place = work.place;
    place.head = at.head;
    const Corner corner{at.tile * Config::kBlockQ, work.keys.begin};
    ScoreSlopes<ScoreFragment> slopes;
    scores_of<true>(s, slopes, s_at, p, place, corner,
                    tile_is_open(p, place, at.queries(), {corner.k, corner.k + Config::kBlockK}), units.scale);
    probabilities_of(s, s_at, statistics(), units);
    release_by_warp(near_channel(), cursor.slot);
    weights.pack(s, 1.f);
    p_cursor.wait_empty(shared.probabilities);
    shared.p.store([&] { return thread(); }, [&](int i) { return s[i] * slopes[i]; });
    arrive_by_warp(p_cursor.full(shared.probabilities));
    p_cursor.advance();
  }
};

struct Keys : Kind {
  using Kind::Kind;
  typedef ValueTile KeyPlane;
  typedef DoutPlanes Near;
  typedef QueryPlanes Far;
  static constexpr int kDepth = Config::kHeadDimV, kColumns = Config::kHeadDim;
  Cursor<1> ds_cursor;
  __device__ __forceinline__ auto& keys() const { return shared.v; }
  __device__ __forceinline__ auto& near() const { return shared.dout; }
  __device__ __forceinline__ auto& far() const { return shared.q; }
  __device__ __forceinline__ auto& near_channel() const { return shared.channels.douts; }
  __device__ __forceinline__ auto& far_channel() const { return shared.channels.queries; }

  // dP -> dS, for dK and, through shared memory, for dQ.
  __device__ __forceinline__ void form(Scores& dp, Weights& weights) {
    release_by_warp(near_channel(), cursor.slot);
    cursor.wait_full(far_channel());  // brings the statistics
    p_cursor.wait_full(shared.probabilities);
    Scores s;
    shared.p.load<0>([&] { return thread(); }, s);
    score_gradients_of(s, dp, fragment(), statistics(), in_units(p, shared.channels));
    release_by_warp(shared.probabilities, 0);
    p_cursor.advance();
    weights.pack(s, 1.f);
    ds_cursor.wait_empty(shared.gradients);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) store_operand(shared.ds[plane], warp_row(), weights.plane[plane]);
    fence_proxy_async();
    arrive_by_warp(ds_cursor.full(shared.gradients));
    ds_cursor.advance();
  }
};

// One warpgroup of either kind.
template <class Kind> struct Consumer : Kind {
  using Kind::at, Kind::cursor, Kind::kColumns, Kind::kDepth;
  using typename Kind::Far, typename Kind::KeyPlane, typename Kind::Near;
  static constexpr int kFirst = kColumns < kPanelColumns ? kColumns : kPanelColumns, kRest = kColumns - kFirst;
  float sums[kColumns / 2];

  __device__ __forceinline__ Consumer(const Params& p, SharedStorage& shared, const Work& work)
      : Kind(p, shared, work) {
    clear(sums);
  }

  // Keys times queries: high by high parts and high by low ones are one product, low by high ones another.
  struct Products { float both[2 * ScoreFragment::kSize], low[ScoreFragment::kSize]; };
  __device__ __forceinline__ void issue_products(Products& x) {
    const SplitOperand<kPlanes, KeyPlane> keys(this->keys());
    const u64 queries = StackedOperand<kPlanes, Near>(this->near()[cursor.slot]).plane(0);
    cursor.wait_full(this->near_channel());
    wgmma_fence();
    wgmma_plane_rows<true, kDepth, KeyPlane, Near>(x.both, keys.plane(0), queries);
    wgmma_plane_rows<true, kDepth, KeyPlane, Near>(x.low, keys.plane(1), queries);
    wgmma_commit_group();
  }
  static __device__ __forceinline__ void take_products(Scores& s, Products& x) {
    wgmma_wait_group<0>();
    pin(x.both);
    pin(x.low);
#pragma unroll
    for (int i = 0; i < ScoreFragment::kSize; ++i)
      s[i] = x.both[i] + (x.both[ScoreFragment::kSize + i] + x.low[i]) * (1.f / kLowScale);
  }

  // Weights times queries, a panel each.
  typedef StackedOperand<kPlanes, Far> Operand;
  template <int kSize>
  static __device__ __forceinline__ void issue_low(float (&part)[kSize], const Weights& weights,
                                                   const Operand& queries) {
    wgmma_low_high_columns(part, weights, queries, 0);
    wgmma_high_low_columns(part, weights, queries, 0);
    wgmma_commit_group();
  }
  template <int kSize>
  static __device__ __forceinline__ void issue_high(float (&part)[kSize], const Weights& weights,
                                                    const Operand& queries) {
    take_low(part);
    wgmma_fence();
    wgmma_high_columns(part, weights, queries, 0, 0, kScoreSteps);
    wgmma_commit_group();
  }
  __device__ __forceinline__ void multiply_weights(Weights& weights) {
    const Operand queries(this->far()[cursor.slot]);
    float part[kFirst / 2];
    cursor.wait_full(this->far_channel());
    pin(weights);
    wgmma_fence();
    issue_low(part, weights, queries);
    if constexpr (kRest > 0) {
      const Operand others(this->far()[cursor.slot], 1);
      float rest[kRest / 2];
      issue_low(rest, weights, others);
      wgmma_wait_group<1>();
      issue_high(part, weights, queries);
      wgmma_wait_group<1>();
      issue_high(rest, weights, others);
      wgmma_wait_group<1>();
      take(sums, part);
      wgmma_wait_group<0>();
      take(sums, rest, kFirst / 2);
    } else {
      wgmma_wait_group<0>();
      issue_high(part, weights, queries);
      wgmma_wait_group<0>();
      take(sums, part);
    }
    pin(weights);
    release_by_warp(this->far_channel(), cursor.slot);
  }

  __device__ __forceinline__ void walk() {
    if (this->work.steps == 0) return;
    Products products;
    issue_products(products);
    for (int rest = this->work.steps;; --rest) {
      Scores s;
      Weights weights;
      take_products(s, products);
      this->form(s, weights);
      multiply_weights(weights);
      if (rest == 1) return;
      cursor.advance();
      at.advance(this->p, this->work);
      issue_products(products);
    }
  }
};

// ---- queries -------------------------------------------------------------------------------------------------------------
// dQ of all steps, by halves of its columns: one is added to the sums while products of the other are under way.
__device__ __forceinline__ void sum_dq(const Params& p, SharedStorage& shared, const Work& work) {
  constexpr int kHalf = Config::kDqWidth / 2;
  constexpr u64 kNext = kHalf == kPanelColumns ? KeyTile::kPanelBytes >> 4 : kHalf * 2 >> 4;
  typedef SumTile<kWarpgroupThreads, kHalf / 8> HalfTile;
  typedef float Half[kHalf / 2];
  const SplitOperand<kPlanes, GradientTile> ds(shared.ds);
  const SplitOperand<kPlanes, KeyTile> keys(shared.k);
  const auto issue_low = [&](Half& dq, int half) {
    wgmma_fence();
    wgmma_plane_columns_columns<true, kWarpgroupRows>(dq, ds.plane(1), keys.plane(0) + half * kNext);
    wgmma_plane_columns_columns<false, kWarpgroupRows>(dq, ds.plane(0), keys.plane(1) + half * kNext);
    wgmma_commit_group();
  };
  const auto issue_high = [&](Half& dq, int half) {
    take_low(dq);
    wgmma_fence();
    wgmma_plane_columns_columns<false, kWarpgroupRows>(dq, ds.plane(0), keys.plane(0) + half * kNext);
    wgmma_commit_group();
  };
  const auto add = [&](Half& dq, int tile, int half) {
    HalfTile::add(static_cast<float*>(p.dq_sum) + (2 * i64(tile) + half) * HalfTile::kSize, dq,
                  int(threadIdx.x % kWarpgroupThreads));
  };
  Cursor<1> cursor;
  Step at(p, work);
  Half first, second;
  int before = -1;  // the step's whose second half is not added yet
#pragma unroll 1
  for (int rest = work.steps; rest > 0; --rest) {
    cursor.wait_full(shared.gradients);
    issue_low(first, 0);
    if (before >= 0) add(second, before, 1);
    issue_low(second, 1);
    wgmma_wait_group<1>();
    issue_high(first, 0);
    wgmma_wait_group<1>();
    issue_high(second, 1);
    wgmma_wait_group<0>();
    pin(first);
    pin(second);
    release_by_warp(shared.gradients, 0);
    before = at.number();
    add(first, before, 0);
    cursor.advance();
    at.advance(p, work);
  }
  if (before >= 0) add(second, before, 1);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    set_work(p, shared.channels);
    shared.channels.init(arrivals_of(2 * kGroupWarps));
    shared.probabilities.init(arrivals_of(kGroupWarps), arrivals_of(kGroupWarps));
    shared.gradients.init(arrivals_of(kGroupWarps), arrivals_of(kGroupWarps));
    fence_mbarrier_init();
  }
  __syncthreads();
  const Work& work = shared.channels.work;  // no registers are left to keep it in
  if (!is_split(p, work.place)) return;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x / kWarpgroupThreads), 0);
  const auto await = [&] { await_keys<kAllBarrier, kGroups * kWarpgroupThreads>(p, shared, work); };
  if (group == 0) {
    setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce_planes(p, shared, work);
  } else if (group == 1) {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    await();
    Consumer<Values> consumer(p, shared, work);
    consumer.walk();
    store_plane_gradient(p.dv, consumer.warp_row(), consumer.sums, GradientExponents(p, work.place).dv(), 1.f,
                         p.head_dim_v, p.dv_vectors, work);
  } else if (group == 2) {
    setmaxnreg_inc<Config::kConsumerRegisters>();
    await();
    Consumer<Keys> consumer(p, shared, work);
    consumer.walk();
    store_plane_gradient(p.dk, consumer.warp_row(), consumer.sums, GradientExponents(p, work.place).dk(), p.scale,
                         p.head_dim, p.dk_vectors, work);
  } else {
    setmaxnreg_dec<Config::kSumRegisters>();
    await();
    sum_dq(p, shared, work);
  }
}
