#include "cuda/library_gemm.hpp"

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAFunctions.h>

#include "ops/data_type.hpp"

namespace flux::cuda {
namespace {

at::Tensor view(void const* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::TensorOptions const& options) {
  return at::for_blob(const_cast<void*>(data), sizes)
      .strides(strides)
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

}  // namespace

LibraryGemm::LibraryGemm(Problem const& p, Operands const& o)
    : options_(at::TensorOptions(row_of(p.dtype).scalar).device(c10::DeviceType::CUDA, c10::cuda::current_device())) {
  weight_ = p.weight_transposed ? matrix(o.weight, p.k, p.n, o.weight_stride)
                                : matrix(o.weight, p.n, p.k, o.weight_stride).t();
  if (o.bias != nullptr) bias_ = view(o.bias, {p.n}, {1}, options_);
}

at::Tensor LibraryGemm::matrix(void const* data, int64_t rows, int64_t cols, int64_t row_stride) const {
  return view(data, {rows, cols}, {row_stride, 1}, options_);
}

at::Tensor LibraryGemm::batch(void const* data, int64_t count, int64_t stride, int64_t rows, int64_t cols,
                              int64_t row_stride) const {
  return view(data, {count, rows, cols}, {stride, row_stride, 1}, options_);
}

at::Tensor LibraryGemm::empty(int64_t rows, int64_t cols) const { return at::empty({rows, cols}, options_); }

void LibraryGemm::product(at::Tensor out, at::Tensor const& x, bool with_bias) const {
  if (with_bias && bias_.defined()) {
    at::addmm_out(out, bias_, x, weight_);
  } else {
    at::mm_out(out, x, weight_);
  }
}

void LibraryGemm::batched_product(at::Tensor out, at::Tensor const& x) const {
  at::Tensor const weight = weight_.unsqueeze(0).expand({x.size(0), -1, -1});
  if (bias_.defined()) {
    at::baddbmm_out(out, bias_.expand(out.sizes()), x, weight);
  } else {
    at::bmm_out(out, x, weight);
  }
}

void LibraryGemm::add_product(at::Tensor sums, at::Tensor const& x, int64_t k) const {
  at::Tensor const weight = weight_.narrow(0, k, x.size(1));
  if (sums.scalar_type() == x.scalar_type()) {
    if (k > 0) {
      at::addmm_out(sums, sums, x, weight);
    } else if (bias_.defined()) {
      at::addmm_out(sums, bias_, x, weight);
    } else {
      at::mm_out(sums, x, weight);
    }
  } else if (k > 0) {
    at::addmm_out(sums, sums, x, weight, sums.scalar_type());
  } else {
    at::mm_out(sums, x, weight, sums.scalar_type());
  }
}

void LibraryGemm::finish(at::Tensor out, at::Tensor const& sums) const {
  if (bias_.defined()) {
    at::add_out(out, sums, bias_);
  } else {
    out.copy_(sums);
  }
}

}  // namespace flux::cuda
