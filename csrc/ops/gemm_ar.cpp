// gemm_ar: y[M, N] = all_reduce(x[M, K] . weight[N, K]^T) + bias[N]

#include <ATen/ops/empty.h>

#include "ops/dispatch.hpp"
#include "ops/ops.hpp"

namespace flux {

at::Tensor gemm_ar(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                   std::string const& group_name, std::string const& strategy) {
  Arguments const args{Op::kGemmAr, x, weight, bias, group_name, /*return_gathered=*/false, strategy};
  Call call = begin_call(args);
  if (call.strategy() == Strategy::kLocal) return run_local(call, args);
  if (call.strategy() == Strategy::kSequential) return run_sequential_gemm_ar(call, args);
  at::Tensor y = at::empty(result_shape(args, call.problem()), x.options());
  run_overlapped(call, args, y, /*gathered=*/nullptr);
  return y;
}

}  // namespace flux
