// After a backward that summed gradients of operands in fixed point: the sums as numbers, each in the first bytes of its own.
#include "variant.cuh"  // generated: Config, Params, modifiers
#include "attention/sums.cuh"

static_assert(Config::kSharedBytes == 0, "schedules/rows.py disagrees");

extern "C" __global__ void __launch_bounds__(Config::kThreads) CUFLASH_ENTRY(const __grid_constant__ Params p) {
  for_each_gradient_sum(p, [&](const View& view, int rows, int columns, bool is_table) {
    int entries = 1;
#pragma unroll
    for (int axis = 0; axis < kBatchAxes; ++axis)
      if (view.batch[axis] != 0) entries *= p.batch_sizes[axis];
    const int heads = view.head != 0 ? p.heads_q : 1;
    if (view.row == 0) rows = 1;
    if (view.column == 0) columns = 1;
    const i64 size = i64(entries) * heads * rows * columns;
    for (i64 i = i64(blockIdx.x) * Config::kThreads + threadIdx.x; i < size; i += i64(gridDim.x) * Config::kThreads) {
      i64 rest = i;
      const auto next = [&](int length) {
        const int at = int(rest % length);
        rest /= length;
        return at;
      };
      const int column = next(columns), row = next(rows);
      Place place;
      place.set_head(p, next(heads));
#pragma unroll
      for (int axis = kBatchAxes - 1; axis >= 0; --axis)
        place.batch[axis] = view.batch[axis] != 0 ? next(p.batch_sizes[axis]) : 0;
      OperandSum* sum = element_at<OperandSum>(view, place.batch_offset(view) + place.head * view.head, row, column);
      const Real value = sum->value(OperandSums::unit(p, place, view, is_table));
      *reinterpret_cast<Real*>(sum) = value;
    }
  });
}
