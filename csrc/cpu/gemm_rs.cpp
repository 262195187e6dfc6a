// y[rows, n] = reduce_scatter(x[world * rows, k] . w[n, k]^T) + bias
//
// The workers take tiles in the order of the schedule, own chunk last. The partial of another rank's chunk is rounded
// to the dtype and written straight into its owner's region; the tile that completes a piece sends the piece's signal.
// A tile of the own chunk waits for the same piece of every peer, then adds the partials in rank order, its own
// unrounded, in the accumulation type: the result does not depend on timing.

#include <ATen/core/LegacyTypeDispatch.h>

#include "cpu/config.hpp"
#include "cpu/staging.hpp"
#include "cpu/trace.hpp"
#include "cpu/worker_pool.hpp"
#include "ops/backend.hpp"
#include "schedule/chunk_order.hpp"

namespace flux::cpu {

void gemm_rs(Problem const& p, Operands const& o, WorkspaceView const& workspace, CallInfo const& info) {
  Config const config = make_config(p);
  Exchange const exchange(p, workspace, info);
  int const num_pieces = config.pieces.count();
  Tracer tracer(p.world, num_pieces);
  exchange.announce();

  int64_t const size = element_size(p.dtype);
  int32_t const num_tiles = config.order.num_tiles();
  Staging const staging(p, exchange, config.tile, num_tiles);
  std::atomic<int64_t> next_item{0};
  Countdown tiles_left(p.world * num_pieces);
  auto const number_of = [&](int chunk, int piece) { return chunk * num_pieces + piece; };
  for (int chunk = 0; chunk < p.world; ++chunk) {
    for (int piece = 0; piece < num_pieces; ++piece) tiles_left.set(number_of(chunk, piece), config.pieces.size(piece));
  }

  auto const reduce = [&](int32_t position, TileRange const& range, at::Tensor const& own) {
    at::Tensor const total = add_in_rank_order(p.world, [&](int source) {
      if (source == p.rank) return own;
      exchange.wait(source, config.pieces.piece_of(position), position);
      return staging.tile(p.rank, peer_slot(p.rank, p.world, source), position, range).to(own.scalar_type());
    });
    tracer.arrived(p.rank, config.pieces.piece_of(position));
    write_result(p, o, total, range.row, range);
  };

  auto const work = [&] {
    at::AutoDispatchBelowADInplaceOrView const no_autograd;
    for (int64_t item; (item = next_item.fetch_add(1)) < int64_t{num_tiles} * p.world;) {
      auto const [step, position] = rs_item(static_cast<int32_t>(item), p.world, config.parts);
      int const chunk = rs_chunk(config.order_rank, p.world, step);
      TileRange const range = tile_range(p.rows, p.n, config.tile, config.order.tile_at(position));
      auto const* const x = static_cast<std::byte const*>(o.x) + (chunk * p.rows + range.row) * p.k * size;
      at::Tensor const partial = tile_product(p, o, view_matrix(p.dtype, x, range.rows, p.k, p.k), range);
      if (chunk == p.rank) {
        reduce(position, range, partial);
      } else {
        staging.tile(chunk, peer_slot(chunk, p.world, p.rank), position, range).copy_(partial);
      }
      int const piece = config.pieces.piece_of(position);
      if (!tiles_left.finish_one(number_of(chunk, piece))) continue;
      if (chunk != p.rank) exchange.signal(chunk, piece);
      tracer.done(chunk, piece);
    }
  };
  run_workers(num_threads(p.world), work, [] {}, [&] { exchange.cancel(); });
  tracer.publish();
}

}  // namespace flux::cpu
