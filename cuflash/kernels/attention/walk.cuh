// The walk of a backward: a block owns a tile of keys and goes over the tiles of queries that see it, head by head of a group.
#pragma once
#include "attention/mask.cuh"

// The tile of keys of a block, and the steps of its walk.
struct Work {
  Place place;  // with the first head of the group
  Range keys;
  int batch;        // entry, all batch axes merged
  int first, last;  // tiles of queries, the same for every head
  int steps;

  Work() = default;
  __device__ __forceinline__ Work(const Params& p, int index) {
    // Longest first: under a causal mask the first keys are seen by the most queries.
    const Assignment assigned(p, index, Place::key_tiles<Config::kBlockK>(p), p.batch_size * p.heads_k);
    const int first_key = place.enter_keys<Config::kBlockK>(p, assigned.tile) * Config::kBlockK;
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
  __device__ __forceinline__ Step(const Params& p, const Work& work) : head(work.place.head), tile(begin(work)) {
    head_tiles = (work.batch * p.heads_q + head) * (p.rows_padded / Config::kBlockQ) +
                 work.place.padded_row<Config::kBlockQ>() / Config::kBlockQ;
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
};
