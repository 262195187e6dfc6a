#include "comm/collect.hpp"
#include "comm/replay.cuh"
#include "schedule/ar_schedule.hpp"

namespace flux {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // 16-byte loads of a thread

// Called by all threads of a block: to[begin, end) = from[begin, end).
__device__ __forceinline__ void copy(uint4* to, uint4 const* from, int64_t begin, int64_t end) {
  int64_t i = begin + threadIdx.x;
  for (; i + (kInFlight - 1) * kThreads < end; i += kInFlight * kThreads) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) v[j] = __ldcs(from + i + j * kThreads);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) to[i + j * kThreads] = v[j];
  }
  for (; i < end; i += kThreads) to[i] = __ldcs(from + i);
}

// Each block copies its part of every chunk.
__global__ void __launch_bounds__(kThreads)
    collect_kernel(SignalWait wait, ReplayedCall call, Epoch const* arrived, Collect c) {
  int64_t const vectors = c.chunk_bytes / 16;
  int64_t const begin = vectors * blockIdx.x / gridDim.x, end = vectors * (blockIdx.x + 1) / gridDim.x;
  for (int section = 0; section < c.sections; ++section) {
    for (int step = 1; step < c.world; ++step) {
      int const owner = wrap_rank(c.rank - step, c.world), piece = c.first_piece + section;
      if (threadIdx.x == 0) {
        wait_signal(wait, arrived + owner * kMaxPieces + piece, owner, piece, /*tile_m=*/-1, section);
      }
      __syncthreads();
      int64_t const offset = ar_chunk_index({section, owner}, c.world) * vectors;
      copy(reinterpret_cast<uint4*>(c.to) + offset, reinterpret_cast<uint4 const*>(c.from) + offset, begin, end);
    }
  }
  if (threadIdx.x == 0) end_call(call);
}

}  // namespace

cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call, Epoch const* arrived,
                           Collect const& collect, int num_blocks) {
  ReplayedCall ended = call;
  ended.items = static_cast<uint32_t>(num_blocks);
  collect_kernel<<<num_blocks, kThreads, 0, stream>>>(wait, ended, arrived, collect);
  return cudaGetLastError();
}

}  // namespace flux
