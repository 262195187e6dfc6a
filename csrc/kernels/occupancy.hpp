#pragma once
// How many clusters of a kernel run at once, and their launch. In-kernel waits rely on all CTAs of the grid being
// resident, so no grid is larger.
//
// A stream of a green context has a part of the GPU's SMs. It is asked at each launch, as nothing tells when another
// one takes the place of a context that is gone.
//
// Ranks that share a GPU leave some SMs to the copies: on one GPU the copy engine's work is done by a kernel.

#include <cuda_runtime.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "comm/stream_ops.hpp"

namespace flux {

inline std::atomic<int> spare_sms = 0;  // of each GPU

inline cudaError_t ask_active_clusters(void const* kernel, dim3 cluster, int threads, int smem_bytes,
                                       cudaStream_t stream, int* clusters) {
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster.x, cluster.y, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = {cluster.x * 64, cluster.y, 1};
  config.blockDim = {static_cast<unsigned>(threads), 1, 1};
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

inline cudaError_t max_active_clusters(void const* kernel, dim3 cluster, int threads, int smem_bytes,
                                       cudaStream_t stream, int* device, int* result) {
  static std::mutex mutex;
  static std::map<std::pair<void const*, int>, int> known;  // by kernel and device
  if (cudaError_t error = cudaGetDevice(device); error != cudaSuccess) return error;
  std::lock_guard<std::mutex> const lock(mutex);
  int of_part = 0;
  int& clusters = is_of_green_context(stream) ? of_part : known[{kernel, *device}];
  if (clusters == 0) {
    cudaError_t const error = ask_active_clusters(kernel, cluster, threads, smem_bytes, stream, &clusters);
    if (error != cudaSuccess) return error;
  }
  int const cluster_size = static_cast<int>(cluster.x * cluster.y);
  *result = clusters - (spare_sms + cluster_size - 1) / cluster_size;
  if (*result < 1) return cudaErrorInvalidConfiguration;
  return cudaSuccess;
}

// Starts a kernel of clusters, after max_active_clusters. With `overlaps` its beginning may run while the kernel before
// it ends.
template <class Params>
cudaError_t launch_clusters(void (*kernel)(Params), Params const& params, dim3 grid, dim3 cluster, int threads,
                            int smem_bytes, bool overlaps, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  auto const add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (overlaps) add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  if (cluster.x * cluster.y > 1) {
    add(cudaLaunchAttributeClusterDimension).clusterDim = {cluster.x, cluster.y, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace flux
