// What `auto` leaves to the plain sequence where nothing is tuned.

#include "choose_test.hpp"

namespace flux::test {
namespace {

void few_rows_are_left_to_the_sequence() {
  CHECK(!why_fused_is_slower(problem_of(Op::kAgGemm, 2, 128, 14336, 8192)).empty(), "128 rows a rank");
  CHECK(!why_fused_is_slower(problem_of(Op::kGemmRs, 2, 256, 4096, 7168)).empty(), "128 tiles");
  CHECK(why_fused_is_slower(problem_of(Op::kGemmRs, 2, 4096, 4096, 5504)).empty(), "llama-7b");
}

void half_empty_tiles_are_left_to_the_sequence() {
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (int64_t m : {2, 18, 66, 100, 128, 130, 192, 254, 256, 1024, 8192}) {
      CHECK(why_sequence_is_faster(down_projection(op, m)).empty(), "%s of %ld rows", op_name(op), long(m));
    }
    for (int64_t m : {258, 288, 400, 514, 1026}) {
      CHECK(!why_sequence_is_faster(down_projection(op, m)).empty(), "%s of %ld rows", op_name(op), long(m));
    }
    for (int64_t m : {320, 384, 448}) {  // of ag_gemm with so large a K the gathered rows have no room
      bool const fits = op != Op::kAgGemm;
      CHECK(why_sequence_is_faster(down_projection(op, m)).empty() == fits, "%s of %ld rows", op_name(op), long(m));
    }
  }
}

// As measured on H200s: what a product must be for the fused kernels to be faster, and half of its rows, which are too
// few.
void short_products_are_left_to_the_sequence() {
  struct {
    Op op;
    int world;
    int64_t least, n, k;
  } const kCases[] = {
      {Op::kAgGemm, 4, 8192, 768, 1024},    // 12.0 us with 4096 rows
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
      CHECK(why_sequence_is_faster(p).empty() == enough, "%s, TP = %d, M = %ld: '%s'", op_name(c.op), c.world, long(m),
            why_sequence_is_faster(p).c_str());
    }
  }
}

// NCCL gathers between two ranks what SMs push too slowly for a short product.
void short_products_of_two_ranks_gather_by_nccl() {
  auto const pays = [](Op op, int world, int64_t m, int64_t n, int64_t k) {
    return why_sequence_is_faster(problem_of(op, world, rows_of(op, world, m), n, k)).empty();
  };
  CHECK(!pays(Op::kAgGemm, 2, 256, 4096, 2048) && !pays(Op::kAgGemm, 2, 512, 4096, 2048), "short");
  CHECK(pays(Op::kAgGemm, 2, 128, 4096, 2048), "few rows");
  CHECK(pays(Op::kAgGemm, 2, 256, 7168, 5120) && pays(Op::kAgGemm, 2, 512, 4096, 3072), "longer");
  CHECK(pays(Op::kAgGemm, 4, 256, 4096, 2048) && pays(Op::kGemmRs, 2, 256, 4096, 2048), "four ranks, other ops");
}

}  // namespace

std::vector<Test> sequence_tests() {
  return {TEST(few_rows_are_left_to_the_sequence), TEST(half_empty_tiles_are_left_to_the_sequence),
          TEST(short_products_are_left_to_the_sequence), TEST(short_products_of_two_ranks_gather_by_nccl)};
}

}  // namespace flux::test
