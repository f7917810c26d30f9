// Operands of translated PTX instructions.
//
// An asm operand becomes a reference of the type its constraint names; {a, b, c} becomes list(a, b, c), which names
// the registers.
#pragma once
#include <type_traits>
#include "numbers.h"

namespace emu::ptx {
using b8 = u8;
using s8 = signed char;
using b16 = u16;
using s16 = short;
using b32 = u32;
using s32 = int;
using b64 = u64;
using s64 = i64;
using f32 = float;
using f64 = double;
using emu::u16;
using emu::u32;
using emu::u64;
using emu::u8;

// "=r"(x): the register itself, seen as the constraint's type.
template <class Register, class T>
inline Register& output(T& variable) {
  static_assert(sizeof(T) == sizeof(Register), "asm: the size of an output differs from its constraint");
  static_assert(std::is_floating_point<T>::value == std::is_floating_point<Register>::value,
                "asm: an output's kind differs from its constraint");
  return reinterpret_cast<Register&>(variable);
}
// "r"(x): a variable of the constraint's size is named, any other value is converted.
template <class Register, class T>
inline decltype(auto) input(T&& value) {
  using Value = std::remove_cv_t<std::remove_reference_t<T>>;
  static_assert(sizeof(Value) <= sizeof(Register), "asm: an input is larger than its constraint");
  static_assert(std::is_floating_point<Value>::value == std::is_floating_point<Register>::value,
                "asm: an input's kind differs from its constraint");
  if constexpr (std::is_pointer<Value>::value)
    return Register(reinterpret_cast<uintptr_t>(value));
  else if constexpr (std::is_lvalue_reference<T>::value && sizeof(Value) == sizeof(Register))
    return reinterpret_cast<const Register&>(value);
  else
    return Register(value);
}

template <class T, int N>
struct List {
  T* at[N];
  operator List<const T, N>() const {
    List<const T, N> l;
    for (int i = 0; i < N; ++i) l.at[i] = at[i];
    return l;
  }
};
template <class T, int N>
struct List<const T, N> {
  const T* at[N];
};
template <class T, class... Rest>
inline List<T, 1 + sizeof...(Rest)> list(T& first, Rest&... rest) {
  return {{&first, &rest...}};
}
// The values of a list, and back.
template <class T, int N>
struct Values {
  T value[N];
  Values() = default;
  Values(const List<const T, N>& l) {
    for (int i = 0; i < N; ++i) value[i] = *l.at[i];
  }
  void assign_to(const List<T, N>& l) const {
    for (int i = 0; i < N; ++i) *l.at[i] = value[i];
  }
};
// Registers of a matrix fragment that the hardware keeps using after the instruction: elements of one array, in order.
template <class T, int N>
inline T* array_of(const List<T, N>& l) {
  for (int i = 1; i < N; ++i)
    if (l.at[i] != l.at[0] + i) fail("wgmma registers must be the elements of one array, in order");
  return l.at[0];
}
}  // namespace emu::ptx
