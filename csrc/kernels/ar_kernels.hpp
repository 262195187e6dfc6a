#pragma once
// The kernels of gemm_ar for few rows, a row each. Names: rows of the weight x rows of x of a tile.

#include "kernels/ar_launch.hpp"

namespace flux {

using GemmArLauncher = cudaError_t (*)(GemmArArgs const&, cudaStream_t);

#define FLUX_DECLARE_KERNELS(config)                                    \
  cudaError_t gemm_ar_##config##_bf16(GemmArArgs const&, cudaStream_t); \
  cudaError_t gemm_ar_##config##_fp16(GemmArArgs const&, cudaStream_t)
FLUX_DECLARE_KERNELS(64x16);
FLUX_DECLARE_KERNELS(64x32);
FLUX_DECLARE_KERNELS(64x64);
FLUX_DECLARE_KERNELS(64x128);
#undef FLUX_DECLARE_KERNELS

struct ArKernelRow {
  char const* name;
  int tile_n, tile_m;
  GemmArLauncher launch[2];  // by Element16

  int64_t num_tiles(int64_t m, int64_t n) const { return ceil_div(m, tile_m) * ceil_div(n, tile_n); }
  int64_t slot_bytes(int64_t m, int64_t n, int world) const {
    return exchange_bytes(num_tiles(m, n), world, tile_n * tile_m / 2);
  }
};

#define FLUX_LAUNCHERS(config) {gemm_ar_##config##_bf16, gemm_ar_##config##_fp16}
// The least tile that holds all rows is the fastest; x is read from the L2 as often as there are tiles along N.
inline constexpr ArKernelRow kArKernels[] = {
    {"64x16", 64, 16, FLUX_LAUNCHERS(64x16)},
    {"64x32", 64, 32, FLUX_LAUNCHERS(64x32)},
    {"64x64", 64, 64, FLUX_LAUNCHERS(64x64)},
    {"64x128", 64, 128, FLUX_LAUNCHERS(64x128)},
};
#undef FLUX_LAUNCHERS
inline constexpr int kNumArKernels = sizeof(kArKernels) / sizeof(kArKernels[0]);

}  // namespace flux
