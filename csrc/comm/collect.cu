#include "comm/collect.hpp"
#include "comm/replay.cuh"

namespace flux {
namespace {

constexpr int kCopyWarps = 16, kThreads = (kCopyWarps + 1) * 32;  // one more tells the peers
constexpr uint32_t kInFlight = 4;                                 // 16-byte loads of a thread

// Called by whole copy warps: store(offset, vector) for this warp's part of a block of results, of which there are less
// than 2^32 vectors: y would have more than 64 GB. `from` and the offsets lie as in y.
template <class Store>
__device__ __forceinline__ void copy(ArResults const& results, ArChunk chunk, ArBlock const& block, void const* from,
                                     Store const& store) {
  int const warp = blockIdx.x * kCopyWarps + threadIdx.x / 32, warps = gridDim.x * kCopyWarps;
  uint32_t const width = block.width / 16, pitch = results.row_bytes / 16;
  int64_t const count = block.rows * width, first = results.offset(chunk, block) / 16;
  uint32_t const end = count * (warp + 1) / warps;
  auto const at = [&](uint32_t i) { return first + int64_t{i / width} * pitch + i % width; };
  for (uint32_t i = count * warp / warps + threadIdx.x % 32; i < end; i += kInFlight * 32) {
    uint4 v[kInFlight];
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * 32 < end) v[j] = __ldcs(static_cast<uint4 const*>(from) + at(i + j * 32));
    }
#pragma unroll
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (i + j * 32 < end) store(at(i + j * 32), v[j]);
    }
  }
}

// Run by one warp, when the copy warps of its block have stored their parts of the last piece: the last block to come
// here tells the peers.
__device__ __forceinline__ void tell_peers(SignalWait const& wait, Collect const& c) {
  ArResults const& r = c.results;
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  if (threadIdx.x % 32 != 0) return;
  __threadfence_system();
  uint32_t const all = r.pieces.size(r.pieces.count() - 1) + gridDim.x;  // the GEMM has counted the tiles
  if (atomicAdd(c.tiles_done, 1) + 1 < all) return;
  *c.tiles_done = 0;
  __threadfence_system();
  for (int i = 0; i < r.world - 1; ++i) {
    Epoch* const words = c.arrived[ag_push_peer(r.rank, r.world, i)];
    store_release_sys(words + r.signal(r.num_pieces() - 1), signal_of(wait));
  }
}

// Run by the copy warps: pieces [begin, end) of every peer's chunks, numbered through the sections.
__device__ __forceinline__ void collect_pieces(SignalWait const& wait, Collect const& c, int begin, int end) {
  ArResults const& r = c.results;
  for (int step = 1; step < r.world; ++step) {
    int const owner = wrap_rank(r.rank - step, r.world), mine = begin + threadIdx.x % 32;
    if (mine < end) {
      int const signal = r.signal(mine);
      wait_signal(wait, c.arrivals + owner * kMaxPieces + signal, owner, signal, /*tile_m=*/-1, mine);
    }
    __syncwarp();
    for (int i = begin; i < end; ++i) {
      copy(r, {r.section_of(i), owner}, r.block(i), c.region[r.rank],
           [&](int64_t at, uint4 const& vector) { static_cast<uint4*>(c.y)[at] = vector; });
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) collect_kernel(SignalWait wait, ReplayedCall call, Collect c) {
  ArResults const& r = c.results;
  int const last = r.num_pieces() - 1;
  if (threadIdx.x / 32 < kCopyWarps) {
    copy(r, {r.sections - 1, r.rank}, r.block(last), c.y, [&](int64_t at, uint4 const& vector) {
      for (int i = 0; i < r.world - 1; ++i) {
        static_cast<uint4*>(c.region[ag_push_peer(r.rank, r.world, i)])[at] = vector;
      }
    });
    asm volatile("bar.arrive 1, %0;" ::"n"(kThreads) : "memory");
    collect_pieces(wait, c, 0, last);
    collect_pieces(wait, c, last, last + 1);
  } else {
    tell_peers(wait, c);
  }
  __syncthreads();
  if (threadIdx.x == 0) end_call(call);
}

}  // namespace

cudaError_t stream_collect(cudaStream_t stream, SignalWait const& wait, ReplayedCall const& call,
                           Collect const& collect, int num_blocks) {
  ReplayedCall ended = call;
  ended.items = static_cast<uint32_t>(num_blocks);
  collect_kernel<<<num_blocks, kThreads, 0, stream>>>(wait, ended, collect);
  return cudaGetLastError();
}

}  // namespace flux
