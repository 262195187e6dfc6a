#include "cpu/protocol.hpp"

#include <c10/util/Exception.h>

#include <chrono>
#include <thread>

#include "ops/hooks.hpp"

namespace flux::cpu {
namespace {

constexpr int kSpins = 256;  // a few microseconds
constexpr int kYields = 64;  // then let others run
constexpr auto kNap = std::chrono::microseconds(50);
constexpr int kNapsBetweenSignals = 512;  // of Python: some 50 ms

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Exchange::Exchange(Problem const& problem, WorkspaceView const& workspace, CallInfo const& info)
    : problem_(problem), workspace_(workspace), info_(info) {}

Epoch& Exchange::arrived(int owner, int source, int piece) const {
  int const set = static_cast<int>(signal_set_of(parity_of(info_.epoch), /*replay=*/false));
  return workspace_.control(owner).signals.arrived[set][source][piece];
}

CallWord& Exchange::call_word(int owner, int source) const {
  return workspace_.control(owner).signals.calls[parity()][source];
}

void Exchange::announce() const {
  for (int peer = 0; peer < problem_.world; ++peer) {
    if (peer == problem_.rank) continue;
    CallWord& word = call_word(peer, problem_.rank);
    word.digest = info_.digest;
    __atomic_store_n(&word.epoch, info_.epoch, __ATOMIC_RELEASE);
  }
}

void Exchange::signal(int peer, int piece) const {
  __atomic_store_n(&arrived(peer, problem_.rank, piece), info_.epoch, __ATOMIC_RELEASE);
}

void Exchange::wait(int source, int piece, int tile, char const* unit) const {
  Epoch const& word = arrived(problem_.rank, source, piece);
  Epoch seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
  if (seen < info_.epoch) {
    auto const begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; seen < info_.epoch; ++i) {
      if (i < kSpins) {
        relax();
      } else {
        if (__atomic_load_n(&cancelled_, __ATOMIC_RELAXED)) throw Cancelled{};
        check_same_problem(source);
        if (seconds_since(begin) >= info_.timeout_seconds) time_out(source, piece, tile, unit, seen);
        if (i < kSpins + kYields) {
          std::this_thread::yield();
        } else {
          std::this_thread::sleep_for(kNap);
          if (i % kNapsBetweenSignals == 0) hooks().check_signals();
        }
      }
      seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
    }
  }
  check_same_problem(source);
}

void Exchange::check_same_problem(int source) const {
  CallWord const& word = call_word(problem_.rank, source);
  if (__atomic_load_n(&word.epoch, __ATOMIC_ACQUIRE) != info_.epoch || word.digest == info_.digest) return;
  TORCH_CHECK_WITH(DistBackendError, false, op_name(problem_.op), ": the ranks of group '", workspace_.group_name,
                   "' are out of step: in call ", info_.epoch, " of the workspace rank ", source,
                   " makes another call than rank ", problem_.rank, ", whose product has M = ", total_rows(problem_),
                   ", N = ", problem_.n, " and K = ", problem_.k, ".");
}

void Exchange::time_out(int source, int piece, int tile, char const* unit, Epoch seen) const {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(op_name(problem_.op), ": rank ", problem_.rank, " of group '", workspace_.group_name, "' waited ",
               info_.timeout_seconds, " s for rank ", source, ": ", unit, " ", tile, " needs piece ", piece,
               " of its data, expected epoch ", info_.epoch, ", seen ", seen,
               ". The rank is late, dead, or makes other calls than this one; flux_ops.set_timeout(seconds) "
               "allows more time."));
}

}  // namespace flux::cpu
