#pragma once
// What the kernels that exchange data before or after a library GEMM can do: pure functions of the problem.

#include <algorithm>
#include <string>

#include "kernels/few_rows_choose.hpp"
#include "ops/decomposed.hpp"

namespace flux {

inline ExchangeForm all_reduce_form(Problem const& problem) {
  bool const two_shot = decomposition_of(problem).schedule == ChunkSchedule::kTwoShot;
  return two_shot ? ExchangeForm::kTwoShot : ExchangeForm::kOneShot;
}

// Why it can't reduce the product of a gemm_ar, as the end of a sentence; empty if it can.
inline std::string why_no_all_reduce(Problem const& problem) {
  if (element_size(problem.dtype) != 2) return "the all-reduce kernel takes bf16 and fp16";
  if (problem.n % 8 != 0) return "the all-reduce kernel takes an N that is a multiple of 8";
  int64_t const bytes = all_reduce_slot_bytes(all_reduce_form(problem), 2 * problem.rows * problem.n, problem.world);
  int64_t const most = std::max(kExchangeBytes, exchange_bytes_at_most(problem));
  if (bytes <= most) return {};
  return "the all-reduce of " + std::to_string(problem.rows) + " x " + std::to_string(problem.n) + " between " +
         std::to_string(problem.world) + " ranks does not fit into the exchange area of " + std::to_string(most >> 20) +
         " MiB";
}

// The same for a gather of the operand of an ag_gemm.
inline std::string why_no_all_gather(Problem const& problem) {
  int64_t const row_bytes = problem.k * element_size(problem.dtype);
  if (row_bytes % 16 != 0) return "the all-gather kernel takes rows of x of whole 16 bytes";
  if (total_rows(problem) * row_bytes <= kGatherBytes) return {};
  return "the all-gather of " + std::to_string(total_rows(problem)) + " x " + std::to_string(problem.k) +
         " does not fit into the exchange area of " + std::to_string(kGatherBytes >> 20) + " MiB";
}

// Why CUDA can't run the problem decomposed; empty if it can.
inline std::string why_not_decomposed_on_cuda(Problem const& problem) {
  if (std::string const why_not = why_not_decomposed(problem); !why_not.empty()) return why_not;
  if (problem.op == Op::kGemmAr) return why_no_all_reduce(problem);
  return decomposition_of(problem).schedule == ChunkSchedule::kGather ? why_no_all_gather(problem) : "";
}

}  // namespace flux
