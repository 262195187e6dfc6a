#pragma once
// The TMA mainloop of CUTLASS, with the partials of the peers behind the operands of each tile of the own chunk:
//
//   y = sum of the partials in rank order, in fp32, the own one unrounded
//
// They come through the stages of the operands: the producer, after a tile's last operands, waits for the tile's piece
// from each peer and fills a few stages more; the math warps add those up when the product is there. So memory's latency
// is hidden behind the products before, as that of the operands is. Tiles of the peers' chunks have no such stages, so
// the states of the pipeline are kept here, not by the kernel.
//
// The partials lie in a stage in runs of a few vectors of all threads: [group of vectors][source].

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/numeric_conversion.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "kernels/rs_transport.cuh"
#include "kernels/tile_scheduler.cuh"

namespace flux {

// Turns: math warpgroups that take tiles in turn, each one a whole tile.
template <class Stock_, int Turns>
struct RsMainloop : Stock_ {
  using Stock = Stock_;
  using typename Stock::ElementA;
  using typename Stock::MainloopPipeline;
  using typename Stock::PipelineState;
  using typename Stock::TensorStorage;
  using Fragments = RsFragments<typename Stock::TileShape, cute::size(typename Stock::TiledMma{})>;

  static constexpr int kGroup = Fragments::kAccumulators > 128 ? 1 : 2;  // vectors of a run: as registers allow
  static constexpr int kRunBytes = kGroup * Fragments::kVectorBytes;
  static constexpr int kRunsOfA = Stock::TmaTransactionBytesMK / kRunBytes;  // a stage is a part for A and one for B
  static constexpr int kRunsOfB = Stock::TmaTransactionBytesNK / kRunBytes;
  static constexpr int kRuns = kRunsOfA + kRunsOfB;
  static constexpr int kPrefetches = 8;
  static_assert(Fragments::kVectors % kGroup == 0 && kRuns * kRunBytes == Stock::TmaTransactionBytes);

