// The choice of a kernel and its knobs (csrc/kernels/choose.hpp, fused_choose.hpp) and what is measured for it
// (candidates.hpp): no kernel is needed.

#include "choose_test.hpp"

#include <cstring>
#include <set>

namespace flux::test {
namespace {

template <class Visit>
void for_many_problems(Visit visit) {
  for (Op op : {Op::kAgGemm, Op::kGemmRs}) {
    for (int world : {2, 3, 4, 8, 16}) {
      for (int64_t rows : {1, 8, 127, 128, 129, 256, 300, 512, 1000, 4096, 65536}) {
        for (int64_t n : {8, 64, 256, 264, 4096, 5504, 14784, 49152}) {
          for (int64_t k : {8, 64, 4096, 12288}) visit(problem_of(op, world, rows, n, k));
        }
      }
    }
  }
}

void names_are_read_back() {
  for_many_problems([](Problem const& p) {
    LaunchChoice choice = choose_launch(p);
    for (bool const same_order : {false, true}) {
      choice.same_order = same_order;
      LaunchChoice read{};
      CHECK(parse_choice(choice.name(), &read), "%s", choice.name().c_str());
      CHECK(read.kernel == choice.kernel && read.swizzle == choice.swizzle && read.along_n == choice.along_n &&
                read.pieces == choice.pieces && read.same_order == same_order,
            "%s became %s", choice.name().c_str(), read.name().c_str());
    }
  });
}

void other_names_are_refused() {
  LaunchChoice choice;
  for (char const* text :
       {"", "c128x256_2x1", "c128x256_2x1/n2", "c128x256_2x1/n2/", "c128x256_2x1/x2/p1", "none/n1/p1",
        "c128x256_2x1/n0/p1", "c128x256_2x1/n1/p0", "c128x256_2x1/n1/p17", "/n1/p1", "//p1", "c128x256_2x1/n2x/p1",
        "c128x256_2x1/n1/p1y", "c128x256_2x1/n99999/p1", "/same-order", "c128x256_2x1/n1/p1/other-order",
        "c128x256_2x1/n1/p1/same-order/same-order"}) {
    CHECK(!parse_choice(text, &choice), "'%s' was taken", text);
  }
}

void ranks_choose_alike() {
  for_many_problems([](Problem p) {
    std::string const first = choose_launch(p).name();
    p.rank = p.world - 1;
    CHECK(choose_launch(p).name() == first, "rank 0 takes %s, another %s", first.c_str(),
          choose_launch(p).name().c_str());
  });
}

void pieces_have_signals() {
  for_many_problems([](Problem const& p) {
    LaunchChoice const choice = choose_launch(p);
    CHECK(choice.pieces >= 1 && choice.pieces <= kMaxPieces, "%d pieces", choice.pieces);
    Pieces const pieces = cut_chunk(p, choice).pieces;
    CHECK(pieces.count() >= 1 && pieces.count() <= choice.pieces, "%d pieces of %d", pieces.count(), choice.pieces);
  });
}

// csrc/cuda/backend.cpp allocates the bound: for fewer rows, and for whatever configuration is tuned for them.
void no_candidate_pads_more_than_the_bound() {
  for_many_problems([](Problem const& largest) {
    int64_t const bound = largest_rs_slot_bytes(largest);
    for (Problem p = largest; p.rows > 0; p.rows = p.rows * 7 / 8) {
      for (LaunchChoice const& choice : launch_candidates(p, p.world > 2)) {
        TileShape const shape = kKernels[choice.kernel].config.shape;
        CHECK(rs_slot_bytes_of(p, shape) <= bound, "%s pads more", choice.name().c_str());
      }
    }
  });
}

void the_bound_costs_a_column_of_tiles_at_most() {
  for (int world : {2, 8}) {
    for (int64_t rows : {512, 1024, 4096, 16384}) {
      for (int64_t n : {256, 4096, 11008, 28672}) {
        int64_t const bytes = largest_rs_slot_bytes(problem_of(Op::kGemmRs, world, rows, n, 4096));
        CHECK(bytes <= 2 * rows * (n + 192), "%ld x %ld, %d ranks", long(rows), long(n), world);
      }
    }
  }
}

void interleaved_chunks_of_one_stripe_have_pieces_along_n() {
  for (int world : {2, 4, 8}) {
    for (int64_t rows : {512, 2048}) {
      std::vector<FusedChoice> const candidates = fused_candidates(problem_of(Op::kGemmRs, world, rows, 8192, 7168));
      auto const there = [&](char const* name) {
        auto const is = [&](FusedChoice const& choice) { return choice.name(Op::kGemmRs) == name; };
        return std::any_of(candidates.begin(), candidates.end(), is);
      };
      bool const along_n = world > 2 && rows == 512;
      CHECK(there("p128x128_2x1/n4/p4") == along_n, "%d ranks, %ld rows", world, long(rows));
      CHECK(there("p128x128_2x1/m1/p4") != along_n, "%d ranks, %ld rows", world, long(rows));
    }
  }
}

void candidates_are_few_and_begin_with_the_model() {
  for_many_problems([](Problem const& p) {
    std::vector<LaunchChoice> const candidates = launch_candidates(p, p.world > 2);
    CHECK(candidates.size() >= 4 && candidates.size() <= 25, "%zu candidates", candidates.size());
    CHECK(candidates.front().name() == choose_launch(p).name(), "the first is %s", candidates.front().name().c_str());
    std::set<std::string> names;
    for (LaunchChoice const& choice : candidates) {
      LaunchChoice read{};
      CHECK(parse_choice(choice.name(), &read), "%s", choice.name().c_str());
      CHECK(names.insert(choice.name()).second, "%s comes twice", choice.name().c_str());
    }
  });
}

void tall_tiles_are_not_half_empty() {
  char const* const name = kKernels[choose_launch(problem_of(Op::kAgGemm, 4, 256, 12288, 12288)).kernel].config.name;
  CHECK(std::strcmp(name, "c256x128_2x1") != 0, "256 rows fill half of a cluster that is 512 rows tall");
}

// Every kernel with every number of sections that takes the rows stays within the bound; more rows never have less.
void sections_stay_within_the_bound() {
  for (int world : {2, 3, 4, 8, 16}) {
    for (int64_t n : {8, 264, 4096, 14784}) {
      int64_t before = 0;
      for (int64_t rows = 1; rows < 40000; rows += 1 + rows / 30) {
        for (int64_t const m : {rows, rows * world, rows * world * 4}) {
          Problem const p = problem_of(Op::kGemmAr, world, m, n, 4096);
          for (int kernel = 0; kernel < kNumKernels; ++kernel) {
            for (int sections = 1; sections <= kMostArSections; ++sections) {
              FusedChoice choice;
              choice.many_rows = {kernel, 1, false, 1};
              choice.many_rows.sections = sections;
              if (!why_not_fused_choice(p, choice).empty()) continue;
              TileShape const shape = kKernels[kernel].config.shape;
              Problem const chunk = section_problem(p, sections);
              int64_t const tiles = int64_t{sections} * make_tile_order(chunk.rows, n, shape, 1, false).num_tiles();
              int64_t const bytes = rs_tile_bytes(shape.tile_m, shape.tile_n, 2);
              CHECK(ar_slot_results_offset(tiles, bytes) + sections * chunk.rows * n * 2 <= ar_slot_bytes_at_most(p),
                    "M %ld, N %ld, %d ranks: %s", long(m), long(n), world, choice.name(p.op).c_str());
            }
          }
        }
        int64_t const most = ar_slot_bytes_at_most(problem_of(Op::kGemmAr, world, rows, n, 4096));
        CHECK(most >= before, "M %ld, N %ld, %d ranks: less than with fewer rows", long(rows), long(n), world);
        before = most;
      }
    }
  }
}

void sections_leave_full_tiles_and_pieces() {
  struct Row {
    int world;
    int64_t m, n;
    int sections;
  };
  for (Row const row : {Row{2, 16384, 8192, 2}, Row{2, 4096, 8192, 2}, Row{2, 4090, 8192, 1}, Row{2, 1024, 4096, 1},
                        Row{4, 8192, 8192, 4}, Row{4, 8192, 4096, 2}, Row{4, 4096, 8192, 2}, Row{4, 2048, 8192, 1},
                        Row{4, 10240, 8192, 2}, Row{4, 9216, 8192, 3}, Row{8, 4096, 8192, 1}}) {
    Problem const p = problem_of(Op::kGemmAr, row.world, row.m, row.n, 4096);
    CHECK(why_fused_does_not_pay(p).empty(), "M %ld: %s", long(row.m), why_fused_does_not_pay(p).c_str());
    CHECK(choose_sections(p) == row.sections, "M %ld, N %ld, %d ranks: %d", long(row.m), long(row.n), row.world,
          choose_sections(p));
  }
  Problem const p = problem_of(Op::kGemmAr, 2, 16384, 8192, 4096);
  std::vector<FusedChoice> const candidates = fused_candidates(p);
  LaunchChoice const& first = candidates.front().many_rows;
  CHECK(first.sections == 2 && first.pieces == 4, "%s", candidates.front().name(p.op).c_str());
  CHECK(candidates.size() <= 60, "%zu candidates", candidates.size());
}

void what_gemm_ar_can_not_cut_is_refused() {
  struct Row {
    char const* cut;
    bool runs;
  };
  for (Row const& row : {Row{"p8/s1", true}, Row{"p4/s2", true}, Row{"p2/s3", true}, Row{"p2/s4", true},
                         Row{"p9/s1", false}, Row{"p5/s2", false}, Row{"p3/s4", false}, Row{"p1/s5", false},
                         Row{"p1/s8", false}, Row{"p1/same-order/s2", false}}) {
    FusedChoice choice;
    std::string const name = std::string("p128x192_2x1/m1/") + row.cut;
    CHECK(parse_fused_choice(Op::kGemmAr, name, &choice), "%s is not read", name.c_str());
    std::string const why_not = why_not_fused_choice(problem_of(Op::kGemmAr, 2, 3 * 8 * 1024, 4096, 4096), choice);
    CHECK(why_not.empty() == row.runs, "%s: '%s'", name.c_str(), why_not.c_str());
  }
  for (int sections = 1; sections <= kMostArSections; ++sections) {  // 256 rows of each chunk are computed
    FusedChoice choice;
    parse_fused_choice(Op::kGemmAr, "p128x192_2x1/m1/p1/s" + std::to_string(sections), &choice);
    int64_t const rows = int64_t{sections == 1 ? 128 : 192} * 4 * sections, fewer = rows - int64_t{4} * sections;
    CHECK(why_not_fused_choice(problem_of(Op::kGemmAr, 4, rows, 4096, 4096), choice).empty(), "%d", sections);
    CHECK(!why_not_fused_choice(problem_of(Op::kGemmAr, 4, fewer, 4096, 4096), choice).empty(), "%d", sections);
  }
}

void pieces_of_gemm_ar_are_varied_for_every_kernel() {
  for (int world : {2, 4}) {
    Problem const p = problem_of(Op::kGemmAr, world, 8192, 8192, 7168);
    std::set<std::string> kernels, in_pieces;
    for (FusedChoice const& choice : fused_candidates(p)) {
      if (choice.is_few_rows()) continue;
      CHECK(cut_chunk(p, choice.many_rows).pieces.count() == choice.many_rows.pieces, "%s", choice.name(p.op).c_str());
      std::string const name = kKernels[choice.many_rows.kernel].config.name;
      kernels.insert(name);
      if (choice.many_rows.pieces == 4) in_pieces.insert(name);
    }
    CHECK(kernels == in_pieces, "%d ranks: %zu of %zu kernels", world, in_pieces.size(), kernels.size());
  }
}

void fused_candidates_run_and_are_read_back() {
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (int world : {2, 3, 4, 8}) {
      for (int64_t m : {0, 1, 16, 17, 64, 100, 128, 200, 512, 1000, 1024, 8192}) {
        for (int64_t n : {0, 8, 4096, 8192}) {
          Problem const p = problem_of(op, world, rows_of(op, world, m), n, 4096);
          for (FusedChoice const& choice : fused_candidates(p)) {
            std::string const name = choice.name(op);
            FusedChoice read;
            CHECK(parse_fused_choice(op, name, &read) && read.name(op) == name, "%s", name.c_str());
            CHECK(why_not_fused_choice(p, choice).empty(), "%s", name.c_str());
          }
        }
      }
    }
  }
}

void few_rows_have_kernels_of_their_own() {
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (int world : {2, 4, 8}) {
      for (int64_t m : {1, 8, 16, 64, 128, 256}) {
        Problem p = problem_of(op, world, rows_of(op, world, m), 4096, 8192);
        CHECK(fused_candidates(p).front().is_few_rows(), "%s of %ld rows", op_name(op), long(m));
        bool const gathers = op == Op::kAgGemm && world == 2 && m > 64;
        CHECK(why_fused_does_not_pay(p).empty() != gathers, "%s of %ld rows", op_name(op), long(m));
        p.weight_transposed = true;
        for (FusedChoice const& choice : fused_candidates(p)) CHECK(!choice.is_few_rows(), "[K, N] is not for them");
      }
    }
  }
}

