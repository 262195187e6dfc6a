#include "cpu/tile_gemm.hpp"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "ops/data_type.hpp"

namespace flux::cpu {

TileRange tile_range(int64_t rows, int64_t cols, TileShape shape, Tile tile) {
  int64_t const row = int64_t{tile.m} * shape.tile_m, col = int64_t{tile.n} * shape.tile_n;
  return {row, std::min<int64_t>(shape.tile_m, rows - row), col, std::min<int64_t>(shape.tile_n, cols - col)};
}

at::ScalarType accumulation_type(DataType dtype) { return dtype == DataType::kFloat64 ? at::kDouble : at::kFloat; }

at::Tensor view_matrix(DataType dtype, void const* data, int64_t rows, int64_t cols, int64_t row_stride) {
  return at::from_blob(const_cast<void*>(data), {rows, cols}, {row_stride, 1}, at::TensorOptions(row_of(dtype).scalar));
}

at::Tensor tile_product(Problem const& p, Operands const& o, at::Tensor const& x_rows, TileRange const& range) {
  at::ScalarType const type = accumulation_type(p.dtype);
  auto const* const weight = static_cast<std::byte const*>(o.weight);
  int64_t const size = element_size(p.dtype);
  at::Tensor w;  // [k, cols]
  if (p.weight_transposed) {
    w = view_matrix(p.dtype, weight + range.col * size, p.k, range.cols, o.weight_stride);
  } else {
    w = view_matrix(p.dtype, weight + range.col * o.weight_stride * size, range.cols, p.k, o.weight_stride).t();
  }
  return at::mm(x_rows.to(type), w.to(type));
}

void write_result(Problem const& p, Operands const& o, at::Tensor total, int64_t y_row, TileRange const& range) {
  int64_t const size = element_size(p.dtype);
  if (o.bias != nullptr) {
    total.add_(
        view_matrix(p.dtype, static_cast<std::byte const*>(o.bias) + range.col * size, 1, range.cols, range.cols));
  }
  std::byte* const y = static_cast<std::byte*>(o.y) + (y_row * p.n + range.col) * size;
  view_matrix(p.dtype, y, range.rows, range.cols, p.n).copy_(total);
}

}  // namespace flux::cpu
