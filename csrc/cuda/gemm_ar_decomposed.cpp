// gemm_ar on CUDA, decomposed: cuBLAS computes the partial in y, then one kernel adds up those of all ranks there. They
// are rounded to the dtype before, as those of a plain all-reduce are.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContext.h>

#include "cuda/launch.hpp"
#include "cuda/library_gemm.hpp"
#include "kernels/all_reduce.hpp"
#include "kernels/exchange_choose.hpp"
#include "ops/backend.hpp"

namespace flux::cuda {

void gemm_ar_decomposed(Problem const& p, Operands const& operands, Workspace& workspace, CallInfo const& info) {
  at::AutoDispatchBelowADInplaceOrView const no_autograd;
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  AllReduceArgs args{};
  args.y = operands.y;
  args.bias = operands.bias;
  args.num_vectors = static_cast<uint32_t>(p.rows * p.n / 8);
  args.row_vectors = static_cast<uint32_t>(p.n / 8);
  args.exchange = exchange_args(p, all_reduce_form(p), workspace, info, stream);
  LibraryGemm const gemm(p, operands);
  gemm.product(gemm.matrix(operands.y, p.rows, p.n, p.n), gemm.matrix(operands.x, p.rows, p.k, p.k),
               /*with_bias=*/false);
  check(all_reduce(args, p.dtype, stream), "launching the all-reduce");
}

}  // namespace flux::cuda
