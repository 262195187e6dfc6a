#pragma once
// The TMA-store epilogue of CUTLASS with a bias added to the accumulators first: y = acc + bias[n].
// The bias is read straight into the registers that hold its columns; without one the cost is a uniform branch.

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"

namespace flux {

// Adds bias[n0 + column] to each accumulator of a tile whose first column is n0; columns past `cols` are never stored.
// The accumulators of wgmma are ((2 columns, 2 rows, N / 8), M / 64, 1): each bias is read once for all its rows.
template <class Element, class Accumulators, class TileShapeT, class TiledMma>
CUTLASS_DEVICE void add_bias(Accumulators& acc, Element const* bias, int n0, int cols, TileShapeT tile,
                             TiledMma const& tiled_mma, int thread_idx) {
  static_assert(decltype(cute::size<2>(acc.layout()))::value == 1, "one MMA spans the columns of a tile");
  auto const coords = tiled_mma.get_slice(thread_idx).partition_C(cute::make_identity_tensor(cute::take<0, 2>(tile)));
  CUTLASS_PRAGMA_UNROLL
  for (int block = 0; block < cute::size<0, 2>(acc.layout()); ++block) {
    CUTLASS_PRAGMA_UNROLL
    for (int column = 0; column < cute::size<0, 0>(acc.layout()); ++column) {
      int const n = n0 + int(cute::get<1>(coords(cute::make_coord(column, 0, block), 0, 0)));
      float const b = n < cols ? float(bias[n]) : 0.0f;
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < cute::size<0, 1>(acc.layout()); ++row) {
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < cute::size<1>(acc.layout()); ++m) acc(cute::make_coord(column, row, block), m, 0) += b;
      }
    }
    __syncwarp();  // else all of the bias is loaded first, into registers that nothing has left
  }
}

template <class Stock_>
class BiasEpilogue : public Stock_ {
 public:
  using Stock = Stock_;
  using typename Stock::ElementD;
  using typename Stock::TensorStorage;

  struct Arguments : Stock::Arguments {
    ElementD const* bias = nullptr;
  };
  struct Params : Stock::Params {
    ElementD const* bias = nullptr;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args, void* workspace) {
    Params params;
    static_cast<typename Stock::Params&>(params) = Stock::to_underlying_arguments(problem, args, workspace);
    params.bias = args.bias;
    return params;
  }

  CUTLASS_HOST_DEVICE BiasEpilogue(Params const& params, TensorStorage& storage)
      : Stock(params, storage), bias_(params.bias) {}

  template <class LoadPipeline, class LoadState, class StorePipeline, class StoreState, class ProblemShape,
            class TileShapeT, class TileCoord, class AccEngine, class AccLayout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadState load_state, StorePipeline store_pipeline,
                            StoreState store_state, ProblemShape problem, TileShapeT tile, TileCoord coord,
                            cute::Tensor<AccEngine, AccLayout> acc, TiledMma tiled_mma, int thread_idx,
                            TensorStorage& storage, int subtile_idx = -1) {
    if (bias_ != nullptr) {
      int const n0 = int(cute::get<1>(coord)) * int(cute::size<1>(tile));
      add_bias(acc, bias_, n0, int(cute::get<1>(problem)), tile, tiled_mma, thread_idx);
    }
    return Stock::store(load_pipeline, load_state, store_pipeline, store_state, problem, tile, coord, acc, tiled_mma,
                        thread_idx, storage, subtile_idx);
  }

 private:
  ElementD const* bias_;
};

}  // namespace flux
