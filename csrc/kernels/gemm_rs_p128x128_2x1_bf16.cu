#include "kernels/gemm_rs.cuh"

namespace flux {

cudaError_t gemm_rs_p128x128_2x1_bf16(GemmRsArgs const& args, cudaStream_t stream) {
  return launch_gemm_rs<Config<Pingpong, 128, 128, 64, 2, 1>, cutlass::bfloat16_t>(args, stream);
}

}  // namespace flux
