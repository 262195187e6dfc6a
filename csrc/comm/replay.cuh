#pragma once
// Beginning and ending a call that the device counts, in a kernel of the call.
//
//   begin   one warp of one block: tells every peer, begun[rank] = epoch, that this rank has finished all calls before;
//           waits until every peer has finished the last call that used the region of this parity; lets the copy
//           streams push
//   end     a thread of each block that has work, when it has read the epoch for the last time: the last one counts
//
// In between local->epoch is the number of calls before this one, for all blocks.

#include "comm/replay.hpp"
#include "comm/signal.cuh"

namespace flux {

// Run by one warp. Returns the number of the call.
__device__ __forceinline__ Epoch announce_call(ReplayedCall const& call, SignalWait const& wait) {
  int const peer = threadIdx.x % 32;
  LocalWords* const local = call.local;
  Epoch const epoch = local->epoch + 1;
  Epoch const last = local->last_use[call.parity];
  __syncwarp();
  if (peer == 0) {
    local->signal = make_signal(epoch, wait.signal);
    local->last_use[call.parity] = epoch;
  }
  bool const is_peer = peer < call.world && peer != wait.rank;
  if (is_peer) store_release_sys(call.begun.at[peer] + wait.rank, epoch);
  __syncwarp();  // all peers are told before any is waited for: else ranks could wait in a ring
  if (is_peer) wait_at_least(wait, call.begun.at[wait.rank] + peer, last + 1, peer, kCallsBegun, -1, -1);
  __syncwarp();
  return epoch;
}

// Run by one warp of each block, before its first tile.
__device__ __forceinline__ void begin_call(ReplayedCall const& call, SignalWait const& wait) {
  if (call.local == nullptr || blockIdx.x != 0 || blockIdx.y != 0) return;
  announce_call(call, wait);
  if (threadIdx.x % 32 == 0) count_release_gpu(&call.local->may_push);
}

// How many of the items, which are tiles, the block has.
__device__ __forceinline__ int tiles_of_block(ReplayedCall const& call) {
  uint32_t const block = blockIdx.x + blockIdx.y * gridDim.x, blocks = gridDim.x * gridDim.y;
  return (call.items - block + blocks - 1) / blocks;
}

// Run by one thread of each block.
__device__ __forceinline__ void end_call(ReplayedCall const& call) {
  if (call.local == nullptr || call.items == 0) return;
  uint32_t const blocks = min(call.items, gridDim.x * gridDim.y);
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(&call.local->blocks_ended)
               : "memory");
  if (before + 1 < blocks) return;
  call.local->blocks_ended = 0;
  call.local->epoch += 1;
}

}  // namespace flux
