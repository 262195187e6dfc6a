#pragma once
// Order of the output tiles inside one chunk, and the map tile -> position -> piece.
//
// A chunk is cut into tiles of tile_m x tile_n; cluster_m x cluster_n neighbouring tiles form a cluster, whose tiles
// run at the same time. The grid is padded to whole clusters. Clusters are walked along the major direction in
// stripes that are `swizzle` clusters wide, so that a wave of CTAs touches a compact block of A and B in the L2:
//
//   along_n, swizzle 2, 4 x 3 clusters        (rows of the picture = clusters along M, columns along N)
//        0  2  4
//        1  3  5
//        6  8 10
//        7  9 11
//
// The last stripe may be narrower. `position` counts tiles in that order: cluster * cluster_size + tile in cluster.

#include "schedule/host_device.hpp"

namespace flux {

struct Tile {
  int32_t m, n;  // tile coordinates in the chunk; m may lie past the last row tile in a padded cluster
};

struct TileOrder {
  int32_t clusters_m, clusters_n;  // size of the padded grid, in clusters
  int32_t cluster_m, cluster_n;    // tiles of a cluster
  int32_t swizzle;                 // width of a stripe, in clusters
  int32_t along_n;                 // 1: walk along N (stripes are bands of M), 0: along M

  FLUX_HD int32_t cluster_size() const { return cluster_m * cluster_n; }
  FLUX_HD int32_t num_clusters() const { return clusters_m * clusters_n; }
  FLUX_HD int32_t num_tiles() const { return num_clusters() * cluster_size(); }

  // Cluster coordinates of the cluster at `index` in the walk.
  FLUX_HD Tile cluster_at(int32_t index) const {
    int32_t const major_size = along_n ? clusters_n : clusters_m;
    int32_t const minor_size = along_n ? clusters_m : clusters_n;
    int32_t const stripe = index / (swizzle * major_size);
    int32_t const in_stripe = index - stripe * swizzle * major_size;
    int32_t const left = minor_size - stripe * swizzle;
    int32_t const width = left < swizzle ? left : swizzle;
    int32_t const major = in_stripe / width;
    int32_t const minor = stripe * swizzle + in_stripe - major * width;
    return along_n ? Tile{minor, major} : Tile{major, minor};
  }

  // Position of a cluster in the walk: the inverse of cluster_at.
  FLUX_HD int32_t cluster_index(Tile cluster) const {
    int32_t const major_size = along_n ? clusters_n : clusters_m;
    int32_t const minor_size = along_n ? clusters_m : clusters_n;
    int32_t const major = along_n ? cluster.n : cluster.m;
    int32_t const minor = along_n ? cluster.m : cluster.n;
    int32_t const stripe = minor / swizzle;
    int32_t const left = minor_size - stripe * swizzle;
    int32_t const width = left < swizzle ? left : swizzle;
    return stripe * swizzle * major_size + major * width + minor - stripe * swizzle;
  }

  FLUX_HD Tile tile_at(int32_t position) const {
    int32_t const cluster = position / cluster_size();
    int32_t const in_cluster = position - cluster * cluster_size();
    Tile const c = cluster_at(cluster);
    int32_t const dm = in_cluster % cluster_m;  // M fastest inside a cluster, as hardware numbers cluster blocks
    int32_t const dn = in_cluster / cluster_m;
    return {c.m * cluster_m + dm, c.n * cluster_n + dn};
  }

  // The fewest tiles, counted from a multiple of them on, that make up a block of whole rows or columns of the chunk: a
  // stripe, or one step of its walk if there is but one.
  FLUX_HD int32_t tiles_of_block() const {
    int32_t const major_size = along_n ? clusters_n : clusters_m;
    int32_t const minor_size = along_n ? clusters_m : clusters_n;
    return cluster_size() * (minor_size <= swizzle ? minor_size : swizzle * major_size);
  }

