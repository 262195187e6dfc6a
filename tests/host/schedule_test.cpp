// Tests of csrc/schedule, built by g++ alone with the undefined-behaviour sanitizer (a signed overflow ends the run).
// Here the orders; pieces_test.cpp has the pieces, workspace_test.cpp the layout, ar_schedule_test.cpp what is of
// gemm_ar.
//
//   schedule_test --list      names of the tests
//   schedule_test NAME        run one; a failure prints where, what and the values, and exits with 1

#include "schedule_test.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "schedule/chunk_order.hpp"
#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"

namespace flux::test {
namespace {

// True when `values` are 0 .. size - 1 in some order.
bool is_permutation_of_all(std::vector<int> values) {
  std::sort(values.begin(), values.end());
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != static_cast<int>(i)) return false;
  }
  return true;
}

// ---- chunk order

template <typename Visit>
void for_ranks(Visit visit) {
  for (int world = 1; world <= kMaxWorld; ++world) {
    for (int rank = 0; rank < world; ++rank) visit(rank, world);
  }
}

void ag_chunks_are_a_permutation_own_first() {
  for_ranks([](int rank, int world) {
    std::vector<int> chunks;
    for (int step = 0; step < world; ++step) chunks.push_back(ag_chunk(rank, world, step));
    CHECK(is_permutation_of_all(chunks), "rank %d of %d", rank, world);
    CHECK(chunks.front() == rank, "rank %d of %d begins with chunk %d", rank, world, chunks.front());
  });
}

void rs_chunks_are_a_permutation_own_last() {
  for_ranks([](int rank, int world) {
    std::vector<int> chunks;
    for (int step = 0; step < world; ++step) chunks.push_back(rs_chunk(rank, world, step));
    CHECK(is_permutation_of_all(chunks), "rank %d of %d", rank, world);
    CHECK(chunks.back() == rank, "rank %d of %d ends with chunk %d", rank, world, chunks.back());
    for (int step = 0; step < world; ++step) {  // in one step no two ranks send to the same rank
      std::set<int> targets;
      for (int r = 0; r < world; ++r) targets.insert(rs_chunk(r, world, step));
      CHECK(static_cast<int>(targets.size()) == world, "step %d of %d", step, world);
    }
  });
}

void pushes_are_consumed_in_the_order_they_are_sent() {
  for_ranks([](int rank, int world) {
    std::vector<int> peers = {rank};
    for (int s = 0; s < world - 1; ++s) {
      int const peer = ag_push_peer(rank, world, s);
      peers.push_back(peer);
      CHECK(ag_chunk(peer, world, s + 1) == rank, "push %d of rank %d of %d goes to %d, which computes chunk %d then",
            s, rank, world, peer, ag_chunk(peer, world, s + 1));
    }
    CHECK(is_permutation_of_all(peers), "rank %d of %d does not push to each peer once", rank, world);
  });
}

void peer_slots_are_distinct_and_inverse() {
  for_ranks([](int owner, int world) {
    std::vector<int> slots;
    for (int source = 0; source < world; ++source) {
      if (source == owner) continue;
      int const slot = peer_slot(owner, world, source);
      slots.push_back(slot);
      CHECK(slot_peer(owner, world, slot) == source, "owner %d of %d, source %d, slot %d", owner, world, source, slot);
    }
    CHECK(is_permutation_of_all(slots), "slots of owner %d of %d are not 0 .. %d", owner, world, world - 2);
  });
}

// ---- tile order

struct TileCase {
  int64_t rows, cols;
  TileShape shape;
  int swizzle;
  bool along_n;
};

template <typename Visit>
void for_tile_orders(Visit visit) {
  int64_t const sizes[] = {1, 7, 64, 127, 128, 129, 256, 640, 1000, 1536};
  TileShape const shapes[] = {{128, 128, 1, 1}, {128, 256, 2, 1}, {256, 128, 1, 2},
                              {64, 128, 2, 2},  {16, 64, 4, 1},   {128, 64, 3, 2}};
  for (int64_t rows : sizes) {
    for (int64_t cols : sizes) {
      for (TileShape const& shape : shapes) {
        for (int swizzle : {1, 2, 3, 4, 8, 1000}) {
          for (bool along_n : {false, true}) visit(TileCase{rows, cols, shape, swizzle, along_n});
        }
      }
    }
  }
}

