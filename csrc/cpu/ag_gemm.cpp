// y[world * rows, n] = all_gather(x[rows, k]) . w[n, k]^T + bias
//
// The calling thread pushes the own shard into the region of each peer, piece by piece, next rank first. Meanwhile the
// workers take tiles in the order of the schedule, own chunk first; a tile of another rank's chunk waits for the last
// piece that holds one of its rows. The own shard is read where it lies.

#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "cpu/config.hpp"
#include "cpu/protocol.hpp"
#include "cpu/tile_gemm.hpp"
#include "cpu/trace.hpp"
#include "cpu/worker_pool.hpp"
#include "ops/backend.hpp"
#include "schedule/chunk_order.hpp"

namespace flux::cpu {
namespace {

void push_shard(Problem const& p, Config const& config, Operands const& o, Exchange const& exchange) {
  int64_t const row_bytes = p.k * element_size(p.dtype);
  int64_t const shard = ag_shard_offset(p.rank, p.rows, p.k, element_size(p.dtype));
  for (int step = 0; step < p.world - 1; ++step) {
    int const peer = ag_push_peer(p.rank, p.world, step);
    for (int piece = 0; piece < config.pieces.count(); ++piece) {
      int64_t const begin = config.pieces.begin(piece) * row_bytes;
      std::memcpy(exchange.region(peer) + shard + begin, static_cast<std::byte const*>(o.x) + begin,
                  config.pieces.size(piece) * row_bytes);
      exchange.signal(peer, piece);
    }
  }
}

}  // namespace

void ag_gemm(Problem const& p, Operands const& o, WorkspaceView const& workspace, CallInfo const& info) {
  Config const config = make_config(p);
  Exchange const exchange(p, workspace, info);
  Tracer tracer(p.world);
  exchange.announce();

  int64_t const size = element_size(p.dtype);
  int32_t const tiles_per_chunk = config.order.num_tiles();
  // The work of a chunk: its tiles, and the copy into the gathered output where that is asked for.
  int64_t const items_per_chunk = tiles_per_chunk + (o.gathered != nullptr ? 1 : 0);
  std::atomic<int64_t> next_item{0};
  std::vector<std::atomic<int64_t>> left(p.world);
  for (auto& l : left) l = items_per_chunk;

  auto const shard_of = [&](int chunk) -> std::byte const* {
    if (chunk == p.rank) return static_cast<std::byte const*>(o.x);
    return exchange.region(p.rank) + ag_shard_offset(chunk, p.rows, p.k, size);
  };
  auto const wait_for = [&](int chunk, int piece, int tile) {
    if (chunk != p.rank) {
      exchange.wait(chunk, piece, tile);
      tracer.arrived(chunk);
    }
  };

  auto const work = [&] {
    at::AutoDispatchBelowADInplaceOrView const no_autograd;
    for (int64_t item; (item = next_item.fetch_add(1)) < items_per_chunk * p.world;) {
      int const chunk = ag_chunk(config.order_rank, p.world, static_cast<int>(item / items_per_chunk));
      int32_t const position = static_cast<int32_t>(item % items_per_chunk);
      if (position < tiles_per_chunk) {
        TileRange const range = tile_range(p.rows, p.n, config.tile, config.order.tile_at(position));
        wait_for(chunk, config.pieces.piece_of(static_cast<int32_t>(range.row + range.rows - 1)), position);
        at::Tensor const x_rows = view_matrix(p.dtype, shard_of(chunk) + range.row * p.k * size, range.rows, p.k, p.k);
        write_result(p, o, tile_product(p, o, x_rows, range), chunk * p.rows + range.row, range);
      } else {
        wait_for(chunk, config.pieces.count() - 1, position);
        std::memcpy(static_cast<std::byte*>(o.gathered) + chunk * p.rows * p.k * size, shard_of(chunk),
                    p.rows * p.k * size);
      }
      if (left[chunk].fetch_sub(1) == 1) tracer.done(chunk);
    }
  };
  run_workers(num_threads(p.world), work, [&] { push_shard(p, config, o, exchange); }, [&] { exchange.cancel(); });
  tracer.publish();
}

}  // namespace flux::cpu
