"""Differentiable pieces of parallel layers. A group is named by its name, as in torch.ops.flux.

Where the operators' own autograd is not enough, ParallelProduct is the node of the graph: for `copy`, which has no
operator, and for every form whose weight's gradient goes to main_grad.

    form        Y                              dX                     dW                       what is kept
    ag_gemm     all_gather(X) · Wᵀ + b         reduce_scatter(dY·W)   dYᵀ · all_gather(X)      X, or its gathered form
    gemm_rs     reduce_scatter(X · Wᵀ) + b     all_gather(dY) · W     all_gather(dY)ᵀ · X      X
    copy        X · Wᵀ + b                     all_reduce(dY · W)     dYᵀ · X                  X
    gemm_ar     all_reduce(X · Wᵀ) + b         dY · W                 dYᵀ · X                  X
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from flux_ops import autocast, autograd, fallback
from flux_ops.nn.main_grad import MainGrad
from flux_ops.ops import _group_name as group_name_of

FORMS = ("ag_gemm", "gemm_rs", "copy", "gemm_ar")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: str,
    group_name: str,
    strategy: str = "auto",
    save_gathered: bool = False,
    main_grad: bool = False,
) -> torch.Tensor:
    """One product in one of the FORMS, with its derivatives. See the layers for the arguments."""
    if form == "copy":
        _check_tokens("ColumnParallelLinear", x)
    wants_weight = weight.requires_grad and torch.is_grad_enabled()
    main_grad, save_gathered = main_grad and wants_weight, save_gathered and wants_weight
    if main_grad or form == "copy":
        return ParallelProduct.apply(x, weight, bias, form, group_name, strategy, save_gathered, main_grad)
    return _product(x, weight, bias, form, group_name, strategy, save_gathered)[0]


def _check_tokens(name: str, x: torch.Tensor) -> None:
    """For a product without operator, which would check it."""
    if x.dim() < 2:
        raise ValueError(f"{name}: x must have at least 2 dimensions, [tokens, ..., K]; it has shape {list(x.shape)}.")


def _product(x, weight, bias, form, group_name, strategy, gathers):
    """(Y, the gathered X if `gathers`, else X)"""
    if form == "ag_gemm":
        y, gathered = torch.ops.flux.ag_gemm(x, weight, bias, group_name, gathers, strategy)
        return y, gathered if gathers else x
    if form == "gemm_rs":
        return torch.ops.flux.gemm_rs(x, weight, bias, group_name, strategy), x
    if form == "gemm_ar":
        return torch.ops.flux.gemm_ar(x, weight, bias, group_name, strategy), x
    return F.linear(x, weight, bias), x


class ParallelProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, form, group_name, strategy, save_gathered, main_grad):
        needs = ctx.needs_input_grad
        ctx.call = form, group_name, strategy, save_gathered
        ctx.main_grad = MainGrad(weight) if main_grad else None
        x, weight, bias = autocast.in_autocast_dtype(x, weight, bias)
        y, operand = _product(x, weight, bias, *ctx.call)
        ctx.save_for_backward(operand if needs[1] else None, weight if needs[0] else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):
        form, group_name, strategy, has_gathered = ctx.call
        given = ctx.needs_input_grad[:3], grad_y, *ctx.saved_tensors
        weight_grad = ctx.main_grad.add if ctx.main_grad else autograd.weight_grad
        with autocast.off(grad_y.device):
            if form == "ag_gemm":
                grads = autograd.ag_gemm_grads(*given, group_name, strategy, has_gathered, weight_grad)
            elif form == "gemm_rs":
                grads = autograd.gemm_rs_grads(*given, group_name, strategy, weight_grad)
            else:
                grads = autograd.replicated_grads(*given, group_name if form == "copy" else None, weight_grad)
        return *grads, None, None, None, None, None


class SumGrad(torch.autograd.Function):
    """Y = X, which all ranks hold alike; dX = all_reduce(dY)."""

    @staticmethod
    def forward(ctx, x, group_name):
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_y):
        return autograd.wait(autograd.start_all_reduce(grad_y.clone(), ctx.group_name)), None


class _GatherLast(torch.autograd.Function):
    """Y = the ranks' X side by side, in the last dimension; dX = this rank's part of dY, which all ranks hold alike."""

    @staticmethod
    def forward(ctx, x, group_name, rank):
        ctx.place = group_name, rank
        return _gather_last(x, group_name)

    @staticmethod
    def backward(ctx, grad_y):
        return _own_last(grad_y, *ctx.place), None, None


class _SplitLast(torch.autograd.Function):
    """Y = this rank's part of X, which all ranks hold alike, in the last dimension; dX = the ranks' dY side by side."""

    @staticmethod
    def forward(ctx, x, group_name, rank):
        ctx.group_name = group_name
        return _own_last(x, group_name, rank)

    @staticmethod
    def backward(ctx, grad_y):
        return _gather_last(grad_y, ctx.group_name), None, None


def gather_last(x: torch.Tensor, group_name: str, rank: int) -> torch.Tensor:
    return _GatherLast.apply(x, group_name, rank)


def split_last(x: torch.Tensor, group_name: str, rank: int) -> torch.Tensor:
    if x.shape[-1] % (world := autograd.world_size(group_name)):
        raise ValueError(
            f"RowParallelLinear: x has {x.shape[-1]} columns, which are cut into equal pieces: it must be a multiple "
            f"of the number of ranks, TP = {world}."
        )
    return _SplitLast.apply(x, group_name, rank)


def _gather_last(x, group_name):
    world = autograd.world_size(group_name)
    parts = autograd.wait(autograd.start_all_gather(x.unsqueeze(0), group_name))
    return parts.movedim(0, -2).reshape(*x.shape[:-1], world * x.shape[-1])


def _own_last(x, group_name, rank):
    return x.chunk(autograd.world_size(group_name), dim=-1)[rank].contiguous()


def column_parallel(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    group=None,
    sequence_parallel: bool = True,
    strategy: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Several column-parallel products of one x, which is gathered once: Y_i = all_gather(X) · W_iᵀ + b_i.

    For weights that are parameters of their own (query, key and value; gate and up). The first product overlaps with
    the gather, the others are plain products of the gathered x, which the graph keeps. With sequence_parallel the
    backward of several weights reduces once, too, while the first one's gradient is computed. One ColumnParallelLinear
    with several out_features makes one product of them, which is faster.

    Args:
        x: [M/TP, ..., K] with sequence_parallel, as for flux_ops.ag_gemm; else [M, ..., K], the same on all ranks.
        weights: [N_i, K] each, this rank's rows.
        biases: [N_i] each, or None.
        group, strategy: as for flux_ops.ag_gemm.

    Returns one Y_i [M, ..., N_i] for each weight. Differentiable; dX is summed over all products and ranks.

    Raises as flux_ops.ag_gemm does; ValueError if there is no weight, or not one bias for each.

    The same in plain PyTorch::

        gathered = torch.distributed.nn.functional.all_gather(x, group)  # then torch.cat
        ys = [torch.nn.functional.linear(gathered, w, b) for w, b in zip(weights, biases)]
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    if len(weights) == 0 or len(biases) != len(weights):
        raise ValueError(
            f"column_parallel: weights has {len(weights)} and biases {len(biases)} elements; there must be at least "
            "one weight, and a bias or None for each."
        )
    group_name = group_name_of("column_parallel", group)
    if not sequence_parallel:
        fallback.check_strategy("column_parallel", strategy)
        _check_tokens("column_parallel", x)
        x = SumGrad.apply(x, group_name)
        return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    several = len(weights) > 1
    first, gathered = torch.ops.flux.ag_gemm(x, weights[0], biases[0], group_name, several, strategy)
    return first, *(F.linear(gathered, w, b) for w, b in zip(weights[1:], biases[1:], strict=True))
