// Products of tiles in shared memory by scalar multiply-adds, each thread a small block of the result in registers.
//
// Operands are row-major with a pitch; every load is a vector of 16 bytes.  Free of bank conflicts when a pitch, counted in
// vectors, is odd (`odd_pitch`), because lanes read neighbouring rows or neighbouring vectors of one row.
#pragma once
#include "hw/copy_simt.cuh"
#include "hw/fragment_simt.cuh"

template <class T> struct Vector;  // 16 bytes
template <> struct Vector<float> {
  float4 v;
  static constexpr int kSize = 4;
  __device__ __forceinline__ float operator[](int i) const { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  static __device__ __forceinline__ Vector load(const float* from) { return {*reinterpret_cast<const float4*>(from)}; }
};
template <> struct Vector<double> {
  double2 v;
  static constexpr int kSize = 2;
  __device__ __forceinline__ double operator[](int i) const { return i == 0 ? v.x : v.y; }
  static __device__ __forceinline__ Vector load(const double* from) {
    return {*reinterpret_cast<const double2*>(from)};
  }
};

// kCount elements in runs of kRun neighbours that lie kStep apart.
template <int kCount, int kRun, int kStep, class T>
__device__ __forceinline__ void load_runs(T (&x)[kCount], const T* from) {
#pragma unroll
  for (int j = 0; j < kCount; j += kRun) {
    const T* run = from + j / kRun * kStep;
    if constexpr (kRun % Vector<T>::kSize == 0) {
#pragma unroll
      for (int e = 0; e < kRun; e += Vector<T>::kSize) {
        const auto v = Vector<T>::load(run + e);
#pragma unroll
        for (int i = 0; i < Vector<T>::kSize; ++i) x[j + e + i] = v[i];
      }
    } else if constexpr (kRun == 2 && sizeof(T) == 4) {
      const float2 v = *reinterpret_cast<const float2*>(run);
      x[j] = v.x;
      x[j + 1] = v.y;
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e) x[j + e] = run[e];
    }
  }
}

// Steps of a loop to unroll, each of so many multiply-adds: enough to hide the loop, few enough for the instruction cache.
__device__ constexpr int unroll(int multiply_adds) { return multiply_adds < 256 ? 256 / multiply_adds : 1; }

// c += a · bᵀ over kDepth: the contraction runs along the rows of both.
template <class F, int kDepth, int kPitchA, int kPitchB, class T>
__device__ __forceinline__ void multiply_abt(T (&c)[F::kSize], const F& f, const T* a, const T* b) {
  constexpr int kV = Vector<T>::kSize;
  static_assert(F::kRowRun == 1 && F::kColumnRun == 1 && kDepth % kV == 0,
                "rows and columns one by one, whole vectors");
  a += f.first_row * kPitchA;
  b += f.first_column * kPitchB;
  constexpr int kUnroll = unroll(F::kSize * kV);
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; k += kV) {
    Vector<T> y[F::kColumns];
#pragma unroll
    for (int j = 0; j < F::kColumns; ++j) y[j] = Vector<T>::load(b + k + j * F::kColumnStep * kPitchB);
#pragma unroll
    for (int i = 0; i < F::kRows; ++i) {
      const auto x = Vector<T>::load(a + k + i * F::kRowStep * kPitchA);
#pragma unroll
      for (int e = 0; e < kV; ++e) {
#pragma unroll
        for (int j = 0; j < F::kColumns; ++j) c[i * F::kColumns + j] = fma_of(x[e], y[j][e], c[i * F::kColumns + j]);
      }
    }
  }
}

// c += a · b over kDepth: along the rows of a, down the columns of b.
template <class F, int kDepth, int kPitchA, int kPitchB, class T>
__device__ __forceinline__ void multiply_ab(T (&c)[F::kSize], const F& f, const T* a, const T* b) {
  constexpr int kV = Vector<T>::kSize;
  static_assert(F::kRowRun == 1 && kDepth % kV == 0, "rows one by one, whole vectors");
  a += f.first_row * kPitchA;
  b += f.first_column;
  constexpr int kUnroll = unroll(F::kSize * kV);
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; k += kV) {
    Vector<T> x[F::kRows];
#pragma unroll
    for (int i = 0; i < F::kRows; ++i) x[i] = Vector<T>::load(a + k + i * F::kRowStep * kPitchA);
#pragma unroll
    for (int e = 0; e < kV; ++e) {
      T y[F::kColumns];
      load_runs<F::kColumns, F::kColumnRun, F::kColumnStep>(y, b + (k + e) * kPitchB);
#pragma unroll
      for (int i = 0; i < F::kRows; ++i) {
#pragma unroll
        for (int j = 0; j < F::kColumns; ++j) c[i * F::kColumns + j] = fma_of(x[i][e], y[j], c[i * F::kColumns + j]);
      }
    }
  }
}

// c += aᵀ · b over kDepth: down the columns of both.
template <class F, int kDepth, int kPitchA, int kPitchB, class T>
__device__ __forceinline__ void multiply_atb(T (&c)[F::kSize], const F& f, const T* a, const T* b) {
  a += f.first_row;
  b += f.first_column;
  constexpr int kUnroll = unroll(F::kSize);
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; ++k) {
    T x[F::kRows], y[F::kColumns];
    load_runs<F::kRows, F::kRowRun, F::kRowStep>(x, a + k * kPitchA);
    load_runs<F::kColumns, F::kColumnRun, F::kColumnStep>(y, b + k * kPitchB);
#pragma unroll
    for (int i = 0; i < F::kRows; ++i) {
#pragma unroll
      for (int j = 0; j < F::kColumns; ++j) c[i * F::kColumns + j] = fma_of(x[i], y[j], c[i * F::kColumns + j]);
    }
  }
}

