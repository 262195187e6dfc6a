#pragma once
// Threads that run the tiles of one call. A pool is used by one call at a time; calls that run at once (on several
// groups, from several threads) get a pool each.

#include <functional>

namespace flux::cpu {

// Runs `work` on `num_workers` threads, and `meanwhile` on the calling thread, which then waits for the workers. The
// first exception of any of them, or of a handler of a signal that Python has received meanwhile, is rethrown after all
// have ended; `on_error` is called at once when it occurs. Cancelled is none: it ends who throws it.
void run_workers(int num_workers, std::function<void()> const& work, std::function<void()> const& meanwhile,
                 std::function<void()> const& on_error);

}  // namespace flux::cpu
