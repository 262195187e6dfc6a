#pragma once
// The kernels of gemm_ar for few rows, a row each. Names: rows of the weight x rows of x of a tile, CTAs that share K.

#include "kernels/ar_launch.hpp"

namespace flux {

using GemmArLauncher = cudaError_t (*)(GemmArArgs const&, cudaStream_t);

#define FLUX_DECLARE_KERNELS(config)                                    \
  cudaError_t gemm_ar_##config##_bf16(GemmArArgs const&, cudaStream_t); \
  cudaError_t gemm_ar_##config##_fp16(GemmArArgs const&, cudaStream_t)
FLUX_DECLARE_KERNELS(64x16_k1);
FLUX_DECLARE_KERNELS(64x16_k2);
FLUX_DECLARE_KERNELS(64x32_k2);
FLUX_DECLARE_KERNELS(128x32_k2);
FLUX_DECLARE_KERNELS(64x64_k2);
FLUX_DECLARE_KERNELS(128x64_k2);
FLUX_DECLARE_KERNELS(128x128_k2);
#undef FLUX_DECLARE_KERNELS

struct ArKernelRow {
  char const* name;
  int tile_n, tile_m, split_k;
  GemmArLauncher launch[2];  // by Element16

  int64_t num_units(int64_t m, int64_t n) const { return ceil_div(m, tile_m) * ceil_div(n, tile_n) * split_k; }
  int32_t unit_words() const { return tile_n * tile_m / split_k / 2; }
  int64_t slot_bytes(int64_t m, int64_t n, int world) const {
    return exchange_bytes(static_cast<int32_t>(num_units(m, n)), world, unit_words());
  }
};

#define FLUX_LAUNCHERS(config) {gemm_ar_##config##_bf16, gemm_ar_##config##_fp16}
inline constexpr ArKernelRow kArKernels[] = {
    // up to 16 rows, a wide weight: one CTA a tile fills the chip
    {"64x16_k1", 64, 16, 1, FLUX_LAUNCHERS(64x16_k1)},
    // the same for a narrow weight
    {"64x16_k2", 64, 16, 2, FLUX_LAUNCHERS(64x16_k2)},
    {"64x32_k2", 64, 32, 2, FLUX_LAUNCHERS(64x32_k2)},
    // with more rows x is read from the L2 as often as there are tiles along N: the fewer the better
    {"128x32_k2", 128, 32, 2, FLUX_LAUNCHERS(128x32_k2)},
    {"64x64_k2", 64, 64, 2, FLUX_LAUNCHERS(64x64_k2)},
    {"128x64_k2", 128, 64, 2, FLUX_LAUNCHERS(128x64_k2)},
    {"128x128_k2", 128, 128, 2, FLUX_LAUNCHERS(128x128_k2)},
};
#undef FLUX_LAUNCHERS
inline constexpr int kNumArKernels = sizeof(kArKernels) / sizeof(kArKernels[0]);

}  // namespace flux
