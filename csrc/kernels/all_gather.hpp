#pragma once
// gathered[world * rows, k] = all_gather(x[rows, k]), by one kernel through the exchange area
//
// It moves 16 bytes at a time, whatever they hold. See schedule/exchange_layout.hpp, gather: here there is one slice.

#include "kernels/exchange_args.hpp"

namespace flux {

struct AllGatherArgs {
  void const* shard;
  void* gathered;
  int64_t num_vectors;  // of 16 bytes, of a shard
  ExchangeArgs exchange;
};

cudaError_t all_gather(AllGatherArgs const& args, cudaStream_t stream);

}  // namespace flux
