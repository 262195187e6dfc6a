#pragma once
// The exchange of partials by the kernels for few rows and by the all-reduce after a library GEMM: thread t of a group
// on every rank holds the same words of the same unit, and the data is its own signal (schedule/exchange_layout.hpp).
//
// A kernel comes here once or a few times: fetching instructions takes longer than running them. So loops are rolled,
// but for the loads whose latencies should overlap, and what they need is computed before them.

#include "cutlass/numeric_conversion.h"
#include "kernels/exchange_call.cuh"
#include "schedule/chunk_order.hpp"
#include "schedule/exchange_layout.hpp"

namespace flux {

struct ExchangeUnit {
  int32_t number;
  int32_t columns, first_vector;  // where it lies in y: which 64 columns, and from which 16 rows on
};

// Words: of a thread, two 16-bit values each. Threads: that hold a unit. Share: vectors of a share (two-shot).
template <class Element, int Words, int Threads, int Share>
class Exchange {
 public:
  static constexpr int kVectorWords = 4;
  static constexpr int kVectors = Words / kVectorWords, kShare = Share, kShares = kVectors / Share;
  static_assert(Words == kVectors * kVectorWords && kVectors == kShares * Share);

  struct alignas(4 * kVectorWords) Vector {
    uint32_t word[kVectorWords];
  };
  __device__ Exchange(ExchangeArgs const& args, int32_t num_units, ExchangeCall const& call, int thread)
      : args_(args),
        num_units_(num_units),
        signal_(call.wait().signal),
        base_(call.parity() * (args.slots_bytes / 4) + thread * kVectorWords),
        source_vectors_(args.form == ExchangeForm::kScatter   ? scatter_vectors(args.own_rows)
                        : args.form == ExchangeForm::kTwoShot ? kShare
                                                              : kVectors) {}

  // Two-shot: a bit for each vector of a unit that this rank adds up.
  __device__ uint32_t owned(ExchangeUnit const& unit) const {
    uint32_t mask = 0;
    each_share(unit, [&](int share, int owner) {
      if (owner == args_.rank) mask |= ((1u << kShare) - 1) << share * kShare;
    });
    return mask;
  }

  // Stores a partial into this rank's slot at every rank that adds it up, next rank first. This rank's own goes through
  // memory too if other threads add it up; all ranks add the same rounded values. `mask_of(rank)` has a bit for each
  // vector with rows that the rank takes part in.
  template <class MaskOf>
  __device__ void send_partial(ExchangeUnit const& unit, Vector const (&partial)[kVectors], bool to_self,
                               MaskOf const& mask_of) const {
#pragma unroll 1
    for (int step = 1; step < args_.world + int(to_self); ++step) {
      int const peer = wrap_rank(args_.rank + step, args_.world);
      uint32_t const mask = mask_of(peer);
      if (args_.form != ExchangeForm::kTwoShot) {
        store<kVectors>(partial_at(peer, unit, args_.rank, 0), partial, mask);
        continue;
      }
      each_share(unit, [&](int share, int owner) {
        int const first = share * kShare;
        if (owner == peer) store<kShare>(partial_at(peer, unit, args_.rank, first), partial + first, mask >> first);
      });
    }
  }

