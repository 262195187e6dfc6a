#pragma once
// How the CTAs of a cluster that share a tile add up their parts of it. The accumulators of a tile fall into a slice
// for each CTA; every CTA stores what it has of another's slice into that one's shared memory.
//
//   arrived   the others' parts of this CTA's slice have come
//   free      all CTAs of the cluster have read what had come before: this one may store its next parts

#include "cutlass/arch/barrier.h"

namespace flux {

struct SplitBarriers {
  uint64_t arrived, free;

  __device__ void init(int ctas, int warps) {
    cutlass::arch::ClusterBarrier::init(&arrived, 1);
    cutlass::arch::ClusterBarrier::init(&free, ctas * warps);
  }
};

// Bytes that the others' parts, in fp32, of a tile of so many elements take at each CTA.
constexpr int split_bytes(int elements, int ctas) { return elements / ctas * (ctas - 1) * 4; }

__device__ __forceinline__ uint32_t address_in_cluster(void const* shared, int cta) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(cute::cast_smem_ptr_to_uint(shared)), "r"(cta));
  return address;
}

__device__ __forceinline__ void wait_in_cluster(uint64_t* barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n"
      "}\n" ::"r"(cute::cast_smem_ptr_to_uint(barrier)),
      "r"(phase)
      : "memory");
}

// Adds up the slice of this CTA over the cluster: its sums are the first values of `acc` then. For all math threads;
// `turn` counts the tiles. `buffer` is in shared memory, of split_bytes(); after the last tile each thread may use
// there what it has read. The order of the adds depends on the CTA's number alone.
template <int Ctas, int Parts, class Accumulators>
__device__ void add_slices(SplitBarriers& barriers, void* buffer, int cta, int turn, bool is_last, int thread,
                           Accumulators& acc) {
  constexpr int kCount = decltype(cute::size(acc))::value / Ctas;
  constexpr int kThreads = Parts * 128, kSliceBytes = kCount * 4 * kThreads;
  static_assert(kCount % 4 == 0 && split_bytes(Ctas * kCount * kThreads, Ctas) == (Ctas - 1) * kSliceBytes);
  auto const offset = [&](int source, int i) { return source * kSliceBytes + (i / 4 * kThreads + thread) * 16; };
  if (thread == 0) {
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&barriers.arrived, (Ctas - 1) * kSliceBytes);
  }
  if (turn > 0) wait_in_cluster(&barriers.free, (turn - 1) & 1);
#pragma unroll
  for (int mine = 0; mine < Ctas; ++mine) {  // so that registers are known at compile time
    if (mine != cta) continue;
#pragma unroll
    for (int step = 1; step < Ctas; ++step) {
      int const other = (mine + step) % Ctas;
      uint32_t const to = address_in_cluster(buffer, other) + offset(mine < other ? mine : mine - 1, 0);
      uint32_t const signal = address_in_cluster(&barriers.arrived, other);
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                to + i / 4 * kThreads * 16),
            "f"(acc(other * kCount + i)), "f"(acc(other * kCount + i + 1)), "f"(acc(other * kCount + i + 2)),
            "f"(acc(other * kCount + i + 3)), "r"(signal)
            : "memory");
      }
    }
#pragma unroll
    for (int i = 0; i < kCount && mine > 0; ++i) acc(i) = acc(mine * kCount + i);
  }
  wait_in_cluster(&barriers.arrived, turn & 1);
#pragma unroll
  for (int source = 0; source < Ctas - 1; ++source) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      auto const values = *reinterpret_cast<float4 const*>(static_cast<char const*>(buffer) + offset(source, i));
      acc(i) += values.x;
      acc(i + 1) += values.y;
      acc(i + 2) += values.z;
      acc(i + 3) += values.w;
    }
  }
  __syncwarp();
  if (!is_last && thread % 32 < Ctas) {  // after the last tile the others may have left
    uint32_t const there = address_in_cluster(&barriers.free, thread % 32);
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
  }
}

}  // namespace flux
