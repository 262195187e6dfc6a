// The decomposed strategy without data: its schedules (csrc/schedule/chunk_schedule.hpp), its configurations and the
// choice among them (csrc/ops/decomposed.hpp). Built by g++ alone.
//
//   decomposed_test           names of the tests
//   decomposed_test NAME      run one

#include "ops/decomposed.hpp"

#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "schedule_test.hpp"

namespace flux::test {
namespace {

ChunkSchedule const kAgKinds[] = {ChunkSchedule::kUniformFused1d, ChunkSchedule::kHeteroFused1d,
                                  ChunkSchedule::kHeteroUnfused1d, ChunkSchedule::kUniformFused2d};

template <class Visit>
void for_schedules(Visit visit) {
  for (ChunkSchedule kind : kAgKinds) {
    for (int world = 1; world <= kMaxWorld; ++world) {
      for (int rank = 0; rank < world; ++rank) {
        for (int64_t rows : {1, 2, 3, 7, 300, 1024, 4097}) {
          for (int64_t k : {1, 5, 513, 8192}) {
            for (int chunks : {1, 2, 3, 4, 8, kMaxPieces}) {
              visit(make_ag_schedule(kind, rank, world, rows, k, chunks));
            }
          }
        }
      }
    }
  }
}

std::string text(AgSchedule const& s) {
  return Decomposition{s.kind, s.pieces.count()}.name() + ", rank " + std::to_string(s.rank) + " of " +
         std::to_string(s.world) + ", " + std::to_string(s.rows) + " x " + std::to_string(s.k);
}

bool overlap(Block const& a, Block const& b) {
  bool const rows = a.row < b.row + b.rows && b.row < a.row + a.rows;
  bool const columns = a.k < b.k + b.ks && b.k < a.k + a.ks;
  return rows && columns;
}

void products_cover_each_row_and_column_once() {
  for_schedules([](AgSchedule const& s) {
    std::vector<Block> of[kMaxWorld];
    for (AgProduct const& one : s.products()) {
      CHECK(one.first_source >= 0 && one.num_sources >= 1 && one.first_source + one.num_sources <= s.world, "%s",
            text(s).c_str());
      CHECK(one.block.rows >= 1 && one.block.ks >= 1, "%s", text(s).c_str());
      for (int i = 0; i < one.num_sources; ++i) of[one.first_source + i].push_back(one.block);
    }
    for (int source = 0; source < s.world; ++source) {
      int64_t area = 0;
      for (size_t i = 0; i < of[source].size(); ++i) {
        Block const& b = of[source][i];
        CHECK(b.row >= 0 && b.k >= 0 && b.row + b.rows <= s.rows && b.k + b.ks <= s.k, "%s", text(s).c_str());
        for (size_t j = 0; j < i; ++j) CHECK(!overlap(b, of[source][j]), "%s", text(s).c_str());
        area += b.rows * b.ks;
      }
      CHECK(area == s.rows * s.k, "%s: source %d", text(s).c_str(), source);
    }
  });
}

// A product reads nothing but what it has waited for: its block is its piece, or the whole own shard.
void products_need_the_pieces_that_they_read() {
  for_schedules([](AgSchedule const& s) {
    for (AgProduct const& one : s.products()) {
      Block const read = one.piece < 0 ? Block{0, s.rows, 0, s.k} : s.block(one.piece);
      CHECK(
          read.row == one.block.row && read.rows == one.block.rows && read.k == one.block.k && read.ks == one.block.ks,
          "%s", text(s).c_str());
      bool const has_own = one.first_source <= s.rank && s.rank < one.first_source + one.num_sources;
      CHECK(one.piece >= 0 || (has_own && one.num_sources == 1), "%s", text(s).c_str());
      CHECK(has_own == (one.piece < 0 || is_uniform(s.kind)), "%s", text(s).c_str());
    }
  });
}

// A call that did not wait for each piece of each peer would let its rank run ahead of them.
void every_piece_is_pushed_once_and_waited_for() {
  for_schedules([](AgSchedule const& s) {
    CHECK(s.pieces.count() >= 1 && s.pieces.count() <= kMaxPieces, "%s", text(s).c_str());
    std::set<std::pair<int, int>> pushed, needed;
    for (AgPush const& one : s.pushes()) {
      CHECK(one.peer >= 0 && one.peer < s.world && one.peer != s.rank, "%s", text(s).c_str());
      CHECK(pushed.insert({one.peer, one.piece}).second, "%s: piece %d to %d twice", text(s).c_str(), one.piece,
            one.peer);
    }
    for (AgProduct const& one : s.products()) {
      for (int i = 0; i < one.num_sources && one.piece >= 0; ++i) needed.insert({one.first_source + i, one.piece});
    }
    for (int peer = 0; peer < s.world; ++peer) {
      for (int piece = 0; piece < s.pieces.count() && peer != s.rank; ++piece) {
        CHECK(pushed.count({peer, piece}) == 1, "%s: piece %d to %d", text(s).c_str(), piece, peer);
        CHECK(needed.count({peer, piece}) == 1, "%s: piece %d of %d", text(s).c_str(), piece, peer);
      }
    }
  });
}

// Push number i of every rank goes out at the same time, one a link. Then no product needs what comes later than all
// that the product after it needs: the GEMMs follow the arrivals. All ranks cut alike.
void products_follow_the_order_of_arrival() {
  for_schedules([](AgSchedule const& s) {
    size_t last = 0;
    for (AgProduct const& one : s.products()) {
      size_t needs = 0;
      for (int i = 0; i < one.num_sources && one.piece >= 0; ++i) {
        int const source = one.first_source + i;
        if (source == s.rank) continue;
        AgSchedule const theirs{s.kind, source, s.world, s.rows, s.k, s.pieces};
        std::vector<AgPush> const pushes = theirs.pushes();
        for (size_t at = 0; at < pushes.size(); ++at) {
          if (pushes[at].peer == s.rank && pushes[at].piece == one.piece && at + 1 > needs) needs = at + 1;
        }
      }
      CHECK(needs >= last, "%s: a product needs push %zu, the one before it %zu", text(s).c_str(), needs, last);
      last = needs;
    }
  });
}

// Sums along K begin with column 0, which puts the bias in place, and go on from there.
void sums_begin_with_the_first_columns() {
  for_schedules([](AgSchedule const& s) {
    if (!is_along_k(s.kind)) return;
    int64_t next = 0;
    for (AgProduct const& one : s.products()) {
      CHECK(one.block.k == next && one.block.row == 0 && one.block.rows == s.rows, "%s", text(s).c_str());
      CHECK(one.first_source == 0 && one.num_sources == s.world, "%s", text(s).c_str());
      next += one.block.ks;
    }
    CHECK(next == s.k, "%s", text(s).c_str());
  });
}

// The picture at the head of chunk_schedule.hpp.
void schedules_match_the_picture() {
  char const* const picture[] = {"[0a 1a 2a 3a] [0b 1b 2b 3b]", "[1a 1b] [0a] [2a 3a] [0b] [2b 3b]",
                                 "[1a 1b] [0a] [3a] [2a] [0b] [3b] [2b]", "[0a 1a 2a 3a] [0b 1b 2b 3b]"};
  for (int i = 0; i < 4; ++i) {
    std::string drawn;
    for (AgProduct const& one : make_ag_schedule(kAgKinds[i], 1, 4, 64, 64, 2).products()) {
      drawn += drawn.empty() ? "[" : " [";
      for (int j = 0; j < one.num_sources; ++j) {
        std::string const source = std::to_string(one.first_source + j);
        drawn += j > 0 ? " " : "";
        drawn += one.piece < 0 ? source + "a " + source + "b" : source + (one.piece == 0 ? "a" : "b");
      }
      drawn += "]";
    }
    CHECK(drawn == picture[i], "%s, drawn %s", drawn.c_str(), picture[i]);
  }
}

void large_chunks_are_whole_tiles() {
  for (int64_t extent = 1; extent < 9000; extent += 37) {
    for (int wanted = 1; wanted <= kMaxPieces; ++wanted) {
      Pieces const pieces = make_chunks(extent, wanted);
      CHECK(pieces.count() >= 1 && pieces.count() <= wanted, "%d of %d", pieces.count(), wanted);
      CHECK(extent < 256 * wanted || pieces.per_piece % 128 == 0, "%lld in %d", static_cast<long long>(extent), wanted);
      CHECK(extent < wanted || pieces.count() * 2 > wanted, "%lld in %d: %d", static_cast<long long>(extent), wanted,
            pieces.count());
    }
  }
}

void partials_cover_each_row_once_own_last() {
  for (int world = 1; world <= kMaxWorld; ++world) {
    for (int rank = 0; rank < world; ++rank) {
      for (int64_t rows : {1, 3, 7, 300, 4097}) {
        for (int chunks : {1, 2, 4, kMaxPieces}) {
          Pieces const pieces = make_chunks(rows, chunks);
          std::vector<RsProduct> const products = rs_products(rank, world, rows, pieces);
          int64_t next[kMaxWorld] = {};
          for (RsProduct const& one : products) {
            bool const own = one.owner == rank;
            CHECK(own == (&one == &products.back()) && own == (one.piece < 0), "rank %d of %d", rank, world);
            CHECK(own || one.row == pieces.begin(one.piece), "rank %d of %d", rank, world);
            CHECK(one.row == next[one.owner] && one.rows >= 1, "rank %d of %d: owner %d", rank, world, one.owner);
            next[one.owner] += one.rows;
          }
          for (int owner = 0; owner < world; ++owner) CHECK(next[owner] == rows, "owner %d of %d", owner, world);
        }
      }
    }
  }
}

// ---- configurations

Problem problem_of(Op op, int world, int64_t rows, int64_t n, int64_t k, std::string const& config = {}) {
  return {op, 0, world, rows, n, k, DataType::kBFloat16, /*weight_transposed=*/false, config};
}

template <class Visit>
void for_problems(Visit visit) {
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (int world : {2, 3, 4, 8, 16}) {
      for (int64_t rows : {1, 8, 129, 1000, 4096, 65536}) {
        for (int64_t n : {1, 64, 5504, 49152}) {
          for (int64_t k : {1, 64, 4096, 12288}) visit(problem_of(op, world, rows, n, k));
        }
      }
    }
  }
}

void names_are_read_back() {
  for_problems([](Problem const& p) {
    Decomposition const choice = choose_decomposition(p);
    CHECK(choice.chunks >= 1 && choice.chunks <= kMaxPieces, "%d chunks", choice.chunks);
    Decomposition read{};
    CHECK(parse_decomposition(p.op, choice.name(), &read), "%s", choice.name().c_str());
    CHECK(read.schedule == choice.schedule && read.chunks == choice.chunks, "%s", choice.name().c_str());
  });
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (std::string const& name : decomposed_candidates(op)) {
      Problem const p = problem_of(op, 4, 512, 512, 512, name);
      CHECK(why_not_decomposed(p).empty() && decomposition_of(p).name() == name, "%s", name.c_str());
    }
  }
}

