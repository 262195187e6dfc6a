#pragma once
// Everything in schedule/ is pure integer arithmetic: no torch, CUDA or CUTLASS header, no global state. The
// functions run on the host (launch code, CPU backend, tests built by g++) and on the device (tile schedulers).

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define FLUX_HD __host__ __device__ __forceinline__
#else
#define FLUX_HD inline
#endif

namespace flux {

FLUX_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FLUX_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace flux
