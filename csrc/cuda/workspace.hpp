#pragma once
// The CUDA side of a workspace: the streams that drive the copy engines, and the state of the protocol on this rank.
//
// Protocol, one call of any op on a group:
//
//  1. Every rank calls the same ops with the same problems in the same order, on one stream.
//  2. A call has an epoch, one more than the call before. A push writes its data, then the piece's signal, which holds
//     the epoch and the digest of the call. A reader waits for its epoch; another digest tells it that the peer makes
//     another call. Nothing that a peer writes is ever reset.
//  3. Eager calls use the region, and the set of signals, of parity epoch & 1. Why they are free: to finish call e-1 a
//     rank needs data from every peer that the peer sends after it has finished call e-2. So when this rank starts call
//     e, every peer is done with call e-2, the last to use that parity. (Kernels that exchange data by themselves take
//     numbers, too, and use no region, but wait for data from every peer just so: a parity that repeats around them is
//     free as well.)
//  4. The call ends on the caller's stream when the kernels and the pushes of this rank are done; then the tile
//     counters and the operands are free again. What the call sends lies in the region that it does not use
//     (WorkspaceView::to_send), each peer's in a slot that this peer alone writes, in its next call: by then it has
//     received all of it. Shards in line (uniform schedules of ag_gemm) lie across these slots: with more than two
//     ranks all tell each other first, finished[rank] = e, "this rank has finished all calls before e", and wait for
//     that.
//  5. From the first call that a CUDA graph captures on, the host can't know epochs: replays advance them. Such calls,
//     and all later eager ones, count epochs in device memory from 1 on, with signals of their own. They alternate
//     between the regions too, but graphs may be replayed in any order, so one region can be used twice in a row. Each
//     call first tells the peers begun[rank] = e, "this rank has finished all calls before e". Then it waits until
//     begun[q] > last_use[region] for every peer q; before that it pushes nothing. After a call on the other region
//     that holds already, by rule 3. The GEMM does this by one warp while the others compute: a kernel of its own
//     before it would cost about 4 us, and one beside it might find no free SM (csrc/comm/replay.cuh).
//
// tests/host/protocol_model.cpp checks these rules by going through all interleavings of small cases; ar_order_test.cpp
// goes through a call of gemm_ar for many rows.

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "comm/replay.hpp"
#include "ops/problem.hpp"

namespace flux::cuda {

class Workspace {
 public:
  explicit Workspace(WorkspaceView const& view);
  ~Workspace();
  Workspace(Workspace const&) = delete;
  Workspace& operator=(Workspace const&) = delete;

  WorkspaceView const& view() const { return view_; }
  bool is_captured() const { return replayed_; }

  // Begins a call that exchanges its data by itself (schedule/exchange_layout.hpp): it takes no part in the protocol.
  // The kernel knows the value of the signals.
  SignalWait begin_exchange(Problem const& problem, CallInfo const& info, cudaStream_t stream);

  // The fault that an earlier call left behind, as a sentence; empty if there is none.
  std::string fault_message() const;
  // Throws it as c10::DistBackendError.
  void check_fault() const;

 private:
  friend class Call;

  SignalWait make_wait(Problem const& problem, CallInfo const& info);
  void note_capture(cudaStream_t stream);

  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t reached = nullptr;
  };

  WorkspaceView view_;
  Lane lanes_[2];
  cudaEvent_t fork_ = nullptr, may_push_ = nullptr;
  FaultRecord* fault_ = nullptr;  // pinned
  double timeout_seconds_ = 0;    // of the last call
  bool replayed_ = false;         // rule 5 holds
};

// Who does what rule 5 asks for at the start of a call: its GEMM, launched before the first push, which then ends the
// call too, or leaves that to a later kernel; or a small kernel before all others.
enum class BegunBy { kGemm, kKernelOfItsOwn };

// One call in flight between its first and its last launch on the caller's stream. Pushes of tiles go to two copy
// streams in turn, the lanes: so the wait ahead of a copy and the signal behind it, 5 us in a replayed call, take no
// time of the link, where the other lane has something to send.
class Call {
 public:
  Call(Workspace& workspace, Problem const& problem, CallInfo const& info, cudaStream_t stream, BegunBy begun_by);

  int parity() const { return parity_; }
  SignalWait const& wait() const { return wait_; }
  // Whether the device counts the calls, and how a kernel does it.
  bool is_replayed() const { return replayed_.local != nullptr; }
  ReplayedCall const& replayed() const { return replayed_; }

  // The signals of this call at rank `r`, written by `source`.
  Epoch* arrived(int r, int source) const;
  // The word at `r` by which `source` tells that it has finished the calls before.
  Epoch* finished(int r, int source) const;

  // Lets the lanes start, or go on: what is enqueued on them next sees all that the caller's stream has done so far.
  void fork();
  // Goes over to the other lane, and holds it back until a kernel has counted so many tiles, and starts to count anew.
  void take_tiles(uint32_t* counter, int32_t count);
  // Each lane goes on only when the other one has done what is enqueued so far, held signals included.
  void meet();
  // Enqueues, on the lane of now, a signal to a peer.
  void signal(Epoch* word);
  // The same of a copy to a peer and the signal that it has arrived.
  void push(void* to, void const* from, int64_t bytes, Epoch* signal);
  // The same on the other lane, once a kernel has counted so many tiles. The signal is held: it goes out with what its
  // lane does next, or with fork(), meet() or join().
  void push_tiles(uint32_t* counter, int32_t count, void* to, void const* from, int64_t bytes, Epoch* signal);
  // As push, for a block of rows: `width` bytes of every `pitch`, on both sides.
  void push_rows(void* to, void const* from, int64_t pitch, int64_t width, int64_t rows, Epoch* signal);
  // Makes the caller's stream wait for all that is enqueued on the lanes so far. The last launch of a call is followed
  // by one: rule 4.
  void join();

 private:
  cudaStream_t lane(int i);  // which is in use from now on
  cudaEvent_t reached(int i);
  void wait_for(cudaEvent_t event, cudaStream_t stream);
  void copy(void* to, void const* from, int64_t bytes);
  void wait_until_may_push();
  void send_signal(Epoch* signal, int lane);
  void send_held_signal(int lane);

  Workspace& workspace_;
  cudaStream_t stream_;
  int parity_;
  SignalSet signals_;
  SignalWait wait_;
  ReplayedCall replayed_;
  bool may_push_ = true;               // what is enqueued next
  bool waited_to_push_ = false;        // a lane has; the event tells a lane that comes into use later
  int lane_ = 0;                       // of what is enqueued next
  bool in_use_[2] = {};                // each lane, by this call
  Epoch* held_signal_[2] = {nullptr};  // of each lane's last push_tiles; eager only
};

// Throws a c10::Error with the failed action's name.
void check(cudaError_t error, char const* action);

// Fills operands.gathered, where it is asked for, from the own shard and those of the peers: shard_of(source) has
// arrived.
template <class ShardOf>
void copy_gathered(Problem const& problem, Operands const& operands, cudaStream_t stream, ShardOf const& shard_of) {
  if (operands.gathered == nullptr) return;
  int64_t const size = element_size(problem.dtype), bytes = ag_shard_bytes(problem.rows, problem.k, size);
  auto* const gathered = static_cast<std::byte*>(operands.gathered);
  for (int source = 0; source < problem.world; ++source) {
    void const* const from = source == problem.rank ? operands.x : shard_of(source);
    std::byte* const to = gathered + ag_shard_offset(source, problem.rows, problem.k, size);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copying the gathered operand");
  }
}

}  // namespace flux::cuda