void other_names_are_refused() {
  for (Op op : {Op::kAgGemm, Op::kGemmRs, Op::kGemmAr}) {
    for (char const* name : {"c2", "chunks", "chunks/c0", "chunks/c17", "chunks/c02", "chunks/c2 ",
                             "hetero-fused-2d/c2", "uniform-fused-1d/2", "/c2", "auto", "one-shot/c1", "two-shots"}) {
      CHECK(!why_not_decomposed(problem_of(op, 4, 512, 512, 512, name)).empty(), "'%s' was taken", name);
    }
  }
  CHECK(!why_not_decomposed(problem_of(Op::kAgGemm, 4, 512, 512, 512, "chunks/c2")).empty(), "a name of gemm_rs");
  CHECK(!why_not_decomposed(problem_of(Op::kGemmRs, 4, 512, 512, 512, "hetero-fused-1d/c2")).empty(), "of ag_gemm");
  CHECK(!why_not_decomposed(problem_of(Op::kGemmRs, 4, 512, 512, 512, "two-shot")).empty(), "of gemm_ar");
}

void ranks_choose_alike() {
  for_problems([](Problem p) {
    std::string const first = choose_decomposition(p).name();
    p.rank = p.world - 1;
    CHECK(choose_decomposition(p).name() == first, "%s", first.c_str());
  });
}

