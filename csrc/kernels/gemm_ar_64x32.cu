#include "kernels/gemm_ar.cuh"

namespace flux {

cudaError_t gemm_ar_64x32_bf16(GemmArArgs const& args, cudaStream_t stream) {
  return launch_gemm_ar<ArConfig<cutlass::bfloat16_t, 64, 32>>(args, stream);
}

cudaError_t gemm_ar_64x32_fp16(GemmArArgs const& args, cudaStream_t stream) {
  return launch_gemm_ar<ArConfig<cutlass::half_t, 64, 32>>(args, stream);
}

}  // namespace flux
