#include "comm/replay.cuh"

namespace flux {
namespace {

__global__ void begin_call_kernel(ReplayedCall call, SignalWait wait) {
  Epoch const epoch = announce_call(call, wait);
  if (threadIdx.x == 0) {
    call.local->before = epoch - 1;
    call.local->epoch = epoch;
  }
}

}  // namespace

cudaError_t stream_begin_call(cudaStream_t stream, ReplayedCall const& call, SignalWait const& wait) {
  begin_call_kernel<<<1, 32, 0, stream>>>(call, wait);
  return cudaGetLastError();
}

}  // namespace flux
