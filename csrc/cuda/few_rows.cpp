// The ops for few rows on CUDA: one kernel does it all, see csrc/kernels/few_rows.cuh.

#include <ATen/cuda/CUDAContext.h>

#include "cuda/launch.hpp"
#include "ops/backend.hpp"

namespace flux::cuda {

void run_few_rows(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
                  CallInfo const& info) {
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceView const& view = workspace.view();
  bool const gathers = plan.form == ExchangeForm::kGather;
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
  args.exchange.rank = problem.rank;
  args.exchange.world = problem.world;
  args.exchange.form = plan.form;
  args.exchange.own_rows = static_cast<int>(plan.form == ExchangeForm::kScatter ? problem.rows : args.m);
  args.exchange.digest = info.digest;
  for (int r = 0; r < problem.world; ++r) {
    args.exchange.words[r] = reinterpret_cast<ExchangeWords*>(view.exchange(r));
    args.exchange.slots[r] = reinterpret_cast<uint32_t*>(
        view.base[r] + (gathers ? view.layout.gather_offset() : WorkspaceLayout::slots_offset()));
  }
  args.exchange.slots_bytes = view.layout.exchange_bytes;
  args.exchange.wait = workspace.begin_exchange(problem, info, stream);
  auto* const run = kFewRowsLaunchers[plan.few_rows].run[element_index(problem.dtype)];
  check(run(args, stream), "launching a kernel for few rows");
}

}  // namespace flux::cuda
