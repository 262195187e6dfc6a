#include "ops/arguments.hpp"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <sstream>

#include "ops/choose.hpp"
#include "ops/data_type.hpp"

namespace flux {
namespace {

constexpr int64_t kAlignment = 16;  // bytes, of operand addresses and of row strides

bool is_aligned(at::Tensor const& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment == 0; }

// A contiguous copy that begins at an aligned address even where `t` is contiguous already.
at::Tensor aligned_copy(at::Tensor const& t) {
  at::Tensor copy = at::empty(t.sizes(), t.options());
  copy.copy_(t);
  return copy;
}

at::Tensor aligned_contiguous(at::Tensor const& t) { return t.is_contiguous() && is_aligned(t) ? t : aligned_copy(t); }

DataType data_type(Arguments const& args) {
  auto const* row = find_data_type([&](DataTypeRow const& r) { return r.scalar == args.x.scalar_type(); });
  TORCH_CHECK_NOT_IMPLEMENTED(row != nullptr, op_name(args.op), ": x has dtype ", args.x.scalar_type(),
                              "; supported are ", kDataTypeNames, ".");
  return row->type;
}

}  // namespace

Problem check_arguments(Arguments const& args, int rank, int world) {
  char const* op = op_name(args.op);
  at::Tensor const& x = args.x;
  at::Tensor const& weight = args.weight;
  TORCH_CHECK_TYPE(x.defined() && weight.defined(), op, ": ", x.defined() ? "weight" : "x",
                   " is None; it must be a tensor.");
  TORCH_CHECK_VALUE(is_allowed_strategy(args.strategy), op, ": strategy is '", args.strategy, "'; allowed are ",
                    kAllowedStrategies, ".");
  TORCH_CHECK_VALUE(x.dim() >= 2, op, ": x must have at least 2 dimensions, [tokens, ..., K]; it has shape ", x.sizes(),
                    ".");
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight must have 2 dimensions, [N, K]; it has shape ", weight.sizes(),
                    ".");
  DataType const dtype = data_type(args);
  TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type(), op, ": weight has dtype ", weight.scalar_type(),
                   " but x has dtype ", x.scalar_type(), "; they must be the same.");
  TORCH_CHECK_VALUE(weight.device() == x.device(), op, ": weight is on ", weight.device(), " but x is on ", x.device(),
                    "; they must be on the same device.");
  int64_t const k = x.size(-1);
  int64_t const n = weight.size(0);
  TORCH_CHECK_VALUE(weight.size(1) == k, op, ": weight has shape ", weight.sizes(), " [N, K] but x has shape ",
                    x.sizes(), " [..., K]: K is ", weight.size(1), " in weight and ", k, " in x.");
  if (args.has_bias()) {
    at::Tensor const& bias = *args.bias;
    TORCH_CHECK_TYPE(bias.scalar_type() == x.scalar_type(), op, ": bias has dtype ", bias.scalar_type(),
                     " but x has dtype ", x.scalar_type(), "; they must be the same.");
    TORCH_CHECK_VALUE(bias.device() == x.device(), op, ": bias is on ", bias.device(), " but x is on ", x.device(),
                      "; they must be on the same device.");
    TORCH_CHECK_VALUE(bias.dim() == 1 && bias.size(0) == n, op, ": bias must have shape [", n,
                      "], the rows N of weight; it has shape ", bias.sizes(), ".");
  }

  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  if (args.op == Op::kGemmRs) {
    TORCH_CHECK_VALUE(x.size(0) % world == 0, op, ": dimension 0 of x, M = ", x.size(0),
                      ", is scattered and must be a multiple of the number of ranks, TP = ", world, "; x has shape ",
                      x.sizes(), ".");
    rows /= world;
  }
  return {
      args.op, rank, world, rows, n, k, dtype, is_weight_transposed(weight), std::string(asked_config(args.strategy))};
}

bool is_weight_transposed(at::Tensor const& weight) {
  int64_t const n = weight.size(0), k = weight.size(1);
  bool const unit_along_k = weight.stride(1) == 1 || k <= 1;
  bool const unit_along_n = weight.stride(0) == 1 && n > 1;
  if (unit_along_k && (weight.stride(0) >= k || n <= 1)) return false;
  return unit_along_n && weight.stride(1) >= n;
}

PreparedOperands prepare_operands(Arguments const& args, Problem const& problem, at::Tensor const& y,
                                  at::Tensor const* gathered) {
  PreparedOperands p;
  p.x = aligned_contiguous(args.x);
  if (args.has_bias()) p.bias = aligned_contiguous(*args.bias);

  // Rows run along k, or along n where the weight is transposed, with unit stride.
  int const along = problem.weight_transposed ? 0 : 1;
  int64_t const length = args.weight.size(along);
  int64_t stride = args.weight.stride(1 - along);
  bool const unit = args.weight.stride(along) == 1 || length <= 1;
  bool const separate = stride >= length;
  bool const on_grid = stride * element_size(problem.dtype) % kAlignment == 0 || stride == length;
  p.weight = args.weight;
  if (!unit || !separate || !on_grid || !is_aligned(args.weight)) {
    p.weight = aligned_copy(problem.weight_transposed ? args.weight.t() : args.weight);
    stride = p.weight.stride(0);
  }

  p.operands.x = p.x.const_data_ptr();
  p.operands.weight = p.weight.const_data_ptr();
  p.operands.weight_stride = stride;
  p.operands.bias = p.bias.defined() ? p.bias.const_data_ptr() : nullptr;
  p.operands.y = y.mutable_data_ptr();
  p.operands.gathered = gathered != nullptr ? gathered->mutable_data_ptr() : nullptr;
  return p;
}

std::vector<int64_t> result_shape(Arguments const& args, Problem const& problem) {
  std::vector<int64_t> shape = args.x.sizes().vec();
  if (args.op == Op::kAgGemm) shape.front() *= problem.world;
  if (args.op == Op::kGemmRs) shape.front() /= problem.world;
  shape.back() = problem.n;
  return shape;
}

std::vector<int64_t> gathered_shape(Arguments const& args, Problem const& problem) {
  std::vector<int64_t> shape = args.x.sizes().vec();
  shape.front() *= problem.world;
  return shape;
}

std::string describe(Arguments const& args, Problem const& problem) {
  std::ostringstream s;
  s << op_name(args.op) << "(x " << args.x.sizes() << ", weight " << args.weight.sizes();
  if (problem.weight_transposed) s << " transposed view";
  s << (args.has_bias() ? ", bias" : ", no bias") << ", " << args.x.scalar_type() << " on " << args.x.device().type();
  if (args.return_gathered) s << ", return_gathered";
  s << ", strategy '" << args.strategy << "')";
  return s.str();
}

}  // namespace flux
