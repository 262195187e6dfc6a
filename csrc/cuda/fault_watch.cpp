#include "cuda/fault_watch.hpp"

#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "cuda/workspace.hpp"

namespace flux::cuda {
namespace {

struct Watch {
  std::mutex mutex;
  std::map<Workspace const*, bool> told;  // by workspace: whether its fault has been said
  bool started = false;
};

// Never destroyed: the thread outlives the static objects of the process.
Watch& watch() {
  static auto* const instance = new Watch;
  return *instance;
}

void run() {
  Watch& w = watch();
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::lock_guard<std::mutex> const lock(w.mutex);
    for (auto& [workspace, told] : w.told) {
      if (told) continue;
      std::string const message = workspace->fault_message();
      if (message.empty()) continue;
      std::fprintf(stderr, "%s\n", message.c_str());
      std::fflush(stderr);
      told = true;
    }
  }
}

}  // namespace

void watch_faults(Workspace const* workspace) {
  Watch& w = watch();
  std::lock_guard<std::mutex> const lock(w.mutex);
  if (!w.started) std::thread(run).detach();
  w.started = true;
  w.told[workspace] = false;
}

void unwatch_faults(Workspace const* workspace) {
  std::lock_guard<std::mutex> const lock(watch().mutex);
  watch().told.erase(workspace);
}

}  // namespace flux::cuda
