// The operators under torch.autocast: they take their operands in its dtype, as the products of torch do; float64 stays
// as it is. A weight in float32 is cast once in a region. flux_ops/autocast.py does it for the fallback.

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops/find_op.hpp"

namespace flux {
namespace {

template <class Op, class... Options>
auto call_in_autocast_dtype(Op const& op, at::Tensor const& x, at::Tensor const& weight,
                            std::optional<at::Tensor> const& bias, Options const&... options) {
  c10::impl::ExcludeDispatchKeyGuard const guard(c10::autocast_dispatch_keyset);
  c10::DeviceType const device = x.device().type();
  at::ScalarType const dtype = at::autocast::get_autocast_dtype(device);
  auto const cast = [&](at::Tensor const& t) { return at::autocast::cached_cast(dtype, t, device); };
  std::optional<at::Tensor> const cast_bias = bias ? std::optional(cast(*bias)) : std::nullopt;
  return op.call(cast(x), cast(weight), cast_bias, options...);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> ag_gemm_autocast(at::Tensor const& x, at::Tensor const& weight,
                                                    std::optional<at::Tensor> const& bias,
                                                    std::string const& group_name, bool return_gathered,
                                                    std::string const& strategy) {
  return call_in_autocast_dtype(ag_gemm_op(), x, weight, bias, group_name, return_gathered, strategy);
}

at::Tensor gemm_rs_autocast(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                            std::string const& group_name, std::string const& strategy) {
  return call_in_autocast_dtype(gemm_rs_op(), x, weight, bias, group_name, strategy);
}

at::Tensor gemm_ar_autocast(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                            std::string const& group_name, std::string const& strategy) {
  return call_in_autocast_dtype(gemm_ar_op(), x, weight, bias, group_name, strategy);
}

}  // namespace flux
