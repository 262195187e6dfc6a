#pragma once
// The exchange of partials by the kernels for few rows: thread t of a group on every rank holds the same words of the
// same unit, and the data is its own signal (schedule/exchange_layout.hpp).

#include "comm/signal.cuh"
#include "cutlass/numeric_conversion.h"
#include "kernels/few_rows_launch.hpp"
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
  __device__ Exchange(ExchangeArgs const& args, int32_t num_units, int parity, Epoch signal, int thread)
      : args_(args),
        num_units_(num_units),
        signal_(signal),
        base_(parity * (args.slots_bytes / 4) + thread * kVectorWords) {}

  // Stores a partial into this rank's slot at every rank that adds it up, next rank first. This rank's own goes through
  // memory too if other threads add it up; all ranks add the same rounded values. `mask_of(rank)` has a bit for each
  // vector that the rank needs.
  template <class MaskOf>
  __device__ void send_partial(int32_t unit, Vector const (&partial)[kVectors], bool to_self,
                               MaskOf const& mask_of) const {
    int64_t const number = exchange_slot(args_.form, unit, args_.world, args_.rank);
    if (args_.form == ExchangeForm::kTwoShot) {
      int const owner = exchange_owner(unit, args_.world);
      if (to_self || owner != args_.rank) store(owner, number, partial, mask_of(owner));
      return;
    }
    for (int step = 1; step < args_.world + int(to_self); ++step) {
      int const peer = wrap_rank(args_.rank + step, args_.world);
      store(peer, number, partial, mask_of(peer));
    }
  }

  // The sums of all ranks' partials of a group of vectors (the more, the fewer times the latency counts), in rank order
  // and in fp32, + the bias of even and of odd words, rounded. `own`: this rank's partial of the group, or null if it
  // went through memory.
  template <int Group>
  __device__ void reduce(int32_t unit, int group, uint32_t mask, float2 bias, Vector const* own,
                         Vector (&sums)[Group]) const {
    float sum[2 * Group * kVectorWords];
#pragma unroll
    for (float& value : sum) value = 0.0f;
    for (int first_source = 0; first_source < args_.world; first_source += kSources) {
      Vector parts[kSources][Group];
      receive(unit, first_source, group, parts, own != nullptr, mask);
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        if (first_source + i >= args_.world) continue;
        if (own != nullptr && first_source + i == args_.rank) {
#pragma unroll
          for (int v = 0; v < Group; ++v) parts[i][v] = own[v];
        }
#pragma unroll
        for (int w = 0; w < Group * kVectorWords; ++w) {
          float2 const pair = unpack(parts[i][w / kVectorWords].word[w % kVectorWords]);
          sum[2 * w] += pair.x;
          sum[2 * w + 1] += pair.y;
        }
      }
    }
#pragma unroll
    for (int w = 0; w < Group * kVectorWords; ++w) {
      float const b = w % 2 == 0 ? bias.x : bias.y;
      sums[w / kVectorWords].word[w % kVectorWords] = pack(sum[2 * w] + b, sum[2 * w + 1] + b);
    }
  }

  // Stores a group of the sums of a unit that this rank owns into the unit's slot at all peers, next rank first.
  template <int Group>
  __device__ void send_sum(int32_t unit, int group, Vector const (&sums)[Group], uint32_t mask) const {
    int64_t const number = exchange_sum_slot(unit, num_units_, args_.world);
    for (int step = 1; step < args_.world; ++step) {
#pragma unroll
      for (int v = 0; v < Group; ++v) {
        if (mask >> (group + v) & 1) {
          store_relaxed(slot(wrap_rank(args_.rank + step, args_.world), number, group + v), sums[v]);
        }
      }
    }
  }

  // A group of the sums that the unit's owner has sent.
  template <int Group>
  __device__ void receive_sum(int32_t unit, int group, Vector (&sums)[Group], uint32_t mask) const {
    int64_t const number = exchange_sum_slot(unit, num_units_, args_.world);
    Poll poll(*this);
    for (;;) {
      bool arrived = true;
#pragma unroll
      for (int v = 0; v < Group; ++v) {
        if (mask >> (group + v) & 1) load(slot(args_.rank, number, group + v), sums[v]);
      }
#pragma unroll
      for (int v = 0; v < Group; ++v) arrived = arrived && (!(mask >> (group + v) & 1) || is_full(sums[v]));
      if (arrived) break;
      poll.again(exchange_owner(unit, args_.world), unit);
    }
#pragma unroll
    for (int v = 0; v < Group; ++v) {
      if (mask >> (group + v) & 1) empty(slot(args_.rank, number, group + v));
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
  static constexpr int kSources = 2;

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

  __device__ uint32_t* slot(int at, int64_t number, int v) const {
    return args_.slots[at] + base_ + number * kUnitWords + v * Threads * kVectorWords;
  }

  __device__ void store(int at, int64_t number, Vector const (&vectors)[kVectors], uint32_t mask) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (mask >> v & 1) store_relaxed(slot(at, number, v), vectors[v]);
    }
  }

  // The partials of a few sources; waits until all have arrived, and empties their slots.
  template <int Group>
  __device__ void receive(int32_t unit, int first_source, int group, Vector (&parts)[kSources][Group], bool but_own,
                          uint32_t mask) const {
    auto const each = [&](auto const& visit) {
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
#pragma unroll
        for (int v = 0; v < Group; ++v) {
          int const source = first_source + i, vector = group + v;
          bool const is_sent = source < args_.world && !(but_own && source == args_.rank) && (mask >> vector & 1);
          if (is_sent) {
            visit(source, slot(args_.rank, exchange_slot(args_.form, unit, args_.world, source), vector), parts[i][v]);
          }
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
  int32_t num_units_;
  Epoch signal_;
  int64_t base_;
};

}  // namespace flux
