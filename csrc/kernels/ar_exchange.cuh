#pragma once
// The exchange of gemm_ar for few rows: thread t of a CTA on every rank holds the same words of the same unit, and the
// data is its own signal (schedule/exchange_layout.hpp).

#include "comm/signal.cuh"
#include "cutlass/numeric_conversion.h"
#include "kernels/ar_launch.hpp"
#include "schedule/chunk_order.hpp"
#include "schedule/exchange_layout.hpp"

namespace flux {

// Words: of a thread, two 16-bit values each. Threads: that hold a unit.
template <class Element, int Words, int Threads>
class Exchange {
 public:
  static constexpr int kVectorWords = Words < 4 ? Words : 4;
  static constexpr int kVectors = Words / kVectorWords;
  static constexpr int32_t kUnitWords = Words * Threads;
  static_assert(Words == kVectors * kVectorWords);

  struct Vector {
    uint32_t word[kVectorWords];
  };
  struct Sums {  // of a unit, in fp32: what is left to do is the bias and the rounding
    float value[2 * Words];
  };

  __device__ Exchange(ExchangeArgs const& args, int parity, Epoch signal, int thread)
      : args_(args), signal_(signal), base_(parity * (kExchangeBytes / 4) + thread * kVectorWords) {}

  // Stores a partial into this rank's slot at every rank that adds up the unit: all, or its owner. This rank's own goes
  // through memory too: so each rank adds the same rounded values, and no registers hold them meanwhile. `mask` has a
  // bit for each vector that holds anything.
  __device__ void send_partial(int32_t unit, Vector const (&partial)[kVectors], uint32_t mask) const {
    if (args_.two_shot) {
      store(exchange_owner(unit, args_.world), unit, partial, mask);
    } else {
      for (int step = 1; step <= args_.world; ++step)
        store(wrap_rank(args_.rank + step, args_.world), unit, partial, mask);
    }
  }

  // Stores the sum of a unit that this rank owns into its slot at all peers, next rank first.
  __device__ void send_sum(int32_t unit, Vector const (&sum)[kVectors], uint32_t mask) const {
    for (int step = 1; step < args_.world; ++step) store(wrap_rank(args_.rank + step, args_.world), unit, sum, mask);
  }

  // The sum of all ranks' partials of a unit, in rank order.
  __device__ Sums reduce(int32_t unit, uint32_t mask) const {
    Sums sums;
#pragma unroll
    for (int i = 0; i < 2 * Words; ++i) sums.value[i] = 0.0f;
    for (int first_source = 0; first_source < args_.world; first_source += kSources) {
#pragma unroll
      for (int first_vector = 0; first_vector < kVectors; first_vector += kGroup) {
        Vector parts[kSources][kGroup];
        receive(unit, first_source, first_vector, parts, mask);
#pragma unroll
        for (int i = 0; i < kSources; ++i) {
          if (first_source + i >= args_.world) continue;
#pragma unroll
          for (int v = 0; v < kGroup; ++v) {
#pragma unroll
            for (int w = 0; w < kVectorWords; ++w) {
              float2 const pair = unpack(parts[i][v].word[w]);
              float* const sum = sums.value + ((first_vector + v) * kVectorWords + w) * 2;
              sum[0] += pair.x;
              sum[1] += pair.y;
            }
          }
        }
      }
    }
    return sums;
  }

  // The sum that the unit's owner has sent.
  __device__ void receive_sum(int32_t unit, Vector (&sum)[kVectors], uint32_t mask) const {
    int const owner = exchange_owner(unit, args_.world);
    Poll poll(*this);
    for (;;) {
      bool arrived = true;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (!(mask >> v & 1)) continue;
        load(slot(args_.rank, unit, owner, v), sum[v]);
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) arrived = arrived && (!(mask >> v & 1) || is_full(sum[v]));
      if (arrived) break;
      poll.again(owner, unit);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (mask >> v & 1) empty(slot(args_.rank, unit, owner, v));
    }
  }

