#pragma once
// What the mainloop and the epilogue of gemm_rs share: where partials lie, and of which shape they are.
//
// Both ends run the same kernel, so a tile travels as raw fragments [vector][thread], 16 bytes each: every store and
// load is coalesced, and the owner's loads land on its own accumulators.

#include "comm/signal.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "schedule/ar_schedule.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

struct RsTransport {
  int rank = 0, world = 1, sections = 1;
  int order_rank = 0;  // whose order of chunks is taken
  bool counts_own = false;
  TileOrder order{};
  Pieces pieces{0, 1};              // of the tile positions of a chunk
  uint8_t* send = nullptr;          // [slot of the destination][section][position][tile]
  uint8_t const* staged = nullptr;  // [slot of the source][section][position][tile]
  uint32_t* tiles_done = nullptr;   // [destination][kMaxPieces]
  Epoch const* arrived = nullptr;   // [source][kMaxPieces]
  SignalWait wait{};

  // Of the tile at `position` of a chunk of `section`.
  FLUX_HD int piece(int section, int position) const { return section * pieces.count() + pieces.piece_of(position); }
  FLUX_HD int64_t offset(int slot, int section, int position, int64_t tile_bytes) const {
    int const per_chunk = order.num_tiles();
    return rs_tile_offset(slot, section * per_chunk + position, sections * per_chunk, tile_bytes);
  }
  FLUX_HD uint32_t* counter(int owner, int piece) const { return tiles_done + owner * kMaxPieces + piece; }
};

// Threads: of the warpgroups that hold one tile.
template <class TileShapeMNK, int Threads>
struct RsFragments {
  static constexpr int kAccumulators = cute::size<0>(TileShapeMNK{}) * cute::size<1>(TileShapeMNK{}) / Threads;
  static constexpr int kVectors = kAccumulators / 8;  // 16-byte vectors of a thread
  static constexpr int kVectorBytes = Threads * 16;
  static constexpr int64_t kTileBytes =
      rs_tile_bytes(cute::size<0>(TileShapeMNK{}), cute::size<1>(TileShapeMNK{}), /*element_size=*/2);
  static_assert(kTileBytes == int64_t{kVectors} * kVectorBytes, "a tile is its fragments, nothing else");
};

// The threads of one warpgroup meet, at one of the barriers that CUTLASS leaves to its users.
CUTLASS_DEVICE void sync_warpgroup() {
  cutlass::arch::NamedBarrier::sync(cutlass::NumThreadsPerWarpGroup, uint32_t(cutlass::canonical_warp_group_idx()));
}

}  // namespace flux