std::string text(TileCase const& c) {
  char line[160];
  std::snprintf(line, sizeof line, "%lld x %lld, tile %d x %d, cluster %d x %d, swizzle %d, along %c",
                static_cast<long long>(c.rows), static_cast<long long>(c.cols), c.shape.tile_m, c.shape.tile_n,
                c.shape.cluster_m, c.shape.cluster_n, c.swizzle, c.along_n ? 'N' : 'M');
  return line;
}

TileOrder order_of(TileCase const& c) { return make_tile_order(c.rows, c.cols, c.shape, c.swizzle, c.along_n); }

void tile_grid_covers_the_chunk_and_pads_less_than_a_cluster() {
  for_tile_orders([](TileCase const& c) {
    TileOrder const order = order_of(c);
    int64_t const step_m = int64_t{c.shape.tile_m} * c.shape.cluster_m;
    int64_t const step_n = int64_t{c.shape.tile_n} * c.shape.cluster_n;
    CHECK(order.clusters_m * step_m >= c.rows && order.clusters_m * step_m - c.rows < step_m, "%s", text(c).c_str());
    CHECK(order.clusters_n * step_n >= c.cols && order.clusters_n * step_n - c.cols < step_n, "%s", text(c).c_str());
    CHECK(order.num_tiles() == order.clusters_m * order.clusters_n * c.shape.cluster_m * c.shape.cluster_n, "%s",
          text(c).c_str());
  });
}

void tile_order_is_a_permutation_with_an_inverse() {
  for_tile_orders([](TileCase const& c) {
    TileOrder const order = order_of(c);
    int const tiles_m = order.clusters_m * order.cluster_m, tiles_n = order.clusters_n * order.cluster_n;
    std::vector<int> visited;
    for (int position = 0; position < order.num_tiles(); ++position) {
      Tile const tile = order.tile_at(position);
      CHECK(tile.m >= 0 && tile.m < tiles_m && tile.n >= 0 && tile.n < tiles_n, "%s: position %d is tile (%d, %d)",
            text(c).c_str(), position, tile.m, tile.n);
      CHECK(order.position_of(tile) == position, "%s: position %d is tile (%d, %d), at position %d", text(c).c_str(),
            position, tile.m, tile.n, order.position_of(tile));
      visited.push_back(tile.m * tiles_n + tile.n);
    }
    CHECK(is_permutation_of_all(visited), "%s", text(c).c_str());
  });
}

void cluster_order_is_a_permutation_with_an_inverse() {
  for_tile_orders([](TileCase const& c) {
    TileOrder const order = order_of(c);
    std::vector<int> visited;
    for (int index = 0; index < order.num_clusters(); ++index) {
      Tile const cluster = order.cluster_at(index);
      CHECK(order.cluster_index(cluster) == index, "%s: cluster %d is (%d, %d), at %d", text(c).c_str(), index,
            cluster.m, cluster.n, order.cluster_index(cluster));
      visited.push_back(cluster.m * order.clusters_n + cluster.n);
    }
    CHECK(is_permutation_of_all(visited), "%s", text(c).c_str());
  });
}

void tiles_of_a_cluster_are_neighbours_m_fastest() {
  for_tile_orders([](TileCase const& c) {
    TileOrder const order = order_of(c);
    for (int position = 0; position < order.num_tiles(); ++position) {
      int const in_cluster = position % order.cluster_size();
      Tile const first = order.tile_at(position - in_cluster), tile = order.tile_at(position);
      CHECK(first.m % order.cluster_m == 0 && first.n % order.cluster_n == 0, "%s: a cluster begins at (%d, %d)",
            text(c).c_str(), first.m, first.n);
      CHECK(tile.m - first.m == in_cluster % order.cluster_m && tile.n - first.n == in_cluster / order.cluster_m,
            "%s: position %d", text(c).c_str(), position);
    }
  });
}

