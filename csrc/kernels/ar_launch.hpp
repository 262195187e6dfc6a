#pragma once
// How the host starts a kernel of gemm_ar for few rows: plain arguments in, an error code out.

#include <cuda_runtime.h>

#include "comm/fault.hpp"
#include "schedule/exchange_layout.hpp"

namespace flux {

struct ExchangeArgs {
  int rank, world;
  bool two_shot;
  uint32_t* slots[kMaxWorld];  // exchange area of parity 0 at each rank
  SignalWait wait;
};

//   y[m, n] = sum over ranks of x[m, k] . weight[n, k]^T, in rank order, + bias
struct GemmArArgs {
  int64_t m, n, k;
  void const* x;  // [m, k]
  void const* weight;
  int64_t weight_stride;
  void const* bias;  // [n] or null
  void* y;           // [m, n]
  ExchangeArgs exchange;
  ExchangeWords* words[kMaxWorld];  // at each rank
  uint64_t digest;
};

}  // namespace flux
