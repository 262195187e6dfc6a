#pragma once
// The TMA mainloop of CUTLASS, whose producer waits for the rows that a tile reads. Only the producer warp runs
// load(), so the tensor cores go on with the tiles before while it waits.
//
// A comes from two tensor maps: the own shard is read where it lies, the others from their slots of the workspace.

#include "comm/replay.cuh"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"

namespace flux {

struct ArrivalWait {
  Epoch const* arrived = nullptr;  // [source][kMaxPieces]
  Pieces pieces{0, 1};
  int rank = 0, world = 1;
  SignalWait wait{};
  ReplayedCall replayed{};
};

template <class Stock_>
struct AgMainloop : Stock_ {
  using Stock = Stock_;
  using typename Stock::ElementA;
  using typename Stock::MainloopPipeline;
  using typename Stock::PipelineState;
  using typename Stock::TensorStorage;
  static constexpr int kTileM = cute::size<0>(typename Stock::TileShape{});

  struct Arguments : Stock::Arguments {
    ElementA const* ptr_shard = nullptr;
    ArrivalWait arrival;
  };
  struct Params : Stock::Params {
    typename Stock::Params own;
    ArrivalWait arrival;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args, void* workspace) {
    Params params;
    typename Stock::Arguments stock = args;
    static_cast<typename Stock::Params&>(params) = Stock::to_underlying_arguments(problem, stock, workspace);
    stock.ptr_A = args.ptr_shard;
    auto [M, N, K, L] = problem;
    params.own = Stock::to_underlying_arguments(cute::make_shape(M, N, K, 1), stock, workspace);
    params.arrival = args.arrival;
    return params;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const& problem, Arguments const& args) {
    return Stock::can_implement(problem, args);
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Stock::prefetch_tma_descriptors(params);
    cute::prefetch_tma_descriptor(params.own.tma_load_a.get_tma_descriptor());
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write_state,
                           cute::tuple<TensorA, TensorB> const& inputs, BlockCoord const& block, KTileIterator k_tile,
                           int k_tile_count, int thread_idx, uint32_t rank_in_cluster, TensorStorage& storage) {
    auto [m, n, k, l] = block;
    if (tiles_left_ == 0) {
      tiles_left_ = tiles_of_block(params.arrival.replayed);
      begin_call(params.arrival.replayed, params.arrival.wait);
    }
    if (int(l) == params.arrival.rank) {
      Stock::load(params.own, pipeline, write_state, inputs, cute::make_coord(m, n, k, 0), k_tile, k_tile_count,
                  thread_idx, rank_in_cluster, storage);
    } else {
      wait_rows(params.arrival, int(l), int(m), int(n));
      int const slot = peer_slot(params.arrival.rank, params.arrival.world, int(l));
      Stock::load(params, pipeline, write_state, inputs, cute::make_coord(m, n, k, slot), k_tile, k_tile_count,
                  thread_idx, rank_in_cluster, storage);
    }
    --tiles_left_;
    if (tiles_left_ == 0 && cute::elect_one_sync()) end_call(params.arrival.replayed);
  }

 private:
  // Waits for the last piece that holds rows of tile m; the pieces of a source arrive in order.
  CUTLASS_DEVICE void wait_rows(ArrivalWait const& arrival, int source, int m, int n) {
    int const end_row = min((m + 1) * kTileM, arrival.pieces.items);
    int const piece = arrival.pieces.piece_of(end_row - 1);
    int const needed = source * kMaxPieces + piece;
    if (needed <= ready_ && ready_ < (source + 1) * kMaxPieces) return;
    if (cute::elect_one_sync()) {
      wait_signal(arrival.wait, arrival.arrived + source * kMaxPieces + piece, source, piece, m, n);
      fence_async_proxy();
    }
    __syncwarp();
    ready_ = needed;
  }

  int tiles_left_ = 0;  // 0 before the first
  int ready_ = -1;      // source and piece of the last wait
};

}  // namespace flux
