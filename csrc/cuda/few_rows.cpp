// The ops for few rows on CUDA: one kernel does it all, see csrc/kernels/few_rows.cuh.

#include <ATen/cuda/CUDAContext.h>

#include "cuda/launch.hpp"
#include "ops/backend.hpp"

namespace flux::cuda {

void launch_few_rows(Problem const& problem, LaunchPlan const& plan, Operands const& operands,
                     ExchangeArgs const& exchange, cudaStream_t stream) {
  FewRowsArgs args{};
  args.m = total_rows(problem);
  args.n = problem.n;
  args.k = problem.k;
  args.x = operands.x;
  args.weight = operands.weight;
  args.weight_stride = operands.weight_stride;
  args.bias = operands.bias;
  args.y = operands.y;
  args.gathered = operands.gathered;
  args.exchange = exchange;
  auto* const run = kFewRowsLaunchers[plan.few_rows].run[element_index(problem.dtype)];
  check(run(args, stream), "launching a kernel for few rows");
}

void run_few_rows(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
                  CallInfo const& info) {
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  ExchangeArgs const exchange = exchange_args(problem, plan.form, workspace, info, stream);
  launch_few_rows(problem, plan, operands, exchange, stream);
}

}  // namespace flux::cuda
