#pragma once
// How the CPU backend cuts a problem: a function of what the ranks agree on, so all of them cut alike.

#include "ops/problem.hpp"
#include "schedule/ar_schedule.hpp"
#include "schedule/tile_order.hpp"

namespace flux::cpu {

// ag_gemm and gemm_rs, by name "t128x256/p4": tiles of 128 x 256, chunks in at most 4 pieces; "/same-order" at the end:
// see chunk_order.hpp.
struct Config {
  TileShape tile;
  TileOrder order;  // of the tiles in a chunk
  Pieces pieces;    // of a chunk: rows (ag_gemm) or tile positions (gemm_rs)
  int order_rank;   // whose order of chunks is taken
  Pieces parts;     // gemm_rs: of the tile positions, for rs_item
};
// The configuration that the problem names, or else the default choice.
Config make_config(Problem const& problem);

// gemm_ar, by name "two-shot/t128x256/s2": at most 2 sections; or "one-shot/t64x64/p4": y in at most 4 pieces.
struct ArConfig {
  bool one_shot;
  TileShape tile;
  TileOrder order;      // of the tiles in a chunk; one-shot: in y
  ArSchedule schedule;  // two-shot
  Pieces pieces;        // one-shot: of the tile positions
};
ArConfig make_ar_config(Problem const& problem);

// Worker threads of one call; 0 asks for the default.
void set_num_threads(int num_threads);
int num_threads(int world);

}  // namespace flux::cpu
