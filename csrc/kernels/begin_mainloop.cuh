#pragma once
// The TMA mainloop of CUTLASS, whose producer begins the call before it loads the first tile.

#include "comm/replay.cuh"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"

namespace flux {

template <class Stock_>
struct BeginMainloop : Stock_ {
  using Stock = Stock_;

  struct Arguments : Stock::Arguments {
    ReplayedCall replayed;
    SignalWait wait{};
  };
  struct Params : Stock::Params {
    ReplayedCall replayed;
    SignalWait wait;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args, void* workspace) {
    Params params;
    static_cast<typename Stock::Params&>(params) = Stock::to_underlying_arguments(problem, args, workspace);
    params.replayed = args.replayed;
    params.wait = args.wait;
    return params;
  }

  // Run by the producer warp.
  template <class... Rest>
  CUTLASS_DEVICE void load(Params const& params, Rest&&... rest) {
    if (!has_begun_) begin_call(params.replayed, params.wait);
    has_begun_ = true;
    Stock::load(params, static_cast<Rest&&>(rest)...);
  }

 private:
  bool has_begun_ = false;
};

}  // namespace flux
