// ag_gemm on CUDA: the copy engine pushes this rank's shard to its peers, next rank first, while one kernel computes
// the product chunk by chunk, own shard first. See csrc/kernels/ag_gemm.cuh.

#include <ATen/cuda/CUDAContext.h>
#include <c10/util/Exception.h>

#include "cuda/launch.hpp"
#include "ops/backend.hpp"
#include "schedule/chunk_order.hpp"

namespace flux::cuda {

void ag_gemm(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
             CallInfo const& info) {
  if (plan.few_rows >= 0) return run_few_rows(problem, plan, operands, workspace, info);
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceView const& view = workspace.view();
  Call call(workspace, problem, info, stream, BegunBy::kGemm);

  int64_t const size = element_size(problem.dtype);
  int64_t const row_bytes = problem.k * size;
  Pieces const& pieces = plan.pieces;
  auto const* shard = static_cast<std::byte const*>(operands.x);
  TORCH_INTERNAL_ASSERT(view.slot_bytes() >= ag_shard_bytes(problem.rows, problem.k, size));

  auto args = kernel_args<AgGemmArgs>(problem, plan, operands, call);
  args.shard = shard;
  args.gathered = view.region(problem.rank, call.parity());
  args.slot_bytes = view.slot_bytes();

  auto const start_gemm = [&] {
    check(kLaunchers[plan.choice.kernel].ag_gemm[element_index(problem.dtype)](args, stream), "launching ag_gemm");
  };
  bool const gemm_first = call.is_replayed();  // the copy stream waits for it; else the first push need not be late
  call.fork();
  if (gemm_first) start_gemm();
  for (int step = 0; step < problem.world - 1; ++step) {
    int const peer = ag_push_peer(problem.rank, problem.world, step);
    std::byte* const slot = view.slot(peer, problem.rank, call.parity());
    for (int piece = 0; piece < pieces.count(); ++piece) {
      int64_t const offset = pieces.begin(piece) * row_bytes;
      call.push(slot + offset, shard + offset, pieces.size(piece) * row_bytes,
                call.arrived(peer, problem.rank) + piece);
    }
    if (step == 0 && !gemm_first) start_gemm();
  }
  call.join();
  // Every shard has arrived when the kernel is done.
  copy_gathered(problem, operands, stream, [&](int source) { return view.slot(problem.rank, source, call.parity()); });
}

}  // namespace flux::cuda
