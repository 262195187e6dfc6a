#pragma once
// y[rows, n] = sum over ranks, in rank order, of part_r[rows, n], + bias[n]
//
// The sum is in fp32 (fp64 for fp64), rounded once: the result depends on nothing but the partials.

#include <cuda_runtime.h>

#include "ops/problem.hpp"

namespace flux {

struct ReduceArgs {
  void const* part[kMaxWorld];  // by rank, each aligned to 16 bytes; one may be y
  int world;
  void const* bias;  // [n] or null
  void* y;
  int64_t rows, n;
};

cudaError_t reduce_partials(ReduceArgs const& args, DataType dtype, cudaStream_t stream);

}  // namespace flux
