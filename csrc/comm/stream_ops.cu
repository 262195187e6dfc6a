#include "comm/stream_ops.hpp"

#include <cuda.h>

#include "comm/signal.cuh"

namespace flux {
namespace {

// The driver's stream memory operations, found at run time: the extension loads on machines without a driver.
struct MemoryOps {
  decltype(&cuStreamWriteValue64) write64 = nullptr;
  decltype(&cuStreamWriteValue32) write32 = nullptr;
  decltype(&cuStreamWaitValue32) wait32 = nullptr;
  cudaError_t error = cudaSuccess;

  MemoryOps() {
    find("cuStreamWriteValue64", reinterpret_cast<void**>(&write64));
    find("cuStreamWriteValue32", reinterpret_cast<void**>(&write32));
    find("cuStreamWaitValue32", reinterpret_cast<void**>(&wait32));
  }

  void find(char const* name, void** function) {
    cudaDriverEntryPointQueryResult found;
    cudaError_t const result = cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &found);
    if (result != cudaSuccess) error = result;
    if (result == cudaSuccess && found != cudaDriverEntryPointSuccess) error = cudaErrorSymbolNotFound;
  }
};

MemoryOps const& memory_ops() {
  static MemoryOps const ops;
  return ops;
}

cudaError_t to_runtime_error(CUresult result) {
  if (result == CUDA_SUCCESS) return cudaSuccess;
  return result == CUDA_ERROR_NOT_SUPPORTED ? cudaErrorNotSupported : cudaErrorUnknown;
}

__global__ void begin_call_kernel(LocalWords* local, uint64_t digest, Epoch const* completed, int world,
                                  SignalWait wait) {
  Epoch const previous = local->epoch;
  __syncwarp();
  int const peer = threadIdx.x;
  if (peer == 0) {
    local->epoch = previous + 1;
    local->signal = make_signal(previous + 1, digest);
  }
  if (peer < world && peer != wait.rank) wait_at_least(wait, completed + peer, previous, peer, -1, -1, -1);
}

__global__ void end_call_kernel(PeerWords completed, int rank, int world, Epoch const* epoch) {
  int const peer = threadIdx.x;
  if (peer >= world || peer == rank) return;
  __threadfence_system();
  store_release_sys(completed.at[peer] + rank, load_relaxed_sys(epoch));
}

}  // namespace

cudaError_t stream_write(cudaStream_t stream, Epoch* word, Epoch value) {
  if (memory_ops().error != cudaSuccess) return memory_ops().error;
  return to_runtime_error(memory_ops().write64(stream, reinterpret_cast<CUdeviceptr>(word), value, 0));
}

cudaError_t stream_write(cudaStream_t stream, uint32_t* word, uint32_t value) {
  if (memory_ops().error != cudaSuccess) return memory_ops().error;
  return to_runtime_error(memory_ops().write32(stream, reinterpret_cast<CUdeviceptr>(word), value, 0));
}

cudaError_t stream_wait(cudaStream_t stream, uint32_t const* word, uint32_t value) {
  if (memory_ops().error != cudaSuccess) return memory_ops().error;
  return to_runtime_error(
      memory_ops().wait32(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WAIT_VALUE_GEQ));
}

cudaError_t stream_begin_call(cudaStream_t stream, LocalWords* local, uint64_t digest, Epoch const* completed,
                              int world, SignalWait const& wait) {
  begin_call_kernel<<<1, 32, 0, stream>>>(local, digest, completed, world, wait);
  return cudaGetLastError();
}

cudaError_t stream_end_call(cudaStream_t stream, PeerWords const& completed, int rank, int world, Epoch const* epoch) {
  end_call_kernel<<<1, 32, 0, stream>>>(completed, rank, world, epoch);
  return cudaGetLastError();
}

}  // namespace flux
