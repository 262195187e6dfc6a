#pragma once
// y[m, n] = sum over ranks, in rank order, of what each rank has in y[m, n], + bias[n], in place, by one kernel
//
// The sum is in fp32, rounded once: it has the same bits on all ranks. The ranks send their partials, and the two-shot
// form its sums, through the exchange area (schedule/exchange_layout.hpp).

#include "kernels/exchange_args.hpp"
#include "ops/problem.hpp"

namespace flux {

struct AllReduceArgs {
  void* y;
  void const* bias;      // [n] or null
  uint32_t num_vectors;  // of 16 bytes, of y
  uint32_t row_vectors;  // of a row: no vector lies in two
  ExchangeArgs exchange;
};

cudaError_t all_reduce(AllReduceArgs const& args, DataType dtype, cudaStream_t stream);

}  // namespace flux