  static __device__ uint32_t pack(float x, float y) {
    cutlass::NumericArrayConverter<Element, float, 2> convert;
    cutlass::Array<float, 2> values;
    values[0] = x;
    values[1] = y;
    cutlass::Array<Element, 2> const packed = convert(values);
    return reinterpret_cast<uint32_t const&>(packed);
  }

 private:
  // What is polled together: the more loads are under way, the fewer times their latency counts.
  static constexpr int kSources = 4;
  static constexpr int kGroup = kVectors < 2 ? kVectors : 2;
  static_assert(kVectors % kGroup == 0);

  // Bounds a wait.
  struct Poll {
    Exchange const& exchange;
    uint64_t start = 0;
    uint32_t count = 0;
    __device__ explicit Poll(Exchange const& e) : exchange(e) {}
    __device__ void again(int peer, int32_t unit) {
      if (++count % 64 != 0) return;
      SignalWait const& wait = exchange.args_.wait;
      uint64_t const now = global_timer_ns();
      if (start == 0) start = now;
      if (now - start > wait.timeout_ns) report_fault(wait, peer, 0, 0, unit, exchange.signal_, 0);
    }
  };

  static __device__ float2 unpack(uint32_t word) {
    cutlass::NumericArrayConverter<float, Element, 2> convert;
    cutlass::Array<float, 2> const values = convert(reinterpret_cast<cutlass::Array<Element, 2> const&>(word));
    return {values[0], values[1]};
  }

  __device__ uint32_t* slot(int at, int32_t unit, int source, int v) const {
    return args_.slots[at] + base_ + exchange_slot(unit, args_.world, source, kUnitWords) + v * Threads * kVectorWords;
  }

  __device__ void store(int peer, int32_t unit, Vector const (&vectors)[kVectors], uint32_t mask) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (mask >> v & 1) store_relaxed(slot(peer, unit, args_.rank, v), vectors[v]);
    }
  }

  // The partials of a few sources; waits until all have arrived, and empties their slots.
  __device__ void receive(int32_t unit, int first_source, int first_vector, Vector (&parts)[kSources][kGroup],
                          uint32_t mask) const {
    auto const each = [&](auto const& visit) {
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
#pragma unroll
        for (int v = 0; v < kGroup; ++v) {
          int const source = first_source + i, vector = first_vector + v;
          bool const is_sent = source < args_.world && (mask >> vector & 1);
          if (is_sent) visit(source, slot(args_.rank, unit, source, vector), parts[i][v]);
        }
      }
    };
    Poll poll(*this);
    for (;;) {
      int missing = -1;
      each([](int, uint32_t* from, Vector& vector) { load(from, vector); });
      each([&](int source, uint32_t*, Vector& vector) {
        if (!is_full(vector)) missing = source;
      });
      if (missing < 0) break;
      poll.again(missing, unit);
    }
    each([](int, uint32_t* at, Vector&) { empty(at); });
  }

  static __device__ bool is_full(Vector const& vector) {
    bool full = true;
#pragma unroll
    for (int w = 0; w < kVectorWords; ++w) full = full && vector.word[w] != kEmptyWord;
    return full;
  }

  static __device__ void empty(uint32_t* slot) {
    Vector vector;
#pragma unroll
    for (int w = 0; w < kVectorWords; ++w) vector.word[w] = kEmptyWord;
    store_relaxed(slot, vector);
  }

  static __device__ void store_relaxed(uint32_t* to, Vector const& v) {
    if constexpr (kVectorWords == 4) {
      asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
                   "r"(v.word[2]), "r"(v.word[3])
                   : "memory");
    } else {
      static_assert(kVectorWords == 2);
      asm volatile("st.relaxed.sys.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]) : "memory");
    }
  }

  static __device__ void load(uint32_t const* from, Vector& v) {
    if constexpr (kVectorWords == 4) {
      asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                   : "l"(from)
                   : "memory");
    } else {
      asm volatile("ld.relaxed.sys.global.v2.b32 {%0, %1}, [%2];"
                   : "=r"(v.word[0]), "=r"(v.word[1])
                   : "l"(from)
                   : "memory");
    }
  }

  ExchangeArgs const& args_;
  Epoch signal_;
  int64_t base_;
};

}  // namespace flux
