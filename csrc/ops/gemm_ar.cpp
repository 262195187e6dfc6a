// gemm_ar: y[M, N] = all_reduce(x[M, K] . weight[N, K]^T) + bias[N]

#include "ops/dispatch.hpp"
#include "ops/ops.hpp"

namespace flux {

at::Tensor gemm_ar(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                   std::string const& group_name, std::string const& strategy) {
  return run_reduction({Op::kGemmAr, x, weight, bias, group_name, /*return_gathered=*/false, strategy});
}

}  // namespace flux
