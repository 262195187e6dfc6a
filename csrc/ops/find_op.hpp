#pragma once
// Operators as the dispatcher knows them.

#include <ATen/core/dispatch/Dispatcher.h>

#include "ops/ops.hpp"

namespace flux {

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(char const* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline auto const& ag_gemm_op() {
  static auto const op = find_op<decltype(ag_gemm)>("flux::ag_gemm");
  return op;
}

inline auto const& gemm_rs_op() {
  static auto const op = find_op<decltype(gemm_rs)>("flux::gemm_rs");
  return op;
}

inline auto const& gemm_ar_op() {
  static auto const op = find_op<decltype(gemm_ar)>("flux::gemm_ar");
  return op;
}

}  // namespace flux
