#pragma once
// Signals between GPUs: loads and stores at system scope, and the bounded wait.
//
//   writer   stores the data; then the signal, with release semantics at system scope
//   reader   loads the signal with acquire semantics at system scope; then the data
//   TMA      reads through the async proxy: fence_async_proxy() stands between the acquire and the first TMA load of
//            data that ordinary stores or a copy engine wrote

#include <cuda_runtime.h>

#include "comm/fault.hpp"

namespace flux {

__device__ __forceinline__ Epoch load_acquire_sys(Epoch const* p) {
  Epoch v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ Epoch load_relaxed_sys(Epoch const* p) {
  Epoch v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release_sys(Epoch* p, Epoch v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Counts one arrival at a local counter that this GPU's stream operations wait for, before its copy engine reads what
// was stored. All earlier stores of the caller, and of threads it has synchronised with, are in the L2 by then, where
// the copy engine reads: the scope is the GPU.
__device__ __forceinline__ void count_release_gpu(uint32_t* p) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ uint64_t global_timer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// The value of the signals of the call that `wait` belongs to.
__device__ __forceinline__ Epoch signal_of(SignalWait const& wait) {
  if (wait.epoch_word == nullptr) return wait.signal;
  return make_signal(load_relaxed_sys(wait.epoch_word) + 1, wait.signal);
}

// Records the first fault and stops the kernel: what it would compute from here on could only be wrong.
__device__ __forceinline__ void report_fault(SignalWait const& wait, int peer, int piece, int tile_m, int tile_n,
                                             Epoch expected, Epoch seen) {
  if (atomicCAS(wait.fault_claim, 0u, 1u) == 0u) {
    FaultRecord volatile* record = wait.fault;
    record->op = wait.op;
    record->rank = wait.rank;
    record->peer = peer;
    record->piece = piece;
    record->tile_m = tile_m;
    record->tile_n = tile_n;
    record->expected = expected;
    record->seen = seen;
    __threadfence_system();
    record->written = 1;
    __threadfence_system();
  } else {  // leave the thread that writes the record time to finish
    uint64_t const start = global_timer_ns();
    while (global_timer_ns() - start < 10'000'000) {
    }
  }
  __trap();
}

// Returns once *word >= expected. Stops the kernel with a fault record after the timeout.
__device__ __forceinline__ Epoch wait_at_least(SignalWait const& wait, Epoch const* word, Epoch expected, int peer,
                                               int piece, int tile_m, int tile_n) {
  Epoch seen = load_acquire_sys(word);
  if (seen >= expected) return seen;
  uint64_t const start = global_timer_ns();
  for (;;) {
    seen = load_acquire_sys(word);
    if (seen >= expected) return seen;
    if (global_timer_ns() - start > wait.timeout_ns) {
      report_fault(wait, peer, piece, tile_m, tile_n, expected, seen);
    }
  }
}

// Waits for the signal of this call at *word; a signal of the same epoch with another digest is a fault. The word
// keeps its value until this rank has finished the call, so no other value can follow the right one.
__device__ __forceinline__ void wait_signal(SignalWait const& wait, Epoch const* word, int peer, int piece, int tile_m,
                                            int tile_n) {
  Epoch const expected = signal_of(wait);
  Epoch const seen = wait_at_least(wait, word, make_signal(signal_epoch(expected), 0), peer, piece, tile_m, tile_n);
  if (seen != expected) report_fault(wait, peer, piece, tile_m, tile_n, expected, seen);
}

}  // namespace flux
