#include "kernels/few_rows_launch.cuh"

namespace flux {

cudaError_t few_rows_64x32_bf16(FewRowsArgs const& args, cudaStream_t stream) {
  return launch_few_rows<FewRowsConfig<cutlass::bfloat16_t, 64, 32, 1>>(args, stream);
}

cudaError_t few_rows_64x32_fp16(FewRowsArgs const& args, cudaStream_t stream) {
  return launch_few_rows<FewRowsConfig<cutlass::half_t, 64, 32, 1>>(args, stream);
}

}  // namespace flux
