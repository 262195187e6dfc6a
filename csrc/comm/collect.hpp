#pragma once
// The end of gemm_ar for many rows: the reduced rows of all peers, from their slots into y as they arrive.

#include <cuda_runtime.h>

#include "comm/replay.hpp"
#include "schedule/ar_results.hpp"

namespace flux {

// `arrived` is [source][kMaxPieces]; the results in slot i begin at first + i * slot_bytes. Ends the call where the
// device counts calls.
cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call, Epoch const* arrived,
                           ArResults const& results, void const* first, int64_t slot_bytes, void* y, int num_blocks);

}  // namespace flux
