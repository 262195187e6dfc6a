// gemm_rs on CUDA: one kernel computes the partials, the chunks of the peers interleaved, own chunk last, and adds up
// the own chunk. The copy engine pushes finished pieces to their owners meanwhile. See csrc/kernels/gemm_rs.cuh.

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
  args.parts = interleaved_parts(plan.pieces, plan.choice.same_order);

  call.fork();
  // First the kernel: its counters are what the side stream waits for.
  check(kLaunchers[plan.choice.kernel].gemm_rs[element_index(problem.dtype)](args, stream), "launching gemm_rs");
  for (int i = 0; i < problem.world * plan.pieces.count(); ++i) {
    auto const [step, piece] = rs_piece(i, problem.world, plan.pieces, args.parts);
    int const peer = rs_chunk(args.order_rank, problem.world, step);
    if (peer == problem.rank) continue;
    int32_t const begin = plan.pieces.begin(piece), tiles = plan.pieces.size(piece);
    auto const offset = [&](int slot) { return rs_tile_offset(slot, begin, num_tiles, plan.tile_bytes); };
    call.push_tiles(&local.tiles_done[peer][piece], tiles,
                    view.region(peer, call.parity()) + offset(rs_slot(peer, problem.world, problem.rank)),
                    view.send_buffer() + offset(rs_slot(problem.rank, problem.world, peer)), tiles * plan.tile_bytes,
                    call.arrived(peer, problem.rank) + piece);
  }
  call.join();
}

}  // namespace flux::cuda
