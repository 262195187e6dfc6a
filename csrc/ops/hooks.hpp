#pragma once
// What the ops leave to Python: everything that happens once per shape or once per group. The ops know nothing of
// Python but these functions; python_hooks.cpp fills them.

#include <c10/core/Device.h>

#include <atomic>
#include <functional>
#include <string>

#include "ops/problem.hpp"

namespace flux {

// One call of an op on a group; the ranks count their calls alike.
struct CallSite {
  std::string group_name;
  uint64_t state_id;  // tells apart the groups that have borne one name
  int64_t call_idx;
  char const* op;
};

// What the tuner has found for a problem: a strategy as a caller may ask for it, and where that is written. Empty: it
// has found nothing.
struct Tuned {
  std::string choice;
  std::string origin;
};

struct Hooks {
  // The tuner's choice for a problem, from this rank's caches.
  std::function<Tuned(Problem const&, c10::Device)> tuned;
  // Compares `text` across the ranks; throws on every rank if it differs. Returns what rank 0 proposes.
  std::function<Tuned(CallSite const&, std::string const& text, Tuned const& proposal)> agree;
  // Tells the ranks that wait in `agree` that this rank has refused the call.
  std::function<void(CallSite const&, std::string const& message)> refuse;
  // Why the ranks can't reach each other's memory on this kind of device; empty if they can.
  std::function<std::string(CallSite const&, c10::Device)> why_not_connected;
  // Replaces the workspace by one of at least this size, on all ranks, and attaches it.
  std::function<void(CallSite const&, c10::Device, WorkspaceNeeds)> grow;
  // What the other ranks are known to do in this call: the end of a timeout's message, or empty.
  std::function<std::string(CallSite const&)> explain_timeout;
  std::function<void(std::string const& message)> warn_once;
  // In long waits of any thread: on Python's main thread runs its handlers of the signals that have come. Throws what
  // they raise, KeyboardInterrupt among it.
  std::function<void()> check_signals;
  // An op on a group of so many ranks has been traced.
  std::function<void(std::string const& group_name, int64_t world)> traced;
  // The state is gone: free what belongs to it.
  std::function<void(uint64_t state_id)> dropped;
};

Hooks& hooks();

struct Settings {
  std::atomic<double> timeout_seconds{30};
  std::atomic<bool> check_ranks{true};
};
Settings& settings();

}  // namespace flux
