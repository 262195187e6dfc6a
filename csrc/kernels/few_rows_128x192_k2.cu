#include "kernels/few_rows_launch.cuh"

namespace flux {

cudaError_t few_rows_128x192_k2_bf16(FewRowsArgs const& args, cudaStream_t stream) {
  return launch_few_rows<FewRowsConfig<cutlass::bfloat16_t, 128, 192, 2>>(args, stream);
}

cudaError_t few_rows_128x192_k2_fp16(FewRowsArgs const& args, cudaStream_t stream) {
  return launch_few_rows<FewRowsConfig<cutlass::half_t, 128, 192, 2>>(args, stream);
}

}  // namespace flux
