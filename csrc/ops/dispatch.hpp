#pragma once
// The way of a call from its arguments to a strategy, the same for every op.

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "ops/arguments.hpp"
#include "ops/group_state.hpp"

namespace flux {

// A call whose arguments are right, that all ranks make alike, and whose strategy is chosen. Where the strategy needs
// a workspace it is large enough.
struct Call {
  std::shared_ptr<GroupState> state;
  Turn turn;
  CallSite site;
  std::shared_ptr<Plan const> plan;

  Problem const& problem() const { return plan->problem; }
  Strategy strategy() const { return plan->choice.strategy; }
};
Call begin_call(Arguments const& args);

struct Results {
  at::Tensor y;
  at::Tensor gathered;  // x of all ranks, where the arguments ask for it
};

// Runs the strategy, one that needs a workspace, on the device of x. A peer that does not arrive breaks the group.
Results run_overlapped(Call& call, Arguments const& args);

// Run the sequential strategy. It gathers x whether asked to or not.
Results run_sequential_ag_gemm(Call const& call, Arguments const& args);
at::Tensor run_sequential_reduction(Call const& call, Arguments const& args);

// The product of one rank, or a product without terms: no communication.
at::Tensor run_local(Call const& call, Arguments const& args);

// Throws what tells why the group is broken, if it is.
void check_not_broken(GroupState const& state, char const* op);

// gemm_rs or gemm_ar, from the arguments to the result.
at::Tensor run_reduction(Arguments const& args);

// What the last call on any group ran; null before the first.
std::shared_ptr<Plan const> last_dispatch();

// How many calls of this process ran how, on any group; with `reset`, they are counted from zero again.
using DispatchCounts = std::map<std::tuple<Op, Strategy, ChosenBy>, int64_t>;
DispatchCounts dispatch_counts(bool reset);

bool may_run_beside_collective(c10::Device device, std::string const& group_name, std::string const& strategy);

WorkspaceNeeds workspace_needs(Problem const& problem, Strategy strategy, c10::DeviceType device);

// What the tuner measures: strategies as a caller may ask for them, "sequential" first.
std::vector<std::string> candidates(Problem const& problem, c10::DeviceType device);
// Whether a choice that was measured with other rows, `measured_m` in all, may stand for the problem.
bool suits(Problem const& problem, std::string const& choice, int64_t measured_m, c10::DeviceType device);
// What "auto" runs where nothing is tuned.
std::string model_choice(Problem const& problem, c10::DeviceType device);
// The names that configurations are made of in this build; a tuned choice is worth nothing where they are others.
std::string config_names(c10::DeviceType device);

}  // namespace flux
