// Which kernels for few rows `auto` takes where nothing is tuned, as measured on H200s.

#include <cstring>

#include "choose_test.hpp"

namespace flux::test {
namespace {

// The fastest as measured on H200s: small tiles while all of them run at once.
void narrow_weights_have_small_tiles() {
  struct {
    int64_t m, n;
    char const* name;
  } const kCases[] = {
      {64, 1024, "64x64_k2"},    {128, 1024, "64x64_k2"}, {128, 4096, "64x64"},    {128, 8192, "128x128_k2"},
      {192, 2560, "64x64"},      {192, 5120, "128x64"},   {256, 1024, "64x64_k2"}, {256, 2048, "64x64"},
      {256, 2560, "128x128_k2"}, {256, 8192, "128x128"},
  };
  for (auto const& c : kCases) {
    for (Op const op : {Op::kGemmRs, Op::kGemmAr}) {
      Problem const p = problem_of(op, 2, rows_of(op, 2, c.m), c.n, 4096);
      char const* const name = kFewRowsKernels[fused_candidates(p).front().few_rows].name;
      CHECK(std::strcmp(name, c.name) == 0, "%s of %ld rows, N %ld: %s", op_name(op), long(c.m), long(c.n), name);
    }
  }
}

// Up to 16 rows of a narrow weight: two CTAs share a tile, if K is long enough.
void very_few_rows_may_share_tiles() {
  auto const is_shared = [](Op op, int64_t m, int64_t n, int64_t k) {
    Problem const p = problem_of(op, 2, rows_of(op, 2, m), n, k);
    return std::strcmp(kFewRowsKernels[fused_candidates(p).front().few_rows].name, "64x32_k2") == 0;
  };
  for (Op const op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    CHECK(is_shared(op, 16, 2048, 2048) && is_shared(op, 2, 2560, 4864), "%s: narrow", op_name(op));
    CHECK(!is_shared(op, 16, 3072, 4096) && !is_shared(op, 16, 2048, 512), "%s: wide, or short", op_name(op));
    CHECK(is_shared(op, 16, 1024, 1024) == (op != Op::kAgGemm), "%s: K of 1024", op_name(op));
  }
}

// A gemm_rs sends tile by tile, too, where all tiles run at once or the others' are not full, up to 2048 rows.
void more_rows_of_gemm_rs_have_them_too() {
  struct {
    int64_t m, n, k;
    bool expected;
  } const kCases[] = {
      {1024, 2048, 4096, true},   {1024, 3072, 4096, true},  {2048, 1024, 2048, true},
      {768, 8192, 14336, true},   {768, 5120, 7168, true},   {1536, 4096, 7168, false},
      {1024, 8192, 14336, false}, {2048, 4096, 7168, false}, {4096, 1024, 2048, false},
  };
  for (auto const& c : kCases) {
    Problem const p = problem_of(Op::kGemmRs, 2, c.m / 2, c.n, c.k);
    bool const is_few = fused_candidates(p).front().is_few_rows();
    CHECK(is_few == c.expected && why_fused_does_not_pay(p).empty(), "M %ld, N %ld", long(c.m), long(c.n));
  }
}

}  // namespace

std::vector<Test> few_rows_tests() {
  return {TEST(narrow_weights_have_small_tiles), TEST(very_few_rows_may_share_tiles),
          TEST(more_rows_of_gemm_rs_have_them_too)};
}

}  // namespace flux::test
