#pragma once
// The epilogue of gemm_rs around the TMA-store epilogue of CUTLASS.
//
//   tile of a peer's chunk   accumulators -> 16-bit -> local send buffer; count the tile; the copy engine pushes the
//                            piece to its owner when all its tiles are counted
//   tile of the own chunk    wait for the tile's piece from each peer; y = sum of the partials in rank order, in fp32,
//                            the own one unrounded, + bias; then the stock store
//
// Both ends run the same kernel, so a tile travels as raw fragments [vector][thread], 16 bytes each: every store and
// load is coalesced, and the owner's loads land on its own accumulators.

#include "comm/signal.cuh"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/numeric_conversion.h"
#include "kernels/bias_epilogue.cuh"
#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

struct RsTransport {
  int rank = 0, world = 1;
  TileOrder order{};
  Pieces pieces{0, 1};              // of the tile positions of a chunk
  uint8_t* send = nullptr;          // [slot of the destination][position][tile]
  uint8_t const* staged = nullptr;  // [slot of the source][position][tile]
  uint32_t* tiles_done = nullptr;   // [destination][kMaxPieces]
  Epoch const* arrived = nullptr;   // [source][kMaxPieces]
  SignalWait wait{};
};

// Threads: of the warpgroups that hold one tile.
template <class Stock_, class TileShapeMNK, int Threads>
class RsEpilogue : public Stock_ {
 public:
  using Stock = Stock_;
  using typename Stock::ElementD;
  using typename Stock::TensorStorage;
  static constexpr int kAccumulators = cute::size<0>(TileShapeMNK{}) * cute::size<1>(TileShapeMNK{}) / Threads;
  static constexpr int kVectors = kAccumulators / 8;  // 16-byte vectors of a thread
  static constexpr int kBatch = 2;                    // vectors loaded together,
  static constexpr int kAhead = 4;                    // and batches in flight: 32 KB an SM hide the memory's latency
  static constexpr int64_t kTileBytes =
      rs_tile_bytes(cute::size<0>(TileShapeMNK{}), cute::size<1>(TileShapeMNK{}), sizeof(ElementD));
  static_assert(kTileBytes == int64_t{kVectors} * Threads * 16, "a tile is its fragments, nothing else");
  static_assert(kVectors % kBatch == 0);

  struct Arguments : Stock::Arguments {
    ElementD const* bias = nullptr;
    RsTransport transport;
  };
  struct Params : Stock::Params {
    ElementD const* bias = nullptr;
    RsTransport transport;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args, void* workspace) {
    Params params;
    static_cast<typename Stock::Params&>(params) = Stock::to_underlying_arguments(one_chunk(problem), args, workspace);
    params.bias = args.bias;
    params.transport = args.transport;
    return params;
  }

  CUTLASS_HOST_DEVICE RsEpilogue(Params const& params, TensorStorage& storage)
      : Stock(params, storage), params_(params) {}

