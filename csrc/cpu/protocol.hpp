#pragma once
// The protocol between the processes of a group, on shared memory. Same signals, epochs and double buffers as on the
// GPU; `release` and `acquire` are those of the C++ memory model on words that all ranks have mapped.
//
//   1. The ranks make the same calls in the same order. Call e (the epoch, from 1; it counts the calls that use the
//      workspace) uses region e & 1 only.
//   2. A signal word holds the newest epoch for which its piece has been sent. The sender writes the piece, then the
//      word with release; the reader waits with acquire until word >= e, then reads the piece. Nothing is reset.
//   3. A rank finishes call e only after it has received, from every peer, a piece that the peer sent in call e.
//   4. A rank sends in call e only after it has finished call e - 1: calls do not overlap within a rank.
//
// Two regions are enough. Say rank r begins call e + 1 and writes into region (e + 1) & 1 of peer p. That region was
// last read by p in call e - 1. By 4, r has finished call e; by 3, it has received a piece that p sent in call e; by
// 4, p had finished call e - 1 by then, and with it all its reads of that region. The reads come before p's release,
// and r's writes after the matching acquire, so they are ordered for the memory too. No barrier is needed, and a rank
// is never more than one call ahead of a peer. The same holds for the call words below and for any mix of ops.
//
// A rank also announces what it computes, so that ranks that are out of step find out at once: before the first piece
// of call e it writes the digest of the call to every peer, doubled like the regions.

#include <cstdint>
#include <string>

#include "ops/problem.hpp"

namespace flux::cpu {

// One call of one rank.
class Exchange {
 public:
  Exchange(Problem const& problem, WorkspaceView const& workspace, CallInfo const& info);

  int parity() const { return parity_of(info_.epoch); }
  std::byte* region(int rank) const { return workspace_.region(rank, parity()); }

  // Tells every peer which call this is.
  void announce() const;
  // Tells `peer` that `piece` of this rank lies in its region.
  void signal(int peer, int piece) const;
  // Waits until `piece` of `source` lies in the region of this rank. `tile` (or what `unit` calls it) is for the
  // message only. Throws c10::DistBackendError after the timeout, or if the source computes something else; and what
  // the handler of a signal raises.
  void wait(int source, int piece, int tile, char const* unit = "tile") const;
  // Makes waits of all threads of this call end.
  void cancel() const { __atomic_store_n(&cancelled_, true, __ATOMIC_RELAXED); }

 private:
  Epoch& arrived(int owner, int source, int piece) const;
  CallWord& call_word(int owner, int source) const;
  void check_same_problem(int source) const;
  [[noreturn]] void time_out(int source, int piece, int tile, char const* unit, Epoch seen) const;

  Problem const& problem_;
  WorkspaceView const& workspace_;
  CallInfo info_;
  mutable bool cancelled_ = false;
};

// Thrown by a wait that another thread of the same call has cancelled.
struct Cancelled {};

}  // namespace flux::cpu
