#include "comm/stream_ops.hpp"

#include <cuda.h>

namespace flux {
namespace {

// A function of the driver, found at run time: the extension loads on machines without a driver.
template <class Function>
cudaError_t find(char const* name, unsigned version, Function*& function) {
  cudaDriverEntryPointQueryResult found;
  auto** const address = reinterpret_cast<void**>(&function);
  cudaError_t const error = cudaGetDriverEntryPointByVersion(name, address, version, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  return found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound;
}

struct MemoryOps {
  decltype(cuStreamWriteValue64)* write64 = nullptr;
  decltype(cuStreamBatchMemOp)* batch = nullptr;
  cudaError_t error = cudaSuccess;

  MemoryOps() {
    error = find("cuStreamWriteValue64", 12000, write64);
    if (error == cudaSuccess) error = find("cuStreamBatchMemOp", 12000, batch);
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

bool is_of_green_context(cudaStream_t stream) {
  static auto* const get = [] {
    decltype(cuStreamGetGreenCtx)* function = nullptr;
    return find("cuStreamGetGreenCtx", 12040, function) == cudaSuccess ? function : nullptr;  // older drivers have none
  }();
  CUgreenCtx context = nullptr;
  return get != nullptr && (get(stream, &context) != CUDA_SUCCESS || context != nullptr);
}

}  // namespace flux
