#pragma once
// The operators, as bindings.cpp registers them.

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <optional>
#include <string>
#include <tuple>

namespace flux {

std::tuple<at::Tensor, at::Tensor> ag_gemm(at::Tensor const& x, at::Tensor const& weight,
                                           std::optional<at::Tensor> const& bias, std::string const& group_name,
                                           bool return_gathered, std::string const& strategy);
at::Tensor gemm_rs(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                   std::string const& group_name, std::string const& strategy);
at::Tensor gemm_ar(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                   std::string const& group_name, std::string const& strategy);

// Shapes only: the same results as tensors without storage, for symbolic sizes too.
std::tuple<at::Tensor, at::Tensor> ag_gemm_meta(at::Tensor const& x, at::Tensor const& weight,
                                                std::optional<at::Tensor> const& bias, std::string const& group_name,
                                                bool return_gathered, std::string const& strategy);
at::Tensor gemm_rs_meta(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                        std::string const& group_name, std::string const& strategy);
at::Tensor gemm_ar_meta(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                        std::string const& group_name, std::string const& strategy);

// The same results, differentiable; `keys` are those of the dispatcher.
std::tuple<at::Tensor, at::Tensor> ag_gemm_autograd(c10::DispatchKeySet keys, at::Tensor const& x,
                                                    at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                                                    std::string const& group_name, bool return_gathered,
                                                    std::string const& strategy);
at::Tensor gemm_rs_autograd(c10::DispatchKeySet keys, at::Tensor const& x, at::Tensor const& weight,
                            std::optional<at::Tensor> const& bias, std::string const& group_name,
                            std::string const& strategy);
at::Tensor gemm_ar_autograd(c10::DispatchKeySet keys, at::Tensor const& x, at::Tensor const& weight,
                            std::optional<at::Tensor> const& bias, std::string const& group_name,
                            std::string const& strategy);

// The same with the operands in the dtype of torch.autocast.
std::tuple<at::Tensor, at::Tensor> ag_gemm_autocast(at::Tensor const& x, at::Tensor const& weight,
                                                    std::optional<at::Tensor> const& bias,
                                                    std::string const& group_name, bool return_gathered,
                                                    std::string const& strategy);
at::Tensor gemm_rs_autocast(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                            std::string const& group_name, std::string const& strategy);
at::Tensor gemm_ar_autocast(at::Tensor const& x, at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                            std::string const& group_name, std::string const& strategy);

}  // namespace flux
