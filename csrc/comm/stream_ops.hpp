#pragma once
// What the copy-engine side of an op enqueues on a stream. Every function returns an error code.

#include <cuda_runtime.h>

#include "schedule/workspace_layout.hpp"

namespace flux {

// Writes `value` after all earlier work of the stream, visible to the whole system; `word` may be a peer's.
cudaError_t stream_write(cudaStream_t stream, Epoch* word, Epoch value);

// Holds back the stream until *counter >= value, then sets it to 0. It is local, and local kernels are sure to raise it
// to that value, and no further. Before that it does stream_write(stream, word, word_value), if `word` is not null: in
// one call of the driver, since each costs the host most of a microsecond.
cudaError_t stream_take(cudaStream_t stream, uint32_t* counter, uint32_t value, Epoch* word = nullptr,
                        Epoch word_value = 0);

// Whether the stream belongs to a green context, that is to a part of the GPU's SMs, or may.
bool is_of_green_context(cudaStream_t stream);

}  // namespace flux
