#pragma once
// What the tests of the choice share, and those that choose_test.cpp takes from other files.

#include "kernels/predict.hpp"
#include "schedule_test.hpp"

namespace flux::test {

inline Problem problem_of(Op op, int world, int64_t rows, int64_t n, int64_t k) {
  return {op, 0, world, rows, n, k, DataType::kBFloat16, /*weight_transposed=*/false, /*config=*/{}};
}

// llama3.1-70b at TP = 2.
inline Problem down_projection(Op op, int64_t m) { return problem_of(op, 2, rows_of(op, 2, m), 8192, 14336); }

std::vector<Test> predict_tests();
std::vector<Test> beside_fused_tests();
std::vector<Test> few_rows_tests();
int print_why_not(char const* const* texts);

}  // namespace flux::test
