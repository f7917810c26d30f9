// What a translated kernel includes, and the entry points of the shared library it becomes: launching by argument
// pointers, as cuLaunchKernel does.
#pragma once
#include <utility>
#include "cuda_language.h"
#include "ptx_arithmetic.h"
#include "ptx_memory.h"
#include "ptx_sm80.h"
#include "ptx_sm90.h"

namespace emu {
template <class... P, size_t... I>
inline void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<P>*>(arguments[I])...);
}
template <class... P>
inline int launch_kernel(void (*kernel)(P...), Launch parameters, void** arguments, u32 launch_bound) {
  if (parameters.shared_bytes > kSharedLimit) return refuse_launch("launch: more shared memory than 227 KB");
  if (launch_bound && parameters.threads > launch_bound)
    return refuse_launch("launch: more threads than __launch_bounds__");
  struct Context {
    void (*kernel)(P...);
    void** arguments;
  } context{kernel, arguments};
  parameters.context = &context;
  parameters.entry = [](void* c) {
    call(static_cast<Context*>(c)->kernel, static_cast<Context*>(c)->arguments, std::index_sequence_for<P...>{});
  };
  return launch(parameters);
}
// Sizes of the kernel's parameters; returns their number.
template <class... P>
inline int parameter_sizes(void (*)(P...), u32* sizes) {
  ((*sizes++ = u32(sizeof(std::decay_t<P>))), ...);
  return int(sizeof...(P));
}
}  // namespace emu

#define EMU_KERNEL(name, bound, alignment, uses_async_proxy)                                                      \
  extern "C" EMU_EXPORT int emu_launch_##name(const emu::LaunchRequest* request, void** arguments) {              \
    return emu::launch_kernel(name, {*request, alignment, uses_async_proxy, nullptr, nullptr}, arguments, bound); \
  }                                                                                                               \
  extern "C" EMU_EXPORT int emu_parameters_##name(unsigned* sizes) { return emu::parameter_sizes(name, sizes); }
