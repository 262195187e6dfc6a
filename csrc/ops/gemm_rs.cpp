// gemm_rs: y[M / TP, N] = reduce_scatter(x[M, K] . weight[N, K]^T) + bias[N]

#include "ops/dispatch.hpp"
#include "ops/ops.hpp"

namespace flux {

at::Tensor gemm_rs(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                   std::string const& group_name, std::string const& strategy) {
  return run_reduction({Op::kGemmRs, x, weight, bias, group_name, /*return_gathered=*/false, strategy});
}

}  // namespace flux
