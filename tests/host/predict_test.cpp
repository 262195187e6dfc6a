// What a call is expected to run, to take and to send (csrc/kernels/predict.hpp).

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "choose_test.hpp"

namespace flux::test {
namespace {

// llama3.1-70b at TP = 8: M = 8192, H = 8192, I = 28672.
void predictions_are_those_of_the_model() {
  double const tile = 128 * 256 * 8192 / 1e6 * 0.385 + 3.0;
  Prediction const ag = predict(problem_of(Op::kAgGemm, 8, 1024, 3584, 8192));
  CHECK(ag.choice == "fused:c128x256_2x1/m4/p1", "%s", ag.choice.c_str());
  CHECK(std::abs(ag.product_us - 7 * tile) < 1e-6, "%f us", ag.product_us);  // 64 x 14 tiles on 132 SMs: 7 waves
  CHECK(ag.sent_bytes == int64_t{7} * 1024 * 8192 * 2, "%ld bytes", long(ag.sent_bytes));

  Prediction const rs = predict(problem_of(Op::kGemmRs, 8, 1024, 8192, 3584));
  CHECK(rs.choice == "fused:" + choose_launch(problem_of(Op::kGemmRs, 8, 1024, 8192, 3584)).name(), "%s",
        rs.choice.c_str());
  CHECK(rs.sent_bytes == int64_t{7} * 1024 * 8192 * 2, "%ld bytes", long(rs.sent_bytes));

  Prediction const ar = predict(problem_of(Op::kGemmAr, 8, 8192, 8192, 3584));
  Problem const chunks = problem_of(Op::kGemmRs, 8 * 2, 512, 8192, 3584);  // 2 sections of 8 chunks of 8 MiB
  LaunchChoice launch = choose_launch(chunks);
  launch.pieces = 1;
  KernelRow const& kernel = kKernels[launch.kernel];
  CHECK(ar.choice == "fused:" + launch.name() + "/s2", "%s", ar.choice.c_str());
  CHECK(ar.product_us == estimated_us(chunks, kernel), "%f us", ar.product_us);
  CHECK(ar.sent_bytes == 2 * rs.sent_bytes, "%ld bytes", long(ar.sent_bytes));
}

void predictions_of_what_is_not_fused() {
  Prediction const few = predict(problem_of(Op::kGemmRs, 8, 128, 8192, 3584));
  CHECK(few.choice == "sequential" && few.product_us > 0, "%s", few.choice.c_str());
  CHECK(few.product_us < predict(problem_of(Op::kGemmRs, 8, 1024, 8192, 3584)).product_us, "%f us", few.product_us);
  CHECK(few.sent_bytes == 7 * 128 * 8192 * 2, "%ld bytes", long(few.sent_bytes));
  Prediction const odd = predict(problem_of(Op::kAgGemm, 8, 1024, 3584, 8191));
  CHECK(odd.choice == "sequential", "K = 8191: %s", odd.choice.c_str());
}

void predictions_of_few_rows_tell_the_forms_apart() {
  Prediction const one = predict(problem_of(Op::kGemmAr, 8, 16, 8192, 3584));
  CHECK(one.choice == "fused:64x16/one-shot" && one.product_us == 0, "%s", one.choice.c_str());
  CHECK(one.sent_bytes == 7 * 16 * 8192 * 2, "%ld bytes", long(one.sent_bytes));
  Prediction const two = predict(problem_of(Op::kGemmAr, 8, 64, 8192, 3584));
  CHECK(two.choice == "fused:128x64_k2/two-shot", "%s", two.choice.c_str());
  CHECK(two.sent_bytes == 2 * 7 * 8 * 8192 * 2, "%ld bytes", long(two.sent_bytes));
  Prediction const scattered = predict(problem_of(Op::kGemmRs, 8, 8, 8192, 3584));
  CHECK(scattered.choice == "fused:128x64_k2", "%s", scattered.choice.c_str());
  CHECK(scattered.sent_bytes == 7 * 8 * 8192 * 2, "%ld bytes", long(scattered.sent_bytes));
}

void a_gemm_ar_that_is_not_fused_is_decomposed() {
  Prediction const two = predict(problem_of(Op::kGemmAr, 2, 640, 8192, 14336));
  CHECK(two.choice == "decomposed:one-shot" && two.product_us > 0, "%s", two.choice.c_str());
  CHECK(two.sent_bytes == 640 * 8192 * 2, "%ld bytes", long(two.sent_bytes));
  Prediction const four = predict(problem_of(Op::kGemmAr, 4, 640, 8192, 7168));
  CHECK(four.choice == "decomposed:two-shot", "%s", four.choice.c_str());
  CHECK(four.sent_bytes == 2 * 3 * 160 * 8192 * 2, "%ld bytes", long(four.sent_bytes));
  for (int64_t n : {8191, 8196}) {
    std::string const odd = predict(problem_of(Op::kGemmAr, 2, 640, n, 14336)).choice;
    CHECK(odd == "sequential", "N = %ld: %s", long(n), odd.c_str());
  }
}

// What is allocated for a product is enough for every smaller one that the all-reduce takes; and so many it does take.
void slots_hold_what_is_reduced() {
  for (int world : {2, 3, 4, 8, 16}) {
    for (int64_t n : {8, 264, 4096, 14784}) {
      std::vector<int64_t> taken;  // bytes, of each form
      for (int64_t m = 1; m < 5000; m += 1 + m / 20) {
        Problem p = problem_of(Op::kGemmAr, world, m, n, 4096);
        CHECK(m > 2048 || why_no_all_reduce(p).empty(), "M %ld, N %ld, %d ranks", long(m), long(n), world);
        for (char const* form : {"one-shot", "two-shot"}) {
          p.config = form;
          if (!why_no_all_reduce(p).empty()) continue;
          taken.push_back(all_reduce_slot_bytes(all_reduce_form(p), 2 * m * n, world));
        }
        WorkspaceLayout const layout = make_workspace_layout({0, exchange_bytes_at_most(p)});
        CHECK(*std::max_element(taken.begin(), taken.end()) <= layout.exchange_bytes, "M %ld, N %ld, %d ranks", long(m),
              long(n), world);
      }
    }
  }
  Problem wide = problem_of(Op::kGemmAr, 4, 4096, 8192, 4096);
  CHECK(why_no_all_reduce(wide).find("exchange area") != std::string::npos, "%s", why_no_all_reduce(wide).c_str());
  wide.rows = wide.n = int64_t{1} << 30;
  CHECK(why_no_all_reduce(wide).find("exchange area") != std::string::npos, "%s", why_no_all_reduce(wide).c_str());
  wide.rows = wide.n = 512;
  wide.dtype = DataType::kFloat32;
  CHECK(why_no_all_reduce(wide).find("fp16") != std::string::npos, "%s", why_no_all_reduce(wide).c_str());
}

}  // namespace

// --why-not OP WORLD M N K DTYPE LAYOUT CONFIG: prints why "fused:CONFIG" can't run the product; nothing if it can.
int print_why_not(char const* const* texts) {
  constexpr char const* kDataTypeNames[] = {"float32", "float64", "bfloat16", "float16"};
  Problem p = problem_of(Op::kAgGemm, parse_count(texts[1]), 0, std::atol(texts[3]), std::atol(texts[4]));
  int found = 0;
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    if (std::strcmp(texts[0], op_name(op)) == 0) p.op = op, ++found;
  }
  for (DataType type : {DataType::kFloat32, DataType::kFloat64, DataType::kBFloat16, DataType::kFloat16}) {
    if (std::strcmp(texts[5], kDataTypeNames[static_cast<int>(type)]) == 0) p.dtype = type, ++found;
  }
  if (found != 2 || p.world < 1) return 2;
  p.rows = rows_of(p.op, p.world, std::atol(texts[2]));
  p.weight_transposed = std::strcmp(texts[6], "kn") == 0;
  p.config = texts[7];
  std::printf("%s\n", why_no_kernel(p).c_str());
  return 0;
}

std::vector<Test> predict_tests() {
  return {
      TEST(predictions_are_those_of_the_model),
      TEST(predictions_of_what_is_not_fused),
      TEST(predictions_of_few_rows_tell_the_forms_apart),
      TEST(a_gemm_ar_that_is_not_fused_is_decomposed),
      TEST(slots_hold_what_is_reduced),
  };
}

}  // namespace flux::test
