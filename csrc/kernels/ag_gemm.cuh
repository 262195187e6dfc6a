#pragma once
// ag_gemm, fused: y[c] = A_c . w^T + bias for each chunk c, own chunk first, then in order of arrival.
//
//   pushes   the copy engine of each rank, next rank first, one peer at a time: shard -> peer's region, then the
//            piece's signal
//   waits    the producer warp, once per tile, for the rows that the tile reads
//
// Source: FLUX, section 3 (all-gather prologue fused into the GEMM, tile order by arrival).

#include "kernels/ag_mainloop.cuh"
#include "kernels/bias_epilogue.cuh"
#include "kernels/recipe.cuh"
#include "kernels/tile_scheduler.cuh"

namespace flux {

template <class Cfg, class Element, bool WeightTransposed>
cudaError_t launch_ag_gemm_kernel(AgGemmArgs const& args, cudaStream_t stream) {
  using Epilogue = BiasEpilogue<StockEpilogue<Cfg, Element>>;
  using Mainloop = AgMainloop<StockMainloop<Cfg, Element, WeightTransposed, Epilogue>>;
  using GemmKernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                          ChunkedSchedulerTag<AgOrder>>;
  typename GemmKernel::Arguments arguments{};
  arguments.mainloop.ptr_A = static_cast<Element const*>(args.gathered);
  arguments.mainloop.dA = {args.k, cute::_1{}, args.slot_bytes / int64_t{sizeof(Element)}};
  arguments.mainloop.ptr_B = static_cast<Element const*>(args.weight);
  arguments.mainloop.dB = weight_stride<WeightTransposed>(args.weight_stride);
  arguments.mainloop.ptr_shard = static_cast<Element const*>(args.shard);
  arguments.mainloop.arrival = {args.arrived, args.pieces, args.rank, args.world, args.wait, args.replayed};
  arguments.epilogue.ptr_D = static_cast<Element*>(args.y);
  arguments.epilogue.dD = {args.n, cute::_1{}, args.rows * args.n};
  arguments.epilogue.bias = static_cast<Element const*>(args.bias);
  return launch_gemm<GemmKernel>(arguments, args, Cfg::kShape, stream);
}

template <class Cfg, class Element>
cudaError_t launch_ag_gemm(AgGemmArgs const& args, cudaStream_t stream) {
  return args.weight_transposed ? launch_ag_gemm_kernel<Cfg, Element, true>(args, stream)
                                : launch_ag_gemm_kernel<Cfg, Element, false>(args, stream);
}

}  // namespace flux
