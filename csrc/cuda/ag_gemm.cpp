// ag_gemm on CUDA: the copy engine pushes this rank's shard to its peers, next rank first, while one kernel computes
// the product chunk by chunk, own shard first. See csrc/kernels/ag_gemm.cuh.

#include <ATen/cuda/CUDAContext.h>
#include <c10/util/Exception.h>

#include "cuda/launch.hpp"
#include "ops/backend.hpp"
#include "schedule/chunk_order.hpp"

namespace flux::cuda {

void ag_gemm(Problem const& problem, Operands const& operands, Workspace& workspace, Epoch epoch,
             double timeout_seconds) {
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceView const& view = workspace.view();
  LaunchChoice const choice = launch_choice(problem);
  uint64_t const digest = digest_of(problem, choice, operands.bias != nullptr);
  Call call(workspace, problem, digest, stream, epoch, timeout_seconds);

  int64_t const row_bytes = problem.k * element_size(problem.dtype);
  int64_t const shard_bytes = problem.rows * row_bytes;
  Pieces const pieces = make_pieces(problem.rows, choice.pieces, 1);
  auto const* shard = static_cast<std::byte const*>(operands.x);
  TORCH_INTERNAL_ASSERT(view.layout.region_bytes >= problem.world * shard_bytes);

  AgGemmArgs args{};
  args.rank = problem.rank;
  args.world = problem.world;
  args.rows = problem.rows;
  args.n = problem.n;
  args.k = problem.k;
  args.shard = shard;
  args.gathered = view.region(problem.rank, call.parity());
  args.weight = operands.weight;
  args.weight_stride = operands.weight_stride;
  args.weight_transposed = problem.weight_transposed;
  args.bias = operands.bias;
  args.y = operands.y;
  args.arrived = call.arrived(problem.rank, 0);
  args.pieces = pieces;
  args.swizzle = choice.swizzle;
  args.along_n = choice.along_n;
  args.wait = call.wait();

  auto const launch = [&] {
    check(kKernels[choice.kernel].ag_gemm[element_index(problem.dtype)](args, stream), "launching ag_gemm");
  };
  call.fork();
  for (int step = 0; step < problem.world - 1; ++step) {
    int const peer = ag_push_peer(problem.rank, problem.world, step);
    std::byte* const slot = view.region(peer, call.parity()) + problem.rank * shard_bytes;
    for (int piece = 0; piece < pieces.count(); ++piece) {
      int64_t const offset = pieces.begin(piece) * row_bytes;
      call.push(slot + offset, shard + offset, pieces.size(piece) * row_bytes,
                call.arrived(peer, problem.rank) + piece);
    }
    if (step == 0 && !launches_block()) launch();  // as soon as the first push is on its way
  }
  if (launches_block()) launch();
  call.join();

  if (operands.gathered != nullptr) {  // every shard has arrived when the kernel is done
    auto* gathered = static_cast<std::byte*>(operands.gathered);
    for (int source = 0; source < problem.world; ++source) {
      void const* from = source == problem.rank ? static_cast<void const*>(shard)
                                                : static_cast<std::byte const*>(args.gathered) + source * shard_bytes;
      check(cudaMemcpyAsync(gathered + source * shard_bytes, from, shard_bytes, cudaMemcpyDeviceToDevice, stream),
            "copying the gathered operand");
    }
  }
  call.finish();
}

}  // namespace flux::cuda
