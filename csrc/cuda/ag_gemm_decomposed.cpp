// ag_gemm on CUDA, decomposed: the copy engine pushes this rank's shard to its peers, chunk by chunk, while cuBLAS
// computes the products of the schedule. A one-warp kernel before each product waits for the chunks that it needs. See
// csrc/schedule/chunk_schedule.hpp.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <vector>

#include "comm/arrivals.hpp"
#include "cuda/launch.hpp"
#include "cuda/library_gemm.hpp"
#include "kernels/all_gather.hpp"
#include "ops/backend.hpp"
#include "ops/decomposed.hpp"

namespace flux::cuda {

namespace {

// One kernel gathers the operand, and cuBLAS computes the product: for few rows, where a copy engine takes longer to
// start than the gather takes.
void gather_and_compute(Problem const& p, Operands const& operands, Workspace& workspace, CallInfo const& info) {
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  LibraryGemm const gemm(p, operands);
  int64_t const rows = total_rows(p);
  at::Tensor const x =
      operands.gathered != nullptr ? gemm.matrix(operands.gathered, rows, p.k, p.k) : gemm.empty(rows, p.k);
  AllGatherArgs args{};
  args.shard = operands.x;
  args.gathered = x.data_ptr();
  args.num_vectors = p.rows * p.k * element_size(p.dtype) / 16;
  args.exchange = exchange_args(p, ExchangeForm::kGather, workspace, info, stream);
  check(all_gather(args, stream), "launching the all-gather");
  gemm.product(gemm.matrix(operands.y, rows, p.n, p.n), x, /*with_bias=*/true);
}

// Shards in line lie across the slots of the region: of more than one peer, and what one has received there another one
// may yet have to receive. So all ranks tell each other that they have finished the calls before.
void wait_until_all_have_finished(Call& call, Problem const& p, cudaStream_t stream) {
  for (int step = 0; step < p.world - 1; ++step) {
    call.signal(call.finished(ag_push_peer(p.rank, p.world, step), p.rank));
  }
  call.join();  // where streams share a queue of the GPU, the wait must not stand before the signals
  Arrivals const all{0, p.world, 0, 1, /*step=*/0, /*of_calls=*/true};
  check(stream_wait_arrivals(stream, call.wait(), call.finished(p.rank, 0), all), "waiting for the peers");
  call.fork();
}

}  // namespace

void ag_gemm_decomposed(Problem const& p, Operands const& operands, Workspace& workspace, CallInfo const& info) {
  at::AutoDispatchBelowADInplaceOrView const no_autograd;
  if (decomposition_of(p).schedule == ChunkSchedule::kGather) return gather_and_compute(p, operands, workspace, info);
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceView const& view = workspace.view();
  AgSchedule const schedule = ag_schedule_of(p);
  bool const along_k = is_along_k(schedule.kind);

  LibraryGemm const gemm(p, operands);
  auto* const y = static_cast<std::byte*>(operands.y);
  at::Tensor const result = gemm.matrix(y, p.world * p.rows, p.n, p.n);
  bool const wide_sums = along_k && !sums_in_result(p.dtype, schedule.pieces.count());
  at::Tensor const sums = wide_sums ? at::empty(result.sizes(), result.options().dtype(at::kFloat)) : result;
  Call call(workspace, p, info, stream, BegunBy::kKernelOfItsOwn);

  int64_t const size = element_size(p.dtype);
  int64_t const row_bytes = p.k * size;
  auto const* const shard = static_cast<std::byte const*>(operands.x);
  // The shard of `source` at rank `r`: in its slot, but in a uniform schedule in line with all others.
  bool const in_line = is_uniform(schedule.kind);
  int64_t const shard_bytes = ag_shard_bytes(p.rows, p.k, size), stride = in_line ? shard_bytes : view.slot_bytes();
  TORCH_INTERNAL_ASSERT(in_line ? view.layout.region_bytes >= ag_region_bytes(p.world, p.rows, p.k, size)
                                : stride >= shard_bytes);
  auto const shard_at = [&](int r, int source) {
    return in_line ? view.region(r, call.parity()) + ag_shard_offset(source, p.rows, p.k, size)
                   : view.slot(r, source, call.parity());
  };
  auto const begin_of = [&](Block const& block) { return block.row * row_bytes + block.k * size; };
  auto const push = [&](AgPush const& one) {
    Block const block = schedule.block(one.piece);
    std::byte* const to = shard_at(one.peer, p.rank) + begin_of(block);
    std::byte const* const from = shard + begin_of(block);
    Epoch* const signal = call.arrived(one.peer, p.rank) + one.piece;
    if (block.ks == p.k) {
      call.push(to, from, block.rows * row_bytes, signal);
    } else {
      call.push_rows(to, from, row_bytes, block.ks * size, block.rows, signal);
    }
  };

  auto const compute = [&](AgProduct const& one, int step) {
    Block const& block = one.block;
    if (one.piece >= 0) {
      Arrivals const needed{one.first_source, one.num_sources, one.piece, 1, step};
      check(stream_wait_arrivals(stream, call.wait(), call.arrived(p.rank, 0), needed), "waiting for chunks");
    }
    std::byte const* const x = (one.piece >= 0 ? shard_at(p.rank, one.first_source) : shard) + begin_of(block);
    int64_t const row = one.first_source * p.rows + block.row;
    if (along_k) {
      gemm.add_product(sums, gemm.matrix(x, p.world * p.rows, block.ks, p.k), block.k);
    } else if (one.num_sources == 1 || (block.rows == p.rows && in_line)) {  // rows without a gap
      int64_t const rows = one.num_sources * block.rows;
      gemm.product(result.narrow(0, row, rows), gemm.matrix(x, rows, p.k, p.k), /*with_bias=*/true);
    } else {
      at::Tensor const out = gemm.batch(y + row * p.n * size, one.num_sources, p.rows * p.n, block.rows, p.n, p.n);
      gemm.batched_product(out, gemm.batch(x, one.num_sources, stride / size, block.rows, p.k, p.k));
    }
  };

  std::vector<AgPush> const pushes = schedule.pushes();
  std::vector<AgProduct> const products = schedule.products();
  call.fork();
  if (in_line && p.world > 2) wait_until_all_have_finished(call, p, stream);
  push(pushes.front());
  // Before the first wait, while the chunks are on their way: the product of the own shard, or its way to where the
  // uniform products take their operand.
  int step = 0;
  if (in_line) {
    check(cudaMemcpyAsync(shard_at(p.rank, p.rank), shard, shard_bytes, cudaMemcpyDeviceToDevice, stream),
          "copying the own shard");
  } else {
    compute(products[step], step);
    ++step;
  }
  for (size_t i = 1; i < pushes.size(); ++i) push(pushes[i]);
  for (; step < static_cast<int>(products.size()); ++step) compute(products[step], step);
  if (wide_sums) gemm.finish(result, sums);
  call.join();
  // Every shard has arrived when the last product is done.
  copy_gathered(p, operands, stream, [&](int source) { return shard_at(p.rank, source); });
}

}  // namespace flux::cuda
