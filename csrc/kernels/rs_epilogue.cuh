#pragma once
// The epilogue of gemm_rs around the TMA-store epilogue of CUTLASS.
//
//   tile of a peer's chunk   accumulators -> 16-bit -> local memory; a warp beside the one that feeds the mainloop
//                            counts the tile, as the release would hold up the math warps until all is stored; the copy
//                            engine pushes the piece to its owner when all its tiles are counted
//   tile of the own chunk    y = sum of the partials in rank order, in fp32, the own one unrounded, + bias; then the
//                            stock store. The same warp waits for the tile's piece from each peer and brings the
//                            partials to shared memory, a vector or two of all threads at a time, while the tensor
//                            cores still work on the tile
//
// Both ends run the same kernel, so a tile travels as raw fragments [vector][thread], 16 bytes each: every store and
// load is coalesced, and the owner's loads land on its own accumulators.

#include "comm/replay.cuh"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/numeric_conversion.h"
#include "kernels/bias_epilogue.cuh"
#include "kernels/partials_pipeline.cuh"
#include "schedule/ar_schedule.hpp"
#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux {

struct RsTransport {
  int rank = 0, world = 1, sections = 1;
  bool counts_own = false;
  TileOrder order{};
  Pieces pieces{0, 1};              // of the tile positions of a chunk
  int64_t slot_bytes = 0;           // from slot to slot
  uint8_t* send = nullptr;          // [slot of the destination][section][position][tile]
  uint8_t const* staged = nullptr;  // [slot of the source][section][position][tile]
  uint32_t* tiles_done = nullptr;   // [destination][kMaxPieces]
  Epoch const* arrived = nullptr;   // [source][kMaxPieces]
  SignalWait wait{};
  ReplayedCall replayed{};

  // Of the tile at `position` of a chunk of `section`.
  FLUX_HD int piece(int section, int position) const { return section * pieces.count() + pieces.piece_of(position); }
  FLUX_HD int64_t offset(int slot, int section, int position, int64_t tile_bytes) const {
    return rs_tile_offset(slot, slot_bytes, section * order.num_tiles() + position, tile_bytes);
  }
};

// Threads: of the warpgroups that hold one tile.
template <class Stock_, class TileShapeMNK, int Threads>
class RsEpilogue : public Stock_ {
 public:
  using Stock = Stock_;
  using typename Stock::ElementD;
  static constexpr int kAccumulators = cute::size<0>(TileShapeMNK{}) * cute::size<1>(TileShapeMNK{}) / Threads;
  static constexpr int kVectors = kAccumulators / 8;  // 16-byte vectors of a thread
  static constexpr int kVectorBytes = Threads * 16;
  static constexpr int kSlotBytes = 4 << 10;                  // partials of one source, brought by one copy
  static constexpr int kPerSlot = kSlotBytes / kVectorBytes;  // vectors
  static constexpr int kPerTile = kVectors / kPerSlot;        // slots that a tile fills for each source
  static constexpr int kSlots = 4;                            // 16 KB hide the memory's latency
  static constexpr int64_t kTileBytes =
      rs_tile_bytes(cute::size<0>(TileShapeMNK{}), cute::size<1>(TileShapeMNK{}), sizeof(ElementD));
  static_assert(kTileBytes == int64_t{kVectors} * kVectorBytes, "a tile is its fragments, nothing else");
  static_assert(kSlotBytes % kVectorBytes == 0 && kVectors % kPerSlot == 0, "a tile fills whole slots");