// A gemm_ar sends tile by tile up to 2048 rows, where its tiles are full.
void more_rows_of_gemm_ar_have_them_too() {
  for (int world : {2, 3, 4, 8}) {
    for (int64_t m : {513, 768, 1000, 1024, 2048, 2049}) {
      Problem const p = problem_of(Op::kGemmAr, world, m, 8192, 7168);
      std::vector<FusedChoice> const candidates = fused_candidates(p);
      bool const any = std::any_of(candidates.begin(), candidates.end(), [](auto const& c) { return c.is_few_rows(); });
      CHECK(any == (m <= 2048), "%ld rows of %d ranks", long(m), world);
    }
  }
  for (int64_t m : {768, 1000, 1024, 1152, 1536, 1792, 2048}) {
    Problem const p = problem_of(Op::kGemmAr, 2, m, 8192, 14336);
    CHECK(fused_candidates(p).front().is_few_rows() && why_fused_does_not_pay(p).empty(), "%ld rows", long(m));
  }
  for (int64_t m : {640, 1280}) {
    CHECK(!why_fused_does_not_pay(problem_of(Op::kGemmAr, 2, m, 8192, 14336)).empty(), "%ld rows", long(m));
  }
  // With four ranks only where each thread block has one tile.
  CHECK(fused_candidates(problem_of(Op::kGemmAr, 4, 1024, 4096, 3584)).front().is_few_rows(), "8b");
  for (int64_t m : {640, 768, 1280, 1536, 1792, 2047}) {
    CHECK(!why_fused_does_not_pay(problem_of(Op::kGemmAr, 4, m, 8192, 7168)).empty(), "%ld rows", long(m));
  }
}

