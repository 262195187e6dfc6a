#pragma once
// The kernels for few rows, a row each. Names: rows of the weight x rows of x of a tile, and the CTAs that share it, if
// there are several.

#include "kernels/num_sms.hpp"
#include "schedule/exchange_layout.hpp"

namespace flux {

struct FewRowsRow {
  char const* name;
  int tile_n, tile_m;
  int split_k;  // CTAs that share a tile

  int64_t num_tiles(int64_t m, int64_t n) const { return ceil_div(m, tile_m) * ceil_div(n, tile_n); }
  bool runs_at_once(int64_t m, int64_t n) const { return num_tiles(m, n) * split_k <= kNumSms; }  // on an H100 or H200
  int64_t slot_bytes(ExchangeForm form, int64_t m, int64_t n, int world) const {
    int64_t const columns = ceil_div(n, tile_n) * (tile_n / 64), vector_bytes = 16 * 64 * 2;
    if (form == ExchangeForm::kScatter) {
      return columns * world * scatter_vectors(static_cast<int>(m / world)) * vector_bytes;
    }
    int64_t const units = num_tiles(m, n) * (tile_n / 64) * split_k;
    int const vectors = tile_m / split_k / 16;
    int const slot = form == ExchangeForm::kTwoShot ? exchange_share(vectors) : vectors;
    return exchange_slots(form, units * (vectors / slot), world) * slot * vector_bytes;
  }
};

// Of two that load as much, the first is the faster one. A high tile fills shared memory with less of x; where few of
// them cover the weight, they are shared.
inline constexpr FewRowsRow kFewRowsKernels[] = {
    {"64x16", 64, 16, 1},      {"128x16", 128, 16, 1},      {"64x32_k2", 64, 32, 2},  {"64x32", 64, 32, 1},
    {"128x64_k2", 128, 64, 2}, {"64x64_k2", 64, 64, 2},     {"64x64", 64, 64, 1},     {"128x64", 128, 64, 1},
    {"128x128", 128, 128, 1},  {"128x128_k2", 128, 128, 2}, {"128x192", 128, 192, 1}, {"128x192_k2", 128, 192, 2},
    {"128x256", 128, 256, 1},  {"128x256_k2", 128, 256, 2},
};
inline constexpr int kNumFewRowsKernels = sizeof(kFewRowsKernels) / sizeof(kFewRowsKernels[0]);

}  // namespace flux
