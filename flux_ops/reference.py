"""The operators in plain PyTorch: a collective, then a product, or the other way round.

This is what the `sequential` strategy does (csrc/ops/sequential.cpp), what it is without the compiled part, and what
tests and benchmarks compare with. Nothing here overlaps.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

# By the names of torch 2.13 and later, which warn of the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """[M/TP, ...] of each rank -> [M, ...], in rank order."""
    world = dist.get_world_size(group)
    gathered = x.new_empty(x.shape[0] * world, *x.shape[1:])
    if gathered.numel() > 0:
        all_gather_single(gathered, x.detach().contiguous(), group=group)
    return gathered


def reduce_scatter(partial: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """[M, ...] of each rank -> [M/TP, ...]: the rows of this rank, summed over the ranks.

    NCCL adds in the dtype of the tensor. On the CPU the partials are added in rank order in fp32 (fp64 for fp64) and
    rounded once, so the result is bitwise repeatable.
    """
    world = dist.get_world_size(group)
    partial = partial.detach().contiguous()
    shape = (partial.shape[0] // world, *partial.shape[1:])
    if partial.numel() == 0:
        return partial.new_empty(shape)
    if partial.is_cuda:
        result = partial.new_empty(shape)
        reduce_scatter_single(result, partial, group=group)
        return result
    parts = torch.empty_like(partial)
    dist.all_to_all_single(parts, partial, group=group)
    return _sum_in_rank_order(parts.view(world, *shape))


def all_reduce(partial: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """[M, ...] of each rank -> their sum over the ranks, on each: the same bits everywhere. Adds as reduce_scatter.

    `partial` is the caller's no more: the sum may be written there.
    """
    partial = partial.detach().contiguous()
    if partial.numel() == 0:
        return partial
    if partial.is_cuda:
        dist.all_reduce(partial, group=group)
        return partial
    return _sum_in_rank_order(all_gather(partial, group).view(dist.get_world_size(group), *partial.shape))


def _sum_in_rank_order(parts: torch.Tensor) -> torch.Tensor:
    total, *others = parts.to(torch.float64 if parts.dtype == torch.float64 else torch.float32).unbind(0)
    for part in others:
        total = total + part
    return total.to(parts.dtype)


@torch.no_grad()
def ag_gemm(x, weight, bias=None, *, group=None, return_gathered=False):
    """Y = all_gather(X) · Wᵀ + b, with X [M/TP, ..., K], W [N, K], b [N], Y [M, ..., N].

    Dimension 0 of X is gathered. Returns Y, or (Y, all_gather(X)) if `return_gathered`. No autograd.
    """
    gathered = all_gather(x, group)
    y = F.linear(gathered, weight, bias).contiguous()
    return (y, gathered) if return_gathered else y


@torch.no_grad()
def gemm_rs(x, weight, bias=None, *, group=None):
    """Y = reduce_scatter(X · Wᵀ) + b, with X [M, ..., K], W [N, K], b [N], Y [M/TP, ..., N].

    Dimension 0 of the product is scattered; M must be a multiple of TP. The bias is added once, after the reduction.
    No autograd.
    """
    world = dist.get_world_size(group)
    if x.shape[0] % world:
        raise ValueError(f"gemm_rs: M = {x.shape[0]} must be a multiple of the number of ranks, TP = {world}.")
    y = reduce_scatter(F.linear(x, weight), group)
    return y if bias is None else y + bias


@torch.no_grad()
def gemm_ar(x, weight, bias=None, *, group=None):
    """Y = all_reduce(X · Wᵀ) + b, with X [M, ..., K], W [N, K], b [N], Y [M, ..., N] on every rank.

    The bias is added once, after the reduction. No autograd.
    """
    y = all_reduce(F.linear(x, weight), group)
    return y if bias is None else y + bias
