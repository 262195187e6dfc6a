#pragma once
// The calls of CUDA graphs, which the device counts: rule 5 of csrc/cuda/workspace.hpp.

#include <cuda_runtime.h>

#include "comm/fault.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

struct PeerWords {
  Epoch* at[kMaxWorld];  // one array of words at each rank
};

// What a kernel needs to begin and to end such a call.
struct ReplayedCall {
  LocalWords* local = nullptr;  // null: the host counts the calls, there is nothing to do
  PeerWords begun{};
  int world = 1;
  int parity = 0;
  uint32_t items = 0;  // of work, that the blocks of the kernel take in turn; 0: a later kernel ends the call
};

// Begins a call by a small kernel of its own, where no kernel of the call can: it stands before all others on the
// stream. It counts the call, too: local->before is what comes before it.
cudaError_t stream_begin_call(cudaStream_t stream, ReplayedCall const& call, SignalWait const& wait);

}  // namespace flux
