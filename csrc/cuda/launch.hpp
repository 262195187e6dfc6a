#pragma once
// What the two ops of the CUDA backend share.

#include "cuda/workspace.hpp"
#include "kernels/choose.hpp"
#include "ops/problem.hpp"

namespace flux::cuda {

// The configuration that the problem names, or the default choice.
LaunchChoice launch_choice(Problem const& problem);

// How the partials of gemm_rs travel: both ends compute it alike.
struct RsPlan {
  LaunchChoice choice;
  TileOrder order;
  Pieces pieces;  // of the tile positions
  int64_t tile_bytes;
};
RsPlan rs_plan(Problem const& problem);

// The arguments that both kernels have.
template <class Args>
Args kernel_args(Problem const& problem, Operands const& operands, LaunchChoice const& choice, Epoch const* arrived,
                 SignalWait const& wait) {
  Args args{};
  args.rank = problem.rank;
  args.world = problem.world;
  args.rows = problem.rows;
  args.n = problem.n;
  args.k = problem.k;
  args.weight = operands.weight;
  args.weight_stride = operands.weight_stride;
  args.weight_transposed = problem.weight_transposed;
  args.bias = operands.bias;
  args.y = operands.y;
  args.arrived = arrived;
  args.swizzle = choice.swizzle;
  args.along_n = choice.along_n;
  args.wait = wait;
  return args;
}

template <class Args>
Args kernel_args(Problem const& problem, Operands const& operands, LaunchChoice const& choice, Call const& call) {
  return kernel_args<Args>(problem, operands, choice, call.arrived(problem.rank, 0), call.wait());
}

inline int element_index(DataType dtype) {
  return static_cast<int>(dtype == DataType::kBFloat16 ? Element16::kBFloat16 : Element16::kFloat16);
}

}  // namespace flux::cuda
