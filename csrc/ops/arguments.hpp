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

// The weight as a backend reads it: in place if one of its dimensions has unit stride, rows do not overlap and a row
// begins at a multiple of 16 bytes wherever the first one does; otherwise a copy.
bool is_weight_transposed(at::Tensor const& weight);

// The operands and whatever copies they point into.
struct PreparedOperands {
  at::Tensor x, weight, bias;
  Operands operands;
};
PreparedOperands prepare_operands(Arguments const& args, Problem const& problem, at::Tensor const& y,
                                  at::Tensor const* gathered);

// Shape of the result: that of x with dimension 0 times (ag_gemm) or divided by (gemm_rs) world, and n columns.
std::vector<int64_t> result_shape(Arguments const& args, Problem const& problem);
std::vector<int64_t> gathered_shape(Arguments const& args, Problem const& problem);

// "x [128, 64], weight [256, 64] (transposed view), bias, bfloat16 on cpu, ..."
std::string describe(Arguments const& args, Problem const& problem);

}  // namespace flux
