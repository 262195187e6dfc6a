#pragma once
// What gemm_ar for many rows does beside and behind the product: the peers' reduced rows go from the region into y, and
// the last piece of the own rows goes to all peers by stores of the SMs, which are idle by then and faster than a copy
// engine with so little.

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
  int num_blocks;
};

// Copies all pieces of the peers but the last, as they arrive. For the stream of the pushes, behind those: while the
// product still has some SMs, the others do this.
cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, Collect const& collect);

// Sends the last piece, copies those of the peers, and ends the call where the device counts calls. Behind the product
// and all else. Like the product, it needs all of its blocks to run at the same time: every rank waits for what all
// blocks of the others send.
cudaError_t stream_finish(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call,
                          Collect const& collect);

}  // namespace flux
