#pragma once
// The loads of the ops for few rows (few_rows.cuh): one thread, by TMA.

#include "cutlass/arch/barrier.h"
#include "cutlass/pipeline/sm90_pipeline.hpp"
#include "kernels/few_rows_push.cuh"
#include "kernels/few_rows_tiles.cuh"

namespace flux {

// The rows of the weight of a tile, in tiles of K, and where they go in shared memory, in stages.
template <class Cfg, class Params>
__device__ auto few_rows_weights(Params const& p, typename Cfg::Storage& storage, FewRowsTiles<Cfg> const& tile) {
  using namespace cute;
  Tensor const weight = p.tma_weight.get_tma_tensor(make_shape(p.n, p.k));
  Tensor const s_weight = make_tensor(make_smem_ptr(storage.weight.begin()), typename Cfg::WeightLayout{});
  auto const g_weight = local_tile(weight, Shape<Int<Cfg::TileN>, Int<Cfg::kTileK>>{}, make_coord(tile.n(), _));
  return tma_partition(p.tma_weight, Int<0>{}, Layout<_1>{}, group_modes<0, 2>(s_weight), group_modes<0, 2>(g_weight));
}

// Brings the first weights as far as the L2 while the kernel before this one comes to its end. That they may be
// written by it does no harm: the L2 is where they are written.
template <class Cfg, class Params>
__device__ void few_rows_prefetch(Params const& p, typename Cfg::Storage& storage) {
  auto const weights = few_rows_weights<Cfg>(p, storage, FewRowsTiles<Cfg>(p));
  int k = FewRowsTiles<Cfg>::slice();
  for (int stage = 0; stage < Cfg::kStages && k < p.k_tiles(); ++stage, k += Cfg::SplitK) {
    prefetch(p.tma_weight, cute::get<0>(weights)(cute::_, k));
  }
}

// One thread, elected in a way that the compiler knows: otherwise it takes each load as one of many lanes'. Where
// nothing is gathered it waits for the end of the last kernel, after all that needs no memory. For an ag_gemm the
// caller has waited before that: as measured, weights that are loaded sooner delay the rows of x.
template <bool Gathers, class Cfg, class Params>
__device__ void few_rows_load(Params const& p, typename Cfg::Storage& storage) {
  using namespace cute;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  int const parity = Gathers ? ExchangeCall(p.exchange).parity() : 0;
  GatheredSlices const slices(Gathers ? p.shard_rows() : 1, p.k);
  Tensor const x = p.tma_x[parity].get_tma_tensor(make_shape(p.m, p.k));
  Tensor const s_x = make_tensor(make_smem_ptr(storage.x.begin()), typename Cfg::XLayout{});

  int const first_k = FewRowsTiles<Cfg>::slice();
  int arrived_k = 0;                                    // tiles of K whose x is there
  bool is_first = true;                                 // of the tiles
  cutlass::PipelineState<Cfg::kStages> state(0, 1, 0);  // all stages are empty
  for (FewRowsTiles<Cfg> tile(p); tile.is_valid(); tile.next(), is_first = false) {
    bool const is_last_m = p.is_last_m(tile.m());
    auto const& tma_x = is_last_m ? p.tma_last_x[parity] : p.tma_x[parity];
    int const stage_bytes = Cfg::kWeightBytes + (is_last_m ? p.last_x_bytes : Cfg::kXBytes);
    auto const g_x = local_tile(x, Shape<Int<Cfg::TileM>, Int<Cfg::kTileK>>{}, make_coord(tile.m(), _));
    auto const weights = few_rows_weights<Cfg>(p, storage, tile);
    auto const rows = tma_partition(tma_x, Int<0>{}, Layout<_1>{}, group_modes<0, 2>(s_x), group_modes<0, 2>(g_x));
    auto ahead = state;
    auto const load_weight = [&](int k) {
      int const stage = ahead.index();
      EmptyBarrier::wait(&storage.empty[stage], ahead.phase());
      FullBarrier::arrive_and_expect_tx(&storage.full[stage], stage_bytes);
      copy(p.tma_weight.with(storage.full[stage], 0, TMA::CacheHintSm90::EVICT_FIRST), get<0>(weights)(_, k),
           get<1>(weights)(_, stage));
      ++ahead;
    };
    int loaded_k = first_k;
    if (is_first && !Gathers) wait_for_last_kernel();
    if (is_first && Gathers) {
      // While the peers' rows of x come in, the weights fill all stages, and the next ones come as far as the L2.
      for (int stage = 0; stage < Cfg::kStages && loaded_k < p.k_tiles(); ++stage, loaded_k += Cfg::SplitK) {
        load_weight(loaded_k);
      }
      for (int k = loaded_k; k < min(p.k_tiles(), loaded_k + Cfg::kStages * Cfg::SplitK); k += Cfg::SplitK) {
        prefetch(p.tma_weight, get<0>(weights)(_, k));
      }
    }
    for (int k = first_k; k < p.k_tiles(); k += Cfg::SplitK, ++state) {
      if (Gathers && k >= arrived_k) arrived_k = slices.take(k * Cfg::kTileK, &storage.slices) / Cfg::kTileK;
      if (k >= loaded_k) load_weight(k);
      int const stage = state.index();
      copy(tma_x.with(storage.full[stage], 0, TMA::CacheHintSm90::EVICT_LAST), get<0>(rows)(_, k),
           get<1>(rows)(_, stage));
    }
  }
}

}  // namespace flux
