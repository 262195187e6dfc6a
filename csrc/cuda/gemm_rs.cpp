// gemm_rs on CUDA: one kernel computes the partials, chunk by chunk, own chunk last, and adds up the own chunk. The
// copy engine pushes finished pieces to their owners meanwhile. See csrc/kernels/gemm_rs.cuh.

#include <ATen/cuda/CUDAContext.h>
#include <c10/util/Exception.h>

#include "cuda/launch.hpp"
#include "ops/backend.hpp"
#include "schedule/chunk_order.hpp"

namespace flux::cuda {

void gemm_rs(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
             CallInfo const& info) {
  if (plan.few_rows >= 0) return run_few_rows(problem, plan, operands, workspace, info);
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceView const& view = workspace.view();
  int64_t const num_tiles = plan.order.num_tiles();
  int64_t const staged_bytes = rs_region_bytes(problem.world, num_tiles, plan.tile_bytes);
  TORCH_INTERNAL_ASSERT(view.layout.region_bytes >= staged_bytes && view.layout.send_bytes >= staged_bytes);
  Call call(workspace, problem, info, stream, BegunBy::kGemm);
  LocalWords& local = view.control(problem.rank).local;

  auto args = kernel_args<GemmRsArgs>(problem, plan, operands, call);
  args.x = operands.x;
  args.y_stride = problem.rows * problem.n;
  args.send = view.send_buffer();
  args.staged = view.region(problem.rank, call.parity());
  args.tiles_done = local.tiles_done[0];

  call.fork();
  // First the kernel: its counters are what the side stream waits for.
  check(kLaunchers[plan.choice.kernel].gemm_rs[element_index(problem.dtype)](args, stream), "launching gemm_rs");
  for (int step = 0; step < problem.world; ++step) {  // in the order of the kernel
    int const peer = rs_chunk(args.order_rank, problem.world, step);
    if (peer == problem.rank) continue;
    int const slot_here = rs_slot(problem.rank, problem.world, peer);
    int const slot_there = rs_slot(peer, problem.world, problem.rank);
    for (int piece = 0; piece < plan.pieces.count(); ++piece) {
      int32_t const begin = plan.pieces.begin(piece);
      int32_t const tiles = plan.pieces.size(piece);
      call.take_tiles(&local.tiles_done[peer][piece], tiles);
      call.push(view.region(peer, call.parity()) + rs_tile_offset(slot_there, begin, num_tiles, plan.tile_bytes),
                view.send_buffer() + rs_tile_offset(slot_here, begin, num_tiles, plan.tile_bytes),
                tiles * plan.tile_bytes, call.arrived(peer, problem.rank) + piece);
    }
  }
  call.join();
}

}  // namespace flux::cuda
