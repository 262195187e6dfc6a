#pragma once
// The TMA-store epilogue of CUTLASS with a bias added to the accumulators first: y = acc + bias[n].
// The bias is read straight into the registers that hold its columns; without one the cost is a uniform branch.

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"

namespace flux {

// Adds bias[n0 + column] to each accumulator of a tile whose first column is n0; columns past `cols` are left alone.
template <class Element, class Accumulators, class TileShapeT, class TiledMma>
CUTLASS_DEVICE void add_bias(Accumulators& acc, Element const* bias, int n0, int cols, TileShapeT tile,
                             TiledMma const& tiled_mma, int thread_idx) {
  auto const coords = tiled_mma.get_slice(thread_idx).partition_C(cute::make_identity_tensor(cute::take<0, 2>(tile)));
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < cute::size(acc); ++i) {
    int const n = n0 + int(cute::get<1>(coords(i)));
    if (n < cols) acc(i) += float(bias[n]);
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
