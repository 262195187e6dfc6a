#pragma once
// The end of gemm_ar for many rows, one kernel behind the product and the pushes: the last piece of the own rows goes
// to all peers by stores of the SMs, which are idle by then and faster than a copy engine with so little; meanwhile the
// peers' reduced rows go from the region into y, and at last their last pieces. Like the product itself, it needs all
// of its blocks to run at the same time, as every rank waits for what all blocks of the others send.

#include <cuda_runtime.h>

#include "comm/replay.hpp"
#include "schedule/ar_results.hpp"

namespace flux {

struct Collect {
  ArResults results;
  void* y;
  void* region[kMaxWorld];    // where the results begin in the region of each rank
  Epoch* arrived[kMaxWorld];  // [piece], the signals of this rank at each rank
  Epoch const* arrivals;      // [source][kMaxPieces], at this rank
  uint32_t* tiles_done;       // of the last piece of the own rows; 0 again afterwards
};

// Ends the call where the device counts calls.
cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call,
                           Collect const& collect, int num_blocks);

}  // namespace flux
