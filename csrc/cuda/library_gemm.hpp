#pragma once
// cuBLAS products through ATen on the current stream, on views of the operands of one call.

#include <ATen/core/Tensor.h>

#include "ops/problem.hpp"

namespace flux::cuda {

class LibraryGemm {
 public:
  LibraryGemm(Problem const& problem, Operands const& operands);

  // A view of memory of this device as [rows, cols] with unit stride along cols.
  at::Tensor matrix(void const* data, int64_t rows, int64_t cols, int64_t row_stride) const;
  // The same as [batch, rows, cols].
  at::Tensor batch(void const* data, int64_t count, int64_t stride, int64_t rows, int64_t cols,
                   int64_t row_stride) const;

  // Memory of its own.
  at::Tensor empty(int64_t rows, int64_t cols) const;

  // out[rows, n] = x[rows, k] . w^T (+ bias)
  void product(at::Tensor out, at::Tensor const& x, bool with_bias) const;
  // out[b, rows, n] = x[b, rows, k] . w^T + bias, one GEMM
  void batched_product(at::Tensor out, at::Tensor const& x) const;
  // sums[rows, n] += x[rows, ks] . w[:, k : k + ks]^T; the first one, k = 0, puts bias, or 0, in the place of what is
  // there. 16-bit products may be added up in fp32: then finish() adds the bias.
  void add_product(at::Tensor sums, at::Tensor const& x, int64_t k) const;
  // out = round(sums + bias)
  void finish(at::Tensor out, at::Tensor const& sums) const;

 private:
  at::TensorOptions options_;
  at::Tensor weight_;  // [k, n], a view
  at::Tensor bias_;
};

}  // namespace flux::cuda