// What is allocated for a product is enough for every smaller one, whatever kernel runs it.
void slots_stay_within_the_bound() {
  for (int world : {2, 3, 4, 8, 16}) {
    for (int64_t n : {8, 264, 4096, 14784}) {
      int64_t most = 0;
      for (int64_t m = 1; m < 4000; m += 1 + m / 20) {
        Problem const p = problem_of(Op::kGemmAr, world, m, n, 4096);
        CHECK(exchange_bytes_at_most(p) >= most, "M %ld, N %ld, %d ranks: less than with fewer rows", long(m), long(n),
              world);
        most = exchange_bytes_at_most(p);
        for (int kernel = 0; kernel < kNumFewRowsKernels; ++kernel) {
          for (ExchangeForm const form : exchange_forms(Op::kGemmAr)) {
            if (!why_not_fused_choice(p, {kernel, {}, form}).empty()) continue;
            CHECK(kFewRowsKernels[kernel].slot_bytes(form, m, n, world) <= std::max(most, kExchangeBytes),
                  "%s of M %ld, N %ld, %d ranks", kFewRowsKernels[kernel].name, long(m), long(n), world);
          }
        }
      }
    }
  }
}

// 512 rows are 128 for each of four ranks, 64 of eight: less than a tile of the kernels for many rows.
void few_rows_of_a_rank_have_them_too() {
  for (Op op : {Op::kAgGemm, Op::kGemmRs}) {
    for (int world : {4, 8}) {
      Problem const p = problem_of(op, world, 512 / world, 8192, 7168);
      CHECK(fused_candidates(p).front().is_few_rows(), "%s", op_name(op));
      CHECK(why_fused_does_not_pay(p).empty(), "%s", op_name(op));
    }
    CHECK(!fused_candidates(problem_of(op, 2, 256, 8192, 14336)).front().is_few_rows(), "%s", op_name(op));
  }
}

