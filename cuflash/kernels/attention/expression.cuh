// What expressions that users write are made of (modifiers/written.py), beside the operators of the language.
//
// Whole numbers wrap at 32 bits, and what has no result is 0: the host computes the same.
#pragma once
#include "hw/element.cuh"

__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float sqrt_of(float x) { return sqrtf(x); }
__device__ __forceinline__ double sqrt_of(double x) { return sqrt(x); }
__device__ __forceinline__ float floor_of(float x) { return floorf(x); }
__device__ __forceinline__ double floor_of(double x) { return floor(x); }

// Quotient and remainder of whole numbers, rounded down.
__device__ __forceinline__ int floor_divided(int x, int y) {
  if (y == 0) return 0;
  if (y == -1) return int(0u - u32(x));
  const int quotient = x / y;
  return quotient - ((x % y != 0) & ((x < 0) != (y < 0)));
}
__device__ __forceinline__ int floor_remainder(int x, int y) {
  if (y == 0 || y == -1) return 0;
  const int rest = x % y;
  return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

// A real number as a whole one, towards 0; as many as float has below 2^31.
template <class T> __device__ __forceinline__ int whole(T x) {
  const T most = T(2147483520);
  return x != x ? 0 : int(x < -most ? -most : x > most ? most : x);
}

// An index inside of an axis, whatever was computed.
__device__ __forceinline__ int clamped(int index, int last) { return min(max(index, 0), last); }
