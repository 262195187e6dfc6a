#include "kernels/ag_gemm.cuh"

namespace flux {

cudaError_t ag_gemm_p128x128_2x1_fp16(AgGemmArgs const& args, cudaStream_t stream) {
  return launch_ag_gemm<Config<Pingpong, 128, 128, 64, 2, 1>, cutlass::half_t>(args, stream);
}

}  // namespace flux
