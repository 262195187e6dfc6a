// ag_gemm: y[M, N] = all_gather(x[M / TP, K]) . weight[N, K]^T + bias[N]

#include <ATen/ops/empty.h>

#include "ops/dispatch.hpp"
#include "ops/ops.hpp"

namespace flux {

std::tuple<at::Tensor, at::Tensor> ag_gemm(at::Tensor const& x, at::Tensor const& weight,
                                           std::optional<at::Tensor> const& bias, std::string const& group_name,
                                           bool return_gathered, std::string const& strategy) {
  Arguments const args{Op::kAgGemm, x, weight, bias, group_name, return_gathered, strategy};
  Call call = begin_call(args);

  at::Tensor y, gathered;
  switch (call.strategy()) {
    case Strategy::kLocal:
      y = run_local(call, args);
      if (return_gathered) gathered = at::empty(gathered_shape(args, call.problem()), x.options());
      if (return_gathered && gathered.numel() > 0) gathered.copy_(x);
      break;
    case Strategy::kSequential:
      y = run_sequential_ag_gemm(call, args, gathered);
      break;
    case Strategy::kFused:
    case Strategy::kDecomposed:
      y = at::empty(result_shape(args, call.problem()), x.options());
      if (return_gathered) gathered = at::empty(gathered_shape(args, call.problem()), x.options());
      run_overlapped(call, args, y, return_gathered ? &gathered : nullptr);
      break;
  }
  return {y, return_gathered ? gathered : at::empty({0}, x.options())};
}

}  // namespace flux
