#pragma once
// What the copy-engine side of an op enqueues on a stream. Every function returns an error code.

#include <cuda_runtime.h>

#include "comm/fault.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

// Writes `value` after all earlier work of the stream, visible to the whole system; `word` may be a peer's.
cudaError_t stream_write(cudaStream_t stream, Epoch* word, Epoch value);

// Holds back the stream until *counter >= value, then sets it to 0. It is local, and local kernels are sure to raise it
// to that value, and no further.
cudaError_t stream_take(cudaStream_t stream, uint32_t* counter, uint32_t value);

struct PeerWords {
  Epoch* at[kMaxWorld];  // one array of words at each rank
};

// Graph replay (see csrc/cuda/workspace.hpp). One small kernel counts a call: epoch += 1, signal = make_signal(epoch,
// digest). It tells every peer, begun[rank] = epoch, that this rank has finished all calls before; then it waits until
// every peer has finished the last call that used the region of `parity`. It stands before the GEMM on the same stream:
// a kernel that waits beside a persistent GEMM might find no free SM.
cudaError_t stream_begin_call(cudaStream_t stream, LocalWords* local, int parity, uint64_t digest,
                              PeerWords const& begun, int world, SignalWait const& wait);

}  // namespace flux
