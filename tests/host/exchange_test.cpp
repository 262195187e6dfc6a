// Tests of the slots through which the kernels for few rows exchange their tiles.

#include "schedule/exchange_layout.hpp"

#include <set>
#include <utility>

#include "kernels/few_rows_kernels.hpp"
#include "schedule_test.hpp"

namespace flux::test {
namespace {

// No two slots that a rank reads are one, and all lie within the area; one-shot leaves none out.
void exchange_slots_are_disjoint() {
  for (int world : {2, 3, 8, 16}) {
    for (int32_t units : {1, 2, 40, 257}) {
      for (ExchangeForm form : {ExchangeForm::kOneShot, ExchangeForm::kTwoShot}) {
        int64_t const slots = exchange_slots(form, units, world);
        for (int rank = 0; rank < world; ++rank) {
          std::set<int64_t> seen;
          auto const add = [&](int64_t slot) {
            CHECK(slot >= 0 && slot < slots && seen.insert(slot).second, "slot %ld of %ld", long(slot), long(slots));
          };
          for (int32_t unit = 0; unit < units; ++unit) {
            bool const two_shot = form == ExchangeForm::kTwoShot, owns = exchange_owner(unit, world) == rank;
            if (two_shot) add(exchange_sum_slot(unit, units, world));
            for (int source = 0; source < world && (!two_shot || owns); ++source) {
              add(exchange_slot(form, unit, world, source));
            }
          }
          CHECK(form == ExchangeForm::kTwoShot || int64_t(seen.size()) == slots, "%zu of %ld", seen.size(),
                long(slots));
        }
      }
    }
  }
}

// Of every kernel: the partials and the sums of a two-shot exchange have places of their own in its slots, each vector
// has one owner, and where M fills only the first share of every unit, all ranks own about as much of that.
void shares_are_disjoint_and_even() {
  constexpr int64_t kVectorBytes = 16 * 64 * 2;
  for (FewRowsRow const& kernel : kFewRowsKernels) {
    int const vectors = kernel.tile_m / kernel.split_k / 16, share = exchange_share(vectors);
    CHECK(vectors % share == 0, "%s: shares of %d of %d", kernel.name, share, vectors);
    for (int world : {2, 3, 4, 5, 6, 8, 16}) {
      int64_t const m = 3 * kernel.tile_m - 1, n = 11 * kernel.tile_n;
      int64_t const units = kernel.num_tiles(m, n) * (kernel.tile_n / 64) * kernel.split_k;
      int64_t const places = kernel.slot_bytes(ExchangeForm::kTwoShot, m, n, world) / kVectorBytes;
      int64_t owned = 0;
      for (int rank = 0; rank < world; ++rank) {
        std::set<int64_t> seen;
        auto const add = [&](int64_t place) {
          CHECK(place >= 0 && place < places && seen.insert(place).second, "%s: %ld of %ld", kernel.name, long(place),
                long(places));
        };
        int64_t firsts = 0;
        for (int32_t unit = 0; unit < units; ++unit) {
          for (int v = 0; v < vectors; ++v) {
            add(sum_place(unit, v, vectors, share, units, world));
            if (exchange_owner(share_of_vector(unit, v, vectors, share), world) != rank) continue;
            ++owned;
            if (v == 0) ++firsts;
            for (int source = 0; source < world; ++source) add(share_place(unit, v, vectors, share, world, source));
          }
        }
        // Of two ranks whose number of shares in a unit is even, one owns all of these.
        bool const is_even = world > 2 || vectors / share % 2 == 1;
        int64_t const most = ceil_div(2 * units, int64_t{world}) + world;
        CHECK(!is_even || firsts <= most, "%s: rank %d of %d owns %ld of %ld first shares", kernel.name, rank, world,
              long(firsts), long(units));
      }
      CHECK(owned == units * vectors, "%s: %ld of %ld vectors have an owner", kernel.name, long(owned),
            long(units * vectors));
    }
  }
}

// The owner of the next share, and the share of an owner, are what exchange_owner says.
void owners_agree() {
  for (int world : {2, 3, 4, 5, 8, 16}) {
    for (int32_t first : {0, 1, 7, 16, 30, 255}) {
      int owner = exchange_owner(first, world), left = shares_left_in_slot(first, world);
      for (int32_t share = first; share < first + 3 * world; ++share) {
        CHECK(owner == exchange_owner(share, world), "share %d of %d ranks: %d", share, world, owner);
        CHECK(left == shares_left_in_slot(share, world), "share %d of %d ranks: %d left", share, world, left);
        owner = next_owner(owner, &left, world);
      }
    }
    for (int slot = 0; slot < 3 * world; ++slot) {
      for (int rank = 0; rank <= world; ++rank) {
        int const share = slot * world + share_in_slot(slot, rank, world);
        CHECK(exchange_owner(share, world) == rank % world, "slot %d, rank %d of %d", slot, rank, world);
      }
    }
  }
}

// The vectors that all sources send to one owner have places of their own, whether or not 16 divides the rows.
void scatter_places_are_disjoint() {
  for (int world : {2, 3, 8}) {
    for (int rows : {1, 2, 15, 16, 17, 33, 64, 128}) {
      for (int owner = 0; owner < world; ++owner) {
        constexpr int kColumns = 3;
        int64_t const places = int64_t{kColumns} * world * scatter_vectors(rows);
        std::set<int64_t> seen;
        for (int columns = 0; columns < kColumns; ++columns) {
          for (int source = 0; source < world; ++source) {
            for (int vector = owner * rows / 16; vector * 16 < (owner + 1) * rows; ++vector) {
              int64_t const place = scatter_place(columns, source, world, vector, owner, rows);
              CHECK(place >= 0 && place < places && seen.insert(place).second, "%ld of %ld", long(place), long(places));
            }
          }
        }
      }
    }
  }
}

void masks_have_the_vectors_with_rows_in_a_range() {
  for (int vectors : {1, 2, 3, 6, 8, 16}) {
    for (int first = 0; first < 40; first += 2) {
      for (int begin = 0; begin < 100; ++begin) {
        for (int length : {1, 2, 5, 6, 7, 16, 33, 100}) {
          uint32_t expected = 0;
          for (int v = 0; v < vectors; ++v) {
            for (int row : {0, 1, 8, 9}) {
              int const m = first + 16 * v + row;
              if (m >= begin && m < begin + length) expected |= 1u << v;
            }
          }
          CHECK(vector_mask(first, vectors, begin, begin + length) == expected, "%d vectors from %d, rows %d..%d",
                vectors, first, begin, begin + length);
        }
      }
    }
  }
}

// What the ranks store of their tiles at an owner lies apart, within the slots, and holds all its rows; by every
// kernel's tiles.
void scattered_tiles_meet_their_owners() {
  for (FewRowsRow const& kernel : kFewRowsKernels) {
    int const slice_m = kernel.tile_m / kernel.split_k, n = 2 * kernel.tile_n;
    for (int world : {2, 3, 8}) {
      for (int rows : {1, 5, 16, 40, 64}) {
        int const m = rows * world;
        int64_t const bytes = kernel.slot_bytes(ExchangeForm::kScatter, m, n, world);
        for (int owner = 0; owner < world; ++owner) {
          std::set<int64_t> seen;
          std::set<std::pair<int, int>> held;  // row, and 64 columns
          for (int unit = 0; unit < kernel.num_tiles(m, n) * (kernel.tile_n / 64) * kernel.split_k; ++unit) {
            int const columns = unit % (n / 64), slice = unit / (n / 64);
            for (int thread = 0; thread < 128; ++thread) {
              int const column = thread % 4, first_row = slice * slice_m;
              uint32_t const mask = vector_mask(first_row + 2 * column, slice_m / 16, owner * rows, (owner + 1) * rows);
              for (int v = 0; v < slice_m / 16; ++v) {
                if (!(mask >> v & 1)) continue;
                for (int row : {0, 1, 8, 9}) held.insert({first_row + 16 * v + 2 * column + row, columns});
                for (int source = 0; source < world; ++source) {
                  int64_t const place = scatter_place(columns, source, world, first_row / 16, owner, rows) + v;
                  int64_t const at = (place * 128 + thread) * 16;
                  CHECK(at >= 0 && at < bytes && seen.insert(at).second, "%s, %d rows of %d ranks: %ld of %ld",
                        kernel.name, rows, world, long(at), long(bytes));
                }
              }
            }
          }
          for (int row = owner * rows; row < (owner + 1) * rows; ++row) {
            for (int columns = 0; columns < n / 64; ++columns) {
              CHECK(held.count({row, columns}) == 1, "%s: row %d of %d", kernel.name, row, m);
            }
          }
        }
      }
    }
  }
}

// Slices cover K, begin at multiples of every tile's K, and have words of their own.
void slices_of_the_gather_cover_k() {
  for (int rows : {1, 8, 64, 256}) {
    for (int k : {8, 64, 128, 136, 4096, 7168, 8192, 28672}) {
      int const slice_k = gather_slice_k(rows, k);
      CHECK(slice_k > 0 && slice_k % 128 == 0 && ceil_div(k, slice_k) <= kMaxSlices, "%d rows of %d: %d", rows, k,
            slice_k);
    }
  }
}

// No byte is left out, no block has nothing to do, and a two-shot group has a unit of each owner, but for the last one.
void groups_of_an_all_reduce_cover_its_units() {
  for (int world : {2, 3, 8, 16}) {
    for (ExchangeForm form : {ExchangeForm::kOneShot, ExchangeForm::kTwoShot}) {
      for (int64_t bytes : {int64_t{16}, kAllReduceUnitBytes - 16, kAllReduceUnitBytes, kAllReduceUnitBytes + 16,
                            16 * kAllReduceUnitBytes, 257 * kAllReduceUnitBytes + 16}) {
        int64_t const units = all_reduce_units(bytes), groups = all_reduce_groups(form, bytes, world);
        int const each = all_reduce_group_units(form, world);
        CHECK(units * kAllReduceUnitBytes >= bytes && (units - 1) * kAllReduceUnitBytes < bytes, "%ld bytes",
              long(bytes));
        CHECK(groups * each >= units && (groups - 1) * each < units, "%ld bytes", long(bytes));
        std::set<int> owners;
        for (int unit = 0; unit < each; ++unit) owners.insert(exchange_owner(unit, world));
        CHECK(int(owners.size()) == (form == ExchangeForm::kTwoShot ? world : 1), "%d ranks", world);
      }
    }
  }
}

}  // namespace

std::vector<Test> exchange_tests() {
  return {
      TEST(exchange_slots_are_disjoint),
      TEST(shares_are_disjoint_and_even),
      TEST(owners_agree),
      TEST(scatter_places_are_disjoint),
      TEST(masks_have_the_vectors_with_rows_in_a_range),
      TEST(scattered_tiles_meet_their_owners),
      TEST(slices_of_the_gather_cover_k),
      TEST(groups_of_an_all_reduce_cover_its_units),
  };
}

}  // namespace flux::test
