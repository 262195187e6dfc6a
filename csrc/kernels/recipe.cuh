#pragma once
// What all kernels share: the CUTLASS collectives of a configuration, and the launch.

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "kernels/launch.hpp"
#include "kernels/occupancy.hpp"

namespace flux {

// Two warpgroups share a tile.
struct Cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
  static constexpr int kWarpgroupsPerTile = 2;
};

// Two warpgroups work on tiles of their own, one in its mainloop while the other is in its epilogue.
struct Pingpong {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
  static constexpr int kWarpgroupsPerTile = 1;
};

template <class Schedule_, int TileM, int TileN, int TileK, int ClusterM, int ClusterN>
struct Config {
  using Schedule = Schedule_;
  using Tile = cute::Shape<cute::Int<TileM>, cute::Int<TileN>, cute::Int<TileK>>;
  using Cluster = cute::Shape<cute::Int<ClusterM>, cute::Int<ClusterN>, cute::Int<1>>;
  static constexpr int kThreadsPerTile = Schedule::kWarpgroupsPerTile * 128;
  static constexpr TileShape kShape{TileM, TileN, ClusterM, ClusterN};
};

// The stock collectives: y [rows, n, chunk] row major, 16-bit, no source; weight broadcast over the chunks (its batch
// stride is a static 0, so its tensor map has no chunk dimension).
template <class Cfg, class Element>
using StockEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Cfg::Tile, typename Cfg::Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, cutlass::layout::RowMajor, 8, Element,
    cutlass::layout::RowMajor, 8, typename Cfg::Schedule::Epilogue>::CollectiveOp;

using WeightStrideKMajor = cute::Stride<int64_t, cute::_1, cute::_0>;
using WeightStrideNMajor = cute::Stride<cute::_1, int64_t, cute::_0>;

template <class Cfg, class Element, bool WeightTransposed, class Epilogue>
using StockMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, 8, Element,
    cute::conditional_t<WeightTransposed, WeightStrideNMajor, WeightStrideKMajor>, 8, float, typename Cfg::Tile,
    typename Cfg::Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    typename Cfg::Schedule::Mainloop>::CollectiveOp;

template <bool WeightTransposed>
auto weight_stride(int64_t stride) {
  if constexpr (WeightTransposed) {
    return WeightStrideNMajor{cute::_1{}, stride, cute::_0{}};
  } else {
    return WeightStrideKMajor{stride, cute::_1{}, cute::_0{}};
  }
}

// Fills in what does not depend on the op, and launches.
template <class GemmKernel, class Args>
cudaError_t launch_gemm(typename GemmKernel::Arguments& arguments, Args const& args, TileShape shape,
                        cudaStream_t stream) {
  dim3 const cluster(shape.cluster_m, shape.cluster_n);
  auto* const kernel = cutlass::device_kernel<GemmKernel>;
  cudaError_t const error = max_active_clusters(reinterpret_cast<void const*>(kernel), cluster,
                                                GemmKernel::MaxThreadsPerBlock, GemmKernel::SharedStorageSize, stream,
                                                &arguments.hw_info.device_id, &arguments.hw_info.max_active_clusters);
  if (error != cudaSuccess) return error;
  arguments.hw_info.sm_count = arguments.hw_info.max_active_clusters * shape.cluster_m * shape.cluster_n;
  arguments.mode = cutlass::gemm::GemmUniversalMode::kBatched;
  arguments.problem_shape = {static_cast<int>(args.rows), static_cast<int>(args.n), static_cast<int>(args.k),
                             args.world * args.sections};
  using RasterOrderOptions = cutlass::gemm::kernel::detail::RasterOrderOptions;
  arguments.scheduler.raster_order = args.along_n ? RasterOrderOptions::AlongN : RasterOrderOptions::AlongM;
  arguments.scheduler.rank = args.order_rank;
  arguments.scheduler.world = args.world;
  arguments.scheduler.sections = args.sections;
  arguments.scheduler.order = make_tile_order(args.rows, args.n, shape, args.swizzle, args.along_n);
  if (!GemmKernel::can_implement(arguments)) return cudaErrorInvalidValue;
  auto const params = GemmKernel::to_underlying_arguments(arguments, nullptr);
  return launch_clusters(kernel, params, GemmKernel::get_grid_shape(params), cluster, GemmKernel::MaxThreadsPerBlock,
                         GemmKernel::SharedStorageSize, /*overlaps=*/false, stream);
}

}  // namespace flux
