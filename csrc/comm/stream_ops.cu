#include "comm/stream_ops.hpp"

#include <cuda.h>

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

}  // namespace

cudaError_t stream_write(cudaStream_t stream, Epoch* word, Epoch value) {
  if (memory_ops().error != cudaSuccess) return memory_ops().error;
  return to_runtime_error(memory_ops().write64(stream, reinterpret_cast<CUdeviceptr>(word), value, 0));
}

cudaError_t stream_take(cudaStream_t stream, uint32_t* counter, uint32_t value, Epoch* word, Epoch word_value) {
  if (memory_ops().error != cudaSuccess) return memory_ops().error;
  CUstreamBatchMemOpParams ops[3] = {};
  ops[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  ops[0].writeValue.address = reinterpret_cast<CUdeviceptr>(word);
  ops[0].writeValue.value64 = word_value;
  ops[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  ops[1].waitValue.address = reinterpret_cast<CUdeviceptr>(counter);
  ops[1].waitValue.value = value;
  ops[1].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  ops[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  ops[2].writeValue.address = reinterpret_cast<CUdeviceptr>(counter);
  ops[2].writeValue.value = 0;
  int const first = word == nullptr ? 1 : 0;
  return to_runtime_error(memory_ops().batch(stream, 3 - first, ops + first, 0));
}

}  // namespace flux
