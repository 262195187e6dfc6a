#include "comm/collect.hpp"
#include "comm/replay.cuh"

namespace flux {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // 16-byte loads of a thread

// A block of rows, in vectors: number i of them lies at vector at(i) of both sides.
struct Vectors {
  uint32_t width, pitch;
  __device__ __forceinline__ int64_t at(uint32_t i) const {
    uint32_t const row = i / width;
    return int64_t{row} * pitch + (i - row * width);
  }
};

// Called by all threads of a block: copies vectors [begin, end).
__device__ __forceinline__ void copy(uint4* to, uint4 const* from, Vectors const& vectors, uint32_t begin,
                                     uint32_t end) {
  for (uint32_t i = begin + threadIdx.x; i < end; i += kInFlight * kThreads) {
    uint4 v[kInFlight];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < end) v[j] = __ldcs(from + vectors.at(i + j * kThreads));
    }
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < end) to[vectors.at(i + j * kThreads)] = v[j];
    }
  }
}

// Each block copies its part of every piece. A piece has less than 2^32 vectors: y would have more than 64 GB.
__global__ void __launch_bounds__(kThreads) collect_kernel(SignalWait wait, ReplayedCall call, Epoch const* arrived,
                                                           ArResults results, uint8_t const* from, uint8_t* to) {
  for (int section = 0; section < results.sections; ++section) {
    for (int piece = 0; piece < results.pieces.count(); ++piece) {
      ArBlock const block = results.block(piece);
      Vectors const vectors{static_cast<uint32_t>(block.width / 16), static_cast<uint32_t>(results.row_bytes / 16)};
      int64_t const count = block.rows * vectors.width;
      uint32_t const begin = count * blockIdx.x / gridDim.x, end = count * (blockIdx.x + 1) / gridDim.x;
      for (int step = 1; step < results.world; ++step) {
        int const owner = wrap_rank(results.rank - step, results.world), signal = results.signal(section, piece);
        if (threadIdx.x == 0) {
          wait_signal(wait, arrived + owner * kMaxPieces + signal, owner, signal, /*tile_m=*/-1, section);
        }
        __syncthreads();
        int64_t const offset = results.offset({section, owner}, block);
        copy(reinterpret_cast<uint4*>(to + offset), reinterpret_cast<uint4 const*>(from + offset), vectors, begin, end);
      }
    }
  }
  if (threadIdx.x == 0) end_call(call);
}

}  // namespace

cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call, Epoch const* arrived,
                           ArResults const& results, void const* from, void* to, int num_blocks) {
  ReplayedCall ended = call;
  ended.items = static_cast<uint32_t>(num_blocks);
  collect_kernel<<<num_blocks, kThreads, 0, stream>>>(wait, ended, arrived, results, static_cast<uint8_t const*>(from),
                                                      static_cast<uint8_t*>(to));
  return cudaGetLastError();
}

}  // namespace flux
