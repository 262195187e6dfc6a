#include "kernels/gemm_rs.cuh"

namespace flux {

cudaError_t gemm_rs_c128x256_2x1_fp16(GemmRsArgs const& args, cudaStream_t stream) {
  return launch_gemm_rs<Config<Cooperative, 128, 256, 64, 2, 1>, cutlass::half_t>(args, stream);
}

}  // namespace flux
