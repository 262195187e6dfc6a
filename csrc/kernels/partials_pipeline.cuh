#pragma once
// How partials come to shared memory: one thread fills the slots by bulk copies, the warps that hold a tile empty them.
// The barriers count one arrival of the filling thread and one of each warp; those of CUTLASS's pipeline count every
// thread, which is 32 times as many arrivals at one word of shared memory.
//
// The other way round, each warp that holds a tile tells the warp of the filling thread when it has stored its part.
// One sum over all warps would not do: nothing keeps the warps of a cooperative kernel from storing a tile while others
// have yet to store the one before.

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/pipeline/pipeline.hpp"

namespace flux {

// Warps: that hold a tile.
template <int Slots, int SlotBytes, int Warps>
class PartialsPipeline : public cutlass::PipelineTransactionAsync<Slots> {
 public:
  using Base = cutlass::PipelineTransactionAsync<Slots>;
  using typename Base::Params;
  using typename Base::PipelineState;
  struct SharedStorage : Base::SharedStorage {
    uint32_t tiles_stored[Warps];  // so far, by each warp
  };

  // Called by all threads of the block.
  CUTLASS_DEVICE PartialsPipeline(SharedStorage& storage, Params const& params)
      : Base(storage, per_warp(params)), tiles_stored_(cute::cast_smem_ptr_to_uint(storage.tiles_stored)) {
    if (threadIdx.x < Warps) storage.tiles_stored[threadIdx.x] = 0;
    __syncthreads();
  }

  // Called by one thread: brings the bytes of a slot, when it is empty. They are the params' transaction_bytes.
  CUTLASS_DEVICE void fill(PipelineState const& state, void const* from, void* to) {
    Base::producer_acquire(state);
    Base::producer_expect_transaction(state);
    cute::SM90_BULK_COPY_G2S::copy(from, Base::producer_get_barrier(state), to, SlotBytes);
    Base::producer_commit(state);
  }

  // Called by whole warps. The copy that fills the slot next takes another way than the warp's loads: without a fence
  // it could overtake them.
  CUTLASS_DEVICE void consumer_release(PipelineState const& state) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (cute::elect_one_sync()) Base::consumer_release(state);
  }

  // Called by a whole warp, of that number among those that hold the tile, when it has stored its part.
  CUTLASS_DEVICE void tile_stored(int warp) const {
    __syncwarp();
    if (cute::elect_one_sync()) {
      asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(tiles_stored_ + 4 * warp) : "memory");
    }
  }

  // Called by a whole warp: returns when all warps have stored so many tiles, and what they stored is visible to it.
  CUTLASS_DEVICE void wait_stored(uint32_t tiles) const {
    int const warp = threadIdx.x % cutlass::NumThreadsPerWarp;
    if (warp < Warps) {
      for (;;) {
        uint32_t stored;
        asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
                     : "=r"(stored)
                     : "r"(tiles_stored_ + 4 * warp)
                     : "memory");
        if (stored >= tiles) break;
        __nanosleep(100);  // a tile takes microseconds, and the warps that compute it share the issue slots
      }
    }
    __syncwarp();
  }

 private:
  CUTLASS_DEVICE static Params per_warp(Params params) {
    params.producer_arv_count = 1;
    params.consumer_arv_count = Warps;
    return params;
  }

  uint32_t tiles_stored_;  // their address
};

}  // namespace flux
