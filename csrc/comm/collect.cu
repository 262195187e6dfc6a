#include "comm/collect.hpp"
#include "comm/replay.cuh"

namespace flux {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kInFlight = 4;  // 16-byte loads of a thread

// Called by all threads of a block: copies its part of a block of results, of which there are less than 2^32 vectors: y
// would have more than 64 GB. Both sides have the rows of y.
__device__ __forceinline__ void copy(ArBlock const& block, int64_t row_bytes, uint4 const* from, uint4* to) {
  uint32_t const width = block.width / 16, pitch = row_bytes / 16;
  int64_t const count = block.rows * width;
  uint32_t const end = count * (blockIdx.x + 1) / gridDim.x;
  auto const at = [&](uint32_t i) { return int64_t{i / width} * pitch + i % width; };
  for (uint32_t i = count * blockIdx.x / gridDim.x + threadIdx.x; i < end; i += kInFlight * kThreads) {
    uint4 v[kInFlight];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < end) v[j] = __ldcs(from + at(i + j * kThreads));
    }
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < end) to[at(i + j * kThreads)] = v[j];
    }
  }
}

// Each block copies its part of every piece.
__global__ void __launch_bounds__(kThreads)
    collect_kernel(SignalWait wait, ReplayedCall call, Epoch const* arrived, ArResults results, uint8_t const* first,
                   int64_t slot_bytes, uint8_t* y) {
  for (int number = 0; number < results.num_pieces(); ++number) {
    for (int step = 1; step < results.world; ++step) {
      int const owner = wrap_rank(results.rank - step, results.world), signal = results.signal(number);
      if (threadIdx.x == 0) {
        wait_signal(wait, arrived + owner * kMaxPieces + signal, owner, signal, /*tile_m=*/-1, number);
      }
      __syncthreads();
      int const section = results.section_of(number);
      ArBlock const block = results.block(number);
      int64_t const slot = peer_slot(results.rank, results.world, owner) * slot_bytes;
      copy(block, results.row_bytes,
           reinterpret_cast<uint4 const*>(first + slot + results.offset_of_owner(section, block)),
           reinterpret_cast<uint4*>(y + results.offset({section, owner}, block)));
    }
  }
  if (threadIdx.x == 0) end_call(call);
}

}  // namespace

cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call, Epoch const* arrived,
                           ArResults const& results, void const* first, int64_t slot_bytes, void* y, int num_blocks) {
  ReplayedCall ended = call;
  ended.items = static_cast<uint32_t>(num_blocks);
  collect_kernel<<<num_blocks, kThreads, 0, stream>>>(wait, ended, arrived, results, static_cast<uint8_t const*>(first),
                                                      slot_bytes, static_cast<uint8_t*>(y));
  return cudaGetLastError();
}

}  // namespace flux
