#include "comm/stream_ops.hpp"

#include <cuda.h>

#include "comm/signal.cuh"

namespace flux {
namespace {

// The driver's stream memory operations, found at run time: the extension loads on machines without a driver.
struct MemoryOps {
  decltype(&cuStreamWriteValue64) write64 = nullptr;
  decltype(&cuStreamBatchMemOp) batch = nullptr;
  cudaError_t error = cudaSuccess;

  MemoryOps() {
    find("cuStreamWriteValue64", reinterpret_cast<void**>(&write64));
    find("cuStreamBatchMemOp", reinterpret_cast<void**>(&batch));
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

__global__ void begin_call_kernel(LocalWords* local, int parity, uint64_t digest, PeerWords begun, int world,
                                  SignalWait wait) {
  int const peer = threadIdx.x;
  Epoch const epoch = local->epoch + 1;
  Epoch const last = local->last_use[parity];
  __syncwarp();
  if (peer == 0) {
    local->epoch = epoch;
    local->signal = make_signal(epoch, digest);
    local->last_use[parity] = epoch;
  }
  bool const is_peer = peer < world && peer != wait.rank;
  if (is_peer) store_release_sys(begun.at[peer] + wait.rank, epoch);
  __syncwarp();  // all peers are told before any is waited for: else ranks could wait in a ring
  if (is_peer) wait_at_least(wait, begun.at[wait.rank] + peer, last + 1, peer, -1, -1, -1);
}

}  // namespace

cudaError_t stream_write(cudaStream_t stream, Epoch* word, Epoch value) {
  if (memory_ops().error != cudaSuccess) return memory_ops().error;
  return to_runtime_error(memory_ops().write64(stream, reinterpret_cast<CUdeviceptr>(word), value, 0));
}

cudaError_t stream_take(cudaStream_t stream, uint32_t* counter, uint32_t value) {
  if (memory_ops().error != cudaSuccess) return memory_ops().error;
  CUstreamBatchMemOpParams ops[2] = {};
  ops[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  ops[0].waitValue.address = reinterpret_cast<CUdeviceptr>(counter);
  ops[0].waitValue.value = value;
  ops[0].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  ops[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  ops[1].writeValue.address = reinterpret_cast<CUdeviceptr>(counter);
  ops[1].writeValue.value = 0;
  return to_runtime_error(memory_ops().batch(stream, 2, ops, 0));
}

cudaError_t stream_begin_call(cudaStream_t stream, LocalWords* local, int parity, uint64_t digest,
                              PeerWords const& begun, int world, SignalWait const& wait) {
  begin_call_kernel<<<1, 32, 0, stream>>>(local, parity, digest, begun, world, wait);
  return cudaGetLastError();
}

}  // namespace flux
