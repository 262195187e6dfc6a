#pragma once
// How the rows of x of all ranks come together in a kernel for few rows (schedule/exchange_layout.hpp, gather): some
// CTAs store this rank's rows at every rank, slice by slice along K, in the order in which the product takes them. In
// how many parts does not depend on how many CTAs a rank has: with fewer, each stores several.

#include "cute/arch/util.hpp"
#include "kernels/exchange_call.cuh"
#include "kernels/few_rows_launch.hpp"
#include "schedule/chunk_order.hpp"

namespace flux {

constexpr int kPushWarps = 2, kWatchWarp = kPushWarps;

// The slices, along K, in which the rows of all ranks come.
class GatheredSlices {
 public:
  // `rows` of each rank.
  __device__ GatheredSlices(int rows, int k) : width_(gather_slice_k(rows, k)), count_(ceil_div(k, width_)) {}

  __device__ int width() const { return width_; }  // columns of each, but the last one
  __device__ int count() const { return count_; }

  // For the thread that loads: returns once column k of x has been counted, and the first column beyond its slice.
  // Columns beyond K are zeros that need not come.
  __device__ int take(int k, uint32_t* arrived) const {
    int const needed = min(k / width_ + 1, count_);
    for (int seen = 0; seen < needed;) {
      asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                   : "=r"(seen)
                   : "r"(cute::cast_smem_ptr_to_uint(arrived))
                   : "memory");
    }
    fence_async_proxy();
    return needed * width_;
  }

 private:
  int width_, count_;
};

class PushedRows {
 public:
  // `rows` of each rank. `most_ctas`: as many as the grid would have if all ran at once.
  __device__ PushedRows(ExchangeArgs const& args, ExchangeCall const& call, int rows, int k, int most_ctas)
      : args_(args),
        wait_(call.wait()),
        parity_(call.parity()),
        rows_(rows),
        row_vectors_(k / kVector),
        slices_(rows, k) {
    parts_ = min(most_ctas, kMaxPushers);
    slice_vectors_ = slices_.width() / kVector;
  }

  // For one warp: counts the slices that have arrived from all ranks.
  __device__ void watch(uint32_t* slices) const {
    for (int slice = 0; slice < slices_.count(); ++slice) {
      wait_slice(slice);
      if (threadIdx.x % 32 == 0) {
        auto const to = cute::cast_smem_ptr_to_uint(slices);
        asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(to), "r"(slice + 1) : "memory");
      }
    }
  }

  // For the threads of the push warps.
  __device__ void push(void const* shard, int thread) const {
    int64_t const own = area_offset() + int64_t{args_.rank} * rows_ * row_vectors_;
    each_part([&](int slice, int part) {
      copy(static_cast<uint4 const*>(shard), slice, part, rows_, thread, [&](int64_t i, uint4 const& vector) {
        for (int step = 1; step <= args_.world; ++step) {
          reinterpret_cast<uint4*>(args_.slots[wrap_rank(args_.rank + step, args_.world)])[own + i] = vector;
        }
      });
      asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
      if (thread < args_.world) {
        store_release_sys(&args_.words[thread]->pushed[parity_][args_.rank][slice][part], wait_.signal);
      }
    });
  }

  // The same threads: copies the rows of all ranks to `gathered`.
  __device__ void copy_to(void* gathered, int thread) const {
    auto const* const area = reinterpret_cast<uint4 const*>(args_.slots[args_.rank]) + area_offset();
    each_part([&](int slice, int part) {
      wait_slice(slice);
      copy(area, slice, part, args_.world * rows_, thread,
           [&](int64_t i, uint4 const& vector) { static_cast<uint4*>(gathered)[i] = vector; });
    });
  }

 private:
  static constexpr int kVectorBytes = 16, kVector = kVectorBytes / 2, kThreads = kPushWarps * 32;

  // visit(slice, part) with what this CTA stores.
  template <class Visit>
  __device__ void each_part(Visit const& visit) const {
    for (int slice = 0; slice < slices_.count(); ++slice) {
      for (int part = blockIdx.x; part < parts_; part += gridDim.x) visit(slice, part);
    }
  }

  __device__ int64_t area_offset() const { return parity_ * (kGatherBytes / kVectorBytes); }

  __device__ void wait_slice(int slice) const {
    int const lane = threadIdx.x % 32;
    ExchangeWords const& local = *args_.words[args_.rank];
    for (int source = 0; source < args_.world; ++source) {
#pragma unroll
      for (int i = 0; i < kMaxPushers; i += 32) {
        if (i + lane < parts_) {
          wait_signal(wait_, &local.pushed[parity_][source][slice][i + lane], source, slice, -1, -1);
        }
      }
    }
    __syncwarp();
  }

  // This thread's vectors of a part of a slice of `rows` rows.
  template <class Store>
  __device__ void copy(uint4 const* from, int slice, int part, int rows, int thread, Store const& store) const {
    constexpr int kUnroll = 4;
    int const begin = slice * slice_vectors_, width = min(slice_vectors_, row_vectors_ - begin);
    int const count = rows * width, stride = parts_ * kThreads;
    auto const place = [&](int i) { return int64_t{i / width} * row_vectors_ + begin + i % width; };
    for (int i = part * kThreads + thread; i < count; i += stride * kUnroll) {
      uint4 vectors[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (i + j * stride < count) vectors[j] = from[place(i + j * stride)];
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (i + j * stride < count) store(place(i + j * stride), vectors[j]);
      }
    }
  }

  ExchangeArgs const& args_;
  SignalWait wait_;
  int parity_, rows_, row_vectors_, parts_, slice_vectors_;
  GatheredSlices slices_;
};

}  // namespace flux
