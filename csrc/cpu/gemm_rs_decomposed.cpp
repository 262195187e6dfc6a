// y[rows, n] = reduce_scatter(x[world * rows, k] . w[n, k]^T) + bias, as a sequence of ATen GEMMs on chunks
//
// The calling thread computes the partials, chunk by chunk, own chunk last. A second thread copies each to its owner
// when it is finished. At the end the partials are added up in rank order; all of them, the own one too, are rounded to
// the dtype before, as those of a plain reduce-scatter are.

#include <ATen/ops/empty.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

#include "cpu/chunk_gemm.hpp"
#include "cpu/staging.hpp"
#include "ops/backend.hpp"
#include "ops/data_type.hpp"
#include "ops/decomposed.hpp"

namespace flux::cpu {
namespace {

// How many of the products are finished: what an event is to a stream.
class Progress {
 public:
  void finish_one() {
    std::lock_guard<std::mutex> const lock(mutex_);
    ++finished_;
    changed_.notify_one();
  }
  // No further product will be finished.
  void end() {
    std::lock_guard<std::mutex> const lock(mutex_);
    ended_ = true;
    changed_.notify_one();
  }
  // False if the products ended before.
  bool wait_for(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_ >= count || ended_; });
    return finished_ >= count;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t finished_ = 0;
  bool ended_ = false;
};

}  // namespace

void gemm_rs_decomposed(Problem const& p, Operands const& o, WorkspaceView const& workspace, CallInfo const& info) {
  Pieces const pieces = make_chunks(p.rows, decomposition_of(p).chunks);
  std::vector<RsProduct> const products = rs_products(p.rank, p.world, p.rows, pieces);
  Exchange const exchange(p, workspace, info);
  exchange.announce();

  int64_t const size = element_size(p.dtype);
  std::vector<at::Tensor> partials(products.size());
  Progress progress;

  auto const push = [&] {
    for (size_t i = 0; i + 1 < products.size() && progress.wait_for(i + 1); ++i) {
      RsProduct const& one = products[i];
      int const slot = peer_slot(one.owner, p.world, p.rank);
      std::memcpy(exchange.region(one.owner) + rs_chunk_offset(slot, one.row, p.rows, p.n, size),
                  partials[i].const_data_ptr(), one.rows * p.n * size);
      exchange.signal(one.owner, one.piece);
    }
  };

  auto const reduce = [&](ChunkGemm const& gemm, at::Tensor const& own) {
    auto const part = [&](int source) {
      if (source == p.rank) return own.to(accumulation_type(p.dtype));
      for (int piece = 0; piece < pieces.count(); ++piece) exchange.wait(source, piece, p.world, "step");
      int64_t const offset = rs_chunk_offset(peer_slot(p.rank, p.world, source), 0, p.rows, p.n, size);
      at::Tensor const staged = view_matrix(p.dtype, exchange.region(p.rank) + offset, p.rows, p.n, p.n);
      return staged.to(accumulation_type(p.dtype));
    };
    gemm.write(add_in_rank_order(p.world, part), 0);
  };

  auto const compute = [&] {
    ChunkGemm const gemm(p, o);
    for (size_t i = 0; i < products.size(); ++i) {
      RsProduct const& one = products[i];
      auto const* const x = static_cast<std::byte const*>(o.x) + (one.owner * p.rows + one.row) * p.k * size;
      at::Tensor const product = gemm.product(view_matrix(p.dtype, x, one.rows, p.k, p.k), 0);
      partials[i] = product.to(row_of(p.dtype).scalar);
      progress.finish_one();
    }
    reduce(gemm, partials.back());
  };
  auto const compute_then_end = [&] {
    struct AtEnd {
      Progress& progress;
      ~AtEnd() { progress.end(); }
    } const at_end{progress};
    compute();
  };
  run_beside(compute_then_end, push, exchange);
}

}  // namespace flux::cpu
