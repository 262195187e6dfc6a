#pragma once
// How the host starts a kernel for few rows: plain arguments in, an error code out.

#include "kernels/exchange_args.hpp"

namespace flux {

//   kGather    y[m, n] = x of all ranks, one below the other [m, k] . weight[n, k]^T + bias
//   kScatter   y[m / world, n] = this rank's rows of the sum over ranks of x[m, k] . weight[n, k]^T, + bias
//   otherwise  y[m, n] = the sum + bias
// The sum is in rank order.
struct FewRowsArgs {
  int64_t m, n, k;  // m: of all ranks
  void const* x;    // [m, k], or this rank's [m / world, k]
  void const* weight;
  int64_t weight_stride;
  void const* bias;  // [n] or null
  void* y;
  void* gathered;  // kGather: [m, k] for x of all ranks, or null
  ExchangeArgs exchange;
};

}  // namespace flux
