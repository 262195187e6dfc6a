#pragma once
// Which kernels for few rows suit a problem, and what memory they need: pure functions of it.

#include <algorithm>
#include <vector>

#include "kernels/few_rows_kernels.hpp"
#include "kernels/num_sms.hpp"
#include "ops/problem.hpp"

namespace flux {

constexpr int64_t kFewRows = 512;  // up to so many the kernels for many rows leave most of their tiles empty

// Up to so many the kernels for few rows may pay: where they reduce they send each tile as soon as it is computed,
// those for many rows a chunk of them.
inline int64_t few_rows_at_most(Op op) { return op == Op::kAgGemm ? kFewRows : 4 * kFewRows; }

// Whether the rows of x of all ranks fit into the exchange area.
inline bool gathered_rows_fit(Problem const& problem) {
  int64_t const row_bytes = problem.k * element_size(problem.dtype);
  return row_bytes == 0 || total_rows(problem) <= kGatherBytes / row_bytes;
}

// Bytes of a parity's slots, whatever kernel runs and in what form, also after a library GEMM; 0 if the least are
// enough. They grow with M.
inline int64_t exchange_bytes_at_most(Problem const& problem) {
  if (problem.op != Op::kGemmAr || element_size(problem.dtype) != 2) return 0;
  int64_t const rows = std::min(total_rows(problem), few_rows_at_most(problem.op));
  int64_t most = all_reduce_slot_bytes(ExchangeForm::kTwoShot, 2 * rows * problem.n, problem.world);
  for (FewRowsRow const& kernel : kFewRowsKernels) {
    if (problem.weight_transposed) break;  // they don't take it
    int64_t const m = round_up(rows, int64_t{kernel.tile_m});
    most = std::max(most, kernel.slot_bytes(ExchangeForm::kTwoShot, m, problem.n, problem.world));
  }
  return most > kExchangeBytes ? most : 0;
}

// The kernels for few rows that are worth a measurement, the fastest first: those whose tile is the least that holds
// all rows, or one of the largest where there are more rows than one of 128 holds; and smaller ones while all tiles run
// at once, or those that CTAs share while there are few of them, so that more SMs load and send.
inline std::vector<int> few_rows_order(Problem const& problem) {
  constexpr int kSmallest = 16, kShared = 32, kSmall = 64, kLarge = 128;
  constexpr int kFewCtas = 80;  // with more of them those of the smallest tiles load as fast
  // From here on what is loaded outweighs the exchange of parts, in an ag_gemm later as x is waited for; measured at
  // TP = 2 and 4 (bench --study rows).
  int64_t const long_k = problem.op == Op::kAgGemm ? 2048 : 1024;
  std::vector<int> order;
  int64_t const m = total_rows(problem);
  if (m > few_rows_at_most(problem.op)) return order;
  int least = 2 * kLarge;
  for (FewRowsRow const& row : kFewRowsKernels) {
    if (row.tile_m >= m) least = std::min(least, row.tile_m);
  }
  for (int kernel = 0; kernel < kNumFewRowsKernels; ++kernel) {
    FewRowsRow const& row = kFewRowsKernels[kernel];
    bool const is_small = row.tile_m == kSmall && m > kSmall && row.runs_at_once(m, problem.n);
    bool const is_shared = least == kSmallest && row.tile_m == kShared && row.split_k > 1 && problem.k >= long_k &&
                           row.num_tiles(m, problem.n) * row.split_k <= kFewCtas;
    bool const is_large = row.tile_m >= kLarge && m > kLarge;
    if (row.tile_m == least || is_large || is_small || is_shared) order.push_back(kernel);
  }
  // What an SM loads into its shared memory, in rows of K; CTAs that share a tile take a third longer for each, and a
  // bit more with several tiles of x.
  auto const loads = [&](int kernel) {
    FewRowsRow const& row = kFewRowsKernels[kernel];
    int64_t const turns = ceil_div(row.num_tiles(m, problem.n) * row.split_k, kNumSms);
    // Of x; CTAs with several tiles share those that M does not fill. Up to one large tile it hardly matters.
    int64_t const m_tiles = ceil_div(m, int64_t{row.tile_m});
    bool const shares = m > kLarge && (m_tiles == 1 || turns > 1);
    double const x_rows = shares ? double(m) / double(m_tiles) : row.tile_m;
    double const rows = (row.tile_n + x_rows) / row.split_k;
    return double(turns) * rows * (row.split_k == 1 ? 1.0 : m_tiles == 1 ? 4.0 / 3 : 1.35);
  };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return loads(a) < loads(b); });
  return order;
}

// The share of what a kernel for few rows multiplies, with all SMs in each of its turns, that is of the product.
inline double few_rows_use(Problem const& problem, FewRowsRow const& row) {
  int64_t const m = total_rows(problem), at_once = kNumSms / row.split_k;
  int64_t const turns = ceil_div(row.num_tiles(m, problem.n), at_once);
  return double(m) * double(problem.n) / (double(turns * at_once) * row.tile_m * row.tile_n);
}

}  // namespace flux
