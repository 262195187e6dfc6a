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

  // For the threads of the push warps. The signal that a part has been stored takes as long as the stores; meanwhile
  // the first vectors of the next part are on their way.
  __device__ void push(void const* shard, int thread) const {
    auto const* const from = static_cast<uint4 const*>(shard);
    int64_t const own = area_offset() + int64_t{args_.rank} * rows_ * row_vectors_;
    uint4 vectors[kInFlight];
    auto const store = [&](Vectors const& part) {
      part.each([&](int j, int64_t i) {
        for (int step = 1; step <= args_.world; ++step) {
          reinterpret_cast<uint4*>(args_.slots[wrap_rank(args_.rank + step, args_.world)])[own + i] = vectors[j];
        }
      });
    };
    auto const load = [&](Vectors const& part) { part.each([&](int j, int64_t i) { vectors[j] = from[i]; }); };
    Part at = first_part();
    Vectors part = vectors_of(at, rows_, thread);
    load(part);
    while (at.slice < slices_.count()) {
      store(part);
      for (part.skip(); part.any(); part.skip()) {
        load(part);
        store(part);
      }
      Part const stored = at;
      at = next_part(at);
      part = vectors_of(at, rows_, thread);
      load(part);
      asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
      if (thread < args_.world) {
        store_release_sys(&args_.words[thread]->pushed[parity_][args_.rank][stored.slice][stored.number], wait_.signal);
      }
    }
  }

  // The same threads: copies the rows of all ranks to `gathered`.
  __device__ void copy_to(void* gathered, int thread) const {
    auto const* const area = reinterpret_cast<uint4 const*>(args_.slots[args_.rank]) + area_offset();
    for (Part at = first_part(); at.slice < slices_.count(); at = next_part(at)) {
      wait_slice(at.slice);
      for (Vectors part = vectors_of(at, args_.world * rows_, thread); part.any(); part.skip()) {
        uint4 vectors[kInFlight];
        part.each([&](int j, int64_t i) { vectors[j] = area[i]; });
        part.each([&](int j, int64_t i) { static_cast<uint4*>(gathered)[i] = vectors[j]; });
      }
    }
  }

 private:
  static constexpr int kVectorBytes = 16, kVector = kVectorBytes / 2, kThreads = kPushWarps * 32, kInFlight = 4;

  struct Part {
    int slice, number;
  };
  // What this CTA stores, one after the other.
  __device__ Part first_part() const {
    return {int(blockIdx.x) < parts_ ? 0 : slices_.count(), static_cast<int>(blockIdx.x)};
  }
  __device__ Part next_part(Part part) const {
    part.number += gridDim.x;
    return part.number < parts_ ? part : Part{part.slice + 1, static_cast<int>(blockIdx.x)};
  }

  // A thread's vectors of a part of a slice, in batches.
  struct Vectors {
    int i, end, stride;         // counted through the slice
    int row, column;            // of i
    int row_step, column_step;  // of the stride
    int begin, width, row_vectors;

    __device__ bool any() const { return i < end; }
    // visit(j, place in the rows) for each vector of the batch.
    template <class Visit>
    __device__ void each(Visit const& visit) const {
      Vectors at = *this;
#pragma unroll
      for (int j = 0; j < kInFlight; ++j, at.step()) {
        if (at.any()) visit(j, int64_t{at.row} * row_vectors + begin + at.column);
      }
    }
    // Goes on to the next batch.
    __device__ void skip() {
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) step();
    }
    __device__ void step() {
      bool const wraps = column + column_step >= width;
      i += stride;
      row += row_step + int(wraps);
      column += column_step - (wraps ? width : 0);
    }
  };
  // None of a part that there is not.
  __device__ Vectors vectors_of(Part part, int rows, int thread) const {
    int const begin = part.slice * slice_vectors_, width = min(slice_vectors_, row_vectors_ - begin);
    int const first = part.number * kThreads + thread, stride = parts_ * kThreads;
    if (width <= 0) return {};
    return {first,          rows * width,   stride, first / width, first % width,
            stride / width, stride % width, begin,  width,         row_vectors_};
  }

  __device__ int64_t area_offset() const { return parity_ * (kGatherBytes / kVectorBytes); }

  // For one warp. The words of a few sources are read at once, so that the latency counts once.
  __device__ void wait_slice(int slice) const {
    constexpr int kWords = kMaxPushers / 32, kSources = 4;
    int const lane = threadIdx.x % 32;
    ExchangeWords const& local = *args_.words[args_.rank];
    Epoch const least = make_signal(signal_epoch(wait_.signal), 0);
    for (int first = 0; first < args_.world; first += kSources) {
      uint64_t start = 0;
      for (;;) {
        Epoch seen[kSources][kWords];
        int missing = -1;
        Epoch wrong = 0;
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            bool const is_one = first + s < args_.world && w * 32 + lane < parts_;
            seen[s][w] =
                is_one ? load_relaxed_sys(&local.pushed[parity_][first + s][slice][w * 32 + lane]) : wait_.signal;
          }
        }
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) {
            if (seen[s][w] == wait_.signal || wrong >= least) continue;  // another call is said at once
            missing = first + s;
            wrong = seen[s][w];
          }
        }
        if (missing < 0) break;
        uint64_t const now = global_timer_ns();
        if (start == 0) start = now;
        if (wrong >= least || now - start > wait_.timeout_ns) {
          report_fault(wait_, missing, slice, -1, -1, wait_.signal, wrong);
        }
      }
    }
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    __syncwarp();
  }

  ExchangeArgs const& args_;
  SignalWait wait_;
  int parity_, rows_, row_vectors_, parts_, slice_vectors_;
  GatheredSlices slices_;
};

}  // namespace flux
