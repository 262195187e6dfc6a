// y[rows, n] = all_reduce(x[rows, k] . w[n, k]^T) + bias, the same bits on every rank
//
// Two-shot: the workers take tiles in the order of schedule/ar_schedule.hpp. The partial of another rank's chunk is
// rounded to the dtype and written into its owner's region; the tile that completes a chunk sends its signal. A tile of
// an own chunk waits for the peers' partials, adds them up in rank order, its own unrounded, in the accumulation type,
// and goes to y and to the regions of all peers; the last one of a chunk signals that. The calling thread meanwhile
// copies the reduced rows of the peers' chunks into y as they come.
//
// One-shot: the workers write the partial of each tile, rounded to the dtype, into the regions of all ranks, the own
// one too; the tile that completes a piece sends its signal to all. Then they add up all tiles, in rank order: what
// they add is the same on all ranks, and so is the sum.
//
// In both, each rank waits in each call for every signal of every peer. So the proof of cpu/protocol.hpp holds: whoever
// writes into a region in call e + 1 has received, in call e, from the rank that reads it, what that rank sent after it
// had finished call e - 1. Of the signals of two-shot, the partials of section s are waited for by the tiles of the own
// chunk of section s, of which there is at least one, though it may have no rows; the results by the calling thread.

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstring>

#include "cpu/config.hpp"
#include "cpu/staging.hpp"
#include "cpu/trace.hpp"
#include "cpu/worker_pool.hpp"
#include "ops/backend.hpp"
#include "ops/data_type.hpp"

