// Tests of the pieces of a chunk: what they hold, and the order in which a kernel goes through them.

#include <set>
#include <utility>
#include <vector>

#include "schedule/tile_order.hpp"
#include "schedule/workspace_layout.hpp"
#include "schedule_test.hpp"

namespace flux::test {
namespace {

void pieces_cover_every_item_once() {
  for (int items = 0; items <= 300; ++items) {
    for (int wanted = 1; wanted <= kMaxPieces; ++wanted) {
      for (int granule : {1, 2, 4, 7, 64, 128, 1000}) {
        Pieces const pieces = make_pieces(items, wanted, granule);
        CHECK(pieces.count() <= wanted, "%d items, %d wanted, granule %d: %d pieces", items, wanted, granule,
              pieces.count());
        CHECK((pieces.count() == 0) == (items == 0), "%d items: %d pieces", items, pieces.count());
        CHECK(pieces.per_piece >= 1 && pieces.per_piece % granule == 0, "%d a piece", pieces.per_piece);
        int next = 0;
        for (int p = 0; p < pieces.count(); ++p) {
          CHECK(pieces.begin(p) == next && pieces.size(p) >= 1,
                "%d items, %d wanted, granule %d: piece %d is [%d, +%d)", items, wanted, granule, p, pieces.begin(p),
                pieces.size(p));
          for (int i = 0; i < pieces.size(p); ++i, ++next) {
            CHECK(pieces.piece_of(next) == p, "item %d of %d is in piece %d, not %d", next, items,
                  pieces.piece_of(next), p);
          }
        }
        CHECK(next == items, "%d of %d items, %d wanted, granule %d", next, items, wanted, granule);
      }
    }
  }
}

void pieces_of_many_items_do_not_overflow() {
  for (int64_t items : {int64_t{1} << 20, int64_t{1} << 30, (int64_t{1} << 31) - 1000}) {
    for (int wanted : {1, 2, 3, 7, 16}) {
      for (int granule : {1, 128, 999}) {
        Pieces const pieces = make_pieces(items, wanted, granule);
        CHECK(pieces.count() <= wanted, "%lld items: %d pieces", static_cast<long long>(items), pieces.count());
        Wide sum = 0;
        for (int p = 0; p < pieces.count(); ++p) {
          CHECK(Wide{pieces.begin(p)} == sum, "piece %d begins at %d", p, pieces.begin(p));
          sum += pieces.size(p);
          CHECK(pieces.piece_of(pieces.begin(p)) == p, "piece %d begins at %d", p, pieces.begin(p));
          CHECK(pieces.piece_of(pieces.begin(p) + pieces.size(p) - 1) == p, "piece %d", p);
        }
        CHECK(sum == items, "%lld items", static_cast<long long>(items));
      }
    }
  }
}

void rs_items_go_piece_by_piece_own_chunk_last() {
  for (int world : {1, 2, 3, 4, 8, 16}) {
    for (int64_t items : {1, 2, 5, 12, 13, 64}) {
      for (int wanted : {1, 2, 3, 4, 16}) {
        Pieces const pieces = make_pieces(items, wanted, 1);
        int32_t index = 0;
        auto const expect = [&](int step, int32_t item) {
          RsItem const got = rs_item(index, world, pieces);
          CHECK(got.step == step && got.item == item, "world %d, %ld items, %d pieces: %d is (%d, %d), not (%d, %d)",
                world, long(items), pieces.count(), index, got.step, got.item, step, item);
          ++index;
        };
        for (int piece = 0; piece < pieces.count(); ++piece) {
          for (int step = 0; step < world - 1; ++step) {
            for (int i = 0; i < pieces.size(piece); ++i) expect(step, pieces.begin(piece) + i);
          }
        }
        for (int i = 0; i < items; ++i) expect(world - 1, i);
      }
    }
  }
}

// A piece is done when its last item is: rs_piece names them in that order. Those of the last step it names besides.
void rs_pieces_are_named_in_the_order_of_their_items() {
  for (int world : {1, 2, 3, 8}) {
    for (int64_t items : {1, 5, 12, 64}) {
      for (int wanted : {1, 2, 3, 16}) {
        for (bool same_order : {false, true}) {
          Pieces const pieces = make_pieces(items, wanted, 1), parts = interleaved_parts(pieces, same_order);
          std::vector<std::pair<int, int>> done, named;
          std::set<int> last;
          for (int32_t index = 0; index < (world - 1) * items; ++index) {
            auto const [step, item] = rs_item(index, world, parts);
            int const piece = pieces.piece_of(item);
            if (item + 1 == pieces.begin(piece) + pieces.size(piece)) done.emplace_back(step, piece);
          }
          for (int i = 0; i < world * pieces.count(); ++i) {
            auto const [step, piece] = rs_piece(i, world, pieces, parts);
            if (step < world - 1) named.emplace_back(step, piece);
            if (step == world - 1) last.insert(piece);
          }
          CHECK(named == done, "world %d, %ld items, %d pieces, %d parts", world, long(items), pieces.count(),
                parts.count());
          CHECK(int(last.size()) == pieces.count(), "world %d: %zu of the last chunk's pieces", world, last.size());
        }
      }
    }
  }
}

// A kernel walks by clusters of tiles, the copy engine by pieces of tiles: clusters go as their tiles do.
void rs_items_of_clusters_go_as_their_tiles() {
  for (int world : {2, 3, 8}) {
    for (int cluster : {2, 4}) {
      for (int clusters : {1, 3, 10, 33}) {
        for (int wanted : {1, 2, 3, 4}) {
          Pieces const tiles = make_pieces(clusters * cluster, wanted, cluster);
          Pieces const walk{tiles.items / cluster, tiles.per_piece / cluster};
          for (int i = 0; i < world * clusters; ++i) {
            RsItem const of_cluster = rs_item(i, world, walk), of_tile = rs_item(i * cluster, world, tiles);
            CHECK(of_cluster.step == of_tile.step && of_cluster.item * cluster == of_tile.item,
                  "world %d, %d clusters of %d, %d pieces: cluster %d", world, clusters, cluster, tiles.count(), i);
          }
        }
      }
    }
  }
}

void rs_items_of_many_tiles_do_not_overflow() {
  for (int world : {2, 3, 16}) {
    int64_t const items = ((int64_t{1} << 30) - 1) / world;
    for (int wanted : {1, 2, 3, 16}) {
      Pieces const pieces = make_pieces(items, wanted, 1);
      for (int piece : {0, pieces.count() / 2, pieces.count() - 1}) {
        for (int step : {0, world - 2}) {
          for (int i : {0, pieces.size(piece) - 1}) {
            Wide const index = Wide{pieces.begin(piece)} * (world - 1) + Wide{step} * pieces.size(piece) + i;
            RsItem const got = rs_item(static_cast<int32_t>(index), world, pieces);
            CHECK(got.step == step && got.item == pieces.begin(piece) + i, "world %d, piece %d, step %d: (%d, %d)",
                  world, piece, step, got.step, got.item);
          }
        }
      }
      RsItem const last = rs_item(static_cast<int32_t>(items * world - 1), world, pieces);
      CHECK(last.step == world - 1 && last.item == items - 1, "world %d: the last is (%d, %d)", world, last.step,
            last.item);
    }
  }
}

void blocks_of_tiles_are_whole_rows_or_columns() {
  for (int clusters_m : {1, 2, 5, 8}) {
    for (int clusters_n : {1, 3, 8}) {
      for (TileShape const& shape : {TileShape{1, 1, 1, 1}, TileShape{1, 1, 2, 1}, TileShape{1, 1, 1, 2}}) {
        for (int swizzle : {1, 2, 4, 64}) {
          for (bool along_n : {false, true}) {
            TileOrder const order = make_tile_order(int64_t{clusters_m} * shape.cluster_m,
                                                    int64_t{clusters_n} * shape.cluster_n, shape, swizzle, along_n);
            int const stripes = ceil_div(along_n ? clusters_m : clusters_n, swizzle);
            Pieces const blocks = make_pieces(order.num_tiles(), order.num_tiles(), order.tiles_of_block());
            CHECK(blocks.count() == (stripes > 1 ? stripes
                                     : along_n   ? clusters_n
                                                 : clusters_m),
                  "%d blocks of %d x %d", blocks.count(), clusters_m, clusters_n);
            for (int b = 0; b < blocks.count(); ++b) {
              Tile const first = order.tile_at(blocks.begin(b));
              Tile const last = order.tile_at(blocks.begin(b) + blocks.size(b) - 1);
              CHECK((last.m - first.m + 1) * (last.n - first.n + 1) == blocks.size(b), "block %d is no rectangle", b);
              for (int i = blocks.begin(b); i < blocks.begin(b) + blocks.size(b); ++i) {
                Tile const tile = order.tile_at(i);
                CHECK(first.m <= tile.m && tile.m <= last.m && first.n <= tile.n && tile.n <= last.n,
                      "tile (%d, %d) is not in block %d", tile.m, tile.n, b);
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace

std::vector<Test> pieces_tests() {
  return {
      TEST(pieces_cover_every_item_once),
      TEST(pieces_of_many_items_do_not_overflow),
      TEST(rs_items_go_piece_by_piece_own_chunk_last),
      TEST(rs_pieces_are_named_in_the_order_of_their_items),
      TEST(rs_items_of_clusters_go_as_their_tiles),
      TEST(rs_items_of_many_tiles_do_not_overflow),
      TEST(blocks_of_tiles_are_whole_rows_or_columns),
  };
}

}  // namespace flux::test