// The first kPart elements.
template <int kPart, int kSize, class T> __device__ __forceinline__ T (&part(T (&x)[kSize])) [kPart] {
  static_assert(kPart <= kSize, "a part");
  return reinterpret_cast<T(&)[kPart]>(x);
}

// A thread's elements from a row-major tile and into one.
template <class F, int kPitch, class T>
__device__ __forceinline__ void load_tile(T (&c)[F::kSize], const F& f, const T* from) {
  from += f.row(0) * kPitch + f.column(0);
#pragma unroll
  for (int i = 0; i < F::kSize; ++i) c[i] = from[f.row_offset(F::slot(i)) * kPitch + f.column_offset(i)];
}
template <class F, int kPitch, class T>
__device__ __forceinline__ void store_tile(const T (&c)[F::kSize], const F& f, T* to) {
  to += f.row(0) * kPitch + f.column(0);
#pragma unroll
  for (int i = 0; i < F::kSize; ++i) to[f.row_offset(F::slot(i)) * kPitch + f.column_offset(i)] = c[i];
}

// The same as sums in global memory that many blocks add to.
template <class F, int kPitch, class T>
__device__ __forceinline__ void add_tile(const T (&c)[F::kSize], const F& f, T* to) {
  to += f.row(0) * kPitch + f.column(0);
#pragma unroll
  for (int i = 0; i < F::kSize; ++i) atomicAdd(to + f.row_offset(F::slot(i)) * kPitch + f.column_offset(i), c[i]);
}

// Longest run of neighbours that `count` elements a thread consist of: a vector, a pair, or one.
template <class T> __device__ constexpr int run_length(int count) {
  return count % Vector<T>::kSize == 0 ? Vector<T>::kSize : count % 2 == 0 ? 2 : 1;
}

// ---- pitches: the same formulas as in schedules/simt.py ------------------------------------------------------------
// Rows of `length` elements, `run` elements a vector: an odd number of vectors.
__device__ constexpr int odd_pitch(int length, int run) { return ((length + run - 1) / run | 1) * run; }
// Rows that lanes write element by element: the pitch puts the rows that meet in one pass into different banks.
__device__ constexpr int scatter_pitch(int length, int lane_columns, int itemsize) {
  const int banks = 128 / itemsize;  // of one element each
  const int wanted = lane_columns < banks / 2 ? lane_columns : banks / 2;
  return length + (wanted - length % banks + banks) % banks;
}
// Rows of float64 that four lanes read as pairs: two rows that follow each other fill all banks.
__device__ constexpr int pair_pitch(int length) { return length + (24 - length % 16) % 16; }

// Two products in a row for a warp that owns whole rows: s = a · bᵀ, then o += s · c, where s passes through the warp's own
// piece of shared memory.
template <class T, int kLaneRows, int kThreadRows, int kDepth, int kMiddle, int kWidth> struct RowProducts {
  typedef Lanes<kLaneRows> Grid;
  static constexpr int kColumns = kMiddle / Grid::kColumns, kOutColumns = kWidth / Grid::kColumns;
  static_assert(kMiddle % Grid::kColumns == 0 && kWidth % (2 * Grid::kColumns) == 0,
                "whole columns of lanes, pairs in o");
  typedef FragmentSimt<Grid, kThreadRows, kColumns, 1, 1> First;
  typedef FragmentSimt<Grid, kThreadRows, kOutColumns, 1, run_length<T>(kOutColumns)> Second;

  static constexpr int kRows = First::kTileRows;  // of a warp
  static constexpr int kPitchA = odd_pitch(kDepth, Vector<T>::kSize), kPitchB = kPitchA, kPitchC = kWidth;
  static constexpr int kPitchMiddle = scatter_pitch(kMiddle, Grid::kColumns, sizeof(T));
  // Part of a block's shared memory.
  template <int kWarps> struct Middles { PitchedTile<kWarps * kRows, kMiddle, kPitchMiddle, T> middle; };

  First first;
  Second second;
  T* middle;

  // The warp's rows of a, s and o are kRows from warp * kRows on.
  template <class Shared>
  __device__ __forceinline__ RowProducts(int warp, Shared& shared)
      : first(int(threadIdx.x) % 32, warp * kRows, 0),
        second(int(threadIdx.x) % 32, warp * kRows, 0),
        middle(shared.middle.data) {}

  template <class A, class B> __device__ __forceinline__ void multiply_first(T (&s)[First::kSize], const A& a,
                                                                             const B& b) const {
    clear(s);
    multiply_abt<First, kDepth, kPitchA, kPitchB>(s, first, a.data, b.data);
  }
  template <class C>
  __device__ __forceinline__ void multiply_second(T (&o)[Second::kSize], const T (&s)[First::kSize], const C& c) const {
    __syncwarp();  // the warp has read the previous s
    store_tile<First, kPitchMiddle>(s, first, middle);
    __syncwarp();
    if constexpr (Second::kSize * sizeof(T) <= 320) {
      // A block's sum stands alone before it joins o: chains of roundings are as long as a block, not as all of them.
      T sum[Second::kSize];
      clear(sum);
      multiply_ab<Second, kMiddle, kPitchMiddle, kPitchC>(sum, second, middle, c.data);
#pragma unroll
      for (int i = 0; i < Second::kSize; ++i) o[i] += sum[i];
    } else {  // no registers for it
      multiply_ab<Second, kMiddle, kPitchMiddle, kPitchC>(o, second, middle, c.data);
    }
  }
};
