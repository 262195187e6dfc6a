"""The formulas of csrc/ops/autograd.cpp in Python, and the reasons: for what the compiled operators can't do.

That is the backward of the fallback's operators, and of layers that keep their weight's gradient in main_grad. `needs`
tells which of x, weight and bias want a gradient; nothing is computed or sent for the others. `weight_grad` is what
makes the weight's gradient of dY and X, all tokens of both.
"""

from collections.abc import Callable

import torch
from torch.distributed.distributed_c10d import _get_group_size_by_name as world_size  # a constant when compiled

from flux_ops import extension

Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def wait(work: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(work)


def start_all_gather(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """What it returns is there after `wait`."""
    return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), world_size(group_name), group_name)


def start_all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """The sum over the ranks is there after `wait`. `x` is the caller's own and is given up."""
    if world_size(group_name) == 1:
        return x
    if torch.compiler.is_compiling():  # traced code is functional
        return torch.ops._c10d_functional.all_reduce(x, "sum", group_name)
    return torch.ops._c10d_functional.all_reduce_(x.contiguous(), "sum", group_name)


def _start_reduce_scatter(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", world_size(group_name), group_name)


def _may_run_beside_collective(x: torch.Tensor, group_name: str, strategy: str) -> bool:
    if torch.compiler.is_compiling():  # for whatever runs the graph later, a CUDA graph perhaps
        return not x.is_cuda or strategy == "sequential" or world_size(group_name) <= 2
    core = extension.module
    return core is None or core.may_run_beside_collective(x, group_name, strategy)


def _backward_strategy(strategy: str) -> str:
    """The other op has other shapes and configurations: what the forward was told to run may not exist for it."""
    return "sequential" if strategy == "sequential" else "auto"


def weight_grad(grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dYᵀ · X over all tokens: [N, K]."""
    return grad_y.flatten(0, -2).t() @ x.flatten(0, -2)


def bias_grad(grad_y: torch.Tensor) -> torch.Tensor:
    return grad_y.flatten(0, -2).sum(0)


def ag_gemm_grads(
    needs: tuple[bool, ...],
    grad_y: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    group_name: str,
    strategy: str,
    has_gathered: bool,
    weight_grad: Callable = weight_grad,
) -> Grads:
    """Of Y = all_gather(X) · Wᵀ + b. `x` is the gathered operand if `has_gathered`."""
    strategy = _backward_strategy(strategy)
    grad_x = None
    gathering = needs[1] and not has_gathered
    if gathering:  # on its way while gemm_rs runs
        x = start_all_gather(x, group_name)
        if not _may_run_beside_collective(x, group_name, strategy):
            x = wait(x)
    if needs[0]:
        grad_x = torch.ops.flux.gemm_rs(grad_y, weight.t(), None, group_name, strategy)
    if gathering:
        x = wait(x)
    return grad_x, weight_grad(grad_y, x) if needs[1] else None, bias_grad(grad_y) if needs[2] else None


def gemm_rs_grads(
    needs: tuple[bool, ...],
    grad_y: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    group_name: str,
    strategy: str,
    weight_grad: Callable = weight_grad,
) -> Grads:
    """Of Y = reduce_scatter(X · Wᵀ) + b. The bias's gradient is the sum over this rank's rows."""
    grad_x = gathered = None
    if needs[0]:
        grad_x, gathered = torch.ops.flux.ag_gemm(
            grad_y, weight.t(), None, group_name, needs[1], _backward_strategy(strategy)
        )
    elif needs[1]:
        gathered = wait(start_all_gather(grad_y, group_name))
    return grad_x, weight_grad(gathered, x) if needs[1] else None, bias_grad(grad_y) if needs[2] else None


def replicated_grads(
    needs: tuple[bool, ...],
    grad_y: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    sum_over: str | None = None,
    weight_grad: Callable = weight_grad,
) -> Grads:
    """Of Y = X · Wᵀ + b, where all ranks hold dY alike: Y was summed over them (gemm_ar). Or where they hold X alike,
    whose gradient is then the sum over the group `sum_over`."""
    grad_x = torch.matmul(grad_y, weight) if needs[0] else None
    summing = needs[0] and sum_over is not None
    if summing:  # on its way while the weight's gradient is computed
        grad_x = start_all_reduce(grad_x, sum_over)
    grad_weight = weight_grad(grad_y, x) if needs[1] else None
    grad_bias = bias_grad(grad_y) if needs[2] else None
    return wait(grad_x) if summing else grad_x, grad_weight, grad_bias


def _setup_ag_gemm(ctx, inputs, output) -> None:
    x, weight, _, ctx.group_name, ctx.has_gathered, ctx.strategy = inputs
    # The gathered operand is kept only where the caller holds it anyhow; otherwise the backward gathers again.
    ctx.save_for_backward(output[1] if ctx.has_gathered else x, weight)


def _backward_ag_gemm(ctx, grad_y, grad_gathered):
    needs, (x, weight) = ctx.needs_input_grad, ctx.saved_tensors
    work = None
    if ctx.has_gathered and needs[0]:  # one reduction takes both gradients, while dW is computed
        whole = torch.addmm(grad_gathered.flatten(0, -2), grad_y.flatten(0, -2), weight)
        work = _start_reduce_scatter(whole.view_as(grad_gathered), ctx.group_name)
        needs = (False, *needs[1:])
    grads = ag_gemm_grads(needs, grad_y, x, weight, ctx.group_name, ctx.strategy, ctx.has_gathered)
    return grads[0] if work is None else wait(work), *grads[1:], None, None, None


def _setup_reduced(ctx, inputs, output) -> None:
    x, weight, _, ctx.group_name, ctx.strategy = inputs
    ctx.save_for_backward(x, weight)


def _backward_gemm_rs(ctx, grad_y):
    grads = gemm_rs_grads(ctx.needs_input_grad, grad_y, *ctx.saved_tensors, ctx.group_name, ctx.strategy)
    return *grads, None, None


def _backward_gemm_ar(ctx, grad_y):
    return *replicated_grads(ctx.needs_input_grad, grad_y, *ctx.saved_tensors), None, None


def register() -> None:
    torch.library.register_autograd("flux::ag_gemm", _backward_ag_gemm, setup_context=_setup_ag_gemm)
    torch.library.register_autograd("flux::gemm_rs", _backward_gemm_rs, setup_context=_setup_reduced)
    torch.library.register_autograd("flux::gemm_ar", _backward_gemm_ar, setup_context=_setup_reduced)
