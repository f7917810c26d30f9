// A bias on its way into the scores of Hopper's schedules, ahead of use.
//
// cuflash/schedules/wgmma.py chooses the form by where the bias lies: blocks of queries x keys, or of one row where it is the same
// for all queries, are brought into shared memory by the thread that loads (kBiasRows, kBiasStages); a row whose keys stay with
// a warp is held in registers (kHoldsBias).  In all other cases attention/score.cuh reads memory.
#pragma once
#include "bias_blocks.cuh"
#include "attention/score.cuh"
#include "hw/gemm_wgmma.cuh"

template <bool kIsRow> struct BiasBlock { typedef RowTile<Config::kBlockK> Tile; };
template <> struct BiasBlock<false> { typedef PanelTile<Config::kBiasRows, Config::kBlockK> Tile; };

// In shared memory; nothing at all where no bias is brought.
// Its gradient, where elements are single terms, leaves a block at a time in the place of the bias (kReturnsBias); others are summed
// by backward_wgmma_bias.cu (kDbiasApart).
template <int kStages> struct BiasTilesOf { BiasBlock<Config::kBiasRows <= 1>::Tile bias[kStages]; };
template <> struct BiasTilesOf<0> {};
template <int kStages> struct BiasChannelsOf {
  Channel<kStages> biases;
  Channel<kStages> gradients_of_bias;

  // By one thread, before a barrier of the block; each of the warps gives back a slot, or makes its part of a gradient.
  __device__ __forceinline__ void init_bias(int warps) {
    biases.init(Config::kReturnsBias ? 1 : arrivals_of(warps));
    gradients_of_bias.init(1, arrivals_of(warps));
  }
};
template <> struct BiasChannelsOf<0> {
  __device__ __forceinline__ void init_bias(int) {}
};
typedef BiasTilesOf<Config::kBiasStages> BiasTiles;
typedef BiasChannelsOf<Config::kBiasStages> BiasChannels;

// The thread that loads, or all of a warp that keep its cursor, of which one `leads`.
template <int kStages> struct BiasWriter {
  Cursor<kStages> at;

  // A block, from (q, k) on.
  template <class P>
  __device__ __forceinline__ void load(const P& p, BiasTilesOf<kStages>& to, BiasChannelsOf<kStages>& channels,
                                       int batch, int head, int q, int k, bool leads) {
    at.wait_empty(channels.biases);
    if (leads) {
      const View& view = WithArray<P>::added(p);
      load_inside(to.bias[at.slot], p.bias_map, at.full(channels.biases), bias_corner(view, batch, head, q, k),
                  p.seq_k - k, view.head ? CachePolicy::kEvictFirst : CachePolicy::kEvictNormal);
    }
    at.advance();
  }
};
template <> struct BiasWriter<0> {
  template <class P> __device__ __forceinline__ void load(const P&, BiasTiles&, BiasChannels&, int, int, int, int,
                                                          bool) {}
};

// One thread: takes blocks of gradients that all warps have made to memory, and hands their places back.
template <int kStages> struct BiasReturner {
  Cursor<kStages> at;

  template <class P>
  __device__ __forceinline__ void store(const P& p, BiasTilesOf<kStages>& from, BiasChannelsOf<kStages>& channels,
                                        int batch, int head, int q, int k) {
    at.wait_full(channels.gradients_of_bias);
    store_inside(from.bias[at.slot], p.dbias_map, bias_corner(p.dbias, batch, head, q, k), p.seq_k - k);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
    at.release(channels.biases);
    at.advance();
  }
};
template <> struct BiasReturner<0> {
  template <class P> __device__ __forceinline__ void store(const P&, BiasTiles&, BiasChannels&, int, int, int, int) {}
};

