#pragma once
// The reduced rows of gemm_ar for many rows, as they travel: each piece of a chunk as one block of rows and columns of
// y. So the pieces of plan and kernel, which count tile positions, are multiples of TileOrder::tiles_of_block.

#include "schedule/ar_schedule.hpp"
#include "schedule/tile_order.hpp"

namespace flux {

// Part of a chunk of y: rows [row, row + rows), bytes [column, column + width) of each.
struct ArBlock {
  int64_t row, rows;
  int64_t column, width;
};

// Its pieces are numbered through the sections.
struct ArResults {
  int rank, world, sections;
  int64_t chunk_rows;
  int64_t row_bytes;  // a multiple of 16
  TileOrder order;    // of the tiles of a chunk
  Pieces pieces;      // of their positions
  int32_t tile_rows;
  int64_t tile_width;  // bytes, a multiple of 16

  FLUX_HD int num_pieces() const { return sections * pieces.count(); }
  FLUX_HD int section_of(int number) const { return number / pieces.count(); }
  // How many have been sent once those that follow the partials of `section` are: of all sections before; at last all.
  FLUX_HD int sent_after_partials_of(int section) const {
    return section == sections - 1 ? num_pieces() : section * pieces.count();
  }
  FLUX_HD ArBlock block(int number) const {
    int const piece = number % pieces.count();
    Tile const first = order.tile_at(pieces.begin(piece));
    Tile const last = order.tile_at(pieces.begin(piece) + pieces.size(piece) - 1);
    int64_t const row = int64_t{first.m} * tile_rows, end_row = (int64_t{last.m} + 1) * tile_rows;
    int64_t const column = first.n * tile_width, end_column = (last.n + 1) * tile_width;
    return {row, (end_row < chunk_rows ? end_row : chunk_rows) - row, column,
            (end_column < row_bytes ? end_column : row_bytes) - column};
  }
  // In y, and among the results of one owner.
  FLUX_HD int64_t offset(ArChunk chunk, ArBlock const& block) const {
    return (ar_chunk_index(chunk, world) * chunk_rows + block.row) * row_bytes + block.column;
  }
  FLUX_HD int64_t offset_of_owner(int section, ArBlock const& block) const {
    return (section * chunk_rows + block.row) * row_bytes + block.column;
  }
  FLUX_HD int64_t bytes_of_owner() const { return sections * chunk_rows * row_bytes; }
  // Those of the partials come first.
  FLUX_HD int signal(int number) const { return num_pieces() + number; }
};

}  // namespace flux
