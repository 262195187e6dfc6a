#include "ops/group_state.hpp"

#include <pthread.h>

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <vector>

#include "ops/dispatch.hpp"

namespace flux {
namespace {

std::mutex registry_mutex;
std::unordered_map<std::string, std::shared_ptr<GroupState>>& registry() {
  static auto* states = new std::unordered_map<std::string, std::shared_ptr<GroupState>>;
  return *states;
}

// States of groups that are gone, to be dropped.
std::vector<std::shared_ptr<GroupState>>& gone() {
  static auto* states = new std::vector<std::shared_ptr<GroupState>>;
  return *states;
}

// Counts the forks between the first use of a group and this process. (getpid would be a system call in every call.)
int fork_generation() {
  static int generation = 0;
  static int const registered = pthread_atfork(nullptr, nullptr, [] { ++generation; });
  TORCH_INTERNAL_ASSERT(registered == 0);
  return generation;
}

bool is_current(GroupState const& state, c10d::ProcessGroup const* group) {
  auto const known = state.group.lock();
  return known && known.get() == group;
}

bool is_alive(GroupState const& state) {
  try {
    return is_current(state, c10d::resolve_process_group(state.name).get());
  } catch (c10::Error const&) {
    return false;
  }
}

// Dropping waits for the device, which ends a capture.
bool may_drop(std::vector<std::shared_ptr<GroupState>> const& states) {
#if defined(FLUX_WITH_CUDA)
  for (auto const& state : states) {
    if (state->on(c10::DeviceType::CUDA).cuda) return !cuda::is_capturing();
  }
#endif
  return true;
}

void drop(std::shared_ptr<GroupState> state) {
  uint64_t const id = state->id;
  state.reset();  // what works on the memory goes before the memory
  hooks().dropped(id);
}

}  // namespace

Turn take_turn(GroupState& state, char const* op) {
  if (state.world == 1) return nullptr;
  TORCH_CHECK(!state.busy.exchange(true, std::memory_order_acquire), op, ": another thread is in a call on group '",
              state.name, "'. All ranks make the calls of a group in one order, so one thread at a time makes them.");
  return Turn(&state);
}

bool Signature::operator==(Signature const& o) const {
  Problem const &a = problem, &b = o.problem;
  return a.op == b.op && a.rows == b.rows && a.n == b.n && a.k == b.k && a.dtype == b.dtype &&
         a.weight_transposed == b.weight_transposed && has_bias == o.has_bias && return_gathered == o.return_gathered &&
         device == o.device && strategy == o.strategy;
}

size_t SignatureHash::operator()(Signature const& s) const {
  size_t h = 0;
  auto const mix = [&h](size_t v) { h = (h ^ v) * 0x9E3779B97F4A7C15ull + (h >> 29); };
  Problem const& p = s.problem;
  mix(p.rows);
  mix(p.n);
  mix(p.k);
  mix(static_cast<size_t>(p.op) | static_cast<size_t>(p.dtype) << 4 | size_t{p.weight_transposed} << 8 |
      size_t{s.has_bias} << 9 | size_t{s.return_gathered} << 10 | static_cast<size_t>(s.device) << 12);
  mix(std::hash<std::string>{}(s.strategy));
  return h;
}

c10::intrusive_ptr<c10d::ProcessGroup> resolve_group(char const* op, std::string const& group_name) {
  try {
    return c10d::resolve_process_group(group_name);
  } catch (c10::Error const&) {
    TORCH_CHECK_VALUE(false, op, ": there is no process group '", group_name,
                      "' in this process: it was never created here, this rank is not a member, or it has been "
                      "destroyed.");
  }
}

std::shared_ptr<GroupState> group_state(char const* op, std::string const& group_name) {
  auto const group = resolve_group(op, group_name);
  std::vector<std::shared_ptr<GroupState>> dropped;
  std::shared_ptr<GroupState> state;
  {
    std::lock_guard<std::mutex> const lock(registry_mutex);
    auto const found = registry().find(group_name);
    if (found != registry().end() && is_current(*found->second, group.get())) {
      TORCH_CHECK(found->second->generation == fork_generation(), op, ": group '", group_name,
                  "' belongs to the process that this one was forked from; a forked process would answer for a rank "
                  "that is there already. Start processes afresh (spawn).");
      return found->second;
    }

    for (auto it = registry().begin(); it != registry().end();) {
      if (is_alive(*it->second)) {
        ++it;
      } else {
        gone().push_back(std::move(it->second));
        it = registry().erase(it);
      }
    }
    if (may_drop(gone())) dropped.swap(gone());
    static uint64_t next_id = 1;
    state = std::make_shared<GroupState>(group_name, next_id++, group, fork_generation());
    registry()[group_name] = state;
  }
  for (std::shared_ptr<GroupState>& one : dropped) drop(std::move(one));
  return state;
}

void drop_group(std::string const& group_name) {
  std::vector<std::shared_ptr<GroupState>> dropped;
  {
    std::lock_guard<std::mutex> const lock(registry_mutex);
    if (auto const found = registry().find(group_name); found != registry().end()) {
      // For good: a thread that has found the state before can't begin a call.
      take_turn(*found->second, "destroy").release();
      gone().push_back(std::move(found->second));
      registry().erase(found);
    }
    dropped.swap(gone());
  }
  for (std::shared_ptr<GroupState>& one : dropped) drop(std::move(one));
}

void forget_plans(std::string const& group_name) { group_state("forget_plans", group_name)->forget_plans(); }

void attach_workspace(std::string const& group_name, c10::Device device, std::vector<uintptr_t> const& bases,
                      WorkspaceNeeds const& needs) {
  auto const state = group_state("attach_workspace", group_name);
  TORCH_CHECK(bases.size() == static_cast<size_t>(state->world) && state->world <= kMaxWorld,
              "attach_workspace: ", bases.size(), " blocks for a group of ", state->world, " ranks; at most ",
              kMaxWorld, " are allowed.");
  WorkspaceView view{};
  view.group_name = group_name;
  view.rank = state->rank;
  view.world = state->world;
  view.layout = make_workspace_layout(needs);
  for (size_t r = 0; r < bases.size(); ++r) view.base[r] = reinterpret_cast<std::byte*>(bases[r]);

  DeviceState& on_device = state->on(device.type());
#if defined(FLUX_WITH_CUDA)
  if (device.is_cuda()) {
    c10::OptionalDeviceGuard const device_guard(device);
    if (on_device.is_captured()) on_device.kept.push_back(on_device.cuda);
    on_device.cuda = cuda::make_workspace(view);
  }
#endif
  on_device.view = view;
  on_device.index = device.index();
}

Hooks& hooks() {
  static auto* the_hooks = new Hooks;
  return *the_hooks;
}

Settings& settings() {
  static Settings the_settings;
  return the_settings;
}

}  // namespace flux