// Stripe s holds the minor coordinates [s * swizzle, s * swizzle + width); the walk enters a stripe once, goes through
// it line by line along the major direction, and finishes it before the next.
void stripes_are_compact() {
  for_tile_orders([](TileCase const& c) {
    TileOrder const order = order_of(c);
    int const major_size = c.along_n ? order.clusters_n : order.clusters_m;
    int const minor_size = c.along_n ? order.clusters_m : order.clusters_n;
    int index = 0;
    for (int begin = 0; begin < minor_size; begin += c.swizzle) {
      int const end = std::min(begin + c.swizzle, minor_size);
      for (int major = 0; major < major_size; ++major) {
        for (int minor = begin; minor < end; ++minor, ++index) {
          Tile const cluster = order.cluster_at(index);
          CHECK((c.along_n ? cluster.n : cluster.m) == major && (c.along_n ? cluster.m : cluster.n) == minor,
                "%s: cluster %d is (%d, %d)", text(c).c_str(), index, cluster.m, cluster.n);
        }
      }
    }
    CHECK(index == order.num_clusters(), "%s", text(c).c_str());
  });
}

// The picture at the head of tile_order.hpp.
void swizzle_matches_the_picture() {
  int const picture[4][3] = {{0, 2, 4}, {1, 3, 5}, {6, 8, 10}, {7, 9, 11}};
  for (bool along_n : {true, false}) {  // along M the picture is transposed
    TileOrder const order = make_tile_order(along_n ? 4 : 3, along_n ? 3 : 4, {1, 1, 1, 1}, 2, along_n);
    for (int a = 0; a < 4; ++a) {
      for (int b = 0; b < 3; ++b) {
        int const index = order.cluster_index(along_n ? Tile{a, b} : Tile{b, a});
        CHECK(index == picture[a][b], "(%d, %d): %d, drawn %d", a, b, index, picture[a][b]);
      }
    }
  }
}

// The largest grids that fit 32-bit tile coordinates, at their ends.
void large_tile_grids_do_not_overflow() {
  for (int64_t rows : {int64_t{1} << 21, (int64_t{1} << 22) + 1}) {
    for (int64_t cols : {int64_t{1} << 20, (int64_t{1} << 20) - 3}) {
      for (TileShape const& shape : {TileShape{64, 64, 1, 1}, TileShape{128, 128, 2, 1}}) {
        for (int swizzle : {1, 2, 8, 64}) {
          for (bool along_n : {false, true}) {
            TileOrder const order = make_tile_order(rows, cols, shape, swizzle, along_n);
            for (int64_t i = 0; i < 1000; ++i) {
              int const position = static_cast<int>(int64_t{order.num_tiles() - 1} * i / 999);
              Tile const tile = order.tile_at(position);
              CHECK(order.position_of(tile) == position, "position %d of %d", position, order.num_tiles());
              CHECK(tile.m < order.clusters_m * order.cluster_m && tile.n < order.clusters_n * order.cluster_n,
                    "position %d: (%d, %d)", position, tile.m, tile.n);
            }
          }
        }
      }
    }
  }
}

std::vector<Test> order_tests() {
  return {
      TEST(ag_chunks_are_a_permutation_own_first),
      TEST(rs_chunks_are_a_permutation_own_last),
      TEST(pushes_are_consumed_in_the_order_they_are_sent),
      TEST(peer_slots_are_distinct_and_inverse),
      TEST(tile_grid_covers_the_chunk_and_pads_less_than_a_cluster),
      TEST(tile_order_is_a_permutation_with_an_inverse),
      TEST(cluster_order_is_a_permutation_with_an_inverse),
      TEST(tiles_of_a_cluster_are_neighbours_m_fastest),
      TEST(stripes_are_compact),
      TEST(swizzle_matches_the_picture),
      TEST(large_tile_grids_do_not_overflow),
  };
}

}  // namespace
}  // namespace flux::test

int main(int argc, char** argv) {
  auto tests = flux::test::order_tests();
  for (auto const& test : flux::test::pieces_tests()) tests.push_back(test);
  for (auto const& test : flux::test::workspace_tests()) tests.push_back(test);
  for (auto const& test : flux::test::ar_tests()) tests.push_back(test);
  for (auto const& test : flux::test::ar_order_tests()) tests.push_back(test);
  for (auto const& test : flux::test::exchange_tests()) tests.push_back(test);
  for (auto const& test : tests) {
    if (argc < 2) std::printf("%s\n", test.name);
    if (argc > 1 && std::strcmp(argv[1], test.name) == 0) return test.run(), 0;
  }
  return argc < 2 ? 0 : 2;
}
