#pragma once
// The kernels of gemm_ar for few rows, a row each. Names: rows of the weight x rows of x of a tile. Plain C++:
// launchers.hpp has the functions that start them.

#include "schedule/exchange_layout.hpp"

namespace flux {

struct ArKernelRow {
  char const* name;
  int tile_n, tile_m;

  int64_t num_tiles(int64_t m, int64_t n) const { return ceil_div(m, tile_m) * ceil_div(n, tile_n); }
  int64_t slot_bytes(int64_t m, int64_t n, int world) const {
    return exchange_bytes(num_tiles(m, n), world, tile_n * tile_m / 2);
  }
};

// The least tile that holds all rows is the fastest; x is read from the L2 as often as there are tiles along N.
inline constexpr ArKernelRow kArKernels[] = {
    {"64x16", 64, 16},
    {"64x32", 64, 32},
    {"64x64", 64, 64},
    {"64x128", 64, 128},
};
inline constexpr int kNumArKernels = sizeof(kArKernels) / sizeof(kArKernels[0]);

}  // namespace flux
