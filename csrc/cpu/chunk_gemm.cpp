#include "cpu/chunk_gemm.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mm.h>

#include "cpu/tile_gemm.hpp"
#include "cpu/worker_pool.hpp"

namespace flux::cpu {

ChunkGemm::ChunkGemm(Problem const& p, Operands const& o) : problem_(p), operands_(o) {
  int64_t const rows = p.weight_transposed ? p.k : p.n, cols = p.weight_transposed ? p.n : p.k;
  at::Tensor const stored = view_matrix(p.dtype, o.weight, rows, cols, o.weight_stride);
  weight_ = (p.weight_transposed ? stored : stored.t()).to(accumulation_type(p.dtype));
}

at::Tensor ChunkGemm::product(at::Tensor const& x, int64_t k) const {
  return at::mm(x.to(weight_.scalar_type()), weight_.narrow(0, k, x.size(1)));
}

void ChunkGemm::write(at::Tensor const& total, int64_t row) const {
  write_result(problem_, operands_, total, row, {row, total.size(0), 0, problem_.n});
}

void run_beside(std::function<void()> const& products, std::function<void()> const& pushes, Exchange const& exchange) {
  auto const on_this_thread = [&] {
    at::AutoDispatchBelowADInplaceOrView const no_autograd;
    products();
  };
  run_workers(1, pushes, on_this_thread, [&] { exchange.cancel(); });
}

}  // namespace flux::cpu
