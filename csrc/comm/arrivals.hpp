#pragma once
// A wait between two kernels of a stream, for kernels that know nothing of signals (library GEMMs).

#include <cuda_runtime.h>

#include "comm/fault.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

// The pieces [first_piece, first_piece + num_pieces) of each source in [first_source, first_source + num_sources), but
// for the own rank. `step` is for the message only.
struct Arrivals {
  int first_source, num_sources;
  int first_piece, num_pieces;
  int step;
  bool of_calls = false;  // each source has one word, by which it tells that it has finished the calls before
};

// Holds back the stream until all of them have arrived; `arrived` is [source][kMaxPieces], or [source] of calls. What
// peers have written before their signals is visible to every kernel that comes after on the stream. One small kernel,
// which waits no longer than the timeout and leaves a fault record then. Nothing that it waits for may come after it on
// any stream of this rank: it holds one SM's slot of a warp, and pushes need none.
cudaError_t stream_wait_arrivals(cudaStream_t stream, SignalWait const& wait, Epoch const* arrived,
                                 Arrivals const& arrivals);

}  // namespace flux
