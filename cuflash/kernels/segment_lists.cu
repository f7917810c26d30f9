// Before kernels that work on packed sequences: lists of their tiles, those of long walks first, so that no block begins a long one
// when others are done.
//
// Job: a block makes a list.  A list has an element for each tile of one head, which tells the segment; its tiles follow each
// other.  Where there are two lists, segments of more than kMostKeys keys are in the second one, whose tiles are others.
// Invariant: a list is no longer than there is room for, whatever the offsets.
#include "variant.cuh"  // generated: Config, Params, modifiers

static_assert(Config::kSharedBytes == 0, "schedules/lists.py disagrees");
constexpr int kClasses = 256, kLaneClasses = kClasses / 32;  // of lengths of walks, eight to each power of two
constexpr int kFewTiles = 4;                                 // of a segment, which a thread lists by itself

// The longest walks are of class 0.
__device__ __forceinline__ int class_of(int length) {
  const int power = 31 - __clz(max(length, 1));
  const int eighth = (power >= 3 ? length >> (power - 3) : length << (3 - power)) & 7;
  return kClasses - 1 - (8 * power + eighth);
}

// A segment, and how many tiles of a list it has.
struct Own : Segment<true> {
  int tiles = 0;

  __device__ __forceinline__ Own(const Params& p, int number, bool of_long) {
    if (number > p.segment_count) return;
    enter<Config::kOfKeys>(p, number);
    if (Config::kLongTile > 0 && (seq_k(p) > Config::kMostKeys) != of_long) return;
    tiles = tiles_of(Config::kOfKeys ? seq_k(p) : seq_q(p), of_long ? Config::kLongTile : Config::kTile);
  }
  __device__ __forceinline__ int walk(const Params& p) const { return Config::kOfKeys ? seq_q(p) : seq_k(p); }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  __shared__ u64
      begins[kClasses];  // of each class in the list; offsets that nobody looked at may ask for any number of tiles
  const int thread = int(threadIdx.x), lane = thread % 32;
  const bool of_long = blockIdx.x > 0;
  ListHead* const head = static_cast<ListHead*>(p.segment_lists) + i64(blockIdx.x) * (p.listed_tiles + 1);
  ListedSegment* const list = reinterpret_cast<ListedSegment*>(head + 1);
  for (int i = thread; i < kClasses; i += Config::kThreads) begins[i] = 0;
  __syncthreads();
  for (int i = thread; i <= p.segment_count; i += Config::kThreads) {
    const Own own(p, i, of_long);
    if (own.tiles > 0) atomicAdd(&begins[class_of(own.walk(p))], u64(own.tiles));
  }
  __syncthreads();
  if (thread < 32) {
    u64 counts[kLaneClasses], sum = 0;
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) sum += counts[i] = begins[lane * kLaneClasses + i];
    u64 before = sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u64 lower = __shfl_up_sync(0xffffffffu, before, distance);
      if (lane >= distance) before += lower;
    }
    if (lane == 31) *head = {int(min(before, u64(p.listed_tiles))), 0, {}};
    before -= sum;
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      begins[lane * kLaneClasses + i] = before;
      before += counts[i];
    }
  }
  __syncthreads();
  for (int first = thread - lane; first <= p.segment_count; first += Config::kThreads) {
    const Own own(p, first + lane, of_long);
    ListedSegment listed{own.index, 0, own.queries, own.keys, {}};
    if (own.tiles > 0) {
      const u64 before = atomicAdd(&begins[class_of(own.walk(p))], u64(own.tiles));
      listed.before = int(min(before, u64(p.listed_tiles)));
    }
    if (own.tiles <= kFewTiles)
      for (int i = 0; i < own.tiles && listed.before + i < p.listed_tiles; ++i) list[listed.before + i] = listed;
    for (u32 many = __ballot_sync(0xffffffffu, own.tiles > kFewTiles); many != 0; many &= many - 1) {
      const int from = 31 - __clz(int(many & (0u - many)));
      const auto told = [&](int x) { return __shfl_sync(0xffffffffu, x, from); };
      const ListedSegment theirs{told(listed.index),
                                 told(listed.before),
                                 {told(listed.queries.begin), told(listed.queries.end)},
                                 {told(listed.keys.begin), told(listed.keys.end)},
                                 {}};
      const int tiles = told(own.tiles);
      for (int i = lane; i < tiles && theirs.before + i < p.listed_tiles; i += 32) list[theirs.before + i] = theirs;
    }
  }
}
