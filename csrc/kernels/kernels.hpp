#pragma once
// The compiled configurations, a row each, and the choice among them. Names: tile, cluster, schedule (c: cooperative,
// p: pingpong). Plain C++: launchers.hpp has the functions that start them.

#include <string>

#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"

namespace flux {

struct KernelConfig {
  char const* name;
  TileShape shape;
};

// The model of its time, fitted to the kernels alone on an H100 (benchmarks/kernels.py): waves of CTAs, times
// us_per_mmac for a million multiply-adds of a tile + us_per_wave.
struct KernelModel {
  double us_per_mmac;
  double us_per_wave;
};

struct KernelRow {
  KernelConfig config;
  KernelModel model;
};

inline constexpr KernelRow kKernels[] = {
    // most products: its epilogue is hidden, and it moves little through the caches
    {{"p128x192_2x1", {128, 192, 2, 1}}, {0.374, 1.5}},
    // few tiles, short K: finer waves
    {{"p128x128_2x1", {128, 128, 2, 1}}, {0.429, -1.6}},
    // where N ends in a third of a tile of the first, or its last wave is nearly empty
    {{"c128x256_2x1", {128, 256, 2, 1}}, {0.385, 3.0}},
    // the same for tall chunks whose N ends in half a tile of 256
    {{"c256x128_2x1", {256, 128, 2, 1}}, {0.388, 3.0}},
};
inline constexpr int kNumKernels = sizeof(kKernels) / sizeof(kKernels[0]);

// How one problem is run: a kernel and its knobs.
struct LaunchChoice {
  int kernel;               // index into kKernels
  int swizzle;              // clusters in a stripe
  bool along_n;             // walk along N
  int pieces;               // of a chunk, each with its own signal
  bool same_order = false;  // of the chunks, on all ranks: chunk_order.hpp
  int sections = 1;         // of the rows of gemm_ar: fused_choose.hpp

  std::string name() const {
    return std::string(kKernels[kernel].config.name) + "/" + (along_n ? "n" : "m") + std::to_string(swizzle) + "/p" +
           std::to_string(pieces) + (same_order ? kSameOrder : "");
  }
};

}  // namespace flux
