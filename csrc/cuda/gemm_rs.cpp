// gemm_rs on CUDA: one kernel computes the partials, the chunks of the peers interleaved, own chunk last, and adds up
// the own chunk. The copy engine pushes finished pieces to their owners meanwhile. See csrc/kernels/gemm_rs.cuh.

#include <ATen/cuda/CUDAContext.h>
#include <c10/util/Exception.h>

#include "cuda/push_partials.hpp"
#include "ops/backend.hpp"

namespace flux::cuda {

void gemm_rs(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
             CallInfo const& info) {
  if (plan.few_rows >= 0) return run_few_rows(problem, plan, operands, workspace, info);
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceView const& view = workspace.view();
  TORCH_INTERNAL_ASSERT(view.slot_bytes() >= rs_slot_bytes(plan.order.num_tiles(), plan.tile_bytes));
  Call call(workspace, problem, info, stream, BegunBy::kGemm);
  LocalWords& local = view.control(problem.rank).local;

  auto args = kernel_args<GemmRsArgs>(problem, plan, operands, call);
  args.x = operands.x;
  args.y_stride = problem.rows * problem.n;
  args.slot_bytes = view.slot_bytes();
  args.send = view.send_region(call.parity());
  args.staged = view.region(problem.rank, call.parity());
  args.tiles_done = local.tiles_done[0];
  args.parts = interleaved_parts(plan.pieces, plan.choice.same_order);

  call.fork();
  // First the kernel: its counters are what the copy streams wait for.
  check(kLaunchers[plan.choice.kernel].gemm_rs[element_index(problem.dtype)](args, stream), "launching gemm_rs");
  push_partials(call, view, plan, args, /*section=*/0);
  call.join();
}

}  // namespace flux::cuda