  // The sums of all ranks' partials of a group of vectors (the more, the fewer times the latency counts), in rank order
  // and in fp32, + bias(w) of word w of the group, rounded. `own(v)`: this rank's partial of a vector, if `has_own`;
  // else it went through memory. Two-shot: the group lies in one share.
  template <int Group, class Bias, class Own>
  __device__ void reduce(ExchangeUnit const& unit, int group, uint32_t mask, Bias const& bias, bool has_own,
                         Own const& own, Vector (&sums)[Group]) const {
    float sum[Group][2 * kVectorWords] = {};
    Vector* from = partial_at(args_.rank, unit, 0, group);
#pragma unroll 1
    for (int source = 0; source < args_.world; source += kSources, from += kSources * source_vectors_ * Threads) {
      Vector parts[kSources][Group] = {};
      uint32_t sent[kSources];  // a bit for each vector
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        bool const is_own = has_own && source + i == args_.rank;
        sent[i] = source + i < args_.world && !is_own ? mask >> group : 0;
#pragma unroll
        for (int v = 0; v < Group; ++v) {
          if (is_own) parts[i][v] = own(group + v);
        }
      }
      receive(from, sent, parts, [&](int i, int) { return source + i; }, unit);
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
#pragma unroll
        for (int w = 0; w < Group * kVectorWords; ++w) {
          float2 const pair = unpack(parts[i][w / kVectorWords].word[w % kVectorWords]);
          sum[w / kVectorWords][w % kVectorWords * 2] += pair.x;
          sum[w / kVectorWords][w % kVectorWords * 2 + 1] += pair.y;
        }
      }
    }
#pragma unroll
    for (int w = 0; w < Group * kVectorWords; ++w) {
      float2 const b = bias(w);
      float const* const pair = sum[w / kVectorWords] + w % kVectorWords * 2;
      sums[w / kVectorWords].word[w % kVectorWords] = pack(pair[0] + b.x, pair[1] + b.y);
    }
  }

  // Stores a group of sums that this rank has added up into their slots at all peers, next rank first.
  template <int Group>
  __device__ void send_sum(ExchangeUnit const& unit, int group, Vector const (&sums)[Group], uint32_t mask) const {
#pragma unroll 1
    for (int step = 1; step < args_.world; ++step) {
      store<Group>(sum_at(wrap_rank(args_.rank + step, args_.world), unit, group), sums, mask >> group);
    }
  }

  // A group of the sums that their owners have sent.
  template <int Group>
  __device__ void receive_sum(ExchangeUnit const& unit, int group, Vector (&sums)[1][Group], uint32_t mask) const {
    uint32_t const sent[] = {mask >> group};
    auto const owner = [&](int, int v) {
      return exchange_owner(share_of_vector(unit.number, group + v, kVectors, kShare), args_.world);
    };
    receive(sum_at(args_.rank, unit, group), sent, sums, owner, unit);
  }

  static __device__ float2 unpack(uint32_t word) {
    cutlass::NumericArrayConverter<float, Element, 2> convert;
    cutlass::Array<float, 2> const values = convert(reinterpret_cast<cutlass::Array<Element, 2> const&>(word));
    return {values[0], values[1]};
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
    template <class Peer>
    __device__ void again(Peer const& peer, ExchangeUnit const& unit) {
      if (++count % 64 != 0) return;
      SignalWait const& wait = exchange.args_.wait;
      uint64_t const now = global_timer_ns();
      if (start == 0) start = now;
      if (now - start > wait.timeout_ns) report_fault(wait, peer(), 0, 0, unit.number, exchange.signal_, 0);
    }
  };

  // visit(share, counted in the unit, and its owner).
  template <class Visit>
  __device__ void each_share(ExchangeUnit const& unit, Visit const& visit) const {
    int32_t const first = share_of_vector(unit.number, 0, kVectors, kShare);
    int owner = exchange_owner(first, args_.world), left = shares_left_in_slot(first, args_.world);
#pragma unroll
    for (int share = 0; share < kShares; ++share) {
      visit(share, owner);
      owner = next_owner(owner, &left, args_.world);
    }
  }

  // This thread's first vector of a group of the partial of `source`, and of the sum, in the slots of rank `at`. The
  // thread's next one, of partials in a two-shot exchange the next one of the share, lies `Threads` vectors further.
  __device__ Vector* partial_at(int at, ExchangeUnit const& unit, int source, int group) const {
    if (args_.form == ExchangeForm::kTwoShot) {
      return vector_at(at, share_place(unit.number, group, kVectors, kShare, args_.world, source));
    }
    int64_t const place = args_.form == ExchangeForm::kScatter
                              ? scatter_place(unit.columns, source, args_.world, unit.first_vector, at, args_.own_rows)
                              : exchange_slot(args_.form, unit.number, args_.world, source) * kVectors;
    return vector_at(at, place + group);
  }
  __device__ Vector* sum_at(int at, ExchangeUnit const& unit, int group) const {
    return vector_at(at, sum_place(unit.number, group, kVectors, kShare, num_units_, args_.world));
  }
  __device__ Vector* vector_at(int at, int64_t place) const {
    return reinterpret_cast<Vector*>(args_.slots[at] + base_) + place * Threads;
  }

  template <int Count>
  static __device__ void store(Vector* to, Vector const* vectors, uint32_t mask) {
#pragma unroll
    for (int v = 0; v < Count; ++v) {
      if (mask >> v & 1) store_relaxed(to + v * Threads, vectors[v]);
    }
  }

  // The vectors that a few sources have sent, whose slots follow each other; waits until all have arrived, and empties
  // the slots.
  template <int Sources, int Group, class RankOf>
  __device__ void receive(Vector* from, uint32_t const (&sent)[Sources], Vector (&parts)[Sources][Group],
                          RankOf const& rank_of, ExchangeUnit const& unit) const {
    auto const each = [&](auto const& visit) {
#pragma unroll
      for (int i = 0; i < Sources; ++i) {
#pragma unroll
        for (int v = 0; v < Group; ++v) {
          if (sent[i] >> v & 1) visit(i, v, from + (i * source_vectors_ + v) * Threads, parts[i][v]);
        }
      }
    };
    Poll poll(*this);
    for (;;) {
      int missing = -1, source = 0;  // a vector that is missing, and whose
      each([](int, int, Vector const* at, Vector& vector) { load(at, vector); });
      each([&](int i, int v, Vector const*, Vector const& vector) {
        if (!is_full(vector)) {
          source = i;
          missing = v;
        }
      });
      if (missing < 0) break;
      poll.again([&] { return rank_of(source, missing); }, unit);
    }
    each([](int, int, Vector* at, Vector const&) { empty(at); });
  }

  static __device__ bool is_full(Vector const& vector) {
    bool full = true;
#pragma unroll
    for (int w = 0; w < kVectorWords; ++w) full = full && vector.word[w] != kEmptyWord;
    return full;
  }

  static __device__ void empty(Vector* slot) {
    Vector vector;
#pragma unroll
    for (int w = 0; w < kVectorWords; ++w) vector.word[w] = kEmptyWord;
    store_relaxed(slot, vector);
  }

  static __device__ void store_relaxed(Vector* to, Vector const& v) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
  }

  static __device__ void load(Vector const* from, Vector& v) {
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from)
                 : "memory");
  }

  ExchangeArgs const& args_;
  int32_t num_units_;
  Epoch signal_;
  int64_t base_;
  int source_vectors_;  // of the partials of a source, one after the other
};

}  // namespace flux
