#pragma once
// The function that starts each kernel of kernels.hpp and few_rows_kernels.hpp, in the order of their rows.

#include <string_view>

#include "kernels/few_rows_kernels.hpp"
#include "kernels/few_rows_launch.hpp"
#include "kernels/kernels.hpp"
#include "kernels/launch.hpp"

namespace flux {

enum class Element16 : int { kBFloat16 = 0, kFloat16 = 1 };

using AgGemmLauncher = cudaError_t (*)(AgGemmArgs const&, cudaStream_t);
using GemmRsLauncher = cudaError_t (*)(GemmRsArgs const&, cudaStream_t);
using FewRowsLauncher = cudaError_t (*)(FewRowsArgs const&, cudaStream_t);

struct Launchers {
  char const* name;
  AgGemmLauncher ag_gemm[2];  // by Element16
  GemmRsLauncher gemm_rs[2];
};

struct FewRowsLaunchers {
  char const* name;
  FewRowsLauncher run[2];
};

#define FLUX_DECLARE_KERNELS(config)                                    \
  cudaError_t ag_gemm_##config##_bf16(AgGemmArgs const&, cudaStream_t); \
  cudaError_t ag_gemm_##config##_fp16(AgGemmArgs const&, cudaStream_t); \
  cudaError_t gemm_rs_##config##_bf16(GemmRsArgs const&, cudaStream_t); \
  cudaError_t gemm_rs_##config##_fp16(GemmRsArgs const&, cudaStream_t)
FLUX_DECLARE_KERNELS(p128x192_2x1);
FLUX_DECLARE_KERNELS(p128x128_2x1);
FLUX_DECLARE_KERNELS(c128x256_2x1);
FLUX_DECLARE_KERNELS(c256x128_2x1);
#undef FLUX_DECLARE_KERNELS

#define FLUX_DECLARE_KERNELS(config)                                      \
  cudaError_t few_rows_##config##_bf16(FewRowsArgs const&, cudaStream_t); \
  cudaError_t few_rows_##config##_fp16(FewRowsArgs const&, cudaStream_t)
FLUX_DECLARE_KERNELS(64x16);
FLUX_DECLARE_KERNELS(128x16);
FLUX_DECLARE_KERNELS(64x32_k2);
FLUX_DECLARE_KERNELS(64x32);
FLUX_DECLARE_KERNELS(128x64_k2);
FLUX_DECLARE_KERNELS(64x64_k2);
FLUX_DECLARE_KERNELS(64x64);
FLUX_DECLARE_KERNELS(128x64);
FLUX_DECLARE_KERNELS(128x128);
FLUX_DECLARE_KERNELS(128x128_k2);
FLUX_DECLARE_KERNELS(128x192);
FLUX_DECLARE_KERNELS(128x192_k2);
FLUX_DECLARE_KERNELS(128x256);
FLUX_DECLARE_KERNELS(128x256_k2);
#undef FLUX_DECLARE_KERNELS

#define FLUX_LAUNCHERS(config)                                                                                        \
  {                                                                                                                   \
    #config, {ag_gemm_##config##_bf16, ag_gemm_##config##_fp16}, { gemm_rs_##config##_bf16, gemm_rs_##config##_fp16 } \
  }
inline constexpr Launchers kLaunchers[kNumKernels] = {
    FLUX_LAUNCHERS(p128x192_2x1),
    FLUX_LAUNCHERS(p128x128_2x1),
    FLUX_LAUNCHERS(c128x256_2x1),
    FLUX_LAUNCHERS(c256x128_2x1),
};
#undef FLUX_LAUNCHERS

#define FLUX_LAUNCHERS(config)                                      \
  {                                                                 \
    #config, { few_rows_##config##_bf16, few_rows_##config##_fp16 } \
  }
inline constexpr FewRowsLaunchers kFewRowsLaunchers[kNumFewRowsKernels] = {
    FLUX_LAUNCHERS(64x16),     FLUX_LAUNCHERS(128x16),     FLUX_LAUNCHERS(64x32_k2), FLUX_LAUNCHERS(64x32),
    FLUX_LAUNCHERS(128x64_k2), FLUX_LAUNCHERS(64x64_k2),   FLUX_LAUNCHERS(64x64),    FLUX_LAUNCHERS(128x64),
    FLUX_LAUNCHERS(128x128),   FLUX_LAUNCHERS(128x128_k2), FLUX_LAUNCHERS(128x192),  FLUX_LAUNCHERS(128x192_k2),
    FLUX_LAUNCHERS(128x256),   FLUX_LAUNCHERS(128x256_k2),
};
#undef FLUX_LAUNCHERS

constexpr bool launchers_are_in_order() {
  for (int i = 0; i < kNumKernels; ++i) {
    if (std::string_view(kLaunchers[i].name) != kKernels[i].config.name) return false;
  }
  for (int i = 0; i < kNumFewRowsKernels; ++i) {
    if (std::string_view(kFewRowsLaunchers[i].name) != kFewRowsKernels[i].name) return false;
  }
  return true;
}
static_assert(launchers_are_in_order(), "the rows of a launcher and of its kernel have one index");

}  // namespace flux
