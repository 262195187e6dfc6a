// What the CUDA backend can run, and what it needs for it.

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

#include "cuda/launch.hpp"
#include "kernels/exchange_choose.hpp"
#include "kernels/occupancy.hpp"
#include "kernels/predict.hpp"
#include "ops/backend.hpp"
#include "ops/decomposed.hpp"

namespace flux::cuda {

namespace {

FusedChoice fused_choice(Problem const& problem) {
  FusedChoice choice;
  TORCH_CHECK_VALUE(find_fused_choice(problem, &choice), "'", problem.config, "' is no configuration.");
  return choice;
}

LaunchPlan launch_plan(Problem const& problem) {
  FusedChoice const choice = fused_choice(problem);
  if (choice.is_few_rows()) {
    LaunchPlan plan{};
    plan.few_rows = choice.few_rows;
    plan.form = choice.form;
    return plan;
  }
  LaunchChoice const& many = choice.many_rows;
  TileShape const shape = kKernels[many.kernel].config.shape;
  auto const [order, pieces] = cut_chunk(problem, many);
  return {many, order, pieces, rs_tile_bytes(shape.tile_m, shape.tile_n, element_size(problem.dtype))};
}

}  // namespace

std::string config_name(Problem const& problem) { return fused_choice(problem).name(problem.op); }

std::vector<std::string> candidates(Problem const& problem) {
  std::vector<std::string> names;
  for (FusedChoice const& choice : fused_candidates(problem)) names.push_back(choice.name(problem.op));
  return names;
}

std::string config_names() {
  std::string names;
  for (KernelRow const& row : kKernels) names.append(names.empty() ? "" : " ").append(row.config.name);
  for (FewRowsRow const& row : kFewRowsKernels) names.append(" ").append(row.name);
  return names;
}

WorkspaceNeeds workspace_needs(Problem const& problem) {
  int const world = problem.world;
  if (problem.op == Op::kAgGemm) {  // a shard in each slot, or all shards at once
    int64_t const size = element_size(problem.dtype);
    int64_t const slots = region_of_slots(world, ag_shard_bytes(problem.rows, problem.k, size));
    return {std::max(slots, ag_region_bytes(world, problem.rows, problem.k, size)), 0};
  }
  int64_t const slot = problem.op == Op::kGemmAr ? ar_slot_bytes_at_most(problem) : largest_rs_slot_bytes(problem);
  return {region_of_slots(world, slot), exchange_bytes_at_most(problem)};
}

WorkspaceNeeds decomposed_needs(Problem const& problem) {
  if (problem.op == Op::kAgGemm) {
    return decomposition_of(problem).schedule == ChunkSchedule::kGather ? WorkspaceNeeds{} : workspace_needs(problem);
  }
  if (problem.op == Op::kGemmAr) return {0, exchange_bytes_at_most(problem)};
  return {region_of_slots(problem.world, rs_chunk_bytes(problem.rows, problem.n, element_size(problem.dtype))), 0};
}

std::shared_ptr<LaunchPlan const> make_launch_plan(Problem const& problem) {
  return std::make_shared<LaunchPlan>(launch_plan(problem));
}

std::shared_ptr<Workspace> make_workspace(WorkspaceView const& view) { return std::make_shared<Workspace>(view); }

void check_fault(Workspace const& workspace) { workspace.check_fault(); }

void set_spare_sms(int count) { spare_sms = count; }

bool is_captured(Workspace const& workspace) { return workspace.is_captured(); }

bool is_capturing() { return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None; }

}  // namespace flux::cuda