void the_heuristic_is_that_of_the_paper() {
  auto const chosen = [](int world, int64_t rows, int64_t n, int64_t k) {
    return choose_schedule(problem_of(Op::kAgGemm, world, rows, n, k));
  };
  CHECK(chosen(4, 256, 12288, 12288) == ChunkSchedule::kUniformFused2d, "M < K");
  CHECK(chosen(4, 512, 512, 1024) == ChunkSchedule::kUniformFused1d, "little to do");
  CHECK(chosen(4, 2048, 2752, 4096) == ChunkSchedule::kHeteroFused1d, "more");
  CHECK(chosen(4, 4096, 12288, 12288) == ChunkSchedule::kHeteroUnfused1d, "much");
}

void what_is_large_is_reduced_in_two_shots() {
  auto const chosen = [](int world, int64_t rows) {
    return choose_decomposition(problem_of(Op::kGemmAr, world, rows, 8192, 4096)).schedule;
  };
  CHECK(chosen(2, 2048) == ChunkSchedule::kOneShot, "two ranks send as much in one");
  CHECK(chosen(4, 16) == ChunkSchedule::kOneShot && chosen(4, 64) == ChunkSchedule::kTwoShot, "four ranks");
  CHECK(chosen(8, 4) == ChunkSchedule::kOneShot && chosen(8, 16) == ChunkSchedule::kTwoShot, "eight ranks");
}

