// Derivatives of the operators. The gradient of a gather is a reduction, and the reverse: ag_gemm and gemm_rs are each
// the other's.
//
//   ag_gemm   Y = all_gather(X) . W^T + b       dX = reduce_scatter(dY . W)   dW = dY^T . all_gather(X)   db = sum dY
//   gemm_rs   Y = reduce_scatter(X . W^T) + b   dX = all_gather(dY) . W       dW = all_gather(dY)^T . X   db = sum dY
//   gemm_ar   Y = all_reduce(X . W^T) + b       dX = dY . W                   dW = dY^T . X                 db = sum dY
//
// Where the gathered operand of ag_gemm is used elsewhere, too, and so has a gradient dG, dX is reduce_scatter(dG + dY
// . W): a plain product and one collective, beside which dW is computed.
//
// gemm_ar leaves Y, and so dY, alike on all ranks: its backward needs no communication. The db of ag_gemm and gemm_ar
// is complete. gemm_rs's db is the sum over the rows of this rank: as for every parameter that all ranks hold alike
// under sequence parallelism, adding it up over the ranks is the caller's.
//
// The weight goes into the backward product as a transposed view, without a copy. Nothing is computed, or kept, for an
// input that needs no gradient. The backward calls through the dispatcher, so it can be traced like the forward.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "ops/dispatch.hpp"
#include "ops/find_op.hpp"
#include "ops/group_state.hpp"

namespace flux {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor wait(at::Tensor const& work) {
  static auto const op = find_op<at::Tensor(at::Tensor const&)>("_c10d_functional::wait_tensor");
  return op.call(work);
}

// A functional collective, whose result is there after `wait`. The call is boxed because the C++ type of the group
// depends on torch's version: a string, or a value of any type, among them a string.
template <class... Args>
at::Tensor start_collective(c10::OperatorHandle const& op, Args const&... args) {
  torch::jit::Stack stack{c10::IValue(args)...};
  op.callBoxed(stack);
  return stack.at(0).toTensor();
}

at::Tensor start_all_gather(at::Tensor const& x, std::string const& group_name) {
  static auto const op = c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::all_gather_into_tensor", "");
  return start_collective(op, x.contiguous(), resolve_group("all_gather", group_name)->getSize(), group_name);
}

at::Tensor start_reduce_scatter(at::Tensor const& x, std::string const& group_name) {
  static auto const op = c10::Dispatcher::singleton().findSchemaOrThrow("_c10d_functional::reduce_scatter_tensor", "");
  int64_t const world = resolve_group("reduce_scatter", group_name)->getSize();
  return start_collective(op, x.contiguous(), "sum", world, group_name);
}

// dY^T . X over all tokens: [N, K].
at::Tensor weight_grad(at::Tensor const& grad_y, at::Tensor const& x) {
  return at::mm(grad_y.flatten(0, -2).t(), x.flatten(0, -2));
}

at::Tensor bias_grad(at::Tensor const& grad_y) { return grad_y.flatten(0, -2).sum(0); }

// The other op has other shapes and configurations: what the forward was told to run may not exist for it.
std::string backward_strategy(std::string const& strategy) { return strategy == "sequential" ? "sequential" : "auto"; }

bool is_given(std::optional<at::Tensor> const& bias) { return bias.has_value() && bias->defined(); }

// Inputs of the ops, by position.
constexpr size_t kX = 0, kWeight = 1, kBias = 2;

// What a backward needs of the call. `x` is kept for the gradient of the weight, and the weight for that of x: each is
// undefined where that gradient is not wanted.
struct Saved {
  at::Tensor x, weight;
  std::string group_name;
  std::string strategy;  // of the backward
  bool has_bias, has_gathered;

  void keep(AutogradContext* ctx) const {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["call"] = std::make_tuple(group_name, strategy, has_bias, has_gathered);
    ctx->set_materialize_grads(false);
  }

  static Saved of(AutogradContext* ctx) {
    variable_list const tensors = ctx->get_saved_variables();
    auto const call = ctx->saved_data["call"].to<std::tuple<std::string, std::string, bool, bool>>();
    auto const [group_name, strategy, has_bias, has_gathered] = call;
    return {tensors[0], tensors[1], group_name, strategy, has_bias, has_gathered};
  }

