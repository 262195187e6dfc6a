#include "cuda/alone.hpp"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "cuda/launch.hpp"
#include "kernels/predict.hpp"
#include "ops/backend.hpp"
#include "ops/data_type.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux::cuda {
namespace {

constexpr int64_t kRecordBytes = sizeof(FaultRecord);  // at the end of the scratch memory
constexpr uint64_t kTimeoutNs = 5'000'000'000;

WorkspaceLayout layout_of(Problem const& problem) {
  if (problem.op == Op::kAgGemm) return make_workspace_layout({});
  return make_workspace_layout(workspace_needs(problem));
}

}  // namespace

Problem alone_problem(Op op, at::Tensor const& x, at::Tensor const& weight, int world, std::string const& config) {
  TORCH_CHECK_VALUE(world >= 2, "a kernel is made for the chunks of two ranks or more, not of ", world, ".");
  int64_t const shards = op == Op::kGemmAr ? 1 : world;  // of the rows
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && x.size(0) % shards == 0 &&
                        x.is_contiguous() && weight.is_contiguous() && x.scalar_type() == weight.scalar_type(),
                    "x [M, K] and weight [N, K] must be contiguous, of one dtype, and M a multiple of ", shards, ".");
  auto const* row = find_data_type([&](DataTypeRow const& r) { return r.scalar == x.scalar_type(); });
  TORCH_CHECK_NOT_IMPLEMENTED(row != nullptr, "x has dtype ", x.scalar_type(), ".");
  Problem const problem{op, world - 1, world, x.size(0) / shards, weight.size(0), x.size(1), row->type, false, config};
  std::string const why_not = why_no_kernel(problem);
  TORCH_CHECK_NOT_IMPLEMENTED(why_not.empty(), why_not);
  return problem;
}

at::Tensor alone_scratch(Problem const& problem, c10::Device device) {
  WorkspaceLayout const layout = layout_of(problem);
  at::Tensor const scratch =
      at::zeros({layout.total_bytes() + kRecordBytes}, at::TensorOptions(at::kByte).device(device));
  scratch.narrow(0, WorkspaceLayout::slots_offset(), 2 * layout.exchange_bytes).fill_(0xff);  // empty
  return scratch;
}

at::Tensor run_alone(Problem const& problem, at::Tensor const& x, at::Tensor const& weight, at::Tensor const& scratch) {
  c10::OptionalDeviceGuard const device_guard(x.device());
  cudaStream_t const stream = at::cuda::getCurrentCUDAStream();
  WorkspaceLayout const layout = layout_of(problem);
  TORCH_CHECK_VALUE(scratch.nbytes() >= static_cast<size_t>(layout.total_bytes() + kRecordBytes),
                    "scratch is too small.");
  std::shared_ptr<LaunchPlan const> const plan = make_launch_plan(problem);
  bool const ag = problem.op == Op::kAgGemm, few = plan->few_rows >= 0;
  at::Tensor const y = at::empty({ag || few ? x.size(0) : problem.rows, problem.n}, x.options());

  WorkspaceView view{"", problem.rank, problem.world, layout, {}};
  for (int r = 0; r < problem.world; ++r) view.base[r] = static_cast<std::byte*>(scratch.mutable_data_ptr());
  ControlWords& control = view.control(problem.rank);
  Operands const operands{
      x.const_data_ptr(), weight.const_data_ptr(), problem.k, nullptr, y.mutable_data_ptr(), nullptr};
  // Zeros are the signals of epoch 0: all that the kernel waits for is there.
  SignalWait wait{};
  wait.timeout_ns = kTimeoutNs;
  wait.fault = reinterpret_cast<FaultRecord*>(view.base[0] + layout.total_bytes());
  wait.fault_claim = &control.local.fault_claim;
  if (few) {
    Problem only = problem;
    only.rank = 0;
    only.world = 1;
    only.rows = x.size(0);
    launch_few_rows(only, *plan, operands, exchange_args(only, plan->form, view, wait), stream);
    return y;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(problem.op != Op::kGemmAr, "a gemm_ar for many rows doesn't run alone.");
  Launchers const& kernel = kLaunchers[plan->choice.kernel];
  Epoch* const arrived = control.signals.arrived[0][0];
  if (ag) {
    auto args = kernel_args<AgGemmArgs>(problem, *plan, operands, arrived, wait);
    int64_t const shard_bytes = ag_shard_bytes(problem.rows, problem.k, element_size(problem.dtype));
    args.shard = static_cast<std::byte const*>(operands.x) + problem.rank * shard_bytes;
    args.gathered = operands.x;  // the slots of the last rank are in the order of the ranks
    args.slot_bytes = shard_bytes;
    check(kernel.ag_gemm[element_index(problem.dtype)](args, stream), "launching ag_gemm");
  } else {
    auto args = kernel_args<GemmRsArgs>(problem, *plan, operands, arrived, wait);
    args.x = operands.x;
    args.y_stride = problem.rows * problem.n;
    args.slot_bytes = view.slot_bytes();
    args.send = view.send_region(0);
    args.staged = view.region(problem.rank, 0);
    args.tiles_done = control.local.tiles_done[0];
    args.parts = interleaved_parts(plan->pieces, plan->choice.same_order);
    check(kernel.gemm_rs[element_index(problem.dtype)](args, stream), "launching gemm_rs");
  }
  return y;
}

}  // namespace flux::cuda
