#include "ops/dispatch.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "kernels/predict.hpp"
#include "ops/connections.hpp"
#include "ops/decomposed.hpp"

namespace flux {
namespace {

// Of the calls of all threads. It stays: one may still be calling while the process ends.
struct Last {
  std::mutex mutex;
  std::shared_ptr<Plan const> plan;
  DispatchCounts counts;
};
Last& last() {
  static auto* the_last = new Last;
  return *the_last;
}

constexpr char const* kNoCudaKernels = "this build of flux_ops has no CUDA kernels";

std::string backend_why_not(Problem const& problem, bool decomposed, c10::DeviceType device) {
  if (problem.world > kMaxWorld) {
    return "the group has " + std::to_string(problem.world) + " ranks; at most " + std::to_string(kMaxWorld) +
           " are supported";
  }
  if (device == c10::DeviceType::CPU) return (decomposed ? why_not_decomposed : cpu::why_not_fused)(problem);
#if defined(FLUX_WITH_CUDA)
  if (device == c10::DeviceType::CUDA) return (decomposed ? why_not_decomposed_on_cuda : why_no_kernel)(problem);
#endif
  return kNoCudaKernels;
}

std::string backend_why_fused_is_slower(Problem const& problem, c10::DeviceType device) {
  return device == c10::DeviceType::CUDA ? why_fused_does_not_pay(problem) : "";
}

// What "auto" runs where fused is slower, or can't run.
BesideFused backend_beside_fused(Problem const& problem, c10::DeviceType device) {
  BesideFused const beside = device == c10::DeviceType::CUDA ? beside_fused(problem) : BesideFused{};
  bool const runs = needs_workspace(beside.strategy) &&
                    backend_why_not(with_config(problem, beside.config), /*decomposed=*/true, device).empty();
  return runs ? beside : BesideFused{};
}

std::string config_name(Problem const& problem, Strategy strategy, c10::DeviceType device) {
  if (strategy == Strategy::kDecomposed) return decomposition_of(problem).name();
#if defined(FLUX_WITH_CUDA)
  if (device == c10::DeviceType::CUDA) return cuda::config_name(problem);
#endif
  return cpu::config_name(problem);
}

std::vector<std::string> backend_candidates(Problem const& problem, c10::DeviceType device) {
#if defined(FLUX_WITH_CUDA)
  if (device == c10::DeviceType::CUDA) return cuda::candidates(problem);
#endif
  return cpu::candidates(problem);
}

// The one of three that belongs to the op.
template <class Function>
Function of_op(Op op, Function ag_gemm, Function gemm_rs, Function gemm_ar) {
  return op == Op::kAgGemm ? ag_gemm : op == Op::kGemmRs ? gemm_rs : gemm_ar;
}

// Why a call needs no communication, or empty.
std::string why_local(Problem const& problem, bool return_gathered) {
  if (problem.world == 1) return "the group has one rank";
  bool const nothing_to_gather = problem.rows == 0 || problem.k == 0;
  if (nothing_to_gather || (problem.n == 0 && !return_gathered)) return "the product is empty";
  return {};
}

// The tuner's choice for the problem: that of rank 0, if the ranks agree, else that of this rank's own caches.
Tuned agree_on(CallSite const& site, Arguments const& args, Problem const& problem, bool wants_tuned) {
  bool const agrees = problem.world > 1 && settings().check_ranks;
  Tuned tuned;
  if (wants_tuned && (problem.rank == 0 || !agrees)) tuned = hooks().tuned(problem, args.x.device());
  return agrees ? hooks().agree(site, describe(args, problem), tuned) : tuned;
}

// Why a tuned choice can't run between ranks that are connected, or empty.
std::string why_not_tuned(Tuned const& tuned, Problem const& problem, c10::DeviceType device) {
  if (tuned.choice == "sequential") return {};
  if (!is_fused(tuned.choice) && !is_decomposed(tuned.choice)) return "there is no such strategy";
  return backend_why_not(problem, is_decomposed(tuned.choice), device);
}

// Why the ranks can't exchange data, or empty. They ask each other once. It is asked for whatever the problem is, so
// that all do, those too that have other GPUs or another build.
std::string const& why_not_connected(GroupState& state, CallSite const& site, c10::Device device) {
  DeviceState& on_device = state.on(device.type());
  if (!on_device.connection_known) {
    on_device.why_not_connected = hooks().why_not_connected(site, device);
    on_device.connection_known = true;
  }
  return on_device.why_not_connected;
}

std::shared_ptr<Plan const> make_plan(GroupState& state, CallSite const& site, Arguments const& args,
                                      Signature const& signature) {
  auto plan = std::make_shared<Plan>();
  Problem const& problem = signature.problem;
  plan->problem = problem;
  c10::Device const device = args.x.device();
  c10::OptionalDeviceGuard const device_guard(device);
  std::string const local = why_local(problem, signature.return_gathered);
  bool const several = state.world > 1;
  if (several) state.may_differ = true;
  Tuned const tuned = agree_on(site, args, problem, local.empty() && args.strategy == "auto");
  if (several) state.may_differ = false;

  std::string why_not, not_connected;
  BesideFused beside;
  if (local.empty() && args.strategy != "sequential") {
    not_connected = why_not_connected(state, site, device);
    why_not =
        problem.n == 0 ? "the product is empty" : backend_why_not(problem, is_decomposed(args.strategy), device.type());
    if (why_not.empty()) why_not = not_connected;
    if (args.strategy == "auto" && not_connected.empty()) beside = backend_beside_fused(problem, device.type());
  }
  std::string const slower = backend_why_fused_is_slower(problem, device.type());
  plan->choice = choose_strategy(args.strategy, local, why_not, slower, beside.strategy);
  if (args.strategy == "auto" && plan->choice.strategy == Strategy::kDecomposed) plan->problem.config = beside.config;
  plan->chosen_by = !local.empty()            ? ChosenBy::kNoCommunication
                    : args.strategy != "auto" ? ChosenBy::kCaller
                    : plan->choice.fell_back  ? ChosenBy::kFallback
                                              : ChosenBy::kModel;
  if (!tuned.choice.empty() && not_connected.empty()) {
    Problem const chosen = with_config(problem, std::string(asked_config(tuned.choice)));
    std::string const why_not_it = why_not_tuned(tuned, chosen, device.type());
    if (why_not_it.empty()) {
      plan->choice = {asked_strategy(tuned.choice), "tuned: " + tuned.origin};
      plan->chosen_by = ChosenBy::kTuner;
      plan->problem = chosen;
    } else {
      hooks().warn_once("the tuned choice '" + tuned.choice + "' is ignored (" + tuned.origin + "): " + why_not_it);
    }
  }
  Strategy const strategy = plan->choice.strategy;
  if (needs_workspace(strategy) && !plan->choice.refused) {
    plan->config = config_name(plan->problem, strategy, device.type());
    plan->needs = workspace_needs(plan->problem, strategy, device.type());
#if defined(FLUX_WITH_CUDA)
    if (device.is_cuda() && strategy == Strategy::kFused) plan->launch = cuda::make_launch_plan(plan->problem);
#endif
  }
  if (plan->choice.fell_back) {
    hooks().warn_once(std::string(site.op) + " falls back to strategy 'sequential', because " + plan->choice.reason);
  }
  state.keep_plan(signature, plan);
  return plan;
}

bool is_capturing(c10::Device device) {
#if defined(FLUX_WITH_CUDA)
  if (device.is_cuda()) return cuda::is_capturing();
#endif
  return false;
}

void ensure_workspace(Call& call, c10::Device device) {
  DeviceState& on_device = call.state->on(device.type());
  WorkspaceNeeds const& needs = call.plan->needs;
  if (on_device.view && on_device.view->layout.covers(needs)) return;
  TORCH_CHECK(!is_capturing(device), call.site.op, ": the workspace of group '", call.state->name,
              "' is not there yet, or too small for this call (", needs.region_bytes, " bytes of a region and ",
              needs.exchange_bytes,
              " of slots are needed) and can't grow while a CUDA "
              "graph is captured. Call flux_ops.prepare(...) with the largest M before the capture.");
  hooks().grow(call.site, device, needs);
  TORCH_CHECK(on_device.view && on_device.view->layout.covers(needs), call.site.op, ": the workspace of group '",
              call.state->name, "' did not grow.");
}

// A fault that an earlier call has met on the device breaks the group; nothing else tells the host of it.
void check_fault(GroupState& state, c10::DeviceType device) {
#if defined(FLUX_WITH_CUDA)
  DeviceState& on_device = state.on(device);
  if (!on_device.cuda) return;
  try {
    cuda::check_fault(*on_device.cuda);
    for (auto const& replaced : on_device.kept) cuda::check_fault(*replaced);
  } catch (c10::DistBackendError const& e) {
    state.broken = e.what_without_backtrace();
    throw;
  }
#endif
}

// What the call computes. Where it is refused, the ranks that may wait for this one are told.
Problem checked_problem(GroupState& state, CallSite const& site, Arguments const& args) {
  try {
    Problem problem = check_arguments(args, state.rank, state.world);
    c10::Device const device = args.x.device();
    DeviceState const& on_device = state.on(device.type());
    TORCH_CHECK_VALUE(!on_device.view || on_device.index == device.index() || args.strategy == "sequential", site.op,
                      ": group '", state.name, "' has its workspace on device ", int{on_device.index}, " but x is on ",
                      device, "; one process uses one device per group.");
    return problem;
  } catch (c10::Error const& e) {
    if (state.world > 1) {
      state.may_differ = true;
      hooks().refuse(site, e.what_without_backtrace());
    }
    throw;
  }
}

}  // namespace

// Whether a collective may be on its way while an op of this strategy runs.
//
// On GPUs both can hold SMs while they wait for a peer. On a rank where the collective starts first, some thread blocks
// of a fused kernel have to wait until others end; where the fused kernel starts first, the collective waits for its
// end. With two ranks that resolves itself: at least one kernel is there as a whole, so the other gets all that it
// needs. With more, two ranks may wait for each other's missing thread blocks, and both for the collective of a third.
// There the order has to be the same on all ranks: with CUDA_DEVICE_MAX_CONNECTIONS=1 it is that of the launches,
// except in a CUDA graph.
bool may_run_beside_collective(c10::Device device, std::string const& group_name, std::string const& strategy) {
  return !device.is_cuda() || strategy == "sequential" || (has_one_connection() && !is_capturing(device)) ||
         resolve_group("collective", group_name)->getSize() <= 2;
}

WorkspaceNeeds workspace_needs(Problem const& problem, Strategy strategy, c10::DeviceType device) {
  bool const decomposed = strategy == Strategy::kDecomposed;
#if defined(FLUX_WITH_CUDA)
  if (device == c10::DeviceType::CUDA) return (decomposed ? cuda::decomposed_needs : cuda::workspace_needs)(problem);
#endif
  TORCH_CHECK(device == c10::DeviceType::CPU, kNoCudaKernels, ".");
  return (decomposed ? cpu::decomposed_needs : cpu::workspace_needs)(problem);
}

std::vector<std::string> candidates(Problem const& problem, c10::DeviceType device) {
  std::vector<std::string> choices{"sequential"};
  if (backend_why_not(problem, /*decomposed=*/false, device).empty()) {
    for (std::string const& config : backend_candidates(problem, device)) choices.push_back("fused:" + config);
  }
  for (std::string const& config : decomposed_candidates(problem.op)) {
    bool const runs = backend_why_not(with_config(problem, config), /*decomposed=*/true, device).empty();
    if (runs) choices.push_back("decomposed:" + config);
  }
  return choices;
}

bool suits(Problem const& problem, std::string const& choice, int64_t measured_m, c10::DeviceType device) {
  return device != c10::DeviceType::CUDA ||
         suits(problem, asked_strategy(choice), std::string(asked_config(choice)), measured_m);
}

std::string model_choice(Problem const& problem, c10::DeviceType device) {
  std::string const why_not = backend_why_not(problem, /*decomposed=*/false, device);
  BesideFused const beside = backend_beside_fused(problem, device);
  Choice const choice =
      choose_strategy("auto", /*why_local=*/"", why_not, backend_why_fused_is_slower(problem, device), beside.strategy);
  Problem const chosen = choice.strategy == Strategy::kDecomposed ? with_config(problem, beside.config) : problem;
  std::string const name = strategy_name(choice.strategy);
  return needs_workspace(choice.strategy) ? name + ":" + config_name(chosen, choice.strategy, device) : name;
}

std::string config_names(c10::DeviceType device) {
#if defined(FLUX_WITH_CUDA)
  if (device == c10::DeviceType::CUDA) return cuda::config_names();
#endif
  return device == c10::DeviceType::CPU ? cpu::config_names() : "";
}

void check_not_broken(GroupState const& state, char const* op) {
  TORCH_CHECK_WITH(DistBackendError, state.broken.empty(), op, ": group '", state.name,
                   "' can't be used any more, because its ranks are out of step since an earlier call failed. Call "
                   "flux_ops.destroy(group) on every rank, or make a new group. The earlier failure: ",
                   state.broken);
}

Call begin_call(Arguments const& args) {
  Call call;
  call.state = group_state(op_name(args.op), args.group_name);
  GroupState& state = *call.state;
  call.turn = take_turn(state, op_name(args.op));
  call.site = {state.name, state.id, state.calls++, op_name(args.op)};
  check_not_broken(state, call.site.op);
  Signature const signature{checked_problem(state, call.site, args), args.has_bias(), args.return_gathered,
                            args.x.device().type(), args.strategy};
  check_fault(state, signature.device);
  call.plan = state.find_plan(signature);
  if (call.plan == nullptr) {
    call.plan = make_plan(state, call.site, args, signature);
  } else if (state.may_differ && call.strategy() == Strategy::kSequential) {
    // Its collectives don't tell calls apart, and the peers may have made the one that has failed here.
    agree_on(call.site, args, call.problem(), /*wants_tuned=*/false);
    state.may_differ = false;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!call.plan->choice.refused, call.site.op, ": strategy '", strategy_name(call.strategy()),
                              "' can't run ", describe(args, call.problem()), ": ", call.plan->choice.reason, ".");
  if (needs_workspace(call.strategy())) ensure_workspace(call, args.x.device());
  std::lock_guard<std::mutex> const lock(last().mutex);
  last().plan = call.plan;
  ++last().counts[{args.op, call.strategy(), call.plan->chosen_by}];
  return call;
}

Results run_overlapped(Call& call, Arguments const& args) {
  c10::OptionalDeviceGuard const device_guard(args.x.device());
  // Memory that is lacking here leaves the group as it was: the caller may try again, on all ranks.
  Results results;
  results.y = at::empty(result_shape(args, call.problem()), args.x.options());
  if (args.return_gathered) results.gathered = at::empty(gathered_shape(args, call.problem()), args.x.options());
  PreparedOperands const prepared =
      prepare_operands(args, call.problem(), results.y, args.return_gathered ? &results.gathered : nullptr);
  DeviceState& on_device = call.state->on(args.x.device().type());
  CallInfo const info{++on_device.epoch,
                      digest_of(call.problem(), call.strategy(), args.has_bias(), call.site.call_idx),
                      settings().timeout_seconds};
  bool const decomposed = call.strategy() == Strategy::kDecomposed;
  try {
#if defined(FLUX_WITH_CUDA)
    if (args.x.is_cuda()) {
      if (decomposed) {
        auto* const run = of_op(args.op, cuda::ag_gemm_decomposed, cuda::gemm_rs_decomposed, cuda::gemm_ar_decomposed);
        run(call.problem(), prepared.operands, *on_device.cuda, info);
      } else {
        auto* const run = of_op(args.op, cuda::ag_gemm, cuda::gemm_rs, cuda::gemm_ar);
        run(call.problem(), *call.plan->launch, prepared.operands, *on_device.cuda, info);
      }
      return results;
    }
#endif
    auto* const run = decomposed
                          ? of_op(args.op, cpu::ag_gemm_decomposed, cpu::gemm_rs_decomposed, cpu::gemm_ar_decomposed)
                          : of_op(args.op, cpu::ag_gemm, cpu::gemm_rs, cpu::gemm_ar);
    run(call.problem(), prepared.operands, *on_device.view, info);
    return results;
  } catch (c10::DistBackendError const& e) {
    call.state->broken = e.what_without_backtrace();
    std::string const more = hooks().explain_timeout(call.site);
    C10_THROW_ERROR(DistBackendError, call.state->broken + more);
  } catch (std::exception const& e) {  // the peers may be in this call already, and this rank is not
    call.state->broken = e.what();
    throw;
  }
}

at::Tensor run_reduction(Arguments const& args) {
  Call call = begin_call(args);
  if (call.strategy() == Strategy::kLocal) return run_local(call, args);
  if (call.strategy() == Strategy::kSequential) return run_sequential_reduction(call, args);
  return run_overlapped(call, args).y;
}

at::Tensor run_local(Call const& call, Arguments const& args) {
  Problem const& p = call.problem();
  if (p.world == 1 && p.k > 0) return at::linear(args.x, args.weight, args.bias);
  at::Tensor y = at::zeros(result_shape(args, p), args.x.options());
  if (args.has_bias()) y.add_(*args.bias);
  return y;
}

std::shared_ptr<Plan const> last_dispatch() {
  std::lock_guard<std::mutex> const lock(last().mutex);
  return last().plan;
}

DispatchCounts dispatch_counts(bool reset) {
  std::lock_guard<std::mutex> const lock(last().mutex);
  return reset ? std::exchange(last().counts, {}) : last().counts;
}

}  // namespace flux