  bool wants(AutogradContext* ctx, size_t input) const {
    return (input != kBias || has_bias) && ctx->needs_input_grad(input);
  }
};

// torch counts its nodes by std::shared_ptr or, in later versions, by c10::intrusive_ptr.
template <class Node, class... Args>
auto make_node(Args&&... args) {
  using Pointer = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Node>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

// Under create_graph=True: whoever differentiates these gradients again meets an error that says what is missing.
void refuse_second_derivative(char const* op, variable_list const& grads, variable_list const& inputs) {
  auto const error = make_node<torch::autograd::Error>(
      c10::str("flux_ops.", op, " can be differentiated only once: its backward has no derivative. Where second ",
               "derivatives are needed, use a plain collective and a plain product."),
      torch::autograd::collect_next_edges(inputs));
  for (at::Tensor const& grad : grads) {
    if (grad.defined()) torch::autograd::set_history(grad, error);
  }
}

struct AgGemm : torch::autograd::Function<AgGemm> {
  static constexpr bool is_traceable = true;  // by compiled autograd

  static variable_list forward(AutogradContext* ctx, at::Tensor const& x, at::Tensor const& weight,
                               std::optional<at::Tensor> const& bias, std::string const& group_name,
                               bool return_gathered, std::string const& strategy, c10::DispatchKeySet below) {
    at::AutoDispatchBelowADInplaceOrView const guard;
    auto const [y, gathered] = ag_gemm_op().redispatch(below, x, weight, bias, group_name, return_gathered, strategy);
    // The gathered operand is kept only where the caller holds it anyhow; otherwise the backward gathers again.
    at::Tensor const& operand = return_gathered ? gathered : x;
    Saved{weight.requires_grad() ? operand : at::Tensor(),
          x.requires_grad() ? weight : at::Tensor(),
          group_name,
          backward_strategy(strategy),
          is_given(bias),
          return_gathered}
        .keep(ctx);
    return {y, gathered};
  }

  static variable_list backward(AutogradContext* ctx, variable_list const& grads) {
    at::Tensor const &grad_y = grads[0], &grad_gathered = grads[1];
    Saved const saved = Saved::of(ctx);
    bool const has_gathered = saved.has_gathered;
    bool const create_graph = at::GradMode::is_enabled();
    at::NoGradGuard const no_grad;

    at::Tensor grad_x, grad_weight, grad_bias;
    // Where the gathered operand has a gradient of its own, one reduction takes both, while dW is computed.
    bool const reduces_both = has_gathered && grad_gathered.defined() && saved.wants(ctx, kX);
    if (reduces_both) {
      at::Tensor whole = grad_gathered;
      if (grad_y.defined()) {
        whole = at::addmm(whole.flatten(0, -2), grad_y.flatten(0, -2), saved.weight).view_symint(whole.sym_sizes());
      }
      grad_x = start_reduce_scatter(whole, saved.group_name);
    }
    if (grad_y.defined()) {
      bool const wants_weight = saved.wants(ctx, kWeight);
      at::Tensor operand = saved.x;
      if (wants_weight && !has_gathered) {  // on its way while gemm_rs runs
        operand = start_all_gather(operand, saved.group_name);
        if (!may_run_beside_collective(operand.device(), saved.group_name, saved.strategy)) operand = wait(operand);
      }
      if (saved.wants(ctx, kX) && !reduces_both) {
        grad_x = gemm_rs_op().call(grad_y, saved.weight.t(), std::nullopt, saved.group_name, saved.strategy);
      }
      if (wants_weight) grad_weight = weight_grad(grad_y, has_gathered ? operand : wait(operand));
      if (saved.wants(ctx, kBias)) grad_bias = bias_grad(grad_y);
    }
    if (reduces_both) grad_x = wait(grad_x);
    if (create_graph) {
      refuse_second_derivative("ag_gemm", {grad_x, grad_weight, grad_bias},
                               {grad_y, grad_gathered, saved.x, saved.weight});
    }
    return {grad_x, grad_weight, grad_bias, {}, {}, {}, {}};
  }
};

// The forward of the ops that reduce.
using ReducingOp = c10::TypedOperatorHandle<decltype(gemm_rs)>;
at::Tensor reduce_and_keep(AutogradContext* ctx, ReducingOp const& op, at::Tensor const& x, at::Tensor const& weight,
                           std::optional<at::Tensor> const& bias, std::string const& group_name,
                           std::string const& strategy, c10::DispatchKeySet below) {
  at::AutoDispatchBelowADInplaceOrView const guard;
  at::Tensor y = op.redispatch(below, x, weight, bias, group_name, strategy);
  Saved{weight.requires_grad() ? x : at::Tensor(),
        x.requires_grad() ? weight : at::Tensor(),
        group_name,
        backward_strategy(strategy),
        is_given(bias),
        /*has_gathered=*/false}
      .keep(ctx);
  return y;
}

struct GemmRs : torch::autograd::Function<GemmRs> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, at::Tensor const& x, at::Tensor const& weight,
                            std::optional<at::Tensor> const& bias, std::string const& group_name,
                            std::string const& strategy, c10::DispatchKeySet below) {
    return reduce_and_keep(ctx, gemm_rs_op(), x, weight, bias, group_name, strategy, below);
  }

