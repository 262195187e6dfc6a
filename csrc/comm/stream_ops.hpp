#pragma once
// What the copy-engine side of an op enqueues on a stream. Every function returns an error code.

#include <cuda_runtime.h>

#include "schedule/workspace_layout.hpp"

namespace flux {

// Writes `value` after all earlier work of the stream, visible to the whole system; `word` may be a peer's.
cudaError_t stream_write(cudaStream_t stream, Epoch* word, Epoch value);

// Holds back the stream until *counter >= value, then sets it to 0. It is local, and local kernels are sure to raise it
// to that value, and no further.
cudaError_t stream_take(cudaStream_t stream, uint32_t* counter, uint32_t value);

}  // namespace flux
