#pragma once
// How the host starts a kernel: plain arguments in, an error code out. No torch, no CUTLASS.

#include <cuda_runtime.h>

#include "comm/replay.hpp"
#include "schedule/tile_order.hpp"

namespace flux {

//   y[c * rows + i, :] = A_c[i, :] . w^T + bias      A_c = shard for c = rank, gathered[slot of c] else
struct AgGemmArgs {
  int rank, world;
  int sections;    // 1
  int order_rank;  // whose order of chunks is taken
  int64_t rows, n, k;
  void const* shard;     // [rows, k], this rank's x
  void const* gathered;  // [slot of the source][rows, k], filled by the peers
  int64_t slot_bytes;    // from slot to slot
  void const* weight;
  int64_t weight_stride;
  bool weight_transposed;
  void const* bias;      // [n] or null
  void* y;               // [world * rows, n]
  Epoch const* arrived;  // [source][kMaxPieces]
  Pieces pieces;         // of the rows of a shard
  int swizzle;
  bool along_n;
  SignalWait wait;
  ReplayedCall replayed;
};

//   partial_c = x_c . w^T for each chunk c; the tiles of other owners' chunks go to `send`, those of the own
//   chunks become y_c = sum over ranks, in rank order, of the partials of chunk c, + bias
// gemm_rs has one section, gemm_ar as many as pay (schedule/ar_schedule.hpp): chunk c = section * world + owner.
struct GemmRsArgs {
  int rank, world;
  int sections;
  int order_rank;  // whose order of chunks is taken
  int64_t rows, n, k;
  void const* x;  // [sections * world * rows, k]
  void const* weight;
  int64_t weight_stride;
  bool weight_transposed;
  void const* bias;
  void* y;  // [rows, n] of each section, y_stride elements apart
  int64_t y_stride;
  bool counts_own;       // tiles_done[rank] counts the tiles of y, too
  int64_t slot_bytes;    // from slot to slot, of the next two
  void* send;            // [slot of the destination][section][tile position][tile]
  void const* staged;    // [slot of the source][section][tile position][tile]
  uint32_t* tiles_done;  // [destination][kMaxPieces], counts tiles; a piece's number is section * pieces + piece
  Epoch const* arrived;  // [source][kMaxPieces]
  Pieces pieces;         // of the tile positions of a chunk
  Pieces parts;          // of the tile positions of a chunk, which ar_item interleaves with those of other chunks
  int swizzle;
  bool along_n;
  SignalWait wait;
  ReplayedCall replayed;
};

}  // namespace flux