  using LoadPipeline = PartialsPipeline<kSlots, kSlotBytes, Threads / cutlass::NumThreadsPerWarp>;
  using LoadPipelineState = cutlass::PipelineState<kSlots>;
  using PipelineStorage = typename LoadPipeline::SharedStorage;
  struct TensorStorage : Stock::TensorStorage {
    alignas(128) uint4 partials[kSlots][kPerSlot][Threads];
  };
  struct SharedStorage {
    TensorStorage tensors;
    PipelineStorage pipeline;
  };

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
    static_cast<typename Stock::Params&>(params) =
        Stock::to_underlying_arguments(own_chunks(problem, args.transport), args, workspace);
    params.tma_transaction_bytes = kSlotBytes;
    params.bias = args.bias;
    params.transport = args.transport;
    return params;
  }

  CUTLASS_HOST_DEVICE RsEpilogue(Params const& params, TensorStorage& storage)
      : Stock(params, storage), params_(params) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return params_.transport.world > 1; }

  // Run by one warp, tile after tile: brings the partials of a tile of the own chunk, or counts a tile that is sent.
  template <class ProblemShape, class TileShapeT, class TileCoord, class TiledMma>
  CUTLASS_DEVICE LoadPipelineState load(LoadPipeline pipeline, LoadPipelineState state, ProblemShape, TileShapeT,
                                        TileCoord coord, TiledMma, int lane, TensorStorage& storage,
                                        int subtile_idx = -1) {
    RsTransport const& t = params_.transport;
    auto [m, n, k, l] = coord;
    auto const [section, owner] = ar_chunk_of(int(l), t.world);
    int const position = t.order.position_of({int(m), int(n)});
    int const piece = t.piece(section, position);
    if (owner != t.rank) {
      count(pipeline, owner, piece);
      return state;
    }
    if (lane < t.world && lane != t.rank) {
      wait_signal(t.wait, t.arrived + lane * kMaxPieces + piece, lane, piece, int(m), int(n));
    }
    __syncwarp();
    if (cute::elect_one_sync()) fill(pipeline, state, t.offset(0, section, position, kTileBytes), storage);
    __syncwarp();
    state.advance(kPerTile * (t.world - 1));
    if (t.counts_own) count(pipeline, owner, piece);
    return state;
  }

  CUTLASS_DEVICE void load_tail(LoadPipeline pipeline, LoadPipelineState state) {
    // After the begin of the call, which is before the first load of the mainloop: that one lets this warp start.
    bool const had_a_tile = tiles_counted_ != 0 || state.count() != 0;
    if (had_a_tile && cute::elect_one_sync()) end_call(params_.transport.replayed);
    pipeline.producer_tail(state);
  }

  template <class StorePipeline, class StoreState, class ProblemShape, class TileShapeT, class TileCoord,
            class AccEngine, class AccLayout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
                            StoreState store_state, ProblemShape problem, TileShapeT tile, TileCoord coord,
                            cute::Tensor<AccEngine, AccLayout> acc, TiledMma tiled_mma, int thread_idx,
                            TensorStorage& storage, int subtile_idx = -1) {
    static_assert(cute::size(AccLayout{}) == kAccumulators);
    auto [m, n, k, l] = coord;
    RsTransport const& t = params_.transport;
    Tile const at{int(m), int(n)};
    auto const [section, owner] = ar_chunk_of(int(l), t.world);
    if (owner != t.rank) {
      send(acc, owner, section, at, thread_idx);
      load_pipeline.tile_stored(thread_idx / cutlass::NumThreadsPerWarp);
      return cute::make_tuple(load_state, store_state);
    }
    add_partials(acc, load_pipeline, section, at, thread_idx, storage);
    if (params_.bias != nullptr) {
      add_bias(acc, params_.bias, at.n * int(cute::size<1>(tile)), int(cute::get<1>(problem)), tile, tiled_mma,
               thread_idx);
    }
    auto const [_, next] = Stock::store(unused(load_pipeline), typename Stock::LoadPipelineState{}, store_pipeline,
                                        store_state, own_chunks(problem, t), tile, cute::make_coord(m, n, k, section),
                                        acc, tiled_mma, thread_idx, storage, subtile_idx);
    if (t.counts_own) {
      if (thread_idx < cutlass::NumThreadsPerWarp) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // of the thread that stored: all is in y
      }
      load_pipeline.tile_stored(thread_idx / cutlass::NumThreadsPerWarp);
    }
    return cute::make_tuple(load_state, next);
  }

  template <class StorePipeline, class StoreState>
  CUTLASS_DEVICE auto store_tail(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
                                 StoreState store_state) {
    auto const [_, next] =
        Stock::store_tail(unused(load_pipeline), typename Stock::LoadPipelineState{}, store_pipeline, store_state);
    return cute::make_tuple(load_state, next);
  }

 private:
  using Vector = cutlass::Array<ElementD, 8>;

  // Run by one thread. `tile`: the offset of the tile in the first staging slot. Only what changes from copy to copy is
  // computed in the loops: they are the way of every partial.
  CUTLASS_DEVICE void fill(LoadPipeline& pipeline, LoadPipelineState state, int64_t tile,
                           TensorStorage& storage) const {
    RsTransport const& t = params_.transport;
    int64_t const of_rank_0 = peer_slot(t.rank, t.world, 0) * t.slot_bytes;  // from there around the ring of slots
    fence_async_proxy();
    uint8_t const* from = t.staged + tile;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kPerTile; ++i, from += kSlotBytes) {
      int64_t slot = of_rank_0;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int source = 0; source < t.world; ++source) {
        if (source == t.rank) {
          slot = 0;  // of the rank after this one
          continue;
        }
        pipeline.fill(state, from + slot, storage.partials[state.index()]);
        slot += t.slot_bytes;
        ++state;
      }
    }
  }

  // The batch mode of the stock epilogue is the own chunks alone, by section.
  template <class ProblemShape>
  CUTLASS_HOST_DEVICE static auto own_chunks(ProblemShape const& problem, RsTransport const& transport) {
    return cute::make_shape(cute::get<0>(problem), cute::get<1>(problem), cute::get<2>(problem), transport.sections);
  }

  // The stock epilogue has no source, so it never looks at its load pipeline.
  CUTLASS_DEVICE static typename Stock::LoadPipeline& unused(LoadPipeline& pipeline) {
    return reinterpret_cast<typename Stock::LoadPipeline&>(pipeline);
  }

  // Run by one warp: counts its next tile, when it is stored.
  CUTLASS_DEVICE void count(LoadPipeline const& pipeline, int owner, int piece) {
    ++tiles_counted_;
    pipeline.wait_stored(tiles_counted_);
    if (cute::elect_one_sync()) {
      count_release_gpu(params_.transport.tiles_done + owner * kMaxPieces + piece);
    }
    __syncwarp();
  }

  template <class Accumulators>
  CUTLASS_DEVICE void send(Accumulators const& acc, int owner, int section, Tile at, int thread_idx) {
    RsTransport const& t = params_.transport;
    int const position = t.order.position_of(at);
    int const slot = peer_slot(t.rank, t.world, owner);
    uint8_t* const to = t.send + t.offset(slot, section, position, kTileBytes) + thread_idx * 16;
    cutlass::NumericArrayConverter<ElementD, float, 8> convert;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      cutlass::Array<float, 8> values;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) values[i] = acc(v * 8 + i);
      Vector const packed = convert(values);
      *reinterpret_cast<uint4*>(to + v * kVectorBytes) = reinterpret_cast<uint4 const&>(packed);
    }
  }

  // Tiles of own chunks that this CTA had before this one.
  CUTLASS_DEVICE int own_tiles_before(int section, Tile at) const {
    RsTransport const& t = params_.transport;
    int const per_chunk = t.order.num_clusters();
    int const num_clusters = gridDim.x * gridDim.y / t.order.cluster_size();  // that run
    int const in_chunk = t.order.position_of(at) / t.order.cluster_size();
    int64_t const here = int64_t{ar_own_step(t.world, t.sections, section)} * per_chunk + in_chunk;
    int before = in_chunk / num_clusters;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int s = 0; s < section; ++s) {
      int64_t const begin = int64_t{ar_own_step(t.world, t.sections, s)} * per_chunk;
      before += int(num_turns(begin, begin + per_chunk, int(here % num_clusters), num_clusters));
    }
    return before;
  }

  template <class Accumulators>
  CUTLASS_DEVICE void add_partials(Accumulators& acc, LoadPipeline pipeline, int section, Tile at, int thread_idx,
                                   TensorStorage& storage) {
    RsTransport const& t = params_.transport;
    int const tiles_before = own_tiles_before(section, at);  // whose vectors load() has brought already
    uint32_t const before = uint32_t(tiles_before) * kPerTile * (t.world - 1);
    LoadPipelineState state{int(before % kSlots), before / kSlots % 2, before};
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kVectors; v += kPerSlot) {
      // The next slot's values, each to its accumulator of the group or to the sum that stands in for it.
      auto const take = [&](auto const& add) {
        pipeline.consumer_wait(state);
        CUTLASS_PRAGMA_UNROLL
        for (int u = 0; u < kPerSlot; ++u) {
          cutlass::Array<float, 8> const values = unpack(storage.partials[state.index()][u][thread_idx]);
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 8; ++i) add(u * 8 + i, values[i]);
        }
        pipeline.consumer_release(state);
        ++state;
      };
      float sum[kPerSlot * 8] = {};
      CUTLASS_PRAGMA_NO_UNROLL
      for (int source = 0; source < t.rank; ++source) take([&](int i, float value) { sum[i] += value; });
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPerSlot * 8; ++i) acc(v * 8 + i) = sum[i] + acc(v * 8 + i);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int source = t.rank + 1; source < t.world; ++source) {
        take([&](int i, float value) { acc(v * 8 + i) += value; });
      }
    }
  }

  CUTLASS_DEVICE static cutlass::Array<float, 8> unpack(uint4 const& vector) {
    cutlass::NumericArrayConverter<float, ElementD, 8> convert;
    return convert(reinterpret_cast<Vector const&>(vector));
  }

  Params const& params_;
  uint32_t tiles_counted_ = 0;  // by the warp that runs load()
};

}  // namespace flux
