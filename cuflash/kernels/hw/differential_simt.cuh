// Products of tiles in shared memory by scalar multiply-adds, together with what they change by when both operands move:
// d(a · b) = a' · b + a · b', where a' and b' lie in tiles of the same shapes.
//
// All is computed in one loop, so that each operand is loaded once for the three products.  Layouts are those of gemm_simt.cuh.
#pragma once
#include "hw/gemm_simt.cuh"

// An operand and its tangent.
template <class T> struct MovingOperand { const T *at, *tangent; };

// c += a · bᵀ and d += a' · bᵀ + a · b'ᵀ over kDepth.
template <class F, int kDepth, int kPitchA, int kPitchB, class T>
__device__ __forceinline__ void multiply_moving_abt(T (&c)[F::kSize], T (&d)[F::kSize], const F& f, MovingOperand<T> a,
                                                    MovingOperand<T> b) {
  constexpr int kV = Vector<T>::kSize;
  static_assert(F::kRowRun == 1 && F::kColumnRun == 1 && kDepth % kV == 0,
                "rows and columns one by one, whole vectors");
  const int row = f.first_row * kPitchA, column = f.first_column * kPitchB;
  constexpr int kUnroll = unroll(3 * F::kSize * kV);
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; k += kV) {
    Vector<T> y[F::kColumns], y_tangent[F::kColumns];
#pragma unroll
    for (int j = 0; j < F::kColumns; ++j) {
      y[j] = Vector<T>::load(b.at + column + k + j * F::kColumnStep * kPitchB);
      y_tangent[j] = Vector<T>::load(b.tangent + column + k + j * F::kColumnStep * kPitchB);
    }
#pragma unroll
    for (int i = 0; i < F::kRows; ++i) {
      const auto x = Vector<T>::load(a.at + row + k + i * F::kRowStep * kPitchA);
      const auto x_tangent = Vector<T>::load(a.tangent + row + k + i * F::kRowStep * kPitchA);
#pragma unroll
      for (int e = 0; e < kV; ++e) {
#pragma unroll
        for (int j = 0; j < F::kColumns; ++j) {
          const int at = i * F::kColumns + j;
          c[at] = fma_of(x[e], y[j][e], c[at]);
          d[at] = fma_of(x[e], y_tangent[j][e], fma_of(x_tangent[e], y[j][e], d[at]));
        }
      }
    }
  }
}

// c += a · b, if kWithValue, and d += a' · b + a · b' over kDepth.
template <bool kWithValue, class F, int kDepth, int kPitchA, int kPitchB, class T, int kSize>
__device__ __forceinline__ void multiply_moving_ab(T (&c)[kSize], T (&d)[F::kSize], const F& f, MovingOperand<T> a,
                                                   MovingOperand<T> b) {
  constexpr int kV = Vector<T>::kSize;
  static_assert(F::kRowRun == 1 && kDepth % kV == 0, "rows one by one, whole vectors");
  const int row = f.first_row * kPitchA;
  constexpr int kUnroll = unroll(3 * F::kSize * kV);
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; k += kV) {
    Vector<T> x[F::kRows], x_tangent[F::kRows];
#pragma unroll
    for (int i = 0; i < F::kRows; ++i) {
      x[i] = Vector<T>::load(a.at + row + k + i * F::kRowStep * kPitchA);
      x_tangent[i] = Vector<T>::load(a.tangent + row + k + i * F::kRowStep * kPitchA);
    }
#pragma unroll
    for (int e = 0; e < kV; ++e) {
      T y[F::kColumns], y_tangent[F::kColumns];
      load_runs<F::kColumns, F::kColumnRun, F::kColumnStep>(y, b.at + f.first_column + (k + e) * kPitchB);
      load_runs<F::kColumns, F::kColumnRun, F::kColumnStep>(y_tangent, b.tangent + f.first_column + (k + e) * kPitchB);
#pragma unroll
      for (int i = 0; i < F::kRows; ++i) {
#pragma unroll
        for (int j = 0; j < F::kColumns; ++j) {
          const int at = i * F::kColumns + j;
          if constexpr (kWithValue) c[at] = fma_of(x[i][e], y[j], c[at]);
          d[at] = fma_of(x[i][e], y_tangent[j], fma_of(x_tangent[i][e], y[j], d[at]));
        }
      }
    }
  }
}

// RowProducts, of operands that move: s = a · bᵀ, then o += s · c, and what both change by.
template <class T, int kLaneRows, int kThreadRows, int kDepth, int kMiddle, int kWidth> struct MovingRowProducts {
  typedef RowProducts<T, kLaneRows, kThreadRows, kDepth, kMiddle, kWidth> Plain;
  typedef typename Plain::First First;
  typedef typename Plain::Second Second;
  static constexpr int kRows = Plain::kRows;  // of a warp
  static constexpr int kPitchA = Plain::kPitchA, kPitchB = Plain::kPitchB, kPitchC = Plain::kPitchC;
  static constexpr int kPitchMiddle = Plain::kPitchMiddle;
  template <int kWarps> struct Middles {
    PitchedTile<kWarps * kRows, kMiddle, kPitchMiddle, T> middle, middle_tangent;
  };

  First first;
  Second second;
  T *middle, *middle_tangent;

  template <class Shared>
  __device__ __forceinline__ MovingRowProducts(int warp, Shared& shared)
      : first(int(threadIdx.x) % 32, warp * kRows, 0),
        second(int(threadIdx.x) % 32, warp * kRows, 0),
        middle(shared.middle.data),
        middle_tangent(shared.middle_tangent.data) {}

  template <class A, class B>
  __device__ __forceinline__ void multiply_first(T (&s)[First::kSize], T (&ds)[First::kSize], const A& a,
                                                 const A& a_tangent, const B& b, const B& b_tangent) const {
    clear(s);
    clear(ds);
    multiply_moving_abt<First, kDepth, kPitchA, kPitchB, T>(s, ds, first, {a.data, a_tangent.data},
                                                            {b.data, b_tangent.data});
  }
  template <class C>
  __device__ __forceinline__ void multiply_second(T (&o)[Second::kSize], T (&u)[Second::kSize],
                                                  const T (&s)[First::kSize], const T (&ds)[First::kSize], const C& c,
                                                  const C& c_tangent) const {
    __syncwarp();  // the warp has read the previous s
    store_tile<First, kPitchMiddle>(s, first, middle);
    store_tile<First, kPitchMiddle>(ds, first, middle_tangent);
    __syncwarp();
    const MovingOperand<T> left = {middle, middle_tangent}, right = {c.data, c_tangent.data};
    if constexpr (Second::kSize * sizeof(T) <= 160) {
      // A block's sums stand alone before they join: chains of roundings are as long as a block, not as all of them.
      T sum[Second::kSize], moved[Second::kSize];
      clear(sum);
      clear(moved);
      multiply_moving_ab<true, Second, kMiddle, kPitchMiddle, kPitchC>(sum, moved, second, left, right);
#pragma unroll
      for (int i = 0; i < Second::kSize; ++i) {
        o[i] += sum[i];
        u[i] += moved[i];
      }
    } else {  // no registers for them
      multiply_moving_ab<true, Second, kMiddle, kPitchMiddle, kPitchC>(o, u, second, left, right);
    }
  }
};
