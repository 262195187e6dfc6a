#pragma once
// The kernels of the fused strategy with the communication switched off: on one GPU, with all that a peer would send
// there from the start; those for few rows as the only rank. For benchmarks, which compare them with the library's
// GEMM.

#include <ATen/core/Tensor.h>

#include <string>

#include "ops/problem.hpp"

namespace flux::cuda {

// x [M, K] (ag_gemm: the gathered operand) and weight [N, K], as the last of `world` ranks would compute them.
Problem alone_problem(Op op, at::Tensor const& x, at::Tensor const& weight, int world, std::string const& config);

// Memory for the runs of such a problem, one after the other.
at::Tensor alone_scratch(Problem const& problem, c10::Device device);

// y [M, N] of ag_gemm and of kernels for few rows; else y [M / world, N], and the partials of the others are zeros.
at::Tensor run_alone(Problem const& problem, at::Tensor const& x, at::Tensor const& weight, at::Tensor const& scratch);

}  // namespace flux::cuda
