// y[world * rows, n] = all_gather(x[rows, k]) . w[n, k]^T + bias, as a sequence of ATen GEMMs on chunks
//
// A second thread pushes the own shard into the region of each peer, chunk by chunk. Meanwhile the calling thread makes
// the products of the schedule, each as soon as the chunks that it needs have come. See schedule/chunk_schedule.hpp.

#include <cstring>

#include "cpu/chunk_gemm.hpp"
#include "cpu/tile_gemm.hpp"
#include "ops/backend.hpp"
#include "ops/decomposed.hpp"

namespace flux::cpu {

void ag_gemm_decomposed(Problem const& p, Operands const& o, WorkspaceView const& workspace, CallInfo const& info) {
  AgSchedule const schedule = ag_schedule_of(p);
  Exchange const exchange(p, workspace, info);
  exchange.announce();

  int64_t const size = element_size(p.dtype);
  int64_t const row_bytes = p.k * size;
  auto const shard_of = [&](int source) -> std::byte const* {
    if (source == p.rank) return static_cast<std::byte const*>(o.x);
    return exchange.region(p.rank) + ag_shard_offset(source, p.rows, p.k, size);
  };

  auto const push = [&] {
    int64_t const own = ag_shard_offset(p.rank, p.rows, p.k, size);
    for (AgPush const& one : schedule.pushes()) {
      Block const block = schedule.block(one.piece);
      int64_t const begin = block.row * row_bytes + block.k * size;
      std::byte* const to = exchange.region(one.peer) + own + begin;
      std::byte const* const from = shard_of(p.rank) + begin;
      if (block.ks == p.k) {
        std::memcpy(to, from, block.rows * row_bytes);
      } else {
        for (int64_t r = 0; r < block.rows; ++r) std::memcpy(to + r * row_bytes, from + r * row_bytes, block.ks * size);
      }
      exchange.signal(one.peer, one.piece);
    }
  };

  auto const compute = [&] {
    ChunkGemm const gemm(p, o);
    at::Tensor sums[kMaxWorld];  // 2d: of the products so far, by source
    int step = 0;
    for (AgProduct const& one : schedule.products()) {
      Block const& block = one.block;
      for (int source = one.first_source; source < one.first_source + one.num_sources; ++source) {
        if (source != p.rank) exchange.wait(source, one.piece, step, "step");
        std::byte const* const x = shard_of(source) + block.row * row_bytes + block.k * size;
        at::Tensor total = gemm.product(view_matrix(p.dtype, x, block.rows, block.ks, p.k), block.k);
        if (block.k > 0) total = sums[source].add_(total);
        sums[source] = total;
        if (block.k + block.ks == p.k) gemm.write(total, source * p.rows + block.row);
      }
      ++step;
    }
    if (o.gathered == nullptr) return;
    for (int source = 0; source < p.world; ++source) {
      std::memcpy(static_cast<std::byte*>(o.gathered) + ag_shard_offset(source, p.rows, p.k, size), shard_of(source),
                  ag_shard_bytes(p.rows, p.k, size));
    }
  };
  run_beside(compute, push, exchange);
}

}  // namespace flux::cpu