  struct Arguments : Stock::Arguments {
    RsTransport transport;
  };
  struct Params : Stock::Params {
    RsTransport transport;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem, Arguments const& args, void* workspace) {
    Params params;
    static_cast<typename Stock::Params&>(params) = Stock::to_underlying_arguments(problem, args, workspace);
    params.transport = args.transport;
    return params;
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState /*ours is*/,
                           cute::tuple<TensorA, TensorB> const& inputs, BlockCoord const& block, KTileIterator k_tile,
                           int k_tile_count, int lane, uint32_t rank_in_cluster, TensorStorage& storage) {
    auto [m, n, k, l] = block;
    RsTransport const& t = params.transport;
    auto const [section, owner] = ar_chunk_of(int(l), t.world);
    int const parts = owner == t.rank ? kPrefetches : 1;
    int const position = t.order.position_of({int(m), int(n)});
    for (int part = 0, done = 0; part < parts; ++part) {
      if (owner == t.rank && lane < t.world && lane != t.rank) {
        constexpr int kBytes = Fragments::kTileBytes / kPrefetches;
        cute::SM90_BULK_COPY_G2S::PREFETCH::copy(
            t.staged + t.offset(rs_slot(t.rank, t.world, lane), section, position, Fragments::kTileBytes) + part * kBytes,
            kBytes);
      }
      __syncwarp();
      int const count = k_tile_count * (part + 1) / parts - done;
      Stock::load(params, pipeline, write_, inputs, block, k_tile, count, lane, rank_in_cluster, storage);
      write_.advance(count);
      for (int i = 0; i < count; ++i) ++k_tile;
      done += count;
    }
    if (owner == t.rank) load_partials(t, pipeline, section, {int(m), int(n)}, lane, rank_in_cluster, storage);
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline, PipelineState) { Stock::load_tail(pipeline, write_); }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState, Accumulators& acc, int k_tile_count, int thread_idx,
                          TensorStorage& storage, Params const& params) {
    RsTransport const& t = params.transport;
    while (turn_ % Turns != (Turns == 1 ? 0 : cutlass::canonical_warp_group_idx() - 1)) {  // another warpgroup's tile
      read_.advance(k_tile_count + (is_own(t, turn_) ? num_stages(t.world) : 0));
      ++turn_;
    }
    Stock::mma(pipeline, read_, acc, k_tile_count, thread_idx, storage, params);
    Stock::mma_tail(pipeline, read_, k_tile_count);
    cute::warpgroup_fence_operand(acc);
    read_.advance(k_tile_count);
    add_partials(t, pipeline, acc, is_own(t, turn_), thread_idx, storage);
    ++turn_;
  }

  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}  // done

 private:
  CUTLASS_DEVICE static int num_runs(int world) { return Fragments::kVectors / kGroup * (world - 1); }
  CUTLASS_DEVICE static int num_stages(int world) { return (num_runs(world) + kRuns - 1) / kRuns; }

  CUTLASS_DEVICE static bool is_own(RsTransport const& t, int turn) {
    ClusterWalk const walk(t.order);
    int const step = walk.at(turn) / t.order.num_clusters();
    return step < t.sections * t.world && ar_chunk(t.order_rank, t.world, t.sections, step).owner == t.rank;
  }

  CUTLASS_DEVICE static uint8_t* run_at(TensorStorage& storage, int stage, int run) {
    auto* const a = reinterpret_cast<uint8_t*>(storage.smem_A.data()) + stage * Stock::TmaTransactionBytesMK;
    auto* const b = reinterpret_cast<uint8_t*>(storage.smem_B.data()) + stage * Stock::TmaTransactionBytesNK;
    return run < kRunsOfA ? a + run * kRunBytes : b + (run - kRunsOfA) * kRunBytes;
  }

  CUTLASS_DEVICE void load_partials(RsTransport const& t, MainloopPipeline pipeline, int section, Tile tile, int lane,
                                    uint32_t rank_in_cluster, TensorStorage& storage) {
    int const position = t.order.position_of(tile), piece = t.piece(section, position);
    if (lane < t.world && lane != t.rank) {
      wait_signal(t.wait, t.arrived + lane * kMaxPieces + piece, lane, piece, tile.m, tile.n);
    }
    __syncwarp();
    if (cute::elect_one_sync()) {
      fence_async_proxy();
      PipelineState state = write_;
      int group = 0, source = t.rank == 0 ? 1 : 0;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int left = num_runs(t.world); left > 0; left -= kRuns, ++state) {
        pipeline.producer_acquire(state);  // expects the bytes of a whole stage
        auto* const barrier = pipeline.producer_get_barrier(state);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int run = 0; run < min(left, kRuns); ++run) {
          uint8_t const* from =
              t.staged + t.offset(rs_slot(t.rank, t.world, source), section, position, Fragments::kTileBytes);
          cute::SM90_BULK_COPY_G2S::copy(from + group * kRunBytes, barrier, run_at(storage, state.index(), run),
                                         kRunBytes);
          source += source + 1 == t.rank ? 2 : 1;
          if (source >= t.world) ++group, source = t.rank == 0 ? 1 : 0;
        }
        if (left < kRuns) {
          cutlass::arch::ClusterTransactionBarrier::complete_transaction(barrier, rank_in_cluster,
                                                                         (kRuns - left) * kRunBytes);
        }
      }
    }
    write_.advance(num_stages(t.world));
  }

  template <class Accumulators>
  CUTLASS_DEVICE void add_partials(RsTransport const& t, MainloopPipeline pipeline, Accumulators& acc, int is_own,
                                   int thread_idx, TensorStorage& storage) {
    int run = 0;
    auto const release = [&] {
      cutlass::arch::fence_view_async_shared();
      sync_warpgroup();  // one thread releases for all
      pipeline.consumer_release(read_);
      ++read_;
      run = 0;
    };
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < Fragments::kAccumulators; first += 8 * kGroup) {
      asm volatile("" : "+r"(is_own));  // a branch for each group: one for all needs all accumulators twice
      if (!is_own) continue;
      float sum[8 * kGroup] = {};
      CUTLASS_PRAGMA_NO_UNROLL
      for (int source = 0; source < t.world; ++source) {
        if (source == t.rank) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 8 * kGroup; ++i) sum[i] += acc(first + i);
          continue;
        }
        if (run == 0) pipeline.consumer_wait(read_);
        auto const* const vectors = reinterpret_cast<uint4 const*>(run_at(storage, read_.index(), run)) + thread_idx;
        uint4 values[kGroup];
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kGroup; ++v) values[v] = vectors[v * (Fragments::kVectorBytes / 16)];
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kGroup; ++v) accumulate(sum + 8 * v, values[v]);
        if (++run == kRuns) release();
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8 * kGroup; ++i) acc(first + i) = sum[i];
    }
    if (run > 0) release();
  }

  CUTLASS_DEVICE static void accumulate(float* sum, uint4 const& vector) {
    using Vector = cutlass::Array<ElementA, 8>;
    cutlass::NumericArrayConverter<float, ElementA, 8> convert;
    cutlass::Array<float, 8> const values = convert(reinterpret_cast<Vector const&>(vector));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) sum[i] += values[i];
  }

  PipelineState write_{0, 1, 0};  // all stages are empty
  PipelineState read_{};
  int turn_ = 0;  // the CTA's tiles that `read_` has passed
};

}  // namespace flux
