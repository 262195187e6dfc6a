#pragma once
// The arguments of a kernel that exchanges its data by itself (schedule/exchange_layout.hpp).

#include <cuda_runtime.h>

#include "comm/fault.hpp"
#include "schedule/exchange_layout.hpp"

namespace flux {

struct ExchangeArgs {
  int rank, world;
  ExchangeForm form;
  int own_rows;                // of y: kScatter: this rank's, else all; for kernels for few rows alone
  uint32_t* slots[kMaxWorld];  // of parity 0 at each rank; kGather: where the operand is gathered
  int64_t slots_bytes;         // of a parity
  ExchangeWords* words[kMaxWorld];
  SignalWait wait;
};

}  // namespace flux
