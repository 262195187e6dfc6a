#pragma once
// The kernels of the fused strategy with the communication switched off: on one GPU, with all that a peer would send
// there from the start. For benchmarks, which compare them with the library's GEMM.

#include <ATen/core/Tensor.h>

#include <string>

#include "ops/problem.hpp"

namespace flux::cuda {

// x [M, K] (ag_gemm: the gathered operand) and weight [N, K], as the last of `world` ranks would compute them.
Problem alone_problem(Op op, at::Tensor const& x, at::Tensor const& weight, int world, std::string const& config);

// Bytes of the scratch memory, which has to be zero before the first run and may be used again.
int64_t alone_scratch_bytes(Problem const& problem);

// y [M, N] (ag_gemm), or y [M / world, N] (gemm_rs), whose other partials are what the scratch memory holds: zeros.
at::Tensor run_alone(Problem const& problem, at::Tensor const& x, at::Tensor const& weight, at::Tensor const& scratch);

}  // namespace flux::cuda
