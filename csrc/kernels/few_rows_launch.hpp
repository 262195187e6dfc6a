#pragma once
// How the host starts a kernel for few rows: plain arguments in, an error code out.

#include <cuda_runtime.h>

#include "comm/fault.hpp"
#include "schedule/exchange_layout.hpp"

namespace flux {

struct ExchangeArgs {
  int rank, world;
  ExchangeForm form;
  int own_rows;                // of y: kScatter: this rank's, else all
  uint32_t* slots[kMaxWorld];  // of parity 0 at each rank; kGather: where the operand is gathered
  int64_t slots_bytes;         // of a parity
  ExchangeWords* words[kMaxWorld];
  uint64_t digest;
  SignalWait wait;
};

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
