#pragma once
// What the two ops of the CUDA backend share.

#include "cuda/workspace.hpp"
#include "kernels/choose.hpp"
#include "ops/problem.hpp"

namespace flux::cuda {

// The configuration that the problem names, or the default choice.
LaunchChoice launch_choice(Problem const& problem);

// What the ranks must have in common to exchange data in a call.
uint64_t digest_of(Problem const& problem, LaunchChoice const& choice, bool has_bias);

// How the partials of gemm_rs travel: both ends compute it alike.
struct RsPlan {
  LaunchChoice choice;
  TileOrder order;
  Pieces pieces;  // of the tile positions
  int64_t tile_bytes;
};
RsPlan rs_plan(Problem const& problem);

inline int element_index(DataType dtype) {
  return static_cast<int>(dtype == DataType::kBFloat16 ? Element16::kBFloat16 : Element16::kFloat16);
}

}  // namespace flux::cuda