void huge_extents_are_refused() {
  CHECK(why_not_decomposed(problem_of(Op::kAgGemm, 2, int64_t{1} << 29, 8, 8)).empty(), "2^30 rows");
  CHECK(!why_not_decomposed(problem_of(Op::kAgGemm, 2, int64_t{1} << 30, 8, 8)).empty(), "2^31 rows");
  CHECK(!why_not_decomposed(problem_of(Op::kGemmRs, 2, 8, int64_t{1} << 31, 8)).empty(), "N = 2^31");
  CHECK(!why_not_decomposed(problem_of(Op::kGemmRs, 2, 8, 8, int64_t{1} << 30)).empty(), "rows of 2^31 bytes");
}

void sums_of_16_bits_are_wide() {
  for (DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
    CHECK(sums_in_result(dtype, 1) && !sums_in_result(dtype, 2), "sums");
  }
  CHECK(sums_in_result(DataType::kFloat32, 16) && sums_in_result(DataType::kFloat64, 16), "wide sums");
}

}  // namespace
}  // namespace flux::test

int main(int argc, char** argv) {
  using namespace flux::test;
  Test const tests[] = {
      TEST(products_cover_each_row_and_column_once),
      TEST(products_need_the_pieces_that_they_read),
      TEST(every_piece_is_pushed_once_and_waited_for),
      TEST(products_follow_the_order_of_arrival),
      TEST(sums_begin_with_the_first_columns),
      TEST(schedules_match_the_picture),
      TEST(large_chunks_are_whole_tiles),
      TEST(partials_cover_each_row_once_own_last),
      TEST(names_are_read_back),
      TEST(other_names_are_refused),
      TEST(ranks_choose_alike),
      TEST(the_heuristic_is_that_of_the_paper),
      TEST(what_is_large_is_reduced_in_two_shots),
      TEST(huge_extents_are_refused),
      TEST(sums_of_16_bits_are_wide),
  };
  for (Test const& test : tests) {
    if (argc < 2) std::printf("%s\n", test.name);
    if (argc > 1 && std::strcmp(argv[1], test.name) == 0) return test.run(), 0;
  }
  return argc < 2 ? 0 : 2;
}