void a_choice_suits_rows_that_fill_its_tiles() {
  struct {
    Op op;
    char const* choice;
    int64_t measured, m;
    bool expected;
  } const kCases[] = {
      {Op::kGemmAr, "fused:64x16/one-shot", 16, 16, true},
      {Op::kGemmAr, "fused:64x16/one-shot", 16, 15, true},
      {Op::kGemmAr, "fused:64x16/one-shot", 16, 17, false},  // its tiles read the weight twice
      {Op::kGemmRs, "fused:128x64_k2", 64, 62, true},
      {Op::kGemmRs, "fused:128x64_k2", 64, 48, false},
      {Op::kGemmRs, "fused:128x64_k2", 64, 66, false},
      {Op::kGemmRs, "fused:128x128_k2", 128, 126, true},
      {Op::kAgGemm, "fused:128x256", 256, 254, true},
      {Op::kAgGemm, "fused:128x256", 256, 192, false},
      {Op::kAgGemm, "fused:128x256", 256, 258, false},
      {Op::kGemmRs, "fused:p128x128_2x1/n2/p2", 1024, 2048, true},
      {Op::kGemmRs, "fused:p128x128_2x1/n2/p2", 1024, 1000, true},
      {Op::kGemmRs, "fused:p128x128_2x1/n2/p2", 1024, 1026, false},
      {Op::kGemmRs, "fused:p128x128_2x1/n2/p2", 1024, 514, false},
      {Op::kGemmAr, "fused:c128x256_2x1/m1/p1/s2", 1024, 1020, true},
      {Op::kGemmAr, "fused:c128x256_2x1/m1/p1/s2", 1024, 516, false},
      {Op::kGemmAr, "fused:p128x192_2x1/m1/p2/s4", 16384, 8192, true},
      {Op::kGemmAr, "fused:p128x192_2x1/m1/p2/s4", 8192, 8188, false},  // no multiple of 2 x 4
      {Op::kGemmRs, "fused:p128x128_2x1/n2/p2", 1024, 512, false},      // where there are kernels for few rows
      {Op::kGemmRs, "fused:128x128", 512, 514, false},
      {Op::kGemmRs, "sequential", 1024, 514, true},
      {Op::kGemmRs, "sequential", 1024, 512, false},
      {Op::kGemmAr, "sequential", 1024, 512, false},
      {Op::kGemmAr, "sequential", 1024, 600, true},
      {Op::kGemmAr, "sequential", 4096, 2048, false},
      {Op::kGemmAr, "fused:128x256/two-shot", 1024, 1000, true},
      {Op::kGemmAr, "fused:128x256/two-shot", 1024, 1026, false},
      {Op::kGemmAr, "decomposed:two-shot", 1024, 1026, true},
      {Op::kAgGemm, "decomposed:gather", 256, 290, true},
      {Op::kAgGemm, "decomposed:gather", 256, 300, false},  // of so large a K more than 8 MiB
      {Op::kAgGemm, "decomposed:hetero-fused-1d/c1", 288, 256, false},
      {Op::kAgGemm, "decomposed:hetero-fused-1d/c1", 288, 300, true},  // which can't be gathered
      {Op::kAgGemm, "decomposed:hetero-fused-1d/c1", 1024, 900, true},
      {Op::kGemmRs, "decomposed:chunks/c1", 512, 300, true},
  };
  for (auto const& c : kCases) {
    std::string const config(asked_config(c.choice));
    CHECK(suits(down_projection(c.op, c.m), asked_strategy(c.choice), config, c.measured) == c.expected,
          "%s of %ld for %ld", c.choice, long(c.measured), long(c.m));
  }
}

}  // namespace
}  // namespace flux::test

