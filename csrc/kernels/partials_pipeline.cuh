#pragma once
// How partials come to shared memory: one thread fills the slots by bulk copies, the warps that hold a tile empty them.
// The barriers count one arrival of the filling thread and one of each warp; those of CUTLASS's pipeline count every
// thread, which is 32 times as many arrivals at one word of shared memory.
//
// The other way round, the warps that hold a tile tell the filling thread when they have stored it.

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
    uint32_t parts_stored;  // by a warp each, of all tiles so far
  };

  // Called by all threads; the kernel's barrier before its first tile makes the zero known.
  CUTLASS_DEVICE PartialsPipeline(SharedStorage& storage, Params const& params)
      : Base(storage, per_warp(params)), parts_stored_(cute::cast_smem_ptr_to_uint(&storage.parts_stored)) {
    if (threadIdx.x == 0) storage.parts_stored = 0;
  }

  // Called by one thread: brings the bytes of a slot, when it is empty. They are the params' transaction_bytes.
  CUTLASS_DEVICE void fill(PipelineState const& state, void const* from, void* to) {
    Base::producer_acquire(state);
    Base::producer_expect_transaction(state);
    cute::SM90_BULK_COPY_G2S::copy(from, Base::producer_get_barrier(state), to, SlotBytes);
    Base::producer_commit(state);
  }

  // Called by whole warps.
  CUTLASS_DEVICE void consumer_release(PipelineState const& state) {
    __syncwarp();
    if (cute::elect_one_sync()) Base::consumer_release(state);
  }

  // Called by whole warps, when they have stored their part of a tile.
  CUTLASS_DEVICE void tile_stored() const {
    __syncwarp();
    if (cute::elect_one_sync()) {
      asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(parts_stored_) : "memory");
    }
  }

  // Called by one thread: returns when so many tiles are stored, and what was stored is visible to it.
  CUTLASS_DEVICE void wait_stored(uint32_t tiles) const {
    for (;;) {
      uint32_t stored;
      asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(stored) : "r"(parts_stored_) : "memory");
      if (stored >= tiles * Warps) return;
      __nanosleep(100);  // a tile takes microseconds, and the warps that compute it share the issue slots
    }
  }

 private:
  CUTLASS_DEVICE static Params per_warp(Params params) {
    params.producer_arv_count = 1;
    params.consumer_arv_count = Warps;
    return params;
  }

  uint32_t parts_stored_;  // its address
};

}  // namespace flux
