#pragma once
// How the CPU backend cuts a problem: a function of what the ranks agree on, so all of them cut alike.

#include "ops/problem.hpp"
#include "schedule/tile_order.hpp"

namespace flux::cpu {

constexpr int32_t kWantedPieces = 4;  // signals of a chunk
static_assert(kWantedPieces <= kMaxPieces);

struct Config {
  TileShape tile;
  TileOrder order;  // of the tiles in a chunk
  Pieces pieces;    // of a chunk: rows (ag_gemm) or tile positions (gemm_rs)
};
Config make_config(Problem const& problem);

// Worker threads of one call; 0 asks for the default.
void set_num_threads(int num_threads);
int num_threads(int world);

}  // namespace flux::cpu