int main(int argc, char** argv) {
  using namespace flux::test;
  if (argc == 10 && std::strcmp(argv[1], "--why-not") == 0) return print_why_not(argv + 2);
  std::vector<Test> tests = {
      TEST(names_are_read_back),
      TEST(other_names_are_refused),
      TEST(ranks_choose_alike),
      TEST(pieces_have_signals),
      TEST(no_candidate_pads_more_than_the_bound),
      TEST(the_bound_costs_a_column_of_tiles_at_most),
      TEST(interleaved_chunks_of_one_stripe_have_pieces_along_n),
      TEST(candidates_are_few_and_begin_with_the_model),
      TEST(tall_tiles_are_not_half_empty),
      TEST(sections_stay_within_the_bound),
      TEST(sections_leave_full_tiles_and_pieces),
      TEST(what_gemm_ar_can_not_cut_is_refused),
      TEST(pieces_of_gemm_ar_are_varied_for_every_kernel),
      TEST(fused_candidates_run_and_are_read_back),
      TEST(few_rows_have_kernels_of_their_own),
      TEST(few_rows_of_a_rank_have_them_too),
      TEST(more_rows_of_gemm_ar_have_them_too),
      TEST(slots_stay_within_the_bound),
      TEST(a_choice_suits_rows_that_fill_its_tiles),
  };
  for (auto const& more : {predict_tests(), beside_fused_tests(), few_rows_tests()})
    tests.insert(tests.end(), more.begin(), more.end());
  for (Test const& test : tests) {
    if (argc < 2) std::printf("%s\n", test.name);
    if (argc > 1 && std::strcmp(argv[1], test.name) == 0) return test.run(), 0;
  }
  return argc < 2 ? 0 : 2;
}
