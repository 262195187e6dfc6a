// gemm_rs on CUDA, decomposed: cuBLAS computes the partials, chunk by chunk, own chunk last. The copy engine pushes
// each to its owner while the next is computed. Then one kernel adds up the own chunk, in rank order. All partials, the
// own one too, are rounded to the dtype before, as those of a plain reduce-scatter are. See
// schedule/chunk_schedule.hpp.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/util/Exception.h>

#include "comm/arrivals.hpp"
#include "cuda/library_gemm.hpp"
#include "cuda/workspace.hpp"
#include "kernels/reduce.hpp"
#include "ops/backend.hpp"
#include "ops/decomposed.hpp"

namespace flux::cuda {

void gemm_rs_decomposed(Problem const& p, Operands const& operands, Workspace& workspace, CallInfo const& info) {
  at::AutoDispatchBelowADInplaceOrView const no_autograd;
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceView const& view = workspace.view();
  int64_t const size = element_size(p.dtype);
  TORCH_INTERNAL_ASSERT(view.slot_bytes() >= rs_chunk_bytes(p.rows, p.n, size));
  Pieces const pieces = make_chunks(p.rows, decomposition_of(p).chunks);
  Call call(workspace, p, info, stream, BegunBy::kKernelOfItsOwn);

  LibraryGemm const gemm(p, operands);
  auto const* const x = static_cast<std::byte const*>(operands.x);
  for (RsProduct const& one : rs_products(p.rank, p.world, p.rows, pieces)) {
    at::Tensor const x_rows = gemm.matrix(x + (one.owner * p.rows + one.row) * p.k * size, one.rows, p.k, p.k);
    if (one.owner == p.rank) {  // y holds the own partial until the reduction
      gemm.product(gemm.matrix(operands.y, p.rows, p.n, p.n), x_rows, /*with_bias=*/false);
      continue;
    }
    int64_t const offset = rs_chunk_offset(0, one.row, p.rows, p.n, size);
    std::byte* const from = view.to_send(one.owner, call.parity()) + offset;
    std::byte* const to = view.slot(one.owner, p.rank, call.parity()) + offset;
    gemm.product(gemm.matrix(from, one.rows, p.n, p.n), x_rows, /*with_bias=*/false);
    call.fork();
    call.push(to, from, one.rows * p.n * size, call.arrived(one.owner, p.rank) + one.piece);
  }

  Arrivals const all{0, p.world, 0, pieces.count(), p.world};
  check(stream_wait_arrivals(stream, call.wait(), call.arrived(p.rank, 0), all), "waiting for partials");
  ReduceArgs args{};
  for (int source = 0; source < p.world; ++source) {
    args.part[source] = source == p.rank ? operands.y : view.slot(p.rank, source, call.parity());
  }
  args.world = p.world;
  args.bias = operands.bias;
  args.y = operands.y;
  args.rows = p.rows;
  args.n = p.n;
  check(reduce_partials(args, p.dtype, stream), "launching the reduction");
  call.join();
}

}  // namespace flux::cuda
