#include "cpu/protocol.hpp"

#include <c10/util/Exception.h>

#include <thread>

namespace flux::cpu {
namespace {

constexpr int kSpins = 256;  // a few microseconds
constexpr int kYields = 64;  // then let others run
constexpr auto kNap = std::chrono::microseconds(50);

uint64_t digest_of(Problem const& p) {
  uint64_t h = 14695981039346656037ull;
  for (int64_t const v :
       {int64_t{static_cast<int>(p.op)}, int64_t{p.world}, p.rows, p.n, p.k, int64_t{static_cast<int>(p.dtype)}}) {
    h = (h ^ static_cast<uint64_t>(v)) * 1099511628211ull;
    h ^= h >> 31;
  }
  return h;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Exchange::Exchange(Problem const& problem, WorkspaceView const& workspace, Epoch epoch, double timeout_seconds)
    : problem_(problem),
      workspace_(workspace),
      epoch_(epoch),
      timeout_seconds_(timeout_seconds),
      start_(std::chrono::steady_clock::now()) {}

Epoch& Exchange::arrived(int owner, int source, int piece) const {
  int const set = static_cast<int>(signal_set_of(epoch_));
  return workspace_.control(owner).signals.arrived[set][source][piece];
}

CallWords& Exchange::call_words(int rank) const {
  return *reinterpret_cast<CallWords*>(workspace_.base[rank] + workspace_.layout.send_offset());
}

void Exchange::announce() const {
  uint64_t const digest = digest_of(problem_);
  for (int peer = 0; peer < problem_.world; ++peer) {
    if (peer == problem_.rank) continue;
    CallWords::Word& word = call_words(peer).calls[parity()][problem_.rank];
    word.digest = digest;
    __atomic_store_n(&word.epoch, epoch_, __ATOMIC_RELEASE);
  }
}

void Exchange::signal(int peer, int piece) const {
  __atomic_store_n(&arrived(peer, problem_.rank, piece), epoch_, __ATOMIC_RELEASE);
}

double Exchange::wait(int source, int piece, int tile) const {
  Epoch const& word = arrived(problem_.rank, source, piece);
  Epoch seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
  double waited = 0;
  if (seen < epoch_) {
    auto const begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; seen < epoch_; ++i) {
      if (i < kSpins) {
        relax();
      } else {
        if (__atomic_load_n(&cancelled_, __ATOMIC_RELAXED)) throw Cancelled{};
        check_same_problem(source);
        check_deadline(source, piece, tile, seen);
        if (i < kSpins + kYields) {
          std::this_thread::yield();
        } else {
          std::this_thread::sleep_for(kNap);
        }
      }
      seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
    }
    waited = 1e6 * seconds_since(begin);
  }
  check_same_problem(source);
  return waited;
}

void Exchange::check_same_problem(int source) const {
  CallWords::Word const& word = call_words(problem_.rank).calls[parity()][source];
  if (__atomic_load_n(&word.epoch, __ATOMIC_ACQUIRE) != epoch_ || word.digest == digest_of(problem_)) return;
  TORCH_CHECK_WITH(DistBackendError, false, op_name(problem_.op), ": the ranks of group '", workspace_.group_name,
                   "' are out of step: in fused call ", epoch_, " rank ", source,
                   " computes another op, shape or dtype "
                   "than rank ",
                   problem_.rank, ", whose chunk has ", problem_.rows, " rows, N = ", problem_.n,
                   " and K = ", problem_.k, ".");
}

void Exchange::check_deadline(int source, int piece, int tile, Epoch seen) const {
  if (seconds_since(start_) < timeout_seconds_) return;
  TORCH_CHECK_WITH(DistBackendError, false, op_name(problem_.op), ": rank ", problem_.rank, " of group '",
                   workspace_.group_name, "' waited ", timeout_seconds_, " s for rank ", source, ": tile ", tile,
                   " needs piece ", piece, " of its data, expected epoch ", epoch_, ", seen ", seen,
                   ". The rank is late, dead, or makes other calls than this one; flux_ops.set_timeout(seconds) "
                   "allows more time.");
}

}  // namespace flux::cpu