namespace flux::cpu {
namespace {

at::Tensor product_of(Problem const& p, Operands const& o, int64_t row, TileRange const& range) {
  auto const* const x = static_cast<std::byte const*>(o.x) + row * p.k * element_size(p.dtype);
  return tile_product(p, o, view_matrix(p.dtype, x, range.rows, p.k, p.k), range);
}

void two_shot(Problem const& p, ArConfig const& config, Operands const& o, Exchange const& exchange) {
  ArSchedule const& schedule = config.schedule;
  int64_t const size = element_size(p.dtype);
  int32_t const tiles_per_chunk = config.order.num_tiles();
  int64_t const staged_tiles = int64_t{schedule.sections} * tiles_per_chunk;
  Staging const staging(p, exchange, config.tile, staged_tiles);
  Tracer tracer(schedule.num_chunks());
  std::atomic<int64_t> next_item{0};
  Countdown left(schedule.num_chunks());
  for (int i = 0; i < schedule.num_chunks(); ++i) left.set(i, tiles_per_chunk);

  // Row `row` of y, and column `col` of it, as the owner sends it to `rank`.
  auto const result_at = [&](int rank, int64_t row, int64_t col) {
    return exchange.region(rank) + ar_result_offset(p.world, staged_tiles, staging.tile_bytes(), row, p.n, size) +
           col * size;
  };
  auto const y_at = [&](int64_t row, int64_t col) { return static_cast<std::byte*>(o.y) + (row * p.n + col) * size; };

  auto const send = [&](ArChunk chunk, int64_t position, TileRange const& range) {
    at::Tensor const partial = product_of(p, o, schedule.begin(chunk) + range.row, range);
    staging.tile(chunk.owner, peer_slot(chunk.owner, p.world, p.rank), position, range).copy_(partial);
  };

  auto const wait_for_partials = [&](ArChunk chunk, int32_t tile) {
    for (int source = 0; source < p.world; ++source) {
      if (source != p.rank) exchange.wait(source, schedule.partial_piece(chunk.section), tile);
    }
    tracer.arrived(schedule.index(chunk));
  };

  auto const reduce = [&](ArChunk chunk, int32_t tile, int64_t position, TileRange const& range) {
    int64_t const row = schedule.begin(chunk) + range.row;
    at::Tensor const own = product_of(p, o, row, range);
    wait_for_partials(chunk, tile);
    at::Tensor const total = add_in_rank_order(p.world, [&](int source) {
      if (source == p.rank) return own;
      return staging.tile(p.rank, peer_slot(p.rank, p.world, source), position, range).to(own.scalar_type());
    });
    write_result(p, o, total, row, range);
    at::Tensor const result = view_matrix(p.dtype, y_at(row, range.col), range.rows, range.cols, p.n);
    for (int step = 0; step < p.world - 1; ++step) {
      std::byte* const there = result_at(ag_push_peer(p.rank, p.world, step), row, range.col);
      view_matrix(p.dtype, there, range.rows, range.cols, p.n).copy_(result);
    }
  };

  auto const finish = [&](ArChunk chunk) {
    if (chunk.owner != p.rank) {
      exchange.signal(chunk.owner, schedule.partial_piece(chunk.section));
    } else {
      for (int step = 0; step < p.world - 1; ++step) {
        exchange.signal(ag_push_peer(p.rank, p.world, step), schedule.result_piece(chunk.section));
      }
    }
    tracer.done(schedule.index(chunk));
  };

  auto const work = [&] {
    at::AutoDispatchBelowADInplaceOrView const no_autograd;
    for (int64_t item; (item = next_item.fetch_add(1)) < int64_t{tiles_per_chunk} * schedule.num_chunks();) {
      ArChunk const chunk = schedule.chunk_at(p.rank, static_cast<int>(item / tiles_per_chunk));
      int32_t const tile = static_cast<int32_t>(item % tiles_per_chunk);
      int64_t const position = int64_t{chunk.section} * tiles_per_chunk + tile;
      TileRange const range = tile_range(schedule.size(chunk), p.n, config.tile, config.order.tile_at(tile));
      if (chunk.owner != p.rank) {
        if (range.rows > 0) send(chunk, position, range);
      } else if (range.rows > 0) {
        reduce(chunk, tile, position, range);
      } else {
        wait_for_partials(chunk, tile);
      }
      if (left.finish_one(schedule.index(chunk))) finish(chunk);
    }
  };

  auto const receive = [&] {
    for (int section = 0; section < schedule.sections; ++section) {
      for (int step = 0; step < p.world - 1; ++step) {
        ArChunk const chunk{section, rs_chunk(p.rank, p.world, step)};
        exchange.wait(chunk.owner, schedule.result_piece(section), schedule.index(chunk), "chunk");
        int64_t const row = schedule.begin(chunk);
        std::memcpy(y_at(row, 0), result_at(p.rank, row, 0), schedule.size(chunk) * p.n * size);
      }
    }
  };
  run_workers(num_threads(p.world), work, receive, [&] { exchange.cancel(); });
  tracer.publish();
}

void one_shot(Problem const& p, ArConfig const& config, Operands const& o, Exchange const& exchange) {
  int32_t const num_tiles = config.order.num_tiles();
  Staging const staging(p, exchange, config.tile, num_tiles);
  Tracer tracer(config.pieces.count());
  std::atomic<int64_t> next_item{0};
  Countdown to_send(config.pieces.count()), to_reduce(config.pieces.count());
  for (int piece = 0; piece < config.pieces.count(); ++piece) {
    to_send.set(piece, config.pieces.size(piece));
    to_reduce.set(piece, config.pieces.size(piece));
  }

  auto const send = [&](int32_t tile, TileRange const& range) {
    at::Tensor const partial = product_of(p, o, range.row, range).to(row_of(p.dtype).scalar);
    for (int step = 0; step < p.world; ++step) {  // the own rank comes last
      staging.tile(ag_push_peer(p.rank, p.world, step), p.rank, tile, range).copy_(partial);
    }
    int const piece = config.pieces.piece_of(tile);
    if (!to_send.finish_one(piece)) return;
    for (int step = 0; step < p.world; ++step) exchange.signal(ag_push_peer(p.rank, p.world, step), piece);
  };

  auto const reduce = [&](int32_t tile, TileRange const& range) {
    int const piece = config.pieces.piece_of(tile);
    for (int source = 0; source < p.world; ++source) exchange.wait(source, piece, tile);
    tracer.arrived(piece);
    at::Tensor const total = add_in_rank_order(
        p.world, [&](int source) { return staging.tile(p.rank, source, tile, range).to(accumulation_type(p.dtype)); });
    write_result(p, o, total, range.row, range);
    if (to_reduce.finish_one(piece)) tracer.done(piece);
  };

  auto const work = [&] {
    at::AutoDispatchBelowADInplaceOrView const no_autograd;
    for (int64_t item; (item = next_item.fetch_add(1)) < int64_t{2} * num_tiles;) {
      int32_t const tile = static_cast<int32_t>(item % num_tiles);
      TileRange const range = tile_range(p.rows, p.n, config.tile, config.order.tile_at(tile));
      item < num_tiles ? send(tile, range) : reduce(tile, range);
    }
  };
  run_workers(num_threads(p.world), work, [] {}, [&] { exchange.cancel(); });
  tracer.publish();
}

}  // namespace

void gemm_ar(Problem const& p, Operands const& o, WorkspaceView const& workspace, CallInfo const& info) {
  Exchange const exchange(p, workspace, info);
  exchange.announce();
  ArConfig const config = make_ar_config(p);
  (config.one_shot ? one_shot : two_shot)(p, config, o, exchange);
}

}  // namespace flux::cpu
