#include "kernels/ag_gemm.cuh"

namespace flux {

cudaError_t ag_gemm_c128x256_2x1_fp16(AgGemmArgs const& args, cudaStream_t stream) {
  return launch_ag_gemm<Config<Cooperative, 128, 256, 64, 2, 1>, cutlass::half_t>(args, stream);
}

}  // namespace flux
