// Before kernels that pass over tiles between documents: the smallest and the largest id of each granule.
//
// Job: a warp looks at one granule of one side of a batch entry.
#include "variant.cuh"  // generated: Config, Params, modifiers

static_assert(Config::kSharedBytes == 0, "schedules/rows.py disagrees");
static_assert(Documents::kGranule == 32, "an id for each lane");

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  const int number = int(blockIdx.x) * (Config::kThreads / 32) + int(threadIdx.x) / 32, all = Documents::granules(p);
  if (number >= p.batch_size * all) return;
  Place place;
  place.set_head(p, 0);
  place.set_batch(p, number / all);
  const int granules_q = Documents::granules_of(p.seq_q), granule = number % all;
  const bool is_query = granule < granules_q;
  const View& ids = is_query ? p.document_q : p.document_k;
  const int first = (is_query ? granule : granule - granules_q) * Documents::kGranule;
  const int last = (is_query ? p.seq_q : p.seq_k) - 1;  // stands for those that do not exist
  const int at = min(first + int(threadIdx.x) % 32, last);
  const int id = *element_at<int>(ids, place.offset(ids), is_query ? at : 0, is_query ? 0 : at);
  Documents::Ids found{id, id};
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    found.least = min(found.least, __shfl_xor_sync(0xffffffffu, found.least, bit));
    found.most = max(found.most, __shfl_xor_sync(0xffffffffu, found.most, bit));
  }
  if (threadIdx.x % 32 == 0) static_cast<Documents::Ids*>(p.document_bounds)[number] = found;
}
