#pragma once
// The arguments of a call, their checks, and the local copies that a backend may need.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "ops/problem.hpp"

namespace flux {

struct Arguments {
  Op op;
  at::Tensor const& x;
  at::Tensor const& weight;
  std::optional<at::Tensor> const& bias;
  std::string const& group_name;
  bool return_gathered;
  std::string const& strategy;

  bool has_bias() const { return bias.has_value() && bias->defined(); }
};

// Refuses, with a sentence, what is not allowed; needs no communication.
Problem check_arguments(Arguments const& args, int rank, int world);

// Whether a backend reads the weight as [k, n] with unit stride along n, not as [n, k] with unit stride along k.
bool is_weight_transposed(at::Tensor const& weight);

// The operands and whatever copies they point into. The weight is read in place if one of its dimensions has unit
// stride, its rows do not overlap and they begin at multiples of 16 bytes (or lie back to back); otherwise it is
// copied.
struct PreparedOperands {
  at::Tensor x, weight, bias;
  Operands operands;
};
PreparedOperands prepare_operands(Arguments const& args, Problem const& problem, at::Tensor const& y,
                                  at::Tensor const* gathered);

// Shape of the result: that of x with dimension 0 times (ag_gemm), divided by (gemm_rs) or without (gemm_ar) world,
// and n columns.
std::vector<int64_t> result_shape(Arguments const& args, Problem const& problem);
std::vector<int64_t> gathered_shape(Arguments const& args, Problem const& problem);

// "ag_gemm(x [128, 64], weight [256, 64] transposed view, bias, BFloat16 on cpu, strategy 'auto')"
std::string describe(Arguments const& args, Problem const& problem);

}  // namespace flux
