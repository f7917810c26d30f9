// The walk of a backward: a block owns a tile of keys and goes over the tiles of queries that see it, head by head of a group.
//
// Where hidden tiles are passed over (kPassesOver), warps walk by themselves and find the same steps: each lane looks at one of
// them, 32 at a time.
#pragma once
#include "attention/mask.cuh"

constexpr bool kPassesOver = Visibility::kHidesTiles;

// The tile of keys of a block, and the steps of its walk.
struct Work {
  Place place;  // with the first head of the group
  Range keys;
  int batch;        // entry, all batch axes merged
  int first, last;  // tiles of queries, the same for every head
  int steps;

  Work() = default;
  __device__ __forceinline__ Work(const Params& p, int index) { take(p, index); }
  // In place: a thread with few registers keeps nothing of it in them.
  __device__ __forceinline__ void take(const Params& p, int index) {
    // Longest first: under a causal mask the first keys are seen by the most queries.
    const Assignment assigned = place.enter_listed_keys<Config::kBlockK>(p, index, p.batch_size * p.heads_k);
    const int first_key = assigned.tile * Config::kBlockK;
    keys = {first_key, min(place.seq_k(p), first_key + Config::kBlockK)};
    const HeadOfEntry of(p, assigned.head, p.heads_k);
    batch = of.batch;
    place.head_k = of.head;
    place.head = place.head_k * p.group;
    place.set_batch(p, batch);
    place.key_count = Visibility::key_count(p, place);
    const Range walk = tiles_over<Config::kBlockQ>(queries_seeing_any(p, place, keys));
    first = walk.begin;
    last = walk.end;
    steps = last > first ? (last - first) * p.group : 0;
    if (Config::kDeterministic && !place.has_all_tiles<Config::kBlockQ, Config::kBlockK>(p)) steps = 0;
  }
};

// One step of the walk: a head of the group and a tile of queries.
struct Step {
  int head, tile;
  int head_tiles;  // tiles of queries before this head, of all; the grid of the conversion numbers them by 31 bits

  // Where blocks add to dq in turns, they begin with the last queries: under a causal mask all earlier blocks begin there, too.
  static __device__ __forceinline__ int begin(const Work& work) {
    return Config::kDeterministic ? work.last - 1 : work.first;
  }
  Step() = default;
  __device__ __forceinline__ Step(const Params& p, const Work& work) : head(work.place.head), tile(begin(work)) {
    head_tiles = (work.batch * p.heads_q + head) * (p.rows_padded / Config::kBlockQ) +
                 work.place.padded_row<Config::kBlockQ>() / Config::kBlockQ;
  }
  // The one with that number among all.
  __device__ __forceinline__ Step(const Params& p, const Work& work, int index) : Step(p, work) {
    const int tiles = work.last - work.first, heads = index / tiles, rest = index - heads * tiles;
    head += heads;
    head_tiles += heads * (p.rows_padded / Config::kBlockQ);
    tile += Config::kDeterministic ? -rest : rest;
  }
  __device__ __forceinline__ void advance(const Params& p, const Work& work) {
    if (tile == (Config::kDeterministic ? work.first : work.last - 1)) {
      tile = begin(work);
      ++head;
      head_tiles += p.rows_padded / Config::kBlockQ;
    } else {
      tile += Config::kDeterministic ? -1 : 1;
    }
  }
  __device__ __forceinline__ int number() const { return head_tiles + tile; }
  __device__ __forceinline__ Range queries() const { return {tile * Config::kBlockQ, (tile + 1) * Config::kBlockQ}; }
};

// Whether a tile of keys adds to dq of a step's tile of queries, as far as glances tell.
__device__ __forceinline__ bool adds(const Params& p, const Place& place, const Step& step, int key_tile) {
  return !tile_is_hidden(p, place, step.queries(), {key_tile * Config::kBlockK, (key_tile + 1) * Config::kBlockK});
}

// The walk of one warp, past hidden tiles; all lanes take part.  Each of kParts parts of the keys is asked about on its own, and if
// kInTurns, the turn of adding to dq.
template <int kParts, bool kInTurns> struct Walk {
  const Params& p;
  const Work& work;
  Lookout<kParts + kInTurns> lookout;
  int index = -1;  // of the step at hand, among all

  __device__ __forceinline__ Walk(const Params& params, const Work& w) : p(params), work(w) { advance(); }
  __device__ __forceinline__ bool ends() const { return index >= work.steps; }
  __device__ __forceinline__ Step step() const { return Step(p, work, index); }
  // Bit i: no element of part i needs a test.
  __device__ __forceinline__ u32 open() const { return lookout.marks(index) & ((1u << kParts) - 1); }
  __device__ __forceinline__ void advance() {
    index = lookout.next(index + 1, work.steps, [&](int own, auto& marks) {
      const Step step(p, work, own);
      const Place place = place_of(step);
      if (tile_is_hidden(p, place, step.queries(), work.keys)) return false;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        constexpr int kKeys = Config::kBlockK / (kParts > 0 ? kParts : 1);
        const int begin = work.keys.begin + part * kKeys;
        marks[part] = tile_is_open(p, place, step.queries(), {begin, begin + kKeys});
      }
      if constexpr (kInTurns) marks[kParts] = adds(p, place, step, max(own_tile() - 1, 0));
      return true;
    });
  }
  // When the block may add to dq of the step at hand: the counter stands behind the last tile of keys before the block's own that
  // adds, too, or else where it started.  Mostly that is the tile's own number, as if none were hidden.
  __device__ __forceinline__ int turn() const {
    if (lookout.marks(index) >> kParts & 1) return own_tile();
    const Step now = step();
    const Place place = place_of(now);
    const int first = first_key_tile<Config::kBlockQ, Config::kBlockK>(p, place, now.tile);
    Lookout<0> back;  // from the block's own tile
    const int hidden =
        back.next(0, own_tile() - first, [&](int i, auto&) { return adds(p, place, now, own_tile() - 1 - i); });
    return own_tile() - hidden;
  }

 private:
  __device__ __forceinline__ int own_tile() const { return work.keys.begin / Config::kBlockK; }
  __device__ __forceinline__ Place place_of(const Step& step) const {
    Place place = work.place;
    place.head = step.head;
    return place;
  }
};
