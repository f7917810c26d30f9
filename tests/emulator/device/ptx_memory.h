// PTX loads, stores, reductions and atomics by name.
//
// translate.py writes the type and the vector length as template arguments, `ld.global.nc.v4.b32` as ld_global<b32,
// 4>, and drops what does not change the result: cache hints, memory order (fibers are sequentially consistent) and
// scope.
#pragma once
#include <cstring>
#include "ptx_operands.h"

namespace emu::ptx {
// Loads may widen into a larger register, stores may narrow from one.
template <class T, class Register>
inline void load_element(Register& r, const unsigned char* p) {
  T v;
  memcpy(&v, p, sizeof v);
  if constexpr (sizeof(Register) == sizeof(T))
    memcpy(&r, &v, sizeof v);
  else
    r = Register(v);
}
template <class T, class Register>
inline void store_element(unsigned char* p, const Register& r) {
  static_assert(sizeof(Register) >= sizeof(T), "a store is wider than its register");
  memcpy(p, &r, sizeof(T));  // little endian: the low bytes
}

// ---- ld, st ---------------------------------------------------------------------------------------------------------
template <class T, int N, class Register>
inline void ld_global(const List<Register, N>& d, u64 address) {
  const unsigned char* p = global_pointer(address, N * sizeof(T), "ld.global");
  for (int i = 0; i < N; ++i) load_element<T>(*d.at[i], p + i * sizeof(T));
}
template <class T, int N, class Register>
inline void ld_global(Register& d, u64 address) {
  ld_global<T, 1>(list(d), address);
}
template <class T, int N, class Register>
inline void st_global(u64 address, const List<Register, N>& v) {
  unsigned char* p = global_pointer(address, N * sizeof(T), "st.global");
  for (int i = 0; i < N; ++i) store_element<T>(p + i * sizeof(T), *v.at[i]);
}
template <class T, int N, class Register>
inline void st_global(u64 address, const Register& v) {
  st_global<T, 1>(address, list(v));
}
template <class T, int N, class Register>
inline void ld_shared(const List<Register, N>& d, u32 address) {
  const unsigned char* p = shared_read(address, N * sizeof(T), "ld.shared");
  for (int i = 0; i < N; ++i) load_element<T>(*d.at[i], p + i * sizeof(T));
}
template <class T, int N, class Register>
inline void ld_shared(Register& d, u32 address) {
  ld_shared<T, 1>(list(d), address);
}
template <class T, int N, class Register>
inline void st_shared(u32 address, const List<Register, N>& v) {
  unsigned char* p = shared_write(address, N * sizeof(T), "st.shared");
  for (int i = 0; i < N; ++i) store_element<T>(p + i * sizeof(T), *v.at[i]);
}
template <class T, int N, class Register>
inline void st_shared(u32 address, const Register& v) {
  st_shared<T, 1>(address, list(v));
}

// ---- red, atom: fibers only switch where they block, so plain code is atomic ----------------------------------------
struct Add {
  template <class T>
  static T apply(T a, T b) {
    return T(a + b);
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return b < a ? b : a;
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return a < b ? b : a;
  }
};
struct Exch {
  template <class T>
  static T apply(T, T b) {
    return b;
  }
};
// The result of an atomic operation on one element; returns the old value.
template <class T, class Operation, class Register>
inline T update(unsigned char* p, const Register& operand) {
  static_assert(sizeof(Register) == sizeof(T), "an atomic operand has the size of its type");
  T old, value;
  memcpy(&old, p, sizeof old);
  memcpy(&value, &operand, sizeof value);
  value = Operation::apply(old, value);
  memcpy(p, &value, sizeof value);
  return old;
}
template <class T, int N, class Operation, class Register>
inline void red_global(u64 address, const List<Register, N>& v) {
  unsigned char* p = global_pointer(address, N * sizeof(T), "red.global");
  for (int i = 0; i < N; ++i) update<T, Operation>(p + i * sizeof(T), *v.at[i]);
}
template <class T, int N, class Operation, class Register>
inline void red_global(u64 address, const Register& v) {
  red_global<T, 1, Operation>(address, list(v));
}
template <class T, int N, class Operation, class Result, class Register>
inline void atom_global(Result& old, u64 address, const Register& v) {
  const T before = update<T, Operation>(global_pointer(address, sizeof(T), "atom.global"), v);
  memcpy(&old, &before, sizeof before);
}
template <class T, int N, class Operation, class Register>
inline void red_shared(u32 address, const Register& v) {
  update<T, Operation>(shared_write(address, sizeof(T), "red.shared"), v);
}
template <class T, int N, class Operation, class Result, class Register>
inline void atom_shared(Result& old, u32 address, const Register& v) {
  const T before = update<T, Operation>(shared_write(address, sizeof(T), "atom.shared"), v);
  memcpy(&old, &before, sizeof before);
}

// ---- fences, addresses ----------------------------------------------------------------------------------------------
inline void membar_cta() {}
inline void membar_gl() {}
inline void membar_sys() {}
inline void fence_acq_rel_cta() {}
inline void fence_acq_rel_gpu() {}
inline void fence_acq_rel_sys() {}
inline void cvta_to_global_u64(u64& d, u64 generic) { d = generic; }
inline void cvta_to_shared_u64(u64& d, u64 generic) { d = shared_address(reinterpret_cast<const void*>(generic)); }
inline void prefetch_global_L2(u64) {}
inline void prefetch_global_L1(u64) {}
}  // namespace emu::ptx
