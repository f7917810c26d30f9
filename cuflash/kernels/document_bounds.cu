// Before kernels that pass over tiles between documents: the smallest and the largest id of each granule.
//
// Job: a warp looks at one granule of one side of a batch entry.
#include "variant.cuh"  // generated: Config, Params, modifiers

static_assert(Config::kSharedBytes == 0, "schedules/rows.py disagrees");
static_assert(Documents::kGranule == 32, "an id for each lane");

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  const int granules_q = tiles_of(p.seq_q, Documents::kGranule), granules_k = tiles_of(p.seq_k, Documents::kGranule);
  const int number = int(blockIdx.x) * (Config::kThreads / 32) + int(threadIdx.x) / 32, all = granules_q + granules_k;
  if (number >= p.batch_size * all) return;
  Place place;
  place.set_head(p, 0);
  place.set_batch(p, number / all);
  const bool is_query = number % all < granules_q;
  const int granule = number % all - (is_query ? 0 : granules_q);
  const View& ids = is_query ? p.document_q : p.document_k;
  const View& bounds = is_query ? p.document_bounds_q : p.document_bounds_k;
  const int last = (is_query ? p.seq_q : p.seq_k) - 1;  // stands for those that do not exist
  const int at = min(granule * Documents::kGranule + int(threadIdx.x) % 32, last);
  int least = *element_at<int>(ids, place.offset(ids), is_query ? at : 0, is_query ? 0 : at), most = least;
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    least = min(least, __shfl_xor_sync(0xffffffffu, least, bit));
    most = max(most, __shfl_xor_sync(0xffffffffu, most, bit));
  }
  if (threadIdx.x % 32 != 0) return;
  *element_at<int>(bounds, place.offset(bounds), granule, 0) = least;
  *element_at<int>(bounds, place.offset(bounds), granule, 1) = most;
}
