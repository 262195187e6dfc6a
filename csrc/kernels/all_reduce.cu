// Each block sends its units of the partial, adds up those that this rank owns (one-shot: all), and in the two-shot
// form sends these sums and receives the others. Groups of units, one of each owner, take these steps one behind the
// other, so that a block never waits for what the peers have only begun: while group i is added up, group i + 1 is on
// its way, and so are the sums of group i - 1. Of a group each rank begins with the unit that the next rank owns, so
// that not all send to one.
//
// All ranks take the groups in one order. A partial waits for nothing but groups before its own, and a sum for these
// and the partials of its own group: no order of the blocks can make ranks wait in a circle.

#include "kernels/all_reduce.hpp"

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "kernels/exchange.cuh"
#include "kernels/exchange_launch.cuh"

namespace flux {
namespace {

__host__ __device__ int64_t y_bytes(AllReduceArgs const& args) { return int64_t{args.num_vectors} * 16; }

template <class Element>
class AllReduce {
 public:
  __device__ AllReduce(AllReduceArgs const& args, ExchangeCall const& call)
      : args_(args),
        num_units_(static_cast<int>(all_reduce_units(y_bytes(args)))),
        num_groups_(static_cast<int>(all_reduce_groups(args.exchange.form, y_bytes(args), args.exchange.world))),
        transfer_(args.exchange, num_units_, call, threadIdx.x) {}

  __device__ int num_groups() const { return num_groups_; }

  __device__ void send(int group) const {
    each_unit(group, [&](int unit) {
      Vector partial[kVectors];
      uint32_t const mask = mask_of(unit);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (mask >> v & 1) partial[v] = load(unit, v);
      }
      transfer_.send_partial({unit, 0, 0}, partial, /*to_self=*/false, [mask](int) { return mask; });
    });
  }

  __device__ void reduce(int group) const {
    each_unit(group, [&](int unit) {
      if (!is_owner(unit)) return;
      uint32_t const mask = mask_of(unit);
      Vector sums[kVectors];
      transfer_.template reduce<kVectors>(
          {unit, 0, 0}, 0, mask, [&](int word) { return bias(unit, word); }, /*has_own=*/true,
          [&](int v) { return mask >> v & 1 ? load(unit, v) : Vector{}; }, sums);
      if (is_two_shot()) transfer_.send_sum({unit, 0, 0}, 0, sums, mask);
      store(unit, mask, sums);
    });
  }

  __device__ void receive(int group) const {
    each_unit(group, [&](int unit) {
      if (is_owner(unit)) return;
      uint32_t const mask = mask_of(unit);
      Vector sums[1][kVectors];
      transfer_.receive_sum({unit, 0, 0}, 0, sums, mask);
      store(unit, mask, sums[0]);
    });
  }

 private:
  static constexpr int kVectors = kAllReduceVectors;
  static constexpr uint32_t kUnit = kAllReduceThreads * kVectors;  // vectors
  using Transfer = Exchange<Element, 4 * kVectors, kAllReduceThreads, /*Share=*/kVectors>;
  using Vector = typename Transfer::Vector;
  static_assert(sizeof(Vector) == 16 && Transfer::kVectors == kVectors);

  __device__ bool is_two_shot() const { return args_.exchange.form == ExchangeForm::kTwoShot; }
  __device__ bool is_owner(int unit) const {
    return !is_two_shot() || exchange_owner(unit, args_.exchange.world) == args_.exchange.rank;
  }

  template <class Visit>
  __device__ void each_unit(int group, Visit const& visit) const {
    if (group < 0 || group >= num_groups_) return;
    int const units = all_reduce_group_units(args_.exchange.form, args_.exchange.world);
    int next = is_two_shot() ? share_in_slot(group, args_.exchange.rank + 1, units) : 0;
#pragma unroll 1
    for (int i = 0; i < units; ++i, next = wrap_rank(next + 1, units)) {
      int const unit = group * units + next;
      if (unit < num_units_) visit(unit);
    }
  }

  __device__ uint32_t vector_at(int unit, int v) const { return unit * kUnit + v * kAllReduceThreads + threadIdx.x; }
  __device__ uint32_t mask_of(int unit) const {
    uint32_t mask = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) mask |= uint32_t{vector_at(unit, v) < args_.num_vectors} << v;
    return mask;
  }

  // Of y. Whatever NaNs the GEMM may have written, none is taken for an empty slot.
  __device__ Vector load(int unit, int v) const {
    Vector vector = static_cast<Vector const*>(args_.y)[vector_at(unit, v)];
#pragma unroll
    for (uint32_t& word : vector.word) {
      if (word == kEmptyWord) word = kEmptyWord & 0x7fff7fffu;
    }
    return vector;
  }
  __device__ void store(int unit, uint32_t mask, Vector const (&vectors)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (mask >> v & 1) static_cast<Vector*>(args_.y)[vector_at(unit, v)] = vectors[v];
    }
  }

  __device__ float2 bias(int unit, int word) const {
    if (args_.bias == nullptr) return {0, 0};
    uint32_t const column = vector_at(unit, word / 4) % args_.row_vectors;
    return Transfer::unpack(static_cast<Vector const*>(args_.bias)[column].word[word % 4]);
  }

  AllReduceArgs const& args_;
  int num_units_, num_groups_;
  Transfer transfer_;
};

template <class Element>
__global__ void __launch_bounds__(kAllReduceThreads, 2) all_reduce_kernel(__grid_constant__ AllReduceArgs const args) {
  wait_for_last_kernel();
  ExchangeCall const call(args.exchange);
  AllReduce<Element> const all_reduce(args, call);
  int const lane = threadIdx.x;
  if (blockIdx.x == 0 && lane < 32) call.announce(lane);
  int const stride = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int group = static_cast<int>(blockIdx.x); group < all_reduce.num_groups() + 2 * stride; group += stride) {
    all_reduce.send(group);
    if (group == 0 && lane < 32) call.compare(lane);
    all_reduce.reduce(group - stride);
    all_reduce.receive(group - 2 * stride);
  }
  __syncthreads();
  if (threadIdx.x == 0) call.end();
}

template <class Element>
cudaError_t launch(AllReduceArgs const& args, cudaStream_t stream) {
  int64_t const groups = all_reduce_groups(args.exchange.form, y_bytes(args), args.exchange.world);
  return launch_exchange(all_reduce_kernel<Element>, kAllReduceThreads, 1, groups, args, stream);
}

}  // namespace

cudaError_t all_reduce(AllReduceArgs const& args, DataType dtype, cudaStream_t stream) {
  return dtype == DataType::kBFloat16 ? launch<cutlass::bfloat16_t>(args, stream)
                                      : launch<cutlass::half_t>(args, stream);
}

}  // namespace flux
