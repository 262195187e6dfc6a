// gemm_ar on CUDA, for many rows: a gemm_rs of several sections; the copy engine pushes finished partials to their
// owners, and the own chunk of a section, once it is reduced, to all peers, while the kernel computes the next
// sections. At the end the peers' chunks go from the region into y.

#include <ATen/cuda/CUDAContext.h>
#include <c10/util/Exception.h>

#include "comm/collect.hpp"
#include "cuda/launch.hpp"
#include "ops/backend.hpp"

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
  int64_t const chunk_bytes = chunk.rows * problem.n * size;
  TORCH_INTERNAL_ASSERT(view.layout.region_bytes >=
                            ar_two_shot_bytes(world, num_tiles, plan.tile_bytes, problem.rows, problem.n, size) &&
                        view.layout.send_bytes >= rs_region_bytes(world, num_tiles, plan.tile_bytes));
  Call call(workspace, problem, info, stream, BegunBy::kGemm);
  auto* const done = view.control(rank).local.tiles_done;
  auto* const y = static_cast<std::byte*>(operands.y);
  auto const chunk_offset = [&](int section, int owner) {
    return ar_chunk_index({section, owner}, world) * chunk_bytes;
  };
  int64_t const results = ar_results_offset(world, num_tiles, plan.tile_bytes);

  auto args = kernel_args<GemmRsArgs>(chunk, plan, operands, call);
  args.x = operands.x;
  args.y = y + chunk_offset(0, rank);
  args.y_stride = world * chunk.rows * problem.n;
  args.counts_own = true;
  args.replayed.items = 0;  // the call ends when all is collected
  args.send = view.send_buffer();
  args.staged = view.region(rank, call.parity());
  args.tiles_done = done[0];

  call.fork();
  check(kLaunchers[plan.choice.kernel].gemm_rs[element_index(problem.dtype)](args, stream), "launching gemm_ar");
  for (int step = 0; step < sections * world; ++step) {
    auto const [section, owner] = ar_chunk(rank, world, sections, step);
    if (owner == rank) {
      uint32_t* const counter = &done[rank][section * num_pieces];
      call.take_tiles(counter, per_chunk);
      for (int i = 0; i < world - 1; ++i) {
        int const peer = ag_push_peer(rank, world, i);
        call.push(view.region(peer, call.parity()) + results + chunk_offset(section, rank),
                  y + chunk_offset(section, rank), chunk_bytes,
                  call.arrived(peer, rank) + sections * num_pieces + section);
      }
      continue;
    }
    for (int piece = 0; piece < num_pieces; ++piece) {
      int const number = section * num_pieces + piece;
      int64_t const begin = int64_t{section} * per_chunk + plan.pieces.begin(piece);
      int32_t const tiles = plan.pieces.size(piece);
      call.push_tiles(
          &done[owner][number], tiles,
          view.region(owner, call.parity()) +
              rs_tile_offset(rs_slot(owner, world, rank), begin, num_tiles, plan.tile_bytes),
          view.send_buffer() + rs_tile_offset(rs_slot(rank, world, owner), begin, num_tiles, plan.tile_bytes),
          tiles * plan.tile_bytes, call.arrived(owner, rank) + number);
    }
  }
  call.join();
  Collect const collect{rank,
                        world,
                        sections,
                        sections * num_pieces,
                        chunk_bytes,
                        reinterpret_cast<uint8_t const*>(view.region(rank, call.parity()) + results),
                        reinterpret_cast<uint8_t*>(y)};
  check(stream_collect(stream, call.wait(), call.replayed(), call.arrived(rank, 0), collect,
                       at::cuda::getCurrentDeviceProperties()->multiProcessorCount),
        "collecting the reduced rows");
}

}  // namespace flux::cuda
