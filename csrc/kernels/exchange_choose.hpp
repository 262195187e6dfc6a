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

// Why it can't reduce the product of a gemm_ar, as the end of a sentence; empty if it can. Without M: `auto` warns of a
// reason once.
inline std::string why_no_all_reduce(Problem const& problem) {
  if (element_size(problem.dtype) != 2) return "the all-reduce kernel takes bf16 and fp16";
  if (problem.n % 8 != 0) return "the all-reduce kernel takes an N that is a multiple of 8";
  constexpr int64_t kMostElements = int64_t{1} << 34;  // the kernel counts its vectors of 8 in 32 bits
  int64_t const elements = problem.rows * problem.n;
  int64_t const most = std::max(kExchangeBytes, exchange_bytes_at_most(problem));
  bool const fits =
      elements <= kMostElements && all_reduce_slot_bytes(all_reduce_form(problem), 2 * elements, problem.world) <= most;
  if (fits) return {};
  return "an all-reduce of so many rows of " + std::to_string(problem.n) + " between " + std::to_string(problem.world) +
         " ranks does not fit into the exchange area of " + std::to_string(most >> 20) + " MiB";
}

// The same for a gather of the operand of an ag_gemm.
inline std::string why_no_all_gather(Problem const& problem) {
  int64_t const row_bytes = problem.k * element_size(problem.dtype);
  if (row_bytes % 16 != 0) return "the all-gather kernel takes rows of x of whole 16 bytes";
  if (gathered_rows_fit(problem)) return {};
  return "the all-gather kernel takes up to " + std::to_string(kGatherBytes / row_bytes) + " rows of " +
         std::to_string(problem.k);
}

// Why CUDA can't run the problem decomposed; empty if it can.
inline std::string why_not_decomposed_on_cuda(Problem const& problem) {
  if (std::string const why_not = why_not_decomposed(problem); !why_not.empty()) return why_not;
  if (problem.op == Op::kGemmAr) return why_no_all_reduce(problem);
  return decomposition_of(problem).schedule == ChunkSchedule::kGather ? why_no_all_gather(problem) : "";
}

// What "auto" runs on CUDA where fused is slower, or can't run: decomposed in a configuration that exchanges its data
// by a kernel, where there is one that can, as that is faster than the plain sequence; or this. Measured at TP = 2 and
// 4 (bench --study rows --lists models). With more than two ranks a gemm_ar that sends much is left to NCCL.
struct BesideFused {
  Strategy strategy = Strategy::kSequential;
  std::string config = {};
};
inline BesideFused beside_fused(Problem const& problem) {
  constexpr int64_t kMostSent = int64_t{16} << 20;
  if (problem.op == Op::kGemmRs || problem.n == 0) return {};
  std::string const config = problem.op == Op::kAgGemm ? "gather" : choose_decomposition(problem).name();
  if (!why_not_decomposed_on_cuda(with_config(problem, config)).empty()) return {};
  int64_t const y_bytes = problem.rows * problem.n * element_size(problem.dtype);
  if (problem.op == Op::kGemmAr && problem.world > 2 && y_bytes / problem.world * 2 * (problem.world - 1) > kMostSent) {
    return {};
  }
  return {Strategy::kDecomposed, config};
}

}  // namespace flux
