#pragma once
// Which kernels and knobs are worth measuring for a problem, and the memory that the widest of them needs.

#include <algorithm>
#include <vector>

#include "kernels/choose.hpp"

namespace flux {

// Bytes of a chunk of gemm_rs that is made of tiles of this shape.
inline int64_t rs_slot_bytes_of(Problem const& problem, TileShape shape) {
  int64_t const tiles = make_tile_order(problem.rows, problem.n, shape, 1, false).num_tiles();
  return rs_slot_bytes(tiles, rs_tile_bytes(shape.tile_m, shape.tile_n, element_size(problem.dtype)));
}

// The same for the kernel whose tiles pad the chunks most. It grows with the rows: what is enough for a product is
// enough for every smaller one, whatever kernel runs it.
inline int64_t largest_rs_slot_bytes(Problem const& problem) {
  int64_t largest = 0;
  for (KernelRow const& row : kKernels) largest = std::max(largest, rs_slot_bytes_of(problem, row.config.shape));
  return largest;
}

// The model's choice first, then every kernel that the model thinks is not far behind, with every walk of its tiles.
// Walks and pieces matter by a few per cent each, and hardly depend on each other: pieces are varied with one walk. But
// where the chunks of several peers are interleaved, pieces that are bands of columns save reading the weight
// again (rs_item); along N they are that where a chunk is one stripe, and then the faster ones of the small tiles.
// More pieces than four never paid but for those of a gemm_ar of few sections.
inline std::vector<LaunchChoice> launch_candidates(Problem const& problem, bool interleaved, int most_pieces = 4) {
  struct Walk {
    int swizzle;
    bool along_n;
  };
  constexpr Walk kWalks[] = {{4, true}, {2, true}, {1, false}, {4, false}};
  constexpr int64_t kSlackPercent = 30;                   // the estimate is off by a third at times
  constexpr int64_t kLeastPieceBytes = int64_t{1} << 20;  // smaller pieces cost more than they gain

  LaunchChoice const model = choose_launch(problem);
  bool const ag = problem.op == Op::kAgGemm;
  int64_t const chunk_bytes = problem.rows * (ag ? problem.k : problem.n) * 2;
  auto const cost = [&](int kernel) { return estimated_us(problem, kKernels[kernel]); };

  std::vector<LaunchChoice> candidates{model};
  auto const add = [&](LaunchChoice const& choice) {
    auto const same = [&](LaunchChoice const& other) { return other.name() == choice.name(); };
    if (std::none_of(candidates.begin(), candidates.end(), same)) candidates.push_back(choice);
  };
  double best = cost(0);
  for (int kernel = 1; kernel < kNumKernels; ++kernel) best = std::min(best, cost(kernel));
  for (int kernel = 0; kernel < kNumKernels; ++kernel) {
    if (cost(kernel) * 100 > best * (100 + kSlackPercent)) continue;
    for (Walk const walk : kWalks) add({kernel, walk.swizzle, walk.along_n, model.pieces});
    for (int pieces = 1; pieces <= most_pieces; pieces *= 2) {
      TileShape const shape = kKernels[kernel].config.shape;
      bool const one_stripe = problem.rows <= int64_t{kWalks[0].swizzle} * shape.tile_m * shape.cluster_m;
      bool const along_n = ag || (interleaved && shape.tile_n == 128 && one_stripe);
      Walk const walk = along_n ? kWalks[0] : kWalks[2];  // the best of most products
      if (pieces == 1 || chunk_bytes / pieces >= kLeastPieceBytes) add({kernel, walk.swizzle, walk.along_n, pieces});
    }
  }
  return candidates;
}

}  // namespace flux
