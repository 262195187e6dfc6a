#pragma once
// Order in which a rank visits the chunks. Chunk c of an M-row operand is the block of M / world rows that rank c
// holds (ag_gemm) or owns in the result (gemm_rs). gemm_ar has chunks of its own: ar_schedule.hpp.
//
//   ag_gemm, world = 4            step 0   1   2   3
//     rank r computes chunk            r  r-1 r-2 r-3    own shard first, then in order of arrival
//     rank r pushes its shard to      r+1 r+2 r+3        one peer at a time, next rank first
//
//   gemm_rs, world = 4
//     rank r computes chunk           r+1 r+2 r+3  r     own chunk last: its peers' partials have arrived by then
//
//     The chunks of the peers are interleaved, piece by piece: rs_item in tile_order.hpp.
//
// With these orders every link carries one shard (gemm_rs: one piece) at a time in each step, and chunk r-s of rank r
// is the s-th push of rank r-s: what is needed first is sent first.
//
// What that is worth can be measured: a configuration whose name ends in kSameOrder lets every rank compute its chunks
// in the order of rank 0, one after the other. It is correct, too: a chunk's owner waits for its peers, and none of
// them has a chunk to wait for that comes later in the common order.

#include "schedule/host_device.hpp"

namespace flux {

inline constexpr char kSameOrder[] = "/same-order";

FLUX_HD int wrap_rank(int r, int world) { return r < 0 ? r + world : (r >= world ? r - world : r); }

// Chunk that `rank` computes in `step` of ag_gemm, step in [0, world).
FLUX_HD int ag_chunk(int rank, int world, int step) { return wrap_rank(rank - step, world); }

// Peer to which `rank` makes its push number `step`, step in [0, world - 1).
FLUX_HD int ag_push_peer(int rank, int world, int step) { return wrap_rank(rank + 1 + step, world); }

// Chunk that `rank` computes in `step` of gemm_rs, step in [0, world). In each step but the last it is also the
// rank to which the partial is sent.
FLUX_HD int rs_chunk(int rank, int world, int step) { return wrap_rank(rank + 1 + step, world); }

// Slot, in a region of `rank`, for what `peer` != rank writes there: 0 .. world - 2. The peers of higher rank come
// first, and neighbours among them lie side by side, as do those of lower rank.
FLUX_HD int peer_slot(int rank, int world, int peer) { return wrap_rank(peer - rank - 1, world); }

// Peer that writes in slot `slot` of `rank`: the inverse of peer_slot.
FLUX_HD int slot_peer(int rank, int world, int slot) { return wrap_rank(rank + 1 + slot, world); }

}  // namespace flux