  FLUX_HD int32_t position_of(Tile tile) const {
    Tile const c{tile.m / cluster_m, tile.n / cluster_n};
    int32_t const dm = tile.m - c.m * cluster_m;
    int32_t const dn = tile.n - c.n * cluster_n;
    return cluster_index(c) * cluster_size() + dn * cluster_m + dm;
  }
};

// Of the numbers in [begin, end), those that CTA or cluster `c` of `count` takes: c, c + count, c + 2 count ...
FLUX_HD int64_t num_turns(int64_t begin, int64_t end, int32_t c, int32_t count) {
  auto const below = [&](int64_t x) { return x > c ? (x - 1 - c) / count + 1 : 0; };
  return below(end) - below(begin);
}

struct TileShape {
  int32_t tile_m, tile_n;
  int32_t cluster_m, cluster_n;
};

// The order of the tiles of a chunk of `rows` x `cols`.
FLUX_HD TileOrder make_tile_order(int64_t rows, int64_t cols, TileShape shape, int32_t swizzle, bool along_n) {
  TileOrder order;
  order.clusters_m = static_cast<int32_t>(ceil_div(rows, int64_t{shape.tile_m} * shape.cluster_m));
  order.clusters_n = static_cast<int32_t>(ceil_div(cols, int64_t{shape.tile_n} * shape.cluster_n));
  order.cluster_m = shape.cluster_m;
  order.cluster_n = shape.cluster_n;
  order.swizzle = swizzle;
  order.along_n = along_n ? 1 : 0;
  return order;
}

// A chunk travels in pieces, each with one signal. `items` are rows of a shard (ag_gemm) or tile positions
// (gemm_rs); piece p holds items [p * per_piece, min((p + 1) * per_piece, items)).
struct Pieces {
  int32_t items;
  int32_t per_piece;

  FLUX_HD int32_t count() const { return items == 0 ? 0 : (items - 1) / per_piece + 1; }
  FLUX_HD int32_t piece_of(int32_t item) const { return item / per_piece; }
  FLUX_HD int32_t begin(int32_t piece) const { return piece * per_piece; }
  FLUX_HD int32_t size(int32_t piece) const {
    int32_t const left = items - begin(piece);
    return left < per_piece ? left : per_piece;
  }
};

// `items` cut into at most `wanted` pieces, each a multiple of `granule` except the last.
FLUX_HD Pieces make_pieces(int64_t items, int32_t wanted, int32_t granule) {
  int64_t const per_piece = round_up(ceil_div(items, wanted), granule);
  return {static_cast<int32_t>(items), static_cast<int32_t>(per_piece < granule ? granule : per_piece)};
}

// gemm_rs interleaves the chunks of its peers: piece 0 of each, next rank first, then piece 1 of each ...,
// and the own chunk last. Where a piece is a band of columns, its part of the weight is read once for all peers: it
// stays in the L2 meanwhile. And the pieces leave in the order in which their owners need them. With one piece it is
// one chunk after the other.
struct RsItem {
  int step;      // of rs_chunk
  int32_t item;  // of the chunk
};
// `parts`: what is interleaved, from interleaved_parts.
FLUX_HD RsItem rs_item(int32_t index, int world, Pieces const& parts) {
  int32_t const of_own = index - (world - 1) * parts.items;
  if (of_own >= 0) return {world - 1, of_own};
  int32_t const of_all = (world - 1) * parts.per_piece;  // a part of each peer's chunk
  int32_t const part = index / of_all, in_all = index - part * of_all;
  int32_t const step = in_all / parts.size(part);
  return {step, parts.begin(part) + in_all - step * parts.size(part)};
}
// A part is a piece; where all ranks take the order of one (kSameOrder), it is the whole chunk.
FLUX_HD Pieces interleaved_parts(Pieces const& pieces, bool same_order) {
  return same_order ? Pieces{pieces.items, pieces.items} : pieces;
}

// The order in which rs_item completes the pieces of the peers; index in [0, world * pieces.count()). It names those of
// the own chunk, too, which nobody pushes: in the last step, unless all ranks take the order of one.
struct RsPiece {
  int step;  // of rs_chunk
  int piece;
};
FLUX_HD RsPiece rs_piece(int index, int world, Pieces const& pieces, Pieces const& parts) {
  int const of_part = pieces.count() / parts.count();
  int const part = index / (world * of_part), in_all = index - part * world * of_part;
  return {in_all / of_part, part * of_part + in_all % of_part};
}

}  // namespace flux
