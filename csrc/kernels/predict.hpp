#pragma once
// What the kernels make of a problem: which of them `auto` runs where nothing is tuned, for how long by their model,
// and how much a rank sends. Pure functions, so no GPU is needed.

#include <algorithm>
#include <string>

#include "kernels/exchange_choose.hpp"
#include "kernels/fused_choose.hpp"

namespace flux {

inline int64_t num_tiles_at_most(Problem const& problem) {  // of the smallest tile, padded to the largest cluster
  return problem.world * (ceil_div(problem.rows, 128) + 4) * (ceil_div(problem.n, 128) + 2);
}

// Why no kernel takes the problem, as the end of a sentence; empty if one does.
inline std::string why_no_kernel(Problem const& problem) {
  if (problem.dtype != DataType::kBFloat16 && problem.dtype != DataType::kFloat16) {
    return "its CUDA kernels take bfloat16 and float16 only";
  }
  auto const is = [](char const* name, int64_t value) { return std::string(name) + " = " + std::to_string(value); };
  if (problem.k % 8 != 0) return is("K", problem.k) + " is not a multiple of 8 (rows of 16 bytes)";
  if (problem.n % 8 != 0) return is("N", problem.n) + " is not a multiple of 8 (rows of 16 bytes)";
  constexpr int64_t kLimit = int64_t{1} << 30;  // of extents and of tiles: what kernels compute from them fits 32 bits
  if (std::max({problem.rows, problem.n, problem.k}) > kLimit || num_tiles_at_most(problem) > kLimit) {
    return "a chunk of " + std::to_string(problem.rows) + " x " + std::to_string(problem.n) + " x " +
           std::to_string(problem.k) + " has extents or tiles past 2^30";
  }
  FusedChoice choice;
  if (find_fused_choice(problem, &choice)) return why_not_fused_choice(problem, choice);
  FusedChoice const many = many_rows_choice(problem, /*sections=*/1);
  if (!problem.config.empty()) {
    return "there is no configuration '" + problem.config + "' (one is '" + many.name(problem.op) + "')";
  }
  FusedChoice const few{kNumFewRowsKernels - 1, {}, exchange_forms(problem.op).back()};
  std::string const why_not_few = why_not_few_rows(problem, few);
  return (why_not_few.empty() ? "" : why_not_few + ", and ") + why_not_fused_choice(problem, many);
}

struct Prediction {
  std::string choice;  // as a caller would ask for it
  double product_us;   // of the kernel, or of the product alone where it is a library GEMM; 0: it has no model
  int64_t sent_bytes;  // by a rank
};

inline Prediction predict(Problem const& problem) {
  // What a gather or a reduction moves: the shards, or the partials, of the other ranks.
  bool const ag = problem.op == Op::kAgGemm, ar = problem.op == Op::kGemmAr;
  int64_t const matrix = total_rows(problem) * (ag ? problem.k : problem.n) * element_size(problem.dtype);
  int64_t const to_others = matrix * (problem.world - 1) / problem.world;

  auto const sent = [&](ExchangeForm form) {  // one-shot: all partials to all ranks
    return form == ExchangeForm::kOneShot ? matrix * (problem.world - 1) : ar ? 2 * to_others : to_others;
  };

  BesideFused const beside = beside_fused(problem);
  Choice const strategy =
      choose_strategy("auto", "", why_no_kernel(problem), why_fused_does_not_pay(problem), beside.strategy);
  if (strategy.strategy != Strategy::kFused) {
    Problem whole = problem;
    whole.world = 1;
    whole.rows = total_rows(problem);
    double const us = estimated_us(whole, kKernels[choose_launch(whole).kernel]);
    if (strategy.strategy == Strategy::kSequential) return {"sequential", us, ar ? 2 * to_others : to_others};
    int64_t const bytes = ar ? sent(all_reduce_form(with_config(problem, beside.config))) : to_others;
    return {"decomposed:" + beside.config, us, bytes};
  }
  FusedChoice choice;
  find_fused_choice(problem, &choice);
  std::string const name = "fused:" + choice.name(problem.op);
  if (choice.is_few_rows()) return {name, 0.0, sent(choice.form)};
  LaunchChoice const& many = choice.many_rows;
  KernelRow const& kernel = kKernels[many.kernel];
  if (!ar) return {name, estimated_us(problem, kernel), to_others};
  return {name, estimated_us(chunks_problem(problem, many.sections), kernel), 2 * to_others};
}

}  // namespace flux
