#pragma once
// The persistent tile scheduler of CUTLASS with the order of schedule/: of the chunks and their parts (chunk_order.hpp,
// ar_item), and of the tiles in a chunk (tile_order.hpp). The chunk is the batch mode L of the problem, so a tile never
// straddles two ranks and a ragged M / TP is the ordinary residue of a batch.

#include "cutlass/cutlass.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "schedule/ar_schedule.hpp"
#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"

namespace flux {

struct ChunkWork {
  int chunk;
  int32_t cluster;  // of the chunk
};

struct AgOrder {
  template <class Params>
  FLUX_HD static ChunkWork at(Params const& p, int32_t index) {
    int32_t const per_chunk = p.order.num_clusters();
    int const step = index / per_chunk;
    return {ag_chunk(p.rank, p.world, step), index - step * per_chunk};
  }
};
struct RsOrder {
  template <class Params>
  FLUX_HD static ChunkWork at(Params const& p, int32_t index) {
    ArItem const work = ar_item(index, p.rank, p.world, p.sections, p.parts);
    return {ar_chunk_index(work.chunk, p.world), work.item};
  }
};

// What GemmUniversal takes for its scheduler argument to select ChunkedTileScheduler.
template <class ChunkOrder>
struct ChunkedSchedulerTag {};

template <class ChunkOrder>
class ChunkedTileScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Stock = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  using StockParams = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params;

 public:
  using typename Stock::RasterOrder;
  using typename Stock::WorkTileInfo;

  struct Arguments : Stock::Arguments {
    int rank = 0, world = 1, sections = 1;  // there are world * sections chunks
    TileOrder order{};
    Pieces parts{0, 1};  // of the clusters of a chunk, for ar_item
  };

  struct Params : StockParams {
    int rank = 0, world = 1, sections = 1;
    TileOrder order{};
    Pieces parts{0, 1};
  };

  template <class ProblemShape, class TileShapeT, class ClusterShapeT>
  static Params to_underlying_arguments(ProblemShape problem, TileShapeT tile, ClusterShapeT cluster,
                                        cutlass::KernelHardwareInfo const& hw, Arguments const& args,
                                        void* workspace = nullptr, uint32_t epilogue_subtile = 1,
                                        uint32_t k_alignment = 1) {
    Params params;
    static_cast<StockParams&>(params) =
        Stock::to_underlying_arguments(problem, tile, cluster, hw, args, workspace, epilogue_subtile, k_alignment);
    params.rank = args.rank;
    params.world = args.world;
    params.sections = args.sections;
    params.order = args.order;
    params.parts = args.parts;
    return params;
  }

  CUTLASS_HOST_DEVICE ChunkedTileScheduler() {}

  CUTLASS_DEVICE explicit ChunkedTileScheduler(Params const& params) : Stock(params), params_(&params) {
#if defined(__CUDA_ARCH__)
    uint32_t const block = params.raster_order_ == RasterOrder::AlongN ? blockIdx.x + blockIdx.y * gridDim.x
                                                                       : blockIdx.x * gridDim.y + blockIdx.y;
    uint32_t const cluster_size = params.order.cluster_size();
    cluster_ = block / cluster_size;
    num_clusters_ = gridDim.x * gridDim.y / cluster_size;
#endif
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return work_at(cluster_); }

  template <class ClusterShapeT>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShapeT) {
    return work_at(cluster_);
  }

  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { cluster_ += num_clusters_ * count; }

  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t count = 1) const {
    return cluster_ + num_clusters_ * count >=
           uint32_t(params_->order.num_clusters() * params_->world * params_->sections);
  }

  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo) {
    advance_to_next_work();
    return cute::make_tuple(work_at(cluster_), true);
  }

  template <class Pipeline, class PipelineState>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work, Pipeline&, PipelineState) {
    return fetch_next_work(work);
  }

 private:
  CUTLASS_DEVICE WorkTileInfo work_at(uint32_t cluster) const {
    TileOrder const& order = params_->order;
    if (cluster >= uint32_t(order.num_clusters() * params_->world * params_->sections)) {
      return WorkTileInfo::invalid_work_tile();
    }
    ChunkWork const work = ChunkOrder::at(*params_, cluster);
    Tile const c = order.cluster_at(work.cluster);
    dim3 const in_cluster = cute::block_id_in_cluster();
    return {c.m * order.cluster_m + int32_t(in_cluster.x), c.n * order.cluster_n + int32_t(in_cluster.y), work.chunk,
            true};
  }

  Params const* params_ = nullptr;
  uint32_t cluster_ = 0;
  uint32_t num_clusters_ = 0;
};

}  // namespace flux

namespace cutlass::gemm::kernel::detail {

template <class ChunkOrder, class TileShape, class ClusterShape, uint32_t SchedulerPipelineStageCount>
struct TileSchedulerSelector<flux::ChunkedSchedulerTag<ChunkOrder>, arch::Sm90, TileShape, ClusterShape,
                             SchedulerPipelineStageCount> {
  using Scheduler = flux::ChunkedTileScheduler<ChunkOrder>;
};

}  // namespace cutlass::gemm::kernel::detail
