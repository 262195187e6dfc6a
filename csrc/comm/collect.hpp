#pragma once
// The end of gemm_ar for many rows: the reduced chunks of all peers, from the region into y as they arrive.

#include <cuda_runtime.h>

#include "comm/replay.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

struct Collect {
  int rank, world, sections;
  int first_piece;      // signal of section 0; the sections follow
  int64_t chunk_bytes;  // a multiple of 16; chunk section * world + owner lies at that many of them
  uint8_t const* from;
  uint8_t* to;
};

// Ends the call where the device counts calls.
cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call, Epoch const* arrived,
                           Collect const& collect, int num_blocks);

}  // namespace flux
