// gemm_ar on CUDA, for many rows: a gemm_rs of several sections; the copy engine pushes finished partials to their
// owners, and each piece of the own chunk of a section, once it is reduced, to all peers, while the kernel computes
// what comes next. At the end the peers' chunks go from the region into y.

#include <ATen/cuda/CUDAContext.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "comm/collect.hpp"
#include "cuda/push_partials.hpp"
#include "ops/backend.hpp"
#include "ops/connections.hpp"

namespace flux::cuda {

void gemm_ar(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
             CallInfo const& info) {
  if (plan.few_rows >= 0) return run_few_rows(problem, plan, operands, workspace, info);
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceView const& view = workspace.view();
  int const rank = problem.rank, world = problem.world, sections = plan.choice.sections;
  int const num_pieces = plan.pieces.count();
  int32_t const per_chunk = plan.order.num_tiles();
  int64_t const num_tiles = int64_t{sections} * per_chunk, size = element_size(problem.dtype);
  Problem const chunk = section_problem(problem, sections);
  Call call(workspace, problem, info, stream, BegunBy::kGemm);
  auto* const done = view.control(rank).local.tiles_done;
  auto* const y = static_cast<std::byte*>(operands.y);
  int64_t const results_offset = ar_slot_results_offset(num_tiles, plan.tile_bytes);
  TileShape const tile = kKernels[plan.choice.kernel].config.shape;
  ArResults const results{rank,       world,       sections,    chunk.rows,        problem.n * size,
                          plan.order, plan.pieces, tile.tile_m, tile.tile_n * size};
  TORCH_INTERNAL_ASSERT(view.slot_bytes() >= results_offset + results.bytes_of_owner());

  auto args = kernel_args<GemmRsArgs>(chunk, plan, operands, call);
  args.x = operands.x;
  args.y = y + results.offset({0, rank}, {});
  args.y_stride = world * chunk.rows * problem.n;
  args.counts_own = true;
  args.replayed.items = 0;  // the call ends when all is collected
  args.slot_bytes = view.slot_bytes();
  args.send = view.send_region(call.parity());
  args.staged = view.region(rank, call.parity());
  args.tiles_done = done[0];
  args.parts = plan.pieces;

  auto const take_results = [&](int number) {
    call.take_tiles(&done[rank][number], plan.pieces.size(number % num_pieces));
  };
  auto const push_results = [&](int number) {
    ArBlock const block = results.block(number);
    int const section = results.section_of(number);
    int64_t const there = results_offset + results.offset_of_owner(section, block);
    std::byte const* const from = y + results.offset({section, rank}, block);
    for (int i = 0; i < world - 1; ++i) {
      int const peer = ag_push_peer(rank, world, i);
      call.push_rows(view.slot(peer, rank, call.parity()) + there, from, results.row_bytes, block.width, block.rows,
                     call.arrived(peer, rank) + results.signal(number));
    }
  };

  call.fork();
  check(kLaunchers[plan.choice.kernel].gemm_rs[element_index(problem.dtype)](args, stream), "launching gemm_ar");
  int const last = results.num_pieces() - 1;
  for (int section = 0, number = 0; section < sections; ++section) {  // in the order of ar_item
    push_partials(call, view, plan, args, section);
    int const sent = results.sent_after_partials_of(section);
    // Results wait for the peers, and these for partials that may lie behind them if the lanes share a queue.
    if (number < sent) call.meet();
    for (; number < std::min(sent, last); ++number) {
      take_results(number);
      push_results(number);
    }
  }
  take_results(last);
  // The peers' rows are collected while the last piece goes out. Not sooner: where streams share a queue of the GPU,
  // pushes behind a kernel that waits for the product would never start, and the product waits for those of the peers.
  // Eager calls keep the order in which they are enqueued, but a graph keeps its edges alone: where all streams share
  // one queue, the last piece comes first there, too.
  bool const last_comes_first = call.is_replayed() && has_one_connection();
  if (last_comes_first) push_results(last);
  call.join();
  if (!last_comes_first) push_results(last);
  check(stream_collect(stream, call.wait(), call.replayed(), call.arrived(rank, 0), results,
                       view.region(rank, call.parity()) + results_offset, view.slot_bytes(), y,
                       at::cuda::getCurrentDeviceProperties()->multiProcessorCount),
        "collecting the reduced rows");
  call.join();
}

}  // namespace flux::cuda
