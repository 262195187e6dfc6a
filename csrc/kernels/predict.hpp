#pragma once
// What the kernels make of a problem: which of them `auto` runs where nothing is tuned, for how long by their model,
// and how much a rank sends. Pure functions, so no GPU is needed.

#include <algorithm>
#include <string>

#include "kernels/ar_choose.hpp"

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
  if (problem.op == Op::kGemmAr) {
    ArChoice choice;
    if (find_ar_choice(problem, &choice)) return why_not_ar(problem, choice);
    if (!problem.config.empty()) return "there is no configuration '" + problem.config + "'";
    std::string const few = why_not_ar(problem, ArChoice{kNumArKernels - 1, {}, /*two_shot=*/false});
    std::string const many = why_not_ar(problem, many_rows_choice(problem, /*sections=*/1));
    return few.empty() ? many : few + ", and " + many;
  }
  LaunchChoice choice;
  if (!problem.config.empty() && !parse_choice(problem.config, &choice)) {
    return "there is no configuration '" + problem.config + "' (one is '" + choose_launch(problem).name() + "')";
  }
  return {};
}

// Why the plain sequence is faster than the kernel that would run, or empty.
inline std::string why_kernel_is_slower(Problem const& problem) {
  return problem.op == Op::kGemmAr ? why_ar_is_slower(problem) : why_fused_is_slower(problem);
}

struct Prediction {
  std::string choice;  // as a caller would ask for it
  double product_us;   // of the kernel, or of the product alone where the plain sequence runs; 0: it has no model
  int64_t sent_bytes;  // by a rank
};

inline Prediction predict(Problem const& problem) {
  // What a gather or a reduction moves: the shards, or the partials, of the other ranks.
  bool const ag = problem.op == Op::kAgGemm, ar = problem.op == Op::kGemmAr;
  int64_t const matrix = total_rows(problem) * (ag ? problem.k : problem.n) * element_size(problem.dtype);
  int64_t const to_others = matrix * (problem.world - 1) / problem.world;

  Choice const strategy = choose_strategy("auto", "", why_no_kernel(problem), why_kernel_is_slower(problem));
  if (strategy.strategy == Strategy::kSequential) {
    Problem whole = problem;
    whole.world = 1;
    whole.rows = total_rows(problem);
    return {"sequential", estimated_us(whole, kKernels[choose_launch(whole).kernel]), ar ? 2 * to_others : to_others};
  }
  if (!ar) {
    LaunchChoice const choice = choose_launch(problem);
    return {"fused:" + choice.name(), estimated_us(problem, kKernels[choice.kernel]), to_others};
  }
  ArChoice choice;
  find_ar_choice(problem, &choice);
  if (choice.is_few_rows()) {  // one-shot: all partials to all ranks
    return {"fused:" + choice.name(), 0.0, choice.two_shot ? 2 * to_others : matrix * (problem.world - 1)};
  }
  LaunchChoice const& many = choice.many_rows;
  Problem chunks = section_problem(problem, many.sections);
  chunks.world *= many.sections;  // one kernel computes those of all sections
  return {"fused:" + choice.name(), estimated_us(chunks, kKernels[many.kernel]), 2 * to_others};
}

}  // namespace flux
