#pragma once
// What the ops of the CUDA backend share.

#include "cuda/workspace.hpp"
#include "kernels/fused_choose.hpp"
#include "kernels/launchers.hpp"
#include "ops/problem.hpp"

namespace flux::cuda {

// What follows from a problem: all ranks compute it alike.
struct LaunchPlan {
  LaunchChoice choice;
  TileOrder order;     // of the tiles of a chunk
  Pieces pieces;       // of a chunk: rows (ag_gemm) or tile positions (gemm_rs, gemm_ar)
  int64_t tile_bytes;  // of a partial of gemm_rs and gemm_ar
  // For few rows there is nothing but these.
  int few_rows = -1;  // index into kFewRowsKernels
  ExchangeForm form{};
};

// Runs any op by a kernel for few rows (csrc/kernels/few_rows.cuh).
void run_few_rows(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Workspace& workspace,
                  CallInfo const& info);

// Launches a kernel for few rows.
void launch_few_rows(Problem const& problem, LaunchPlan const& plan, Operands const& operands,
                     ExchangeArgs const& exchange, cudaStream_t stream);

// The arguments of a kernel that exchanges its data by itself.
ExchangeArgs exchange_args(Problem const& problem, ExchangeForm form, WorkspaceView const& view,
                           SignalWait const& wait);
// The same; begins such a call.
ExchangeArgs exchange_args(Problem const& problem, ExchangeForm form, Workspace& workspace, CallInfo const& info,
                           cudaStream_t stream);

// The arguments that both kernels have.
template <class Args>
Args kernel_args(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Epoch const* arrived,
                 SignalWait const& wait) {
  Args args{};
  args.rank = problem.rank;
  args.order_rank = plan.choice.same_order ? 0 : problem.rank;
  args.world = problem.world;
  args.sections = plan.choice.sections;
  args.rows = problem.rows;
  args.n = problem.n;
  args.k = problem.k;
  args.weight = operands.weight;
  args.weight_stride = operands.weight_stride;
  args.weight_transposed = problem.weight_transposed;
  args.bias = operands.bias;
  args.y = operands.y;
  args.arrived = arrived;
  args.pieces = plan.pieces;
  args.swizzle = plan.choice.swizzle;
  args.along_n = plan.choice.along_n;
  args.wait = wait;
  return args;
}

template <class Args>
Args kernel_args(Problem const& problem, LaunchPlan const& plan, Operands const& operands, Call const& call) {
  auto args = kernel_args<Args>(problem, plan, operands, call.arrived(problem.rank, 0), call.wait());
  args.replayed = call.replayed();
  args.replayed.items = static_cast<uint32_t>(plan.order.num_tiles() * args.world * args.sections);
  return args;
}

inline int element_index(DataType dtype) {
  return static_cast<int>(dtype == DataType::kBFloat16 ? Element16::kBFloat16 : Element16::kFloat16);
}

}  // namespace flux::cuda
