#pragma once
// gemm_rs, fused: partial_c = x_c . w^T for each chunk c, those of the peers interleaved, next rank first, the own
// chunk last.
//
//   stores   math warps, tile by tile, to local memory; a warp beside them counts finished tiles
//   pushes   the copy engine, piece by piece, when the count of a piece is reached; then the piece's signal
//   waits    a warp that brings the partials, once per tile of the own chunk, for that tile's piece from each peer
//
// The sum over ranks is part of the last chunk's epilogue: no reduction kernel, no atomics on data, and the order of
// the additions is fixed. Source: FLUX, section 3 (reduce-scatter epilogue fused into the GEMM).

#include "kernels/begin_mainloop.cuh"
#include "kernels/recipe.cuh"
#include "kernels/rs_epilogue.cuh"
#include "kernels/tile_scheduler.cuh"

namespace flux {

template <class Cfg, class Element, bool WeightTransposed>
cudaError_t launch_gemm_rs_kernel(GemmRsArgs const& args, cudaStream_t stream) {
  using Epilogue = RsEpilogue<StockEpilogue<Cfg, Element>, typename Cfg::Tile, Cfg::kThreadsPerTile>;
  using Mainloop = BeginMainloop<StockMainloop<Cfg, Element, WeightTransposed, Epilogue>>;
  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                          ChunkedSchedulerTag<RsOrder>>;
  typename GemmKernel::Arguments arguments{};
  arguments.mainloop.ptr_A = static_cast<Element const*>(args.x);
  arguments.mainloop.dA = {args.k, cute::_1{}, args.rows * args.k};
  arguments.mainloop.ptr_B = static_cast<Element const*>(args.weight);
  arguments.mainloop.dB = weight_stride<WeightTransposed>(args.weight_stride);
  arguments.mainloop.replayed = args.replayed;
  arguments.mainloop.wait = args.wait;
  arguments.epilogue.ptr_D = static_cast<Element*>(args.y);
  arguments.epilogue.dD = {args.n, cute::_1{}, args.y_stride};
  arguments.epilogue.bias = static_cast<Element const*>(args.bias);
  int const per_cluster = Cfg::kShape.cluster_m * Cfg::kShape.cluster_n;
  arguments.scheduler.parts = {args.parts.items / per_cluster, args.parts.per_piece / per_cluster};
  RsTransport& transport = arguments.epilogue.transport;
  transport.rank = args.rank;
  transport.world = args.world;
  transport.sections = args.sections;
  transport.counts_own = args.counts_own;
  transport.order = make_tile_order(args.rows, args.n, Cfg::kShape, args.swizzle, args.along_n);
  transport.pieces = args.pieces;
  transport.slot_bytes = args.slot_bytes;
  transport.send = static_cast<uint8_t*>(args.send);
  transport.staged = static_cast<uint8_t const*>(args.staged);
  transport.tiles_done = args.tiles_done;
  transport.arrived = args.arrived;
  transport.wait = args.wait;
  transport.replayed = args.replayed;
  return launch_gemm<GemmKernel>(arguments, args, Cfg::kShape, stream);
}

template <class Cfg, class Element>
cudaError_t launch_gemm_rs(GemmRsArgs const& args, cudaStream_t stream) {
  return args.weight_transposed ? launch_gemm_rs_kernel<Cfg, Element, true>(args, stream)
                                : launch_gemm_rs_kernel<Cfg, Element, false>(args, stream);
}

}  // namespace flux
