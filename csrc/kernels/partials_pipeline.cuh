#pragma once
// How partials come to shared memory: one thread fills the slots by bulk copies, the warps that hold a tile empty them.
// The barriers count one arrival of the filling thread and one of each warp; those of CUTLASS's pipeline count every
// thread, which is 32 times as many arrivals at one word of shared memory.

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/pipeline/pipeline.hpp"

namespace flux {

template <int Slots, int SlotBytes>
class PartialsPipeline : public cutlass::PipelineTransactionAsync<Slots> {
 public:
  using Base = cutlass::PipelineTransactionAsync<Slots>;
  using typename Base::Params;
  using typename Base::PipelineState;
  using typename Base::SharedStorage;

  CUTLASS_DEVICE PartialsPipeline(SharedStorage& storage, Params const& params) : Base(storage, per_warp(params)) {}

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

 private:
  CUTLASS_DEVICE static Params per_warp(Params params) {
    params.producer_arv_count = 1;
    params.consumer_arv_count /= cutlass::NumThreadsPerWarp;
    return params;
  }
};

}  // namespace flux
