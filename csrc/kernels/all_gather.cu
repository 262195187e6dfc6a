// Each block stores its part of the shard at all peers, says so to the block of its number there, and takes the same
// part of the peers' shards out of the exchange area as soon as these blocks have said the same.

#include "kernels/all_gather.hpp"

#include <algorithm>

#include "kernels/exchange_call.cuh"
#include "kernels/exchange_launch.cuh"
#include "schedule/chunk_order.hpp"

namespace flux {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // loads of a thread

// visit(i, from[i]) for each vector of this block's part.
template <class Visit>
__device__ __forceinline__ void each_vector(int64_t num_vectors, uint4 const* from, Visit const& visit) {
  int64_t const end = num_vectors * (blockIdx.x + 1) / gridDim.x;
  for (int64_t i = num_vectors * blockIdx.x / gridDim.x + threadIdx.x; i < end; i += kInFlight * kThreads) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < end) v[j] = from[i + j * kThreads];
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < end) visit(i + j * kThreads, v[j]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) all_gather_kernel(__grid_constant__ AllGatherArgs const args) {
  wait_for_last_kernel();
  ExchangeArgs const& exchange = args.exchange;
  ExchangeCall const call(exchange);
  int const rank = exchange.rank, world = exchange.world, thread = threadIdx.x;
  if (blockIdx.x == 0 && thread < 32) call.announce(thread);
  auto const area = [&](int at, int source) {
    return reinterpret_cast<uint4*>(exchange.slots[at]) + call.parity() * (kGatherBytes / 16) +
           source * args.num_vectors;
  };
  auto* const gathered = static_cast<uint4*>(args.gathered);

  each_vector(args.num_vectors, static_cast<uint4 const*>(args.shard), [&](int64_t i, uint4 const& v) {
#pragma unroll 1
    for (int step = 1; step < world; ++step) area(wrap_rank(rank + step, world), rank)[i] = v;
    gathered[rank * args.num_vectors + i] = v;
  });
  __syncthreads();
  if (blockIdx.x == 0 && thread < 32) call.compare(thread);
  if (thread < world && thread != rank) {
    store_release_sys(&exchange.words[thread]->pushed[call.parity()][rank][0][blockIdx.x], call.wait().signal);
    Epoch const* const word = &exchange.words[rank]->pushed[call.parity()][thread][0][blockIdx.x];
    wait_signal(call.wait(), word, thread, /*piece=*/0, -1, -1);
  }
  __syncthreads();
  for (int step = 1; step < world; ++step) {
    int const source = wrap_rank(rank - step, world);
    each_vector(args.num_vectors, area(rank, source),
                [&](int64_t i, uint4 const& v) { gathered[source * args.num_vectors + i] = v; });
  }
  __syncthreads();
  if (thread == 0) call.end();
}

}  // namespace

cudaError_t all_gather(AllGatherArgs const& args, cudaStream_t stream) {
  // As many on every rank: each has one to talk to.
  int64_t const blocks = std::min<int64_t>(ceil_div(args.num_vectors, kThreads), kMaxPushers);
  return launch_exchange(all_gather_kernel, kThreads, blocks, blocks, args, stream);
}

}  // namespace flux
