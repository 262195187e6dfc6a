"""Backward of the fallback's operators: the formulas, and the reasons, of csrc/ops/autograd.cpp."""

import torch
from torch.distributed import distributed_c10d


def _wait(work: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(work)


def _all_gather(x: torch.Tensor, group_name: str) -> torch.Tensor:
    world = distributed_c10d._resolve_process_group(group_name).size()
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), world, group_name))


def _reduce_scatter(x: torch.Tensor, group_name: str) -> torch.Tensor:
    world = distributed_c10d._resolve_process_group(group_name).size()
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", world, group_name))


def _backward_strategy(strategy: str) -> str:
    """The other op has other shapes and configurations: what the forward was told to run may not exist for it."""
    return "sequential" if strategy == "sequential" else "auto"


def _weight_grad(grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dYᵀ · X over all tokens: [N, K]."""
    return grad_y.flatten(0, -2).t() @ x.flatten(0, -2)


def _bias_grad(grad_y: torch.Tensor) -> torch.Tensor:
    return grad_y.flatten(0, -2).sum(0)


def _setup_ag_gemm(ctx, inputs, output) -> None:
    x, weight, _, ctx.group_name, ctx.has_gathered, ctx.strategy = inputs
    # The gathered operand is kept only where the caller holds it anyhow; otherwise the backward gathers again.
    ctx.save_for_backward(output[1] if ctx.has_gathered else x, weight)


def _backward_ag_gemm(ctx, grad_y, grad_gathered):
    x, weight = ctx.saved_tensors
    grad_x = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.flux.gemm_rs(grad_y, weight.t(), None, ctx.group_name, _backward_strategy(ctx.strategy))
        if ctx.has_gathered:
            grad_x = grad_x + _reduce_scatter(grad_gathered, ctx.group_name)
    if ctx.needs_input_grad[1]:
        grad_weight = _weight_grad(grad_y, x if ctx.has_gathered else _all_gather(x, ctx.group_name))
    if ctx.needs_input_grad[2]:
        grad_bias = _bias_grad(grad_y)
    return grad_x, grad_weight, grad_bias, None, None, None


def _setup_reduced(ctx, inputs, output) -> None:
    x, weight, _, ctx.group_name, ctx.strategy = inputs
    ctx.save_for_backward(x, weight)


def _backward_gemm_rs(ctx, grad_y):
    x, weight = ctx.saved_tensors
    grad_x = grad_weight = grad_bias = None
    needs_weight_grad = ctx.needs_input_grad[1]
    if ctx.needs_input_grad[0]:
        grad_x, gathered = torch.ops.flux.ag_gemm(
            grad_y, weight.t(), None, ctx.group_name, needs_weight_grad, _backward_strategy(ctx.strategy)
        )
    elif needs_weight_grad:
        gathered = _all_gather(grad_y, ctx.group_name)
    if needs_weight_grad:
        grad_weight = _weight_grad(gathered, x)
    if ctx.needs_input_grad[2]:
        grad_bias = _bias_grad(grad_y)
    return grad_x, grad_weight, grad_bias, None, None


def _backward_gemm_ar(ctx, grad_y):
    x, weight = ctx.saved_tensors
    grad_x = grad_y @ weight if ctx.needs_input_grad[0] else None
    grad_weight = _weight_grad(grad_y, x) if ctx.needs_input_grad[1] else None
    grad_bias = _bias_grad(grad_y) if ctx.needs_input_grad[2] else None
    return grad_x, grad_weight, grad_bias, None, None


def register() -> None:
    torch.library.register_autograd("flux::ag_gemm", _backward_ag_gemm, setup_context=_setup_ag_gemm)
    torch.library.register_autograd("flux::gemm_rs", _backward_gemm_rs, setup_context=_setup_reduced)
    torch.library.register_autograd("flux::gemm_ar", _backward_gemm_ar, setup_context=_setup_reduced)