// A warp that uses it, and makes its gradient: what `scores_of` takes as the array that is added, and what only some forms do.
struct BiasUser {
  // Of a block that nobody looks at.
  __device__ __forceinline__ void skip() {}
  // Products -> scores for a guess, which may want them once more; then the block that they needed is handed back.
  template <class Fragment>
  __device__ __forceinline__ void try_on(Real (&)[Fragment::kSize], const Fragment&, Real) const {}
  __device__ __forceinline__ void release() {}
  // Of the keys from `first` on, for the queries of a head.
  template <class Fragment> __device__ __forceinline__ void enter(const Params&, const Place&, int, const Fragment&) {}
  // The gradients of the scores of a block, as an operand whose rows are keys.
  template <int kSteps, class Fragment>
  __device__ __forceinline__ void hand_over(const RegisterOperand<kSteps>&, const Fragment&) {}
  // Where blocks go round with others, in as many slots: registers need to hold but one place.
  template <int kSlots> __device__ __forceinline__ void stand_at(const Cursor<kSlots>&) {}

  // The warp's first row, of scores.
  template <class Fragment> static __device__ __forceinline__ int warp_row(const Fragment& f) {
    return f.first_row / 16 * 16;
  }
};
template <int kStages, bool kHolds> struct BiasReader : BiasUser {  // brought
  static constexpr bool kIsAtHand = true;
  BiasTilesOf<kStages>& tiles;
  BiasChannelsOf<kStages>& channels;
  Cursor<kStages> at;

  __device__ __forceinline__ BiasReader(BiasTilesOf<kStages>& t, BiasChannelsOf<kStages>& c) : tiles(t), channels(c) {}
  template <int kSlots> __device__ __forceinline__ void stand_at(const Cursor<kSlots>& place) {
    if constexpr (kSlots == kStages) at = {place.slot, place.phase};
  }
  __device__ __forceinline__ void release() {
    release_by_warp(channels.biases, at.slot);
    at.advance();
  }
  __device__ __forceinline__ void skip() {
    at.wait_full(channels.biases);
    release();
  }
  // In place: products -> scores.
  template <class Fragment>
  __device__ __forceinline__ void try_on(Real (&s)[Fragment::kSize], const Fragment& f, Real scale) const {
    at.wait_full(channels.biases);
    add_block(s, f, scale, tiles.bias[at.slot]);
  }
  // The same; the block is handed back, unless its gradient shall take its place.
  template <class Fragment>
  __device__ __forceinline__ void add_to(Real (&s)[Fragment::kSize], const Fragment& f, Real scale) {
    try_on(s, f, scale);
    if constexpr (!Config::kReturnsBias) release();
  }
  template <int kSteps, class Fragment>
  __device__ __forceinline__ void hand_over(const RegisterOperand<kSteps>& gradients, const Fragment& f) {
    if constexpr (Config::kReturnsBias) {
      store_operand_columns(tiles.bias[at.slot], warp_row(f), gradients);
      fence_proxy_async();
      arrive_by_warp(at.full(channels.gradients_of_bias));
      at.advance();
    }
  }
};
template <> struct BiasReader<0, true> : BiasUser {  // held
  static constexpr bool kIsAtHand = true;
  Real of_slot[2];

  __device__ __forceinline__ BiasReader(BiasTiles&, BiasChannels&) {}
  template <class Fragment>
  __device__ __forceinline__ void enter(const Params& p, const Place& place, int first, const Fragment& f) {
    const View& view = WithArray<Fragment>::added(p);
    const i64 offset = place.offset(view);
#pragma unroll
    for (int slot = 0; slot < Fragment::kSlots; ++slot) {
      const int k = min(first + f.row(slot), place.seq_k(p) - 1);
      of_slot[slot] = to_real(*element_at<OutElement>(view, offset, 0, k));
    }
  }
  template <class Fragment>
  __device__ __forceinline__ void add_to(Real (&s)[Fragment::kSize], const Fragment&, Real scale) const {
    static_assert(Fragment::kTransposed, "a number for each row");
#pragma unroll
    for (int i = 0; i < Fragment::kSize; ++i) s[i] = s[i] * scale + of_slot[Fragment::slot(i)];
  }
};
template <> struct BiasReader<0, false> : BiasUser, FromMemory {
  __device__ __forceinline__ BiasReader(BiasTiles&, BiasChannels&) {}
};
typedef BiasReader<Config::kBiasStages, Config::kHoldsBias> AddedBias;
