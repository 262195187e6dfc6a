#include "comm/arrivals.hpp"
#include "comm/signal.cuh"

namespace flux {
namespace {

__global__ void wait_arrivals_kernel(SignalWait wait, Epoch const* arrived, Arrivals arrivals) {
  int const count = arrivals.num_sources * arrivals.num_pieces;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    int const source = arrivals.first_source + i / arrivals.num_pieces;
    int const piece = arrivals.first_piece + i % arrivals.num_pieces;
    if (source == wait.rank) continue;
    Epoch const* const word = arrived + (arrivals.of_calls ? source : source * kMaxPieces + piece);
    wait_signal(wait, word, source, arrivals.of_calls ? kCallsFinished : piece, /*tile_m=*/-1, arrivals.step);
  }
  fence_async_proxy();  // the next kernel may read by TMA
}

}  // namespace

cudaError_t stream_wait_arrivals(cudaStream_t stream, SignalWait const& wait, Epoch const* arrived,
                                 Arrivals const& arrivals) {
  wait_arrivals_kernel<<<1, 32, 0, stream>>>(wait, arrived, arrivals);
  return cudaGetLastError();
}

}  // namespace flux
