#pragma once
// The way of a call from its arguments to a strategy, the same for every op.

#include <memory>
#include <string>
#include <vector>

#include "ops/arguments.hpp"
#include "ops/group_state.hpp"

namespace flux {

// A call whose arguments are right, that all ranks make alike, and whose strategy is chosen. Where the strategy is
// fused the workspace is large enough.
struct Call {
  std::shared_ptr<GroupState> state;
  CallSite site;
  Problem problem;
  std::shared_ptr<Plan const> plan;

  Strategy strategy() const { return plan->choice.strategy; }
};
Call begin_call(Arguments const& args);

// Runs the fused strategy on the device of x. A peer that does not arrive breaks the group.
void run_fused(Call& call, Arguments const& args, at::Tensor const& y, at::Tensor const* gathered);

// The product of one rank, or a product without terms: no communication.
at::Tensor run_local(Call const& call, Arguments const& args);

// Throws what tells why the group is broken, if it is.
void check_not_broken(GroupState const& state, char const* op);

// What the last call on any group ran.
struct DispatchRecord {
  Problem problem{};
  std::shared_ptr<Plan const> plan;
};
DispatchRecord last_dispatch();

WorkspaceNeeds workspace_needs(Problem const& problem, c10::DeviceType device);

// What the tuner measures: strategies as a caller may ask for them, "sequential" first.
std::vector<std::string> candidates(Problem const& problem, c10::DeviceType device);
// What "auto" runs where nothing is tuned.
std::string model_choice(Problem const& problem, c10::DeviceType device);
// The names that configurations are made of in this build; a tuned choice is worth nothing where they are others.
std::string config_names(c10::DeviceType device);

}  // namespace flux
