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

  Results results;
  switch (call.strategy()) {
    case Strategy::kLocal:
      results.y = run_local(call, args);
      if (return_gathered) results.gathered = at::empty(gathered_shape(args, call.problem()), x.options());
      if (return_gathered && results.gathered.numel() > 0) results.gathered.copy_(x);
      break;
    case Strategy::kSequential:
      results = run_sequential_ag_gemm(call, args);
      break;
    case Strategy::kFused:
    case Strategy::kDecomposed:
      results = run_overlapped(call, args);
      break;
  }
  return {results.y, return_gathered ? results.gathered : at::empty({0}, x.options())};
}

}  // namespace flux