  static variable_list backward(AutogradContext* ctx, variable_list const& grads) {
    at::Tensor const& grad_y = grads[0];
    if (!grad_y.defined()) return variable_list(6);
    Saved const saved = Saved::of(ctx);
    bool const create_graph = at::GradMode::is_enabled();
    at::NoGradGuard const no_grad;

    bool const wants_weight = saved.wants(ctx, kWeight);
    at::Tensor grad_x, grad_weight, grad_bias, gathered;
    if (saved.wants(ctx, kX)) {
      std::tie(grad_x, gathered) = ag_gemm_op().call(grad_y, saved.weight.t(), std::nullopt, saved.group_name,
                                                     /*return_gathered=*/wants_weight, saved.strategy);
    } else if (wants_weight) {
      gathered = wait(start_all_gather(grad_y, saved.group_name));
    }
    if (wants_weight) grad_weight = weight_grad(gathered, saved.x);
    if (saved.wants(ctx, kBias)) grad_bias = bias_grad(grad_y);
    if (create_graph) {
      refuse_second_derivative("gemm_rs", {grad_x, grad_weight, grad_bias}, {grad_y, saved.x, saved.weight});
    }
    return {grad_x, grad_weight, grad_bias, {}, {}, {}};
  }
};

struct GemmAr : torch::autograd::Function<GemmAr> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, at::Tensor const& x, at::Tensor const& weight,
                            std::optional<at::Tensor> const& bias, std::string const& group_name,
                            std::string const& strategy, c10::DispatchKeySet below) {
    return reduce_and_keep(ctx, gemm_ar_op(), x, weight, bias, group_name, strategy, below);
  }

  static variable_list backward(AutogradContext* ctx, variable_list const& grads) {
    at::Tensor const& grad_y = grads[0];
    if (!grad_y.defined()) return variable_list(6);
    Saved const saved = Saved::of(ctx);
    bool const create_graph = at::GradMode::is_enabled();
    at::NoGradGuard const no_grad;

    at::Tensor grad_x, grad_weight, grad_bias;
    if (saved.wants(ctx, kX)) grad_x = at::matmul(grad_y, saved.weight);
    if (saved.wants(ctx, kWeight)) grad_weight = weight_grad(grad_y, saved.x);
    if (saved.wants(ctx, kBias)) grad_bias = bias_grad(grad_y);
    if (create_graph) {
      refuse_second_derivative("gemm_ar", {grad_x, grad_weight, grad_bias}, {grad_y, saved.x, saved.weight});
    }
    return {grad_x, grad_weight, grad_bias, {}, {}, {}};
  }
};

// Without this the tangent would be dropped, and taken for zero.
void refuse_forward_mode(char const* op, at::Tensor const& x, at::Tensor const& weight,
                         std::optional<at::Tensor> const& bias) {
  auto const has_tangent = [](at::Tensor const& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); };
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(x) && !has_tangent(weight) && !(bias && has_tangent(*bias)), "flux_ops.", op,
                              " has no forward-mode derivative: use a plain collective and a plain product.");
}

template <class Function>
at::Tensor reduce_autograd(ReducingOp const& op, c10::DispatchKeySet keys, at::Tensor const& x,
                           at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                           std::string const& group_name, std::string const& strategy) {
  c10::DispatchKeySet const below = keys & c10::after_ADInplaceOrView_keyset;
  if (torch::autograd::compute_requires_grad(x, weight, bias)) {
    return Function::apply(x, weight, bias, group_name, strategy, below);
  }
  at::AutoDispatchBelowADInplaceOrView const guard;
  return op.redispatch(below, x, weight, bias, group_name, strategy);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> ag_gemm_autograd(c10::DispatchKeySet keys, at::Tensor const& x,
                                                    at::Tensor const& weight, std::optional<at::Tensor> const& bias,
                                                    std::string const& group_name, bool return_gathered,
                                                    std::string const& strategy) {
  refuse_forward_mode("ag_gemm", x, weight, bias);
  c10::DispatchKeySet const below = keys & c10::after_ADInplaceOrView_keyset;
  if (torch::autograd::compute_requires_grad(x, weight, bias)) {
    variable_list const results = AgGemm::apply(x, weight, bias, group_name, return_gathered, strategy, below);
    // A gathered x that needs no gradient. (mark_non_differentiable says the same, but not to compiled autograd.)
    return {results[0], return_gathered && !x.requires_grad() ? results[1].detach() : results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView const guard;
  return ag_gemm_op().redispatch(below, x, weight, bias, group_name, return_gathered, strategy);
}

at::Tensor gemm_rs_autograd(c10::DispatchKeySet keys, at::Tensor const& x, at::Tensor const& weight,
                            std::optional<at::Tensor> const& bias, std::string const& group_name,
                            std::string const& strategy) {
  refuse_forward_mode("gemm_rs", x, weight, bias);
  return reduce_autograd<GemmRs>(gemm_rs_op(), keys, x, weight, bias, group_name, strategy);
}

at::Tensor gemm_ar_autograd(c10::DispatchKeySet keys, at::Tensor const& x, at::Tensor const& weight,
                            std::optional<at::Tensor> const& bias, std::string const& group_name,
                            std::string const& strategy) {
  refuse_forward_mode("gemm_ar", x, weight, bias);
  return reduce_autograd<GemmAr>(gemm_ar_op(), keys, x, weight, bias, group_name, strategy);
}

}  // namespace flux
