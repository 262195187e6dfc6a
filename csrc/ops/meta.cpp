// Shapes and dtypes of the results, for FakeTensor and torch.compile: nothing here looks at a concrete size unless
// the result depends on it.

#include <ATen/ops/empty.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include "ops/choose.hpp"
#include "ops/group_state.hpp"
#include "ops/hooks.hpp"
#include "ops/ops.hpp"

namespace flux {
namespace {

// Checks what the real operator refuses, and returns the number of ranks.
int64_t check_meta(char const* op, at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                   std::string const& group_name, std::string const& strategy) {
  TORCH_CHECK_VALUE(is_allowed_strategy(strategy), op, ": strategy is '", strategy, "'; allowed are ",
                    kAllowedStrategies, ".");
  TORCH_CHECK_VALUE(x.dim() >= 2, op, ": x must have at least 2 dimensions, [tokens, ..., K]; it has ", x.dim(), ".");
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight must have 2 dimensions, [N, K]; it has ", weight.dim(), ".");
  TORCH_CHECK_TYPE(weight.scalar_type() == x.scalar_type(), op, ": weight has dtype ", weight.scalar_type(),
                   " but x has dtype ", x.scalar_type(), "; they must be the same.");
  for (auto const& [name, tensor] : {std::pair{"weight", weight}, std::pair{"bias", bias.value_or(at::Tensor())}}) {
    TORCH_CHECK_VALUE(!tensor.defined() || tensor.device() == x.device(), op, ": ", name, " is on ", tensor.device(),
                      " but x is on ", x.device(), "; they must be on the same device.");
  }
  TORCH_CHECK_VALUE(weight.sym_size(1).sym_eq(x.sym_size(-1)).expect_true(__FILE__, __LINE__), op, ": K is ",
                    weight.sym_size(1), " in weight and ", x.sym_size(-1), " in x.");
  if (bias.has_value() && bias->defined()) {
    TORCH_CHECK_TYPE(bias->scalar_type() == x.scalar_type(), op, ": bias has dtype ", bias->scalar_type(),
                     " but x has dtype ", x.scalar_type(), "; they must be the same.");
    TORCH_CHECK_VALUE(bias->dim() == 1, op, ": bias must have shape [N]; it has ", bias->dim(), " dimensions.");
    TORCH_CHECK_VALUE(bias->sym_size(0).sym_eq(weight.sym_size(0)).expect_true(__FILE__, __LINE__), op, ": bias has ",
                      bias->sym_size(0), " elements; weight has N = ", weight.sym_size(0), " rows.");
  }
  int64_t const world = resolve_group(op, group_name)->getSize();
  hooks().traced(group_name, world);
  return world;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> ag_gemm_meta(at::Tensor const& x, at::Tensor const& weight,
                                                std::optional<at::Tensor> const& bias, std::string const& group_name,
                                                bool return_gathered, std::string const& strategy) {
  int64_t const world = check_meta("ag_gemm", x, weight, bias, group_name, strategy);
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  shape.front() = shape.front() * world;
  at::Tensor const gathered = return_gathered ? at::empty_symint(shape, x.options()) : at::empty({0}, x.options());
  shape.back() = weight.sym_size(0);
  return {at::empty_symint(shape, x.options()), gathered};
}

at::Tensor gemm_rs_meta(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                        std::string const& group_name, std::string const& strategy) {
  int64_t const world = check_meta("gemm_rs", x, weight, bias, group_name, strategy);
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  TORCH_CHECK_VALUE((shape.front() % world).sym_eq(0).expect_true(__FILE__, __LINE__),
                    "gemm_rs: dimension 0 of x, M = ", shape.front(),
                    ", is scattered and must be a multiple of the number of ranks, TP = ", world, ".");
  shape.front() = shape.front() / world;
  shape.back() = weight.sym_size(0);
  return at::empty_symint(shape, x.options());
}

at::Tensor gemm_ar_meta(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                        std::string const& group_name, std::string const& strategy) {
  check_meta("gemm_ar", x, weight, bias, group_name, strategy);
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  shape.back() = weight.sym_size(0);
  return at::empty_symint(shape, x.options());
}

}  // namespace flux
