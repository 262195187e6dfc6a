// Tests of the two-shot form of gemm_ar: who owns which rows, and the order in which a rank computes.

#include "schedule/ar_schedule.hpp"

#include <set>
#include <utility>
#include <vector>

#include "schedule/ar_results.hpp"
#include "schedule/tile_order.hpp"
#include "schedule_test.hpp"

namespace flux::test {
namespace {

template <typename Visit>
void for_schedules(Visit visit) {
  for (int64_t rows : {1, 2, 7, 63, 64, 65, 127, 128, 129, 257, 1000, 4096, 10007}) {
    for (int world : {1, 2, 3, 4, 8, 16}) {
      for (int sections = 1; sections <= kMaxSections; ++sections) {
        for (int64_t granule : {1, 16, 64, 128, 512})
          visit(make_ar_schedule(rows, world, sections, granule), sections, granule);
      }
    }
  }
}

void ar_chunks_cover_the_rows_in_order() {
  for_schedules([](ArSchedule const& s, int wanted, int64_t granule) {
    CHECK(1 <= s.sections && s.sections <= wanted, "%d sections of %d wanted", s.sections, wanted);
    int64_t next = 0;
    for (int section = 0; section < s.sections; ++section) {
      int64_t const before = next;
      for (int owner = 0; owner < s.world; ++owner) {
        ArChunk const chunk{section, owner};
        CHECK(s.begin(chunk) == next, "chunk %d.%d begins at %ld, not at %ld", owner, section, long(s.begin(chunk)),
              long(next));
        CHECK(s.begin(chunk) % granule == 0 || s.size(chunk) == 0, "chunk %d.%d begins inside a granule", owner,
              section);
        CHECK(0 <= s.size(chunk) && s.size(chunk) <= s.chunk_rows, "chunk %d.%d has %ld rows", owner, section,
              long(s.size(chunk)));
        next += s.size(chunk);
        CHECK(s.size(chunk) == s.chunk_rows || next == s.rows, "chunk %d.%d is short", owner, section);
      }
      CHECK(next > before, "section %d of %d has no rows", section, s.sections);
    }
    CHECK(next == s.rows, "%ld rows of %ld", long(next), long(s.rows));
  });
}

void ar_steps_visit_every_chunk_once() {
  for_schedules([](ArSchedule const& s, int, int64_t) {
    for (int rank = 0; rank < s.world; ++rank) {
      std::set<int> seen;
      for (int step = 0; step < s.num_chunks(); ++step) {
        ArChunk const chunk = s.chunk_at(rank, step);
        CHECK(chunk.section < s.sections && chunk.owner < s.world && seen.insert(s.index(chunk)).second,
              "step %d of rank %d of %d: chunk %d.%d of %d sections", step, rank, s.world, chunk.owner, chunk.section,
              s.sections);
      }
    }
  });
}

// O of a section comes after P of the next one and before P of the one after that; a P is the order of gemm_rs.
void ar_own_chunks_come_a_section_later() {
  for (int world = 1; world <= kMaxWorld; ++world) {
    for (int sections = 1; sections <= kMaxSections; ++sections) {
      ArSchedule const s = make_ar_schedule(int64_t{world} * sections, world, sections, 1);
      for (int rank = 0; rank < world; ++rank) {
        int step = 0;
        auto const expect = [&](int section, int owner) {
          ArChunk const chunk = s.chunk_at(rank, step);
          CHECK(chunk.section == section && chunk.owner == owner, "step %d of rank %d of %d is %d.%d, expected %d.%d",
                step, rank, world, chunk.owner, chunk.section, owner, section);
          ++step;
        };
        for (int section = 0; section <= sections; ++section) {
          if (section < sections) {
            for (int i = 0; i < world - 1; ++i) expect(section, rs_chunk(rank, world, i));
          }
          if (section > 0) expect(section - 1, rank);
        }
        CHECK(step == s.num_chunks(), "%d steps of %d", step, s.num_chunks());
      }
    }
  }
}

void ar_own_steps_are_those_of_the_order() {
  for (int world = 1; world <= kMaxWorld; ++world) {
    for (int sections = 1; sections <= kMaxSections; ++sections) {
      for (int rank = 0; rank < world; ++rank) {
        for (int section = 0; section < sections; ++section) {
          int const step = ar_own_step(world, sections, section);
          ArChunk const chunk = ar_chunk(rank, world, sections, step);
          CHECK(chunk.owner == rank && chunk.section == section, "step %d of rank %d of %d is %d.%d, not section %d",
                step, rank, world, chunk.owner, chunk.section, section);
        }
      }
    }
  }
}

// Each section's peers by piece, and the own chunk where ar_chunk has it.
void ar_items_follow_the_order_of_the_chunks() {
  for (int world : {1, 2, 3, 4, 16}) {
    for (int sections : {1, 2, 3, kMaxSections}) {
      for (int wanted : {1, 2, 3}) {
        Pieces const parts = make_pieces(12, wanted, 1);
        for (int rank = 0; rank < world; rank += 1 + world / 3) {
          int32_t index = 0;
          auto const expect = [&](ArChunk chunk, int32_t item) {
            ArItem const got = ar_item(index, rank, world, sections, parts);
            CHECK(got.chunk.section == chunk.section && got.chunk.owner == chunk.owner && got.item == item,
                  "rank %d of %d, %d sections, %d parts: %d is %d.%d %d, not %d.%d %d", rank, world, sections,
                  parts.count(), index, got.chunk.owner, got.chunk.section, got.item, chunk.owner, chunk.section, item);
            ++index;
          };
          for (int step = 0; step < sections * world;) {
            ArChunk const chunk = ar_chunk(rank, world, sections, step);
            if (chunk.owner == rank) {
              for (int i = 0; i < parts.items; ++i) expect(chunk, i);
              ++step;
              continue;
            }
            for (int i = 0; i < (world - 1) * parts.items; ++i) {
              RsItem const work = rs_item(i, world, parts);
              expect(ar_chunk(rank, world, sections, step + work.step), work.item);
            }
            step += world - 1;
          }
          CHECK(index == sections * world * parts.items, "%d items", index);
        }
      }
    }
  }
}

// Every byte of y, and of what an owner has reduced, is in one block of one chunk; signals are distinct, behind those
// of the partials.
void ar_results_cover_y_once() {
  for (int world : {2, 3}) {
    for (int sections : {1, 2}) {
      for (int wanted : {1, 2, 4}) {
        for (bool along_n : {false, true}) {
          for (int swizzle : {1, 2, 8}) {
            int64_t const chunk_rows = 37, row_bytes = 24 * 16;
            TileShape const tile{8, 5, 2, 1};  // columns: 16 bytes each
            TileOrder const order = make_tile_order(chunk_rows, row_bytes / 16, tile, swizzle, along_n);
            Pieces const pieces = make_pieces(order.num_tiles(), wanted, order.tiles_of_block());
            ArResults const results{0,     world,  sections,    chunk_rows,      row_bytes,
                                    order, pieces, tile.tile_m, 16 * tile.tile_n};
            std::vector<int> times(world * sections * chunk_rows * row_bytes / 16);
            std::vector<int> times_of_owner(results.bytes_of_owner() / 16);
            std::set<int> signals;
            for (int number = 0; number < results.num_pieces(); ++number) {
              int const signal = results.signal(number), piece = number % pieces.count();
              CHECK(signal >= results.num_pieces() && signal < kMaxPieces && signals.insert(signal).second, "signal %d",
                    signal);
              ArBlock const block = results.block(number);
              for (int i = pieces.begin(piece); i < pieces.begin(piece) + pieces.size(piece); ++i) {
                Tile const at = order.tile_at(i);
                int64_t const row = int64_t{at.m} * tile.tile_m, column = int64_t{at.n} * results.tile_width;
                bool const pads = row >= chunk_rows || column >= row_bytes;
                CHECK(pads || (block.row <= row && row < block.row + block.rows && block.column <= column &&
                               column < block.column + block.width),
                      "piece %d has tile (%d, %d), its block not", piece, at.m, at.n);
              }
              for (int owner = 0; owner < world; ++owner) {
                for (int64_t row = 0; row < block.rows; ++row) {
                  int64_t const at = results.offset({results.section_of(number), owner}, block) + row * row_bytes;
                  for (int64_t i = 0; i < block.width / 16; ++i) ++times[at / 16 + i];
                }
              }
              for (int64_t row = 0; row < block.rows; ++row) {
                int64_t const at = results.offset_of_owner(results.section_of(number), block) + row * row_bytes;
                for (int64_t i = 0; i < block.width / 16; ++i) ++times_of_owner.at(at / 16 + i);
              }
            }
            CHECK(times_of_owner.size() * world == times.size(), "%zu and %zu", times_of_owner.size(), times.size());
            for (int const count : times_of_owner) CHECK(count == 1, "16 bytes of an owner %d times", count);
            for (int const count : times) CHECK(count == 1, "%d pieces: 16 bytes of y %d times", pieces.count(), count);
          }
        }
      }
    }
  }
}

void turns_are_counted() {
  for (int32_t count : {1, 2, 5, 66}) {
    for (int32_t c = 0; c < count; ++c) {
      for (int64_t begin : {0, 1, 4, 5, 67, 131}) {
        for (int64_t length : {0, 1, 5, 66, 133}) {
          int64_t expected = 0;
          for (int64_t x = begin; x < begin + length; ++x) expected += x % count == c;
          CHECK(num_turns(begin, begin + length, c, count) == expected, "%d of %d in [%ld, +%ld)", c, count,
                long(begin), long(length));
        }
      }
    }
  }
}

void ar_order_matches_the_picture() {
  ArSchedule const s = make_ar_schedule(6, 3, 2, 1);
  std::vector<std::pair<int, int>> const picture = {{2, 0}, {0, 0}, {2, 1}, {0, 1}, {1, 0}, {1, 1}};  // owner, section
  for (int step = 0; step < 6; ++step) {
    ArChunk const chunk = s.chunk_at(1, step);
    CHECK(chunk.owner == picture[step].first && chunk.section == picture[step].second, "step %d is %d.%d", step,
          chunk.owner, chunk.section);
  }
}

void ar_signals_are_distinct() {
  for (int sections = 1; sections <= kMaxSections; ++sections) {
    ArSchedule const s = make_ar_schedule(sections, 1, sections, 1);
    std::set<int> pieces;
    for (int section = 0; section < sections; ++section) {
      for (int piece : {s.partial_piece(section), s.result_piece(section)}) {
        CHECK(0 <= piece && piece < kMaxPieces && pieces.insert(piece).second, "section %d of %d: piece %d", section,
              sections, piece);
      }
    }
  }
}

void ar_bound_of_the_staged_rows_holds_and_grows() {
  for (int world : {1, 2, 3, 4, 8, 16}) {
    int64_t before = 0;
    for (int64_t rows = 1; rows < 20000; rows += 1 + rows / 50) {
      int64_t const most = ar_rows_per_owner_at_most(rows, world, 512);
      CHECK(most >= before, "%ld rows: %ld, less than %ld", long(rows), long(most), long(before));
      before = most;
      for (int wanted = 1; wanted <= kMaxSections; ++wanted) {
        for (int granule : {64, 128, 256, 512}) {
          ArSchedule const s = make_ar_schedule(rows, world, wanted, granule);
          CHECK(s.sections * s.chunk_rows <= most, "%ld rows, %d ranks, %d sections of %ld rows: more than %ld",
                long(rows), world, s.sections, long(s.chunk_rows), long(most));
        }
      }
    }
  }
}

// The last tile of the partials ends before the first result; the last result ends with the region.
void ar_region_parts_are_disjoint() {
  for (int world : {2, 3, 8, 16}) {
    for (int64_t tiles : {1, 5, 640}) {
      for (int64_t n : {1, 24, 8192}) {
        int64_t const rows = 1000, tile_bytes = rs_tile_bytes(64, 128, 2),
                      slot_bytes = rs_slot_bytes(tiles, tile_bytes);
        Wide const partials_end = Wide{rs_tile_offset(world - 2, slot_bytes, tiles - 1, tile_bytes)} + tile_bytes;
        int64_t const first = ar_result_offset(world, tiles, tile_bytes, 0, n, 2);
        CHECK(partials_end <= first && first % kRegionAlign == 0, "partials end at %ld, results begin at %ld",
              long(partials_end), long(first));
        Wide const end = Wide{ar_result_offset(world, tiles, tile_bytes, rows - 1, n, 2)} + n * 2;
        CHECK(end == ar_two_shot_bytes(world, tiles, tile_bytes, rows, n, 2), "the results end at %ld", long(end));
        Wide const one_shot_end = Wide{rs_tile_offset(world - 1, slot_bytes, tiles - 1, tile_bytes)} + tile_bytes;
        int64_t const in_slot = ar_slot_results_offset(tiles, tile_bytes);
        CHECK(in_slot >= slot_bytes && in_slot < slot_bytes + kRegionAlign && in_slot % kRegionAlign == 0,
              "in a slot of %ld tiles the results begin at %ld", long(tiles), long(in_slot));
        CHECK(one_shot_end == ar_one_shot_bytes(world, tiles, tile_bytes), "one-shot ends at %ld", long(one_shot_end));
      }
    }
  }
}

}  // namespace

std::vector<Test> ar_tests() {
  return {
      TEST(ar_chunks_cover_the_rows_in_order),
      TEST(ar_steps_visit_every_chunk_once),
      TEST(ar_own_chunks_come_a_section_later),
      TEST(ar_own_steps_are_those_of_the_order),
      TEST(ar_items_follow_the_order_of_the_chunks),
      TEST(ar_results_cover_y_once),
      TEST(turns_are_counted),
      TEST(ar_order_matches_the_picture),
      TEST(ar_signals_are_distinct),
      TEST(ar_bound_of_the_staged_rows_holds_and_grows),
      TEST(ar_region_parts_are_disjoint),
  };
}

}  // namespace flux::test