  template <class LoadPipeline, class LoadState, class StorePipeline, class StoreState, class ProblemShape,
            class TileShapeT, class TileCoord, class AccEngine, class AccLayout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadState load_state, StorePipeline store_pipeline,
                            StoreState store_state, ProblemShape problem, TileShapeT tile, TileCoord coord,
                            cute::Tensor<AccEngine, AccLayout> acc, TiledMma tiled_mma, int thread_idx,
                            TensorStorage& storage, int subtile_idx = -1) {
    static_assert(cute::size(AccLayout{}) == kAccumulators);
    auto [m, n, k, l] = coord;
    Tile const at{int(m), int(n)};
    if (int(l) != params_.transport.rank) {
      send(acc, int(l), at, thread_idx);
      return cute::make_tuple(load_state, store_state);
    }
    receive(acc, at, thread_idx);
    if (params_.bias != nullptr) {
      add_bias(acc, params_.bias, at.n * int(cute::size<1>(tile)), int(cute::get<1>(problem)), tile, tiled_mma,
               thread_idx);
    }
    return Stock::store(load_pipeline, load_state, store_pipeline, store_state, one_chunk(problem), tile,
                        cute::make_coord(m, n, k, 0), acc, tiled_mma, thread_idx, storage, subtile_idx);
  }

 private:
  using Vector = cutlass::Array<ElementD, 8>;

  // y is one chunk: the batch mode of the problem does not reach the stock epilogue.
  template <class ProblemShape>
  CUTLASS_HOST_DEVICE static auto one_chunk(ProblemShape const& problem) {
    return cute::make_shape(cute::get<0>(problem), cute::get<1>(problem), cute::get<2>(problem), 1);
  }

  // The threads of one warpgroup meet, at one of the barriers that CUTLASS leaves to its users.
  CUTLASS_DEVICE static void sync_warpgroup() {
    cutlass::arch::NamedBarrier::sync(cutlass::NumThreadsPerWarpGroup, uint32_t(cutlass::canonical_warp_group_idx()));
  }

  CUTLASS_DEVICE int64_t offset(int slot, int position, int thread_idx) const {
    return rs_tile_offset(slot, position, params_.transport.order.num_tiles(), kTileBytes) + thread_idx * 16;
  }

  template <class Accumulators>
  CUTLASS_DEVICE void send(Accumulators const& acc, int owner, Tile at, int thread_idx) {
    RsTransport const& t = params_.transport;
    int const position = t.order.position_of(at);
    int const slot = rs_slot(t.rank, t.world, owner);
    uint8_t* const to = t.send + offset(slot, position, thread_idx);
    cutlass::NumericArrayConverter<ElementD, float, 8> convert;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      cutlass::Array<float, 8> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) values[i] = acc(v * 8 + i);
      Vector const packed = convert(values);
      *reinterpret_cast<uint4*>(to + v * Threads * 16) = reinterpret_cast<uint4 const&>(packed);
    }
    sync_warpgroup();
    if (thread_idx % cutlass::NumThreadsPerWarpGroup == 0) {
      count_release_gpu(t.tiles_done + owner * kMaxPieces + t.pieces.piece_of(position));
    }
  }

  template <class Accumulators>
  CUTLASS_DEVICE void receive(Accumulators& acc, Tile at, int thread_idx) {
    RsTransport const& t = params_.transport;
    int const position = t.order.position_of(at);
    int const piece = t.pieces.piece_of(position);
    int const peer = thread_idx % cutlass::NumThreadsPerWarpGroup;
    if (peer < t.world && peer != t.rank) {
      wait_signal(t.wait, t.arrived + peer * kMaxPieces + piece, peer, piece, at.m, at.n);
    }
    sync_warpgroup();

    // Batches are loaded in the order of use, batch by batch and source by source, kAhead of them ahead.
    constexpr int kBatches = kVectors / kBatch;
    int const first = t.rank == 0 ? 1 : 0;
    int load_batch = 0, load_source = first;
    uint4 ahead[kAhead][kBatch];
    auto load_next = [&](uint4(&to)[kBatch]) {
      if (load_batch == kBatches) return;
      uint8_t const* from = t.staged + offset(rs_slot(t.rank, t.world, load_source), position, thread_idx);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kBatch; ++v) {
        to[v] = __ldcg(reinterpret_cast<uint4 const*>(from + (load_batch * kBatch + v) * Threads * 16));
      }
      load_source += load_source + 1 == t.rank ? 2 : 1;
      if (load_source >= t.world) {
        load_source = first;
        ++load_batch;
      }
    };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAhead; ++i) load_next(ahead[i]);

    CUTLASS_PRAGMA_UNROLL
    for (int batch = 0; batch < kBatches; ++batch) {
      float sum[kBatch * 8] = {};
      CUTLASS_PRAGMA_NO_UNROLL
      for (int source = 0; source < t.world; ++source) {
        if (source == t.rank) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kBatch * 8; ++i) sum[i] += acc(batch * kBatch * 8 + i);
          continue;
        }
        accumulate(sum, ahead[0]);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i + 1 < kAhead; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < kBatch; ++v) ahead[i][v] = ahead[i + 1][v];
        }
        load_next(ahead[kAhead - 1]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch * 8; ++i) acc(batch * kBatch * 8 + i) = sum[i];
    }
  }

  CUTLASS_DEVICE static void accumulate(float (&sum)[kBatch * 8], uint4 const (&vectors)[kBatch]) {
    cutlass::NumericArrayConverter<float, ElementD, 8> convert;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kBatch; ++v) {
      cutlass::Array<float, 8> const values = convert(reinterpret_cast<Vector const&>(vectors[v]));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) sum[v * 8 + i] += values[i];
    }
  }

  Params const& params_;
};

}  // namespace flux
