#pragma once
// The call that a kernel makes which exchanges its data by itself. Device memory counts such calls, so a replayed CUDA
// graph needs no more.
//
// Consecutive calls use the two halves of the exchange area in turn: to finish a call a rank needs data that each peer
// sends after it has finished the call before, so when a rank begins a call, all peers are done with the last call but
// one. That call's readers have emptied the slots.

#include "comm/signal.cuh"
#include "kernels/exchange_args.hpp"

namespace flux {

// No sooner may memory be read or written, but for prefetches, that kernels before this one on the stream use.
__device__ __forceinline__ void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

class ExchangeCall {
 public:
  // After wait_for_last_kernel. Reading which call it is takes the better part of a us.
  __device__ explicit ExchangeCall(ExchangeArgs const& args) : args_(args), wait_(args.wait) {
    number_ = load_relaxed_sys(&local().calls) + 1;
    wait_.signal = make_signal(number_, args.wait.signal);  // whose digest it keeps
  }

  __device__ int parity() const { return parity_of(number_); }
  __device__ SignalWait const& wait() const { return wait_; }

  // For the lanes of one warp of one block: tells the peers which call this is.
  __device__ void announce(int lane) const {
    if (is_peer(lane)) store_release_sys(&args_.words[lane]->begun[parity()][args_.rank], wait_.signal);
  }
  // For the lanes of one warp: waits until each peer has begun the call; another call than this one is a fault. What
  // the peers send tells that, too, but only where it comes.
  __device__ void compare(int lane) const {
    if (is_peer(lane)) wait_signal(wait_, &local().begun[parity()][lane], lane, 0, 0, 0);
  }
  // For one thread of each block, when all others are done.
  __device__ void end() const {
    if (atomicAdd(&local().finished, 1u) != gridDim.x - 1) return;
    local().finished = 0;
    local().calls = number_;
  }

 private:
  __device__ ExchangeWords& local() const { return *args_.words[args_.rank]; }
  __device__ bool is_peer(int lane) const { return lane < args_.world && lane != args_.rank; }

  ExchangeArgs const& args_;
  SignalWait wait_;
  Epoch number_;
};

}  // namespace flux
