#pragma once
// Tensors over the operands of a call, and the product of one tile in the accumulation type: fp64 for fp64, fp32 for
// everything else.

#include <ATen/core/Tensor.h>

#include "ops/problem.hpp"
#include "schedule/tile_order.hpp"

namespace flux::cpu {

// Part of a chunk of rows x cols that a tile covers, cut at the edges of the chunk. `rows` may be 0 or less: the chunk
// ends before the tile.
struct TileRange {
  int64_t row, rows;
  int64_t col, cols;
};
TileRange tile_range(int64_t rows, int64_t cols, TileShape shape, Tile tile);

at::ScalarType accumulation_type(DataType dtype);

// A [rows, cols] view of memory with unit stride along cols.
at::Tensor view_matrix(DataType dtype, void const* data, int64_t rows, int64_t cols, int64_t row_stride);

// x_rows[rows, k] . weight[col : col + cols, k]^T in the accumulation type.
at::Tensor tile_product(Problem const& problem, Operands const& operands, at::Tensor const& x_rows,
                        TileRange const& range);

// y[row, col ...] = round(total + bias): the only rounding of a result.
void write_result(Problem const& problem, Operands const& operands, at::Tensor total, int64_t y_row,
                  TileRange const& range);

}  // namespace flux::cpu
