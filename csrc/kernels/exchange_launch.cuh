#pragma once
// Starts a kernel that exchanges its data by itself and does nothing else.

#include <algorithm>

#include "kernels/occupancy.hpp"

namespace flux {

// Blocks wait for blocks of the peers, so all are resident: at most `most`, and at least `least` or it is an error.
template <class Args>
cudaError_t launch_exchange(void (*kernel)(Args), int threads, int64_t least, int64_t most, Args const& args,
                            cudaStream_t stream) {
  int device = 0, blocks = 0;
  cudaError_t const error = max_active_clusters(reinterpret_cast<void const*>(kernel), dim3(1), threads,
                                                /*smem_bytes=*/0, stream, &device, &blocks);
  if (error != cudaSuccess) return error;
  if (blocks < least) return cudaErrorInvalidConfiguration;
  dim3 const grid(std::min<int64_t>(most, blocks));
  return launch_clusters(kernel, args, grid, dim3(1), threads, /*smem_bytes=*/0, /*overlaps=*/true, stream);
}

}  // namespace flux
