#include "comm/collect.hpp"
#include "comm/replay.cuh"

namespace flux {
namespace {

constexpr int kThreads = 512;
constexpr uint32_t kInFlight = 4;  // 16-byte loads of a thread

// Called by all threads of a block: store(offset, vector) for this block's part of a block of results, of which there
// are less than 2^32 vectors: y would have more than 64 GB. `from` and the offsets lie as in y.
template <class Store>
__device__ __forceinline__ void copy(ArResults const& results, ArChunk chunk, ArBlock const& block, void const* from,
                                     Store const& store) {
  uint32_t const width = block.width / 16, pitch = results.row_bytes / 16;
  int64_t const count = block.rows * width, first = results.offset(chunk, block) / 16;
  uint32_t const end = count * (blockIdx.x + 1) / gridDim.x;
  auto const at = [&](uint32_t i) { return first + int64_t{i / width} * pitch + i % width; };
  for (uint32_t i = count * blockIdx.x / gridDim.x + threadIdx.x; i < end; i += kInFlight * kThreads) {
    uint4 v[kInFlight];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < end) v[j] = __ldcs(static_cast<uint4 const*>(from) + at(i + j * kThreads));
    }
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < end) store(at(i + j * kThreads), v[j]);
    }
  }
}

// Called by all threads of a block: its part of a piece of every peer.
__device__ __forceinline__ void collect_piece(SignalWait const& wait, Collect const& c, int number) {
  ArResults const& r = c.results;
  for (int step = 1; step < r.world; ++step) {
    int const owner = wrap_rank(r.rank - step, r.world), signal = r.signal(number);
    if (threadIdx.x == 0) {
      wait_signal(wait, c.arrivals + owner * kMaxPieces + signal, owner, signal, /*tile_m=*/-1, number);
    }
    __syncthreads();
    copy(r, {r.section_of(number), owner}, r.block(number), c.region[r.rank],
         [&](int64_t at, uint4 const& vector) { static_cast<uint4*>(c.y)[at] = vector; });
  }
}

__global__ void __launch_bounds__(kThreads) collect_kernel(SignalWait wait, Collect c) {
  for (int number = 0; number < c.results.num_pieces() - 1; ++number) collect_piece(wait, c, number);
}

__global__ void __launch_bounds__(kThreads) finish_kernel(SignalWait wait, ReplayedCall call, Collect c) {
  ArResults const& r = c.results;
  int const last = r.num_pieces() - 1;
  copy(r, {r.section_of(last), r.rank}, r.block(last), c.y, [&](int64_t at, uint4 const& vector) {
    for (int i = 0; i < r.world - 1; ++i) static_cast<uint4*>(c.region[ag_push_peer(r.rank, r.world, i)])[at] = vector;
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    uint32_t const all = r.pieces.size(r.pieces.count() - 1) + gridDim.x;  // the product has counted its tiles
    if (atomicAdd(c.tiles_done, 1) + 1 == all) {                           // the last block tells the peers
      *c.tiles_done = 0;
      __threadfence_system();
      for (int i = 0; i < r.world - 1; ++i) {
        store_release_sys(c.arrived[ag_push_peer(r.rank, r.world, i)] + r.signal(last), signal_of(wait));
      }
    }
  }
  collect_piece(wait, c, last);
  if (threadIdx.x == 0) end_call(call);
}

}  // namespace

cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, Collect const& collect) {
  if (collect.results.num_pieces() == 1) return cudaSuccess;
  collect_kernel<<<collect.num_blocks, kThreads, 0, stream>>>(wait, collect);
  return cudaGetLastError();
}

cudaError_t stream_finish(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call,
                          Collect const& collect) {
  ReplayedCall ended = call;
  ended.items = static_cast<uint32_t>(collect.num_blocks);
  finish_kernel<<<collect.num_blocks, kThreads, 0, stream>>>(wait, ended, collect);
  return cudaGetLastError();
}

}  // namespace flux
