#pragma once
// What gemm_rs and gemm_ar do with the partials of a section: gemm_rs has one section.

#include "cuda/launch.hpp"
#include "schedule/chunk_order.hpp"

namespace flux::cuda {

// Enqueues a push of each piece of the peers' chunks, in the order in which the kernel completes them (ar_item).
inline void push_partials(Call& call, WorkspaceView const& view, LaunchPlan const& plan, GemmRsArgs const& args,
                          int section) {
  int const rank = args.rank, world = args.world, count = args.pieces.count();
  int32_t const per_chunk = plan.order.num_tiles();
  auto* const done = view.control(rank).local.tiles_done;
  for (int i = 0; i < world * count; ++i) {
    auto const [step, piece] = rs_piece(i, world, args.pieces, args.parts);
    int const owner = rs_chunk(args.order_rank, world, step), number = section * count + piece;
    if (owner == rank) continue;
    // There the own chunk lies in the middle: what comes after it waits for the peers, as the results of a gemm_ar do.
    if (plan.choice.same_order) call.meet();
    int64_t const begin = int64_t{section} * per_chunk + args.pieces.begin(piece);
    int32_t const tiles = args.pieces.size(piece);
    int64_t const offset = begin * plan.tile_bytes;
    call.push_tiles(&done[owner][number], tiles, view.slot(owner, rank, call.parity()) + offset,
                    view.to_send(owner, call.parity()) + offset, tiles * plan.tile_bytes,
                    call.arrived(owner, rank) + number);
  }
}

}  // namespace flux::cuda
