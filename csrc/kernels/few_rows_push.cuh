#pragma once
// How the rows of x of all ranks come together in a kernel for few rows (schedule/exchange_layout.hpp, gather): some
// CTAs store this rank's rows at every rank, slice by slice along K, in the order in which the product takes them.

#include "cutlass/fast_math.h"

#include "kernels/exchange_call.cuh"
#include "kernels/few_rows_launch.hpp"
#include "schedule/chunk_order.hpp"

namespace flux {

constexpr int kPushWarps = 2, kWatchWarp = kPushWarps;

// The slices, along K, in which the rows of all ranks come.
class GatheredSlices {
 public:
  // `rows` of each rank.
  __device__ GatheredSlices(int rows, int k) : width_(gather_slice_k(rows, k)), count_((k + width_ - 1) / width_) {}

  __device__ int width() const { return width_; }  // columns of each, but the last one
  __device__ int count() const { return count_; }

  // For the thread that loads: returns once column k of x has been counted, and the first column beyond its slice.
  // Columns beyond K are zeros that need not come.
  __device__ int take(int k, uint32_t* arrived) const {
    int const needed = min(k / width_ + 1, count_);
    for (int seen = 0; seen < needed;) {
      asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(shared_address(arrived)) : "memory");
    }
    fence_async_proxy();
    return needed * width_;
  }

  static __device__ uint32_t shared_address(void const* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }

 private:
  int width_, count_;
};

class PushedRows {
 public:
  // `rows` of each rank. `num_ctas`: at least so many does the grid have on every rank. Needs no memory.
  __device__ PushedRows(ExchangeArgs const& args, int rows, int k, int num_ctas)
      : args_(args), rows_(rows), row_vectors_(k / kVector), slices_(rows, k), by_width_(slices_.width() / kVector) {
    pushers_ = min(num_ctas, kMaxPushers);
  }

  // For one warp: counts the slices that have arrived from all ranks.
  __device__ void watch(ExchangeCall const& call, uint32_t* arrived) const {
    for (int slice = 0; slice < slices_.count(); ++slice) {
      wait_slice(call, slice);
      if (threadIdx.x % 32 == 0) {
        auto const to = GatheredSlices::shared_address(arrived);
        asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(to), "r"(slice + 1) : "memory");
      }
    }
  }

  // For the threads of the push warps.
  __device__ void push(ExchangeCall const& call, void const* shard, int thread) const {
    int const pusher = blockIdx.x;
    if (pusher >= pushers_) return;
    int64_t const own = area_offset(call) + int64_t{args_.rank} * rows_ * row_vectors_;
    for (int slice = 0; slice < slices_.count(); ++slice) {
      copy(static_cast<uint4 const*>(shard), slice, rows_, thread, [&](int64_t i, uint4 const& vector) {
        for (int step = 1; step <= args_.world; ++step) {
          reinterpret_cast<uint4*>(args_.slots[wrap_rank(args_.rank + step, args_.world)])[own + i] = vector;
        }
      });
      asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
      if (thread < args_.world) {
        auto& words = args_.words[thread]->pushed[call.parity()][args_.rank][slice];
        store_release_sys(&words[pusher], call.wait().signal);
      }
    }
  }

  // The same threads: copies the rows of all ranks to `gathered`.
  __device__ void copy_to(void* gathered, ExchangeCall const& call, int thread) const {
    if (blockIdx.x >= pushers_) return;
    for (int slice = 0; slice < slices_.count(); ++slice) {
      wait_slice(call, slice);
      auto const* from = reinterpret_cast<uint4 const*>(args_.slots[args_.rank]) + area_offset(call);
      copy(from, slice, args_.world * rows_, thread,
           [&](int64_t i, uint4 const& vector) { static_cast<uint4*>(gathered)[i] = vector; });
    }
  }

 private:
  static constexpr int kVectorBytes = 16, kVector = kVectorBytes / 2, kThreads = kPushWarps * 32;

  static __device__ int64_t area_offset(ExchangeCall const& call) {
    return call.parity() * (kGatherBytes / kVectorBytes);
  }

  __device__ void wait_slice(ExchangeCall const& call, int slice) const {
    int const lane = threadIdx.x % 32;
    ExchangeWords const& local = *args_.words[args_.rank];
    for (int source = 0; source < args_.world; ++source) {
#pragma unroll
      for (int i = 0; i < kMaxPushers; i += 32) {
        if (i + lane < pushers_) {
          auto const* words = local.pushed[call.parity()][source][slice];
          wait_signal(call.wait(), &words[i + lane], source, slice, -1, -1);
        }
      }
    }
    __syncwarp();
  }

  // This thread's vectors of a slice of `rows` rows. The last slice may be narrower.
  template <class Store>
  __device__ void copy(uint4 const* from, int slice, int rows, int thread, Store const& store) const {
    constexpr int kUnroll = 4;
    int const begin = slice * by_width_.divisor, count = rows * by_width_.divisor, stride = pushers_ * kThreads;
    for (int i = blockIdx.x * kThreads + thread; i < count; i += stride * kUnroll) {
      uint4 vectors[kUnroll];
      int64_t places[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        int row, column;
        by_width_(row, column, i + j * stride);
        bool const is_there = i + j * stride < count && begin + column < row_vectors_;
        places[j] = is_there ? int64_t{row} * row_vectors_ + begin + column : -1;
        if (is_there) vectors[j] = from[places[j]];
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (places[j] >= 0) store(places[j], vectors[j]);
      }
    }
  }

  ExchangeArgs const& args_;
  int rows_, row_vectors_, pushers_;
  GatheredSlices slices_;
  cutlass::FastDivmod by_width_;
};

}  // namespace flux
