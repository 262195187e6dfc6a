#pragma once
// What a process remembers of a process group between calls.

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/backend.hpp"
#include "ops/choose.hpp"
#include "ops/hooks.hpp"

namespace flux {

// What the ranks agree on before they run a call.
struct Signature {
  Problem problem;
  bool has_bias;
  bool return_gathered;
  c10::DeviceType device;
  std::string strategy;

  bool operator==(Signature const& other) const;
};
struct SignatureHash {
  size_t operator()(Signature const& s) const;
};

// What follows from a signature: the same on every rank, made once. A call finds its plan and runs it.
struct Plan {
  Problem problem;
  Choice choice;
  std::string config;  // that runs, by name
  ChosenBy chosen_by = ChosenBy::kModel;
  WorkspaceNeeds needs;
#if defined(FLUX_WITH_CUDA)
  std::shared_ptr<cuda::LaunchPlan const> launch;  // of the fused strategy on CUDA
#endif
};

// Symmetric memory of the group on one kind of device. Epochs count the calls that use this memory.
struct DeviceState {
  bool connection_known = false;
  std::string why_not_connected;
  c10::DeviceIndex index = -1;
  Epoch epoch = 0;
  std::optional<WorkspaceView> view;
#if defined(FLUX_WITH_CUDA)
  std::shared_ptr<cuda::Workspace> cuda;
  std::vector<std::shared_ptr<cuda::Workspace>> kept;  // replaced ones that CUDA graphs may still use
  bool is_captured() const { return cuda && cuda::is_captured(*cuda); }
#else
  bool is_captured() const { return false; }
#endif
};

// Of a group of several ranks one thread at a time makes calls (Turn). Any number may on a group of one rank, whose
// calls use no more than `calls` and the plans.
struct GroupState {
  GroupState(std::string group_name, uint64_t state_id, c10::intrusive_ptr<c10d::ProcessGroup> const& process_group,
             int fork_generation)
      : name(std::move(group_name)),
        id(state_id),
        rank(process_group->getRank()),
        world(process_group->getSize()),
        group(process_group),
        generation(fork_generation) {}

  std::string const name;
  uint64_t const id;
  int const rank;
  int const world;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> const group;
  int const generation;  // of the process that made it: see fork_generation
  std::atomic<bool> busy{false};
  std::atomic<int64_t> calls{0};
  bool may_differ = false;  // a call has failed here, on every rank or not, since the ranks last compared theirs
  std::string broken;       // why no further call can be trusted; empty if all is well
  DeviceState devices[2];   // CPU, CUDA

  DeviceState& on(c10::DeviceType type) { return devices[type == c10::DeviceType::CUDA ? 1 : 0]; }

  std::shared_ptr<Plan const> find_plan(Signature const& signature) {
    std::lock_guard<std::mutex> const lock(plans_mutex_);
    auto const found = plans_.find(signature);
    return found == plans_.end() ? nullptr : found->second;
  }
  void keep_plan(Signature const& signature, std::shared_ptr<Plan const> plan) {
    std::lock_guard<std::mutex> const lock(plans_mutex_);
    plans_.emplace(signature, std::move(plan));
  }
  void forget_plans() {
    std::lock_guard<std::mutex> const lock(plans_mutex_);
    plans_.clear();
  }

 private:
  std::mutex plans_mutex_;
  std::unordered_map<Signature, std::shared_ptr<Plan const>, SignatureHash> plans_;
};

// A thread's turn on a group: until it ends, all other threads are refused. None is needed on a group of one rank.
struct EndTurn {
  void operator()(GroupState* state) const { state->busy.store(false, std::memory_order_release); }
};
using Turn = std::unique_ptr<GroupState, EndTurn>;
Turn take_turn(GroupState& state, char const* op);

// The process group of this name; a ValueError if there is none.
c10::intrusive_ptr<c10d::ProcessGroup> resolve_group(char const* op, std::string const& group_name);
// The state of the group that bears this name now. States of groups that are gone are dropped on the way.
std::shared_ptr<GroupState> group_state(char const* op, std::string const& group_name);
// Forgets the group, and all that are gone: the next call on it begins anew.
void drop_group(std::string const& group_name);
// Forgets how the group's calls are run: each shape is decided anew. All ranks do it between the same two calls.
void forget_plans(std::string const& group_name);

void attach_workspace(std::string const& group_name, c10::Device device, std::vector<uintptr_t> const& bases,
                      WorkspaceNeeds const& needs);

}  // namespace flux
