// What `auto` leaves to library GEMMs, and to the exchange beside them, where nothing is tuned.

#include "choose_test.hpp"

namespace flux::test {
namespace {

void few_rows_are_not_fused() {
  CHECK(!why_too_few_tiles(problem_of(Op::kAgGemm, 2, 128, 14336, 8192)).empty(), "128 rows a rank");
  CHECK(!why_too_few_tiles(problem_of(Op::kGemmRs, 2, 256, 4096, 7168)).empty(), "128 tiles");
  CHECK(why_too_few_tiles(problem_of(Op::kGemmRs, 2, 4096, 4096, 5504)).empty(), "llama-7b");
}

void half_empty_tiles_are_not_fused() {
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (int64_t m : {2, 18, 64, 1024, 8192}) {
      CHECK(why_fused_does_not_pay(down_projection(op, m)).empty(), "%s of %ld rows", op_name(op), long(m));
    }
    for (int64_t m : {258, 288, 400, 514, 1026}) {
      CHECK(!why_fused_does_not_pay(down_projection(op, m)).empty(), "%s of %ld rows", op_name(op), long(m));
    }
    for (int64_t m : {66, 100, 128, 130, 192, 254, 256, 320, 384, 448}) {
      bool const fits = op != Op::kAgGemm;  // which is gathered first or, with so large a K, has no room for that
      CHECK(why_fused_does_not_pay(down_projection(op, m)).empty() == fits, "%s of %ld rows", op_name(op), long(m));
    }
  }
}

// As measured on H200s: what a product must be for the fused kernels to be faster, and half of its rows, which are too
// few.
void short_products_are_not_fused() {
  struct {
    Op op;
    int world;
    int64_t least, n, k;
  } const kCases[] = {
      {Op::kAgGemm, 4, 8192, 1024, 1024},   // gathered by a kernel with 4096 rows, if in less than 27 us
      {Op::kGemmRs, 4, 8192, 1024, 1024},   // 14.9 us with 4096
      {Op::kGemmAr, 2, 8192, 1024, 2048},   // not two turns of the SMs with 4096
      {Op::kGemmAr, 2, 2048, 5120, 13824},  // the same with 1024
      {Op::kGemmAr, 4, 8192, 2048, 2048},   // 48.0 us with 4096
      {Op::kGemmAr, 4, 2048, 5120, 6912},   // not two turns with 1024
  };
  for (auto const& c : kCases) {
    for (bool const enough : {true, false}) {
      int64_t const m = enough ? c.least : c.least / 2;
      Problem const p = problem_of(c.op, c.world, rows_of(c.op, c.world, m), c.n, c.k);
      CHECK(why_fused_does_not_pay(p).empty() == enough, "%s, TP = %d, M = %ld: '%s'", op_name(c.op), c.world, long(m),
            why_fused_does_not_pay(p).c_str());
    }
  }
}

void some_rows_are_gathered_first() {
  auto const pays = [](int world, int64_t m, int64_t n, int64_t k) {
    return why_fused_does_not_pay(problem_of(Op::kAgGemm, world, m / world, n, k)).empty();
  };
  CHECK(pays(2, 64, 4096, 4096) && pays(2, 1024, 8192, 8192), "few and many");
  CHECK(!pays(2, 66, 4096, 4096) && !pays(2, 512, 14336, 8192), "between");
  CHECK(pays(4, 128, 1024, 4096) && !pays(4, 256, 1024, 4096) && pays(4, 256, 7168, 8192), "four ranks, few rows");
  CHECK(pays(4, 512, 1024, 1024) && !pays(4, 512, 1024, 4096), "a short gather, and a longer one");
  CHECK(!pays(4, 2048, 2048, 2048) && pays(4, 2048, 2560, 2048), "many rows: 26 and 32 us by the model");
}

void most_is_decomposed_beside_fused() {
  auto const beside = [](Op op, int world, int64_t m, int64_t n, int64_t k) {
    return beside_fused(problem_of(op, world, rows_of(op, world, m), n, k)).config;
  };
  CHECK(beside(Op::kAgGemm, 2, 512, 14336, 8192) == "gather" && beside(Op::kAgGemm, 4, 512, 7168, 8192) == "gather",
        "ag_gemm");
  CHECK(beside(Op::kAgGemm, 2, 514, 14336, 8192).empty() && beside(Op::kAgGemm, 2, 16, 64, 12).empty(), "ag_gemm");
  CHECK(beside(Op::kGemmRs, 2, 512, 8192, 8192).empty(), "gemm_rs");
  CHECK(beside(Op::kGemmAr, 2, 2048, 8192, 8192) == "one-shot" && beside(Op::kGemmAr, 4, 640, 8192, 8192) == "two-shot",
        "gemm_ar");
  CHECK(beside(Op::kGemmAr, 4, 1024, 8192, 8192).empty() && beside(Op::kGemmAr, 2, 2048, 8196, 8192).empty(),
        "gemm_ar");
}

// With more than two ranks every product whose tiles run at once is fused, however empty they are.
void tiles_at_once_are_fused() {
  auto const pays = [](Op op, int64_t m, int64_t n, int64_t k) {
    return why_fused_does_not_pay(problem_of(op, 4, rows_of(op, 4, m), n, k)).empty();
  };
  for (Op op : {Op::kGemmRs, Op::kGemmAr}) {
    CHECK(pays(op, 768, 1024, 768) && pays(op, 1024, 2560, 2432) && pays(op, 512, 3072, 2048), "%s", op_name(op));
  }
  CHECK(!pays(Op::kGemmAr, 1024, 5120, 3584), "160 tiles");
}

// Between two ranks, as the exchange takes as long behind a library GEMM.
void tiles_of_gemm_ar_keep_most_sms_busy() {
  auto const pays = [](int64_t m, int64_t n, int64_t k) {
    return why_fused_does_not_pay(problem_of(Op::kGemmAr, 2, m, n, k)).empty();
  };
  CHECK(pays(128, 5120, 13824) && !pays(256, 5120, 13824) && pays(256, 8192, 14336) && pays(256, 3072, 4096), "tiles");
}

}  // namespace

std::vector<Test> beside_fused_tests() {
  return {TEST(few_rows_are_not_fused),
          TEST(half_empty_tiles_are_not_fused),
          TEST(short_products_are_not_fused),
          TEST(some_rows_are_gathered_first),
          TEST(most_is_decomposed_beside_fused),
          TEST(tiles_at_once_are_fused),
          TEST(tiles_of_gemm_ar_keep_most_sms_busy)};
}

}  // namespace flux::test
